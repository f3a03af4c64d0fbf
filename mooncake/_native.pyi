"""The contract of the native core: bytes in columns, completions out in batches.

Only ``mooncake.transfer.transports`` (and ``mooncake.transfer``, which re-exports) imports this. Methods
marked *unlocked* release the interpreter lock while they work or wait. No native thread calls Python.
A forked child may drop these objects but not use them: threads do not survive a fork.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

class Op(IntEnum):
    """One-sided, as the caller sees it."""

    WRITE = 1
    "local -> remote"
    READ = 2
    "remote -> local"

class Status(IntEnum):
    """What came of a transfer."""

    OK = 0
    PEER_LOST = 1
    "The connection broke or was refused, or the process behind it is gone."
    ACCESS_DENIED = 2
    "The peer has no such range under that key, or will not be written to there."
    CANCELLED = 3
    "cancel(), close(), or local memory was unregistered meanwhile."
    TIMED_OUT = 4
    UNREGISTERED = 5
    "Local memory is not registered, or is read-only and was to be written; nothing was moved."
    PROTOCOL_ERROR = 6
    "The peer sent what it may not send."
    IO_ERROR = 7
    "A file or device refused; the completion's ``reason`` says why."

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
        """Not the end: ``num_bytes`` have been moved so far."""
    @property
    def reason(self) -> str:
        """What is wrong and what to do, where the status alone does not say it; else empty."""
    @property
    def checksums(self) -> npt.NDArray[np.uint32] | None:
        """CRC32C per slice of the bytes moved, if asked for and status is OK."""

class Region(Buffer):
    """Registered memory. As a buffer: its bytes, writable unless it was registered read-only.

    The buffer of an allocated region keeps the memory mapped, also after it was unregistered.
    """

    owner: object
    "What the memory belongs to, kept alive by the region; unset for allocated memory."
    path: str
    "Of a file region, as it was opened."
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def key(self) -> int:
        """64 random bits; whoever shows them may access the region."""
    @property
    def kind(self) -> str:
        """``memory``; or ``file``, ``cuda:0``, … whose addresses stand for bytes that only a medium can move.

        Such a region is no buffer.
        """
    @property
    def is_shared(self) -> bool:
        """Processes of this host and user can reach it: a memfd, a file, or device memory with a handle."""
    @property
    def is_writable(self) -> bool: ...
    @property
    def is_closed(self) -> bool:
        """Unregistered; nothing enters it any more."""
    def enter(self) -> bool:
        """Hold it open for one short step; False when it is closed. Each True needs a ``leave()``."""
    def leave(self) -> None: ...
    @property
    def how(self) -> str:
        """How a file is read and written: ``io_uring, O_DIRECT``, or what there is instead and why."""
    def flush(self) -> None:
        """Make a file durable; nothing for other kinds. *Unlocked.* OSError when the device refuses."""
    def provide(self, offset: int, size_bytes: int) -> None:
        """Make sure that the disk has room for these bytes; nothing for other kinds. *Unlocked.*

        OSError when it has none. A file system that can't promise it does nothing: writing will tell.
        """
    def view(self) -> memoryview:
        """Its bytes."""
    def read_into(self, buffer: Buffer, offset: int = 0) -> None:
        """Fill ``buffer`` with its bytes, wherever they are. *Unlocked.* OSError when a medium fails."""
    def write_from(self, buffer: Buffer, offset: int = 0) -> None: ...

class RegionTable:
    """What this process has registered. Ranges may overlap."""

    def __init__(self) -> None: ...
    def allocate(self, size_bytes: int, huge_pages: bool, populate: bool) -> Region:
        """Shared memory, zeroed. *Unlocked.* MemoryError when the machine will not give it."""
    def open_file(
        self, path: str, size_bytes: int, is_writable: bool, direct: bool, ring: bool, depth: int
    ) -> Region:
        """A file or block device as a region, created or extended to ``size_bytes``, or as it is (0).

        ``direct`` and ``ring`` are wishes, see ``Region.how``; ``depth`` reads and writes go at once.
        *Unlocked.* OSError when it cannot be had.
        """
    def add(self, address: int, size_bytes: int, is_writable: bool) -> Region:
        """Register memory that belongs to somebody else."""
    def remove(self, key: int) -> None:
        """Unregister. When it returns nothing touches the memory, however sick a peer is. *Unlocked.*"""
    def remove_all(self) -> None: ...
    def all(self) -> list[Region]:
        """By address."""

class View(Buffer):
    """Bytes of a peer's region in place, read-only; keeps the mapping."""

class Queue:
    """Completions of submitted transfers."""

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """An eventfd, readable while something lies in the queue. Do not read it."""
    def push(self, completion: Completion) -> None: ...
    def drain(self, max_items: int = 256, timeout_s: float = 0.0) -> list[Completion]:
        """Oldest first; waits up to ``timeout_s`` for the first. *Unlocked.*"""

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
        """Move on a worker thread; -1, or the first unregistered slice and then no completion comes.

        The greater priority goes first; a big job goes in pieces of 16 MiB, between which a more urgent one
        takes its place. With ``reports`` the end of each piece but the last is a partial completion.
        """
    def set_remote(self, regions: Sequence[tuple[int, int, int]]) -> None:
        """The peer's regions: (address, size, key)."""
    def cancel(self) -> None:
        """Fail what is queued or under way; afterwards no local memory is touched for it. *Unlocked.*"""
    def close(self) -> None: ...

class ShmPeer(Peer):
    def view(self, address: int, size_bytes: int, timeout_s: float) -> View | None: ...

class ShmTransport:
    """Serves shared regions to processes of the same host and user. One thread."""

    def __init__(self, regions: RegionTable, epoch: int) -> None: ...
    @property
    def endpoint(self) -> str: ...
    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[tuple[int, int, int]], timeout_s: float
    ) -> ShmPeer | Status: ...
    def close(self) -> None: ...

class TlsContext:
    """TLS 1.3 for servers and peers: both sides show a certificate of ``authority``. Opens libssl.so.3."""

    def __init__(self, certificate: str, key: str, authority: str, check_host: bool) -> None:
        """Paths of PEM files. ValueError(field, reason) when one is not what it should be, or no libssl."""

class CudaDevice:
    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def bus_id(self) -> str:
        """As in sysfs: ``0000:17:00.0``."""
    @property
    def size_bytes(self) -> int: ...

class Cuda:
    """The devices behind a CUDA driver library, started. OSError says why there are none."""

    def __init__(self, library: str) -> None: ...
    @staticmethod
    def why_not_there(library: str) -> str:
        """Empty when the library can be loaded; starts nothing."""
    @staticmethod
    def is_device_memory(library: str, address: int) -> bool:
        """Of a driver that this process uses already; loads and starts nothing."""
    @property
    def devices(self) -> list[CudaDevice]: ...
    def add(self, regions: RegionTable, address: int, size_bytes: int, is_writable: bool) -> Region:
        """Register device memory of somebody else. ValueError when it is none."""
    def allocate(self, regions: RegionTable, device: int, size_bytes: int) -> Region:
        """Zeroed device memory, freed with the region. MemoryError when the device has not that much."""
    def pin(self, region: Region) -> None:
        """Lock main memory until the region is closed. OSError when it cannot be."""
    def is_pinned(self, region: Region) -> bool: ...

class CudaPeer(Peer): ...

class CudaTransport:
    """Shows device memory to processes of the same host and user. One thread."""

    def __init__(self, cuda: Cuda, regions: RegionTable, epoch: int, endpoint: str) -> None: ...
    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[tuple[int, int, int]], timeout_s: float
    ) -> CudaPeer | Status: ...
    def close(self) -> None: ...

class FilePeer(Peer):
    """File regions of ``far``, a table of this process."""

    def __init__(
        self, local: RegionTable, far: RegionTable, regions: Sequence[tuple[int, int, int]]
    ) -> None: ...

class SharedFilePeer(Peer):
    """File regions of another process of this host, opened anew by their descriptors."""

class SharedFileTransport:
    """Shows file regions to processes of the same host and user. One thread."""

    def __init__(self, regions: RegionTable, epoch: int, endpoint: str) -> None: ...
    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[tuple[int, int, int]], timeout_s: float
    ) -> SharedFilePeer | Status: ...
    def close(self) -> None: ...

class TcpServer:
    """Serves all regions over TCP, on every one of ``hosts``. OSError when an address cannot be had."""

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
        """A connection has ``greeting_s`` to say who it is, and a frame ``stall_s`` and a second per MiB."""
    @property
    def ports(self) -> list[int]:
        """One per host."""
    def close(self) -> None: ...

class TcpPeer(Peer):
    def __init__(
        self,
        local: RegionTable,
        regions: Sequence[tuple[int, int, int]],
        host: str,
        port: int,
        epoch: int,
        num_streams: int,
        source_host: str = "",
        tls: TlsContext | None = None,
    ) -> None:
        """Hosts are numeric. Connects when the first slices need it, from ``source_host`` if given."""

def rdma_devices() -> list[str]:
    """Names of the RDMA devices of this machine. OSError when libibverbs is not installed."""

RdmaAddress = tuple[bytes, int, int, int]
"""Where a device is: gid, lid, mtu as verbs count it, reads it answers at a time."""

LaneEnd = tuple[int, int]
"""A queue pair's number and that of the first packet it sends."""

class RdmaTransport:
    """Devices of this machine, and what of this process's memory is registered with them.

    OSError, whose text begins with the device's name, when one cannot be used.
    """

    def __init__(
        self, regions: RegionTable, devices: Sequence[str], port: int, gid_index: int, traffic_class: int
    ) -> None: ...
    def address(self, device: str) -> RdmaAddress | None:
        """None when it is not one of ours."""
    def serve(self, device: str, owner: int, peer: RdmaAddress, theirs: Sequence[LaneEnd]) -> list[LaneEnd]:
        """Our ends for the peer's lanes, ready to answer; only ``owner``, its secret, ends them. *Unlocked.*

        OSError when the device refuses.
        """
    def retire(self, device: str, owner: int, pair: int) -> None:
        """End a served lane; nothing that travelled through it lands after this. *Unlocked.*"""
    def num_served(self, device: str) -> int: ...
    def grant(self, device: str, keys: Sequence[int]) -> list[tuple[int, int, int, int, bool]]:
        """Register regions: (key, address, size, the device's key, is writable); size 0 if there is none.

        *Unlocked.* OSError when the device does not take the memory.
        """
    def connect(
        self,
        device: str,
        their_device: str,
        epoch: int,
        regions: Sequence[tuple[int, int, int]],
        num_lanes: int,
    ) -> RdmaPeer | None:
        """None when ``device`` is not one of ours. Has no lanes yet."""
    def close(self) -> None:
        """Stop serving. *Unlocked.*"""

class RdmaPeer(Peer):
    @property
    def is_ready(self) -> bool:
        """All lanes are there, all regions are known, and nothing given up may still land."""
    @property
    def is_able(self) -> bool:
        """As above, but some lanes may be missing."""
    def unknown_keys(self, limit: int) -> list[int]:
        """Regions the peer has not granted or refused yet."""
    def learn(self, grants: Sequence[tuple[int, int, int, int, bool]]) -> None: ...
    def offer(self) -> list[LaneEnd]:
        """Our ends of the lanes that are missing. *Unlocked.* OSError when the device has no more."""
    def join(self, peer: RdmaAddress, theirs: Sequence[LaneEnd]) -> None:
        """What the peer answered to ``offer``. *Unlocked.* OSError when they cannot be connected."""
    def retired(self) -> list[tuple[str, int]]:
        """The peer's ends (device, queue pair) of lanes that have ended here."""
    def forget_retired(self, lanes: Sequence[tuple[str, int]]) -> None:
        """They have ended there too."""

def crc32c(data: Buffer, seed: int = 0) -> int:
    """CRC32C of a contiguous buffer, continuing from ``seed``. *Unlocked.*"""

def crc32c_combine(a: int, b: int, length_b: int) -> int:
    """Checksum of A followed by B, from their checksums and B's length."""

def crc32c_columns(
    addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint32]:
    """CRC32C per row of this process's memory. The caller vouches for the addresses. *Unlocked.*"""

def crc32c_implementation() -> str:
    """``avx512``, ``sse42`` or ``table``, whichever is the best this processor runs."""
