"""What a process offers to its peers: its registered memory and the ways to reach it.

A descriptor travels through a metadata service, the store's master or any message; whoever holds it
holds the keys in it and may read and write the regions. This module decides which paths two processes
have in common and which of them can carry a slice. It does no I/O: who we are arrives as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.errors import ProtocolError

Column = npt.NDArray[np.uint64]
"""One row per slice: addresses, or lengths in bytes."""

VERSION = 1
"""Of descriptors and the handshake. Peers of different versions refuse each other; a field that is added
with a default does not raise it."""

ON_ONE_HOST = frozenset({"local", "shm", "file", "cuda"})
"""Schemes that end where the host does."""

IN_ONE_PROCESS = frozenset({"local"})
"""Schemes that end where the process does."""


def scheme_of(path: str) -> str:
    """How bytes travel: what stands before the ``@`` of ``tcp@10.0.0.1>10.1.0.2``, or all of ``shm``."""
    return path.partition("@")[0]


def rail_of(path: str) -> str:
    """Between which two devices: what stands behind the ``@``, or nothing."""
    return path.partition("@")[2]


class RegionInfo(msgspec.Struct, frozen=True):
    """Registered memory as its owner publishes it."""

    address: int
    "Where it starts in the owner's address space."
    size_bytes: int
    key: int
    "64 random bits; access without it is denied."
    is_shared: bool
    "Processes on the same host can map it, or open it."
    kind: str = "memory"
    "What holds the bytes: ``memory``, ``file``, ``cuda:<n>``."
    location: str = "*"
    "Which part of the machine it is near: ``cpu:<numa node>``, ``cuda:<n>``, or ``*`` for any."


class SegmentDescriptor(msgspec.Struct, frozen=True):
    """How to reach a process and what it has registered."""

    name: str
    host: str
    "Identity of the kernel and network namespace it runs in; equal means the same host."
    epoch: int
    "Random per process start, so that a restarted process is never taken for its predecessor."
    endpoints: dict[str, str]
    "Address per scheme, in the transport's own form: `shm`, `tcp` (`ip:port`, several by commas), `local`."
    regions: list[RegionInfo]
    handshake: str = ""
    "Where the process answers handshakes (``host:port``); empty when it does not."
    version: int = VERSION
    topology: dict[str, tuple[list[str], list[str]]] = {}
    "Which of its RDMA devices are near which location: (preferred, other); empty when it has no rails."

    def encode(self) -> bytes:
        """As JSON, the form that metadata services keep."""
        return msgspec.json.encode(self)


def decode_descriptor(encoded: bytes) -> SegmentDescriptor:
    """The descriptor that ``SegmentDescriptor.encode`` wrote.

    Raises:
        ProtocolError: these bytes are something else, or of a release that we do not understand.
    """
    try:
        descriptor = msgspec.json.decode(encoded, type=SegmentDescriptor)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"not a segment descriptor: {error}; is another service using this key?"
        ) from error
    check_version(descriptor.name, descriptor.version)
    return descriptor


def check_version(peer: str, version: int) -> None:
    """Raises ProtocolError, saying what to do, when ``peer`` speaks another version."""
    if version != VERSION:
        raise ProtocolError(version_mismatch(peer, version, "this process", VERSION))


def version_mismatch(one: str, version: int, other: str, others_version: int) -> str:
    """What is wrong, and what to do."""
    return (
        f"{one} speaks version {version} of the transfer protocol, {other} version {others_version}; "
        "install the same release of mooncake-serving on both"
    )


def common_schemes(peer: SegmentDescriptor, host: str, process: str, ours: Sequence[str]) -> tuple[str, ...]:
    """Schemes by which a process on ``host`` reaches ``peer``, in our order of preference.

    ``process`` is our own endpoint of those in ``IN_ONE_PROCESS``.
    """

    def leads_there(scheme: str) -> bool:
        if scheme not in ON_ONE_HOST:
            return True
        return peer.host == host and (scheme not in IN_ONE_PROCESS or peer.endpoints[scheme] == process)

    return tuple(scheme for scheme in ours if scheme in peer.endpoints and leads_there(scheme))


REACHABLE_REGIONS = (
    ("shm", ("memory",), True),
    ("cuda", ("cuda",), True),
    ("rdma", ("memory", "cuda"), False),
    ("file", ("file",), True),
    ("local", ("memory",), False),
)
"""Schemes that carry only some kinds of regions, and whether these must be shared. Others carry all."""


class RegionIndex:
    """The peer's regions, arranged to answer for whole columns which slices a scheme can reach."""

    def __init__(self, regions: Sequence[RegionInfo]) -> None:
        self._spans: dict[str, tuple[Column, Column]] = {}
        self._carries_all: dict[str, bool] = {}
        for scheme, kinds, must_share in REACHABLE_REGIONS:
            open_to_us = [
                region
                for region in regions
                if (region.is_shared or not must_share) and _sort(region) in kinds
            ]
            open_to_us.sort(key=lambda region: region.address)
            starts = np.array([region.address for region in open_to_us], dtype=np.uint64)
            sizes = np.array([region.size_bytes for region in open_to_us], dtype=np.uint64)
            self._spans[scheme] = starts, starts + sizes
            self._carries_all[scheme] = len(open_to_us) == len(regions)

    def carries_all(self, scheme: str) -> bool:
        return self._carries_all.get(scheme, True)

    def carries_any(self, scheme: str) -> bool:
        return scheme not in self._spans or len(self._spans[scheme][0]) > 0

    def carried(self, scheme: str, remote: Column, lengths: Column) -> npt.NDArray[np.bool_]:
        """One flag per slice. Empty slices lie everywhere."""
        empty: npt.NDArray[np.bool_] = np.equal(lengths, 0)
        starts, ends = self._spans[scheme]
        if not len(starts):
            return empty
        nearest = np.searchsorted(starts, remote, side="right").astype(np.int64) - 1
        inside = nearest >= 0
        room = ends[np.maximum(nearest, 0)] - np.minimum(remote, ends[np.maximum(nearest, 0)])
        found: npt.NDArray[np.bool_] = np.logical_or(inside & (lengths <= room), empty)
        return found


def _sort(region: RegionInfo) -> str:
    return region.kind.partition(":")[0]
