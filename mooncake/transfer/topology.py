# SPDX-License-Identifier: Apache-2.0
"""Topology of a host: which network cards are near which memory, by NUMA node and GPU.

A buffer's *location* is ``cpu:<numa node>``, ``cuda:<gpu>`` or ``*`` (anywhere). For each location the
RDMA devices are split into preferred and other ones. Hosts publish that split (in the
form that the existing package prints), and from the splits of both hosts each rail between a pair of
buffers gets a rank. ``host.py`` reads the devices.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mooncake.transfer.descriptor import rail_of

ANYWHERE = "*"

Matrix = dict[str, tuple[list[str], list[str]]]
"""Location -> (preferred, other) RDMA devices."""


class Distance(enum.IntEnum):
    """Distance of two devices, nearest first; the names are those of ``nvidia-smi topo``."""

    PIX = 0
    "Below one PCIe switch."
    PXB = 1
    "Below several switches of one root port."
    PHB = 2
    "Across the host bridge."
    NODE = 3
    "Within a NUMA node."
    SYS = 4
    "Across sockets."


class Device(msgspec.Struct, frozen=True):
    """Network card or GPU."""

    name: str
    kind: str
    "``rdma``, ``net`` or ``gpu``."
    numa: int
    "Its NUMA node; -1 when unknown."
    bus: tuple[str, ...] = ()
    "PCI addresses from the host bridge to the card; empty for a virtual one."
    is_up: bool = True
    gbit_per_s: float = 0.0
    "0 when unknown."
    carries: str = ""
    "Network interface that shares its port, for an RDMA device."


class Topology(msgspec.Struct, frozen=True):
    """Devices and NUMA nodes of one host."""

    nodes: list[int]
    devices: list[Device]

    def of_kind(self, kind: str) -> list[Device]:
        return [device for device in self.devices if device.kind == kind]

    def locations(self) -> list[str]:
        """Locations that memory can have on this host."""
        gpus = self.of_kind("gpu")
        return [f"cpu:{node}" for node in self.nodes] + [f"cuda:{i}" for i in range(len(gpus))]

    def split(self, location: str, allowed: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """Preferred and other RDMA devices for memory at ``location``, among ``allowed`` (empty: all)."""
        cards = [card for card in self.of_kind("rdma") if not allowed or card.name in allowed]
        where, _, number = location.partition(":")
        if where == "cpu" and number.isdigit():
            near = [card for card in cards if card.numa in (int(number), -1)]
        elif where == "cuda" and number.isdigit() and int(number) < len(self.of_kind("gpu")):
            gpu = self.of_kind("gpu")[int(number)]
            least = min((distance(gpu, card) for card in cards), default=Distance.SYS)
            near = [card for card in cards if distance(gpu, card) == least]
        else:
            near = cards
        return [card.name for card in near], [card.name for card in cards if card not in near]

    def matrix(self, allowed: Sequence[str] = ()) -> Matrix:
        return {location: self.split(location, allowed) for location in self.locations()}


def distance(one: Device, other: Device) -> Distance:
    """Distance between two cards."""
    shared = 0
    while shared < min(len(one.bus), len(other.bus)) and one.bus[shared] == other.bus[shared]:
        shared += 1
    if shared >= 2:
        below = max(len(one.bus), len(other.bus)) - shared
        return Distance.PIX if below <= 2 else Distance.PXB
    if shared == 1:
        return Distance.PHB
    return Distance.NODE if one.numa == other.numa else Distance.SYS


class Places:
    """Locations of memory ranges, for those whose location is known."""

    def __init__(self, spans: Iterable[tuple[int, int, str]] = ()) -> None:
        self._spans = sorted(span for span in spans if span[2] != ANYWHERE)
        "(address, size in bytes, location)"
        self._starts = [address for address, _, _ in self._spans]

    def __bool__(self) -> bool:
        return bool(self._spans)

    def at(self, address: int) -> str:
        """The location of the memory at ``address``."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._spans[index][0] + self._spans[index][1]:
            return ANYWHERE
        return self._spans[index][2]


def is_location(text: str) -> bool:
    """Whether ``text`` is ``cpu:<numa node>``, ``cuda:<gpu>`` or ``*``."""
    kind, _, number = text.partition(":")
    return text == ANYWHERE or (kind in ("cpu", "cuda") and number.isdigit())


def ranks(
    paths: Iterable[str], here: Matrix, location: str, there: Matrix, remote_location: str
) -> dict[str, int]:
    """Rank of each path for a pair of buffers: 0 when both ends are preferred, one more per other end."""
    far_here, far_there = _others(here, location), _others(there, remote_location)
    found = {}
    for path in paths:
        local, _, remote = rail_of(path).partition(">")
        found[path] = (local in far_here) + (remote in far_there)
    return found


def _others(matrix: Mapping[str, tuple[Sequence[str], Sequence[str]]], location: str) -> frozenset[str]:
    preferred, others = matrix.get(location, ((), ()))
    return frozenset(others) if preferred else frozenset()
