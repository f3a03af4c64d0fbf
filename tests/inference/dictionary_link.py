# SPDX-License-Identifier: Apache-2.0
"""A ``KvLink`` over a dictionary of bytes: the contract at its simplest, with faults on request.

The dictionary is keyed by block hash alone, so a test shares one only between engines of one model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mooncake.prefix import BlockHash

Objects = dict[BlockHash, Tensor]
"""Per block: [layers, 2, tokens, heads, dim]."""


@dataclasses.dataclass
class DictionaryLookup:
    blocks: list[tuple[BlockHash, int]]
    num_blocks: int = 0
    done: bool = False
    is_released: bool = False


@dataclasses.dataclass
class DictionaryLoad:
    objects: list[Tensor]
    block_ids: list[int]
    num_layers: int
    num_layers_loaded: int = 0
    failed: bool = False

    @property
    def done(self) -> bool:
        return self.failed or self.num_layers_loaded == self.num_layers

    @property
    def moved(self) -> tuple[int, float] | None:
        return None if self.failed else (sum(one.shape[2] for one in self.objects), 0.25)


@dataclasses.dataclass
class DictionarySave:
    blocks: list[tuple[BlockHash, int, int]]
    objects: list[Tensor]
    num_layers_saved: int = 0
    is_finished: bool = False
    is_aborted: bool = False
    done: bool = False
    num_stored_blocks: int = 0


class DictionaryLink:
    """A link whose layers move when the test or ``wait_layer`` moves them, or at once with ``is_eager``."""

    def __init__(self, objects: Objects | None = None, is_eager: bool = True) -> None:
        self.objects: Objects = {} if objects is None else objects
        self.is_eager = is_eager
        self.fail_at_layer: int | None = None
        """Layer at which loads fail."""
        self.lookups: list[DictionaryLookup] = []
        self.loads: list[DictionaryLoad] = []
        self.saves: list[DictionarySave] = []
        self.pool = torch.empty(0)
        self.wake: Callable[[], None] = lambda: None

    def attach(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def lookup(self, blocks: Sequence[tuple[BlockHash, int]]) -> DictionaryLookup:
        lookup = DictionaryLookup(list(blocks))
        self.lookups.append(lookup)
        if self.is_eager:
            self.answer(lookup)
        return lookup

    def answer(self, lookup: DictionaryLookup) -> None:
        for block_hash, num_tokens in lookup.blocks:
            found = self.objects.get(block_hash)
            if found is None or found.shape[2] != num_tokens:
                break
            lookup.num_blocks += 1
        lookup.done = True
        self.wake()

    def release(self, lookup: DictionaryLookup) -> None:
        lookup.is_released = True

    def start_load(self, lookup: DictionaryLookup, block_ids: Sequence[int]) -> DictionaryLoad:
        assert lookup.done and len(block_ids) == lookup.num_blocks
        objects = [self.objects[block_hash] for block_hash, _ in lookup.blocks[: lookup.num_blocks]]
        load = DictionaryLoad(objects, list(block_ids), num_layers=self.pool.shape[0])
        self.loads.append(load)
        if self.is_eager:
            self.load_layer(load)
        return load

    def load_layer(self, load: DictionaryLoad) -> None:
        layer = load.num_layers_loaded
        if layer == self.fail_at_layer:
            load.failed = True
        else:
            for stored, block in zip(load.objects, load.block_ids, strict=True):
                self.pool[layer, :, block, : stored.shape[2]] = stored[layer]
            load.num_layers_loaded += 1
        self.wake()

    def wait_layer(self, loads: Sequence[DictionaryLoad], layer: int) -> None:
        for load in loads:
            while load.num_layers_loaded <= layer and not load.failed:
                self.load_layer(load)

    def start_save(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> DictionarySave:
        layers, _, _, _, heads, dim = self.pool.shape
        objects = [torch.full((layers, 2, tokens, heads, dim), torch.nan) for _, tokens, _ in blocks]
        save = DictionarySave(list(blocks), objects)
        self.saves.append(save)
        return save

    def save_layer(self, save: DictionarySave, layer: int) -> None:
        assert layer == save.num_layers_saved
        for (_, num_tokens, block), stored in zip(save.blocks, save.objects, strict=True):
            stored[layer] = self.pool[layer, :, block, :num_tokens]
        save.num_layers_saved += 1

    def finish_save(self, save: DictionarySave) -> None:
        assert save.num_layers_saved == self.pool.shape[0] and not save.is_aborted
        save.is_finished = True
        if self.is_eager:
            self.land(save)

    def land(self, save: DictionarySave) -> None:
        for (block_hash, _, _), stored in zip(save.blocks, save.objects, strict=True):
            assert not stored.isnan().any()
            self.objects.setdefault(block_hash, stored)
        save.num_stored_blocks = len(save.blocks)
        save.done = True
        self.wake()

    def abort_save(self, save: DictionarySave) -> None:
        assert not save.is_finished
        save.is_aborted = save.done = True
        self.wake()
