# SPDX-License-Identifier: Apache-2.0
"""Real processes on loopback: typical use, and behaviour when one is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from mooncake import clock
from mooncake.cli.ports import free_ports
from mooncake.errors import DeadlineExceeded, InvalidArgument, Unavailable
from mooncake.store import AsyncStore, PutGrant, Refusal, Store, StoreSettings
from mooncake.store import messages as m
from mooncake.transfer import Op, TransferEngine, TransferSettings
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

MIB = 1 << 20
STARTUP_S = 30.0


class Processes:
    """A master and nodes, each a real process; killed at the end of any test."""

    def __init__(self) -> None:
        self.port = free_ports("127.0.0.1", 1, Random())[0]
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, name: str, role: str, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "mooncake", role, *flags]
        self.running[name] = subprocess.Popen(command)
        return self.running[name]

    def start_master(self, *more: str) -> None:
        flags = ["--lease-s", "2", "--put-s", "3", "--grace-s", "0.5", "--segment-ttl-s", "2"]
        flags += ["--heartbeat-s", "0.2"]
        self.start("master", "master", "--port", str(self.port), *flags, *more)

    def start_node(self, name: str = "node", pool: str = "64MiB", *more: str) -> None:
        flags = ["--master", self.address, "--name", name, "--pool-size", pool, "--no-huge-pages", *more]
        self.start(name, "node", *flags)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def stop(self, name: str) -> int:
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(20)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait(10)


def started() -> Iterator[Processes]:
    with contextlib.closing(Processes()) as processes:
        processes.start_master()
        processes.start_node()
        yield processes


shared_processes = pytest.fixture(scope="module")(started)
"""For tests that leave the processes intact; each has its own keys."""
processes = pytest.fixture(started)
"""For tests that kill processes, or fill the memory."""


def connected(processes: Processes) -> Iterator[Store]:
    with Store(processes.address, settings=StoreSettings(timeout_s=20.0)) as store:
        wait_until(lambda: num_writable(store) == 1)
        yield store


@pytest.fixture
def shared_store(shared_processes: Processes) -> Iterator[Store]:
    yield from connected(shared_processes)


@pytest.fixture
def store(processes: Processes) -> Iterator[Store]:
    yield from connected(processes)


def num_writable(store: Store) -> int:
    status = store.ask(m.GetMasterStatus())
    assert isinstance(status, m.MasterStatus)
    return sum(one.is_writable for one in status.segments)


def num_kept_on(store: Store, segment: str) -> int:
    """Number of objects on a segment; 0 while more are being copied."""
    (found,) = [one for one in store.ask(m.GetMasterStatus()).segments if one.segment == segment]
    return 0 if found.num_tasks else int(found.num_objects)


def content(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


def test_put_and_get_of_every_kind(shared_store: Store) -> None:
    store = shared_store
    for size in (1, 4096, 300_000, 5 * MIB + 7):
        key, value = f"k{size}", content(size, size)
        assert store.put(key, value) is None
        assert store.get(key) == value
        buffer = bytearray(size)
        assert store.get_into(key, buffer) == size and buffer == value
    assert store.get("missing") is None
    assert store.get_into("missing", bytearray(1)) is None
    assert store.exists(["k1", "missing"]) == [True, False]
    assert store.put("k1", b"another") is None
    assert store.get("k1") == content(1, 1), "objects are immutable"
    refusal = store.put("empty", b"")
    assert refusal is not None and refusal.code == "invalid_size"
    with pytest.raises(InvalidArgument, match="4096 bytes"):
        store.get_into("k4096", bytearray(100))
    with pytest.raises(InvalidArgument, match="writable"):
        store.get_into("k4096", bytes(4096))


def test_batches_with_misses_in_between(shared_store: Store) -> None:
    store = shared_store
    keys = [f"b{i}" for i in range(20)]
    arrays = [np.frombuffer(content(i, 10_000 + i), dtype=np.uint8) for i in range(20)]
    assert store.put_batch(keys, arrays) == [None] * 20
    wanted = [keys[3], "missing", keys[19]]
    assert store.get_batch(wanted) == [arrays[3].tobytes(), None, arrays[19].tobytes()]
    targets = [np.zeros(20_000, dtype=np.uint8) for _ in wanted]
    assert store.get_batch_into(wanted, targets) == [10_003, None, 10_019]
    assert targets[2][:10_019].tobytes() == arrays[19].tobytes()
    assert store.get_batch([]) == [] and store.put_batch([], []) == []


def test_a_torch_tensor_goes_in_and_comes_out(shared_store: Store) -> None:
    store = shared_store
    torch = pytest.importorskip("torch")
    tensor = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)
    assert store.put("tensor", tensor) is None
    back = torch.zeros_like(tensor)
    assert store.get_into("tensor", back) == tensor.nbytes
    assert torch.equal(back, tensor)
    with pytest.raises(InvalidArgument, match="contiguous"):
        store.put("transposed", tensor.t())


def test_parts_written_in_any_order_appear_at_the_end(shared_store: Store) -> None:
    store = shared_store
    value = content(1, 10_000)
    pool = store.engine.allocate(20_000, huge_pages=False)
    memory = pool.view()
    memory[:10_000] = value
    grants = store.start_puts(["parts"], [10_000], 4096)
    assert isinstance(grants[0], PutGrant)
    mine = [grants[0]]
    for start, end in ((8192, 10_000), (0, 1000), (1000, 5000)):
        assert store.write_ranges(mine, [start], [pool.address + start], [end - start]) == [None]
    assert store.get("parts") is None
    assert store.write_ranges(mine, [5000], [pool.address + 5000], [3192]) == [None]
    assert store.end_puts(mine) == [None]
    assert store.get("parts") == value
    reads = [grant for grant in store.open_reads(["parts"]) if grant is not None]
    good = store.read_ranges(
        reads, [4096, 8192], [pool.address + 15_000, pool.address + 12_000], [4096, 1808]
    )
    assert good == [True]
    assert memory[15_000:19_096] == value[4096:8192] and memory[12_000:13_808] == value[8192:]
    with pytest.raises(InvalidArgument, match="whole chunks"):
        store.read_ranges(reads, [1], [pool.address], [10])


def test_a_write_after_the_deadline_is_not_even_begun(shared_store: Store) -> None:
    store = shared_store
    pool = store.engine.allocate(64, huge_pages=False)
    memory = pool.view()
    grants = [g for g in store.start_puts(["late"], [64], 64) if isinstance(g, PutGrant)]
    store.write_ranges(grants, [0], [pool.address], [64])
    wait_until(lambda: clock.monotonic() > grants[0].expires_at)
    memory[:] = b"x" * 64
    refusal = store.write_ranges(grants, [0], [pool.address], [64])[0]
    assert refusal is not None and refusal.code == "expired"
    there = store.engine.map(grants[0].segment, grants[0].address, 64)
    assert there is not None and bytes(there) == bytes(64)


def test_incomplete_and_aborted_puts_leave_nothing(shared_store: Store) -> None:
    store = shared_store
    pool = store.engine.allocate(4096, huge_pages=False)
    grants = [g for g in store.start_puts(["half", "dropped"], [4096, 64], 1024) if isinstance(g, PutGrant)]
    assert len(grants) == 2
    store.write_ranges(grants[:1], [0], [pool.address], [1024])
    ended = store.end_puts(grants[:1])
    assert ended[0] is not None and ended[0].code == "incomplete"
    store.abort_puts(grants[1:])
    assert store.exists(["half", "dropped"]) == [False, False]
    assert store.put("half", b"new") is None


def test_a_view_shows_the_bytes_and_keeps_its_lease(shared_store: Store) -> None:
    store = shared_store
    value = content(2, 3 * MIB)
    store.put("viewed", value)
    with store.view("viewed") as data:
        assert data is not None and data.readonly and data == value
        lease_over = clock.monotonic() + 2.5  # the lease is 2 s
        while clock.monotonic() < lease_over:
            time.sleep(0.1)
            assert isinstance(store.remove(["viewed"])[0], Refusal)
        assert data == value
    with store.view("missing") as data:
        assert data is None


def test_leaving_a_view_whose_lease_was_lost_raises(processes: Processes, store: Store) -> None:
    store.put("viewed", b"x" * 1000)
    with pytest.raises(Unavailable, match="discard"), store.view("viewed") as data:
        assert data is not None
        processes.kill("master")
        lease_over = clock.monotonic() + 2.1
        wait_until(lambda: clock.monotonic() > lease_over)


async def test_the_asyncio_face_does_the_same(shared_processes: Processes, shared_store: Store) -> None:
    store = shared_store
    async with AsyncStore(shared_processes.address) as other:
        assert await other.put("a", b"value") is None
        assert store.get("a") == b"value"
        big = content(3, 2 * MIB)
        assert await other.put_batch(["b", "c"], [big, b"small"]) == [None, None]
        assert await other.get_batch(["c", "missing", "b"]) == [b"small", None, big]
        target = bytearray(len(big))
        assert await other.get_into("b", target) == len(big) and target == big
        async with other.view("b") as data:
            assert data is not None and bytes(data) == big
        assert await other.exists(["a", "z"]) == [True, False]
        assert await other.remove(["a"], force=True) == [True]
        assert isinstance(await other.ask(m.GetMasterStatus()), m.MasterStatus)


def test_without_room_a_put_is_refused_with_a_reason(store: Store) -> None:
    refusal = store.put("huge", bytes(65 * MIB))
    assert refusal is not None and refusal.code == "too_large"
    values = [content(i, 8 * MIB) for i in range(8)]
    assert store.put_batch([f"v{i}" for i in range(8)], values) == [None] * 8
    store.exists([f"v{i}" for i in range(8)])
    refusal = store.put("one more", values[0])
    assert refusal is not None and refusal.code == "no_space"
    # When the leases are over, something old makes room.
    wait_until(lambda: store.put("one more", values[0]) is None)


def test_a_killed_node_means_misses_and_a_new_one_serves(processes: Processes, store: Store) -> None:
    value = content(4, MIB)
    store.put("k", value)
    assert store.get("k") == value
    processes.kill("node")
    wait_until(lambda: store.get("k") is None)
    refusal = store.put("l", value)
    assert refusal is not None and refusal.code in ("no_space", "peer_lost")
    processes.start_node()
    wait_until(lambda: store.put("k", value) is None)
    assert store.get("k") == value


def test_puts_go_to_the_node_that_is_left(processes: Processes, store: Store) -> None:
    processes.start_node("second")
    wait_until(lambda: num_writable(store) == 2)
    processes.kill("node")
    value = content(5, MIB)
    wait_until(lambda: store.put("k", value) is None)
    assert store.get("k") == value


def test_a_killed_master_comes_back_empty_and_the_node_mounts_again(
    processes: Processes, store: Store
) -> None:
    store.put("k", b"before")
    processes.kill("master")
    processes.start_master()
    assert store.get("k") is None, "waits for the master, and finds nothing"
    # The memory rests until every promise of the old master has run out: 3.5 s.
    wait_until(lambda: store.put("k", b"after") is None)
    assert store.get("k") == b"after"


def test_with_an_oplog_a_killed_master_costs_nothing(tmp_path: Path) -> None:
    with contextlib.closing(Processes()) as processes:
        oplog = ("--oplog", str(tmp_path / "oplog"))
        processes.start_master(*oplog)
        processes.start_node()
        with Store(processes.address, settings=StoreSettings(timeout_s=20.0)) as store:
            wait_until(lambda: num_writable(store) == 1)
            values = {f"k{i}": content(i, 100_000 + i) for i in range(20)}
            assert store.put_batch(list(values), list(values.values())) == [None] * 20
            assert store.remove(["k7"]) == [True]
            processes.kill("master")
            processes.start_master(*oplog)
            del values["k7"]
            wait_until(lambda: store.get("k0") == values["k0"])
            assert store.get_batch(list(values)) == list(values.values())
            assert store.exists(["k7"]) == [False], "what was removed stays removed"
            wait_until(lambda: store.put("new", b"value") is None)
            assert store.get("new") == b"value"


def test_without_a_master_every_call_ends(processes: Processes, store: Store) -> None:
    processes.kill("master")
    with Store(processes.address, settings=StoreSettings(timeout_s=0.5)) as impatient:
        began = clock.monotonic()
        with pytest.raises(DeadlineExceeded, match=str(processes.port)):
            impatient.get("k")
        assert clock.monotonic() - began < 5


WRITER = """
import sys, time
from mooncake.store import Store
store = Store(sys.argv[1])
pool = store.engine.allocate(4096, huge_pages=False)
grants = store.start_puts(["torn"], [4096], 1024)
store.write_ranges(grants, [0], [pool.address], [2048])
print("half", flush=True)
time.sleep(60)
"""


def test_a_writer_killed_half_way_leaves_no_trace(processes: Processes, store: Store) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, processes.address], stdout=subprocess.PIPE)
    processes.running["writer"] = writer
    assert writer.stdout is not None and writer.stdout.readline() == b"half\n"
    processes.kill("writer")
    writer.stdout.close()
    assert store.get("torn") is None
    wait_until(lambda: store.ask(m.GetMasterStatus()).num_writing == 0)
    value = content(6, 4096)
    assert store.put("torn", value) is None
    assert store.get("torn") == value
    wait_until(lambda: store.ask(m.GetMasterStatus()).allocated_bytes == 4096)


def test_wrong_bytes_are_a_miss_and_are_reported(shared_store: Store) -> None:
    """A bit flips in the node's memory; here, another process writes there."""
    store = shared_store
    value = content(7, 3 * MIB)
    store.put("k-bytes", value)
    grant = store.open_reads(["k-bytes"])[0]
    assert grant is not None
    vandal = store.engine.allocate(64, huge_pages=False)
    done = store.engine.run(Op.WRITE, grant.segment, [vandal.address], [grant.address + MIB + 5], [1])
    assert done.num_bytes == 1
    if store.get("k-bytes") is None:
        assert store.operations.counts.checksum_mismatches == 2, "the same replica is read again"
    else:
        pytest.fail("wrong bytes were believed")
    # Its node has read it again and found it wrong too: the object is dropped, so that it can be put again.
    wait_until(lambda: store.exists(["k-bytes"]) == [False])
    assert any("wrong checksums" in line for line in store.ask(m.ObjectStory("k-bytes")).lines)
    assert store.put("k-bytes", value) is None and store.get("k-bytes") == value


def test_a_wrong_view_is_a_miss(shared_store: Store) -> None:
    store = shared_store
    store.put("k-wrong", content(8, 10_000))
    grant = store.open_reads(["k-wrong"])[0]
    assert grant is not None
    vandal = store.engine.allocate(64, huge_pages=False)
    store.engine.run(Op.WRITE, grant.segment, [vandal.address], [grant.address], [64])
    with store.view("k-wrong") as data:
        assert data is None


def test_two_engines_meet_over_tcp(shared_processes: Processes) -> None:
    """As from another host: the client has no shared memory with the node."""
    engine = TransferEngine(TransferSettings(transports=("tcp",)))
    with contextlib.closing(engine), Store(shared_processes.address, engine) as store:
        wait_until(lambda: num_writable(store) == 1)
        value = content(9, 5 * MIB)
        assert store.put("k-engines", value) is None
        assert store.get("k-engines") == value
        with store.view("k-engines") as data:
            assert data is not None and bytes(data) == value, "fetched, because it can't be mapped"


def test_a_clean_stop_is_reported_to_the_master(processes: Processes, store: Store) -> None:
    store.put("k", b"v")
    assert processes.stop("node") in (0, -signal.SIGTERM)
    wait_until(lambda: not store.ask(m.GetMasterStatus()).segments)
    assert processes.stop("master") in (0, -signal.SIGTERM)


def test_errors_at_the_start_are_named(shared_processes: Processes, shared_store: Store) -> None:
    taken = subprocess.run(
        [sys.executable, "-m", "mooncake", "master", "--port", str(shared_processes.port)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert taken.returncode != 0 and str(shared_processes.port) in taken.stderr + taken.stdout
    greedy = subprocess.run(
        [
            sys.executable,
            "-m",
            "mooncake",
            "node",
            "--master",
            shared_processes.address,
            "--pool-size",
            "900TiB",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert greedy.returncode != 0 and "available" in greedy.stderr + greedy.stdout


@pytest.mark.parametrize("dies", ["node", "both"])
def test_what_is_on_ssd_survives_sigkill(dies: str, tmp_path: Path) -> None:
    """Every object is there again with the daemon, also for a master without any state."""
    ssd = ("--ssd-path", str(tmp_path / "ssd"), "--ssd-size", "64MiB")
    keys = [f"k{number}" for number in range(24)]
    with contextlib.closing(Processes()) as processes:
        processes.start_master("--demote-watermark", "0", "--no-evict-undemoted")
        processes.start_node("node", "12MiB", *ssd)
        with Store(processes.address, settings=StoreSettings(timeout_s=20.0)) as store:
            wait_until(lambda: num_writable(store) == 2)

            for number, key in enumerate(keys):
                wait_until(lambda: store.put(key, content(number, MIB + number)) is None)  # noqa: B023
            wait_until(lambda: num_kept_on(store, "node/ssd") == len(keys))
            if dies == "both":
                processes.kill("master")
            processes.kill("node")
            if dies == "both":
                processes.start_master()
            processes.start_node("node", "12MiB", *ssd)
            # The master may not have noticed the kill yet, and then says that all is there.
            wait_until(lambda: None not in store.get_batch(keys))
            for number, key in enumerate(keys):
                assert store.get(key) == content(number, MIB + number), key
