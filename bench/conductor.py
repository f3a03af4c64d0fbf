"""How long the conductor takes to decide, and what a cached block costs it in memory.

``python -m bench.conductor`` prints one table. The prompt is held in part by every instance, each with
another length: the worst case for the index, because all of them drop out of the walk one by one.
"""

from __future__ import annotations

import argparse
import resource
import time
from random import Random

from mooncake.conductor.conductor import Conductor
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.messages import AddInstance, BlocksStored, Place, Probed
from mooncake.conductor.settings import SchedulingSettings
from mooncake.prefix import BlockKey
from mooncake.types import Role

PROMPT_BLOCKS = 256  # 8,192 tokens of 32
NUM_DECISIONS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--blocks", type=int, default=10_000, help="cached blocks per instance")
    given = parser.parse_args()
    print("| instances | cached blocks | bytes/block | decision p50, CPU µs | p99, CPU µs | block events/s |")
    print("|---:|---:|---:|---:|---:|---:|")
    for num_instances in given.instances:
        print(measure(num_instances, given.blocks), flush=True)


def measure(num_instances: int, blocks_per_instance: int) -> str:
    random = Random(0)
    conductor = Conductor(SchedulingSettings(), random)
    prompt = [random.getrandbits(64) for _ in range(PROMPT_BLOCKS)]
    before_bytes = _memory_bytes()
    storing_s = 0.0
    for number in range(num_instances):
        name = f"10.0.{number // 256}.{number % 256}:8000"
        conductor.handle(AddInstance(name, Role.PREFILL if number % 2 else Role.DECODE), 0.0)
        conductor.handle(Probed(name, ProbeOutcome.READY), 0.0)
        blocks: list[BlockKey] = [random.getrandbits(64) for _ in range(blocks_per_instance)]
        began = time.perf_counter()
        conductor.handle(BlocksStored(name, blocks), 0.0)
        storing_s += time.perf_counter() - began
        conductor.handle(BlocksStored(name, prompt[: random.randrange(PROMPT_BLOCKS)]), 0.0)
    num_blocks = conductor.index.num_blocks
    block_bytes = (_memory_bytes() - before_bytes) / max(1, num_blocks)
    durations_s = sorted(_decide(conductor, prompt, number) for number in range(NUM_DECISIONS))
    p50_us, p99_us = (durations_s[int(NUM_DECISIONS * part)] * 1e6 for part in (0.50, 0.99))
    rate = num_instances * blocks_per_instance / storing_s
    return (
        f"| {num_instances} | {num_blocks} | {block_bytes:.0f} | {p50_us:.0f} | {p99_us:.0f} | {rate:.0f} |"
    )


def _decide(conductor: Conductor, prompt: list[BlockKey], number: int) -> float:
    place = Place(f"r{number}", PROMPT_BLOCKS * 32, prompt)
    # CPU time: a decision does not wait for anything, and neighbours on the machine are not its cost.
    began = time.thread_time()
    conductor.handle(place, 100.0 + number)
    return time.thread_time() - began


def _memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
