# SPDX-License-Identifier: Apache-2.0
"""Processor time of recording requests, beside that of serving them, in the same run.

Command: ``python -m bench.recording``. Two gateways, processes of their own, are in front of the same fake
engines: one records into a folder and keeps the latest requests, the other does neither. Both get the same
sessions of agents in turn, and their processor time per request is compared. The difference of two such times
is smaller than what they vary by on a busy machine; so the second table has the time of the recorder alone,
for requests of these lengths, in this process, divided by the first table's time without recording. The goal
is at most 1 %.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from bench.report import measured, options
from mooncake.conductor.messages import Finished, Place, Prefilled
from mooncake.gateway.gateway import Gateway, GatewaySettings
from mooncake.gateway.retries import PlacedRequest
from mooncake.prefix import block_hashes, root_hash, short_key
from tests.agentic_load import Agents
from tests.cluster import wait_for
from tests.gateway.doubles import save_tokenizer
from tests.program import Program, programs

GOAL = 0.01
BLOCK = 32
LENGTHS = (512, 2048, 8192)
ANSWER_TOKENS = 100
CLOCK_TICKS = 100.0
RECORDING, PLAIN = "recording", "plain"


def processor_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def started(start: Callable[..., Program], folder: Path, engines: list[Program], *flags: str) -> Program:
    prefill, decode = (one.address for one in engines)
    gateway = start(
        *("gateway", "--model", str(folder), "--served-model-name", "fake", "--protocol", "workers"),
        *("--prefill", prefill, "--decode", decode, "--block-tokens", "16", *flags),
    )

    def is_ready() -> bool:
        with urllib.request.urlopen(f"{gateway.url}/ready") as answer:
            return bool(answer.status == 200)

    wait_for(is_ready, "the engines", 60)
    return gateway


@dataclasses.dataclass
class Unplaced:
    """The part of an HTTP request that a recorder looks at."""

    @dataclasses.dataclass
    class State:
        client: Any = None

    state: State = dataclasses.field(default_factory=State)


def alone_us(folder: Path, num_tokens: int, num_requests: int) -> float:
    """Processor time of one request in the recorder, in microseconds."""
    gateway = Gateway(GatewaySettings(record_folder=str(folder), block_tokens=BLOCK), None)
    recorder, random = gateway.recorder, Random(0)
    prompt = [random.randrange(1000, 30_000) for _ in range(num_tokens)]
    hashes = block_hashes(prompt, BLOCK, root_hash())
    keys = [short_key(one) for one in hashes]
    output = [random.randrange(1000, 30_000) for _ in range(ANSWER_TOKENS)]
    finished = Finished("r", ANSWER_TOKENS, 0.1, 0.01, True)
    samples = []
    for _ in range(num_requests):
        request = PlacedRequest(gateway.workers, Place("r", num_tokens, keys, "session"))  # type: ignore[arg-type]
        request.prefilled = Prefilled("r", 0.1, 0.2, num_tokens, 0)
        request.prompt_tokens = prompt
        recorder.watch(request, Unplaced(), hashes[-1])
        began = time.process_time_ns()
        request.end(finished, output)
        samples.append((time.process_time_ns() - began) / 1e3)
        asyncio.run(recorder._flush()) if len(samples) % 500 == 0 else None
    return statistics.median(samples)


def main() -> None:
    arguments = options(__doc__, "bench.recording").parse_args()
    rounds, sessions = (2, 20) if arguments.quick else (6, 60)
    with (
        measured("recording", arguments) as result,
        tempfile.TemporaryDirectory() as temporary,
        programs(Path(temporary)) as start,
    ):
        folder = Path(temporary)
        save_tokenizer(folder)
        engine = ("dev", "fake-engine", "--num-blocks", "4096")
        engines = [start(*engine, "--role", role) for role in ("prefill", "decode")]
        gateways = {
            RECORDING: started(start, folder, engines, "--record-folder", str(folder / "traces")),
            PLAIN: started(start, folder, engines, "--recent-requests", "0"),
        }
        found: dict[str, list[float]] = {name: [] for name in gateways}
        for number in range(rounds + 1):
            for name, gateway in gateways.items():
                before = processor_s(gateway.process.pid)
                agents = Agents(gateway.url, sessions, 4, mean_pause_s=0.01, seed=number)
                asyncio.run(agents.run(8))
                used_s = processor_s(gateway.process.pid) - before
                if number:  # the first round warms up
                    found[name].append(used_s / (sessions * 4) * 1e3)
        table = result.table("gateway", ("processor ms a request, median", 3), ("spread", 3))
        for name, values in found.items():
            spread = max(values) - min(values)
            table.add(name, statistics.median(values), spread, samples={"ms": values})
        plain_ms = statistics.median(found[PLAIN])
        alone = result.table("prompt tokens", ("recorder alone us a request", 1), ("of serving %", 2))
        worst = 0.0
        for num_tokens in LENGTHS:
            microseconds = alone_us(folder / "alone", num_tokens, 500 if arguments.quick else 2000)
            share = microseconds / 1e3 / plain_ms
            worst = max(worst, share) if num_tokens <= LENGTHS[1] else worst
            alone.add(num_tokens, microseconds, share * 100)
        result.note(
            f"goal of {GOAL:.0%} up to {LENGTHS[1]} tokens: {'met' if worst <= GOAL else 'missed'} "
            "(serving: as in the first table, prompts of a few hundred tokens, answers not streamed)"
        )


if __name__ == "__main__":
    main()
