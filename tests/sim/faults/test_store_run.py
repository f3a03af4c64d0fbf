# SPDX-License-Identifier: Apache-2.0
"""The simulated processes alone: what they do to bytes, and when they report it as done."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.sim.faults.clients import SimClient
from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.disks import SimDisk
from mooncake.sim.faults.store_run import StoreCluster
from mooncake.sim.faults.workload import SETTINGS, WorkloadClient
from mooncake.sim.kernel import Kernel
from mooncake.store import messages as m
from mooncake.store.client.effects import Operation
from mooncake.types import Tier

SIZE_BYTES = 4096


def cluster_of(seed: int, faults: ClusterFaults, *, has_disk: bool = False) -> StoreCluster:
    cluster = StoreCluster(Kernel(seed), faults, SETTINGS)
    if has_disk:
        cluster.disks["node0"] = SimDisk(cluster.kernel, faults, 1 << 16)
    cluster.start_node("node0", "left", 1 << 16)
    cluster.kernel.run(2.0)
    return cluster


@pytest.mark.parametrize("seed", range(5))
def test_a_client_is_notified_of_the_end_of_its_write_when_all_of_it_has_landed(seed: int) -> None:
    """Also with a clock that is fast."""
    cluster = cluster_of(seed, ClusterFaults(clock_drift=0.3))
    client = cluster.start_client("client0", "right")
    client.memory[:SIZE_BYTES] = bytes(range(256)) * (SIZE_BYTES // 256)
    results: list[Any] = []
    deadline = client.now + 5.0
    put = client.operations.put(["k"], [0], [SIZE_BYTES], 64, deadline)
    client.run(put, deadline, lambda result, error: results.append(error or result))
    cluster.kernel.run(cluster.kernel.now + 1.0)
    get = client.operations.get_into(["k"], [SIZE_BYTES], [SIZE_BYTES], deadline)
    client.run(get, deadline, lambda result, error: results.append(error or result))
    cluster.kernel.run(cluster.kernel.now + 1.0)
    assert results == [[None], [SIZE_BYTES]]
    assert client.memory[SIZE_BYTES : 2 * SIZE_BYTES] == client.memory[:SIZE_BYTES]


class OneLook(WorkloadClient):
    """A client that looks once."""

    def _next(self, *_: Any) -> None:
        pass

    def _some_keys(self) -> list[str]:
        return ["k"]


def test_a_client_that_was_paused_beyond_its_lease_does_not_look() -> None:
    """The space may have been used again, and the answer is late only because of the pause."""
    cluster = StoreCluster(Kernel(1), ClusterFaults(pause_client_every_s=1.0, has_checksums=False), SETTINGS)
    cluster.start_node("node0", "left", SIZE_BYTES)
    cluster.kernel.run(2.0)
    writer, reader = cluster.start_client("client0", "left"), cluster.start_client("client1", "right")
    results: list[Any] = []

    def done(client: SimClient, operation: Operation[Any]) -> None:
        client.run(operation, client.now + 6.0, lambda result, error: results.append(error or result))
        cluster.kernel.run(cluster.kernel.now + 1.0)

    def put(key: str, value: bytes) -> None:
        cluster.checkers.value_put(key, value)
        writer.memory[: len(value)] = value
        done(writer, writer.operations.put([key], [0], [len(value)], SIZE_BYTES, writer.now + 6.0))

    put("k", b"A" * 3000)
    done(reader, reader.operations.get_into(["k"], [0], [3000], reader.now + 6.0))
    counts = cluster.master.master.counts
    num_lookups = counts.lookups
    OneLook(reader, ["k"], 3000)._look()
    while counts.lookups == num_lookups:
        cluster.kernel.run_one(20.0)
        assert cluster.kernel.now < 20.0
    reader.process.pause(12.0)
    cluster.kernel.run(cluster.kernel.now + SETTINGS.lease_s + 1.0)
    done(writer, writer.operations.remove(["k"], True, writer.now + 6.0))
    put("other", b"B" * 3000)
    assert results == [[None], [3000], [True], [None]]
    cluster.kernel.run(cluster.kernel.now + 10.0)
    assert cluster.checkers.counts["looks"] == 0


def test_a_copy_that_is_being_flushed_is_completely_written() -> None:
    """So another master, which learns of it from the index, may promise it to readers."""
    cluster = cluster_of(0, ClusterFaults(slow_disk_chance=1.0, slow_disk_s=4.0), has_disk=True)
    client, ssd = cluster.start_client("client0", "right"), cluster.nodes["node0"].segments["node0/ssd"]
    outcomes: list[Any] = []
    deadline = client.now + 20.0
    put = client.operations.put(["k"], [0], [SIZE_BYTES], 256, deadline, m.PutPolicy(is_durable=True))
    client.run(put, deadline, lambda result, error: outcomes.append(error or result))
    while not ssd.entries():
        cluster.kernel.run_one(20.0)
        assert cluster.kernel.now < 20.0
    assert not outcomes  # it is not durable yet
    (entry,) = ssd.entries()
    cluster.checkers.master_started()
    source = m.Replica("node0", ssd.epoch, 0, Tier.MEMORY)
    cluster.checkers.task_promised(ssd, m.CopyTask(1, entry, source, 1.0), cluster.kernel.now + 1.0)
    cluster.kernel.run(20.0)
    assert outcomes == [[None]]
