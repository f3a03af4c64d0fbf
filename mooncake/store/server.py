# SPDX-License-Identifier: Apache-2.0
"""The master's process: connections, the core's driver, the operation log, leadership. Decides nothing.

All requests are handled on one loop, in the order in which they arrive, by plain function calls;
that is what makes the core's answers consistent without a lock, and fast. Where masters are elected,
a reply is sent only while the election confirms that this master leads, and once every standby
that may lead next has the records it rests on (``standby_replication.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from mooncake import clock
from mooncake.driver import Driver
from mooncake.errors import AccessDenied, MooncakeError, Refusal, Unavailable
from mooncake.http.server import HttpServer, listen_for_metrics
from mooncake.log import get_logger
from mooncake.machine import Wake
from mooncake.metrics import registry
from mooncake.rpc import Call, Connection, RpcServer
from mooncake.rpc.client import split_address
from mooncake.rpc.wire import Failure
from mooncake.security import TRUSTED, Access, HttpAuth, Identity, Role, check_address, process_identity
from mooncake.store import messages as m
from mooncake.store.ha import leader_search, standby_replication
from mooncake.store.ha.coordinator import Coordinator
from mooncake.store.ha.election import Election, Standby
from mooncake.store.ha.leader_search import Leads, WhoLeads
from mooncake.store.ha.role import MasterRole, not_leader
from mooncake.store.ha.standby_replication import Follow, Followed, StandbyReplicator
from mooncake.store.mapped_segments import MappedSegments
from mooncake.store.master import tenants_file
from mooncake.store.master.context import EventPublisher, Leadership, LoadHttp, MasterHttp
from mooncake.store.master.effects import (
    AppendRecords,
    ConnectionLost,
    Effect,
    Event,
    OperatorEvent,
    Received,
    RecoveryComplete,
    Reply,
)
from mooncake.store.master.master import Master
from mooncake.store.master.metrics import MasterMetrics
from mooncake.store.master.objects import scoped
from mooncake.store.master.oplog_writer import OplogWriter
from mooncake.store.settings import MasterSettings

log = get_logger(__name__)


class MasterServer:
    """Serves one ``Master`` to clients and nodes, alone or as one of several of which one leads."""

    def __init__(self, settings: MasterSettings, other: str = "", identity: Identity | None = None) -> None:
        """
        Args:
            other: Unix socket of the server for clients that open with another protocol.
            identity: this master's identity towards others, instead of the process's.
        """
        self.identity = identity or process_identity()
        self.settings = settings
        self.publisher: EventPublisher | None = None
        self._oplog = OplogWriter(settings.oplog, settings.oplog_flush, settings.oplog_repair)
        self._role = MasterRole(settings, self._oplog, _first_id, secrets.token_bytes(16))
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises when this master must stop."""
        handlers: dict[type[msgspec.Struct], Any] = dict.fromkeys(m.REQUESTS, self._received)
        handlers |= dict.fromkeys((m.Unmount, m.DrainSegments), self._end_received)
        handlers |= {m.LookupObjects: self._lookup_received, m.PutWritten: self._put_written_received}
        if settings.log_blocks:
            handlers[m.PutEnd] = self._block_request_received
        self._rpc = RpcServer(
            {**handlers, Follow: self._follow, WhoLeads: self._who_leads},
            self._connection_lost,
            access=Access({**m.ACCESS, **leader_search.ACCESS, **standby_replication.ACCESS}, m.SPECIAL),
            identity=self.identity,
            other=other,
            name="master",
            has_local_socket=True,
        )
        self._driver: Driver[Event, Effect] | None = None
        self._coordinator: Coordinator | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._replies_sent = asyncio.Event()
        """No reply is held back."""
        self._replies_sent.set()
        self._gone: list[Connection] = []
        """Connections lost while this master did not lead; handled when it does."""
        self.web_address = ""
        """Address of the HTTP server, once it serves."""
        self.first_messages: list[msgspec.Struct] = []
        """Messages from this master's own settings, handled once it leads."""
        self._metrics = MasterMetrics(self)
        self._memory = MappedSegments(self.identity)
        self._is_serving = False

    @property
    def master(self) -> Master:
        """The master's state in this process."""
        return self._role.master

    @property
    def port(self) -> int:
        return self._rpc.port

    @property
    def address(self) -> str:
        """Address at which others reach this master."""
        host = self.settings.host
        if self.settings.advertise or host not in ("0.0.0.0", "::"):
            return self.settings.advertise or (
                f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
            )
        from mooncake.transfer.host import (  # late: transfer takes long to load
            reachable_host,
            with_port,
        )

        return with_port(reachable_host(host), self.port)

    @property
    def connections(self) -> list[Connection]:
        return list(self._rpc.connections)

    async def start(self) -> int:
        """Take over an earlier master's records, and listen. Returns the port.

        Where masters are elected, this one answers that it does not lead for as long as that is so.

        Raises:
            AddressInUse: the port is taken.
            InvalidArgument: the oplog, the election or the address can't be used.
        """
        settings = self.settings
        if settings.advertise:
            split_address(settings.advertise)
        lease_store = None
        if settings.election:
            from mooncake.store.ha.lease_store import make_lease_store  # late: transfer takes long to load

            lease_store = make_lease_store(
                settings.election, settings.cluster_id, settings.election_lease_s / 4
            )
        records, now = self._oplog.read(), clock.monotonic()
        self._guarded(lambda: self._role.begin(records, now, self._oplog.doubt))
        if settings.oplog:
            num_objects, doubt = len(self.master.objects.readable), self._oplog.doubt.name.lower()
            log.info("oplog_read", path=settings.oplog, num_objects=num_objects, doubt=doubt)
        if lease_store is None:
            self.lead(0, True)
        port = await self._rpc.start(settings.host, settings.port)
        registry.register(self._metrics)
        self._is_serving = True
        if lease_store is not None:
            me = Standby(self._oplog.id or secrets.token_hex(8), self.address)
            election = Election(
                me,
                settings.election_lease_s,
                settings.orphan_s,
                has_log=bool(settings.oplog),
                has_state=bool(records),
                keeps_records=lease_store.keeps_records,
                is_whole=self._oplog.is_whole,
            )
            self._coordinator = Coordinator(election, lease_store, self, self.identity)
            self._coordinator.on_change = self._reconsider
            self._coordinator.start()
        return port

    async def close(self) -> None:
        """Stop serving; a complete standby leads from now on. Repeated calls are harmless."""
        if not self._is_serving:
            return
        if self._coordinator is not None and self._coordinator.election.is_leading:
            await self._hand_over(self._coordinator)
        self._is_serving = self._role.is_leading = False
        if self._driver is not None:
            self._driver.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._coordinator is not None:
            await self._coordinator.close()
        await self._rpc.close()
        registry.unregister(self._metrics)
        self._memory.close()
        self._oplog.close()

    # Queries of the HTTP server and of the metrics

    @property
    def leadership(self) -> Leadership:
        """The present leader: a single master always leads itself."""
        coordinator = self._coordinator
        if coordinator is None:
            return Leadership(True, "serving", self.address, 0)
        record = coordinator.election.record
        state = "serving" if coordinator.leads() else "standby" if coordinator.is_in_sync else "catching_up"
        return Leadership(coordinator.leads(), state, coordinator.leader, record.term if record else 0)

    @property
    def num_clients(self) -> int:
        return len(self._rpc.connections)

    @property
    def num_standbys(self) -> int:
        """Number of standbys that have everything."""
        return len(self._role.followers.listed) if self._role.followers is not None else 0

    @property
    def replication(self) -> dict[str, float]:
        followers = self._role.followers
        if followers is None:
            is_standby = self._coordinator is not None and self._coordinator.is_in_sync
            return {"ha_standby_state": float(is_standby)}
        return {
            "ha_oplog_last_sequence_id": followers.number,
            "ha_oplog_applied_sequence_id": followers.number - followers.lag,
            "ha_oplog_standby_lag": followers.lag,
            "ha_oplog_pending_entries": followers.num_held,
        }

    async def ask(self, message: msgspec.Struct) -> msgspec.Struct:
        """Handle ``message`` as from a client and return the answer; for the HTTP server of this process."""
        own = _LocalCall()
        try:
            self._take(Received(own, own, message))
        except MooncakeError as error:
            return Failure(error.code, str(error))
        return await own.answer

    # Requests of clients and nodes

    def _received(self, message: msgspec.Struct, call: Call) -> None:
        self._take(Received(call, call.connection, message))

    def _end_received(self, message: m.Unmount | m.DrainSegments, call: Call) -> None:
        if call.connection.principal.role is Role.NODE:
            self._check_owner(message, call)
        self._received(message, call)

    def _block_request_received(self, message: m.LookupObjects | m.PutEnd | m.PutWritten, call: Call) -> None:
        self._take(Received(self._origin(message, call), call.connection, message))

    def _origin(self, message: m.LookupObjects | m.PutEnd | m.PutWritten, call: Call) -> Answerable:
        return _LoggedCall(call, message, self.master) if self.settings.log_blocks else call

    def _lookup_received(self, message: m.LookupObjects, call: Call) -> None:
        origin = self._origin(message, call)
        if message.value_bytes:
            origin = _CallWithValues(origin, message, self._memory, self.master)
        self._take(Received(origin, call.connection, message))

    def _put_written_received(self, message: m.PutWritten, call: Call) -> None:
        origin = self._origin(message, call)
        if message.values and self._role.is_leading and not self._write_values(message):
            origin.reply(m.PutsWritten([_NOT_HERE] * len(message.keys)))
            return
        if message.is_remote:
            origin = _CallWithValues(origin, message, self._memory, self.master)
        self._take(Received(origin, call.connection, message))

    def _write_values(self, message: m.PutWritten) -> bool:
        """Write values to the pieces that they were sent for; those that may not be written are left to the
        core, which refuses them. False: some could not be written."""
        columns = (message.pieces, message.sizes, message.checksums, message.values)
        is_small = sum(map(len, message.values)) <= m.MAX_VALUE_BYTES and len(message.keys) <= m.MAX_VALUES
        if not is_small or any(len(column) != len(message.keys) for column in columns):
            return False
        for index, (piece, size_bytes, checksum, value) in enumerate(zip(*columns, strict=True)):
            put_id, now = message.put_id + index, clock.monotonic()
            extent = self.master.preallocated(piece, message.tenant, put_id, size_bytes, now)
            if extent is None:
                continue
            address = extent.segment.address + extent.offset
            if len(value) != size_bytes or not self._memory.write(extent.segment, address, value, checksum):
                return False
        return True

    def _take(self, event: Received) -> None:
        if not self._role.is_leading or self._driver is None:
            leader = self._coordinator.leader if self._coordinator is not None else ""
            event.origin.reply(Failure("not_leader", "" if leader == self.address else leader))
            return
        if self._oplog.trouble and isinstance(event.message, _CHANGES):
            if isinstance(event.message, m.PutStart | m.PutWritten | m.PutEnd):
                self.master.counts.refused_puts += len(event.message.keys)
            event.origin.reply(_refused(event.message, self._oplog.trouble, self.settings.put_s))
            return
        self._driver.post(event)

    def _check_owner(self, message: m.Unmount | m.DrainSegments, call: Call) -> None:
        """Check that a node ends only what it mounted itself; the rest takes an administrator.

        Raises:
            AccessDenied: another node mounted it.
        """
        mounted = self.master.catalog.segments.mounted
        own = {one.node for one in mounted.values() if one.connection is call.connection}
        named = [message.segment] if isinstance(message, m.Unmount) else message.segments
        others = [name for name in named if name in mounted and mounted[name].node not in own]
        if others:
            raise AccessDenied(f"{', '.join(others)} was mounted by another node; that takes the role admin")

    def _connection_lost(self, connection: Connection) -> None:
        if self._role.followers is not None:
            self._role.followers.lost(connection)
            self._reconsider()
        if not self._is_serving:
            return
        if self._role.is_leading and self._driver is not None:
            self._driver.post(ConnectionLost(connection))
        elif any(one.connection is connection for one in self.master.segments.mounted.values()):
            self._gone.append(connection)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._reply(effect)
        elif isinstance(effect, OperatorEvent):
            (log.warning if effect.is_warning else log.info)(effect.event, **effect.fields)
        elif isinstance(effect, RecoveryComplete):
            self._oplog.recovery_complete(self.master.catalog)
        else:
            self._guarded(lambda: self._keep(effect))

    def _reply(self, reply: Reply) -> None:
        if self._oplog.trouble and isinstance(reply.message, _ACKNOWLEDGEMENTS):
            reply.origin.reply(Failure(_CODE, self._oplog.trouble))
        elif reply.must_last:
            self._oplog.flushed(functools.partial(self._answer_lasting, reply, self._role.followers))
        else:
            self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        if self._role.followers is None:  # a single master, which holds no reply back
            reply.origin.reply(reply.message)
            return
        self._guarded(lambda: _send(self._role.carry_out(reply, clock.monotonic())))
        if self._role.followers is not None and self._role.followers.num_held:
            self._replies_sent.clear()
            if self._timer is None:
                self._arm()

    def _answer_lasting(self, reply: Reply, followers: StandbyReplicator | None, trouble: str) -> None:
        """Send a reply that promises durability, or the error ``trouble`` if that is uncertain."""
        if trouble:
            reply.origin.reply(Failure(_CODE, trouble))
        elif followers is self._role.followers and self._role.is_leading:
            self._answer(reply)
        else:
            _send([not_leader(reply)])  # the request came in another term

    def _keep(self, effect: AppendRecords) -> None:
        """Write down records. If that fails, a complete standby takes over; without one, this master waits
        for space and serves reads. Raises Unavailable."""
        _send(self._role.carry_out(effect, clock.monotonic()))
        if self._oplog.trouble and self.num_standbys:
            raise Unavailable(self._oplog.trouble)

    def _fail(self, error: MooncakeError) -> None:
        """Stop answering, and let no standby copy what was not written down."""
        _send([not_leader(held) for held in self._role.step_down()])
        self._replies_sent.set()
        self._arm()
        if not self.failed.done():
            self.failed.set_exception(error)

    # Requests of standbys

    def _follow(self, message: Follow, call: Call) -> None:
        replies = self._role.follow(message, call, call.connection, clock.monotonic())
        if replies is None:
            call.reply(
                Failure("not_leader", self._coordinator.leader if self._coordinator is not None else "")
            )
            return
        _send(replies)
        self._reconsider()

    def _who_leads(self, _: WhoLeads, call: Call) -> Leads:
        lead = self.leadership
        return Leads(lead.leader, lead.term, lead.is_leader and self._role.is_leading)

    def _reconsider(self) -> None:
        """After an event of standbys or of the election: send freed replies, and update the list."""
        coordinator, followers = self._coordinator, self._role.followers
        if coordinator is None or followers is None:
            return
        coordinator.list_as_in_sync(tuple(followers.listed.values()))
        if self._role.followers is followers:
            _send(self._role.let_go(clock.monotonic()))
        if not followers.num_held:
            self._replies_sent.set()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        followers = self._role.followers
        deadline = followers.deadline() if followers is not None else None
        if deadline is not None:
            delay_s = max(0.0, deadline - clock.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._role.followers is not None:
            _send(self._role.followers.expire(clock.monotonic()))
            self._reconsider()

    # Calls of the election (``coordinator.LeadershipListener``)

    def lead(self, term: int, is_complete: bool) -> None:
        """Answer from now on, with this master's state or an empty one."""
        election = self._coordinator.election if self._coordinator is not None else None
        session = secrets.randbits(40)
        self._guarded(lambda: self._role.lead(is_complete, election, session, clock.monotonic()))
        if not self.master.catalog.is_doubted:
            self._oplog.recovery_complete(self.master.catalog)
        if election is not None:
            num_objects = len(self.master.objects.readable)
            log.info("leadership_acquired", term=term, num_objects=num_objects, is_complete=is_complete)
        self.master.catalog.keeps_records = bool(self.settings.oplog) or election is not None
        self._driver = Driver(self.master, self._perform)
        gone, self._gone = self._gone, []
        self._driver.post(Wake())
        for connection in gone:
            self._driver.post(ConnectionLost(connection))
        first_messages, self.first_messages = self.first_messages, []
        for message in first_messages:
            own = _LocalCall()
            self._driver.post(Received(own, own, message))

    def step_down(self, reason: str) -> None:
        log.warning("leadership_lost", reason=reason)
        if self._driver is not None:
            self._driver.close()
        _send([not_leader(held) for held in self._role.step_down()])
        self._arm()
        # A client without an answer tries another master, or this one again.
        for connection in self.connections:
            connection.close()

    def begin_to_follow(self) -> None:
        self._guarded(self._role.begin_to_follow)

    def take(self, answer: Followed) -> None:
        def enter() -> None:
            if self._role.take(answer, clock.monotonic()):
                self._gone = []
                log.info("standby_in_sync", num_objects=len(self.master.objects.readable))
            if self._oplog.trouble:  # the leader must not count this standby as complete
                raise Unavailable(self._oplog.trouble)

        self._guarded(enter)

    def _guarded(self, keep: Callable[[], None]) -> None:
        try:
            keep()
        except Unavailable as error:
            self._fail(error)
            raise

    async def _hand_over(self, coordinator: Coordinator) -> None:
        """Wait until held replies are sent, and name a successor."""
        self._role.is_leading = False  # nothing new is begun
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.standby_ack_s):
                await self._replies_sent.wait()
        successor = await coordinator.resign(self.settings.election_lease_s)
        log.info("leadership_handed_over", successor=successor.address if successor else "")


_CODE = "storage_error"
_NOT_HERE = Refusal("not_here", "this master can't write these bytes; the writer does")
_CHANGES = (
    m.PutStart,
    m.PutWritten,
    m.PutEnd,
    m.Remove,
    m.RemoveMatching,
    m.DropReplicas,
    m.Corrupt,
    m.Pin,
    m.Poll,
    m.CopyObject,
    m.DrainSegments,
    m.SetQuota,
)
"""Requests refused while nothing can be written down; reads and nodes' own reports are not."""
_ACKNOWLEDGEMENTS = (m.PutStarted, m.PutsWritten, m.Outcomes, m.Removed, m.Polled)
"""Replies that may confirm that something was written down."""


def _refused(message: msgspec.Struct, why: str, put_s: float) -> msgspec.Struct:
    refusal = Refusal(_CODE, why)
    if isinstance(message, m.PutStart):
        return m.PutStarted(
            put_s, [None] * len(message.keys), dict.fromkeys(range(len(message.keys)), refusal)
        )
    if isinstance(message, m.PutWritten):
        return m.PutsWritten([refusal] * len(message.keys))
    return Failure(_CODE, why)


def _first_id() -> int:
    """A larger id than earlier masters began with, if the clock was never set back. A node that knows larger
    ones reports them when it mounts (``Mount.largest_id``), before anything can be put there."""
    return (int(clock.wall() * 1000) << 20) + secrets.randbits(20)


def _send(replies: list[Reply]) -> None:
    for reply in replies:
        reply.origin.reply(reply.message)


class Answerable(Protocol):
    """Whatever a reply may be sent to."""

    def reply(self, message: msgspec.Struct) -> None: ...


class _LoggedCall:
    """A client's call whose answer is logged by block: what it has written, and what it may read now.

    Bytes move between a client and the nodes without the master, so a lease is all that is seen of a read.
    """

    def __init__(
        self, call: Call, request: m.LookupObjects | m.PutEnd | m.PutWritten, master: Master
    ) -> None:
        self._call, self._request, self._master = call, request, master

    def reply(self, message: msgspec.Struct) -> None:
        self._call.reply(message)
        keys = self._request.keys
        if isinstance(message, m.LookupReply):
            for key, found in zip(keys, message.objects, strict=True):
                if found is not None:
                    self._log("block_read", key, found, found.replicas[:1])
        elif isinstance(message, m.Outcomes | m.PutsWritten):
            for key, outcome in zip(keys, message.outcomes, strict=True):
                stored = self._master.catalog.objects.readable.get(scoped(self._request.tenant, key))
                if outcome is True and stored is not None and stored.stored is not None:
                    self._log("block_write", key, stored.stored, stored.stored.replicas)

    def _log(self, event: str, key: str, found: m.Stored, replicas: Sequence[m.Replica]) -> None:
        fields = {"tenant": self._request.tenant} if self._request.tenant else {}
        for replica in replicas:
            log.info(
                event,
                key=key,
                bytes=found.size_bytes,
                tier=str(replica.tier),
                node=replica.segment,
                peer=self._call.connection.peer,
                **fields,
            )


class _CallWithValues:
    """A client's call about small objects, whose bytes this master may move where it maps their memory.

    A lookup is answered with the bytes as well, and a put of a client that does not map its pieces with
    whether it may send them.
    """

    def __init__(
        self,
        origin: Answerable,
        request: m.LookupObjects | m.PutWritten,
        memory: MappedSegments,
        master: Master,
    ) -> None:
        self._origin, self._request, self._memory, self._master = origin, request, memory, master

    def reply(self, message: msgspec.Struct) -> None:
        if isinstance(message, m.LookupReply) and isinstance(self._request, m.LookupObjects):
            values = self._values(message.objects, self._request.value_bytes)
            message = m.LookupReply(message.lease_s, message.objects, values)
        elif isinstance(message, m.PutsWritten):
            message = m.PutsWritten(message.outcomes, message.advance, self._takes_values())
        self._origin.reply(message)

    def _values(self, objects: list[m.Stored | None], value_bytes: int) -> list[bytes]:
        """The bytes of all; nothing if some are not mapped or too large."""
        left, values = min(value_bytes, m.MAX_VALUE_BYTES), list[bytes]()
        if len(objects) > m.MAX_VALUES:
            return []
        for found in objects:
            if found is None:
                values.append(b"")
                continue
            left -= found.size_bytes
            replica = found.replicas[0]
            segment = self._master.segments.mounted.get(replica.segment)
            if left < 0 or found.size_bytes > found.chunk_bytes:
                return []
            if segment is None or segment.epoch != replica.epoch:
                return []
            value = self._memory.read(segment, replica.address, found.size_bytes, found.checksums)
            if value is None:  # not mapped, or corrupt: the client reads it, and reports that
                return []
            values.append(value)
        return values

    def _takes_values(self) -> bool:
        """Whether all of its objects, which are the best guess for the next ones, lie in mapped memory."""
        objects = self._master.catalog.objects.readable
        stored = [objects.get(scoped(self._request.tenant, key)) for key in self._request.keys]
        segments = [one.extents[0].segment for one in stored if one is not None]
        return bool(segments) and all(map(self._memory.maps, segments))


class _LocalCall:
    """Origin of a message of this process itself, in place of a client's ``Call``."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[msgspec.Struct] = asyncio.get_running_loop().create_future()

    def reply(self, message: msgspec.Struct) -> None:
        if not self.answer.done():
            self.answer.set_result(message)


async def serve(settings: MasterSettings, load_http: LoadHttp) -> None:
    """Run a master until cancelled.

    Raises:
        InvalidArgument: other hosts can reach it, and clients need no credential.
        MooncakeError: as ``running`` does.
    """
    check_address(settings.host)
    async with running(settings, load_http) as server:
        await server.failed


@contextlib.asynccontextmanager
async def running(
    settings: MasterSettings, load_http: LoadHttp, other: str = ""
) -> AsyncIterator[MasterServer]:
    """Serve clients, nodes and HTTP; the server's ``failed`` raises when the master must stop.

    Args:
        settings: see ``MasterSettings``.
        load_http: called when clients are served already, because importing takes half a second.
        other: Unix socket of the server for clients that open with another protocol.

    Raises:
        AddressInUse: a port is taken.
        InvalidArgument: the oplog can't be used.
        Unavailable: the oplog can no longer be written.
    """
    # Millions of long-lived objects and no cycles: full collections would only cost pauses.
    gc.set_threshold(100_000, 50, 1_000_000)
    quotas = tenants_file.read(settings.tenants_file) if settings.tenants_file else {}
    server = MasterServer(settings, other)
    server.first_messages = [m.SetQuota(tenant, size_bytes) for tenant, size_bytes in quotas.items()]
    async with contextlib.AsyncExitStack() as stack:
        sock = listen_for_metrics(settings.metrics_host or settings.host, settings.metrics_port)
        stack.callback(sock.close)
        stack.push_async_callback(server.close)
        gc.disable()  # the earlier master's records are read now, and none of them is garbage
        try:
            port = await server.start()
        finally:
            gc.enable()
        gc.freeze()
        http = await asyncio.to_thread(load_http)
        server.web_address = metrics_address = await stack.enter_async_context(_web(server, sock, http))
        log.info("ready", role="master", address=f"{settings.host}:{port}", metrics=metrics_address)
        log.info(f"Master service started on port {port}")  # the text that existing launchers wait for
        if settings.report_s:
            reporting = asyncio.create_task(_report(server, http, settings.report_s))
            stack.callback(reporting.cancel)
        if settings.kv_events_endpoint:
            await stack.enter_async_context(_publishing(server))
        yield server


@contextlib.asynccontextmanager
async def _web(server: MasterServer, sock: socket.socket, http: MasterHttp) -> AsyncIterator[str]:
    """Serve HTTP; yields the address."""
    key, identity = server.settings.admin_api_key, server.identity
    auth = HttpAuth(http.make_app(server), identity, TRUSTED, open_paths=http.open_paths, api_key=key)
    web = HttpServer(auth, sock, tls=identity.server_tls)
    try:
        await web.start()
        yield f"{server.settings.metrics_host or server.settings.host}:{web.port}"
    finally:
        await web.close()


async def _report(server: MasterServer, http: MasterHttp, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        status = await server.ask(m.GetMasterStatus())
        if isinstance(status, m.MasterStatus):
            log.info("summary", text=http.summary(server, status))


@contextlib.asynccontextmanager
async def _publishing(server: MasterServer) -> AsyncIterator[None]:
    from mooncake.store.master.kv_publisher import MasterKvEventPublisher  # late: it needs ZeroMQ

    server.publisher = MasterKvEventPublisher(server)
    try:
        server.publisher.start()
        yield
    finally:
        await server.publisher.close()
