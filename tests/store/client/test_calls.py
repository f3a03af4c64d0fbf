# SPDX-License-Identifier: Apache-2.0
"""The calls that both clients share: their list, the release of memory, parts of a large durable batch."""

from __future__ import annotations

import asyncio
import enum
import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from mooncake.errors import InvalidArgument
from mooncake.store import AsyncStore, PutPolicy, Store
from mooncake.store.client import calls
from mooncake.store.client.buffers import STAGED_BYTES, LocalMemory
from mooncake.store.client.calls import ClientCalls, RunConcurrently, RunFunction, StoreSettings
from mooncake.store.client.effects import CallMaster, MasterReply, Operation, Pause
from mooncake.store.client.operations import Operations
from mooncake.store.messages import Exists, Flags, Removed, RemoveMatching
from mooncake.transfer import TransferEngine

LARGE = b"x" * (STAGED_BYTES + 1)


@pytest.fixture
def memory() -> Iterator[LocalMemory]:
    with TransferEngine() as engine:
        memory = LocalMemory(engine)
        yield memory
        memory.close()
        assert not engine.regions.all(), "a region is still registered"


@pytest.fixture
def client(memory: LocalMemory) -> ClientCalls:
    operations = Operations("here", lambda first, second, length: 0, 1)
    return ClientCalls(operations, memory, StoreSettings())


def test_both_clients_have_every_call() -> None:
    names = [name for name in vars(ClientCalls) if not name.startswith("_") and name != "deadline"]
    assert len(names) > 25
    for name in names:
        call, blocking, awaited = (getattr(one, name) for one in (ClientCalls, Store, AsyncStore))
        assert blocking.__doc__ == awaited.__doc__ == call.__doc__
        assert inspect.iscoroutinefunction(awaited) and not inspect.iscoroutinefunction(blocking)
        parameters = inspect.signature(call).parameters
        assert inspect.signature(blocking).parameters == parameters
        assert inspect.signature(awaited).parameters == parameters


def test_a_call_that_is_closed_releases_its_memory(client: ClientCalls, memory: LocalMemory) -> None:
    call = client.put("k", LARGE)
    assert isinstance(next(call), CallMaster)
    assert memory.engine.regions.all()
    call.close()
    assert not memory.engine.regions.all()


def test_batches_of_unequal_length_are_refused(client: ClientCalls) -> None:
    with pytest.raises(InvalidArgument, match="buffers"):
        next(client.put_batch(["a", "b"], [b"a"]))
    with pytest.raises(InvalidArgument, match="groups"):
        next(client.put_batch(["a", "b"], [b"a", b"b"], groups=["g"]))


def calls_with(client: ClientCalls, keys: Any) -> list[Callable[[], Any]]:
    """Every call that takes several keys."""
    return [
        partial(client.exists, keys),
        partial(client.remove, keys),
        partial(client.inspect, keys),
        partial(client.pin, keys, None),
        partial(client.unpin, keys),
        partial(client.drop_replicas, keys),
        partial(client.verify, keys),
        partial(client.get_batch, keys),
        partial(client.get_batch_into, keys, [bytearray(1) for _ in range(3)]),
        partial(client.put_batch, keys, [b"1", b"2", b"3"]),
        partial(client.start_puts, keys, [1, 1, 1], 4096),
        partial(client.open_reads, keys),
    ]


@pytest.mark.parametrize(
    "keys",
    [
        "abc",
        b"abc",
        [b"a", b"b", b"c"],
        ["a", "b", 3],
        iter(["a"]),
        {"a", "b", "c"},
        list(np.array(["a"] * 3)),
    ],
    ids=["string", "bytes", "list of bytes", "one number", "iterator", "set", "strings of numpy"],
)
def test_keys_that_are_no_list_of_strings_are_refused(client: ClientCalls, keys: Any) -> None:
    for call in calls_with(client, keys):
        with pytest.raises(InvalidArgument, match=r"keys is .*a list of strings"):
            next(call())


def test_one_string_is_no_list_of_other_names(client: ClientCalls) -> None:
    for name in ("groups", "parents"):
        with pytest.raises(InvalidArgument, match=name):
            next(client.put_batch(["a", "b"], [b"a", b"b"], **{name: "xy"}))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="targets"):
        client.copy("k", "one")
    with pytest.raises(InvalidArgument, match="targets"):
        client.drain(["one"], "two")
    with pytest.raises(InvalidArgument, match="segments"):
        client.drain("one")
    with pytest.raises(InvalidArgument, match="key"):
        next(client.get(b"k"))  # type: ignore[arg-type]


def test_an_enumeration_of_strings_names_keys(client: ClientCalls) -> None:
    class Name(enum.StrEnum):
        FIRST = "first"

    assert isinstance(next(client.get_batch((Name.FIRST, "second"))), CallMaster)


def test_a_large_durable_batch_is_put_in_parts(client: ClientCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DURABLE_PART_BYTES", 4)
    keys, values = [f"k{number}" for number in range(6)], [b"12"] * 6
    call = client.put_batch(keys, values, PutPolicy(is_durable=True))
    effect = next(call)
    assert isinstance(effect, RunConcurrently) and len(effect.operations) == 3
    with pytest.raises(StopIteration) as stop:
        call.send([[None, None]] * 3)
    assert stop.value.value == [None] * 6


def test_a_durable_batch_with_one_key_twice_is_put_in_order(
    client: ClientCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "DURABLE_PART_BYTES", 4)
    keys, values = ["a", "b", "c", "a"], [b"12"] * 4
    effect = next(client.put_batch(keys, values, PutPolicy(is_durable=True), replace=True))
    assert isinstance(effect, CallMaster), "no part of it is put at the same time as another"


def test_a_removal_by_pattern_has_a_longer_deadline_and_stays_within_the_tenant(client: ClientCalls) -> None:
    """It fails within the timeout if no master answers."""
    client.operations.tenant = "red"
    for call, pattern in ((client.remove_all(), ""), (client.remove_matching("^a"), "^a")):
        first = next(call)
        assert isinstance(first, CallMaster) and first.message == Exists([], "red")
        second = call.send(MasterReply(Flags(1.0, b""), None, 0.0, 0.0))
        assert isinstance(second, CallMaster) and second.message == RemoveMatching(pattern, False, "red")
        assert second.deadline - first.deadline > calls.REMOVAL_TIMEOUT_S / 2
        with pytest.raises(StopIteration) as stop:
            call.send(MasterReply(Removed(3, 1), None, 0.0, 99.0))
        assert stop.value.value == 3


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), 1e9, "5", None])
def test_a_timeout_that_no_call_could_have_is_refused(timeout_s: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout_s"):
        StoreSettings(timeout_s=timeout_s)


def pausing(number: int, num_ended: list[int]) -> Operation[int]:
    """An operation that pauses, and fails if its number is 0."""
    yield Pause(0.01 * number)
    num_ended.append(number)
    if number == 0:
        raise InvalidArgument("number", number, "more than 0")
    return number


def test_the_blocking_client_runs_operations_concurrently() -> None:
    with Store("127.0.0.1:1") as store:
        ended: list[int] = []
        assert store._perform(RunConcurrently([pausing(2, ended), pausing(1, ended)])) == [2, 1]
        with pytest.raises(InvalidArgument):
            store._perform(RunConcurrently([pausing(0, ended), pausing(3, ended)]))
        assert sorted(ended) == [0, 1, 2, 3], "the others are waited for"
        assert store._perform(RunFunction(threading.get_ident)) == threading.get_ident()


async def test_the_asyncio_client_runs_operations_concurrently() -> None:
    async with AsyncStore("127.0.0.1:1") as store:
        ended: list[int] = []
        assert await store._perform(RunConcurrently([pausing(2, ended), pausing(1, ended)])) == [2, 1]
        assert ended == [1, 2]
        with pytest.raises(InvalidArgument):
            await store._perform(RunConcurrently([pausing(0, ended), pausing(3, ended)]))
        assert sorted(ended) == [0, 1, 2, 3], "the others are waited for"
        assert await store._perform(RunFunction(threading.get_ident)) != threading.get_ident()


@pytest.mark.parametrize("name", ["put", "get_into"])
async def test_a_cancelled_call_releases_its_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data = bytearray(LARGE)
    async with AsyncStore("127.0.0.1:1") as store:
        has_begun = asyncio.Event()

        async def call(message: Any, timeout_s: float) -> Any:
            has_begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(store._rpc, "call", call)
        moving = asyncio.create_task(getattr(store, name)("k", data))
        await has_begun.wait()
        assert store.engine.regions.all()
        with pytest.raises(BufferError):
            data.clear()
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert not store.engine.regions.all()
        data.clear()
