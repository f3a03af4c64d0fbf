# SPDX-License-Identifier: Apache-2.0
"""Shared memory on one host: the caller's thread copies, the target does nothing.

A thin layer: the native side maps, checks and copies (``native/sharing.h`` describes the protocol). Works
only for regions that were allocated as shared memory, and between processes of the same user.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake import _native
from mooncake._native import Status, View
from mooncake.errors import AccessDenied, DeadlineExceeded, PeerLost, Unavailable
from mooncake.transfer.descriptor import RegionInfo
from mooncake.transfer.transports import (
    NativeConnection,
    PeerConnection,
    RegionRow,
    TransportContext,
    region_rows,
)


class ShmConnection(NativeConnection):
    def __init__(self, peer: _native.ShmPeer) -> None:
        super().__init__(peer, shared_only)
        self._shm = peer

    def view(self, address: int, size_bytes: int, timeout_s: float) -> View | None:
        return self._shm.view(address, size_bytes, timeout_s)


class SharedMemoryTransport:
    def __init__(self, site: TransportContext) -> None:
        try:
            self._native = _native.ShmTransport(site.regions, site.epoch)
        except OSError as error:
            raise Unavailable(f"shm transport: {error}") from error
        self.endpoint = self._native.endpoint
        self._is_closed = False

    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float
    ) -> PeerConnection:
        if self._is_closed:
            raise PeerLost("this engine was closed")
        peer = self._native.connect(endpoint, epoch, shared_only(regions), timeout_s)
        if isinstance(peer, _native.ShmPeer):
            return ShmConnection(peer)
        if peer == Status.TIMED_OUT:
            raise DeadlineExceeded(
                f"shm peer {endpoint} did not answer within {timeout_s:g} s; is it stopped?"
            )
        if peer == Status.ACCESS_DENIED:
            raise AccessDenied(f"shm peer {endpoint} runs as another user; use tcp between users")
        raise PeerLost(f"shm peer {endpoint} is gone; open its current descriptor")

    def close(self) -> None:
        self._is_closed = True
        self._native.close()


def shared_only(regions: Sequence[RegionInfo]) -> list[RegionRow]:
    return region_rows(region for region in regions if region.is_shared and region.kind == "memory")
