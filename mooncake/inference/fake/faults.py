# SPDX-License-Identifier: Apache-2.0
"""Corrupts, delays or fails the loads of any link, counted and repeatable.

It wraps a ``KvLink`` and keeps its contract, except where the settings break it: a load that is
slow or fails is within the contract; wrong bytes and the death of the process are what the contract is
there to survive. Faults are injected where the engine waits for a layer, in the middle of a load.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence

from mooncake.connectors.kv_link import AnyLink, KvLoad, KvLookup, KvSave
from mooncake.prefix import BlockHash


@dataclasses.dataclass(frozen=True)
class LoadFaults:
    """Faults to inject. Loads are counted from 1; 0 is never."""

    load_layer_s: float = 0.0
    """Delay added to each layer of each load."""
    fail_load_every: int = 0
    """Every n-th load fails when half of its layers have arrived."""
    corrupt_load_every: int = 0
    """Every n-th load brings one wrong bit without reporting a failure."""
    die_in_load: int = 0
    """The process is killed (SIGKILL) in the middle of this load."""


class FaultyLoad:
    """A load and the faults that are due in it."""

    def __init__(
        self, real: KvLoad, number: int, faults: LoadFaults, block_ids: Sequence[int], most: int
    ) -> None:
        def is_due(every: int) -> bool:
            return every > 0 and number % every == 0

        self.real = real
        self.block_ids = list(block_ids)
        self.is_failing = is_due(faults.fail_load_every)
        self.is_corrupt = is_due(faults.corrupt_load_every)
        self.is_last = number == faults.die_in_load
        self._most = most

    @property
    def num_layers_loaded(self) -> int:
        return (
            min(self.real.num_layers_loaded, self._most) if self.is_failing else self.real.num_layers_loaded
        )

    @property
    def failed(self) -> bool:
        return self.real.failed or (self.is_failing and self.real.done)

    @property
    def done(self) -> bool:
        return self.real.done


class FaultyLink:
    """``link`` with ``faults`` in its loads. ``flip(block id, layer)`` inverts a bit of the pool."""

    def __init__(
        self, link: AnyLink, faults: LoadFaults, num_layers: int, flip: Callable[[int, int], None]
    ) -> None:
        self._link = link
        self._faults = faults
        self._num_layers = num_layers
        self._flip = flip
        self.num_loads = 0

    def attach(self, wake: Callable[[], None]) -> None:
        self._link.attach(wake)

    def lookup(self, blocks: Sequence[tuple[BlockHash, int]]) -> KvLookup:
        found: KvLookup = self._link.lookup(blocks)
        return found

    def release(self, lookup: KvLookup) -> None:
        self._link.release(lookup)

    def start_load(self, lookup: KvLookup, block_ids: Sequence[int]) -> FaultyLoad:
        self.num_loads += 1
        real = self._link.start_load(lookup, block_ids)
        return FaultyLoad(real, self.num_loads, self._faults, block_ids, self._num_layers // 2)

    def wait_layer(self, loads: Sequence[FaultyLoad], layer: int) -> None:
        for load in loads:
            time.sleep(self._faults.load_layer_s)
            is_middle = layer == self._num_layers // 2
            if load.is_last and is_middle:
                os.kill(os.getpid(), signal.SIGKILL)
            # A failed load must write nothing afterwards: let all of it arrive before reporting the failure.
            last = self._num_layers - 1 if load.is_failing and layer >= self._num_layers // 2 else layer
            for each in range(layer, last + 1):
                self._link.wait_layer([load.real], each)
            if load.is_corrupt and is_middle and not load.failed:
                self._flip(load.block_ids[0], layer)

    def start_save(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> KvSave:
        save: KvSave = self._link.start_save(blocks)
        return save

    def save_layer(self, save: KvSave, layer: int) -> None:
        self._link.save_layer(save, layer)

    def finish_save(self, save: KvSave) -> None:
        self._link.finish_save(save)

    def abort_save(self, save: KvSave) -> None:
        self._link.abort_save(save)
