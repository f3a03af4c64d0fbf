# SPDX-License-Identifier: Apache-2.0
"""The index answers like a plain search over sets, in any order of events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.conductor.index.prefix_index import PrefixIndex
from mooncake.conductor.index.removals import Removal
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


def test_removals_are_remembered_with_their_reason(index: PrefixIndex) -> None:
    index.store("a", PROMPT[:4])
    index.store("b", PROMPT[:4])
    index.remove("a", PROMPT[3:4], reason="capacity", now=1.0)
    index.clear("a", "restarted", 2.0)
    index.forget("b", now=3.0)
    assert index.removal_log.removals(PROMPT[3:5]) == [Removal(3.0, "b", None, "lost"), None]
    index.store("c", PROMPT[:1])
    index.remove("c", PROMPT[:1], Tier.DEVICE, reason="capacity", now=4.0)
    assert index.removal_log.removals(PROMPT[:1]) == [Removal(4.0, "c", Tier.DEVICE, "capacity")]


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
