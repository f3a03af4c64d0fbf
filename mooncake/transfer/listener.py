# SPDX-License-Identifier: Apache-2.0
"""The thread in which an engine answers handshakes, and its inbox of notifications.

Programs with and without an event loop use engines, and an engine must answer while its program
computes; so it has a loop of its own, in one thread, closed with it. The listener holds
no reference to its engine: an unreferenced engine is collected, and its listener with it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from mooncake.errors import PeerLost, ProtocolError, Unavailable
from mooncake.file_limit import default_max_connections
from mooncake.log import get_logger
from mooncake.rpc import Call, Limits, RpcServer
from mooncake.security import Identity
from mooncake.transfer.descriptor import VERSION, SegmentDescriptor, version_mismatch
from mooncake.transfer.handshake import (
    ACCESS,
    MAX_PAYLOAD_BYTES,
    DescribeReply,
    DescribeRequest,
    ExchangeReply,
    ExchangeRequest,
    HandshakeRequest,
    Notification,
    NotifyReply,
    NotifyRequest,
    ProbeReply,
    ProbeRequest,
    check_size,
)
from mooncake.transfer.host_address import numeric_host
from mooncake.transfer.settings import TransferSettings

log = get_logger(__name__)

MAX_NOTIFICATIONS = 65_536
MAX_NOTIFIED_BYTES = 64 << 20
_REMEMBERED = 4096
_PATIENCE_S = 10.0


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
            access=ACCESS,
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
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in self._server.descriptors():
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _after_fork() -> None:
    for listener in list(_listeners):
        listener.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
