# SPDX-License-Identifier: Apache-2.0
"""A master's log that is damaged or truncated, and lost power: objects acknowledged as durable survive.

In one process and on virtual time, so that thousands of restarts take minutes: the real master, membership,
task agent, index and log, on simulated files that lose unsynced data. The bytes of an object are one number.
A client puts durable objects, replaces and removes some, and records the replies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from mooncake.errors import InvalidArgument
from mooncake.files import LockedDirectory
from mooncake.machine import Wake
from mooncake.sim.faults.disks import SimDirectory
from mooncake.store import messages as m
from mooncake.store.master.effects import AppendRecords, Effect, Received, RecoveryComplete, Reply
from mooncake.store.master.master import Master
from mooncake.store.master.oplog import Oplog
from mooncake.store.master.snapshot import Snapshot
from mooncake.store.node import membership as ms
from mooncake.store.node import task_agent as e
from mooncake.store.node.ssd_index_log import SsdIndexLog
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier
from tests.integrity.outcome import Outcome

SETTINGS = MasterSettings(
    lease_s=0.5, put_s=2.0, grace_s=0.2, heartbeat_s=0.5, segment_ttl_s=3.0, demote_watermark=1.0
)
MEMORY_BYTES, SSD_BYTES = 1 << 16, 1 << 19
LOG = "oplog"


class PowerLost(Exception):
    """Loss of power of the whole machine, in the middle of a call to a disk."""


class Disk:
    """A node's SSD: the file of its index, and the number stored at each offset."""

    def __init__(self, world: World, files: SimDirectory, numbers: dict[int, bytes], content_id: int) -> None:
        self.world, self.files, self.content_id = world, files, content_id
        self.numbers = dict(numbers)
        self._before: list[tuple[int, bytes | None]] = []

    def write(self, offset: int, number: bytes) -> None:
        self._before.append((offset, self.numbers.get(offset)))
        self.numbers[offset] = number

    def flush(self) -> None:
        self.world.disk_works()
        self._before.clear()

    def lose_power(self) -> None:
        for offset, before in reversed(self._before):
            if self.world.random.random() < 0.5:
                if before is None:
                    self.numbers.pop(offset, None)
                else:
                    self.numbers[offset] = before
        self._before.clear()
        self.files.lose_power()


class Segment:
    """One segment of a node, with its real cores."""

    def __init__(self, world: World, name: str, tier: Tier, epoch: int, disk: Disk | None) -> None:
        self.world, self.name, self.tier, self.epoch, self.disk = world, name, tier, epoch, disk
        self.numbers: dict[int, bytes] = {} if disk is None else disk.numbers
        self.held: dict[int, m.SegmentEntry] = {}
        self.index: SsdIndexLog | None = None
        if disk is not None:
            folder = LockedDirectory(Path(f"/{name}"), "ssd_path", disk.files)
            folder.take()
            self.index = SsdIndexLog(folder)
        self.membership = ms.Membership(
            name,
            epoch,
            name.split("/")[0],
            1 << 30,
            MEMORY_BYTES if disk is None else SSD_BYTES,
            b"",
            Random(1),
            tier=tier,
            content_id=epoch if disk is None else disk.content_id,
            node=name.split("/")[0],
            held=self.entries,
        )
        self.agent = e.TaskAgent(name, epoch)
        self.post(Wake())

    def entries(self) -> list[m.SegmentEntry]:
        return list((self.held if self.index is None else self.index.index.entries).values())

    def post(self, event: ms.Event | Wake) -> None:
        for effect in self.membership.handle(event, self.world.now):
            if isinstance(effect, ms.Connect):
                self.post(ms.ConnectionOpened())
            elif isinstance(effect, ms.Send):
                self.world.say(self, effect.message, lambda reply: self.post(ms.ReplyReceived(reply)))
            elif isinstance(effect, ms.DropObjects):
                self._drop(effect.object_ids)
        if self.membership.phase is ms.MembershipPhase.MOUNTED and not self.agent.is_mounted:
            self.work(e.SegmentRegistered())

    def work(self, event: e.Event | Wake) -> None:
        for effect in self.agent.handle(event, self.world.now):
            if isinstance(effect, e.SendPoll):
                number = effect.number
                self.world.say(
                    self,
                    effect.message,
                    lambda reply, n=number: self.work(e.PollAnswered(n, reply)),  # type: ignore[misc]
                )
            elif isinstance(effect, e.UpdateJournal):
                self._change(effect.changes)
            elif isinstance(effect, e.RunTask):
                self.world.later.append(lambda run=effect: self._run(run))  # type: ignore[misc]
            elif isinstance(effect, e.SendReport):
                for part in e.reports(self.name, self.epoch, self.entries()):
                    self.world.say(self, part, lambda reply: self._drop(reply.unwanted))
                self.world.later.append(lambda: self.work(e.ReportEnded(is_complete=True)))

    def wake(self) -> None:
        for core, post in ((self.membership, self.post), (self.agent, self.work)):
            deadline = core.deadline()
            if deadline is not None and deadline <= self.world.now:
                post(Wake())

    def _run(self, run: e.RunTask) -> None:
        """Run a task as the replica copier does: durable bytes first, then the index entry, durably."""
        source, entry = run.task.source, run.task.entry
        number = self.world.number_at(source.segment, source.address - (1 << 30))
        if self.index is not None and self.disk is not None:
            self.index.drop(self.index.index.overlapping(entry.offset, entry.size_bytes))
            self.disk.write(entry.offset, number)
            self.disk.flush()
            self.index.hold(entry)
            self.index.flush()
        else:
            self.numbers[entry.offset] = number
        self.work(e.TaskEnded(run.task.task_id, run.life, None))

    def _change(self, changes: list[m.SegmentEntry | int]) -> None:
        if self.index is None:
            e.changed(self.held, changes)
            return
        for change in changes:
            self._drop([change]) if isinstance(change, int) else self.index.hold(change)

    def _drop(self, object_ids: list[int]) -> None:
        if self.index is None:
            e.changed(self.held, object_ids)
        else:
            self.index.drop(object_ids)


class World:
    """A master and two nodes through several restarts."""

    def __init__(self, seed: int, log: bytes | None = None, disks: list[Disk] | None = None) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.boot = 0
        self.epoch = 100
        self.log_files = SimDirectory(self.random)
        if log is not None:
            self.log_files.open(LOG)
            self.log_files.damage(LOG, log)
        self.disks = [Disk(self, SimDirectory(self.random), {}, 1000 + number) for number in range(2)]
        for here, there in zip(self.disks, disks or [], strict=False):
            here.numbers.update(there.numbers)
            for name in there.files.names():
                here.files.open(name)
                here.files.damage(name, there.files.content(name))
        self.later: list[Callable[[], None]] = []
        self.segments: list[Segment] = []
        self.acknowledged: dict[str, bytes | None] = {}
        """Last acknowledged state of each key: its number, or None for removed."""
        self.possible: dict[str, list[bytes | None]] = {}
        """Other states that are allowed because a reply is missing."""
        self.power_left: int | None = None
        """Number of disk calls until power is lost."""
        self._numbers = 0
        for files in (self.log_files, *(disk.files for disk in self.disks)):
            files.delay_s = lambda what, num_bytes: self.disk_works()

    def disk_works(self) -> float:
        if self.power_left is not None:
            self.power_left -= 1
            if self.power_left < 0:
                self.power_left = None
                raise PowerLost
        return 0.0

    # Processes

    def start(self, repairs: bool = False) -> None:
        """Start all processes. Raises InvalidArgument if the log is refused."""
        log = Oplog(Path(f"/simulated/{LOG}"), repairs, self.log_files, f"boot {self.boot}")
        records = log.read()
        self.log = log
        self.master = Master(SETTINGS, 1)
        self.master.restore(records, self.now, log.doubt)
        self.master.objects.ids_from(int(self.now * 1000) << 20)
        if not records:
            log.append(self.master.snapshot())
        if not self.master.catalog.is_doubted:
            log.is_whole(self.master.objects.last_id)
        self.master.check()
        self.replies: dict[int, Callable[[Any], None]] = {}
        self.origin = 0
        self.later.clear()
        self.epoch += 1
        self.segments = []
        for number, disk in enumerate(self.disks):
            self.segments.append(Segment(self, f"n{number}", Tier.MEMORY, self.epoch, None))
            self.segments.append(Segment(self, f"n{number}/ssd", Tier.SSD, self.epoch, disk))
        self.run(SETTINGS.rest_s + 1.0)

    def stop(self) -> None:
        """Stop all processes in order."""
        self.log.close()
        for segment in self.segments:
            if segment.index is not None:
                segment.index.close()
        for files in (self.log_files, *(disk.files for disk in self.disks)):
            files.crash()
        self.now += 10.0

    def lose_power(self) -> None:
        self.power_left = None
        for disk in self.disks:
            disk.lose_power()
        self.log_files.lose_power()
        self.boot += 1
        self.now += 10.0

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            while self.later:
                self.later.pop(0)()
            self._perform(self.master.handle(Wake(), self.now))
            for segment in self.segments:
                segment.wake()
            self.now += 0.05

    # Messages

    def say(self, connection: object, message: msgspec.Struct, then: Callable[[Any], None]) -> None:
        """Send a message to the master; ``then`` is called with the reply."""
        self.origin += 1
        self.replies[self.origin] = then
        self._perform(self.master.handle(Received(self.origin, connection, message), self.now))

    def _perform(self, effects: list[Effect]) -> None:
        """Perform the master's effects as the server does."""
        for effect in effects:
            if isinstance(effect, AppendRecords):
                self.log.append(effect.records)
            elif isinstance(effect, RecoveryComplete):
                self.log.is_whole(self.master.objects.last_id)
            elif isinstance(effect, Reply):
                if effect.must_last:
                    self.log.flush()
                then = self.replies.pop(effect.origin)
                self.later.append(lambda then=then, message=effect.message: then(message))  # type: ignore[misc]

    def number_at(self, segment: str, offset: int) -> bytes:
        return next(one for one in self.segments if one.name == segment).numbers.get(offset, b"none")

    # The client

    def ask(self, message: msgspec.Struct, seconds: float = 3.0) -> Any:
        """The reply, or None if there is none."""
        found: list[Any] = []
        self.say("client", message, found.append)
        until = self.now + seconds
        while not found and self.now < until:
            self.run(0.05)
        return found[0] if found else None

    def put(self, key: str, replace: bool = False) -> None:
        """Put a durable object and record its allowed states."""
        self._numbers += 1
        number = self._numbers.to_bytes(4, "little")
        self.possible.setdefault(key, []).append(number)
        policy = m.PutPolicy(is_durable=True)
        size = self.random.choice((100, 3000, 9000))
        started = self.ask(
            m.PutStart(1000 * self._numbers, "n0", [key], [size], [size], policy=policy, replace=replace)
        )
        if not isinstance(started, m.PutStarted) or started.reserved[0] is None:
            return
        reserved = started.reserved[0]
        for replica in reserved.replicas:
            place = next(one for one in self.segments if one.name == replica.segment)
            place.numbers[replica.address - (1 << 30)] = number
        ended = self.ask(m.PutEnd([key], [reserved.object_id], [number]))
        if isinstance(ended, m.Outcomes) and ended.outcomes == [True]:
            self.acknowledged[key], self.possible[key] = number, []

    def remove(self, key: str) -> None:
        self.possible.setdefault(key, []).append(None)
        answer = self.ask(m.Remove([key], force=True))
        if isinstance(answer, m.Outcomes) and answer.outcomes == [True]:
            self.acknowledged[key], self.possible[key] = None, []

    def compact(self) -> None:
        anew, copy = self.log.begin_anew(), Snapshot(self.master.catalog)
        while not copy.is_over:
            anew.append(copy.piece())
        anew.commit()

    def live(self, num_steps: int) -> None:
        """Put, replace and remove objects, and compact the log now and then."""
        for _ in range(num_steps):
            keys = [key for key, number in self.acknowledged.items() if number is not None]
            what = self.random.random()
            if what < 0.15 and keys:
                self.remove(self.random.choice(keys))
            elif what < 0.35 and keys:
                self.put(self.random.choice(keys), replace=True)
            elif what < 0.4:
                self.compact()
            else:
                self.put(f"k{self._numbers}")

    def look(self, may_return: bool) -> list[str]:
        """Keys whose state is not the acknowledged one. ``may_return``: removed objects may reappear."""
        wrong: list[str] = []
        for key, number in self.acknowledged.items():
            found = self.read(key)
            allowed = [number, *self.possible.get(key, [])]
            if found not in allowed and not (may_return and number is None):
                wrong.append(f"{key}: {found!r} instead of {allowed}")
        return wrong

    def read(self, key: str) -> bytes | None:
        """Read as a client does: a replica whose bytes don't match the announced checksums is ignored."""
        (stored,) = self.ask(m.LookupObjects([key])).objects
        if stored is None:
            return None
        for replica in stored.replicas:
            if self.number_at(replica.segment, replica.address - (1 << 30)) == stored.checksums:
                return bytes(stored.checksums)
        return None


def flip_oplog(num_flips: int, seed: int = 0) -> Outcome:
    """Flip a bit of a master's log while the master is not running."""

    def flipped(log: bytes, random: Random) -> bytes:
        wrong, bit = bytearray(log), random.randrange(8 * len(log))
        wrong[bit // 8] ^= 1 << bit % 8
        return bytes(wrong)

    return _spoil(num_flips, seed, flipped)


def cut_oplog(num_cuts: int, seed: int = 0) -> Outcome:
    """Truncate a master's log while the master is not running."""
    return _spoil(num_cuts, seed, lambda log, random: log[: random.randrange(len(log))])


def _spoil(count: int, seed: int, spoil: Callable[[bytes, Random], bytes]) -> Outcome:
    outcome, random = Outcome(), Random(seed)
    while outcome.num_flips < count:
        world = World(random.getrandbits(32))
        world.start()
        world.live(60)
        outcome.wrong += [f"before any damage: {one}" for one in world.look(may_return=False)]
        world.stop()
        log = world.log_files.content(LOG)
        for _ in range(min(100, count - outcome.num_flips)):
            outcome.num_flips += 1
            again = World(random.getrandbits(32), spoil(log, random), world.disks)
            again.now, again.epoch = world.now, world.epoch
            again.acknowledged, again.possible = world.acknowledged, world.possible
            what = "taken as it was"
            try:
                again.start()
            except InvalidArgument as error:
                what = "refused and repaired"
                if "offset" not in str(error) or LOG not in str(error):
                    outcome.wrong.append(
                        f"flip {outcome.num_flips}: refused, but not with the place: {error}"
                    )
                again.start(repairs=True)
            outcome.counts[what] += 1
            outcome.counts["durable objects looked at"] += sum(map(bool, again.acknowledged.values()))
            outcome.wrong += [f"flip {outcome.num_flips}: {one}" for one in again.look(may_return=True)]
            again.master.check()
    return outcome


def lose_power(num_losses: int, seed: int = 0) -> Outcome:
    """Power of the one machine that runs everything is lost at any disk call, also during the next start."""
    outcome, random = Outcome(), Random(seed)
    while outcome.num_flips < num_losses:
        world = World(random.getrandbits(32))
        for _ in range(random.randint(1, 4)):
            outcome.num_flips += 1
            world.power_left = random.randrange(4 if random.random() < 0.2 else 300)
            try:
                world.start()
                world.live(60)
                world.stop()
                outcome.counts["stopped before"] += 1
            except PowerLost:
                world.lose_power()
                outcome.counts["lost"] += 1
            world.power_left = None
            try:
                world.start()
            except InvalidArgument as error:
                outcome.counts["refused and repaired"] += 1
                outcome.wrong.append(f"loss {outcome.num_flips}: {error}")
                world.start(repairs=True)
            outcome.counts["durable objects looked at"] += sum(map(bool, world.acknowledged.values()))
            outcome.wrong += [f"loss {outcome.num_flips}: {one}" for one in world.look(may_return=False)]
            world.master.check()
            world.stop()
    return outcome


KINDS: dict[str, Callable[[int, int], Outcome]] = {
    "oplog-flips": flip_oplog,
    "oplog-cuts": cut_oplog,
    "power": lose_power,
}
