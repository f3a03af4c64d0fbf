# SPDX-License-Identifier: Apache-2.0
"""The blocks of prompts that wait are those that their instances will have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.conductor.keyed_prompt import NO_KEYS, KeyedPrompt
from mooncake.conductor.queued_prefixes import QueuedPrefixes
from tests.conductor.clusters import prompt


def reach(queued: QueuedPrefixes, one: KeyedPrompt) -> dict[int, tuple[int, float]]:
    found: dict[int, tuple[int, float]] = {}
    for num_blocks, slots, turns in queued.reach(one):
        for slot, turn in zip(slots, turns, strict=True):
            found.setdefault(slot, (num_blocks, turn))
    return found


def test_the_longest_common_part_counts_and_the_earliest_turn_that_brings_it() -> None:
    queued = QueuedPrefixes()
    assert reach(queued, prompt(10, 0, 1)) == {}
    queued.add(0, prompt(10, 5, 1), 7.0)
    later = queued.add(0, prompt(20, 5, 2), 9.0)
    queued.add(3, prompt(20, 5, 2), 8.0)
    assert reach(queued, prompt(30, 0, 3)) == {0: (20, 9.0), 3: (20, 8.0)}
    assert reach(queued, prompt(10, 9, 4)) == {0: (10, 7.0), 3: (10, 8.0)}
    assert reach(queued, prompt(0, 9, 5)) == reach(queued, NO_KEYS) == {}
    queued.remove(0, later)
    assert reach(queued, prompt(30, 0, 3)) == {0: (10, 7.0), 3: (20, 8.0)}
    queued.check()


def test_a_prompt_that_is_computed_is_not_waited_for() -> None:
    queued = QueuedPrefixes()
    added = queued.add(1, prompt(10, 5, 1), 7.0)
    queued.begin(1, added)
    assert reach(queued, prompt(10, 5, 2)) == {1: (10, -math.inf)}
    queued.check()


def test_a_hot_prefix_on_many_instances_is_looked_at_once() -> None:
    queued = QueuedPrefixes()
    for slot in range(1000):
        queued.add(slot, prompt(400, 10, slot), float(slot))
    (found,) = queued.reach(prompt(400, 10, 5000))
    assert found.num_blocks == 400 and found.slots == [*range(1000)] and found.turns[7] == 7.0
    for slot in range(40):
        queued.add(slot, prompt(400 + 10 * slot, 10, 1), 0.0)
    assert 1 < len(queued.reach(prompt(800, 10, 5000))) <= 8


def test_what_is_cached_already_is_not_awaited() -> None:
    queued = QueuedPrefixes()
    queued.add(1, prompt(10, 5, 1, num_cached=10), 1.0)
    assert reach(queued, prompt(10, 5, 2)) == {}
    assert reach(queued, prompt(10, 5, 1)) == {1: (15, 1.0)}


@settings(max_examples=50)
@given(st.integers(0, 1 << 30))
def test_nothing_is_left_when_all_are_computed(seed: int) -> None:
    random, queued = Random(seed), QueuedPrefixes()
    waiting: list[tuple[int, Sequence[int]]] = []
    for number in range(100):
        if waiting and random.random() < 0.4:
            queued.remove(*waiting.pop(random.randrange(len(waiting))))
        slot, common = random.randrange(3), random.choice([0, 5, 40, 300])
        one = prompt(common, random.choice([0, 1, 100]), number, random.choice([0, 3]))
        waiting.append((slot, queued.add(slot, one, random.random())))
        queued.check()
    for slot, added in waiting:
        queued.remove(slot, added)
    queued.check()
    assert repr(queued) == "<QueuedPrefixes 0 keys>"
