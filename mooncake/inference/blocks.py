# SPDX-License-Identifier: Apache-2.0
"""The paged block pool: which blocks are in use, which are shared, and which is reused next.

It owns block ids, reference counts and the prefix index; it does not know requests, tensors and
where else a block may be cached. A block is in exactly one of three states::

    in use     referenced by at least one request, save or load
    cached     unreferenced, but full and indexed by its hash: the next hit revives it
    blank      unreferenced and holding nothing worth keeping

Blanks are taken first, then the cached block that was freed longest ago. Using a cached block and
freeing it only records when: the blocks that are evicted next are selected from these times, many at once,
and one that was used since then is skipped. So a prompt of a thousand cached blocks costs two short
loops. Only full blocks are indexed: a block is immutable from then on, and sharing never needs a copy.

Block ids are lists where there are few of them, and columns (arrays) where a long prompt is used as a whole:
what is known of each block lies in arrays, which loops and numpy both read. A prompt that is remembered as a
path (its keys and its blocks) needs no look-up of each key when the next prompt continues it.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mooncake.prefix import BlockHash

KeyT = TypeVar("KeyT", bound=Hashable)
"""Name of a block: its hash, or what a simulation uses instead of one."""


BlockColumn: TypeAlias = NDArray[np.int64]
"""Ids of different blocks."""

NO_BLOCKS: BlockColumn = np.empty(0, np.int64)

_FEWEST_OLDEST = 64
_OLDEST_PART = 16
"""The eviction order is selected for so many blocks, or for this part of the pool, whichever is more."""

_MOST_ADDED = 16
"""Most blocks that a prompt adds to a remembered path which it continues."""
_BLOCKS_PER_PATH = 64
"""One path is remembered for so many blocks of the pool."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolBlocksStored(Generic[KeyT]):
    """Blocks were indexed in this worker's memory; the first one continues ``parent``."""

    hashes: tuple[KeyT, ...]
    parent: KeyT
    token_ids: tuple[int, ...]


EVICTED = "evicted: least recently used"
CLEARED = "cleared: weights replaced"
"""The reasons for which this pool removes blocks."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolBlocksRemoved(Generic[KeyT]):
    """Blocks were removed from this worker's memory."""

    hashes: tuple[KeyT, ...]
    reason: str = EVICTED
    """``EVICTED`` or ``CLEARED``."""


BlockEvent: TypeAlias = PoolBlocksStored[BlockHash] | PoolBlocksRemoved[BlockHash]


def joined(blocks: BlockColumn, more: Sequence[int]) -> BlockColumn:
    """A column of both."""
    return np.concatenate((blocks, np.array(more, np.int64))) if more else blocks


class _Path(NamedTuple, Generic[KeyT]):
    """The blocks of a prompt that was used."""

    keys: Sequence[KeyT]
    blocks: BlockColumn
    num_forgotten: int
    "Number of blocks that the pool had forgotten by then."


class BlockPool(Generic[KeyT]):
    """Blocks 1 to ``num_blocks - 1``; block 0 is scratch space that no request owns."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._references = array("i", bytes(4 * num_blocks))
        self._hashes: list[KeyT | None] = [None] * num_blocks
        self._index: dict[KeyT, int] = {}
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_idle = 0
        """Number of cached blocks without a reference."""
        self._now = 0
        """Number of frees so far, the clock of the eviction order."""
        self._given_back = array("q", bytes(8 * num_blocks))
        """Value of that clock at which each cached block was freed."""
        self._oldest: list[tuple[int, int]] = []
        """(time it was freed, block) of the blocks that are evicted next, the first one last. An entry counts
        as long as its block is cached and was not freed again; all other cached blocks were freed later."""
        self._is_indexed = bytearray(num_blocks)
        self._paths: dict[KeyT, _Path[KeyT]] = {}
        """By the last key of each, the latest last."""
        self._num_forgotten = 0
        """Number of blocks so far whose content was forgotten."""
        self._forgotten_at = array("q", bytes(8 * num_blocks))
        """Value of that count after each block was forgotten."""
        # The same memory for numpy.
        self._reference_column: NDArray[np.int32] = np.frombuffer(self._references, np.int32)
        self._given_back_column: NDArray[np.int64] = np.frombuffer(self._given_back, np.int64)
        self._forgotten_column: NDArray[np.int64] = np.frombuffer(self._forgotten_at, np.int64)
        self._indexed_column: NDArray[np.uint8] = np.frombuffer(self._is_indexed, np.uint8)
        self._events: list[PoolBlocksStored[KeyT] | PoolBlocksRemoved[KeyT]] = []

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, cached ones included."""
        return len(self._blank) + self._num_idle

    @property
    def num_cached(self) -> int:
        """Number of blocks that are indexed by hash, in use or not."""
        return len(self._index)

    def match(self, hashes: Iterable[KeyT]) -> list[int]:
        """Block ids of the longest cached prefix of ``hashes``. Takes no reference."""
        found: list[int] = []
        known = self._index.get
        for block_hash in hashes:
            block = known(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def match_column(self, keys: Sequence[KeyT]) -> BlockColumn:
        """As ``match``, for a long prompt."""
        for end in range(len(keys), max(0, len(keys) - _MOST_ADDED), -1):
            path = self._paths.get(keys[end - 1])
            if path is not None:
                found = self._along(path, keys, end)
                if found is None:
                    break
                return joined(found, self.match(keys[end:])) if end < len(keys) else found
        return np.array(self.match(keys), np.int64)

    def _along(self, path: _Path[KeyT], keys: Sequence[KeyT], end: int) -> BlockColumn | None:
        """Blocks of the first ``end`` of ``keys``, the last of which is that of ``path``; None if not all of
        them are on it, or no longer."""
        if path.keys[-end:] != keys[:end]:
            return None
        blocks = path.blocks[-end:]
        if self._forgotten_column.take(blocks).max() > path.num_forgotten:
            del self._paths[keys[end - 1]]
            return None
        return blocks

    def remember(self, keys: Sequence[KeyT], blocks: BlockColumn) -> None:
        """Remember the blocks of a prompt as a path, in place of that which it continues; not if one of them
        is not indexed, because another block has its content."""
        assert len(keys) == len(blocks)
        if not len(keys) or np.count_nonzero(self._indexed_column.take(blocks)) < len(blocks):
            return
        paths = self._paths
        for key in keys[-_MOST_ADDED:]:
            paths.pop(key, None)
        paths[keys[-1]] = _Path(keys, blocks, self._num_forgotten)
        if len(paths) * _BLOCKS_PER_PATH > self.num_blocks + _BLOCKS_PER_PATH:
            del paths[next(iter(paths))]

    def num_free_after_touch(self, block_ids: Iterable[int]) -> int:
        """The value of ``num_free`` after ``touch(block_ids)``."""
        return self.num_free - sum(self._references[block] == 0 for block in block_ids)

    def touch(self, block_ids: Iterable[int] | BlockColumn) -> None:
        """Take one reference on each."""
        if isinstance(block_ids, np.ndarray):
            self._touch_column(block_ids)
            return
        references, hashes, num_revived = self._references, self._hashes, 0
        for block in block_ids:
            before = references[block]
            if not before:
                if hashes[block] is None:
                    del self._blank[block]
                else:
                    num_revived += 1
            references[block] = before + 1
        self._num_idle -= num_revived

    def _touch_column(self, blocks: BlockColumn) -> None:
        before = self._reference_column.take(blocks)
        num_idle = len(before) - int(np.count_nonzero(before))
        if num_idle and np.count_nonzero(self._indexed_column.take(blocks)) < len(before):
            self.touch(blocks.tolist())  # some are blank
            return
        before += 1
        self._reference_column[blocks] = before
        self._num_idle -= num_idle

    def allocate(self, num_blocks: int, after: int | None = None, headroom: int = 0) -> list[int] | None:
        """``num_blocks`` blocks with one reference each, or None if there are not enough.

        Ids are consecutive where possible, starting behind ``after``: attention reads a run of
        consecutive blocks in place and copies across gaps. Up to ``headroom`` blanks behind the last
        one are moved to where they are taken last, so that this request can still grow into them after
        others have been admitted.
        """
        if num_blocks > self.num_free:
            return None
        blanks: list[int] = []
        while self._blank and len(blanks) < num_blocks:
            if after is None or after + 1 not in self._blank:
                after, _ = self._blank.popitem(last=False)
            else:
                after += 1
                del self._blank[after]
            blanks.append(after)
        evicted = self._pop_oldest(num_blocks - len(blanks))
        self._forget(evicted, EVICTED)
        taken = blanks + sorted(evicted)
        for block in taken:
            self._references[block] = 1
        if taken:
            self._spare(taken[-1], headroom)
        return taken

    def _spare(self, last: int, headroom: int) -> None:
        for block in range(last + 1, last + 1 + headroom):
            if block not in self._blank:
                break
            self._blank.move_to_end(block)

    def free(self, block_ids: Sequence[int] | BlockColumn) -> None:
        """Release one reference on each. Later blocks are reused before earlier ones."""
        if isinstance(block_ids, np.ndarray):
            self._free_column(block_ids)
            return
        references, hashes, given_back = self._references, self._hashes, self._given_back
        now = began = self._now
        for block in reversed(block_ids):
            left = references[block] - 1
            references[block] = left
            if left:
                assert left > 0, f"block {block} was freed more often than taken"
            elif hashes[block] is None:
                self._blank[block] = None
            else:
                now += 1
                given_back[block] = now
        self._num_idle += now - began
        self._now = now

    def _free_column(self, blocks: BlockColumn) -> None:
        idle, left = blocks, self._reference_column.take(blocks)
        left -= 1
        if np.count_nonzero(left):
            assert left.min() >= 0, f"a block of {blocks} was freed more often than taken"
            idle = blocks[left == 0]
        num_idle = len(idle)
        if np.count_nonzero(self._indexed_column.take(idle)) < num_idle:
            self.free(blocks.tolist())  # some become blank
            return
        self._reference_column[blocks] = left
        now = self._now + num_idle
        self._given_back_column[idle] = np.arange(now, self._now, -1)
        self._num_idle += num_idle
        self._now = now

    def _pop_oldest(self, num_blocks: int) -> list[int]:
        """Remove and return the cached blocks that were freed first; there must be so many."""
        references, given_back, oldest = self._references, self._given_back, self._oldest
        popped: list[int] = []
        last_at = 0
        while len(popped) < num_blocks:
            if not oldest:
                oldest = self._oldest = self._select_oldest(last_at)
            freed_at, block = oldest.pop()
            if not references[block] and given_back[block] == freed_at:
                popped.append(block)
                last_at = freed_at
        self._num_idle -= num_blocks
        return popped

    def _is_idle(self) -> NDArray[np.bool_]:
        """By block: whether it is cached and not referenced."""
        idle: NDArray[np.bool_] = (self._reference_column == 0) & (self._indexed_column != 0)
        return idle

    def _select_oldest(self, after: int) -> list[tuple[int, int]]:
        """The next entries: of the cached blocks that were freed later than ``after``, those freed first."""
        idle = (self._is_idle() & (self._given_back_column > after)).nonzero()[0]
        freed_at = self._given_back_column[idle]
        num_oldest = max(_FEWEST_OLDEST, self.num_blocks // _OLDEST_PART)
        if num_oldest < len(idle):
            first = freed_at.argpartition(num_oldest)[:num_oldest]
            idle, freed_at = idle[first], freed_at[first]
        order = freed_at.argsort()[::-1]
        return list(zip(freed_at[order].tolist(), idle[order].tolist(), strict=True))

    def publish(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[KeyT],
        parent: KeyT,
        token_ids: Sequence[int] = (),
    ) -> None:
        """Index full blocks by hash. A hash that is indexed already keeps its first block. ``token_ids``:
        those of the blocks, for the events; empty when subscribers do not need them."""
        assert not token_ids or len(token_ids) == len(block_ids) * self.block_tokens
        run: list[KeyT] = []
        run_parent, run_start = parent, 0
        for position, (block, block_hash) in enumerate(zip(block_ids, hashes, strict=True)):
            assert self._references[block] > 0, f"block {block} is published but not in use"
            if block_hash in self._index:
                self._emit_stored(run, run_parent, run_start, token_ids)
                run, run_parent, run_start = [], block_hash, position + 1
                continue
            assert self._hashes[block] is None, f"block {block} is published under two hashes"
            self._index[block_hash] = block
            self._hashes[block] = block_hash
            self._is_indexed[block] = True
            run.append(block_hash)
        self._emit_stored(run, run_parent, run_start, token_ids)

    def clear(self) -> None:
        """Forget the content of every block, as it is that of other weights; none may be in use."""
        assert self.num_free == self.num_usable, "a block is in use"
        cached = [block for block, block_hash in enumerate(self._hashes) if block_hash is not None]
        self._forget(cached, CLEARED)
        self._blank.update(dict.fromkeys(cached))
        self._oldest.clear()
        self._num_idle = 0

    def drain_events(self) -> list[PoolBlocksStored[KeyT] | PoolBlocksRemoved[KeyT]]:
        """Blocks that were indexed or removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        num_idle = 0
        for block in range(1, self.num_blocks):
            is_idle = self._references[block] == 0 and self._hashes[block] is not None
            num_idle += is_idle
            places = (self._references[block] > 0) + (block in self._blank) + is_idle
            assert places == 1, f"block {block} is in {places} states"
            assert self._is_indexed[block] == (self._hashes[block] is not None), (
                f"block {block} is marked wrongly"
            )
        assert num_idle == self._num_idle, f"{num_idle} blocks are idle, not {self._num_idle}"
        self._check_oldest()
        assert 0 not in self._blank and self._references[0] == 0
        for block_hash, block in self._index.items():
            assert self._hashes[block] == block_hash, f"block {block} is indexed wrongly"
        assert len(self._index) == sum(block_hash is not None for block_hash in self._hashes)

    def _check_oldest(self) -> None:
        """The entries that count are the cached blocks that were freed first, in that order."""
        idle = self._is_idle().nonzero()[0].tolist()
        order = sorted((self._given_back[block], block) for block in idle)
        known = set(order)
        valid = [entry for entry in reversed(self._oldest) if entry in known]
        assert valid == order[: len(valid)], "a block is evicted before one that was freed earlier"

    def __repr__(self) -> str:
        num_used = self.num_usable - self.num_free
        return f"BlockPool(used={num_used} cached={self._num_idle} blank={len(self._blank)})"

    def _forget(self, block_ids: Sequence[int], reason: str) -> None:
        removed = []
        for block in block_ids:
            block_hash = self._hashes[block]
            assert block_hash is not None
            del self._index[block_hash]
            self._hashes[block] = None
            self._is_indexed[block] = False
            self._num_forgotten += 1
            self._forgotten_at[block] = self._num_forgotten
            removed.append(block_hash)
        if removed:
            self._events.append(PoolBlocksRemoved(tuple(removed), reason))

    def _emit_stored(self, run: list[KeyT], parent: KeyT, start: int, token_ids: Sequence[int]) -> None:
        if run:
            first = start * self.block_tokens
            tokens = tuple(token_ids[first : first + len(run) * self.block_tokens])
            self._events.append(PoolBlocksStored(tuple(run), parent, tokens))
