# SPDX-License-Identifier: Apache-2.0
"""Recent removals from the index, when and why; and other names under which the same tokens were requested.

It owns a bounded memory for explanations of misses, and decides nothing. A note costs eight bytes a block and
no loop; the query pays for the search, and covers all of a request's blocks at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mooncake.conductor.index.key_table import Keys, key_column
from mooncake.prefix import BlockKey
from mooncake.types import InstanceId, Tier

_MAX_NOTES = 20_000


class Removal(NamedTuple):
    """Why an instance no longer holds a block."""

    at: float
    instance: InstanceId
    tier: Tier | None
    "Tier it was on; None: every tier."
    reason: str
    "Reason given by the remover (``evicted``, ...), or ``cleared``, ``restarted``, ``lost``."


class RemovalLog:
    """Remembers the last ``capacity`` removed blocks, and as many blocks of prompts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._removed: deque[tuple[str, Keys, Removal]] = deque()
        self._num_removed = 0
        self._prompts: deque[tuple[Keys, Keys]] = deque()
        self._num_prompt_blocks = 0

    def note_removed(self, scope: str, keys: Keys, removal: Removal) -> None:
        keys = keys[-self._capacity :] if self._capacity else keys[:0]
        if not len(keys):
            return
        self._removed.append((scope, keys, removal))
        self._num_removed += len(keys)
        while self._num_removed > self._capacity or len(self._removed) > _MAX_NOTES:
            self._num_removed -= len(self._removed.popleft()[1])

    def removals(self, keys: Sequence[BlockKey], scope: str = "") -> list[Removal | None]:
        """The last remembered removal of each block."""
        notes = [(gone, removal) for its_scope, gone, removal in self._removed if its_scope == scope]
        if not notes:
            return [None] * len(keys)
        gone = np.concatenate([gone for gone, _ in notes])
        ends = np.cumsum([len(gone) for gone, _ in notes])
        [at] = np.isin(gone, key_column(keys)).nonzero()
        note_of = np.searchsorted(ends, at, side="right")
        last = dict(zip(gone[at].tolist(), note_of.tolist(), strict=True))
        return [notes[last[key]][1] if key in last else None for key in keys]

    def note_prompt(self, keys: Keys, bare_keys: Sequence[BlockKey] = ()) -> None:
        """Note a requested prompt; without its salt, if it has one, its blocks would be ``bare_keys``."""
        if len(bare_keys) not in (0, len(keys)) or not 0 < len(keys) <= self._capacity:
            return
        self._prompts.append((keys, np.array(bare_keys, np.uint64) if bare_keys else keys))
        self._num_prompt_blocks += len(keys)
        while self._num_prompt_blocks > self._capacity or len(self._prompts) > _MAX_NOTES:
            self._num_prompt_blocks -= len(self._prompts.popleft()[0])

    def other_salts(self, keys: Sequence[BlockKey], bare_keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """The other keys of each block, under which its tokens were requested with other salts."""
        if not self._prompts or not len(bare_keys):
            return [[] for _ in keys]
        ours = np.concatenate([prompt[0] for prompt in self._prompts])
        bare = np.concatenate([prompt[1] for prompt in self._prompts])
        wanted, wanted_bare = np.array(keys, np.uint64), np.array(bare_keys, np.uint64)
        [at] = np.isin(bare, wanted_bare).nonzero()
        ours, bare = ours[at], bare[at]
        order = wanted_bare.argsort()
        is_other = ours != wanted[order][np.searchsorted(wanted_bare[order], bare)]
        others: dict[BlockKey, dict[BlockKey, None]] = {}
        for name, other in zip(bare[is_other].tolist(), ours[is_other].tolist(), strict=True):
            others.setdefault(name, {})[other] = None
        return [list(others.get(name, ())) for name in wanted_bare.tolist()]
