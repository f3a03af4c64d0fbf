# SPDX-License-Identifier: Apache-2.0
"""Every rule of the store's world finds a bug, and what triggers the bugs is harmless without them."""

from __future__ import annotations

import re

import pytest

from mooncake.sim.faults.invariants import Invariant, Violation
from mooncake.sim.faults.store_run import StoreRun
from tests.sim.faults.planted_bugs import BUGS, Bug
from tests.sim.faults.test_transfer_run import RULES as TRANSFER_RULES

MAX_SEEDS = 100
MIXES = list(dict.fromkeys((bug.faults, bug.load) for bug in BUGS if bug.faults is not None))


def test_every_rule_has_a_bug() -> None:
    assert {bug.rule for bug in BUGS} | TRANSFER_RULES == set(Invariant)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_by_its_rule(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    for seed in range(bug.begin, MAX_SEEDS):
        try:
            StoreRun(seed, bug.faults, bug.load).run()
        except Violation as violation:
            assert re.match(rf"seed {seed} at ", str(violation))
            if violation.rule is bug.rule:
                return
    pytest.fail(f"{bug.name} was not found by {bug.rule}")


@pytest.mark.parametrize("number", range(len(MIXES)))
def test_without_the_bug_nothing_is_violated(number: int) -> None:
    faults, load = MIXES[number]
    StoreRun(1000, faults, load).run()
