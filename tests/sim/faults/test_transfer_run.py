# SPDX-License-Identifier: Apache-2.0
"""Transfers over links that fail: a short sweep, and proof that the checkers detect bugs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from mooncake.sim.faults import transfer_run
from mooncake.sim.faults.invariants import Invariant, Violation
from mooncake.sim.faults.transfer_run import LinkFaults, TransferRun
from mooncake.transfer import batch, rails

CALM = LinkFaults()
ROUGH = LinkFaults(
    down_every_s=1.0,
    silent_every_s=1.0,
    reset_every_s=0.5,
    kill_every_s=5.0,
    name_service_outage_every_s=5.0,
    half_frame_chance=0.01,
)


@pytest.mark.parametrize("seed", range(25))
def test_seeds(seed: int) -> None:
    TransferRun(seed, 50).run()


@pytest.mark.parametrize("seed", range(1000, 1005))
def test_everything_fails_at_once(seed: int) -> None:
    run = TransferRun(seed, 60, ROUGH)
    run.run()
    assert run.counts["done"] < run.counts["batches"]


@pytest.mark.parametrize(
    "seed",
    [
        5038,  # the name service came back 6e-13 s before a batch's deadline: a healthy link was blamed
        5387,  # the same, 3e-14 s before
    ],
)
def test_seeds_that_once_failed(seed: int) -> None:
    TransferRun(seed).run()


@pytest.mark.parametrize(("left_s", "is_blamed"), [(1e-13, False), (transfer_run.PLENTY_S, True)])
def test_links_answer_for_the_time_since_the_peer_was_found(left_s: float, is_blamed: bool) -> None:
    """A batch that times out breaks a promise only if it had plenty of time left for its move."""
    run = TransferRun(1, 0, CALM)
    run.run()
    run.kernel.run(run.kernel.now + 1.0)
    area = run._areas[0]
    target, now = run.targets[area.target_name], run.kernel.now
    if is_blamed:
        with pytest.raises(AssertionError, match="had no fault all the time"):
            run._check_need(area, target, transfer_run.TIMED_OUT, now, now + left_s)
    else:
        run._check_need(area, target, transfer_run.TIMED_OUT, now, now + left_s)


def test_without_faults_every_batch_arrives() -> None:
    for seed in range(5):
        run = TransferRun(seed, 50, CALM)
        run.run()
        assert run.counts["batches"] == run.counts["done"] >= 50
        all_rails = [mover.rails_to(target) for mover in run.movers for target in run.targets.values()]
        assert not any(known.story("masked") for known in all_rails)


def test_a_seed_is_one_history() -> None:
    first, second = TransferRun(5), TransferRun(5)
    first.run()
    second.run()
    assert first.kernel.trace == second.kernel.trace
    assert first.kernel.num_steps == second.kernel.num_steps and first.counts == second.counts


# Each bug is plausible; a sweep must find it.


def fences_nothing_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfer_run.SimInitiator, "fence", lambda self, target: None)


def never_takes_a_rail_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rails.Rails, "is_open", lambda self, path, now: not self.rails[path].is_masked)
    patch.setattr(rails.Rails, "first_to_unmask", lambda self, paths: paths[-1])


def forgets_a_piece_that_failed(patch: pytest.MonkeyPatch) -> None:
    ended = batch.Batch._ended

    def broken(self: batch.Batch, event: batch.PartDone, now: float) -> None:
        waiting = len(self._waiting)
        ended(self, event, now)
        if len(self._waiting) > waiting and self.is_sprayed:
            self._waiting.popleft()

    patch.setattr(batch.Batch, "_ended", broken)


def waits_for_a_part_until_the_deadline(patch: pytest.MonkeyPatch) -> None:
    send = batch.Batch._send

    def broken(self: batch.Batch, *rest: object) -> batch.Carry:
        carry = send(self, *rest)  # type: ignore[arg-type]
        return batch.Carry(carry.part, carry.path, carry.slices, self._deadline)

    patch.setattr(batch.Batch, "_send", broken)


def gives_up_at_the_first_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch, "RETRIED_STATUSES", frozenset[int]())


def has_no_patience_with_the_last(patch: pytest.MonkeyPatch) -> None:
    piece = batch._Piece.__init__

    class Forgetful(list[str]):
        def append(self, path: str) -> None:
            pass

    def broken(self: object, *rest: object, **named: object) -> None:
        piece(self, *rest, **named)  # type: ignore[arg-type]
        self.too_slow = Forgetful()  # type: ignore[attr-defined]

    patch.setattr(batch._Piece, "__init__", broken)


def loses_count_of_what_is_queued(patch: pytest.MonkeyPatch) -> None:
    def broken(self: rails.Rails, path: str, num_bytes: int) -> None:
        self.rails[path].num_under_way -= 1

    patch.setattr(rails.Rails, "dropped", broken)
    patch.setattr(rails.Rails, "failed", lambda self, path, num_bytes, *rest: broken(self, path, num_bytes))


def does_not_report_its_end(patch: pytest.MonkeyPatch) -> None:
    """A part that failed permanently is dropped, and the batch waits for it."""
    handle = batch.Batch.handle

    def broken(self: batch.Batch, event: object, now: float) -> object:
        effects = handle(self, event, now)  # type: ignore[arg-type]
        return [] if self._status == batch.TIMED_OUT else effects

    patch.setattr(batch.Batch, "handle", broken)


def gives_no_reason(patch: pytest.MonkeyPatch) -> None:
    fail = batch.Batch._fail

    def broken(self: batch.Batch, status: int, *rest: object) -> None:
        fail(self, 99, *rest)  # type: ignore[arg-type]

    patch.setattr(batch.Batch, "_fail", broken)


FLAPPING = LinkFaults(down_every_s=0.3, silent_every_s=1.0, outage_s=4.0)
LONG_SILENCE = LinkFaults(silent_every_s=2.0, outage_s=40.0)


@dataclasses.dataclass(frozen=True)
class Bug:
    """A bug that ``rule`` finds, in some seeds; in others another rule may detect it first."""

    plant: Callable[[pytest.MonkeyPatch], None]
    rule: Invariant
    faults: LinkFaults | None = None
    begin: int = 0
    """The first seed of the search."""


BUGS = (
    Bug(fences_nothing_off, Invariant.KEPT),
    Bug(never_takes_a_rail_back, Invariant.RETURN),
    Bug(forgets_a_piece_that_failed, Invariant.SLICES),
    Bug(waits_for_a_part_until_the_deadline, Invariant.BLAME, LONG_SILENCE),
    Bug(gives_up_at_the_first_failure, Invariant.BLAME),
    Bug(has_no_patience_with_the_last, Invariant.BLAME, FLAPPING, 88),  # rare: one seed in 200
    Bug(loses_count_of_what_is_queued, Invariant.CORE),
    Bug(does_not_report_its_end, Invariant.ENDS, begin=5),
    Bug(gives_no_reason, Invariant.STATUS),
)
RULES = {bug.rule for bug in BUGS}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_is_found_by_its_rule(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(bug.begin, bug.begin + 3):
        TransferRun(seed, 100, bug.faults).run()
    bug.plant(monkeypatch)
    for seed in range(bug.begin, 100):
        try:
            TransferRun(seed, 100, bug.faults).run()
        except Violation as violation:
            assert f"seed {seed} at" in str(violation)
            if violation.rule is bug.rule:
                return
    pytest.fail(f"{bug.plant.__name__} was not found by {bug.rule}")
