# SPDX-License-Identifier: Apache-2.0
"""A tenth of ``scripts/integrity``."""

from __future__ import annotations

import pytest

from tests.integrity import logs
from tests.integrity.flips import KINDS


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_is_read_as_good(kind: str) -> None:
    outcome = KINDS[kind](100, 1)
    assert not outcome.wrong, f"scripts/integrity {kind} --flips 100 --seed 1: {outcome.wrong}"
    assert outcome.num_flips >= 100 and outcome.counts["miss"] > 0


@pytest.mark.parametrize("kind", logs.KINDS)
def test_no_durable_object_is_lost_with_a_damaged_log_or_a_loss_of_power(kind: str) -> None:
    outcome = logs.KINDS[kind](60, 1)
    assert not outcome.wrong, f"scripts/integrity {kind} --flips 60 --seed 1: {outcome.wrong}"
    assert outcome.num_flips >= 60 and outcome.counts["durable objects looked at"] > 500


def test_every_flipped_bit_of_a_log_is_refused_with_its_offset() -> None:
    outcome = logs.flip_oplog(60, 2)
    assert outcome.counts["refused and repaired"] == 60 and not outcome.wrong
