# SPDX-License-Identifier: Apache-2.0
"""memcpy inside the process: the executable definition of a transport.

Pure Python and slow on purpose. Every check is visible in this file: local memory must be
registered here, remote memory must be registered there under the key in the descriptor, a slice is
moved whole or the completion names the one that failed. It reaches only other engines of the same
process.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np

from mooncake._native import Completion, Op, Queue, Region, RegionTable, Status, crc32c
from mooncake.errors import PeerLost
from mooncake.transfer.descriptor import Column, RegionInfo
from mooncake.transfer.transports import PeerConnection, TransportContext

_STEP_BYTES = 1 << 20  # between checks of cancellation and deadline

_engines: weakref.WeakValueDictionary[int, LocalTransport] = weakref.WeakValueDictionary()


class LocalConnection:
    def __init__(self, ours: RegionTable, peer: LocalTransport, regions: Sequence[RegionInfo]) -> None:
        self._ours = ours
        self._peer = peer
        self._regions = list(regions)
        self._lock = threading.Lock()
        self._generation = 0
        self._is_closed = False

    @property
    def is_lost(self) -> bool:
        return self._peer.is_closed

    def run(
        self, op: Op, local: Column, remote: Column, lengths: Column, timeout_s: float, checksum: bool
    ) -> Completion:
        deadline = time.monotonic() + timeout_s
        generation = self._generation
        rows = list(zip(local.tolist(), remote.tolist(), lengths.tolist(), strict=True))
        for row, (here, _, length) in enumerate(rows):
            if length:
                region = _enter(self._ours, here, length, is_write=op == Op.READ)
                if region is None:
                    return Completion(status=Status.UNREGISTERED, failed_slice=row)
                region.leave()
        sums = []
        for row, (here, there, length) in enumerate(rows):
            status, checksum_of_row = self._move(op, here, there, length, deadline, generation)
            if status != Status.OK:
                return Completion(status=status, failed_slice=row)
            sums.append(checksum_of_row)
        return Completion(num_bytes=int(lengths.sum()), checksums=sums if checksum else [])

    def run_slice(
        self, op: Op, local: int, remote: int, length: int, timeout_s: float, checksum: bool
    ) -> int | Completion:
        here, there, lengths = np.array(((local,), (remote,), (length,)), dtype=np.uint64)
        done = self.run(op, here, there, lengths, timeout_s, checksum)
        if done.status != Status.OK:
            return done
        return 0 if done.checksums is None else int(done.checksums[0])

    def _move(
        self, op: Op, here: int, there: int, length: int, deadline: float, generation: int
    ) -> tuple[Status, int]:
        """Move one slice in steps, entering the regions per step only, so that unregistering is quick."""
        is_write = op == Op.WRITE
        key = next(
            (r.key for r in self._regions if _covers(r, there, length) and (r.is_writable or not is_write)), 0
        )
        done, checksum = 0, 0
        while done < length:
            step = min(_STEP_BYTES, length - done)
            with self._lock:
                if self._is_closed or generation != self._generation:
                    return Status.CANCELLED, 0
                if self._peer.is_closed:
                    return Status.PEER_LOST, 0
                if done and time.monotonic() > deadline:
                    return Status.TIMED_OUT, 0
                remote = self._peer.enter(key, there, length, is_write=is_write)
                if remote is None:
                    return Status.ACCESS_DENIED, 0
                try:
                    region = _enter(self._ours, here, length, is_write=not is_write)
                    if region is None:
                        return Status.CANCELLED, 0
                    target, source = (there, here) if is_write else (here, there)
                    ctypes.memmove(target + done, source + done, step)
                    checksum = crc32c((ctypes.c_char * step).from_address(source + done), checksum)
                    region.leave()
                finally:
                    remote.leave()
            done += step
        return Status.OK, checksum

    def submit(
        self,
        queue: Queue,
        token: int,
        op: Op,
        local: Column,
        remote: Column,
        lengths: Column,
        timeout_s: float,
        checksum: bool,
        *,
        priority: int = 0,
        reports: bool = False,
    ) -> int:
        """Move at once, in the caller: the contract requires a completion, not another thread.

        So nothing is ever queued for a ``priority`` to overtake, or partly done to report.
        """
        done = self.run(op, local, remote, lengths, timeout_s, checksum)
        if done.status == Status.UNREGISTERED:
            return done.failed_slice
        sums = [] if done.checksums is None else done.checksums.tolist()
        queue.push(Completion(token, done.status, done.failed_slice, done.num_bytes, sums))
        return -1

    def view(self, address: int, size_bytes: int, timeout_s: float) -> memoryview | None:
        region = _enter(self._peer.regions, address, size_bytes, is_write=False)
        if region is None:
            return None
        region.leave()
        start = address - region.address
        return region.view()[start : start + size_bytes].toreadonly()

    def set_regions(self, regions: Sequence[RegionInfo]) -> None:
        self._regions = list(regions)

    def cancel(self) -> None:
        with self._lock:
            self._generation += 1

    def close(self) -> None:
        with self._lock:
            self._is_closed = True


class LocalTransport:
    def __init__(self, site: TransportContext) -> None:
        self.regions = site.regions
        self.endpoint = str(os.getpid())
        self.is_closed = False
        _engines[site.epoch] = self

    def enter(self, key: int, address: int, length: int, *, is_write: bool) -> Region | None:
        """The region, held open until its ``leave()``, if the key gives access to this range."""
        return _enter(self.regions, address, length, is_write=is_write, key=key)

    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float
    ) -> PeerConnection:
        peer = _engines.get(epoch)
        if peer is None or peer.is_closed:
            raise PeerLost(f"no engine with epoch {epoch:x} in this process; it was closed")
        return LocalConnection(self.regions, peer, regions)

    def close(self) -> None:
        self.is_closed = True


def _covers(region: Region | RegionInfo, address: int, length: int) -> bool:
    return region.address <= address and address + length <= region.address + region.size_bytes


def _enter(
    table: RegionTable, address: int, length: int, *, is_write: bool, key: int | None = None
) -> Region | None:
    for region in table.all():
        is_memory = region.kind == "memory"
        is_it = is_memory and _covers(region, address, length) and (key is None or region.key == key)
        if is_it and (region.is_writable or not is_write) and region.enter():
            return region
    return None
