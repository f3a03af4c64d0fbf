# SPDX-License-Identifier: Apache-2.0
"""A short slice of ``scripts/pauses``, and tests that its check detects violations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pauses.engines import ENGINES, NUM_BLOCKS, content
from tests.pauses.run import KINDS, Outcome, Points, Stage, play, staged

NUM_POINTS = 2
"""Number of points of each connector; the seed determines their kinds and operations."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged() as running:
        yield running


@pytest.mark.processes
@pytest.mark.parametrize("name", ENGINES)
def test_released_memory_is_not_touched_again(stage: Stage, name: str) -> None:
    outcome = play(stage, name, NUM_POINTS)
    assert not outcome.violations, f"scripts/pauses --points {NUM_POINTS} --connector {name}: {outcome}"
    assert outcome.num_points == NUM_POINTS


def judged(op: str, answer: dict[str, Any], found: list[tuple[bool, bool]]) -> Outcome:
    points = object.__new__(Points)
    points.outcome, points._number, points._seed, points._num_seen = Outcome(), 1, 0, {"save": 0, "load": 0}
    usual = {"loaded": 0, "wrong": [], "overwritten": [], "num_seen": 9, "has_struck": True}
    points._judge(op, KINDS[0], True, {**usual, **answer}, found)
    return points.outcome


def test_wrong_bytes_are_distinguished_from_misses() -> None:
    saved = judged("save", {}, [(True, True), (False, False), (True, False), (False, True)])
    assert (len(saved.wrong), saved.num_found, saved.num_not_found) == (1, 2, 2)
    assert len(saved.violations) == 1 and "block 2" in saved.violations[0]
    loaded = judged("load", {"loaded": 3, "wrong": [1]}, [])
    assert (loaded.num_loaded, loaded.num_not_loaded, len(loaded.wrong)) == (3, NUM_BLOCKS - 3, 1)


def test_memory_that_changed_afterwards_is_detected() -> None:
    assert len(judged("load", {"overwritten": [0, 3]}, []).overwritten) == 2


def test_no_two_names_have_the_same_content() -> None:
    assert bytes(content("a", 64)) == bytes(content("a", 64)) != bytes(content("b", 64))
