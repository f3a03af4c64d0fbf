"""A native peer as a carrier: what the transports that only hand columns down have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from mooncake import _native
from mooncake.transfer.descriptor import RegionInfo

RegionFilter: TypeAlias = Callable[[Sequence[RegionInfo]], list[tuple[int, int, int]]]
"""Picks the regions that a path reaches, as (address, size in bytes, key)."""


class NativeConnection:
    """Connection to one peer through a native one: passes columns down; nothing can be mapped."""

    def __init__(self, peer: _native.Peer, reachable: RegionFilter) -> None:
        self._peer = peer
        self._reachable = reachable
        self.run = peer.run
        self.submit = peer.submit
        self.cancel = peer.cancel
        self.close = peer.close

    @property
    def is_lost(self) -> bool:
        return self._peer.is_lost

    def view(self, address: int, size_bytes: int, timeout_s: float) -> _native.View | None:
        return None

    def set_regions(self, regions: Sequence[RegionInfo]) -> None:
        self._peer.set_remote(self._reachable(regions))
