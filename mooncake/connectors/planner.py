"""Which blocks an engine's ranks load and save in a step, and which may not be overwritten meanwhile.

A core: the engine's scheduler says what became of its requests, this says what the ranks should move.
It owns three rules. A block is saved in the step that fills it. It stays held until every rank has
moved it, whatever becomes of its request. And nothing is saved that was computed while a load was
still coming in: when some rank's load fails, every rank has computed with what never came, so such a
save waits until all ranks have said that they loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

BlockName = bytes
"""What a block is called before it is said whose numbers it has (``memory.Identity``)."""


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Blocks that every rank loads for a request."""

    request_id: str
    names: tuple[BlockName, ...]
    block_ids: tuple[int, ...]
    is_layerwise: bool
    """The step that follows computes with them; otherwise the request waits until they are there."""


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """Blocks that every rank saves; full at the end of the step it is planned for."""

    number: int
    names: tuple[BlockName, ...]
    block_ids: tuple[int, ...]
    first_block: int
    """How many blocks of the prefix come before them."""


@dataclasses.dataclass
class _Request:
    num_saved: int = 0
    """Leading blocks that are in the store, or on their way."""
    missing_ranks: int = 0
    """How many ranks have not said how its layer-wise load ended."""
    has_failed: bool = False
    """On some rank."""
    has_ended: bool = False
    last: tuple[tuple[BlockName, ...], tuple[int, ...], int] = ((), (), 0)
    """When it has ended before that is known: blocks that are held, to be saved or not, and the first."""


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

    @property
    def is_holding(self) -> bool:
        """Some blocks are held, so the ranks must be asked again how far they are."""
        return bool(self._held) or any(request.last[0] for request in self._requests.values())

    def num_saved(self, request_id: str) -> int:
        """Leading blocks of the request that need no saving."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.num_saved

    def is_unconfirmed(self, request_id: str) -> bool:
        """A layer-wise load of the request is not known to have arrived on all ranks."""
        request = self._requests.get(request_id)
        return request is not None and request.missing_ranks > 0

    def load(
        self, request_id: str, names: Sequence[BlockName], block_ids: Sequence[int], is_layerwise: bool
    ) -> None:
        """These blocks of the request are to be loaded."""
        assert len(names) == len(block_ids) > 0
        self._loads.append(LoadPlan(request_id, tuple(names), tuple(block_ids), is_layerwise))
        if is_layerwise:
            self._requests.setdefault(request_id, _Request()).missing_ranks = self._num_ranks

    def found(self, request_id: str, num_blocks: int) -> None:
        """The store has that many leading blocks of the request; they need not be saved."""
        request = self._requests.setdefault(request_id, _Request())
        request.num_saved = max(request.num_saved, num_blocks)

    def computes(
        self, request_id: str, names: Sequence[BlockName], block_ids: Sequence[int], num_full: int
    ) -> SavePlan | None:
        """After this step the request's first ``num_full`` blocks are full. What to hold and save of it."""
        request = self._requests.setdefault(request_id, _Request())
        end = min(num_full, len(names), len(block_ids))
        if request.missing_ranks or not self._saves or end <= request.num_saved:
            return None
        part = slice(request.num_saved, end)
        request.num_saved = end
        return self._save(tuple(names[part]), tuple(block_ids[part]), part.start)

    def finishes(
        self, request_id: str, names: Sequence[BlockName], block_ids: Sequence[int], num_full: int
    ) -> list[int]:
        """The request has ended. Blocks to hold until it is known whether they are worth saving."""
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
        """What was planned since the last call, for this step."""
        loads, saves = self._loads, self._new_saves
        self._loads, self._new_saves = [], []
        return loads, saves

    def reported(self, saved: Mapping[int, int], loaded: Mapping[str, tuple[int, int]]) -> list[int]:
        """So many ranks are done with these saves, and (ranks, failures) with these loads.

        Returns blocks that need not be held any more, one for each time they were held.
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
            request.num_saved = 0  # what was found can't be read: it is computed, and saved again
        request.missing_ranks = max(0, request.missing_ranks - num_ranks)
        if request.missing_ranks:
            return ()
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
        """Raises if the books are wrong."""
        assert all(0 < missing <= self._num_ranks for _, missing in self._held.values())
        for request in self._requests.values():
            assert not request.last[0] or (request.has_ended and request.missing_ranks)
            assert len(request.last[0]) == len(request.last[1])
