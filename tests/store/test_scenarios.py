# SPDX-License-Identifier: Apache-2.0
"""Scenarios of the master as text: commands and its decisions. For operators as much as for tests.

``tests/scenarios/master_*.txt`` hold blocks like ::

    10 writer: put_start k:1000 l:1000
      k -> #1 at a+0
      l refused, no_space: ...

An instant, the sender (a connection), a command; below it, indented, the answer and the operators' log
events. ``pytest tests/store/test_scenarios.py --rewrite`` writes down the master's present decisions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.errors import Refusal
from mooncake.machine import Wake
from mooncake.store import messages as m
from mooncake.store.master.effects import ConnectionLost, OperatorEvent, Received, Reply
from mooncake.store.master.master import Master
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier
from tests.scenarios.play import FOLDER, play

BASE = 1 << 40


class Stage:
    """One scenario's master. Times: lease 10 s, put 30 s, grace 5 s, heartbeat 1 s, ttl 5 s. Where there is
    an SSD, every object is copied there at once.
    """

    def __init__(self) -> None:
        self.master = Master(MasterSettings(high_watermark=1.0, demote_watermark=0.0))
        self.now = 0.0
        self._ids: dict[str, int] = {}
        """Id of the last reservation of each key, so that scenarios need not repeat numbers."""
        self._put_id = 1
        self._seen: dict[str, int] = {}
        """Number of the last change sent to the node of each segment."""

    def perform(self, line: str) -> list[str]:
        when, who, *words = line.replace(":", " ", 1).split()
        lines = self._let_time_pass(float(when))
        if words[0] == "lose":
            lines += self._handle(ConnectionLost(who))
        elif words[0] == "wait":
            pass
        elif words[0] == "story":
            lines += self.master.story(words[1])
        else:
            message = self._message(words[0], words[1:])
            lines += self._handle(Received((who, message), who, message))
        self.master.check()
        return lines

    def _let_time_pass(self, until: float) -> list[str]:
        assert until >= self.now, "time goes forward"
        lines: list[str] = []
        while (deadline := self.master.deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            lines += [f"at {self.now:g}: {line}" for line in self._handle(Wake())]
        self.now = until
        return lines

    def _handle(self, event: Any) -> list[str]:
        lines: list[str] = []
        effects = self.master.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Reply):
                who, message = effect.origin
                is_late = not isinstance(event, Received) or effect.origin is not event.origin
                lines += [
                    f"{who} receives: {line}" if is_late else line
                    for line in self._shown(message, effect.message)
                ]
            elif isinstance(effect, OperatorEvent):
                fields = " ".join(
                    f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in effect.fields.items()
                )
                lines.append(f"note {effect.event} {fields}")
        if isinstance(event, Received) and not any(
            isinstance(effect, Reply) and effect.origin is event.origin for effect in effects
        ):
            lines.append("waits for its answer")
        return lines

    def _message(self, command: str, words: list[str]) -> msgspec.Struct:
        options = dict(word.split("=") for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        if command == "mount":
            rest_s, epoch = float(options.get("rest", 0)), int(options.get("epoch", 1))
            size, host = int(options.get("size", 4096)), options.get("host", "h")
            tier, content_id = Tier(options.get("tier", "memory")), int(options.get("content", 0))
            node = options.get("node", "")
            return m.Mount(names[0], epoch, host, BASE, size, b"", rest_s, tier, content_id, node)
        if command == "report":
            entries = [_entry(name) for name in names[1:]]
            return m.ReportContents(
                names[0], int(options.get("epoch", 1)), entries, options.get("last") != "no"
            )
        if command == "poll":
            done = [m.TaskDone(int(task), None) for task in options.get("done", "").split(",") if task]
            if "failed" in options:
                task, code = options["failed"].split(":")
                done.append(m.TaskDone(int(task), Refusal(code, "says the node")))
            checked = []
            if "checked" in options:
                check, _, code = options["checked"].partition(":")
                checked.append(m.TaskDone(int(check), Refusal(code, "says the node") if code else None))
            seen = self._seen.get(names[0], 0)
            return m.Poll(names[0], int(options.get("epoch", 1)), done, seen, 16, checked)
        if command in ("copy", "move"):
            return m.CopyObject(names[0], names[1:], options.get("from", ""))
        if command == "drain":
            unmount_after_s = float(options["unmount"]) if "unmount" in options else None
            targets = options["to"].split(",") if "to" in options else []
            return m.DrainSegments(names, targets, unmount_after_s=unmount_after_s)
        if command in ("job", "cancel"):
            return m.AskJob(int(names[0]), command == "cancel")
        if command in ("beat", "unmount"):
            kind = m.Heartbeat if command == "beat" else m.Unmount
            return kind(names[0], int(options.get("epoch", 1)))
        if command == "put_start":
            keys = [name.split(":")[0] for name in names]
            sizes = [int(name.split(":")[1]) for name in names]
            put_id = int(options.get("put", self._put_id))
            self._put_id = max(self._put_id, put_id) + len(keys)
            avoid = options["avoid"].split(",") if "avoid" in options else []
            is_durable = options.get("durable") == "yes"
            pin_s = float(options["pin"]) if "pin" in options else None
            policy = m.PutPolicy(int(options.get("replicas", 1)), soft_pin_ttl_s=pin_s, is_durable=is_durable)
            groups = [options["group"]] * len(keys) if "group" in options else []
            parents = options["parents"].split(",") if "parents" in options else []
            more = (policy, groups, parents, "replace" in options, options.get("tenant", ""))
            return m.PutStart(put_id, options.get("host", "h"), keys, sizes, sizes, avoid, *more)
        ids = [int(options.get("id", self._ids.get(name, 0))) for name in names]
        if command == "put_end":
            failed = [options["failed"].split(",")] * len(names) if "failed" in options else []
            return m.PutEnd(names, ids, [b"crc!"] * len(names), failed, options.get("tenant", ""))
        if command == "put_abort":
            return m.PutAbort(names, ids)
        if command == "corrupt":
            where = [options["on"]] * len(names) if "on" in options else []
            return m.Corrupt(names, ids, where)
        if command == "pin":
            return m.Pin(names, float(options["ttl"]) if "ttl" in options else None)
        if command == "inspect":
            return m.Inspect(names, options.get("tenant", ""))
        if command == "quota":
            return m.SetQuota(names[0], int(names[1]))
        if command == "renew":
            return m.Renew(names, ids)
        if command == "lookup":
            return m.LookupObjects(names)
        if command == "exists":
            return m.Exists(names)
        if command in ("remove", "remove_force"):
            return m.Remove(names, command == "remove_force")
        raise AssertionError(f"no such command: {command}")

    def _shown(self, message: Any, reply: Any) -> list[str]:
        keys = getattr(message, "keys", [])
        if isinstance(reply, m.PutStarted):
            lines = []
            for index, (key, place) in enumerate(zip(keys, reply.reserved, strict=True)):
                if place is not None:
                    self._ids[key] = place.object_id
                    lines.append(f"{key} -> {_place(place)}")
                elif index in reply.refusals:
                    lines.append(f"{key} {_outcome(reply.refusals[index])}")
                else:
                    lines.append(f"{key} exists")
            return lines
        if isinstance(reply, m.LookupReply):
            return [
                f"{key} miss"
                if stored is None
                else f"{key} -> {_place(stored)}, leased for {reply.lease_s:g} s"
                for key, stored in zip(keys, reply.objects, strict=True)
            ]
        if isinstance(reply, m.Outcomes):
            return [f"{key} {_outcome(outcome)}" for key, outcome in zip(keys, reply.outcomes, strict=True)]
        if isinstance(reply, m.Flags):
            return [f"{key} {'yes' if flag else 'no'}" for key, flag in zip(keys, reply.flags, strict=True)]
        if isinstance(reply, m.Mounted):
            if reply.refusal:
                return [_outcome(reply.refusal)]
            wish = "; report what is there" if reply.wants_report else ""
            return [f"mounted, {reply.num_objects} objects{wish}"]
        if isinstance(reply, m.Reported):
            return [f"not wanted: {', '.join(f'#{one}' for one in reply.unwanted) or 'nothing'}"]
        if isinstance(reply, m.Polled):
            return self._polled(message, reply)
        if isinstance(reply, m.JobReply):
            return [_job(reply.status)]
        if isinstance(reply, m.RefusedReply):
            return [_outcome(reply.refusal)]
        if isinstance(reply, m.Inspected):
            return [f"{key} {_status(status)}" for key, status in zip(keys, reply.objects, strict=True)]
        if isinstance(reply, m.Quotas):
            return [f"{one.tenant}: {one.used_bytes} of {one.quota_bytes} bytes" for one in reply.quotas]
        assert isinstance(reply, m.Beat)
        return ["known" if reply.is_known else "unknown, mount again"]

    def _polled(self, poll: m.Poll, polled: m.Polled) -> list[str]:
        if not polled.is_known:
            return ["unknown, mount again"]
        lines = []
        if polled.first:
            if polled.first > self._seen.get(poll.segment, 0) + 1:
                lines.append("changes were missed, report what is there")
            self._seen[poll.segment] = polled.first + len(polled.changes) - 1
        for change in polled.changes:
            lines.append(
                f"#{change} removed" if isinstance(change, int) else f"{change.key} #{change.object_id} added"
            )
        for task in polled.tasks:
            entry, source = task.entry, task.source
            where = f"from {source.segment}+{source.address - BASE} to {poll.segment}+{entry.offset}"
            what = f"task {task.task_id}: {entry.key} #{entry.object_id} {where}"
            lines.append(f"{what} within {task.deadline_s:g} s")
        for check in polled.checks:
            entry = check.entry
            lines.append(f"check {check.check_id}: {entry.key} #{entry.object_id} at {entry.offset}")
        return lines or ["nothing"]


def _entry(name: str) -> m.SegmentEntry:
    """``key#id:size@offset``."""
    key, rest = name.split("#")
    object_id, rest = rest.split(":")
    size, offset = rest.split("@")
    return m.SegmentEntry(key, int(object_id), int(size), int(size), b"crc!", int(offset))


def _job(job: m.JobStatus) -> str:
    counts = f"{job.num_done} done, {job.num_failed} failed, {job.num_left} left"
    reason = f": {job.reason}" if job.reason else ""
    return f"job {job.job_id}, {job.kind} of {job.about}: {job.state}; {counts}{reason}"


def _place(place: m.Reserved | m.Stored) -> str:
    where = ", ".join(f"{one.segment}+{one.address - BASE}" for one in place.replicas)
    return f"#{place.object_id} at {where}"


def _status(status: m.ObjectStatus | None) -> str:
    if status is None:
        return "is not there"
    where = ", ".join(one.segment for one in status.replicas if one.is_complete)
    pinned = "hard" if status.pinned_s is None else f"{status.pinned_s:g} s"
    return f"on {where or 'nothing yet'}, leased for {status.leased_s:g} s, pinned {pinned}"


def _outcome(outcome: bool | Refusal) -> str:
    if isinstance(outcome, Refusal):
        return f"refused, {outcome.code}: {outcome.reason}"
    return "done" if outcome else "nothing to do"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("master_*.txt")), ids=lambda path: path.stem)
def test_master(path: Path, request: pytest.FixtureRequest) -> None:
    play(Stage(), path, request)


def test_there_are_scenarios() -> None:
    assert len(list(FOLDER.glob("master_*.txt"))) >= 5
