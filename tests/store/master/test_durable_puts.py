# SPDX-License-Identifier: Apache-2.0
"""Put-ends that wait for a copy on SSD: when they are answered, and with what."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.errors import Refusal
from mooncake.store import messages as m
from tests.store.conftest import PUT_S, SETTINGS
from tests.store.nodes import Nodes, Place, with_ssd

DURABLE = m.PutPolicy(is_durable=True)


class Scene:
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
def scene() -> Scene:
    return Scene()


def test_a_durable_put_is_readable_at_once_and_answered_when_it_is_on_ssd(scene: Scene) -> None:
    scene.end(["k"], scene.begin("k"))
    assert scene.answer() is None and scene.nodes.where("k") == ["a"]
    scene.ssd.work()
    assert scene.answer() == [True]


def test_the_answer_waits_for_all_objects_of_a_request(scene: Scene) -> None:
    scene.end(["k", "l"], scene.begin("k", "l"))
    first, second = scene.ssd.poll()
    scene.ssd.poll(m.TaskDone(first.task_id, None))
    assert scene.answer() is None
    scene.ssd.poll(m.TaskDone(second.task_id, None))
    assert scene.answer() == [True, True]


def test_a_put_that_need_not_wait_is_answered_at_once(scene: Scene) -> None:
    scene.end(["k"], scene.begin("k", policy=m.PutPolicy()))
    assert scene.answer() == [True]


def test_a_put_that_would_wait_too_long_is_refused_and_the_object_stays(scene: Scene) -> None:
    scene.end(["k"], scene.begin("k"))
    scene.live(PUT_S - 1)
    assert scene.answer() is None
    scene.live(1)
    (outcome,) = scene.answer() or [None]
    assert isinstance(outcome, Refusal) and outcome.code == "no_ssd"
    assert scene.nodes.where("k") == ["a"]


def test_an_object_that_goes_before_is_refused(scene: Scene) -> None:
    ids = scene.begin("k", "l")
    scene.end(["k", "l"], ids)
    scene.nodes.say(m.Remove(["k"], True))
    assert scene.answer() is None, "the other is waited for"
    scene.ssd.work()
    outcomes = scene.answer()
    assert outcomes is not None and outcomes[1] is True
    assert isinstance(outcomes[0], Refusal) and "was removed" in outcomes[0].reason


def test_a_repeated_put_end_waits_too(scene: Scene) -> None:
    """Its connection broke; both are answered, and the second answer says that it was done already."""
    ids = scene.begin("k")
    scene.end(["k"], ids)
    scene.end(["k"], ids, "again")
    assert scene.answer("again") is None
    scene.ssd.work()
    assert scene.answer() == [True] and scene.answer("again") == [False]
    assert isinstance(scene.memory, Place)
