# SPDX-License-Identifier: Apache-2.0
"""A gateway's reports: in order, many at a time, and no end of a request is dropped.

How a gateway changes conductors is in ``test_peers.py`` and ``test_server.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mooncake.conductor import client
from mooncake.conductor.client import ConductorReach, RemoteConductor
from mooncake.conductor.messages import AddInstance, Failed, Finished, Place, ReportedFact
from mooncake.conductor.server import ConductorServer, ConductorService
from mooncake.types import WorkerRole
from tests.conductor.test_server import SETTINGS
from tests.waiting import until


@pytest.fixture
async def service() -> AsyncIterator[ConductorService]:
    service = ConductorService(SETTINGS)
    yield service
    await service.close()


@pytest.fixture
async def server(service: ConductorService) -> AsyncIterator[ConductorServer]:
    server = ConductorServer(service)
    await service.start()
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


@pytest.fixture
async def remote(server: ConductorServer) -> AsyncIterator[RemoteConductor]:
    remote = RemoteConductor(f"127.0.0.1:{server.rpc.port}")
    await remote.start()
    yield remote
    await remote.close()


async def test_each_conductor_s_connection_is_shown(server: ConductorServer) -> None:
    reached, lost = f"127.0.0.1:{server.rpc.port}", "127.0.0.1:9"
    remote = RemoteConductor(reached, lost)
    assert [one.is_connected for one in remote.conductors] == [False, False]
    await remote.start()
    try:
        await until(lambda: remote.is_connected)
        assert remote.conductors == [ConductorReach(reached, True), ConductorReach(lost, False)]
    finally:
        await remote.close()


async def test_facts_arrive_in_order(
    service: ConductorService, remote: RemoteConductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[Any] = []
    monkeypatch.setattr(service, "post", received.append)
    sent: list[ReportedFact] = []
    for number in range(1000):
        sent += [Failed("w:1", "gone", f"r{number}"), Finished(f"r{number}")]
    for fact in sent:
        remote.post(fact)
    await until(lambda: len(received) == len(sent))
    assert received == sent


async def test_many_facts_are_sent_before_the_first_one_s_answer(
    remote: RemoteConductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: remote.is_connected)
    num_open = most_open = 0
    answer = asyncio.Event()

    async def call(message: Any) -> None:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await answer.wait()
        num_open -= 1

    monkeypatch.setattr(remote, "_call", call)
    for number in range(1000):
        remote.post(Finished(f"r{number}"))
    await until(lambda: num_open == client._FACTS_AT_ONCE)
    answer.set()
    await until(lambda: not num_open and remote._outbox.empty())
    assert most_open == client._FACTS_AT_ONCE


async def test_no_end_is_dropped_when_more_facts_wait_than_there_is_room_for(
    remote: RemoteConductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: remote.is_connected)
    received: list[str] = []
    answer = asyncio.Event()

    async def call(message: Any) -> None:
        await answer.wait()
        received.append(message.request_id)

    monkeypatch.setattr(remote, "_call", call)
    names = [f"r{number}" for number in range(client._MOST_UNSENT + 1000)]
    for name in names:
        remote.post(Finished(name))
    answer.set()
    await until(lambda: len(received) >= len(names))
    assert received == names and not remote._late_ends


async def test_ends_of_requests_that_no_conductor_knows_are_not_kept() -> None:
    remote = RemoteConductor("127.0.0.1:9")  # not started: no conductor
    remote.post(AddInstance("w:1", WorkerRole.DECODE))
    names = [f"r{number}" for number in range(client._MOST_UNSENT + 10)]
    for name in names:
        await remote.place(Place(name, 10, needs_prefill=False))
    for name in names:
        remote.post(Finished(name))
    assert not remote._late_ends and not remote._unheard and not remote._in_flight
