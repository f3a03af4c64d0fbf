"""What a transport must do, and the table of them by scheme.

``local.py`` is the living definition; ``tests/contract/test_transports.py`` holds all of them to it.
A transport reaches other processes' registered memory; a carrier is one such process as seen by one
transport. Everything here works on columns and completions; plans and retries are the engine's.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mooncake._native import (
    Completion,
    Op,
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
    "NativeQueue",
    "NegotiatedConnection",
    "NegotiatedTransport",
    "Op",
    "PeerConnection",
    "Region",
    "RegionTable",
    "Status",
    "Transport",
    "TransportContext",
    "View",
    "crc32c",
    "crc32c_columns",
    "crc32c_combine",
    "make_transport",
]


class PeerConnection(Protocol):
    """One peer over one transport. Safe to use from many threads."""

    @property
    def is_lost(self) -> bool:
        """The peer is gone for good; nothing more can be moved."""
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
        and a write that was given up may still land until the next operation on this carrier begins.
        """
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
        """The same on another thread; the completion comes to ``queue``.

        The greater ``priority`` goes first, also between the pieces of what is under way already; equals
        go in order. With ``reports``, completions that are ``is_partial`` may come before the last.
        Returns -1, or the first slice whose local memory is not registered; then nothing will come.
        """
        ...

    def view(self, address: int, size_bytes: int, timeout_s: float) -> View | memoryview | None:
        """The peer's bytes in place, read-only; None when this path cannot."""
        ...

    def set_regions(self, regions: Sequence[RegionInfo]) -> None:
        """The peer published a new list."""
        ...

    def cancel(self) -> None:
        """Fail everything in flight; when it returns no local memory is touched on its behalf."""
        ...

    def close(self) -> None:
        """Cancel, and refuse what comes later."""
        ...


class Transport(Protocol):
    """One way to reach and to be reached."""

    @property
    def endpoint(self) -> str:
        """Where peers find this process on this path."""
        ...

    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float
    ) -> PeerConnection:
        """Reach the process that published ``endpoint`` and ``epoch``.

        Raises:
            PeerLost: nobody is there, or another process by now.
            DeadlineExceeded: somebody is there and does not answer.
            AccessDenied: the peer runs as another user.
        """
        ...

    def close(self) -> None:
        """Stop serving. Carriers of this transport are closed before."""
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
        """As for every transport, over one of ``rails`` (or any)."""
        ...


@runtime_checkable
class NegotiatedConnection(PeerConnection, Protocol):
    """A carrier that must agree with its peer before the first operation."""

    def set_up(self, deadline: float) -> Status:
        """Do that now, if it was not done; ``run`` and ``submit`` would in their caller."""
        ...


class NegotiatedTransport(Transport, Protocol):
    """A transport whose connections are set up by a conversation of both engines (``handshake.py``)."""

    needs_handshake: bool
    "True; the engine then listens for handshakes, and ``connect`` gets the peer's ``handshake`` address."

    def connect(
        self,
        endpoint: str,
        epoch: int,
        regions: Sequence[RegionInfo],
        timeout_s: float,
        *,
        handshake: str = "",
    ) -> PeerConnection:
        """As for every transport; calls ``TransportContext.exchange``."""
        ...

    def accept(self, payload: bytes) -> bytes:
        """The peer's side of ``TransportContext.exchange``: take what it sent, return what it needs.

        Called in a thread of the engine, never twice for one call of ``exchange``. What it raises from
        ``errors.py`` is raised in the peer.
        """
        ...


class HandshakeExchange(Protocol):
    """One step of a connection set-up."""

    def __call__(
        self, address: str, scheme: str, payload: bytes, timeout_s: float, *, epoch: int = 0
    ) -> bytes:
        """What ``accept`` of the transport ``scheme`` returned at the peer that listens at ``address``.

        ``epoch`` is the one that ``connect`` was given: a successor of that process refuses.

        Raises:
            PeerLost: nobody listens there, it is another process by now, or the connection broke.
            DeadlineExceeded, ProtocolError: as usual.
        """
        ...


class TransportContext(Protocol):
    """What a transport needs to know about the engine it works for.

    Keep what you need of it, not the site: an engine that nobody refers to is closed.
    """

    regions: RegionTable
    epoch: int
    listen_host: str
    "One address, or several by commas; `advertise_host` has as many."
    advertise_host: str
    tcp_port: int
    num_streams: int
    settings: TransferSettings
    exchange: HandshakeExchange
    cuda_library: str


SCHEMES = {
    "file": "mooncake.transfer.transports.file:FileTransport",
    "local": "mooncake.transfer.transports.local:LocalTransport",
    "rdma": "mooncake.transfer.transports.rdma:RdmaTransport",
    "shm": "mooncake.transfer.transports.shm:ShmTransport",
    "cuda": "mooncake.transfer.transports.cuda:CudaTransport",
    "tcp": "mooncake.transfer.transports.tcp:TcpTransport",
}


def make_transport(scheme: str, site: TransportContext) -> Transport:
    """The transport called ``scheme``, serving ``site``.

    Raises:
        Unavailable: this machine lacks what it needs.
        AddressInUse, InvalidArgument: an address cannot be had.
    """
    module, name = SCHEMES[scheme].split(":")
    transport: Transport = getattr(importlib.import_module(module), name)(site)
    return transport
