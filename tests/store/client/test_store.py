# SPDX-License-Identifier: Apache-2.0
"""The blocking and the asyncio client against real processes: everything beyond put and get."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake import clock
from mooncake.errors import DeadlineExceeded, InvalidArgument, Unavailable
from mooncake.store import AsyncStore, PutGrant, PutPolicy, Refusal, Store, StoreSettings
from mooncake.store import messages as m
from mooncake.store.client.effects import CallMaster, MoveSlices, Slices
from mooncake.store.client.grants import ReadGrant
from mooncake.store.client.store import LeaseKeeper
from mooncake.transfer import Completion, Status
from tests.store.test_processes import Processes, num_writable
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

TWO = PutPolicy(num_replicas=2)
VALUE = bytes(range(256)) * 1024


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with contextlib.closing(Processes()) as processes:
        processes.start_master()
        processes.start_node("one")
        processes.start_node("two")
        with connected(processes) as first:
            wait_until(lambda: num_writable(first) == 2)
        yield processes


def connected(processes: Processes, tenant: str = "default", verify_local: bool = True) -> Store:
    settings = StoreSettings(timeout_s=20.0, tenant=tenant, verify_local=verify_local)
    return Store(processes.address, settings=settings)


@pytest.fixture
def store(processes: Processes) -> Iterator[Store]:
    with connected(processes) as store:
        yield store
        store.remove_all(force=True)


def test_a_forked_child_can_not_use_its_parents_store(processes: Processes, store: Store) -> None:
    """It would share the connection, and take the parent's replies for its own."""
    assert store.put("k", VALUE) is None
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        found = b""
        try:
            store.get("k")
        except BaseException as error:
            found = repr(error).encode()
        store.close()
        os.write(writing, found)
        os._exit(0)
    os.waitpid(child, 0)
    found = os.read(reading, 4096)
    assert b"InvalidArgument" in found and b"make a store in each process" in found
    assert store.get("k") == VALUE, "the child has closed nothing of its parent's"


def test_a_closed_store_says_so_at_once(processes: Processes) -> None:
    store = connected(processes)
    store.connect()
    errors: list[BaseException] = []

    def call_again_and_again() -> None:
        try:
            while True:
                store.get("missing")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call_again_and_again) for _ in range(3)]
    for thread in threads:
        thread.start()
    store.close()
    for thread in threads:
        thread.join(10.0)  # half of what a call may take
    assert len(errors) == 3 and all(type(error) is Unavailable for error in errors), errors
    for call in (store.connect, lambda: store.get("k"), lambda: store.put("k", b"")):
        with pytest.raises(Unavailable, match="this store is closed"):
            call()


async def test_a_closed_asyncio_store_says_so_at_once(processes: Processes) -> None:
    store = AsyncStore(processes.address)
    assert await store.get("missing") is None
    await store.close()
    with pytest.raises(Unavailable, match="this store is closed"):
        await store.get("missing")


def test_a_get_that_is_under_way_when_its_store_is_closed_raises(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transfer ends as cancelled, which is no miss; its memory stays mapped until then."""
    errors: list[BaseException] = []
    has_begun, may_end = threading.Event(), threading.Event()

    def run(*_: object, **__: object) -> Completion:
        has_begun.set()
        assert may_end.wait(20.0)
        return Completion(0, Status.CANCELLED)

    def get() -> None:
        try:
            client.get("under way")
        except BaseException as error:
            errors.append(error)

    client = connected(processes)
    assert client.put("under way", VALUE) is None
    monkeypatch.setattr(client.engine, "run", run)
    thread = threading.Thread(target=get)
    thread.start()
    assert has_begun.wait(20.0)
    client.close()
    may_end.set()
    thread.join(20.0)
    assert [type(error) for error in errors] == [Unavailable]


async def test_an_asyncio_get_that_is_under_way_when_its_store_is_closed_raises(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def transfer(*_: object, **__: object) -> Completion:
        has_begun.set()
        await may_end.wait()
        return Completion(0, Status.CANCELLED)

    store = AsyncStore(processes.address, settings=StoreSettings(timeout_s=20.0))
    assert await store.put("under way", VALUE) is None
    monkeypatch.setattr(store.engine, "transfer", transfer)
    getting = asyncio.create_task(store.get("under way"))
    await has_begun.wait()
    await store.close()
    may_end.set()
    with pytest.raises(Unavailable, match="this store was closed"):
        await getting


def segments(store: Store, key: str) -> list[str]:
    (found,) = store.inspect([key])
    return [] if found is None else sorted(one.segment for one in found.replicas if one.is_complete)


def test_two_replicas_in_parts_and_as_a_view(store: Store) -> None:
    assert store.put("whole", VALUE, TWO) is None
    source = store.engine.allocate(1 << 20, huge_pages=False)
    source.view()[: len(VALUE)] = VALUE
    (grant,) = store.start_puts(["parts"], [len(VALUE)], 4096, TWO)
    assert isinstance(grant, PutGrant) and len(grant.targets) == 2
    half = len(VALUE) // 2
    for offset in (half, 0):
        assert store.write_ranges([grant], [offset], [source.address + offset], [half]) == [None]
    assert store.end_puts([grant]) == [None]
    for key in ("whole", "parts"):
        assert segments(store, key) == ["one", "two"]
        assert store.get(key) == VALUE and store.verify([key, "none"]) == [True, None]
        with store.view(key) as data:
            assert data is not None and data == VALUE
    store.engine.unregister(source)


def test_a_view_whose_bytes_are_in_use_at_its_end_is_not_kept_leased(store: Store) -> None:
    assert store.put("viewed", VALUE) is None
    view = store.view("viewed")
    data = view.__enter__()
    assert data is not None and len(store._keeper._grants) == 1
    in_use = struct.iter_unpack("B", data)
    with pytest.raises(BufferError):
        view.__exit__(None, None, None)
    assert store._keeper._grants == {}
    assert next(in_use) == (VALUE[0],)


async def test_an_asyncio_view_whose_bytes_are_in_use_at_its_end_is_not_kept_leased(
    store: Store, processes: Processes
) -> None:
    assert store.put("viewed", VALUE) is None
    async with AsyncStore(processes.address, settings=StoreSettings(timeout_s=20.0)) as other:
        view = other.view("viewed")
        data = await view.__aenter__()
        assert data is not None and view._renewing is not None
        in_use = struct.iter_unpack("B", data)
        with pytest.raises(BufferError):
            await view.__aexit__(None, None, None)
        with pytest.raises(asyncio.CancelledError):
            await view._renewing
        assert next(in_use) == (VALUE[0],)


def test_a_lease_that_has_ended_is_renewed_no_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an outage of the master is logged once, not at each of the renewals that it fails."""
    num_renewals, now = 0, 0.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)

    def renew(grants: list[ReadGrant], timeout_s: float) -> None:
        nonlocal num_renewals, now
        num_renewals += 1
        now += timeout_s  # the time that has been waited
        if num_renewals > 1:
            raise DeadlineExceeded("the master does not answer")
        grants[0].expires_at += 0.1

    keeper = LeaseKeeper(renew)
    keeper.add(a_grant(0.1))
    wait_until(lambda: keeper._thread is None)
    assert num_renewals > 2
    assert [one.getMessage() for one in caplog.records].count("lease_not_renewed") == 1


async def test_an_asyncio_view_whose_lease_has_ended_renews_it_no_more() -> None:
    async with AsyncStore("127.0.0.1:1") as store:
        await asyncio.wait_for(store.view("k")._renew(a_grant(0.1)), 20.0)


def a_grant(lease_s: float) -> ReadGrant:
    replica = m.Replica("n", 1, 0)
    sums = np.zeros(1, dtype=np.uint32)
    return ReadGrant("k", 1, 1, None, 0, sums, clock.monotonic() + lease_s, 1, replica, [])


def test_reads_that_need_not_be_checked(store: Store, processes: Processes) -> None:
    array = np.arange(10_000, dtype=np.float32)
    assert store.put("array", array) is None
    with connected(processes, verify_local=False) as trusting:
        back = np.zeros_like(array)
        assert trusting.get_into("array", back) == array.nbytes and (back == array).all()
        with trusting.view("array") as data:
            assert data is not None and data == array.tobytes()
        assert trusting.verify(["array"]) == [True]


def test_replacing_pinning_and_dropping(store: Store) -> None:
    assert store.put_batch(["a", "b"], [b"1", b"2"], TWO, groups=["g", "g"], parents=["", "a"]) == [None] * 2
    assert store.put("a", b"new", replace=True) is None and store.get("a") == b"new"
    assert store.put("a", b"newer") is None and store.get("a") == b"new"
    assert store.pin(["a", "none"], None) == [True, False]
    (status,) = store.inspect(["b"])
    assert status is not None and (status.group, status.parent) == ("g", "a")
    (status,) = store.inspect(["a"])
    assert status is not None and status.pinned_s is None and status.size_bytes == 3
    assert store.unpin(["a"]) == [True]
    assert store.drop_replicas(["b"], "two") == [True] and segments(store, "b") == ["one"]
    assert store.remove_matching("^b$") == 1 and store.remove_all(force=True) == 1
    with pytest.raises(InvalidArgument, match="groups"):
        store.put_batch(["a", "b"], [b"1", b"2"], groups=["g"])
    with pytest.raises(InvalidArgument, match="expression"):
        store.remove_matching("(")


def test_tenants_have_their_own_keys_and_quotas(store: Store, processes: Processes) -> None:
    with connected(processes, tenant="red") as red:
        store.put("k", b"ours")
        assert red.get("k") is None and red.put("k", b"theirs") is None
        assert store.get("k") == b"ours" and red.get("k") == b"theirs"
        assert store.set_quota("red", 64) is None
        refusal = red.put("l", b"x" * 11)
        assert refusal is not None and refusal.code == "quota_exceeded"
        # What other tests have removed counts for as long as it may be read.
        used_bytes = {one.tenant: one.used_bytes for one in store.quotas()}
        assert used_bytes["red"] == 64 and used_bytes["default"] >= 64
        assert store.remove_all(force=True) == 1 and red.remove_all(force=True) == 1
        assert store.set_quota("red", None) is None


def test_copies_and_moves_are_jobs(store: Store) -> None:
    store.put("k", VALUE, PutPolicy(preferred_segments=["one"]))
    assert segments(store, "k") == ["one"]
    job = store.copy("k", ["two"])
    assert not isinstance(job, Refusal)
    wait_until(lambda: segments(store, "k") == ["one", "two"])
    wait_until(lambda: (status := store.job(job.job_id)) is not None and status.state == "done")
    moved = store.move("k", "one", "two")
    if not isinstance(moved, Refusal):
        wait_until(lambda: segments(store, "k") == ["two"])
    assert store.get("k") == VALUE
    refusal = store.copy("none", ["two"])
    assert isinstance(refusal, Refusal) and refusal.code == "not_found"
    assert store.job(1 << 40) is None and store.cancel(1 << 40) is False


def test_the_asyncio_client_does_the_same(store: Store, processes: Processes) -> None:
    async def work() -> None:
        async with AsyncStore(processes.address, settings=StoreSettings(timeout_s=20.0)) as store:
            assert await store.put("k", VALUE, TWO) is None
            assert await store.put_batch(["l"], [b"1"], groups=["g"], replace=True) == [None]
            assert await store.verify(["k", "none"]) == [True, None]
            (status,) = await store.inspect(["l"])
            assert status is not None and status.group == "g"
            assert await store.pin(["l"], 5.0) == [True] and await store.unpin(["l"]) == [True]
            assert await store.drop_replicas(["l"]) == [True]
            assert await store.set_quota("red", 10) is None and await store.set_quota("red", None) is None
            assert {one.quota_bytes for one in await store.quotas()} == {None}
            job = await store.copy("none", ["one"])
            assert isinstance(job, Refusal)
            assert await store.job(1 << 40) is None and not await store.cancel(1 << 40)
            async with store.view("k") as data:
                assert data is not None and data == VALUE
            assert await store.remove_matching("k", force=True) == 1 and await store.remove_all() == 0

    asyncio.run(work())


def test_an_object_outlives_one_of_its_nodes(store: Store, processes: Processes) -> None:
    """This test comes last in this file because it stops a node."""
    assert store.put_batch([f"k{n}" for n in range(8)], [VALUE] * 8, TWO) == [None] * 8
    processes.kill("two")
    assert store.get_batch([f"k{n}" for n in range(8)]) == [VALUE] * 8
    processes.start_node("two")
    wait_until(lambda: num_writable(store) == 2)


class Slow:
    """Transfers that end when the test allows it, even after cancellation: their memory is in use."""

    def __init__(self, num_transfers: int) -> None:
        self.num_begun = 0
        self.may_end = [asyncio.Event() for _ in range(num_transfers)]

    async def __call__(self, *_: object, **__: object) -> Completion:
        number, self.num_begun = self.num_begun, self.num_begun + 1
        cancelled: BaseException | None = None
        while not self.may_end[number].is_set():
            try:
                await self.may_end[number].wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if number == 0:
            raise InvalidArgument("local[0]", "there", "registered memory")
        return Completion(number)


def a_move(num_transfers: int, deadline: float) -> MoveSlices:
    nothing = np.zeros(0, dtype=np.uint64)
    return MoveSlices(False, [Slices(None, nothing, nothing, nothing)] * num_transfers, deadline)


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "one fails"])
async def test_a_move_with_several_nodes_ends_when_the_last_of_its_transfers_does(
    monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    async with AsyncStore("127.0.0.1:1") as store:
        slow = Slow(2)
        monkeypatch.setattr(store.engine, "transfer", slow)
        moving = asyncio.ensure_future(store._perform(a_move(2, clock.monotonic() + 60.0)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert slow.num_begun == 2
        if is_cancelled:
            moving.cancel()
        slow.may_end[0].set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not moving.done(), "the other one still writes to the caller's memory"
        slow.may_end[1].set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else InvalidArgument):
            await moving


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_transfers_begin_waits_for_those_that_have_begun(
    monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    """Their memory would be used by the next operation, and then be written by them."""
    with Store("127.0.0.1:1") as store:
        queue, num_ended = store.engine.new_queue(), 0

        def end() -> None:
            nonlocal num_ended
            num_ended += 1
            queue._native.push(Completion(7))

        def submit(_: object, token: int, *__: object, **___: object) -> None:
            if token:
                threading.Timer(0.05, end).start()
                raise failure
            queue._parts[7] = Completion(token)

        monkeypatch.setattr(store.engine, "new_queue", lambda: queue)
        monkeypatch.setattr(store.engine, "submit", submit)
        with pytest.raises(failure):
            store._perform(a_move(2, clock.monotonic() + 60.0))
        assert num_ended == 1 and len(queue) == 0


@pytest.mark.parametrize("size", [1000, 3 << 20])
def test_memory_that_is_unregistered_during_a_put_is_no_fault_of_the_node(
    processes: Processes, store: Store, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The put may go on where the memory is registered for itself, too; else the caller is at fault."""
    moves: list[str] = []

    def cancelled_once(method: Any) -> Any:
        def move(*args: Any, **named: Any) -> Any:
            moves.append(method.__name__)
            return method(*args, **named) if len(moves) > 1 else Completion(0, Status.CANCELLED)

        return move

    def unregistered(*_: object, **__: object) -> Completion:
        raise InvalidArgument("local[0]", "memory", "registered memory; call register() first")

    value = np.zeros(size, dtype=np.uint8)
    with monkeypatch.context() as patched:
        for method in ("run", "run_slice"):
            patched.setattr(store.engine, method, cancelled_once(getattr(store.engine, method)))
        assert store.put("k", value) is None and len(moves) == 2
        for method in ("run", "run_slice"):
            patched.setattr(store.engine, method, unregistered)
        with pytest.raises(InvalidArgument):
            store.put("l", value)
    assert store.put("l", value) is None, "the key is free, and the nodes are still used"
    assert store.operations.counts.failed_transfers == 0


def test_a_large_batch_that_fails_releases_its_keys_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its keys are more than a socket takes, and without harm to calls of other threads."""
    keys, values = [f"{number:0>100}" for number in range(4000)], [b"value"] * 4000

    def fail(*args: Any, **named: Any) -> Any:
        raise InvalidArgument("local[0]", "memory", "registered memory")

    assert store.put("first", b"value") is None
    client = store._rpc._client
    assert client is not None
    connection = client._socket
    for method in ("run", "submit"):
        monkeypatch.setattr(store.engine, method, fail)
    with pytest.raises(InvalidArgument):
        store.put_batch(keys, values)
    monkeypatch.undo()
    grants = store.start_puts(keys, [5] * 4000, 5)
    assert all(isinstance(grant, PutGrant) for grant in grants)
    store.abort_puts([grant for grant in grants if isinstance(grant, PutGrant)])
    assert client._socket is connection and connection is not None and connection.lost is None


async def test_after_the_deadline_nothing_is_moved_or_sent_except_releases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with AsyncStore("127.0.0.1:1") as store:
        sent: list[str] = []

        def post(message: Any) -> None:
            sent.append(type(message).__name__)

        monkeypatch.setattr(store._rpc, "post", post)
        monkeypatch.setattr(store.engine, "transfer", Slow(0))
        (moved,) = await store._perform(a_move(1, clock.monotonic()))
        assert moved.checksums is None and moved.reason == "timed_out"
        late = clock.monotonic()
        answer = await store._perform(CallMaster(m.PutEnd(["k"], [1], [b""], []), late))
        assert isinstance(answer.error, DeadlineExceeded) and sent == []
        await store._perform(CallMaster(m.PutAbort(["k"], [1]), late, may_be_late=True))
        assert sent == ["PutAbort"], "reservations are released even after the deadline"


def test_a_step_has_no_more_time_than_its_task() -> None:
    with Store("127.0.0.1:1", settings=StoreSettings(timeout_s=10.0)) as store:
        now = clock.monotonic()
        assert store._calls.deadline(None, now + 1.0) == now + 1.0
        assert now + 10.0 <= store._calls.deadline(None, now + 100.0) <= clock.monotonic() + 10.0
        with pytest.raises(DeadlineExceeded, match="deadline has passed"):
            store.open_reads(["k"], now)


def test_an_engine_of_its_own_has_the_settings_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake.toml").write_text('[transfer]\ntransports = ["tcp", "local"]\nname = "a-node"\n')
    monkeypatch.setenv("MOONCAKE_CONFIG", str(tmp_path / "mooncake.toml"))
    with Store("127.0.0.1:1") as store:
        assert set(store.engine.describe().endpoints) == {"tcp", "local"}
        assert store.engine.name != "a-node", "others look for the node under that name"
