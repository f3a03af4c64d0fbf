# SPDX-License-Identifier: Apache-2.0
"""Segment descriptors: the registered memory that a process offers its peers, and how to reach it.

A descriptor travels through a metadata service, the store's master or any message. Its holder
has the keys in it and may read and write the regions. This module decides which paths two processes
have in common and which of them can carry a slice. It does no I/O: this process's identity is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.errors import ProtocolError

Column = npt.NDArray[np.uint64]
"""Addresses, or lengths in bytes, one per slice."""

VERSION = 1
"""Version of descriptors and the handshake. Peers of different versions refuse each other; adding a field
with a default does not raise it."""

_LARGEST = (1 << 64) - 1

ON_ONE_HOST = frozenset({"local", "shm", "file", "cuda"})
"""Schemes that work only within one host."""

IN_ONE_PROCESS = frozenset({"local"})
"""Schemes that work only within one process."""


def scheme_of(path: str) -> str:
    """The part of a path before its ``@``, as in ``tcp@10.0.0.1>10.1.0.2``, or all of it, as in ``shm``."""
    return path.partition("@")[0]


def rail_of(path: str) -> str:
    """The two devices of a path: the part after its ``@``, or an empty string."""
    return path.partition("@")[2]


class RegionInfo(msgspec.Struct, frozen=True):
    """Registered memory, as published by its owner."""

    address: int
    "Start address in the owner's address space."
    size_bytes: int
    key: int
    "64 random bits; access without it is denied."
    is_shared: bool
    "True when processes on the same host can map it, or open it."
    kind: str = "memory"
    "Medium that holds the bytes: ``memory``, ``file``, ``cuda:<n>``."
    location: str = "*"
    "Part of the machine that it is near: ``cpu:<numa node>``, ``cuda:<n>``, or ``*`` for any."
    is_writable: bool = True
    "False when peers may only read it."


class SegmentDescriptor(msgspec.Struct, frozen=True):
    """Addresses of a process and its registered memory."""

    name: str
    host: str
    "Identity of the kernel and network namespace that it runs in; equal means the same host."
    epoch: int
    "Random per process start, which distinguishes a restarted process from its predecessor."
    endpoints: dict[str, str]
    "Address per scheme, in the transport's own form: `shm`, `tcp` (`ip:port`, several by commas), `local`."
    regions: list[RegionInfo]
    handshake: str = ""
    "Address where the process answers handshakes (``host:port``); empty when it does not."
    version: int = VERSION
    topology: dict[str, tuple[list[str], list[str]]] = {}
    "Its RDMA devices per location, as (preferred, other); empty when it has no rails."

    def encode(self) -> bytes:
        """Encode as JSON, the form that metadata services keep."""
        return msgspec.json.encode(self)


def decode_descriptor(encoded: bytes) -> SegmentDescriptor:
    """Decode the bytes that ``SegmentDescriptor.encode`` wrote.

    Raises:
        ProtocolError: the bytes are something else, or of an unsupported release.
    """
    try:
        descriptor = msgspec.json.decode(encoded, type=SegmentDescriptor)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"not a segment descriptor: {error}; is another service using this key?"
        ) from error
    check_version(descriptor.name, descriptor.version)
    numbers = [descriptor.epoch]
    for region in descriptor.regions:
        numbers += region.address, region.size_bytes, region.key
    if min(numbers) < 0 or max(numbers) > _LARGEST:
        raise ProtocolError(
            f"not a segment descriptor: {descriptor.name} has a number beyond 64 bits, or a negative one"
        )
    return descriptor


def check_version(peer: str, version: int) -> None:
    """Raise ProtocolError, with what to do, when ``peer`` speaks another version."""
    if version != VERSION:
        raise ProtocolError(version_mismatch(peer, version, "this process", VERSION))


def version_mismatch(one: str, version: int, other: str, others_version: int) -> str:
    """Error text for a version mismatch, with what to do."""
    return (
        f"{one} speaks version {version} of the transfer protocol, {other} version {others_version}; "
        "install the same release of mooncake-serving on both"
    )


def common_schemes(peer: SegmentDescriptor, host: str, process: str, order: Sequence[str]) -> tuple[str, ...]:
    """Schemes by which a process on ``host`` reaches ``peer``, in the order of preference ``order``.

    ``process`` is this process's endpoint of the schemes in ``IN_ONE_PROCESS``.
    """

    def leads_there(scheme: str) -> bool:
        if scheme not in ON_ONE_HOST:
            return True
        return peer.host == host and (scheme not in IN_ONE_PROCESS or peer.endpoints[scheme] == process)

    return tuple(scheme for scheme in order if scheme in peer.endpoints and leads_there(scheme))


REACHABLE_REGIONS = (
    ("shm", ("memory",), True),
    ("cuda", ("cuda",), True),
    ("rdma", ("memory", "cuda"), False),
    ("file", ("file",), True),
    ("local", ("memory",), False),
)
"""Kinds of regions that a scheme carries, and whether they must be shared. Other schemes carry all."""


class RegionIndex:
    """A peer's regions, indexed to find for whole columns which slices a scheme can reach."""

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
        """One flag per slice: True when ``scheme`` can carry it. Empty slices are always carried."""
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
