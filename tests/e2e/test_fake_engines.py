"""Fake engines, two for prefill and two for decode, behind a gateway process: with each protocol, and killed.

An engine without store and gateway computes the expected answers. One engine of each side is slow, so that it
can be killed in the middle of its work.
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
"""Length of a long answer, for which a slow engine takes ten seconds."""


@dataclass
class Steady:
    """Processes shared by the tests: the store, an engine of each side, and one for the expected answers."""

    folder: Path
    start: Callable[..., Program]
    store: Program
    prefill: Program
    decode: Program
    reference: Program

    def engine(self, role: str, *flags: str) -> Program:
        return self.start("dev", "fake-engine", "--role", role, "--master", self.store.address, *flags)


@dataclass
class Deployment:
    """A gateway, those of its engines that will be killed, and a client."""

    gateway: Program
    prefill: Program
    decode: Program
    reference: Program
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
    """A streamed answer, read by a task; ``begun`` is set when its first event has arrived."""

    def __init__(self, deployment: Deployment, prompt: list[int]) -> None:
        self.prompt = prompt
        self.decode = self.text = ""
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(deployment))

    async def _read(self, deployment: Deployment) -> None:
        body = {"prompt": self.prompt, "max_tokens": NUM_TOKENS, "stream": True}
        async with deployment.http.post(deployment.gateway.url + PATH, json=body) as answer:
            assert answer.status == 200, await answer.text()
            self.decode = answer.headers["x-mooncake-decode"]
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                assert not (self.is_done or self.error) or not data, "data after the end of the stream"
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
async def test_answers_equal_those_of_a_single_engine_whichever_dies(steady: Steady, protocol: str) -> None:
    prefill, decode = steady.engine("prefill", *SLOW), steady.engine("decode", *SLOW)
    gateway = steady.start(
        *("gateway", "--model", str(steady.folder), "--served-model-name", "fake", "--protocol", protocol),
        *("--prefill", steady.prefill.address, "--prefill", prefill.address),
        *("--decode", steady.decode.address, "--decode", decode.address),
        *("--scheduling", "round_robin", "--probe-interval-s", "0.2", "--admin-api-key", ADMIN_KEY),
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2 * PATIENCE_S)) as http:
        deployment = Deployment(gateway, prefill, decode, steady.reference, http)

        def all_ready(status: Any) -> bool:
            return [row["health"] for row in status["instances"]] == ["ready"] * 4

        await deployment.until(all_ready, f"{gateway.url}/status")
        await _equal(deployment, [_prompt(protocol, number) for number in range(4)])
        await _a_prefill_dies(deployment, [_prompt(protocol, number, 500) for number in range(4, 8)])
        await _a_decode_dies(deployment, [_prompt(protocol, number) for number in range(8, 12)], protocol)
        await _equal(deployment, [_prompt(protocol, number) for number in range(12, 14)])


def _prompt(protocol: str, number: int, num_tokens: int = 40) -> list[int]:
    """Token ids, which need no tokenizer."""
    random = Random(f"{protocol} {number}")
    return [random.randrange(256) for _ in range(num_tokens)]


async def _equal(deployment: Deployment, prompts: list[list[int]]) -> None:
    reference = await asyncio.gather(*(deployment.ask(deployment.reference, prompt) for prompt in prompts))
    for _ in range(2):
        found = await asyncio.gather(*(deployment.ask(deployment.gateway, prompt) for prompt in prompts))
        assert found == reference


async def _a_prefill_dies(deployment: Deployment, prompts: list[list[int]]) -> None:
    """A prefill engine dies before any output reached a client: no client notices."""
    reference = await asyncio.gather(*(deployment.ask(deployment.reference, prompt) for prompt in prompts))
    answers = asyncio.gather(*(deployment.ask(deployment.gateway, prompt) for prompt in prompts))
    await deployment.until(
        lambda health: health["num_running"] > 0 or answers.done(), f"{deployment.prefill.url}/health"
    )
    deployment.prefill.process.kill()
    assert await answers == reference


async def _a_decode_dies(deployment: Deployment, prompts: list[list[int]], protocol: str) -> None:
    """Clients of whole answers do not notice. A stream goes on at another engine, or ends with an error."""
    reference = [await deployment.ask(deployment.reference, prompt, NUM_TOKENS) for prompt in prompts]
    streams: list[Stream] = []
    cut: list[Stream] = []
    async with asyncio.timeout(PATIENCE_S):
        while not cut:
            streams += [Stream(deployment, prompt) for prompt in prompts]
            for stream in streams:
                await stream.begun.wait()
            cut = [stream for stream in streams if stream.decode == deployment.decode.address]
    answers = asyncio.gather(*(deployment.ask(deployment.gateway, prompt, NUM_TOKENS) for prompt in prompts))
    await deployment.until(
        lambda health: health["num_running"] > len(cut) or answers.done(), f"{deployment.decode.url}/health"
    )
    deployment.decode.process.kill()
    assert await answers == reference
    await asyncio.gather(*(stream.task for stream in streams))
    for number, stream in enumerate(streams):
        whole = reference[number % len(reference)]
        if stream.error is None:
            assert (stream.text, stream.is_done) == (whole, True)
        else:
            assert stream in cut and protocol != "workers"
            assert stream.error["code"] == "engine_lost", stream.error
            assert not stream.is_done and stream.text != whole and whole.startswith(stream.text)
