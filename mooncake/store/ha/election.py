# SPDX-License-Identifier: Apache-2.0
"""Leader election among several masters: one record that is only ever changed by compare-and-set.

The record names the leader, its term and the standbys that have everything it acknowledged. It counts its
renewals, and that is the whole lease: a master that sees the same record for ``lease_s`` by its own clock may
replace it, and the leader, which counts from *before* each renewal, has stopped acting by then. So no two
clocks are compared, only their speeds have to agree (within ``MARGIN``), and the service that stores the
record needs no notion of time::

    leader    renews──────renews──────renews ✝          |◀── lease_s·(1-MARGIN), then it stops acting
    standby        sees it      sees it      sees it────────── lease_s ──────────▶ replaces it, leads

The record may be replaced by its own leader, at once (a process with the same log is the same leader, unless
its machine went down and may have lost the log's end while a standby has it); by a listed standby, after
``lease_s``; by any master when there is no record; and, because a cache without a leader is useless, by any
master after a further ``orphan_s``, which then discards its own state and rebuilds it from the nodes'
reports.

A compare-and-set without an answer may still take effect later. It then applies to exactly the record it was
meant for, so it needs no special care, with one exception: a leader keeps count of the standbys it may name.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator

import msgspec

from mooncake.machine import Wake
from mooncake.state_table import Move, StateTable, move

MARGIN = 0.1
"""The largest relative difference in clock speed, and the delay in noticing, that a leader allows for."""
STORY_LINES = 100


class Standby(msgspec.Struct, frozen=True):
    """A master that has all that was acknowledged. ``id`` names its log, or its process if it has none."""

    id: str
    address: str


class LeaderLease(msgspec.Struct, frozen=True):
    """The record that names the leader."""

    leader: str
    """Id as in ``Standby``; "" after a resignation that left no copy of the leader's state."""
    address: str
    term: int
    beat: int
    """Counts renewals, so that no two records of a term are equal."""
    lease_s: float
    standbys: list[Standby] = []
    begins_empty: bool = False
    """The leader took over without its predecessor's state, and has not begun to answer yet."""

    def lists(self, who: str) -> bool:
        return any(standby.id == who for standby in self.standbys)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def decode_lease(content: bytes) -> LeaderLease:
    """Decode the record. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(content, type=LeaderLease)


# Events. Every ReadLease and CompareAndSet is followed by exactly one of the first three.


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseRead:
    """The record was read; ``content`` is None if there is none."""

    content: bytes | None


@dataclasses.dataclass(frozen=True, slots=True)
class CompareAndSetDone:
    """``is_done``: the record was the old one and is the new one now; otherwise nothing was changed."""

    is_done: bool


@dataclasses.dataclass(frozen=True, slots=True)
class NoAnswer:
    """The service did not answer; a CompareAndSet may have taken effect, or may do so later."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class LeaderLost:
    """The connection to the leader broke, or it answered that it does not lead: read the record at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class InSync:
    """These standbys should be listed, and no others. A new one has all that was acknowledged so far."""

    standbys: tuple[Standby, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CaughtUp:
    """This master has a complete copy of the leader's state, and has written it down."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resign:
    """Stop leading, and name a listed standby as the leader. Resigned follows, within a bounded time."""


# Effects


@dataclasses.dataclass(frozen=True, slots=True)
class ReadLease:
    """Read the record from the lease store."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Replace the record if it is ``old`` (None: if there is none)."""

    old: bytes | None
    new: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Lead:
    """Act as the leader from now on, as long as ``leads(now)``."""

    term: int
    is_complete: bool
    """This master's state is complete; otherwise it must begin with an empty one."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepDown:
    """Stop acting as the leader."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class LeaderChanged:
    """Another master leads (or led); follow it."""

    record: LeaderLease


@dataclasses.dataclass(frozen=True, slots=True)
class Resigned:
    """The resignation is over. ``successor`` is None when there was no standby, or none could be named."""

    successor: Standby | None


LEASE_ENDED, DUE = "lease ended", "due"
"""Events that follow from the time: the leader's lease was not renewed; the next request is due."""

Event = LeaseRead | CompareAndSetDone | NoAnswer | LeaderLost | InSync | CaughtUp | Resign
Effect = ReadLease | CompareAndSet | Lead | StepDown | LeaderChanged | Resigned


class ElectionPhase(enum.StrEnum):
    FOLLOWING = "following"
    """Another master leads, or none; this one reads the record, and replaces it when it may."""
    LEADING = "leading"
    RESIGNING = "resigning"
    """It no longer leads, and names its successor."""
    OVER = "over"


class Election:
    """One master's part in the election. A machine; deliver a first ``Wake()``, then the results of effects.

    Args:
        me: id and address of this master.
        has_log: it will be the same master when it comes back.
        has_state: it has read a log with content; where there is no record, such a master goes first.
        keeps_records: the service never loses data, so that no record means that there never was a leader.
        is_whole: the log that was read has all that was written to it. False after the machine went down:
            its end may be missing then, and a listed standby has what only this master had.
    """

    def __init__(
        self,
        me: Standby,
        lease_s: float,
        orphan_s: float,
        *,
        has_log: bool,
        has_state: bool,
        keeps_records: bool,
        is_whole: bool = True,
    ) -> None:
        self.me = me
        self.record: LeaderLease | None = None
        """The record as last seen."""
        self.term = 0
        """The last term in which this master led."""
        self._has_log = has_log
        self._has_state = has_state
        self._lease_s = lease_s
        self._orphan_s = orphan_s
        self._keeps_records = keeps_records
        self._is_whole = is_whole
        self._content: bytes | None = None
        """The bytes of ``record``; None also while the service has lost it."""
        self._seen_at = 0.0
        """When exactly these bytes were first seen."""
        self._has_looked = False
        self._must_read = True
        self._acts_until = -math.inf
        self._phase = ElectionPhase.FOLLOWING
        self._resigns_until = -math.inf
        self._wanted: list[Standby] = []
        self._pending: ReadLease | CompareAndSet | None = None
        self._requested_at = -math.inf
        self._open_lists: list[list[Standby]] = []
        """The standbys named by each CompareAndSet that may have taken effect, or may yet."""
        self._next_at = -math.inf
        self._lines: list[str] = []

    def leads(self, now: float) -> bool:
        """Whether this master may act at this instant; to be called before everything it sends."""
        return self.is_leading and now < self._acts_until

    @property
    def is_leading(self) -> bool:
        return self._phase is ElectionPhase.LEADING

    def eligible(self) -> dict[str, None]:
        """Ids of all masters that may lead next: nothing may be acknowledged before they have it."""
        lists = [*self._open_lists, self._wanted, self.record.standbys if self.record is not None else []]
        return {standby.id: None for standbys in lists for standby in standbys}

    # The contract of a machine

    def handle(self, event: Event | Wake, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.is_leading and now >= self._acts_until:
            effects += self._move(LEASE_ENDED, now)
        effects += self._move(event, now)
        if self._pending is None and now >= self._next_at and not self._is_over:
            effects += self._request(ReadLease(), now) if self._must_read else self._move(DUE, now)
        return effects

    def deadline(self) -> float | None:
        if self._is_over:
            return None
        wakes = [self._acts_until] if self.is_leading else []
        if self._pending is None:
            wakes.append(self._next_at)
        return min(wakes, default=None)

    def check(self) -> None:
        if self.is_leading:
            assert self.record is not None and self.record.leader == self.me.id, self.record
            assert self.record.term == self.term
        assert self._pending is not None or self._is_over or self._next_at < math.inf

    def story(self, key: str) -> list[str]:
        """The last events; ``key`` is this master's address."""
        return list(self._lines) if key == self.me.address else []

    @property
    def _is_over(self) -> bool:
        return self._phase is ElectionPhase.OVER

    def _move(self, event: Event | Wake | str, now: float) -> list[Effect]:
        return MOVES.handle(lambda: self._phase, event, self, event, now)

    # What to do while no request is pending

    def _renew(self, _: str, now: float) -> list[Effect]:
        assert self.record is not None
        record = LeaderLease(
            self.me.id,
            self.me.address,
            self.term,
            self.record.beat + 1,
            self._lease_s,
            list(self._wanted),
        )
        return self._replace_by(record, now)

    def _read_or_replace(self, _: str, now: float) -> list[Effect]:
        if now < self._may_lead_at():
            return self._request(ReadLease(), now)
        is_complete = self._is_complete
        inherited = self.record.standbys if self.record is not None and is_complete else []
        others = [standby for standby in inherited if standby.id != self.me.id]
        term = 1 + max(self.term, self.record.term if self.record is not None else 0)
        record = LeaderLease(
            self.me.id, self.me.address, term, 0, self._lease_s, others, begins_empty=not is_complete
        )
        return self._replace_by(record, now)

    @property
    def _is_complete(self) -> bool:
        """This master has everything that the last leader acknowledged."""
        record = self.record
        if record is None:
            return True
        if record.lists(self.me.id):
            return self._is_whole
        # Where no standby was listed, no master has more than this log.
        is_best = self._is_whole or not record.standbys
        return record.leader == self.me.id and not record.begins_empty and is_best

    def _may_lead_at(self) -> float:
        """When this master may replace the record, if it stays as it is."""
        record = self.record
        if self._content is None:
            # Either there never was one, or it was lost and its leader still acts by it.
            is_kept = record is None and self._keeps_records
            wait_s = 0.0 if is_kept else max(self._lease_s, record.lease_s if record else 0.0)
            is_first = self._has_state if record is None else self._is_complete
            return self._seen_at + wait_s + (0.0 if is_first else self._lease_s / 2)
        assert record is not None
        if record.leader == self.me.id and (self._is_complete or record.begins_empty):
            return self._seen_at
        if not record.leader:
            return self._seen_at + (0.0 if self._has_state else self._lease_s / 2)
        ends_at = self._seen_at + max(record.lease_s, self._lease_s)
        if self._is_complete:
            return ends_at
        return ends_at + self._orphan_s if self._orphan_s else math.inf

    def _wait(self, now: float) -> None:
        """Wait until the next renewal, or the next reading of the record."""
        if self.is_leading:
            record = self.record
            is_right = record is not None and record.standbys == self._wanted and not record.begins_empty
            is_due = not is_right or self._content is None
            self._next_at = now if is_due else self._requested_at + self._lease_s / 4
        else:
            self._next_at = min(now + self._lease_s / 8, max(now, self._may_lead_at()))

    def _replace_by(self, record: LeaderLease, now: float) -> list[Effect]:
        self._open_lists.append(record.standbys)
        return self._request(CompareAndSet(self._content, record.encode()), now)

    def _request(self, what: ReadLease | CompareAndSet, now: float) -> list[Effect]:
        self._pending, self._requested_at = what, now
        return [what]

    # Answers of the lease store

    def _lease_read(self, event: LeaseRead, now: float) -> list[Effect]:
        self._pending, self._must_read = None, False
        content = event.content
        effects: list[Effect] = []
        try:
            record = None if content is None else decode_lease(content)
        except msgspec.MsgspecError as error:
            self._log(now, f"a record that can't be read: {error}")
            self._must_read, self._next_at = True, now + self._lease_s
            return effects
        was, known_before = self.record, self._content
        if content != known_before or not self._has_looked:
            self._has_looked, self._seen_at = True, now
        self._content = content
        if record is not None:
            self.record = record
            if self.is_leading and (record.leader, record.term) != (self.me.id, self.term):
                effects += self._step_down(f"{record.address} leads in term {record.term}", now)
            if was is None or (was.leader, was.term) != (record.leader, record.term):
                self._log(now, f"sees {record.address} lead in term {record.term}")
                effects.append(LeaderChanged(record))
        # A leader whose record was lost writes it again; no other master does before its lease is over.
        self._wait(now)
        if self.is_leading:
            self._next_at = now
        return effects

    def _compare_and_set_done(self, event: CompareAndSetDone, now: float) -> list[Effect]:
        swap, self._pending = self._pending, None
        assert isinstance(swap, CompareAndSet)
        if not event.is_done:
            # Another master was quicker; or the service applied the first of two tries, and this is the
            # second.
            self._must_read, self._next_at = True, now
            return []
        self._content, self.record, self._seen_at = swap.new, decode_lease(swap.new), now
        self._must_read = False
        self._open_lists = []  # the others were about a record that no longer exists
        if self.record.leader != self.me.id:
            named = Standby(self.record.leader, self.record.address) if self.record.leader else None
            return self._resigned(named, now)
        if self._phase is ElectionPhase.RESIGNING:
            self._next_at = now
            return []
        self._acts_until = self._requested_at + self._lease_s * (1 - MARGIN)
        if now >= self._acts_until:
            self._next_at = now
            return []
        effects: list[Effect] = []
        if not self.is_leading:
            self._phase, self._is_whole = ElectionPhase.LEADING, True
            self.term, self._wanted = self.record.term, self.record.standbys
            is_complete = not self.record.begins_empty
            self._log(now, f"leads in term {self.term}{'' if is_complete else ', with nothing'}")
            effects.append(Lead(self.term, is_complete))
        self._wait(now)
        return effects

    def _no_answer(self, event: NoAnswer, now: float) -> list[Effect]:
        self._pending, self._must_read = None, True
        self._next_at = now + self._lease_s / 20
        self._log(now, f"no answer: {event.reason}")
        return []

    # Reports of this master's other parts

    def _leader_lost(self, _: LeaderLost, now: float) -> list[Effect]:
        self._must_read, self._next_at = not self.is_leading, now
        return []

    def _in_sync(self, event: InSync, now: float) -> list[Effect]:
        self._wanted = list(event.standbys)
        self._wait(now)
        return []

    def _caught_up(self, _: CaughtUp, now: float) -> list[Effect]:
        self._is_whole = True
        self._wait(now)
        return []

    # The end of leading

    def _lease_ended(self, _: str, now: float) -> list[Effect]:
        return self._step_down("the lease could not be renewed in time", now)

    def _step_down(self, reason: str, now: float) -> list[Effect]:
        self._phase = ElectionPhase.FOLLOWING
        self._acts_until = -math.inf
        self._must_read, self._next_at = True, now
        self._log(now, f"steps down: {reason}")
        return [StepDown(reason)]

    def _resign(self, _: Resign, now: float) -> list[Effect]:
        self._resigns_until = now + self._lease_s
        self._phase = ElectionPhase.RESIGNING
        self._acts_until = -math.inf
        self._next_at = now
        self._log(now, "resigns")
        return []

    def _hand_over(self, _: str, now: float) -> list[Effect]:
        record = self.record
        is_mine = record is not None and (record.leader, record.term) == (self.me.id, self.term)
        if record is None or not is_mine or now >= self._resigns_until:
            return self._resigned(None, now)
        if not record.standbys:
            if self._has_log:
                return self._resigned(None, now)
            return self._replace_by(LeaderLease("", "", record.term, record.beat + 1, record.lease_s), now)
        first, *others = record.standbys
        return self._replace_by(
            LeaderLease(first.id, first.address, record.term + 1, 0, record.lease_s, others), now
        )

    def _resigned(self, successor: Standby | None, now: float) -> list[Effect]:
        self._phase = ElectionPhase.OVER
        self._log(now, f"resigned; successor: {successor.address if successor else 'none'}")
        return [Resigned(successor)]

    def _log(self, now: float, what: str) -> None:
        self._lines.append(f"{now:.6f} {what}")
        del self._lines[:-STORY_LINES]

    def __repr__(self) -> str:
        return f"<Election of {self.me.address} [{self._phase}, last seen {self.record}]>"


def _moves() -> Iterator[tuple[tuple[ElectionPhase, type | str], Move[ElectionPhase]]]:
    following, leading = ElectionPhase.FOLLOWING, ElectionPhase.LEADING
    resigning, over = ElectionPhase.RESIGNING, ElectionPhase.OVER
    yield (following, DUE), move(following, by=Election._read_or_replace)
    yield (leading, DUE), move(leading, by=Election._renew)
    yield (leading, LEASE_ENDED), move(following, by=Election._lease_ended)
    yield (resigning, DUE), move(resigning, over, by=Election._hand_over)
    yield (following, CompareAndSetDone), move(following, leading, by=Election._compare_and_set_done)
    yield (leading, CompareAndSetDone), move(leading, by=Election._compare_and_set_done)
    yield (resigning, CompareAndSetDone), move(resigning, over, by=Election._compare_and_set_done)
    yield (leading, LeaseRead), move(leading, following, by=Election._lease_read)
    for phase in (following, resigning):
        yield (phase, LeaseRead), move(phase, by=Election._lease_read)
    for phase in (following, leading, resigning):
        yield (phase, NoAnswer), move(phase, by=Election._no_answer)
        yield (phase, LeaderLost), move(phase, by=Election._leader_lost)
        yield (phase, InSync), move(phase, by=Election._in_sync)
        yield (phase, CaughtUp), move(phase, by=Election._caught_up)
        yield (phase, Resign), move(resigning, by=Election._resign)
        yield (phase, Wake), move(phase)
    late = (LeaseRead, CompareAndSetDone, NoAnswer, LeaderLost, InSync, CaughtUp, Resign, Wake)
    for event in late:
        yield (over, event), move(over, meaning="too late")


MOVES: StateTable[ElectionPhase] = StateTable("election", ElectionPhase, dict(_moves()))
