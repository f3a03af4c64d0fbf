# SPDX-License-Identifier: Apache-2.0
"""``mooncake replay``: a trace against a live endpoint, and the simulator's prediction beside it.

Every request is sent at its time, whether earlier ones have ended or not (open loop). Rows become prompts in
which equal keys are equal tokens, so that a real cache hits where the trace does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mooncake import clock
from mooncake.cli.output import check_writable, fail, wide_console, write_whole
from mooncake.cli.replay.endpoint import HIGHEST_TOKEN, LOWEST_TOKEN, ApiKey, Endpoint, TimedAnswer, Url
from mooncake.cli.simulation.options import (
    BlockTokens,
    DivideLengths,
    Format,
    MaxSilence,
    NumRows,
    SloTbt,
    SloTtft,
    Speedup,
    Spread,
    TimeUnit,
    TraceRequests,
    TraceSpec,
    cluster_of,
    known_settings,
    requests_of,
)
from mooncake.cli.simulation.report import ClusterRun, check_html, render_html, table
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.sim.serving import simulate
from mooncake.sim.serving.nodes import longest_mean
from mooncake.sim.serving.results import DONE, FAILED, REJECTED, Recorder, RunResults, Timeline
from mooncake.sim.traces.trace import TraceOptions, TraceRow

SAMPLE_S = 1.0
LATE_S = 0.05
"""A request sent later than that behind its time shows that this machine can't keep up."""
_SALT = 0x5EED


class TracePrompts:
    """Generates token ids from keys: a block's tokens depend on its key alone."""

    def __init__(self, block_tokens: int, seed: int = 0) -> None:
        self._block_tokens = block_tokens
        self._seed = seed

    def tokens(self, row: TraceRow, number: int) -> list[int]:
        """The prompt of row ``number``. Tokens that no key covers are unique to the row."""
        found: list[int] = []
        for key in row.keys:
            found += self._draw(f"{_SALT}/{self._seed}/{key}", self._block_tokens)
        missing = row.num_input - len(found)
        if missing > 0:
            found += self._draw(f"{_SALT}/{self._seed}/row {number}", missing)
        return found[: row.num_input]

    @staticmethod
    def _draw(seed: str, num_tokens: int) -> list[int]:
        return Random(seed).choices(range(LOWEST_TOKEN, HIGHEST_TOKEN), k=num_tokens)


@dataclass
class ReplayObservations:
    """What a replay observed besides its results."""

    errors: Counter[str] = field(default_factory=Counter)
    "Reasons of failed requests, with counts."
    rejections: Counter[str] = field(default_factory=Counter)
    num_without_retry_after: int = 0
    "429 answers without a Retry-After."
    retry_after_s: list[float] = field(default_factory=list)
    num_late: int = 0
    "Requests that this machine sent late."


class Replay:
    """One run. ``progress(sent, ended)`` is called at every change."""

    def __init__(
        self,
        endpoint: Endpoint,
        prompts: TracePrompts,
        speedup: float,
        objectives: tuple[float, float],
        sends_slo: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._prompts = prompts
        self._speedup = speedup
        self._objectives = objectives
        names = ("x-slo-ttft-ms", "x-slo-tbt-ms")
        wanted = {name: f"{s * 1000:g}" for name, s in zip(names, objectives, strict=True) if s}
        self._headers = wanted if sends_slo else {}
        self._progress = progress
        self._recorder = Recorder()
        self._measured = ReplayObservations()
        self._num_ended = 0
        self._num_decoding = 0
        self._samples: list[tuple[float, ...]] = []

    async def run(self, rows: Iterable[TraceRow]) -> tuple[RunResults, ReplayObservations]:
        """Send everything, wait for every end. A broken row raises and nothing is measured."""
        began = clock.monotonic()
        first_s: float | None = None
        sampling = asyncio.create_task(self._sample(began))
        try:
            async with asyncio.TaskGroup() as group:
                for number, row in enumerate(rows):
                    first_s = row.timestamp_s if first_s is None else first_s
                    due_s = (row.timestamp_s - first_s) / self._speedup
                    prompt = self._prompts.tokens(row, number)  # before its time, so that it is sent on time
                    num_output = max(1, row.num_output)  # as in the simulator: servers refuse to make none
                    await asyncio.sleep(max(0.0, began + due_s - clock.monotonic()))
                    self._measured.num_late += clock.monotonic() - began - due_s > LATE_S
                    place = self._recorder.add(clock.monotonic() - began, len(prompt), num_output)
                    group.create_task(self._one(place, prompt, num_output))
        finally:
            sampling.cancel()
        columns = np.array(self._samples, dtype=np.float64).reshape(-1, 10).T
        outcome = self._recorder.outcome(Timeline(SAMPLE_S, *columns), *self._objectives)
        return outcome, self._measured

    async def _one(self, place: int, prompt: list[int], num_output: int) -> None:
        self._num_decoding += 1
        answer = await self._endpoint.complete(prompt, num_output, self._headers)
        self._num_decoding -= 1
        self._num_ended += 1
        self._note(place, answer, num_output)
        if self._progress is not None:
            self._progress(len(self._recorder), self._num_ended)

    def _note(self, place: int, answer: TimedAnswer, num_output: int) -> None:
        recorder, measured = self._recorder, self._measured
        recorder.e2e_s[place] = answer.end_s  # also of those that failed: the run is not over before
        if answer.status == 429:
            recorder.status[place] = REJECTED
            measured.rejections[answer.error] += 1
            if answer.retry_after_s is None:
                measured.num_without_retry_after += 1
            else:
                measured.retry_after_s.append(answer.retry_after_s)
            return
        if not answer.is_complete or answer.num_tokens != num_output:
            recorder.status[place] = FAILED
            short = f"{answer.num_tokens} of {num_output} tokens came"
            measured.errors[answer.error or short] += 1
            return
        recorder.status[place] = DONE
        recorder.ttft_s[place] = answer.token_at_s[0]
        recorder.tbt_s[place], recorder.tbt_mean_s[place] = token_intervals(answer.intervals_s)
        recorder.cached_tokens[place] = answer.num_cached

    async def _sample(self, began: float) -> None:
        recorder = self._recorder
        while True:
            await asyncio.sleep(SAMPLE_S)
            status = np.frombuffer(bytes(recorder.status), dtype=np.int8)
            done = status == DONE
            input_tokens = float(np.array(recorder.num_input)[done].sum())
            cached = float(np.array(recorder.cached_tokens)[done].sum())
            num_rejected = float((status == REJECTED).sum())
            now_s = clock.monotonic() - began
            self._samples.append(
                (
                    now_s,
                    0,
                    0,
                    self._num_decoding,
                    len(recorder),
                    num_rejected,
                    input_tokens,
                    cached,
                    0,
                    0,
                )
            )


def token_intervals(intervals_s: list[float]) -> tuple[float, float]:
    """Mean of the longest tenth, as in the simulator, and mean of all; 0 without any."""
    if not intervals_s:
        return 0.0, 0.0
    longest_s = longest_mean([(1, seconds) for seconds in intervals_s], 0.0, len(intervals_s))
    return longest_s, sum(intervals_s) / len(intervals_s)


@dataclass(frozen=True)
class ReplayAccuracy:
    """Predicted against measured: for the requests that both completed, and for the runs as wholes. None:
    nothing was measured that could tell."""

    num_compared: int
    ttft_error: float | None
    "Mean absolute error over the mean measured TTFT."
    tbt_error: float | None
    hit_rate_error: float | None
    "Predicted minus measured."
    goodput_error: float | None
    "Predicted over measured, minus 1."


def accuracy(predicted: RunResults, measured: RunResults) -> ReplayAccuracy:
    """Compare two runs of the same rows."""
    assert len(predicted) == len(measured), (len(predicted), len(measured))
    both = predicted.is_done & measured.is_done

    def error(name: str) -> float | None:
        ours = getattr(predicted, name)[both].astype(np.float64)
        theirs = getattr(measured, name)[both].astype(np.float64)
        mean = float(theirs.mean()) if len(theirs) else 0.0
        return float(np.abs(ours - theirs).mean()) / mean if mean else None

    ours, theirs = predicted.summary(), measured.summary()
    have_hits = ours.num_done and theirs.num_done
    return ReplayAccuracy(
        num_compared=int(both.sum()),
        ttft_error=error("ttft_s"),
        tbt_error=error("tbt_mean_s"),
        hit_rate_error=ours.hit_rate - theirs.hit_rate if have_hits else None,
        goodput_error=ours.goodput_per_s / theirs.goodput_per_s - 1 if theirs.goodput_per_s else None,
    )


def replay_command(
    trace: TraceSpec,
    url: Url = "http://127.0.0.1:8000",
    model: Annotated[
        str, typer.Option("--model", help="Model to use; by default the first that the server lists.")
    ] = "",
    api_key: ApiKey = "",
    rows: NumRows = 0,
    speedup: Speedup = 1.0,
    divide_lengths: DivideLengths = 1,
    is_spread: Spread = False,
    trace_format: Format = "auto",
    time_unit: TimeUnit = "auto",
    block_tokens: BlockTokens = 0,
    max_silence_s: MaxSilence = 3600.0,
    slo_ttft_s: SloTtft = 30.0,
    slo_tbt_s: SloTbt = 0.1,
    sends_slo: Annotated[
        bool, typer.Option("--tell-slo", help="Send the objectives along, for servers that reject by them.")
    ] = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="Simulate first; print both and the prediction's errors.")
    ] = False,
    costs: Annotated[
        str | None,
        typer.Option(
            "--costs",
            metavar="NAME|FILE",
            help="Costs file from `mooncake calibrate`, with --predict. Default `costs.toml`.",
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="The live cluster, with --predict. Default `2P2D`.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="Of the live conductor, with --predict. Default: as its default."),
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option("--admission", help="Of the live conductor, with --predict. Default: as its default."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the prompts; change it for prompts not sent before.")
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="HTML report with plots.")
    ] = None,
) -> None:
    """Replay a trace against a live cluster, each request at its time, and report what clients measured.

    Prompts are generated from the trace's block ids, so that they share prefixes as in the trace. With
    --predict the same rows first run through the simulator with calibrated costs.
    """
    simulated = {"--costs": costs, "--cluster": cluster, "--policy": policy, "--admission": admission}
    for option, value in simulated.items():
        if value is not None and not predict:
            raise InvalidArgument(option, value, "left out without --predict")
    check_writable(json_file, "--json")
    check_html(html_file)
    options = TraceOptions(
        format=trace_format,
        time_unit=time_unit,
        block_tokens=block_tokens,
        max_silence_s=max_silence_s,
        num_rows=rows,
        divide_lengths=divide_lengths,
        is_spread=is_spread,
    )
    requests = requests_of(trace, options)
    objectives = (slo_ttft_s, slo_tbt_s)
    # Read whole before the first request is sent: a broken row must not end a run halfway.
    wanted = list(requests)
    runs: list[ClusterRun] = []
    if predict:
        live = SchedulingSettings()
        policy, admission = policy or live.scheduling, admission or live.admission
        cluster = cluster or "2P2D"
        known_settings("policy", "scheduling", [policy])
        known_settings("admission", "admission", [admission])
        spec = cluster_of(cluster, costs or "costs.toml", [], requests.block_tokens)
        began = time.perf_counter()
        outcome = simulate(
            wanted, spec, policy, admission, speedup=speedup, slo_ttft_s=slo_ttft_s, slo_tbt_s=slo_tbt_s
        )
        runs.append(ClusterRun("predicted", outcome, outcome.summary(), time.perf_counter() - began))
        wide_console().print(
            f"predicted for {cluster} with policy {policy} and admission {admission}; "
            "name those of the live cluster with --cluster, --policy and --admission",
            markup=False,
        )
    began = time.perf_counter()
    outcome, measured = asyncio.run(
        _drive(wanted, requests, url, model, api_key, speedup, objectives, sends_slo, seed)
    )
    runs.append(ClusterRun("measured", outcome, outcome.summary(), time.perf_counter() - began, True))
    errors = accuracy(runs[0].outcome, outcome) if predict else None
    report(requests, runs, measured, errors)
    if json_file is not None:
        write_whole(json_file, _json(requests.name, runs, measured, errors), "--json")
    if html_file is not None:
        write_whole(html_file, render_html(requests.name, runs), "--html")
    if not runs[-1].summary.num_done and measured.errors:
        fail("no request was answered")


async def _drive(
    wanted: list[TraceRow],
    requests: TraceRequests,
    url: str,
    model: str,
    api_key: str,
    speedup: float,
    objectives: tuple[float, float],
    sends_slo: bool,
    seed: int,
) -> tuple[RunResults, ReplayObservations]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    async with Endpoint(url, model, api_key) as endpoint:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("replaying", total=len(wanted))

            def show(sent: int, ended: int) -> None:
                bar.update(task, completed=ended, description=f"{sent - ended} under way")

            prompts = TracePrompts(requests.block_tokens, seed)
            return await Replay(endpoint, prompts, speedup, objectives, sends_slo, show).run(wanted)


def report(
    requests: TraceRequests,
    runs: list[ClusterRun],
    measured: ReplayObservations,
    errors: ReplayAccuracy | None,
) -> None:
    console = wide_console()
    console.print(table(requests.name, runs))
    if errors is not None:
        console.print(
            f"errors of the prediction over {errors.num_compared} requests: "
            f"TTFT {_error(errors.ttft_error, '.1%')}, TBT {_error(errors.tbt_error, '.1%')} (mean absolute "
            f"error over the measured mean), hit rate {_error(errors.hit_rate_error, '+.3f')}, "
            f"goodput {_error(errors.goodput_error, '+.1%')}"
        )
    for reason, count in measured.errors.most_common(5):
        console.print(f"failed, {count} times: {reason}", markup=False)
    for reason, count in measured.rejections.most_common(5):
        console.print(f"rejected, {count} times: {reason}", markup=False)
    if measured.retry_after_s:
        least, most = min(measured.retry_after_s), max(measured.retry_after_s)
        console.print(f"Retry-After of the rejected: {least:g} to {most:g} s")
    if measured.num_without_retry_after:
        console.print(f"{measured.num_without_retry_after} rejections had no Retry-After")
    if measured.num_late:
        console.print(f"{measured.num_late} requests were sent late: this machine can't send that fast")


def _error(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _json(
    trace: str, runs: list[ClusterRun], measured: ReplayObservations, errors: ReplayAccuracy | None
) -> str:
    document: dict[str, object] = {
        "trace": trace,
        "runs": [{"name": run.name, **json.loads(run.outcome.to_json(rows=True))} for run in runs],
        "errors": dict(measured.errors),
        "rejections": dict(measured.rejections),
        "num_without_retry_after": measured.num_without_retry_after,
        "num_late": measured.num_late,
    }
    if errors is not None:
        document["accuracy"] = msgspec.to_builtins(errors)
    return json.dumps(document) + "\n"
