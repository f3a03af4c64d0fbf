# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a master whose invariants are checked after every test, and a ``Voice`` that sends it
messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from mooncake.errors import Refusal
from mooncake.machine import Wake
from mooncake.store import messages as m
from mooncake.store.master.effects import (
    AppendRecords,
    ConnectionLost,
    Effect,
    Event,
    OperatorEvent,
    Received,
    Reply,
)
from mooncake.store.master.log_records import Record
from mooncake.store.master.master import Master
from mooncake.store.master.objects import DEFAULT_POLICY, StoredObject
from mooncake.store.master.tasks import entry_of
from mooncake.store.settings import MasterSettings

LEASE_S, PUT_S, GRACE_S, TTL_S = 10.0, 30.0, 5.0, 5.0


class Voice:
    """Sends messages to a master at instants chosen by the test; ``notes`` has the operators' log events."""

    def __init__(self, settings: MasterSettings) -> None:
        self.master = Master(settings)
        self.now = 0.0
        self.notes: list[OperatorEvent] = []
        self.records: list[Record] = []
        """All records the master wanted written down."""
        self._put_id = 1

    def handle(self, event: Event | Wake) -> list[Effect]:
        effects = self.master.handle(event, self.now)
        found = self.master.catalog.deadline()
        assert self.master.deadline() == found, f"the deadline is {found} after {event}"
        return effects

    def say(self, message: msgspec.Struct, connection: str = "client") -> Any:
        replies = []
        for effect in self.handle(Received("origin", connection, message)):
            if isinstance(effect, Reply):
                assert effect.origin == "origin"
                replies.append(effect.message)
            elif isinstance(effect, AppendRecords):
                assert not replies, "records come before the acknowledgement that rests on them"
                self.records += effect.records
            elif isinstance(effect, OperatorEvent):
                self.notes.append(effect)
        self.master.check()
        assert len(replies) == 1
        return replies[0]

    def lose(self, connection: str) -> None:
        self._take(self.handle(ConnectionLost(connection)))
        self.master.check()

    def _take(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, AppendRecords):
                self.records += effect.records
            else:
                assert isinstance(effect, OperatorEvent)
                self.notes.append(effect)

    def wait(self, seconds: float) -> None:
        """Let time pass; the master is woken at each of its deadlines."""
        until = self.now + seconds
        while True:
            deadline = self.master.deadline()
            if deadline is None or deadline > until:
                break
            self.now = max(self.now, deadline)
            self._take(self.handle(Wake()))
            self.master.check()
            after = self.master.deadline()
            assert after is None or after > self.now, "a deadline must lie in the future"
        self.now = until

    def mount(
        self,
        name: str = "a",
        size_bytes: int = 4096,
        *,
        epoch: int = 7,
        host: str = "h",
        rest_s: float = 0.0,
        line: int = 0,
    ) -> m.Mounted:
        how = b"how to reach " + name.encode()
        mount = m.Mount(name, epoch, host, 1 << 20, size_bytes, how, rest_s, line=line)
        reply = self.say(mount, f"node {name}")
        assert isinstance(reply, m.Mounted)
        if reply.refusal is None:
            assert self.say(m.Heartbeat(name, epoch), f"node {name}").is_known
        return reply

    def keep_alive(self, seconds: float, *names: str, epoch: int = 7) -> None:
        """Let time pass while these nodes send heartbeats."""
        for _ in range(int(seconds)):
            self.wait(1.0)
            for name in names or ("a",):
                assert self.say(m.Heartbeat(name, epoch), f"node {name}").is_known
        self.wait(seconds - int(seconds))

    def start(
        self,
        *keys: str,
        size_bytes: int = 1000,
        host: str = "h",
        put_id: int = 0,
        policy: m.PutPolicy = DEFAULT_POLICY,
        tenant: str = "",
        group: str = "",
        parents: Sequence[str] = (),
        replace: bool = False,
    ) -> m.PutStarted:
        if not put_id:
            put_id = self._put_id
            self._put_id += len(keys)
        count = len(keys)
        sizes = [size_bytes] * count
        groups = [group] * count if group else []
        message = m.PutStart(
            put_id, host, list(keys), sizes, sizes, [], policy, groups, list(parents), replace, tenant
        )
        reply = self.say(message)
        assert isinstance(reply, m.PutStarted)
        return reply

    def end(
        self, key: str, object_id: int, checksums: bytes = b"crc!", tenant: str = "", *failed: str
    ) -> Any:
        lost = [list(failed)] if failed else []
        return self.say(m.PutEnd([key], [object_id], [checksums], lost, tenant)).outcomes[0]

    def put(
        self,
        *keys: str,
        size_bytes: int = 1000,
        host: str = "h",
        policy: m.PutPolicy = DEFAULT_POLICY,
        tenant: str = "",
        group: str = "",
        parents: Sequence[str] = (),
        replace: bool = False,
    ) -> list[m.Reserved]:
        started = self.start(
            *keys,
            size_bytes=size_bytes,
            host=host,
            policy=policy,
            tenant=tenant,
            group=group,
            parents=parents,
            replace=replace,
        )
        for key, place in zip(keys, started.reserved, strict=True):
            assert place is not None, started.refusals
            assert self.end(key, place.object_id, tenant=tenant) is True
        return [place for place in started.reserved if place is not None]

    def find(self, key: str, tenant: str = "") -> m.Stored | None:
        found = self.say(m.LookupObjects([key], tenant)).objects[0]
        assert found is None or isinstance(found, m.Stored)
        return found

    def inspect(self, key: str, tenant: str = "") -> m.ObjectStatus | None:
        """All details of an object, without a lease."""
        found = self.say(m.Inspect([key], tenant)).objects[0]
        assert found is None or isinstance(found, m.ObjectStatus)
        return found

    def there(self, keys: str) -> str:
        """The readable ones of these one-letter keys, without a lease."""
        return "".join(key for key in keys if self.inspect(key) is not None)

    def where(self, key: str) -> list[str]:
        """The segments that have a complete replica."""
        found = self.inspect(key)
        return [] if found is None else [one.segment for one in found.replicas if one.is_complete]

    def remove(self, key: str, force: bool = False) -> Any:
        return self.say(m.Remove([key], force)).outcomes[0]

    def look(self, is_right: Callable[[m.SegmentEntry, str], bool] = lambda entry, segment: False) -> int:
        """Nodes read the replicas that readers reported and send the results; returns their number."""
        verification, count = self.master.verification, 0
        for segment in list(self.master.segments.mounted.values()):
            while True:
                verification.take(segment, self.now)
                # Including those that came with the answer to an earlier Poll.
                doubts = list(verification._under_way.get(segment, {}).values())
                if not doubts:
                    break
                count += len(doubts)
                wrong = Refusal("corrupt", "says the node")
                results: list[m.TaskDone] = []
                for doubt in doubts:
                    good = is_right(entry_of(doubt.stored, doubt.extent.offset), segment.name)
                    results.append(m.TaskDone(doubt.check_id, None if good else wrong))
                verification.answered(results, segment, self.now)
        self._take(self.handle(Wake()))
        self.master.check()
        return count

    @property
    def allocated_bytes(self) -> int:
        return self.master.allocated_bytes


SETTINGS = MasterSettings(
    lease_s=LEASE_S, put_s=PUT_S, grace_s=GRACE_S, heartbeat_s=1.0, segment_ttl_s=TTL_S, high_watermark=1.0
)


def follower(records: list[Record]) -> Master:
    """Apply one record after the other, with a check of the invariants after each."""
    master = Master(SETTINGS)
    for record in records:
        master.apply([record], 100.0)
        master.check()
    return master


def contents(master: Master) -> dict[str, tuple[int, list[tuple[str, int]]]]:
    """The acknowledged versions: while a durable object waits for its copy, the one that it replaces
    (``Catalog.show``)."""
    versions = {key: stored.before or stored for key, stored in master.objects.readable.items()}
    return {key: (stored.object_id, places_of(stored)) for key, stored in versions.items() if stored.extents}


def places_of(stored: StoredObject) -> list[tuple[str, int]]:
    return sorted((extent.segment.name, extent.offset) for extent in stored.complete())


@pytest.fixture
def voice() -> Iterator[Voice]:
    voice = Voice(SETTINGS)
    yield voice
    voice.master.check()
