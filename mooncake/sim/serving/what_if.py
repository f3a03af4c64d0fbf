# SPDX-License-Identifier: Apache-2.0
"""The effect of a change to a live cluster, computed from its latest requests.

Three runs are compared: what was measured, what the simulator makes of the same requests on the cluster as it
is, and what it makes of them after the change. All that the simulator must know of the machines is fitted to
the requests themselves: prefill to the times that instances report, decode to the times between tokens at the
batch sizes that the requests' times imply, the size of the cache to the measured hit rate. The difference
between the first two runs is the error of that model, and is part of the answer; the effect is the relation
of the last two, which share that error, applied to what was measured.

Requests arrive when they did. That agents would go on earlier after a faster answer is not modelled. The
conductor's policy, its rule of admission and its objectives are those of the live one. Requests that it
rejected are in neither simulation: how long their answers would have been, and which of them a change would
admit, was not measured.

Colocated instances have one memory for the cache and for what is in progress. It has room for the most that
was in progress at once: that much was there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from mooncake.conductor.settings import Scheduling, SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.recorded_requests import RecordedRequest
from mooncake.sim.serving import simulate
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.node_costs import NodeCosts, PrefillSample, StepSample, fit_decode, fit_prefill
from mooncake.sim.serving.results import REJECTED, REJECTED_AFTER_PREFILL, Quantiles, RunResults
from mooncake.sim.traces.reuse import INTERVAL, ReuseReport, reuse_of
from mooncake.sim.traces.trace import TraceRow

_Floats: TypeAlias = NDArray[np.float64]

MIN_ROWS = 20
"""Fewer requests say too little."""
NUM_SLICES = 32
NUM_RESAMPLES = 200
HIT_RATE_TOLERANCE = 0.005
MOST_FITS = 6
"""Simulations that look for the size of the cache."""
_UNLIMITED_BYTES_PER_S = 1e12
"""Transfers are inside the measured times."""
_DEVICE_TOKENS = 1 << 40
_UNLIMITED_BATCH = 1024
_FEWEST_STEPS = 3
_MOST_REJECTED = 0.02
"""Share of requests that the live rule may reject in the simulation of the cluster as it is. It has admitted
all of them, so a larger share shows that it does not see here what it saw there."""
_SPARE = 1.25
"""Room for what is in progress in a simulation, as a multiple of what was: it deviates a little."""
_FEWEST_FREE = 5
_WAITS_LONGER = 3.0
_UNDISTURBED = 0.1
_LEAST_WAITING = 0.25
_INSTANTS = 0.02
"""A part of the time in which instances are busy that counts as no time."""


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What would be different. Several changes may be made at once."""

    memory: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    "Factor of the memory for KV."
    prefill: Annotated[int, Meta(ge=-256, le=256)] = 0
    "Prefill instances more, or fewer."
    decode: Annotated[int, Meta(ge=-256, le=256)] = 0
    "Decode instances more, or fewer."
    policy: Annotated[str, Meta(max_length=40)] = ""
    "Another policy of the conductor."
    load: Annotated[float, Meta(gt=0, le=64)] = 1.0
    "Factor by which requests come faster."


class WhatIfQuestion(msgspec.Struct, frozen=True):
    """The latest requests of a cluster, the cluster, and a change to it."""

    rows: list[RecordedRequest]
    "In the order of arrival; ids are of blocks of `block_tokens`."
    block_tokens: Annotated[int, Meta(gt=0)]
    num_prefill: Annotated[int, Meta(ge=0)]
    "0: every instance computes prompts and decodes."
    num_decode: Annotated[int, Meta(ge=1)]
    settings: SchedulingSettings
    "The conductor's: how it places requests, and which ones it admits."
    change: Change
    since_ms: float = 0.0
    "Requests that arrived earlier only fill the caches."
    slo_ttft_s: float = 0.0
    "Objectives of the goodput; the conductor's own are in its settings."
    slo_tbt_s: float = 0.0
    notes: list[str] = []
    "What was assumed about the cluster."


class LoadFigures(msgspec.Struct, frozen=True):
    """What clients see."""

    ttft_s: Quantiles
    tbt_s: Quantiles
    "Mean time between the tokens of each request."
    e2e_s: Quantiles
    hit_rate: float
    goodput_per_s: float
    num_done: int


class Effect(msgspec.Struct, frozen=True):
    """A relative change, for hit rates the difference, with its 90 % interval."""

    value: float
    low: float
    high: float


class WhatIfAnswer(msgspec.Struct, frozen=True):
    """Figures of the same requests, measured and simulated."""

    rows: int
    minutes: float
    change: Change
    measured: LoadFigures
    baseline: LoadFigures
    "The cluster as it is, simulated."
    changed: LoadFigures
    "After the change, simulated."
    expected: dict[str, float]
    "What was measured, with the effect. Without an effect there is no entry."
    effect: dict[str, Effect]
    "Figures that are 0 in the baseline have no effect: there is nothing to divide by."
    model_error: dict[str, float]
    "Baseline against measured: relative, for the hit rate the difference. What was 0 has no entry."
    cache_tokens: int
    "Size of the cluster's cache that explains the measured hit rate."
    has_pool: bool
    notes: list[str] = []


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Figures by request; NaN where it did not end well."""

    ttft_s: _Floats
    tbt_s: _Floats
    e2e_s: _Floats
    cached: _Floats
    num_input: _Floats
    is_good: _Floats
    is_rejected: NDArray[np.bool_]

    def figures(self, chosen: Any, span_s: float) -> LoadFigures:
        done = ~np.isnan(self.ttft_s[chosen])
        total = self.num_input[chosen][done].sum()
        return LoadFigures(
            _quantiles(self.ttft_s[chosen]),
            _quantiles(self.tbt_s[chosen]),
            _quantiles(self.e2e_s[chosen]),
            float(self.cached[chosen][done].sum() / total) if total else 0.0,
            float(self.is_good[chosen].sum() / span_s) if span_s else 0.0,
            int(done.sum()),
        )


_FIGURES: dict[str, Callable[[LoadFigures], float]] = {
    "ttft_mean_s": lambda one: one.ttft_s.mean,
    "ttft_p50_s": lambda one: one.ttft_s.p50,
    "ttft_p90_s": lambda one: one.ttft_s.p90,
    "tbt_mean_s": lambda one: one.tbt_s.mean,
    "tbt_p50_s": lambda one: one.tbt_s.p50,
    "tbt_p90_s": lambda one: one.tbt_s.p90,
    "e2e_mean_s": lambda one: one.e2e_s.mean,
    "hit_rate": lambda one: one.hit_rate,
    "goodput_per_s": lambda one: one.goodput_per_s,
}
_DIFFERENCES = {"hit_rate"}


def answer_what_if(question: WhatIfQuestion) -> WhatIfAnswer:
    """Simulate the requests with and without the change.

    Raises:
        InvalidArgument: there are too few requests, too little was measured, or the change is impossible.
    """
    notes = list(question.notes)
    arrivals_ms = [row.timestamp for row in question.rows if row.timestamp >= question.since_ms]
    question = _without_rejected(question, notes)
    rows = question.rows
    is_asked = _asked(question, notes)
    num_asked = int(is_asked.sum())
    if num_asked < MIN_ROWS:
        allowed = (
            f"a time with {MIN_ROWS} requests or more, not counting answers that came whole; ask for more "
            "minutes, or send more requests"
        )
        raise InvalidArgument("minutes", f"a time with {num_asked} requests", allowed)
    change = question.change
    trace = [
        TraceRow(one.timestamp / 1e3, one.input_length, one.output_length, tuple(one.hash_ids))
        for one in rows
    ]
    span_s = max(1e-3, (arrivals_ms[-1] - arrivals_ms[0]) / 1e3)
    measured = _measured(question)
    fitting = _Model(question, trace, is_asked, measured, notes)
    now, size_tokens = fitting.fitted()
    changed_tokens = min(round(size_tokens * change.memory), max(size_tokens, fitting.most_tokens))
    spec = fitting.spec(changed_tokens, change.prefill, change.decode, change.load)
    if not question.num_prefill and change.load * question.num_decode > spec.num_prefill:
        notes.append("that memory suffices for more requests in progress is assumed: it was not measured")
    settings = fitting.settings
    if change.policy:
        settings = dataclasses.replace(settings, scheduling=cast(Scheduling, change.policy))
    later = fitting.run(spec, settings, change.load)
    num_now, num_later = (int(run.is_rejected[is_asked].sum()) for run in (now, later))
    if num_now or num_later:
        notes.append(
            f"admission by {settings.admission!r} rejects {num_now:,} of the {num_asked:,} requests in the "
            f"simulation of the cluster as it is, and {num_later:,} after the change"
        )
    # More load: the same requests in less time.
    spans = (span_s, span_s, span_s / change.load)
    figures = [one.figures(is_asked, s) for one, s in zip((measured, now, later), spans, strict=True)]
    effect = _effects(now, later, np.flatnonzero(is_asked), spans[1:], figures[1:])
    expected = {name: _applied(name, _FIGURES[name](figures[0]), one.value) for name, one in effect.items()}
    if unknown := [name for name in _FIGURES if name not in effect]:
        notes.append(
            f"no effect is stated on {', '.join(unknown)}: it is 0 in a simulation, so there is nothing to "
            "relate it to"
        )
    if "goodput_per_s" in expected:
        # A baseline with fewer good requests than were measured makes the effect on them too large.
        expected["goodput_per_s"] = min(expected["goodput_per_s"], num_asked / spans[2])
    errors = {name: _relation(name, get(figures[0]), get(figures[1])) for name, get in _FIGURES.items()}
    return WhatIfAnswer(
        rows=num_asked,
        minutes=round(span_s / 60, 3),
        change=change,
        measured=figures[0],
        baseline=figures[1],
        changed=figures[2],
        expected=expected,
        effect=effect,
        model_error={name: error for name, error in errors.items() if error is not None},
        cache_tokens=size_tokens,
        has_pool=fitting.has_pool,
        notes=notes,
    )


def _without_rejected(question: WhatIfQuestion, notes: list[str]) -> WhatIfQuestion:
    rows = [row for row in question.rows if row.status != "rejected"]
    num_rejected = len(question.rows) - len(rows)
    if num_rejected:
        notes.append(
            f"{num_rejected:,} requests that were rejected are left out: which of them would be admitted "
            "after the change is not predicted"
        )
    return msgspec.structs.replace(question, rows=rows)


def _asked(question: WhatIfQuestion, notes: list[str]) -> NDArray[np.bool_]:
    """The requests of which figures are stated. The times of answers that came whole were not measured."""
    is_late = np.array([row.timestamp >= question.since_ms for row in question.rows], dtype=bool)
    is_whole = np.array([row.is_done and not row.ttft_ms for row in question.rows], dtype=bool)
    num_whole = int((is_late & is_whole).sum())
    if num_whole:
        notes.append(
            f"{num_whole:,} answers that engines sent whole are simulated, but are in none of the figures: "
            "the times of their tokens are unknown"
        )
    is_asked: NDArray[np.bool_] = is_late & ~is_whole
    return is_asked


class _Model:
    """The live cluster in the simulator's terms."""

    def __init__(
        self,
        question: WhatIfQuestion,
        trace: list[TraceRow],
        is_asked: NDArray[np.bool_],
        measured: _Columns,
        notes: list[str],
    ) -> None:
        self._question, self._trace, self._is_asked = question, trace, is_asked
        self.settings = question.settings
        """The conductor's in the simulations."""
        self._hit_rate = measured.figures(is_asked, 1.0).hit_rate
        self._measured_ttft_s = measured.ttft_s
        self._notes = notes
        self.has_pool = question.num_prefill > 0 and any(row.loaded_tokens for row in question.rows)
        self._costs = costs_of(question.rows, notes)
        limit = limit_of_batch([row for row in question.rows if row.is_done])
        self._max_batch = limit or _UNLIMITED_BATCH
        self._longest = max(row.input_length for row in question.rows)
        self._in_progress = most_in_progress(question.rows, question.block_tokens, limit)
        self.most_tokens = 0
        """A cache of this size never evicts."""

    def spec(
        self, size_tokens: int, more_prefill: int = 0, more_decode: int = 0, load: float = 1.0
    ) -> ClusterSpec:
        """The cluster with a cache of this size, more instances, and so much load. Raises InvalidArgument."""
        question = self._question
        size = question.block_tokens
        num_prefill, num_decode = question.num_prefill + more_prefill, question.num_decode + more_decode
        if num_decode < 1 or num_prefill < min(1, question.num_prefill):
            raise InvalidArgument(
                "change", f"{num_prefill} prefill, {num_decode} decode", "1 or more of each"
            )
        least = 2 * size
        if not question.num_prefill:
            if more_prefill:
                raise InvalidArgument(
                    "prefill", more_prefill, "0: every instance computes prompts and decodes"
                )
            own = max(least, size_tokens // question.num_decode)
            # Their memory has both the cache and what is in progress. With more load for each, more requests
            # are in progress, and each of them for longer.
            more = max(1.0, load * question.num_decode / num_decode)
            device_tokens = own + round(_SPARE * more * more * self._in_progress)
            costs = msgspec.structs.replace(
                self._costs, decode_makes_first_token=False, device_tokens=device_tokens
            )
            return ClusterSpec(
                costs=costs,
                mode="chunked_prefix",
                num_prefill=num_decode,
                num_decode=0,
                max_batch=self._max_batch,
                block_tokens=size,
            )
        if not self.has_pool:
            own = max(least, size_tokens // question.num_prefill)
            return ClusterSpec(
                costs=self._costs,
                num_prefill=num_prefill,
                num_decode=num_decode,
                max_batch=self._max_batch,
                block_tokens=size,
                cache_tokens=own,
            )
        return ClusterSpec(
            costs=self._costs,
            num_prefill=num_prefill,
            num_decode=num_decode,
            max_batch=self._max_batch,
            block_tokens=size,
            cache_tokens=max(least, 2 * self._longest),  # what is computed, beside the pool
            num_store=1,
            store_tokens=max(least, size_tokens),
        )

    def run(self, spec: ClusterSpec, settings: SchedulingSettings, load: float = 1.0) -> _Columns:
        outcome = simulate(
            self._trace,
            spec,
            settings.scheduling,
            settings.admission,
            speedup=load,
            slo_ttft_s=settings.slo_ttft_s,
            slo_tbt_s=settings.slo_tbt_s,
            settings=settings,
        )
        return _simulated(outcome, self._question)

    def fitted(self) -> tuple[_Columns, int]:
        """The cluster as it is, with the cache whose hit rate is the measured one; and the cache's size."""
        reuse = reuse_of(self._trace, self._question.block_tokens)
        run, size_tokens = self._with_cache(reuse)
        num_rejected, num_asked = int(run.is_rejected[self._is_asked].sum()), int(self._is_asked.sum())
        if num_rejected > _MOST_REJECTED * num_asked:
            self._notes.append(
                f"admission by {self.settings.admission!r} would reject {num_rejected:,} of the "
                f"{num_asked:,} requests in the simulation of the cluster as it is, though the live one "
                "admitted them: both simulations admit all requests"
            )
            self.settings = dataclasses.replace(self.settings, admission="none")
            run, size_tokens = self._with_cache(reuse)
        if size_tokens >= reuse.unique_tokens:
            self._notes.append("nothing that these requests use was evicted: more memory changes nothing")
        return run, size_tokens

    def _with_cache(self, reuse: ReuseReport) -> tuple[_Columns, int]:
        question = self._question
        if not question.num_prefill:  # what the steps of others take of the rest differs: found below
            self._costs = msgspec.structs.replace(self._costs, first_token_s=0.0)
        endless = self.most_tokens = max(8 * question.block_tokens, 2 * reuse.unique_tokens)
        # One cache that has this hit rate; several hold some blocks twice, and a run evicts a little earlier.
        enough = [one.size_tokens for one in reuse.curve if one.hit_rate >= self._hit_rate]
        size_tokens = enough[0] if enough else endless
        low, high = size_tokens // 4, min(endless, 16 * size_tokens)
        found: tuple[float, int, _Columns] | None = None
        for _ in range(MOST_FITS):
            run = self.run(self.spec(size_tokens), self.settings)
            error = run.figures(self._is_asked, 1.0).hit_rate - self._hit_rate
            if found is None or abs(error) < abs(found[0]):
                found = (error, size_tokens, run)
            if abs(error) <= HIT_RATE_TOLERANCE or (error < 0 and size_tokens >= endless):
                break
            low, high = (low, size_tokens) if error > 0 else (size_tokens, high)
            size_tokens = max(1, round((max(1, low) * high) ** 0.5))
        assert found is not None
        late_s = self._measured_ttft_s - found[2].ttft_s
        if question.num_prefill or np.isnan(late_s).all():
            return found[2], found[1]
        first_token_s = max(0.0, float(np.nanquantile(late_s, _LEAST_WAITING)))
        self._costs = msgspec.structs.replace(self._costs, first_token_s=first_token_s)
        return self.run(self.spec(found[1]), self.settings), found[1]


def most_in_progress(rows: Sequence[RecordedRequest], block_tokens: int, limit: int = 0) -> int:
    """Most tokens of KV, of prompts and answers, that one instance had in progress at a time, in whole
    blocks. ``limit``: most answers that it decodes at a time, where that is known."""

    def num_tokens(row: RecordedRequest) -> int:
        return -(-(row.input_length + row.output_length) // block_tokens) * block_tokens

    by_instance: dict[int, list[RecordedRequest]] = {}
    for row in rows:
        by_instance.setdefault(row.decode, []).append(row)
    longest = most = max(map(num_tokens, rows))
    for those in by_instance.values():
        begins = np.array([row.timestamp + row.queued_ms for row in those])
        ends = np.maximum(begins, [row.ends_ms for row in those])
        amounts = np.array([float(num_tokens(row)) for row in those])
        _, level = _sums_over_time([begins, ends], [amounts, -amounts])
        most = max(most, int(level.max()))
    # Those that wait for a place in the batch have no memory yet.
    return min(most, limit * longest) if limit else most


def costs_of(rows: Sequence[RecordedRequest], notes: list[str]) -> NodeCosts:
    """Costs of an instance, fitted to what was measured. Raises InvalidArgument: too little was."""
    done = [row for row in rows if row.is_done]
    samples = [
        PrefillSample(row.input_length - row.computed_tokens, row.input_length, row.computed_ms / 1e3)
        for row in done
        if row.computed_ms > 0 and 0 < row.computed_tokens <= row.input_length
    ]
    if not samples:
        samples = [
            PrefillSample(min(row.cached_tokens, row.input_length - 1), row.input_length, row.ttft_ms / 1e3)
            for row in done
            if row.ttft_ms > 0
        ]
        notes.append(
            "no instance reports how long it computes: prefill is fitted to the times to first token"
        )
    prefill, prefill_error = fit_prefill(samples)
    decode, decode_error = fit_decode(_steps(done))
    for name, error in (("prefill", prefill_error), ("decode", decode_error)):
        if error > 0.3:
            notes.append(
                f"times of {name} vary by {error:.0%} around what explains them: expect large errors"
            )
    timed = [row for row in done if row.computed_ms > 0 and row.ttft_ms > 0]
    rests = np.array(
        [
            (row.ttft_ms - row.queued_ms - row.computed_ms) / 1e3 - decode.seconds(1, row.input_length)
            for row in timed
        ]
    )
    # What is not waiting: the path from the last layer to the client when nothing else is in the way.
    limit = limit_of_batch(done, notes)
    if limit:
        # With two places free, none of these was about to be taken by one that waited.
        free = rests[~_wait_for_batch(timed, done, limit - 1)]
        undisturbed = float(np.median(free)) if len(free) >= _FEWEST_FREE else float(rests.min())
    else:
        undisturbed = float(np.quantile(rests, _LEAST_WAITING)) if len(rests) else 0.0
    first_token_s = max(0.0, undisturbed)
    return NodeCosts(
        title="as recorded",
        source="fitted to recorded requests",
        kv_bytes_per_token=1,
        num_layers=1,
        prefill=prefill,
        decode=decode,
        device_tokens=_DEVICE_TOKENS,
        cache_tokens=0,
        nic_bytes_per_s=_UNLIMITED_BYTES_PER_S,
        nic_latency_s=0.0,
        ssd_bytes_per_s=_UNLIMITED_BYTES_PER_S,
        device_load_bytes_per_s=_UNLIMITED_BYTES_PER_S,
        first_token_s=first_token_s,
        decode_makes_first_token=True,
    )


def limit_of_batch(done: Sequence[RecordedRequest], notes: list[str] | None = None) -> int:
    """Most answers that an instance decodes at a time, if others have waited for that; 0: none has."""
    levels, busy = dict[int, float](), 0.0
    for answers in _by_instance(done).values():
        times, level = _levels(answers)
        for count, lasted in zip(level[:-1], np.diff(times), strict=True):
            if count > 0:
                levels[int(count)] = levels.get(int(count), 0.0) + float(lasted)
                busy += float(lasted)
    if not busy:
        return 0
    # A level that is reached for instants only comes from the clients' clocks.
    limit, above = max(levels), 0.0
    while above + levels.get(limit, 0.0) <= _INSTANTS * busy:
        above += levels.get(limit, 0.0)
        limit -= 1
    timed = [row for row in done if row.computed_ms > 0 and row.ttft_ms > 0]
    is_waiting = _wait_for_batch(timed, done, limit)
    rests = np.array([row.ttft_ms - row.queued_ms - row.computed_ms for row in timed])
    if is_waiting.sum() < _FEWEST_FREE:
        return 0
    # Those that waited least: an instance takes a moment from one answer's end to the next one's first token.
    if np.median(rests[is_waiting]) < _WAITS_LONGER * max(1.0, float(np.quantile(rests, _UNDISTURBED))):
        return 0
    if notes is not None:
        notes.append(
            f"an instance decodes at most {limit} answers at a time, by the times of those that waited"
        )
    return limit


class _Decoding(NamedTuple):
    """An answer, and the time in which an instance decoded it."""

    row: RecordedRequest
    begins_ms: float
    ends_ms: float


def _by_instance(rows: Sequence[RecordedRequest]) -> dict[int, list[_Decoding]]:
    """Answers of some length, by the instance that decoded them. One that came whole is assumed to have had
    the usual time between tokens: it took a place in the batch like the others."""
    long = [row for row in rows if row.output_length > _FEWEST_STEPS and row.e2e_ms > row.ttft_ms]
    steps_ms = [(row.e2e_ms - row.ttft_ms) / (row.output_length - 1) for row in long if row.ttft_ms > 0]
    usual_ms = float(np.median(steps_ms)) if steps_ms else 0.0
    found: dict[int, list[_Decoding]] = {}
    for row in long:
        lasting_ms = min(row.e2e_ms, usual_ms * (row.output_length - 1))
        begins_ms = row.timestamp + row.ttft_ms if row.ttft_ms > 0 else row.ends_ms - lasting_ms
        found.setdefault(row.decode, []).append(_Decoding(row, begins_ms, row.ends_ms))
    return found


def _levels(answers: Sequence[_Decoding]) -> tuple[_Floats, _Floats]:
    """Instants, and the number of these answers that are decoded from each on."""
    begins = np.array([one.begins_ms for one in answers])
    ends = np.array([one.ends_ms for one in answers])
    one = np.ones(len(answers))
    return _sums_over_time([ends, begins], [-one, one])  # of one instant, ends come first


def _sums_over_time(at: list[_Floats], changes: list[_Floats]) -> tuple[_Floats, _Floats]:
    """Instants in order, and the sum of all changes up to each. Of one instant, those that are listed first
    come first."""
    times = np.concatenate(at)
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(np.concatenate(changes)[order])


def _wait_for_batch(
    rows: Sequence[RecordedRequest], done: Sequence[RecordedRequest], limit: int
) -> NDArray[np.bool_]:
    """Which of ``rows`` found so many of all answers on their instance when their prompts were computed."""
    found = np.zeros(len(rows), dtype=bool)
    if not limit:
        return found
    levels = {number: _levels(those) for number, those in _by_instance(done).items()}
    for number, row in enumerate(rows):
        if row.decode in levels:
            times, level = levels[row.decode]
            at = int(np.searchsorted(times, row.timestamp + row.queued_ms + row.computed_ms, "right")) - 1
            found[number] = at >= 0 and level[at] >= limit
    return found


def _steps(done: Sequence[RecordedRequest]) -> list[StepSample]:
    """For each answer with known times: the mean batch and context on its instance while it was decoded, and
    its mean step."""
    found = []
    for answers in _by_instance(done).values():
        rows = [one.row for one in answers]
        begins = np.array([one.begins_ms for one in answers])
        ends = np.array([one.ends_ms for one in answers])
        contexts = np.array([row.input_length + row.output_length / 2 for row in rows])
        steps = np.array([row.output_length - 1 for row in rows])
        sizes = _mean_of(begins, ends, np.ones(len(rows)))
        loads = _mean_of(begins, ends, contexts)
        seconds = (ends - begins) / 1e3 / steps
        found += [
            StepSample(max(1, round(size)), max(1, round(load)), float(one))
            for row, size, load, one in zip(rows, sizes, loads, seconds, strict=True)
            if row.ttft_ms > 0
        ]
    return found


def _mean_of(begins: _Floats, ends: _Floats, amounts: _Floats) -> _Floats:
    """For each interval, the mean over its time of the sum of the amounts of all intervals at an instant."""
    times, level = _sums_over_time([begins, ends], [amounts, -amounts])
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times))])
    return np.asarray(
        (np.interp(ends, times, area) - np.interp(begins, times, area)) / np.maximum(ends - begins, 1e-9)
    )


def _measured(question: WhatIfQuestion) -> _Columns:
    rows, nan = question.rows, float("nan")
    done = np.array([row.is_done and row.ttft_ms > 0 for row in rows])

    def column(values: list[float]) -> _Floats:
        return np.where(done, np.array(values), nan)

    ttft_s = column([row.ttft_ms / 1e3 for row in rows])
    e2e_s = column([row.e2e_ms / 1e3 for row in rows])
    num_steps = np.array([max(1, row.output_length - 1) for row in rows])
    tbt_s = np.where([row.output_length > 1 for row in rows], (e2e_s - ttft_s) / num_steps, 0.0)
    tbt_s = np.where(done, tbt_s, nan)
    longest_s = np.array([row.tbt_ms / 1e3 for row in rows])
    return _Columns(
        ttft_s,
        tbt_s,
        e2e_s,
        np.array([float(row.cached_tokens) for row in rows]),
        np.array([float(row.input_length) for row in rows]),
        _good(question, ttft_s, longest_s, done),
        np.zeros(len(rows), dtype=bool),  # rejected ones are left out
    )


def _good(question: WhatIfQuestion, ttft_s: _Floats, tbt_s: _Floats, done: NDArray[np.bool_]) -> _Floats:
    good = done.copy()
    if question.slo_ttft_s:
        good &= np.nan_to_num(ttft_s, nan=np.inf) <= question.slo_ttft_s
    if question.slo_tbt_s:
        good &= tbt_s <= question.slo_tbt_s
    return good.astype(np.float64)


def _simulated(outcome: RunResults, question: WhatIfQuestion) -> _Columns:
    done = outcome.is_done

    def column(values: Any) -> _Floats:
        return np.where(done, values.astype(np.float64), float("nan"))

    return _Columns(
        column(outcome.ttft_s),
        column(outcome.tbt_mean_s),
        column(outcome.e2e_s),
        outcome.cached_tokens.astype(np.float64),
        outcome.num_input.astype(np.float64),
        outcome.is_good(question.slo_ttft_s, question.slo_tbt_s).astype(np.float64),
        np.isin(outcome.status, (REJECTED, REJECTED_AFTER_PREFILL)),
    )


def _effects(
    now: _Columns,
    later: _Columns,
    asked: NDArray[np.int64],
    spans: Sequence[float],
    figures: Sequence[LoadFigures],
) -> dict[str, Effect]:
    """Effects with their intervals, of all figures that have one: the same slices of time are drawn for both
    runs."""
    slices = np.array_split(asked, min(NUM_SLICES, len(asked)))
    random = np.random.default_rng(0)
    drawn: dict[str, list[float]] = {name: [] for name in _FIGURES}
    for _ in range(NUM_RESAMPLES):
        chosen = np.concatenate([slices[one] for one in random.integers(len(slices), size=len(slices))])
        pair = [run.figures(chosen, span_s) for run, span_s in zip((now, later), spans, strict=True)]
        for name, get in _FIGURES.items():
            if (one := _relation(name, get(pair[0]), get(pair[1]))) is not None:
                drawn[name].append(one)
    found = {}
    for name, get in _FIGURES.items():
        value = _relation(name, get(figures[0]), get(figures[1]))
        if value is None:
            continue
        low, high = np.quantile(drawn[name] or [value], INTERVAL)
        found[name] = Effect(value, min(float(low), value), max(float(high), value))
    return found


def _relation(name: str, before: float, after: float) -> float | None:
    """None: there is nothing to divide by."""
    if name in _DIFFERENCES:
        return after - before
    # A latency of 0 is that of no request; no good request after a change is a fact.
    return after / before - 1 if before and (after or name == "goodput_per_s") else None


def _applied(name: str, measured: float, effect: float) -> float:
    return min(1.0, max(0.0, measured + effect)) if name in _DIFFERENCES else measured * (1 + effect)


def _quantiles(values: _Floats) -> Quantiles:
    known = values[~np.isnan(values)]
    if not len(known):
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.quantile(known, (0.5, 0.9, 0.99))
    return Quantiles(float(known.mean()), float(p50), float(p90), float(p99))
