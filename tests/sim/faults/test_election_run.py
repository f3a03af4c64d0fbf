# SPDX-License-Identifier: Apache-2.0
"""Masters that elect a leader: a short sweep, and proof that the checkers detect bugs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mooncake.sim.faults.election_run import ElectionRun
from mooncake.sim.faults.invariants import Invariant, Violation
from mooncake.store.ha.election import Election
from tests.sim.faults.masters_bugs import (
    counts_only_its_own_lease,
    forgets_lists_that_may_be_in_the_record_yet,
)


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 10):
        run = ElectionRun(seed)
        run.run()
        assert run.counts["terms"] > 0, f"seed {seed}"


def test_the_worlds_have_takeovers_and_acknowledgements() -> None:
    terms = acknowledged = num_mixed = 0
    for seed in range(20):
        run = ElectionRun(seed)
        num_mixed += len({voter.lease_s for voter in run.voters.values()}) > 1
        run.run()
        terms += run.counts["terms"]
        acknowledged += run.counts["acknowledged"]
    assert terms > 60 and acknowledged > 1000 and num_mixed > 2, (terms, acknowledged, num_mixed)


def test_a_seed_is_one_history() -> None:
    first, second = ElectionRun(5), ElectionRun(5)
    first.run()
    second.run()
    assert first.kernel.trace == second.kernel.trace and first.counts == second.counts


# Each bug is plausible; a sweep must find it.


def acts_until_it_is_notified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Election, "leads", lambda self, now: self.is_leading)


def takes_over_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Election, "_may_lead_at", lambda self: self._seen_at)


def waits_for_no_standby(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Election, "eligible", lambda self: {})


def assumes_that_it_has_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Election, "_is_complete", True)


def never_leads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Election, "leads", lambda self, now: False)


@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        (acts_until_it_is_notified, Invariant.LEADER),
        (takes_over_at_once, Invariant.LEADER),
        (waits_for_no_standby, Invariant.SUCCESSION),
        (assumes_that_it_has_everything, Invariant.SUCCESSION),
        (counts_only_its_own_lease, Invariant.LEADER),
        (forgets_lists_that_may_be_in_the_record_yet, Invariant.SUCCESSION),
        (never_leads, Invariant.HEALTH),
    ],
)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], rule: Invariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(Violation, match="seed") as found:
        for seed in range(100):
            ElectionRun(seed).run()
    assert found.value.rule is rule
