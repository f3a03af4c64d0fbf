"""Masters that elect one of them: a short sweep, and proof that the checkers see."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mooncake.sim.election_run import ElectionRun
from mooncake.sim.rules import Violation
from mooncake.store.election import Election


@pytest.mark.parametrize("seed", range(20))
def test_seeds(seed: int) -> None:
    run = ElectionRun(seed)
    run.run()
    assert run.counts["terms"] > 0


def test_a_seed_is_one_history() -> None:
    first, second = ElectionRun(5), ElectionRun(5)
    first.run()
    second.run()
    assert first.kernel.trace == second.kernel.trace and first.counts == second.counts


# Each bug is one that somebody could write; a sweep must find it.


def acts_until_it_is_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Election, "leads", lambda self, now: self.is_leading)


def takes_over_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Election, "_may_lead_at", lambda self: self._seen_at)


def asks_no_standby(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Election, "eligible", lambda self: {})


def believes_that_it_has_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Election, "_is_complete", True)


@pytest.mark.parametrize(
    "bug",
    [acts_until_it_is_told, takes_over_at_once, asks_no_standby, believes_that_it_has_everything],
)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(Violation, match="seed"):
        for seed in range(30):
            ElectionRun(seed).run()
