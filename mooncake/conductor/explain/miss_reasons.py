# SPDX-License-Identifier: Apache-2.0
"""Whether each block of a prompt was a hit, and if not, why.

It owns the verdicts and the order in which causes are tested, from certain to likely, and refuses to know
requests beyond their blocks. The worker's measurements take precedence over the index. Runs of equal verdicts
are one row. The causes of a miss:

``hit``            where, on which tier
``elsewhere``      another instance has it, and it was not fetched from there
``being_written``  another request was computing just this block
``evicted``        (or ``cleared``, ``restarted``, ``lost``): it was removed; when, and by which rule
``removed``        it was removed for another reason, which is given
``other_digest``   the pool has these tokens, computed by other weights or in another layout
``other_salt``     the same tokens were requested under another salt
``never_stored``   no event ever reported it
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from mooncake.conductor.index.prefix_index import PrefixIndex
from mooncake.kvlayout import KEY_PREFIX
from mooncake.types import InstanceId, Tier

_TIERS = list(Tier)
_REMOVAL_VERDICTS = frozenset({"evicted", "cleared", "restarted", "lost"})


class BlockVerdict(msgspec.Struct, frozen=True):
    """The verdict on ``num`` blocks from ``first`` on."""

    first: int
    num: int
    verdict: str
    where: str = ""
    "Instance and tier, salt or digest."
    rule: str = ""
    "Rule by which it was removed."
    seconds_before: float = 0.0
    "Seconds from its removal to the request."


@dataclass(slots=True)
class PromptBlocks:
    """The blocks of a prompt, with what is known of each."""

    keys: array[int]
    bare_keys: array[int]
    "Keys without salt; empty if there was none."
    tiers: bytes
    "By block: the tiers on which ``instance`` was believed to have it, as bits."
    scope: str
    instance: InstanceId
    "Instance that computes the prompt."
    at: float
    others: dict[InstanceId, int] = field(default_factory=dict)
    "Number of leading blocks that other instances had."
    pools: dict[str, int] = field(default_factory=dict)
    "Number of leading blocks that the pool had, by scope."
    written_at: float | None = None
    "When its blocks were computed and stored."
    is_measured: bool = False
    num_cached: int = 0
    "Leading blocks that were found on the instance."
    num_loaded: int = 0
    "Blocks after those that came from the pool or another instance."


def block_verdicts(
    prompt: PromptBlocks,
    in_flight: Sequence[PromptBlocks],
    index: PrefixIndex,
    identity: str,
) -> list[BlockVerdict]:
    """The verdicts on all blocks.

    Args:
        in_flight: prompts that were being computed when this one arrived.
        identity: the digest under which the instance's blocks lie in the pool; empty when it has none.
    """
    keys = prompt.keys
    num_hit, found = _hits(prompt)
    if num_hit < len(keys):
        found += _Causes(prompt, in_flight, index, identity).of(num_hit)
    return _joined(found)


def _hits(prompt: PromptBlocks) -> tuple[int, list[BlockVerdict]]:
    """The number of leading blocks that were found, and where."""
    if prompt.is_measured:
        num_hit = min(len(prompt.keys), prompt.num_cached + prompt.num_loaded)
        local = min(num_hit, prompt.num_cached)
        found = [BlockVerdict(number, 1, "hit", _place(prompt, number)) for number in range(local)]
        return num_hit, found + [BlockVerdict(number, 1, "hit", "pool") for number in range(local, num_hit)]
    num_hit = next((number for number, tiers in enumerate(prompt.tiers) if not tiers), len(prompt.tiers))
    return num_hit, [BlockVerdict(number, 1, "hit", _place(prompt, number)) for number in range(num_hit)]


def _place(prompt: PromptBlocks, number: int) -> str:
    tiers = prompt.tiers[number]
    tier = next((tier for bit, tier in enumerate(_TIERS) if tiers >> bit & 1), Tier.DEVICE)
    return f"{prompt.instance} {tier}"


class _Causes:
    """Finds out why blocks of one prompt were missing."""

    def __init__(
        self, prompt: PromptBlocks, in_flight: Sequence[PromptBlocks], index: PrefixIndex, identity: str
    ) -> None:
        self._prompt, self._index = prompt, index
        self._pool = KEY_PREFIX + identity if identity else ""
        keys = np.array(prompt.keys, np.uint64)
        self._written: dict[int, InstanceId] = {}
        for other in in_flight:
            if other.scope == prompt.scope:
                common = keys[np.isin(keys, np.array(other.keys, np.uint64))]
                self._written.update(dict.fromkeys(common.tolist(), other.instance))
        self._removals = [index.removal_log.removals(prompt.keys.tolist(), prompt.scope)]
        if self._pool:
            self._removals.append(index.removal_log.removals(prompt.keys.tolist(), self._pool))
        self._salts = index.removal_log.other_salts(prompt.keys, prompt.bare_keys or prompt.keys)

    def of(self, first: int) -> list[BlockVerdict]:
        """One verdict for each block from ``first`` on."""
        return [self._cause(number) for number in range(first, len(self._prompt.keys))]

    def _cause(self, number: int) -> BlockVerdict:
        prompt, key = self._prompt, self._prompt.keys[number]
        if key in self._written:
            return BlockVerdict(number, 1, "being_written", self._written[key])
        holders = self._holders(number)
        if holders:
            return BlockVerdict(number, 1, "elsewhere", ", ".join(holders))
        gone = [one[number] for one in self._removals]
        before = [removal for removal in gone if removal is not None and removal.at <= prompt.at]
        if before:
            last = max(before, key=lambda removal: removal.at)
            verdict, rule = _named(last.reason)
            where = last.instance if last.tier is None else f"{last.instance} {last.tier}"
            return BlockVerdict(number, 1, verdict, where, rule, prompt.at - last.at)
        digests = [scope.removeprefix(KEY_PREFIX) for scope, num in prompt.pools.items() if number < num]
        if self._pool and digests:
            return BlockVerdict(number, 1, "other_digest", ", ".join(digests))
        if self._salts[number]:
            return BlockVerdict(number, 1, "other_salt")
        return BlockVerdict(number, 1, "never_stored")

    def _holders(self, number: int) -> list[str]:
        """Other holders of the block, including the pool."""
        found = [name for name, num in self._prompt.others.items() if number < num]
        return found + ["pool"] * (number < self._prompt.pools.get(self._pool, 0))


def _named(reason: str) -> tuple[str, str]:
    """The verdict and rule of a removal's reason (``evicted: lru``); an unknown reason is a rule."""
    verdict, _, rule = reason.partition(": ")
    return (verdict, rule) if verdict in _REMOVAL_VERDICTS else ("removed", reason)


def _joined(found: Sequence[BlockVerdict]) -> list[BlockVerdict]:
    """Adjacent blocks with equal verdicts as one row."""
    rows: list[BlockVerdict] = []
    for one in found:
        last = rows[-1] if rows else None
        if last is not None and (last.verdict, last.where, last.rule) == (one.verdict, one.where, one.rule):
            rows[-1] = msgspec.structs.replace(last, num=last.num + one.num)
        else:
            rows.append(one)
    return rows
