# SPDX-License-Identifier: Apache-2.0
"""Every rule of the store's world finds a bug, and what triggers the bugs is harmless without them.

Besides, the history checker alone: what it considers promised after each kind of loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.invariants import LATE_S, HistoryChecker, Invariant, Violation
from mooncake.sim.faults.store_run import StoreCluster, StoreRun
from mooncake.sim.faults.workload import SETTINGS
from mooncake.sim.kernel import Kernel
from mooncake.store import messages as m
from mooncake.store.client.effects import Operation
from tests.sim.faults.masters_bugs import RULES as MASTERS_RULES
from tests.sim.faults.planted_bugs import BUGS, Bug
from tests.sim.faults.test_transfer_run import RULES as TRANSFER_RULES

MAX_SEEDS = 100
MIXES = list(dict.fromkeys((bug.faults, bug.load) for bug in BUGS if bug.faults is not None))


def test_every_rule_has_a_bug() -> None:
    assert {bug.rule for bug in BUGS} | MASTERS_RULES | TRANSFER_RULES == set(Invariant)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_by_its_rule(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    for seed in range(bug.begin, bug.begin + MAX_SEEDS):
        try:
            StoreRun(seed, bug.faults, bug.load).run()
        except Violation as violation:
            assert re.match(rf"seed {seed} at ", str(violation))
            if violation.rule is bug.rule:
                return
    pytest.fail(f"{bug.name} was not found by {bug.rule}")


@pytest.mark.parametrize("number", range(len(MIXES)))
def test_without_the_bug_nothing_is_violated(number: int) -> None:
    faults, load = MIXES[number]
    StoreRun(1000, faults, load).run()


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


def test_the_quota_is_the_one_that_the_master_has_rounded_up() -> None:
    cluster = StoreCluster(Kernel(1), ClusterFaults(), SETTINGS)
    answers = cluster.checkers.answers
    cluster.start_node("node0", "left", 65536)
    cluster.kernel.run(2.0)
    client = cluster.start_client("client0", "left")

    def run(operation: Operation[object], done: Callable[[object], None]) -> None:
        client.run(operation, client.now + 6.0, lambda reply, _: done(reply))
        cluster.kernel.run(cluster.kernel.now + 8.0)

    change = answers.quota_began(client)
    ask = client.operations.ask(m.SetQuota("", 500), client.now + 6.0)
    run(ask, lambda reply: answers.quota_set(change, 500, reply))
    outcomes: list[object] = []
    run(client.operations.put(["k"], [0], [510], 65536, client.now + 6.0), outcomes.append)
    assert outcomes == [[None]]


def test_an_answer_of_a_master_that_has_died_says_nothing_about_the_quotas_of_the_next() -> None:
    cluster = StoreCluster(Kernel(1), ClusterFaults(), SETTINGS)
    answers, client = cluster.checkers.answers, cluster.start_client("client0", "left")
    reply = m.Quotas([m.QuotaStatus("default", 512, 0, 0)])
    change = answers.quota_began(client)
    cluster.checkers.master_died(cluster.master.master)
    answers.quota_set(change, 500, reply)
    assert not answers._quotas
    answers.quota_set(answers.quota_began(client), 500, reply)
    assert answers._quotas == {"": 512}
    with pytest.raises(Violation, match="was to have a quota of 500 bytes"):
        answers.quota_set(answers.quota_began(client), 500, m.Quotas([]))
