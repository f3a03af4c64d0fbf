# SPDX-License-Identifier: Apache-2.0
"""Methods of the drop-in engine: what they return, in every case that has an error number of its own."""

from __future__ import annotations

import copy
import ctypes
import logging
import mmap
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from mooncake.compat.transfer import engine_module
from mooncake.compat.transfer.host_probe import rdma_devices
from mooncake.engine import Read, TransferEngine, TransferNotify, TransferOpcode, Write, create_rpc_client
from mooncake.transfer import Op, TransferSettings
from mooncake.transfer import TransferEngine as OwnEngine
from mooncake.transfer.metadata import make_backend
from mooncake.transfer.name_service import metadata_key
from tests.contract.metadata_servers import KINDS, MetadataServer
from tests.transfer.next_release import use_next_version

P2P = "P2PHANDSHAKE"
Bytes = npt.NDArray[np.uint8]


class Peer:
    """An initialized engine and its memory."""

    def __init__(self, size: int = 100_000, metadata: str = P2P, host: str = "127.0.0.1") -> None:
        self.engine = TransferEngine()
        assert self.engine.initialize(host, metadata, "tcp", "") == 0
        self.memory: Bytes = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        self.at = int(self.memory.ctypes.data)
        assert self.engine.register_memory(self.at, size) == 0

    @property
    def session(self) -> str:
        return f"127.0.0.1:{self.engine.get_rpc_port()}"


@pytest.fixture
def near() -> Iterator[Peer]:
    yield Peer()


@pytest.fixture
def far() -> Iterator[Peer]:
    yield Peer(100_001)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "mooncake")

    def take() -> str:
        text = "\n".join(record.getMessage() for record in caplog.records)
        caplog.clear()
        return text

    return take


# Start ----------------------------------------------------------------------------------------------


def test_no_call_crashes_before_initialize(logged: Callable[[], str]) -> None:
    engine = TransferEngine()
    assert engine.get_rpc_port() == 0 and engine.get_engine() is None and engine.get_engine_ptr() == 0
    assert engine.register_memory(4096, 10) == -1 and engine.unregister_memory(4096) == -1
    assert engine.batch_register_memory([4096], [10]) == -1
    assert engine.transfer_sync_write("127.0.0.1:1", 1, 2, 3) == -1
    assert engine.batch_transfer_async_read("127.0.0.1:1", [1], [2], [3]) == 0
    assert engine.transfer_check_status(1) == -1 and engine.get_batch_transfer_status([1]) == -1
    assert engine.get_notifies() == [] and engine.send_probe("127.0.0.1:1") == -1
    assert engine.allocate_managed_buffer(10) == 0 and engine.free_managed_buffer(1, 10) == -1
    assert engine.get_first_buffer_address("x") == 0
    assert "call initialize()" in logged()


def test_numbers_of_numpy_and_words_of_bytes() -> None:
    engine = TransferEngine()
    assert engine.initialize(b"127.0.0.1", b"P2PHANDSHAKE", b"tcp", b"") == 0  # type: ignore[arg-type]
    memory = np.arange(64, dtype=np.uint8)
    kinds: tuple[Any, ...] = (np.int64, np.uint64)
    for kind in kinds:
        at = kind(memory.ctypes.data)
        assert engine.register_memory(at, kind(64)) == 0 and engine.unregister_memory(at) == 0
        column = np.array([at, at + kind(32)], dtype=kind)
        assert engine.batch_register_memory(column, np.array([32, 32], dtype=kind)) == 0  # type: ignore[arg-type]
        assert engine.batch_unregister_memory(column) == 0  # type: ignore[arg-type]
        assert engine.read_bytes_from_buffer(at, kind(4)) == bytes(range(4))
        assert engine.write_bytes_to_buffer(at, bytes(range(4)), kind(4)) == 0
        managed = engine.allocate_managed_buffer(kind(100))
        assert managed and engine.free_managed_buffer(kind(managed), kind(100)) == 0
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError):
            engine.allocate_managed_buffer(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            engine.register_memory(wrong, 1)  # type: ignore[arg-type]
    for location in (5, None, b"cpu:0"):
        with pytest.raises(TypeError, match="location must be a str"):
            engine.register_memory(1, 1, location)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="location must be a str"):
            engine.batch_register_memory([1], [1], location)  # type: ignore[arg-type]


def test_every_opcode_is_true() -> None:
    """Else ``opcode or TransferOpcode.Write`` makes a write of a read."""
    assert int(TransferOpcode.Read) == 0 and all(TransferOpcode)


def test_names_of_types_are_those_that_programs_import() -> None:
    kinds = {kind for kind in vars(engine_module).values() if isinstance(kind, type)}
    assert kinds and {kind.__module__ for kind in kinds} == {"mooncake.engine"}
    assert pickle.loads(pickle.dumps(Write)) is Write
    with pytest.raises(TypeError, match=r"^TransferEngine\.initialize\(\) missing"):
        TransferEngine().initialize()  # type: ignore[call-arg]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_cannot_be_copied(duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="cannot pickle 'TransferEngine'"):
        duplicate(TransferEngine())


def test_initialize_is_idempotent(near: Peer) -> None:
    port = near.engine.get_rpc_port()
    assert 15000 <= port <= 17000
    assert near.engine.initialize("127.0.0.1", P2P, "tcp", "") == 0
    assert near.engine.get_rpc_port() == port
    assert near.engine.get_engine() is not None and near.engine.get_engine_ptr() != 0


@pytest.mark.parametrize(
    ("arguments", "number", "why"),
    [
        (("127.0.0.1", P2P, "tpc", ""), -1, "allowed: tcp"),
        (("127.0.0.1", P2P, "efa", ""), -1, "use rdma or tcp"),
        (("127.0.0.1", P2P, "xgmi", ""), -1, "use rdma or tcp"),
        (("127.0.0.1", "http://127.0.0.1:1/metadata", "tcp", ""), -1, "is it running"),
        (("127.0.0.1", "ftp://127.0.0.1", "tcp", ""), -1, "metadata"),
        (("127.0.0.1", "", "tcp", ""), -1, "metadata_server"),
        (("", P2P, "tcp", ""), -1, "local_hostname"),
        (("no-such-host.invalid", P2P, "tcp", ""), -101, "resolves"),
        (("x" * 64, P2P, "tcp", ""), -101, "resolves"),
        (("a..b", P2P, "tcp", ""), -101, "resolves"),
        (("a\0b", P2P, "tcp", ""), -101, "resolves"),
        (("127.0.0.1", "[::1", "tcp", ""), -1, "metadata_server"),
        (("127.0.0.1", "x" * 64, "tcp", ""), -1, "initialize"),
    ],
)
def test_invalid_arguments_of_initialize(
    arguments: tuple[str, str, str, str], number: int, why: str, logged: Callable[[], str]
) -> None:
    engine = TransferEngine()
    begun = time.monotonic()
    assert engine.initialize(*arguments) == number
    assert why in logged() and time.monotonic() - begun < 30
    assert engine.initialize("127.0.0.1", P2P, "tcp", "") == 0, "a second try may succeed"


def test_rdma_without_a_device(logged: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.compat.transfer.engine_lifecycle.rdma_devices", list)
    monkeypatch.setattr("mooncake.compat.transfer.engine_lifecycle.available_schemes", lambda: ["shm", "tcp"])
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", P2P, "rdma", "") == 0
    assert "no RDMA device, so shm and tcp" in logged()
    assert TransferEngine().initialize("127.0.0.1", P2P, "rdma", "mlx5_0") == -6
    assert "'mlx5_0' does not exist" in logged()
    monkeypatch.setenv("MC_FORCE_HCA", "1")
    assert TransferEngine().initialize("127.0.0.1", P2P, "rdma", "") == -6
    assert "no RDMA device" in logged()


@pytest.mark.skipif(bool(rdma_devices()), reason="this host has RDMA devices, so the case cannot be set up")
def test_rdma_with_an_unusable_device(logged: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.compat.transfer.engine_lifecycle.rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(
        "mooncake.compat.transfer.engine_lifecycle.available_schemes", lambda: ["shm", "rdma", "tcp"]
    )
    assert TransferEngine().initialize("127.0.0.1", P2P, "rdma", "") == 0
    assert "shm and tcp will carry the bytes" in logged()
    assert TransferEngine().initialize("127.0.0.1", P2P, "rdma", "mlx5_0") == -6
    assert TransferEngine().initialize("127.0.0.1", P2P, "rdma", "mlx5_7") == -6
    assert "this host has mlx5_0" in logged()
    monkeypatch.setenv("MC_FORCE_HCA", "1")
    assert TransferEngine().initialize("127.0.0.1", P2P, "rdma", "") == -6


def test_a_port_range_without_a_free_port(logged: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for name in ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"):
            monkeypatch.setenv(name, str(taken.getsockname()[1]))
        assert TransferEngine().initialize("127.0.0.1", P2P, "tcp", "") == -102
    assert "in use" in logged()
    monkeypatch.setenv("MC_MIN_RPC_PORT", "many")
    assert TransferEngine().initialize("127.0.0.1", P2P, "tcp", "") == -1
    assert "MC_MIN_RPC_PORT" in logged()


def test_deleting_an_engine_closes_it(far: Peer) -> None:
    peer = Peer()
    session = peer.session
    assert (
        peer.engine.get_batch_transfer_status(
            [peer.engine.transfer_submit_write(far.session, peer.at, far.at, 9)]
        )
        == 0
    )
    assert far.engine.send_probe(session) == 0
    del peer
    assert far.engine.send_probe(session) == -102


# Memory ---------------------------------------------------------------------------------------------


def test_registration(near: Peer, logged: Callable[[], str]) -> None:
    engine, at, size = near.engine, near.at, near.memory.size
    assert engine.register_memory(at, size) == -7
    assert engine.register_memory(at + size - 1, 10) == -7 and "overlaps" in logged()
    assert engine.register_memory(at - 10, 11) == -7
    assert engine.register_memory(0, 10) == -1 and engine.register_memory(at, 0) == -1
    assert engine.register_memory(1 << 40, 1 << 20) == -1 and "memory" in logged()
    assert engine.unregister_memory(at + 1) == -3
    assert engine.unregister_memory(at) == 0 and engine.unregister_memory(at) == -3
    assert engine.register_memory(buffer_addr=at, capacity=size, location="cpu:0") == 0


def test_batch_registration(near: Peer) -> None:
    engine, other = near.engine, np.zeros(9000, dtype=np.uint8)
    starts = [other.ctypes.data + i * 3000 for i in range(3)]
    assert engine.batch_register_memory(starts, [3000, 3001, 3000]) == -7
    assert engine.batch_register_memory(starts, [3000, 3000]) == -1
    assert engine.batch_register_memory(starts, [3000] * 3) == 0, "adjacent ranges do not overlap"
    assert engine.batch_register_memory([starts[1]], [1]) == -7
    assert engine.batch_unregister_memory([*starts, 5]) == -3, "those that were registered are removed"
    assert engine.batch_register_memory(starts, [3000] * 3) == 0
    assert engine.batch_unregister_memory(starts) == 0


def test_managed_buffers(near: Peer, far: Peer) -> None:
    here, there = near.engine.allocate_managed_buffer(5), far.engine.allocate_managed_buffer(70_000)
    assert here and there and near.engine.allocate_managed_buffer(5) != here
    assert near.engine.write_bytes_to_buffer(here, b"bytes", 5) == 0
    assert near.engine.write_bytes_to_buffer(here, "text!", 5) == 0
    assert near.engine.write_bytes_to_buffer(here, b"short", 6) == -1
    for wrong in (5, [116], None):  # bytes() of an integer would be so many zeros
        with pytest.raises(TypeError):
            near.engine.write_bytes_to_buffer(here, wrong, 1)  # type: ignore[arg-type]
    assert near.engine.write_bytes_to_buffer(4096, b"x", 1) == -1
    assert near.engine.read_bytes_from_buffer(here, 5) == b"text!"
    assert near.engine.read_bytes_from_buffer(4096, 5) == b""
    assert near.engine.transfer_sync_write(far.session, here, there + 65_000, 5) == 0
    assert far.engine.read_bytes_from_buffer(there + 65_000, 5) == b"text!"
    assert near.engine.register_memory(here, 5) == -7, "the slab it lies in is registered"
    assert near.engine.free_managed_buffer(here, 5) == 0 and near.engine.free_managed_buffer(here, 5) == -3
    assert near.engine.allocate_managed_buffer(8000) == here
    assert near.engine.allocate_managed_buffer(0) == 0 and near.engine.allocate_managed_buffer(-1) == 0


def test_first_buffers(near: Peer, far: Peer) -> None:
    assert near.engine.get_first_buffer_address(near.session) == near.at
    assert near.engine.get_first_buffer_address(far.session) == far.at
    low = np.zeros(10, dtype=np.uint8)
    assert far.engine.register_memory(low.ctypes.data, 10) == 0
    assert near.engine.get_first_buffer_address(far.session) == far.at
    assert near.engine.get_first_buffer_address("127.0.0.1:1") == 0


# Transfers ------------------------------------------------------------------------------------------


def test_write_and_read_back(near: Peer, far: Peer) -> None:
    engine, back = near.engine, np.zeros(1000, dtype=np.uint8)
    assert engine.register_memory(back.ctypes.data, 1000) == 0
    assert engine.transfer_sync_write(far.session, near.at, far.at + 500, 1000) == 0
    assert (far.memory[500:1500] == near.memory[:1000]).all()
    assert engine.transfer_sync_read(far.session, back.ctypes.data, far.at + 500, 1000) == 0
    assert (back == near.memory[:1000]).all()
    opcodes = [TransferOpcode.Write, TransferOpcode.WRITE, Write, TransferEngine.TransferOpcode.Write]
    for number, opcode in enumerate(opcodes):
        assert engine.transfer_sync(far.session, near.at + number, far.at, 100, opcode) == 0
        assert (far.memory[:100] == near.memory[number : number + 100]).all()
    assert (str(TransferOpcode.Read), f"{Write}") == ("TransferOpcode.Read", "TransferOpcode.Write")
    for wrong in (None, 7, "write"):
        with pytest.raises(TypeError, match="opcode"):
            engine.transfer_sync(far.session, near.at, far.at, 100, wrong)  # type: ignore[arg-type]
    before = far.memory.tobytes()
    with pytest.raises(TypeError, match="notify"):
        engine.transfer_sync(far.session, near.at + 200, far.at, 100, Write, "text")  # type: ignore[arg-type]
    assert far.memory.tobytes() == before, "nothing was moved"
    assert Read == TransferOpcode.READ == TransferOpcode(0) and Write.name == "Write"


def test_over_ipv6(far: Peer) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"IPv6 was NOT TESTED: this host has no ::1 ({error}); enable IPv6 on loopback")
    near, six = Peer(host="::1"), Peer(2000, host="[::1]")
    session = f"[::1]:{six.engine.get_rpc_port()}"
    assert near.engine.transfer_sync_write(session, near.at, six.at, 2000) == 0
    assert (six.memory == near.memory[:2000]).all()
    assert far.engine.transfer_sync_write(session, far.at, six.at, 2000) == 0, (
        "an engine that listens on IPv4 reaches one on IPv6"
    )


def test_results_are_plain_numbers(near: Peer, far: Peer) -> None:
    results = [
        TransferEngine().initialize("127.0.0.1", P2P, "tcp", ""),
        TransferEngine().initialize("127.0.0.1", P2P, "none", ""),
        near.engine.initialize("127.0.0.1", P2P, "tcp", ""),
        near.engine.register_memory(near.at, 1),
        near.engine.transfer_sync_write(far.session, near.at, far.at, 1),
        near.engine.batch_transfer_async_read(far.session, [near.at], [far.at], [1]),
        near.engine.transfer_check_status(99),
        near.engine.send_probe("127.0.0.1:1"),
        near.engine.warmup_efa_segment(far.session),
    ]
    assert [type(result) for result in results] == [int] * len(results)


def test_blocking_batches(near: Peer, far: Peer) -> None:
    engine = near.engine
    here = [near.at + i * 100 for i in range(100)]
    there = [far.at + (99 - i) * 100 for i in range(100)]
    assert engine.batch_transfer_sync_write(far.session, here, there, [100] * 100) == 0
    assert (far.memory[:10_000].reshape(100, 100)[::-1] == near.memory[:10_000].reshape(100, 100)).all()
    assert engine.batch_transfer_sync_read(far.session, here[:3], here[:3], [1, 2]) == -1
    assert engine.batch_transfer_sync_write(far.session, [], [], []) == 0
    assert engine.batch_transfer_sync(far.session, here[:1], there[:1], [-5], Write) == -1


def test_every_failed_transfer_returns_minus_one(near: Peer, far: Peer, logged: Callable[[], str]) -> None:
    engine = near.engine
    assert engine.transfer_sync_write("127.0.0.1:1", near.at, far.at, 10) == -1
    assert "Connection refused" in logged()
    assert engine.transfer_sync_write("nonsense", near.at, far.at, 10) == -1 and "host:port" in logged()
    assert engine.transfer_sync_write(far.session, near.at, far.at + far.memory.size - 5, 10) == -1
    assert "has not registered" in logged()
    assert engine.transfer_sync_write(far.session, 1 << 40, far.at, 10) == -1
    assert "memory of this process" in logged()
    assert engine.batch_transfer_async_write(far.session, [near.at], [far.at], []) == 0
    late = engine.batch_transfer_async_write(far.session, [near.at], [far.at + (1 << 30)], [10])
    assert 0 < late < 1 << 63 and engine.get_batch_transfer_status([late]) == -1


def test_memory_that_only_the_peer_registered(near: Peer, far: Peer) -> None:
    loose = np.full(5000, 7, dtype=np.uint8)
    assert near.engine.transfer_sync_write(far.session, loose.ctypes.data, far.at, 5000) == 0
    assert (far.memory[:5000] == 7).all()
    ids = [
        near.engine.batch_transfer_async_read(far.session, [loose.ctypes.data], [far.at + 5000], [5000])
        for _ in range(3)
    ]
    assert near.engine.get_batch_transfer_status(ids) == 0
    assert (loose == far.memory[5000:10_000]).all()
    inner = near.engine.get_engine()
    assert inner is not None and len(inner.engine.regions.all()) == 1, "registered for the transfer only"


@pytest.mark.parametrize("name", ["x" * 64, "a..b", ".a", "é" * 70, "a\0b", "\udc80x", "[::1", ""])
def test_names_that_no_host_can_have(near: Peer, name: str) -> None:
    engine, at = near.engine, near.at
    for peer in (name, f"{name}:1"):
        assert engine.transfer_sync_write(peer, at, at, 10) == -1
        assert engine.batch_transfer_async_write(peer, [at], [at], [10]) == 0
        assert engine.send_probe(peer) < 0
        assert engine.get_first_buffer_address(peer) == 0
        assert create_rpc_client().send_data(peer, b"x") == -1


def test_no_device_is_as_good_as_an_empty_name() -> None:
    assert TransferEngine().initialize("127.0.0.1", P2P, "rdma", None) == 0
    assert TransferEngine().initialize_ext("127.0.0.1", P2P, "tcp", None, "p2p") == 0


@pytest.mark.parametrize("wrong", [1.0, "1", None, np.float64(1), [1]])
def test_columns_of_what_is_no_address(near: Peer, far: Peer, wrong: Any) -> None:
    good = ([near.at], [far.at], [10])
    for at in range(3):
        columns: Any = [*good[:at], [wrong], *good[at + 1 :]]
        with pytest.raises(TypeError, match="columns"):
            near.engine.batch_transfer_sync_write(far.session, *columns)
        with pytest.raises(TypeError, match="columns"):
            near.engine.batch_transfer_async_read(far.session, *columns)
    assert near.engine.batch_transfer_sync_write(far.session, *good) == 0


@pytest.mark.parametrize("is_registered", [False, True])
def test_memory_that_may_only_be_read(near: Peer, far: Peer, is_registered: bool) -> None:
    """It can be sent; bytes that arrived there, from here or from a peer, would end the process."""
    mapped = np.frombuffer(mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ), np.uint8)
    there = int(mapped.ctypes.data)
    if is_registered:
        assert near.engine.register_memory(there, mapped.nbytes) == 0
    assert near.engine.transfer_sync_write(far.session, there, far.at, 1000) == 0
    assert not far.memory[:1000].any() and far.memory[1000:].any()
    for size in (100, 100_000):
        assert near.engine.transfer_sync_read(far.session, there, far.at, size) == -1
        assert far.engine.transfer_sync_write(near.session, far.at, there, size) == -1
    assert near.engine.write_bytes_to_buffer(there, b"abc", 3) == -1
    assert near.engine.read_bytes_from_buffer(there, 3) == bytes(3)


def test_memory_that_may_not_be_accessed(near: Peer, far: Peer) -> None:
    mapped = mmap.mmap(-1, 1 << 20)
    there = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(there), ctypes.c_size_t(1 << 20), 0) == 0
    for size in (100, 100_000):
        assert near.engine.transfer_sync_write(far.session, there, far.at, size) == -1
        assert near.engine.transfer_sync_read(far.session, there, far.at, size) == -1
        assert near.engine.register_memory(there, size) == -1
        assert near.engine.batch_register_memory([there], [size]) == -1
    assert near.engine.write_bytes_to_buffer(there, b"abc", 3) == -1
    assert near.engine.read_bytes_from_buffer(there, 3) == b""


def test_memory_that_may_only_be_written(near: Peer, far: Peer) -> None:
    mapped = np.frombuffer(mmap.mmap(-1, 1 << 20, prot=mmap.PROT_WRITE), np.uint8)
    there = int(mapped.ctypes.data)
    assert near.engine.register_memory(there, mapped.nbytes) == 0
    assert near.engine.transfer_sync_read(far.session, there, far.at, 100_000) == 0
    assert far.engine.transfer_sync_write(near.session, far.at, there + 200_000, 1000) == 0
    near.engine.transfer_sync_write(far.session, there, far.at, 100_000)  # the process goes on


def test_memory_registered_after_the_first_transfer(near: Peer, far: Peer) -> None:
    assert near.engine.transfer_sync_write(far.session, near.at, far.at, 10) == 0
    late = np.zeros(1000, dtype=np.uint8)
    assert far.engine.register_memory(late.ctypes.data, 1000) == 0
    assert near.engine.transfer_sync_write(far.session, near.at, late.ctypes.data, 1000) == 0
    assert (late == near.memory[:1000]).all()
    assert far.engine.unregister_memory(late.ctypes.data) == 0
    assert near.engine.transfer_sync_write(far.session, near.at, late.ctypes.data, 1000) == -1


def status_of(engine: TransferEngine, batch: int) -> int:
    deadline = time.monotonic() + 60
    while (status := engine.transfer_check_status(batch)) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return status


@pytest.mark.parametrize("call", ["write", "read", "submit_write"])
def test_asynchronous_batches_find_memory_that_was_registered_later(near: Peer, far: Peer, call: str) -> None:
    engine = near.engine
    first = engine.batch_transfer_async_write(far.session, [near.at], [far.at], [100])
    assert engine.get_batch_transfer_status([first]) == 0
    later = np.full(100, 7, dtype=np.uint8)
    there = int(later.ctypes.data)
    assert far.engine.register_memory(there, 100) == 0
    if call == "submit_write":
        batch = engine.transfer_submit_write(far.session, near.at, there, 100)
    else:
        move = getattr(engine, f"batch_transfer_async_{call}")
        batch = move(far.session, [near.at], [there], [100])
    assert status_of(engine, batch) == 1, "the id stays in flight while the batch is submitted again"
    assert (later == near.memory[:100]).all()
    assert engine.transfer_check_status(batch) == -1, "the final status was read"


def test_asynchronous_batches(near: Peer, far: Peer) -> None:
    engine = near.engine
    write = engine.batch_transfer_async_write(far.session, [near.at], [far.at], [5000])
    single = engine.transfer_submit_write(far.session, near.at, far.at + 5000, 5000)
    third = engine.batch_transfer_async(far.session, [near.at], [far.at + 10_000], [5000], Write)
    assert 0 < write < single < third < 1 << 63
    assert engine.get_batch_transfer_status([write, third]) == 0
    assert status_of(engine, single) == 1 and engine.transfer_check_status(single) == -1, (
        "the final status can be read once"
    )
    assert (far.memory[:15_000].reshape(3, 5000) == near.memory[:5000]).all()
    refused = engine.batch_transfer_async_read(far.session, [near.at], [1], [10])
    assert status_of(engine, refused) == -1
    assert engine.get_batch_transfer_status([]) == 0 and engine.get_batch_transfer_status([999]) == -1


def test_a_batch_that_times_out() -> None:
    """A listener that never answers simulates a peer that hangs."""
    peer = Peer()
    with socket.socket() as silent, OwnEngine(TransferSettings(handshake_port=0)) as real:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        pool = real.allocate(4096)
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        hanging = msgspec.structs.replace(real.describe(), endpoints={"tcp": endpoint}, handshake="")
        inner = peer.engine.get_engine()
        assert inner is not None and peer.engine._batches is not None
        peer_segment = inner.engine.open(hanging)
        columns = [np.array([value], dtype=np.uint64) for value in (peer.at, pool.address, 10)]
        batch = peer.engine._batches.begin(
            lambda queue, number: inner.engine.submit(
                queue, number, Op.WRITE, peer_segment, *columns, timeout_s=0.2
            ),
            lambda queue, number: False,
        )
        assert status_of(peer.engine, batch) == -2


def test_many_threads(near: Peer, far: Peer) -> None:
    size, failures = 10_000, []

    def work(number: int) -> None:
        engine = near.engine
        mine = np.full(size, number, dtype=np.uint8)
        back = np.zeros(size, dtype=np.uint8)
        there = far.at + number * size
        for round_ in range(20):
            ok = engine.batch_register_memory([mine.ctypes.data, back.ctypes.data], [size, size]) == 0
            ok &= engine.transfer_sync_write(far.session, mine.ctypes.data, there, size) == 0
            batch = engine.batch_transfer_async_read(far.session, [back.ctypes.data], [there], [size])
            done = (
                engine.get_batch_transfer_status([batch]) == 0
                if round_ % 2
                else status_of(engine, batch) == 1
            )
            ok &= done and bool((back == number).all())
            ok &= engine.batch_unregister_memory([mine.ctypes.data, back.ctypes.data]) == 0
            back[:] = 0
            if not ok:
                failures.append((number, round_))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_other_threads_run_while_bytes_move(near: Peer, far: Peer) -> None:
    """A thread that held the interpreter lock would stop the counter until the deadline."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        counted, over = [0], threading.Event()

        def count() -> None:
            while not over.is_set():
                counted[0] += 1
                time.sleep(0)

        counter = threading.Thread(target=count)
        counter.start()
        inner = near.engine.get_engine()
        assert inner is not None
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        described = inner.engine.describe()
        hanging = inner.engine.open(
            msgspec.structs.replace(described, name="x", epoch=1, endpoints={"tcp": endpoint}, handshake="")
        )
        before = counted[0]
        inner.engine.run(Op.WRITE, hanging, [near.at], [near.at], [10], timeout_s=0.5)
        assert counted[0] > before + 10
        over.set()
        counter.join(60)


# Peers ----------------------------------------------------------------------------------------------


def test_a_notification_after_the_data(near: Peer, far: Peer) -> None:
    note = TransferNotify("kv", "is there")
    assert near.engine.transfer_sync(far.session, near.at, far.at, 100, Write, note) == 0
    assert near.engine.batch_transfer_sync(far.session, [near.at], [far.at], [100], Write, notify=note) == 0
    assert near.engine.batch_transfer_sync(far.session, [], [], [], Write, note) == 0, "also without data"
    assert near.engine.transfer_sync(far.session, near.at, 1, 100, Write, note) == -1
    assert [(one.name, one.msg) for one in far.engine.get_notifies()] == [("kv", "is there")] * 3
    assert far.engine.get_notifies() == []
    assert (TransferNotify().name, TransferNotify().msg) == ("", "")


def test_probes_without_a_metadata_server(
    near: Peer, far: Peer, logged: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert near.engine.send_probe(far.session) == 0
    assert near.engine.send_probe("127.0.0.1:1") == -102 and "is it running" in logged()
    assert near.engine.send_probe("no-such-host.invalid:15000") == -101 and "resolves" in logged()
    use_next_version(monkeypatch)
    assert near.engine.send_probe(far.session) == -104
    assert "version" in logged()


@pytest.mark.parametrize("kind", KINDS)
def test_names_in_a_metadata_server(kind: str, logged: Callable[[], str]) -> None:
    server = MetadataServer(kind)
    url = server.url
    try:
        near, far = Peer(metadata=url, host="near.invalid"), Peer(2000, metadata=url, host="127.0.0.1:9")
        assert near.engine.transfer_sync_write("127.0.0.1:9", near.at, far.at, 2000) == 0
        assert (far.memory == near.memory[:2000]).all()
        assert near.engine.send_probe("127.0.0.1:9") == 0 and far.engine.send_probe("near.invalid") == 0
        assert near.engine.send_probe("missing") == -200 and "missing" in logged()
        assert near.engine.transfer_sync_write("missing", near.at, far.at, 10) == -1
        backend = make_backend(url)
        backend.put(metadata_key("garbage"), b"{")
        assert near.engine.send_probe("garbage") == -103
        backend.close()
    finally:
        server.stop()


def test_calls_for_other_hardware(near: Peer, far: Peer) -> None:
    assert near.engine.warmup_efa_segment(far.session) == 0
    topology = msgspec.json.decode(near.engine.get_local_topology())
    assert all(len(lists) == 2 for lists in topology.values()) and "cpu:0" in topology
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        for call in (near.engine.transfer_write_on_cuda, near.engine.transfer_read_on_cuda):
            with pytest.raises(RuntimeError, match="CUDA device"):
                call(far.session, near.at, far.at, 10)
        for many in (near.engine.batch_transfer_write_on_cuda, near.engine.batch_transfer_read_on_cuda):
            with pytest.raises(RuntimeError, match="CUDA device"):
                many(far.session, [near.at], [far.at], [10])
