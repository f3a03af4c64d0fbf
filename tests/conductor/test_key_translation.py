# SPDX-License-Identifier: Apache-2.0
"""Foreign block hashes are translated to our keys, or left out."""

from __future__ import annotations

import struct

import pytest
import xxhash

from mooncake.conductor.event_subscriptions import EventReader
from mooncake.conductor.key_translation import (
    EngineKeys,
    KeyScope,
    OwnKeys,
    SequenceKeys,
    extend_sequence,
    is_remote,
    sequence_hashes,
    tier_of,
)
from mooncake.conductor.messages import BlocksRemoved, BlocksStored
from mooncake.kv_events import BlockRemoved, BlockStored, EventBatch, KvEvent, encode_batch
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.types import Tier

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


def test_salts_in_every_event_of_a_prompt_are_those_of_its_beginning() -> None:
    """SGLang sends each block by itself, with the prompt's salt."""
    salt = [["dynamo-cache-salt:pepper"]]
    ours = [short_key(one) for one in block_hashes(TOKENS, 4, root_hash("pepper"))]
    engine, sequence = EngineKeys(4), SequenceKeys(SCOPE, 5)
    salted = KeyScope("default", "m", "", 4, "pepper").name
    for number in range(2):
        event = stored([number], number - 1 if number else None, 4 * number, extra_keys=salt)
        assert engine.stored(event)[1] == ours[number : number + 1]
        assert sequence.stored(event) == (salted, NAMES[number : number + 1])
    with_image = stored([2], 1, 8, extra_keys=[[*salt[0], "image 7"]])
    assert engine.stored(with_image)[1] == sequence.stored(with_image)[1] == []


def test_an_adapter_without_a_name_is_not_the_base_model() -> None:
    first, second = stored([1], None, 0, lora_id=3), stored([2], 1, 4, lora_id=3)
    for keys in (EngineKeys(4), SequenceKeys(SCOPE, 5)):
        assert keys.stored(first)[1] == keys.stored(second)[1] == []
        assert keys.stored(stored([3], None, 0, lora_id=0))[1]
    registered = SequenceKeys(KeyScope("default", "m", "sql", 4, ""), 5)
    assert registered.stored(first)[1] == NAMES[:1], "its publisher was registered for this adapter"


@pytest.mark.parametrize("keys", [EngineKeys(4), SequenceKeys(SCOPE, 5)], ids=["ours", "the standard's"])
def test_copies_on_another_tier_are_known_by_their_hashes(keys: EngineKeys | SequenceKeys) -> None:
    """vLLM's offloading sends no tokens."""
    first, second = keys.stored(stored([1], None, 0)), keys.stored(stored([2], 1, 4))
    copies = BlockStored([1, 99], None, [], 0, "CPU", group_idx=0)
    assert keys.stored(copies) == first
    assert keys.stored(BlockStored([98], None, [], 0, "CPU"))[1] == []
    keys.removed(BlockRemoved([1, 2], "GPU"))
    assert keys.stored(stored([2], 1, 4)) == second, "its parent is still there"
    assert keys.removed(BlockRemoved([1], "CPU")) == first
    assert keys.stored(stored([3], 1, 4))[1] == []


def test_an_event_may_name_blocks_of_several_scopes() -> None:
    """A tier evicts blocks of any prompts together."""
    reader = EventReader("w", SequenceKeys(SCOPE, 5))
    salts = ["a", "b", "a"]
    events: list[KvEvent] = [stored([n], None, 4 * n, extra_keys=[[salt]]) for n, salt in enumerate(salts)]
    copied = BlockStored([*range(4)], None, [], 4, "CPU")
    facts = reader.read(0, encode_batch(EventBatch(1.0, events)))
    together: list[KvEvent] = [copied, BlockRemoved([*range(4)], "CPU"), BlockRemoved([*range(4)], "GPU")]
    facts += reader.read(1, encode_batch(EventBatch(2.0, together)))
    assert len(reader._translation._scopes) == 0  # type: ignore[attr-defined]
    held: dict[tuple[str, Tier], set[int]] = {}
    for fact in facts:
        if isinstance(fact, BlocksStored):
            held.setdefault((fact.scope, fact.tier), set()).update(fact.keys)
        elif isinstance(fact, BlocksRemoved):
            held[fact.scope, fact.tier] -= {*fact.keys}
    assert len(held) == 4 and not any(held.values())


def test_scopes_are_known_as_long_as_they_have_blocks() -> None:
    """Clients choose salts: neither memory nor time may grow with those that were ever used."""
    keys = SequenceKeys(SCOPE, 5)
    for number in range(100):
        event = stored([number], None, 0, extra_keys=[[f"salt {number}"]])
        assert keys.stored(event) == (KeyScope("default", "m", "", 4, f"salt {number}").name, NAMES[:1])
        keys.stored(event)  # reported once more
    assert len(keys._scopes) == 100
    for number in range(100):
        name, gone = keys.removed(BlockRemoved([number, 1000]))
        assert (name, gone) == (KeyScope("default", "m", "", 4, f"salt {number}").name, NAMES[:1])
    assert len(keys._scopes) == len(keys._names) == len(keys._held) == 0
    keys.stored(stored([1], None, 0, extra_keys=[["a"]]))
    other = stored([1, 2], None, 0, extra_keys=[["b"]])
    assert keys.stored(other)[1] == NAMES[1:2], "a hash that is known stays in its scope"


def test_media_of_other_engines_are_tiers() -> None:
    media = {"GPU": Tier.DEVICE, None: Tier.DEVICE, "CPU_PINNED": Tier.MEMORY, "CPU_TIER1": Tier.MEMORY}
    media |= {"CPU": Tier.MEMORY, "DISK": Tier.SSD, "STORAGE": Tier.SSD, "CPU_TIER2": Tier.SSD}
    assert {medium: tier_of(BlockRemoved([1], medium)) for medium in media} == media
    assert is_remote(BlockRemoved([1], "EXTERNAL")) and is_remote(BlockRemoved([1], "CPU", locality="REMOTE"))
    assert not is_remote(BlockRemoved([1], "CPU_PINNED", locality="LOCAL"))


def test_an_engine_s_block_is_known_until_its_last_tier_lost_it() -> None:
    keys = EngineKeys(4)
    keys.stored(stored([1], None, 0))
    keys.stored(stored([1], None, 0, medium="cpu"))
    assert keys.removed(BlockRemoved([1]))[1] and keys.removed(BlockRemoved([1], medium="cpu"))[1]
    assert keys.removed(BlockRemoved([1]))[1] == []
