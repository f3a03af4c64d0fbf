# SPDX-License-Identifier: Apache-2.0
"""Table of the segments that this process opened, by descriptor and by name, with their current state.

A segment belongs to one process and never passes to another. So after a failure the question is not
how to reach that address again, but whether the process that was meant is still the one that answers.
"""

from __future__ import annotations

import os
import threading
import time

from mooncake.errors import InvalidArgument, MooncakeError, Unavailable
from mooncake.log import get_logger
from mooncake.rpc.client import split_address
from mooncake.transfer.descriptor import SegmentDescriptor, common_schemes
from mooncake.transfer.handshake import HandshakeClient, ProbeReply
from mooncake.transfer.name_service import NameService
from mooncake.transfer.remote_segment import RemoteSegment
from mooncake.transfer.settings import TransferSettings
from mooncake.transfer.transports import Transport

log = get_logger(__name__)


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
        self._opened: dict[tuple[str, int], RemoteSegment] = {}
        self._named: dict[str, tuple[RemoteSegment, float]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._opened)

    def open(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        """See ``TransferEngine.open``."""
        with self._lock:
            key = (descriptor.name, descriptor.epoch)
            segment = self._opened.get(key)
            if segment is None:
                for known in [known for known in self._opened if known[0] == descriptor.name]:
                    del self._opened[known]  # it restarted; callers may keep the old one
                available = tuple(self._transports)
                schemes = common_schemes(descriptor, self._host, str(os.getpid()), available)
                segment = self._opened[key] = RemoteSegment(
                    descriptor, schemes, self._transports, self._settings.rail_patience_s
                )
            elif segment.descriptor != descriptor:
                segment.renew(descriptor)
            return segment

    def forget(self, segment: RemoteSegment) -> None:
        """See ``TransferEngine.forget``."""
        with self._lock:
            self._opened.pop((segment.name, segment.descriptor.epoch), None)
            self._named = {name: known for name, known in self._named.items() if known[0] is not segment}
        segment.close()

    def close(self) -> None:
        """Forget all segments."""
        for segment in list(self._opened.values()):
            segment.close()
        self._opened.clear()
        self._named.clear()

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
        if known is not None and time.monotonic() < until:
            return known
        try:
            descriptor = self.require_name_service().find(name)
        except Unavailable as error:
            if known is None:
                raise
            log.info("name_lookup_failed", name=name, reason=str(error))
            return known
        if descriptor is None:
            return known  # gone, or the service restarted empty: a transfer will show which
        segment = self.open(descriptor)
        segment.source, segment.may_be_stale = name, False
        with self._lock:
            self._named[name] = segment, time.monotonic() + self._settings.metadata_cache_s
        return segment

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
                self._opened.pop((peer.name, peer.epoch), None)
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
