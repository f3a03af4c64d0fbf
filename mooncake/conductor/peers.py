# SPDX-License-Identifier: Apache-2.0
"""A conductor's connections to the other conductors of its cluster.

Owns one task per peer, which sends it facts as they are reported and a heartbeat between them, and the
metrics of this. What is sent is ``replication.py``'s, who leads is ``leadership.py``'s. With no peers it
costs nothing but the accounts of owners.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec
from prometheus_client import Counter, Gauge

from mooncake import clock, metrics
from mooncake.conductor.conductor import Conductor
from mooncake.conductor.leadership import ConductorLeaderChanged, ConductorLeadership, StandingReceived
from mooncake.conductor.messages import (
    PEER_REPLIES,
    Abandoned,
    ClaimRequests,
    Event,
    Finished,
    Placed,
    RemoveInstance,
    Replicate,
    Replicated,
    SharedFact,
    Standing,
)
from mooncake.conductor.replication import FactStream, Replicas, settled_members
from mooncake.driver import Driver
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.log import get_logger
from mooncake.rpc import AsyncClient

log = get_logger(__name__)

_is_leader = Gauge(
    "mooncake_conductor_is_leader",
    "1 while the conductor of this process leads, 0 while it follows another one, or where there is none.",
    registry=metrics.registry,
)
_takeovers = Counter(
    "mooncake_conductor_takeovers",
    "Times that this conductor led in place of another one that no longer stated its term.",
    registry=metrics.registry,
)
_peer_connected = Gauge(
    "mooncake_conductor_peer_connected",
    "Whether a peer acknowledges the facts that this conductor sends to it.",
    ["peer"],
    registry=metrics.registry,
)
_peer_lag = Gauge(
    "mooncake_conductor_peer_lag_seconds",
    "Age of the oldest fact that a peer has not acknowledged, when the last message was sent.",
    ["peer"],
    registry=metrics.registry,
)
_snapshots = Counter(
    "mooncake_conductor_peer_snapshots",
    "Snapshots that were sent to a peer: at each connection, and after more facts than are kept.",
    ["peer"],
    registry=metrics.registry,
)
_placed_elsewhere = Counter(
    "mooncake_conductor_placed_elsewhere",
    "Placements that were reported to this conductor instead of decided by it, by who reported them.",
    ["source"],
    registry=metrics.registry,
)
_released = Counter(
    "mooncake_conductor_released_requests",
    "Requests of a lost conductor that no gateway reported in time, so that they count as finished.",
    registry=metrics.registry,
)

HEARTBEATS_PER_LEASE = 4
GRACE_LEASES = 5
"""Leases for which the requests of a lost conductor wait for their gateways."""
KEYS_PER_FACT = 4096
MAX_REFUSED = 4096
"""Refused requests whose gateways are still to report an end; they do so at once."""


class _PeerLink:
    """The stream to one peer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = AsyncClient(address, PEER_REPLIES, "the conductor")
        self.stream = FactStream()
        self.has_news = asyncio.Event()
        self.is_connected = False
        self.is_failure_known = False


class Peers:
    """The other conductors. Use it on one event loop: ``start``, then anything, then ``close``."""

    def __init__(
        self, core: Conductor, post: Callable[[Event], None], addresses: Sequence[str], lease_s: float
    ) -> None:
        """``post``: delivers an event to ``core``.

        Raises:
            InvalidArgument: an address is not ``host:port``.
        """
        self._core, self._post, self._lease_s = core, post, lease_s
        self._links = [_PeerLink(address) for address in addresses]
        self.replicas = Replicas(GRACE_LEASES * lease_s)
        own_id = secrets.randbits(62)
        self.leadership = ConductorLeadership(own_id, lease_s, clock.monotonic(), is_alone=not addresses)
        self._driver: Driver[StandingReceived, ConductorLeaderChanged] = Driver(
            self.leadership, self._leader_changed
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._unclaimed: dict[Hashable, dict[str, None]] = {}
        """By connection with a claim under way: what it owned before, and has not named since."""
        self._refused: dict[str, None] = {}
        """Requests that were refused here and had no placement then, the latest last."""
        _is_leader.set(self.leadership.standing.is_leader)

    @property
    def standing(self) -> Standing:
        return self.leadership.standing

    def start(self) -> None:
        """Connect to the peers. With none of them, this conductor leads after a lease."""
        if not self._links:
            return
        loop = asyncio.get_running_loop()
        self._driver.arm()
        self._tasks = [loop.create_task(self._serve(link)) for link in self._links]
        self._tasks.append(loop.create_task(self._release()))

    async def close(self) -> None:
        self._driver.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            await link.client.close()

    def share(self, fact: SharedFact) -> None:
        """Send what a client reported to all peers. Returns at once."""
        if not self._links:
            return
        now = clock.monotonic()
        for link in self._links:
            link.stream.add(fact, now)
            link.has_news.set()

    # --- owners of requests

    def placed(self, placed: Placed, owner: Hashable) -> None:
        """A request of ``owner``, a connection, was placed here."""
        owners, request_id = self.replicas.owners, placed.place.request_id
        owners.put(request_id, owner, placed.claim)
        if owner in self._unclaimed:
            self._unclaimed[owner].pop(request_id, None)
        self.share(msgspec.structs.replace(placed, claim=owners.claim(request_id)))

    def claim(self, message: ClaimRequests, owner: Hashable) -> None:
        """Requests in flight that ``owner``, a connection, reports from now on. Others of it have ended:
        their ends were reported elsewhere while this conductor did not answer."""
        owners = self.replicas.owners
        if message.is_first:
            self._unclaimed[owner] = dict.fromkeys(owners.requests(owner))
        for one in message.placed:
            if message.number < owners.claim(one.place.request_id):
                continue  # read late: its gateway has claimed it at another conductor since
            _placed_elsewhere.labels("gateway").inc()
            self._post(one)
            self.placed(msgspec.structs.replace(one, claim=message.number), owner)
        if message.is_last:
            unclaimed = self._unclaimed.pop(owner, {})
            for request_id in message.pending:
                unclaimed.pop(request_id, None)
            for request_id in unclaimed:
                if owners.owner(request_id) == owner:
                    self._post(Finished(request_id))
                    self.ended(Finished(request_id))

    def ended(self, event: Finished) -> None:
        """A client reported the end of a request."""
        is_refused = event.request_id in self._refused
        self._refused.pop(event.request_id, None)
        if is_refused and self.replicas.owners.owner(event.request_id) is None:
            return
        self.replicas.owners.remove(event.request_id)
        self.replicas.note_ended(event.request_id, clock.monotonic())
        self.share(event)

    def refused(self, request_id: str) -> None:
        """A request was refused here, which ends its earlier placement. Without one nothing has ended, now or
        when its gateway reports so: ends that peers may have missed would be forgotten for it."""
        if self.replicas.owners.owner(request_id) is not None:
            self.ended(Finished(request_id))
        self._refused.pop(request_id, None)
        self._refused[request_id] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def lost(self, owner: Hashable) -> None:
        """A connection is lost: its requests count as finished."""
        self._unclaimed.pop(owner, None)
        for request_id in self.replicas.owners.drop(owner):
            self._post(Finished(request_id))
            self.share(Abandoned(request_id))

    # --- what peers send

    def receive(self, message: Replicate) -> Replicated:
        """Take a peer's facts. A message of this process itself changes nothing."""
        now = clock.monotonic()
        if message.sender.id == self.standing.id:
            return Replicated(self.standing, message.first)
        self._driver.post(StandingReceived(message.sender))
        members = list(self._core.instances)
        facts, wanted = self.replicas.receive(message, now)
        is_leader = self.standing.is_leader  # and if so, the sender does not, whatever it has stated
        if wanted >= 0:
            self._end_missed(message)
        if wanted >= 0 and not is_leader:
            for instance in self.replicas.removed_members(message, members):
                self._post(RemoveInstance(instance))
        for fact in settled_members(facts, message, members, is_leader):
            if isinstance(fact, Placed):
                _placed_elsewhere.labels("peer").inc()
            self._post(fact)
        return Replicated(self.standing, wanted)

    def _end_missed(self, message: Replicate) -> None:
        """End requests that a peer knows to have ended while this conductor received nothing."""
        owners = self.replicas.owners
        for request_id, _ in message.ended:
            placement = self._core.placements.get(request_id)
            if placement is None or placement.placed_at > self.replicas.ended_at(request_id):
                continue
            is_of_client = not isinstance(owners.owner(request_id), int)
            owners.remove(request_id)
            self._post(Finished(request_id))
            if is_of_client:  # all peers have it from here
                self.share(Finished(request_id))

    # --- what is sent to peers

    async def _serve(self, link: _PeerLink) -> None:
        heartbeat_s = self._lease_s / HEARTBEATS_PER_LEASE
        while True:
            try:
                await self._exchange(link)
            except MooncakeError as error:
                if not link.is_failure_known:
                    log.warning("conductor_peer_lost", peer=link.address, reason=str(error))
                link.is_connected, link.is_failure_known = False, True
                _peer_connected.labels(link.address).set(0)
                _peer_lag.labels(link.address).set(0)
                link.stream.lost()
                await asyncio.sleep(heartbeat_s)
                continue
            if not link.stream.has_facts:
                link.has_news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(heartbeat_s):
                        await link.has_news.wait()

    async def _exchange(self, link: _PeerLink) -> None:
        """Send one message and take its answer.

        Raises:
            MooncakeError: the peer can't be reached, refuses this process, or is this process itself.
        """
        await link.client.connect(self._lease_s)
        now = clock.monotonic()
        message = link.stream.message(self.standing, self._snapshot, now)
        if message.is_snapshot:
            message = msgspec.structs.replace(message, ended=self.replicas.recent_ends(now))
            _snapshots.labels(link.address).inc()
        _peer_lag.labels(link.address).set(link.stream.lag_s(now))
        answer = await link.client.call(message, self._lease_s)
        assert isinstance(answer, Replicated)
        if answer.standing.id == self.standing.id:
            raise InvalidArgument("peers", link.address, "the other conductors, without this one")
        self._driver.post(StandingReceived(answer.standing))
        is_taken = link.stream.acknowledged(answer.next)
        if is_taken and not link.is_connected:
            log.info("conductor_peer_connected", peer=link.address, id=answer.standing.id)
            link.is_connected, link.is_failure_known = True, False
            _peer_connected.labels(link.address).set(1)

    def _snapshot(self) -> tuple[Sequence[SharedFact], Iterable[SharedFact]]:
        """Members and the requests of this conductor's clients; then what is inferred of silent instances."""
        owners, own = self.replicas.owners, list[str]()
        for request_id in self._core.placements:
            if not isinstance(owners.owner(request_id), int):
                own.append(request_id)
        state = [
            msgspec.structs.replace(fact, claim=owners.claim(fact.place.request_id))
            if isinstance(fact, Placed)
            else fact
            for fact in self._core.shared_state(own, clock.monotonic())
        ]
        return state, self._core.assumptions(KEYS_PER_FACT)

    async def _release(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s)
            found = self.replicas.expired(clock.monotonic())
            if found:
                log.info("conductor_requests_released", num_requests=len(found))
                _released.inc(len(found))
            for request_id in found:
                self._post(Finished(request_id))

    def _leader_changed(self, change: ConductorLeaderChanged) -> None:
        _is_leader.set(change.is_own)
        if change.is_takeover:
            _takeovers.inc()
        log.info(
            "conductor_leader_changed",
            leader=change.leader,
            term=change.term,
            is_own=change.is_own,
            reason=change.reason,
        )
        for link in self._links:
            link.has_news.set()  # the peers learn of it at once
