# SPDX-License-Identifier: Apache-2.0
"""Requests that wait: for space while objects are being copied to SSD, for a copy there, for nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.effects import Reply
from mooncake.store.master.objects import Extent
from mooncake.store.master.placement import FreeSpace
from mooncake.store.master.put_queue import HOLD_S, MAX_WAITING, NodeReturns
from mooncake.store.master.segments import RETURN_S, Segment
from mooncake.types import Tier
from tests.store.conftest import PUT_S, SETTINGS
from tests.store.nodes import Nodes, Place, with_ssd

DURABLE = m.PutPolicy(is_durable=True)
KEEPS = dataclasses.replace(SETTINGS, evict_undemoted=False, demote_watermark=0.0)
DURABLE = m.PutPolicy(is_durable=True)


class Scene:
    """A node whose memory is full of four objects that are to be copied to its SSD."""

    def __init__(self, settings: Any = KEEPS) -> None:
        self.nodes = Nodes(settings)
        self.memory, self.ssd = with_ssd(self.nodes, memory_bytes=4096)
        self.nodes.put(*"abcd", size_bytes=1024, host="a")

    def start(self, *keys: str, wait_s: float = 5.0, put_id: int = 1 << 30, tenant: str = "") -> None:
        sizes = [1024] * len(keys)
        message = m.PutStart(put_id, "a", list(keys), sizes, sizes, [], DURABLE, tenant=tenant, wait_s=wait_s)
        self.nodes.post(message, "client", keys[0])

    def answer(self, key: str) -> m.PutStarted | None:
        replies = self.nodes.late.pop(key, [])
        assert len(replies) <= 1
        return replies[0] if replies else None

    def copy_one(self) -> None:
        """Copy one more object to the SSD."""
        (task, *_) = self.tasks
        self.tasks.remove(task)
        self.ssd.held[task.entry.object_id] = task.entry
        self.tasks += self.ssd.poll(m.TaskDone(task.task_id, None))

    def poll(self) -> None:
        self.tasks: list[m.CopyTask] = self.ssd.poll()
        assert self.tasks

    def live(self, seconds: float) -> None:
        self.nodes.wait(seconds)
        self.memory.beat()
        self.ssd.beat()


def test_a_put_waits_for_space_that_is_about_to_be_free() -> None:
    scene = Scene()
    scene.poll()
    scene.start("k")
    assert scene.answer("k") is None and scene.nodes.master.put_queue.num_waiting == 1
    scene.live(1.0)
    scene.copy_one()
    started = scene.answer("k")
    assert started is not None and started.reserved[0] is not None and not started.refusals
    assert scene.nodes.where("a") == ["a/ssd"], "nothing is lost for it"
    scene.nodes.post(m.PutEnd(["k"], [started.reserved[0].object_id], [b"crc!"]), "client", "end")
    scene.poll()
    while scene.tasks:
        scene.copy_one()
    assert scene.nodes.late.pop("end") == [m.Outcomes([True])]
    assert scene.nodes.where("k") == ["a", "a/ssd"] and scene.nodes.master.counts.refused_puts == 0


def test_puts_are_served_in_order_and_a_batch_piece_by_piece() -> None:
    scene = Scene()
    scene.poll()
    scene.start("k", "l")
    scene.start("m", put_id=1 << 31)
    scene.copy_one()
    assert scene.answer("k") is None and scene.answer("m") is None
    scene.copy_one()
    started = scene.answer("k")
    assert started is not None and None not in started.reserved and scene.answer("m") is None
    scene.copy_one()
    assert scene.answer("m") is not None


def test_a_batch_is_tried_again_up_to_the_first_key_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each demotion, for a thousand waiting puts of thousands of keys."""
    scene = Scene()
    scene.poll()
    scene.start(*(f"k{number}" for number in range(100)))
    tried: list[int] = []
    make_room = FreeSpace.make_room

    def counted(space: FreeSpace, size_bytes: int, *more: Any) -> list[Extent] | Refusal:
        tried.append(size_bytes)
        return make_room(space, size_bytes, *more)

    monkeypatch.setattr(FreeSpace, "make_room", counted)
    scene.copy_one()
    assert tried == [1024, 1024], "one has room now, and the next one has none"
    scene.copy_one()
    assert len(tried) == 4
    scene.live(5.0)
    started = scene.answer("k0")
    assert started is not None and started.reserved.count(None) == 98
    assert [one.code for one in started.refusals.values()] == ["no_space"] * 98


def test_a_put_is_refused_when_its_waiting_time_is_over() -> None:
    scene = Scene()
    scene.poll()
    scene.start("k", wait_s=2.0)
    scene.live(1.0)
    assert scene.answer("k") is None
    scene.live(1.0)
    started = scene.answer("k")
    assert started is not None and started.refusals[0].code == "no_space"
    assert scene.nodes.master.counts.refused_puts == 1
    assert any("put refused" in line for line in scene.nodes.master.story("k"))
    assert scene.nodes.master.request_counters.counts["put_start_alloc_failures"] == 1


def test_the_wait_leaves_time_for_writing() -> None:
    scene = Scene()
    scene.poll()
    scene.start("k", wait_s=1e9)
    for _ in range(int(PUT_S / 2)):
        assert scene.answer("k") is None
        scene.live(1.0)
    assert scene.answer("k") is not None


def test_a_put_is_refused_when_no_demotion_is_under_way() -> None:
    scene = Scene()
    scene.nodes.find("a")
    for key in "bcd":
        scene.nodes.find(key)
    scene.poll()
    scene.start("k")
    while scene.tasks:
        assert scene.answer("k") is None
        scene.copy_one()
    started = scene.answer("k")
    assert started is not None and started.refusals[0].code == "no_space", "readers hold all of it"


@pytest.mark.parametrize("wait_s", [0.0, -1.0, float("nan")])
def test_a_put_without_waiting_time_is_refused_at_once(wait_s: float) -> None:
    scene = Scene()
    scene.poll()
    scene.start("k", wait_s=wait_s)
    started = scene.answer("k")
    assert started is not None and started.refusals[0].code == "no_space"
    assert "try again" in started.refusals[0].reason


def test_where_waiting_would_not_help_no_put_waits() -> None:
    scene = Scene()
    scene.poll()
    while scene.tasks:
        scene.copy_one()
    for key in "abcd":
        scene.nodes.find(key)
    scene.start("k")
    started = scene.answer("k")
    assert started is not None and started.refusals[0].code == "no_space"
    evicts = Scene(dataclasses.replace(KEEPS, evict_undemoted=True))
    for key in "abcd":
        evicts.nodes.find(key)
    evicts.start("k")
    assert evicts.answer("k") is not None


def test_a_repeated_request_gets_the_same_space() -> None:
    """Its connection broke while it waited."""
    scene = Scene()
    scene.poll()
    scene.start("k")
    scene.nodes.lose("client")
    first = m.PutStart(1 << 30, "a", ["k"], [1024], [1024], [], DURABLE, wait_s=5.0)
    scene.nodes.post(first, "client again", "again")
    scene.copy_one()
    one, other = scene.answer("k"), scene.answer("again")
    assert one is not None and other is not None and one.reserved == other.reserved != [None]


def test_a_tenant_over_its_quota_waits_the_same() -> None:
    nodes = Nodes(KEEPS)
    _, ssd = with_ssd(nodes, memory_bytes=65536)
    nodes.say(m.SetQuota("red", 2048))
    nodes.put("a", "b", size_bytes=1024, host="a", tenant="red")
    tasks = ssd.poll()
    message = m.PutStart(9, "a", ["k"], [1024], [1024], [], DURABLE, tenant="red", wait_s=5.0)
    nodes.post(message, "client", "k")
    assert "k" not in nodes.late
    ssd.work(*tasks)
    (started,) = nodes.late.pop("k")
    assert started.reserved[0] is not None


def test_the_number_of_waiting_puts_is_limited() -> None:
    scene = Scene()
    scene.poll()
    for number in range(MAX_WAITING):
        scene.nodes.master.put_queue.wait(  # what waits does not matter here
            None,  # type: ignore[arg-type]
            5.0,
            lambda now: True,
            lambda now, number=number: m.PutStarted(1.0, [], {}),  # type: ignore[misc]
            scene.nodes.now,
        )
    scene.start("k")
    assert scene.answer("k") is not None
    assert isinstance(scene.memory, Place)


def test_a_put_that_became_durable_while_it_waited_must_last() -> None:
    scene = Scene()
    scene.poll()
    scene.copy_one()
    scene.start("a", "x", "y")
    assert scene.nodes.master.put_queue.num_waiting == 1
    replies: list[Reply] = []
    take = scene.nodes._take

    def seen(effects: list[Any]) -> None:
        replies.extend(one for one in effects if isinstance(one, Reply) and one.origin == "a")
        take(effects)

    scene.nodes._take = seen  # type: ignore[method-assign]
    scene.copy_one()
    (reply,) = replies
    assert reply.must_last, "the record that it is on SSD may not be flushed yet"
    started = scene.answer("a")
    assert started is not None and started.reserved[0] is None and not started.refusals


class DurableScene:
    def __init__(self) -> None:
        self.nodes = Nodes(SETTINGS)
        self.memory, self.ssd = with_ssd(self.nodes)

    def begin(self, *keys: str, policy: m.PutPolicy = DURABLE) -> list[int]:
        reserved = self.nodes.start(*keys, host="a", policy=policy).reserved
        return [place.object_id for place in reserved if place is not None]

    def end(self, keys: list[str], ids: list[int], origin: str = "end") -> None:
        self.nodes.post(m.PutEnd(keys, ids, [b"crc!"] * len(keys)), "client", origin)

    def answer(self, origin: str = "end") -> list[Any] | None:
        replies = self.nodes.late.pop(origin, [])
        assert len(replies) <= 1
        return replies[0].outcomes if replies else None

    def live(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.nodes.wait(1.0)
            self.memory.beat()
            self.ssd.beat()


@pytest.fixture
def durable_scene() -> DurableScene:
    return DurableScene()


def test_a_durable_put_is_readable_at_once_and_answered_when_it_is_on_ssd(
    durable_scene: DurableScene,
) -> None:
    durable_scene.end(["k"], durable_scene.begin("k"))
    assert durable_scene.answer() is None and durable_scene.nodes.where("k") == ["a"]
    durable_scene.ssd.work()
    assert durable_scene.answer() == [True]


def test_the_answer_waits_for_all_objects_of_a_request(durable_scene: DurableScene) -> None:
    durable_scene.end(["k", "l"], durable_scene.begin("k", "l"))
    first, second = durable_scene.ssd.poll()
    durable_scene.ssd.poll(m.TaskDone(first.task_id, None))
    assert durable_scene.answer() is None
    durable_scene.ssd.poll(m.TaskDone(second.task_id, None))
    assert durable_scene.answer() == [True, True]


def test_a_put_that_need_not_wait_is_answered_at_once(durable_scene: DurableScene) -> None:
    durable_scene.end(["k"], durable_scene.begin("k", policy=m.PutPolicy()))
    assert durable_scene.answer() == [True]


def test_a_put_that_would_wait_too_long_is_refused_and_the_object_stays(durable_scene: DurableScene) -> None:
    durable_scene.end(["k"], durable_scene.begin("k"))
    durable_scene.live(PUT_S - 1)
    assert durable_scene.answer() is None
    durable_scene.live(1)
    (outcome,) = durable_scene.answer() or [None]
    assert outcome == Refusal("no_ssd", "no copy was on SSD in time")
    assert durable_scene.nodes.where("k") == ["a"]
    assert durable_scene.nodes.master.counts.refused_puts == 1


def test_a_put_without_a_copy_in_time_is_refused_with_the_reason_of_the_last_failure(
    durable_scene: DurableScene,
) -> None:
    durable_scene.end(["k", "l"], durable_scene.begin("k", "l"))
    broken = Refusal("io_error", "the disk can't be written")
    todo = durable_scene.ssd.poll()
    for second in range(int(PUT_S)):
        for _ in range(len(todo)):
            code, reason = ("io_error", broken.reason) if second else ("unreachable", "the source")
            todo += durable_scene.ssd.fail(todo.pop(0), code, reason)
        durable_scene.live(1)
        todo += durable_scene.ssd.answered()
    reason = f"no copy was on SSD in time; the last one failed: {broken}"
    assert durable_scene.answer() == [Refusal("no_ssd", reason)] * 2
    assert durable_scene.nodes.master.counts.refused_puts == 2


def test_a_durable_put_is_refused_at_once_with_the_reason_when_every_disk_is_full(
    durable_scene: DurableScene,
) -> None:
    full = Refusal("no_space", "/ssd: No space left on device; make room")
    refused = Refusal("no_ssd", f"no copy is on SSD: {full}")
    durable_scene.end(["k"], durable_scene.begin("k"))
    (task,) = durable_scene.ssd.poll()
    durable_scene.ssd.fail(task, full.code, full.reason)
    assert durable_scene.answer() == [refused] and durable_scene.nodes.where("k") == ["a"]
    durable_scene.end(["l", "m"], durable_scene.begin("l", "m"), "second")
    (task,) = durable_scene.ssd.poll()
    durable_scene.ssd.fail(task, full.code, full.reason)
    durable_scene.live(1)
    assert durable_scene.answer("second") == [refused] * 2, "only one of them was tried"
    durable_scene.end(["n"], durable_scene.begin("n"), "third")
    for _ in range(4):
        durable_scene.ssd.work()
        durable_scene.live(1)
    assert durable_scene.answer("third") in ([True], [refused])
    durable_scene.end(["o"], durable_scene.begin("o"), "fourth")
    durable_scene.ssd.work()
    assert durable_scene.answer("fourth") == [True]
    assert all(len(durable_scene.nodes.master.objects.readable[key].complete()) == 2 for key in "klmno")


def test_an_object_that_goes_before_is_refused(durable_scene: DurableScene) -> None:
    ids = durable_scene.begin("k", "l")
    durable_scene.end(["k", "l"], ids)
    durable_scene.nodes.say(m.Remove(["k"], True))
    assert durable_scene.answer() is None, "the other is waited for"
    durable_scene.ssd.work()
    outcomes = durable_scene.answer()
    assert outcomes is not None and outcomes[1] is True
    assert isinstance(outcomes[0], Refusal) and "was removed" in outcomes[0].reason
    assert durable_scene.nodes.master.counts.refused_puts == 1


def test_a_repeated_put_end_waits_too(durable_scene: DurableScene) -> None:
    """Its connection broke; both are answered, and the second answer says that it was done already."""
    ids = durable_scene.begin("k")
    durable_scene.end(["k"], ids)
    durable_scene.end(["k"], ids, "again")
    assert durable_scene.answer("again") is None
    durable_scene.ssd.work()
    assert durable_scene.answer() == [True] and durable_scene.answer("again") == [False]
    assert isinstance(durable_scene.memory, Place)


# Nodes that have yet to mount again, after a change of the master


class Takeover:
    """A master whose predecessor had objects on two nodes, neither of which has come back yet."""

    def __init__(self, settings: Any = SETTINGS) -> None:
        before = Nodes(settings)
        for name in "ab":
            Place(before, name, 4096)
        self.placed = {key: before.put(key, host=host)[0] for key, host in (("k", "a"), ("l", "b"))}
        self.placed["both"] = before.put("both", host="a", policy=m.PutPolicy(num_replicas=2))[0]
        self.line = before.master.segments.line
        self.nodes = Nodes(settings)
        self.nodes.master.restore(before.records, 0.0)

    def back(self, name: str, epoch: int = 7) -> Place:
        return Place(self.nodes, name, 4096, epoch=epoch, line=self.line)

    def ask(self, message: Any, origin: str = "q") -> Any:
        """The reply, or None if the request waits."""
        self.nodes.post(message, "client", origin)
        return self.answer(origin)

    def answer(self, origin: str = "q") -> Any:
        self.nodes.wait(0.0)
        replies = self.nodes.late.pop(origin, [])
        assert len(replies) <= 1
        return replies[0] if replies else None

    def start(self, key: str = "new", size_bytes: int = 100, **fields: Any) -> m.PutStart:
        return m.PutStart(1 << 30, "a", [key], [size_bytes], [size_bytes], **fields)


def test_reads_of_objects_whose_nodes_are_not_back_wait_for_them() -> None:
    takeover = Takeover()
    object_id = takeover.placed["k"].object_id
    for origin, message in (
        ("lookup", m.LookupObjects(["none", "k"])),
        ("exists", m.Exists(["k", "none"])),
        ("renew", m.Renew(["k"], [object_id])),
        ("other", m.Exists(["l"])),
    ):
        assert takeover.ask(message, origin) is None
    assert takeover.ask(m.Exists(["none"])).flags == b"\0", "what is not known is missing at once"
    takeover.nodes.wait(1.0)
    assert takeover.answer("lookup") is None and takeover.nodes.master.node_returns.num_held == 4
    takeover.back("a")
    found = takeover.answer("lookup").objects
    assert found[0] is None and found[1].object_id == object_id
    assert takeover.answer("exists").flags == b"\1\0" and takeover.answer("renew").flags == b"\1"
    assert takeover.answer("other") is None, "its own node is still away"
    takeover.back("b")
    assert takeover.answer("other").flags == b"\1"
    assert takeover.nodes.master.node_returns.num_held == 0


def test_an_object_that_another_node_has_too_does_not_wait_for_the_second() -> None:
    takeover = Takeover()
    takeover.back("a")
    (found,) = takeover.ask(m.LookupObjects(["both"])).objects
    assert [replica.segment for replica in found.replicas] == ["a"]


def test_a_node_that_does_not_come_back_is_waited_for_once() -> None:
    takeover = Takeover()
    takeover.back("b")
    assert takeover.ask(m.LookupObjects(["k"])) is None
    takeover.nodes.wait(RETURN_S - 0.1)
    assert takeover.answer() is None
    takeover.nodes.wait(0.1)
    assert takeover.answer().objects == [None]
    assert takeover.ask(m.LookupObjects(["k"])).objects == [None], "at once from now on"
    assert not takeover.nodes.master.segments.awaited


def test_no_longer_than_its_objects_are_kept() -> None:
    settings = dataclasses.replace(SETTINGS, segment_ttl_s=1.0)
    takeover = Takeover(settings)
    assert takeover.ask(m.LookupObjects(["k"])) is None
    takeover.nodes.wait(1.0)
    assert takeover.answer().objects == [None]


def test_a_node_that_was_started_anew_has_lost_its_objects() -> None:
    takeover = Takeover()
    assert takeover.ask(m.LookupObjects(["k"])) is None
    takeover.back("a", epoch=8)
    assert takeover.answer().objects == [None]


def test_a_put_waits_until_a_node_is_back() -> None:
    takeover = Takeover()
    assert takeover.ask(takeover.start()) is None
    mount = m.Mount("a", 7, "a", 1 << 30, 4096, b"", 0.0, node="a", line=takeover.line)
    assert takeover.nodes.say(mount, "node").refusal is None
    assert takeover.answer() is None, "nothing is allocated before the first heartbeat"
    assert takeover.nodes.say(m.Heartbeat("a", 7), "node").is_known
    started = takeover.answer()
    assert started.reserved[0].replicas[0].segment == "a" and not started.refusals


def test_a_put_is_sent_again_while_nodes_are_away_and_refused_afterwards() -> None:
    """So that the master does not reserve space for a client that has given up."""
    takeover = Takeover()
    at = 0.0
    while at < RETURN_S:
        assert takeover.ask(takeover.start()) is None
        takeover.nodes.wait(HOLD_S)
        at += HOLD_S
        answer = takeover.answer()
        assert at == RETURN_S or (isinstance(answer, Failure) and answer.code == "peer_lost")
    assert answer.refusals[0].code == "no_space"
    assert takeover.ask(takeover.start()).refusals[0].code == "no_space"
    assert "new" not in takeover.nodes.master.objects.writing


def test_each_try_that_fails_while_nodes_are_away_counts_as_a_refused_put() -> None:
    takeover = Takeover()
    message = m.PutStart(1 << 30, "a", ["x", "y"], [100] * 2, [100] * 2)
    assert takeover.ask(message) is None
    takeover.nodes.wait(HOLD_S)
    assert isinstance(takeover.answer(), Failure)
    assert takeover.nodes.master.counts.refused_puts == 2


@pytest.mark.parametrize("is_same_host", [False, True])
def test_a_put_gets_space_of_a_node_that_was_started_anew(is_same_host: bool) -> None:
    """Its segment takes objects from its first heartbeat on, which comes after the mount."""
    takeover = Takeover()
    policy = m.PutPolicy(is_same_host=is_same_host)
    assert takeover.ask(takeover.start(policy=policy)) is None
    assert takeover.ask(m.LookupObjects(["k"]), "read") is None
    mount = m.Mount("a", 8, "a", 1 << 30, 4096, b"", 0.0, node="a")
    assert takeover.nodes.say(mount, "node").refusal is None
    assert takeover.answer() is None
    assert takeover.answer("read").objects == [None], "what it had is lost"
    assert takeover.nodes.say(m.Heartbeat("a", 8), "node").is_known
    started = takeover.answer()
    assert started.reserved[0].replicas[0].segment == "a" and not started.refusals


def test_a_put_is_answered_when_the_node_that_was_started_anew_is_lost_again() -> None:
    takeover = Takeover()
    near = takeover.start(policy=m.PutPolicy(is_same_host=True))
    assert takeover.ask(near) is None
    mount = m.Mount("a", 8, "a", 1 << 30, 4096, b"", 0.0, node="a")
    assert takeover.nodes.say(mount, "node").refusal is None
    takeover.nodes.lose("node")
    assert takeover.answer().refusals[0].code == "no_space"


def test_a_return_looks_only_at_the_requests_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the work for a put and a read for each node while all of them return."""

    work, is_looking = 0, False
    waits_for = NodeReturns._waits_for

    class Counted(dict[str, Segment]):
        def values(self) -> Any:
            nonlocal work
            work += len(self) if is_looking else 0
            return super().values()

    def counted(self: NodeReturns, *args: Any) -> Any:
        nonlocal work, is_looking
        work += 1
        is_looking = True
        result = waits_for(self, *args)
        is_looking = False
        return result

    monkeypatch.setattr(NodeReturns, "_waits_for", counted)
    near = m.PutPolicy(is_same_host=True)
    names = [f"n{number}" for number in range(30)]
    before = Nodes(SETTINGS)
    for name in names:
        Place(before, name, 4096)
        before.put(f"on {name}", host=name)
    nodes = Nodes(SETTINGS)
    nodes.master.restore(before.records, 0.0)
    segments = nodes.master.segments
    segments.awaited = Counted(segments.awaited)
    for number, name in enumerate(names):
        put = m.PutStart(number << 20, name, [name], [100], [100], policy=near)
        nodes.post(put, "client", f"near {name}")
        nodes.post(m.Exists([f"on {name}"]), "client", f"read {name}")
    assert nodes.master.node_returns.num_held == 60
    work = 0
    for name in reversed(names):
        Place(nodes, name, 4096, line=before.master.segments.line)
        assert f"near {name}" in nodes.late and f"read {name}" in nodes.late
    assert work <= 10 * len(names)
    assert nodes.master.node_returns.num_held == 0


def test_a_put_of_a_known_key_does_not_replace_what_a_node_brings_back() -> None:
    takeover = Takeover()
    takeover.back("b")
    assert takeover.ask(takeover.start("k")) is None
    takeover.back("a")
    started = takeover.answer()
    assert started.reserved == [None] and not started.refusals, "it exists"
    assert takeover.nodes.find("k").object_id == takeover.placed["k"].object_id  # type: ignore[union-attr]


def test_a_put_does_not_wait_where_no_node_that_is_away_could_take_it() -> None:
    takeover = Takeover()
    takeover.back("b")
    assert takeover.ask(takeover.start()).reserved[0].replicas[0].segment == "b"
    assert takeover.ask(takeover.start("large", 8192)).refusals[0].code == "too_large"
    near = m.PutPolicy(is_same_host=True)
    assert takeover.ask(takeover.start("near", policy=near), "near") is None, "its host is away"
    takeover.back("a")
    assert takeover.answer("near").reserved[0].replicas[0].segment == "a"


def test_a_durable_put_waits_for_the_ssd_of_its_node_too() -> None:
    before = Nodes(SETTINGS)
    with_ssd(before)
    takeover = Takeover()
    takeover.nodes = Nodes(SETTINGS)
    takeover.nodes.master.restore(before.records, 0.0)
    line = before.master.segments.line
    Place(takeover.nodes, "a", 65536, line=line)
    assert takeover.ask(takeover.start(policy=DURABLE)) is None
    Place(takeover.nodes, "a/ssd", 1 << 20, tier=Tier.SSD, content_id=99, line=line)
    assert takeover.answer().reserved[0] is not None


def test_an_unknown_segment_or_a_lost_connection_is_not_awaited() -> None:
    """Nodes that were here and are lost are suspected as ever: their objects are missing at once."""
    takeover = Takeover()
    takeover.back("a")
    takeover.nodes.lose("node a 7")
    assert takeover.ask(m.LookupObjects(["k"])).objects == [None]
