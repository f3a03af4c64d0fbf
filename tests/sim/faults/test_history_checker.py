"""The history checker alone: what it considers promised after each kind of loss."""

from __future__ import annotations

import pytest

from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.history_checker import LATE_S, HistoryChecker
from mooncake.sim.faults.store_cluster import StoreCluster
from mooncake.sim.faults.workload_mix import SETTINGS
from mooncake.sim.kernel import Kernel

LIARS = ClusterFaults(power_loss_chance=1.0, lying_disk_chance=1.0, has_oplog=True)


def put(ledger: HistoryChecker, key: str, nodes: list[str], is_durable: bool = False) -> None:
    """As if its put had been acknowledged with these replicas in memory."""
    known = ledger.of(key)
    known.nodes = dict.fromkeys(nodes)
    known.is_absent, known.is_present, known.is_durable = False, True, is_durable


@pytest.fixture
def ledger() -> HistoryChecker:
    return StoreCluster(Kernel(1), LIARS, SETTINGS).checkers.ledger


def test_what_is_in_memory_of_two_nodes_outlives_either(ledger: HistoryChecker) -> None:
    put(ledger, "k", ["a", "b"])
    ledger.node_crashed("a", has_lost_power=False)
    assert ledger.promised() == {"k": None}
    ledger.node_crashed("b", has_lost_power=False)
    assert not ledger.promised()


def test_the_last_node_that_is_given_up_takes_the_promise_along(ledger: HistoryChecker) -> None:
    put(ledger, "k", ["a", "b"])
    put(ledger, "durable", ["a"], is_durable=True)
    ledger.given_up("a")
    assert list(ledger.promised()) == ["k", "durable"]
    ledger.given_up("b")
    assert list(ledger.promised()) == ["durable"]


def test_an_object_lost_while_a_node_has_it_is_found(ledger: HistoryChecker) -> None:
    put(ledger, "k", ["a", "b"])
    ledger.node_crashed("a", has_lost_power=False)
    assert ledger.vanished("k", "a: another process took its name") == ["b"]


def test_what_left_memory_for_an_ssd_is_lost_with_it(ledger: HistoryChecker) -> None:
    put(ledger, "k", ["a"])
    ledger.evicted("k", "a")
    assert list(ledger.promised()) == ["k"]  # an honest disk has it
    assert ledger.vanished("k", "a/ssd: given up") == []


@pytest.mark.parametrize("is_evicted_first", [True, False])
def test_an_ssd_that_lied_is_not_trusted_after_a_power_loss(
    ledger: HistoryChecker, is_evicted_first: bool
) -> None:
    put(ledger, "k", ["a"], is_durable=True)
    put(ledger, "stays", ["a"], is_durable=True)
    if is_evicted_first:
        ledger.evicted("k", "a")
        ledger.node_crashed("b", has_lost_power=True)
    else:
        ledger.node_crashed("b", has_lost_power=True)
        ledger.evicted("k", "a")
    assert list(ledger.promised()) == ["stays"]


def test_what_a_client_had_begun_is_unclear_for_a_while_after_it_died() -> None:
    cluster = StoreCluster(Kernel(1), LIARS, SETTINGS)
    client, other = cluster.start_client("client0", "left"), cluster.start_client("client1", "right")
    ledger, kernel = cluster.checkers.ledger, cluster.kernel
    ledger.begin(client, ["k"])
    ledger.client_crashed(client)

    def removed() -> bool:
        ledger.removed(ledger.begin(other, ["k"]), "k", True)
        return ledger.of("k").is_absent

    assert not removed()
    kernel.now += LATE_S
    assert removed()
