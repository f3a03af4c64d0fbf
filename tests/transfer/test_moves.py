"""``write`` and ``read``: what callers pass, what they are told, what is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.errors import AccessDenied, DeadlineExceeded, InvalidArgument, PeerLost
from mooncake.transfer import Completion, Op, RemoteSegment, Status, TransferEngine, TransferSettings, crc32c
from mooncake.transfer.moves import completion_error, rows_of

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
    [told] = far.notifications()
    assert (told.sender, told.name, told.text) == ("near", "kv", "layer 3")
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
    told: list[tuple[int, int]] = []
    await near.write(
        near.open(far.describe()), here, pool.address, progress=lambda done, whole: told.append((done, whole))
    )
    assert told[-1] == (40 * MIB, 40 * MIB) and told == sorted(told) and len(told) > 1


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
    ],
)
def test_failures_name_the_operation_the_peer_and_the_slice(
    near: TransferEngine, far: TransferEngine, status: Status, error: type[Exception]
) -> None:
    segment: RemoteSegment = near.open(far.describe())
    raised = completion_error(Op.READ, segment, Completion(status=status, failed_slice=2), 5.0)
    assert type(raised) is error and "read from far (slice 2)" in str(raised)


def test_rows_of_memory_that_knows_its_length() -> None:
    data = np.zeros((4, 5), dtype=np.uint32)
    start = data.ctypes.data
    assert rows_of(data, 7) == ([start], [7], [80])
    assert rows_of([data[0], (123, 9)], np.array([1, 2])) == ([start, 123], [1, 2], [20, 9])
