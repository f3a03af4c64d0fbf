# SPDX-License-Identifier: Apache-2.0
"""A gateway with worker doubles and the console, served as ``mooncake gateway`` serves it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncake.console.gateway_site import gateway_pages
from mooncake.gateway.app import create_app, create_operator_app
from mooncake.gateway.gateway import Gateway, GatewaySettings
from mooncake.http.server import HttpServer, listen
from mooncake.inference.tokenizer import Tokenizer
from tests.gateway.conftest import ADMIN_KEY, Stack, tokenizer
from tests.gateway.doubles import BLOCK_TOKENS, doubles

__all__ = ["tokenizer"]

CLIENT_KEYS = {"alice": "alice-key-0123456789", "bob": "bob-key-01234567890"}


@dataclass
class Browser:
    """Requests with the cookies of one browser; they come from this host unless ``host`` says otherwise."""

    session: aiohttp.ClientSession
    url: str
    headers: dict[str, str] = field(default_factory=dict)

    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, decoded body, headers."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {
            **({} if data is None else {"Content-Type": "application/json"}),
            **self.headers,
            **(headers or {}),
        }
        async with self.session.request(
            method, self.url + path, data=data, headers=fields, allow_redirects=False
        ) as answer:
            content = await answer.read()
            is_json = answer.headers.get("Content-Type", "").startswith("application/json")
            return answer.status, json.loads(content) if is_json else content, answer.headers

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        status, body, _ = await self.send(
            "GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        return status, body

    async def login(self, key: str) -> tuple[int, str]:
        """Log in; the status, and the value that changes must carry."""
        status, _, headers = await self.send("POST", "/console/session", {"key": key})
        if status != 200:
            return status, ""
        self.headers["Cookie"] = headers["Set-Cookie"].partition(";")[0]
        found = await self.get("/console/session.json")
        return status, found[1]["csrf"]


@dataclass
class ConsoleStack(Stack):
    """A running gateway with its console."""

    def browser(self, **headers: str) -> Browser:
        return Browser(self.session, self.url, headers)

    def stranger(self) -> Browser:
        """A browser that is not on this host, as far as the console can see."""
        return self.browser(Host="console.example")


@contextlib.asynccontextmanager
async def serving(tokenizer: Tokenizer, **settings: Any) -> AsyncIterator[ConsoleStack]:
    async with doubles(1, 1) as (prefill, decode):
        fields: dict[str, Any] = {
            "model": "/somewhere/tiny",
            "prefill": tuple(one.address for one in prefill),
            "decode": tuple(one.address for one in decode),
            "admin_api_key": ADMIN_KEY,
            "block_tokens": BLOCK_TOKENS,
            "probe_interval_s": 0.1,
            "slow_start_s": 0.0,
        }
        gateway = Gateway(GatewaySettings(**{**fields, **settings}), tokenizer)
        app, operator_app = create_app(gateway), create_operator_app(gateway)
        server = HttpServer(app, listen("127.0.0.1", 0), grace_s=1.0)
        async with gateway_pages(gateway, app, operator_app), aiohttp.ClientSession() as session:
            await server.start()
            url = f"http://127.0.0.1:{server.port}"
            stack = ConsoleStack(gateway, [*prefill], [*decode], url, session)
            try:
                await stack.until(lambda health: [*health.values()] == ["ready"] * 2)
                yield stack
            finally:
                await server.close()


@pytest.fixture
async def console(tokenizer: Tokenizer) -> AsyncIterator[ConsoleStack]:
    async with serving(tokenizer) as stack:
        yield stack


@pytest.fixture
async def shared(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[ConsoleStack]:
    """A gateway whose clients have keys."""
    path = tmp_path / "keys.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"keys": [{"name": name, "key": key} for name, key in CLIENT_KEYS.items()]}))
    async with serving(tokenizer, api_keys_file=str(path)) as stack:
        yield stack
