# SPDX-License-Identifier: Apache-2.0
"""What was reused is known from the answer, or else from counters, or it is unknown."""

from __future__ import annotations

import pytest

from mooncake.doctor.facts import GatewayFacts, InstanceFacts, Reach, Shot, Trouble


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


@pytest.mark.parametrize(
    ("answered", "absent"),
    [
        ([True, False, False], [1, 2]),
        ([False, False], []),
        ([None, False], [1]),
        ([True, None], []),
    ],
)
def test_instances_are_absent_beside_others_of_their_role(
    answered: list[bool | None], absent: list[int]
) -> None:
    rows = [
        InstanceFacts(f"p:{number}", "prefill", "starting", has_answered=one)
        for number, one in enumerate(answered)
    ]
    rows.append(InstanceFacts("d:0", "decode", "ready", has_answered=True))
    assert [row.address for row in GatewayFacts("g:1", instances=rows).absent] == [f"p:{n}" for n in absent]
    assert GatewayFacts("g:1").absent == []


def test_only_200_is_an_answer() -> None:
    assert Shot(200).is_answered and not Shot(503).is_answered and not Shot().is_answered


def test_a_trouble_is_not_fine() -> None:
    assert Reach().is_fine and not Reach(Trouble.SILENT, "no answer").is_fine
