# SPDX-License-Identifier: Apache-2.0
"""The master: which objects exist, where their bytes are, and when space may be used again.

It composes the other cores of this room behind ``handle``: a client's or node's message and the
present instant go in, replies come out. It never touches a byte of an object and never calls another
process; nodes and clients connect to it. Its invariants, whatever is lost or late:

* A key is readable whole or not at all, and never has another content than the one put-end announced.
* Space is allocated again only when no old promise about it is left: not before a reader's lease ends,
  not before a writer's deadline plus ``grace_s`` (a write posted in time may land late). So an object
  that is removed while promised is *unlinked* at once and its space *released* later.
* What it acknowledged can be written down first (``AppendRecords``), and a successor that reads it
  (``restore``) has every object again, and knows which space was promised. Leases are not written down:
  the successor assumes that every object is leased (``master/snapshot.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mooncake.machine import Wake
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog, MasterCounts
from mooncake.store.master.effects import (
    AppendRecords,
    ConnectionLost,
    Effect,
    Event,
    Received,
    RecoveryComplete,
    Reply,
)
from mooncake.store.master.eviction import Eviction
from mooncake.store.master.hot_replicas import HotReplicas
from mooncake.store.master.introspection import Introspection, QuotaRequests
from mooncake.store.master.jobs import Jobs
from mooncake.store.master.key_scans import KeyScans
from mooncake.store.master.log_records import Doubt, Record
from mooncake.store.master.nodes import NodeRequests
from mooncake.store.master.object_requests import LookupRequests, RemoveRequests
from mooncake.store.master.objects import Extent, Objects
from mooncake.store.master.placement import FreeSpace
from mooncake.store.master.put import PreallocatedPuts, Preallocations, PutRequests
from mooncake.store.master.put_queue import NodeReturns, PutQueue
from mooncake.store.master.request_counters import RequestCounters
from mooncake.store.master.segments import Segments
from mooncake.store.master.snapshot import LogReplay, Snapshot
from mooncake.store.master.tasks import Tasks
from mooncake.store.master.tiering import Tiering
from mooncake.store.master.verification import Verification
from mooncake.store.settings import MasterSettings

DEFAULTS = MasterSettings()


class Master:
    """A machine (see ``machine.py``) over ``Received`` and ``ConnectionLost``.

    ``first_object_id`` should be random: then no request about an object of an earlier master can
    mean one of this master's. ``secret`` should be random, too: then no client can guess the name of space
    that was preallocated for another.
    """

    def __init__(
        self, settings: MasterSettings = DEFAULTS, first_object_id: int = 1, secret: bytes = b""
    ) -> None:
        self.settings = settings
        self.catalog = Catalog(settings, first_object_id)
        self.request_counters = RequestCounters(self.catalog)
        space = FreeSpace(self.catalog)
        self._preallocations = Preallocations(self.catalog, space, secret)
        self.put_queue = PutQueue(self.catalog, lambda: self.tiers.is_freeing)
        lookup = LookupRequests(self.catalog)
        put = PutRequests(self.catalog, space, self._preallocations, self.put_queue)
        preallocated_put = PreallocatedPuts(self.catalog, space, self._preallocations, put)
        self.tasks = Tasks(self.catalog)
        self.tiers = Tiering(self.catalog, self.tasks)
        self.replication = Jobs(self.catalog, self.tasks)
        self.hot = HotReplicas(self.catalog, self.tasks)
        self._key_scans = KeyScans(self.catalog)
        self.verification = Verification(self.catalog, self.tasks)
        self.node_returns = NodeReturns(self.catalog, self._answer)
        # Tasks last: tasks that the others plan in a step are sent in the same one. Held requests first: what
        # follows from their answers is planned in the same step, too.
        self.catalog.clocks += [
            self.node_returns,
            self._preallocations,
            self.tiers,
            self.replication,
            self.hot,
            self.verification,
        ]
        self.catalog.clocks += [self._key_scans, self.tasks, self.put_queue]
        self.tiers.on_demoted = self.put_queue.demoted
        self._durable = put.durable
        self.tiers.on_failed = self._durable.copy_failed
        self.put_queue.on_end = self._durable.on_end = self.request_counters.add
        self._key_scans.on_end = self.request_counters.add
        remove, nodes = RemoveRequests(self.catalog, self._key_scans), NodeRequests(self.catalog, self.tasks)
        self.introspection = introspection = Introspection(
            self.catalog, self._key_scans, self.verification.reporters
        )
        quotas = QuotaRequests(self.catalog)
        self._replay = LogReplay(self.catalog)
        self._soonest = -math.inf
        """The deadline after the last event; -inf before the first one and after records were replayed."""
        self._answers: dict[type, Callable[[Any, Received, float], msgspec.Struct | None]] = {
            m.LookupObjects: lookup.lookup,
            m.Exists: lookup.exists,
            m.Renew: lookup.renew,
            m.Pin: lookup.pin,
            m.PutStart: put.put_start,
            m.PutWritten: preallocated_put.put_written,
            m.PutEnd: put.put_end,
            m.PutAbort: put.put_abort,
            m.Remove: remove.remove,
            m.RemoveMatching: remove.remove_matching,
            m.DropReplicas: remove.drop_replicas,
            m.Corrupt: self.verification.corrupt,
            m.DescribeSegments: nodes.describe,
            m.Mount: nodes.mount,
            m.ReportContents: nodes.report,
            m.Poll: self.tasks.poll,
            m.Heartbeat: nodes.heartbeat,
            m.Unmount: nodes.unmount,
            m.GetMasterStatus: introspection.status,
            m.ListKeys: introspection.list_keys,
            m.ListPrefixes: introspection.list_prefixes,
            m.ObjectStory: introspection.story,
            m.CopyObject: self.replication.copy,
            m.DrainSegments: self.replication.drain,
            m.AskJob: self.replication.ask,
            m.Inspect: introspection.inspect,
            m.SetQuota: quotas.set_quota,
            m.AskQuotas: quotas.ask,
        }

    # The contract of a machine

    def handle(self, event: Event | Wake, now: float) -> list[Effect]:
        catalog = self.catalog
        was_doubted = catalog.is_doubted
        catalog.keeps_deadline = False
        is_due = now >= self._soonest
        if is_due:
            catalog.expire(now)
        effects: list[Effect] = []
        if isinstance(event, Received):
            catalog.must_last = False
            answer = self._answer(event, now)
            if answer is not None:
                effects.append(Reply(event.origin, answer, catalog.must_last))
        elif isinstance(event, ConnectionLost):
            for segment in catalog.segments.connection_lost(event.connection, now):
                catalog.note("segment_suspected", segment, reason="connection lost")
        if catalog.replies:
            effects += catalog.replies
            catalog.replies = []
        if catalog.notes:
            effects += catalog.notes
            catalog.notes = []
        if catalog.records:
            if catalog.keeps_records:
                effects.insert(0, AppendRecords(catalog.records))
            catalog.records = []
        if was_doubted and not catalog.is_doubted:
            effects.append(RecoveryComplete())
        if is_due or not catalog.keeps_deadline:
            deadline = catalog.deadline()
            self._soonest = math.inf if deadline is None else deadline
        return effects

    def deadline(self) -> float | None:
        if self._soonest == -math.inf:
            return self.catalog.deadline()
        return None if self._soonest == math.inf else self._soonest

    def check(self) -> None:
        self.catalog.check()
        for part in (
            self.tasks,
            self.tiers,
            self.replication,
            self.hot,
            self.verification,
            self._key_scans,
            self._preallocations,
        ):
            part.check()
        self.put_queue.check()
        self.node_returns.check()
        self._durable.check()

    def story(self, key: str) -> list[str]:
        return self.catalog.story(key)

    # Queries of shells and tests

    @property
    def objects(self) -> Objects:
        return self.catalog.objects

    @property
    def segments(self) -> Segments:
        return self.catalog.segments

    @property
    def eviction(self) -> Eviction:
        return self.catalog.eviction

    @property
    def counts(self) -> MasterCounts:
        return self.catalog.counts

    @property
    def capacity_bytes(self) -> int:
        return self.catalog.capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        return self.catalog.allocated_bytes

    def preallocated(
        self, piece: tuple[int, int], tenant: str, put_id: int, size_bytes: int, now: float
    ) -> Extent | None:
        """The space of a preallocated piece, if its put may write so many bytes to it now."""
        found = self._preallocations.find(piece, tenant, put_id, size_bytes, now)
        return found if isinstance(found, Extent) else None

    def _answer(self, event: Received, now: float) -> msgspec.Struct | None:
        message = event.message
        keys = getattr(message, "keys", ())
        if len(keys) > m.MAX_KEYS:
            return Failure("invalid_argument", f"{len(keys)} keys in one message; at most {m.MAX_KEYS}")
        answer = self._answers.get(type(message))
        if answer is None:
            return Failure("unsupported", f"this master does not answer {type(message).__name__}")
        if self.catalog.segments.awaited and self.node_returns.holds(event, now):
            return None
        reply = answer(message, event, now)
        if reply is not None:
            self.request_counters.add(message, reply)
        return reply

    # State of an earlier master

    def apply(self, records: Sequence[Record], now: float) -> None:
        """Enter another master's records. Only before this one answers any request."""
        self._soonest = -math.inf
        self._replay.apply(records, now)

    def settle(self, now: float, doubt: Doubt = Doubt.NONE) -> None:
        """This master answers from now on: its state from ``apply`` is under promises it does not know.

        Objects are hidden until their nodes mount here, then complete; requests for them wait for a while
        (``put_queue.py``). Every object counts as leased; promised space rests. ``doubt``: what may be
        missing, so that nodes are asked to report and their reports are entered (``master/nodes.py``);
        RecoveryComplete follows when all have reported, unless nothing is missing.
        """
        self._soonest = -math.inf
        self._replay.settle(now, doubt)

    def begin_term(self, now: float) -> None:
        """From now on this master makes promises. The caller must deliver an event next."""
        self._soonest = -math.inf
        self.catalog.lease_bounds.begin(self.catalog.segments.line, now)

    def restore(self, records: Sequence[Record], now: float, doubt: Doubt = Doubt.NONE) -> None:
        """Begin with ``records`` as the state; call before anything else."""
        self.apply(records, now)
        self.settle(now, doubt)

    def snapshot(self) -> list[Record]:
        """The shortest records from which ``restore`` makes this state: a complete ``Snapshot`` at once."""
        copy, records = Snapshot(self.catalog), list[Record]()
        while not copy.is_over:
            records += copy.piece()
        return records

    def __repr__(self) -> str:
        return f"<Master {self.objects!r} {self.segments!r}>"
