# SPDX-License-Identifier: Apache-2.0
"""The transfer engine: registers memory, opens segments of peers, moves batches of slices.

It owns the transports of one process, its registered memory and its table of peers; moving bytes is in
``submission.py``. It knows no object keys and no metadata format except its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import secrets
import socket
import weakref
from collections.abc import Iterable
from typing import Any

from mooncake.errors import InvalidArgument, OutOfMemory, Unavailable
from mooncake.log import get_logger
from mooncake.security import EVERYBODY, Identity, process_identity
from mooncake.security.principal import Level
from mooncake.transfer.completion_queue import AsyncCompletionQueue
from mooncake.transfer.descriptor import RegionInfo, SegmentDescriptor
from mooncake.transfer.handshake import HandshakeClient, Listener, Notification, NotificationInbox, ProbeReply
from mooncake.transfer.host import host_identity, host_topology, reachable_host, with_port
from mooncake.transfer.memory import (
    SpanIndex,
    available_bytes,
    check_mapped,
    device_span_of,
    is_device_memory,
    span_and_export,
)
from mooncake.transfer.metadata import Backend, PeerBackend, make_backend
from mooncake.transfer.name_service import NameService
from mooncake.transfer.peers import PeerTable, RemoteSegment
from mooncake.transfer.settings import TransferSettings
from mooncake.transfer.submission import TransferMethods
from mooncake.transfer.topology import ANYWHERE, Places, is_location
from mooncake.transfer.transports import (
    SCHEMES,
    Region,
    RegionTable,
    Transport,
    make_transport,
)
from mooncake.transfer.transports.cuda import DeviceMemoryTransport
from mooncake.transfer.transports.file import FileTransport, flush, open_file, provide

log = get_logger(__name__)

_numbers = itertools.count()

LOOPBACK = "127.0.0.1"
"""Address listened on where the settings name none."""


class TransferEngine(TransferMethods):
    """Registered memory of this process and the segments of its peers. Thread-safe.

    Args:
        settings: see ``TransferSettings``.
        backend: metadata backend, instead of ``settings.metadata``; neither is needed when
            descriptors are passed in some other way.
        identity: identity of this engine towards peers, instead of the process's. TLS files in the settings
            replace those of the identity, which are otherwise used for everything, tcp data included.
        admitted: roles to which this engine describes its memory and with which it sets up connections, where
            peers are authenticated.

    Raises:
        AddressInUse: ``tcp_port`` or ``handshake_port`` is taken.
        InvalidArgument: an address or a transport that does not exist.
        Unavailable: this machine lacks something that a transport needs.
    """

    def __init__(
        self,
        settings: TransferSettings | None = None,
        backend: Backend | None = None,
        identity: Identity | None = None,
        *,
        admitted: frozenset[Level] = EVERYBODY,
    ) -> None:
        settings, identity = agree_on_tls(settings or TransferSettings(), identity or process_identity())
        self.identity = identity
        for scheme in settings.transports:
            if scheme not in SCHEMES:
                raise InvalidArgument("transports", scheme, "some of " + ", ".join(SCHEMES))
        self.name = settings.name or f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        self.epoch = secrets.randbits(63)
        self.regions = RegionTable()
        self.listen_host = settings.listen_host or LOOPBACK
        self.advertise_host = settings.advertise_host or ",".join(
            reachable_host(host) for host in self.listen_host.split(",")
        )
        self.tcp_port = settings.tcp_port
        self.cuda_library = settings.cuda_library
        self.num_streams = settings.num_streams or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._host = host_identity()
        self._owned: dict[int, Region] = {}
        self._lasting: dict[int, Region] = {}
        """Those of ``_owned`` that are registered for longer than one operation, and shown to peers."""
        self._changes = itertools.count(1)
        self._last_change = 0
        self._index: tuple[int, list[int], SpanIndex] = 0, [], SpanIndex([])
        """Keys and places of ``_lasting`` as they were after the change of that number."""
        self._exports: dict[int, object] = {}
        """By key of a region: what keeps Python from freeing or resizing its memory."""
        self._locations: dict[int, str] = {}
        self._transports: dict[str, Transport] = {}
        self._client = HandshakeClient(identity)
        self.exchange = self._client.exchange
        peers = PeerTable(settings, self._host, self._transports, self._client)
        super().__init__(settings, peers, host_topology().matrix() if "rdma" in settings.transports else {})
        self._inbox = NotificationInbox()
        self._services: list[Listener | HandshakeClient | NameService] = [self._client]
        self._finalizer = weakref.finalize(
            self,
            _shut_down,
            os.getpid(),
            self._services,
            self._peers,
            self.regions,
            self._owned,
            self._lasting,
            self._exports,
            self._transports,
            self._loops,
        )
        for scheme in settings.transports:
            try:
                self._transports[scheme] = make_transport(scheme, self)
            except Unavailable as error:
                if not settings.may_lack(scheme):
                    raise
                if scheme == "rdma":
                    log.warning("rdma_unavailable", segment=self.name, reason=str(error))
        self.handshake = ""
        "Address where this process answers handshakes (``host:port``); empty when it does not."
        if backend is None and settings.metadata:
            backend = make_backend(
                settings.metadata,
                timeout_s=settings.metadata_timeout_s,
                tls=identity.https_tls(),
                signer=identity.signer(),
            )
        asks_peers = isinstance(backend, PeerBackend)
        if asks_peers:  # uses this engine's handshake client, with its certificates
            backend = PeerBackend(self._client.describe, settings.metadata_timeout_s)
        if (
            settings.handshake_port >= 0
            or asks_peers
            or any(getattr(transport, "needs_handshake", False) for transport in self._transports.values())
        ):
            self._listen(max(0, settings.handshake_port), admitted)
        if asks_peers and not settings.name:
            self.name = self.handshake
        if backend is not None:
            this = weakref.ref(self)
            self._peers.name_service = NameService(
                backend,
                settings.metadata_cluster,
                self.name,
                self.epoch,
                lambda: engine.describe() if (engine := this()) is not None else None,
            )
            self._services.insert(0, self._peers.name_service)

    def __repr__(self) -> str:
        ends = " ".join(f"{path}={transport.endpoint}" for path, transport in self._transports.items())
        return f"<TransferEngine {self.name} {ends} regions={len(self._owned)} segments={len(self._peers)}>"

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Memory ---------------------------------------------------------------------------------------

    def allocate(
        self,
        size_bytes: int,
        *,
        huge_pages: bool = True,
        populate: bool = True,
        device: str = "cpu",
        location: str = ANYWHERE,
    ) -> Region:
        """Allocate and register ``size_bytes`` of zeroed shared memory that peers reach over every path.

        ``huge_pages`` requests huge pages and falls back to normal ones. ``populate`` makes the
        kernel provide all of it now, so that missing memory is an error here and not a crash later.
        With a ``device`` (``cuda:0``) it is that device's memory, freed with the region.

        Raises:
            OutOfMemory: the machine does not have that much.
            InvalidArgument: ``size_bytes`` is not positive, or there is no such device.
            Unavailable: device memory cannot be used here.
        """
        if size_bytes <= 0:
            raise InvalidArgument("size_bytes", size_bytes, "more than 0")
        if not is_location(location):
            raise InvalidArgument("location", location, "cpu:<numa node>, cuda:<gpu> or *")
        if device != "cpu":
            return self._keep(self._cuda().allocate(size_bytes, device), device)
        room = available_bytes()
        if populate and size_bytes > room:
            raise OutOfMemory(
                f"allocate {size_bytes:,} bytes: {room:,} are available; ask for less or stop something"
            )
        try:
            region = self.regions.allocate(size_bytes, huge_pages, populate)
        except MemoryError as error:
            raise OutOfMemory(
                f"allocate {size_bytes:,} bytes: {error}; ask for less or stop something"
            ) from error
        return self._keep(region, location)

    def register(self, buffer: Any, location: str = ANYWHERE, *, is_brief: bool = False) -> Region:
        """Make existing memory usable as the local side and reachable by peers over tcp.

        ``buffer`` is a contiguous tensor, an array, anything with the buffer protocol or
        ``__cuda_array_interface__``, or ``(address, size_bytes)``, which may lie in device memory. Until
        it is unregistered it is kept alive and can be neither resized nor closed (``bytearray.clear`` and
        ``mmap.close`` raise BufferError). A read-only buffer may be read from, here and by peers, but
        nothing is moved into it. Transfers do not wait for kernels: synchronise before. ``location``
        (``cpu:<numa node>``), if known, is used to choose network cards near it. With ``is_brief`` it is
        for one operation, and its local side only: the descriptor does not contain it. Several operations
        may register the same memory so, each for itself.

        Raises:
            InvalidArgument: not contiguous, in unreachable memory, not a buffer, no such location.
            Unavailable: it is device memory, which cannot be used here.
        """
        if not is_location(location):
            raise InvalidArgument("location", location, "cpu:<numa node>, cuda:<gpu> or *")
        cuda = self._transports.get("cuda")
        region = cuda.register(buffer) if isinstance(cuda, DeviceMemoryTransport) else None
        if region is None and device_span_of(buffer) is not None:
            self._cuda()  # raises with the reason
        if region is None:
            address, size, is_writable, export = span_and_export(buffer)
            try:
                check_mapped(address, size)
            except InvalidArgument:
                export = None  # the traceback would keep it
                raise
            region = self.regions.add(address, size, is_writable, is_brief)
            if export is not None:
                self._exports[region.key] = export
        region.owner = buffer
        return self._keep(region, location, is_brief=is_brief)

    def _keep(self, region: Region, location: str, *, is_brief: bool = False) -> Region:
        if location != ANYWHERE or region.kind.startswith("cuda"):
            self._locations[region.key] = location if location != ANYWHERE else region.kind
        self._owned[region.key] = region
        if not is_brief:
            self._lasting[region.key] = region
        self._changed(is_shown=not is_brief)
        return region

    def pin(self, region: Region) -> None:
        """Lock a region of main memory until it is unregistered: copies from and to devices get faster.

        Raises:
            InvalidArgument: the system does not allow it to be locked.
            Unavailable: device memory cannot be used here.
        """
        self._cuda().pin(region)

    def _cuda(self) -> DeviceMemoryTransport:
        if "cuda" not in self.settings.transports:
            raise InvalidArgument("transports", self.settings.transports, "a list with cuda")
        if "cuda" not in self._transports:
            self._transports["cuda"] = make_transport("cuda", self)  # or raises with what is missing
        cuda = self._transports["cuda"]
        assert isinstance(cuda, DeviceMemoryTransport)
        return cuda

    def register_all(self, buffers: Iterable[Any]) -> list[Region]:
        """Register each buffer as ``register`` does; all of them or none.

        Raises:
            InvalidArgument: one of them cannot be registered.
        """
        regions: list[Region] = []
        with self.deferred_publication():
            try:
                for buffer in buffers:
                    regions.append(self.register(buffer))
            except InvalidArgument:
                for region in regions:
                    self.unregister(region)
                raise
        return regions

    def open_file(
        self,
        path: str | os.PathLike[str],
        size_bytes: int | None = None,
        *,
        writable: bool = True,
        direct: bool = True,
    ) -> Region:
        """Open a file or block device as a region: reached over ``file`` on this host, else over tcp.

        Without ``size_bytes`` its length is left as it is; with it, a file is created or extended to that
        length. ``direct`` bypasses the page cache where possible. Modes that the machine lacks are named
        in ``region.how`` and in the log. The region is no buffer; moved bytes are durable after ``flush``.

        Raises:
            InvalidArgument: no such file, and no size to create it with; or neither file nor device.
            AccessDenied: this process may not open it, or not for writing.
            OutOfSpace: the disk has no room to extend it.
            StorageError: the disk reports an error.
        """
        region = open_file(
            self.regions,
            path,
            size_bytes,
            writable=writable,
            direct=direct,
            ring=self.settings.file_ring,
            depth=self.settings.file_depth,
        )
        shown_by = self._transports.get("file")
        if isinstance(shown_by, FileTransport):
            shown_by.serve()
        return self._keep(region, ANYWHERE)

    def provide(self, region: Region, offset: int, size_bytes: int) -> None:
        """Reserve disk space for a part of a file region that was opened with holes in it.

        On file systems that cannot reserve space, a full disk is noticed only when writing.

        Raises:
            InvalidArgument: that part is not inside the region.
            OutOfSpace: the disk has no room.
            StorageError: the disk reports an error, or the region is unregistered.
        """
        provide(region, offset, size_bytes)

    def flush(self, region: Region) -> None:
        """Make bytes that were moved into a file region survive a loss of power (fdatasync).

        Raises:
            InvalidArgument: the region is no file.
            StorageError: the device reports an error, or the region is unregistered; bytes written since the
                last flush may be lost.
        """
        flush(region)

    def unregister(self, region: Region) -> None:
        """Unregister a region: afterwards nothing accesses its memory, and transfers that did are CANCELLED.

        The wait is bounded: a peer that hangs is disconnected. Views of an allocated region stay readable.
        A brief region may be unregistered when its operation's transfers have ended; those of another
        operation that has registered the same memory go on.
        """
        self.regions.remove(region.key)
        self._owned.pop(region.key, None)
        self._locations.pop(region.key, None)
        was_shown = self._lasting.pop(region.key, None) is not None
        self._exports.pop(region.key, None)
        self._changed(is_shown=was_shown)

    def region_of(self, address: int, size_bytes: int) -> Region | None:
        """The region that contains all of the range, so that it need not be registered again.

        Regions registered only for one operation (``is_brief``) are left out: they may go too early.
        """
        number, keys, index = self._index
        if number != self._last_change:
            number = self._last_change  # before the regions are listed: another thread may change them
            regions = list(self._lasting.items())
            keys = [key for key, _ in regions]
            index = SpanIndex([(region.address, region.size_bytes) for _, region in regions])
            self._index = number, keys, index
        at = index.around(address, size_bytes)
        return None if at is None else self._lasting.get(keys[at])

    def is_on_one_device(self, segment: RemoteSegment, remote_address: int, local_address: int) -> bool:
        """Whether both are memory of the same device of this host, by its name in both processes."""
        here = _kind_at(list(self._owned.values()), local_address)
        return here.startswith("cuda") and here == _kind_at(segment.descriptor.regions, remote_address)

    def is_host_memory(self, address: int) -> bool:
        """Whether the address lies in registered memory of the host, which the processor reads and writes."""
        return _kind_at(list(self._owned.values()), address) == "memory"

    def is_device_memory(self, address: int) -> bool:
        """Whether the address, registered or not, is in memory of a device whose bytes this engine moves."""
        return "cuda" in self.settings.transports and is_device_memory(address, self.cuda_library)

    def deferred_publication(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: changes of registered memory inside are published once, at its end."""
        name_service = self._peers.name_service
        return contextlib.nullcontext() if name_service is None else name_service.deferred_publication()

    def _changed(self, *, is_shown: bool) -> None:
        if is_shown:
            self._last_change = next(self._changes)
        self._places = Places(
            (region.address, region.size_bytes, location)
            for key, location in list(self._locations.items())
            if (region := self._owned.get(key)) is not None
        )
        if is_shown and self._peers.name_service is not None:
            self._peers.name_service.renew()

    # Peers ----------------------------------------------------------------------------------------

    def describe(self) -> SegmentDescriptor:
        """What peers need to reach this process; outdated once more memory is registered. Oldest first."""
        regions = [
            RegionInfo(
                region.address,
                region.size_bytes,
                region.key,
                region.is_shared,
                region.kind,
                self._locations.get(region.key, ANYWHERE),
                region.is_writable,
            )
            for region in list(self._lasting.values())
        ]
        endpoints = {path: transport.endpoint for path, transport in self._transports.items()}
        return SegmentDescriptor(
            self.name, self._host, self.epoch, endpoints, regions, self.handshake, topology=self._matrix
        )

    def open(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        """Open the peer of a descriptor, cached by name and epoch. Connects when first used.

        Raises:
            Unavailable: this engine is closed.
        """
        return self._peers.open(descriptor)

    def forget(self, segment: RemoteSegment) -> None:
        """Drop a peer that will not be used again: what is in flight is CANCELLED, connections close."""
        self._peers.forget(segment)

    def publish(self, ttl_s: float | None = None, *, is_patient: bool = False) -> None:
        """Publish this process under its name, from now until the engine is closed.

        The descriptor is put again three times within ``ttl_s`` (by default ``metadata_ttl_s``), and
        whenever registered memory changes, before the call that changed it returns.

        Args:
            is_patient: an unreachable service is no error; it gets the descriptor when it is back.

        Raises:
            InvalidArgument: the engine was made without metadata.
            PeerLost, DeadlineExceeded: the service does not answer.
            ProtocolError: it is something else.
        """
        ttl_s = self.settings.metadata_ttl_s if ttl_s is None else ttl_s
        self._peers.require_name_service().publish(ttl_s, is_patient)

    def open_name(self, name: str) -> RemoteSegment | None:
        """Open the segment called ``name``; None when there is none. With ``P2PHANDSHAKE`` a name is the
        ``host:port`` of the peer's handshake, and the peer itself is queried.

        The answer is cached for ``metadata_cache_s`` and requested again at once after a transfer has
        failed. While the service is unreachable, peers opened before stay usable.

        Raises:
            InvalidArgument: the engine was made without metadata.
            PeerLost, DeadlineExceeded: the service does not answer, or without one the peer.
            ProtocolError: another kind of entry has that name, or the peer has another version.
        """
        return self._peers.open_name(name)

    def refresh(self, segment: RemoteSegment, timeout_s: float = 5.0) -> bool:
        """Query a peer's current descriptor after a failure. True if a retry makes sense, because the
        same process has published something else since.

        A process that took its place is never used: the caller meant memory of the first one. Then
        the segment is dead, ``reason`` says so, and ``open_name`` finds the new one.
        """
        return self._peers.refresh(segment, timeout_s)

    # Handshake ------------------------------------------------------------------------------------

    def notify(
        self, segment: RemoteSegment, name: str, message: bytes | str = b"", timeout_s: float = 5.0
    ) -> None:
        """Send a notification to the peer's program, which takes it with ``notifications``. At most 1 MiB.

        Returns when the peer has it. The receiver sees all bytes that were written before.

        Raises:
            InvalidArgument: too large, or the peer does not listen for handshakes.
            PeerLost, DeadlineExceeded: the peer is gone, was restarted, or does not answer.
            Unavailable: the peer's program does not take its notifications.
        """
        peer = segment.descriptor
        if not peer.handshake:
            raise InvalidArgument(
                "segment", peer.name, "one that listens for handshakes; start it with handshake_port=0"
            )
        data = message.encode() if isinstance(message, str) else bytes(message)
        self._client.notify(peer.handshake, self.name, name, data, timeout_s, epoch=peer.epoch)

    def notifications(self, timeout_s: float = 0.0) -> list[Notification]:
        """Take the notifications received since the last call; wait up to ``timeout_s`` for the first."""
        return self._inbox.take(timeout_s)

    def probe(self, peer: str, timeout_s: float = 5.0) -> ProbeReply | None:
        """Probe the engine that answers handshakes under the name or address (``host:port``) ``peer``.

        None when no segment is published under that name and it is no address either.

        Raises:
            PeerLost, DeadlineExceeded: neither an engine nor, if needed, the metadata service answers.
            ProtocolError: an engine of another version answers.
            Unavailable: the engine of that name does not listen for handshakes.
            InvalidArgument: ``peer`` is no address, and the engine was made without metadata.
        """
        return self._peers.probe(peer, timeout_s)

    def accept(self, scheme: str, payload: bytes) -> bytes:
        """Answer a peer's connection set-up; called by the listener."""
        accept = getattr(self._transports.get(scheme), "accept", None)
        if accept is None:
            schemes = ", ".join(path for path, other in self._transports.items() if hasattr(other, "accept"))
            raise InvalidArgument("transport", scheme, f"one that {self.name} sets up: {schemes or 'none'}")
        answer: bytes = accept(payload)
        return answer

    def _listen(self, port: int, admitted: frozenset[Level]) -> None:
        target = weakref.ref(self)
        first, reached_at = self.listen_host.split(",")[0], self.advertise_host.split(",")[0]
        listener = Listener(first, port, target, self._inbox, self.settings, self.identity, admitted)
        self._services.insert(0, listener)
        self.handshake = with_port(reached_at, listener.port)

    def map(
        self, segment: RemoteSegment, address: int, size_bytes: int, timeout_s: float = 5.0
    ) -> memoryview | None:
        """Map the peer's bytes, read-only; None when no path can map them.

        Later changes by the peer are visible; the bytes stay mapped while the view lives.
        """
        for path in segment.paths:
            connection = segment.connection(path, timeout_s)
            view = connection.view(address, size_bytes, timeout_s) if connection is not None else None
            if view is not None:
                return memoryview(view)
        return None

    def close(self) -> None:
        """Cancel everything, unregister all memory, stop serving. Harmless when repeated."""
        self._finalizer()


# At exit the finalizers of a process run in the place of the first one that it made. One made here, and not
# with the first engine, leaves engines open for what a program registers between its import and that engine.
weakref.finalize(TransferEngine, lambda: None).detach()


def _shut_down(
    owner_pid: int,
    services: list[Listener | HandshakeClient | NameService],
    peers: PeerTable,
    regions: RegionTable,
    owned: dict[int, Region],
    lasting: dict[int, Region],
    exports: dict[int, object],
    transports: dict[str, Transport],
    loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncCompletionQueue],
) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child: everything here belongs to its parent
    for service in services:
        service.close()
    peers.close()
    regions.remove_all()
    owned.clear()
    lasting.clear()
    exports.clear()
    for transport in transports.values():
        transport.close()
    for queue in list(loops.values()):
        queue.close_soon()


def _kind_at(regions: Iterable[Region] | Iterable[RegionInfo], address: int) -> str:
    """The medium of the region that contains ``address``; empty when none does."""
    return next((r.kind for r in regions if r.address <= address < r.address + r.size_bytes), "")


def agree_on_tls(settings: TransferSettings, identity: Identity) -> tuple[TransferSettings, Identity]:
    """Return settings and identity of one engine with the same TLS files.

    They are those of the settings if these name any, else those of the identity.

    Raises:
        InvalidArgument: names the setting whose file is missing or wrong.
    """
    if settings.tls:
        return settings, identity.with_tls_files(
            settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_check_host
        )
    if not identity.has_tls:
        return settings, identity
    files = identity.settings
    return (
        dataclasses.replace(
            settings,
            tls="all",
            tls_cert=files.tls_cert,
            tls_key=files.tls_key,
            tls_ca=files.tls_ca,
            tls_check_host=files.tls_check_host,
        ),
        identity,
    )
