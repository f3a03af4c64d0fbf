# SPDX-License-Identifier: Apache-2.0
"""Local memory that a program moves without having registered it.

The existing engine moves such memory over tcp, and programs rely on it. Here each batch registers what it
moves for itself, until it ends. Several may do so with the same bytes: the registrations are brief ones, of
which one that ends leaves the transfers of the others alone. They are never published to peers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake.errors import InvalidArgument
from mooncake.transfer.descriptor import Column
from mooncake.transfer.memory import is_readable, is_writable
from mooncake.transfer.transports import Region, RegionTable


class TemporaryRegistrations:
    """Regions of unregistered memory that batches in flight use. Thread-safe."""

    def __init__(self, regions: RegionTable) -> None:
        self._table = regions
        self._by_number: dict[int, list[Region]] = {}

    def begin(self, addresses: Column, sizes: Column, number: int = 0) -> list[Region]:
        """Register the given memory for a batch that begins. What is returned needs an ``end``, or with a
        ``number`` an ``end_of``.

        Raises:
            InvalidArgument: part of it is not memory that this process may read.
        """
        spans = np.unique(np.stack([addresses, sizes]), axis=1).T.tolist()
        for address, size in spans:
            if not is_readable(address, size):
                allowed = "memory of this process that it may read; a device's must be registered"
                raise InvalidArgument("local memory", f"[{address:#x}, +{size})", allowed)
        regions = [
            self._table.add(address, size, is_writable(address, size), is_brief=True)
            for address, size in spans
        ]
        if number:
            self._by_number[number] = regions
        return regions

    def end(self, regions: Sequence[Region]) -> None:
        """Unregister the memory of a batch whose transfers have ended."""
        for region in regions:
            self._table.remove(region.key)

    def end_of(self, number: int) -> None:
        """As ``end``, if that batch uses such memory."""
        self.end(self._by_number.pop(number, []))
