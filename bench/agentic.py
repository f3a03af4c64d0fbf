# SPDX-License-Identifier: Apache-2.0
"""Agents before two real vLLM servers: (a) caches of their own, (b) with the pool, (c) with placement, too.

Command: ``scripts/test-vllm --python -m bench.agentic``. Sessions share instructions, grow turn by turn to
4,000 tokens and pause for tools; a session's next turn is sent after the former answer and its pause (a
closed load), through our gateway. By default they follow the generator's recipe (that of the vLLM project's
benchmark), all lengths divided by 30, with its pauses; with ``--trace`` they are cut from a trace of agents.

Each load begins when every session has sent what it has so far, so that caches hold what they can. Each row:
*a* the servers without a connector, placed in turn; *b* with our store connector, placed in turn; *c* the
same with the gateway's default policy. *attainable*: what a cache without end, shared by both, would have
had of the same prompts. Before each load the simulator predicts it, with costs that were measured at these
servers, times how much longer a prompt of 1,024 tokens takes than while they were measured, and with steps as
long as the latency of small loads of other sessions says, which do not pause, so that no server is idle.
On a CPU what is loaded from the pool or saved to it takes time of the cores that compute. *same*: leading
tokens of a sample of answers that are the same when they are computed again without any cache (in bfloat16
another order of sums changes one sooner or later, in row *a* as well, which is the control; with
``--dtype float32 --kv-bytes-per-token 46080`` all must be the same; faster on a CPU without bfloat16).

One GPU: ``--device cuda --model FOLDER --num-servers 1``, or 2 servers with
``--vllm-flag=--gpu-memory-utilization=0.4``; and ``--divide 10`` or less.

What it can't show here: a network; a GPU, where prefill is a thousand times faster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from bench.report import Result, Table, measured, not_run, options
from bench.session_replay import (
    DECODE_HEADER,
    LoadFigures,
    SentTurn,
    SessionReplay,
    attainable_hit_rate,
    figures_of,
    mean_figures,
    running_sessions,
    simulated_figures,
)
from mooncake.cli.replay.endpoint import HIGHEST_TOKEN, LOWEST_TOKEN, Endpoint, TimedAnswer, gather_at_once
from mooncake.conductor.settings import SchedulingSettings
from mooncake.sim.serving import ClusterSpec, simulate_sessions
from mooncake.sim.serving.node_costs import NodeCosts, PrefillSample, StepSample, fit_decode, fit_prefill
from mooncake.sim.traces.generators import Agentic
from mooncake.sim.traces.sessions import (
    AgentSession,
    ClosedLoop,
    num_working_tokens,
    recipe_sessions,
    trace_sessions,
)
from mooncake.sim.traces.trace import TraceFile, session_rows
from tests.vllm_server import VllmServer, free_port, running_gateway, running_store, store_connector

LENGTHS = (0.024, 0.128, 0.256, 0.512, 0.9)
"""Lengths of the prompts that costs are measured with, as shares of the longest."""
DECODE_ROUNDS = 2
"""How often each batch is decoded for costs: one time is up to twice as long as another."""
STEP_TOKENS = 2048
TRACE_BLOCK_TOKENS = 64
"""Block size of the trace's ids."""
DEFAULT_POLICY = SchedulingSettings().scheduling
GOALS = {"throughput": 2.0, "TTFT p50": 5.0}
IN_MEMORY_BYTES_PER_S = 1e12
PROBE_SESSIONS, PROBE_TURNS = 3, 8
"""Sessions of the probe, and turns of each: so few that each server's memory holds the KV of all. Where some
is evicted, latencies depend on which, and say nothing about steps."""
PROBE_REQUESTS, PROBE_ROUNDS = 36, 3
"""Requests of a probe, and how many probes, each of other sessions: by one of them alone steps of the same
servers took 1.1 times as long in one run and 2.2 times in another."""
SPEED_ROUNDS = 6
"""Prompts for each server that say how fast the machine is now."""
LEAST_BUSY, MOST_BUSY = 0.5, 8.0
BISECTIONS = 10
FAILURES = re.compile(r"\b(store_unreachable|(?:load|save)_(?:failed|refused|timed_out))\b.*")
"""Events of our connector's link by which blocks are computed, or not saved."""
NEARBY_COSTS = tuple(0.97 + 0.01 * number for number in range(7))
"""Factors of the costs in the runs whose mean is expected."""
PLACEMENT = {"a": "round_robin", "b": "round_robin", "c": DEFAULT_POLICY}


@dataclass(frozen=True)
class Load:
    """A closed load, and how large the servers' KV memory is beside it."""

    ratio: float
    num_sessions: int
    sessions: list[AgentSession]
    num_requests: int

    def loop(self) -> ClosedLoop:
        return ClosedLoop(self.sessions, self.num_sessions, self.num_requests)

    @property
    def working_tokens(self) -> int:
        return num_working_tokens(running_sessions(self.sessions, self.num_sessions))


# -- the servers


class Servers:
    """vLLM servers with as much KV memory as wanted."""

    def __init__(
        self, stack: ExitStack, folder: Path, arguments: argparse.Namespace, kv_tokens: int, store: str
    ) -> None:
        self.folder, self.arguments, self.kv_tokens = folder, arguments, kv_tokens
        self.servers: list[VllmServer] = []
        self._read: dict[str, int] = {}
        """Length of each server's log at the last call of ``problems``."""
        for number in range(arguments.num_servers):
            events = {"enable_kv_cache_events": True, "publisher": "zmq"}
            events |= {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
            flags = ["--block-size", str(arguments.block_tokens)]
            flags += ["--max-model-len", str(arguments.longest + 96)]
            flags += ["--num-gpu-blocks-override", str(kv_tokens // arguments.block_tokens + 1)]
            flags += ["--max-num-batched-tokens", str(STEP_TOKENS), "--kv-events-config", json.dumps(events)]
            server = VllmServer(
                f"{'pool' if store else 'own'}-{number}",
                arguments.model,
                folder,
                store_connector(store) if store else None,
                number,
                arguments.dtype,
                {} if arguments.device == "cpu" else {"VLLM_CPU_OMP_THREADS_BIND": ""},
                (*flags, *arguments.vllm_flag),
            )
            stack.callback(server.close)
            self.servers.append(server)
        for server in self.servers:
            server.wait_until_ready()

    @contextmanager
    def gateway(self, scheduling: str) -> Iterator[str]:
        """A gateway of its own, which knows only what the servers' events say."""
        flags = ["--protocol", "pool", "--scheduling", scheduling]
        flags += ["--slow-start-s", "0", "--block-tokens", str(self.arguments.block_tokens), "--decode"]
        addresses = [one.address for one in self.servers]
        with running_gateway(self.folder, self.arguments.model, *flags, *addresses) as gateway:
            gateway.wait_until_routable()
            yield gateway.url

    def problems(self) -> list[str]:
        """How often each event of a failure was logged since the last call, and the first of each."""
        found: dict[str, list[str]] = defaultdict(list)
        for server in self.servers:
            log = server.log()
            for event in FAILURES.finditer(log, self._read.get(server.address, 0)):
                found[event[1]].append(event[0])
            self._read[server.address] = len(log)
        return [f"{len(texts)} {texts[0]}" for _, texts in sorted(found.items())]

    def counts(self) -> dict[str, float]:
        """Counters of all servers and sums of their times, by name without prefix."""
        found: dict[str, float] = {}
        for server in self.servers:
            for line in server.request("GET", "/metrics", None).body.splitlines():
                name = line.split("{")[0].split(" ")[0].removeprefix("vllm:")
                if name.endswith(("_total", "_seconds_sum")) and not line.startswith("#"):
                    found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
        return found

    def counted_since(self, before: dict[str, float]) -> dict[str, float]:
        return {name: value - before.get(name, 0.0) for name, value in self.counts().items()}


# -- costs


class CostSampling:
    """Times of these servers, all of them at once as under load: costs for the simulator."""

    def __init__(self, endpoint: Endpoint, num_servers: int, seed: str) -> None:
        self._endpoint = endpoint
        self._num_servers = num_servers
        self._random = Random(seed)

    async def run(
        self, title: str, kv_tokens: int, has_pool: bool, kv_bytes_per_token: int, longest: int
    ) -> NodeCosts:
        """The costs, without those of loads; with a pool, each prompt is loaded once, too."""
        await self._ask(self._prompts(300), 8)
        prefill: list[PrefillSample] = []
        for length in (round(share * longest) for share in LENGTHS):
            prompts = self._prompts(length)
            for answer in await self._ask(prompts, 1):
                prefill.append(PrefillSample(0, length, answer.token_at_s[0]))
            for answer in await self._ask(prompts, 1):
                if answer.num_cached and not has_pool:
                    prefill.append(PrefillSample(answer.num_cached, length, answer.token_at_s[0]))
            if has_pool:
                # The other server's: it is loaded.
                await self._ask(self._prompts(96)[:1], 1)
                await self._ask(prompts, 1)
                await self._ask(self._prompts(96)[:1], 1)
        model, _ = fit_prefill(prefill)
        long = max(400, min(2400, kv_tokens // 2 - 64))  # two of them fit
        shapes = ((1, 400), (2, 400), (4, 400), (8, 400), (1, long), (2, long)) * DECODE_ROUNDS
        decode, _ = fit_decode([one for batch, length in shapes for one in await self._steps(batch, length)])
        return NodeCosts(
            title=title,
            source="measured by bench.agentic",
            kv_bytes_per_token=kv_bytes_per_token,
            num_layers=30,
            prefill=model,
            decode=decode,
            device_tokens=kv_tokens,
            cache_tokens=0,
            nic_bytes_per_s=IN_MEMORY_BYTES_PER_S,
            nic_latency_s=0.0,
            ssd_bytes_per_s=IN_MEMORY_BYTES_PER_S,
            device_load_bytes_per_s=IN_MEMORY_BYTES_PER_S,
        )

    async def speed_s(self) -> float:
        """How long a prompt of 1,024 tokens takes now: a shared machine's speed changes.

        The first answers do not count: the gateway's connections are new, and the servers may still save what
        an earlier load has computed.
        """
        length = 1024
        await self._ask(self._prompts(length), 1)
        answers = [one for _ in range(SPEED_ROUNDS) for one in await self._ask(self._prompts(length), 1)]
        return statistics.median(one.token_at_s[0] for one in answers)

    async def _steps(self, batch: int, length: int) -> list[StepSample]:
        """Decode of so many prompts of that length at a time on each server."""
        num_output = 32
        by_instance: dict[str, list[TimedAnswer]] = defaultdict(list)
        for answer in await self._ask(self._prompts(length, batch), num_output):
            by_instance[answer.headers.get(DECODE_HEADER, "")].append(answer)
        found = []
        for answers in by_instance.values():
            begin = max(one.token_at_s[0] for one in answers)
            end = min(one.end_s for one in answers)
            inside = [[at for at in one.token_at_s if begin <= at <= end] for one in answers]
            # Means, since several tokens may come at one instant.
            steps = [(times[-1] - times[0]) / (len(times) - 1) for times in inside if len(times) > 3]
            if steps and min(steps) > 0:
                size = len(answers)
                context = size * (length + num_output // 2)
                found.append(StepSample(size, context, statistics.median(steps)))
        return found

    def _prompts(self, length: int, per_server: int = 1) -> list[list[int]]:
        count = self._num_servers * per_server
        return [self._random.choices(range(LOWEST_TOKEN, HIGHEST_TOKEN), k=length) for _ in range(count)]

    async def _ask(self, prompts: Sequence[list[int]], num_output: int) -> list[TimedAnswer]:
        answers = await gather_at_once(self._endpoint, prompts, num_output)
        assert all(one.is_complete for one in answers), [one.error for one in answers]
        return answers


def slower(costs: NodeCosts, factor: float) -> NodeCosts:
    """The costs of such servers on a machine that is so many times slower."""
    prefill = costs.prefill
    return msgspec.structs.replace(
        busier(costs, factor),
        prefill=type(prefill)(prefill.c0 * factor, prefill.c1 * factor, prefill.c2 * factor),
        nic_bytes_per_s=costs.nic_bytes_per_s / factor,
        nic_latency_s=costs.nic_latency_s * factor,
        move_s_per_byte=costs.move_s_per_byte * factor,
    )


def busier(costs: NodeCosts, factor: float) -> NodeCosts:
    """The costs of servers whose steps of decode take so many times as long as with nothing beside them."""
    decode = costs.decode
    times = (decode.base_s * factor, decode.per_request_s * factor, decode.per_token_s * factor)
    return msgspec.structs.replace(costs, decode=type(decode)(*times))


def with_loads(costs: NodeCosts, counted: dict[str, float], block_bytes: int, is_cpu: bool) -> NodeCosts:
    """The costs with those of loads, by what the connectors counted. On a CPU a core that copies does not
    compute meanwhile, whether it loads or saves."""
    num_bytes = counted.get("mooncake_connector_loaded_blocks_total", 0.0) * block_bytes
    load_s = counted.get("mooncake_connector_load_seconds_sum", 0.0)
    if not num_bytes or not load_s:
        return costs
    move_s_per_byte = load_s / num_bytes if is_cpu else 0.0
    return msgspec.structs.replace(costs, nic_bytes_per_s=num_bytes / load_s, move_s_per_byte=move_s_per_byte)


# -- loads


def probe_arguments(arguments: argparse.Namespace, number: int) -> argparse.Namespace:
    """The arguments with the seed of one of the probes, which has sessions and prompts of its own."""
    return argparse.Namespace(**{**vars(arguments), "seed": arguments.seed + PROBE_SESSIONS + number})


def probe_of(arguments: argparse.Namespace) -> Load:
    """A small load of other sessions without pauses, by which costs are corrected."""
    sessions = [
        replace(one, turns=tuple(replace(turn, pause_s=0.0) for turn in one.turns[:PROBE_TURNS]))
        for one in sessions_of(arguments)
    ]
    return Load(0.0, PROBE_SESSIONS, sessions, PROBE_REQUESTS)


def busy_factor(
    probes: Sequence[Load], row: str, costs: NodeCosts, latency_s: float, args: argparse.Namespace
) -> float:
    """How many times as long steps of decode take when requests come and go, by the mean latency of loads.

    Costs are sampled one kind of work at a time. Under load, loading and saving, the engine's scheduler and
    its HTTP server run on the cores that compute, and a step waits for all of them. Below 1: the samples
    came while the machine was slower.
    """
    low, high = LEAST_BUSY, MOST_BUSY
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        nearby = busier(costs, middle)
        expected_s = np.mean([predicted(probe, row, nearby, args).latency_s.mean() for probe in probes])
        low, high = (middle, high) if expected_s < latency_s else (low, middle)
    return low


def predicted(load: Load, row: str, costs: NodeCosts, arguments: argparse.Namespace) -> LoadFigures:
    """What the simulator expects: the mean of runs with nearly the same costs. In a closed load of few
    sessions it depends on small differences who finds its blocks: one run's TTFT p50 varies by a tenth."""
    pool_tokens = int(arguments.pool_gb * 1e9 / costs.kv_bytes_per_token / arguments.num_servers)
    cluster = ClusterSpec(
        costs=costs,
        num_prefill=arguments.num_servers,
        num_decode=0,
        mode="chunked_prefix",
        block_tokens=arguments.block_tokens,
        store_tokens=None if row == "a" else pool_tokens,
        step_tokens=STEP_TOKENS,
    )
    runs = []
    for factor in NEARBY_COSTS:
        nearby = replace(cluster, costs=slower(costs, factor))
        results = simulate_sessions(load.loop(), nearby, PLACEMENT[row], slo_ttft_s=0.0, slo_tbt_s=0.0)
        runs.append(simulated_figures(results, load.num_sessions, load.num_requests))
    return mean_figures(runs)


@contextmanager
def alone(path: str) -> Iterator[None]:
    """While measured, no other bench of this machine that takes the same lock runs."""
    if not path:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def driven(
    load: Load, row: str, url: str, arguments: argparse.Namespace
) -> tuple[list[SentTurn], list[float]]:
    """Run a load; also the load average of the machine when it began and when it ended."""
    averages: list[float] = []
    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(alone(arguments.lock))
            averages.append(os.getloadavg()[0])

        async with Endpoint(url, "smollm2", timeout_s=1200.0) as endpoint:
            seed = f"{arguments.seed}/{row}/{load.ratio}"
            replay = SessionReplay(endpoint, load.loop(), arguments.block_tokens, seed, begin)
            sent = await replay.run()
        averages.append(os.getloadavg()[0])
    return sent, averages


async def same_tokens(servers: Servers, sent: Sequence[SentTurn], checked: int, seed: str) -> str:
    """How many leading tokens of a sample of answers are those that a server computes without any cache."""
    done = [one for one in sent if one.answer.is_complete and not one.upcoming.is_first_phase]
    random = Random(seed)
    sample, salt = random.sample(done, min(checked, len(done))), f"{random.getrandbits(64):x}"
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(Endpoint(one.url, "smollm2")) for one in servers.servers]
        again = await asyncio.gather(
            *(
                endpoints[number % len(endpoints)].complete(
                    one.prompt, one.upcoming.turn.num_output, cache_salt=f"{salt} {number}"
                )
                for number, one in enumerate(sample)
            )
        )
    pairs = [(one, other) for one, other in zip(sample, again, strict=True) if other.is_complete]
    if len(pairs) < len(sample):
        print(f"not computed again: {[one.error for one in again if not one.is_complete]}", file=sys.stderr)
    assert all(other.num_cached == 0 for _, other in pairs), "a salt of its own must find nothing"
    num_same = num_all = 0
    for one, other in pairs:
        tokens = enumerate(zip(one.answer.token_ids, other.token_ids, strict=False))
        num_same += next((at for at, (ours, theirs) in tokens if ours != theirs), len(other.token_ids))
        num_all += len(other.token_ids)
    return f"{num_same}/{num_all}"


COLUMNS: list[str | tuple[str, int]] = [
    "working set",
    "row",
    "",
    "requests",
    ("per s", 3),
    ("TTFT p50 s", 2),
    ("p90", 2),
    ("latency p50 s", 2),
    ("p90", 2),
    ("hit rate", 3),
    ("attainable", 3),
    "same",
    "load",
]


def add_row(
    table: Table, load: Load, row: str, kind: str, found: LoadFigures, *rest: float | str | None
) -> None:
    table.add(
        f"{load.ratio:g} x",
        row,
        kind,
        found.num_done,
        found.per_s,
        found.ttft(0.5),
        found.ttft(0.9),
        found.latency(0.5),
        found.latency(0.9),
        found.hit_rate,
        *rest,
        samples={"ttft_s": found.ttft_s.tolist(), "latency_s": found.latency_s.tolist()},
    )


def gains(before: LoadFigures, after: LoadFigures) -> dict[str, float]:
    return {
        "throughput": after.per_s / before.per_s,
        "TTFT p50": before.ttft(0.5) / after.ttft(0.5),
        "TTFT p90": before.ttft(0.9) / after.ttft(0.9),
        "latency p50": before.latency(0.5) / after.latency(0.5),
    }


def run_rows(
    servers: Servers,
    rows: str,
    loads: list[Load],
    result: Result,
    table: Table,
    arguments: argparse.Namespace,
) -> dict[tuple[float, str], tuple[LoadFigures, LoadFigures, float]]:
    """By load and row: predicted and measured figures, and the attainable hit rate."""
    has_pool = "a" not in rows

    def sampling(endpoint: Endpoint, what: str) -> CostSampling:
        return CostSampling(endpoint, len(servers.servers), f"{arguments.seed}/costs/{rows}/{what}")

    async def sample(url: str) -> tuple[NodeCosts, float]:
        """Costs, and the machine's speed meanwhile: before and after, so that a change lies between."""
        async with Endpoint(url, "smollm2") as endpoint:
            before_s = await sampling(endpoint, "before").speed_s()
            found = await sampling(endpoint, "all").run(
                "pool" if has_pool else "own",
                servers.kv_tokens,
                has_pool,
                arguments.kv_bytes_per_token,
                arguments.longest,
            )
            return found, (before_s + await sampling(endpoint, "after").speed_s()) / 2

    async def speed_s(url: str, what: str) -> float:
        async with Endpoint(url, "smollm2") as endpoint:
            return await sampling(endpoint, what).speed_s()

    other = [probe_arguments(arguments, number) for number in range(PROBE_ROUNDS)]
    probes = [probe_of(one) for one in other]
    with servers.gateway("round_robin") as url:
        before = servers.counts()
        costs, sampled_s = asyncio.run(sample(url))
        block_bytes = arguments.block_tokens * arguments.kv_bytes_per_token
        costs = with_loads(costs, servers.counted_since(before), block_bytes, arguments.device == "cpu")
        factor = asyncio.run(speed_s(url, "probe")) / sampled_s
        sent_probes = [
            asyncio.run(driven(probe, rows[0], url, one))[0] for probe, one in zip(probes, other, strict=True)
        ]
    note_costs(result, costs)
    latencies_s = [float(figures_of(one).latency_s.mean()) for one in sent_probes]
    busy = busy_factor(probes, rows[0], slower(costs, factor), statistics.fmean(latencies_s), arguments)
    shown = ", ".join(f"{one:.2f}" for one in latencies_s)
    result.note(f"small loads, {costs.title}: latency {shown} s, as if steps took {busy:.2f} times as long")
    costs = busier(costs, busy)
    found = {}
    for row in rows:
        for load in loads:
            before = servers.counts()
            with servers.gateway("round_robin") as url:  # others may place two of its prompts on one server
                factor = asyncio.run(speed_s(url, f"{row}/{load.ratio}")) / sampled_s
            with servers.gateway(PLACEMENT[row]) as url:
                expected = predicted(load, row, slower(costs, factor), arguments)
                add_row(table, load, row, "predicted", expected, None, "", f"costs x {factor:.2f}")
                sent, averages = asyncio.run(driven(load, row, url, arguments))
            counted = servers.counted_since(before)
            measured_figures, attainable = figures_of(sent), attainable_hit_rate(sent)
            seed = f"{arguments.seed}/same/{row}/{load.ratio}"
            same = asyncio.run(same_tokens(servers, sent, arguments.checked, seed))
            average = " ".join(f"{one:.1f}" for one in averages)
            add_row(table, load, row, "measured", measured_figures, attainable, same, average)
            if measured_figures.num_failed:
                errors = sorted({one.answer.error for one in sent if not one.answer.is_complete})
                result.note(f"{load.ratio:g} x, {row}: {measured_figures.num_failed} failed: {errors[:2]}")
            note_losses(result, load, row, sent, counted)
            if problems := servers.problems():
                result.note(f"{load.ratio:g} x, {row}: {'; '.join(problems)}")
            found[load.ratio, row] = expected, measured_figures, attainable
    return found


def note_costs(result: Result, costs: NodeCosts) -> None:
    prefill, decode = costs.prefill, costs.decode
    text = f"costs, {costs.title}: prefill of 1,000 and 3,900 tokens {prefill.seconds(0, 1000):.2f} and "
    text += f"{prefill.seconds(0, 3900):.2f} s, of 100 behind 3,000 {prefill.seconds(3000, 3100):.2f} s; "
    text += f"a step with 1 and 4 of 2,000 tokens {decode.seconds(1, 2000) * 1e3:.0f} and "
    text += f"{decode.seconds(4, 8000) * 1e3:.0f} ms"
    if costs.title == "pool":
        text += f"; a load {costs.nic_bytes_per_s / 1e9:.2f} GB/s"
    result.note(text)


LOSSES = (
    "num_preemptions",
    "mooncake_connector_found_blocks",
    "mooncake_connector_missed_blocks",
    "mooncake_connector_loaded_blocks",
    "mooncake_connector_failed_blocks",
    "mooncake_connector_saved_blocks",
    "mooncake_connector_unsaved_blocks",
    "mooncake_connector_lookup_failures",
)


def note_losses(
    result: Result, load: Load, row: str, sent: Sequence[SentTurn], counted: dict[str, float]
) -> None:
    """What the servers counted, and the prompts that lost most against the endless cache."""
    shown = [
        f"{name.removeprefix('mooncake_connector_')} {counted.get(f'{name}_total', 0.0):.0f}"
        for name in LOSSES
        if f"{name}_total" in counted
    ]
    load_turns = [one for one in sent if not one.upcoming.is_first_phase]
    lost = sorted((one.attainable_tokens - one.answer.num_cached for one in load_turns), reverse=True)
    by_server, num_losing = Counter(one.instance for one in load_turns), sum(one > 0 for one in lost)
    result.note(
        f"{load.ratio:g} x, {row}: {'; '.join(shown)}; {num_losing} prompts lost {sum(lost)} tokens, most: "
        f"{lost[:3]}; requests by server: {sorted(by_server.values())}"
    )


# -- the command


def sessions_of(arguments: argparse.Namespace) -> list[AgentSession]:
    divide = arguments.divide
    recipe = Agentic(seed=arguments.seed)
    size = arguments.block_tokens
    common = math.ceil(recipe.common_tokens / divide / size) * size
    if arguments.trace:
        whole = session_rows(TraceFile(arguments.trace), TRACE_BLOCK_TOKENS)
        return trace_sessions(
            (rows for rows in whole if rows[0].num_input // divide < arguments.longest // 2),
            block_tokens=TRACE_BLOCK_TOKENS,
            divide_lengths=divide,
            longest=arguments.longest,
            common_tokens=common,
        )
    recipe = replace(
        recipe,
        common_tokens=common,
        first_tokens=round(recipe.first_tokens / divide),
        turn_tokens=round(recipe.turn_tokens / divide),
        output_tokens=round(recipe.output_tokens / divide),
    )
    return recipe_sessions(recipe, 400)


def add_gains(
    table: Table, load: Load, found: dict[tuple[float, str], tuple[LoadFigures, LoadFigures, float]]
) -> None:
    expected_a, reached_a, _ = found[load.ratio, "a"]
    expected_c, reached_c, attainable = found[load.ratio, "c"]
    expected = gains(expected_a, expected_c)
    for name, gain in gains(reached_a, reached_c).items():
        goal = GOALS.get(name) if load.ratio >= 4 else None
        verdict = "" if goal is None else "yes" if gain >= goal else "no"
        table.add(f"{load.ratio:g} x", name, expected[name], gain, expected[name] / gain - 1, goal, verdict)
    missing = attainable - reached_c.hit_rate
    verdict = "yes" if missing <= GOAL_MISSING else "no"
    table.add(f"{load.ratio:g} x", "attainable minus hit rate", None, missing, None, GOAL_MISSING, verdict)


def loads_of(arguments: argparse.Namespace) -> tuple[list[Load], int]:
    """The loads, and the tokens of KV that a server has: the largest load is the largest ratio of them."""
    sessions = sessions_of(arguments)
    most, ratios = arguments.sessions, sorted(arguments.ratio or [2.0, 4.0])
    tokens = num_working_tokens(running_sessions(sessions, most))
    kv_tokens = math.ceil(tokens / ratios[-1] / arguments.num_servers)
    loads = []
    for ratio in ratios:
        wanted = ratio * arguments.num_servers * kv_tokens
        number = min(
            range(1, most + 1),
            key=lambda one: abs(num_working_tokens(running_sessions(sessions, one)) - wanted),
        )
        loads.append(Load(ratio, number, sessions, arguments.requests))
    return loads, kv_tokens


def main() -> None:
    parser = options(__doc__, "bench.agentic")
    parser.add_argument("--trace", help="sessions from this trace instead of the recipe")
    parser.add_argument("--divide", type=int, default=30, help="all lengths are divided by this")
    parser.add_argument("--longest", type=int, default=4000, help="most tokens of a prompt with its answer")
    parser.add_argument("--sessions", type=int, default=24, help="sessions at a time, at the largest ratio")
    parser.add_argument("--ratio", type=float, action="append", help="working set over KV memory: 2 and 4")
    parser.add_argument("--requests", type=int, default=72, help="requests of each load")
    parser.add_argument("--checked", type=int, default=3, help="answers of each load to compute again")
    parser.add_argument("--rows", default="abc", help="which of a, b and c")
    parser.add_argument("--num-servers", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="a folder; by default that of scripts/test-vllm")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-tokens", type=int, default=32)
    parser.add_argument("--kv-bytes-per-token", type=int, default=23_040, help="SmolLM2-135M's in bfloat16")
    parser.add_argument("--pool-gb", type=float, default=3.0)
    parser.add_argument("--vllm-flag", action="append", default=[], help="one more flag of each server")
    parser.add_argument("--lock", default="", help="file to lock while a load is measured")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if "MOONCAKE_VLLM_ENV" not in os.environ:
        not_run("vLLM is not in this environment: scripts/test-vllm --python -m bench.agentic")
    arguments.model = arguments.model or Path(os.environ["MOONCAKE_VLLM_ENV"]) / "model"
    if arguments.quick:
        arguments.requests = arguments.sessions
    loads, kv_tokens = loads_of(arguments)
    found: dict[tuple[float, str], tuple[LoadFigures, LoadFigures, float]] = {}
    with measured("agentic", arguments) as result:
        table = result.table(*COLUMNS, title=title_of(arguments, loads, kv_tokens))
        for rows in ("a", "bc"):
            wanted = "".join(row for row in rows if row in arguments.rows)
            if not wanted:
                continue
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-agentic-")))
                store = ""
                if rows != "a":
                    store = stack.enter_context(running_store(folder, arguments.pool_gb))
                servers = Servers(stack, folder, arguments, kv_tokens, store)
                found |= run_rows(servers, wanted, loads, result, table, arguments)
        if {"a", "c"} <= set(arguments.rows):
            summary = result.table(*GAIN_COLUMNS, title="gains of c over a")
            for load in loads:
                add_gains(summary, load, found)
        result.note("can't show: a network between hosts; a GPU, where prefill is a thousand times faster")


GOAL_MISSING = 0.03
GAIN_COLUMNS: list[str | tuple[str, int]] = [
    "working set",
    "gain",
    ("predicted", 3),
    ("measured", 3),
    ("error", 3),
    ("goal", 2),
    "met",
]


def title_of(arguments: argparse.Namespace, loads: list[Load], kv_tokens: int) -> str:
    what = Path(arguments.trace).name if arguments.trace else "the generator's recipe"
    numbers = ", ".join(
        f"{load.num_sessions} sessions with {load.working_tokens:,} tokens ({load.ratio:g} x)"
        for load in loads
    )
    return (
        f"{arguments.num_servers} vLLM servers on {arguments.device}, {arguments.dtype}, "
        f"{kv_tokens:,} tokens of KV each; {what}, lengths / {arguments.divide}: {numbers}"
    )


if __name__ == "__main__":
    main()
