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

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from mooncake.conductor.holder_sets import PLANE
from mooncake.conductor.key_table import KeyTable, Values, key_column
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

_TIERS = {
    **dict.fromkeys(("gpu", "device"), Tier.DEVICE),
    **dict.fromkeys(("cpu", "cpu_pinned", "cpu_tier1"), Tier.MEMORY),
    **dict.fromkeys(("disk", "storage", "nvme", "cpu_tier2"), Tier.SSD),
}
_SHARED = ("external", "network", "remote", "shared")
"""Media of pools that several engines share."""
_SALT_PREFIX = "dynamo-cache-salt:"
"""Before a salt among SGLang's inputs of hashes."""
_TIER_BITS = len(PLANE)
_U64 = (1 << 64) - 1
_UNKNOWN = 0
"""Placeholder for the name of an unknown block."""


class KeyTranslation(Protocol):
    """Translates one publisher's events; it may keep state from earlier ones."""

    block_tokens: int
    "Tokens of a block that a key names; 0 where events name our blocks themselves."

    def parts(self, event: BlockStored | BlockRemoved) -> Sequence[BlockStored | BlockRemoved]:
        """The event, divided where its blocks are of several scopes."""
        ...

    def stored(self, event: BlockStored) -> Blocks: ...

    def removed(self, event: BlockRemoved) -> Blocks: ...

    def clear(self) -> None: ...


def tier_of(event: BlockStored | BlockRemoved) -> Tier:
    return _TIERS.get((event.medium or "gpu").lower(), Tier.DEVICE)


def is_remote(event: BlockStored | BlockRemoved) -> bool:
    """Whether its blocks are not the publisher's own: the store that has them publishes them itself."""
    return event.locality == "REMOTE" or (event.medium or "").lower() in _SHARED


class OwnKeys:
    """Translates to short keys of our own block hashes. A store's blocks are in the scope of their identity:
    ``kv/`` and the digest of the ``KvIdentity`` that they belong to."""

    block_tokens = 0

    def parts(self, event: BlockStored | BlockRemoved) -> Sequence[BlockStored | BlockRemoved]:
        return [event]

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


class _TranslatedBlock(msgspec.Struct, gc=False):
    """An engine's block: it ends ``tail`` behind our block ``parent``, and completed ``keys``.

    A conductor has millions of them, hence bytes instead of lists.
    """

    parent: BlockHash
    tail: bytes
    "Tokens of four bytes."
    keys: tuple[BlockKey, ...]
    salts: tuple[str, ...]
    "Those of its prompt."
    tiers: int = 0


class EngineKeys:
    """Translates to short keys of our own block hashes, from the tokens of an engine that hashes differently.

    Its blocks may be longer or shorter than ours, of ``block_tokens``: one of ours is stored when an engine's
    block completes it, and removed with that one.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blocks: dict[ForeignHash, _TranslatedBlock] = {}

    def parts(self, event: BlockStored | BlockRemoved) -> Sequence[BlockStored | BlockRemoved]:
        return [event]

    def stored(self, event: BlockStored) -> Blocks:
        keys: list[BlockKey] = []
        bit = 1 << PLANE[tier_of(event)]
        if not event.token_ids:  # as vLLM sends of blocks that it copies to another tier
            for foreign in event.block_hashes:
                known = self._blocks.get(foreign)
                if known is not None:
                    known.tiers |= bit
                    keys += known.keys
            return "", keys
        before = self._before(event)
        for number, (foreign, tokens) in enumerate(_with_tokens(event)):
            salts = _salts(event, number)
            if before is None or (salts and salts != before.salts):
                break  # the hash depends on more than tokens from here on, such as an image
            known = self._blocks.get(foreign) or self._completed(before, tokens)
            known.tiers |= bit
            before = self._blocks[foreign] = known
            keys += known.keys
        return "", keys

    def removed(self, event: BlockRemoved) -> Blocks:
        keys: list[BlockKey] = []
        for foreign in event.block_hashes:
            known = self._blocks.get(foreign)
            if known is not None:
                keys += known.keys
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
        if _has_unnamed_adapter(event):
            return None
        salts = _salts(event, 0)
        return _TranslatedBlock(root_hash(" ".join(salts), event.lora_name or ""), b"", (), salts)

    def _completed(self, before: _TranslatedBlock, tokens: list[int]) -> _TranslatedBlock:
        together = array("I", before.tail)
        together.extend(tokens)
        hashes = block_hashes(together, self.block_tokens, before.parent)
        tail = together[len(hashes) * self.block_tokens :].tobytes()
        parent = hashes[-1] if hashes else before.parent
        return _TranslatedBlock(parent, tail, tuple(map(short_key, hashes)), before.salts)


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
    """Translates to names by ``extend_sequence``. ``scope`` is the default for an event's missing fields.

    A publisher's hash names a block in all scopes: adapter and salt are inputs of it. So one table has the
    blocks of all scopes, of which a client makes one with each salt that it chooses.
    """

    def __init__(self, scope: KeyScope, seed: int, *, is_store: bool = False) -> None:
        self._scope, self._seed, self._is_store = scope, seed, is_store
        self.block_tokens = scope.block_tokens
        # By the publisher's hash: our name; and the number of its scope with the tiers on which the
        # publisher has the block.
        self._names = KeyTable(np.uint64)
        self._held = KeyTable(np.uint64)
        self._scopes = _NumberedScopes()

    def parts(self, event: BlockStored | BlockRemoved) -> Sequence[BlockStored | BlockRemoved]:
        # A tier names blocks of any prompts together when it copies or evicts them.
        has_tokens = isinstance(event, BlockStored) and event.token_ids
        if has_tokens or event.seq_hashes or len(event.block_hashes) < 2 or len(self._scopes) < 2:
            return [event]
        held = self._held.find(key_column(map(_word, event.block_hashes)))
        numbers = (held.values >> np.uint64(_TIER_BITS)).tolist()
        by_scope: dict[int, list[ForeignHash]] = {}
        for word, number in zip(held.keys.tolist(), numbers, strict=True):
            by_scope.setdefault(number, []).append(word)
        return [msgspec.structs.replace(event, block_hashes=words) for words in by_scope.values()]

    def stored(self, event: BlockStored) -> Blocks:
        scope = self._scope_of(event)
        if event.seq_hashes or self._is_store:
            return scope.name, _standard(event)
        if not event.token_ids:  # as vLLM sends of blocks that it copies to another tier
            return self._copied(event) or (scope.name, [])
        name, parent = self._continued(event, scope)
        if parent == _UNKNOWN or event.block_size not in (None, scope.block_tokens):
            return name, []
        names: dict[BlockKey, BlockKey] = {}
        for number, (foreign, tokens) in enumerate(_with_tokens(event, scope.block_tokens)):
            salt = " ".join(_salts(event, number))
            is_of_scope = name == scope.name and salt == scope.salt
            if salt and (number or parent is not None) and not is_of_scope:
                break  # the hash depends on more than tokens from here on, such as an image
            parent = extend_sequence(parent, tokens, self._seed)
            names[_word(foreign)] = parent
        return name, self._remember(name, names, tier_of(event))

    def removed(self, event: BlockRemoved) -> Blocks:
        scope = self._scope_of(event)
        if event.seq_hashes or self._is_store:
            return scope.name, _standard(event)
        # The event lacks the adapter and salt under which they were stored.
        held = self._held.find(key_column(map(_word, event.block_hashes)))
        number = _scope_number(held.values)
        if not number:
            return scope.name, []
        name, names = self._scopes.name(number), self._names.find(held.keys)
        is_of_scope = held.values >> np.uint64(_TIER_BITS) == number
        rest = np.where(is_of_scope, held.values & ~_tier_bit(event), held.values)
        is_kept = rest & np.uint64((1 << _TIER_BITS) - 1) != 0
        self._held.put(held, rest * is_kept)
        self._names.put(names, names.values * is_kept)
        self._scopes.count(number, -int(np.count_nonzero(is_of_scope & ~is_kept)))
        return name, names.values[is_of_scope].tolist()

    def clear(self) -> None:
        self._names = KeyTable(np.uint64)
        self._held = KeyTable(np.uint64)
        self._scopes = _NumberedScopes()

    def _scope_of(self, event: BlockStored | BlockRemoved) -> KeyScope:
        default = self._scope
        salts = _salts(event, 0) if isinstance(event, BlockStored) else ()
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
            is_known = bool(scope.lora) or not _has_unnamed_adapter(event)
            return scope.name, None if is_known else _UNKNOWN
        word = key_column([_word(foreign)])  # only the first block of a prompt carries its salt
        parent = int(self._names.find(word).values[0])
        if not parent:
            return scope.name, _UNKNOWN
        return self._scopes.name(_scope_number(self._held.find(word).values)), parent

    def _copied(self, event: BlockStored) -> Blocks | None:
        """The blocks of an event without tokens, as far as they are known."""
        held = self._held.find(key_column(map(_word, event.block_hashes)))
        number = _scope_number(held.values)
        if not number:
            return None
        is_of_scope = held.values >> np.uint64(_TIER_BITS) == number
        self._held.put(held, np.where(is_of_scope, held.values | _tier_bit(event), held.values))
        return self._scopes.name(number), self._names.find(held.keys).values[is_of_scope].tolist()

    def _remember(self, scope: str, names: dict[BlockKey, BlockKey], tier: Tier) -> list[BlockKey]:
        """Enter blocks by the publisher's hashes; returns the names of those that are in no other scope."""
        if not names:
            return []
        number = self._scopes.number(scope)
        held = self._held.find(key_column(names))
        column = np.fromiter(names.values(), np.uint64, len(names))
        is_new = held.values == 0
        is_of_scope = is_new | (held.values >> np.uint64(_TIER_BITS) == number)
        stored = held.values | np.uint64(number << _TIER_BITS | 1 << PLANE[tier])
        found = self._names.find(held.keys)
        self._names.put(found, np.where(is_of_scope, column, found.values))
        self._held.put(held, np.where(is_of_scope, stored, held.values))
        self._scopes.count(number, int(np.count_nonzero(is_new)))
        entered: list[BlockKey] = column[is_of_scope].tolist()
        return entered


class _NumberedScopes:
    """Numbers from 1 on for scopes, each as long as it has blocks."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._num_blocks: dict[int, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            self._last += 1
            number = self._numbers[name] = self._last
            self._names[number], self._num_blocks[number] = name, 0
        return number

    def name(self, number: int) -> str:
        return self._names[number]

    def count(self, number: int, num_blocks: int) -> None:
        """Note that a scope has so many blocks more."""
        self._num_blocks[number] += num_blocks
        if not self._num_blocks[number]:
            del self._num_blocks[number], self._numbers[self._names.pop(number)]


def _scope_number(held: Values) -> int:
    """The number of the scope of the first known block, and so of all of an event; 0 if there is none."""
    [known] = held.nonzero()
    return int(held[known[0]]) >> _TIER_BITS if len(known) else 0


def _with_tokens(event: BlockStored, block_tokens: int = 0) -> list[tuple[ForeignHash, list[int]]]:
    """The event's blocks with their tokens, as far as it has tokens."""
    size, tokens = event.block_size or block_tokens, event.token_ids or []
    if not size:
        return []
    starts = range(0, len(tokens) - size + 1, size)
    return [(one, tokens[at : at + size]) for one, at in zip(event.block_hashes, starts, strict=False)]


def _tier_bit(event: BlockStored | BlockRemoved) -> np.uint64:
    return np.uint64(1 << PLANE[tier_of(event)])


def _salts(event: BlockStored, number: int) -> tuple[str, ...]:
    """Inputs of a block's hash beside its tokens and the adapter."""
    extra = event.extra_keys[number] if event.extra_keys and number < len(event.extra_keys) else None
    return tuple(str(one).removeprefix(_SALT_PREFIX) for one in extra or () if one != event.lora_name)


def _has_unnamed_adapter(event: BlockStored) -> bool:
    """Whether the blocks are of an adapter of which only the engine's number is known."""
    return bool(event.lora_id) and event.lora_name is None


def _standard(event: BlockStored | BlockRemoved) -> list[BlockKey]:
    """The standard's names that a store sends, older ones as signed numbers."""
    return [one & _U64 for one in event.seq_hashes or event.block_hashes if isinstance(one, int)]


def _word(foreign: ForeignHash) -> BlockKey:
    return foreign & _U64 if isinstance(foreign, int) else short_key(foreign)
