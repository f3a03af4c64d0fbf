# SPDX-License-Identifier: Apache-2.0
"""Behaviour that the engine adds to its transports: choice of paths, retries, names, memory, coroutines."""

from __future__ import annotations

import array
import asyncio
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from mooncake.errors import AddressInUse, InvalidArgument, OutOfMemory, PeerLost, ProtocolError, Unavailable
from mooncake.transfer import (
    Completion,
    Op,
    Status,
    TransferEngine,
    TransferSettings,
    crc32c,
    crc32c_columns,
    crc32c_combine,
    peers,
)
from mooncake.transfer.host import host_identity, reachable_host
from mooncake.transfer.name_service import metadata_key
from tests.transfer.dict_backend import DictBackend
from tests.waiting import until


@pytest.fixture
def near() -> Iterator[TransferEngine]:
    with TransferEngine() as engine:
        yield engine


@pytest.fixture
def far() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(name="far")) as engine:
        yield engine


def test_shared_and_plain_memory_in_one_batch(near: TransferEngine, far: TransferEngine) -> None:
    pool = far.allocate(10_000)
    plain = np.zeros(10_000, dtype=np.uint8)
    registered = far.register(plain)
    data = np.random.default_rng(1).integers(1, 256, 10_000, dtype=np.uint8)
    here = near.register(data)
    segment = near.open(far.describe())
    assert {"shm", "tcp"} <= {*segment.paths} and not segment.is_uniform
    local = [here.address + i * 1000 for i in range(10)]
    remote = [(pool if i % 2 else registered).address + i * 1000 for i in range(10)]
    done = near.run(Op.WRITE, segment, local, remote, [1000] * 10, checksum=True)
    assert (done.status, done.num_bytes) == (Status.OK, 10_000)
    assert done.checksums is not None
    assert done.checksums.tolist() == [crc32c(data[i * 1000 : (i + 1) * 1000].data) for i in range(10)]
    shared = np.frombuffer(pool.view(), dtype=np.uint8)
    assert (np.where(np.arange(10_000) // 1000 % 2, shared, plain) == data).all()
    assert not shared[:1000].any() and not plain[1000:2000].any()

    queue = near.new_queue()
    near.submit(queue, 4, Op.WRITE, segment, local, [*remote[:9], 1], [1000] * 10)
    ended: list[Completion] = []
    while not ended:
        ended = queue.drain(timeout_s=10)
    assert (ended[0].token, ended[0].status, ended[0].failed_slice) == (4, Status.ACCESS_DENIED, 9)


def test_tcp_takes_over_when_shm_leads_nowhere(near: TransferEngine, far: TransferEngine) -> None:
    pool = far.allocate(4096)
    here = near.allocate(4096)
    here.view()[:] = b"x" * 4096
    described = far.describe()
    broken = msgspec.structs.replace(described, endpoints={**described.endpoints, "shm": "mooncake-missing"})
    segment = near.open(broken)
    done = near.run(Op.WRITE, segment, [here.address], [pool.address], [4096])
    assert done.status == Status.OK and bytes(pool.view()) == b"x" * 4096
    assert "shm lost" in repr(segment)
    queue = near.new_queue()
    near.submit(queue, 1, Op.WRITE, segment, [here.address], [pool.address], [4096])
    assert [completion.status for completion in queue.drain(timeout_s=10)] == [Status.OK]


def test_a_peer_without_a_common_path(near: TransferEngine, far: TransferEngine) -> None:
    pool, here = far.allocate(4096), near.allocate(4096)
    elsewhere = msgspec.structs.replace(far.describe(), host="elsewhere", endpoints={"shm": "x"})
    segment = near.open(elsewhere)
    assert segment.paths == ()
    done = near.run(Op.WRITE, segment, [here.address], [pool.address], [10])
    assert done.status == Status.PEER_LOST
    queue = near.new_queue()
    near.submit(queue, 3, Op.WRITE, segment, [here.address], [pool.address], [10])
    assert [(c.token, c.status) for c in queue.drain(timeout_s=10)] == [(3, Status.PEER_LOST)]
    assert near.map(segment, pool.address, 10) is None


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense", "host:port", "127.0.0.1:99999", "no such host:1", "127.0.0.1:1"]
)
def test_a_damaged_tcp_endpoint(near: TransferEngine, far: TransferEngine, endpoint: str) -> None:
    pool, here = far.allocate(4096), near.allocate(4096)
    segment = near.open(msgspec.structs.replace(far.describe(), endpoints={"tcp": endpoint}))
    done = near.run(Op.WRITE, segment, [here.address], [pool.address], [10])
    assert done.status == Status.PEER_LOST


def test_registered_memory_can_be_neither_resized_nor_closed(near: TransferEngine) -> None:
    data, items, mapped = bytearray(4096), array.array("q", [0] * 512), mmap.mmap(-1, 4096)
    regions = near.register_all([data, items, mapped])
    resizing = (data.clear, items.pop, mapped.close)
    for resize in resizing:
        with pytest.raises(BufferError):
            resize()
    for region in regions:
        near.unregister(region)
    for resize in resizing:  # although the regions are still referenced
        resize()


def test_a_closed_engine_gives_memory_back(near: TransferEngine) -> None:
    data = bytearray(4096)
    region = near.register(data)
    near.close()
    data.clear()
    assert region.is_closed


def test_memory_whose_registration_failed_is_given_back(near: TransferEngine) -> None:
    data = bytearray(4096)
    with pytest.raises(InvalidArgument) as failure:
        near.register_all([data, np.zeros((4, 4))[:, 1]])
    data.clear()
    assert "contiguous" in str(failure.value)


def test_segments_are_cached_and_learn_new_regions(near: TransferEngine, far: TransferEngine) -> None:
    first = far.allocate(4096)
    here = near.allocate(4096)
    segment = near.open(far.describe())
    assert near.run(Op.WRITE, segment, [here.address], [first.address], [10]).status == Status.OK
    second = far.allocate(4096)
    assert near.run(Op.WRITE, segment, [here.address], [second.address], [10]).status == Status.ACCESS_DENIED
    assert near.open(far.describe()) is segment
    assert near.run(Op.WRITE, segment, [here.address], [second.address], [10]).status == Status.OK
    near.forget(segment)
    assert near.run(Op.WRITE, segment, [here.address], [second.address], [10]).status == Status.CANCELLED
    again = near.open(far.describe())
    assert again is not segment
    assert near.run(Op.WRITE, again, [here.address], [second.address], [10]).status == Status.OK


def test_a_restarted_peer_takes_the_place_of_the_old(near: TransferEngine) -> None:
    here = near.allocate(4096)
    segments = []
    for _ in range(2):
        with TransferEngine(TransferSettings(name="node")) as far:
            pool = far.allocate(4096)
            segments.append(near.open(far.describe()))
            done = near.run(Op.WRITE, segments[-1], [here.address], [pool.address], [10])
            assert done.status == Status.OK
    assert segments[0] is not segments[1] and "segments=1" in repr(near)


def test_peers_that_restart_under_other_names_leave_no_connections(
    near: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "KEPT_SEGMENTS", 3)
    monkeypatch.setattr(peers, "IDLE_S", 0.0)
    here, num_files = near.allocate(4096), []
    held = None
    for number in range(12):
        with TransferEngine(TransferSettings(name=f"far-{number}", handshake_port=0)) as far:
            pool = far.register(bytearray(4096))
            segment = near.open(far.describe())
            assert near.run(Op.WRITE, segment, [here.address], [pool.address], [10]).status == Status.OK
            assert near.probe(far.handshake) is not None
            if held is None:
                held, described = segment, far.describe()
        num_files.append(len(os.listdir("/proc/self/fd")))
    assert "segments=4" in repr(near), "three are kept, this test holds one more"
    assert num_files[-1] <= num_files[5] + 1
    assert held is not None and near.open(described) is held


def test_ipv6() -> None:
    settings = TransferSettings(listen_host="::1", transports=("tcp",))
    try:
        far = TransferEngine(settings)
    except InvalidArgument:
        pytest.skip("this host has no IPv6")
    with far, TransferEngine(settings) as near:
        pool, here = far.allocate(4096), near.allocate(4096)
        assert far.describe().endpoints["tcp"].startswith("[::1]:")
        done = near.run(Op.WRITE, near.open(far.describe()), [here.address], [pool.address], [10])
        assert done.status == Status.OK


async def test_transfers_on_an_event_loop(near: TransferEngine, far: TransferEngine) -> None:
    pool, here = far.allocate(1 << 20), near.allocate(1 << 20)
    here.view()[:] = bytes(range(256)) * 4096
    segment = near.open(far.describe())
    starts = range(0, 1 << 20, 1 << 14)
    ended = await asyncio.gather(
        *(
            near.transfer(
                Op.WRITE, segment, [here.address + at], [pool.address + at], [1 << 14], checksum=True
            )
            for at in starts
        )
    )
    assert all(completion.status == Status.OK for completion in ended)
    assert pool.view() == here.view()
    with pytest.raises(InvalidArgument, match="register"):
        await near.transfer(Op.WRITE, segment, [1], [pool.address], [10])


async def test_a_cancelled_coroutine_waits_for_its_memory(near: TransferEngine, far: TransferEngine) -> None:
    size = 32 << 20
    pool, here = far.allocate(size), near.allocate(size)
    here.view()[:] = b"a" * size
    segment = near.open(far.describe())
    assert segment.connect(60.0), "until then nothing is under way"
    task = asyncio.create_task(near.transfer(Op.WRITE, segment, [here.address], [pool.address], [size]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bytes(pool.view()[-10:]) == b"a" * 10, "the transfer was still under way"


async def test_closed_engines_leave_nothing_in_a_loop_that_goes_on(far: TransferEngine) -> None:
    pool = far.allocate(4096)

    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def come_and_go() -> None:
        with TransferEngine() as engine:
            here = engine.allocate(4096)
            segment = engine.open(far.describe())
            done = await engine.transfer(Op.READ, segment, [here.address], [pool.address], [4096])
            assert done.status == Status.OK
            moving = asyncio.create_task(
                engine.transfer(Op.READ, segment, [here.address], [pool.address], [4096])
            )
            await asyncio.sleep(0)
        assert (await moving).status in (Status.OK, Status.CANCELLED)  # its completion comes after close()
        late = await engine.transfer(Op.READ, segment, [here.address], [pool.address], [4096])
        assert late.status == Status.PEER_LOST

    await come_and_go()
    before = num_files()
    for _ in range(5):
        await come_and_go()
    gc.collect()
    await until(lambda: num_files() <= before, "the end of the engines' files")


def test_a_closed_engine_opens_no_segment(near: TransferEngine, far: TransferEngine) -> None:
    near.close()
    with pytest.raises(Unavailable, match="closed"):
        near.open(far.describe())


def test_memory_of_one_operation_is_its_local_side_and_not_shown_to_peers(far: TransferEngine) -> None:
    backend = DictBackend()
    with TransferEngine(TransferSettings(name="node-1"), backend) as near:
        near.publish(ttl_s=30)
        lasting = near.register(np.zeros(100, dtype=np.uint8))
        num_puts, pool = backend.num_puts, far.allocate(4096)
        brief = near.register(np.ones(100, dtype=np.uint8), is_brief=True)
        assert near.region_of(brief.address, 10) is None and near.region_of(lasting.address, 10) is lasting
        assert [region.key for region in near.describe().regions] == [lasting.key]
        segment = near.open(far.describe())
        assert near.run(Op.WRITE, segment, [brief.address], [pool.address], [100]).status == Status.OK
        assert bytes(pool.view()[:100]) == bytes([1] * 100)
        near.unregister(brief)
        assert backend.num_puts == num_puts, "each put of the service is a request"
        near.unregister(lasting)
        assert backend.num_puts == num_puts + 1


def test_peers_find_each_other_by_name() -> None:
    backend = DictBackend()
    settings = TransferSettings(name="node-1")
    with TransferEngine(settings, backend) as far, TransferEngine(backend=backend) as near:
        assert near.open_name("node-1") is None
        pool, here = far.allocate(4096), near.allocate(4096)
        far.publish(ttl_s=30)
        segment = near.open_name("node-1")
        assert segment is not None and segment.name == "node-1"
        assert near.run(Op.WRITE, segment, [here.address], [pool.address], [10]).status == Status.OK
        backend.put(metadata_key("node-2"), b"{}")
        with pytest.raises(ProtocolError):
            near.open_name("node-2")


def test_a_service_that_hangs_delays_one_lookup_of_a_known_peer(
    far: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither other threads nor later calls wait for it."""
    backend = DictBackend()
    backend.put(metadata_key("far"), far.describe().encode())
    with TransferEngine(TransferSettings(metadata_cache_s=3600), backend) as near:
        segment = near.open_name("far")
        assert segment is not None
        asked, fails = threading.Event(), threading.Event()
        num_lookups = []

        def hang(key: str) -> bytes | None:
            num_lookups.append(key)
            asked.set()
            fails.wait(60)
            raise PeerLost("it did not answer")

        monkeypatch.setattr(backend, "get", hang)
        near._peers._named["far"] = segment, 0.0  # as if the time had passed
        found = []
        looking = threading.Thread(target=lambda: found.append(near.open_name("far")))
        looking.start()
        try:
            assert asked.wait(60)
            assert near.open_name("far") is segment and len(num_lookups) == 1
            near._peers._named["far"] = segment, 0.0
        finally:
            fails.set()
        looking.join(60)
        assert found == [segment]
        assert near.open_name("far") is segment and len(num_lookups) == 1


def test_memory_that_is_not_there(near: TransferEngine) -> None:
    for size in (1 << 50, 1 << 62):
        for populate in (True, False):
            with pytest.raises(OutOfMemory, match="bytes"):
                near.allocate(size, populate=populate)
    with pytest.raises(InvalidArgument, match="size_bytes"):
        near.allocate(0)


def test_foreign_memory_is_refused(near: TransferEngine) -> None:
    """The error comes at registration, not as a crash when the memory is used."""
    mapped = near.allocate(4096, huge_pages=False)
    for address, size in ((1 << 40, 100), (0, 1), (mapped.address, 1 << 45), (1 << 60, 8)):
        with pytest.raises(InvalidArgument, match="memory of this process"):
            near.register((address, size))
    assert near.register((mapped.address + 10, 1000)).size_bytes == 1000


def test_allocated_memory(near: TransferEngine) -> None:
    region = near.allocate(5000, huge_pages=False)
    assert region.is_shared and region.is_writable and region.size_bytes == 5000 and region.key
    view = region.view()
    assert len(view) == 5000 and not any(view)
    view[4999] = 9
    near.unregister(region)
    near.unregister(region)
    assert region.is_closed and view[4999] == 9, "views outlive the registration"
    assert near.describe().regions == []


def test_registered_memory_is_kept_alive(near: TransferEngine) -> None:
    region = near.register(bytearray(b"hello"))
    assert bytes(region.view()) == b"hello" and not region.is_shared


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AddressInUse, match="tcp_port"):
            TransferEngine(TransferSettings(tcp_port=taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (TransferSettings(transports=("shm", "pigeon")), "transports"),
        (TransferSettings(listen_host="192.0.2.7"), "listen_host"),
        (TransferSettings(listen_host="no such host"), "listen_host"),
    ],
)
def test_bad_settings(settings: TransferSettings, names: str) -> None:
    with pytest.raises(InvalidArgument, match=names):
        TransferEngine(settings)


@pytest.mark.parametrize(
    "columns",
    [
        ([1], [1, 2], [1]),
        ([-1], [1], [1]),
        ([2**64], [1], [1]),
        ([[1]], [[1]], [[1]]),
        (["a"], [1], [1]),
        ([None], [1], [1]),
    ],
)
def test_bad_columns(near: TransferEngine, far: TransferEngine, columns: tuple[list[int], ...]) -> None:
    segment = near.open(far.describe())
    with pytest.raises(InvalidArgument, match="columns"):
        near.run(Op.WRITE, segment, *columns)


def test_columns_of_other_types(near: TransferEngine, far: TransferEngine) -> None:
    pool, here = far.allocate(4096), near.allocate(4096)
    segment = near.open(far.describe())
    signed = np.array([here.address, 0, here.address, 0])[::2]
    remote = np.array([pool.address, pool.address + 99], dtype=np.int64)
    assert near.run(Op.WRITE, segment, signed, remote, (10, 20)).num_bytes == 30


def test_names_and_addresses() -> None:
    assert host_identity() == host_identity() and "/" in host_identity()
    assert reachable_host("127.0.0.1") == "127.0.0.1"
    assert reachable_host("0.0.0.0") not in ("0.0.0.0", "")
    with TransferEngine(TransferSettings(listen_host="localhost")) as one, TransferEngine() as two:
        assert one.name != two.name and one.epoch != two.epoch
        assert "tcp=" in repr(one)


def test_checksums() -> None:
    data = np.frombuffer(b"123456789", dtype=np.uint8)
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    assert crc32c_combine(crc32c(b"12345"), crc32c(b"6789"), 4) == 0xE3069283
    base = data.ctypes.data
    sums = crc32c_columns(
        np.array([base, base + 5, base], dtype=np.uint64), np.array([5, 4, 0], dtype=np.uint64)
    )
    assert sums.dtype == np.uint32 and sums.tolist() == [crc32c(b"12345"), crc32c(b"6789"), 0]


def test_memory_says_where_it_is(near: TransferEngine) -> None:
    registered = near.register(bytearray(100), "cpu:1")
    pool = near.allocate(4096, location="cpu:0")
    anywhere = near.register(bytearray(100))
    known = {region.key: region.location for region in near.describe().regions}
    assert known == {registered.key: "cpu:1", pool.key: "cpu:0", anywhere.key: "*"}
    with pytest.raises(InvalidArgument, match="location"):
        near.register(bytearray(100), "gpu0")
    near.unregister(registered)
    assert registered.key not in {region.key for region in near.describe().regions}


LAST_REGISTRATION = """
import atexit
from mooncake.transfer import TransferEngine
engines = []
atexit.register(lambda: print(engines[0].register(bytearray(10)).size_bytes))
engines.append(TransferEngine())
"""


@pytest.mark.processes
def test_an_engine_is_open_in_what_runs_at_exit() -> None:
    """Also in a function that was registered before the engine was made."""
    done = subprocess.run(
        [sys.executable, "-c", LAST_REGISTRATION], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "10\n", done.stderr
