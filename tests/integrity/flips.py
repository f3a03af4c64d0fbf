# SPDX-License-Identifier: Apache-2.0
"""Bit flips in memory, on SSD and on the wire, one at a time, and the result of reads after each.

Allowed are the right bytes, a miss, and an error; never another value. A flip in a node's memory or file
must also be counted by the client and by the master, be in the master's log with the key's story, and leave
the key free to be put again. The position of every flip is drawn from a seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np

from mooncake.cli.ports import free_ports
from mooncake.errors import MooncakeError
from mooncake.store import ReadGrant, Store, StoreSettings
from mooncake.store import messages as m
from mooncake.store.node.ssd_index import SsdIndex
from mooncake.transfer import Op, TransferEngine, TransferSettings
from mooncake.types import Tier
from tests.faults.proxy import Proxy
from tests.integrity.outcome import Outcome
from tests.kill.processes import PATIENCE_S, ROOT, Cluster

SIZES = (1, 100, 4096, 60_000, 150_000)
CHUNK_BYTES = 64 << 10
"""Size of a chunk; the largest object has more than one."""
NUM_KEYS = 20
WIRE_TIMEOUT_S = 1.5
"""Timeout: a flipped length may leave a peer waiting for bytes that never arrive; the call must then fail."""

DROPPED_IN_S = 20.0
"""Time for the node to confirm a reader's report."""

SETTINGS = StoreSettings(chunk_bytes=CHUNK_BYTES)


class Objects:
    """A few objects of all sizes; each has one value."""

    def __init__(self, store: Store, random: Random, on_ssd: bool = False) -> None:
        self._store = store
        self._on_ssd = on_ssd
        self._random = random
        self.values = {
            f"k{number}": random.randbytes(SIZES[number % len(SIZES)] + number) for number in range(NUM_KEYS)
        }
        self.fill()

    def fill(self) -> None:
        """Put the objects that are missing."""
        until = time.monotonic() + PATIENCE_S
        keys = list(self.values)
        policy = m.PutPolicy(is_durable=self._on_ssd)
        while (got := self._store.put_batch(keys, list(self.values.values()), policy)) != [None] * len(keys):
            assert time.monotonic() < until, got
            time.sleep(0.02)
        if self._on_ssd:  # so that reads come from there
            self._store.drop_replicas([key for key in keys if self._is_in_memory(key)])

    def _is_in_memory(self, key: str) -> bool:
        status = self._store.inspect([key])[0]
        return status is not None and any(one.tier is Tier.MEMORY for one in status.replicas)

    def any_key(self) -> str:
        return self._random.choice(list(self.values))

    def judge(self, key: str, value: object, how: str, outcome: Outcome) -> None:
        if value is None:
            outcome.counts["miss"] += 1
        elif value == self.values[key]:
            outcome.counts["right"] += 1
        else:
            outcome.wrong.append(f"flip {outcome.num_flips}: {how} of {key} gave other bytes")


# Ways to read


def by_get(store: Store, key: str, size_bytes: int) -> bytes | None:
    return store.get(key)


def by_get_into(store: Store, key: str, size_bytes: int) -> bytes | None:
    buffer = bytearray(size_bytes)
    return bytes(buffer) if store.get_into(key, buffer) is not None else None


def by_view(store: Store, key: str, size_bytes: int) -> bytes | None:
    with store.view(key) as data:
        return None if data is None else bytes(data)


def by_ranges(store: Store, key: str, size_bytes: int) -> bytes | None:
    """Read the object in two pieces of each chunk, so that checksums are combined."""
    grant = store.open_reads([key])[0]
    if grant is None:
        return None
    buffer = np.zeros(size_bytes, dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        region = store.engine.register(buffer)
        stack.callback(store.engine.unregister, region)
        pieces: list[tuple[int, int]] = []
        for start in range(0, size_bytes, grant.chunk_bytes):
            end = min(start + grant.chunk_bytes, size_bytes)
            middle = (start + end) // 2
            pieces += [(start, middle - start), (middle, end - middle)]
        offsets = [start for start, _ in pieces]
        addresses = [region.address + start for start in offsets]
        good = store.read_ranges([grant], offsets, addresses, [length for _, length in pieces])
    return buffer.tobytes() if good == [True] else None


READERS: tuple[Callable[[Store, str, int], bytes | None], ...] = (by_get, by_get_into, by_view, by_ranges)


# In memory


def flip_memory(num_flips: int, seed: int = 0) -> Outcome:
    """Flip a bit of the node's pool under an object, from another process."""
    outcome, random = Outcome(), Random(seed)
    with running() as cluster, Store(cluster.master, settings=SETTINGS) as store:
        objects = Objects(store, random)
        vandal = Vandal(store.engine)
        while outcome.num_flips < num_flips:
            key = objects.any_key()
            grant = store.open_reads([key])[0]
            if grant is None:  # evicted: the space of what was dropped comes back when its lease ends
                objects.fill()
                continue
            vandal.flip(grant, random.randrange(grant.size_bytes * 8))
            outcome.num_flips += 1
            reader = READERS[outcome.num_flips % len(READERS)]
            objects.judge(key, reader(store, key, grant.size_bytes), reader.__name__, outcome)
            if not is_dropped(store, key):
                outcome.wrong.append(f"flip {outcome.num_flips}: {key} was not dropped")
            objects.fill()
        _check_counted(store, cluster, outcome)
    return outcome


def is_dropped(store: Store, key: str) -> bool:
    """Whether the replica was dropped; its node verifies it first, a moment after the reader's report."""
    ends_at = time.monotonic() + DROPPED_IN_S
    while store.inspect([key])[0] is not None:
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.002)
    return True


class Vandal:
    """A process that may write to the node's memory."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._region = engine.allocate(4096, huge_pages=False)
        self._memory = self._region.view()

    def flip(self, grant: ReadGrant, bit: int) -> None:
        here, there = [self._region.address], [grant.address + bit // 8]
        assert self._engine.run(Op.READ, grant.segment, here, there, [1]).num_bytes == 1
        self._memory[0] ^= 1 << bit % 8
        assert self._engine.run(Op.WRITE, grant.segment, here, there, [1]).num_bytes == 1


def _check_counted(store: Store, cluster: Cluster, outcome: Outcome) -> None:
    """Assert that every flip was counted by the client and the master."""
    num_flips = outcome.num_flips
    logged = [line for line in (cluster.folder / "log").read_text().splitlines() if "object_corrupt" in line]
    counts = {
        "the client counted": store.operations.counts.checksum_mismatches // 2,  # each is read twice
        "the master counted": store.ask(m.GetMasterStatus()).counts["corrupt_objects"],
        "the master logged": len(logged),
        "the master logged with the key's story": sum("readable as" in line for line in logged),
    }
    outcome.wrong += [f"{who} {n} of {num_flips} flips" for who, n in counts.items() if n != num_flips]


# On SSD


def flip_ssd(num_flips: int, seed: int = 0) -> Outcome:
    """Flip a bit of the node's file under an object that has no other replica."""
    outcome, random = Outcome(), Random(seed)
    with running(has_ssd=True) as cluster, Store(cluster.master, settings=SETTINGS) as store:
        objects = Objects(store, random, on_ssd=True)
        file = os.open(cluster.folder / cluster.nodes[0] / "mooncake.data", os.O_RDWR)
        while outcome.num_flips < num_flips:
            key = objects.any_key()
            status = store.inspect([key])[0]
            if status is None or [one.tier for one in status.replicas] != [Tier.SSD]:
                objects.fill()
                continue
            (base,) = [one.address for one in store.ask(m.GetMasterStatus()).segments if one.tier is Tier.SSD]
            bit = random.randrange(status.size_bytes * 8)
            at = status.replicas[0].address - base + bit // 8
            os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 1 << bit % 8]), at)
            outcome.num_flips += 1
            reader = READERS[outcome.num_flips % len(READERS)]
            objects.judge(key, reader(store, key, status.size_bytes), reader.__name__, outcome)
            if not is_dropped(store, key):
                outcome.wrong.append(f"flip {outcome.num_flips}: {key} was not dropped")
            objects.fill()
        os.close(file)
        _check_counted(store, cluster, outcome)
    return outcome


def flip_index(num_flips: int, seed: int = 0) -> Outcome:
    """Flip a bit of the index of an SSD.

    Either that is damage, which fails the node's start, and no whole record has a wrong content; or it is in
    the last record, which counts as torn: then the index has the state before that record.
    """
    outcome, random = Outcome(), Random(seed)
    index, ever = SsdIndex(), list[m.SegmentEntry]()
    log, after = [b""], [dict[int, m.SegmentEntry]()]
    for number in range(200):
        entry = m.SegmentEntry(
            f"k{number}", number, 1 + number, 64, random.randbytes(8), 4096 * (number % 50)
        )
        ever.append(entry)
        is_drop = random.random() < 0.2
        log.append(index.drop([random.randrange(number + 1)]) if is_drop else index.hold(entry))
        after.append(dict(index.entries))
    content = b"".join(log)
    ends = list(itertools.accumulate(map(len, log)))
    for _ in range(num_flips):
        outcome.num_flips += 1
        damaged, bit = bytearray(content), random.randrange(len(content) * 8)
        damaged[bit // 8] ^= 1 << bit % 8
        expected = after[max(n for n, end in enumerate(ends) if end <= bit // 8)]
        found = SsdIndex(bytes(damaged))
        is_damaged = bool(found.found.damages)
        is_right = (
            all(one in ever for one in found.entries.values()) if is_damaged else found.entries == expected
        )
        if not is_right:
            outcome.wrong.append(f"flip {outcome.num_flips}: bit {bit} of the index was believed")
        outcome.counts["miss"] += 1
    return outcome


# On the wire


def flip_wire(num_flips: int, seed: int = 0) -> Outcome:
    """Flip a bit between the client and the node, or between the client and the master."""
    outcome, random = Outcome(), Random(seed)
    with running(behind_proxy=True) as cluster, contextlib.ExitStack() as stack:
        assert cluster.proxy is not None
        to_master = Proxy(cluster.ports[0])
        stack.callback(to_master.close)
        objects = Objects(stack.enter_context(Store(cluster.master, settings=SETTINGS)), random)
        engine = TransferEngine(TransferSettings(transports=("tcp",)))
        stack.callback(engine.close)
        settings = dataclasses.replace(SETTINGS, timeout_s=WIRE_TIMEOUT_S)
        store = stack.enter_context(Store(f"127.0.0.1:{to_master.port}", engine, settings))
        while outcome.num_flips < num_flips:
            key = objects.any_key()
            size_bytes = len(objects.values[key])
            proxy = random.choice((cluster.proxy, cluster.proxy, cluster.proxy, to_master))
            near = 64 if proxy is cluster.proxy else 200
            at = random.randrange(near if random.random() < 0.5 else size_bytes + near)
            proxy.flip(at, random.randrange(8), to_peer=random.random() < 0.5)
            before = proxy.num_flipped
            reader = READERS[random.randrange(len(READERS))]
            for is_put in (random.random() < 0.5, False):
                try:
                    if is_put:
                        store.remove([key], force=True)
                        store.put(key, objects.values[key])
                    objects.judge(key, reader(store, key, size_bytes), reader.__name__, outcome)
                except MooncakeError:
                    outcome.counts["error"] += 1
                if proxy.num_flipped > before:
                    break
            proxy.heal()
            outcome.num_flips += proxy.num_flipped - before
            if outcome.num_flips % 20 == 0:
                _look_at_all(objects, outcome)
        _look_at_all(objects, outcome)
    return outcome


def _look_at_all(objects: Objects, outcome: Outcome) -> None:
    """Read all objects, because a flip may have directed a write to the wrong address."""
    for key, value in zip(objects.values, objects._store.get_batch(list(objects.values)), strict=True):
        if value is not None and value != objects.values[key]:
            outcome.wrong.append(f"flip {outcome.num_flips}: later, {key} has other bytes")
    objects.fill()


# Processes


class Damaged(Cluster):
    """A master and one node, with an optional proxy. No heartbeat is missed on a busy machine."""

    master_flags: ClassVar[dict[str, str]] = {
        "--lease-s": "0.5",
        "--put-s": "1",
        "--grace-s": "0.2",
        "--heartbeat-s": "5",
        "--promote-after-hits": "0",  # else a promotion may find a changed bit before the reader does
    }

    proxy: Proxy | None = None

    def start_node(self, name: str) -> None:
        if self.proxy is None:
            super().start_node(name)
            return
        config = {
            "master": self.master,
            "name": name,
            "port": self.node_port,
            "pool_size_bytes": 64 << 20,
            "huge_pages": False,
        }
        command = [sys.executable, "-m", "tests.integrity.node", f"127.0.0.1:{self.proxy.port}"]
        self.running[name] = subprocess.Popen(
            [*command, json.dumps(config)], stdout=self.log, stderr=self.log, cwd=ROOT, env=os.environ
        )

    def put_proxy(self) -> None:
        self.node_port = free_ports("127.0.0.1", 1, Random())[0]
        self.proxy = Proxy(self.node_port)

    def close(self) -> None:
        super().close()
        if self.proxy is not None:
            self.proxy.close()


@contextlib.contextmanager
def running(behind_proxy: bool = False, has_ssd: bool = False) -> Iterator[Damaged]:
    folder = Path(tempfile.mkdtemp(prefix="integrity-"))
    with contextlib.closing(Damaged(folder, (), 1, has_ssd)) as cluster:
        if behind_proxy:
            cluster.put_proxy()
        cluster.start()
        yield cluster
    shutil.rmtree(folder)


KINDS: dict[str, Callable[[int, int], Outcome]] = {
    "memory": flip_memory,
    "wire": flip_wire,
    "ssd": flip_ssd,
    "index": flip_index,
}
