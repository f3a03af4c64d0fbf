# SPDX-License-Identifier: Apache-2.0
"""Handshakes between engines: descriptor, probe, notification, connection set-up.

This module has the messages, the client, and the listener that answers them. They are small messages over
``mooncake.rpc``; bytes of regions never travel here. Every request names the version of its sender
and the process that it is meant for, so a peer of another release and a successor at the same address
are refused before anything is done.

Programs with and without an event loop use engines, and an engine must answer while its program computes; so
its listener has a loop of its own, in one thread, closed with it. The listener holds no reference to its
engine: an unreferenced engine is collected, and its listener with it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import msgspec

from mooncake.errors import InvalidArgument, PeerLost, ProtocolError, Unavailable
from mooncake.file_limit import default_max_connections
from mooncake.log import get_logger
from mooncake.rpc import BlockingClient, Call, Limits, RpcServer
from mooncake.rpc.wire import Message
from mooncake.security import EVERYBODY, TRUSTED, Access, Identity, process_identity
from mooncake.security.principal import Level
from mooncake.transfer.descriptor import VERSION, SegmentDescriptor, decode_descriptor, version_mismatch
from mooncake.transfer.host import numeric_host
from mooncake.transfer.settings import TransferSettings

MAX_PAYLOAD_BYTES = 1 << 20
"""Limit of a notification and of one step of a connection set-up."""

MAX_PEERS = 256
"""Connections kept open for later requests; beyond it the least recently used one is closed."""

log = get_logger(__name__)

MAX_NOTIFICATIONS = 65_536
MAX_NOTIFIED_BYTES = 64 << 20
_REMEMBERED = 4096
_PATIENCE_S = 10.0


class HandshakeRequest(msgspec.Struct, frozen=True, array_like=True):
    """Fields that every request begins with."""

    version: int
    epoch: int
    "Epoch of the process that is meant; 0 for any."


class DescribeRequest(HandshakeRequest, frozen=True, array_like=True, tag="describe"):
    """Request for the engine's descriptor. Answered by ``DescribeReply``."""


class DescribeReply(msgspec.Struct, frozen=True, array_like=True, tag="described"):
    descriptor: bytes


class ProbeRequest(HandshakeRequest, frozen=True, array_like=True, tag="probe"):
    """Check whether the engine is alive. Answered by ``ProbeReply``."""


class ProbeReply(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The engine that answers."""

    name: str
    epoch: int


class NotifyRequest(HandshakeRequest, frozen=True, array_like=True, tag="notify"):
    """Notification for its program. Answered by ``NotifyReply``; delivered once if received twice."""

    number: int
    "Random number; the same when the request is sent again."
    sender: str
    name: str
    message: bytes


class ExchangeRequest(HandshakeRequest, frozen=True, array_like=True, tag="exchange"):
    """A transport's connection set-up; answered by ``ExchangeReply``."""

    scheme: str
    payload: bytes


class ExchangeReply(msgspec.Struct, frozen=True, array_like=True, tag="exchanged"):
    payload: bytes


class NotifyReply(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Confirmation without content."""


def access_of(admitted: frozenset[Level]) -> Access:
    """Table of the roles that may send requests to an engine that serves those of ``admitted``."""
    requests = (DescribeRequest, ProbeRequest, ExchangeRequest)
    return Access({**dict.fromkeys(requests, admitted), NotifyRequest: admitted & TRUSTED})


class Notification(msgspec.Struct, frozen=True):
    """Message from a peer's program to this process's program."""

    sender: str
    "Name of the peer's segment."
    name: str
    message: bytes

    @property
    def text(self) -> str:
        return self.message.decode(errors="replace")


_Reply = TypeVar("_Reply", bound=Message)

REPLIES: tuple[type[Message], ...] = (DescribeReply, ProbeReply, NotifyReply, ExchangeReply)


class HandshakeClient:
    """Client of other engines' listeners; thread-safe. Every call may raise PeerLost (no listener, or another
    process than the one that was meant), DeadlineExceeded, and ProtocolError (a peer of another version)."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity or process_identity()
        self._clients: dict[str, BlockingClient] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        _clients.add(self)

    def __repr__(self) -> str:
        return f"<HandshakeClient peers={len(self._clients)}>"

    def describe(self, address: str, timeout_s: float, *, epoch: int = 0) -> SegmentDescriptor:
        """Get the descriptor of the engine at ``address`` (``host:port``)."""
        answer = self._ask(address, DescribeRequest(VERSION, epoch), DescribeReply, timeout_s)
        return decode_descriptor(answer.descriptor)

    def probe(self, address: str, timeout_s: float, *, epoch: int = 0) -> ProbeReply:
        """Probe the engine at ``address``."""
        return self._ask(address, ProbeRequest(VERSION, epoch), ProbeReply, timeout_s)

    def notify(
        self, address: str, sender: str, name: str, message: bytes, timeout_s: float, *, epoch: int = 0
    ) -> None:
        """Send a notification and wait for its receipt; ``TransferEngine.notifications`` returns it there.

        Raises:
            InvalidArgument: larger than ``MAX_PAYLOAD_BYTES``.
            Unavailable: the peer's program does not take its notifications.
        """
        check_size("notification", len(name.encode()) + len(message))
        number = secrets.randbits(63)
        self._ask(
            address, NotifyRequest(VERSION, epoch, number, sender, name, message), NotifyReply, timeout_s
        )

    def exchange(
        self, address: str, scheme: str, payload: bytes, timeout_s: float, *, epoch: int = 0
    ) -> bytes:
        """Return the answer of the peer's transport ``scheme`` to ``payload`` (``Transport.accept``).

        The request is never sent twice: after a broken connection it is unknown whether the peer accepted.
        """
        check_size("payload", len(payload))
        client = self._new_client(address)
        try:
            answer = _first_answer(client, ExchangeRequest(VERSION, epoch, scheme, payload), timeout_s)
        finally:
            client.close()
        return _expected(answer, ExchangeReply, address).payload

    def close(self) -> None:
        """Close all connections; calls under way raise PeerLost."""
        with self._lock:
            self._is_closed = True
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _ask(self, address: str, message: HandshakeRequest, reply: type[_Reply], timeout_s: float) -> _Reply:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            client = self._clients.pop(address, None)
            if client is not None:
                self._clients[address] = client  # most recently used
        if client is not None:
            try:
                return _expected(client.call(message, timeout_s), reply, address)
            except PeerLost:  # perhaps only this connection, because the peer was restarted
                self._drop(address, client)
        client = self._new_client(address)
        answer = _first_answer(client, message, max(0.001, deadline - time.monotonic()))
        self._keep(address, client)
        return _expected(answer, reply, address)

    def _new_client(self, address: str) -> BlockingClient:
        if self._is_closed:
            raise PeerLost(f"engine at {address} was not called: this process's own engine is closed")
        return BlockingClient(
            address,
            REPLIES,
            name="the engine",
            is_patient=False,
            identity=self._identity,
            servers=EVERYBODY,
        )

    def _keep(self, address: str, client: BlockingClient) -> None:
        with self._lock:
            surplus = [client] if self._is_closed else []
            if not self._is_closed:
                surplus += [other for other in [self._clients.pop(address, None)] if other is not None]
                self._clients[address] = client
                if len(self._clients) > MAX_PEERS:
                    surplus.append(self._clients.pop(next(iter(self._clients))))
        for other in surplus:
            other.close()

    def drop(self, address: str) -> None:
        """Close the connection to an address that will not be used soon."""
        with self._lock:
            client = self._clients.pop(address, None)
        if client is not None:
            client.close()

    def _drop(self, address: str, client: BlockingClient) -> None:
        with self._lock:
            if self._clients.get(address) is client:
                del self._clients[address]
        client.close()

    def leave_to_parent(self) -> None:
        """Forget all connections in a forked child: they belong to the parent."""
        self._clients = {}
        self._lock = threading.Lock()


def _first_answer(client: BlockingClient, message: HandshakeRequest, timeout_s: float) -> Any:
    """The answer on a new connection, which a program of another kind closes without a reply."""
    try:
        return client.call(message, timeout_s)
    except PeerLost as error:
        was_cut_off = client.is_cut_off
        client.close()
        if not was_cut_off:
            raise
        raise PeerLost(f"{error}; is it an engine of this release, or another program?") from error
    except BaseException:
        client.close()
        raise


def _expected(answer: object, reply: type[_Reply], address: str) -> _Reply:
    if not isinstance(answer, reply):
        raise ProtocolError(f"the engine at {address} answered with {type(answer).__name__}; restart it")
    return answer


def check_size(what: str, num_bytes: int) -> None:
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidArgument(f"size of the {what}", num_bytes, f"at most {MAX_PAYLOAD_BYTES} bytes")


class HandshakeTarget(Protocol):
    """The part of an engine that serves requests of peers."""

    name: str
    epoch: int

    def describe(self) -> SegmentDescriptor: ...

    def accept(self, scheme: str, payload: bytes) -> bytes:
        """Hand a peer's connection set-up to the transport ``scheme``."""
        ...


class NotificationInbox:
    """Notifications that were received and not taken yet. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._waiting: list[Notification] = []
        self._num_bytes = 0
        self._seen: dict[int, None] = {}
        self._arrived = threading.Condition()

    def put(self, number: int, notification: Notification) -> None:
        """Add a notification, once per ``number``. Raises Unavailable when the inbox is full."""
        size_bytes = len(notification.message) + len(notification.name) + len(notification.sender)
        with self._arrived:
            if number in self._seen:
                return
            if len(self._waiting) >= MAX_NOTIFICATIONS or self._num_bytes + size_bytes > MAX_NOTIFIED_BYTES:
                raise Unavailable(
                    f"{len(self._waiting)} notifications wait to be taken; call notifications() there"
                )
            self._seen[number] = None
            if len(self._seen) > _REMEMBERED:
                del self._seen[next(iter(self._seen))]
            self._waiting.append(notification)
            self._num_bytes += size_bytes
            self._arrived.notify_all()

    def take(self, timeout_s: float) -> list[Notification]:
        """Take all notifications; wait up to ``timeout_s`` for the first."""
        with self._arrived:
            if not self._waiting and timeout_s > 0:
                self._arrived.wait_for(lambda: self._waiting, timeout_s)
            taken, self._waiting, self._num_bytes = self._waiting, [], 0
            return taken


class Listener:
    """Server of handshakes at ``host:port`` for an engine, in a thread of its own, until closed.

    Args:
        target: returns the engine, or None once it has been collected.
        admitted: roles whose requests are served, where peers are authenticated.

    Raises:
        AddressInUse: the port is taken.
        InvalidArgument: the host is no address of this machine.
    """

    def __init__(
        self,
        host: str,
        port: int,
        target: Callable[[], HandshakeTarget | None],
        inbox: NotificationInbox,
        settings: TransferSettings,
        identity: Identity,
        admitted: frozenset[Level] = EVERYBODY,
    ) -> None:
        limits = Limits(
            greeting_s=settings.greeting_timeout_s,
            stall_s=settings.stall_timeout_s,
            max_connections=settings.max_connections or default_max_connections(),
            max_body_bytes=2 * MAX_PAYLOAD_BYTES,
        )
        self._target = target
        self._inbox = inbox
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._server = RpcServer(
            {
                DescribeRequest: self._describe,
                ProbeRequest: self._probe,
                NotifyRequest: self._notify,
                ExchangeRequest: self._exchange,
            },
            limits=limits,
            access=access_of(admitted),
            identity=identity,
            name="handshake",
            is_peer=True,
        )
        started: concurrent.futures.Future[int] = concurrent.futures.Future()
        address = numeric_host(host, "listen_host")  # a name may have several, with one port for all
        self._thread = threading.Thread(
            target=self._run, args=(address, port, started), name="mooncake-handshake", daemon=True
        )
        self._thread.start()
        try:
            self.port = started.result(_PATIENCE_S)
        except BaseException:
            self._thread.join(_PATIENCE_S)
            raise
        _listeners.add(self)

    def __repr__(self) -> str:
        return f"<Listener {self._server!r}>"

    def close(self) -> None:
        """Stop listening, close connections, end the thread. Harmless when repeated."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # the last reference may be dropped in any thread
            self._thread.join(_PATIENCE_S)

    def _run(self, host: str, port: int, started: concurrent.futures.Future[int]) -> None:
        try:
            self._loop.run_until_complete(self._serve(host, port, started))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _serve(self, host: str, port: int, started: concurrent.futures.Future[int]) -> None:
        try:
            await self._server.start(host, port)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(self._server.port)
        await self._stop.wait()
        await self._server.close()

    # Answers --------------------------------------------------------------------------------------

    def _admitted(self, request: HandshakeRequest) -> HandshakeTarget:
        """The engine, if the request is meant for it."""
        host = self._target()
        if host is None:
            raise PeerLost("the engine is closing")
        if request.version != VERSION:
            raise ProtocolError(
                version_mismatch(host.name, VERSION, "the requesting process", request.version)
            )
        if request.epoch not in (0, host.epoch):
            raise PeerLost(f"segment {host.name} was restarted; open its current descriptor")
        return host

    def _describe(self, request: DescribeRequest, call: Call) -> DescribeReply:
        return DescribeReply(self._admitted(request).describe().encode())

    def _probe(self, request: ProbeRequest, call: Call) -> ProbeReply:
        host = self._admitted(request)
        return ProbeReply(host.name, host.epoch)

    def _notify(self, request: NotifyRequest, call: Call) -> NotifyReply:
        self._admitted(request)
        check_size("notification", len(request.name.encode()) + len(request.message))
        self._inbox.put(request.number, Notification(request.sender, request.name, request.message))
        return NotifyReply()

    async def _exchange(self, request: ExchangeRequest, call: Call) -> ExchangeReply:
        """Run off the loop: a transport may take milliseconds, and the loop serves other peers meanwhile."""
        host = self._admitted(request)
        check_size("payload", len(request.payload))
        since = time.monotonic()
        answer = await asyncio.get_running_loop().run_in_executor(
            None, host.accept, request.scheme, request.payload
        )
        took_s = round(time.monotonic() - since, 4)
        log.debug("transport_set_up", peer=call.connection.peer, scheme=request.scheme, took_s=took_s)
        return ExchangeReply(answer)

    def leave_to_parent(self) -> None:
        """Release the sockets in a forked child, so that they close when the parent's do.

        Their numbers are filled with /dev/null, because objects of the loop, which is not run here, own them.
        """
        replace_by_nothing(self._server.descriptors())


def replace_by_nothing(descriptors: Iterable[int]) -> None:
    """Close files of an event loop that is not run here, and put /dev/null in their places."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in descriptors:
        os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


_clients: weakref.WeakSet[HandshakeClient] = weakref.WeakSet()
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client.leave_to_parent()
    for listener in list(_listeners):
        listener.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
