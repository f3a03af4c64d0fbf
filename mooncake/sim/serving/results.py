# SPDX-License-Identifier: Apache-2.0
"""Results of a simulated run: a row per request, a row per interval of time, and their summary.

It owns the columns, in the order of arrival, and the definitions of the metrics: TBT is the mean of the
longest tenth of a request's intervals (as in the FAST'25 paper), goodput counts what was completed within
both objectives. ``TimelineSampler`` has the counters that a cluster moves, and makes the rows by time of
them: queues, batches, hits, rejections, and where the most used blocks are.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
from array import array
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.nodes import SimRequest

if TYPE_CHECKING:
    from mooncake.sim.serving.cluster import ServingCluster

DONE, REJECTED, REJECTED_AFTER_PREFILL, FAILED = range(4)
STATUSES = ("done", "rejected at arrival", "rejected after prefill", "failed")

Floats: TypeAlias = NDArray[np.float64]
Column: TypeAlias = (
    NDArray[np.float64] | NDArray[np.float32] | NDArray[np.int32] | NDArray[np.int16] | NDArray[np.int8]
)


class Quantiles(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float


class Summary(msgspec.Struct, frozen=True):
    """The summary of one run. Times are of completed requests."""

    num_requests: int
    num_done: int
    num_rejected: int
    "Rejected at arrival."
    num_rejected_after_prefill: int
    num_failed: int
    num_good: int
    "Completed within both objectives."
    goodput_per_s: float
    good_tokens_per_s: float
    "Prompt and answer tokens of good requests."
    slo_ttft_s: float
    slo_tbt_s: float
    span_s: float
    "From the first arrival to the last end or arrival of any request."
    ttft_s: Quantiles
    tbt_s: Quantiles
    e2e_s: Quantiles
    hit_rate: float
    "Share of the prompt tokens of all requests not rejected that were not computed."
    fetched_share: float
    "The part of it that came from another node or from an SSD."
    prefill_gpu_s: float
    "Seconds of a node's prefill, mean over requests."
    num_interruptions: int = 0
    "Interruptions of spot instances, until the last request ended."
    num_retries: int = 0
    "Prefills that an interruption ended and that began anew."


@dataclasses.dataclass(frozen=True)
class Timeline:
    """State every ``every_s`` seconds, and counts up to then."""

    every_s: float
    at_s: Floats
    queue_s: Floats
    "Seconds of queued prefill work, all instances together."
    num_queued: Floats
    num_running: Floats
    "Requests that are decoding."
    num_arrived: Floats
    num_rejected: Floats
    input_tokens: Floats
    cached_tokens: Floats
    "Tokens of prompts whose prefill has begun; ``input_tokens`` likewise."
    replicas_top10: Floats
    "Mean number of prefill instances with one of the ten most used blocks; 0 unless ``watches_blocks``."
    replicas_top100: Floats


@dataclasses.dataclass(frozen=True)
class RunResults:
    """One row per request, in the order of arrival. Events that did not happen have time NaN, instances
    -1."""

    arrival_s: Column
    num_input: Column
    num_output: Column
    status: Column
    ttft_s: Column
    tbt_s: Column
    "Mean of the longest tenth of its intervals; 0 for answers of one token."
    tbt_mean_s: Column
    e2e_s: Column
    "Also that of a request that failed or was rejected, where its end was recorded."
    cached_tokens: Column
    fetched_tokens: Column
    prefill_instance: Column
    decode_instance: Column
    prefill_gpu_s: Column
    "Including what an interruption undid."
    num_retries: Column
    predicted_ttft_s: Column
    predicted_tbt_s: Column
    time_line: Timeline
    slo_ttft_s: float
    slo_tbt_s: float
    "The objectives of the run; 0 is none."
    num_interruptions: int = 0

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def is_done(self) -> NDArray[np.bool_]:
        return np.equal(self.status, DONE)

    def is_good(self, slo_ttft_s: float | None = None, slo_tbt_s: float | None = None) -> NDArray[np.bool_]:
        """Which requests were completed within both objectives (None: those of the run)."""
        ttft_s = self.slo_ttft_s if slo_ttft_s is None else slo_ttft_s
        tbt_s = self.slo_tbt_s if slo_tbt_s is None else slo_tbt_s
        good: NDArray[np.bool_] = self.is_done
        if ttft_s:
            good = good & (self.ttft_s <= ttft_s)
        if tbt_s:
            good = good & (self.tbt_s <= tbt_s)
        return good

    def summary(self, slo_ttft_s: float | None = None, slo_tbt_s: float | None = None) -> Summary:
        done, good = self.is_done, self.is_good(slo_ttft_s, slo_tbt_s)
        began = done | np.equal(self.status, REJECTED_AFTER_PREFILL)
        counts = np.bincount(self.status.astype(np.int64), minlength=len(STATUSES))
        ends_s = self.arrival_s + np.nan_to_num(self.e2e_s)  # what has no end counts as over at once
        span_s = float(ends_s.max() - self.arrival_s[0]) if len(self) else 0.0
        requested = float(self.num_input[began].sum(dtype=np.float64))
        cached = float(self.cached_tokens[began].sum(dtype=np.float64))
        good_tokens = (self.num_input[good] + self.num_output[good]).sum(dtype=np.float64)
        return Summary(
            num_requests=len(self),
            num_done=int(counts[DONE]),
            num_rejected=int(counts[REJECTED]),
            num_rejected_after_prefill=int(counts[REJECTED_AFTER_PREFILL]),
            num_failed=int(counts[FAILED]),
            num_good=int(good.sum()),
            goodput_per_s=float(good.sum()) / span_s if span_s else 0.0,
            good_tokens_per_s=float(good_tokens) / span_s if span_s else 0.0,
            slo_ttft_s=self.slo_ttft_s if slo_ttft_s is None else slo_ttft_s,
            slo_tbt_s=self.slo_tbt_s if slo_tbt_s is None else slo_tbt_s,
            span_s=span_s,
            ttft_s=_quantiles(self.ttft_s[done]),
            tbt_s=_quantiles(self.tbt_s[done]),
            e2e_s=_quantiles(self.e2e_s[done]),
            hit_rate=cached / requested if requested else 0.0,
            fetched_share=float(self.fetched_tokens[began].sum(dtype=np.float64)) / cached if cached else 0.0,
            prefill_gpu_s=float(self.prefill_gpu_s[began].mean(dtype=np.float64)) if began.any() else 0.0,
            num_interruptions=self.num_interruptions,
            num_retries=int(self.num_retries.sum(dtype=np.int64)),
        )

    def to_json(self, *, rows: bool = True) -> str:
        """The summary, the timeline and, unless ``rows`` is False, every column. NaN becomes null."""
        document: dict[str, object] = {
            "summary": msgspec.to_builtins(self.summary()),
            "time_line": {
                field.name: _plain(getattr(self.time_line, field.name))
                for field in dataclasses.fields(Timeline)
            },
        }
        if rows:
            document["requests"] = {
                field.name: _plain(getattr(self, field.name))
                for field in dataclasses.fields(RunResults)
                if isinstance(getattr(self, field.name), np.ndarray)
            }
        return json.dumps(document, allow_nan=False)


_ROWS_ADDED = 4096


class Recorder:
    """Fills the columns of the results: a row at arrival, its cells when they are known.

    Columns have room for thousands of rows more, with what an empty row has: a row costs no sixteen appends.
    """

    def __init__(self) -> None:
        self.arrival_s = array("d")
        self.ttft_s = array("f")
        self.tbt_s = array("f")
        self.tbt_mean_s = array("f")
        self.e2e_s = array("f")
        self.num_input = array("i")
        self.num_output = array("i")
        self.cached_tokens = array("i")
        self.fetched_tokens = array("i")
        self.prefill_instance = array("h")
        self.decode_instance = array("h")
        self.prefill_gpu_s = array("f")
        self.num_retries = array("h")
        self.predicted_ttft_s = array("f")
        self.predicted_tbt_s = array("f")
        self.status = array("b")
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def add(self, arrival_s: float, num_input: int, num_output: int) -> int:
        """Add an arriving request; return the number of its row. Until an end is recorded, it counts as
        failed."""
        number = self._num_rows
        if number == len(self.arrival_s):
            self._grow()
        self._num_rows = number + 1
        self.arrival_s[number] = arrival_s
        self.num_input[number] = num_input
        self.num_output[number] = num_output
        return number

    def _grow(self) -> None:
        nan = float("nan")
        times = (self.ttft_s, self.tbt_s, self.tbt_mean_s, self.e2e_s)
        for unknown in (*times, self.predicted_ttft_s, self.predicted_tbt_s):
            unknown.extend([nan] * _ROWS_ADDED)
        for seconds in (self.arrival_s, self.prefill_gpu_s):
            seconds.extend([0.0] * _ROWS_ADDED)
        for count in (self.num_input, self.num_output, self.cached_tokens, self.fetched_tokens):
            count.extend([0] * _ROWS_ADDED)
        for instance in (self.prefill_instance, self.decode_instance):
            instance.extend([-1] * _ROWS_ADDED)
        self.num_retries.extend([0] * _ROWS_ADDED)
        self.status.extend([FAILED] * _ROWS_ADDED)

    def outcome(
        self, time_line: Timeline, slo_ttft_s: float, slo_tbt_s: float, num_interruptions: int = 0
    ) -> RunResults:
        columns = {
            name: np.frombuffer(column, column.typecode, self._num_rows)
            if self._num_rows
            else np.empty(0, column.typecode)
            for name, column in vars(self).items()
            if isinstance(column, array)
        }
        return RunResults(
            **columns,
            time_line=time_line,
            slo_ttft_s=slo_ttft_s,
            slo_tbt_s=slo_tbt_s,
            num_interruptions=num_interruptions,
        )


def _quantiles(values: Column) -> Quantiles:
    if not len(values):
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
    return Quantiles(float(values.mean(dtype=np.float64)), float(p50), float(p90), float(p99))


def _plain(values: object) -> object:
    if not isinstance(values, np.ndarray):
        return values
    return [None if value != value else value for value in values.tolist()]


class TimelineSampler:
    def __init__(
        self,
        kernel: Kernel,
        recorder: Recorder,
        every_s: float,
        progress: Callable[[int, float], None] | None,
    ) -> None:
        self.num_open = 0
        """Number of requests that have arrived and not ended."""
        self.has_more = True
        """Whether more arrivals are to come."""
        self.num_running = 0
        self.num_rejected = 0
        self._kernel = kernel
        self._recorder = recorder
        self._every_s = every_s
        self._progress = progress
        self._queue_s = 0.0
        self._num_queued = 0
        self._input_tokens = 0
        self._cached_tokens = 0
        self._uses: Counter[Any] = Counter()
        self._world: ServingCluster | None = None
        self._rows: list[tuple[float, ...]] = []

    def start(self, world: ServingCluster) -> None:
        self._world = world
        self._kernel.call_at(self._every_s, self._sample, None)

    def queued(self, request: SimRequest) -> None:
        self._queue_s += request.estimate_s
        self._num_queued += 1

    def withdrawn(self, request: SimRequest) -> None:
        """It is no longer queued, and was not begun."""
        self._queue_s -= request.estimate_s
        self._num_queued -= 1

    def began(self, request: SimRequest) -> None:
        self._queue_s -= request.estimate_s
        self._num_queued -= 1
        self._input_tokens += request.num_input
        self._cached_tokens += request.cached_tokens
        if self._world is not None and self._world.cluster.watches_blocks:
            self._uses.update(request.keys)

    def _sample(self, _: object) -> None:
        now, num_arrived = self._kernel.now, len(self._recorder)
        top10, top100 = self._replicas()
        self._rows.append(
            (
                now,
                max(0.0, self._queue_s),
                self._num_queued,
                self.num_running,
                num_arrived,
                self.num_rejected,
                self._input_tokens,
                self._cached_tokens,
                top10,
                top100,
            )
        )
        if self._progress is not None:
            self._progress(num_arrived, now)
        if self.num_open or self.has_more:
            self._kernel.call_at(now + self._every_s, self._sample, None)

    def _replicas(self) -> tuple[float, float]:
        if not self._uses or self._world is None:
            return 0.0, 0.0
        # The most used first; keys are hashes step by step, which have no negative.
        top = heapq.nsmallest(100, self._uses, key=lambda key: (-self._uses[key], key))
        caches = self._world.caches()
        counts = [sum(bool(cache.match((key,))) for cache in caches) for key in top]
        return float(np.mean(counts[:10])), float(np.mean(counts))

    def time_line(self) -> Timeline:
        columns = np.array(self._rows, dtype=np.float64).reshape(-1, 10).T
        return Timeline(self._every_s, *columns)
