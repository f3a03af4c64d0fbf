# SPDX-License-Identifier: Apache-2.0
"""The part of the gateway's CPU that finding out why prompts missed takes.

``python -m bench.forensics`` starts a gateway in a process of its own, in front of a worker double, and sends
sessions of agents through it: each turn extends the last one, or has another nonce in its first line, so that
every prompt is compared with a sibling. In the gateway the calls of ``CacheMisses`` are measured by the
thread's CPU clock, and set against the process's CPU seconds in the same time. The reference is the same
load with ``sibling_memory_bytes`` of 0. Explanations are requested at the end, outside of what is measured.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
from aiohttp import web

from bench.report import Table, measured, options
from mooncake.gateway.cache_misses import CacheMisses

OUTPUT_TOKENS = 64
LIMIT = 0.03
SETTINGS: dict[str, Any] = {"model": "smollm2", "protocol": "workers", "admin_api_key": "bench-admin-key"}


# --- worker


def work(started: Connection) -> None:
    """A worker that computes nothing and has everything cached."""

    async def ready(request: web.Request) -> web.Response:
        return web.json_response({"status": "ready"})

    async def models(request: web.Request) -> web.Response:
        card = {"id": "smollm2", "object": "model", "created": 1, "max_model_len": 1 << 20}
        return web.json_response({"object": "list", "data": [card]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        base = {"id": "x", "object": "text_completion", "created": 1, "model": "smollm2"}
        for number in range(OUTPUT_TOKENS):
            finish = "length" if number == OUTPUT_TOKENS - 1 else None
            choice = {"index": 0, "text": " word", "finish_reason": finish, "token_ids": [1000 + number]}
            await response.write(b"data: " + json.dumps({**base, "choices": [choice]}).encode() + b"\n\n")
        num_tokens = len(body["prompt"])
        usage = {
            "prompt_tokens": num_tokens,
            "completion_tokens": OUTPUT_TOKENS,
            "total_tokens": num_tokens + OUTPUT_TOKENS,
            "prompt_tokens_details": {"cached_tokens": num_tokens // 2},
        }
        await response.write(
            b"data: " + json.dumps({**base, "choices": [], "usage": usage}).encode() + b"\n\n"
        )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", ready)
        app.router.add_get("/ready", ready)
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


# --- gateway


def front(pipe: Connection, worker_port: int, memory_bytes: int) -> None:
    """A gateway that answers ``"cpu"`` with its CPU seconds and those of ``CacheMisses``."""
    spent = 0.0

    def clocked(name: str) -> None:
        method = getattr(CacheMisses, name)

        def call(*args: Any, **fields: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            try:
                return method(*args, **fields)
            finally:
                spent += time.thread_time() - began

        setattr(CacheMisses, name, call)

    for name in ("tokens_arrived", "ended"):
        clocked(name)

    from mooncake.gateway.app import create_app, load_tokenizer
    from mooncake.gateway.gateway import Gateway, GatewaySettings
    from mooncake.http.server import HttpServer, listen

    async def serve() -> None:
        settings = GatewaySettings(
            **SETTINGS, decode=(f"127.0.0.1:{worker_port}",), sibling_memory_bytes=memory_bytes
        )
        server = HttpServer(create_app(Gateway(settings, load_tokenizer(settings))), listen("127.0.0.1", 0))
        await server.start()
        pipe.send(server.port)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv) == "cpu":
            pipe.send((time.process_time(), spent))
        await server.close()

    asyncio.run(serve())


# --- load

WORDS = (
    "the agent reads a file before it changes anything reports every failed command with output tests must "
    "pass code stays small typed documented branch commit review path module function argument value"
)


def prose(random_: random.Random, num_words: int) -> str:
    return " ".join(random_.choices(WORDS.split(), k=num_words))


async def send(url: str, has_nonce: bool, num_words: int, sessions: int, turns: int) -> int:
    """Run the sessions one after another; returns the number of requests."""
    random_ = random.Random(1)
    system = prose(random_, num_words // 2)
    async with aiohttp.ClientSession() as client:
        for number in range(sessions):
            history: list[dict[str, str]] = []
            body = prose(random_, num_words // 2)
            for _ in range(turns):
                head = f"x-request-nonce: {random_.getrandbits(64):016x}\n" if has_nonce else ""
                history.append({"role": "user", "content": body if not history else prose(random_, 50)})
                messages = [{"role": "system", "content": head + system}, *history]
                fields = {"messages": messages, "max_tokens": OUTPUT_TOKENS, "stream": True}
                headers = {"X-Session-ID": f"session-{number}"}
                async with client.post(
                    url + "/v1/chat/completions", json=fields, headers=headers
                ) as response:
                    content = await response.read()
                    assert response.status == 200, content
                history.append({"role": "assistant", "content": prose(random_, OUTPUT_TOKENS)})
    return sessions * turns


def measure(table: Table, name: str, has_nonce: bool, num_words: int, sessions: int, turns: int) -> None:
    context = multiprocessing.get_context("spawn")
    whole_s: list[float] = []
    for memory_bytes in (0, 64 << 20):
        worker_pipe, worker_end = context.Pipe()
        worker = context.Process(target=work, args=(worker_end,), daemon=True)
        worker.start()
        pipe, end = context.Pipe()
        gateway = context.Process(target=front, args=(end, worker_pipe.recv(), memory_bytes), daemon=True)
        gateway.start()
        url = f"http://127.0.0.1:{pipe.recv()}"

        def cpu(pipe: Connection = pipe) -> tuple[float, float]:
            pipe.send("cpu")
            found: tuple[float, float] = pipe.recv()
            return found

        async def load(url: str = url) -> tuple[int, tuple[float, float], tuple[float, float]]:
            async with aiohttp.ClientSession() as client, asyncio.timeout(120):
                while True:  # the gateway's probes of its worker are in another process
                    async with client.get(url + "/ready") as response:
                        if response.status == 200:
                            break
                    await asyncio.sleep(0.1)
            await send(url, has_nonce, num_words, 1, 2)  # warms up
            before = cpu()
            num = await send(url, has_nonce, num_words, sessions, turns)
            return num, before, cpu()

        num, before, after = asyncio.run(load())
        pipe.send("end")
        gateway.join(20)
        worker.kill()
        whole, own = after[0] - before[0], after[1] - before[1]
        whole_s.append(whole)
        share = own / whole
        table.add(
            name,
            "on" if memory_bytes else "off",
            num,
            whole / num * 1000,
            own / num * 1000,
            share * 100,
            "yes" if share <= LIMIT else "NO",
        )


def main() -> None:
    parser = options(__doc__, "bench.forensics")
    given = parser.parse_args()
    sessions = 2 if given.quick else 12
    with measured("forensics", given) as result:
        table = result.table(
            "load",
            "memory of prompts",
            "requests",
            ("gateway's CPU a request, ms", 2),
            ("of it for misses, ms", 3),
            ("share, %", 2),
            "at most 3 %",
            title="CPU of the gateway",
        )
        for name, has_nonce, num_words in (
            ("sessions that grow, 2k words", False, 2_000),
            ("a nonce in each first line, 2k words", True, 2_000),
            ("sessions that grow, 12k words", False, 12_000),
            ("a nonce in each first line, 12k words", True, 12_000),
        ):
            measure(table, name, has_nonce, num_words, sessions, 6)


if __name__ == "__main__":
    main()
