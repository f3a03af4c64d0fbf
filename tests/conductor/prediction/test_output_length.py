# SPDX-License-Identifier: Apache-2.0
"""Answers are expected to be as long as those of their scope were."""

from __future__ import annotations

from random import Random

from mooncake.conductor.prediction.output_length import LengthHistogram, OutputLengths


def test_quantiles_are_near() -> None:
    answers, random = LengthHistogram(), Random(0)
    seen = [round(random.lognormvariate(5.0, 1.0)) for _ in range(3000)]
    for one in seen:
        answers.add(one)
    for part in (0.1, 0.5, 0.9, 0.99):
        exact = sorted(seen)[int(part * len(seen))]
        assert 0.85 * exact <= answers.quantile(part) <= 1.25 * exact


def test_a_change_of_lengths_is_followed() -> None:
    answers = LengthHistogram()
    for length in (1000, 10):
        for _ in range(20_000):
            answers.add(length)
    assert answers.quantile(0.9) < 20
    assert answers.mean < 200


def test_a_new_scope_is_estimated_from_all() -> None:
    lengths = OutputLengths()
    assert lengths.expected("new", 0) == 0
    assert lengths.expected("new", 128) == 128
    for _ in range(20):
        lengths.add("chat", 400)
    assert lengths.expected("new", 0) == 400
    assert lengths.expected("chat", 100) == 100
    for _ in range(20):
        lengths.add("tools", 20)
    assert (lengths.expected("chat", 0), lengths.expected("tools", 0)) == (400, 20)


def test_scopes_that_are_not_seen_again_are_forgotten() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.add("first", 7)
    for number in range(2000):
        lengths.add(f"s{number}", 100)
    assert lengths.of("first") is lengths.of("never seen")
