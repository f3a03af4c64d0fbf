# SPDX-License-Identifier: Apache-2.0
"""Segments of peers that this process opened: connections and lost paths, and the table of them by name.

A remote segment connects when a path is first used and remembers which paths are lost; which path to use, and
what to do when one fails, is decided elsewhere (``batch.py``). It belongs to one process and never passes to
another. So after a failure the question is not how to reach that address again, but whether the process
that was meant is still the one that answers.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake.errors import AccessDenied, InvalidArgument, MooncakeError, PeerLost, Unavailable
from mooncake.log import get_logger
from mooncake.rpc.client import split_address
from mooncake.transfer.batch import RETRIED_STATUSES, STATUS_REASONS, TIMED_OUT, TransferColumns
from mooncake.transfer.descriptor import (
    ON_ONE_HOST,
    RegionIndex,
    SegmentDescriptor,
    common_schemes,
    rail_of,
    scheme_of,
)
from mooncake.transfer.handshake import HandshakeClient, ProbeReply
from mooncake.transfer.name_service import NameService
from mooncake.transfer.rails import Rails
from mooncake.transfer.settings import TransferSettings
from mooncake.transfer.topology import Places
from mooncake.transfer.transports import (
    Completion,
    MultiRailTransport,
    NegotiatedConnection,
    Op,
    PeerConnection,
    Status,
    Transport,
)

log = get_logger(__name__)

KEPT_SEGMENTS = 64
"""Segments that are kept although no caller may hold them; beyond it, a new one takes the place of idle ones.

Peers that restart under other names would otherwise leave connections here that nothing closes."""
IDLE_S = 600.0
"""Seconds without being opened after which a segment is idle."""

ANOTHER_RAIL_STATUSES = RETRIED_STATUSES | {TIMED_OUT}
"""Statuses after which another rail is tried."""


class RemoteSegment:
    """A peer's segment. Made by ``TransferEngine.open``; connects when first used."""

    def __init__(
        self,
        descriptor: SegmentDescriptor,
        schemes: Sequence[str],
        transports: dict[str, Transport],
        rail_patience_s: float = 2.0,
    ) -> None:
        self._connections: dict[str, PeerConnection] = {}
        self.descriptor = descriptor
        self.name = descriptor.name
        self.paths = tuple(
            path
            for scheme in schemes
            for path in _paths_of(scheme, transports[scheme], descriptor.endpoints[scheme])
        )
        "Usable paths, best first: schemes, and with several devices `scheme@rail` for each of their pairs."
        self.source = ""
        "The name that it was opened by; empty when it was opened by descriptor."
        self.opened_at = 0.0
        "Instant at which it was opened last, by whichever name or descriptor."
        self.reason = ""
        "Reason of the last failure, as far as it is known."
        self.may_be_stale = False
        "True when a transfer has failed since the descriptor was confirmed."
        self.is_replaced = False
        "True when its process has ended; its addresses are invalid, and every transfer fails."
        self.is_connected = False
        "True when the first paths to try are connected or lost, so that no transfer has to wait for that."
        elsewhere = [path for path in self.paths if scheme_of(path) not in ON_ONE_HOST]
        self.is_direct = bool(self.paths) and scheme_of(self.paths[0]) in ON_ONE_HOST
        "True when the best path needs no message to the peer."
        self.rails = Rails(self.paths, rail_patience_s) if len(elsewhere) > 1 else None
        "Measurements of the paths, when there is a choice; to be used under `rails_lock`."
        self.rails_lock = threading.Lock()
        self._best = [path for path in self.paths if scheme_of(path) == scheme_of(self.paths[0])]
        self._transports = transports
        self._index = RegionIndex(descriptor.regions)
        self.places = Places((r.address, r.size_bytes, r.location) for r in descriptor.regions)
        self._lost: dict[str, str] = {}
        self._lock = threading.Lock()
        self._connecting = {path: threading.Lock() for path in self.paths}
        self._is_closed = False

    def __repr__(self) -> str:
        lost = "".join(f" {path} lost: {why}" for path, why in self._lost.items())
        return (
            f"<Segment {self.name} paths={','.join(self.paths)} regions={len(self.descriptor.regions)}{lost}>"
        )

    def leave_to_parent(self, reason: str) -> None:
        """Refuse everything in a forked child; its locks may be held by threads that are not here."""
        self.rails_lock, self._lock = threading.Lock(), threading.Lock()
        self.reason, self.is_replaced, self.may_be_stale = reason, True, True

    def connection(self, path: str, timeout_s: float) -> PeerConnection | None:
        """The connection over ``path``, made first if needed. None when the path is lost."""
        if self.is_replaced:
            return None
        connection = self._connections.get(path)
        if connection is not None and not connection.is_lost:
            return connection
        deadline = time.monotonic() + timeout_s
        if not self._connecting[path].acquire(timeout=timeout_s):
            return None
        try:
            connection = self._connections.get(path)
            if connection is not None and not connection.is_lost:
                return connection
            if path in self._lost or self._is_closed or (connection and scheme_of(path) in ON_ONE_HOST):
                return None
            if connection is not None:  # its device failed; the peer may still be there
                del self._connections[path]
                connection.close()
            return self._connect(path, max(0.0, deadline - time.monotonic()))
        finally:
            self._connecting[path].release()

    def connect(self, timeout_s: float) -> bool:
        """Connect as the first transfer would; False when the peer did not answer in time.

        This blocks: an event loop calls it in a thread, and moves bytes afterwards.
        """
        deadline = time.monotonic() + timeout_s
        for path in self.paths:
            scheme = scheme_of(path)
            if not self._index.carries_any(scheme):
                continue
            connection = self.connection(path, max(0.0, deadline - time.monotonic()))
            if isinstance(connection, NegotiatedConnection):
                connection.set_up(deadline)
            if time.monotonic() >= deadline:
                return False
            if connection is not None and self._index.carries_all(scheme):
                break
        self.is_connected = True
        return True

    def _connect(self, path: str, timeout_s: float) -> PeerConnection | None:
        peer = self.descriptor
        scheme, rail = scheme_of(path), rail_of(path)
        transport = self._transports[scheme]
        extra = {"handshake": peer.handshake} if getattr(transport, "needs_handshake", False) else {}
        if rail:
            extra["rail"] = rail
        try:
            connection = transport.connect(
                peer.endpoints[scheme], peer.epoch, peer.regions, timeout_s, **extra
            )
        except (PeerLost, AccessDenied) as error:
            if scheme in ON_ONE_HOST or self.rails is None:
                self._lost[path] = str(error)  # the same epoch does not come back
            log.info("path_lost", segment=self.name, path=path, reason=str(error))
            return None
        except Unavailable as error:
            log.info("path_timed_out", segment=self.name, path=path, reason=str(error))
            return None
        with self._lock:
            self._connections[path] = connection
            if self.descriptor is not peer:
                connection.set_regions(self.descriptor.regions)
            if self._is_closed:
                connection.close()
        return connection

    def able(self, path: str, columns: TransferColumns) -> npt.NDArray[np.bool_] | None:
        """Flags of the slices that ``path`` can carry; None means all of them."""
        scheme = scheme_of(path)
        if self._index.carries_all(scheme):
            return None
        return self._index.carried(scheme, columns.remote, columns.lengths)

    @property
    def is_uniform(self) -> bool:
        """Whether the best path carries every region of the peer."""
        if self.rails is not None and scheme_of(self.paths[0]) not in ON_ONE_HOST:
            return False  # a rail has to be chosen
        return bool(self.paths) and self._index.carries_all(scheme_of(self.paths[0]))

    def run_single_part(
        self, op: Op, columns: TransferColumns, num_bytes: int, deadline: float, checksum: bool
    ) -> tuple[str, Completion] | None:
        """Move a small batch in one part on the best rail; None when not possible, or the rail failed.

        Same as the first step of a ``Batch``, without making one, which costs as much as the transfer.
        """
        rails, now = self.rails, time.monotonic()
        if rails is None or self.places or not self._index.carries_all(scheme_of(self._best[0])):
            return None
        with self.rails_lock:
            path = rails.choose(self._best, num_bytes, now)
            if path is None or rails.rails[path].is_masked:
                return None
            patience_s = min(rails.patience_s(path, num_bytes), (deadline - now) / 2)
            rails.sent(path, num_bytes)
        status = Status.CANCELLED
        try:
            connection = self.connection(path, patience_s)
            if connection is None:
                status = Status.PEER_LOST
                return None
            done = connection.run(op, columns.local, columns.remote, columns.lengths, patience_s, checksum)
            status = done.status
            return None if status in ANOTHER_RAIL_STATUSES else (path, done)
        finally:
            with self.rails_lock:
                if status == Status.OK:
                    rails.arrived(path, num_bytes, now, time.monotonic())
                elif status in ANOTHER_RAIL_STATUSES:
                    rails.failed(path, num_bytes, now, time.monotonic(), STATUS_REASONS[int(status)])
                else:
                    rails.dropped(path, num_bytes)

    def replace(self, reason: str) -> None:
        """Mark the segment as replaced by another process: fail all transfers, now and later."""
        self.reason, self.is_replaced, self.may_be_stale = reason, True, True
        log.warning("segment_replaced", segment=self.name, reason=reason)
        self.close()

    def renew(self, descriptor: SegmentDescriptor) -> None:
        """Take over the regions that the same process has published since."""
        with self._lock:
            self.descriptor = descriptor
            self.is_connected = False  # a path without reachable regions may have some now
            self._index = RegionIndex(descriptor.regions)
            self.places = Places((r.address, r.size_bytes, r.location) for r in descriptor.regions)
            for connection in self._connections.values():
                connection.set_regions(descriptor.regions)

    def cancel(self) -> None:
        for connection in list(self._connections.values()):
            connection.cancel()

    def __del__(self) -> None:
        """Close the connections with the last reference, not after an idle worker's timeout."""
        for connection in self._connections.values():
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for connection in list(self._connections.values()):
            connection.close()


def _paths_of(scheme: str, transport: Transport, endpoint: str) -> list[str]:
    rails = transport.rails(endpoint) if isinstance(transport, MultiRailTransport) else []
    return [f"{scheme}@{rail}" for rail in rails] or [scheme]


class PeerTable:
    """Segments opened by one engine. Thread-safe.

    Args:
        host: identity of this host.
        transports: the engine's own, by scheme.
        client: handshake client for queries to other engines.
    """

    def __init__(
        self,
        settings: TransferSettings,
        host: str,
        transports: dict[str, Transport],
        client: HandshakeClient,
    ) -> None:
        self.name_service: NameService | None = None
        "Resolves names; None without metadata."
        self._settings = settings
        self._host = host
        self._transports = transports
        self._client = client
        self._opened: weakref.WeakValueDictionary[tuple[str, int], RemoteSegment] = (
            weakref.WeakValueDictionary()
        )
        self._kept: dict[tuple[str, int], RemoteSegment] = {}
        """Those of ``_opened`` that stay although no caller may hold them."""
        self._named: dict[str, tuple[RemoteSegment, float]] = {}
        self._lock = threading.Lock()
        self._refusal = ""
        """Reason why no segment is opened now; empty: there is none."""
        _tables.add(self)

    def __len__(self) -> int:
        return len(self._opened)

    def open(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        """See ``TransferEngine.open``."""
        idle: list[RemoteSegment] = []  # closed at the end, because that may take a while
        with self._lock:
            if self._refusal:
                raise Unavailable(f"open {descriptor.name}: {self._refusal}")
            key = (descriptor.name, descriptor.epoch)
            segment = self._opened.get(key)
            if segment is None:
                for known in [known for known in self._kept if known[0] == descriptor.name]:
                    del self._opened[known]
                    idle.append(self._kept.pop(known))  # it restarted; callers may keep the old one
                idle += self._take_idle()
                available = tuple(self._transports)
                schemes = common_schemes(descriptor, self._host, str(os.getpid()), available)
                if "rdma" in available and "rdma" not in schemes:
                    log.info(
                        "rdma_not_shared", segment=descriptor.name, reason="the peer does not offer rdma"
                    )
                segment = self._opened[key] = RemoteSegment(
                    descriptor, schemes, self._transports, self._settings.rail_patience_s
                )
            elif segment.descriptor != descriptor:
                segment.renew(descriptor)
            self._kept[key] = segment
            segment.opened_at = time.monotonic()
        for other in idle:
            self._client.drop(other.descriptor.handshake)
            self._client.drop(other.source)
        return segment

    def _take_idle(self) -> list[RemoteSegment]:
        """With the lock held: take out those that were not opened for longest, while there are many."""
        num_surplus = min(2, len(self._kept) + 1 - KEPT_SEGMENTS)
        if num_surplus <= 0:
            return []
        before = time.monotonic() - IDLE_S
        idle = [key for key, segment in self._kept.items() if segment.opened_at < before]
        idle.sort(key=lambda key: self._kept[key].opened_at)
        taken = [self._kept.pop(key) for key in idle[:num_surplus]]
        self._named = {name: known for name, known in self._named.items() if known[0] not in taken}
        return taken

    def forget(self, segment: RemoteSegment) -> None:
        """See ``TransferEngine.forget``."""
        with self._lock:
            self._drop(segment.descriptor)
            self._named = {name: known for name, known in self._named.items() if known[0] is not segment}
        segment.close()

    def close(self) -> None:
        """Forget all segments, and open no more."""
        with self._lock:
            self._refusal = "this engine is closed; make another one"
        for segment in list(self._opened.values()):
            segment.close()
        self._opened.clear()
        self._kept.clear()
        self._named.clear()

    def leave_to_parent(self) -> None:
        """Refuse everything in a forked child: the connections and their threads are those of its parent.

        The locks may be held by threads that are not here, so none is taken.
        """
        self._lock = threading.Lock()
        self._refusal = "this engine is that of the process that forked this one; make another one here"
        for segment in list(self._opened.values()):
            segment.leave_to_parent(self._refusal)

    def require_name_service(self) -> NameService:
        """Return the name service; raises InvalidArgument when the engine was made without metadata."""
        if self.name_service is None:
            raise InvalidArgument("metadata", "", "P2PHANDSHAKE or the URL of a metadata service")
        return self.name_service

    def open_name(self, name: str) -> RemoteSegment | None:
        """See ``TransferEngine.open_name``."""
        known, until = self._named.get(name, (None, 0.0))
        if known is not None and known.may_be_stale:
            known = None
        if known is not None:
            now = time.monotonic()
            if now < until:
                known.opened_at = now
                return known
            self._prolong(name, known)  # other threads use it during the lookup, which may take long
        try:
            descriptor = self.require_name_service().find(name)
        except Unavailable as error:
            if known is None:
                raise
            log.info("name_lookup_failed", name=name, reason=str(error))
            self._prolong(name, known)  # else every call would wait for a service that does not answer
            return known
        if descriptor is None:
            return known  # gone, or the service restarted empty: a transfer will show which
        segment = self.open(descriptor)
        segment.source, segment.may_be_stale = name, False
        with self._lock:
            self._named[name] = segment, time.monotonic() + self._settings.metadata_cache_s
        return segment

    def _prolong(self, name: str, known: RemoteSegment) -> None:
        """Let ``open_name`` return ``known`` for a while without a lookup, unless it was forgotten."""
        with self._lock:
            if self._named.get(name, (None, 0.0))[0] is known:
                self._named[name] = known, time.monotonic() + self._settings.metadata_cache_s

    def _drop(self, descriptor: SegmentDescriptor) -> None:
        """With the lock held: open another segment for this peer next time."""
        key = (descriptor.name, descriptor.epoch)
        self._opened.pop(key, None)
        self._kept.pop(key, None)

    def can_refresh(self, segment: RemoteSegment) -> bool:
        """Whether the segment's current descriptor can be queried."""
        return not segment.is_replaced and bool(segment.descriptor.handshake or segment.source)

    def refresh(self, segment: RemoteSegment, timeout_s: float) -> bool:
        """See ``TransferEngine.refresh``."""
        if not self.can_refresh(segment):
            return False
        peer = segment.descriptor
        try:
            current = self._current(segment, min(timeout_s, self._settings.metadata_timeout_s))
        except MooncakeError as error:
            segment.reason = str(error)
            return False
        if current is None:
            segment.reason = f"nothing is published under the name {segment.source} now"
        elif current.epoch != peer.epoch:
            with self._lock:
                self._drop(peer)
            segment.replace(
                f"{peer.name} was restarted, and addresses in it are no longer valid; "
                "open it again and ask it for its addresses"
            )
        elif current != peer:
            segment.renew(current)
            return True
        else:
            segment.reason = ""  # unchanged; the failure had another cause
        return False

    def probe(self, peer: str, timeout_s: float) -> ProbeReply | None:
        """See ``TransferEngine.probe``."""
        if self.name_service is not None and self.name_service.has_server:
            found = self.name_service.find(peer)
            if found is not None and not found.handshake:
                raise Unavailable(f"{peer} does not listen for handshakes; start it with handshake_port=0")
            if found is not None:
                return self._client.probe(found.handshake, timeout_s, epoch=found.epoch)
            try:
                split_address(peer)
            except InvalidArgument:
                return None
        return self._client.probe(peer, timeout_s)

    def _current(self, segment: RemoteSegment, timeout_s: float) -> SegmentDescriptor | None:
        peer = segment.descriptor
        if peer.handshake:
            try:
                return self._client.describe(peer.handshake, timeout_s)
            except Unavailable:
                if not segment.source or self.name_service is None:
                    raise
        return self.require_name_service().find(segment.source)


_tables: weakref.WeakSet[PeerTable] = weakref.WeakSet()


def _after_fork() -> None:
    for table in list(_tables):
        table.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
