# SPDX-License-Identifier: Apache-2.0
"""Local memory that a program moves without having registered it.

The existing engine moves such memory over tcp, and programs rely on it. Here it is registered for as long
as any batch of that kind is in flight, not for each batch by itself: two batches may use the same
bytes, and the end of one must not unregister them for the other. It is never published to peers.
"""

from __future__ import annotations

import threading

import numpy as np

from mooncake.errors import InvalidArgument
from mooncake.transfer.descriptor import Column
from mooncake.transfer.memory import is_readable, is_writable
from mooncake.transfer.transports import Region, RegionTable


class TemporaryRegistrations:
    """Regions of unregistered memory that batches in flight use. Thread-safe."""

    def __init__(self, regions: RegionTable) -> None:
        self._table = regions
        self._lock = threading.Lock()
        self._regions: dict[tuple[int, int], Region] = {}
        self._num_batches = 0
        self._numbers: set[int] = set()

    def begin(self, addresses: Column, sizes: Column, number: int = 0) -> None:
        """Register the given memory for a batch that begins. Each call needs an ``end``, or with a
        ``number`` an ``end_of``.

        Raises:
            InvalidArgument: part of it is not memory that this process may read.
        """
        spans = np.unique(np.stack([addresses, sizes]), axis=1).T.tolist()
        for address, size in spans:
            if not is_readable(address, size):
                allowed = "memory of this process that it may read; a device's must be registered"
                raise InvalidArgument("local memory", f"[{address:#x}, +{size})", allowed)
        with self._lock:
            self._num_batches += 1
            if number:
                self._numbers.add(number)
            for address, size in spans:
                if (address, size) not in self._regions:
                    self._regions[address, size] = self._table.add(address, size, is_writable(address, size))

    def end(self) -> None:
        """Note the end of a batch; the last one unregisters the memory."""
        with self._lock:
            self._num_batches -= 1
            over = [] if self._num_batches else list(self._regions.values())
            if over:
                self._regions = {}
            for region in over:
                self._table.remove(region.key)

    def end_of(self, number: int) -> None:
        """As ``end``, if that batch uses such memory."""
        with self._lock:
            if number not in self._numbers:
                return
            self._numbers.remove(number)
        self.end()
