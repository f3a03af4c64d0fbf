# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.client.admin import AdminOperations
from mooncake.store.client.effects import CallMaster, MasterReply, Operation
from mooncake.store.client.operations import Operations

STATUS = m.JobStatus(7, "copy", "running", "k", 1, 0, 2, 100, "", 1.0, 0.5)
GONE = Refusal("not_found", "no such job")


class ScriptedReply:
    """A master whose replies the test defines."""

    def __init__(self, reply: msgspec.Struct) -> None:
        self.admin = AdminOperations(Operations("h", lambda a, b, n: 0, 1, tenant="red"))
        self.reply = reply
        self.sent: list[msgspec.Struct] = []

    def run(self, operation: Operation[Any]) -> Any:
        effect = next(operation)
        assert isinstance(effect, CallMaster)
        self.sent.append(effect.message)
        try:
            operation.send(MasterReply(self.reply, None, 0.0, 0.0))
        except StopIteration as stop:
            return stop.value
        raise AssertionError("one request is enough")


def test_a_removal_may_take_long_once_a_master_has_answered() -> None:
    master = ScriptedReply(m.Removed(3, 1))
    message = m.RemoveMatching("^a", False, "red")
    removal = master.admin.remove_matching(message, 10.0, 600.0)
    first = next(removal)
    assert isinstance(first, CallMaster) and (first.message, first.deadline) == (m.Exists([], "red"), 10.0)
    second = removal.send(MasterReply(m.Flags(1.0, b""), None, 0.0, 0.0))
    assert isinstance(second, CallMaster) and (second.message, second.deadline) == (message, 600.0)
    with pytest.raises(StopIteration) as stop:
        removal.send(MasterReply(master.reply, None, 0.0, 99.0))
    assert stop.value.value == m.Removed(3, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.copy("k", ["a"], "", 1.0), m.CopyObject("k", ["a"], "", "red")),
        (lambda s: s.copy("k", ["a"], "b", 1.0), m.CopyObject("k", ["a"], "b", "red")),
        (lambda s: s.drain(["a"], ["b"], 2, 1.0), m.DrainSegments(["a"], ["b"], 2)),
    ],
)
def test_a_job_or_the_reason_why_it_was_refused(
    call: Callable[[AdminOperations], Operation[Any]], message: msgspec.Struct
) -> None:
    master = ScriptedReply(m.JobReply(STATUS))
    assert master.run(call(master.admin)) == STATUS and master.sent == [message]
    master.reply = m.RefusedReply(GONE)
    assert master.run(call(master.admin)) == GONE


def test_a_job_is_queried_and_cancelled() -> None:
    master = ScriptedReply(m.JobReply(STATUS))
    assert master.run(master.admin.job(7, 1.0)) == STATUS
    assert master.run(master.admin.cancel(7, 1.0)) is True
    assert master.sent == [m.AskJob(7), m.AskJob(7, cancel=True)]
    master.reply = m.RefusedReply(GONE)
    assert master.run(master.admin.job(7, 1.0)) is None
    assert master.run(master.admin.cancel(7, 1.0)) is False


def test_quotas() -> None:
    master = ScriptedReply(m.Quotas([m.QuotaStatus("red", 100, 50, 1)]))
    assert master.run(master.admin.set_quota("red", 100, 1.0)) is None
    assert master.run(master.admin.quotas(1.0)) == [m.QuotaStatus("red", 100, 50, 1)]
    assert master.sent == [m.SetQuota("red", 100), m.AskQuotas()]
    master.reply = m.RefusedReply(GONE)
    assert master.run(master.admin.set_quota("red", -1, 1.0)) == GONE
