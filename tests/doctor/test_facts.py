# SPDX-License-Identifier: Apache-2.0
"""What was reused is known from the answer, or else from counters, or it is unknown."""

from __future__ import annotations

import pytest

from mooncake.doctor.facts import Reach, Shot, Trouble


@pytest.mark.parametrize(
    ("cached", "hits", "external", "reused"),
    [
        (32, None, None, 32),
        (0, None, None, 0),
        (0, 0, 48, 48),
        (32, 0, 0, 32),
        (None, 16, None, 16),
        (None, 0, 0, 0),
        (None, None, None, None),
    ],
)
def test_reused(cached: int | None, hits: int | None, external: int | None, reused: int | None) -> None:
    shot = Shot(200, cached_tokens=cached, counted_hits=hits, counted_external_hits=external)
    assert shot.reused == reused


def test_only_200_is_an_answer() -> None:
    assert Shot(200).is_answered and not Shot(503).is_answered and not Shot().is_answered


def test_a_trouble_is_not_fine() -> None:
    assert Reach().is_fine and not Reach(Trouble.SILENT, "no answer").is_fine
