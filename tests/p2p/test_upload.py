# SPDX-License-Identifier: Apache-2.0
"""The sending side: slots, the choice among candidates, limits, requesters that vanish."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest

from mooncake.machine import Wake
from mooncake.p2p import upload as u
from mooncake.p2p.token_bucket import TokenBucket
from mooncake.p2p.upload import UploadQueue
from mooncake.sim.kernel import Kernel, Timer


@dataclass
class Reader:
    """A reader in the simulation; ``pause_s`` after it is declined once more."""

    number: int
    pause_s: float = 0.1


def make(num_slots: int = 2, rate: float = 0.0, lease_s: float = 5.0, num_chunks: int = 8) -> UploadQueue:
    queue = UploadQueue(num_slots, TokenBucket(rate, 100.0), lease_s, max_waiting=20)
    queue.add("v", [100] * num_chunks)
    return queue


def handle(queue: UploadQueue, event: u.UploadEvent | Wake, now: float) -> list[u.UploadEffect]:
    """Handle an event; slots are filled at once."""
    effects = queue.handle(event, now)
    for one in effects:
        if isinstance(one, u.SendChunk):
            assert queue.handle(u.SlotFilled(one.lease), now) == []
    return effects


def declined(effects: list[u.UploadEffect]) -> list[tuple[int, str]]:
    return [(one.request_id, one.refusal.code) for one in effects if isinstance(one, u.DeclineUpload)]


def asked(request_id: int, *candidates: int, requester: int = 1) -> u.UploadAsked:
    return u.UploadAsked(request_id, requester, "v", candidates)


def sent(effects: list[u.UploadEffect]) -> list[tuple[int, int]]:
    return [(one.request_id, one.chunk) for one in effects if isinstance(one, u.SendChunk)]


def test_the_least_sent_candidate_is_chosen_and_the_requesters_order_decides_ties() -> None:
    queue = make(num_slots=4)
    assert sent(handle(queue, asked(1, 3, 4), 0.0)) == [(1, 3)]
    assert sent(handle(queue, asked(2, 3, 4, requester=2), 0.0)) == [(2, 4)]
    assert sent(handle(queue, asked(3, 4, 3, 5, requester=3), 0.0)) == [(3, 5)]
    assert queue.num_sent("v")[3:6] == [1, 1, 1]
    queue.check()


def test_requests_wait_for_a_slot_and_only_its_reader_returns_one() -> None:
    queue = make(num_slots=1)
    (first,) = handle(queue, asked(1, 0), 0.0)
    assert isinstance(first, u.SendChunk)
    assert handle(queue, asked(2, 1, requester=2), 0.0) == []
    assert handle(queue, u.SlotReturned(2, first.lease), 0.1) == []
    assert sent(handle(queue, u.SlotReturned(1, first.lease), 0.2)) == [(2, 1)]
    assert handle(queue, u.SlotReturned(1, first.lease), 0.3) == []
    queue.check()


def test_a_lease_that_is_not_returned_ends() -> None:
    queue = make(num_slots=1, lease_s=5.0)
    handle(queue, asked(1, 0), 0.0)
    handle(queue, asked(2, 1), 0.0)
    assert queue.deadline() == 5.0
    assert handle(queue, asked(3, 1, requester=2), 1.0) == []
    assert handle(queue, Wake(), 4.9) == []
    effects = handle(queue, Wake(), 5.0)
    assert declined(effects) == [(2, "busy")] and sent(effects) == [(3, 1)]  # as old as the lease itself
    assert queue.story("") and queue.num_copies("v") == 0


def test_a_requester_that_is_gone_leaves_no_slot_and_no_request() -> None:
    queue = make(num_slots=1)
    handle(queue, asked(1, 0), 0.0)
    handle(queue, asked(2, 1), 0.0)
    handle(queue, asked(3, 2, requester=2), 0.0)
    assert sent(handle(queue, u.RequesterGone(1), 0.1)) == [(3, 2)]
    queue.check()


def test_a_requester_has_a_bounded_number_of_requests_and_so_have_all() -> None:
    queue = make(num_slots=1)
    handle(queue, asked(0, 0, requester=99), 0.0)
    effects = [one for i in range(9) for one in handle(queue, asked(i + 1, 1), 0.0)]
    assert [one.refusal.code for one in effects if isinstance(one, u.DeclineUpload)] == ["too_many"]
    effects = [one for i in range(20) for one in handle(queue, asked(i + 20, 1, requester=i + 2), 0.0)]
    assert {one.refusal.code for one in effects if isinstance(one, u.DeclineUpload)} == {"busy"}
    queue.check()


def test_absent_chunks_and_versions_are_declined() -> None:
    queue = make()
    (effect,) = handle(queue, asked(1), 0.0)
    assert isinstance(effect, u.DeclineUpload) and effect.refusal.code == "absent"
    (effect,) = handle(queue, u.UploadAsked(2, 1, "other", (0,)), 0.0)
    assert isinstance(effect, u.DeclineUpload)


def test_a_dropped_version_declines_what_waits() -> None:
    queue = make(num_slots=1)
    (first,) = handle(queue, asked(1, 0), 0.0)
    handle(queue, asked(2, 1), 0.0)
    assert [one.request_id for one in queue.remove("v")] == [2]
    assert isinstance(first, u.SendChunk)
    handle(queue, u.SlotReturned(1, first.lease), 0.1)
    queue.check()


def test_bytes_are_sent_at_the_rate() -> None:
    queue = make(num_slots=8, rate=100.0)
    assert len(sent(handle(queue, asked(1, 0), 0.0))) == 1
    assert handle(queue, asked(2, 1, requester=2), 0.0) == []
    assert handle(queue, asked(3, 2, requester=3), 0.0) == []
    deadline = queue.deadline()
    assert deadline is not None and 0.0 < deadline <= 1.1
    times: list[float] = []
    while len(times) < 2:
        now = queue.deadline()
        assert now is not None
        times += [now] * len(sent(handle(queue, Wake(), now)))
    assert times[1] - times[0] >= 0.9


def test_copies_are_counted_when_they_were_read() -> None:
    queue = make(num_slots=8, num_chunks=2)
    effects = handle(queue, asked(1, 0), 0.0) + handle(queue, asked(2, 1), 0.0)
    assert queue.num_copies("v") == 0
    for one in effects:
        assert isinstance(one, u.SendChunk)
        handle(queue, u.SlotReturned(1, one.lease, is_read=one.chunk == 0), 0.0)
    assert queue.num_copies("v") == 0  # one of them came to nothing
    (again,) = handle(queue, asked(3, 1), 0.0)
    assert isinstance(again, u.SendChunk)
    handle(queue, u.SlotReturned(1, again.lease, is_read=True), 0.0)
    assert queue.num_copies("v") == 1


def test_a_requester_leaves_slots_to_others() -> None:
    queue = make(num_slots=8)
    for i in range(5):
        handle(queue, asked(i, i), 0.0)
    assert sum(queue.num_sent("v")) == 2
    (first,) = handle(queue, asked(9, 7, requester=2), 0.0)
    assert isinstance(first, u.SendChunk)
    assert queue.deadline() == 5.0  # nothing to do before: what waits has its share
    assert sent(handle(queue, u.SlotReturned(1, 1), 0.1)) == [(2, 2)]
    queue.check()


def test_a_request_that_waited_too_long_is_declined() -> None:
    queue = make(num_slots=1, lease_s=5.0)
    queue.handle(asked(1, 0), 0.0)  # its slot is never filled
    handle(queue, asked(2, 1, requester=2), 1.0)
    assert queue.deadline() == 6.0 and handle(queue, Wake(), 5.9) == []
    assert declined(handle(queue, Wake(), 6.0)) == [(2, "busy")] and queue.deadline() is None
    queue.check()


def test_a_slot_that_is_written_to_is_not_given_to_another() -> None:
    queue = make(num_slots=1)
    (send,) = queue.handle(asked(1, 0), 0.0)
    assert isinstance(send, u.SendChunk)
    queue.handle(asked(2, 1, requester=2), 0.0)
    for event in (u.SlotReturned(1, send.lease, is_read=True), u.RequesterGone(1), Wake()):
        assert queue.handle(event, 1.0) == []
    queue.check()
    assert sent(queue.handle(u.SlotFilled(send.lease), 1.1)) == [(2, 1)]
    assert queue.handle(u.SlotFilled(send.lease), 1.2) == [] and queue.num_copies("v") == 0
    queue.check()


def test_a_request_that_would_wait_for_long_is_declined_at_once() -> None:
    queue = make(num_slots=8, rate=100.0, lease_s=10.0)
    effects = [one for i in range(9) for one in handle(queue, asked(i, 0, requester=i), 0.0)]
    assert [request_id for request_id, code in declined(effects) if code == "busy"] == [7, 8]
    assert len(sent(effects)) == 1
    queue.check()


@pytest.mark.parametrize(("num_readers", "rate"), [(40, 10e6), (60, 5e6)])
def test_more_readers_than_the_rate_serves_get_what_it_gives(num_readers: int, rate: float) -> None:
    """Readers that give up after a time, and pause when they are declined, as live ones do."""
    chunk_bytes, until_s = 4 << 20, 200.0
    kernel = Kernel(3)
    queue = UploadQueue(16, TokenBucket(rate, 4 << 20), 30.0)
    queue.add("v", [chunk_bytes] * 5000)
    open_requests: dict[int, Reader] = {}
    counts = {"useful": 0, "in vain": 0}
    timers: list[Timer] = []

    def post(event: u.UploadEvent | Wake) -> None:
        for one in handle(queue, event, kernel.now):
            reader = open_requests.pop(one.request_id, None)
            if isinstance(one, u.SendChunk):
                counts["in vain" if reader is None else "useful"] += 1
                if reader is not None:
                    reader.pause_s = 0.1
                    back = u.SlotReturned(reader.number, one.lease, is_read=True)
                    kernel.after(0.2, functools.partial(post, back))
                    kernel.after(0.2, functools.partial(ask, reader))
            elif reader is not None:
                kernel.after(reader.pause_s, functools.partial(ask, reader))
                reader.pause_s = min(1.0, 2 * reader.pause_s)
        queue.check()
        while timers:
            timers.pop().cancel()
        deadline = queue.deadline()
        if deadline is not None:
            timers.append(kernel.after(max(0.001, deadline - kernel.now), lambda: post(Wake())))

    def ask(reader: Reader) -> None:
        request_id = next(ids)
        open_requests[request_id] = reader
        kernel.after(30.0, lambda: give_up(request_id))
        candidates = tuple(kernel.random.sample(range(5000), 8))
        post(u.UploadAsked(request_id, reader.number, "v", candidates))

    def give_up(request_id: int) -> None:
        reader = open_requests.pop(request_id, None)
        if reader is not None:
            ask(reader)

    ids = itertools.count(1)
    for number in range(1, num_readers + 1):
        for _ in range(2):
            kernel.after(kernel.random.random(), functools.partial(ask, Reader(number)))
    kernel.run(until=until_s)
    possible = until_s * rate / chunk_bytes
    assert counts["useful"] > 0.9 * possible and counts["in vain"] < 0.02 * possible, counts
