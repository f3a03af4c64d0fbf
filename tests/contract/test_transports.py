# SPDX-License-Identifier: Apache-2.0
"""The contract of all transports. ``transports/local.py`` is its definition."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from mooncake.errors import InvalidArgument, Unavailable
from mooncake.transfer import (
    Completion,
    Op,
    Region,
    RemoteSegment,
    SegmentDescriptor,
    Status,
    TransferEngine,
    crc32c,
)
from mooncake.transfer.batch import transfer_columns
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.transfer.transports.cuda import why_unavailable
from mooncake.transfer.transports.rdma import usable_devices
from tests.contract import cuda_double
from tests.contract.peer_process import engine_with, lend
from tests.waiting import wait_until

NO_GPU = why_unavailable()
GPU = () if NO_GPU else ("cuda",)
ALL = ("local", "shm", "tcp", "file", "tcp-file", "rdma", "cuda-double", *GPU)
ACROSS = ("shm", "tcp", "file", "tcp-file", "rdma", "cuda-double", *GPU)
IN_MEMORY = ("local", "shm")
"Transports that can show a peer's bytes in place."
MIB = 1 << 20
PEER = Path(__file__).with_name("peer_process.py")


@dataclasses.dataclass
class Pair:
    """Two engines of this process: ``near`` moves, ``far`` registers ``pool``."""

    near: TransferEngine
    far: TransferEngine
    pool: Region
    bytes_there: npt.NDArray[np.uint8] | DeviceBytes

    @property
    def segment(self) -> RemoteSegment:
        return self.near.open(self.far.describe())

    def buffer(self, size: int, seed: int = 1) -> tuple[npt.NDArray[np.uint8], Region]:
        data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        return data, self.near.register(data)


class DeviceBytes:
    """Bytes of device memory as an array would show them, through a separate engine: also after the
    region under test was unregistered."""

    def __init__(self, pool: Region, spy: TransferEngine) -> None:
        self._alias = spy.register((pool.address, pool.size_bytes))

    def copied(self) -> npt.NDArray[np.uint8]:
        here = np.empty(self._alias.size_bytes, dtype=np.uint8)
        self._alias.read_into(here.data)
        return here

    def __getitem__(self, part: slice) -> npt.NDArray[np.uint8]:
        return self.copied()[part]

    def __setitem__(self, part: slice, value: int | npt.NDArray[np.uint8]) -> None:
        here = self.copied()
        here[part] = value
        self._alias.write_from(here.data)

    def __eq__(self, other: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]
        same: npt.NDArray[np.bool_] = self.copied() == other
        return same

    def any(self) -> bool:
        return bool(self.copied().any())


def bytes_of(pool: Region, spy: TransferEngine) -> npt.NDArray[np.uint8] | DeviceBytes:
    if pool.kind == "memory":
        return np.frombuffer(pool.view(), dtype=np.uint8)
    if pool.kind == "file":
        return np.memmap(pool.path, dtype=np.uint8, mode="r+", shape=(pool.size_bytes,))
    return DeviceBytes(pool, spy)


def usable(transport: str) -> str:
    """The transport, or a skip with the reason."""
    if transport == "cuda-double" and not cuda_double.built():
        pytest.skip("no C++ compiler for the test double of the CUDA driver; install g++")
    if transport == "rdma":
        try:
            usable_devices((), 1)
        except Unavailable as error:
            pytest.skip(f"{error} (scripts/test-rdma runs this in a small VM that has one)")
    return transport


@pytest.fixture(params=ALL)
def transport(request: pytest.FixtureRequest) -> str:
    return usable(str(request.param))


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    with engine_with(transport) as near, engine_with(transport) as far, engine_with(transport) as spy:
        pool = lend(far, transport, 4 * MIB)
        yield Pair(near, far, pool, bytes_of(pool, spy))


class PeerProcess:
    """Another process with one region, reached from an engine of this one."""

    def __init__(self, transport: str, size_bytes: int = 4 * MIB) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), transport, str(size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.descriptor = decode_descriptor(self._line())

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def say(self, letter: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(letter.encode() + b"\n")
        self.process.stdin.flush()
        assert self._line() == b"done\n"

    def freeze(self) -> None:
        """Wait until all its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., PeerProcess]]:
    started: list[PeerProcess] = []

    def start(transport: str, size_bytes: int = 4 * MIB) -> PeerProcess:
        started.append(PeerProcess(usable(transport), size_bytes))
        return started[-1]

    yield start
    for peer in started:
        peer.end()


def is_ok(done: Completion, num_bytes: int) -> bool:
    return done.status == Status.OK and done.failed_slice == -1 and done.num_bytes == num_bytes


@pytest.mark.skipif(bool(NO_GPU), reason=f"cuda runs over a test double of its driver only: {NO_GPU}")
def test_cuda_is_held_to_this_on_a_gpu() -> None:
    assert "cuda" in ALL


# Moving --------------------------------------------------------------------------------------------


def test_write_then_read_back(pair: Pair) -> None:
    data, here = pair.buffer(10_000)
    assert is_ok(pair.near.run(Op.WRITE, pair.segment, [here.address], [pair.pool.address], [10_000]), 10_000)
    assert (pair.bytes_there[:10_000] == data).all()
    assert not pair.bytes_there[10_000:].any()
    back, here_too = pair.buffer(10_000, seed=2)
    assert is_ok(
        pair.near.run(Op.READ, pair.segment, [here_too.address], [pair.pool.address], [10_000]), 10_000
    )
    assert (back == data).all()


def random_layout(
    rng: np.random.Generator, num_slices: int, room: int
) -> tuple[list[int], list[int], list[int]]:
    """Slices of 0 to ~2,000 bytes at odd offsets, scattered on one side and packed on the other."""
    lengths = rng.integers(0, 2000, num_slices)
    lengths[rng.random(num_slices) < 0.1] = 0
    packed = np.concatenate([[0], np.cumsum(lengths)[:-1]]) + 3
    order = rng.permutation(num_slices)
    scattered = np.zeros(num_slices, dtype=np.int64)
    scattered[order] = np.concatenate([[0], np.cumsum(lengths[order] + 5)[:-1]]) + 1
    assert scattered.max() + 2000 < room
    return packed.tolist(), scattered.tolist(), lengths.tolist()


@pytest.mark.parametrize("num_slices", [1, 2, 100, 1500])
def test_columns_of_many_slices(pair: Pair, num_slices: int) -> None:
    rng = np.random.default_rng(num_slices)
    data, here = pair.buffer(4 * MIB)
    packed, scattered, lengths = random_layout(rng, num_slices, 4 * MIB)
    local = [here.address + offset for offset in packed]
    remote = [pair.pool.address + offset for offset in scattered]
    expected = np.zeros(4 * MIB, dtype=np.uint8)
    for start, there, length in zip(packed, scattered, lengths, strict=True):
        expected[there : there + length] = data[start : start + length]
    done = pair.near.run(Op.WRITE, pair.segment, local, remote, lengths, checksum=True)
    assert is_ok(done, sum(lengths))
    assert (pair.bytes_there == expected).all()
    sums = [crc32c(data[start : start + length].data) for start, length in zip(packed, lengths, strict=True)]
    assert done.checksums is not None and done.checksums.tolist() == sums

    original = data.copy()
    data[:] = 0
    done = pair.near.run(Op.READ, pair.segment, local, remote, lengths, checksum=True)
    assert is_ok(done, sum(lengths))
    assert done.checksums is not None and done.checksums.tolist() == sums
    for start, length in zip(packed, lengths, strict=True):
        assert (data[start : start + length] == original[start : start + length]).all()
        data[start : start + length] = 0
    assert not data.any(), "bytes between the slices were touched"


def test_nothing_to_move(pair: Pair) -> None:
    assert is_ok(pair.near.run(Op.WRITE, pair.segment, [], [], []), 0)
    done = pair.near.run(Op.READ, pair.segment, [0, 1], [0, 7], [0, 0], checksum=True)
    assert is_ok(done, 0)
    assert done.checksums is not None and done.checksums.tolist() == [0, 0]


def test_one_slice_without_columns(pair: Pair) -> None:
    data, here = pair.buffer(10_000)
    segment, at, there = pair.segment, here.address, pair.pool.address
    assert pair.near.run_slice(Op.WRITE, segment, at, there, 10_000, checksum=True) == crc32c(data.data)
    assert (pair.bytes_there[:10_000] == data).all() and not pair.bytes_there[10_000:].any()
    pair.bytes_there[:100] = 7
    assert pair.near.run_slice(Op.READ, segment, at, there, 100) == 0, "no checksum was asked for"
    assert (data[:100] == 7).all() and (data[100:] == pair.bytes_there[100:10_000]).all()
    assert pair.near.run_slice(Op.READ, segment, at, there, 0, checksum=True) == 0


def status_of(done: int | Completion) -> Status:
    return Status.OK if isinstance(done, int) else done.status


@pytest.mark.parametrize("op", list(Op))
def test_one_slice_is_refused_like_columns(pair: Pair, op: Op) -> None:
    _, here = pair.buffer(1000)
    segment, run = pair.segment, pair.near.run_slice
    end = pair.pool.address + pair.pool.size_bytes
    for remote in (pair.pool.address - 1, end - 99, 2**64 - 50):
        assert status_of(run(op, segment, here.address, remote, 100)) == Status.ACCESS_DENIED
    with pytest.raises(InvalidArgument, match=r"local\[0\]"):
        run(op, segment, here.address + 1, pair.pool.address, 1000)
    pair.far.close()
    lost = lambda: status_of(run(op, segment, here.address, pair.pool.address, 9)) == Status.PEER_LOST  # noqa: E731
    wait_until(lost, "the loss")


@pytest.mark.parametrize("num_streams", [1, 3])
def test_large(transport: str, num_streams: int) -> None:
    size = 64 * MIB
    with (
        engine_with(transport, num_streams) as near,
        engine_with(transport, num_streams) as far,
        engine_with(transport) as spy,
    ):
        pool = lend(far, transport, size + 64)
        segment = near.open(far.describe())
        data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        here = near.register(data)
        start = pool.address + 13
        sent = near.run(Op.WRITE, segment, [here.address], [start], [size], checksum=True)
        assert is_ok(sent, size) and sent.checksums is not None
        assert (bytes_of(pool, spy)[13 : 13 + size] == data).all()
        back = np.zeros(size, dtype=np.uint8)
        here_too = near.register(back)
        received = near.run(Op.READ, segment, [here_too.address], [start], [size], checksum=True)
        assert is_ok(received, size) and received.checksums is not None
        assert (back == data).all()
        assert received.checksums[0] == sent.checksums[0] == crc32c(data.data)


def test_a_queue_brings_every_completion(pair: Pair) -> None:
    data, here = pair.buffer(200 * 1000)
    queue = pair.near.new_queue()
    for i in range(200):
        pair.near.submit(
            queue,
            1000 + i,
            Op.WRITE,
            pair.segment,
            [here.address + i * 1000],
            [pair.pool.address + i * 1000],
            [1000],
            checksum=True,
        )
    done: dict[int, Completion] = {}
    while len(done) < 200:
        arrived = queue.drain(timeout_s=10.0)
        assert arrived, "a completion is missing"
        done |= {completion.token: completion for completion in arrived}
    assert sorted(done) == list(range(1000, 1200))
    assert all(is_ok(completion, 1000) for completion in done.values())
    assert (pair.bytes_there[: 200 * 1000] == data).all()
    sums = done[1007].checksums
    assert sums is not None and sums.tolist() == [crc32c(data[7000:8000].data)]
    assert queue.drain() == [] and len(queue) == 0


async def test_coroutines(pair: Pair) -> None:
    data, here = pair.buffer(1000)
    done = await pair.near.transfer(Op.WRITE, pair.segment, [here.address], [pair.pool.address], [1000])
    assert is_ok(done, 1000)
    assert (pair.bytes_there[:1000] == data).all()


async def test_a_big_batch_goes_in_pieces_and_reports_progress(transport: str) -> None:
    size = (16 if transport == "local" else 40) * MIB
    with engine_with(transport) as far, engine_with(transport) as near, engine_with(transport) as spy:
        pool, here = lend(far, transport, size), near.allocate(size)
        data = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
        here.view()[:] = data.data
        reported: list[int] = []
        cut = 23 * MIB + 5 if transport != "local" else 7
        done = await near.transfer(
            Op.WRITE,
            near.open(far.describe()),
            [here.address, here.address + cut],
            [pool.address, pool.address + cut],
            [cut, size - cut],
            checksum=True,
            priority=2,
            progress=reported.append,
        )
        assert is_ok(done, size) and (bytes_of(pool, spy)[:size] == data).all()
        assert done.checksums is not None
        assert done.checksums.tolist() == [crc32c(data[:cut].data), crc32c(data[cut:].data)]
        assert reported == sorted(reported) and all(0 < num_bytes < size for num_bytes in reported)
        assert reported or transport == "local"


def test_empty_slices_after_the_last_byte_of_a_piece(transport: str) -> None:
    """A piece ends where they begin; with nothing but them, a piece would have no bytes."""
    size = 32 * MIB
    with engine_with(transport) as far, engine_with(transport) as near:
        pool, here = lend(far, transport, size), near.allocate(size, populate=False)
        queue = near.new_queue()
        rows = [here.address] * 3, [pool.address] * 3, [size, 0, 0]
        near.submit(queue, 1, Op.WRITE, near.open(far.describe()), *rows, checksum=True)
        (done,) = queue.drain(timeout_s=60)
        assert is_ok(done, size) and done.checksums is not None
        assert done.checksums.tolist() == [crc32c(here.view()), 0, 0]


def test_many_threads(pair: Pair) -> None:
    size, rounds, num_threads = 60_000, 20, 6
    failures: list[str] = []

    def work(number: int) -> None:
        data, here = pair.buffer(size, seed=number)
        back, here_too = pair.buffer(size, seed=100 + number)
        there = pair.pool.address + number * size
        for _ in range(rounds):
            if not is_ok(pair.near.run(Op.WRITE, pair.segment, [here.address], [there], [size]), size):
                failures.append(f"{number}: write")
            if not is_ok(pair.near.run(Op.READ, pair.segment, [here_too.address], [there], [size]), size):
                failures.append(f"{number}: read")
            if not (back == data).all():
                failures.append(f"{number}: wrong bytes")
            back[:] = 0

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_both_directions_at_once(transport: str) -> None:
    with engine_with(transport) as one, engine_with(transport) as two, engine_with(transport) as spy:
        failures: list[str] = []

        def work(near: TransferEngine, far: TransferEngine, pool: Region, seed: int) -> None:
            data = np.random.default_rng(seed).integers(0, 256, 3 * MIB, dtype=np.uint8)
            here = near.register(data)
            segment = near.open(far.describe())
            for _ in range(5):
                if not is_ok(near.run(Op.WRITE, segment, [here.address], [pool.address], [3 * MIB]), 3 * MIB):
                    failures.append("write")
                if not (bytes_of(pool, spy) == data).all():
                    failures.append("bytes")

        pools = lend(one, transport, 3 * MIB), lend(two, transport, 3 * MIB)
        threads = [
            threading.Thread(target=work, args=(one, two, pools[1], 1)),
            threading.Thread(target=work, args=(two, one, pools[0], 2)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_map_shows_the_bytes_in_place(pair: Pair) -> None:
    view = pair.near.map(pair.segment, pair.pool.address + 5, 100)
    if pair.segment.paths[0] not in IN_MEMORY:
        assert view is None
        return
    assert view is not None and view.readonly and len(view) == 100
    pair.bytes_there[5:105] = 7
    assert bytes(view) == b"\7" * 100
    assert pair.near.map(pair.segment, pair.pool.address + 4 * MIB - 5, 6) is None
    pair.far.unregister(pair.pool)
    assert bytes(view) == b"\7" * 100, "a view outlives its region"


# Refusing ------------------------------------------------------------------------------------------


def with_key(descriptor: SegmentDescriptor, key: int) -> SegmentDescriptor:
    regions = [msgspec.structs.replace(region, key=key) for region in descriptor.regions]
    return msgspec.structs.replace(descriptor, regions=regions)


@pytest.mark.parametrize("op", list(Op))
def test_wrong_key(pair: Pair, op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.near, "refresh", lambda *_: False)  # the peer itself would tell the right one
    _, here = pair.buffer(1000)
    before = bytes(here.view())
    guessed = pair.near.open(with_key(pair.far.describe(), pair.pool.key ^ 1))
    done = pair.near.run(op, guessed, [here.address], [pair.pool.address], [1000])
    assert done.status == Status.ACCESS_DENIED
    assert not pair.bytes_there.any() and bytes(here.view()) == before
    described = pair.near.open(pair.far.describe())
    assert is_ok(pair.near.run(Op.WRITE, described, [here.address], [pair.pool.address], [1000]), 1000)


@pytest.mark.parametrize("op", list(Op))
def test_one_byte_out_of_range(pair: Pair, op: Op) -> None:
    _, here = pair.buffer(1000)
    end = pair.pool.address + pair.pool.size_bytes
    claims = pair.far.describe()
    regions = [
        msgspec.structs.replace(region, address=region.address - 64, size_bytes=region.size_bytes + 128)
        for region in claims.regions
    ]
    for descriptor in (claims, msgspec.structs.replace(claims, regions=regions)):
        segment = pair.near.open(descriptor)
        local = [here.address, here.address]
        done = pair.near.run(op, segment, local, [pair.pool.address, end - 99], [100, 100])
        assert (done.status, done.failed_slice) == (Status.ACCESS_DENIED, 1)
        done = pair.near.run(op, segment, local[:1], [pair.pool.address - 1], [100])
        assert (done.status, done.failed_slice) == (Status.ACCESS_DENIED, 0)
        assert is_ok(pair.near.run(op, segment, local[:1], [end - 100], [100]), 100)


def test_ranges_that_wrap_around(pair: Pair) -> None:
    _, here = pair.buffer(1000)
    for remote, length in ((2**64 - 50, 100), (pair.pool.address, 2**64 - 1), (2**64 - 1, 2**64 - 1)):
        with pytest.raises(InvalidArgument) if length > 1000 else contextlib.nullcontext():
            done = pair.near.run(Op.WRITE, pair.segment, [here.address], [remote], [length])
            assert done.status == Status.ACCESS_DENIED


@pytest.mark.parametrize("op", list(Op))
def test_unregistered_local_memory(pair: Pair, op: Op) -> None:
    data, here = pair.buffer(1000)
    unregistered = np.zeros(1000, dtype=np.uint8)
    remote = [pair.pool.address] * 2
    queue = pair.near.new_queue()
    for address in (unregistered.ctypes.data, here.address + 1):
        with pytest.raises(InvalidArgument, match=r"local\[1\]"):
            pair.near.run(op, pair.segment, [here.address, address], remote, [1000, 1000])
        with pytest.raises(InvalidArgument, match=r"local\[1\]"):
            pair.near.submit(queue, 1, op, pair.segment, [here.address, address], remote, [1000, 1000])
    assert queue.drain() == [] and len(queue) == 0
    pair.near.unregister(here)
    with pytest.raises(InvalidArgument, match="register"):
        pair.near.run(op, pair.segment, [here.address], remote[:1], [1000])
    assert not pair.bytes_there.any() and not unregistered.any() and data.any()


def test_read_only_memory_is_read_and_never_written(transport: str) -> None:
    with engine_with(transport) as near, engine_with(transport) as far:
        secret = bytes(range(256))
        registered = far.register(secret)
        pool = near.allocate(4096)
        segment = near.open(far.describe())
        if transport in ("local", "tcp"):  # the others reach only what they share
            assert is_ok(near.run(Op.READ, segment, [pool.address], [registered.address], [256]), 256)
            assert bytes(pool.view()[:256]) == secret
        done = near.run(Op.WRITE, segment, [pool.address + 1000], [registered.address], [256])
        assert done.status == Status.ACCESS_DENIED
        local = near.register(b"x" * 256)
        far_pool = lend(far, transport, 4096)
        segment = near.open(far.describe())
        assert is_ok(near.run(Op.WRITE, segment, [local.address], [far_pool.address], [256]), 256)
        with pytest.raises(InvalidArgument, match="writable"):
            near.run(Op.READ, segment, [local.address], [far_pool.address], [256])
        assert secret == bytes(range(256))


def test_memory_registered_twice_is_written_although_once_it_was_read_only(transport: str) -> None:
    with engine_with(transport) as near, engine_with(transport) as far:
        here, there = bytearray(4096), bytearray(4096)
        local = near.register(here)
        near.register(memoryview(here).toreadonly())
        pool = lend(far, transport, 4096)
        move = (near.open(far.describe()), [local.address], [pool.address], [4096])
        here[:] = b"x" * 4096
        assert is_ok(near.run(Op.WRITE, *move), 4096)
        here[:] = bytes(4096)
        assert is_ok(near.run(Op.READ, *move), 4096)
        assert bytes(here) == b"x" * 4096
        if transport in ("local", "tcp"):  # the others reach only what they share
            remote = far.register(there)
            far.register(memoryview(there).toreadonly())
            segment = near.open(far.describe())
            assert is_ok(near.run(Op.WRITE, segment, [local.address], [remote.address], [4096]), 4096)
            assert bytes(there) == b"x" * 4096


# Ending --------------------------------------------------------------------------------------------


def test_a_closed_peer_is_lost(pair: Pair) -> None:
    _, here = pair.buffer(1000)
    move = (pair.segment, [here.address], [pair.pool.address], [1000])
    assert is_ok(pair.near.run(Op.WRITE, *move), 1000)
    pair.far.close()
    wait_until(lambda: pair.near.run(Op.WRITE, *move).status == Status.PEER_LOST, "the loss")


def test_a_closed_engine_cancels(pair: Pair) -> None:
    _, here = pair.buffer(1000)
    segment = pair.segment
    assert is_ok(pair.near.run(Op.WRITE, segment, [here.address], [pair.pool.address], [1000]), 1000)
    pair.near.close()
    pair.near.close()
    queue = pair.near.new_queue()
    here = pair.near.register(np.zeros(1000, dtype=np.uint8))
    pair.near.submit(queue, 5, Op.WRITE, segment, [here.address], [pair.pool.address], [1000])
    (done,) = queue.drain(timeout_s=10.0)
    assert done.token == 5 and done.status in (Status.CANCELLED, Status.PEER_LOST)


class Traffic:
    """Threads that read from a peer into ``landing`` until stopped, and the statuses that they got."""

    def __init__(self, pair: Pair, op: Op, num_threads: int = 2) -> None:
        self.landing = np.zeros(4 * MIB, dtype=np.uint8)
        self.here = pair.near.register(self.landing)
        self.seen: list[Status] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(pair, op)) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self.seen) > 2, "traffic")

    def _work(self, pair: Pair, op: Op) -> None:
        segment = pair.segment
        while not self._stopped.is_set():
            try:
                done = pair.near.run(
                    op, segment, [self.here.address], [pair.pool.address], [4 * MIB], timeout_s=10
                )
            except InvalidArgument:
                return
            self.seen.append(done.status)
            if done.status not in (Status.OK, Status.CANCELLED):
                return

    def stop(self) -> None:
        self._stopped.set()
        self.end()

    def end(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "a transfer hangs"


def test_unregistering_local_memory_during_transfers(pair: Pair) -> None:
    pair.bytes_there[:] = 1
    traffic = Traffic(pair, Op.READ)
    pair.near.unregister(traffic.here)
    traffic.landing[:] = 2
    traffic.stop()
    assert (traffic.landing == 2).all(), "memory was touched after it was unregistered"
    assert set(traffic.seen) <= {Status.OK, Status.CANCELLED}


def test_unregistering_remote_memory_during_transfers(pair: Pair) -> None:
    traffic = Traffic(pair, Op.WRITE)
    traffic.landing[:] = 1
    pair.far.unregister(pair.pool)
    pair.bytes_there[:] = 2
    traffic.end()
    assert (pair.bytes_there == 2).all(), "memory was touched after it was unregistered"
    assert traffic.seen[-1] in (Status.ACCESS_DENIED, Status.PEER_LOST)
    _, here = pair.buffer(1000)
    other = lend(pair.far, pair.pool.kind, 4096)
    assert is_ok(pair.near.run(Op.WRITE, pair.segment, [here.address], [other.address], [1000]), 1000)


def test_cancel_lets_go_of_memory(pair: Pair) -> None:
    pair.bytes_there[:] = 1
    traffic = Traffic(pair, Op.READ)
    traffic._stopped.set()
    pair.near.cancel(pair.segment)
    traffic.landing[:] = 2  # a thread may begin one more read before it looks at the event
    traffic.stop()
    assert set(traffic.seen) <= {Status.OK, Status.CANCELLED}
    _, here = pair.buffer(1000)
    done = pair.near.run(Op.WRITE, pair.segment, [here.address], [pair.pool.address], [1000])
    assert is_ok(done, 1000), "cancel() is not the end of the peer"


@pytest.mark.processes
@pytest.mark.parametrize("transport", ACROSS)
def test_a_killed_peer_is_lost_soon(transport: str, start_peer: Callable[..., PeerProcess]) -> None:
    peer = start_peer(transport, 64 * MIB)
    with engine_with(transport) as near:
        segment = near.open(peer.descriptor)
        data = np.ones(64 * MIB, dtype=np.uint8)
        here = near.register(data)
        move = (segment, [here.address], [peer.descriptor.regions[0].address], [64 * MIB])
        assert is_ok(near.run(Op.WRITE, *move), 64 * MIB)
        seen: list[Status] = []

        def work() -> None:
            while not seen or seen[-1] == Status.OK:
                seen.append(near.run(Op.WRITE, *move, timeout_s=60).status)

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: len(seen) > 1, "traffic")
        peer.process.kill()
        thread.join(10)
        assert not thread.is_alive(), "a transfer to a dead process hangs"
        assert seen[-1] == Status.PEER_LOST
        assert near.run(Op.WRITE, *move).status == Status.PEER_LOST


@pytest.mark.processes
@pytest.mark.parametrize("transport", ACROSS)
def test_a_killed_peer_is_lost_although_its_forked_child_lives(
    transport: str, start_peer: Callable[..., PeerProcess]
) -> None:
    peer = start_peer(transport)
    with engine_with(transport) as near:
        here = near.allocate(4096)
        move = (near.open(peer.descriptor), [here.address], [peer.descriptor.regions[0].address], [4096])
        assert is_ok(near.run(Op.WRITE, *move), 4096)
        peer.say("f")
        assert is_ok(near.run(Op.WRITE, *move), 4096), "the child has cut its parent's connections"
        peer.process.kill()
        peer.process.wait()
        lost = Status.PEER_LOST
        wait_until(lambda: near.run(Op.READ, *move, timeout_s=0.5).status == lost, "the loss", timeout_s=10)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ACROSS)
def test_a_restarted_peer_is_another(transport: str, start_peer: Callable[..., PeerProcess]) -> None:
    """Old descriptor, new process at the same endpoint: the epochs differ."""
    peer, other = start_peer(transport), start_peer(transport)
    place = {"endpoints": other.descriptor.endpoints, "handshake": other.descriptor.handshake}
    stale = msgspec.structs.replace(peer.descriptor, **place)
    with engine_with(transport) as near:
        here = near.allocate(4096)
        remote = [stale.regions[0].address]
        assert near.run(Op.WRITE, near.open(stale), [here.address], remote, [100]).status == Status.PEER_LOST


@pytest.mark.processes
@pytest.mark.parametrize("transport", ACROSS)
def test_a_hung_peer_costs_its_deadline_and_no_more(
    transport: str, start_peer: Callable[..., PeerProcess]
) -> None:
    peer = start_peer(transport)
    with engine_with(transport) as near:
        data = np.zeros(4 * MIB, dtype=np.uint8)
        here = near.register(data)
        segment = near.open(peer.descriptor)
        move = (segment, [here.address], [peer.descriptor.regions[0].address], [4 * MIB])
        if transport.startswith("tcp"):
            assert is_ok(near.run(Op.READ, *move), 4 * MIB)
        peer.freeze()
        done = near.run(Op.READ, *move, timeout_s=0.2)
        assert done.status == Status.TIMED_OUT
        queue = near.new_queue()
        near.submit(queue, 1, Op.READ, *move, timeout_s=30.0 if transport.startswith("tcp") else 0.2)
        near.unregister(here)
        (ended,) = queue.drain(timeout_s=10.0)
        assert ended.status == (Status.CANCELLED if transport.startswith("tcp") else Status.TIMED_OUT)
        data[:] = 3
        peer.process.send_signal(signal.SIGCONT)
        here = near.register(data)
        done = near.run(Op.WRITE, segment, [here.address], *move[2:])
        assert is_ok(done, 4 * MIB), "a peer that wakes up is a peer again"
        assert (data == 3).all()


@pytest.mark.processes
def test_a_submitted_batch_ends_at_its_deadline_while_others_wait_for_the_peer(
    start_peer: Callable[..., PeerProcess],
) -> None:
    peer = start_peer("tcp")
    with engine_with("tcp", num_streams=1) as near:
        here = near.allocate(4 * MIB)
        move = (near.open(peer.descriptor), [here.address], [peer.descriptor.regions[0].address], [4 * MIB])
        assert is_ok(near.run(Op.READ, *move), 4 * MIB)
        peer.freeze()
        queue = near.new_queue()
        for token in range(4):  # more than there are threads
            near.submit(queue, token, Op.READ, *move, timeout_s=60.0)
        near.submit(queue, 9, Op.READ, *move, timeout_s=0.1)
        (ended,) = queue.drain(timeout_s=20.0)
        assert (ended.token, ended.status) == (9, Status.TIMED_OUT)
        peer.process.send_signal(signal.SIGCONT)
        for _ in range(4):
            (ended,) = queue.drain(1, timeout_s=20.0)
            assert is_ok(ended, 4 * MIB)


@pytest.mark.processes
def test_the_end_of_an_operation_cancels_no_other_with_the_same_memory(
    start_peer: Callable[..., PeerProcess],
) -> None:
    """Each registers the memory for itself, as puts of one buffer at the same time do."""
    peer = start_peer("tcp")
    with engine_with("tcp") as near:
        data = np.ones(MIB, dtype=np.uint8)
        span = (data.ctypes.data, MIB)
        first, second = near.register(span, is_brief=True), near.register(span, is_brief=True)
        move = (near.open(peer.descriptor), [span[0]], [peer.descriptor.regions[0].address], [MIB])
        assert is_ok(near.run(Op.WRITE, *move), MIB)
        peer.freeze()
        queue = near.new_queue()
        near.submit(queue, 1, Op.READ, *move)
        near.unregister(second)
        assert queue.drain(timeout_s=0.1) == []
        peer.process.send_signal(signal.SIGCONT)
        (ended,) = queue.drain(timeout_s=20.0)
        assert is_ok(ended, MIB)
        near.unregister(first)
        assert near.regions.all() == [] and first.is_closed and second.is_closed


@pytest.mark.processes
@pytest.mark.parametrize("transport", ACROSS)
def test_one_slice_of_a_peer_that_hangs_or_dies(
    transport: str, start_peer: Callable[..., PeerProcess]
) -> None:
    peer = start_peer(transport)
    with engine_with(transport) as near:
        here = near.allocate(4 * MIB)
        segment = near.open(peer.descriptor)
        move = (segment, here.address, peer.descriptor.regions[0].address, 4 * MIB)
        if transport.startswith("tcp"):
            assert near.run_slice(Op.READ, *move) == 0
        peer.freeze()
        assert status_of(near.run_slice(Op.READ, *move, timeout_s=0.2)) == Status.TIMED_OUT
        peer.process.send_signal(signal.SIGCONT)
        assert near.run_slice(Op.WRITE, *move) == 0, "a peer that wakes up is a peer again"
        peer.process.kill()
        peer.process.wait()
        wait_until(lambda: status_of(near.run_slice(Op.WRITE, *move)) == Status.PEER_LOST, "the loss")


@pytest.mark.processes
def test_a_hung_reader_does_not_stop_the_owner(start_peer: Callable[..., PeerProcess]) -> None:
    """The owner takes a region back from a process that has mapped it and does not answer."""
    with engine_with("shm") as near:
        region = near.allocate(4096)
        reader = subprocess.Popen(
            [sys.executable, "-c", _READER, near.describe().encode().decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert reader.stdout is not None and reader.stdin is not None
        assert reader.stdout.readline() == b"OK\n"
        reader.send_signal(signal.SIGSTOP)
        os.waitpid(reader.pid, os.WUNTRACED)
        near.unregister(region)  # returns, which is the test
        reader.send_signal(signal.SIGCONT)
        reader.stdin.close()
        assert reader.stdout.readline() in (b"PEER_LOST\n", b"ACCESS_DENIED\n")
        reader.wait(10)
        reader.stdout.close()


_READER = """
import sys
from mooncake.transfer import *
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.transfer.transports.rdma import usable_devices
engine = TransferEngine(TransferSettings(transports=("shm",)))
segment = engine.open(decode_descriptor(sys.argv[1].encode()))
here = engine.allocate(4096)
move = (Op.READ, segment, [here.address], [segment.descriptor.regions[0].address], [4096])
print(engine.run(*move).status.name, flush=True)
sys.stdin.read()
status = Status.OK
while status == Status.OK:
    status = engine.run(*move).status
print(status.name, flush=True)
"""


def test_a_forked_child_moves_nothing_over_its_parents_connections(pair: Pair) -> None:
    """Both would read the answers of one connection. The child's error says so at once, and what to do."""
    _, here = pair.buffer(1000)
    move = (pair.segment, [here.address], [pair.pool.address], [1000])
    assert is_ok(pair.near.run(Op.WRITE, *move), 1000)
    connection = pair.segment.connection(pair.segment.paths[0], 5)
    assert connection is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said: list[object] = []
        try:
            said.append(pair.near.run(Op.READ, *move).status.name)
            columns = transfer_columns(*move[1:])
            done = connection.run(Op.READ, columns.local, columns.remote, columns.lengths, 5.0, False)
            said.append((done.status.name, done.reason))
            said.append(pair.segment)
        except BaseException as error:
            said.append(error)
        os.write(writing, repr(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said_there = os.read(reading, 4096).decode()
    os.close(reading)
    os.close(writing)
    assert said_there.startswith("['PEER_LOST', "), said_there
    assert "that of the process that forked this one; make another one here" in said_there
    if pair.segment.paths != ("local",):  # whose connections are this engine's Python objects
        assert "('CANCELLED', 'the peer was opened before this process was forked" in said_there
    assert is_ok(pair.near.run(Op.READ, *move), 1000)


@pytest.mark.processes
def test_processes_exit_cleanly_without_close(transport: str) -> None:
    """Exit of the interpreter with everything open, of a forked child, and of one forked under traffic."""
    script = """
import os, sys, numpy as np
from mooncake.transfer import *
from tests.contract.peer_process import engine_with, lend
near, far = engine_with(sys.argv[1]), engine_with(sys.argv[1])
pool, here = lend(far, sys.argv[1], 1 << 20), near.allocate(1 << 20)
segment = near.open(far.describe())
queue = near.new_queue()
near.submit(queue, 1, Op.WRITE, segment, [here.address], [pool.address], [1 << 20])
queue.drain(timeout_s=10)
child = os.fork()
if child == 0:
    del near, far, segment, queue
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert near.run(Op.READ, segment, [here.address], [pool.address], [1000]).status == Status.OK
near.submit(queue, 2, Op.WRITE, segment, [here.address], [pool.address], [1 << 20])
"""
    done = subprocess.run(
        # Python 3.12 warns of a fork where a thread runs, which is what is tested.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, transport],
        timeout=60,
        capture_output=True,
        text=True,
        cwd=PEER.parent.parent.parent,
    )
    assert (done.returncode, done.stderr) == (0, "")
