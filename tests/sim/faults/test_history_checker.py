# SPDX-License-Identifier: Apache-2.0
"""The history checker alone: what it considers promised after each kind of loss."""

from __future__ import annotations

import pytest

from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.history_checker import LATE_S, HistoryChecker
from mooncake.sim.faults.store_cluster import StoreCluster
from mooncake.sim.faults.workload_mix import SETTINGS
from mooncake.sim.kernel import Kernel

LIARS = ClusterFaults(power_loss_chance=1.0, lying_disk_chance=1.0, has_oplog=True)


def put(history: HistoryChecker, key: str, nodes: list[str], is_durable: bool = False) -> None:
    """As if its put had been acknowledged with these replicas in memory."""
    known = history.of(key)
    known.nodes = dict.fromkeys(nodes)
    known.is_absent, known.is_present, known.is_durable = False, True, is_durable


@pytest.fixture
def history() -> HistoryChecker:
    return StoreCluster(Kernel(1), LIARS, SETTINGS).checkers.history


def test_what_is_in_memory_of_two_nodes_outlives_either(history: HistoryChecker) -> None:
    put(history, "k", ["a", "b"])
    history.node_crashed("a", has_lost_power=False)
    assert history.promised() == {"k": None}
    history.node_crashed("b", has_lost_power=False)
    assert not history.promised()


def test_the_unmount_of_the_last_node_ends_the_promise(history: HistoryChecker) -> None:
    put(history, "k", ["a", "b"])
    put(history, "durable", ["a"], is_durable=True)
    history.unmounted("a")
    assert list(history.promised()) == ["k", "durable"]
    history.unmounted("b")
    assert list(history.promised()) == ["durable"]


def test_an_object_lost_while_a_node_has_it_is_found(history: HistoryChecker) -> None:
    put(history, "k", ["a", "b"])
    history.node_crashed("a", has_lost_power=False)
    assert history.dropped("k", "a: another process took its name") == ["b"]


def test_what_left_memory_for_an_ssd_is_lost_with_it(history: HistoryChecker) -> None:
    put(history, "k", ["a"])
    history.evicted("k", "a")
    assert list(history.promised()) == ["k"]  # an honest disk has it
    assert history.dropped("k", "a/ssd: given up") == []


@pytest.mark.parametrize("is_evicted_first", [True, False])
def test_an_ssd_that_lied_is_not_trusted_after_a_power_loss(
    history: HistoryChecker, is_evicted_first: bool
) -> None:
    put(history, "k", ["a"], is_durable=True)
    put(history, "stays", ["a"], is_durable=True)
    if is_evicted_first:
        history.evicted("k", "a")
        history.node_crashed("b", has_lost_power=True)
    else:
        history.node_crashed("b", has_lost_power=True)
        history.evicted("k", "a")
    assert list(history.promised()) == ["stays"]


def test_what_a_client_had_begun_is_unclear_for_a_while_after_it_died() -> None:
    cluster = StoreCluster(Kernel(1), LIARS, SETTINGS)
    client, other = cluster.start_client("client0", "left"), cluster.start_client("client1", "right")
    history, kernel = cluster.checkers.history, cluster.kernel
    history.begin(client, ["k"])
    history.client_crashed(client)

    def removed() -> bool:
        history.removed(history.begin(other, ["k"]), "k", True)
        return history.of("k").is_absent

    assert not removed()
    kernel.now += LATE_S
    assert removed()
