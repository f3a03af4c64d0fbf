# SPDX-License-Identifier: Apache-2.0
"""The node against a master in this process: mounting, mounting again, leaving, failing starts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.errors import AddressInUse, InvalidArgument, OutOfMemory
from mooncake.http.server import HttpServer, listen
from mooncake.store import AsyncStore
from mooncake.store import messages as m
from mooncake.store.node import membership
from mooncake.store.node.node import Node, NodeSettings, serve
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.transfer.metadata_server import make_app
from tests.contract.metadata_servers import free_port
from tests.waiting import until

SETTINGS = MasterSettings(port=0, lease_s=0.1, put_s=0.1, grace_s=0.0, heartbeat_s=0.02)


@pytest.fixture
async def master() -> AsyncIterator[MasterServer]:
    server = MasterServer(SETTINGS)
    await server.start()
    yield server
    await server.close()


def settings_for(master: MasterServer, pool_size_bytes: int = 1 << 20) -> NodeSettings:
    return NodeSettings(master=f"127.0.0.1:{master.port}", pool_size_bytes=pool_size_bytes, huge_pages=False)


@pytest.fixture
async def node(master: MasterServer) -> AsyncIterator[Node]:
    node = Node(settings_for(master))
    await node.start()
    async with asyncio.timeout(10):
        await node.mounted.wait()
    yield node
    async with asyncio.timeout(10):
        await node.close()


async def until_written(store: AsyncStore, key: str, value: bytes) -> None:
    async with asyncio.timeout(10):
        while await store.put(key, value) is not None:  # noqa: ASYNC110 - the first heartbeat decides
            await asyncio.sleep(0.005)


async def test_a_node_mounts_its_memory(master: MasterServer, node: Node) -> None:
    assert master.master.capacity_bytes == 1 << 20
    async with AsyncStore(f"127.0.0.1:{master.port}") as store:
        await until_written(store, "k", b"value")
        assert await store.get("k") == b"value"
        async with store.view("k") as data:
            assert data is not None and bytes(data) == b"value"


async def test_a_lost_connection_brings_everything_back(master: MasterServer, node: Node) -> None:
    async with AsyncStore(f"127.0.0.1:{master.port}") as store:
        await until_written(store, "k", b"value")
        for connection in master.connections:
            connection.close()
        async with asyncio.timeout(10):
            while await store.get("k") != b"value":  # noqa: ASYNC110 - until it is back
                await asyncio.sleep(0.005)
    assert master.master.counts.lost_objects == 0


async def test_another_master_finds_the_memory_resting(master: MasterServer, node: Node) -> None:
    await master.close()
    other = MasterServer(MasterSettings(port=master.port, heartbeat_s=0.02))
    await other.start()
    async with asyncio.timeout(10):
        while not other.master.segments.mounted:  # noqa: ASYNC110 - polls the core
            await asyncio.sleep(0.005)
    (segment,) = other.master.segments.mounted.values()
    assert segment.rests_until > segment.last_heartbeat_at, "the first master's promises may be in use"
    await other.close()


async def test_leaving_unmounts_the_segments(master: MasterServer) -> None:
    node = Node(settings_for(master))
    await node.start()
    await node.mounted.wait()
    await node.close()
    assert not master.master.segments.mounted


async def test_leaving_without_a_master_ends(master: MasterServer) -> None:
    node = Node(settings_for(master))
    await master.close()
    await node.start()
    async with asyncio.timeout(10):
        await node.close()


async def test_a_node_names_the_reason_why_the_master_can_not_be_reached(
    master: MasterServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "CONNECT_S", 0.3)
    node = Node(settings_for(master))
    await master.close()
    await node.start()

    def reasons() -> list[str]:
        events = [one for one in caplog.records if one.getMessage() == "mount_failed"]
        return [one.__dict__["fields"]["reason"] for one in events]

    try:
        await until(reasons)
    finally:
        await node.close()
    assert "Connection refused" in reasons()[0], reasons()


async def test_memory_that_is_not_there_is_an_error(master: MasterServer) -> None:
    node = Node(settings_for(master, 1 << 60))
    with pytest.raises(OutOfMemory, match="available"):
        await node.start()
    await node.close()


async def test_a_taken_transfer_port_is_an_error(master: MasterServer) -> None:
    with pytest.raises(AddressInUse, match=str(master.port)):
        Node(NodeSettings(master="127.0.0.1:1", port=master.port))


async def test_a_node_with_two_addresses_has_two_rails(master: MasterServer) -> None:
    settings = dataclasses.replace(settings_for(master), host="127.0.0.1,127.0.0.2")
    node = Node(settings)
    await node.start()
    client = TransferEngine(TransferSettings(transports=("tcp",)))
    try:
        paths = client.open(node.engine.describe()).paths
        assert paths == ("tcp@127.0.0.1>127.0.0.1", "tcp@127.0.0.1>127.0.0.2")
    finally:
        await asyncio.to_thread(client.close)
        await node.close()


@pytest.mark.parametrize("where", ["host", "transfer"])
async def test_every_address_of_a_node_needs_a_credential(master: MasterServer, where: str) -> None:
    hosts = "127.0.0.1,10.254.254.1"
    chosen: dict[str, Any] = {"host": hosts, "transfer": TransferSettings(listen_host=hosts)}
    settings = dataclasses.replace(settings_for(master), **{where: chosen[where]})
    with pytest.raises(InvalidArgument, match=r"10\.254\.254\.1"):
        await serve(settings)


async def test_a_node_is_found_by_its_name(master: MasterServer) -> None:
    """This also holds when the metadata service starts after the node."""
    port = free_port()
    metadata = f"http://127.0.0.1:{port}/metadata"
    settings = dataclasses.replace(settings_for(master), name="one", metadata=metadata)
    node = Node(settings)
    await node.start()
    server = HttpServer(make_app(), listen("127.0.0.1", port))
    await server.start()
    client = TransferEngine(TransferSettings(metadata=metadata))
    try:
        async with asyncio.timeout(30):
            while (segment := await asyncio.to_thread(client.open_name, "one")) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert "shm" in segment.paths and segment.descriptor.regions
    finally:
        await asyncio.to_thread(client.close)
        await node.close()
        await server.close()


async def test_the_status_names_the_node(master: MasterServer, node: Node) -> None:
    async with AsyncStore(f"127.0.0.1:{master.port}") as store:
        status = await store.ask(m.GetMasterStatus())
        assert [segment.segment for segment in status.segments] == [node.engine.name]


async def test_a_node_that_stops_keeps_what_is_in_memory_on_its_ssd(
    master: MasterServer, tmp_path: Path
) -> None:
    """With ``drain_s``, the next node serves it without a report or a rest."""
    settings = dataclasses.replace(
        settings_for(master), name="n", ssd_path=str(tmp_path), ssd_size_bytes=4 << 20, drain_s=10.0
    )
    async with AsyncStore(f"127.0.0.1:{master.port}") as store:
        node = Node(settings)
        await node.start()
        async with asyncio.timeout(10):
            await node.mounted.wait()
        for number in range(5):
            await until_written(store, f"k{number}", bytes([number]) * 50_000)
        await node.close()
        assert await store.get("k1") is None
        again = Node(settings)
        await again.start()
        async with asyncio.timeout(10):
            while not all(await store.exists([f"k{number}" for number in range(5)])):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        for number in range(5):
            assert await store.get(f"k{number}") == bytes([number]) * 50_000
        await again.close()
