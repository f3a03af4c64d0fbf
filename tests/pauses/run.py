# SPDX-License-Identifier: Apache-2.0
"""Points at which an engine is paused, and a check of its memory and of what it left in the store.

Three kinds of pause: the engine's process is stopped (``stop``), the loop of its connector is blocked while
its threads continue (``hold``), or everything stops, as in a paused virtual machine (``machine``). Wrong
is a block that a load, here or elsewhere, reported as good and that has other bytes than were saved under its
name; overwritten is a block that changed after it was released to the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Protocol

from tests.contract.connectors import StoreConnector
from tests.pauses.engines import ENGINES, GENEROUS, LONGEST_S, NUM_BLOCKS, DirectEngine, Engine

ROOT = Path(__file__).parents[2]

KINDS = ("stop", "hold", "machine", "stop at a time")
"""Share of pauses not at a Python call, so that they also occur while native threads work."""
OPERATIONS = ("save", "load")
PAUSE_S = 1.6
"""Longer than every timeout of an engine with short ones (``engines.SHORT``), even if some add up."""
USUAL_PAUSE_S = 25.0
"""The same for the defaults."""
MOST_S = 0.02
"""Approximate time of an operation without a pause."""


@dataclasses.dataclass
class Outcome:
    """Results of the points of one connector."""

    points: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of pauses by kind and operation."""
    num_missed_points: int = 0
    """Number of operations that ended before their point."""
    num_loaded: int = 0
    num_not_loaded: int = 0
    num_found: int = 0
    """Number of blocks that were saved around a pause and could be read elsewhere."""
    num_not_found: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    overwritten: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_points(self) -> int:
        return sum(self.points.values())

    @property
    def violations(self) -> list[str]:
        named = {"wrong": self.wrong, "overwritten": self.overwritten, "broken": self.broken}
        return [f"{name}: {one}" for name, found in named.items() for one in found]


class Partner(Protocol):
    """The other engine, which is never paused and checks."""

    def before(self, op: str, names: list[str]) -> None: ...

    def after(self, op: str, names: list[str]) -> list[tuple[bool, bool]]:
        """For each block that the engine saved: whether it was found, and whether it was right."""
        ...


class StorePartner:
    """Saves the blocks that the engine loads, and loads those that it saved."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def before(self, op: str, names: list[str]) -> None:
        if op == "load":
            self._engine.fill_all(names)
            self._engine.save(names)

    def after(self, op: str, names: list[str]) -> list[tuple[bool, bool]]:
        if op == "load":
            return []
        self._engine.fill_all([f"{name}-elsewhere" for name in names])
        flags, wrong = self._engine.load(names), self._engine.wrong(names)
        return [(flag, number not in wrong) for number, flag in enumerate(flags)]


class DirectPartner:
    """Offers the blocks that the engine receives, and receives those that it offers, concurrently with it."""

    def __init__(self, engine: DirectEngine) -> None:
        self._engine = engine
        self._ended: threading.Event | None = None
        self._receiving: threading.Thread | None = None
        self._flags: list[bool] = []

    def before(self, op: str, names: list[str]) -> None:
        self._engine.use("save" if op == "load" else "load")
        if op == "load":
            self._engine.fill_all(names)
            self._ended = self._engine.offer(names)
        else:
            self._engine.fill_all([f"{name}-elsewhere" for name in names])
            self._receiving = threading.Thread(target=self._receive, args=(names,))
            self._receiving.start()

    def _receive(self, names: list[str]) -> None:
        self._flags = self._engine.load(names)

    def after(self, op: str, names: list[str]) -> list[tuple[bool, bool]]:
        if op == "load":
            assert self._ended is not None and self._ended.wait(LONGEST_S)
            return []
        assert self._receiving is not None
        self._receiving.join(LONGEST_S)
        wrong = self._engine.wrong(names)
        return [(flag, number not in wrong) for number, flag in enumerate(self._flags)]


class Victim:
    """The process that is paused."""

    def __init__(self, address: str, is_usual: bool, log: Any) -> None:
        config = {"address": address, "is_usual": is_usual}
        command = [sys.executable, "-m", "tests.pauses.victim", json.dumps(config)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, cwd=ROOT, text=True)

    def become(self, connector: str) -> str:
        """Make it an engine with this connector; returns its address, if it has one."""
        self._write({"connector": connector})
        return str(json.loads(self.read())["address"])

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait(10.0)}"
        return line

    def _write(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def send(self, command: dict[str, Any]) -> None:
        self._write(command)
        assert self.read() == "begun\n"

    def is_stopped(self) -> bool:
        state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Stage:
    """A store, and the process that is paused."""

    def __init__(self, is_usual: bool, folder: Path) -> None:
        self.is_usual, self.log = is_usual, folder / "engine.log"
        self.store = StoreConnector()
        self.store.start(folder)
        with self.log.open("w") as log:
            self.victim = Victim(self.store.address, is_usual, log)

    def close(self) -> None:
        self.victim.close()
        self.store.stop()


class Points:
    """The points of one connector, one after the other."""

    def __init__(self, connector: str, seed: int, stage: Stage) -> None:
        self._random = Random(f"{seed} {connector}")
        kinds = self._random.sample(KINDS, len(KINDS))
        ops = self._random.sample(OPERATIONS, len(OPERATIONS))
        # One of each kind, operations in turn; then the same with the other operation.
        turns = [(number, number + turn) for turn in (0, 1) for number in range(len(kinds))]
        self._order = [(ops[which % 2], kinds[number]) for number, which in turns]
        self._seed, self._pause_s = seed, USUAL_PAUSE_S if stage.is_usual else PAUSE_S
        self._store, self._victim = stage.store, stage.victim
        engine = ENGINES[connector](self._store.address, GENEROUS)
        self._engine: Engine = engine
        self._partner: Partner = (
            DirectPartner(engine) if isinstance(engine, DirectEngine) else StorePartner(engine)
        )
        self._peer = getattr(engine, "address", "")
        address = self._victim.become(connector)
        if isinstance(engine, DirectEngine):
            engine.peer = address
        self._num_seen = {"save": 0, "load": 0}
        self._number = 0
        self.outcome = Outcome()

    def run(self, num_points: int) -> Outcome:
        try:
            for op in ("save", "load", "save", "load"):  # the first ones meet the node
                self._turn(op, "none", 0)
            while self.outcome.num_points < num_points and not self.outcome.broken:
                op, kind = self._order[self.outcome.num_points % len(self._order)]
                self._turn(op, kind, self._random.randint(1, max(1, self._num_seen[op])))
        except (AssertionError, OSError, ValueError) as error:
            self.outcome.broken.append(f"point {self._number} of seed {self._seed}: {error!r}")
        finally:
            self._engine.close()
        return self.outcome

    def _turn(self, op: str, kind: str, at: int) -> None:
        self._number += 1
        prefix = f"{self._seed}-{self._number}"
        names = [f"{prefix}-{number}" for number in range(NUM_BLOCKS)]
        self._partner.before(op, names)
        is_timed = kind == "stop at a time"
        command = {"op": op, "name": prefix, "kind": kind, "at": 0 if is_timed else at}
        self._victim.send({**command, "pause_s": self._pause_s, "peer": self._peer})
        if is_timed:
            time.sleep(self._random.uniform(0.0, MOST_S))
            self._victim.process.send_signal(signal.SIGSTOP)
        answer = self._answer(kind)
        found = self._partner.after(op, names)
        self._judge(op, kind, is_timed or answer["has_struck"], answer, found)

    def _answer(self, kind: str) -> dict[str, Any]:
        """The engine's answer; if it has stopped, it is continued after the pause."""
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(self._victim.read()))
        reader.start()
        until = time.monotonic() + LONGEST_S
        while reader.is_alive():
            if self._victim.is_stopped():
                self._pause(kind)
            assert time.monotonic() < until, "the engine never got its memory back"
            reader.join(0.005)
        return dict(json.loads(lines[0]))

    def _pause(self, kind: str) -> None:
        going_on: list[Callable[[int], object]] = [self._victim.process.send_signal]
        if kind == "machine":
            self._store.signal(signal.SIGSTOP)
            going_on.append(self._store.signal)
        time.sleep(self._pause_s)
        self._random.shuffle(going_on)
        for go_on in going_on:
            go_on(signal.SIGCONT)
        while self._victim.is_stopped():
            time.sleep(0.001)

    def _judge(
        self, op: str, kind: str, has_struck: bool, answer: dict[str, Any], found: list[tuple[bool, bool]]
    ) -> None:
        outcome, where = self.outcome, f"point {self._number} of seed {self._seed}, {op}, {kind}"
        if kind == "none":
            self._num_seen[op] = answer["num_seen"]
            assert answer["loaded"] == (NUM_BLOCKS if op == "load" else 0), f"{where}: {answer}"
            assert all(is_found for is_found, _ in found), f"{where}: {found}"
        elif has_struck:
            outcome.points[f"{kind}, {op}"] = outcome.points.get(f"{kind}, {op}", 0) + 1
        else:
            outcome.num_missed_points += 1
        if op == "load" and kind != "none":
            outcome.num_loaded += answer["loaded"]
            outcome.num_not_loaded += NUM_BLOCKS - answer["loaded"]
        outcome.wrong += [f"{where}: block {number} of a load" for number in answer["wrong"]]
        outcome.overwritten += [f"{where}: block {number}" for number in answer["overwritten"]]
        for number, (is_found, is_right) in enumerate(found):
            outcome.num_found += is_found
            outcome.num_not_found += not is_found
            if is_found and not is_right:
                outcome.wrong.append(f"{where}: block {number}, loaded elsewhere")


@contextlib.contextmanager
def staged(is_usual: bool = False) -> Iterator[Stage]:
    """A store and a process for the points. ``is_usual``: the engines have their default timeouts."""
    with tempfile.TemporaryDirectory(prefix="pauses-") as folder:
        stage = Stage(is_usual, Path(folder))
        try:
            yield stage
        finally:
            stage.close()


def play(stage: Stage, connector: str, num_points: int, seed: int = 0) -> Outcome:
    outcome = Points(connector, seed, stage).run(num_points)
    if outcome.broken:
        outcome.broken += [f"engine: {line}" for line in stage.log.read_text().splitlines()[-20:]]
    return outcome
