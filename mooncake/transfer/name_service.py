# SPDX-License-Identifier: Apache-2.0
"""Names of segments: publishes this process's descriptor in a metadata service and looks up others.

Entries in a metadata service are soft state: a thread of this module puts this process's again until
the engine is closed, so a service that restarts empty is refilled, and entries of a crashed process
expire. Neither the kind of backend nor the reachability of a descriptor's process is known here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from mooncake.errors import MooncakeError, ProtocolError, Unavailable
from mooncake.log import get_logger
from mooncake.transfer.descriptor import SegmentDescriptor, decode_descriptor
from mooncake.transfer.metadata import Backend, PeerBackend

log = get_logger(__name__)

RETRY_S = 2.0
"""Longest wait after a failure before the descriptor is put again."""


def metadata_key(name: str, cluster: str = "") -> str:
    """Key of segment ``name``'s descriptor; ``cluster`` separates systems that share a service."""
    return f"mooncake/{cluster}/ram/{name}" if cluster else f"mooncake/ram/{name}"


class NameService:
    """One process's view of a metadata service. Thread-safe.

    Args:
        name, epoch: those of the segment that is published.
        describe: returns its current descriptor, or None when it has been closed.
    """

    def __init__(
        self,
        backend: Backend,
        cluster: str,
        name: str,
        epoch: int,
        describe: Callable[[], SegmentDescriptor | None],
    ) -> None:
        self.backend = backend
        self._cluster = cluster
        self._name = name
        self._epoch = epoch
        self._describe = describe
        self._pid = os.getpid()
        self._putting = threading.Lock()  # describe and put are one step, so the last put is the newest
        self._is_closing = False
        self._wake = threading.Event()
        self._keeper: threading.Thread | None = None
        self._ttl_s = 0.0
        self._is_published = False
        self._is_away = False
        self._held = threading.local()

    def __repr__(self) -> str:
        return f"<NameService {self.backend!r}{' published' if self._is_published else ''}>"

    @property
    def has_server(self) -> bool:
        """False when names are addresses and the peers themselves are queried."""
        return not isinstance(self.backend, PeerBackend)

    def find(self, name: str) -> SegmentDescriptor | None:
        """The descriptor published under ``name``, or None.

        Raises:
            PeerLost, DeadlineExceeded: the service (or, without one, the peer) does not answer.
            ProtocolError: the entry is something else, or a descriptor of another version.
        """
        encoded = self.backend.get(metadata_key(name, self._cluster))
        if encoded is None:
            return None
        try:
            return decode_descriptor(encoded)
        except ProtocolError as error:
            raise ProtocolError(f"the entry of {name} is {error}") from error

    def publish(self, ttl_s: float, is_patient: bool) -> None:
        """Put the descriptor, and renew it until ``close``.

        Raises:
            PeerLost, DeadlineExceeded: the service does not answer, and ``is_patient`` is False.
        """
        if not self.has_server:
            return  # peers query this engine
        self._ttl_s = ttl_s
        try:
            self._put()
        except Unavailable as error:
            if not is_patient:
                raise
            log.warning("descriptor_publish_failed", segment=self._name, reason=str(error))
        with self._putting:
            if self._keeper is None and not self._is_closing:
                self._keeper = threading.Thread(target=self._keep, name="mooncake-name-service", daemon=True)
                self._keeper.start()

    def renew(self) -> None:
        """Publish a changed descriptor before this returns, or soon after if that fails."""
        if self._keeper is None or self._held.__dict__.get("depth") or self._is_away:
            return  # not published, or the change is deferred, or the thread is retrying already
        try:
            self._put()
        except MooncakeError as error:
            log.warning("descriptor_publish_failed", segment=self._name, reason=str(error))
            self._wake.set()

    @contextlib.contextmanager
    def deferred_publication(self) -> Iterator[None]:
        """Context manager: changes that the calling thread makes inside are published once, at the end."""
        depth = self._held.__dict__.get("depth", 0)
        self._held.depth = depth + 1
        try:
            yield
        finally:
            self._held.depth = depth
            self.renew()

    def close(self) -> None:
        """Stop renewing and remove the entry, if the service answers. Harmless when repeated."""
        if os.getpid() != self._pid or self._is_closing:
            return
        self._is_closing = True
        self._wake.set()
        if self._keeper is not None and threading.current_thread() is not self._keeper:
            self._keeper.join(10.0)
        with self._putting:
            if self._is_published:
                self._take_back()
        self.backend.close()

    def _take_back(self) -> None:
        try:
            found = self.find(self._name)
            if found is not None and found.epoch == self._epoch:  # otherwise a successor has put its own
                self.backend.remove(metadata_key(self._name, self._cluster))
        except MooncakeError as error:
            log.info("descriptor_not_withdrawn", segment=self._name, reason=str(error))

    def _put(self) -> None:
        with self._putting:
            descriptor = self._describe()
            if descriptor is None or self._is_closing or os.getpid() != self._pid:
                return
            was_published = self._is_published
            try:
                self.backend.put(metadata_key(self._name, self._cluster), descriptor.encode(), self._ttl_s)
            except MooncakeError:
                self._is_published, self._is_away = False, True
                raise
            self._is_published, self._is_away = True, False
        if not was_published:
            log.info("descriptor_published", segment=self._name, metadata=repr(self.backend))

    def _keep(self) -> None:
        """Renew three times within an entry's time to live, so that one failure makes no gap."""
        while not self._is_closing:
            pause_s = min(RETRY_S, self._ttl_s / 3) if self._is_away else self._ttl_s / 3
            if self._wake.wait(pause_s):  # the pause has changed
                self._wake.clear()
                continue
            was_published = self._is_published
            try:
                self._put()
            except MooncakeError as error:
                if was_published:
                    log.warning("descriptor_publish_failed", segment=self._name, reason=str(error))
