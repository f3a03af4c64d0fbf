# SPDX-License-Identifier: Apache-2.0
"""Client side of failover: find the leading master, and find it again; blocking and on asyncio.

A master is named by its address, by those of all that may lead, or by the lease store of their election
(``MasterResolver``). One that does not lead names the leader, and the request is sent there; but one that
has just ceased to lead may have carried it out, and one that was silent for ``DOUBT_S`` may have it, too. So
every request may arrive twice. One that was lost with its connection is not repeated here: the caller does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from mooncake.errors import DeadlineExceeded, InvalidArgument, MooncakeError, NotLeader, PeerLost, Unavailable
from mooncake.rpc import AsyncClient, BlockingClient
from mooncake.rpc.client import split_address
from mooncake.security import Identity, process_identity
from mooncake.store.ha import election
from mooncake.store.ha.leader_search import DOUBT_S, PAUSE_S, PROBE_S, LeaderSearch, Leads, WhoLeads
from mooncake.store.ha.lease_store import LeaseStore, make_lease_store
from mooncake.store.settings import ELECTIONS

ADDRESS_FORMS = (
    "host:port, host:port,host:port, etcd://host:port[;host:port][/cluster], redis://host:port[/cluster] "
    "or k8s://namespace[/cluster]"
)


class MasterResolver:
    """Addresses of a cluster's masters. Thread-safe.

    Raises:
        InvalidArgument: the name has none of ``ADDRESS_FORMS``.
    """

    def __init__(self, master: str) -> None:
        self.master = master
        self.hint = ""
        """Address of the master last reported as the leader."""
        self._lease_store: LeaseStore | None = None
        self._addresses: list[str] = []
        scheme, is_url, _ = master.partition("://")
        if is_url and scheme in ELECTIONS:
            self._lease_store = make_lease_store(master, timeout_s=PROBE_S)
            return
        if is_url:
            raise InvalidArgument("master", master, ADDRESS_FORMS)
        try:
            self._addresses = [one.strip() for one in master.replace(";", ",").split(",")]
            for address in self._addresses:
                split_address(address)
        except InvalidArgument as error:
            raise InvalidArgument("master", master, ADDRESS_FORMS) from error

    @property
    def single_address(self) -> str:
        """The only address there is to try; "" when there are others."""
        return self._addresses[0] if len(self._addresses) == 1 and not self.hint else ""

    def addresses(self) -> list[str]:
        """Addresses to try, the likeliest first. May block; raises MooncakeError if the lease store is
        silent."""
        found = [self.hint] if self.hint else []
        if self._lease_store is not None:
            content = self._lease_store.read()
            if content is not None:
                try:
                    address = election.decode_lease(content).address
                    found = [address] if address else []
                except msgspec.MsgspecError as error:
                    raise Unavailable(f"{self.master} holds no leader record: {error}") from error
        found += [address for address in self._addresses if address not in found]
        return found

    def close(self) -> None:
        if self._lease_store is not None:
            self._lease_store.close()

    def __repr__(self) -> str:
        return f"<MasterResolver to {self.master} [{self.hint or 'no hint'}]>"


def who_leads(address: str, name: str, timeout_s: float, identity: Identity | None) -> Leads | MooncakeError:
    """Ask one master which one leads; an error is returned as a value."""
    probe = BlockingClient(address, (Leads,), name, is_patient=False, identity=identity)
    try:
        answer: Leads = probe.call(WhoLeads(), timeout_s)
        return answer
    except MooncakeError as error:
        return error
    finally:
        probe.close()


class BlockingMasterClient:
    """Calls the leading master, from any thread: a ``BlockingClient`` with a ``MasterResolver``."""

    def __init__(
        self,
        master: str,
        replies: Iterable[type[msgspec.Struct]],
        name: str = "the master",
        *,
        identity: Identity | None = None,
    ) -> None:
        self._identity = identity or process_identity()
        self.resolver = MasterResolver(master)
        self._replies: tuple[type[msgspec.Struct], ...] = (*replies, Leads)
        self._name = name
        self._lock = threading.Lock()
        self._client: BlockingClient | None = None
        self._address = ""
        self._is_closed = False
        if self.resolver.single_address:
            self._use(self.resolver.single_address)

    def call(self, message: msgspec.Struct, timeout_s: float) -> Any:
        """Raises as ``BlockingClient.call``."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            client = self._client
            try:
                if client is None:
                    client = self._find(deadline, timeout_s)
                    continue
                if self.resolver.single_address or remaining_s <= DOUBT_S:
                    return client.call(message, remaining_s)
                return client.call(message, DOUBT_S)
            except NotLeader as error:
                self._let_go(client, error.leader)
                if time.monotonic() + PAUSE_S >= deadline:
                    raise
                if not error.leader:
                    time.sleep(PAUSE_S)
            except PeerLost:
                if not self.resolver.single_address:
                    self._let_go(client)
                raise
            except DeadlineExceeded:
                if remaining_s <= DOUBT_S or self.resolver.single_address or client is None:
                    raise
                self._doubt(client, deadline, timeout_s)

    def post(self, message: msgspec.Struct, timeout_s: float) -> None:
        """As ``BlockingClient.post``; the leading master is not searched for."""
        client = self._client
        if client is None:
            raise PeerLost(f"{self._name}: there is no connection to send {type(message).__name__}")
        client.post(message, timeout_s)

    def connect(self, timeout_s: float) -> None:
        """Find the leader now; raises Unavailable, at once for a single master that refuses connections."""
        single_address = self.resolver.single_address
        if single_address:
            probe = BlockingClient(
                single_address, (Leads,), self._name, is_patient=False, identity=self._identity
            )
            try:
                probe.call(WhoLeads(), timeout_s)
            finally:
                probe.close()
        self.call(WhoLeads(), timeout_s)

    def close(self) -> None:
        self._is_closed = True
        client = self._client
        if client is not None:
            client.close()
        self.resolver.close()

    def _use(self, address: str) -> BlockingClient:
        is_patient = address == self.resolver.single_address
        self._client = BlockingClient(
            address, self._replies, self._name, is_patient=is_patient, identity=self._identity
        )
        self._address = address
        return self._client

    def _let_go(self, client: BlockingClient | None, leader: str = "") -> None:
        with self._lock:
            if client is not None and client is self._client:
                self.resolver.hint = leader
                self._client = None
                client.close()

    def _doubt(self, client: BlockingClient, deadline: float, timeout_s: float) -> None:
        """Check after a long silence whether the master still leads."""
        with self._lock:
            if client is self._client and self._search(deadline, timeout_s) != self._address:
                self._client = None
                client.close()

    def _find(self, deadline: float, timeout_s: float) -> BlockingClient:
        with self._lock:
            if self._client is not None:
                return self._client
            return self._use(self._search(deadline, timeout_s))

    def _search(self, deadline: float, timeout_s: float) -> str:
        search = LeaderSearch(self.resolver, self._name)
        while True:
            if self._is_closed:
                raise PeerLost(f"{self._name}: the client was closed")
            try:
                search.begin_round(self.resolver.addresses())
            except Unavailable as error:
                search.reasons[self.resolver.master] = str(error)
            while (address := search.next()) is not None:
                if search.take_answer(address, self._probe(address, deadline)):
                    return address
            if time.monotonic() + PAUSE_S >= deadline:
                raise search.failure(timeout_s)
            time.sleep(PAUSE_S)

    def _probe(self, address: str, deadline: float) -> Leads | MooncakeError:
        timeout_s = max(0.001, min(PROBE_S, deadline - time.monotonic()))
        return who_leads(address, self._name, timeout_s, self._identity)

    def __repr__(self) -> str:
        return f"<BlockingMasterClient {self.resolver!r}>"


class AsyncMasterClient:
    """Calls the leading master, from a loop: an ``AsyncClient`` with a ``MasterResolver`` for its address.

    ``doubt_s``: time without an answer until it checks whether the leader has changed; infinite where
    answers may take long, and the caller detects a lost leader in another way.
    """

    def __init__(
        self,
        master: str | MasterResolver,
        replies: Iterable[type[msgspec.Struct]],
        name: str = "the master",
        *,
        doubt_s: float = DOUBT_S,
        identity: Identity | None = None,
    ) -> None:
        self._identity = identity or process_identity()
        self._doubt_s = doubt_s
        self.resolver = master if isinstance(master, MasterResolver) else MasterResolver(master)
        self._owns_resolver = not isinstance(master, MasterResolver)
        self._replies: tuple[type[msgspec.Struct], ...] = (*replies, Leads)
        self._name = name
        self._finding = asyncio.Lock()
        self._client: AsyncClient | None = None
        self._address = ""
        self._is_closed = False
        if self.resolver.single_address:
            self._use(self.resolver.single_address)

    @property
    def lost(self) -> asyncio.Event:
        """Like ``AsyncClient.lost``, for the present connection."""
        if self._client is not None:
            return self._client.lost
        lost = asyncio.Event()
        lost.set()
        return lost

    async def call(self, message: msgspec.Struct, timeout_s: float) -> Any:
        """Raises as ``AsyncClient.call``."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            client = self._client
            try:
                if client is None:
                    client = await self._find(deadline, timeout_s)
                    continue
                if self.resolver.single_address or remaining_s <= self._doubt_s:
                    return await client.call(message, remaining_s)
                return await client.call(message, self._doubt_s)
            except NotLeader as error:
                await self._let_go(client, error.leader)
                if time.monotonic() + PAUSE_S >= deadline:
                    raise
                if not error.leader:
                    await asyncio.sleep(PAUSE_S)
            except PeerLost:
                if not self.resolver.single_address:
                    await self._let_go(client)
                raise
            except DeadlineExceeded:
                if remaining_s <= self._doubt_s or self.resolver.single_address or client is None:
                    raise
                async with self._finding:
                    if client is self._client and await self._search(deadline, timeout_s) != self._address:
                        self._client = None
                        await client.close()

    def post(self, message: msgspec.Struct) -> None:
        """As ``AsyncClient.post``; the leading master is not searched for."""
        if self._client is None:
            raise PeerLost(f"{self._name}: there is no connection to send {type(message).__name__}")
        self._client.post(message)

    async def connect(self, timeout_s: float) -> None:
        """Find the leader and connect now; raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        client = self._client or await self._find(deadline, timeout_s)
        await client.connect(max(0.001, deadline - time.monotonic()))

    async def close(self) -> None:
        self._is_closed = True
        if self._client is not None:
            await self._client.close()
        if self._owns_resolver:
            await asyncio.to_thread(self.resolver.close)

    def _use(self, address: str) -> AsyncClient:
        self._client = AsyncClient(address, self._replies, self._name, identity=self._identity)
        self._address = address
        return self._client

    async def _let_go(self, client: AsyncClient | None, leader: str = "") -> None:
        if client is not None and client is self._client:
            self.resolver.hint = leader
            self._client = None
            await client.close()

    async def _find(self, deadline: float, timeout_s: float) -> AsyncClient:
        async with self._finding:
            if self._client is not None:
                return self._client
            return self._use(await self._search(deadline, timeout_s))

    async def _search(self, deadline: float, timeout_s: float) -> str:
        search = LeaderSearch(self.resolver, self._name)
        while True:
            if self._is_closed:
                raise PeerLost(f"{self._name}: the client was closed")
            try:
                search.begin_round(await asyncio.to_thread(self.resolver.addresses))
            except Unavailable as error:
                search.reasons[self.resolver.master] = str(error)
            while (address := search.next()) is not None:
                if search.take_answer(address, await self._probe(address, deadline)):
                    return address
            if time.monotonic() + PAUSE_S >= deadline:
                raise search.failure(timeout_s)
            await asyncio.sleep(PAUSE_S)

    async def _probe(self, address: str, deadline: float) -> Leads | MooncakeError:
        probe = AsyncClient(address, (Leads,), self._name, is_patient=False, identity=self._identity)
        try:
            answer: Leads = await probe.call(
                WhoLeads(), max(0.001, min(PROBE_S, deadline - time.monotonic()))
            )
            return answer
        except MooncakeError as error:
            return error
        finally:
            await probe.close()

    def __repr__(self) -> str:
        return f"<AsyncMasterClient {self.resolver!r}>"
