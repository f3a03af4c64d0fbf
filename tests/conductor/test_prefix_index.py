# SPDX-License-Identifier: Apache-2.0
"""The index answers like a plain search over sets, in any order of events.

The match by few runs, by many, and a plain search agree. The removal log and the inferred blocks are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.conductor import prefix_index
from mooncake.conductor.holder_sets import HolderSets, Masks
from mooncake.conductor.key_table import key_column
from mooncake.conductor.messages import Window
from mooncake.conductor.prefix_index import InferredBlocks, PrefixIndex, Removal, RemovalLog, window_scope
from mooncake.prefix import BlockKey, block_hashes, root_hash, short_key
from mooncake.types import Tier

PROMPT = [short_key(one) for one in block_hashes(range(128), 16, root_hash())]


@pytest.fixture
def index() -> Iterator[PrefixIndex]:
    index = PrefixIndex(1000)
    yield index
    index.check()


def test_longest_prefix_per_instance(index: PrefixIndex) -> None:
    index.store("a", PROMPT[:3])
    index.store("b", PROMPT)
    index.store("c", PROMPT[1:])  # holds everything but the first block: no prefix
    assert index.matches(PROMPT) == {"a": 3, "b": 8}
    assert index.matches([]) == {}
    assert index.match(PROMPT).num_held == 8
    assert index.match([*PROMPT, 5]).num_held == 8


def test_a_block_on_two_tiers_leaves_with_the_second(index: PrefixIndex) -> None:
    index.store("a", PROMPT[:1], Tier.DEVICE)
    index.store("a", PROMPT[:1], Tier.MEMORY)
    index.remove("a", PROMPT[:1], Tier.DEVICE)
    assert index.matches(PROMPT) == {"a": 1}
    index.remove("a", PROMPT[:1], Tier.MEMORY)
    assert index.matches(PROMPT) == {}
    assert index.num_blocks == 0


def test_clear_forgets_the_blocks_of_one_instance(index: PrefixIndex) -> None:
    index.store("a", PROMPT)
    index.store("b", PROMPT[:2])
    assert index.clear("a") == 8
    assert index.matches(PROMPT) == {"b": 2}
    index.store("c", PROMPT[:5])
    assert index.matches(PROMPT) == {"b": 2, "c": 5}
    assert index.clear("unknown") == index.forget("unknown") == 0


def test_a_slot_is_kept_until_its_instance_is_forgotten(index: PrefixIndex) -> None:
    slots = [index.slot(name) for name in "abc"]
    index.store("b", PROMPT)
    index.clear("b")
    assert [index.slot(name) for name in "abc"] == slots == [0, 1, 2]
    assert index.forget("b") == 0
    assert index.slot("d") == 1
    for number in range(200):
        index.slot(f"more {number}")
    assert index.num_slots == 256 == len(index.match(PROMPT).leading)


@pytest.mark.parametrize("num_instances", [63, 64, 65, 128, 129, 256, 257])
def test_the_last_of_any_number_of_instances_is_found(index: PrefixIndex, num_instances: int) -> None:
    for number in range(num_instances):
        index.store(f"instance {number}", PROMPT[:2])
    last = f"instance {num_instances - 1}"
    index.store(last, PROMPT, Tier.MEMORY)
    match = index.match(PROMPT)
    slot = index.slot(last)
    assert len(match.leading) == index.num_slots > slot
    assert match.leading[slot] == 8 and index.matches(PROMPT)[last] == 8


def test_a_prefix_may_go_from_tier_to_tier(index: PrefixIndex) -> None:
    index.store("a", PROMPT[:2], Tier.DEVICE)
    index.store("a", PROMPT[1:5], Tier.MEMORY)
    index.store("a", [PROMPT[5], PROMPT[7]], Tier.SSD)
    index.store("b", PROMPT[:3], Tier.MEMORY)
    match = index.match(PROMPT)
    a, b = index.slot("a"), index.slot("b")
    assert (match.leading_memory[a], match.leading[a]) == (5, 6)
    assert (match.leading_memory[b], match.leading[b]) == (3, 3)
    assert list(match.tiers_of(a)) == [1, 3, 2, 2, 2, 4, 0, 4]
    assert list(match.tiers_of(b)) == [2, 2, 2, 0, 0, 0, 0, 0]
    assert match.num_held == 6


def test_scopes_are_separate(index: PrefixIndex) -> None:
    index.store("a", PROMPT, scope="one")
    index.store("a", PROMPT[:2], scope="two")
    assert index.matches(PROMPT) == {}
    assert index.matches(PROMPT, "one") == {"a": 8}
    assert index.matches(PROMPT, "two") == {"a": 2}
    assert index.scopes_of(PROMPT[0]) == ["one", "two"] and index.scopes_of(PROMPT[3]) == ["one"]
    assert index.num_blocks_of("a") == 10
    index.remove("a", PROMPT, scope="one")
    assert index.matches(PROMPT, "two") == {"a": 2}
    assert index.forget("a") == 2
    assert index.scopes_of(PROMPT[0]) == []


def test_a_scope_ends_with_its_last_block(index: PrefixIndex) -> None:
    index.store("a", PROMPT)
    index.store("b", PROMPT[:1])
    index.remove("b", PROMPT[:1])
    assert index.clear("a") == 8
    index.check()
    assert index.clear("b") == 0
    index.store("b", PROMPT[:2])
    assert index.forget("b") == 2


def removals_of(log: RemovalLog, keys: Sequence[int], scope: str = "") -> list[Removal | None]:
    found = log.removals(np.array(keys, np.uint64), scope)
    return [found.of(block) for block in range(len(keys))]


def has_other_salt(log: RemovalLog, keys: Sequence[int], bare_keys: Sequence[int]) -> list[bool]:
    found = log.has_other_salt(np.array(keys, np.uint64), np.array(bare_keys, np.uint64))
    return [bool(one) for one in found]


def test_removals_are_remembered_with_their_reason(index: PrefixIndex) -> None:
    index.store("a", PROMPT[:4])
    index.store("b", PROMPT[:4])
    index.remove("a", PROMPT[3:4], reason="capacity", now=1.0)
    index.clear("a", "restarted", 2.0)
    index.forget("b", now=3.0)
    assert removals_of(index.removal_log, PROMPT[3:5]) == [Removal(3.0, "b", None, "lost"), None]
    index.store("c", PROMPT[:1])
    index.remove("c", PROMPT[:1], Tier.DEVICE, reason="capacity", now=4.0)
    assert removals_of(index.removal_log, PROMPT[:1]) == [Removal(4.0, "c", Tier.DEVICE, "capacity")]


def test_blocks_that_come_and_go_leave_no_list_behind(index: PrefixIndex) -> None:
    for number in range(0, 40_000, 100):
        index.store("a", range(number + 100, number + 200))
        index.remove("a", range(number, number + 100))
    assert index.num_blocks_of("a") == 100
    assert len(index._lists[0][""]) < 3000
    assert index.clear("a") == 100


def test_an_instance_with_most_blocks_needs_no_list(index: PrefixIndex) -> None:
    index.store("b", range(5, 400_000, 5))
    index.store("a", range(1, 300_000))
    index.remove("a", range(1, 1000))
    assert index._lists == {0: {}, 1: {}}
    index.store("c", range(7, 500, 7))
    assert index.num_blocks_of("a") == 299_000
    assert index.clear("a") == 299_000
    assert index.matches([1000]) == {"b": 1} and index.matches([1001]) == {}
    index.store("a", [1001])
    assert len(index._lists[1][""]) == 1


def test_widely_held_blocks_are_right_after_the_arrays_grew(index: PrefixIndex) -> None:
    for number in range(60):
        index.store(f"i{number}", PROMPT[: 1 + number % 8])
    assert index.matches(PROMPT)["i7"] == 8
    for number in range(60, 70):
        index.store(f"i{number}", PROMPT[:3])
    assert index.matches(PROMPT) == {
        f"i{number}": 1 + number % 8 if number < 60 else 3 for number in range(70)
    }


BLOCKS = list(range(6))
step = st.tuples(
    st.sampled_from(["store", "remove", "clear", "forget"]),
    st.sampled_from(["a", "b", "c"]),
    st.lists(st.sampled_from(BLOCKS), max_size=4),
    st.sampled_from(list(Tier)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=25))
def test_equals_a_search_over_sets(steps: list[tuple[str, str, list[BlockKey], Tier]]) -> None:
    index = PrefixIndex()
    truth: dict[tuple[str, BlockKey], set[Tier]] = {}
    for action, instance, blocks, tier in steps:
        if action == "store":
            index.store(instance, blocks, tier)
        elif action == "remove":
            index.remove(instance, blocks, tier)
        elif action == "clear":
            index.clear(instance)
        else:
            index.forget(instance)
        for block in blocks if action in ("store", "remove") else BLOCKS:
            tiers = truth.setdefault((instance, block), set())
            if action == "store":
                tiers.add(tier)
            elif action == "remove":
                tiers.discard(tier)
            else:
                tiers.clear()
        index.check()

    def leading(instance: str, *tiers: Tier) -> int:
        length = 0
        while length < len(BLOCKS) and truth.get((instance, BLOCKS[length]), set()) & set(tiers):
            length += 1
        return length

    match = index.match(BLOCKS)
    for instance in "abc":
        slot = index.slot(instance)
        assert match.leading_memory[slot] == leading(instance, Tier.DEVICE, Tier.MEMORY)
        assert match.leading[slot] == leading(instance, *Tier)


# --- how much of a prompt each slot holds


NUM_SLOTS = 128
bits = st.sets(st.sampled_from([0, 1, 2, 5, 63, 64, 99, 127]))
all_slots = st.just(set(range(100)))
holders = st.tuples(bits | all_slots, bits, bits)


def masks_of(sets: tuple[set[int], set[int], set[int]]) -> Masks:
    device, memory, ssd = (sum(1 << slot for slot in slots) for slots in sets)
    return device, memory, ssd


@settings(deadline=None)
@given(st.lists(holders, min_size=1, max_size=40))
def test_both_ways_equal_a_plain_search(prompt: list[tuple[set[int], set[int], set[int]]]) -> None:
    known = HolderSets()
    rows = np.array([known.move(0, masks_of(sets), 1) for sets in prompt], np.uint32)
    ends = np.arange(len(rows), dtype=np.int64) + 1
    few = prefix_index._match_few(known, rows.tolist(), ends.tolist(), NUM_SLOTS)
    many = prefix_index._match_many(known.reach(rows, NUM_SLOTS >> 6), ends)
    for level in range(2):
        plain = np.zeros(NUM_SLOTS, np.int64)
        for slot in range(NUM_SLOTS):
            held = [any(slot in tier for tier in sets[: level + 2]) for sets in prompt]
            plain[slot] = [*held, False].index(False)
        assert (few[level] == plain).all() and (many[level] == plain).all()
    for slot in (0, 64, 127):
        tiers = [sum((slot in tier) << bit for bit, tier in enumerate(sets)) for sets in prompt]
        assert known.tiers(rows, slot, NUM_SLOTS >> 6).tolist() == tiers


@pytest.fixture
def staggered() -> PrefixIndex:
    """Instance n has n + 1 of a prompt's 200 blocks, the last ones on another tier."""
    staggered = PrefixIndex()
    for number in range(100):
        staggered.store(f"i{number}", range(1, number + 2), Tier.MEMORY)
        staggered.store(f"i{number}", range(number + 2, number + 4), Tier.SSD)
    return staggered


def test_each_instance_drops_out_at_another_block(staggered: PrefixIndex) -> None:
    found = staggered.match(range(1, 201))
    assert found.leading_memory[:100].tolist() == [number + 1 for number in range(100)]
    assert found.leading[:100].tolist() == [number + 3 for number in range(100)]
    assert found.num_held == 102
    assert list(found.tiers_of(7)) == [2] * 8 + [4] * 2 + [0] * 190


def test_unpacked_rows_are_forgotten_with_their_row(staggered: PrefixIndex) -> None:
    staggered.match(range(1, 201))
    staggered.store("i0", range(1, 201))
    staggered.remove("i5", range(1, 201), Tier.MEMORY)
    staggered.store("one more", [3])
    found = staggered.match(range(1, 201))
    assert found.leading[:7].tolist() == [200, 4, 5, 6, 7, 0, 9]
    assert set(found.tiers_of(0)[3:]) == {1}


def test_more_rows_than_are_kept_unpacked(staggered: PrefixIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.conductor.holder_sets._UNPACKED", 40)
    for first in (1, 30, 60, 1):
        found = staggered.match(range(first, first + 31))
        assert found.leading[90] == 31
        assert found.leading[first + 5] == min(31, 9)
    assert staggered.match(range(1, 201)).leading[99] == 102


def test_slots_grow_beyond_the_unpacked_words(staggered: PrefixIndex) -> None:
    staggered.match(range(1, 201))
    for number in range(200):
        staggered.store(f"later {number}", range(1, 3))
    found = staggered.match(range(1, 201))
    assert len(found.leading) == 512
    assert found.leading[staggered.slot("later 199")] == 2 and found.leading[99] == 102


# --- recent removals


def test_the_last_removal_counts() -> None:
    removals = RemovalLog(10)
    first = Removal(1.0, "a", Tier.DEVICE, "evicted")
    then = Removal(2.0, "b", None, "lost")
    removals.note_removed("", key_column([1, 2, 3]), first)
    removals.note_removed("", key_column([3, 4]), then)
    removals.note_removed("another", key_column([1]), then)
    assert removals_of(removals, [1, 3, 4, 5]) == [first, then, then, None]
    assert removals_of(removals, [3, 1, 3]) == [then, first, then], "in any order, and twice"
    assert removals_of(removals, []) == []


def test_it_is_bounded() -> None:
    removals = RemovalLog(4)
    removal = Removal(1.0, "a", None, "cleared")
    removals.note_removed("", key_column([1, 2, 3]), removal)
    removals.note_removed("", key_column([4, 5]), removal)
    assert removals_of(removals, [3, 5]) == [None, removal]
    removals.note_removed("", key_column(range(10, 20)), removal)
    assert removals_of(removals, [5, 15, 16, 19]) == [None, None, removal, removal]
    nothing = RemovalLog(0)
    nothing.note_removed("", key_column([1]), removal)
    nothing.note_prompt(key_column([1]), [2])
    assert removals_of(nothing, [1]) == [None] and has_other_salt(nothing, [3], [2]) == [False]


def test_the_same_tokens_under_other_salts() -> None:
    removals = RemovalLog(6)
    removals.note_prompt(key_column([11, 12]), [1, 2])
    removals.note_prompt(key_column([21, 22]), [1, 2])
    removals.note_prompt(key_column([31]), [1, 2])  # of another length: not the same blocks
    assert has_other_salt(removals, [11, 12], [1, 2]) == [True, True]
    assert has_other_salt(removals, [42, 9, 41], [2, 7, 1]) == [True, False, True]
    assert has_other_salt(removals, [11], []) == [False]
    removals.note_prompt(key_column([41, 42, 43, 44]), [1, 2, 3, 4])
    assert has_other_salt(removals, [43, 41], [3, 1]) == [False, True], "its own is none"
    removals.note_prompt(key_column([1, 2]))
    removals.note_prompt(key_column([61, 62, 63]), [5, 6, 7])
    assert has_other_salt(removals, [1], [1]) == [False], "only the unsalted one is left"
    assert has_other_salt(removals, [41], [1]) == [True]


def test_the_log_is_searched_as_it_is_now() -> None:
    """Also keys that differ in their highest bits only, other scopes, and notes after a query."""
    log = RemovalLog(1000)
    keys = [7, 7 + (1 << 16), 7 + (1 << 63)]
    first, later = (Removal(at, "a", None, "cleared") for at in (1.0, 2.0))
    log.note_removed("", key_column(keys[1:]), first)
    assert removals_of(log, keys) == [None, first, first]
    log.note_removed("other", key_column(keys), later)
    assert removals_of(log, keys) == [None, first, first]
    assert removals_of(log, keys, "other") == [later] * 3
    log.note_removed("", key_column(keys[:2]), later)
    assert removals_of(log, keys) == [later, later, first]
    log.note_prompt(key_column([1]), keys[:1])
    assert has_other_salt(log, [2, 3], keys[:2]) == [True, False]
    log.note_prompt(key_column([4]), keys[1:2])
    assert has_other_salt(log, [2, 3], keys[:2]) == [True, True]


# --- instances without KV events


def test_the_latest_prompts_are_remembered_from_their_beginning() -> None:
    inferred = InferredBlocks(4)
    assert inferred.note("a", [1, 2, 3]) == ([1, 2, 3], [])
    assert inferred.note("a", [1, 9]) == ([1, 9], [])
    assert inferred.note("a", [1, 8]) == ([1, 8], [3]), "the end of the oldest prompt"
    assert inferred.note("b", [7, 7, 7]) == ([7, 7, 7], [])
    assert inferred.note("a", [5]) == ([5], [2])


def test_only_the_beginning_of_a_too_long_prompt_is_kept() -> None:
    inferred = InferredBlocks(2)
    assert inferred.note("a", [1, 2, 3, 4]) == ([1, 2], [])
    assert inferred.note("a", [1, 2]) == ([1, 2], [])
    inferred.forget("a")
    assert inferred.note("a", [5, 6]) == ([5, 6], [])
    assert InferredBlocks(0).note("a", [1]) == ([], [])


def test_windows_of_many_instances_and_tiers() -> None:
    """Instances in several words of slots, with and without windows, each with its own blocks and marks."""
    random = Random(7)
    index = PrefixIndex()
    keys = list(range(1, 25))
    expected: dict[str, int] = {}
    for number in range(150):
        name, held = f"w{number}", random.randint(1, 24)
        index.store(name, keys[:held], random.choice([*Tier]))
        expected[name] = held
        if number % 3:
            window = Window(random.choice([2, 4]), random.choice([1, 2]))
            marked = [key for key in keys if random.random() < 0.7]
            index.set_windows(name, [window])
            index.store(name, marked, scope=window_scope("", window.num_blocks))
            expected[name] = max(
                end
                for end in range(0, held + 1, window.step)
                if set(keys[max(0, end - window.num_blocks) : end]).issubset(marked)
            )
    assert index.matches(keys) == {name: num for name, num in expected.items() if num}
    index.check()
