# SPDX-License-Identifier: Apache-2.0
"""The contract of the native core: bytes in columns, completions out in batches.

Only ``mooncake.transfer.transports`` (and ``mooncake.transfer``, which re-exports) imports this. Methods
marked *unlocked* release the interpreter lock while they work or wait. No native thread calls Python.
A forked child may drop these objects but not use them: threads do not survive a fork. It has none of their
sockets, and its transfers end as CANCELLED with that reason.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

RemoteRegion = tuple[int, int, int, bool]
"""Region of a peer: address, size, key, whether it may be written."""

class Op(IntEnum):
    """Direction of a one-sided operation, seen from the caller."""

    WRITE = 1
    "local -> remote"
    READ = 2
    "remote -> local"

class Status(IntEnum):
    """Outcome of a transfer."""

    OK = 0
    PEER_LOST = 1
    "The connection broke or was refused, or the process behind it is gone."
    ACCESS_DENIED = 2
    "The peer has no such range under that key, or the range is read-only."
    CANCELLED = 3
    "Ended by cancel() or close(), or local memory was unregistered meanwhile."
    TIMED_OUT = 4
    UNREGISTERED = 5
    "Local memory is not registered, or is read-only and was to be written; nothing was moved."
    PROTOCOL_ERROR = 6
    "The peer violated the protocol."
    IO_ERROR = 7
    "A file or device failed; the completion's ``reason`` says why."

class Completion:
    """The end of one transfer. After a failure the destination's bytes are undefined."""

    def __init__(
        self,
        token: int = 0,
        status: Status = Status.OK,
        failed_slice: int = -1,
        num_bytes: int = 0,
        checksums: Sequence[int] = (),
        reason: str = "",
    ) -> None: ...
    @property
    def token(self) -> int: ...
    @property
    def status(self) -> Status: ...
    @property
    def failed_slice(self) -> int:
        """Row of the first slice known to have failed, or -1."""
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_partial(self) -> bool:
        """True for a progress report: ``num_bytes`` have been moved so far."""
    @property
    def reason(self) -> str:
        """Cause and advice, where the status alone does not suffice; else empty."""
    @property
    def checksums(self) -> npt.NDArray[np.uint32] | None:
        """CRC32C per slice of the bytes moved, if requested and status is OK."""

class Region(Buffer):
    """Registered memory. Its buffer is writable unless it was registered read-only.

    The buffer of an allocated region keeps the memory mapped, also after it was unregistered.
    """

    owner: object
    "The object that owns the memory, kept alive by the region; unset for allocated memory."
    path: str
    "Path of a file region, as it was opened."
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def key(self) -> int:
        """64 random bits; every peer that presents them may access the region."""
    @property
    def kind(self) -> str:
        """``memory``; or ``file``, ``cuda:0``, … whose addresses denote bytes that only a medium can move.

        A region of such a kind is no buffer.
        """
    @property
    def is_shared(self) -> bool:
        """Whether processes of this host and user can reach it: memfd, file, or exported device memory."""
    @property
    def is_writable(self) -> bool: ...
    @property
    def is_closed(self) -> bool:
        """Whether it is unregistered; then ``enter`` fails."""
    def enter(self) -> bool:
        """Keep it open for one short step; False when it is closed. Each True needs a ``leave()``."""
    def leave(self) -> None: ...
    @property
    def how(self) -> str:
        """How a file is read and written: ``io_uring, O_DIRECT``, or the fallback and its reason."""
    def flush(self) -> None:
        """Make a file durable; does nothing for other kinds. *Unlocked.*

        OSError when the device fails; EBADF when the region is closed.
        """
    def provide(self, offset: int, size_bytes: int) -> None:
        """Reserve disk space for these bytes; does nothing for other kinds. *Unlocked.*

        OSError when there is none; EINVAL when the bytes are not inside the region, EBADF when it is closed.
        Does nothing on a file system that cannot reserve: writing may then fail.
        """
    def view(self) -> memoryview:
        """Memory view of its bytes."""
    def read_into(self, buffer: Buffer, offset: int = 0) -> None:
        """Fill ``buffer`` with its bytes, whatever holds them. *Unlocked.* OSError when a medium fails."""
    def write_from(self, buffer: Buffer, offset: int = 0) -> None: ...

class RegionTable:
    """The registered regions of this process. Ranges may overlap."""

    def __init__(self) -> None: ...
    def allocate(self, size_bytes: int, huge_pages: bool, populate: bool) -> Region:
        """Allocate zeroed shared memory. *Unlocked.* MemoryError when the machine does not have it."""
    def open_file(
        self, path: str, size_bytes: int, is_writable: bool, direct: bool, ring: bool, depth: int
    ) -> Region:
        """Open a file or block device as a region, created or extended to ``size_bytes``, or as it is (0).

        ``direct`` and ``ring`` are preferences, see ``Region.how``; ``depth`` reads and writes go at once.
        *Unlocked.* OSError when it cannot be opened.
        """
    def add(self, address: int, size_bytes: int, is_writable: bool, is_brief: bool = False) -> Region:
        """Register memory of another owner; ``is_brief``: for one operation of the owner."""
    def remove(self, key: int) -> None:
        """Unregister. When it returns nothing touches the memory, whatever a peer does. *Unlocked.*

        A brief region is found no more, but stays open for jobs of other operations with overlapping regions.
        """
    def remove_all(self) -> None: ...
    def all(self) -> list[Region]:
        """All regions, by address."""

class View(Buffer):
    """Read-only buffer over mapped bytes of a peer's region; keeps the mapping."""

class Queue:
    """Completions of submitted transfers."""

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """An eventfd, readable while the queue is not empty. Do not read from it."""
    def push(self, completion: Completion) -> None: ...
    def drain(self, max_items: int = 256, timeout_s: float = 0.0) -> list[Completion]:
        """Take completions, oldest first; wait up to ``timeout_s`` for the first. *Unlocked.*"""

class Peer:
    """One remote process over one transport; thread-safe."""

    @property
    def is_lost(self) -> bool: ...
    def run(
        self,
        op: Op,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        timeout_s: float,
        checksum: bool,
    ) -> Completion:
        """Move in the calling thread. *Unlocked.* ValueError when the columns differ in length."""
    def run_slice(
        self, op: Op, local: int, remote: int, length: int, timeout_s: float, checksum: bool
    ) -> int | Completion:
        """As ``run`` for one slice: its CRC32C, 0 without ``checksum``; or the completion of a failure."""
    def submit(
        self,
        queue: Queue,
        token: int,
        op: Op,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        timeout_s: float,
        checksum: bool,
        priority: int = 0,
        reports: bool = False,
    ) -> int:
        """Move on a worker thread. Returns -1, or the first unregistered slice; then no completion comes.

        The greater priority goes first; a big job goes in pieces of 16 MiB, between which a more urgent one
        overtakes it. With ``reports`` the end of each piece but the last is a partial completion.
        """
    def set_remote(self, regions: Sequence[RemoteRegion]) -> None:
        """Set the peer's regions."""
    def cancel(self) -> None:
        """Fail everything queued or under way; afterwards no local memory is touched for it. *Unlocked.*"""
    def close(self) -> None: ...

class ShmPeer(Peer):
    def view(self, address: int, size_bytes: int, timeout_s: float) -> View | None: ...

class ShmTransport:
    """Serves shared regions to processes of the same host and user. One thread."""

    def __init__(self, regions: RegionTable, epoch: int) -> None: ...
    @property
    def endpoint(self) -> str: ...
    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RemoteRegion], timeout_s: float
    ) -> ShmPeer | Status: ...
    def close(self) -> None: ...

class TlsContext:
    """TLS 1.3 for servers and peers: both sides present a certificate of ``authority``. Opens libssl.so.3."""

    def __init__(self, certificate: str, key: str, authority: str, check_host: bool) -> None:
        """Take paths of PEM files. ValueError(field, reason) when one is invalid, or libssl is missing."""

class CudaDevice:
    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def bus_id(self) -> str:
        """PCI address as in sysfs: ``0000:17:00.0``."""
    @property
    def size_bytes(self) -> int: ...

class Cuda:
    """The started devices of a CUDA driver library. OSError when there are none, with the reason."""

    def __init__(self, library: str) -> None: ...
    @staticmethod
    def why_not_there(library: str) -> str:
        """Reason why the library cannot be loaded; empty when it can. Starts nothing."""
    @staticmethod
    def is_device_memory(library: str, address: int) -> bool:
        """Whether a driver that this process already uses owns the address. Loads and starts nothing."""
    @property
    def devices(self) -> list[CudaDevice]: ...
    def add(self, regions: RegionTable, address: int, size_bytes: int, is_writable: bool) -> Region:
        """Register device memory of another owner. ValueError when it is no device memory."""
    def allocate(self, regions: RegionTable, device: int, size_bytes: int) -> Region:
        """Allocate zeroed device memory, freed with the region. MemoryError when the device has less left."""
    def pin(self, region: Region) -> None:
        """Lock main memory until the region is closed. OSError when the system refuses."""
    def is_pinned(self, region: Region) -> bool: ...

class CudaPeer(Peer): ...

class CudaTransport:
    """Exports device memory to processes of the same host and user. One thread."""

    def __init__(self, cuda: Cuda, regions: RegionTable, epoch: int, endpoint: str) -> None: ...
    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RemoteRegion], timeout_s: float
    ) -> CudaPeer | Status: ...
    def close(self) -> None: ...

class FilePeer(Peer):
    """File regions of ``far``, a table of this process."""

    def __init__(self, local: RegionTable, far: RegionTable, regions: Sequence[RemoteRegion]) -> None: ...

class SharedFilePeer(Peer):
    """File regions of another process of this host, reopened by their descriptors."""

class SharedFileTransport:
    """Exports file regions to processes of the same host and user. One thread."""

    def __init__(self, regions: RegionTable, epoch: int, endpoint: str) -> None: ...
    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RemoteRegion], timeout_s: float
    ) -> SharedFilePeer | Status: ...
    def close(self) -> None: ...

class TcpServer:
    """Serves all regions over TCP, on every one of ``hosts``. OSError when an address cannot be used."""

    def __init__(
        self,
        regions: RegionTable,
        epoch: int,
        hosts: Sequence[str],
        port: int,
        num_threads: int,
        tls: TlsContext | None = None,
        greeting_s: float = 5.0,
        stall_s: float = 30.0,
        max_connections: int = 4096,
    ) -> None:
        """A greeting may take ``greeting_s``, and a frame ``stall_s`` plus a second per MiB."""
    @property
    def ports(self) -> list[int]:
        """The ports, one per host."""
    def close(self) -> None: ...

class TcpPeer(Peer):
    def __init__(
        self,
        local: RegionTable,
        regions: Sequence[RemoteRegion],
        host: str,
        port: int,
        epoch: int,
        num_streams: int,
        source_host: str = "",
        tls: TlsContext | None = None,
    ) -> None:
        """Connects when the first slices need it, from ``source_host`` if given. Hosts are numeric."""

def rdma_devices() -> list[str]:
    """List the RDMA devices of this machine. OSError when libibverbs is not installed."""

RdmaAddress = tuple[bytes, int, int, int]
"""Address of a device: gid, lid, mtu in the units of verbs, number of concurrent reads it answers."""

LaneEnd = tuple[int, int]
"""Number of a queue pair, and of the first packet it sends."""

class RdmaTransport:
    """Devices of this machine, and the memory of this process that is registered with them.

    OSError, whose text begins with the device's name, when one cannot be used.
    """

    def __init__(
        self, regions: RegionTable, devices: Sequence[str], port: int, gid_index: int, traffic_class: int
    ) -> None: ...
    def address(self, device: str) -> RdmaAddress | None:
        """Address of a device; None when it is not one of ours."""
    def serve(self, device: str, owner: int, peer: RdmaAddress, theirs: Sequence[LaneEnd]) -> list[LaneEnd]:
        """Make our ends of the peer's lanes; only its secret, ``owner``, can end them. *Unlocked.*

        OSError when the device refuses.
        """
    def retire(self, device: str, owner: int, pair: int) -> None:
        """End a served lane; nothing that travelled through it lands after this. *Unlocked.*"""
    def num_served(self, device: str) -> int: ...
    def grant(self, device: str, keys: Sequence[int]) -> list[tuple[int, int, int, int, bool]]:
        """Register regions: (key, address, size, the device's key, is writable); size 0 for an unknown one.

        *Unlocked.* OSError when the device does not accept the memory.
        """
    def connect(
        self,
        device: str,
        their_device: str,
        epoch: int,
        regions: Sequence[RemoteRegion],
        num_lanes: int,
    ) -> RdmaPeer | None:
        """Make a peer without lanes; None when ``device`` is not one of ours."""
    def close(self) -> None:
        """Stop serving. *Unlocked.*"""

class RdmaPeer(Peer):
    @property
    def is_ready(self) -> bool:
        """Whether all lanes exist, all regions are known, and no abandoned write may still land."""
    @property
    def is_able(self) -> bool:
        """Whether it is ready except for some missing lanes."""
    def unknown_keys(self, limit: int) -> list[int]:
        """Keys of regions that the peer has neither granted nor refused yet."""
    def learn(self, grants: Sequence[tuple[int, int, int, int, bool]]) -> None: ...
    def offer(self) -> list[LaneEnd]:
        """Make our ends of the missing lanes. *Unlocked.* OSError when the device has no more."""
    def join(self, peer: RdmaAddress, theirs: Sequence[LaneEnd]) -> None:
        """Connect to the ends in the peer's answer to ``offer``. *Unlocked.* OSError when that fails."""
    def retired(self) -> list[tuple[str, int]]:
        """List the peer's ends (device, queue pair) of lanes that have ended here."""
    def forget_retired(self, lanes: Sequence[tuple[str, int]]) -> None:
        """Remove lanes that have ended at the peer too from ``retired``."""

def crc32c(data: Buffer, seed: int = 0) -> int:
    """CRC32C of a contiguous buffer, continued from ``seed``. *Unlocked.*"""

def crc32c_combine(a: int, b: int, length_b: int) -> int:
    """Checksum of A followed by B, from their checksums and B's length."""

def crc32c_columns(
    addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint32]:
    """CRC32C per row of this process's memory; addresses are not checked. *Unlocked.*"""

def crc32c_implementation() -> str:
    """Name of the best implementation that this processor runs: ``avx512``, ``sse42`` or ``table``."""
