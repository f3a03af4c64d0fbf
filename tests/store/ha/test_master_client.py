# SPDX-License-Identifier: Apache-2.0
"""Clients find the leading master by every form of its address, and find its successor."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mooncake import clock
from mooncake.errors import DeadlineExceeded, InvalidArgument, NotLeader, PeerLost, Unavailable
from mooncake.store import Store
from mooncake.store import messages as m
from mooncake.store.ha import master_client
from mooncake.store.ha.leader_search import LeaderSearch
from mooncake.store.ha.master_client import AsyncMasterClient, BlockingMasterClient, MasterResolver
from mooncake.store.server import MasterServer
from tests.store.ha.test_coordinator import Masters
from tests.waiting import until


@pytest.fixture
async def masters(tmp_path: Path) -> AsyncIterator[Masters]:
    masters = Masters(tmp_path)
    yield masters
    await masters.close()


def dead_address() -> str:
    """An address without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def forms(masters: Masters, first: MasterServer, second: MasterServer) -> list[str]:
    both = [first.address, second.address]
    return [
        ",".join(both),
        ",".join(reversed(both)),
        f"{dead_address()},{both[1]}",
        both[1],
        f"file://{masters.folder}",
    ]


async def keys(rpc: AsyncMasterClient, timeout_s: float = 10.0) -> Any:
    """Repeated when the connection was lost, as ``operations.py`` does."""
    deadline = clock.monotonic() + timeout_s
    while True:
        try:
            return await rpc.call(m.ListKeys("", 1), deadline - clock.monotonic())
        except PeerLost:
            await asyncio.sleep(0.01)


async def test_no_leader_is_searched_for_to_post_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is posted only releases something earlier; a search takes seconds."""

    def search(*args: Any) -> Any:
        raise AssertionError("it is searched for")

    monkeypatch.setattr(LeaderSearch, "begin_round", search)
    several = f"{dead_address()},{dead_address()}"
    blocking, own = BlockingMasterClient(several, m.REPLIES), AsyncMasterClient(several, m.REPLIES)
    with pytest.raises(PeerLost, match="no connection to send PutAbort"):
        blocking.post(m.PutAbort([], []), 5.0)
    with pytest.raises(PeerLost, match="no connection to send PutAbort"):
        own.post(m.PutAbort([], []))
    blocking.close()
    await own.close()


@pytest.mark.parametrize("form", range(5))
async def test_every_form_leads_to_the_leader_and_to_its_successor(masters: Masters, form: int) -> None:
    first, second = await masters.pair()
    master = forms(masters, first, second)[form]
    rpc, blocking = AsyncMasterClient(master, m.REPLIES), BlockingMasterClient(master, m.REPLIES)
    assert await keys(rpc) == m.Keys([])
    assert await asyncio.to_thread(blocking.call, m.ListKeys("", 1), 10.0) == m.Keys([])
    assert rpc._address == blocking._address == first.address
    await masters.kill(first)
    assert await keys(rpc) == m.Keys([])

    def ask() -> Any:
        try:
            return blocking.call(m.ListKeys("", 1), 10.0)
        except PeerLost:
            return ask()

    assert await asyncio.to_thread(ask) == m.Keys([])
    assert rpc._address == blocking._address == second.address
    await rpc.close()
    await asyncio.to_thread(blocking.close)


async def test_a_silent_leader_is_left_for_its_successor(masters: Masters) -> None:
    first, second = await masters.pair(standby_ack_s=60.0)
    rpc = AsyncMasterClient(f"{first.address},{second.address}", m.REPLIES, doubt_s=0.3)
    assert await keys(rpc) == m.Keys([])
    first._role.carry_out = lambda effect, now: []  # type: ignore[method-assign]
    call = asyncio.create_task(keys(rpc))
    await asyncio.sleep(0)
    assert first._coordinator is not None
    await first._coordinator.close()
    first._role.is_leading = False
    await until(lambda: second.leadership.is_leader)
    assert await call == m.Keys([])
    await rpc.close()


async def test_without_a_leader_the_error_names_addresses_and_reasons(
    masters: Masters, tmp_path: Path
) -> None:
    dead, other = dead_address(), dead_address()
    rpc = AsyncMasterClient(f"{dead},{other}", m.REPLIES)
    with pytest.raises(DeadlineExceeded, match=f"{dead}.*[Rr]efused.*{other}.*refused"):
        await rpc.call(m.GetMasterStatus(), 0.3)
    await rpc.close()
    with pytest.raises(DeadlineExceeded, match="no master has led yet"):
        await AsyncMasterClient(f"file://{tmp_path}/", m.REPLIES).call(m.GetMasterStatus(), 0.2)
    blocking = BlockingMasterClient(f"{dead},{other}", m.REPLIES)
    with pytest.raises(DeadlineExceeded, match=f"{dead}.*[Rr]efused"):
        await asyncio.to_thread(blocking.call, m.GetMasterStatus(), 0.3)


async def test_a_single_master_that_leads_nothing_yet_is_waited_for(masters: Masters) -> None:
    server = await masters.start()
    rpc = AsyncMasterClient(server.address, m.REPLIES)
    assert not server.leadership.is_leader
    assert await rpc.call(m.ListKeys("", 1), 10.0) == m.Keys([])
    await rpc.close()


async def test_without_time_for_a_pause_the_master_that_does_not_lead_is_named(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is made longer instead of the timeout shorter: a busy machine answers late, too."""
    monkeypatch.setattr(master_client, "PAUSE_S", 60.0)
    server = await masters.start()
    with pytest.raises(NotLeader, match=f"{server.address} does not lead"):
        await AsyncMasterClient(server.address, m.REPLIES).call(m.GetMasterStatus(), 30.0)


def test_connecting_to_a_dead_master_fails_at_once() -> None:
    dead = dead_address()
    with Store(dead) as store, pytest.raises(Unavailable, match=rf"{dead} can't be reached: .*is it running"):
        store.connect(60.0)


@pytest.mark.parametrize("wrong", ["", "host", "a:1,b", "a:1,,b:2", "http://a:1", "etcd://a:b", "a:70000"])
def test_an_invalid_address_is_refused_with_the_valid_forms(wrong: str) -> None:
    with pytest.raises(InvalidArgument):
        MasterResolver(wrong)


async def test_a_link_without_doubt_waits_for_its_answer(masters: Masters) -> None:
    first, second = await masters.pair()
    rpc = AsyncMasterClient(f"{first.address},{second.address}", m.REPLIES, doubt_s=math.inf)
    assert await keys(rpc) == m.Keys([])
    await rpc.close()
    with pytest.raises(PeerLost, match="closed"):
        await rpc.call(m.GetMasterStatus(), 1.0)
