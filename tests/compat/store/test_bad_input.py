# SPDX-License-Identifier: Apache-2.0
"""Bad input of every kind gives its own key an error number, and never crashes the process."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mooncake.compat.store.buffer_pool import BufferPool
from mooncake.store import MooncakeDistributedStore
from tests.compat.store.servers import LONG_LEASES, RunningMaster, a_store

MASTER = LONG_LEASES
MIB = 1 << 20
BAD_KEYS: list[Any] = ["", "a\0b", "k" * 1025, "k" * 10_000, "é" * 600, "\ud800", b"\xff", b""]
HUGE = 1 << 70


def here(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("key", BAD_KEYS)
def test_an_invalid_key(store: MooncakeDistributedStore, key: str) -> None:
    memory = np.zeros(10, np.uint8)
    assert store.put(key, b"v") == store.upsert(key, b"v") == store.put_from(key, here(memory), 10) == -600
    assert store.batch_put_from(["fine", key], [here(memory)] * 2, [10, 10]) == [0, -600]
    assert store.put_batch(["fine", key], [b"v", b"v"]) == -600
    assert (store.get(key), store.get_buffer(key), store.is_exist(key)) == (b"", None, 0)
    assert (store.get_size(key), store.get_into(key, here(memory), 10), store.remove(key)) == (-704,) * 3
    assert store.get_batch([key, "fine"]) == [b"", bytes(10)]
    assert store.batch_is_exist([key, "fine"]) == [0, 1]
    assert store.get_replica_desc(key) == [] and store.batch_replica_clear([key]) == []
    assert store.create_copy_task(key, ["nowhere"])[1] < 0
    assert store.get_into_ranges([here(memory)], [[key]], [[[0]]], [[[0]]], [[[1]]]) == [[[-704]]]


def test_the_longest_key(store: MooncakeDistributedStore) -> None:
    key = "é" * 512
    assert store.put(key, b"v") == 0 and store.get(key) == b"v"


def test_invalid_values(store: MooncakeDistributedStore) -> None:
    assert store.put("empty", b"") == store.put("empty", np.zeros(0)) == -600
    memory = np.ones(4, np.uint8)
    for pointer in (0, here(memory)):
        assert store.put_from("empty", pointer, 0) == store.upsert_from("empty", pointer, 0) == 0
        assert store.put_from_with_metadata("empty", pointer, pointer, 0, 0) == 0
    assert store.is_exist("empty") == 0, "nothing to store is no failure, and nothing is stored"
    assert store.put_from_with_metadata("metadata only", 0, here(memory), 0, 4) == 0
    assert store.get("metadata only") == memory.tobytes()
    assert store.put("oversized", bytes(16 * MIB + 1)) == -600, "over the local buffer"
    big = np.zeros(17 * MIB, np.uint8)
    assert store.put_from("oversized", here(big), big.nbytes) == -200, "larger than any segment"
    assert store.is_exist("oversized") == 0
    for value in (None, 7, "text", object(), ["a"], np.array([None])):
        with pytest.raises(TypeError, match="put"):
            store.put("wrong", value)
    with pytest.raises(TypeError, match="parts must be 1-D bytes-like"):
        store.put_parts("wrong", b"a", "b")
    with pytest.raises(RuntimeError, match="parts must be 1-D bytes-like"):
        store.put_parts("wrong", np.zeros((2, 2), np.uint8))


def test_values_of_every_shape(store: MooncakeDistributedStore) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    values: dict[str, Any] = {
        "array": array,
        "columns": array[:, ::2],
        "bytearray": bytearray(b"abc"),
        "view": memoryview(b"abcdef")[::2],
    }
    for key, value in values.items():
        assert store.put(key, value) == 0
        assert store.get(key) == memoryview(value).tobytes()


@pytest.mark.parametrize(("address", "size"), [(0, 10), (1, 10), (-1, 10), (HUGE, 10), (4096, 1 << 40)])
def test_an_invalid_pointer(store: MooncakeDistributedStore, address: int, size: int) -> None:
    memory = np.ones(10, np.uint8)
    assert store.put("ten", bytes(range(10))) == 0
    assert store.put_from("nothing", address, size) == store.register_buffer(address, size) == -600
    assert store.batch_put_from(["nothing", "ten"], [address, here(memory)], [size, 10]) == [-600, 0]
    assert store.batch_get_into(["ten", "ten"], [address, here(memory)], [size, 10]) == [-600, 10]
    assert store.batch_get_into_multi_buffers(["ten"], [[here(memory), address]], [[5, size]]) == [-600]
    assert store.get_into_ranges([address], [["ten"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]]]
    assert bytes(memory) == bytes(range(10))


@pytest.mark.parametrize("size", [-1, 0, HUGE])
def test_an_invalid_size(store: MooncakeDistributedStore, size: int) -> None:
    memory = np.ones(10, np.uint8)
    assert store.put("ten", bytes(range(10))) == 0
    assert store.put_from("sized", here(memory), size) == (0 if size == 0 else -600)
    assert store.get_into("ten", here(memory), size) == store.register_buffer(here(memory), size) == -600
    assert store.alloc_from_mem_pool(size) == 0


def test_a_buffer_that_is_too_small(store: MooncakeDistributedStore) -> None:
    memory = np.ones(10, np.uint8)
    assert store.put("ten", bytes(10)) == 0
    assert store.get_into("ten", here(memory), 9) == -600 and memory.all()
    assert store.batch_get_into_multi_buffers(["ten"], [[here(memory)] * 2], [[4, 5]]) == [-600]


def test_lists_of_unequal_lengths(store: MooncakeDistributedStore) -> None:
    at = here(np.ones(10, np.uint8))
    assert (
        store.batch_put_from(["a", "b"], [at], [1])
        == store.batch_get_into(["a", "b"], [at], [1])
        == [-600] * 2
    )
    assert store.batch_put_from_multi_buffers(["a"], [[at, at]], [[1]]) == [-600]
    assert store.batch_put_from_multi_buffers(["a", "b"], [[at]], [[1]]) == [-600] * 2
    assert store.batch_get_into_multi_buffers(["a"], [[at]], [[1, 1]]) == [-600]
    assert store.put_batch(["a"], []) == store.put_batch([], [b"v"]) == -600
    assert store.get_into_ranges([at], [["a"]], [[[0]]], [[[0, 1]]], [[[1]]]) == [[[-600, -600]]]
    assert store.get_into_ranges([at], [["a"]], [[[0]]], [[[0, 1]]], [[[]]]) == [[[-600, -600]]]
    assert store.get_into_ranges([at, at], [["a"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]]]
    assert (store.put_batch([], []), store.batch_put_from([], [], []), store.batch_is_exist([])) == (
        0,
        [],
        [],
    )
    assert (store.batch_get_into([], [], []), store.get_batch([]), store.batch_remove([])) == ([], [b""], [])


WRONG: list[Callable[[MooncakeDistributedStore], Any]] = [
    lambda store: store.put(7, b"v"),  # type: ignore[arg-type]
    lambda store: store.get(None),  # type: ignore[arg-type]
    lambda store: store.batch_is_exist("abc"),
    lambda store: store.batch_is_exist([7]),  # type: ignore[list-item]
    lambda store: store.put_tensor(None, 7),  # type: ignore[arg-type]
    lambda store: store.get_tensor(None),  # type: ignore[arg-type]
    lambda store: store.remove("a", "yes"),  # type: ignore[arg-type]
    lambda store: store.remove_all([]),  # type: ignore[arg-type]
    lambda store: store.batch_get_into(["a"], ["b"], [1]),  # type: ignore[list-item]
    lambda store: store.batch_get_into(["a"], [1], 1),  # type: ignore[arg-type]
    lambda store: store.batch_put_from_multi_buffers(["a"], [1], [1]),  # type: ignore[list-item]
    lambda store: store.put_from("a", 1.5, 1),  # type: ignore[arg-type]
    lambda store: store.put("a", b"v", None),  # type: ignore[arg-type]
    lambda store: store.register_buffer("a", 1),  # type: ignore[arg-type]
    lambda store: store.remove(None),  # type: ignore[arg-type]
    lambda store: store.unmount_segment("1-2"),
    lambda store: store.mount_segment(7, 1),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_types_are_type_errors(store: MooncakeDistributedStore, number: int) -> None:
    with pytest.raises(TypeError, match=r"\(\): |ReplicateConfig"):
        WRONG[number](store)


def test_numbers_of_numpy_are_numbers(store: MooncakeDistributedStore) -> None:
    memory = np.arange(10, dtype=np.uint8)
    addresses, sizes = np.array([here(memory)], dtype=np.uint64), np.array([10])
    assert store.batch_put_from(("numpy",), addresses, sizes) == [0]  # type: ignore[arg-type]
    (read,) = store.batch_get_into(("numpy",), addresses, sizes)  # type: ignore[arg-type]
    assert read == 10 and type(read) is int


class Name(str):
    """A key of a program's own type, whose text is not what it prints."""

    def __str__(self) -> str:
        return "another text"


@pytest.mark.parametrize("key", [Name("its-key"), np.str_("its-key"), b"its-key", bytearray(b"its-key")])
def test_keys_of_other_types_of_text(store: MooncakeDistributedStore, key: Any) -> None:
    memory = np.arange(10, dtype=np.uint8)
    assert store.put(key, b"v") == 0 and store.get("its-key") == store.get(key) == b"v"
    assert store.batch_is_exist([key]) == store.batch_is_exist(np.array(["its-key"])) == [1]  # type: ignore[arg-type]
    assert store.get_size(key) == 1 and len(store.get_replica_desc(key)) == 1
    assert list(store.batch_get_replica_desc([key])) == ["its-key"]
    assert store.batch_put_from(np.array(["array-key"]), [here(memory)], [10]) == [0]  # type: ignore[arg-type]
    assert store.get("array-key") == memory.tobytes()
    assert store.remove(key, True) == 0 and store.is_exist("its-key") == 0


@pytest.mark.parametrize("force", [1, True, np.bool_(True), np.int8(3), 1.5])
def test_truth_values_of_every_type(store: MooncakeDistributedStore, force: Any) -> None:
    assert store.put_batch(["f1", "f2", "f3"], [b"v"] * 3) == 0
    assert store.batch_is_exist(["f1", "f2", "f3"]) == [1] * 3, "and leased now"
    assert store.remove("f1", None) == store.remove("f1", np.bool_(False)) == -706  # type: ignore[arg-type]
    assert store.remove("f1", force) == 0 and store.batch_remove(["f2"], force) == [0]
    assert store.remove_by_regex("^f3$", force) == 1
    assert store.put("f4", b"v") == 0 and store.is_exist("f4") == 1
    assert store.remove_all(force) >= 1 and store.is_exist("f4") == 0


def test_arguments_of_setup_of_every_type(master: RunningMaster) -> None:
    store = MooncakeDistributedStore()
    words: tuple[Any, ...] = (
        b"127.0.0.1",
        np.str_("P2PHANDSHAKE"),
        np.int64(MIB),
        np.uint32(MIB),
        b"tcp",
        "",
    )
    assert store.setup(*words, master.address.encode(), enable_ssd_offload=0) == 0
    assert store.get_hostname().startswith("127.0.0.1:")
    assert store.put("typed", b"v") == 0 and store.get("typed") == b"v"
    store.close()
    with pytest.raises(TypeError, match="global_segment_size"):
        store.setup(*words[:2], np.float64(MIB), *words[3:], master.address)


def test_memory_registered_twice_or_not_at_all(store: MooncakeDistributedStore) -> None:
    memory = np.zeros(8192, np.uint8)
    assert store.register_buffer(here(memory), 8192) == 0
    assert store.register_buffer(here(memory), 8192) == store.register_buffer(here(memory) + 1, 1) == -600
    assert store.put_from("registered", here(memory) + 100, 1000) == 0
    assert store.unregister_buffer(here(memory) + 1) == -600
    assert store.unregister_buffer(here(memory)) == 0 and store.unregister_buffer(here(memory)) == -600
    assert store.put_from("unregistered", here(memory), 1000) == 0


def test_fragments(store: MooncakeDistributedStore) -> None:
    value = np.random.default_rng(2).integers(0, 256, 3 * MIB, dtype=np.uint8)
    assert store.put("fragments", value) == 0
    out = np.zeros(3 * MIB, np.uint8)
    sources = [[0, MIB - 7, 3 * MIB - 5, 3 * MIB - 5, -1]]
    sizes = [[10, 2 * MIB, 5, 6, 1]]
    targets = [[0, 100, 2 * MIB + 500, 0, 0]]
    read = store.get_into_ranges([here(out)], [["fragments"]], [targets], [sources], [sizes])
    assert read == [[[10, 2 * MIB, 5, -600, -600]]]
    assert (out[:10] == value[:10]).all() and (out[100 : 2 * MIB + 100] == value[MIB - 7 : 3 * MIB - 7]).all()
    assert (out[2 * MIB + 500 :][:5] == value[-5:]).all()


def test_fragments_end_where_their_buffer_does(store: MooncakeDistributedStore) -> None:
    """What lies behind the buffer is the program's own, and mapped, but not for these bytes."""
    out = np.full(64, ord("_"), np.uint8)
    assert store.put("ranged", b"0123456789") == 0
    assert store.register_buffer(here(out), 32) == 0
    targets, sizes = [[[28, 29, 31, -1]]], [[[4, 4, 1, 1]]]
    read = store.get_into_ranges([here(out)], [["ranged"]], targets, [[[0, 0, 9, 0]]], sizes)
    assert read == [[[4, -600, 1, -600]]]
    assert bytes(out) == b"_" * 28 + b"0129" + b"_" * 32
    assert store.unregister_buffer(here(out)) == 0


def test_removal(store: MooncakeDistributedStore, master: RunningMaster) -> None:
    assert store.put_batch(["r1", "r2", "s1"], [b"v"] * 3) == 0
    assert store.is_exist("r1") == 1
    assert store.remove("r1") == -706, "is_exist has leased it"
    assert store.remove_by_regex("^r[0-9]$") == 1 and store.batch_is_exist(["r1", "r2"]) == [1, 0]
    assert store.batch_remove(["r1", "none"], force=True) == [0, -704]
    assert store.remove_by_regex("(") == store.remove_by_regex("\ud800") == -600
    with a_store(master, segment_bytes=0, tenant_id="other tenant") as other:
        assert other.get("s1") == b"" and other.remove_all() == 0
        assert other.put("s1", b"other") == 0 and store.get("s1") == b"v"
        assert other.remove_all(force=True) == 1
    assert store.is_exist("s1") == 1


def test_a_full_pool_makes_room(master: RunningMaster) -> None:
    """Put forty values of 4 MB into 64 MB; the existing package refuses half of them."""
    alone = RunningMaster()
    with a_store(alone, segment_bytes=64 * MIB) as store:
        assert [store.put(f"k{i}", bytes(4_000_000)) for i in range(40)] == [0] * 40
        assert store.is_exist("k39") == 1
    alone.close()


def test_many_threads(store: MooncakeDistributedStore) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        memory = np.full(5000, number, np.uint8)
        target = np.zeros(5000, np.uint8)
        for turn in range(20):
            key = f"t{number}-{turn}"
            store.register_buffer(here(memory), 5000)
            codes = store.batch_upsert_from([key], [here(memory)], [5000])
            read = store.batch_get_into([key], [here(target)], [5000])
            store.unregister_buffer(here(memory))
            if codes != [0] or read != [5000] or not (target == number).all():
                wrong.append(f"{key}: {codes} {read}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_memory_outlives_the_store(master: RunningMaster) -> None:
    with a_store(master) as store:
        assert store.put("k", b"value") == 0
        handle = store.get_buffer("k")
        lease = BufferPool(store).acquire(100)
    lease.buffer[0] = 7
    lease.release()
    assert handle is not None and bytes(handle) == b"value"


def test_a_store_that_is_deleted_unmounts(master: RunningMaster) -> None:
    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address)
    assert store.setup(*arguments) == 0
    name = store.get_hostname()
    assert master.server is not None and name in master.server.master.segments.mounted
    del store
    gc.collect()
    assert name not in master.server.master.segments.mounted


@pytest.mark.parametrize("size", [1000, MIB])
def test_memory_that_may_only_be_read(store: MooncakeDistributedStore, size: int) -> None:
    """Bytes that arrive there would end the process."""
    key = f"read only/{size}"
    read_only = np.frombuffer(mmap.mmap(-1, 2 * MIB, prot=mmap.PROT_READ), np.uint8)
    writable = np.zeros(MIB, np.uint8)
    there = here(read_only)
    assert store.put_from(key, there, size) == 0 and store.get(key) == bytes(size)
    halves = [size // 2, size - size // 2]

    def check() -> None:
        assert store.get_into(key, there, size) == -600
        assert store.batch_get_into([key, key], [here(writable), there], [size, size]) == [size, -600]
        into = store.batch_get_into_multi_buffers
        assert into([key, key], [[there, there + MIB], [here(writable)]], [halves, [size]]) == [-600, size]
        assert store.get_into_ranges([there], [[key]], [[[0]]], [[[5]]], [[[100]]]) == [[[-600]]]
        assert store.batch_get_session_start([key]) == [0]
        assert store.batch_get_into_multi_buffer_ranges([key], [[there]], [[100]], [[7]]) == [-600]
        assert store.get_tensor_into(key, there, 2 * MIB) is None

    check()
    assert store.register_buffer(there, read_only.nbytes) == 0
    try:
        check()
        assert store.upsert_from(key, there, size) == 0
    finally:
        assert store.unregister_buffer(there) == 0


@pytest.mark.parametrize("size", [1000, MIB])
def test_memory_that_may_not_be_accessed(store: MooncakeDistributedStore, size: int) -> None:
    """Such as the addresses that a driver has reserved."""
    memory = mmap.mmap(-1, 2 * MIB)
    address = here(np.frombuffer(memory, np.uint8))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(2 * MIB), 0) == 0
    assert store.put("accessible", bytes(size)) in (0, -705)
    assert store.put_from("inaccessible", address, size) == -600
    halves = [[size // 2, size // 2]]
    assert store.batch_put_from_multi_buffers(["inaccessible"], [[address, address + MIB]], halves) == [-600]
    assert store.put_tensor_from("inaccessible", address, size) == -600
    assert store.get_into("accessible", address, size) == -600
    assert store.register_buffer(address, size) == -600
    assert store.put_from("inaccessible", address, size) == -600
    assert store.is_exist("inaccessible") == 0


def test_memory_that_may_only_be_written(store: MooncakeDistributedStore) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 2 * MIB, prot=mmap.PROT_WRITE), np.uint8)
    assert store.put("write only", b"x" * 1000) == 0
    assert store.register_buffer(here(memory), memory.nbytes) == 0
    assert store.get_into("write only", here(memory), 1000) == 1000
    assert store.unregister_buffer(here(memory)) == 0
