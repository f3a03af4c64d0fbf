# SPDX-License-Identifier: Apache-2.0
"""What traces add to a request at the gateway: off, kept in memory, and sent to a collector as well.

    python -m bench.tracing [--requests 400] [--rounds 9]

A gateway with its conductor, two worker doubles that answer at once and one client share a process; the
collector is a process of its own. The kinds take turns in every round, so that other load on the machine
affects all of them. Processor time per request is that of the whole process, and its reference is ``off`` of
the same run; ``off again`` is the same thing once more: what differs between the two is noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench.report import measured, options
from mooncake.inference.tokenizer import Tokenizer
from mooncake.tracing import Tracing, TracingSettings, install_tracing, tracing_of
from tests.gateway.conftest import running
from tests.gateway.doubles import save_tokenizer
from tests.otlp_collector import collector

KINDS = ("off", "kept", "kept and sent", "off again")
KEPT = 256


def collect(pipe: Connection) -> None:
    with collector() as found:
        pipe.send(found.url)
        with contextlib.suppress(EOFError):
            while pipe.recv():
                pipe.send(len(found.spans))


def tracing_for(kind: str, url: str) -> Tracing | None:
    if kind.startswith("off"):
        return None
    return tracing_of(TracingSettings(requests=KEPT, endpoint=url if kind == "kept and sent" else ""))


async def seconds_per_request(tokenizer: Tokenizer, number: int) -> tuple[float, float]:
    """(processor time, time) of one of ``number`` requests that follow each other."""
    async with running(tokenizer, 1, 1) as stack:
        prompt = [*range(48)]
        for _ in range(20):
            await stack.complete(prompt, max_tokens=4)
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(number):
            await stack.complete(prompt, max_tokens=4)
        return (time.process_time() - cpu) / number, (time.perf_counter() - wall) / number


def main() -> None:
    parser = options(__doc__, "bench.tracing")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as folder, measured("tracing", arguments) as result:
        save_tokenizer(Path(folder))
        tokenizer = Tokenizer(Path(folder))
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,), daemon=True)
        process.start()
        url: str = ours.recv()
        cpu_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
        wall_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                tracing = tracing_for(kind, url)
                install_tracing(tracing)
                found = asyncio.run(seconds_per_request(tokenizer, arguments.requests))
                install_tracing(None)
                if tracing is not None:
                    tracing.close()
                cpu_s[kind].append(found[0])
                wall_s[kind].append(found[1])
        ours.send(True)
        num_spans: int = ours.recv()
        process.terminate()
        table = result.table(
            "traces",
            ("processor time per request, us", 0),
            ("more than off, us", 0),
            ("more than off, %", 1),
            ("requests/s", 0),
            title="one request after the other through a gateway",
        )
        off_s = statistics.median(cpu_s["off"])
        for kind in KINDS:
            cpu, wall = statistics.median(cpu_s[kind]), statistics.median(wall_s[kind])
            more_s = cpu - off_s
            samples = {"cpu_s": cpu_s[kind], "wall_s": wall_s[kind]}
            table.add(kind, 1e6 * cpu, 1e6 * more_s, 100 * more_s / off_s, 1 / wall, samples=samples)
        result.note(f"the collector got {num_spans} spans")


if __name__ == "__main__":
    main()
