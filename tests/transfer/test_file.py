# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from mooncake.errors import AccessDenied, InvalidArgument, OutOfSpace, StorageError
from mooncake.transfer import Op, Region, Status, TransferEngine, TransferSettings, crc32c

MIB = 1 << 20


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(transports=("shm", "file", "tcp"))) as engine:
        yield engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bytes"


def noise(size: int, seed: int = 1) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def move(engine: TransferEngine, op: Op, there: int, here: int, size: int) -> None:
    done = engine.run(op, engine.open(engine.describe()), [here], [there], [size])
    assert (done.status, done.num_bytes) == (Status.OK, size), done


def test_a_file_is_created_extended_and_kept(engine: TransferEngine, path: Path) -> None:
    region = engine.open_file(path, 10_000)
    assert (region.kind, region.size_bytes, region.is_shared, region.is_writable) == (
        "file",
        10_000,
        True,
        True,
    )
    assert path.stat().st_size == 10_000
    assert str(path) in repr(region) and region.how in repr(region)
    data = noise(10_000)
    move(engine, Op.WRITE, region.address, engine.register(data).address, 10_000)
    engine.flush(region)
    engine.unregister(region)
    assert path.read_bytes() == data.tobytes()
    longer = engine.open_file(path, 12_000)
    assert path.stat().st_size == 12_000
    assert path.read_bytes() == data.tobytes() + bytes(2_000)
    engine.unregister(longer)
    assert engine.open_file(path, 5_000).size_bytes == 5_000
    assert path.stat().st_size == 12_000, "a file is never cut"
    assert engine.open_file(path).size_bytes == 12_000


def test_what_cannot_be_opened(engine: TransferEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="size_bytes to create it"):
        engine.open_file(tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match="more than 0"):
        engine.open_file(tmp_path / "nothing", 0)
    with pytest.raises(InvalidArgument, match="block device"):
        engine.open_file(tmp_path)
    with pytest.raises(InvalidArgument, match="block device"):
        engine.open_file("/dev/null", 4096)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(InvalidArgument, match="not empty"):
        engine.open_file(empty)
    with pytest.raises(OutOfSpace, match="make room"):
        engine.open_file(empty, 1 << 55)
    assert empty.stat().st_size == 0
    with pytest.raises(OutOfSpace, match="make room"):
        engine.open_file(empty, 4096, writable=False)
    if os.geteuid() == 0:
        return  # root opens everything
    locked = tmp_path / "locked"
    locked.write_bytes(b"x")
    locked.chmod(0o400)
    with pytest.raises(AccessDenied, match="writable=False"):
        engine.open_file(locked)


def test_a_file_is_no_buffer(engine: TransferEngine, path: Path) -> None:
    region = engine.open_file(path, 4096)
    with pytest.raises(BufferError, match="kind file"):
        memoryview(region)
    with pytest.raises(InvalidArgument, match="region of kind file"):
        engine.flush(engine.allocate(4096))


def test_a_read_only_file_is_not_written(engine: TransferEngine, path: Path) -> None:
    path.write_bytes(bytes(5000))
    region = engine.open_file(path, writable=False)
    here = engine.register(noise(5000))
    segment = engine.open(engine.describe())
    done = engine.run(Op.WRITE, segment, [here.address], [region.address], [5000])
    assert done.status == Status.ACCESS_DENIED
    with pytest.raises(InvalidArgument, match="writable"):
        engine.run(Op.READ, segment, [region.address], [here.address], [5000])
    assert path.read_bytes() == bytes(5000)
    move(engine, Op.READ, region.address, here.address, 5000)


WAYS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(("direct", "ring"), WAYS, ids=["direct+ring", "direct", "ring", "neither"])
@pytest.mark.parametrize("folder", ["disk", "memory"])
def test_ranges_of_every_alignment(tmp_path: Path, folder: str, direct: bool, ring: bool) -> None:
    """Against a model: bytes outside a range stay unchanged, by whichever path the range was moved."""
    home = tmp_path if folder == "disk" else Path("/dev/shm")
    path = home / f"mooncake-test-{os.getpid()}-{direct}-{ring}"
    size = 3 * MIB + 1234
    rng = np.random.default_rng(5)
    try:
        with TransferEngine(TransferSettings(file_ring=ring, file_depth=4)) as engine:
            region = engine.open_file(path, size, direct=direct)
            assert ("io_uring" in region.how) or not ring or "because" in region.how
            segment = engine.open(engine.describe())
            model = np.zeros(size, dtype=np.uint8)
            data, back = noise(size + 100), np.zeros(size + 100, dtype=np.uint8)
            here, landing = engine.register(data), engine.register(back)
            for _ in range(15):
                starts = np.sort(rng.choice(size, 6, replace=False))
                if rng.random() < 0.5:
                    starts = starts // 4096 * 4096
                lengths = np.minimum(np.diff(starts, append=size), rng.integers(0, 700_000, 6))
                skew = int(rng.integers(0, 100)) if rng.random() < 0.7 else 0
                local = [here.address + skew + int(start) for start in starts]
                remote = [region.address + int(start) for start in starts]
                done = engine.run(Op.WRITE, segment, local, remote, lengths, checksum=True)
                assert done.status == Status.OK, done
                for start, length in zip(starts, lengths, strict=True):
                    model[start : start + length] = data[skew + start : skew + start + length]
                assert path.read_bytes() == model.tobytes()
                back[:] = 0
                local = [landing.address + skew + int(start) for start in starts]
                again = engine.run(Op.READ, segment, local, remote, lengths, checksum=True)
                assert again.status == Status.OK and again.checksums is not None
                assert done.checksums is not None and (again.checksums == done.checksums).all()
                for start, length in zip(starts, lengths, strict=True):
                    there = back[skew + start : skew + start + length]
                    assert (there == model[start : start + length]).all()
                    there[:] = 0
                assert not back.any(), "bytes beside the ranges were touched"
    finally:
        path.unlink(missing_ok=True)


def test_a_file_that_was_cut_short(engine: TransferEngine, path: Path) -> None:
    region = engine.open_file(path, 4 * MIB)
    data = noise(4 * MIB)
    here = engine.register(data)
    segment = engine.open(engine.describe())
    os.truncate(path, MIB + 100)
    move(engine, Op.READ, region.address, here.address, MIB)
    for start in (MIB, 2 * MIB, MIB - 4096):
        done = engine.run(Op.READ, segment, [here.address], [region.address + start], [MIB])
        assert (done.status, done.failed_slice) == (Status.IO_ERROR, 0)
        assert "shorter than its region" in done.reason and done.reason in repr(done)


async def test_a_failure_says_what_is_wrong(engine: TransferEngine, path: Path) -> None:
    region = engine.open_file(path, MIB)
    here = engine.register(noise(MIB))
    os.truncate(path, 0)
    with pytest.raises(StorageError, match="shorter than its region"):
        await engine.read(engine.open(engine.describe()), here, region.address)


def test_from_file_to_file_and_to_a_peer(engine: TransferEngine, tmp_path: Path) -> None:
    """A file may be the local side of any path, through staging memory."""
    size = 9 * MIB + 77
    data = noise(size)
    (tmp_path / "one").write_bytes(data.tobytes())
    one, two = engine.open_file(tmp_path / "one"), engine.open_file(tmp_path / "two", size)
    move(engine, Op.WRITE, two.address, one.address, size)
    assert (tmp_path / "two").read_bytes() == data.tobytes()
    for scheme in ("shm", "tcp"):
        with TransferEngine(TransferSettings(transports=(scheme,))) as far:
            pool = far.allocate(size)
            segment = engine.open(far.describe())
            done = engine.run(Op.WRITE, segment, [one.address], [pool.address], [size], checksum=True)
            assert (done.status, done.num_bytes) == (Status.OK, size)
            assert bytes(pool.view()) == data.tobytes()
            done = engine.run(Op.READ, segment, [two.address], [pool.address + 5], [size - 5])
            assert done.status == Status.OK
            assert (tmp_path / "two").read_bytes() == data.tobytes()[5:] + data.tobytes()[-5:]
            move(engine, Op.WRITE, two.address, one.address, size)


def test_files_of_other_sizes_never_share_addresses(engine: TransferEngine, tmp_path: Path) -> None:
    regions = [engine.open_file(tmp_path / str(i), 1 + i * 5000) for i in range(8)]
    regions.append(engine.allocate(MIB))
    spans = sorted((region.address, region.address + region.size_bytes) for region in regions)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_more_empty_slices_than_a_piece_has(path: Path) -> None:
    with TransferEngine(TransferSettings(transports=("file",))) as engine:
        region, here = engine.open_file(path, 4096), engine.allocate(4096)
        here.view()[:] = noise(4096).data
        lengths = [0] * ((1 << 16) + 7) + [4096]
        queue = engine.new_queue()
        columns = [here.address] * len(lengths), [region.address] * len(lengths), lengths
        engine.submit(queue, 1, Op.WRITE, engine.open(engine.describe()), *columns, checksum=True)
        (done,) = queue.drain(timeout_s=60)
        assert (done.status, done.num_bytes) == (Status.OK, 4096) and done.checksums is not None
        assert done.checksums[-1] == crc32c(here.view()) and not done.checksums[:-1].any()
        assert path.read_bytes() == bytes(here.view())


def test_unregistering_a_file_during_transfers(engine: TransferEngine, path: Path) -> None:
    region = engine.open_file(path, 16 * MIB)
    here = engine.register(noise(16 * MIB))
    segment = engine.open(engine.describe())
    seen: list[Status] = []
    has_begun = threading.Event()

    def work(region: Region) -> None:
        status = Status.OK
        while status == Status.OK:
            status = engine.run(Op.WRITE, segment, [here.address], [region.address], [16 * MIB]).status
            seen.append(status)
            has_begun.set()

    threads = [threading.Thread(target=work, args=(region,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert has_begun.wait(30)
    engine.unregister(region)
    path.write_bytes(b"mine")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert set(seen) <= {Status.OK, Status.ACCESS_DENIED, Status.CANCELLED} and seen[-1] != Status.OK
    assert path.read_bytes() == b"mine", "the file was touched after it was unregistered"


def test_an_engine_on_another_host_is_not_reached_by_file(engine: TransferEngine, path: Path) -> None:
    engine.open_file(path, 4096)
    described = engine.describe()
    assert engine.open(described).paths[1] == "file"
    with TransferEngine() as other:
        assert "file" in other.open(described).paths
    elsewhere = msgspec.structs.replace(described, name="elsewhere", epoch=7, host="elsewhere")
    assert "file" not in engine.open(elsewhere).paths


READER = """
import sys
from mooncake.transfer import Op, TransferEngine, TransferSettings
from mooncake.transfer.descriptor import decode_descriptor
with TransferEngine(TransferSettings(transports=("shm", "file"))) as engine:
    segment = engine.open(decode_descriptor(sys.stdin.readline().encode()))
    here = engine.allocate(1 << 20)
    there = segment.descriptor.regions[0].address
    done = engine.run(Op.READ, segment, [here.address], [there], [1 << 20], checksum=True)
    print(done.status.name, done.checksums, flush=True)
    here.view()[:5] = b"other"
    done = engine.run(Op.WRITE, segment, [here.address], [there + 7], [5])
    print(done.status.name, flush=True)
    sys.stdin.readline()
    done = engine.run(Op.READ, segment, [here.address], [there], [1 << 20])
    print(done.status.name, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("writable", [True, False])
def test_another_process_opens_the_file_itself(engine: TransferEngine, path: Path, writable: bool) -> None:
    """Without tcp, a peer reads what the owner wrote, writes if permitted, and is refused afterwards."""
    content = np.random.default_rng(2).bytes(MIB)
    path.write_bytes(content)
    region = engine.open_file(path, writable=writable)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None and reader.stdout is not None
    try:
        print(engine.describe().encode().decode(), file=reader.stdin, flush=True)
        assert reader.stdout.readline() == f"OK [{crc32c(content)}]\n"
        assert reader.stdout.readline() == ("OK\n" if writable else "ACCESS_DENIED\n")
        assert path.read_bytes() == (content[:7] + b"other" + content[12:] if writable else content)
        engine.unregister(region)
        print("", file=reader.stdin, flush=True)
        assert reader.stdout.readline() == "ACCESS_DENIED\n"
    finally:
        reader.kill()
        reader.communicate()


def test_room_is_set_aside_in_a_file_with_holes(engine: TransferEngine, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 * MIB)
    region = engine.open_file(path, 8 * MIB)
    assert path.stat().st_blocks == 0
    engine.provide(region, MIB, MIB)
    assert path.stat().st_blocks * 512 == MIB
    assert path.stat().st_size == 8 * MIB


def test_room_is_set_aside_within_the_region_only(engine: TransferEngine, path: Path) -> None:
    region = engine.open_file(path, MIB)
    for offset, size_bytes in ((MIB, 1), (1, MIB), (2**63, 2**63)):
        with pytest.raises(InvalidArgument, match=r"offset, size_bytes.* 1,048,576 bytes"):
            engine.provide(region, offset, size_bytes)
    engine.provide(region, 0, MIB)


def test_what_was_not_done_to_a_closed_file_is_no_success(engine: TransferEngine, path: Path) -> None:
    """A durable put is acknowledged because its file was flushed."""
    region = engine.open_file(path, MIB)
    engine.flush(region)
    engine.unregister(region)
    with pytest.raises(StorageError, match=r"flush .*unregistered.* may be lost"):
        engine.flush(region)
    with pytest.raises(StorageError, match=r"provide .*unregistered"):
        engine.provide(region, 0, 4096)


def test_a_full_disk_refuses_room(engine: TransferEngine, path: Path) -> None:
    class Full:
        path = "the disk"

        def provide(self, offset: int, size_bytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutOfSpace, match=r"the disk with 4,096 bytes: No space left.* make room"):
        engine.provide(Full(), 0, 4096)  # type: ignore[arg-type]
