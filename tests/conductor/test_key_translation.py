# SPDX-License-Identifier: Apache-2.0
"""Foreign block hashes are translated to our keys, or left out."""

from __future__ import annotations

import struct

import pytest
import xxhash

from mooncake.conductor.key_translation import (
    EngineKeys,
    KeyScope,
    OwnKeys,
    SequenceKeys,
    extend_sequence,
    sequence_hashes,
)
from mooncake.kv_events import BlockRemoved, BlockStored
from mooncake.prefix import block_hashes, root_hash, short_key

# --- the standard's hashes


def test_names_are_chained_by_the_standard() -> None:
    first = xxhash.xxh3_64_intdigest(struct.pack("<4I", 1, 2, 3, 4), seed=7)
    local = xxhash.xxh3_64_intdigest(struct.pack("<4I", 5, 6, 7, 2**32 - 1), seed=7)
    second = xxhash.xxh3_64_intdigest(struct.pack("<2Q", first, local), seed=7)
    assert sequence_hashes([1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9], 4, 7) == [first, second]
    assert sequence_hashes([1, 2, 3], 4, 7) == sequence_hashes([], 4, 7) == []
    assert sequence_hashes([1, 2, 3, 4], 4, 8) != [first]


def test_known_values() -> None:
    """Constants, so that a change of the library or of our code is detected."""
    assert sequence_hashes(range(8), 4, 0) == [11660027832386793900, 15795048925959984383]
    assert extend_sequence(None, [], 0) == 0x2D06800538D394C2  # the published XXH3-64 of the empty input


def test_an_impossible_token_is_refused() -> None:
    with pytest.raises(OverflowError):
        extend_sequence(None, [-1], 0)


# --- translations


TOKENS = list(range(100, 112))
NAMES = sequence_hashes(TOKENS, 4, 5)
SCOPE = KeyScope("default", "m", "", 4, "")


def stored(hashes: list[bytes | int], parent: bytes | int | None, start: int, **more: object) -> BlockStored:
    tokens = TOKENS[start : start + 4 * len(hashes)]
    return BlockStored(hashes, parent, tokens, 4, **more)  # type: ignore[arg-type]


def test_an_engine_s_blocks_are_named_by_their_tokens() -> None:
    keys = SequenceKeys(SCOPE, 5)
    assert keys.stored(stored([-1, 22], None, 0)) == (SCOPE.name, NAMES[:2])
    assert keys.stored(stored([b"c" * 32], 22, 8)) == (SCOPE.name, NAMES[2:])
    assert keys.stored(stored([44], 99, 0))[1] == [], "its parent is unknown"
    assert keys.stored(BlockStored([55], None, [1, 2], 2))[1] == [], "blocks of another size"
    assert keys.stored(BlockStored([66], None))[1] == [], "no tokens"
    assert keys.removed(BlockRemoved([-1, 77, b"c" * 32])) == (SCOPE.name, [NAMES[0], NAMES[2]])
    assert keys.removed(BlockRemoved([-1]))[1] == []
    keys.clear()
    assert keys.stored(stored([b"c" * 32], 22, 8))[1] == []


def test_a_block_is_known_until_its_last_tier_lost_it() -> None:
    keys = SequenceKeys(SCOPE, 5)
    keys.stored(stored([11], None, 0))
    keys.stored(stored([11], None, 0, medium="CPU"))
    assert keys.removed(BlockRemoved([11], "GPU"))[1] == NAMES[:1]
    assert keys.stored(stored([22], 11, 4))[1] == NAMES[1:2]
    assert keys.removed(BlockRemoved([11], "CPU"))[1] == NAMES[:1]
    assert keys.stored(stored([33], 11, 4))[1] == []


def test_our_own_workers_begin_at_the_root() -> None:
    ours = block_hashes(TOKENS, 4, root_hash())
    keys = SequenceKeys(SCOPE, 5)
    assert keys.stored(stored([*ours], root_hash(), 0))[1] == NAMES
    assert keys.stored(stored([*ours], root_hash("salt"), 0))[1] == []


def test_adapters_and_salts_are_scopes() -> None:
    keys = SequenceKeys(SCOPE, 5)
    adapted = stored([1], None, 0, lora_name="sql", extra_keys=[["sql"]])
    assert keys.stored(adapted) == (KeyScope("default", "m", "sql", 4, "").name, NAMES[:1])
    salted = KeyScope("default", "m", "", 4, "pepper").name
    assert keys.stored(stored([2], None, 0, extra_keys=[["pepper"]])) == (salted, NAMES[:1])
    assert keys.stored(stored([3], 2, 4, extra_keys=[None])) == (salted, NAMES[1:2]), "its parent's"
    assert keys.removed(BlockRemoved([3])) == (salted, NAMES[1:2])
    with_image = stored([4, 5], None, 0, extra_keys=[None, ["image 7"]])
    assert keys.stored(with_image)[1] == NAMES[:1], "the same tokens, but not the same block"


def test_a_store_sends_the_standard_s_names_for_many_tenants() -> None:
    keys = SequenceKeys(SCOPE, 5, is_store=True)
    other = KeyScope("t2", "m", "", 4, "").name
    assert keys.stored(BlockStored(seq_hashes=[2**64 - 1], tenant_id="t2")) == (other, [2**64 - 1])
    assert keys.removed(BlockRemoved([-1])) == (SCOPE.name, [2**64 - 1]), "in its older fields"
    assert keys.stored(BlockStored(object_key="no block's")) == (SCOPE.name, [])


def test_our_store_s_blocks_are_in_the_scope_of_their_identity() -> None:
    [block] = block_hashes(range(4), 4, root_hash())
    keys = OwnKeys()
    event = BlockStored(object_key=f"kv/0123456789abcdef/{block.hex()}")
    assert keys.stored(event) == ("kv/0123456789abcdef", [short_key(block)])
    removed = BlockRemoved(object_key=f"kv/ffff456789abcdef/{block.hex()}")
    assert keys.removed(removed) == ("kv/ffff456789abcdef", [short_key(block)])
    assert keys.stored(BlockStored(object_key="kv/0123456789abcdef/no hash"))[1] == []
    assert keys.stored(BlockStored(object_key="17"))[1] == []


def test_an_engine_s_blocks_may_be_longer_or_shorter_than_ours() -> None:
    for ours, theirs in ((2, 4), (4, 2), (4, 4), (4, 3), (3, 4)):
        keys = EngineKeys(ours)
        keys_stored: list[int] = []
        for start in range(0, 12, theirs):  # each block by an event of its own
            event = BlockStored([start], start - theirs if start else None, TOKENS[start:][:theirs], theirs)
            keys_stored += keys.stored(event)[1]
        expected = [short_key(one) for one in block_hashes(TOKENS, ours, root_hash())]
        assert keys_stored == expected, (ours, theirs)
        gone = keys.removed(BlockRemoved([*range(0, 12, theirs)]))[1]
        assert gone == expected
        assert keys.stored(BlockStored([99], 0, TOKENS[:theirs], theirs))[1] == [], "its parent is gone"


def test_an_engine_s_adapters_salts_and_images_are_not_mixed_up() -> None:
    keys = EngineKeys(4)
    adapted = stored([1], None, 0, lora_name="sql", extra_keys=[["sql"]])
    [block] = block_hashes(TOKENS[:4], 4, root_hash("", "sql"))
    assert keys.stored(adapted)[1] == [short_key(block)]
    [block] = block_hashes(TOKENS[:4], 4, root_hash("pepper"))
    assert keys.stored(stored([b"2"], None, 0, extra_keys=[["pepper"]]))[1] == [short_key(block)]
    with_image = stored([4, 5], None, 0, extra_keys=[None, ["image 7"]])
    plain = [short_key(one) for one in block_hashes(TOKENS[:4], 4, root_hash())]
    assert keys.stored(with_image)[1] == plain, "the same tokens, but not the same block"


def test_an_engine_s_block_is_known_until_its_last_tier_lost_it() -> None:
    keys = EngineKeys(4)
    keys.stored(stored([1], None, 0))
    keys.stored(stored([1], None, 0, medium="cpu"))
    assert keys.removed(BlockRemoved([1]))[1] and keys.removed(BlockRemoved([1], medium="cpu"))[1]
    assert keys.removed(BlockRemoved([1]))[1] == []
