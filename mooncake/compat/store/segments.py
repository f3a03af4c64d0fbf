# SPDX-License-Identifier: Apache-2.0
"""The calls that mount further memory in the store, and unmount it.

A segment's id is two numbers joined by a hyphen, as programs expect; its name at the master is this
process's name followed by the id.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake.compat.store.arguments import number, text
from mooncake.compat.store.lifecycle import StoreLifecycle
from mooncake.compat.store.setup_arguments import MIN_SEGMENT_BYTES
from mooncake.compat.store.store_session import StoreSession
from mooncake.errors import AccessDenied, InvalidArgument, MooncakeError, StorageError
from mooncake.log import get_logger
from mooncake.transfer import Region

log = get_logger("mooncake.store")

FAILED = -1
"""Number for every failure of these calls."""


@dataclass
class ExtraSegment:
    """A segment of this process in addition to that of ``setup``."""

    session: StoreSession
    name: str
    region: Region


class SegmentCalls(StoreLifecycle):
    """Further segments of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._segments_lock = threading.Lock()
        self._segments: dict[str, ExtraSegment] = {}
        """Segments by id."""

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Mount part of a file or of shared memory; ``{"ret": 0, "segment_ids": [id]}``, or -1 and no id."""
        what = "mount_segment"
        size, offset = number(what, "size", size), number(what, "offset", offset)
        path = text(what, "path", path)

        def mount(session: StoreSession) -> str:
            return self._mount(session, lambda: _map(session, path, size, offset))

        return self._mounted(what, mount)

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Mount new memory of this size; as ``mount_segment``, with ``allocated_size``.

        A small segment is enlarged, as that of ``setup``.
        """
        what = "allocate_and_mount_segment"
        asked = number(what, "size", size)
        size = max(asked, MIN_SEGMENT_BYTES)

        def mount(session: StoreSession) -> str:
            if asked <= 0:
                raise InvalidArgument("size", asked, "more than 0")
            return self._mount(
                session, lambda: session.engine.allocate(size, huge_pages=session.settings.huge_pages)
            )

        outcome = self._mounted(what, mount)
        return {**outcome, "allocated_size": 0 if outcome["ret"] else size}

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Unmount: 0; -1 for an unknown id. With a grace period, drain first and unmount at its end."""
        return self._unmount("unmount_segment", segment_ids, grace_period_seconds)

    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """As ``unmount_segment``; both release the memory."""
        return self._unmount("unmount_and_free_segment", segment_ids, grace_period_seconds)

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Unmount the SSD tier of ``setup``, whose objects are available after a restart; 0 without one."""

        def unmount(session: StoreSession) -> int:
            with contextlib.suppress(InvalidArgument):  # there is none
                session.node().unmount(f"{session.hostname}/ssd", float(grace_period_seconds))
            return 0

        return self._in_session("unmount_local_disk_segment", unmount, lambda _: FAILED)

    # Implementation -------------------------------------------------------------------------------------

    def _mounted(self, what: str, mount: Callable[[StoreSession], str]) -> dict[str, Any]:
        def done(session: StoreSession) -> dict[str, Any]:
            return {"ret": 0, "segment_ids": [mount(session)]}

        return self._in_session(what, done, lambda _: {"ret": FAILED, "segment_ids": []})

    def _mount(self, session: StoreSession, allocate: Callable[[], Region]) -> str:
        segment_id = f"{secrets.randbits(64)}-{secrets.randbits(64)}"
        name = f"{session.hostname}/{segment_id}"
        region = allocate()
        try:
            session.node().mount(region, name)
        except MooncakeError:
            session.engine.unregister(region)
            raise
        with self._segments_lock:
            self._segments[segment_id] = ExtraSegment(session, name, region)
        return segment_id

    def _has_segment(self, segment_id: str) -> bool:
        """Whether the segment can be unmounted."""
        return segment_id in self._segments

    def _unmount(self, what: str, segment_ids: Sequence[str], grace_s: float) -> int:
        if isinstance(segment_ids, str):
            raise TypeError(f"{what}(): segment_ids must be a list of str")

        def unmount(session: StoreSession) -> int:
            with self._segments_lock:
                found = [self._segments.get(segment_id) for segment_id in segment_ids]
                if any(segment is None or segment.session is not session for segment in found):
                    raise InvalidArgument("segment_ids", list(segment_ids), "ids of this store's segments")
                for segment_id in segment_ids:
                    self._segments.pop(segment_id, None)
            for segment in found:
                if segment is not None:
                    _drain_and_release(segment, grace_s)
            return 0

        return self._in_session(what, unmount, lambda _: FAILED)


def _drain_and_release(segment: ExtraSegment, grace_s: float) -> None:
    session = segment.session
    if grace_s <= 0:
        _release(segment)
        return
    # From now on nothing new is placed there, and its objects are copied elsewhere if there is room.
    try:
        session.node().start_drain(segment.name)
    except MooncakeError as error:
        log.warning(f"unmount {segment.name}: its objects are not moved elsewhere: {error}")
    release = threading.Timer(grace_s, _release, [segment])
    release.daemon = True
    release.start()
    session.at_close.append(release.cancel)


def _release(segment: ExtraSegment) -> None:
    session = segment.session
    if session.enter():
        try:
            session.node().unmount(segment.name)
            session.engine.unregister(segment.region)
        except MooncakeError as error:
            log.error(f"unmount {segment.name}: {error}")
        finally:
            session.leave()


def _map(session: StoreSession, path: str, size: int, offset: int) -> Region:
    """Map part of a file as memory, which other processes may have mapped, too.

    Every client of the pool can read and write it, so links and files of other users are refused.
    """
    if size < MIN_SEGMENT_BYTES or offset < 0 or offset % mmap.ALLOCATIONGRANULARITY:
        raise InvalidArgument(
            "size and offset", (size, offset), f"{MIN_SEGMENT_BYTES} or more, and a multiple of a page"
        )
    try:
        # Non-blocking, because a pipe would wait for its other end.
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError as error:
        raise AccessDenied(f"mount {path!r}: {error.strerror}") from error
    except OSError as error:
        raise InvalidArgument("path", path, f"a file that can be opened ({error.strerror})") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise AccessDenied(f"mount {path!r}: only a regular file of this process's user can be mounted")
        room = found.st_size
        if offset + size > room:
            raise InvalidArgument(
                "size", size, f"at most {room - offset}, the size of {path} from {offset} on"
            )
        mapped = mmap.mmap(file, size, offset=offset)
    except OSError as error:
        raise StorageError(f"mount {path!r}: {error.strerror}") from error
    finally:
        os.close(file)
    return session.engine.register(np.frombuffer(mapped, np.uint8))
