from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.client.admin import AdminOperations
from mooncake.store.client.operations import CallMaster, MasterReply, Operation, Operations

STATUS = m.JobStatus(7, "copy", "running", "k", 1, 0, 2, 100, "", 1.0, 0.5)
GONE = Refusal("not_found", "no such job")


class Desk:
    """A master that answers what the test says."""

    def __init__(self, reply: msgspec.Struct) -> None:
        self.steering = AdminOperations(Operations("h", lambda a, b, n: 0, 1, tenant="red"))
        self.reply = reply
        self.asked: list[msgspec.Struct] = []

    def run(self, operation: Operation[Any]) -> Any:
        effect = next(operation)
        assert isinstance(effect, CallMaster)
        self.asked.append(effect.message)
        try:
            operation.send(MasterReply(self.reply, None, 0.0, 0.0))
        except StopIteration as stop:
            return stop.value
        raise AssertionError("one question is enough")


def test_patterns_stay_within_the_tenant() -> None:
    desk = Desk(m.Removed(3, 1))
    assert desk.run(desk.steering.remove_matching("^a", False, 1.0)) == 3
    assert desk.asked == [m.RemoveMatching("^a", False, "red")]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.copy("k", ["a"], "", 1.0), m.CopyObject("k", ["a"], "", "red")),
        (lambda s: s.copy("k", ["a"], "b", 1.0), m.CopyObject("k", ["a"], "b", "red")),
        (lambda s: s.drain(["a"], ["b"], 2, 1.0), m.DrainSegments(["a"], ["b"], 2)),
    ],
)
def test_a_job_or_why_there_is_none(
    ask: Callable[[AdminOperations], Operation[Any]], message: msgspec.Struct
) -> None:
    desk = Desk(m.JobReply(STATUS))
    assert desk.run(ask(desk.steering)) == STATUS and desk.asked == [message]
    desk.reply = m.RefusedReply(GONE)
    assert desk.run(ask(desk.steering)) == GONE


def test_a_job_is_asked_about_and_stopped() -> None:
    desk = Desk(m.JobReply(STATUS))
    assert desk.run(desk.steering.job(7, 1.0)) == STATUS
    assert desk.run(desk.steering.cancel(7, 1.0)) is True
    assert desk.asked == [m.AskJob(7), m.AskJob(7, cancel=True)]
    desk.reply = m.RefusedReply(GONE)
    assert desk.run(desk.steering.job(7, 1.0)) is None
    assert desk.run(desk.steering.cancel(7, 1.0)) is False


def test_quotas() -> None:
    desk = Desk(m.Quotas([m.QuotaStatus("red", 100, 50, 1)]))
    assert desk.run(desk.steering.set_quota("red", 100, 1.0)) is None
    assert desk.run(desk.steering.quotas(1.0)) == [m.QuotaStatus("red", 100, 50, 1)]
    assert desk.asked == [m.SetQuota("red", 100), m.AskQuotas()]
    desk.reply = m.RefusedReply(GONE)
    assert desk.run(desk.steering.set_quota("red", -1, 1.0)) == GONE
