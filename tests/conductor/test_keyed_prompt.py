# SPDX-License-Identifier: Apache-2.0
"""The blocks by which prompts are compared: few, and in common to prompts of any length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.conductor.keyed_prompt import NO_KEYS, POINTS, KeyedPrompt


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(1, 5))
def test_a_longer_prompt_looks_at_a_part_of_what_a_shorter_one_looks_at(
    num_blocks: int, num_cached: int, factor: int
) -> None:
    prompt = KeyedPrompt(range(num_blocks), num_cached)
    places = [*prompt.points()]
    assert len(places) <= POINTS and all(num_cached <= place < num_blocks for place in places)
    longer = KeyedPrompt(range(num_blocks * factor), num_cached)
    assert {place for place in longer.points() if place < num_blocks} <= {*places}


@pytest.mark.parametrize("num_cached", [0, 100, 12_500])
@pytest.mark.parametrize("num_more", [1, POINTS - 1, POINTS, POINTS + 1, 1000, 10_000])
def test_enough_blocks_are_looked_at_however_many_are_cached(num_more: int, num_cached: int) -> None:
    places = KeyedPrompt(range(num_cached + num_more), num_cached).points()
    assert len(places) >= min(num_more, POINTS // 2)
    assert places[-1] >= num_cached + num_more - 1 - num_more // (POINTS // 2)
    assert not NO_KEYS.points()
