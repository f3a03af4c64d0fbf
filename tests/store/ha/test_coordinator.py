# SPDX-License-Identifier: Apache-2.0
"""Several masters in this process, a file as the lease store: elections, successors' state, answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mooncake.errors import NotLeader, Unavailable
from mooncake.metrics import page, registry
from mooncake.rpc import AsyncClient
from mooncake.store import messages as m
from mooncake.store.ha import coordinator
from mooncake.store.ha.leader_search import Leads, WhoLeads
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from tests.waiting import until

LEASE_S = 1.0
REPLIES: tuple[type[msgspec.Struct], ...] = (*m.REPLIES, Leads)


class Masters:
    """Masters of one cluster, started and stopped at will."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[MasterServer] = []
        self._clients: list[AsyncClient] = []

    async def start(self, oplog: str = "", **more: Any) -> MasterServer:
        settings = MasterSettings(
            port=0,
            election=f"file://{self.folder}",
            election_lease_s=LEASE_S,
            oplog=str(self.folder / oplog) if oplog else "",
            **{"lease_s": 0.2, "put_s": 0.2, "grace_s": 0.0, "segment_ttl_s": 30, "heartbeat_s": 10, **more},
        )
        server = MasterServer(settings)
        await server.start()
        self.running.append(server)
        return server

    async def leader(self) -> MasterServer:
        await until(lambda: any(one.leadership.is_leader for one in self.running))
        return next(one for one in self.running if one.leadership.is_leader)

    async def pair(self, **more: Any) -> tuple[MasterServer, MasterServer]:
        """A leader, and a standby that has everything."""
        first = await self.start(**more)
        await self.leader()
        second = await self.start(**more)
        await until(lambda: first.num_standbys == 1)
        return first, second

    async def kill(self, server: MasterServer) -> None:
        """As if its process had died: it sends nothing more."""
        self.running.remove(server)
        coordinator, driver = server._coordinator, server._driver
        server._is_serving = server._role.is_leading = False
        if coordinator is not None:
            await coordinator.close()
        if driver is not None:
            driver.close()
        server._role.followers = None
        registry.unregister(server._metrics)
        await server._rpc.close()
        server._oplog.close()

    def client(self, server: MasterServer) -> AsyncClient:
        client = AsyncClient(server.address, REPLIES, "the master")
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for server in self.running:
            await server.close()


@pytest.fixture
async def masters(tmp_path: Path) -> AsyncIterator[Masters]:
    masters = Masters(tmp_path)
    yield masters
    await masters.close()


async def mount(client: AsyncClient) -> m.Mounted:
    mounted: m.Mounted = await client.call(m.Mount("a", 1, "h", 0, 1 << 20, b"", 0.0), 5)
    assert (await client.call(m.Heartbeat("a", 1), 5)).is_known
    return mounted


async def put(client: AsyncClient, number: int) -> None:
    started = await client.call(m.PutStart(number + 1, "h", [f"k{number}"], [100], [100]), 5)
    ended = await client.call(m.PutEnd([f"k{number}"], [started.reserved[0].object_id], [b"crc!"]), 5)
    assert ended.outcomes == [True]


async def num_found(client: AsyncClient, count: int) -> int:
    found = await client.call(m.Exists([f"k{number}" for number in range(count)]), 5)
    return sum(found.flags)


async def test_one_alone_leads(masters: Masters) -> None:
    server = await masters.start()
    client = masters.client(server)
    await until(lambda: server.leadership.is_leader)
    assert await client.call(WhoLeads(), 5) == Leads(server.address, 1, True)
    await mount(client)
    await put(client, 0)
    assert "mooncake_store_ha_leads 1.0" in page().decode()


async def test_a_standby_names_the_leader(masters: Masters) -> None:
    first, second = await masters.pair()
    client = masters.client(second)
    assert await client.call(WhoLeads(), 5) == Leads(first.address, 1, False)
    with pytest.raises(NotLeader) as caught:
        await client.call(m.LookupObjects(["k"]), 5)
    assert caught.value.leader == first.address
    answer = await second.ask(m.GetMasterStatus())
    assert getattr(answer, "code", "") == "not_leader"
    assert second.leadership.state == "standby"


async def test_the_standby_has_all_that_was_acknowledged_when_the_leader_dies(masters: Masters) -> None:
    first, second = await masters.pair()
    client = masters.client(first)
    await mount(client)
    for number in range(50):
        await put(client, number)
    await masters.kill(first)
    await until(lambda: second.leadership.is_leader)
    client = masters.client(second)
    assert (await mount(client)).num_objects == 50
    assert await num_found(client, 50) == 50
    second.master.check()


async def test_a_leader_that_is_closed_hands_over_without_waiting_for_its_lease(masters: Masters) -> None:
    first, second = await masters.pair(oplog="")
    client = masters.client(first)
    await mount(client)
    await put(client, 0)
    masters.running.remove(first)
    await first.close()
    record = second._coordinator.election.record if second._coordinator else None
    await until(lambda: second.leadership.is_leader, timeout_s=LEASE_S * 0.8)
    assert record is not None and second.leadership.term > record.term
    client = masters.client(second)
    await mount(client)
    assert await num_found(client, 1) == 1


async def test_object_ids_go_on_where_the_last_leader_may_have_been(masters: Masters) -> None:
    first, second = await masters.pair()
    client = masters.client(first)
    await mount(client)
    started = await client.call(m.PutStart(1, "h", ["k"], [100], [100]), 5)
    await masters.kill(first)
    await until(lambda: second.leadership.is_leader)
    client = masters.client(second)
    await mount(client)
    again = None
    async with asyncio.timeout(5):
        while again is None:  # the memory rests for a while
            reply = await client.call(m.PutStart(9, "h", ["k"], [100], [100]), 5)
            again = reply.reserved[0]
            await asyncio.sleep(0.01)
    assert again.object_id > started.reserved[0].object_id
    ended = await client.call(m.PutEnd(["k"], [started.reserved[0].object_id], [b"crc!"]), 5)
    assert ended.outcomes != [True], "that reservation was the last leader's"


async def test_nothing_is_acknowledged_while_a_listed_standby_is_silent(masters: Masters) -> None:
    first, second = await masters.pair(standby_ack_s=0.5)
    client = masters.client(first)
    await mount(client)
    assert second._coordinator is not None
    second._coordinator._stop_following()
    await put(client, 0)
    assert first.num_standbys == 0, "it was acknowledged because the standby was struck"
    record = first._coordinator.election.record if first._coordinator else None
    assert record is not None and record.standbys == []


async def test_a_standby_that_was_lost_comes_again(masters: Masters) -> None:
    first, second = await masters.pair()
    client = masters.client(first)
    await mount(client)
    await put(client, 0)
    for connection in first.connections:
        connection.close()
    await until(lambda: first.num_standbys == 0)
    await until(lambda: first.num_standbys == 1)
    client = masters.client(first)
    await mount(client)
    await put(client, 1)
    assert len(second.master.objects.readable) == 2


async def test_a_leader_that_comes_back_with_its_log_leads_with_all_of_it(masters: Masters) -> None:
    first = await masters.start("one")
    await masters.leader()
    client = masters.client(first)
    await mount(client)
    for number in range(10):
        await put(client, number)
    await masters.kill(first)
    again = await masters.start("one")
    await until(lambda: again.leadership.is_leader, timeout_s=LEASE_S * 0.8)
    assert again.leadership.term == 2
    client = masters.client(again)
    await mount(client)
    assert await num_found(client, 10) == 10


async def test_a_standby_writes_its_own_log(masters: Masters, tmp_path: Path) -> None:
    first = await masters.start("one")
    await masters.leader()
    client = masters.client(first)
    await mount(client)
    await put(client, 0)
    second = await masters.start("two")
    await until(lambda: first.num_standbys == 1)
    await put(client, 1)
    await masters.kill(first)
    await masters.kill(second)
    alone = await masters.start("two")
    await until(lambda: alone.leadership.is_leader)
    client = masters.client(alone)
    await mount(client)
    assert await num_found(client, 2) == 2


async def test_a_standby_that_never_caught_up_begins_empty_in_the_end(masters: Masters) -> None:
    first = await masters.start("one")
    await masters.leader()
    client = masters.client(first)
    await mount(client)
    await put(client, 0)
    await masters.kill(first)
    other = await masters.start("other", orphan_s=0.5)
    await until(lambda: other.leadership.is_leader)
    assert not other.master.objects.readable


async def test_a_loss_of_the_leader_is_logged_once_for_each_reason(
    masters: Masters, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = await masters.start()
    await masters.leader()
    found = server._coordinator
    assert found is not None and found.election.record is not None
    record = msgspec.structs.replace(found.election.record, address="10.0.0.1:50051")
    itself = NotLeader("the leader at 10.0.0.1:50051 does not lead; 10.0.0.1:50051 does")
    itself.leader = record.address

    def refuse(*_: Any) -> Any:
        raise Unavailable("the wire is cut")

    monkeypatch.setattr(found._lease_store, "read", refuse)
    monkeypatch.setattr(found._lease_store, "swap", refuse)
    await until(lambda: found._is_silent)
    now = 1000.0
    raised: list[Exception] = [
        itself,
        itself,
        itself,
        Unavailable("no route"),
        Unavailable("no route"),
        itself,
    ]
    left = asyncio.Event()

    async def connect(*_: Any) -> None:
        nonlocal now
        if len(raised) == 1:
            now += coordinator.LOG_AGAIN_S
        if not raised:
            left.set()
            await asyncio.Event().wait()
        raise raised.pop(0)

    monkeypatch.setattr(coordinator, "RETRY_S", 0.0)
    monkeypatch.setattr(AsyncClient, "connect", connect)
    monkeypatch.setattr(coordinator, "clock", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(found, "_post", lambda event: None)
    following = asyncio.create_task(found._follow(record))
    await asyncio.wait_for(left.wait(), 10)
    following.cancel()
    reasons = [one.fields["reason"] for one in caplog.records if one.getMessage() == "leader_lost"]  # type: ignore[attr-defined]
    expired = (
        "the leader at 10.0.0.1:50051 does not lead now: its lease has run out "
        "and the election service does not answer"
    )
    assert reasons == [expired, "no route", expired]


async def test_a_leader_cut_off_from_the_lease_store_stops_until_it_is_back(
    masters: Masters,
) -> None:
    server = await masters.start()
    await masters.leader()
    client = masters.client(server)
    await mount(client)
    await put(client, 0)
    assert server._coordinator is not None
    lease_store = server._coordinator._lease_store
    read, swap = lease_store.read, lease_store.swap

    def refuse(*_: Any) -> Any:
        raise Unavailable("the wire is cut")

    lease_store.read, lease_store.swap = refuse, refuse  # type: ignore[method-assign,assignment]
    await until(lambda: not server._role.is_leading)
    with pytest.raises(Unavailable):
        await masters.client(server).call(m.LookupObjects(["k0"]), 5)
    lease_store.read, lease_store.swap = read, swap  # type: ignore[method-assign]
    await until(lambda: server.leadership.is_leader)
    client = masters.client(server)
    assert (await mount(client)).num_objects == 1
    assert await num_found(client, 1) == 1
    server.master.check()
