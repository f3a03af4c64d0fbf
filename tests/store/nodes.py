# SPDX-License-Identifier: Apache-2.0
"""Nodes that run the master's tasks, for tests of its cores. They move no bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.master.effects import AppendRecords, OperatorEvent, Received, RecoveryComplete, Reply
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier
from tests.store.conftest import Voice

SSD_BYTES = 1 << 20


class Nodes(Voice):
    """A voice that also receives delayed answers."""

    def __init__(self, settings: MasterSettings) -> None:
        super().__init__(settings)
        self.late: dict[str, list[Any]] = {}
        """Replies to posted messages, by origin."""

    def post(self, message: msgspec.Struct, connection: str, origin: str) -> None:
        """Send a message that need not be answered at once."""
        self._take(self.handle(Received(origin, connection, message)))
        self.master.check()

    def say(self, message: msgspec.Struct, connection: str = "client") -> Any:
        self.post(message, connection, "origin")
        (reply,) = self.late.pop("origin")
        return reply

    def _take(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, AppendRecords):
                self.records += effect.records
            elif isinstance(effect, Reply):
                self.late.setdefault(effect.origin, []).append(effect.message)
            elif not isinstance(effect, RecoveryComplete):
                assert isinstance(effect, OperatorEvent)
                self.notes.append(effect)


class Place:
    """One segment of a node."""

    def __init__(
        self,
        nodes: Nodes,
        name: str,
        size_bytes: int = 65536,
        *,
        tier: Tier = Tier.MEMORY,
        epoch: int = 7,
        content_id: int = 0,
        node: str = "",
        host: str = "",
        rest_s: float = 0.0,
        entries: list[m.SegmentEntry] | None = None,
        polls: bool = True,
        line: int = 0,
    ) -> None:
        self.nodes, self.name, self.epoch = nodes, name, epoch
        self.connection = f"node {name} {epoch}"
        self.node = node or name.split("/")[0]
        self.seen = 0
        self.held: dict[int, m.SegmentEntry] = {entry.object_id: entry for entry in entries or []}
        whose = (tier, content_id, self.node, line)
        mount = m.Mount(name, epoch, host or self.node, 1 << 30, size_bytes, b"", rest_s, *whose)
        self.mounted: m.Mounted = nodes.say(mount, self.connection)
        if self.mounted.refusal is None:
            if self.mounted.wants_report:
                self.report()
            self.beat()
            if polls:
                self.poll()

    def beat(self) -> None:
        assert self.nodes.say(m.Heartbeat(self.name, self.epoch), self.connection).is_known

    def report(self) -> m.Reported:
        """Report its content, in two parts if it has several objects; returns what is unwanted of both."""
        held, unwanted = list(self.held.values()), list[int]()
        for entries, is_last in ((held[:-1], False), (held[-1:], True)):
            if not entries and not is_last:
                continue
            report = m.ReportContents(self.name, self.epoch, entries, is_last)
            reported = self.nodes.say(report, self.connection)
            assert isinstance(reported, m.Reported)
            unwanted += reported.unwanted
        for object_id in unwanted:
            del self.held[object_id]
        return m.Reported(unwanted)

    def poll(self, *done: m.TaskDone, max_tasks: int = 16) -> list[m.CopyTask]:
        """Poll; returns the tasks that come at once. Changes that the journal missed are reported."""
        poll = m.Poll(self.name, self.epoch, list(done), self.seen, max_tasks)
        self.nodes.post(poll, self.connection, self.name)
        self.nodes.wait(0.0)
        return self.answered()

    def answered(self) -> list[m.CopyTask]:
        """The tasks in the answers to Polls so far."""
        tasks: list[m.CopyTask] = []
        for polled in self.nodes.late.pop(self.name, []):
            assert isinstance(polled, m.Polled) and polled.is_known
            if not polled.first:
                continue
            has_missed = polled.first > self.seen + 1
            for change in polled.changes:
                if isinstance(change, m.SegmentEntry):
                    self.held[change.object_id] = change
                else:
                    self.held.pop(change, None)
            self.seen = polled.first + len(polled.changes) - 1
            tasks += polled.tasks
            if has_missed:
                self.report()
                tasks += self.poll()
        return tasks

    def work(self, *tasks: m.CopyTask) -> list[m.CopyTask]:
        """Do these tasks, or those of a Poll, and report them; returns the next ones."""
        todo = list(tasks) or self.poll()
        for task in todo:
            self.held[task.entry.object_id] = task.entry
        return self.poll(*(m.TaskDone(task.task_id, None) for task in todo))

    def fail(self, task: m.CopyTask, code: str, reason: str = "it did") -> list[m.CopyTask]:
        return self.poll(m.TaskDone(task.task_id, Refusal(code, reason)))


def with_ssd(
    nodes: Nodes, name: str = "a", memory_bytes: int = 65536, ssd_bytes: int = SSD_BYTES
) -> tuple[Place, Place]:
    """A node with memory and an SSD."""
    memory = Place(nodes, name, memory_bytes)
    return memory, Place(nodes, f"{name}/ssd", ssd_bytes, tier=Tier.SSD, content_id=99)
