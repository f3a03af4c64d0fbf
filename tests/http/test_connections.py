# SPDX-License-Identifier: Apache-2.0
"""The time limits of a connection, and the order in which connections are dropped when there are too many."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake.http.connections import (
    MIB,
    ConnectionPhase,
    ConnectionState,
    ConnectionTable,
    Deadlines,
)

ALLOWED = Deadlines(header_s=10.0, body_s=30.0, send_s=20.0, idle_s=75.0, refused_s=2.0, header_bytes=100)


def reasons(connections: ConnectionTable, now: float) -> list[str]:
    return [reason for _, reason in connections.overdue(now)]


def test_who_sends_nothing_or_half_a_header_is_overdue() -> None:
    connections = ConnectionTable(ALLOWED, 10)
    silent, half = connections.opened(0.0), connections.opened(0.0)
    for second in range(9):
        connections.received(half, 1, float(second))
    assert reasons(connections, 9.9) == []
    assert connections.overdue(10.0) == [(silent, "header"), (half, "header")], "trickling does not help"


def test_a_body_may_take_longer_the_larger_it_is() -> None:
    connections = ConnectionTable(ALLOWED, 10)
    one = connections.opened(0.0)
    connections.header_received(one, 5.0)
    assert reasons(connections, 34.9) == [] and reasons(connections, 35.0) == ["body"]
    connections.received(one, 4 * MIB, 34.0)
    assert reasons(connections, 38.9) == [] and reasons(connections, 39.0) == ["body"]


def test_an_answer_takes_as_long_as_it_takes_and_then_the_connection_may_rest() -> None:
    connections = ConnectionTable(ALLOWED, 10)
    one = connections.opened(0.0)
    connections.header_received(one, 1.0)
    connections.body_received(one, 2.0)
    assert reasons(connections, 10_000.0) == [], "that is the application's affair"
    connections.response_sent(one, 10_000.0)
    assert reasons(connections, 10_074.0) == [] and reasons(connections, 10_075.0) == ["idle"]
    connections.received(one, 1, 10_074.0)
    assert reasons(connections, 10_083.0) == [] and reasons(connections, 10_084.0) == ["header"]


def test_a_second_request_in_the_pipeline_is_served_like_the_first() -> None:
    connections = ConnectionTable(ALLOWED, 10)
    one = connections.opened(0.0)
    for _ in range(2):
        connections.header_received(one, 1.0)
        connections.body_received(one, 1.0)
    connections.response_sent(one, 2.0)
    assert connections.count(ConnectionPhase.ANSWER) == 1 and reasons(connections, 1000.0) == []
    connections.response_sent(one, 3.0)
    assert connections.count(ConnectionPhase.IDLE) == 1


def test_who_goes_on_sending_a_refused_body_is_cut_soon() -> None:
    connections = ConnectionTable(ALLOWED, 10)
    one = connections.opened(0.0)
    connections.header_received(one, 1.0)
    connections.response_sent(one, 2.0)
    connections.received(one, MIB, 3.0)
    assert reasons(connections, 3.9) == [] and reasons(connections, 4.0) == ["refused"]
    connections.body_received(one, 3.5)
    assert reasons(connections, 4.0) == [], "all of it came: the connection is as good as any"


def test_who_reads_nothing_is_overdue_and_who_reads_slowly_is_not() -> None:
    connections = ConnectionTable(ALLOWED, 10)
    one = connections.opened(0.0)
    connections.header_received(one, 0.0)
    connections.body_received(one, 0.0)
    connections.read(one, 0, 1000, 5.0)
    assert reasons(connections, 19.9) == [] and reasons(connections, 20.0) == ["unread"]
    connections.read(one, 1, 5000, 19.0)
    assert reasons(connections, 38.9) == [], "it took a byte, though more is waiting than before"
    connections.read(one, 1, 9000, 38.0)
    assert reasons(connections, 39.0) == ["unread"]
    connections.read(one, 9001, 0, 39.0)
    assert reasons(connections, 1000.0) == [], "nothing is there to be read"


def test_a_header_and_a_trailer_have_a_bound() -> None:
    connections = ConnectionTable(ALLOWED, 10)
    one = connections.opened(0.0)
    connections.received(one, 99, 1.0)
    assert connections.header_room(one) == 1
    connections.received(one, 10, 1.0)
    assert connections.header_room(one) == 0
    connections.header_received(one, 1.0)
    connections.received(one, 10_000, 1.0)
    connections.body_part_received(one)
    assert connections.header_room(one) == 100, "a body is not limited here"
    connections.received(one, 60, 1.0)
    assert connections.header_room(one) == 40, "this may be a trailer"
    connections.body_received(one, 1.0)
    connections.received(one, 90, 1.0)
    assert connections.header_room(one) == 10, "the next header, while this request runs"
    connections.response_sent(one, 2.0)
    connections.received(one, 9, 3.0)
    assert connections.header_room(one) == 1


def test_room_is_made_by_who_has_asked_for_nothing() -> None:
    connections = ConnectionTable(ALLOWED, 5)
    served, idle, body, old, new = (connections.opened(float(number)) for number in range(5))
    for one in (served, idle, body):
        connections.header_received(one, 5.0)
    for one in (served, idle):
        connections.body_received(one, 5.0)
    connections.response_sent(idle, 6.0)
    assert len(connections) == 5
    for expected in (old, new, idle):
        assert connections.victim(7.0) is expected
        connections.closed(expected)
    connections.received(body, 1, 7.0)
    assert connections.victim(7.4) is None, "it sends its body as fast as it can"
    assert connections.victim(7.5) is body
    connections.closed(body)
    assert connections.victim(1000.0) is None, "who is being served stays"
    assert len(connections) == 1


@pytest.mark.parametrize("most", [0, -1])
def test_there_is_always_room_for_one(most: int) -> None:
    assert ConnectionTable(ALLOWED, most).most == 1


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.connections = ConnectionTable(ALLOWED, 4)
        self.known: list[ConnectionState] = []

    @rule(step=st.floats(0.0, 30.0))
    def wait(self, step: float) -> None:
        self.now += step
        for one, _ in self.connections.overdue(self.now):
            self.connections.closed(one)
        assert not self.connections.overdue(self.now)

    @rule()
    def open(self) -> None:
        if self.connections.is_full:
            victim = self.connections.victim(self.now)
            if victim is None:
                return
            self.connections.closed(victim)
        self.known.append(self.connections.opened(self.now))

    @rule(
        which=st.integers(0, 50),
        what=st.sampled_from(["header_received", "body_received", "response_sent", "closed"]),
    )
    def happen(self, which: int, what: str) -> None:
        if self.known:
            one = self.known[which % len(self.known)]
            if what == "closed":
                self.connections.closed(one)
            elif not one.is_over or what != "header_received":
                getattr(self.connections, what)(one, self.now)

    @rule(which=st.integers(0, 50), num=st.integers(0, 200))
    def receive(self, which: int, num: int) -> None:
        if self.known:
            self.connections.received(self.known[which % len(self.known)], num, self.now)

    @invariant()
    def holds(self) -> None:
        self.connections.check()
        assert len(self.connections) <= 4


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
