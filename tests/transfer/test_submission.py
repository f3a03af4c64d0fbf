# SPDX-License-Identifier: Apache-2.0
"""When a batch is planned; arguments, reports and errors of ``write`` and ``read``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mooncake.errors import AccessDenied, DeadlineExceeded, InvalidArgument, PeerLost
from mooncake.transfer import Completion, Op, RemoteSegment, Status, TransferEngine, TransferSettings, crc32c
from mooncake.transfer.submission import completion_error, rows_of
from tests.transfer.mute import PATIENCE_S, Mute


def test_memory_that_one_path_alone_carries_needs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, here = np.zeros(100, dtype=np.uint8), np.arange(100, dtype=np.uint8)
    planned: list[Any] = []
    with TransferEngine() as far, TransferEngine() as near:
        plan = near._move

        def note(*arguments: Any) -> Any:
            planned.append(arguments)
            return plan(*arguments)

        monkeypatch.setattr(near, "_move", note)
        registered, ours, pool = far.register(plain), near.register(here), far.allocate(4096)
        segment = near.open(far.describe())
        for there in (registered.address, pool.address):
            done = near.run(Op.WRITE, segment, [ours.address], [there], [100])
            assert (done.status, done.num_bytes) == (Status.OK, 100)
        assert not planned and (plain == here).all() and bytes(pool.view()[:100]) == here.tobytes()
        both = near.run(Op.WRITE, segment, [ours.address] * 2, [registered.address, pool.address], [100] * 2)
        assert both.status == Status.OK and len(planned) == 1
        assert near.run(Op.WRITE, segment, [ours.address], [1], [1]).status == Status.ACCESS_DENIED
        assert near.run(Op.WRITE, segment, [], [], []).status == Status.OK
        far.close()
        assert (
            near.run(Op.WRITE, segment, [ours.address], [registered.address], [100]).status
            == Status.PEER_LOST
        )


async def test_a_coroutine_that_meets_a_mute_peer_does_not_hold_its_loop() -> None:
    with TransferEngine() as far, TransferEngine() as near, Mute() as mute:
        pool, here = far.allocate(4096), near.allocate(4096)
        segment = near.open(mute.instead_of(far.describe()))
        columns = [here.address], [pool.address], [4096]
        moving = asyncio.ensure_future(near.transfer(Op.READ, segment, *columns, timeout_s=PATIENCE_S))
        await mute.met()
        assert mute.is_waited_for() and not moving.done()
        mute.close()
        assert (await moving).status == Status.PEER_LOST


async def test_a_coroutine_gives_a_mute_peer_no_more_than_its_time() -> None:
    with TransferEngine() as far, TransferEngine() as near, Mute() as mute:
        pool, here = far.allocate(4096), near.allocate(4096)
        segment = near.open(mute.instead_of(far.describe()))
        done = await near.transfer(Op.READ, segment, [here.address], [pool.address], [4096], timeout_s=0.01)
        assert done.status == Status.TIMED_OUT and not segment.is_connected


def test_a_peer_is_met_again_when_it_has_other_memory() -> None:
    with TransferEngine() as far, TransferEngine() as near:
        registered = far.register(np.zeros(100, dtype=np.uint8))
        segment = near.open(far.describe())
        assert segment.connect(PATIENCE_S), "over tcp: there is nothing to share"
        far.allocate(4096)
        far.unregister(registered)
        assert (near.open(far.describe()), segment.is_connected) == (segment, False)
        assert segment.connect(PATIENCE_S)


MIB = 1 << 20


@pytest.fixture
def near() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(handshake_port=0, name="near")) as engine:
        yield engine


@pytest.fixture
def far() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(handshake_port=0, name="far")) as engine:
        yield engine


async def test_arrays_there_and_back_with_a_notification(near: TransferEngine, far: TransferEngine) -> None:
    pool = far.allocate(10_000)
    data = np.random.default_rng(1).integers(0, 256, 6000, dtype=np.uint8)
    back = np.zeros((2, 1500), dtype=np.uint16)
    near.register_all([data, back])
    segment = near.open(far.describe())
    done = await near.write(segment, data, pool.address + 7, checksum=True, notify=("kv", "layer 3"))
    assert done.num_bytes == 6000 and done.checksums is not None
    assert done.checksums[0] == crc32c(data.data)
    [note] = far.notifications()
    assert (note.sender, note.name, note.text) == ("near", "kv", "layer 3")
    assert bytes(pool.view()[7:6007]) == data.tobytes()
    await near.read(segment, [back[1], back[0]], [pool.address + 7, pool.address + 3007])
    assert back.tobytes() == data[3000:].tobytes() + data[:3000].tobytes()


async def test_columns_and_a_region(near: TransferEngine, far: TransferEngine) -> None:
    pool, here = far.allocate(4096), near.allocate(4096)
    here.view()[:] = b"q" * 4096
    segment = near.open(far.describe())
    await near.write(segment, [here.address], [pool.address + 96], [4000])
    assert bytes(pool.view()) == bytes(96) + b"q" * 4000
    await near.write(segment, here, pool.address)
    assert bytes(pool.view()) == b"q" * 4096


async def test_torch_tensors(near: TransferEngine, far: TransferEngine) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    pool = far.allocate(4096)
    tensor = torch.arange(512, dtype=torch.int64).reshape(16, 32)
    back = torch.zeros_like(tensor)
    near.register_all([tensor, back])
    segment = near.open(far.describe())
    await near.write(segment, tensor, pool.address)
    await near.read(segment, [back[8:], back[:8]], [pool.address + 2048, pool.address])
    assert torch.equal(back, tensor)
    with pytest.raises(InvalidArgument, match="contiguous"):
        await near.write(segment, tensor.t(), pool.address)


async def test_progress_ends_with_all_of_it(near: TransferEngine, far: TransferEngine) -> None:
    pool, here = far.allocate(40 * MIB), near.allocate(40 * MIB)
    reported: list[tuple[int, int]] = []
    await near.write(
        near.open(far.describe()),
        here,
        pool.address,
        progress=lambda done, whole: reported.append((done, whole)),
    )
    assert reported[-1] == (40 * MIB, 40 * MIB) and reported == sorted(reported) and len(reported) > 1


@pytest.mark.parametrize("lengths", [[-1], [1.5], ["1"], [1 << 64], np.array([-1])])
@pytest.mark.parametrize("progress", [None, lambda done, whole: None])
async def test_lengths_that_are_none_are_refused(
    near: TransferEngine, far: TransferEngine, lengths: Any, progress: Any
) -> None:
    pool, here = far.allocate(4096), near.allocate(4096)
    columns = [here.address], [pool.address], lengths
    with pytest.raises(InvalidArgument, match="columns"):
        await near.write(near.open(far.describe()), *columns, progress=progress)


async def test_an_urgent_write_overtakes_those_that_wait() -> None:
    only_tcp = TransferSettings(transports=("tcp",), num_streams=1)
    with TransferEngine(only_tcp) as far, TransferEngine(only_tcp) as near:
        pool, here = far.allocate(64 * MIB), near.allocate(64 * MIB)
        segment = near.open(far.describe())
        ended: list[str] = []

        async def write(name: str, size: int, priority: int) -> None:
            await near.write(segment, (here.address, size), pool.address, priority=priority)
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            for number in range(8):  # more than there are workers
                group.create_task(write(f"bulk {number}", 64 * MIB, 0))
            await asyncio.sleep(0)
            group.create_task(write("urgent", 4096, 1))
        assert ended[-1] != "urgent", ended  # in order it would be: 512 MiB were asked for before it


async def test_what_is_raised(near: TransferEngine, far: TransferEngine) -> None:
    pool, here = far.allocate(4096), near.allocate(4096)
    segment = near.open(far.describe())
    with pytest.raises(AccessDenied, match="write to far"):
        await near.write(segment, here, pool.address + 1)
    with pytest.raises(InvalidArgument, match="register"):
        await near.read(segment, np.zeros(10, dtype=np.uint8), pool.address)
    with pytest.raises(InvalidArgument, match="one for each of 2"):
        await near.read(segment, [here, here], [pool.address])
    with pytest.raises(InvalidArgument, match="at most"):
        await near.write(segment, here, pool.address, notify=("big", bytes(2 << 20)))
    queue = near.new_queue()
    for priority in (2**31, -(2**31) - 1, 2**70):
        with pytest.raises(InvalidArgument, match="priority"):
            await near.write(segment, here, pool.address, priority=priority)
        with pytest.raises(InvalidArgument, match="priority"):
            near.submit(queue, 1, Op.WRITE, segment, [], [], [], priority=priority)
    far.close()
    with pytest.raises((PeerLost, AccessDenied), match="far"):  # its memory goes before its connections
        await near.write(segment, here, pool.address)


def test_registering_several_is_all_or_nothing(near: TransferEngine) -> None:
    fine = np.zeros(10, dtype=np.uint8)
    before = len(near.regions.all())
    with pytest.raises(InvalidArgument):
        near.register_all([fine, "text"])
    assert len(near.regions.all()) == before
    assert [region.size_bytes for region in near.register_all([fine, bytearray(3)])] == [10, 3]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (Status.TIMED_OUT, DeadlineExceeded),
        (Status.PEER_LOST, PeerLost),
        (Status.ACCESS_DENIED, AccessDenied),
        (Status.UNREGISTERED, InvalidArgument),
    ],
)
def test_failures_name_the_operation_the_peer_and_the_slice(
    near: TransferEngine, far: TransferEngine, status: Status, error: type[Exception]
) -> None:
    segment: RemoteSegment = near.open(far.describe())
    raised = completion_error(Op.READ, segment, Completion(status=status, failed_slice=2), 5.0)
    assert type(raised) is error and "read from far (slice 2)" in str(raised)


async def test_local_memory_that_was_not_registered_is_named_however_many_paths_are_used() -> None:
    """Where another path has already begun to carry its slices, that is known at the end only."""
    with TransferEngine() as far, TransferEngine() as near:
        pool, plain = far.allocate(4096), far.register(np.zeros(4096, dtype=np.uint8))
        here, forgotten = near.allocate(4096), np.zeros(4096, dtype=np.uint8)
        segment = near.open(far.describe())
        both = [here.address, forgotten.ctypes.data], [pool.address, plain.address], [64, 64]
        with pytest.raises(InvalidArgument, match=r"local\[1\].*register"):
            await near.transfer(Op.WRITE, segment, *both)
        with pytest.raises(InvalidArgument, match=r"local\[1\].*register"):
            await near.write(segment, *both)
        queue = near.new_queue()
        near.submit(queue, 5, Op.WRITE, segment, *both)
        done: list[Completion] = []
        while not done:
            done = queue.drain(timeout_s=60)
        assert [(one.token, one.status, one.failed_slice) for one in done] == [(5, Status.UNREGISTERED, 1)]


def test_rows_of_memory_that_knows_its_length() -> None:
    data = np.zeros((4, 5), dtype=np.uint32)
    start = data.ctypes.data
    assert rows_of(data, 7) == ([start], [7], [80])
    assert rows_of([data[0], (123, 9)], np.array([1, 2])) == ([start, 123], [1, 2], [20, 9])
