"""A tenth of ``scripts/integrity``."""

from __future__ import annotations

import pytest

from tests.integrity.flips import KINDS


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_no_changed_bit_is_read_as_good(kind: str) -> None:
    outcome = KINDS[kind](100, 1)
    assert not outcome.wrong, f"scripts/integrity {kind} --flips 100 --seed 1: {outcome.wrong}"
    assert outcome.num_flips >= 100 and outcome.counts["miss"] > 0
