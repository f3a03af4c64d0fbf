# SPDX-License-Identifier: Apache-2.0
"""Two conductors with real sockets, and gateways' clients that use one of them: takeover, claims, return."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random

import pytest
from msgspec.structs import replace

from mooncake import metrics
from mooncake.cli.ports import free_ports
from mooncake.conductor import client
from mooncake.conductor.client import RemoteConductor
from mooncake.conductor.messages import (
    REPLIES,
    AddInstance,
    ClaimRequests,
    Decision,
    Finished,
    Place,
    Placed,
    Prefilled,
    Refuse,
    RemoveInstance,
    Replicate,
    SharedFact,
    Standing,
)
from mooncake.conductor.server import ConductorServer, ConductorService
from mooncake.errors import AccessDenied
from mooncake.rpc import AsyncClient
from mooncake.types import WorkerRole
from tests.conductor.test_server import SETTINGS, Worker
from tests.faults.proxy import Proxy
from tests.waiting import until

LEASE_S = 0.3


@dataclass
class One:
    """A conductor of the pair."""

    service: ConductorService
    server: ConductorServer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.rpc.port}"

    @property
    def num_requests(self) -> int:
        return len(self.service.core.placements)

    @property
    def is_leader(self) -> bool:
        return self.server.peers.standing.is_leader

    async def stop(self) -> None:
        await self.server.close()
        self.service.core.check()
        self.server.peers.leadership.check()
        self.server.peers.replicas.check()
        await self.service.close()


async def begin(port: int, *peers: int) -> One:
    service = ConductorService(SETTINGS)
    await service.start()
    server = ConductorServer(service, [f"127.0.0.1:{peer}" for peer in peers], LEASE_S)
    await server.start("127.0.0.1", port)
    return One(service, server)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[dict[int, One]]:
    """Both conductors by their ports; a test may stop them and begin others."""
    first, second = free_ports("127.0.0.1", 2, Random())
    running = {first: await begin(first, second), second: await begin(second, first)}
    try:
        yield running
    finally:
        for one in running.values():
            await one.stop()


@pytest.fixture
async def workers() -> AsyncIterator[list[Worker]]:
    workers = [Worker(), Worker()]
    for worker in workers:
        await worker.start()
    yield workers
    for worker in workers:
        await worker.stop()
        await worker.publisher.close()


@contextlib.asynccontextmanager
async def gateway(running: dict[int, One], workers: list[Worker]) -> AsyncIterator[RemoteConductor]:
    remote = RemoteConductor(*(f"127.0.0.1:{port}" for port in running))
    await remote.start()
    for worker in workers:
        remote.post(AddInstance(worker.address, WorkerRole.DECODE))
    try:
        yield remote
    finally:
        await remote.close()


async def is_used(remote: RemoteConductor, running: dict[int, One]) -> bool:
    """Whether the gateway uses the leader, knows both, and both have all instances ready."""
    rows = [row for one in running.values() for row in one.service.core.status()]
    is_ready = len(rows) == 2 * len(running) and all(row.health == "ready" for row in rows)
    states = remote.describe()
    return is_ready and states.count("leads") == 1 and states.count("follows") == len(running) - 1


def of_role(running: dict[int, One], is_leader: bool) -> tuple[int, One]:
    [found] = [(port, one) for port, one in running.items() if one.is_leader is is_leader]
    return found


async def place(remote: RemoteConductor, request_id: str) -> Decision:
    answer = await remote.place(Place(request_id, 64))
    assert isinstance(answer, Decision)
    return answer


def sample(name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


async def test_what_the_leader_places_the_follower_knows(workers: list[Worker]) -> None:
    async with pair() as running, gateway(running, workers) as remote:
        await until(lambda: is_used(remote, running))
        _, leader = of_role(running, True)
        _, follower = of_role(running, False)
        first = await place(remote, "a")
        assert first.policy and (await place(remote, "b")).decode != first.decode
        await until(lambda: follower.num_requests == 2)
        assert sorted(row.num_requests for row in follower.service.core.status()) == [1, 1]
        await remote.prefilled(Prefilled("a"))
        remote.post(Finished("a"))
        await until(lambda: follower.num_requests == leader.num_requests == 1)
        await remote.change(RemoveInstance(workers[0].address))
        await until(lambda: len(follower.service.core.instances) == 1)
    assert sample("mooncake_conductor_placed_elsewhere_total", source="peer") >= 2


async def test_a_killed_leader_s_work_goes_on_at_the_follower(workers: list[Worker]) -> None:
    in_turn = sample("mooncake_conductor_client_in_turn_total")
    async with pair() as running, gateway(running, workers) as remote:
        await until(lambda: is_used(remote, running))
        port, leader = of_role(running, True)
        other, follower = of_role(running, False)
        in_flight = [await place(remote, name) for name in ("a", "b", "c")]
        await until(lambda: follower.num_requests == 3)
        takeovers = sample("mooncake_conductor_takeovers_total")
        del running[port]
        await leader.stop()
        next_one = await place(remote, "d")
        assert next_one.policy == "overlap", "the follower is asked at once, before it leads"
        assert follower.num_requests == 4
        busier = max(row.num_requests for row in follower.service.core.status())
        assert busier == 2, "it knew what was in flight"
        await until(lambda: follower.is_leader)
        assert sample("mooncake_conductor_takeovers_total") == takeovers + 1
        owners = follower.server.peers.replicas.owners
        await until(lambda: all(not isinstance(owners.owner(name), int) for name in "abc"))

        restarted = running[port] = await begin(port, other)
        await until(lambda: is_used(remote, running))
        assert follower.is_leader and not restarted.is_leader
        await until(lambda: restarted.num_requests == 4)
        for name in "abcd":
            remote.post(Finished(name))
        await until(lambda: restarted.num_requests == follower.num_requests == 0)
        assert len(in_flight) == 3
    assert sample("mooncake_conductor_client_in_turn_total") == in_turn


async def test_a_snapshot_of_one_that_does_not_lead_changes_no_membership_at_the_leader() -> None:
    [port] = free_ports("127.0.0.1", 1, Random())
    leader = await begin(port)
    try:
        leader.service.post(AddInstance("127.0.0.1:1", WorkerRole.DECODE))
        for is_stale_leader in (False, True):
            members: list[SharedFact] = [AddInstance("127.0.0.1:2", WorkerRole.DECODE)]
            message = Replicate(Standing(7, 0, is_stale_leader), 0, members, is_snapshot=True)
            leader.server.peers.receive(message)
            assert list(leader.service.core.instances) == ["127.0.0.1:1"]
    finally:
        await leader.stop()


async def test_gateways_have_one_view_of_the_load(workers: list[Worker]) -> None:
    async with (
        pair() as running,
        gateway(running, workers) as one,
        gateway(running, workers) as other,
    ):
        for remote in one, other:
            await until(lambda remote=remote: is_used(remote, running))  # type: ignore[misc]
        chosen = [(await place(remote, f"r{n}")).decode for n, remote in enumerate((one, other, one, other))]
        assert sorted(chosen.count(worker.address) for worker in workers) == [2, 2]
        for conductor in running.values():  # what either gateway placed is known to both
            placements = conductor.service.core.placements
            await until(lambda placements=placements: len(placements) == 4)  # type: ignore[misc]
            assert [placements[f"r{n}"].decode for n in range(4)] == chosen
        assert (
            len({await_free.decode for await_free in [await place(one, "x"), await place(other, "y")]}) == 2
        )


@contextlib.asynccontextmanager
async def behind_proxies(running: dict[int, One]) -> AsyncIterator[dict[int, Proxy]]:
    """A proxy before each conductor, for gateways only."""
    proxies = {port: await asyncio.to_thread(Proxy, port) for port in running}  # each has an event loop
    try:
        yield proxies
    finally:
        for proxy in proxies.values():
            await asyncio.to_thread(proxy.close)


async def is_ready(remote: RemoteConductor, running: dict[int, One], proxies: dict[int, Proxy]) -> bool:
    if not await is_used(remote, running):
        return False
    port, _ = of_role(running, True)
    return remote._in_order()[0].address == f"127.0.0.1:{proxies[port].port}"


@contextlib.asynccontextmanager
async def proxied(
    workers: list[Worker], num_gateways: int = 1
) -> AsyncIterator[tuple[dict[int, One], dict[int, Proxy], list[RemoteConductor]]]:
    """Two conductors, and gateways that reach them through proxies."""
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(pair())
        proxies = await stack.enter_async_context(behind_proxies(running))
        ports = dict(zip((one.port for one in proxies.values()), running.values(), strict=True))
        remotes = [await stack.enter_async_context(gateway(ports, workers)) for _ in range(num_gateways)]
        for remote in remotes:
            await until(lambda remote=remote: is_ready(remote, running, proxies))  # type: ignore[misc]
        yield running, proxies, remotes


async def test_what_a_slow_conductor_places_late_ends_with_the_request(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway uses the other conductor meanwhile, where the request ends before this one reads it."""
    async with proxied(workers) as (running, proxies, [remote]):
        port, slow = of_role(running, True)
        _, other = of_role(running, False)
        await place(remote, "a")
        monkeypatch.setattr(client, "CALL_TIMEOUT_S", 0.2)
        proxies[port].silence(True)
        assert (await place(remote, "b")).policy, "the other conductor places it"
        remote.post(Finished("b"))
        await until(lambda: "b" not in other.service.core.placements)
        num_placed = sum(row.num_placed for row in slow.service.core.status())
        monkeypatch.setattr(client, "CALL_TIMEOUT_S", 5.0)
        proxies[port].heal()
        await until(lambda: sum(row.num_placed for row in slow.service.core.status()) > num_placed)
        for one in slow, other:
            await until(lambda one=one: list(one.service.core.placements) == ["a"])  # type: ignore[misc]


async def test_what_a_slow_conductor_places_for_a_client_that_left_ends_as_well(
    workers: list[Worker],
) -> None:
    async with proxied(workers) as (running, proxies, [remote]):
        port, slow = of_role(running, True)
        _, other = of_role(running, False)
        await place(remote, "a")
        proxies[port].silence(True)
        asking = asyncio.create_task(place(remote, "b"))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        num_placed = sum(row.num_placed for row in slow.service.core.status())
        remote.post(Finished("b"))
        await until(lambda: not remote._unanswered)
        proxies[port].heal()
        await until(lambda: sum(row.num_placed for row in slow.service.core.status()) > num_placed)
        for one in slow, other:
            await until(lambda one=one: list(one.service.core.placements) == ["a"])  # type: ignore[misc]


async def test_a_placement_waits_for_conductors_that_were_only_slow(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is lost and the other one is late with its answer: it answers again at once, and is used."""
    in_turn = sample("mooncake_conductor_client_in_turn_total")
    async with proxied(workers) as (running, proxies, [remote]):
        other, _ = of_role(running, False)
        monkeypatch.setattr(client, "CALL_TIMEOUT_S", 0.2)
        monkeypatch.setattr(client, "RETURN_S", 60.0)
        for proxy in proxies.values():
            proxy.silence(True)
        waiting = asyncio.create_task(place(remote, "a"))
        await until(lambda: not remote.is_connected)
        assert not waiting.done()
        proxies[other].heal()
        assert (await waiting).policy
    assert sample("mooncake_conductor_client_in_turn_total") == in_turn


async def test_without_a_conductor_for_longer_nothing_waits(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RETURN_S", 0.0)
    monkeypatch.setattr(client, "CALL_TIMEOUT_S", 0.2)
    async with proxied(workers) as (_, proxies, [remote]):
        for proxy in proxies.values():
            proxy.silence(True)
        assert (await place(remote, "a")).degraded == "no conductor"


async def test_requests_of_a_gateway_that_dies_with_the_leader_are_released(workers: list[Worker]) -> None:
    async with pair() as running:
        async with gateway(running, workers) as remote:
            await until(lambda: is_used(remote, running))
            port, leader = of_role(running, True)
            _, follower = of_role(running, False)
            await place(remote, "a")
            await until(lambda: follower.num_requests == 1)
            # The leader is gone first, so that it can't report what it lost.
            await leader.server.peers.close()
            del running[port]
            await leader.stop()
        await until(lambda: follower.num_requests == 0)


async def test_what_was_placed_without_a_conductor_is_reported_when_one_is_back(
    workers: list[Worker],
) -> None:
    [port] = free_ports("127.0.0.1", 1, Random())
    remote = RemoteConductor(f"127.0.0.1:{port}")
    await remote.start()
    for worker in workers:
        remote.post(AddInstance(worker.address, WorkerRole.DECODE))
    assert (await place(remote, "a")).degraded == "no conductor"
    one = await begin(port)
    await until(lambda: one.num_requests == 1)
    assert sum(row.num_requests for row in one.service.core.status()) == 1
    remote.post(Finished("a"))
    await until(lambda: one.num_requests == 0)
    await remote.close()
    await one.stop()


async def test_a_conductor_that_is_its_own_peer_leads_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    [port] = free_ports("127.0.0.1", 1, Random())
    one = await begin(port, port)
    await until(lambda: one.is_leader)
    assert sample("mooncake_conductor_peer_connected", peer=f"127.0.0.1:{port}") == 0.0
    await one.stop()


async def test_a_stream_that_begins_in_the_middle_is_answered_with_a_gap() -> None:
    [port] = free_ports("127.0.0.1", 1, Random())
    one = await begin(port)
    client = AsyncClient(one.address, (type(one.server.peers.receive(Replicate(Standing(1), 0, []))),))
    try:
        answer = await client.call(Replicate(Standing(5), 3, [Finished("x")]), 5.0)
        assert answer.next == -1 and answer.standing.is_leader
    except AccessDenied:
        pytest.fail("without a credential every peer is admitted")
    finally:
        await client.close()
        await one.stop()


class Wire:
    """A TCP connection's path between two conductors, which can be cut."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_cut = False
        self._pumps: dict[asyncio.Task[None], None] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        self.is_cut = True
        for task in self._pumps:
            task.cancel()

    async def close(self) -> None:
        assert self._server is not None
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        for source, target in ((reader, there_writer), (there_reader, writer)):
            self._pumps[asyncio.create_task(self._pump(source, target))] = None

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                target.write(data)
        finally:
            target.close()


@contextlib.asynccontextmanager
async def with_wires(
    workers: list[Worker],
) -> AsyncIterator[tuple[dict[int, One], list[Wire], dict[int, Proxy], RemoteConductor]]:
    """Two conductors that reach each other by wires, and a gateway that reaches them through proxies."""
    ports = free_ports("127.0.0.1", 2, Random())
    wires = [Wire(port) for port in ports]
    ways = [await wire.open() for wire in wires]
    running = {ports[0]: await begin(ports[0], ways[1]), ports[1]: await begin(ports[1], ways[0])}
    try:
        async with behind_proxies(running) as proxies:
            by_proxy = {proxies[port].port: one for port, one in running.items()}
            async with gateway(by_proxy, workers) as remote:
                await until(lambda: is_ready(remote, running, proxies))
                yield running, wires, proxies, remote
    finally:
        for one in running.values():
            await one.stop()
        for wire in wires:
            await wire.close()


def in_flight(one: One) -> list[str]:
    return sorted(one.service.core.placements)


async def leave_standing(
    running: dict[int, One], wires: list[Wire], proxies: dict[int, Proxy], remote: RemoteConductor
) -> tuple[int, One, One]:
    """The leader is cut off with "a", "b" and "c" in flight; its gateway goes to the other one, where "a" and
    "b" end and "d" is placed. Returns the port of the old leader, and both conductors."""
    port, slow = of_role(running, True)
    _, other = of_role(running, False)
    for name in "abc":
        await place(remote, name)
    await until(lambda: in_flight(other) == ["a", "b", "c"])
    for wire in wires:
        wire.cut()
    proxies[port].silence(True)
    await place(remote, "d")
    for name in "ab":
        remote.post(Finished(name))
    await until(lambda: in_flight(other) == ["c", "d"] and other.is_leader)
    assert in_flight(slow) == ["a", "b", "c"]
    return port, slow, other


async def test_conductors_that_meet_again_report_to_each_other_what_has_ended(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway does not reach the old leader, which has its requests from before."""
    monkeypatch.setattr(client, "CALL_TIMEOUT_S", 0.2)
    async with with_wires(workers) as (running, wires, proxies, remote):
        _, slow, other = await leave_standing(running, wires, proxies, remote)
        for wire in wires:
            wire.is_cut = False
        await until(lambda: in_flight(slow) == in_flight(other) == ["c", "d"])


async def test_a_conductor_that_is_back_learns_from_the_gateway_what_has_ended(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway uses the other one, and both conductors do not reach each other."""
    monkeypatch.setattr(client, "CALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(client, "_REFRESH_S", 0.05)
    async with with_wires(workers) as (running, wires, proxies, remote):
        port, slow, other = await leave_standing(running, wires, proxies, remote)
        used = f"127.0.0.1:{next(proxies[one].port for one in running if one != port)}"
        await until(lambda: max(remote._links, key=lambda link: link.standing.rank).address == used)
        proxies[port].heal()
        await until(lambda: "a" not in in_flight(slow) and "b" not in in_flight(slow))
        assert "c" in in_flight(slow) and in_flight(other) == ["c", "d"]


def claim_of(*names: str) -> list[Placed]:
    return [Placed(Place(name, 64), Decision(name, None, "127.0.0.1:1", "")) for name in names]


@contextlib.asynccontextmanager
async def first_of_pair(worker: Worker) -> AsyncIterator[tuple[One, AsyncClient, list[SharedFact]]]:
    """A conductor whose peer does not run, which has a worker; a gateway's connection; and what it shares."""
    first, closed = free_ports("127.0.0.1", 2, Random())
    one = await begin(first, closed)
    gateway = AsyncClient(one.address, REPLIES)
    try:
        one.service.post(AddInstance(worker.address, WorkerRole.DECODE))
        await until(lambda: one.service.core.status()[0].health == "ready")
        shared: list[SharedFact] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one.server.peers, "share", shared.append)
            yield one, gateway, shared
    finally:
        await gateway.close()
        await one.stop()


async def test_a_claim_in_parts_ends_what_none_of_them_names(workers: list[Worker]) -> None:
    async with first_of_pair(workers[0]) as (one, gateway, shared):
        for name in ("ended", "first", "last", "pending", "anew"):
            await gateway.call(Place(name, 64), 5.0)
        await gateway.call(ClaimRequests(claim_of("first"), 1, is_first=True), 5.0)
        for name in ("anew", "new"):
            await gateway.call(Place(name, 64), 5.0)
        shared.clear()
        assert len(in_flight(one)) == 6, "further parts may name the others"
        await gateway.call(ClaimRequests(claim_of("last"), 1, False, True, ["pending"]), 5.0)
        assert in_flight(one) == ["anew", "first", "last", "new", "pending"]
        assert shared[-1] == Finished("ended"), "and the other conductors receive it"


async def test_a_claim_that_lacks_its_beginning_ends_nothing(workers: list[Worker]) -> None:
    async with first_of_pair(workers[0]) as (one, gateway, _):
        await gateway.call(Place("a", 64), 5.0)
        await gateway.call(ClaimRequests(claim_of("b"), 1, is_last=True), 5.0)
        await gateway.call(ClaimRequests(claim_of("c")), 5.0)
        assert in_flight(one) == ["a", "b", "c"]


async def test_a_claim_that_is_read_late_takes_no_request_back() -> None:
    [port] = free_ports("127.0.0.1", 1, Random())
    one = await begin(port)
    peers = one.server.peers
    try:
        elsewhere: list[SharedFact] = [replace(claim_of("a")[0], claim=2)]
        peers.receive(Replicate(Standing(7), 0, elsewhere, is_snapshot=True))
        peers.claim(ClaimRequests(claim_of("a"), 1, True, True), "gateway")
        assert peers.replicas.owners.owner("a") == 7
        peers.claim(ClaimRequests(claim_of("a"), 3, True, True), "gateway")
        assert peers.replicas.owners.owner("a") == "gateway"
        [snapshot] = [fact for fact in peers._snapshot()[0] if isinstance(fact, Placed)]
        assert snapshot.claim == 3
    finally:
        await one.stop()


async def test_two_that_are_cut_off_both_lead_until_they_meet_again(workers: list[Worker]) -> None:
    ports = free_ports("127.0.0.1", 2, Random())
    wires = [Wire(port) for port in ports]
    ways = [await wire.open() for wire in wires]
    running = {ports[0]: await begin(ports[0], ways[1]), ports[1]: await begin(ports[1], ways[0])}
    try:
        async with gateway(running, workers) as remote:
            await until(lambda: is_used(remote, running))
            _, follower = of_role(running, False)
            for wire in wires:
                wire.cut()
            await until(lambda: all(one.is_leader for one in running.values()))
            assert (await place(remote, "a")).policy, "both answer"
            for wire in wires:
                wire.is_cut = False
            await until(lambda: is_used(remote, running))
            assert follower.is_leader, "its term is higher"
            await until(lambda: [one.num_requests for one in running.values()] == [1, 1])
    finally:
        for one in running.values():
            await one.stop()
        for wire in wires:
            await wire.close()


async def test_a_refusal_is_no_end_where_nothing_was_placed(workers: list[Worker]) -> None:
    async with first_of_pair(workers[0]) as (one, gateway, shared):
        replicas, worker = one.server.peers.replicas, workers[0].address
        for _ in range(2):  # its gateway reports an end after each answer, whatever that was
            assert isinstance(await gateway.call(Place("never", 64, exclude=[worker]), 5.0), Refuse)
            await gateway.call(Finished("never"), 5.0)
        assert replicas.recent_ends(0.0) == [] and not shared
        await gateway.call(Place("once", 64), 5.0)
        shared.clear()
        assert isinstance(await gateway.call(Place("once", 64, exclude=[worker]), 5.0), Refuse)
        assert shared == [Finished("once")], "its earlier placement has ended"
        await gateway.call(Place("never", 64), 5.0)
        await gateway.call(Finished("never"), 5.0)
        assert [name for name, _ in replicas.recent_ends(0.0)] == ["once", "never"]
        await gateway.call(Finished("unknown"), 5.0)
        assert replicas.ended_at("unknown") > 0, "its placement may be reported late"
