# SPDX-License-Identifier: Apache-2.0
"""Refused prompts are recognized by what they have in common."""

from __future__ import annotations

import pytest

from mooncake.conductor.keyed_prompt import POINTS, KeyedPrompt
from mooncake.conductor.refused_prompts import ONCE_S, RefusedPrompts
from tests.conductor.clusters import prompt


def test_a_prompt_that_comes_again_was_refused_as_often() -> None:
    refused = RefusedPrompts()
    again = prompt(10, 5, 1)
    assert refused.repeats(again) == 0.0
    for count in (1, 2, 3):
        refused.add(again, count * ONCE_S)
        assert refused.repeats(again) == count
    refused.check()
    refused.forget(again)
    assert refused.repeats(again) == 0.0, "it is computed now"
    refused.check()


def test_a_common_prefix_counts_for_its_part_of_what_must_be_computed() -> None:
    refused = RefusedPrompts()
    refused.add(prompt(30, 10, 1), 0.0)
    refused.add(prompt(30, 10, 2), 0.0)
    assert refused.repeats(prompt(30, 30, 3)) == pytest.approx(1.0), "half of it, twice"
    assert refused.repeats(prompt(30, 30, 3, 30)) == 0.0, "the common part is cached"
    assert refused.repeats(prompt(0, 30, 4)) == 0.0
    assert refused.repeats(KeyedPrompt()) == refused.repeats(prompt(3, 0, 1, 3)) == 0.0, "nothing is computed"


def test_a_longer_prompt_knows_what_a_shorter_one_was_counted_at() -> None:
    refused = RefusedPrompts()
    refused.add(prompt(1000, 0, 1), 0.0)
    longer = prompt(1000, 3000, 2)
    assert refused.repeats(longer) == pytest.approx(0.25, abs=2 / POINTS)
    assert refused.repeats(longer._replace(num_cached=1000)) == 0.0


def test_the_oldest_are_dropped_and_those_counted_again_are_not_the_oldest() -> None:
    refused = RefusedPrompts(capacity=20)
    first, second, third = (prompt(0, 10, name) for name in (1, 2, 3))
    for number, one in enumerate((first, second, first, third)):
        refused.add(one, number * ONCE_S)
        refused.check()
    assert [refused.repeats(one) for one in (first, second, third)] == [2.0, 0.0, 1.0]


def test_a_client_that_sends_its_prompt_again_is_counted_once() -> None:
    refused, one = RefusedPrompts(), prompt(10, 5, 1)
    for at in (0.0, 0.25, ONCE_S - 1.0):
        refused.add(one, at)
    assert refused.repeats(one) == 1.0
    refused.add(prompt(10, 5, 2), 0.25)
    assert refused.repeats(prompt(10, 0, 3)) == 2.0, "another with the same prefix counts"
    refused.add(one, ONCE_S)
    assert refused.repeats(prompt(10, 0, 3)) == 3.0
    refused.add(KeyedPrompt(), 0.0)
    refused.check()


def test_of_a_prompt_that_is_computed_all_is_forgotten() -> None:
    refused = RefusedPrompts()
    refused.add(prompt(32, 0, 1), 0.0)
    refused.forget(prompt(32, 96, 2))
    assert refused.repeats(prompt(32, 0, 1)) == 0.0
