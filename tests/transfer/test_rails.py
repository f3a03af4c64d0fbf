# SPDX-License-Identifier: Apache-2.0
"""Measurements of rails, and a peer whose rails come and go."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from mooncake.transfer import Op, Region, RemoteSegment, Status, TransferEngine, TransferSettings
from mooncake.transfer.rails import FIRST_MASK_S, MAX_MASK_S, UNMEASURED_BYTES_PER_S, Rails

MIB = 1 << 20
A, B, TCP = "rdma@a>x", "rdma@b>x", "tcp"


def carried(rails: Rails, path: str, num_bytes: int, begin: float, end: float) -> None:
    rails.sent(path, num_bytes)
    rails.arrived(path, num_bytes, begin, end)
    rails.check()


def test_the_quicker_rail_is_chosen_once_both_are_known() -> None:
    rails = Rails([A, B, TCP])
    assert rails.bytes_per_s(A) == UNMEASURED_BYTES_PER_S
    carried(rails, A, 10 * MIB, 0.0, 0.01)
    assert rails.bytes_per_s(B) == rails.bytes_per_s(A) > 1e9, "an unmeasured rail is taken for its equals"
    assert rails.bytes_per_s(TCP) == UNMEASURED_BYTES_PER_S
    carried(rails, B, 10 * MIB, 0.0, 0.1)
    assert rails.choose([A, B], MIB, 1.0) == A


def test_bytes_that_wait_count() -> None:
    rails = Rails([A, B])
    rails.sent(A, 10 * MIB)
    assert rails.choose([A, B], MIB, 0.0) == B
    rails.sent(B, 20 * MIB)
    assert rails.choose([A, B], MIB, 0.0) == A
    rails.check()


def test_a_far_rail_is_second_among_equals_but_not_when_the_near_one_is_busy() -> None:
    rails = Rails([A, B])
    ranks = {A: 2, B: 0}
    assert rails.choose([A, B], MIB, 0.0, ranks) == B
    rails.sent(B, 10 * MIB)
    assert rails.choose([A, B], MIB, 0.0, ranks) == A


def test_a_newer_measurement_counts_more_and_more() -> None:
    rails = Rails([A])
    carried(rails, A, MIB, 0.0, 0.001)
    for i in range(1, 30):
        carried(rails, A, MIB, i, i + 0.1)
    assert rails.bytes_per_s(A) == pytest.approx(MIB / 0.1, rel=0.01)
    latency = rails.rails[A].latency_s
    for i in range(40, 80):
        carried(rails, A, 100, i, i + 0.002)
    assert rails.rails[A].latency_s == pytest.approx(0.002, rel=0.01) != latency


def test_two_parts_that_end_together_show_what_both_took() -> None:
    rails = Rails([A])
    for i in range(20):
        rails.sent(A, 10 * MIB)
        rails.sent(A, 10 * MIB)
        rails.arrived(A, 10 * MIB, i, i + 0.2)
        rails.arrived(A, 10 * MIB, i, i + 0.2)
    assert rails.bytes_per_s(A) == pytest.approx(20 * MIB / 0.2, rel=0.3)
    rails.check()


def test_a_failed_rail_is_masked_longer_and_longer_and_probed_by_one_part() -> None:
    rails = Rails([A, B])
    now, mask_s = 10.0, FIRST_MASK_S
    for _ in range(12):
        rails.sent(A, MIB)
        rails.failed(A, MIB, now, now, "it broke")
        assert rails.choose([A, B], MIB, now + mask_s * 0.99) == B
        assert rails.choose([A], MIB, now + mask_s * 0.99) is None and rails.first_to_unmask([A, B]) == B
        now += mask_s
        assert rails.choose([A, B], MIB, now) == A, "due"
        rails.sent(A, MIB)
        assert rails.choose([A, B], MIB, now) == B, "one part is enough"
        rails.dropped(A, MIB)
        mask_s = min(2 * mask_s, MAX_MASK_S)
        rails.check()
    rails.sent(A, MIB)
    rails.arrived(A, MIB, now, now + 0.1)
    assert rails.in_order([A, B]) == [A, B]
    assert [event for event, _, _ in rails.path_events] == ["rail_masked"] * 12 + ["rail_recovered"]
    assert rails.story(A)[-1].startswith("rail_recovered") and rails.story(B) == []


def test_one_failure_seen_by_two_parts_is_one_failure() -> None:
    rails = Rails([A])
    for _ in range(3):
        rails.sent(A, MIB)
    rails.failed(A, MIB, 1.0, 2.0, "reset")
    rails.failed(A, MIB, 1.5, 2.0, "reset")
    assert rails.rails[A].num_failures == 1
    rails.arrived(A, MIB, 1.9, 3.0)
    assert rails.rails[A].is_masked, "it was sent before the failure and proves nothing"
    rails.check()


def test_a_part_from_before_a_failure_says_nothing_new_when_it_fails_late() -> None:
    """The same when the mask has ended by then and another part is on probation."""
    rails = Rails([A, B])
    for _ in range(2):
        rails.sent(A, 1000)  # at 0
    rails.failed(A, 1000, 0.0, 1.0, "peer lost")
    now = 1.0 + FIRST_MASK_S + 1.0
    assert rails.is_open(A, now)
    rails.sent(A, 1000)  # on probation
    rails.failed(A, 1000, 0.0, now + 0.1, "too slow")
    rail = rails.rails[A]
    assert (rail.num_failures, rail.masked_at, rail.is_being_probed) == (1, 1.0, True)
    assert not rails.is_open(A, now + 0.2), "one part at a time"
    rails.arrived(A, 1000, now, now + 0.2)
    rails.check()
    assert rails.in_order([A, B]) == [A, B]


def test_patience_grows_with_the_work_and_is_short_on_probation() -> None:
    rails = Rails([A], patience_s=2.0)
    carried(rails, A, 100 * MIB, 0.0, 10.0)
    assert rails.patience_s(A, 1) == pytest.approx(2.0)
    assert rails.patience_s(A, 100 * MIB) == pytest.approx(80.0, rel=0.1)
    rails.sent(A, 1)
    rails.failed(A, 1, 11.0, 11.0, "silence")
    assert rails.patience_s(A, 100 * MIB) == 0.5
    assert "masked" in repr(rails)


# Real rails --------------------------------------------------------------------------------------


class Cable:
    """A forwarder to a tcp endpoint that can be cut (resets) or unplugged (silence)."""

    def __init__(self, target: str, host: str) -> None:
        target_host, _, port = target.rpartition(":")
        self._target = (target_host, int(port))
        self._listener = socket.create_server((host, 0))
        self.endpoint = f"{host}:{self._listener.getsockname()[1]}"
        self.is_silent = False
        self.is_cut = False
        self.num_bytes = 0
        self.cut_after: int | None = None
        self.silent_after: int | None = None
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset all connections, and new ones too."""
        self.is_cut = True
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.is_cut:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._sockets += [near, far]
                threading.Thread(target=self._pump, args=(near, far), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                while self.is_silent and not self.is_cut:
                    time.sleep(0.01)
                self.num_bytes += len(data)
                target.sendall(data)
                if self.silent_after is not None and self.num_bytes >= self.silent_after:
                    self.is_silent = True
                if self.cut_after is not None and self.num_bytes >= self.cut_after:
                    self.cut()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass
class Railway:
    """Two engines with two rails between them, of which the second can be broken."""

    near: TransferEngine
    far: TransferEngine
    cable: Cable
    segment: RemoteSegment
    pool: Region
    here: Region

    def move(self, op: Op, num_slices: int = 1, **options: float) -> Status:
        """Move all bytes in ``num_slices`` slices."""
        size = self.here.size_bytes // num_slices
        offsets = np.arange(num_slices, dtype=np.uint64) * np.uint64(size)
        done = self.near.run(
            op,
            self.segment,
            offsets + np.uint64(self.here.address),
            offsets + np.uint64(self.pool.address),
            np.full(num_slices, size, dtype=np.uint64),
            **options,  # type: ignore[arg-type]
        )
        if done.status == Status.OK:
            assert done.num_bytes == size * num_slices
        return done.status

    def fill(self, seed: int) -> bytes:
        data = np.random.default_rng(seed).integers(0, 256, self.here.size_bytes, dtype=np.uint8).tobytes()
        self.here.view()[:] = data
        return data

    @property
    def second(self) -> str:
        return self.segment.paths[1]

    def is_masked(self) -> bool:
        assert self.segment.rails is not None
        return self.segment.rails.rails[self.second].is_masked


@pytest.fixture
def railway() -> Iterator[Railway]:
    size = 16 * MIB
    settings = TransferSettings(transports=("tcp",), rail_patience_s=1.0)
    two = dataclasses.replace(settings, listen_host="127.0.0.1,127.0.0.2")
    with TransferEngine(settings) as near, TransferEngine(two) as far:
        first, second = far.describe().endpoints["tcp"].split(",")
        cable = Cable(second, "127.0.0.3")
        pool, here = far.allocate(size), near.allocate(size)
        described = msgspec.structs.replace(far.describe(), endpoints={"tcp": f"{first},{cable.endpoint}"})
        yield Railway(near, far, cable, near.open(described), pool, here)
        cable.close()


@pytest.mark.parametrize("num_slices", [1, 7, 512])
@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_a_big_batch_takes_both_rails(railway: Railway, op: Op, num_slices: int) -> None:
    data = railway.fill(1)
    if op == Op.READ:
        railway.pool.view()[:] = data
        railway.here.view()[:] = bytes(len(data))
    assert railway.move(op, num_slices) == Status.OK
    size = len(data) // num_slices * num_slices
    assert bytes(railway.pool.view()[:size]) == data[:size] == bytes(railway.here.view()[:size])
    assert MIB <= railway.cable.num_bytes < len(data), "a part of it, not all"


def test_checksums_of_slices_that_were_cut(railway: Railway) -> None:
    from mooncake.transfer import crc32c

    data = railway.fill(2)
    half = len(data) // 2
    done = railway.near.run(
        Op.WRITE,
        railway.segment,
        [railway.here.address, railway.here.address + half],
        [railway.pool.address, railway.pool.address + half],
        [half, half],
        checksum=True,
    )
    assert done.checksums is not None
    assert done.checksums.tolist() == [crc32c(data[:half]), crc32c(data[half:])]


def test_small_batches_take_one_rail(railway: Railway) -> None:
    for _ in range(5):
        done = railway.near.run(
            Op.WRITE, railway.segment, [railway.here.address], [railway.pool.address], [4096]
        )
        assert (done.status, done.num_bytes) == (Status.OK, 4096)
    railway.cable.cut()
    for _ in range(5):
        done = railway.near.run(
            Op.READ, railway.segment, [railway.here.address], [railway.pool.address], [4096]
        )
        assert (done.status, done.num_bytes) == (Status.OK, 4096)


def test_memory_near_the_second_card_takes_the_second_rail(railway: Railway) -> None:
    described = railway.segment.descriptor
    near_the_second = msgspec.structs.replace(
        described,
        topology={"cpu:1": (["127.0.0.3"], ["127.0.0.1"])},
        regions=[msgspec.structs.replace(region, location="cpu:1") for region in described.regions],
    )
    segment = railway.near.open(near_the_second)
    assert segment.paths[0].endswith("127.0.0.1") and segment.paths[1].endswith("127.0.0.3")
    done = railway.near.run(Op.WRITE, segment, [railway.here.address], [railway.pool.address], [4096])
    assert done.status == Status.OK and railway.cable.num_bytes > 4096


def test_nothing_is_counted_as_queued_when_all_has_ended(railway: Railway) -> None:
    assert railway.move(Op.WRITE) == Status.OK
    done = railway.near.run(Op.WRITE, railway.segment, [railway.here.address], [1], [4096])
    assert done.status == Status.ACCESS_DENIED
    rails = railway.segment.rails
    assert rails is not None
    rails.check()
    assert all(not rail.num_under_way and not rail.is_masked for rail in rails.rails.values())


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_a_rail_that_is_cut_in_the_middle_is_replaced_and_taken_back(railway: Railway, op: Op) -> None:
    data = railway.fill(3)
    railway.pool.view()[:] = data
    railway.cable.cut_after = MIB // 2
    assert railway.move(op) == Status.OK
    assert bytes(railway.pool.view()) == data and bytes(railway.here.view()) == data
    assert railway.cable.is_cut and railway.is_masked()
    assert railway.move(op) == Status.OK

    railway.cable.cut_after, railway.cable.is_cut = None, False
    deadline = time.monotonic() + 30
    while railway.is_masked():
        assert time.monotonic() < deadline
        assert railway.move(op) == Status.OK
    assert railway.segment.rails is not None
    assert "rail_recovered" in railway.segment.rails.story(railway.second)[-1]


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_a_rail_that_falls_silent_costs_its_patience(railway: Railway, op: Op) -> None:
    data = railway.fill(4)
    railway.pool.view()[:] = data
    railway.cable.silent_after = MIB // 2
    assert railway.move(op, timeout_s=60.0) == Status.OK
    assert bytes(railway.pool.view()) == data and bytes(railway.here.view()) == data
    assert railway.is_masked()
    # What was given up never lands on top of what comes later.
    later = railway.fill(5)
    assert railway.move(Op.WRITE) == Status.OK
    railway.cable.silent_after, railway.cable.is_silent = None, False
    assert railway.move(Op.READ) == Status.OK
    assert bytes(railway.pool.view()) == later == bytes(railway.here.view())


def test_when_the_peer_is_gone_every_rail_says_so(railway: Railway) -> None:
    assert railway.move(Op.WRITE) == Status.OK
    railway.far.close()
    for _ in range(3):
        begin = time.monotonic()
        assert railway.move(Op.WRITE, timeout_s=60.0) == Status.PEER_LOST
        assert time.monotonic() - begin < 30, "it did not wait for its deadline"


async def test_coroutines_and_queues_take_both_rails(railway: Railway) -> None:
    data = railway.fill(6)
    reported: list[int] = []
    done = await railway.near.transfer(
        Op.WRITE,
        railway.segment,
        [railway.here.address],
        [railway.pool.address],
        [len(data)],
        progress=reported.append,
    )
    assert done.status == Status.OK and bytes(railway.pool.view()) == data
    assert reported == sorted(reported) and reported[0] > 0 and reported[-1] < len(data) and len(reported) > 1
    assert railway.cable.num_bytes > MIB


def test_memory_that_is_not_registered(railway: Railway) -> None:
    from mooncake.errors import InvalidArgument

    with pytest.raises(InvalidArgument, match="register"):
        railway.near.run(Op.WRITE, railway.segment, [4096], [railway.pool.address], [railway.pool.size_bytes])
