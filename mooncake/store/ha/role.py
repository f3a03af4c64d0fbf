# SPDX-License-Identifier: Apache-2.0
"""A master's role among several: it leads and answers, or it follows and enters the leader's records.

Owns the order that makes an answer safe: records are written down, then sent to the standbys, and a reply
is sent when this master still leads and every standby that may lead next has the records the reply rests on.
It also owns which state becomes the master's: a leader's snapshot once it is complete, an empty one when this
master takes over without having everything. It knows no socket, no file and no clock: ``server.py`` runs it
on asyncio, the simulator on virtual time. A master without others is one that always leads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from mooncake.errors import Unavailable
from mooncake.rpc.wire import Failure
from mooncake.store.ha.election import Election
from mooncake.store.ha.standby_replication import Follow, Followed, StandbyReplicator
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import AppendRecords, Reply
from mooncake.store.master.log_records import Doubt, Record
from mooncake.store.master.master import Master
from mooncake.store.settings import MasterSettings

FIRST_ID_OF_TERMS = 1 << 62
"""Larger than ids that come from a wall clock (milliseconds, shifted by 20 bits) in this century."""
TERM_BITS = 36
"""Object ids per term, in bits. A wall clock may have been set back; a term is larger than all before."""


class RecordLog(Protocol):
    """Where records are written down. Raises Unavailable when the master must stop."""

    def keep(self, records: list[Record], catalog: Catalog) -> None:
        """Write down the records; ``catalog`` is the state they led to."""
        ...

    def begin_copy(self) -> None:
        """Begin a snapshot: what follows by ``copied`` replaces the whole log, once it is complete."""
        ...

    def copied(self, records: list[Record], is_complete: bool) -> None: ...


class MasterRole:
    """One master's state, and which replies it may send.

    Args:
        log: has been read already.
        first_id: returns larger object ids than earlier masters began with.
        secret: as in ``Master``.
    """

    def __init__(
        self, settings: MasterSettings, log: RecordLog, first_id: Callable[[], int], secret: bytes = b""
    ) -> None:
        self.settings = settings
        self._secret = secret
        self._log = log
        self._first_id = first_id
        self.master = self._new_master()
        self.election: Election | None = None
        """None: there is a single master, which always leads."""
        self.followers: StandbyReplicator | None = None
        """The standbys of the term in which this master leads, if masters are elected."""
        self.is_leading = False
        """This master answers. Its election decides whether it still leads."""
        self.has_failed = False
        """A record could not be written down: this master knows more than a successor would."""
        self._copied: Master | None = None
        """Becomes ``master`` once it knows all that the leader knows."""
        self._needs_settling = True
        """``master`` comes from a log or a leader: it does not know what was promised."""
        self._doubt = Doubt.NONE
        """What the log that ``master`` comes from may lack."""

    def begin(self, records: list[Record], now: float, doubt: Doubt = Doubt.NONE) -> None:
        """Take over an earlier master's records from the log, some of which may be missing."""
        self._doubt = doubt
        self.master.apply(records, now)
        if not records:
            self._kept(lambda: self._log.keep(self.master.snapshot(), self.master.catalog))

    # Leading

    def lead(self, is_complete: bool, election: Election | None, first_session: int, now: float) -> None:
        """Answer from now on, with this master's state or an empty one. The caller must deliver an event
        next.

        Args:
            first_session: different for each term of each master.
        """
        self._copied = None
        if not is_complete:
            self.master = self._new_master()
            self._kept(self._log.begin_copy)
            self._kept(lambda: self._log.copied(self.master.snapshot(), is_complete=True))
        elif self._needs_settling:
            self.master.settle(now, self._doubt)
        first_id = self._first_id()
        if election is not None:
            first_id = max(first_id, FIRST_ID_OF_TERMS + (election.term << TERM_BITS))
        self.master.objects.ids_from(first_id)
        self._needs_settling = False
        self.master.begin_term(now)
        self.election = election
        if election is not None:
            inherited = list(election.record.standbys) if election.record is not None else []
            self.followers = StandbyReplicator(
                self.master.catalog, inherited, election.eligible, self.settings.standby_ack_s, first_session
            )
        self.is_leading = True

    def step_down(self) -> list[Reply]:
        """Stop answering; returns the held replies, whose content is not certain."""
        self.is_leading = False
        followers, self.followers = self.followers, None
        return followers.withdraw() if followers is not None else []

    def carry_out(self, effect: Reply | AppendRecords, now: float) -> list[Reply]:
        """Carry out one of the master's effects, in their order; returns what may be sent now.

        Raises:
            Unavailable: the records could not be written down. No later effect may be sent.
        """
        followers = self.followers
        if isinstance(effect, AppendRecords):
            self._kept(lambda: self._log.keep(effect.records, self.master.catalog))
            return followers.keep(effect.records, now) if followers is not None else []
        if followers is None or self.election is None:
            return [effect]
        return followers.say(effect, now, may_go=self.election.leads(now))

    def follow(self, message: Follow, origin: Any, connection: Hashable, now: float) -> list[Reply] | None:
        """Handle a standby's request; None if this master does not lead, or not in that term."""
        if self.followers is None or self.election is None or message.term != self.election.term:
            return None
        return self.followers.follow(message, origin, connection, now)

    def let_go(self, now: float) -> list[Reply]:
        """Return held replies that may be sent; call after any event of standbys or of the election."""
        if self.followers is None or self.election is None or not self.election.leads(now):
            return []
        return self.followers.let_go()

    # Following

    def begin_to_follow(self) -> None:
        """Expect a complete copy of the leader's state next."""
        self._copied = self._new_master()
        self._kept(self._log.begin_copy)

    def take(self, answer: Followed, now: float) -> bool:
        """Enter the leader's records, and write them down here. True if a snapshot is complete with them."""
        master = self._copied or self.master
        master.apply(answer.records, now)
        master.catalog.end_rests(now)
        if self._copied is None:
            self._kept(lambda: self._log.keep(answer.records, master.catalog))
            return False
        self._kept(lambda: self._log.copied(answer.records, answer.is_complete))
        if not answer.is_complete:
            return False
        self.master, self._copied = master, None
        self._needs_settling, self._doubt = True, Doubt.NONE
        return True

    def _kept(self, write: Callable[[], None]) -> None:
        """Write records. After a failure no reply is sent: a repeated request would be answered from a state
        that no successor has, and a record behind a torn record would be lost."""
        if self.has_failed:
            raise Unavailable("an earlier record could not be written down; this master must not go on")
        try:
            write()
        except Unavailable:
            self.has_failed, self.is_leading = True, False
            raise

    def _new_master(self) -> Master:
        return Master(self.settings, self._first_id(), self._secret)

    def __repr__(self) -> str:
        state = "failed" if self.has_failed else "leads" if self.is_leading else "follows"
        return f"<MasterRole [{state}] {self.master!r}>"


def not_leader(reply: Reply) -> Reply:
    """The answer sent instead of ``reply`` by a master that has stepped down."""
    return Reply(reply.origin, Failure("not_leader", ""))
