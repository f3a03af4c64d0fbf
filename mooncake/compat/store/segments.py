# SPDX-License-Identifier: Apache-2.0
"""The calls that mount further memory in the store, and unmount it.

A segment's id is two numbers joined by a hyphen, as programs expect; its name at the master is this
process's name followed by the id.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import threading
import weakref
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
RETRY_S = 5.0
"""Time until a segment whose unmount failed at the end of its grace period is unmounted once more."""


@dataclass
class ExtraSegment:
    """A segment of this process in addition to that of ``setup``."""

    session: StoreSession
    segment_id: str
    region: Region
    unlock: Callable[[], object]
    """Allows that memory to be mounted again."""
    is_leaving: bool = False
    """Whether it is being unmounted."""

    @property
    def name(self) -> str:
        """Its name at the master."""
        return f"{self.session.hostname}/{self.segment_id}"


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
            return self._mount(session, *_map(session, path, size, offset))

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
            region = session.engine.allocate(size, huge_pages=session.settings.huge_pages)
            return self._mount(session, region, lambda: None)

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
        what = "unmount_local_disk_segment"
        grace_s = number(what, "grace_period_seconds", grace_period_seconds)

        def unmount(session: StoreSession) -> int:
            with contextlib.suppress(InvalidArgument):  # there is none
                session.node().unmount(f"{session.hostname}/ssd", float(grace_s))
            return 0

        return self._in_session(what, unmount, lambda _: FAILED)

    def close(self) -> int:
        """As that of the lifecycle; the files that were mounted can be mounted again."""
        code = super().close()
        with self._segments_lock:
            ended = {key: one for key, one in self._segments.items() if not one.session.is_usable}
            for segment_id, segment in ended.items():
                del self._segments[segment_id]
                segment.unlock()
        return code

    # Implementation -------------------------------------------------------------------------------------

    def _mounted(self, what: str, mount: Callable[[StoreSession], str]) -> dict[str, Any]:
        def done(session: StoreSession) -> dict[str, Any]:
            return {"ret": 0, "segment_ids": [mount(session)]}

        return self._in_session(what, done, lambda _: {"ret": FAILED, "segment_ids": []})

    def _mount(self, session: StoreSession, region: Region, unlock: Callable[[], object]) -> str:
        segment_id = f"{secrets.randbits(64)}-{secrets.randbits(64)}"
        segment = ExtraSegment(session, segment_id, region, unlock)
        try:
            session.node().mount(region, segment.name)
        except MooncakeError:
            session.engine.unregister(region)
            unlock()
            raise
        with self._segments_lock:
            self._segments[segment_id] = segment
        return segment_id

    def _has_segment(self, segment_id: str) -> bool:
        """Whether the segment can be unmounted."""
        segment = self._segments.get(segment_id)
        return segment is not None and not segment.is_leaving

    def _unmount(self, what: str, segment_ids: Sequence[str], grace_period_seconds: int) -> int:
        if isinstance(segment_ids, str):
            raise TypeError(f"{what}(): segment_ids must be a list of str")
        grace_s = number(what, "grace_period_seconds", grace_period_seconds)

        def unmount(session: StoreSession) -> int:
            ids = list(dict.fromkeys(segment_ids))
            with self._segments_lock:
                for one in ids:
                    if not self._has_segment(one) or self._segments[one].session is not session:
                        raise InvalidArgument("segment_ids", ids, "ids of this store's segments")
                left = [self._segments[one] for one in ids]
                for segment in left:
                    segment.is_leaving = True
            try:
                while left:
                    self._drain_and_release(left[0], grace_s)
                    left.pop(0)
            finally:
                for segment in left:  # they are still mounted: the program may try again
                    segment.is_leaving = False
            return 0

        return self._in_session(what, unmount, lambda _: FAILED)

    def _drain_and_release(self, segment: ExtraSegment, grace_s: int) -> None:
        if grace_s <= 0:
            self._release(segment)
            return
        session = segment.session
        # From now on nothing new is placed there, and its objects are copied elsewhere if there is room.
        try:
            session.node().start_drain(segment.name)
        except MooncakeError as error:
            log.warning(f"unmount {segment.name}: its objects are not moved elsewhere: {error}")
        session.at_close.append(self._release_after(grace_s, segment).cancel)

    def _release_after(
        self, delay_s: float, segment: ExtraSegment, is_retry: bool = False
    ) -> threading.Timer:
        release = threading.Timer(delay_s, self._release_late, [segment, is_retry])
        release.daemon = True
        release.start()
        return release

    def _release_late(self, segment: ExtraSegment, is_retry: bool) -> None:
        if not segment.session.enter():
            return
        try:
            with self._segments_lock:
                if is_retry and not self._has_segment(segment.segment_id):
                    return  # the program has unmounted it, or is about to
                segment.is_leaving = True
            self._release(segment)
        except MooncakeError as error:
            log.error(f"unmount {segment.name}: {error}; it is tried again in {RETRY_S:g} s")
            segment.is_leaving = False  # the program may do so earlier
            self._release_after(RETRY_S, segment, is_retry=True)
        finally:
            segment.session.leave()

    def _release(self, segment: ExtraSegment) -> None:
        session = segment.session
        with contextlib.suppress(InvalidArgument):  # an earlier attempt took too long, but ended
            session.node().unmount(segment.name)
        session.engine.unregister(segment.region)
        segment.unlock()
        with self._segments_lock:
            self._segments.pop(segment.segment_id, None)


def _map(session: StoreSession, path: str, size: int, offset: int) -> tuple[Region, Callable[[], object]]:
    """Map part of a file as memory, which other processes may have mapped, too; also the function that allows
    it to be mounted again.

    Every client of the pool can read and write it, so links and files of other users are refused. And two
    segments of the same memory would write over each other's objects, so it is locked, for all processes.
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
        _lock(file, fcntl.F_WRLCK, offset, size)
        memory = np.frombuffer(mmap.mmap(file, size, offset=offset), np.uint8)
        region = session.engine.register(memory)
    except OSError as error:
        os.close(file)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            allowed = (
                "memory of which no part is mounted, by this process or another; unmount that first "
                "(with a grace period it stays mounted until its end)"
            )
            raise InvalidArgument("path", f"{path} [{offset}, +{size})", allowed) from error
        raise StorageError(f"mount {path!r}: {error.strerror}") from error
    except MooncakeError:
        os.close(file)
        raise
    unlock = weakref.finalize(memory, _unlock, file, os.getpid())  # also when its store is collected
    unlock.atexit = False  # the segment is still mounted then
    return region, unlock


def _lock(file: int, kind: int, offset: int = 0, size: int = 0) -> None:
    """Lock or unlock part of an open file against other openings of it, those of this process included.

    Raises:
        OSError: EAGAIN or EACCES: some of it is locked. Others: this file system has no such locks.
    """
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, size, 0))


def _unlock(file: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the same open file
        _lock(file, fcntl.F_UNLCK)
    os.close(file)
