"""Block key to the instances that hold it, and from that the longest cached prefix on each.

It owns this one relation and refuses to know load, health or tokens. What it holds is a hint: an answer
is never wrong because the index is, so it may keep 64 bits of a hash where correctness would need 256.

Two views of the same facts. ``_holders`` maps a block to a bit mask of instances, so that one walk along
a prompt finds the match on all of a thousand instances with one AND per block. ``_held`` maps an instance
to its blocks (with a bit per tier), so that forgetting an instance costs its own blocks and no more.
About 130 bytes per block and instance; masks held by many blocks are shared objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mooncake.prefix import BlockKey
from mooncake.types import InstanceId, Tier

_TIER_BIT = {tier: 1 << position for position, tier in enumerate(Tier)}


class PrefixIndex:
    """Which instance holds which blocks."""

    def __init__(self) -> None:
        self._slots: dict[InstanceId, int] = {}
        self._instances: dict[int, InstanceId] = {}  # slot -> instance, the inverse of _slots
        self._holders: dict[int, int] = {}  # key -> mask of slots, never 0
        self._held: dict[InstanceId, dict[int, int]] = {}  # instance -> key -> mask of tiers, never 0
        self._shared_masks: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._slots)} instances, {self.num_blocks} blocks>"

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held by anyone."""
        return len(self._holders)

    def num_blocks_of(self, instance: InstanceId) -> int:
        return len(self._held.get(instance, ()))

    def store(self, instance: InstanceId, keys: Iterable[BlockKey], tier: Tier = Tier.DEVICE) -> None:
        """``instance`` now holds these blocks on ``tier``."""
        held = self._held.setdefault(instance, {})
        own = 1 << self._slot_of(instance)
        tier_bit = _TIER_BIT[tier]
        holders = self._holders
        for key in keys:
            held[key] = held.get(key, 0) | tier_bit
            mask = holders.get(key, 0)
            if not mask & own:
                holders[key] = self._shared(mask | own)

    def remove(self, instance: InstanceId, keys: Iterable[BlockKey], tier: Tier = Tier.DEVICE) -> None:
        """``instance`` no longer holds these blocks on ``tier``. Unknown blocks are no news."""
        held = self._held.get(instance, {})
        tier_bit = _TIER_BIT[tier]
        for key in keys:
            tiers = held.get(key, 0) & ~tier_bit
            if tiers:
                held[key] = tiers
            elif held.pop(key, 0):
                self._release(instance, key)

    def clear(self, instance: InstanceId) -> int:
        """Forget all of an instance's blocks; returns how many they were."""
        held = self._held.pop(instance, {})
        for key in held:
            self._release(instance, key)
        slot = self._slots.pop(instance, None)
        if slot is not None:
            del self._instances[slot]
        return len(held)

    def matches(self, keys: Sequence[BlockKey]) -> dict[InstanceId, int]:
        """Instance -> number of leading blocks of ``keys`` that it holds; without any it is absent."""
        found: dict[InstanceId, int] = {}
        alive = -1
        holders_of = self._holders.get
        position = 0
        for position, key in enumerate(keys):
            still = alive & holders_of(key, 0)
            if still != alive:
                if position:
                    self._record(found, alive ^ still, position)
                alive = still
                if not alive:
                    return found
        if keys:
            self._record(found, alive, position + 1)
        return found

    def check(self) -> None:
        assert {slot: instance for instance, slot in self._slots.items()} == self._instances
        assert self._slots.keys() == self._held.keys()
        expected: dict[int, int] = {}
        for instance, held in self._held.items():
            for key, tiers in held.items():
                assert 0 < tiers < 1 << len(_TIER_BIT)
                expected[key] = expected.get(key, 0) | 1 << self._slots[instance]
        assert expected == self._holders

    def _slot_of(self, instance: InstanceId) -> int:
        slot = self._slots.get(instance)
        if slot is None:
            # The lowest free one, so that masks stay as short as there are instances.
            slot = next(slot for slot in range(len(self._slots) + 1) if slot not in self._instances)
            self._slots[instance] = slot
            self._instances[slot] = instance
        return slot

    def _release(self, instance: InstanceId, key: int) -> None:
        mask = self._holders[key] & ~(1 << self._slots[instance])
        if mask:
            self._holders[key] = self._shared(mask)
        else:
            del self._holders[key]

    def _record(self, found: dict[InstanceId, int], mask: int, num_blocks: int) -> None:
        while mask:
            lowest = mask & -mask
            found[self._instances[lowest.bit_length() - 1]] = num_blocks
            mask ^= lowest

    def _shared(self, mask: int) -> int:
        """The one integer object for this mask: at a thousand instances a mask has 160 bytes."""
        if len(self._shared_masks) > 65536:
            self._shared_masks.clear()
        return self._shared_masks.setdefault(mask, mask)
