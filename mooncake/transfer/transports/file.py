# SPDX-License-Identifier: Apache-2.0
"""Files and block devices of this host: io_uring and O_DIRECT between the device and memory.

A thin layer: ``native/file.h`` moves the bytes, ``native/shared_file.h`` passes a file's descriptor to
processes of the same host and user, which open it anew. Processes elsewhere reach it over tcp, through the
engine that opened it. Nothing is served before the first file is opened. The module also opens the files and
explains why one could not be opened, extended or flushed.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from mooncake import _native
from mooncake._native import Region, RegionTable, Status
from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    OutOfSpace,
    PeerLost,
    StorageError,
    Unavailable,
)
from mooncake.log import get_logger
from mooncake.transfer.descriptor import RegionInfo
from mooncake.transfer.transports import (
    NativeConnection,
    PeerConnection,
    RegionRow,
    TransportContext,
    region_rows,
)

log = get_logger(__name__)

CLOSED = "the region was unregistered, or its engine closed"

_engines: weakref.WeakValueDictionary[int, FileTransport] = weakref.WeakValueDictionary()


class FileConnection:
    def __init__(self, ours: RegionTable, peer: FileTransport, regions: Sequence[RegionInfo]) -> None:
        self._transport = peer
        self._peer = _native.FilePeer(ours, peer.regions, files_only(regions))
        self.run = self._peer.run
        self.run_slice = self._peer.run_slice
        self.submit = self._peer.submit
        self.cancel = self._peer.cancel
        self.close = self._peer.close

    @property
    def is_lost(self) -> bool:
        return self._transport.is_closed

    def view(self, address: int, size_bytes: int, timeout_s: float) -> None:
        return None

    def set_regions(self, regions: Sequence[RegionInfo]) -> None:
        self._peer.set_remote(files_only(regions))


class FileTransport:
    def __init__(self, site: TransportContext) -> None:
        self.regions = site.regions
        self.endpoint = f"mooncake-{secrets.token_hex(8)}"
        self.is_closed = False
        self._epoch = site.epoch
        self._lock = threading.Lock()
        self._shared: _native.SharedFileTransport | None = None
        _engines[site.epoch] = self

    def serve(self) -> None:
        """Start serving files to other processes; called before the first one is published.

        Raises:
            Unavailable: the system provides no socket.
        """
        self._start()

    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float
    ) -> PeerConnection:
        here = _engines.get(epoch)
        if here is not None and here.is_closed:
            raise PeerLost(f"the engine with epoch {epoch:x} of this process was closed")
        if here is not None:
            return FileConnection(self.regions, here, regions)
        peer = self._start().connect(endpoint, epoch, files_only(regions), timeout_s)
        if isinstance(peer, _native.SharedFilePeer):
            return NativeConnection(peer, files_only)
        if peer == Status.TIMED_OUT:
            raise DeadlineExceeded(
                f"file peer {endpoint} did not answer within {timeout_s:g} s; is it stopped?"
            )
        if peer == Status.ACCESS_DENIED:
            raise AccessDenied(f"file peer {endpoint} runs as another user; use tcp between users")
        raise PeerLost(f"file peer {endpoint} is gone; open its current descriptor")

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            if self._shared is not None:
                self._shared.close()

    def _start(self) -> _native.SharedFileTransport:
        with self._lock:
            if self._shared is None:
                if self.is_closed:
                    raise PeerLost("this engine was closed")
                try:
                    self._shared = _native.SharedFileTransport(self.regions, self._epoch, self.endpoint)
                except OSError as error:
                    raise Unavailable(f"file transport: {error}") from error
            return self._shared


def files_only(regions: Sequence[RegionInfo]) -> list[RegionRow]:
    return region_rows(region for region in regions if region.kind == "file")


def provide(region: Region, offset: int, size_bytes: int) -> None:
    """See ``TransferEngine.provide``."""
    try:
        region.provide(offset, size_bytes)
    except OSError as error:
        if error.errno == errno.EINVAL:
            allowed = f"a part of the region's {region.size_bytes:,} bytes"
            raise InvalidArgument("offset, size_bytes", (offset, size_bytes), allowed) from error
        if error.errno == errno.EBADF:
            raise StorageError(f"provide {region.path}: {CLOSED}") from error
        raise _refused(region.path, size_bytes, error) from error


def open_file(
    regions: RegionTable,
    path: str | os.PathLike[str],
    size_bytes: int | None,
    *,
    writable: bool,
    direct: bool,
    ring: bool,
    depth: int,
) -> Region:
    """See ``TransferEngine.open_file``."""
    # Links in the caller's path are followed here, once; the native core follows none.
    name = os.path.realpath(path)
    if size_bytes is not None and size_bytes <= 0:
        raise InvalidArgument("size_bytes", size_bytes, "more than 0, or None for its present size")
    try:
        region = regions.open_file(name, size_bytes or 0, writable, direct, ring, depth)
    except OSError as error:
        raise _refused(name, size_bytes, error) from error
    region.path = str(Path(name).resolve())
    log.info("file_opened", path=region.path, size_bytes=region.size_bytes, how=region.how)
    return region


def flush(region: Region) -> None:
    """See ``TransferEngine.flush``."""
    if region.kind != "file":
        raise InvalidArgument("region", region.kind, "a region of kind file")
    try:
        region.flush()
    except OSError as error:
        cause = CLOSED if error.errno == errno.EBADF else error.strerror
        raise StorageError(
            f"flush {region.path}: {cause}; what was written since the last flush may be lost"
        ) from error


def _refused(path: str, size_bytes: int | None, error: OSError) -> Exception:
    match error.errno:
        case errno.ENOENT:
            return InvalidArgument("path", path, "a file that exists, or a size_bytes to create it with")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return AccessDenied(
                f"open {path}: {error.strerror}; open it with writable=False, or as its owner"
            )
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return OutOfSpace(
                f"open {path} with {size_bytes or 0:,} bytes: {error.strerror}; ask for less or make room"
            )
        case errno.ENODATA:
            return InvalidArgument("path", path, "a file that is not empty, or a size_bytes to extend it to")
        case errno.EINVAL | errno.EISDIR | errno.ENXIO | errno.ENOTDIR:
            return InvalidArgument("path", path, f"a file or a block device ({error.strerror})")
        case _:
            return StorageError(f"open {path}: {error.strerror}")
