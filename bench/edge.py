# SPDX-License-Identifier: Apache-2.0
"""The gateway under peers that send much, little, or read nothing: the effect on other clients.

``python -m bench.edge`` starts a gateway (with ``ulimit -n 256``) in front of one worker double, attacks it
in each way for a few seconds, and prints the latency of ``GET /health`` for another client meanwhile, the
peak of the gateway's memory, and how many slots are taken when all requests' deadlines have passed. The
reference is the same gateway without an attack.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from bench.report import Result, Table, measured, options
from mooncake.cli.ports import free_ports
from tests.gateway.doubles import WorkerDouble, save_tokenizer

FILES = 256
TIMEOUT_S = 4.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Endless(WorkerDouble):
    """Streams large pieces for as long as the client reads them."""

    async def _event(self, response: Any, fields: dict[str, Any]) -> None:
        if fields["choices"]:
            fields["choices"][0]["text"] = "x" * 65536
        await super()._event(response, fields)


class Measured:
    """A gateway in a process of its own."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.port, self.admin = free_ports("127.0.0.1", 2, Random())
        command = [
            sys.executable,
            "-m",
            "mooncake",
            "gateway",
            "--model",
            str(folder),
            "--port",
            str(self.port),
        ]
        command += ["--prefill", worker, "--decode", worker, "--protocol", "workers"]
        command += ["--metrics-port", str(self.admin), "--request-timeout-s", str(TIMEOUT_S)]
        command += ["--max-in-flight", "16", "--log-level", "error"]

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))

        self.process = subprocess.Popen(command, preexec_fn=limited)

    def rss_mib(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def health_s(self) -> float:
        began = time.perf_counter()
        reader, writer = await self.connect()
        writer.write(HEALTH)
        answer = await reader.read()
        writer.close()
        if b"200 OK" not in answer:
            raise ConnectionError("it did not answer")
        return time.perf_counter() - began

    async def in_flight(self) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.admin)
        writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return int(json.loads(answer.partition(b"\r\n\r\n")[2])["requests_in_flight"])


async def posting(gateway: Measured, body: bytes) -> None:
    """One client that sends this body again and again."""
    while True:
        try:
            reader, writer = await gateway.connect()
            writer.write(HEAD % len(body))
            for start in range(0, len(body), 1 << 18):
                writer.write(body[start : start + (1 << 18)])
                await writer.drain()
            await reader.readline()
            writer.close()
        except OSError:
            await asyncio.sleep(0.01)


async def holding(gateway: Measured, start: bytes, count: int) -> None:
    """``count`` connections that send ``start`` and nothing more; those that are closed are opened again."""

    async def one() -> None:
        while True:
            try:
                reader, writer = await gateway.connect()
                writer.write(start)
                await reader.read()
                writer.close()
            except OSError:
                pass
            await asyncio.sleep(1.0)

    await asyncio.gather(*(one() for _ in range(count)))


async def not_reading(gateway: Measured, count: int) -> None:
    body = json.dumps({"prompt": [20, 21], "max_tokens": 60, "stream": True}).encode()
    held = []
    for _ in range(count):
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect(("127.0.0.1", gateway.port))
        opened.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        held.append(opened)
    try:
        await asyncio.Event().wait()
    finally:
        for opened in held:
            opened.close()


async def row(
    table: Table, name: str, gateway: Measured, attack: Callable[[], Awaitable[None]], seconds: float
) -> None:
    # In a process of its own, or the measuring client would wait for the attackers.
    attacking = get_context("fork").Process(target=lambda: asyncio.run(attack()), daemon=True)  # type: ignore[arg-type]
    attacking.start()
    await asyncio.sleep(0.3)
    took, failed, most = [], 0, gateway.rss_mib()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        try:
            took.append(await gateway.health_s())
        except (OSError, ConnectionError):
            failed += 1
        most = max(most, gateway.rss_mib())
        await asyncio.sleep(0.01)
    slots = await gateway.in_flight()
    attacking.kill()
    attacking.join()
    took.sort()
    at = [took[min(len(took) - 1, int(len(took) * share))] * 1000 for share in (0.5, 0.99, 1.0)]
    table.add(name, *at, len(took), failed, most, slots, samples={"health_s": took})


async def main(seconds: float, result: Result) -> None:
    worker = Endless()
    await worker.start()
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        gateway = Measured(Path(folder), worker.address)
        try:
            for _ in range(600):
                try:
                    await gateway.health_s()
                    break
                except (OSError, ConnectionError):
                    await asyncio.sleep(0.1)
            ids = json.dumps({"prompt": [12345] * 4_000_000}).encode()
            below = json.dumps({"prompt": [12345] * 1_100_000}).encode()
            text = json.dumps({"prompt": "w20 w21 " * 1_000_000}).encode()
            table = result.table(
                "attack",
                ("p50, ms", 1),
                ("p99, ms", 1),
                ("max, ms", 1),
                ("answers", 0),
                ("failed", 0),
                ("memory, MiB", 0),
                ("slots still taken", 0),
                title=f"/health for another client; ulimit -n {FILES}, requests end after {TIMEOUT_S:g} s",
            )

            def bodies(body: bytes) -> Callable[[], Awaitable[None]]:
                return lambda: many(2, lambda: posting(gateway, body))

            def connections(start: bytes) -> Callable[[], Awaitable[None]]:
                return lambda: holding(gateway, start, 1000)

            attacks = [
                ("no attack (reference)", lambda: asyncio.sleep(seconds)),
                (f"bodies of {len(ids) >> 20} MiB, 2 clients", bodies(ids)),
                (f"token ids of {len(below) / 2**20:.1f} MiB, 2 clients", bodies(below)),
                (f"texts of {len(text) / 2**20:.1f} MiB, 2 clients", bodies(text)),
                ("1000 idle connections", connections(b"")),
                ("1000 half headers", connections(b"GET /health HTTP/1.1\r\nHost")),
                ("1000 half bodies", connections(HEAD % 1000 + b"{")),
                ("16 readers that read nothing", lambda: not_reading(gateway, 16)),
            ]
            for name, attack in attacks:
                await row(table, name, gateway, attack, seconds)
        finally:
            gateway.process.terminate()
            gateway.process.wait(20)
            await worker.stop()


async def many(count: int, one: Callable[[], Awaitable[None]]) -> None:
    await asyncio.gather(*(one() for _ in range(count)))


if __name__ == "__main__":
    parser = options(__doc__, "bench.edge")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each; longer than a request may take")
    arguments = parser.parse_args()
    with measured("edge", arguments) as result:
        asyncio.run(main(arguments.seconds, result))
