# SPDX-License-Identifier: Apache-2.0
"""The contract of a transport, and the table of transports by scheme.

``local.py`` is the executable definition; ``tests/contract/test_transports.py`` checks all of them against
it. A transport reaches other processes' registered memory; a ``PeerConnection`` reaches one such process over
one transport. Everything here works on columns and completions; the engine plans and retries.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from mooncake._native import (
    Completion,
    Op,
    Peer,
    Region,
    RegionTable,
    Status,
    View,
    crc32c,
    crc32c_columns,
    crc32c_combine,
)
from mooncake._native import Queue as NativeQueue
from mooncake.transfer.descriptor import Column, RegionInfo
from mooncake.transfer.settings import TransferSettings

__all__ = [
    "SCHEMES",
    "Completion",
    "HandshakeExchange",
    "MultiRailTransport",
    "NativeConnection",
    "NativeQueue",
    "NegotiatedConnection",
    "NegotiatedTransport",
    "Op",
    "PeerConnection",
    "Region",
    "RegionRow",
    "RegionTable",
    "Status",
    "Transport",
    "TransportContext",
    "View",
    "crc32c",
    "crc32c_columns",
    "crc32c_combine",
    "make_transport",
    "region_rows",
]


class PeerConnection(Protocol):
    """Connection to one peer over one transport. Thread-safe."""

    @property
    def is_lost(self) -> bool:
        """True when the peer is permanently gone; nothing more can be moved."""
        ...

    def run(
        self,
        op: Op,
        local: Column,
        remote: Column,
        lengths: Column,
        timeout_s: float,
        checksum: bool,
    ) -> Completion:
        """Move the slices in the calling thread, without the interpreter lock.

        ``UNREGISTERED`` names a slice whose local memory is not registered (or, for a read, not
        writable); nothing was moved. After any other failure the destination's bytes are undefined,
        and an abandoned write may still land until the next operation on this connection begins.
        """
        ...

    def run_slice(
        self, op: Op, local: int, remote: int, length: int, timeout_s: float, checksum: bool
    ) -> int | Completion:
        """As ``run`` for one slice: its CRC32C, 0 without ``checksum``; or the completion of a failure."""
        ...

    def submit(
        self,
        queue: NativeQueue,
        token: int,
        op: Op,
        local: Column,
        remote: Column,
        lengths: Column,
        timeout_s: float,
        checksum: bool,
        *,
        priority: int = 0,
        reports: bool = False,
    ) -> int:
        """Move the slices on another thread; the completion comes to ``queue``.

        The greater ``priority`` goes first, also between the pieces of a transfer under way; equals
        go in order. With ``reports``, completions that are ``is_partial`` may come before the last.
        Returns -1, or the first slice whose local memory is not registered; then no completion comes.
        """
        ...

    def view(self, address: int, size_bytes: int, timeout_s: float) -> View | memoryview | None:
        """Map the peer's bytes, read-only; None when this path cannot."""
        ...

    def set_regions(self, regions: Sequence[RegionInfo]) -> None:
        """Set the peer's regions to the list that it has published."""
        ...

    def cancel(self) -> None:
        """Fail everything in flight; afterwards no local memory is accessed on its behalf."""
        ...

    def close(self) -> None:
        """Cancel, and refuse later operations."""
        ...


class Transport(Protocol):
    """One kind of path: reaches peers and serves them."""

    @property
    def endpoint(self) -> str:
        """Address at which peers reach this process on this path."""
        ...

    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float
    ) -> PeerConnection:
        """Reach the process that published ``endpoint`` and ``epoch``.

        Raises:
            PeerLost: no process is there, or another one by now.
            DeadlineExceeded: a process is there and does not answer.
            AccessDenied: the peer runs as another user.
        """
        ...

    def close(self) -> None:
        """Stop serving. Connections of this transport are closed before."""
        ...


@runtime_checkable
class MultiRailTransport(Transport, Protocol):
    """A transport with several devices: each pair of a local and a remote one is a rail."""

    def rails(self, endpoint: str) -> list[str]:
        """The rails to a peer, ``<local device>><remote device>``; none when there is only one way."""
        ...

    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float, *, rail: str = ""
    ) -> PeerConnection:
        """Connect as every transport does, over one of ``rails`` (or any)."""
        ...


@runtime_checkable
class NegotiatedConnection(PeerConnection, Protocol):
    """Connection that must be negotiated with its peer before the first operation."""

    def set_up(self, deadline: float) -> Status:
        """Negotiate now, if not done before; else ``run`` and ``submit`` do it in their caller."""
        ...


class NegotiatedTransport(Transport, Protocol):
    """Transport whose connections are set up by a handshake of both engines (``handshake.py``)."""

    needs_handshake: bool
    "Always True; the engine then listens for handshakes, and ``connect`` gets the peer's ``handshake``."

    def connect(
        self,
        endpoint: str,
        epoch: int,
        regions: Sequence[RegionInfo],
        timeout_s: float,
        *,
        handshake: str = "",
    ) -> PeerConnection:
        """Connect as every transport does; calls ``TransportContext.exchange``."""
        ...

    def accept(self, payload: bytes) -> bytes:
        """Serve a peer's ``TransportContext.exchange``: take its payload, return the answer.

        Called in a thread of the engine, never twice for one call of ``exchange``. Errors of
        ``errors.py`` are raised in the peer.
        """
        ...


class HandshakeExchange(Protocol):
    """One step of a connection set-up."""

    def __call__(
        self, address: str, scheme: str, payload: bytes, timeout_s: float, *, epoch: int = 0
    ) -> bytes:
        """Call ``accept`` of the transport ``scheme`` at the peer that listens at ``address``.

        ``epoch`` is the argument of ``connect``: a successor of that process refuses.

        Raises:
            PeerLost: no process listens there, it is another one by now, or the connection broke.
            DeadlineExceeded, ProtocolError: as usual.
        """
        ...


class TransportContext(Protocol):
    """The parts of an engine that its transports use.

    Transports keep these parts, not the context: an engine without references is closed.
    """

    regions: RegionTable
    epoch: int
    listen_host: str
    "One address, or several with commas; `advertise_host` has as many."
    advertise_host: str
    tcp_port: int
    num_streams: int
    settings: TransferSettings
    exchange: HandshakeExchange
    cuda_library: str


RegionRow: TypeAlias = tuple[int, int, int, bool]
"""A peer's region as native connections take it: address, size in bytes, key, whether it may be written."""

RegionFilter: TypeAlias = Callable[[Sequence[RegionInfo]], list[RegionRow]]
"""Picks the regions that a path reaches."""


def region_rows(regions: Iterable[RegionInfo]) -> list[RegionRow]:
    return [(region.address, region.size_bytes, region.key, region.is_writable) for region in regions]


class NativeConnection:
    """Connection to one peer through a native one: passes columns down; nothing can be mapped."""

    def __init__(self, peer: Peer, reachable: RegionFilter) -> None:
        self._peer = peer
        self._reachable = reachable
        self.run = peer.run
        self.run_slice = peer.run_slice
        self.submit = peer.submit
        self.cancel = peer.cancel
        self.close = peer.close

    @property
    def is_lost(self) -> bool:
        return self._peer.is_lost

    def view(self, address: int, size_bytes: int, timeout_s: float) -> View | None:
        return None

    def set_regions(self, regions: Sequence[RegionInfo]) -> None:
        self._peer.set_remote(self._reachable(regions))


SCHEMES = {
    "file": "mooncake.transfer.transports.file:FileTransport",
    "local": "mooncake.transfer.transports.local:LocalTransport",
    "rdma": "mooncake.transfer.transports.rdma:VerbsTransport",
    "shm": "mooncake.transfer.transports.shm:SharedMemoryTransport",
    "cuda": "mooncake.transfer.transports.cuda:DeviceMemoryTransport",
    "tcp": "mooncake.transfer.transports.tcp:TcpTransport",
}


def make_transport(scheme: str, site: TransportContext) -> Transport:
    """Make the transport called ``scheme``, serving ``site``.

    Raises:
        Unavailable: this machine lacks something that it needs.
        AddressInUse, InvalidArgument: an address is taken or invalid.
    """
    module, name = SCHEMES[scheme].split(":")
    transport: Transport = getattr(importlib.import_module(module), name)(site)
    return transport
