# SPDX-License-Identifier: Apache-2.0
"""One incarnation of a master among several, and its log, on virtual time.

A ``MasterHost`` does what ``server.py`` and ``coordinator.py`` do: it queries the lease store, follows the
leader, keeps a log in a directory that outlives it, and sends what its role says. The deciding cores are
those that ship: ``Election``, ``MasterRole``, ``Followers``, ``Following``.

A ``SimOplog`` does what ``oplog.py`` and ``oplog_writer.py`` do with real files. Records are appended before
any answer is sent, copied into a new file piece by piece when a leader is followed or when the log has grown,
and read again by the next incarnation of the process. An older version writes records without the latest
optional fields, and reads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from mooncake.errors import Unavailable
from mooncake.machine import Wake
from mooncake.rpc.wire import Failure
from mooncake.sim.faults.disks import SimDirectory, SimFile
from mooncake.sim.faults.network import ConnectionEnd, over_the_wire, replies, requests
from mooncake.sim.kernel import PausableProcess, SimDriver, Timer
from mooncake.store.ha import election as el
from mooncake.store.ha.leader_search import Leads, WhoLeads
from mooncake.store.ha.role import MasterRole, not_leader
from mooncake.store.ha.standby_replication import ANSWER_S, RETRY_S, Follow, Followed, StandbyCursor
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.catalog_events import ReplicaCompleted, ReplicaRemoved
from mooncake.store.master.effects import AppendRecords, ConnectionLost, Effect, Event, Received, Reply
from mooncake.store.master.log_records import LineBegan, Record, SpaceHeld, decode, encode
from mooncake.store.master.master import Master
from mooncake.store.master.snapshot import Snapshot
from mooncake.store.settings import MasterSettings

if TYPE_CHECKING:
    from mooncake.sim.faults.masters_run import MastersCluster

LOG_NAME, NEXT_LOG_NAME = "oplog", "oplog.new"
HEADER_BYTES = 16
PIECE_OBJECTS = 5
"""Objects copied at a time: few, so that much happens in between."""
PIECE_PAUSE_S = 0.01
COMPACTION_BYTES = 8192
NEWEST: dict[type, dict[str, object]] = {
    LineBegan: {"lease_s": 0.0, "rest_s": 0.0},
    SpaceHeld: {"key": "", "object_id": 0},
}
"""The latest optional fields of each record, with the values that a reader without them assumes."""


def as_known_to_old(records: list[Record]) -> list[Record]:
    """Records as an older version writes them."""
    return [
        msgspec.structs.replace(record, **NEWEST[type(record)]) if type(record) in NEWEST else record
        for record in records
    ]


class SimOplog:
    """Implements ``role.Log`` for one incarnation of a process."""

    def __init__(self, process: PausableProcess, directory: SimDirectory, is_old: bool) -> None:
        self._process = process
        self._directory = directory
        self._is_old = is_old
        self._file = directory.open(LOG_NAME, is_locked=True)
        self._anew: SimFile | None = None
        self._copy: Snapshot | None = None
        """Snapshot of this master's own state, while its log is compacted."""
        self._compacted_bytes = 0
        self.num_compactions = 0
        self.possible: list[list[Record]] = []
        """What the next incarnation may read after records could not be written: some of them may have
        been."""
        self.id = ""

    def read(self) -> list[Record]:
        content = self._file.read()
        if len(content) < HEADER_BYTES:
            self._file.truncate(0)
            content = f"{self._directory.random.getrandbits(60):015x}\n".encode()
            self._file.append(content)
            self._file.sync()
        self.id = content[: HEADER_BYTES - 1].decode()
        records, size_bytes = decode(content[HEADER_BYTES:])
        self._file.truncate(HEADER_BYTES + size_bytes)
        self._compacted_bytes = self._file.size_bytes
        return self._known(records)

    def write_back(self) -> None:
        """Write back as the system does by itself after a while."""
        if not self._directory.sync_error:
            self._file.sync()
            self._directory.sync()
            self._directory.take_late_s()

    def keep(self, records: list[Record], catalog: Catalog) -> None:
        records = self._known(records)
        before = self._file.size_bytes
        try:
            self._file.append(encode(records))
        except OSError as error:
            written, _ = decode(self._file.read()[HEADER_BYTES:before])
            self.possible = [written + records[:count] for count in range(len(records) + 1)]
            raise Unavailable(f"the log can't be written: {error}") from error
        if self._anew is not None and self._copy is not None:
            self._append_anew(self._copy.between(records))
        elif self._anew is None and self._file.size_bytes > max(COMPACTION_BYTES, 2 * self._compacted_bytes):
            self._begin_anew()
            self._copy = Snapshot(catalog)
            self._compact(self._copy)
        self._suspend()

    def begin_copy(self) -> None:
        self._copy = None
        try:
            self._begin_anew()
        except OSError as error:
            raise Unavailable(f"the log can't be written: {error}") from error

    def copied(self, records: list[Record], is_complete: bool) -> None:
        if self._anew is None:
            return
        try:
            self._anew.append(encode(self._known(records)))
            if is_complete:
                self._take_place()
        except OSError as error:
            raise Unavailable(f"the log can't be written: {error}") from error
        self._suspend()

    def _compact(self, copy: Snapshot) -> None:
        if self._copy is not copy or self._anew is None:
            return
        if not self._append_anew(copy.piece(PIECE_OBJECTS)):
            return
        if copy.is_over:
            try:
                self._take_place()
                self.num_compactions += 1
            except OSError:
                self._give_up()
            self._copy = None
        else:
            self._process.after(PIECE_PAUSE_S, lambda: self._compact(copy))
        self._suspend()

    def stop_compacting(self) -> None:
        if self._copy is not None:
            self._give_up()

    def _append_anew(self, records: list[Record]) -> bool:
        """Returns False if the disk refuses it; the log then keeps growing."""
        assert self._anew is not None
        try:
            self._anew.append(encode(self._known(records)))
        except OSError:
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        self._anew = self._copy = None
        self._compacted_bytes = self._file.size_bytes

    def _begin_anew(self) -> None:
        if self._anew is not None:
            self._anew.close()
        self._anew = self._directory.open(NEXT_LOG_NAME)
        self._anew.truncate(0)
        self._anew.append(f"{self.id}\n".encode())

    def _take_place(self) -> None:
        assert self._anew is not None
        self._anew.sync()
        self._directory.rename(NEXT_LOG_NAME, LOG_NAME)
        self._directory.sync()
        self._file, self._anew = self._anew, None
        self._compacted_bytes = self._file.size_bytes

    def _known(self, records: list[Record]) -> list[Record]:
        return as_known_to_old(records) if self._is_old else records

    def _suspend(self) -> None:
        late_s = self._directory.take_late_s()
        if late_s:
            self._process.suspend(late_s)


class NoOplog:
    """The log of a master that keeps none."""

    id = ""
    possible: tuple[list[Record], ...] = ()

    def read(self) -> list[Record]:
        return []

    def write_back(self) -> None: ...

    def keep(self, records: list[Record], catalog: Catalog) -> None: ...

    def begin_copy(self) -> None: ...

    def copied(self, records: list[Record], is_complete: bool) -> None: ...

    def stop_compacting(self) -> None: ...


EXIT_S = 0.05
"""How long until a process that must not continue has ended."""


class MasterHost:
    """Args: directory: of its log; None: it keeps none. is_old: whether it runs an older version."""

    def __init__(
        self,
        world: MastersCluster,
        name: str,
        settings: MasterSettings,
        directory: SimDirectory | None,
        is_old: bool,
    ) -> None:
        self.world, self.name, self.settings, self.is_old = world, name, settings, is_old
        self.process = PausableProcess(world.kernel, name, world.new_clock())
        self.directory = directory
        self.log: SimOplog | NoOplog = NoOplog()
        if directory is not None:
            self.log = SimOplog(self.process, directory, is_old)
        self.role = MasterRole(settings, self.log, lambda: world.first_id(name))
        self._ends: dict[ConnectionEnd, None] = {}
        self._gone: list[ConnectionEnd] = []
        """Connections that were lost while it did not lead."""
        self._numbers: dict[tuple[ConnectionEnd, int], int] = {}
        """Request -> number of the records on which its answer depends."""
        self._driver: SimDriver[Event, Effect] | None = None
        self._driven: Master | None = None
        self._timer: Timer | None = None
        self._listed: tuple[el.Standby, ...] = ()
        self._follow_loop: _FollowLoop | None = None
        self._resigns = False
        records = self.log.read()
        me = el.Standby(self.log.id or f"{name}#{world.kernel.random.getrandbits(40):x}", name)
        self.election = el.Election(
            me,
            settings.election_lease_s,
            settings.orphan_s,
            has_log=directory is not None,
            has_state=bool(records),
            keeps_records=True,
            is_whole=name not in world.has_forgotten,
        )
        self._election_driver: SimDriver[el.Event, el.Effect] = SimDriver(
            self.process, self.election, self._perform_election
        )
        world.network.listen(name, self.process, self._accept)
        try:
            self.role.begin(records, self.process.now)
        except Unavailable:
            self._exit()
            return
        self.process.do(lambda: self._post_election(Wake()))

    @property
    def master(self) -> Master:
        return self.role.master

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    @property
    def acts(self) -> bool:
        """Whether it would answer at this instant."""
        is_there = self.process.is_alive and not self.process.is_suspended
        return is_there and self.role.is_leading and self.election.leads(self.process.now)

    @property
    def is_in_sync(self) -> bool:
        return self._follow_loop is not None and self._follow_loop.following.is_in_sync

    # The election

    def _post_election(self, event: el.Event | Wake) -> None:
        self._election_driver.post(event)
        self._look_around()

    def _perform_election(self, effect: el.Effect) -> None:
        self.process.then(lambda: self._perform_election_now(effect))

    def _perform_election_now(self, effect: el.Effect) -> None:
        if not self.process.is_alive:
            return
        if isinstance(effect, el.ReadLease | el.CompareAndSet):
            self.world.lease_store.ask(self, effect, self._post_election)
        elif isinstance(effect, el.Lead):
            self._stop_following()
            self._lead(effect)
        elif isinstance(effect, el.StepDown):
            self._step_down(effect.reason)
        elif isinstance(effect, el.LeaderChanged):
            self._stop_following()
            if effect.record.leader not in ("", self.election.me.id):
                self._follow_loop = _FollowLoop(self, effect.record)
        elif self.process.is_alive:
            self.world.trace_line(f"{self.name} resigned; next: {effect.successor}")
            self.process.crash()

    def _lead(self, effect: el.Lead) -> None:
        world = self.world
        record = self.election.record
        self._listed = tuple(record.standbys) if record is not None else ()
        self.log.stop_compacting()
        try:
            self.role.lead(
                effect.is_complete, self.election, world.kernel.random.getrandbits(40), self.process.now
            )
        except Unavailable:
            # No effect of a leader follows, not even a renewal that says that it has begun.
            world.trace_line(f"{self.name} can't write its log, and does not begin")
            world.counts["failed logs"] += 1
            self._end()
            return
        world.led(self, effect.is_complete)
        self._numbers = {}
        self._driver = SimDriver(self.process, self.master, self._perform)
        self._driven = self.master
        self.master.catalog.observe({ReplicaRemoved: self._removed, ReplicaCompleted: self._completed})
        self._driver.after_step = self._stepped
        gone, self._gone = self._gone, []
        self._post(Wake())
        for end in gone:
            self._post(ConnectionLost(end))

    def _removed(self, event: ReplicaRemoved) -> None:
        if self.role.is_leading:
            self.world.checkers.history.replica_removed(event)

    def _completed(self, event: ReplicaCompleted) -> None:
        if self.role.is_leading:
            self.world.checkers.history.replica_completed(event)

    def _stepped(self) -> None:
        if self.world.master is self:  # else another one leads, and this one has not noticed yet
            self.world.checkers.master_stepped(self.master)

    def _step_down(self, reason: str) -> None:
        self.world.trace_line(f"{self.name} steps down: {reason}")
        if self._driver is not None:
            self._driver.close()
            self._driver = None
        self.send([not_leader(held) for held in self.role.step_down()])
        self._arm()
        for end in list(self._ends):
            end.close()
            self._gone.append(end)
        self._ends = {}

    def resign(self) -> None:
        """As on SIGTERM."""
        if self._resigns or not self.process.is_alive:
            return
        self._resigns = True
        self._stop_following()
        was_leading = self.election.is_leading
        self.role.is_leading = False
        followers = self.role.followers
        # Messages already sent may still arrive.
        wait_s = self.settings.standby_ack_s if followers is not None and followers.num_held else 0.0

        def hand_over() -> None:
            if was_leading:
                self._post_election(el.Resign())
                self.process.after(self.settings.election_lease_s, self._end)
            else:
                self._end()

        self.process.after(wait_s, hand_over)

    def _end(self) -> None:
        if self.process.is_alive:
            self.process.crash()

    def _exit(self) -> None:
        """It must not continue: a record could not be logged."""
        self.world.trace_line(f"{self.name} can't write its log")
        self.world.counts["failed logs"] += 1
        for records in self.log.possible:
            successor = Master(self.settings)
            successor.restore(records, self.process.now)
            self.world.replication.may_begin_with(successor)
        self.send([not_leader(held) for held in self.role.step_down()])
        self._arm()
        self.process.after(EXIT_S, self.resign)

    # Clients and nodes

    def _accept(self, end: ConnectionEnd) -> None:
        self._ends[end] = None

        def received(frame: tuple[int, Any]) -> None:
            self.process.do(lambda: self._received(end, *frame))

        def closed(_: str) -> None:
            self.process.do(lambda: self._lost(end))

        end.on_message, end.on_closed = received, closed

    def _received(self, end: ConnectionEnd, request_id: int, message: msgspec.Struct) -> None:
        origin = (end, request_id)
        now = self.process.now
        if isinstance(message, WhoLeads):
            record = self.election.record
            leader, term = (record.address, record.term) if record is not None else ("", 0)
            is_here = self.election.leads(now) and self.role.is_leading
            self.send([Reply(origin, Leads(leader, term, is_here))])
        elif isinstance(message, Follow):
            answers = self.role.follow(message, origin, end, now)
            if answers is None:
                self.send([Reply(origin, Failure("not_leader", self._leader))])
                return
            self.send(answers)
            self._look_around()
        elif not self.role.is_leading or self._driver is None:
            leader = "" if self._leader == self.name else self._leader
            self.send([Reply(origin, Failure("not_leader", leader))])
        else:
            checker, master = self.world.checkers.answers, self.master
            checker.received(master, origin, message, now)
            self._post(Received(origin, end, message))
            checker.handled(master, message)

    @property
    def _leader(self) -> str:
        return self.election.record.address if self.election.record is not None else ""

    def _lost(self, end: ConnectionEnd) -> None:
        self._ends.pop(end, None)
        if self.role.followers is not None:
            self.role.followers.lost(end)
            self._look_around()
        if self.role.is_leading and self._driver is not None:
            self._post(ConnectionLost(end))
        else:
            self._gone.append(end)

    def _post(self, event: Event | Wake) -> None:
        if self._driver is not None and self.role.is_leading:
            self._driver.post(event)

    def _perform(self, effect: Effect) -> None:
        driver = self._driver
        if isinstance(effect, Reply):
            self.world.checkers.answers.replied(self.master, effect.origin, effect.message)
        self.process.then(lambda: self._perform_now(effect) if driver is self._driver else None)

    def _perform_now(self, effect: Effect) -> None:
        if not isinstance(effect, Reply | AppendRecords):
            return
        followers = self.role.followers
        if self.role.has_failed:
            return
        if isinstance(effect, Reply) and followers is not None:
            self._numbers[effect.origin] = followers.number
        try:
            answers = self.role.carry_out(effect, self.process.now)
        except Unavailable:
            self._exit()
            return
        if isinstance(effect, AppendRecords):
            self.world.replication.logged(self, effect.records)
        self.send(answers)
        if isinstance(effect, Reply) and followers is not None and followers.num_held and self._timer is None:
            self._arm()

    def send(self, answers: list[Reply]) -> None:
        for reply in answers:
            end, request_id = reply.origin
            message = reply.message
            number = self._numbers.pop(reply.origin, None)
            if number is not None and not isinstance(message, Failure):
                self.world.replication.acknowledged(self, number)
            if isinstance(message, Followed) and self.is_old:
                message = msgspec.structs.replace(message, records=as_known_to_old(message.records))
            end.send((request_id, over_the_wire(message, replies)))

    # Standbys

    def _look_around(self) -> None:
        followers = self.role.followers
        if followers is None:
            return
        listed = tuple(followers.listed.values())
        if listed != self._listed:
            self._listed = listed
            self._post_election(el.InSync(listed))
        if self.role.followers is followers:
            self.send(self.role.let_go(self.process.now))
            if self.election.leads(self.process.now):
                followers.check()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        followers = self.role.followers
        deadline = followers.deadline() if followers is not None else None
        if deadline is not None:
            self._timer = self.process.after(deadline - self.process.now, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self.role.followers is not None:
            self.send(self.role.followers.expire(self.process.now))
            self._look_around()

    def _stop_following(self) -> None:
        if self._follow_loop is not None:
            self._follow_loop.stop()
            self._follow_loop = None

    def leader_lost(self) -> None:
        self._post_election(el.LeaderLost())

    def take(self, following: StandbyCursor, answer: Followed) -> bool:
        """Returns False if it could not be logged."""
        now = self.process.now
        if self.is_old:
            answer = msgspec.structs.replace(answer, records=as_known_to_old(answer.records))
        try:
            if following.begins_anew(answer):
                self.log.stop_compacting()
                self.role.begin_to_follow()
            if self.role.take(answer, now):
                self._gone = []
        except Unavailable:
            self._exit()
            return False
        was_in_sync = following.is_in_sync
        following.entered(answer)
        if following.is_in_sync and not was_in_sync:
            self.world.has_forgotten.pop(self.name, None)
            self._post_election(el.CaughtUp())
        self.world.replication.applied(self, following, answer)
        return True

    def __repr__(self) -> str:
        return f"<MasterHost {self.name} {self.role!r}>"


class _FollowLoop:
    """Follows the leader of one record, until it is stopped."""

    def __init__(self, host: MasterHost, record: el.LeaderLease) -> None:
        self._host = host
        self._record = record
        self.following = StandbyCursor(host.election.me, record.term)
        self._end: ConnectionEnd | None = None
        self._number = 0
        self._is_stopped = False
        self._timer: Timer | None = None
        self._connect()

    def stop(self) -> None:
        self._is_stopped = True
        self._close()

    def _connect(self) -> None:
        if self._is_stopped:
            return
        self._number += 1
        attempt, process = self._number, self._host.process
        self.following = StandbyCursor(self._host.election.me, self._record.term)

        def is_current() -> bool:
            return not self._is_stopped and attempt == self._number

        def opened(end: ConnectionEnd) -> None:
            if not is_current():
                end.close()
                return
            self._end = end
            end.on_message = lambda frame: process.do(lambda: answered(frame[1]))
            end.on_closed = lambda reason: process.do(lambda: self._lost() if is_current() else None)
            self._ask()

        def answered(answer: Any) -> None:
            if not is_current():
                return
            if not isinstance(answer, Followed):
                self._lost()
            elif self._host.take(self.following, answer):
                process.do(lambda: self._ask() if is_current() else None)

        self._restart_timer()
        refused = lambda reason: self._lost() if is_current() else None  # noqa: E731
        self._host.world.network.connect(process, self._record.address, opened, refused)

    def _ask(self) -> None:
        if self._end is not None:
            self._restart_timer()
            self._end.send((0, over_the_wire(self.following.question(), requests)))

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._host.process.after(ANSWER_S, self._lost)

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        end, self._end = self._end, None
        if end is not None:
            end.on_message = end.on_closed = None
            end.close()

    def _lost(self) -> None:
        if self._is_stopped:
            return
        self._number += 1
        self._close()
        self.following = StandbyCursor(self._host.election.me, self._record.term)
        self._host.leader_lost()
        if not self._is_stopped:
            self._host.process.after(RETRY_S, self._connect)
