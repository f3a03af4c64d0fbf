# SPDX-License-Identifier: Apache-2.0
"""Objects are stored and read by every call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from mooncake.compat.store.store import MooncakeDistributedStore
from mooncake.errors import InvalidArgument
from mooncake.store import Store
from mooncake.store.client.grants import PutGrant
from tests.compat.store.servers import LONG_LEASES, RunningMaster, a_store

MASTER = LONG_LEASES


def test_bytes_are_stored_and_read(store: MooncakeDistributedStore) -> None:
    assert store.put("a", b"value") == 0
    assert store.put("a", b"other") == 0
    assert store.get("a") == b"value"
    assert store.get_size("a") == 5
    assert (store.is_exist("a"), store.is_exist("none")) == (1, 0)
    assert store.get_batch(["a", "none"]) == [b"value", b""]


def test_thousands_of_objects_in_one_call(master: RunningMaster) -> None:
    """Each value is memory of its own, which is registered while it is moved."""
    keys = [f"many{number}" for number in range(6000)]
    values = [f"{key:0>500}".encode() for key in keys]
    with a_store(master) as store:
        assert store.put_batch(keys, values) == 0
        assert store.get_batch(keys) == values


def test_parts_become_one_object(store: MooncakeDistributedStore) -> None:
    assert store.put_parts("parts", b"one", bytearray(b"two"), memoryview(b"three")) == 0
    assert store.get("parts") == b"onetwothree"
    assert store.put_parts("nothing") == 0
    assert store.put_parts("nothing", b"", b"") == 0
    assert store.is_exist("nothing") == 0


def test_pointers_are_stored_from_and_read_to(store: MooncakeDistributedStore) -> None:
    source = np.random.default_rng(1).integers(0, 256, (4, 300_000), dtype=np.uint8)
    target = np.zeros_like(source)
    pointers = [row.ctypes.data for row in source]
    assert store.batch_put_from(["p0", "p1"], pointers[:2], [300_000] * 2) == [0, 0]
    assert store.batch_put_from_multi_buffers(["p2"], [pointers[2:]], [[300_000, 100]]) == [0]
    targets = [row.ctypes.data for row in target]
    assert store.batch_get_into(["p0", "none", "p1"], targets[:3], [300_000] * 3) == [300_000, -704, 300_000]
    assert (target[[0, 2]] == source[:2]).all()
    read = store.batch_get_into_multi_buffers(["p2"], [[targets[1], targets[3]]], [[200_000, 300_000]])
    assert read == [300_100] and type(read[0]) is int
    assert bytes(target[1, :200_000]) + bytes(target[3, :100_100]) == bytes(source[2]) + bytes(
        source[3, :100]
    )


def test_what_is_not_stored_is_logged_with_the_reason(
    store: MooncakeDistributedStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.put("a", b"") == -600
    assert store.put("k" * 2000, b"x") == -600
    assert store.put_batch(["a", "b"], [b"1"]) == -600
    assert store.put_batch(["empty", "full", "\0"], [b"", b"1", b"2"]) == -600
    assert store.put_from("p", 8, 100) == -600
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "put: 'a' is not stored: it is empty"
    assert lines[1].startswith("put: 'kkk") and "a key is 1 to 1024 bytes" in lines[1] and len(lines[1]) < 200
    assert lines[2] == "put_batch: 2 keys, but 1 values"
    assert lines[3] == "put: 'empty' is not stored, and 1 more: it is empty"
    assert lines[4].startswith("put_from: 'p' is not stored: its buffers are not memory")


@contextmanager
def another_writer(master: RunningMaster, *keys: str) -> Iterator[Callable[[], None]]:
    """Another process has started puts of these keys; the function ends them."""
    with Store(master.address) as other:
        grants = other.start_puts(list(keys), [5] * len(keys), 5, replace=True)
        held = [grant for grant in grants if isinstance(grant, PutGrant)]
        assert len(held) == len(keys)
        source = np.frombuffer(b"other", dtype=np.uint8).copy()
        other.engine.register(source)

        def end() -> None:
            count = len(held)
            other.write_ranges(held, [0] * count, [source.ctypes.data] * count, [5] * count)
            assert other.end_puts(held) == [None] * count

        yield end
        other.abort_puts(held)


def test_no_put_is_called_stored_while_another_process_writes_its_key(
    master: RunningMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process may be killed, and then there is nothing."""
    monkeypatch.setenv("MOONCAKE_DROPIN_TIMEOUT_S", "2")
    with a_store(master) as store:
        assert store.put("there", b"value") == 0
        with another_writer(master, "w0", "w1", "there"):
            assert store.put("w0", b"value") == -703
            assert store.upsert("w0", b"value") == -703
            assert store.put_parts("w0", b"val", b"ue") == -703
            assert store.upsert_parts("w1", b"val", b"ue") == -703
            assert (store.is_exist("w0"), store.get("w0")) == (0, b"")
            assert store.upsert("there", b"new") == -703
            assert store.put("there", b"new") == 0, "it is stored, and keeps its value"
            assert store.get("there") == b"value"
        assert store.put_parts("w0", b"val", b"ue") == 0 and store.get("w0") == b"value"
        assert store.upsert("there", b"new") == 0 and store.get("there") == b"new"


@pytest.mark.parametrize("parts", [[b"value"], [b"val", b"ue"]])
def test_a_put_waits_until_another_process_has_written_its_key(
    master: RunningMaster, store: MooncakeDistributedStore, parts: list[bytes]
) -> None:
    key = f"waits{len(parts)}"
    with another_writer(master, key) as end, ThreadPoolExecutor(1) as threads:
        put = threads.submit(store.put_parts, key, *parts)
        upsert = threads.submit(store.upsert_parts, key, *parts)
        end()
        assert (put.result(30), store.get(key) in (b"other", b"value")) == (0, True)
        assert (upsert.result(30), store.get(key)) == (0, b"value")


def test_a_key_given_twice_is_put_in_order(store: MooncakeDistributedStore) -> None:
    source = np.frombuffer(b"onetwo", dtype=np.uint8).copy()
    at = source.ctypes.data
    two = [[at, at + 1], [at + 3, at + 4]]
    assert store.batch_put_from_multi_buffers(["d", "d"], two, [[1, 2]] * 2) == [0, 0]
    assert store.get("d") == b"one"
    assert store.upsert_batch(["d", "d"], [b"three", b"four"]) == 0
    assert store.get("d") == b"four"


SIZE = 3_000_000
CALLS: dict[str, Callable[[MooncakeDistributedStore, int], object]] = {
    "put": lambda store, at: store.put_from("put", at, SIZE) or store.get("put") == bytes(SIZE),
    "small put": lambda store, at: store.put_from("small", at, 9) or store.get("small") == bytes(9),
    "parts": lambda store, at: store.batch_put_from_multi_buffers(["p"], [[at, at]], [[SIZE, 7]]) == [0],
    "get": lambda store, at: store.get_into("long", at, SIZE) == SIZE,
    "small get": lambda store, at: store.get_into("short", at, SIZE) == 9,
    "part of it": lambda store, at: (
        store.get_into_ranges([at], [["long"]], [[[0]]], [[[5]]], [[[9]]]) == [[[9]]]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_that_unregisters_memory_waits_for_the_calls_of_others_that_use_it(
    store: MooncakeDistributedStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs register the memory of each call around it, in several threads, and free it afterwards."""
    assert store.put("long", bytes(SIZE)) == 0 and store.put("short", bytes(9)) == 0
    memory = np.zeros(SIZE, dtype=np.uint8)
    at = memory.ctypes.data
    session = store._session
    assert session is not None
    engine, registered, waits = session.engine, session.registered, threading.Semaphore(0)
    wait, unregistering = registered._wait_and_unregister, list[Future[int]]()

    def note_and_wait(*args: Any) -> None:
        waits.release()
        wait(*args)

    def meddle(method: Callable[..., Any]) -> Callable[..., Any]:
        def move(*args: Any, **named: Any) -> Any:
            if not unregistering:
                for size in (SIZE, SIZE - 1, 0):
                    unregistering.append(threads.submit(store.unregister_buffer, at))
                    assert waits.acquire(timeout=30)
                    assert not size or store.register_buffer(at, size) == 0
                assert not any(one.done() for one in unregistering), "afterwards the memory may be freed"
            return method(*args, **named)

        return move

    monkeypatch.setattr(registered, "_wait_and_unregister", note_and_wait)
    for method in ("run", "run_slice"):
        monkeypatch.setattr(engine, method, meddle(getattr(engine, method)))
    assert store.register_buffer(at, SIZE) == 0
    with ThreadPoolExecutor(3) as threads:
        assert CALLS[name](store, at) == 1
        assert [one.result(30) for one in unregistering] == [0, 0, 0]
    assert engine.region_of(at, 9) is None, "it is unregistered after the call"
    assert store.unregister_buffer(at) == -600


def test_memory_is_unregistered_within_a_call_of_the_same_thread(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal's handler, for instance; to wait would be to wait for itself."""
    memory = np.zeros(SIZE, dtype=np.uint8)
    at = memory.ctypes.data
    session = store._session
    assert session is not None
    assert store.put("within", bytes(SIZE)) == 0 and store.register_buffer(at, SIZE) == 0
    run = session.engine.run

    def unregister_and_run(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        assert store.unregister_buffer(at) == 0
        assert session.engine.region_of(at, 9) is None
        return run(*args, **named)

    monkeypatch.setattr(session.engine, "run", unregister_and_run)
    assert store.get_into("within", at, SIZE) == SIZE


def test_a_put_in_parts_that_raises_leaves_its_key_to_others(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InvalidArgument("local[0]", "memory", "registered memory")

    session = store._session
    assert session is not None
    with monkeypatch.context() as patched:
        patched.setattr(session.engine, "run", fail)
        assert store.put_parts("raises", b"val", b"ue") == -600
    assert store.put("raises", b"value") == 0
