# SPDX-License-Identifier: Apache-2.0
"""The link between a prefill group and the store: whole objects, of which each stage moves its own layers.

The first stage asks the master, as any worker does: it reserves space and ends puts, looks up and leases. The
bytes of its own layers it moves itself (``StoreLink``). Each other stage is asked once for all of its layers,
to write its slabs of the same blocks into the same objects, or to read them. It answers with their checksums.
An object becomes visible when every stage has written its part. So the objects are those of a single worker
with the same model, and groups of any size, single workers and decode workers share them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Sequence

import numpy as np

from mooncake import clock
from mooncake.connectors.memory import CacheIdentity, DeviceEvent, HostMemory, Purpose, StagedBlocks
from mooncake.connectors.store_link import (
    LoadPiece,
    StoreLink,
    StoreLoad,
    StoreSave,
    failures,
    loaded_bytes,
)
from mooncake.errors import MooncakeError
from mooncake.inference.prefill_group import PrefillGroup
from mooncake.inference.stage import MoveBlocks
from mooncake.kvlayout import Column
from mooncake.log import get_logger
from mooncake.store import AsyncStore, PutGrant, ReadGrant
from mooncake.store.client.grants import Checksums
from mooncake.transfer import Status, TransferEngine

log = get_logger(__name__)


class FirstLayers:
    """The first stage's memory, as ``HostMemory`` of all layers: those of other stages are not here."""

    def __init__(self, memory: HostMemory, num_layers: int) -> None:
        self._memory, self._num_layers = memory, num_layers
        self.buffers = memory.buffers
        self._left: weakref.WeakKeyDictionary[StagedBlocks, DeviceEvent | None] = weakref.WeakKeyDictionary()
        """The end of the latest copy out of the pool; copies end in the order in which they began."""

    @property
    def most_blocks(self) -> int:
        return self._memory.most_blocks

    def has_room(self, num_blocks: int, purpose: Purpose) -> bool:
        return self._memory.has_room(num_blocks, purpose)

    def hold(
        self, block_ids: Sequence[int], purpose: Purpose, after: DeviceEvent | None = None
    ) -> StagedBlocks | None:
        return self._memory.hold(block_ids, purpose, after)

    def addresses(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> Column:
        assert layer < self._num_layers, f"layer {layer} is in another stage"
        return self._memory.addresses(held, layer, members)

    def computed(self) -> DeviceEvent | None:
        return self._memory.computed()

    def leave(self, held: StagedBlocks, layer: int, computed: DeviceEvent | None) -> DeviceEvent | None:
        if layer < self._num_layers:
            self._left[held] = self._memory.leave(held, layer, computed)
        return self._left.get(held)

    def enter(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> DeviceEvent | None:
        assert layer < self._num_layers, f"layer {layer} is in another stage"
        return self._memory.enter(held, layer, members)

    def compute_after(self, held: StagedBlocks, layer: int) -> None:
        if layer < self._num_layers:
            self._memory.compute_after(held, layer)

    def release(self, held: StagedBlocks) -> None:
        self._memory.release(held)


@dataclasses.dataclass
class StagePart:
    """One stage's part in a save, for the objects in one segment."""

    num_entered: int = 1
    """Layers for which the save's claim was entered."""


class GroupLink(StoreLink):
    """A ``StoreLink`` whose later layers are in other stages. ``identity``: that of a single worker."""

    def __init__(
        self,
        store: AsyncStore,
        transfer: TransferEngine,
        identity: CacheIdentity,
        memory: HostMemory,
        loop: asyncio.AbstractEventLoop,
        group: PrefillGroup,
    ) -> None:
        self._group = group
        self._own = len(group.ranges[0])
        super().__init__(store, transfer, identity, FirstLayers(memory, self._own), loop)
        self._stage_of = {layer: number for number, one in enumerate(group.ranges) for layer in one}
        self._after: weakref.WeakKeyDictionary[StoreSave, int] = weakref.WeakKeyDictionary()
        self._begun_before: weakref.WeakKeyDictionary[StoreLoad, int] = weakref.WeakKeyDictionary()
        self._parts: weakref.WeakKeyDictionary[StoreSave, dict[tuple[int, int], StagePart]] = (
            weakref.WeakKeyDictionary()
        )

    # -- loads ---------------------------------------------------------------------------------

    def _begin_load(self, load: StoreLoad, piece: LoadPiece) -> None:
        # Read before anything arrives: a chunk of this request would wait for the load, and the load for it.
        self._begun_before[load] = self._group.pipeline.latest
        super()._begin_load(load, piece)

    def _submit_load(
        self,
        load: StoreLoad,
        piece: LoadPiece,
        layer: int,
        members: Sequence[int],
        all_checksums: Checksums,
    ) -> None:
        if layer < self._own:
            super()._submit_load(load, piece, layer, members, all_checksums)
        elif layer == self._group.ranges[self._stage_of[layer]].start:
            grants = [piece.grants[index] for index in members]
            lengths = [piece.lengths[index] for index in members]
            block_ids = [piece.block_ids[index] for index in members]
            # Chunks begun before may still use these blocks in that stage, for a request that has ended.
            after, stage = self._begun_before[load], self._stage_of[layer]
            self._spawn(self._load_in_stage(load, piece, stage, grants, lengths, block_ids, after))

    async def _load_in_stage(
        self,
        load: StoreLoad,
        piece: LoadPiece,
        stage: int,
        grants: list[ReadGrant],
        lengths: list[int],
        block_ids: list[int],
        after: int,
    ) -> None:
        layers, reason = self._group.ranges[stage], Status.CANCELLED.name
        checksums: np.ndarray | None = None
        try:
            reason, checksums = await self._move(
                stage, False, after, grants, lengths, block_ids, load.deadline
            )
            if clock.monotonic() > load.deadline:
                reason, checksums = Status.TIMED_OUT.name, None
        finally:  # also when cancelled
            for index, layer in enumerate(layers):
                good = checksums is not None
                if checksums is not None:
                    expected = np.stack([grant.checksums[self._chunks(layer)] for grant in grants])
                    wrong = np.flatnonzero((checksums[index] != expected).any(axis=1))
                    if wrong.size:
                        good, reason = False, f"checksum of {grants[int(wrong[0])].key}"
                    else:
                        num_slabs = self._layout.num_slabs
                        loaded_bytes.inc(num_slabs * sum(map(self._layout.chunk_bytes, lengths)))
                if load.land(layer, good):
                    failures.labels("load").inc()
                    log.warning("load_failed", layer=layer, reason=reason)
                self._leave(load, piece)
            self._wake()

    # -- saves ---------------------------------------------------------------------------------

    def follow(self, save: StoreSave, after: int) -> None:
        """The other stages' layers of ``save`` are computed with chunk number ``after``."""
        self._after[save] = after

    def save_layer(self, save: StoreSave, layer: int) -> None:
        """Save a layer. Those of another stage count as computed once their chunk has begun, all at once:
        the stage itself waits for the chunk."""
        if layer < self._own or layer == self._group.ranges[self._stage_of[layer]].stop - 1:
            super().save_layer(save, layer)

    def _submit_save(self, save: StoreSave, layer: int, members: Sequence[int]) -> None:
        if layer < self._own:
            super()._submit_save(save, layer, members)
            return
        stage = self._stage_of[layer]
        parts = self._parts.setdefault(save, {})
        key = stage, members[0]
        if key in parts:
            parts[key].num_entered += 1
            return
        part = parts[key] = StagePart()
        assert save.grants is not None and save.held is not None
        grants = [save.grants[index] for index in members]
        positions = [save.granted[index] for index in members]
        lengths = [save.blocks[position][1] for position in positions]
        block_ids = [save.held.block_ids[position] for position in positions]
        self._spawn(self._save_in_stage(save, part, stage, grants, lengths, block_ids))

    async def _save_in_stage(
        self,
        save: StoreSave,
        part: StagePart,
        stage: int,
        grants: list[PutGrant],
        lengths: list[int],
        block_ids: list[int],
    ) -> None:
        layers, reason = self._group.ranges[stage], Status.CANCELLED.name
        checksums: np.ndarray | None = None
        deadline = min(clock.monotonic() + self._settings.load_timeout_s, save.claim.deadline)
        try:
            after = self._after[save]
            reason, checksums = await self._move(stage, True, after, grants, lengths, block_ids, deadline)
        finally:  # also when cancelled
            with save.lock:
                for _ in range(part.num_entered):
                    save.claim.leave()
                if checksums is not None and part.num_entered == len(layers):
                    for index, layer in enumerate(layers):
                        chunks = self._chunks(layer)
                        for position, grant in enumerate(grants):
                            grant.checksums[chunks] = checksums[index, position]
                            grant.is_written[chunks] = True
                elif save.is_wanted:
                    save.is_wanted = False
                    failures.labels("save").inc()
                    log.warning("save_failed", layer=layers.start, status=reason)
                self._settle(save)

    # -- shared by both ------------------------------------------------------------------------

    async def _move(
        self,
        stage: int,
        is_save: bool,
        after: int,
        grants: Sequence[PutGrant] | Sequence[ReadGrant],
        lengths: list[int],
        block_ids: list[int],
        deadline: float,
    ) -> tuple[str, np.ndarray | None]:
        """(status, checksums [layers, blocks, slabs] when all was moved) of one stage's part."""
        timeout_s = deadline - clock.monotonic()
        if timeout_s <= 0:
            return Status.TIMED_OUT.name, None
        move = MoveBlocks(
            group=self._group.id,
            is_save=is_save,
            after=after,
            descriptor=grants[0].segment.descriptor.encode(),
            block_ids=block_ids,
            num_tokens=lengths,
            addresses=[grant.address for grant in grants],
            timeout_s=timeout_s,
        )
        try:
            moved = await self._group.move_blocks(stage, move)
        except MooncakeError as error:
            return str(error), None
        if moved.status != Status.OK.name:
            return moved.status, None
        shape = (len(self._group.ranges[stage]), len(grants), self._layout.num_slabs)
        found = np.frombuffer(moved.checksums, dtype="<u4")
        if found.size != np.prod(shape):
            return Status.PROTOCOL_ERROR.name, None
        return moved.status, found.reshape(shape)
