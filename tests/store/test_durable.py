"""A durable put is answered when a copy is on SSD, or when it is known that there will be none."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.types import Tier
from tests.store.conftest import PUT_S, SETTINGS
from tests.store.nodes import Nodes, with_ssd

DURABLE = m.PutPolicy(is_durable=True)


class Writer:
    """Puts one durable object and waits for the answer."""

    def __init__(self, nodes: Nodes, key: str) -> None:
        self.nodes, self.key, self.origin = nodes, key, f"writer of {key}"
        started = nodes.start(key, policy=DURABLE)
        assert isinstance(started, m.PutStarted)
        [reserved] = started.reserved
        assert reserved is not None, started.refusals
        end = m.PutEnd([key], [reserved.object_id], [bytes(4)])
        nodes.post(end, "client", self.origin)

    def answer(self) -> list[Any] | None:
        replies = self.nodes.late.get(self.origin)
        return None if replies is None else replies[0].outcomes


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(SETTINGS)


def test_the_answer_comes_with_the_copy(nodes: Nodes) -> None:
    _, ssd = with_ssd(nodes)
    writer = Writer(nodes, "k")
    assert writer.answer() is None
    assert nodes.find("k") is not None, "others read it meanwhile"
    ssd.work()
    assert writer.answer() == [True]
    assert [extent.segment.tier for extent in nodes.master.catalog.objects.readable["k"].complete(Tier.SSD)]


def test_a_copy_that_does_not_come_in_time_is_a_refusal_and_the_object_stays(nodes: Nodes) -> None:
    memory, ssd = with_ssd(nodes)
    writer = Writer(nodes, "k")
    for _ in range(int(PUT_S) + 2):
        nodes.wait(1.0)
        memory.beat()
        ssd.beat()
    answer = writer.answer()
    assert answer is not None
    [refused] = answer
    assert isinstance(refused, Refusal) and refused.code == "no_ssd"
    assert nodes.find("k") is not None


def test_an_object_that_goes_before_its_copy_is_a_refusal_at_once(nodes: Nodes) -> None:
    with_ssd(nodes)
    writer = Writer(nodes, "k")
    assert nodes.say(m.Remove(["k"], True)).outcomes == [True]
    answer = writer.answer()
    assert answer is not None
    [refused] = answer
    assert isinstance(refused, Refusal) and "went before a copy" in refused.reason


def test_writers_are_answered_one_by_one(nodes: Nodes) -> None:
    _, ssd = with_ssd(nodes)
    first, second = Writer(nodes, "a"), Writer(nodes, "b")
    tasks = ssd.poll()
    assert len(tasks) == 2
    ssd.work(tasks[0])
    assert (first.answer() is None) != (second.answer() is None)
    ssd.work(tasks[1])
    assert first.answer() == second.answer() == [True]
