# SPDX-License-Identifier: Apache-2.0
"""Fake engines, 2P+2D, behind a gateway process: with each of their protocols, and while they are killed.

An engine without store and gateway gives the reference answers. One of each side is slow, so that there is
time to kill it in the middle of its work.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from tests.cluster import ADMIN_KEY
from tests.gateway.doubles import save_tokenizer
from tests.program import Program, programs

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PATH = "/v1/completions"
PATIENCE_S = 120.0
SLOW = ("--prefill-token-s", "0.02", "--decode-token-s", "0.2")
NUM_TOKENS = 48
"""Tokens of an answer: enough that a slow engine takes ten seconds."""


@dataclass
class Steady:
    """Processes that outlive single tests: the store, an engine of each side, and the reference engine."""

    folder: Path
    start: Callable[..., Program]
    store: Program
    prefill: Program
    decode: Program
    truth: Program

    def engine(self, role: str, *arguments: str) -> Program:
        return self.start("dev", "fake-engine", "--role", role, "--master", self.store.address, *arguments)


@dataclass
class Stack:
    """A gateway, its engines that will be killed, and a client."""

    gateway: Program
    prefill: Program
    decode: Program
    truth: Program
    http: aiohttp.ClientSession

    async def ask(self, program: Program, prompt: list[int], num_tokens: int = 8, **more: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": num_tokens, **more}
        async with self.http.post(program.url + PATH, json=body) as answer:
            found = await answer.json()
            assert answer.status == 200, found
            return found["choices"][0]["text"]

    async def until(self, condition: Callable[[Any], bool], url: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self.http.get(url, headers={"X-API-Key": ADMIN_KEY}) as answer:
                    if condition(await answer.json()):
                        return
                await asyncio.sleep(0.05)


class Stream:
    """A streamed answer, read by a task; ``begun`` is set when its first event is there."""

    def __init__(self, stack: Stack, prompt: list[int]) -> None:
        self.prompt = prompt
        self.decode = self.text = ""
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(stack))

    async def _read(self, stack: Stack) -> None:
        body = {"prompt": self.prompt, "max_tokens": NUM_TOKENS, "stream": True}
        async with stack.http.post(stack.gateway.url + PATH, json=body) as answer:
            assert answer.status == 200, await answer.text()
            self.decode = answer.headers["x-mooncake-decode"]
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                assert not (self.is_done or self.error) or not data, "something came after the end"
                if data == b"[DONE]":
                    self.is_done = True
                elif data:
                    event = json.loads(data)
                    self.error = event.get("error")
                    self.text += "".join(choice["text"] for choice in event.get("choices", []))
                    self.begun.set()


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steady]:
    folder = tmp_path_factory.mktemp("fakes")
    save_tokenizer(folder)
    with programs(folder) as start:
        store = start("daemon", "--capacity-dram", "0.064", "--no-huge-pages")
        prefill, decode = (
            start("dev", "fake-engine", "--role", role, "--master", store.address)
            for role in ("prefill", "decode")
        )
        yield Steady(folder, start, store, prefill, decode, start("dev", "fake-engine"))


@pytest.mark.parametrize("protocol", ["workers", "pool", "sequential", "push"])
async def test_answers_equal_a_single_engine_s_whichever_process_dies(steady: Steady, protocol: str) -> None:
    prefill, decode = steady.engine("prefill", *SLOW), steady.engine("decode", *SLOW)
    gateway = steady.start(
        *("gateway", "--model", str(steady.folder), "--served-model-name", "fake", "--protocol", protocol),
        *("--prefill", steady.prefill.address, "--prefill", prefill.address),
        *("--decode", steady.decode.address, "--decode", decode.address),
        *("--scheduling", "round_robin", "--probe-interval-s", "0.2", "--admin-api-key", ADMIN_KEY),
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2 * PATIENCE_S)) as http:
        stack = Stack(gateway, prefill, decode, steady.truth, http)

        def all_ready(status: Any) -> bool:
            return [row["health"] for row in status["instances"]] == ["ready"] * 4

        await stack.until(all_ready, f"{gateway.url}/status")
        await _equal(stack, [_prompt(protocol, number) for number in range(4)])
        await _a_prefill_dies(stack, [_prompt(protocol, number, 500) for number in range(4, 8)])
        await _a_decode_dies(stack, [_prompt(protocol, number) for number in range(8, 12)], protocol)
        await _equal(stack, [_prompt(protocol, number) for number in range(12, 14)])


def _prompt(protocol: str, number: int, num_tokens: int = 40) -> list[int]:
    """A prompt of token ids, which need no tokenizer."""
    random = Random(f"{protocol} {number}")
    return [random.randrange(256) for _ in range(num_tokens)]


async def _equal(stack: Stack, prompts: list[list[int]]) -> None:
    truth = await asyncio.gather(*(stack.ask(stack.truth, prompt) for prompt in prompts))
    for _ in range(2):
        found = await asyncio.gather(*(stack.ask(stack.gateway, prompt) for prompt in prompts))
        assert found == truth


async def _a_prefill_dies(stack: Stack, prompts: list[list[int]]) -> None:
    """Kill a prefill: nothing has reached a client, so the retry is hidden."""
    truth = await asyncio.gather(*(stack.ask(stack.truth, prompt) for prompt in prompts))
    asking = asyncio.gather(*(stack.ask(stack.gateway, prompt) for prompt in prompts))
    await stack.until(
        lambda health: health["num_running"] > 0 or asking.done(), f"{stack.prefill.url}/health"
    )
    stack.prefill.process.kill()
    assert await asking == truth


async def _a_decode_dies(stack: Stack, prompts: list[list[int]], protocol: str) -> None:
    """Kill a decode: unstreamed answers are retried. A stream continues elsewhere, or reports the failure."""
    truth = [await stack.ask(stack.truth, prompt, NUM_TOKENS) for prompt in prompts]
    streams: list[Stream] = []
    cut: list[Stream] = []
    async with asyncio.timeout(PATIENCE_S):
        while not cut:
            streams += [Stream(stack, prompt) for prompt in prompts]
            for stream in streams:
                await stream.begun.wait()
            cut = [stream for stream in streams if stream.decode == stack.decode.address]
    asking = asyncio.gather(*(stack.ask(stack.gateway, prompt, NUM_TOKENS) for prompt in prompts))
    await stack.until(
        lambda health: health["num_running"] > len(cut) or asking.done(), f"{stack.decode.url}/health"
    )
    stack.decode.process.kill()
    assert await asking == truth
    await asyncio.gather(*(stream.task for stream in streams))
    for number, stream in enumerate(streams):
        whole = truth[number % len(truth)]
        if stream.error is None:
            assert (stream.text, stream.is_done) == (whole, True)
        else:
            assert stream in cut and protocol != "workers"
            assert stream.error["code"] == "engine_lost", stream.error
            assert not stream.is_done and stream.text != whole and whole.startswith(stream.text)
