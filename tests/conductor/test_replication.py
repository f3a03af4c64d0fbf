# SPDX-License-Identifier: Apache-2.0
"""Streams of facts between conductors: order, gaps, snapshots, and whose reports of a request count."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from mooncake.conductor.conductor import Conductor
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.messages import (
    Abandoned,
    AddInstance,
    Assumed,
    Decision,
    Drain,
    Event,
    Failed,
    Finished,
    Place,
    Placed,
    Prefilled,
    Probed,
    Replicate,
    ReportedFact,
    SharedFact,
    Standing,
)
from mooncake.conductor.replication import (
    MAX_UNSENT,
    FactStream,
    Replicas,
    RequestOwners,
    settled_members,
)
from mooncake.conductor.settings import SchedulingSettings
from mooncake.types import WorkerRole

SENDER = Standing(7, 1, True)
GRACE_S = 5.0


def placed(request_id: str, age_s: float = 0.0, claim: int = 0) -> Placed:
    return Placed(Place(request_id, 64), Decision(request_id, None, "d", ""), age_s, claim=claim)


def no_state() -> tuple[Sequence[SharedFact], Sequence[SharedFact]]:
    return [], []


def snapshot(*facts: SharedFact, first: int = 0, sender: Standing = SENDER) -> Replicate:
    return Replicate(sender, first, list(facts), is_snapshot=True)


# --- owners


def test_a_request_has_one_owner() -> None:
    owners = RequestOwners()
    owners.put("a", "gateway")
    owners.put("b", "gateway")
    owners.put("a", 7)
    owners.check()
    assert (owners.owner("a"), owners.requests("gateway")) == (7, ["b"])
    assert owners.drop("gateway") == ["b"] and owners.drop("gateway") == []
    owners.remove("unknown")
    owners.check()


# --- the sender's side


def test_a_connection_begins_with_a_snapshot_and_then_sends_each_fact_once() -> None:
    stream = FactStream()
    stream.add(Finished("before"), 0.0)
    first = stream.message(SENDER, lambda: ([placed("a")], [Assumed("d", [1])]), 1.0)
    assert first == snapshot(placed("a"))
    stream.add(Finished("a"), 1.5)
    assert stream.lag_s(2.0) == 1.0
    assert stream.acknowledged(1)
    second = stream.message(SENDER, no_state, 2.0)
    assert second == Replicate(SENDER, 1, [Assumed("d", [1]), Finished("a")])
    assert stream.has_facts, "until they are acknowledged"
    assert stream.acknowledged(3)
    assert stream.lag_s(9.0) == 0.0
    assert stream.message(SENDER, no_state, 3.0) == Replicate(SENDER, 3, [])


@pytest.mark.parametrize("answer", [-1, 0, 99])
def test_a_receiver_that_misses_facts_gets_a_snapshot(answer: int) -> None:
    stream = FactStream()
    stream.message(SENDER, no_state, 0.0)
    stream.acknowledged(0)
    stream.add(Finished("a"), 0.0)
    stream.message(SENDER, no_state, 0.0)
    assert not stream.acknowledged(answer)
    assert stream.message(SENDER, no_state, 0.0).is_snapshot


def test_a_lost_connection_is_followed_by_a_snapshot() -> None:
    stream = FactStream()
    stream.message(SENDER, no_state, 0.0)
    stream.acknowledged(0)
    stream.add(Finished("a"), 0.0)
    stream.lost()
    stream.add(Finished("b"), 0.0)
    assert not stream.has_facts
    assert stream.message(SENDER, no_state, 0.0).is_snapshot


def test_what_waits_is_bounded_also_while_a_message_is_under_way() -> None:
    stream = FactStream()
    stream.message(SENDER, no_state, 0.0)
    for number in range(MAX_UNSENT + 1):
        stream.add(Finished(str(number)), 0.0)
    assert not stream.has_facts
    assert not stream.acknowledged(0), "what it acknowledges was dropped meanwhile"
    assert stream.message(SENDER, no_state, 0.0).is_snapshot


def test_messages_are_bounded_by_facts_and_by_keys() -> None:
    stream = FactStream()
    stream.message(SENDER, no_state, 0.0)
    stream.acknowledged(0)
    for _ in range(3):
        stream.add(Assumed("d", list(range(1 << 19))), 0.0)
    assert len(stream.message(SENDER, no_state, 0.0).facts) == 2
    assert stream.acknowledged(2)
    for number in range(1000):
        stream.add(Finished(str(number)), 0.0)
    assert len(stream.message(SENDER, no_state, 0.0).facts) == 512


# --- the receiver's side


def test_a_stream_without_its_beginning_is_not_taken() -> None:
    replicas = Replicas(GRACE_S)
    assert replicas.receive(Replicate(SENDER, 0, [placed("a")]), 0.0) == ([], -1)
    assert replicas.receive(snapshot(placed("a")), 0.0) == ([placed("a")], 1)
    assert replicas.receive(Replicate(SENDER, 1, [Finished("a")]), 0.0) == ([Finished("a")], 2)
    assert replicas.receive(Replicate(SENDER, 1, [Finished("a")]), 0.0) == ([], -1), "repeated"
    assert replicas.receive(Replicate(SENDER, 9, []), 0.0) == ([], -1)
    replicas.check()


def test_a_snapshot_ends_what_it_does_not_name() -> None:
    replicas = Replicas(GRACE_S)
    replicas.receive(snapshot(placed("a"), placed("b")), 0.0)
    facts, _ = replicas.receive(snapshot(placed("b"), first=50), 1.0)
    assert facts == [Finished("a"), placed("b")]
    assert replicas.owners.requests(SENDER.id) == ["b"]


def test_a_lost_gateway_counts_only_from_the_conductor_that_it_used() -> None:
    replicas = Replicas(GRACE_S)
    replicas.receive(snapshot(placed("a"), placed("b")), 0.0)
    replicas.owners.put("a", "the gateway")
    facts, _ = replicas.receive(Replicate(SENDER, 2, [Abandoned("a"), Abandoned("b")]), 1.0)
    assert facts == [Finished("b")]
    assert replicas.owners.owner("a") == "the gateway"
    facts, _ = replicas.receive(snapshot(placed("a"), first=4), 2.0)
    assert facts == [], "nor does an earlier placement in a snapshot"
    facts, _ = replicas.receive(Replicate(SENDER, 4, [placed("a")]), 3.0)
    assert facts == [], "nor one that the other conductor reports late"
    facts, _ = replicas.receive(Replicate(SENDER, 5, [Abandoned("a")]), 4.0)
    assert facts == [] and replicas.owners.owner("a") == "the gateway"


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_of_two_claims_of_a_gateway_the_later_one_counts(is_snapshot: bool) -> None:
    replicas = Replicas(GRACE_S)
    replicas.owners.put("a", "the gateway", 2)

    def says(sender: int, claim: int) -> list[ReportedFact]:
        replicas.receive(snapshot(sender=Standing(sender)), 0.0)
        message = Replicate(Standing(sender), 0, [placed("a", claim=claim)], is_snapshot)
        return replicas.receive(message, 1.0)[0]

    assert says(7, 1) == says(7, 2) == []
    assert says(7, 3) == [placed("a", claim=3)] and replicas.owners.owner("a") == 7
    assert says(8, 2) == [] and replicas.owners.owner("a") == 7
    assert says(8, 4) == [placed("a", claim=4)] and replicas.owners.owner("a") == 8
    replicas.check()


def test_a_snapshot_brings_no_request_back_that_has_ended() -> None:
    replicas = Replicas(GRACE_S)
    replicas.receive(snapshot(), 0.0)
    replicas.receive(Replicate(SENDER, 0, [Finished("a")]), 10.0)
    late = snapshot(placed("a", age_s=3.0), placed("b", age_s=3.0), sender=Standing(8))
    assert replicas.receive(late, 12.0)[0] == [placed("b", age_s=3.0)]
    anew = snapshot(placed("a", age_s=1.0), placed("b", age_s=3.0), sender=Standing(8))
    facts, _ = replicas.receive(anew, 12.0)
    assert facts == [placed("a", age_s=1.0), placed("b", age_s=3.0)], "it was placed again since its end"


def test_what_a_snapshot_says_to_have_ended_is_remembered() -> None:
    replicas = Replicas(GRACE_S)
    replicas.receive(Replicate(SENDER, 0, [], True, [("a", 2.0), ("b", 1.0)]), 12.0)
    assert replicas.recent_ends(13.0) == [("a", 3.0), ("b", 2.0)]
    late = snapshot(placed("a", age_s=4.0), placed("b", age_s=1.0), sender=Standing(8))
    assert replicas.receive(late, 13.0)[0] == [placed("b", age_s=1.0)]


def test_the_ends_that_are_remembered_are_bounded() -> None:
    replicas = Replicas(GRACE_S)
    for number in range(20_000):
        replicas.note_ended(str(number), float(number))
    replicas.check()
    ends = replicas.recent_ends(20_000.0)
    assert 10_000 < len(ends) < 20_000 and ends[-1] == ("19999", 1.0)


def test_a_gateway_s_own_report_counts_from_any_conductor() -> None:
    replicas = Replicas(GRACE_S)
    replicas.owners.put("a", "the gateway")
    replicas.receive(snapshot(), 0.0)
    reported: list[SharedFact] = [Prefilled("a"), Finished("a"), Failed("d", "x")]
    assert replicas.receive(Replicate(SENDER, 0, reported), 1.0) == (reported, 3)
    assert replicas.owners.owner("a") is None


def test_requests_of_a_lost_conductor_wait_for_their_gateways_for_a_while() -> None:
    replicas = Replicas(GRACE_S)
    replicas.receive(snapshot(placed("a"), placed("b")), 0.0)
    assert replicas.expired(4.9) == []
    replicas.owners.put("a", "the gateway")
    assert replicas.expired(5.0) == ["b"] and replicas.expired(99.0) == []
    assert replicas.receive(Replicate(SENDER, 2, []), 99.0) == ([], -1), "if it is back, from the beginning"


def test_the_leader_s_members_are_the_members() -> None:
    replicas = Replicas(GRACE_S)
    message = snapshot(AddInstance("d", WorkerRole.DECODE))
    assert replicas.removed_members(message, ["d", "e"]) == ["e"]
    message = snapshot(AddInstance("d", WorkerRole.DECODE), sender=Standing(7, 1))
    assert replicas.removed_members(message, ["d", "e"]) == []
    assert replicas.removed_members(snapshot(), ["d", "e"]) == [], "a leader that was just started"


# --- two cores


def loads(conductor: Conductor) -> list[tuple[object, ...]]:
    """What policies see of the load of each instance, but for the time of the first prompt."""
    rows: list[tuple[object, ...]] = []
    for row in sorted(conductor.status(), key=lambda row: row.instance):
        slot = conductor.instances[row.instance].slot
        prompts, decodes = conductor.loads.prompts_of(slot), conductor.loads.decodes_of(slot)
        rows.append((row.instance, row.role, row.num_requests, row.queued_tokens, sorted(prompts)))
        context = float(conductor.loads.context_tokens[slot])
        rows.append((row.instance, sorted(decodes), float(conductor.loads.batch_size[slot]), context))
    return rows


def conductor_of(*instances: str) -> Conductor:
    conductor = Conductor(SchedulingSettings(), Random(1))
    for instance in instances:
        conductor.handle(AddInstance(instance, WorkerRole.DECODE), 0.0)
        conductor.handle(Probed(instance, ProbeOutcome.READY), 0.0)
    return conductor


def exchanged(sender: Conductor, receiver: Conductor, *, does_sender_lead: bool) -> dict[str, str]:
    """Have the receiver take a snapshot of the sender; one of both leads. Returns its members' states."""
    message = snapshot(*sender.shared_state([], 5.0), sender=Standing(7, 3, does_sender_lead))
    facts, _ = Replicas(GRACE_S).receive(message, 5.0)
    members = list(receiver.instances)
    for fact in settled_members(facts, message, members, is_leader=not does_sender_lead):
        receiver.handle(fact, 5.0)
    return {one.id: one.state for one in receiver.instances.values()}


def test_a_follower_s_snapshot_undoes_no_drain_and_no_removal_at_the_leader() -> None:
    leader, follower = conductor_of("d1", "d2"), conductor_of("d1", "d2")
    leader.handle(Place("r", 100), 1.0)
    busy = leader.placements["r"].decode
    [idle] = {"d1", "d2"} - {busy}
    leader.handle(Drain(busy), 2.0)
    leader.handle(Drain(idle), 2.0)
    assert exchanged(follower, leader, does_sender_lead=False) == {busy: "draining"}


def test_a_leader_that_was_just_started_takes_the_members_of_a_follower() -> None:
    follower = conductor_of("d1", "d2")
    assert exchanged(follower, conductor_of(), does_sender_lead=False) == {"d1": "starting", "d2": "starting"}


def test_a_leader_s_snapshot_ends_a_drain_and_adds_instances_at_a_follower() -> None:
    leader, follower = conductor_of("d1", "d2"), conductor_of("d1")
    follower.handle(Place("r", 100), 1.0)
    follower.handle(Drain("d1"), 2.0)
    assert exchanged(leader, follower, does_sender_lead=True) == {"d1": "ready", "d2": "starting"}


@pytest.mark.parametrize("seed", range(10))
def test_the_accounts_of_both_agree(seed: int) -> None:
    """Random requests at one conductor; messages to the other are lost, or its answers are."""
    random = Random(seed)
    settings = SchedulingSettings(block_tokens=16, slow_start_s=0.0, admission="goodput")
    leader, other = Conductor(settings, Random(seed)), Conductor(settings, Random(99))
    stream, replicas, owners = FactStream(), Replicas(GRACE_S), RequestOwners()
    now = 0.0

    def happens(fact: ReportedFact) -> None:
        leader.handle(fact, now)
        stream.add(fact, now)

    def state() -> tuple[Sequence[SharedFact], Sequence[SharedFact]]:
        return leader.shared_state(list(leader.placements), now), list(leader.assumptions(7))

    def exchange(loses: bool) -> None:
        message = stream.message(Standing(7, 1, True), state, now)
        which = random.random() if loses else 1.0
        if which < 0.1:
            stream.lost()
            return
        facts, wanted = replicas.receive(message, now)
        for fact in settled_members(facts, message, list(other.instances), is_leader=False):
            other.handle(fact, now)
        replicas.check()
        if which < 0.2:
            stream.lost()
        else:
            stream.acknowledged(wanted)

    for name in ("p1", "p2", "d1", "d2"):
        happens(AddInstance(name, WorkerRole.PREFILL if name[0] == "p" else WorkerRole.DECODE, 100_000))
        ready: Event = Probed(name, ProbeOutcome.READY)
        leader.handle(ready, now)
    for number in range(300):
        now += random.random() / 10
        request_id = f"r{random.randrange(number + 1)}"
        match random.randrange(5):
            case 0 | 1:
                request = Place(f"r{number}", random.randrange(1, 999), needs_prefill=random.random() < 0.9)
                decision = leader.handle(request, now)[-1]
                assert isinstance(decision, Decision)
                stream.add(leader.placed_of(request, decision, now), now)
                owners.put(request.request_id, "gateway")
            case 2:
                happens(Prefilled(request_id))
            case 3:
                happens(Finished(request_id))
            case 4:
                exchange(loses=True)
    happens(Drain("p2"))
    while stream.has_facts or other.placements.keys() != leader.placements.keys():
        exchange(loses=False)
    assert loads(other) == loads(leader), f"seed {seed}"
    for one in leader, other:
        one.check()
