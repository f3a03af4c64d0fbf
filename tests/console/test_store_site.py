# SPDX-License-Identifier: Apache-2.0
"""The console of a store: at a real master's own HTTP side, and behind a gateway."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncake.cli.store_roles import load_pages
from mooncake.console import store_site
from mooncake.inference.tokenizer import Tokenizer
from mooncake.security import Identity, SecuritySettings, install_identity
from mooncake.security.keys import format_secret
from mooncake.store import Store
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.server import running
from mooncake.store.settings import MasterSettings
from mooncake.transfer import TransferEngine
from tests.console.conftest import Browser, serving
from tests.gateway.conftest import ADMIN_KEY

KEYS = [f"kv/0123456789abcdef/{number:064x}" for number in range(5)]


@dataclass
class RunningStore:
    """A master with one node, five objects, and a browser on this host."""

    browser: Browser
    master: str


@pytest.fixture
async def store() -> AsyncIterator[RunningStore]:
    settings = MasterSettings(port=0, admin_api_key=ADMIN_KEY)
    async with running(settings, load_pages) as server, aiohttp.ClientSession() as session:
        master = f"127.0.0.1:{server.port}"
        node = Node(NodeSettings(master=master, pool_size_bytes=8 << 20))
        await node.start()
        await node.mounted.wait()
        await asyncio.to_thread(_fill, master)
        try:
            yield RunningStore(Browser(session, f"http://{server.web_address}"), master)
        finally:
            await node.close()


def _fill(master: str) -> None:
    with TransferEngine() as engine, Store(master, engine) as client:
        for key in KEYS:
            assert client.put(key, b"x" * 4096) is None
        for _ in range(3):
            assert client.get(KEYS[2]) is not None


async def test_contents_are_those_of_the_master(store: RunningStore) -> None:
    status, found = await store.browser.get("/console/store.json")
    assert status == 200
    assert found["num_objects"] == len(KEYS) == found["contents"]["num_read"]
    assert not found["contents"]["is_sample"]
    [row] = found["contents"]["rows"]
    assert (row["tenant"], row["model"], row["tier"], row["num_objects"]) == (
        "default",
        "kv/0123456789abcdef",
        "memory",
        len(KEYS),
    )
    assert row["size_bytes"] == len(KEYS) * 4096
    assert found["contents"]["prefixes"][0]["key"] == KEYS[2]
    assert found["counts"]["puts"] == len(KEYS)
    assert sum(one["num_objects"] for one in found["segments"]) >= len(KEYS), "and reservations"
    assert {one["tenant"]: one["num_objects"] for one in found["tenants"]} == {"default": len(KEYS)}


async def test_a_key_has_its_story(store: RunningStore) -> None:
    status, found = await store.browser.get(f"/console/key.json?key={KEYS[2]}")
    assert status == 200 and found["object"]["size_bytes"] == 4096 and found["object"]["num_uses"] == 3
    assert any("readable" in line for line in found["story"])
    status, found = await store.browser.get("/console/key.json?key=unknown")
    assert status == 200 and found["object"] is None and found["story"] == []


async def test_pages_of_a_gateway_are_not_there(store: RunningStore) -> None:
    _, found = await store.browser.get("/console/session.json")
    assert found["views"] == ["store", "key"]
    for path in ("overview", "overview.json", "requests.json"):
        status, _ = await store.browser.get(f"/console/{path}")
        assert status == 404, path


async def test_admin_pins_unpins_and_drains(store: RunningStore) -> None:
    browser = store.browser
    body = {"key": KEYS[0]}
    assert (await browser.send("POST", "/console/actions/pin", body))[0] == 403
    _, csrf = await browser.login(ADMIN_KEY)
    headers = {"X-CSRF-Token": csrf}

    async def pinned() -> object:
        return (await browser.get(f"/console/key.json?key={KEYS[0]}"))[1]["object"]["pinned_s"]

    assert (await browser.send("POST", "/console/actions/pin", body, headers))[0] == 200
    assert await pinned() is None, "pinned hard"
    assert (await browser.send("POST", "/console/actions/unpin", body, headers))[0] == 200
    assert await pinned() == 0.0
    status, found, _ = await browser.send("POST", "/console/actions/pin", {"key": "unknown"}, headers)
    assert status == 404 and "unknown" in found["error"]["message"]
    for action in ("pin", "unpin"):
        for wrong in ({"key": "\ud800"}, {"key": KEYS[0], "tenant": "\ud800"}, {"key": KEYS[0], "tenant": 5}):
            status, _, _ = await browser.send("POST", f"/console/actions/{action}", wrong, headers)
            assert status == 400, wrong
    status, found, _ = await browser.send("POST", "/console/actions/pin", {"key": 5}, headers)
    assert status == 400
    status, found, _ = await browser.send(
        "POST", "/console/actions/drain_segment", {"segment": "none"}, headers
    )
    assert status in (404, 503) and found["error"]["message"]
    status, _, _ = await browser.send("POST", "/console/actions/drain", {}, headers)
    assert status == 404, "a store has no instances"


async def test_a_pin_whose_span_cannot_be_read_changes_nothing(store: RunningStore) -> None:
    browser = store.browser
    _, csrf = await browser.login(ADMIN_KEY)
    headers = {"X-CSRF-Token": csrf}

    async def pin(seconds: object) -> tuple[int, Any, object]:
        body = {"key": KEYS[0], "seconds": seconds}
        status, found, _ = await browser.send("POST", "/console/actions/pin", body, headers)
        return status, found, (await browser.get(f"/console/key.json?key={KEYS[0]}"))[1]["object"]["pinned_s"]

    assert (await pin(None))[0] == 200
    unreadable: list[object] = ["abc", -5, 0, True, [], math.inf, math.nan, 10**400]
    for wrong in unreadable:
        status, found, pinned_s = await pin(wrong)
        assert (status, found["error"]["code"]) == (400, "invalid_value"), wrong
        assert pinned_s is None, f"{wrong} must leave the pin as it was"
    spans: list[float | str] = [0.12345678901, "30", 30, 1e16]
    for right in spans:
        status, _, pinned_s = await pin(right)
        assert status == 200 and isinstance(pinned_s, float) and pinned_s <= float(right), right
    assert isinstance(pinned_s, float) and pinned_s > 1000, "as long as a master allows"


async def test_a_stranger_needs_the_admin_key(store: RunningStore) -> None:
    stranger = Browser(store.browser.session, store.browser.url, {"Host": "console.example"})
    for path in ("store.json", "key.json?key=x", "session.json"):
        assert (await stranger.get(f"/console/{path}"))[0] == 401
    assert (await stranger.login(ADMIN_KEY))[0] == 200
    assert (await stranger.get("/console/store.json"))[0] == 200


async def test_where_the_cluster_has_a_credential_no_address_replaces_the_key(tmp_path: Path) -> None:
    """A proxy on the master's host that names neither itself nor its client looks like a local process."""
    file = tmp_path / "cluster.key"
    file.write_text(format_secret(b"s" * 32))
    file.chmod(0o600)
    settings = MasterSettings(port=0, admin_api_key=ADMIN_KEY)
    install_identity(Identity(SecuritySettings(cluster_key_file=str(file))))
    try:
        async with running(settings, load_pages) as server, aiohttp.ClientSession() as session:
            browser = Browser(session, f"http://{server.web_address}")
            for path in ("store.json", "key.json?key=x", "session.json"):
                assert (await browser.get(f"/console/{path}"))[0] == 401
            assert (await browser.login(ADMIN_KEY))[0] == 200
            assert (await browser.get("/console/store.json"))[0] == 200
    finally:
        install_identity(None)


async def test_paths_that_the_console_guards_itself_are_listed(store: RunningStore) -> None:
    """Where a cluster has a credential, only listed paths reach the console's own login."""
    app = store_site.open_paths()
    for view in ("store", "key"):
        assert f"/console/{view}" in app and f"/console/{view}.json" in app
    assert "/console/static/app.js" in app and "/console/session" in app
    assert not {path for path in app if not path.startswith("/console") and path != "/"}


async def test_gateway_shows_the_same_store(store: RunningStore, tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, master=store.master) as stack:
        status, found = await stack.browser().get("/console/store.json")
        assert status == 200 and found["num_objects"] == len(KEYS)
        status, found = await stack.browser().get("/console/cluster.json")
        assert [one["tier"] for one in found["tiers"]] == ["memory"] and not found["store_trouble"]


async def test_gateway_without_its_master_says_so(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, master="127.0.0.1:1") as stack:
        status, found = await stack.browser().get("/console/store.json")
        assert status == 503 and "127.0.0.1:1" in found["error"]["message"]
        status, found = await stack.browser().get("/console/cluster.json")
        assert status == 200 and "127.0.0.1:1" in found["store_trouble"]
