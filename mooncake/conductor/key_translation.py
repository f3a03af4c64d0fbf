# SPDX-License-Identifier: Apache-2.0
"""Translation of the block hashes of engines and stores to the keys of an index.

Three translations. For the index that places our requests there are ``OwnKeys`` (our workers' SHA-256 hashes
as they are, our store's objects by their names) and ``EngineKeys`` (engines with other hashes, by the tokens
that travel beside them). ``SequenceKeys`` is for the index that other routers query, by the block hashes that
routers and stores of this ecosystem agree on: stores send such hashes, engines send tokens. What can't be
translated is left out: a missing hint costs speed, a wrong one costs more.

Those hashes are XXH3-64, chained. The hash of a block's tokens (as little-endian u32) is its local hash; the
first block's local hash names it, and each further block is named by the hash of its predecessor's name and
its own local hash (both as little-endian u64). A seed is part of every hash, so all parties that compare
names must use the same one. Our own workers name blocks by SHA-256 (``mooncake.prefix``), because there a
collision gives wrong tokens; here it gives only a wrong hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from mooncake.conductor.holder_sets import PLANE
from mooncake.conductor.key_table import KeyTable, key_column
from mooncake.conductor.messages import BlocksCleared, BlocksRemoved, BlocksStored, PrefixWindows, Silent
from mooncake.kv_events import BlockRemoved, BlockStored, ForeignHash
from mooncake.kvlayout import KEY_PREFIX
from mooncake.prefix import BlockHash, BlockKey, block_hashes, root_hash, short_key
from mooncake.types import Tier

# --- the standard's hashes


def extend_sequence(parent: BlockKey | None, tokens: Sequence[int], seed: int) -> BlockKey:
    """The name of the block with ``tokens`` that follows ``parent`` (None: it is a prompt's first)."""
    local = xxh3_64_intdigest(np.asarray(tokens, "<u4").tobytes(), seed)
    if parent is None:
        return local
    return xxh3_64_intdigest(parent.to_bytes(8, "little") + local.to_bytes(8, "little"), seed)


def sequence_hashes(tokens: Sequence[int], block_tokens: int, seed: int) -> list[BlockKey]:
    """The names of all full blocks of a prompt, in order."""
    names: list[BlockKey] = []
    parent = None
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = extend_sequence(parent, tokens[start : start + block_tokens], seed)
        names.append(parent)
    return names


# --- translations


Fact = BlocksStored | BlocksRemoved | BlocksCleared | PrefixWindows | Silent
"""What a publisher's events say about its instance."""

Blocks = tuple[str, list[BlockKey]]
"""A scope and blocks in it."""

_TIERS = {"gpu": Tier.DEVICE, "cpu": Tier.MEMORY, "disk": Tier.SSD, "storage": Tier.SSD}
_U64 = (1 << 64) - 1
_UNKNOWN = 0
"""Placeholder for the name of an unknown block."""


class KeyTranslation(Protocol):
    """Translates one publisher's events; it may keep state from earlier ones."""

    block_tokens: int
    "Tokens of a block that a key names; 0 where events name our blocks themselves."

    def stored(self, event: BlockStored) -> Blocks: ...

    def removed(self, event: BlockRemoved) -> Blocks: ...

    def clear(self) -> None: ...


def tier_of(event: BlockStored | BlockRemoved) -> Tier:
    return _TIERS.get((event.medium or "gpu").lower(), Tier.DEVICE)


class OwnKeys:
    """Translates to short keys of our own block hashes. A store's blocks are in the scope of their identity:
    ``kv/`` and the digest of the ``KvIdentity`` that they belong to."""

    block_tokens = 0

    def stored(self, event: BlockStored) -> Blocks:
        if event.object_key is not None:
            return _named_by(event.object_key)
        return "", [short_key(one) for one in event.block_hashes if isinstance(one, bytes)]

    def removed(self, event: BlockRemoved) -> Blocks:
        if event.object_key is not None:
            return _named_by(event.object_key)
        return "", [short_key(one) for one in event.block_hashes if isinstance(one, bytes)]

    def clear(self) -> None:
        pass


class _TranslatedBlock(msgspec.Struct):
    """An engine's block: it ends ``tail`` tokens behind our block ``parent``, and completed ``hashes``."""

    parent: BlockHash
    tail: list[int]
    hashes: list[BlockHash]
    tiers: int = 0


class EngineKeys:
    """Translates to short keys of our own block hashes, from the tokens of an engine that hashes differently.

    Its blocks may be longer or shorter than ours, of ``block_tokens``: one of ours is stored when an engine's
    block completes it, and removed with that one.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blocks: dict[ForeignHash, _TranslatedBlock] = {}

    def stored(self, event: BlockStored) -> Blocks:
        before = self._before(event)
        hashes: list[BlockHash] = []
        for number, (foreign, tokens) in enumerate(_with_tokens(event)):
            if before is None or (_salts(event, number) and (number or event.parent_block_hash is not None)):
                break  # the hash depends on more than tokens from here on, such as an image
            known = self._blocks.get(foreign) or self._completed(before, tokens)
            known.tiers |= 1 << PLANE[tier_of(event)]
            before = self._blocks[foreign] = known
            hashes += known.hashes
        return "", [short_key(one) for one in hashes]

    def removed(self, event: BlockRemoved) -> Blocks:
        keys: list[BlockKey] = []
        for foreign in event.block_hashes:
            known = self._blocks.get(foreign)
            if known is not None:
                keys += [short_key(one) for one in known.hashes]
                known.tiers &= ~(1 << PLANE[tier_of(event)])
                if not known.tiers:
                    del self._blocks[foreign]
        return "", keys

    def clear(self) -> None:
        self._blocks.clear()

    def _before(self, event: BlockStored) -> _TranslatedBlock | None:
        """The block that the event's first block follows; None when that is not known."""
        if event.parent_block_hash is not None:
            return self._blocks.get(event.parent_block_hash)
        return _TranslatedBlock(root_hash(" ".join(_salts(event, 0)), event.lora_name or ""), [], [])

    def _completed(self, before: _TranslatedBlock, tokens: list[int]) -> _TranslatedBlock:
        together = before.tail + tokens
        hashes = block_hashes(together, self.block_tokens, before.parent)
        tail = together[len(hashes) * self.block_tokens :]
        return _TranslatedBlock(hashes[-1] if hashes else before.parent, tail, hashes)


def _named_by(key: str) -> Blocks:
    """The block that our own store keeps under ``key`` (``KvIdentity.key``), if the key names a block."""
    scope, _, block = key.rpartition("/")
    if not scope.startswith(KEY_PREFIX):
        return "", []
    try:
        return scope, [short_key(bytes.fromhex(block))]
    except ValueError:
        return scope, []


class KeyScope(msgspec.Struct, frozen=True):
    """The scope within which equal keys mean equal blocks."""

    tenant: str
    model: str
    lora: str
    block_tokens: int
    salt: str

    @property
    def name(self) -> str:
        """The scope as one string."""
        return msgspec.json.encode(msgspec.structs.astuple(self)).decode()


class SequenceKeys:
    """Translates to names by ``extend_sequence``. ``scope`` is the default for an event's missing fields."""

    def __init__(self, scope: KeyScope, seed: int, *, is_store: bool = False) -> None:
        self._scope, self._seed, self._is_store = scope, seed, is_store
        self.block_tokens = scope.block_tokens
        # By scope and publisher's hash: our name, and the tiers on which the publisher has the block.
        self._names: dict[str, KeyTable] = {}
        self._held: dict[str, KeyTable] = {}

    def stored(self, event: BlockStored) -> Blocks:
        scope = self._scope_of(event)
        if event.seq_hashes or self._is_store:
            return scope.name, _standard(event)
        name, parent = self._continued(event, scope)
        if parent == _UNKNOWN or event.block_size not in (None, scope.block_tokens):
            return name, []
        names: dict[BlockKey, BlockKey] = {}
        for number, (foreign, tokens) in enumerate(_with_tokens(event, scope.block_tokens)):
            if _salts(event, number) and (number or parent is not None):
                break  # the hash depends on more than tokens from here on, such as an image
            parent = extend_sequence(parent, tokens, self._seed)
            names[_word(foreign)] = parent
        self._remember(name, names, tier_of(event))
        return name, list(names.values())

    def removed(self, event: BlockRemoved) -> Blocks:
        scope = self._scope_of(event)
        if event.seq_hashes or self._is_store:
            return scope.name, _standard(event)
        foreign = key_column(map(_word, event.block_hashes))
        bit = 1 << PLANE[tier_of(event)]
        # The event lacks the adapter and salt under which they were stored.
        for name, table in self._names.items():
            names = table.find(foreign)
            if not names.values.any():
                continue
            held = self._held[name].find(foreign)
            rest = held.values & ~np.uint32(bit)
            self._held[name].put(held, rest)
            table.put(names, names.values * (rest != 0))
            return name, names.values[names.values != 0].tolist()
        return scope.name, []

    def clear(self) -> None:
        self._names.clear()
        self._held.clear()

    def _scope_of(self, event: BlockStored | BlockRemoved) -> KeyScope:
        default = self._scope
        salts = _salts(event, 0) if isinstance(event, BlockStored) else []
        return KeyScope(
            event.tenant_id or default.tenant,
            event.model_name or default.model,
            event.lora_name or default.lora,
            default.block_tokens,
            event.additional_salt or " ".join(salts) or default.salt,
        )

    def _continued(self, event: BlockStored, scope: KeyScope) -> tuple[str, BlockKey | None]:
        """The scope and the block that the event continues; None when it opens a prompt."""
        foreign = event.parent_block_hash
        if foreign is None or foreign == root_hash():
            return scope.name, None
        for name, table in self._names.items():  # only the first block of a prompt carries its salt
            parent = int(table.find(key_column([_word(foreign)])).values[0])
            if parent:
                return name, parent
        return scope.name, _UNKNOWN

    def _remember(self, scope: str, names: dict[BlockKey, BlockKey], tier: Tier) -> None:
        if not names:
            return
        if scope not in self._names:
            self._names[scope], self._held[scope] = KeyTable(np.uint64), KeyTable()
        foreign = key_column(names)
        self._names[scope].put(
            self._names[scope].find(foreign), np.fromiter(names.values(), np.uint64, len(names))
        )
        held = self._held[scope].find(foreign)
        self._held[scope].put(held, held.values | np.uint32(1 << PLANE[tier]))


def _with_tokens(event: BlockStored, block_tokens: int = 0) -> list[tuple[ForeignHash, list[int]]]:
    """The event's blocks with their tokens, as far as it has tokens."""
    size, tokens = event.block_size or block_tokens, event.token_ids or []
    if not size:
        return []
    starts = range(0, len(tokens) - size + 1, size)
    return [(one, tokens[at : at + size]) for one, at in zip(event.block_hashes, starts, strict=False)]


def _salts(event: BlockStored, number: int) -> list[str]:
    """Inputs of a block's hash beside its tokens and the adapter."""
    extra = event.extra_keys[number] if event.extra_keys and number < len(event.extra_keys) else None
    return [str(one) for one in extra or () if one != event.lora_name]


def _standard(event: BlockStored | BlockRemoved) -> list[BlockKey]:
    """The standard's names that a store sends, older ones as signed numbers."""
    return [one & _U64 for one in event.seq_hashes or event.block_hashes if isinstance(one, int)]


def _word(foreign: ForeignHash) -> BlockKey:
    return foreign & _U64 if isinstance(foreign, int) else short_key(foreign)
