# SPDX-License-Identifier: Apache-2.0
"""Which blocks an engine's ranks load and save in a step, and which may not be overwritten meanwhile.

A core: its inputs are the events of the engine's requests, its outputs what the ranks should move.
It owns three rules. A block is saved in the step that fills it. It stays held until every rank has
moved it, even if its request ends before. And nothing is saved that was computed while a load was
still arriving: when some rank's load fails, every rank has computed with missing data, and so have
other requests that share its blocks, so saves wait until all ranks have confirmed the load. The same
holds for steps with loads of another connector beside this one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

BlockName = bytes
"""Name of a block's tokens, before an identity (``memory.CacheIdentity``) makes a key of it."""


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Blocks that every rank loads for a request."""

    request_id: str
    names: tuple[BlockName, ...]
    block_ids: tuple[int, ...]
    is_layerwise: bool
    """Whether the next step computes with them; otherwise the request waits until they have arrived."""


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """Blocks that every rank saves; full at the end of the step it is planned for."""

    number: int
    names: tuple[BlockName, ...]
    block_ids: tuple[int, ...]
    first_block: int
    """Number of blocks of the prefix before them."""


@dataclasses.dataclass
class _Request:
    num_saved: int = 0
    """Leading blocks that are in the store, or being saved."""
    missing_ranks: int = 0
    """Number of ranks that have not reported the end of its layer-wise load."""
    has_failed: bool = False
    """Whether the load failed on some rank."""
    has_ended: bool = False
    last: tuple[tuple[BlockName, ...], tuple[int, ...], int] = ((), (), 0)
    """For a request that ends before that is known: names and ids of held blocks, and the first's index."""


class LoadSteps:
    """Numbers steps, and knows whether layer-wise loads of any of the engine's connectors are under way."""

    def __init__(self) -> None:
        self._number = 0
        self.unanswered = 0
        """The last step with such loads; 0 once the ranks have answered it."""

    def begins(self, has_loads: bool) -> int:
        """Record a step. Returns its number for the ranks to answer, or 0 if it has no loads."""
        self._number += 1
        if not has_loads:
            return 0
        self.unanswered = self._number
        return self._number

    def answered(self, step: int) -> None:
        """Record that the ranks have answered ``step``.

        The engine then knows which of its loads have failed, and computes what rests on them again.
        """
        if step >= self.unanswered:
            self.unanswered = 0


class Planner:
    """Plans for ``num_ranks`` ranks; without ``saves`` nothing is saved."""

    def __init__(self, num_ranks: int, saves: bool) -> None:
        self._num_ranks = num_ranks
        self._saves = saves
        self._requests: dict[str, _Request] = {}
        self._loads: list[LoadPlan] = []
        self._new_saves: list[SavePlan] = []
        self._held: dict[int, tuple[SavePlan, int]] = {}
        self._next_number = 0
        self._unconfirmed: set[str] = set()
        """Requests whose layer-wise load some rank has not reported."""
        self.load_steps = LoadSteps()

    @property
    def may_save(self) -> bool:
        """Whether blocks that are full at the end of the next step are to be saved."""
        return self._saves and not (self._unconfirmed or self.load_steps.unanswered)

    @property
    def held_blocks(self) -> Counter[int]:
        """How often each block is held."""
        held = Counter(block_id for plan, _ in self._held.values() for block_id in plan.block_ids)
        for request in self._requests.values():
            held.update(request.last[1])
        return held

    @property
    def is_holding(self) -> bool:
        """Whether some blocks are held, so that further reports of the ranks are needed."""
        return bool(self._held) or any(request.last[0] for request in self._requests.values())

    def num_saved(self, request_id: str) -> int:
        """Number of leading blocks of the request that need no saving."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.num_saved

    def is_unconfirmed(self, request_id: str) -> bool:
        """Whether a layer-wise load of the request is not yet confirmed by all ranks."""
        request = self._requests.get(request_id)
        return request is not None and request.missing_ranks > 0

    def load(
        self, request_id: str, names: Sequence[BlockName], block_ids: Sequence[int], is_layerwise: bool
    ) -> None:
        """Plan to load these blocks of the request."""
        assert len(names) == len(block_ids) > 0
        self._loads.append(LoadPlan(request_id, tuple(names), tuple(block_ids), is_layerwise))
        if is_layerwise:
            self._requests.setdefault(request_id, _Request()).missing_ranks = self._num_ranks
            self._unconfirmed.add(request_id)

    def found(self, request_id: str, num_blocks: int) -> None:
        """Record that the store has this many leading blocks of the request; they need not be saved."""
        request = self._requests.setdefault(request_id, _Request())
        request.num_saved = max(request.num_saved, num_blocks)

    def computes(
        self, request_id: str, names: Sequence[BlockName], block_ids: Sequence[int]
    ) -> SavePlan | None:
        """Blocks to hold and save: those named, which follow the ``num_saved`` and are full after this step.

        None unless ``may_save``: while a layer-wise load of *any* request is unconfirmed, the engine lets
        others use its blocks before they have arrived, and what is computed on blocks that never arrive must
        not be stored.
        """
        request = self._requests.setdefault(request_id, _Request())
        first = request.num_saved
        end = min(first + len(names), len(block_ids))
        if not self.may_save or end <= first:
            return None
        request.num_saved = end
        return self._save(tuple(names[: end - first]), tuple(block_ids[first:end]), first)

    def finishes(
        self, request_id: str, names: Sequence[BlockName], block_ids: Sequence[int], num_full: int
    ) -> list[int]:
        """End the request. Returns the blocks to hold until it is known whether they are to be saved."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        if not request.missing_ranks:
            del self._requests[request_id]
            return []
        request.has_ended = True
        part = slice(request.num_saved, min(num_full, len(names), len(block_ids)))
        if self._saves:
            request.last = (tuple(names[part]), tuple(block_ids[part]), part.start)
        return list(request.last[1])

    def take(self) -> tuple[list[LoadPlan], list[SavePlan]]:
        """Plans since the last call, for this step."""
        loads, saves = self._loads, self._new_saves
        self._loads, self._new_saves = [], []
        return loads, saves

    def reported(self, saved: Mapping[int, int], loaded: Mapping[str, tuple[int, int]]) -> list[int]:
        """Record numbers of ranks that are done with saves, and (ranks, failures) of loads.

        Returns blocks that no longer need to be held, one for each time they were held.
        """
        released: list[int] = []
        for number, num_ranks in saved.items():
            plan, missing = self._held[number]
            if missing > num_ranks:
                self._held[number] = (plan, missing - num_ranks)
            else:
                del self._held[number]
                released += plan.block_ids
        for request_id, (num_ranks, num_failures) in loaded.items():
            released += self._loaded(request_id, num_ranks, num_failures > 0)
        return released

    def _loaded(self, request_id: str, num_ranks: int, has_failed: bool) -> tuple[int, ...]:
        request = self._requests.get(request_id)
        if request is None:
            return ()
        request.has_failed |= has_failed
        if has_failed:
            request.num_saved = 0  # blocks found can't be read: they are computed and saved again
        request.missing_ranks = max(0, request.missing_ranks - num_ranks)
        if request.missing_ranks:
            return ()
        self._unconfirmed.discard(request_id)
        (names, block_ids, first), has_failed = request.last, request.has_failed
        request.last, request.has_failed = ((), (), 0), False
        if request.has_ended:
            del self._requests[request_id]
        if names and not has_failed:
            self._save(names, block_ids, first)
            return ()
        return block_ids

    def _save(self, names: tuple[BlockName, ...], block_ids: tuple[int, ...], first: int) -> SavePlan:
        plan = SavePlan(self._next_number, names, block_ids, first)
        self._next_number += 1
        self._held[plan.number] = (plan, self._num_ranks)
        self._new_saves.append(plan)
        return plan

    def check(self) -> None:
        """Assert the invariants."""
        unconfirmed = {name for name, request in self._requests.items() if request.missing_ranks}
        assert self._unconfirmed == unconfirmed
        assert all(0 < missing <= self._num_ranks for _, missing in self._held.values())
        for request in self._requests.values():
            assert not request.last[0] or (request.has_ended and request.missing_ranks)
            assert len(request.last[0]) == len(request.last[1])
