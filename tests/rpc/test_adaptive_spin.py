# SPDX-License-Identifier: Apache-2.0
"""Spinning is worthwhile while no other program wants the core, and while replies come in time."""

from __future__ import annotations

import pytest

from mooncake.rpc.adaptive_spin import FIRST_REST_S, GAP_S, MAX_REST_S, SAVED_S, WINDOW_S, AdaptiveSpin

US = 1e-6


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def poll_of(clock: Clock, *steps_s: float) -> tuple[list[int], object]:
    """A poll that takes these times, one after the other, and finds something at the last one."""
    left = list(steps_s)
    asked: list[int] = []

    def poll(timeout_ms: int) -> bool:
        asked.append(timeout_ms)
        clock.now += left.pop(0)
        return not left

    return asked, poll


@pytest.mark.parametrize(
    ("lost_s", "num_missed", "is_worthwhile"),
    [(0.0, 0, True), (0.19, 0, True), (0.21, 0, False), (0.0, 3, True), (0.0, 4, False)],
    ids=["alone", "hardly disturbed", "loses its core", "saves what it wastes", "wastes more"],
)
def test_is_worthwhile_while_it_keeps_its_core_and_finds_replies(
    clock: Clock, lost_s: float, num_missed: int, is_worthwhile: bool
) -> None:
    spin = AdaptiveSpin(clock)
    for number in range(12):
        assert spin.is_worthwhile, "it is judged at the end of a window"
        wasted_s = 3 * SAVED_S if number < num_missed else -SAVED_S
        spin.spun(WINDOW_S / 12, lost_s * WINDOW_S / 12, wasted_s)
    spin.spun(US)
    assert spin.is_worthwhile is is_worthwhile


def test_quick_replies_outweigh_slow_ones_that_took_more_time(clock: Clock) -> None:
    """One wait in vain takes longer than ten quick replies; a row of puts begins with one."""
    spin = AdaptiveSpin(clock)
    while clock.now < 3 * WINDOW_S:
        for steps in ([US] * 400, *[[US] * 20] * 10):
            _, poll = poll_of(clock, *steps)
            spin.wait(poll)  # type: ignore[arg-type]
    assert spin.is_worthwhile


def test_is_tried_again_ever_more_rarely_and_at_once_after_a_success(clock: Clock) -> None:
    spin = AdaptiveSpin(clock)
    rests_s = []
    for _ in range(8):
        spin.spun(WINDOW_S, wasted_s=US)
        began = clock.now
        while not spin.is_worthwhile:
            clock.now += 0.01
        rests_s.append(clock.now - began)
    assert rests_s[0] == pytest.approx(FIRST_REST_S, abs=0.011)
    assert rests_s[1] == pytest.approx(2 * FIRST_REST_S, abs=0.011)
    assert rests_s[-2:] == pytest.approx([MAX_REST_S] * 2, abs=0.011)
    spin.spun(WINDOW_S)
    spin.spun(WINDOW_S, wasted_s=US)
    clock.now += 1.01 * FIRST_REST_S
    assert spin.is_worthwhile


def test_the_turn_of_the_peer_is_no_gap_and_that_of_another_program_is_one(clock: Clock) -> None:
    spin = AdaptiveSpin(clock)
    for _ in range(200):
        asked, poll = poll_of(clock, US, 0.5 * GAP_S, US)
        assert spin.wait(poll, limit_s=1.0)  # type: ignore[arg-type]
        assert set(asked) == {0}, "it never waits"
    assert spin.is_worthwhile
    judgements = []
    for steps in ([US, 3 * WINDOW_S, US], *[[US] * 20] * 250):
        _, poll = poll_of(clock, *steps)
        assert spin.wait(poll, limit_s=1.0)  # type: ignore[arg-type]
        judgements.append(spin.is_worthwhile)
    assert all(judgements), "a single one decides nothing, however long it is"
    num_gaps = 0
    while spin.is_worthwhile and num_gaps < 6:
        _, poll = poll_of(clock, US, 3 * WINDOW_S, US)
        assert spin.wait(poll, limit_s=1.0)  # type: ignore[arg-type]
        num_gaps += 1
    assert 1 < num_gaps < 6


def test_a_reply_that_came_while_another_program_had_the_core_is_no_success(clock: Clock) -> None:
    spin = AdaptiveSpin(clock)
    while spin.is_worthwhile and clock.now < 1.0:
        _, poll = poll_of(clock, US, 0.9 * GAP_S)
        assert spin.wait(poll)  # type: ignore[arg-type]
    assert clock.now < 1.0


def test_a_spin_ends_at_its_limit_and_counts_as_useless(clock: Clock) -> None:
    spin = AdaptiveSpin(clock)
    while spin.is_worthwhile:
        _, poll = poll_of(clock, *[100 * US] * 9)
        began = clock.now
        assert not spin.wait(poll, limit_s=350 * US)  # type: ignore[arg-type]
        assert clock.now - began == pytest.approx(400 * US)
    assert clock.now == pytest.approx(WINDOW_S, rel=0.1)
