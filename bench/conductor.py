# SPDX-License-Identifier: Apache-2.0
"""The conductor's cost: memory per cached block, duration of decisions, rate of events.

``python -m bench.conductor`` prints two tables for 1,000 instances that hold 10 million different blocks.
Decisions are of two kinds: ``chat`` prompts continue one of many conversations, whose blocks three instances
hold in part after a system prompt that all instances hold; the ``worst`` prompt is held by every instance, by
each to another length, so that all of them drop out of the search one by one.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from bench.report import Table, measured, options
from mooncake.conductor.conductor import Conductor
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.messages import AddInstance, BlocksRemoved, BlocksStored, Finished, Place, Probed
from mooncake.conductor.prefix_index import PrefixIndex
from mooncake.conductor.settings import SchedulingSettings
from mooncake.types import Tier, WorkerRole

PROMPT_BLOCKS = 256  # 8,192 tokens of 32
SYSTEM_BLOCKS = 64
NUM_CHATS = 2_000
NUM_DECISIONS = 1_000
EVENT_BLOCKS = (1, 16, 256)
TIERS = list(Tier)


def main() -> None:
    parser = options(__doc__, "bench.conductor")
    parser.add_argument(
        "--instances", type=int, nargs="+", default=None, help="number of instances; 1,000 by default"
    )
    parser.add_argument("--blocks", type=int, default=None, help="different cached blocks in all; 10 million")
    parser.add_argument("--policies", nargs="+", default=["cache_aware", "overlap"])
    given = parser.parse_args()
    num_blocks = given.blocks or (100_000 if given.quick else 10_000_000)
    with measured("conductor", given) as result:
        decisions = result.table(
            "instances",
            "blocks",
            ("bytes/block", 0),
            ("longest pause, ms", 0),
            ("remove one, ms", 1),
            "policy",
            "prompts",
            "decision p50, µs",
            "p99, µs",
            "of it the index p50, µs",
            "index p99, µs",
            "decision p99 by the clock, µs",
            title="Decisions",
            note="CPU time, as decisions wait for nothing and neighbours on the machine are not their cost.",
        )
        for num_instances in given.instances or [100 if given.quick else 1000]:
            for policy in given.policies:
                conductor = measure(decisions, num_instances, num_blocks, policy)
        events = result.table(
            "blocks an event",
            "stored, events/s",
            "blocks/s",
            "removed, events/s",
            "removed, blocks/s",
            title="Events",
        )
        for event_blocks in EVENT_BLOCKS:
            events.add(*_events(conductor, event_blocks))


def measure(table: Table, num_instances: int, num_blocks: int, policy: str) -> Conductor:
    random = Random(0)
    conductor = Conductor(SchedulingSettings(scheduling=policy), random)  # type: ignore[arg-type]
    names = [f"10.0.{number // 256}.{number % 256}:8000" for number in range(num_instances)]
    for number, name in enumerate(names):
        conductor.handle(AddInstance(name, WorkerRole.PREFILL if number % 2 else WorkerRole.DECODE), 0.0)
        conductor.handle(Probed(name, ProbeOutcome.READY), 0.0)
    gc.collect()
    before_bytes = _resident_bytes()
    longest_s = _fill(conductor, names, num_blocks)
    block_bytes = (_resident_bytes() - before_bytes) / conductor.index.num_blocks
    kinds = {"chat": _chats(conductor, names, random), "worst": _worst(conductor, names, random)}
    began = time.thread_time()
    conductor.index.clear(names[-1])
    removal_s = time.thread_time() - began
    for kind, prompts in kinds.items():
        table.add(
            num_instances,
            conductor.index.num_blocks,
            block_bytes,
            longest_s * 1e3,
            removal_s * 1e3,
            policy,
            kind,
            *_decisions(conductor, prompts),
            num_samples=NUM_DECISIONS,
        )
    return conductor


def _fill(conductor: Conductor, names: list[str], num_blocks: int) -> float:
    """Store every block on one instance, on one of its tiers. Returns the longest time that an event took."""
    numbers = np.random.default_rng(0)
    longest_s = 0.0
    for position in range(0, num_blocks, 1000):
        name = names[position // 1000 % len(names)]
        keys = numbers.integers(1, 1 << 63, 1000, dtype=np.uint64).tolist()
        tier = TIERS[position // 1000 // len(names) % 3]
        began = time.thread_time()
        conductor.handle(BlocksStored(name, keys, tier), 0.0)
        longest_s = max(longest_s, time.thread_time() - began)
    return longest_s


def _chats(conductor: Conductor, names: list[str], random: Random) -> list[list[int]]:
    system = [random.getrandbits(63) for _ in range(SYSTEM_BLOCKS)]
    for name in names:
        conductor.handle(BlocksStored(name, system), 0.0)
    chats = []
    for _ in range(NUM_CHATS):
        blocks = [random.getrandbits(63) for _ in range(PROMPT_BLOCKS - SYSTEM_BLOCKS)]
        for name in random.sample(names, 3):
            held = blocks[: random.randrange(len(blocks))]
            conductor.handle(BlocksStored(name, held, random.choice(TIERS)), 0.0)
        chats.append([*system, *blocks])
    return chats


def _worst(conductor: Conductor, names: list[str], random: Random) -> list[list[int]]:
    prompt = [random.getrandbits(63) for _ in range(PROMPT_BLOCKS)]
    for number, name in enumerate(names):
        held = prompt[: random.randrange(PROMPT_BLOCKS)]
        conductor.handle(BlocksStored(name, held, TIERS[number % 3]), 0.0)
    return [prompt]


def _decisions(conductor: Conductor, prompts: list[list[int]]) -> list[float]:
    index = conductor.index
    cpu_s, wall_s, index_s = [], [], []
    for number in range(NUM_DECISIONS):
        prompt = prompts[number % len(prompts)]
        place = Place(f"r{number}", PROMPT_BLOCKS * 32, prompt)
        began, began_cpu = time.perf_counter(), time.thread_time()
        conductor.handle(place, 100.0 + number)
        cpu_s.append(time.thread_time() - began_cpu)
        wall_s.append(time.perf_counter() - began)
        if number >= 100:
            conductor.handle(Finished(f"r{number - 100}"), 100.0 + number)
        index_s.append(_timed(index, prompts[(number + len(prompts) // 2) % len(prompts)]))
    parts = [(cpu_s, 0.5), (cpu_s, 0.99), (index_s, 0.5), (index_s, 0.99), (wall_s, 0.99)]
    return [sorted(column)[int(len(column) * part)] * 1e6 for column, part in parts]


def _timed(index: PrefixIndex, prompt: list[int]) -> float:
    began = time.thread_time()
    index.match(prompt)
    return time.thread_time() - began


def _events(conductor: Conductor, num_blocks: int) -> list[float]:
    random = Random(1)
    name = next(iter(conductor.instances))
    events = [[random.getrandbits(63) for _ in range(num_blocks)] for _ in range(2_000)]

    def rate(act: Callable[[list[int]], object]) -> float:
        began = time.thread_time()
        for keys in events:
            act(keys)
        return len(events) / (time.thread_time() - began)

    stored = rate(lambda keys: conductor.handle(BlocksStored(name, keys), 0.0))
    removed = rate(lambda keys: conductor.handle(BlocksRemoved(name, keys), 0.0))
    return [num_blocks, stored, stored * num_blocks, removed, removed * num_blocks]


def _resident_bytes() -> int:
    """The process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
