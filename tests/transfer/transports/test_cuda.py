# SPDX-License-Identifier: Apache-2.0
"""Device memory through the engine, over the test double of the driver; what the double cannot show is
said in ``native/test_cuda_driver.cpp``, and ``scripts/test-cuda`` runs the contract suite on a real GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mooncake.errors import InvalidArgument, OutOfMemory, Unavailable
from mooncake.transfer import Op, Region, Status, TransferEngine, TransferSettings, crc32c
from mooncake.transfer.transports.cuda import why_unavailable
from tests.contract import cuda_double

NOWHERE = "libcuda-nowhere.so.1"


@pytest.fixture(scope="module")
def library() -> str:
    if not cuda_double.built():
        pytest.skip("no C++ compiler for the test double of the CUDA driver; install g++")
    return str(cuda_double.LIBRARY)


@pytest.fixture
def pair(library: str) -> Iterator[tuple[TransferEngine, TransferEngine]]:
    settings = TransferSettings(cuda_library=library)
    with TransferEngine(settings) as near, TransferEngine(settings) as far:
        yield near, far


class DeviceArray:
    """The interface of arrays of cupy, numba and jax."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def noise(size: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def bytes_of(region: Region) -> bytes:
    held = bytearray(region.size_bytes)
    region.read_into(held)
    return bytes(held)


# Without a GPU --------------------------------------------------------------------------------------


def test_a_machine_without_the_driver_says_so() -> None:
    assert "libcuda-nowhere" in why_unavailable(NOWHERE) and "install" in why_unavailable(NOWHERE)
    with pytest.raises(Unavailable, match=r"libcuda-nowhere.*install the NVIDIA driver"):
        TransferEngine(TransferSettings(transports=("cuda", "tcp"), cuda_library=NOWHERE))


def test_the_default_does_without_and_device_memory_is_refused() -> None:
    with TransferEngine(TransferSettings(cuda_library=NOWHERE)) as engine:
        assert "cuda" not in engine.describe().endpoints
        for refused in (
            lambda: engine.register(DeviceArray(1 << 40, 100)),
            lambda: engine.allocate(100, device="cuda:0"),
            lambda: engine.pin(engine.allocate(4096)),
        ):
            with pytest.raises(Unavailable, match="libcuda-nowhere"):
                refused()
    with (
        TransferEngine(TransferSettings(transports=("tcp",))) as engine,
        pytest.raises(InvalidArgument, match="a list with cuda"),
    ):
        engine.register(DeviceArray(1 << 40, 100))


# Over the double -------------------------------------------------------------------------------------


def test_device_memory_is_described(pair: tuple[TransferEngine, TransferEngine]) -> None:
    near, far = pair
    region = far.allocate(10_000, device="cuda:1")
    (described,) = far.describe().regions
    assert (described.kind, described.is_shared, described.address) == ("cuda:1", True, region.address)
    assert bytes_of(region) == bytes(10_000)
    with pytest.raises(BufferError, match="cuda:1"):
        memoryview(region)
    assert near.open(far.describe()).paths == ("shm", "file", "cuda", "tcp")


def test_buffers_in_device_memory(pair: tuple[TransferEngine, TransferEngine]) -> None:
    near, _ = pair
    whole = near.allocate(10_000, device="cuda:0")
    for buffer in (DeviceArray(whole.address + 100, 500), (whole.address + 100, 500)):
        part = near.register(buffer)
        assert (part.kind, part.address, part.size_bytes) == ("cuda:0", whole.address + 100, 500)
        assert part.owner is buffer
    with pytest.raises(InvalidArgument, match="device memory"):
        near.register(DeviceArray(whole.address + 9_900, 200))
    with pytest.raises(InvalidArgument, match="one of cuda:0, cuda:1"):
        near.allocate(100, device="cuda:2")
    with pytest.raises(OutOfMemory, match="cuda:0"):
        near.allocate(1 << 50, device="cuda:0")


@pytest.mark.parametrize("local_device", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("remote_device", ["cpu", "cuda:0"])
def test_every_pair_of_places(
    pair: tuple[TransferEngine, TransferEngine], local_device: str, remote_device: str
) -> None:
    near, far = pair
    size = 3_000_001
    here, pool = near.allocate(size, device=local_device), far.allocate(size + 7, device=remote_device)
    data = noise(size)
    here.write_from(data.data)
    segment = near.open(far.describe())
    cut = 1_234_567
    local = [here.address, here.address + cut]
    remote = [pool.address + 7, pool.address + 7 + cut]
    sums = [crc32c(data[:cut].data), crc32c(data[cut:].data)]
    done = near.run(Op.WRITE, segment, local, remote, [cut, size - cut], checksum=True)
    assert (done.status, done.num_bytes) == (Status.OK, size)
    assert done.checksums is not None and done.checksums.tolist() == sums
    assert bytes_of(pool) == bytes(7) + data.tobytes()
    here.write_from(bytes(size))
    done = near.run(Op.READ, segment, local, remote, [cut, size - cut], checksum=True)
    assert done.status == Status.OK
    assert done.checksums is not None and done.checksums.tolist() == sums
    assert bytes_of(here) == data.tobytes()


def test_device_and_shared_memory_in_one_batch(pair: tuple[TransferEngine, TransferEngine]) -> None:
    near, far = pair
    pools = [far.allocate(5_000), far.allocate(5_000, device="cuda:0")]
    data = noise(10_000)
    here = near.register(data)
    rows = range(10)
    local = [here.address + row * 1_000 for row in rows]
    remote = [pools[row % 2].address + row // 2 * 1_000 for row in rows]
    done = near.run(Op.WRITE, near.open(far.describe()), local, remote, [1_000] * 10)
    assert (done.status, done.num_bytes) == (Status.OK, 10_000)
    in_turn = data.reshape(10, 1_000)
    for number, pool in enumerate(pools):
        assert bytes_of(pool) == in_turn[number::2].tobytes()


def test_device_memory_is_a_source_for_tcp(library: str) -> None:
    settings = TransferSettings(transports=("tcp", "cuda"), cuda_library=library)
    with TransferEngine(settings) as near, TransferEngine(settings) as far:
        plain = np.zeros(1_000_000, dtype=np.uint8)
        registered = far.register(plain)
        here = near.allocate(1_000_000, device="cuda:0")
        data = noise(1_000_000)
        here.write_from(data.data)
        segment = near.open(far.describe())
        done = near.run(Op.WRITE, segment, [here.address], [registered.address], [1_000_000], checksum=True)
        assert done.status == Status.OK and (plain == data).all()
        assert done.checksums is not None and done.checksums.tolist() == [crc32c(data.data)]


def test_device_memory_is_reached_over_tcp(library: str) -> None:
    """Over tcp, as from another host: the owner's server moves the bytes through pinned staging."""
    with (
        TransferEngine(TransferSettings(transports=("tcp",))) as near,
        TransferEngine(TransferSettings(transports=("tcp", "cuda"), cuda_library=library)) as far,
    ):
        size = 3_000_001
        pool = far.allocate(size + 9, device="cuda:1")
        data = noise(size)
        here = near.register(data)
        segment = near.open(far.describe())
        assert segment.paths == ("tcp",)
        done = near.run(Op.WRITE, segment, [here.address], [pool.address + 9], [size], checksum=True)
        assert (done.status, done.num_bytes) == (Status.OK, size)
        assert done.checksums is not None and done.checksums.tolist() == [crc32c(data.data)]
        assert bytes_of(pool) == bytes(9) + data.tobytes()
        back = np.zeros(size, dtype=np.uint8)
        there = near.register(back)
        done = near.run(Op.READ, segment, [there.address], [pool.address + 9], [size], checksum=True)
        assert done.status == Status.OK and (back == data).all()
        done = near.run(Op.WRITE, segment, [here.address], [pool.address + 10], [size])
        assert done.status == Status.ACCESS_DENIED


def test_pinned_memory(pair: tuple[TransferEngine, TransferEngine], library: str) -> None:
    near, far = pair
    pool = far.allocate(1 << 20, device="cuda:0")
    here = near.allocate(1 << 20)
    assert not any(bytes_of(pool))  # has staging buffers by now
    before = _held(library)["pinned"]
    near.pin(here)
    near.pin(here)
    assert _held(library)["pinned"] == before + 1
    here.view()[:] = noise(1 << 20).data
    segment = near.open(far.describe())
    done = near.run(Op.WRITE, segment, [here.address], [pool.address], [1 << 20], checksum=True)
    assert done.status == Status.OK and bytes_of(pool) == bytes(here.view())
    assert done.checksums is not None and done.checksums.tolist() == [crc32c(here.view())]
    near.unregister(here)
    assert _held(library)["pinned"] == before


def _held(library: str) -> dict[str, int]:
    numbers = [ctypes.c_int() for _ in range(4)]
    ctypes.CDLL(library).double_counts(*(ctypes.byref(number) for number in numbers))
    return dict(zip(("own", "opened", "pinned", "streams"), (n.value for n in numbers), strict=True))


def test_nothing_is_left_behind(library: str) -> None:
    settings = TransferSettings(transports=("cuda",), cuda_library=library)

    def visit() -> None:
        with TransferEngine(settings) as near, TransferEngine(settings) as far:
            pool, here = far.allocate(4096, device="cuda:0"), near.allocate(4096, device="cuda:1")
            segment = near.open(far.describe())
            done = near.run(Op.WRITE, segment, [here.address], [pool.address], [4096])
            assert done.status == Status.OK

    visit()
    before: dict[str, Any] = _held(library)
    for _ in range(30):
        visit()
    assert _held(library) == before
