# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import array
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.errors import InvalidArgument
from mooncake.transfer.batch import (
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    OK,
    RETRIED_STATUSES,
    Batch,
    Carry,
    Finish,
    PartDone,
    StartBatch,
    piece_bytes_of,
    transfer_columns,
)
from mooncake.transfer.rails import Rails
from mooncake.transfer.transports import Status

PEER_LOST, DENIED, NO_PATH = 1, 2, 77


def flags(*values: int) -> npt.NDArray[np.bool_]:
    return np.array(values, dtype=np.bool_)


def rows(carry: Carry | Finish) -> list[int] | None:
    assert isinstance(carry, Carry)
    return None if carry.slices is None else carry.slices.tolist()


def test_the_statuses_agree_with_the_native_ones() -> None:
    assert Status.OK == OK
    assert {Status.PEER_LOST, Status.PROTOCOL_ERROR} == RETRIED_STATUSES
    assert Status.TIMED_OUT == TIMED_OUT


def test_one_path_carries_all() -> None:
    batch = Batch(3, {"shm": None, "tcp": None}, deadline=10, no_path=NO_PATH, has_checksums=True)
    (carry,) = batch.handle(StartBatch(), 0)
    assert carry == Carry(0, "shm", None, 10)
    batch.check()
    sums = np.array([1, 2, 3], dtype=np.uint32)
    (end,) = batch.handle(PartDone(0, OK, num_bytes=30, checksums=sums), 1)
    assert isinstance(end, Finish)
    assert (end.status, end.failed_slice, end.num_bytes) == (OK, -1, 30)
    assert end.checksums is not None and end.checksums.tolist() == [1, 2, 3]
    assert batch.story() == ["shm carries 3 slices", "shm ended with status 0"]
    batch.check()


def test_slices_are_dealt_to_the_first_path_that_can() -> None:
    batch = Batch(4, {"shm": flags(1, 0, 1, 0), "tcp": None}, 10, NO_PATH, has_checksums=True)
    first, second = batch.handle(StartBatch(), 0)
    assert (rows(first), rows(second)) == ([0, 2], [1, 3])
    assert batch.handle(PartDone(1, OK, num_bytes=5, checksums=np.array([11, 13], dtype=np.uint32)), 1) == []
    (end,) = batch.handle(PartDone(0, OK, num_bytes=7, checksums=np.array([10, 12], dtype=np.uint32)), 1)
    assert isinstance(end, Finish) and end.checksums is not None
    assert (end.status, end.num_bytes, end.checksums.tolist()) == (OK, 12, [10, 11, 12, 13])


def test_a_lost_path_is_replaced() -> None:
    batch = Batch(2, {"shm": flags(1, 1), "tcp": None}, 10, NO_PATH)
    (carry,) = batch.handle(StartBatch(), 0)
    assert carry == Carry(0, "shm", None, 10)
    (again,) = batch.handle(PartDone(0, PEER_LOST, 1), 5)
    assert again == Carry(1, "tcp", None, 10)
    batch.check()
    assert batch.handle(PartDone(1, OK, num_bytes=3), 6) == [Finish(OK, -1, 3, None)]
    assert "tcp carries 2 slices after shm" in batch.story("tcp")


def test_the_last_path_decides() -> None:
    batch = Batch(2, {"shm": None, "tcp": None}, 10, NO_PATH)
    batch.handle(StartBatch(), 0)
    batch.handle(PartDone(0, PEER_LOST, 0), 5)
    assert batch.handle(PartDone(1, PEER_LOST, 1), 6) == [Finish(PEER_LOST, 1, 0, None)]


def test_no_retry_after_the_deadline_or_for_a_refusal() -> None:
    for status, now in ((PEER_LOST, 10.0), (DENIED, 1.0)):
        batch = Batch(2, {"shm": None, "tcp": None}, 10, NO_PATH)
        batch.handle(StartBatch(), 0)
        assert batch.handle(PartDone(0, status, 1), now) == [Finish(status, 1, 0, None)]


def test_the_end_waits_for_every_part() -> None:
    """A failed batch still uses its memory while another part of it moves."""
    batch = Batch(4, {"shm": flags(0, 1, 0, 1), "tcp": None}, 10, NO_PATH)
    batch.handle(StartBatch(), 0)
    assert batch.handle(PartDone(0, DENIED, 1), 1) == []
    assert batch.handle(PartDone(1, OK, num_bytes=2), 2) == [Finish(DENIED, 3, 0, None)]


def test_a_slice_without_a_path() -> None:
    assert Batch(2, {}, 10, NO_PATH).handle(StartBatch(), 0) == [Finish(NO_PATH, 0, 0, None)]
    batch = Batch(2, {"shm": flags(1, 0)}, 10, NO_PATH)
    (carry,) = batch.handle(StartBatch(), 0)
    assert rows(carry) == [0]
    assert batch.handle(PartDone(0, OK, num_bytes=1), 1) == [Finish(NO_PATH, 1, 0, None)]


def test_nothing_to_move() -> None:
    (carry,) = Batch(0, {"shm": flags()}, 10, NO_PATH).handle(StartBatch(), 0)
    assert carry == Finish(OK, -1, 0, None)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), num_slices=st.integers(0, 12), num_paths=st.integers(0, 4))
def test_every_slice_arrives_once_or_the_batch_fails(seed: int, num_slices: int, num_paths: int) -> None:
    random = Random(seed)
    able = {
        f"p{i}": random.choice([None, flags(*(random.random() < 0.6 for _ in range(num_slices)))])
        for i in range(num_paths)
    }
    batch = Batch(num_slices, able, 100, NO_PATH)
    pending = batch.handle(StartBatch(), 0)
    arrived: list[int] = []
    end = None
    now = 0.0
    while pending:
        batch.check()
        effect = pending.pop(random.randrange(len(pending)))
        if isinstance(effect, Finish):
            assert end is None and not pending, "finished with parts under way"
            end = effect
            continue
        mine = list(range(num_slices)) if effect.slices is None else effect.slices.tolist()
        flag = able[effect.path]
        assert flag is None or all(flag[row] for row in mine)
        now += random.choice([1, 1, 1, 60])
        status = random.choices([OK, PEER_LOST, DENIED], [6, 4, 1])[0]
        if status == OK:
            arrived += mine
        pending += batch.handle(PartDone(effect.part, status, 0 if mine else -1, len(mine)), now)
    assert end is not None
    assert len(arrived) == len(dict.fromkeys(arrived))
    if end.status == OK:
        assert sorted(arrived) == list(range(num_slices)) and end.num_bytes == num_slices
    if not batch.story():
        assert end.status == (NO_PATH if num_slices else OK)


def test_an_unknown_part_is_a_bug() -> None:
    batch = Batch(1, {"tcp": None}, 10, NO_PATH)
    batch.handle(StartBatch(), 0)
    with pytest.raises(KeyError):
        batch.handle(PartDone(5, OK), 1)


# Over rails ----------------------------------------------------------------------------------------

A, B = "rdma@a>x", "rdma@b>x"
TIMED_OUT = 4


def over_rails(num_pieces: int, rails: Rails, deadline: float = 100.0) -> Batch:
    lengths = np.full(num_pieces, 1 << 20, dtype=np.uint64)
    paths = dict.fromkeys(rails.rails)
    return Batch(num_pieces, paths, deadline, NO_PATH, lengths=lengths, rails=rails, piece_bytes=1 << 20)


def carries(effects: list[Carry | Finish]) -> list[tuple[str, list[int] | None]]:
    return [(effect.path, rows(effect)) for effect in effects if isinstance(effect, Carry)]


def test_pieces_are_dealt_as_rails_have_room() -> None:
    batch = over_rails(10, Rails([A, B]))
    assert carries(batch.handle(StartBatch(), 0.0)) == [(A, [0]), (B, [1]), (A, [2]), (B, [3])]
    batch.check()
    assert carries(batch.handle(PartDone(0, OK, num_bytes=1 << 20), 0.001)) == [(A, [4])]
    assert carries(batch.handle(PartDone(1, OK, num_bytes=1 << 20), 0.002)) == [(B, [5])]
    assert batch.num_bytes == 2 << 20


def test_a_rail_that_fails_gives_its_pieces_to_the_other() -> None:
    rails = Rails([A, B, "tcp"])
    batch = over_rails(6, rails)
    batch.handle(StartBatch(), 0.0)
    assert batch.handle(PartDone(0, PEER_LOST), 0.1) == [], "its pieces wait for room on the other"
    assert batch.handle(PartDone(2, PEER_LOST), 0.1) == []
    assert carries(batch.handle(PartDone(1, OK, num_bytes=1 << 20), 0.2)) == [(B, [2])]
    assert carries(batch.handle(PartDone(3, OK, num_bytes=1 << 20), 0.2)) == [(B, [0])]
    batch.check()
    assert "after rdma@a>x" in batch.story("carries")[-1]


def test_when_no_rail_is_in_order_the_next_scheme_takes_over() -> None:
    rails = Rails([A, B, "tcp"])
    batch = over_rails(4, rails)
    batch.handle(StartBatch(), 0.0)
    effects = [effect for part in range(4) for effect in batch.handle(PartDone(part, PEER_LOST), 0.1)]
    assert {path for path, _ in carries(effects)} == {"tcp"}
    assert all(effect.deadline > 50 for effect in effects if isinstance(effect, Carry)), (
        "nothing better is left"
    )
    assert (
        "path" not in batch.story()[0]
        and len(batch.take_path_events()) == 2
        and batch.take_path_events() == []
    )


def test_a_slow_rail_gets_nothing_at_the_end() -> None:
    rails = Rails([A, B])
    for path, seconds in ((A, 0.001), (B, 1.0)):
        rails.sent(path, 1 << 20)
        rails.arrived(path, 1 << 20, 0.0, seconds)
    batch = over_rails(10, rails)
    assert {path for path, _ in carries(batch.handle(StartBatch(), 2.0))} == {A}


def test_a_part_that_could_go_elsewhere_has_a_deadline_of_its_own() -> None:
    batch = over_rails(1, Rails([A, B], patience_s=2.0))
    (carry,) = batch.handle(StartBatch(), 0.0)
    assert isinstance(carry, Carry) and carry.deadline == 2.0
    (again,) = batch.handle(PartDone(0, TIMED_OUT, 0), 2.0)
    assert isinstance(again, Carry) and (again.path, again.deadline) == (B, 100.0)
    assert batch.handle(PartDone(1, TIMED_OUT, 0), 100.0) == [Finish(TIMED_OUT, 0, 0, None)]
    hurried = over_rails(1, Rails([A, B], patience_s=2.0), deadline=1.0)
    (carry,) = hurried.handle(StartBatch(), 0.0)
    assert isinstance(carry, Carry) and carry.deadline == 0.5, "time is left for the other"


def test_nothing_new_is_begun_for_a_batch_that_has_failed() -> None:
    batch = over_rails(10, Rails([A, B]))
    batch.handle(StartBatch(), 0.0)
    assert batch.handle(PartDone(0, DENIED, 0), 0.1) == []
    assert batch.handle(PartDone(1, PEER_LOST, 0), 0.1) == []
    assert batch.handle(PartDone(2, OK, num_bytes=1), 0.1) == []
    assert batch.handle(PartDone(3, OK, num_bytes=1), 0.1) == [Finish(DENIED, 0, 0, None)]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_pieces_arrive_once_or_the_batch_fails(seed: int, sizes: list[int]) -> None:
    random = Random(seed)
    rails = Rails([A, B, "tcp"][: random.randint(1, 3)], patience_s=3.0)
    lengths = np.array(sizes, dtype=np.uint64)
    piece_bytes = random.choice([0, 1, 10, 64]) if sum(sizes) else 0
    now, deadline = 0.0, random.choice([5.0, 1000.0])
    paths = dict.fromkeys(rails.rails)
    batch = Batch(len(sizes), paths, deadline, NO_PATH, lengths=lengths, rails=rails, piece_bytes=piece_bytes)
    pending = batch.handle(StartBatch(), now)
    assert batch.is_sprayed == (piece_bytes > 0)
    arrived: list[int] = []
    end = None
    sick = random.choice([[], [A], [A, B], [A, B, "tcp"]])
    while pending:
        batch.check()
        effect = pending.pop(random.randrange(len(pending)))
        if isinstance(effect, Finish):
            assert end is None and not pending
            end = effect
            continue
        assert effect.deadline <= deadline
        mine = list(range(len(sizes))) if effect.slices is None else effect.slices.tolist()
        status = random.choice([PEER_LOST, TIMED_OUT]) if effect.path in sick else OK
        now = max(now, effect.deadline) if status == TIMED_OUT else now + random.random() / 10
        if status == OK:
            arrived += mine
        done = PartDone(effect.part, status, 0 if mine and status else -1, sum(sizes[row] for row in mine))
        pending += batch.handle(done, now)
    assert end is not None
    assert len(arrived) == len(dict.fromkeys(arrived))
    if end.status == OK:
        assert sorted(arrived) == list(range(len(sizes))) and end.num_bytes == sum(sizes)
    else:
        assert end.status in (PEER_LOST, TIMED_OUT)
    if not sick:
        assert end.status == OK
    if deadline == 1000.0 and len(sick) < len(paths):
        assert end.status == OK, "one path was in order and there was time"


def test_the_size_of_pieces() -> None:
    assert piece_bytes_of(4 << 20, 2) == MIN_PIECE_BYTES
    assert piece_bytes_of(64 << 20, 2) == 4 << 20
    assert piece_bytes_of(1 << 40, 2) == MAX_PIECE_BYTES


def test_a_rail_that_was_too_slow_is_used_again_when_no_other_works() -> None:
    batch = over_rails(1, Rails([A, B], patience_s=2.0))
    batch.handle(StartBatch(), 0.0)
    (other,) = batch.handle(PartDone(0, TIMED_OUT, 0), 2.0)
    assert isinstance(other, Carry) and other.path == B
    (again,) = batch.handle(PartDone(1, PEER_LOST, 0), 2.1)
    assert isinstance(again, Carry) and (again.path, again.deadline) == (A, 100.0)
    batch.check()
    assert batch.handle(PartDone(2, PEER_LOST, 0), 2.2) == [Finish(PEER_LOST, 0, 0, None)], "once"


def test_rows_are_cut_and_remember_where_they_came_from() -> None:
    columns = transfer_columns([1000, 2000, 3000, 4000], [1, 2, 3, 4], [25, 10, 0, 11])
    cut = columns.cut(10)
    assert cut.local.tolist() == [1000, 1010, 1020, 2000, 3000, 4000, 4010]
    assert cut.remote.tolist() == [1, 11, 21, 2, 3, 4, 14]
    assert cut.lengths.tolist() == [10, 10, 5, 10, 0, 10, 1]
    assert cut.origin is not None and cut.origin.tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert cut.whole is columns
    assert {cut.local.dtype, cut.remote.dtype, cut.lengths.dtype} == {np.dtype(np.uint64)}


def test_rows_that_are_small_enough_stay() -> None:
    for columns in (transfer_columns([1], [2], [10]), transfer_columns([], [], [])):
        assert columns.cut(10) is columns


def test_addresses_near_the_end_of_the_world() -> None:
    cut = transfer_columns([2**64 - 30], [2**63], [30]).cut(16)
    assert cut.local.tolist() == [2**64 - 30, 2**64 - 14]
    assert cut.remote.tolist() == [2**63, 2**63 + 16]


def test_columns_of_other_types() -> None:
    wanted = [1, 2, (1 << 64) - 1]
    large: list[Any] = [wanted, tuple(wanted), np.array(wanted, np.uint64), list(map(np.uint64, wanted))]
    for values in large:
        columns = transfer_columns(values, values, values)
        assert columns.local.dtype == np.uint64 and columns.lengths.tolist() == wanted
    small: list[Any] = [
        np.array([5, 6], np.int32),
        array.array("q", [5, 6]),
        range(5, 7),
        torch.tensor([5, 6]),
    ]
    for values in small:
        assert transfer_columns(values, values, values).remote.tolist() == [5, 6]


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        ["1"],
        [None],
        None,
        "1",
        [-1],
        [1 << 64],
        [[1]],
        np.array([1.0]),
        np.array([-1]),
        np.array(["1"]),
        np.array([True]),
        [np.float32(1)],
        [np.int64(-1)],
    ],
)
def test_columns_of_what_is_no_address(values: Any) -> None:
    with pytest.raises(InvalidArgument, match="columns"):
        transfer_columns(values, values, values)
