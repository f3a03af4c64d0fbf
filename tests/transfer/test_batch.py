from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.transfer.batch import OK, RETRIED, Batch, Carry, Finish, PartDone, Start
from mooncake.transfer.transports import Status

PEER_LOST, DENIED, NO_PATH = 1, 2, 77


def flags(*values: int) -> npt.NDArray[np.bool_]:
    return np.array(values, dtype=np.bool_)


def rows(carry: Carry | Finish) -> list[int] | None:
    assert isinstance(carry, Carry)
    return None if carry.slices is None else carry.slices.tolist()


def test_the_statuses_agree_with_the_native_ones() -> None:
    assert Status.OK == OK
    assert {Status.PEER_LOST, Status.PROTOCOL_ERROR} == RETRIED


def test_one_path_carries_all() -> None:
    batch = Batch(3, {"shm": None, "tcp": None}, deadline=10, no_path=NO_PATH, has_checksums=True)
    (carry,) = batch.handle(Start(), 0)
    assert carry == Carry(0, "shm", None)
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
    first, second = batch.handle(Start(), 0)
    assert (rows(first), rows(second)) == ([0, 2], [1, 3])
    assert batch.handle(PartDone(1, OK, num_bytes=5, checksums=np.array([11, 13], dtype=np.uint32)), 1) == []
    (end,) = batch.handle(PartDone(0, OK, num_bytes=7, checksums=np.array([10, 12], dtype=np.uint32)), 1)
    assert isinstance(end, Finish) and end.checksums is not None
    assert (end.status, end.num_bytes, end.checksums.tolist()) == (OK, 12, [10, 11, 12, 13])


def test_a_lost_path_is_replaced() -> None:
    batch = Batch(2, {"shm": flags(1, 1), "tcp": None}, 10, NO_PATH)
    (carry,) = batch.handle(Start(), 0)
    assert carry == Carry(0, "shm", None)
    (again,) = batch.handle(PartDone(0, PEER_LOST, 1), 5)
    assert again == Carry(1, "tcp", None)
    batch.check()
    assert batch.handle(PartDone(1, OK, num_bytes=3), 6) == [Finish(OK, -1, 3, None)]
    assert "tcp carries 2 slices after shm" in batch.story("tcp")


def test_the_last_path_decides() -> None:
    batch = Batch(2, {"shm": None, "tcp": None}, 10, NO_PATH)
    batch.handle(Start(), 0)
    batch.handle(PartDone(0, PEER_LOST, 0), 5)
    assert batch.handle(PartDone(1, PEER_LOST, 1), 6) == [Finish(PEER_LOST, 1, 0, None)]


def test_no_retry_after_the_deadline_or_for_a_refusal() -> None:
    for status, now in ((PEER_LOST, 10.0), (DENIED, 1.0)):
        batch = Batch(2, {"shm": None, "tcp": None}, 10, NO_PATH)
        batch.handle(Start(), 0)
        assert batch.handle(PartDone(0, status, 1), now) == [Finish(status, 1, 0, None)]


def test_the_end_waits_for_every_part() -> None:
    """A failed batch still owns its memory while another part of it moves."""
    batch = Batch(4, {"shm": flags(0, 1, 0, 1), "tcp": None}, 10, NO_PATH)
    batch.handle(Start(), 0)
    assert batch.handle(PartDone(0, DENIED, 1), 1) == []
    assert batch.handle(PartDone(1, OK, num_bytes=2), 2) == [Finish(DENIED, 3, 0, None)]


def test_a_slice_without_a_path() -> None:
    assert Batch(2, {}, 10, NO_PATH).handle(Start(), 0) == [Finish(NO_PATH, 0, 0, None)]
    batch = Batch(2, {"shm": flags(1, 0)}, 10, NO_PATH)
    (carry,) = batch.handle(Start(), 0)
    assert rows(carry) == [0]
    assert batch.handle(PartDone(0, OK, num_bytes=1), 1) == [Finish(NO_PATH, 1, 0, None)]


def test_nothing_to_move() -> None:
    (carry,) = Batch(0, {"shm": flags()}, 10, NO_PATH).handle(Start(), 0)
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
    pending = batch.handle(Start(), 0)
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
    batch.handle(Start(), 0)
    with pytest.raises(KeyError):
        batch.handle(PartDone(5, OK), 1)
