# SPDX-License-Identifier: Apache-2.0
"""A gateway's reports: in order, many at a time, and no end of a request is dropped.

How a gateway changes conductors is in ``test_peers.py`` and ``test_server.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mooncake import clock
from mooncake.conductor import client
from mooncake.conductor.client import ConductorReach, RemoteConductor
from mooncake.conductor.messages import (
    AddInstance,
    ClaimRequests,
    Decision,
    Failed,
    Finished,
    GetStatus,
    Noted,
    Place,
    Placed,
    ReportedFact,
    Status,
)
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
        await until(lambda: remote.is_connected and remote._outbox.empty())  # its claim is answered
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
    await until(lambda: remote.is_connected and remote._outbox.empty())  # its claim is answered
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
    await until(lambda: remote.is_connected and remote._outbox.empty())  # its claim is answered
    received: list[str] = []
    answer = asyncio.Event()

    async def call(message: Any) -> None:
        await answer.wait()
        received.append(message.request_id)

    monkeypatch.setattr(remote, "_call", call)
    names = [f"r{number}" for number in range(client._MOST_UNSENT + 1000)]
    for name in names:
        remote.post(Finished(name))
    assert len(remote._late_ends) == 1000 and list(remote._ending) == names, "a claim names them all"
    answer.set()
    await until(lambda: len(received) >= len(names))
    assert received == names and not remote._late_ends and not remote._ending


async def test_a_claim_names_all_that_has_not_ended_or_ends_later(
    remote: RemoteConductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: remote.is_connected and remote._outbox.empty())  # its claim is answered
    [link] = remote._links
    claims: list[ClaimRequests] = []
    answer = asyncio.Event()

    async def call(message: Any, timeout_s: float) -> Any:
        match message:
            case ClaimRequests():
                claims.append(message)
            case GetStatus():
                return Status([])
            case Place(request_id=name):
                if name != "in flight":
                    await answer.wait()
                return Decision(name, None, "w:1", "")
            case _:
                await answer.wait()
        return Noted()

    monkeypatch.setattr(link.client, "call", call)
    await remote.place(Place("in flight", 10))
    asked = [asyncio.create_task(remote.place(Place(name, 10))) for name in ("asked", "next")]
    remote.post(Finished("ends later"))
    await until(lambda: remote._outbox.empty())  # it was sent, and is not answered
    claims.clear()
    link.has_claims = False
    await remote._claim(link)
    [claim] = claims
    assert (
        claim.is_first and claim.is_last and [one.place.request_id for one in claim.placed] == ["in flight"]
    )
    assert claim.pending == ["asked", "next", "ends later"]

    answer.set()
    await asyncio.gather(*asked)
    await until(lambda: not remote._ending)
    monkeypatch.setattr(client, "_CLAIMS_PER_CALL", 2)
    link.has_claims = False
    claims.clear()
    await remote._claim(link)
    assert [(len(one.placed), one.is_first, one.is_last) for one in claims] == [
        (2, True, False),
        (1, False, True),
    ]
    assert {one.number for one in claims} == {claim.number + 1} and not any(one.pending for one in claims)


async def test_a_claim_leaves_out_what_is_placed_anew(
    remote: RemoteConductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote._in_flight["a"] = Placed(Place("a", 10), Decision("a", None, "w:1", "")), clock.monotonic()
    remote._asked["a"] = 1
    claims: list[ClaimRequests] = []

    async def call(message: Any, timeout_s: float) -> Noted:
        claims.append(message)
        return Noted()

    [link] = remote._links
    await until(lambda: link.is_connected and link.has_claims)
    monkeypatch.setattr(link.client, "call", call)
    link.has_claims = False
    await remote._claim(link)
    assert claims[0].placed == [] and claims[0].pending == ["a"] and claims[0].is_last


async def test_a_request_is_asked_for_until_the_last_call_has_its_answer(
    remote: RemoteConductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: remote.is_connected and remote._outbox.empty())  # its claim is answered
    answers = [asyncio.Event(), asyncio.Event()]
    calls = iter(answers)

    async def call(message: Any) -> Any:
        await next(calls).wait()
        return Decision("a", None, "w:1", "")

    monkeypatch.setattr(remote, "_call", call)
    first, second = (asyncio.create_task(remote.place(Place("a", 10))) for _ in answers)
    await until(lambda: remote._asked["a"] == 2)
    answers[0].set()
    await first
    assert list(remote._asked) == ["a"], "a claim says that it has not ended"
    answers[1].set()
    await second
    assert not remote._asked


async def test_ends_of_requests_that_no_conductor_knows_are_not_kept() -> None:
    remote = RemoteConductor("127.0.0.1:9")  # not started: no conductor
    remote.post(AddInstance("w:1", WorkerRole.DECODE))
    names = [f"r{number}" for number in range(client._MOST_UNSENT + 10)]
    for name in names:
        await remote.place(Place(name, 10, needs_prefill=False))
    for name in names:
        remote.post(Finished(name))
    assert not remote._late_ends and not remote._unheard and not remote._in_flight
    assert len(remote._ending) == remote._outbox.qsize() - 1, "those that are to be sent"
