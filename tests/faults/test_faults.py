# SPDX-License-Identifier: Apache-2.0
"""A short slice of ``scripts/faults``: a few seeds that between them have every kind of fault."""

from __future__ import annotations

import itertools

import pytest

from tests.faults.plan import AREA_BYTES, KINDS, Plan, draw
from tests.faults.run import run

SLICE = (26, 69)


@pytest.mark.processes
@pytest.mark.parametrize("seed", SLICE)
def test_every_batch_ends_in_time_and_what_is_done_is_right(seed: int) -> None:
    outcome = run(draw(seed))
    assert not outcome.wrong, f"seed {seed} (scripts/faults --first {seed} --seeds 1): {outcome.wrong}"
    assert outcome.counts["ok"] > 0, outcome.counts


def test_the_slice_has_every_kind_of_fault() -> None:
    assert {fault.kind for seed in SLICE for fault in draw(seed).faults} == set(KINDS)


def test_a_seed_is_a_plan() -> None:
    plans: list[Plan] = [draw(seed) for seed in range(1, 200)]
    assert plans == [draw(seed) for seed in range(1, 200)]
    for plan in plans:
        for transfer in (transfer for transfers in plan.transfers for transfer in transfers):
            ends = sorted((at, at + length) for at, length in transfer.ranges)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
            assert ends[-1][1] <= AREA_BYTES and transfer.peer < plan.num_peers
