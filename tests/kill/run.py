# SPDX-License-Identifier: Apache-2.0
"""Rounds of one scenario: load, SIGKILL, recovery, and a check of everything that was acknowledged.

Lost is an acknowledged object that was promised (``journal.Book``) and is not found within ``RECOVERY_S`` of
the kill; wrong is a value that was never acknowledged or begun under that key; a phantom is a key that can be
read although its removal was acknowledged, or that was never put.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from mooncake.errors import MooncakeError
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from tests.kill.journal import Book, Line, content
from tests.kill.processes import PATIENCE_S, Cluster

RECOVERY_S = 120.0
"""Time after a kill within which all promised objects must be found again. On a busy machine the start of a
process alone has taken 17 s; how long it all takes is measured, not asserted."""
SHOWN = 20


@dataclasses.dataclass
class Outcome:
    """Result of the rounds."""

    num_rounds: int = 0
    num_acknowledged: int = 0
    num_checked: int = 0
    """Number of reads of promised objects in all rounds."""
    lost: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    phantoms: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)
    """Processes that ended by themselves, and other violations."""
    recovery_s: list[float] = dataclasses.field(default_factory=list)
    """Times from a kill to the first put that was acknowledged and read back."""
    reading_s: list[float] = dataclasses.field(default_factory=list)
    """Times from a kill to the first get of an object from before."""

    @property
    def violations(self) -> list[str]:
        named = {"lost": self.lost, "wrong": self.wrong, "phantom": self.phantoms, "broken": self.broken}
        return [f"{name}: {one}" for name, found in named.items() for one in found]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Processes that are killed, and the objects that must survive."""

    name: str
    kinds: tuple[str, ...]
    """Kinds of objects that the client puts (``client.py``)."""
    num_nodes: int
    has_ssd: bool
    strike: Callable[[Rounds], tuple[float, list[str]]]
    """Kill and restart processes; returns the time of the kill and the names of the killed."""
    num_masters: int = 1


class Rounds:
    """A cluster, its book, and one scenario played repeatedly."""

    def __init__(self, scenario: Scenario, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.cluster = Cluster(
            folder, scenario.kinds, scenario.num_nodes, scenario.has_ssd, scenario.num_masters
        )
        self.book = Book()
        self.outcome = Outcome()
        self._scenario = scenario

    def run(self, num_rounds: int) -> Outcome:
        try:
            self.cluster.start()
            with Store(self.cluster.master, settings=StoreSettings(timeout_s=RECOVERY_S)) as store:
                self._wait_for_nodes(store)
                for _ in range(num_rounds):
                    self._round(store)
                self._end(store)
        finally:
            self.cluster.close()
        self.outcome.num_acknowledged = self.book.num_acknowledged
        self.outcome.wrong += self.book.wrong
        return self.outcome

    def _wait_for_nodes(self, store: Store) -> None:
        until = time.monotonic() + PATIENCE_S
        num_segments = len(self.cluster.nodes) * (2 if self._scenario.has_ssd else 1)
        while sum(_is_open(one) for one in store.ask(m.GetMasterStatus()).segments) < num_segments:
            assert time.monotonic() < until, "the nodes don't mount"
            time.sleep(0.02)

    def _round(self, store: Store) -> None:
        if self.cluster.client is None:
            self.cluster.start_client()
        self.outcome.num_rounds += 1
        old = f"old-{self.outcome.num_rounds}"
        self._put(store, old)
        time.sleep(self.random.uniform(0.3, 0.7))
        killed_at, killed = self._scenario.strike(self)
        self._recover(store, killed_at, old)
        if self.cluster.client is not None:
            self.cluster.client.say("pause")
        for journal in self.cluster.journals:
            self.book.read(journal)
        for name in killed:
            self.book.died(name)
        self._check(store, killed_at)
        self._tidy(store)
        self.outcome.broken += self.cluster.ended()
        if self.cluster.client is not None:
            self.cluster.client.say("go")

    # The runner's own objects are in the book as well

    def _put(self, store: Store, key: str) -> bool:
        is_durable = self._scenario.has_ssd
        self.book.note(Line("put", key, 1, is_durable))
        is_done = store.put(key, content(key, 1), m.PutPolicy(is_durable=is_durable)) is None
        if is_done:
            self.book.note(Line("put_done", key, 1, is_durable))
        return is_done

    def _remove(self, store: Store, keys: list[str]) -> None:
        if not keys:
            return
        for key in keys:
            self.book.note(Line("remove", key))
        store.remove(keys, force=True)
        for key in keys:
            self.book.note(Line("removed", key))

    # After the kill

    def _recover(self, store: Store, killed_at: float, old: str) -> None:
        """Wait until an object from before can be read (if there is one) and a new one put and got."""
        new = f"new-{self.outcome.num_rounds}"
        waits_for_old, waits_for_new = self._scenario.has_ssd, True
        while waits_for_old or waits_for_new:
            with contextlib.suppress(MooncakeError):
                if waits_for_old and store.get(old) is not None:
                    waits_for_old = False
                    self.outcome.reading_s.append(time.monotonic() - killed_at)
            with contextlib.suppress(MooncakeError):
                if waits_for_new and self._put(store, new) and store.get(new) == content(new, 1):
                    waits_for_new = False
                    self.outcome.recovery_s.append(time.monotonic() - killed_at)
            if time.monotonic() > killed_at + RECOVERY_S:
                self.outcome.broken.append(f"no put and get within {RECOVERY_S:g} s of the kill")
                return
            time.sleep(0.005)

    def _check(self, store: Store, killed_at: float) -> None:
        promised = [key for key, kept in self.book.keys.items() if kept.is_promised]
        self.outcome.num_checked += len(promised)
        missing = self._read(store, promised)
        while missing and time.monotonic() < killed_at + RECOVERY_S:
            time.sleep(0.05)
            missing = self._read(store, missing)
        for key in missing[:SHOWN]:
            self.outcome.lost.append(f"{key} {self.book.keys[key]}: {store.ask(m.ObjectStory(key)).lines}")
            self.book.forget(key)
        self._read(store, [key for key, kept in self.book.keys.items() if kept.versions])
        absent = [key for key, kept in self.book.keys.items() if not kept.versions]
        for key, is_there in zip(absent, store.exists(absent), strict=True):
            if is_there:
                self.outcome.phantoms.append(f"{key}: {store.ask(m.ObjectStory(key)).lines}")
        listed = store.ask(m.ListKeys("", 1 << 20)).keys
        self.outcome.phantoms += [f"{key} is listed" for key in listed if key not in self.book.keys]

    def _read(self, store: Store, keys: list[str]) -> list[str]:
        """Check the keys that can be read; returns the others."""
        missing: list[str] = []
        for key, value in zip(keys, store.get_batch(keys), strict=True):
            versions = self.book.keys[key].versions
            if value is None:
                missing.append(key)
            elif not any(value == content(key, version) for version in versions):
                story = store.ask(m.ObjectStory(key)).lines
                self.outcome.wrong.append(f"{key}, not one of versions {versions}: {value[:20]!r} {story}")
        return missing

    def _tidy(self, store: Store) -> None:
        """Remove objects that killed clients left behind, so that the pools never fill up."""
        current = self.cluster.journals[-2:] if self.cluster.client is None else self.cluster.journals[-1:]
        names = tuple(f"{journal.stem}-" for journal in current)
        left = [key for key, kept in self.book.keys.items() if kept.versions and not key.startswith(names)]
        self._remove(store, left)

    def _end(self, store: Store) -> None:
        """Check that all space is freed after everything was removed."""
        if self.cluster.client is not None:
            self.cluster.kill("client")
        self._remove(store, store.ask(m.ListKeys("", 1 << 20)).keys)
        until = time.monotonic() + RECOVERY_S
        while (status := store.ask(m.GetMasterStatus())).allocated_bytes or status.num_writing:
            if time.monotonic() > until:
                self.outcome.broken.append(f"space is not given back: {status}")
                return
            time.sleep(0.05)


def _is_open(segment: m.SegmentStatus) -> bool:
    return segment.state == "alive" and not segment.rests_s


def kill_master(rounds: Rounds) -> tuple[float, list[str]]:
    killed_at = rounds.cluster.kill("master")
    rounds.cluster.start_master()
    return killed_at, []


def kill_leader(rounds: Rounds) -> tuple[float, list[str]]:
    cluster = rounds.cluster
    cluster.wait_for_standbys()
    leader = cluster.leader()
    killed_at = cluster.kill(leader)
    cluster.start_master(leader)
    return killed_at, []


def kill_standby(rounds: Rounds) -> tuple[float, list[str]]:
    """Kill the leader, and during the takeover one of the standbys that may take over."""
    cluster = rounds.cluster
    cluster.wait_for_standbys()
    leader = cluster.leader()
    killed_at = cluster.kill(leader)
    time.sleep(rounds.random.uniform(0.0, 1.5))
    other = rounds.random.choice([name for name in cluster.masters if name != leader])
    cluster.kill(other)
    cluster.start_master(leader)
    cluster.start_master(other)
    return killed_at, []


def kill_client(rounds: Rounds) -> tuple[float, list[str]]:
    return rounds.cluster.kill("client"), []


def kill_daemon(rounds: Rounds) -> tuple[float, list[str]]:
    name = rounds.random.choice(rounds.cluster.nodes)
    killed_at = rounds.cluster.kill(name)
    rounds.cluster.start_node(name)
    return killed_at, [name]


def kill_cluster(rounds: Rounds) -> tuple[float, list[str]]:
    """Kill all processes at once and start them again in any order."""
    cluster = rounds.cluster
    killed_at = cluster.kill(*cluster.running)
    starts: list[Callable[[], None]] = [lambda: cluster.start_master("master")]
    starts += [lambda name=name: cluster.start_node(name) for name in cluster.nodes]  # type: ignore[misc]
    rounds.random.shuffle(starts)
    for start in starts:
        start()
    return killed_at, cluster.nodes


PLAIN = ("whole", "parts", "replace")
DURABLE = ("durable", "durable", "replace-durable")
SCENARIOS = {
    one.name: one
    for one in (
        Scenario("master", (*PLAIN, *DURABLE), 1, True, kill_master),
        Scenario("leader", (*PLAIN, *DURABLE), 1, True, kill_leader, num_masters=3),
        Scenario("standby", (*PLAIN, *DURABLE), 1, True, kill_standby, num_masters=3),
        Scenario("client", (*PLAIN, "parts", "parts"), 1, False, kill_client),
        Scenario("daemon", (*PLAIN, *DURABLE, "replicated", "replicated"), 2, True, kill_daemon),
        Scenario("cluster", (*PLAIN, *DURABLE, "replicated"), 2, True, kill_cluster),
    )
}


def play(name: str, num_rounds: int, seed: int = 0) -> Outcome:
    """Play a scenario from an empty store to an empty store. The logs are kept after a violation."""
    folder = Path(tempfile.mkdtemp(prefix="kill-"))
    outcome = Rounds(SCENARIOS[name], folder, seed).run(num_rounds)
    if outcome.violations:
        outcome.broken.append(f"see {folder}")
    else:
        shutil.rmtree(folder)
    return outcome
