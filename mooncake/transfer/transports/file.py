"""Files and block devices of this process: io_uring and O_DIRECT between the device and memory.

Thin: ``native/file.h`` moves the bytes. Reaches the file regions of engines in this process and nothing
else; peers reach them over tcp, through the engine that opened them. Also opens the files and says, in
words that help, why one could not be opened or made durable.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from mooncake import _native
from mooncake._native import Region, RegionTable
from mooncake.errors import AccessDenied, InvalidArgument, OutOfSpace, PeerLost, StorageError
from mooncake.log import get_logger
from mooncake.transfer.segment import RegionInfo
from mooncake.transfer.transports import Carrier, Site

log = get_logger(__name__)

_engines: weakref.WeakValueDictionary[int, FileTransport] = weakref.WeakValueDictionary()


class FileCarrier:
    def __init__(self, ours: RegionTable, peer: FileTransport, regions: Sequence[RegionInfo]) -> None:
        self._transport = peer
        self._peer = _native.FilePeer(ours, peer.regions, files_only(regions))
        self.run = self._peer.run
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
    def __init__(self, site: Site) -> None:
        self.regions = site.regions
        self.endpoint = str(os.getpid())
        self.is_closed = False
        _engines[site.epoch] = self

    def connect(self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float) -> Carrier:
        peer = _engines.get(epoch)
        if peer is None or peer.is_closed:
            raise PeerLost(f"no engine with epoch {epoch:x} in this process; it was closed")
        return FileCarrier(self.regions, peer, regions)

    def close(self) -> None:
        self.is_closed = True


def files_only(regions: Sequence[RegionInfo]) -> list[tuple[int, int, int]]:
    return [(region.address, region.size_bytes, region.key) for region in regions if region.kind == "file"]


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
    name = os.fspath(path)
    if size_bytes is not None and size_bytes <= 0:
        raise InvalidArgument("size_bytes", size_bytes, "more than 0, or None for the size that it has")
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
        raise StorageError(
            f"flush {region.path}: {error.strerror}; what was written since the last flush may be lost"
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
