# SPDX-License-Identifier: Apache-2.0
"""Handshakes between engines: descriptor, probe, notification, connection set-up.

This module has the messages and the client; ``listener.py`` is the server. They are small messages over
``mooncake.rpc``; bytes of regions never travel here. Every request names the version of its sender
and the process that it is meant for, so a peer of another release and a successor at the same address
are refused before anything is done.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from typing import Any, TypeVar

import msgspec

from mooncake.errors import InvalidArgument, PeerLost, ProtocolError
from mooncake.rpc import BlockingClient
from mooncake.rpc.wire import Message
from mooncake.security import EVERYBODY, TRUSTED, Access, Identity, process_identity
from mooncake.transfer.descriptor import VERSION, SegmentDescriptor, decode_descriptor

MAX_PAYLOAD_BYTES = 1 << 20
"""Limit of a notification and of one step of a connection set-up."""

MAX_PEERS = 256
"""Connections kept open for later requests; beyond it the least recently used one is closed."""


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


ACCESS = Access(
    {DescribeRequest: EVERYBODY, ProbeRequest: EVERYBODY, ExchangeRequest: EVERYBODY, NotifyRequest: TRUSTED}
)
"""Roles that may send requests to an engine, where peers are authenticated."""


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


_clients: weakref.WeakSet[HandshakeClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
