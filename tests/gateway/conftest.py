# SPDX-License-Identifier: Apache-2.0
"""A gateway with worker doubles; tests use it over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

from mooncake.conductor.server import ConductorService
from mooncake.gateway.app import create_app
from mooncake.gateway.gateway import Gateway, GatewaySettings
from mooncake.http.server import HttpServer, listen
from mooncake.inference.tokenizer import Tokenizer
from tests.gateway.doubles import BLOCK_TOKENS, WorkerDouble, doubles, save_tokenizer

ADMIN_KEY = "correct-horse"


@dataclass
class Stack:
    """A running gateway with its workers and a client."""

    gateway: Gateway
    prefill: list[WorkerDouble]
    decode: list[WorkerDouble]
    url: str
    session: aiohttp.ClientSession

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, JSON body and headers (lower case)."""
        data = body if isinstance(body, bytes) else aiohttp.JsonPayload(body)
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            found = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), found

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Get with an operator's key, unless ``headers`` are given."""
        headers = {"X-API-Key": ADMIN_KEY} if headers is None else headers
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any, max_tokens: int = 6, **fields: Any) -> dict[str, Any]:
        """The body of a completion that must succeed."""
        body = {"prompt": prompt, "max_tokens": max_tokens, **fields}
        status, answer, headers = await self.post("/v1/completions", body)
        assert status == 200, answer
        return {**answer, "headers": headers}

    async def stream(self, prompt: Any, max_tokens: int = 6, **fields: Any) -> Streamed:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "return_token_ids": True,
            **fields,
        }
        streamed = Streamed()
        async with self.session.post(self.url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            streamed.headers = {name.lower(): value for name, value in response.headers.items()}
            streamed.events = (await response.read()).decode().strip().split("\n\n")
        return streamed

    def posted(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """The events that the conductor gets from now on without a reply; filled as they come."""
        events: list[Any] = []
        post = self.gateway.scheduling.post

        def noted(event: Any) -> None:
            events.append(event)
            post(event)

        monkeypatch.setattr(self.gateway.scheduling, "post", noted)
        return events

    async def health(self) -> dict[str, str]:
        return {row.instance: row.health for row in await self.gateway.scheduling.status()}

    async def until(self, condition: Callable[[dict[str, str]], bool]) -> None:
        """Wait until the instances' health fulfils ``condition``."""
        async with asyncio.timeout(10):
            while not condition(await self.health()):  # noqa: ASYNC110 (the state is in another process)
                await asyncio.sleep(0.01)


StackT = TypeVar("StackT", bound=Stack)


@dataclass
class Streamed:
    headers: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        import json

        assert self.events[-1] == "data: [DONE]", self.events[-1]
        return [json.loads(event.removeprefix("data: ")) for event in self.events[:-1]]

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        found = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [choice for choice in found if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(choice["text"] for choice in self.choices(index))

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for choice in self.choices(index) for token in choice["token_ids"]]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tokenizer(folder)
    return Tokenizer(folder)


@contextlib.asynccontextmanager
async def opened(
    kind: type[StackT], prefill: Sequence[Any], decode: Sequence[Any], tokenizer: Any, /, **settings: Any
) -> AsyncIterator[StackT]:
    """A gateway whose running instances are all ready; checks that no answers are left in progress."""
    fields: dict[str, Any] = {
        "model": "/somewhere/tiny",
        "prefill": tuple(one.address for one in prefill),
        "decode": tuple(one.address for one in decode),
        "admin_api_key": ADMIN_KEY,
        "block_tokens": BLOCK_TOKENS,
        "probe_interval_s": 0.1,
        "suspect_probe_interval_s": 0.05,
        "slow_start_s": 0.0,
        "scheduling": "round_robin",
    }
    gateway = Gateway(GatewaySettings(**{**fields, **settings}), tokenizer)
    server = HttpServer(create_app(gateway), listen("127.0.0.1", 0), grace_s=1.0)
    await server.start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        stack = kind(gateway, [*prefill], [*decode], f"http://127.0.0.1:{server.port}", session)
        num_instances = len(prefill) + len(decode)
        try:
            await stack.until(lambda health: [*health.values()] == ["ready"] * num_instances)
            yield stack
            async with asyncio.timeout(5):  # whatever the test did
                while gateway.limiter.num_in_flight:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            if isinstance(gateway.scheduling, ConductorService):
                gateway.scheduling.core.check()
                assert not any(row.num_requests for row in await gateway.scheduling.status())
        finally:
            await session.close()
            await server.close()


@contextlib.asynccontextmanager
async def running(
    tokenizer: Tokenizer, num_prefill: int = 1, num_decode: int = 2, **settings: Any
) -> AsyncIterator[Stack]:
    """A gateway with worker doubles."""
    async with (
        doubles(num_prefill, num_decode) as (prefill, decode),
        opened(Stack, prefill, decode, tokenizer, **settings) as stack,
    ):
        yield stack


@pytest.fixture
async def stack(tokenizer: Tokenizer) -> AsyncIterator[Stack]:
    async with running(tokenizer) as stack:
        yield stack
