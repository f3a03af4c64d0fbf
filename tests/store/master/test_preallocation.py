# SPDX-License-Identifier: Apache-2.0
"""Preallocated space. Times as in ``test_master.py``: 30 s to write, 5 s of grace."""

from __future__ import annotations

import pytest

from mooncake.store import messages as m
from mooncake.store.master.log_records import SpaceHeld
from mooncake.store.master.master import Master
from mooncake.store.master.preallocation import MAX_PIECES, PREALLOCATED_SHARE
from tests.store.conftest import GRACE_S, PUT_S, SETTINGS, Voice

POOL = 65536


def preallocated(
    voice: Voice, count: int = 4, size_bytes: int = 128, host: str = "h", key: str = "first"
) -> m.PreallocatedSpace | None:
    """Requested with a put that is aborted at once."""
    message = m.PutStart(900, host, [key], [64], [64], num_pieces=count, piece_bytes=size_bytes)
    started = voice.say(message)
    assert isinstance(started, m.PutStarted)
    reserved = started.reserved[0]
    if reserved is not None:
        voice.say(m.PutAbort([key], [reserved.object_id]))
    given = started.advance
    assert given is None or given.size_bytes == size_bytes
    return given


def places(given: m.PreallocatedSpace | None) -> list[tuple[str, int]]:
    assert given is not None
    return [(one.segment, one.address) for one in given.replicas]


def test_pieces_are_reserved_until_their_time_and_the_grace_are_over(voice: Voice) -> None:
    voice.mount("a", POOL)
    given = preallocated(voice)
    assert given is not None and given.put_s == PUT_S
    assert len({at for _, at in places(given)}) == 4
    voice.keep_alive(PUT_S + GRACE_S - 1)
    assert voice.allocated_bytes == 4 * 128 or voice.allocated_bytes == 4 * 128 + 64
    voice.keep_alive(2)
    assert voice.allocated_bytes == 0


def test_pieces_are_on_the_own_host_first(voice: Voice) -> None:
    voice.mount("a", POOL, host="left")
    voice.mount("b", 2 * POOL, host="right")
    assert {name for name, _ in places(preallocated(voice, host="left"))} == {"a"}
    assert {name for name, _ in places(preallocated(voice, host="right", key="second"))} == {"b"}


def test_only_a_share_of_a_segment_is_preallocated(voice: Voice) -> None:
    voice.mount("a", POOL)
    share = int(POOL * PREALLOCATED_SHARE)
    assert len(places(preallocated(voice, 1000, 64))) == MAX_PIECES == share // 64
    assert preallocated(voice, 1, 64, key="second") is None
    voice.keep_alive(PUT_S + 1)
    assert len(places(preallocated(voice, 1, 64, key="third"))) == 1, "unused space no longer counts"


def test_no_piece_is_allocated_where_little_is_free_and_nothing_is_evicted_for_one(voice: Voice) -> None:
    voice.mount("a", POOL)
    voice.put("old", size_bytes=POOL - POOL // 32)
    voice.wait(0.5)
    assert preallocated(voice) is None
    assert voice.inspect("old") is not None


@pytest.mark.parametrize("size_bytes", [0, -1, (64 << 10) + 1])
def test_pieces_have_a_size_that_small_puts_have(voice: Voice, size_bytes: int) -> None:
    voice.mount("a", 1 << 22)
    assert preallocated(voice, 1, size_bytes) is None


def test_a_segment_that_is_gone_takes_its_pieces_with_it(voice: Voice) -> None:
    voice.mount("a", POOL)
    assert preallocated(voice) is not None
    voice.lose("node a")
    voice.mount("a", POOL, epoch=8)
    assert voice.allocated_bytes == 0
    voice.keep_alive(PUT_S + GRACE_S + 1, epoch=8)
    assert voice.allocated_bytes == 0


def test_a_successor_holds_the_space_as_long_as_a_client_may_write_it(voice: Voice) -> None:
    voice.mount("a", POOL)
    given = places(preallocated(voice))
    held = [place for record in voice.records if isinstance(record, SpaceHeld) for place in record.places]
    assert {offset + (1 << 20) for _, offset in held} >= {at for _, at in given}
    for records in (voice.records, voice.master.snapshot()):
        successor = Master(SETTINGS)
        successor.restore(records, voice.now)
        successor.check()
        allocations = successor.segments.mounted["a"].allocator.allocations
        assert {at - (1 << 20) for _, at in given} <= allocations.keys()
