# SPDX-License-Identifier: Apache-2.0
"""The master's shell in this process: metrics, malformed requests, connections that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from mooncake import clock
from mooncake.errors import AddressInUse, InvalidArgument, ProtocolError, Refusal, StorageError
from mooncake.metrics import page
from mooncake.rpc import AsyncClient
from mooncake.store import AsyncStore
from mooncake.store import messages as m
from mooncake.store.client.calls import StoreSettings
from mooncake.store.client.grants import PutGrant
from mooncake.store.ha.leader_search import Leads, WhoLeads
from mooncake.store.master import segments
from mooncake.store.master.log_records import ObjectReadable
from mooncake.store.master.oplog_writer import OplogWriter
from mooncake.store.node import mounted_segment
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from tests.waiting import LONG_HEARTBEAT_S


@pytest.fixture
async def server() -> AsyncIterator[MasterServer]:
    server = MasterServer(MasterSettings(port=0, heartbeat_s=LONG_HEARTBEAT_S))
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def client(server: MasterServer) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(f"127.0.0.1:{server.port}", m.REPLIES, "the master")
    yield client
    await client.close()


async def mount(client: AsyncClient) -> None:
    await client.call(m.Mount("a", 1, "h", 0, 4096, b"", 0.0), 5)
    assert (await client.call(m.Heartbeat("a", 1), 5)).is_known


async def test_requests_reach_the_core_and_its_counts_the_page(client: AsyncClient) -> None:
    await mount(client)
    started = await client.call(m.PutStart(1, "h", ["k"], [100], [100]), 5)
    await client.call(m.PutEnd(["k"], [started.reserved[0].object_id], [b"crc!"]), 5)
    assert (await client.call(m.Exists(["k", "l"]), 5)).flags == b"\1\0"
    text = page().decode()
    for line in (
        "mooncake_store_objects 1.0",
        "mooncake_store_capacity_bytes 4096.0",
        "mooncake_store_allocated_bytes 128.0",
        "mooncake_store_evicted_bytes_total 0.0",
        "mooncake_store_puts_total 1.0",
    ):
        assert line in text


async def test_no_metric_of_a_node_and_its_master_has_the_name_of_another(server: MasterServer) -> None:
    mounted_segment.FAILED.labels("no_space").inc(0)
    names = re.findall(r"^# TYPE (\S+)", page().decode(), re.MULTILINE)
    assert {"mooncake_store_failed_tasks_total", "mooncake_store_node_failed_tasks_total"} <= set(names)
    assert [name for name in names if names.count(name) > 1] == []


async def test_puts_that_an_unwritable_oplog_refuses_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    settings = MasterSettings(port=0, heartbeat_s=LONG_HEARTBEAT_S, oplog=str(folder / "oplog"))
    server = MasterServer(settings)
    await server.start()
    client = AsyncClient(f"127.0.0.1:{server.port}", m.REPLIES, "the master")
    await mount(client)
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match="removed or replaced"):
        await client.call(m.PutStart(1, "h", ["k"], [100], [100]), 5)
    refused = await client.call(m.PutStart(9, "h", ["x", "y", "z"], [100] * 3, [100] * 3), 5)
    assert {one.code for one in refused.refusals.values()} == {"storage_error"}
    assert server.master.counts.refused_puts == 3
    with pytest.raises(StorageError, match="removed or replaced"):
        await client.call(m.PutEnd(["k", "l"], [1, 2], [b"crc!"] * 2), 5)
    assert server.master.counts.refused_puts == 5
    await client.close()
    await server.close()


async def with_an_object(settings: MasterSettings) -> tuple[MasterServer, AsyncClient, int]:
    """A master with a segment, its client, and the id of the object "k" on it."""
    server = MasterServer(settings)
    await server.start()
    client = AsyncClient(f"127.0.0.1:{server.port}", m.REPLIES, "the master")
    await mount(client)
    started = await client.call(m.PutStart(1, "h", ["k"], [100], [100]), 5)
    object_id: int = started.reserved[0].object_id
    await client.call(m.PutEnd(["k"], [object_id], [b"crc!"]), 5)
    return server, client, object_id


async def test_readers_and_writers_wait_for_the_node_of_a_restarted_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has mounted, no object is reported as missing and no put is refused."""
    monkeypatch.setattr(segments, "RETURN_S", 600.0)
    log = str(tmp_path / "oplog")
    settings = MasterSettings(port=0, heartbeat_s=LONG_HEARTBEAT_S, segment_ttl_s=600.0, oplog=log)
    server, client, object_id = await with_an_object(settings)
    await client.close()
    await server.close()
    server = MasterServer(settings)
    await server.start()
    client = AsyncClient(f"127.0.0.1:{server.port}", m.REPLIES, "the master")
    store = AsyncStore(f"127.0.0.1:{server.port}", settings=StoreSettings(timeout_s=60.0))
    try:
        found = asyncio.ensure_future(client.call(m.LookupObjects(["k"]), 60))
        exists = asyncio.ensure_future(store.exists(["k", "none"]))
        put = asyncio.ensure_future(store.start_puts(["new"], [100], 100))
        async with asyncio.timeout(60):
            while server.master.node_returns.num_held < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await mount(client)
        (stored,) = (await found).objects
        assert stored.object_id == object_id
        assert await exists == [True, False]
        (grant,) = await put
        assert isinstance(grant, PutGrant), grant
    finally:
        await store.close()
        await client.close()
        await server.close()


@pytest.mark.parametrize("has_log", [False, True])
async def test_what_becomes_readable_is_recorded_where_there_is_a_log(tmp_path: Path, has_log: bool) -> None:
    path = tmp_path / "oplog"
    settings = MasterSettings(port=0, heartbeat_s=LONG_HEARTBEAT_S, oplog=str(path) if has_log else "")
    server, client, _ = await with_an_object(settings)
    assert (await client.call(m.Exists(["k"]), 5)).flags == b"\1"
    assert server.master.catalog.keeps_records is has_log and not server.master.catalog.records
    await client.close()
    await server.close()
    found = OplogWriter(str(path)).read() if has_log else []
    assert [one.key for one in found if isinstance(one, ObjectReadable)] == ["k"] * has_log


async def test_blocks_are_logged_with_their_clients(caplog: pytest.LogCaptureFixture) -> None:
    """Preallocated and ordinary puts, and reads; refused puts and misses are no blocks."""
    caplog.set_level("INFO")
    server = MasterServer(MasterSettings(port=0, heartbeat_s=LONG_HEARTBEAT_S, log_blocks=True))
    await server.start()
    client = AsyncClient(f"127.0.0.1:{server.port}", m.REPLIES, "the master")
    try:
        await client.call(m.Mount("a", 1, "h", 0, 1 << 20, b"", 0.0), 5)
        await client.call(m.Heartbeat("a", 1), 5)
        start = m.PutStart(1, "h", ["k"], [100], [100], tenant="t", num_pieces=2, piece_bytes=64)
        started = await client.call(start, 5)
        assert not [r for r in caplog.records if r.getMessage().startswith("block_")], (
            "nothing is written yet"
        )
        await client.call(m.PutEnd(["k"], [started.reserved[0].object_id], [b"crc!"], tenant="t"), 5)
        pieces = [(started.advance.advance_id, 0)]
        await client.call(m.PutWritten(9, "h", ["small"], [64], [b"crc!"], pieces, tenant="t"), 5)
        await client.call(m.PutWritten(10, "h", ["late"], [64], [b"crc!"], [(7, 7)], tenant="t"), 5)
        await client.call(m.LookupObjects(["k", "none", "small"], "t"), 5)
        await client.call(m.LookupObjects(["k"]), 5)  # of another tenant
        blocks = [r for r in caplog.records if r.getMessage().startswith("block_")]
        fields = [r.__dict__["fields"] for r in blocks]
        assert [
            (r.getMessage(), one["key"], one["bytes"]) for r, one in zip(blocks, fields, strict=True)
        ] == [
            ("block_write", "k", 100),
            ("block_write", "small", 64),
            ("block_read", "k", 100),
            ("block_read", "small", 64),
        ]
        assert {one["peer"].rpartition(":")[0] for one in fields} == {"127.0.0.1"}
        assert {(one["node"], one["tier"], one["tenant"]) for one in fields} == {("a", "memory", "t")}
    finally:
        await client.close()
        await server.close()


async def test_losing_the_nodes_connection_hides_its_objects(
    server: MasterServer, client: AsyncClient
) -> None:
    node = AsyncClient(f"127.0.0.1:{server.port}", m.REPLIES)
    await mount(node)
    await node.close()
    async with asyncio.timeout(5):
        while (await client.call(m.GetMasterStatus(), 5)).segments[0].state == "alive":  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_batch_beyond_the_limit_is_refused_by_name(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgument, match="at most 4096"):
        await client.call(m.LookupObjects(["k"] * 4097), 5)


async def test_a_second_master_cannot_take_the_port(server: MasterServer) -> None:
    with pytest.raises(AddressInUse, match=str(server.port)):
        await MasterServer(MasterSettings(port=server.port)).start()


async def test_a_closed_server_leaves_no_metrics(server: MasterServer, client: AsyncClient) -> None:
    other = MasterServer(MasterSettings(port=0))
    await other.start()
    await other.close()
    assert page().decode().count("\nmooncake_store_objects ") == 1


async def test_others_are_answered_during_a_key_scan(server: MasterServer) -> None:
    """Over the wire, with an expression that never ends in an engine that backtracks."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [AsyncClient(f"127.0.0.1:{server.port}", m.REPLIES) for _ in range(2)]
        for client in clients:
            stack.push_async_callback(client.close)
        await clients[1].call(m.Mount("a", 1, "h", 1 << 30, 1 << 20, b"", 0.0), 60.0)
        keys = [f"{'a' * 60}!{number}" for number in range(2000)]
        records = [
            ObjectReadable(key, number + 1, 64, 64, b"crc!", [("a", 64 * number)])
            for number, key in enumerate(keys)
        ]
        server.master.apply(records, clock.monotonic())
        scan = asyncio.create_task(clients[0].call(m.RemoveMatching("^(a+)+$", False), 60.0))
        num_answers = 0
        while not scan.done():
            await clients[1].call(m.Exists(["k"]), 60.0)
            num_answers += 1
        assert await scan == m.Removed(0, 0)
        assert num_answers > 1
        assert await clients[0].call(m.RemoveMatching("^a{60}![0-9]+$", True), 60.0) == m.Removed(2000, 0)


async def test_a_standby_remembers_no_lost_connections_of_clients(
    server: MasterServer,
) -> None:
    """They come and go for as long as it is a standby."""
    node = AsyncClient(f"127.0.0.1:{server.port}", m.REPLIES)
    await mount(node)
    server._role.is_leading = False
    for _ in range(3):
        client = AsyncClient(f"127.0.0.1:{server.port}", (*m.REPLIES, Leads))
        await client.call(WhoLeads(), 5)
        await client.close()
    await node.close()
    async with asyncio.timeout(5):
        while server.num_clients:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert len(server._gone) == 1, "the node's: its segment is to be suspected"


async def test_pieces_of_another_client_cannot_be_guessed(client: AsyncClient) -> None:
    """Not from the ids of the client's own objects and pieces, although both clients are of one tenant."""
    await client.call(m.Mount("a", 1, "h", 0, 1 << 20, b"", 0.0), 5)
    await client.call(m.Heartbeat("a", 1), 5)
    put_ids = (1, 2)
    given, own = [
        await client.call(m.PutStart(n, "h", [f"k{n}"], [64], [64], num_pieces=2, piece_bytes=64), 5)
        for n in put_ids
    ]
    near = {base + n for base in (own.reserved[0].object_id, own.advance.advance_id) for n in range(-50, 50)}
    guesses = sorted(near - {own.advance.advance_id})
    count = len(guesses)
    keys = [f"g{n}" for n in range(count)]
    guessed = m.PutWritten(9, "h", keys, [64] * count, [b"crc!"] * count, [(one, 0) for one in guesses])
    assert {one.code for one in (await client.call(guessed, 5)).outcomes} == {"expired"}
    written = m.PutWritten(999, "h", ["mine"], [64], [b"crc!"], [(given.advance.advance_id, 0)])
    assert (await client.call(written, 5)).outcomes == [True]


async def test_values_for_memory_that_is_not_mapped_are_left_to_the_writer(client: AsyncClient) -> None:
    """Whatever the values are: the piece is still the writer's, and a lookup is answered without bytes."""
    await client.call(m.Mount("a", 1, "h", 0, 1 << 20, b"", 0.0), 5)
    await client.call(m.Heartbeat("a", 1), 5)
    start = m.PutStart(1, "h", ["k"], [64], [64], num_pieces=2, piece_bytes=64)
    started = await client.call(start, 5)
    piece = (started.advance.advance_id, 0)
    many = m.PutWritten(9, "h", ["k"] * 65, [1] * 65, [b"crc!"] * 65, [piece] * 65, values=[b"1"] * 65)
    assert {one.code for one in (await client.call(many, 5)).outcomes} == {"not_here"}
    for values in ([bytes(64)], [b""], [bytes(64), bytes(64)], [bytes(100_000)]):
        written = m.PutWritten(9, "h", ["small"], [64], [b"crc!"], [piece], values=values)
        (outcome,) = (await client.call(written, 5)).outcomes
        assert isinstance(outcome, Refusal) and outcome.code == "not_here"
    assert (await client.call(m.Exists(["small"]), 5)).flags == b"\0"
    written = m.PutWritten(9, "h", ["small"], [64], [b"crc!"], [piece], is_remote=True)
    reply = await client.call(written, 5)
    assert reply.outcomes == [True] and not reply.takes_values
    found = await client.call(m.LookupObjects(["small"], value_bytes=1 << 40), 5)
    assert found.objects[0] is not None and found.values == []


@pytest.mark.parametrize(
    "over",
    [
        m.DescribeSegments([("a", 1)] * (m.MAX_KEYS + 1)),
        m.PutStart(1, "h", ["k"], [1], [1], ["a"] * (m.MAX_AVOIDED + 1)),
    ],
)
async def test_lists_that_would_keep_a_master_busy_are_refused(
    client: AsyncClient, over: msgspec.Struct
) -> None:
    """A descriptor is much larger than a segment's name, and a put compares all segments with those that it
    avoids."""
    most = await client.call(m.DescribeSegments([("a", 1)] * m.MAX_KEYS), 20.0)
    assert most.descriptors == [None] * m.MAX_KEYS
    with pytest.raises(ProtocolError, match="length <="):
        await client.call(over, 20.0)
