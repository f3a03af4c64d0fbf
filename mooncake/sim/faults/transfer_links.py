# SPDX-License-Identifier: Apache-2.0
"""Processes that transfer batches over failing links: what a transport does, on virtual time.

The decisions are ``transfer.batch.Batch`` and ``transfer.rails.Rails``, as shipped. The transports are
simulated: a rail serves its parts one after the other; it can refuse, fall silent, be reset or break in
the middle of a slice. A transport's guarantee holds here too: when a part has ended, nothing accesses
local memory on its behalf, and a write that was abandoned may land later, but no longer after the next
operation of the same process has begun to move (the *fence* of the tcp wire).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mooncake.machine import Wake
from mooncake.sim.kernel import Kernel, Process, Timer
from mooncake.transfer.batch import Batch, Carry, Finish, PartDone, StartBatch
from mooncake.transfer.rails import Rails

OK, PEER_LOST, TIMED_OUT, PROTOCOL_ERROR = 0, 1, 4, 6
STATUSES = {1: "peer lost", 2: "access denied", 4: "timed out", 6: "protocol error"}

PIECE_BYTES = 4096
SPRAY_BYTES = 16384
BIG_BYTES = 2048
PATIENCE_S = 0.5


@dataclass(eq=False)
class SimRail:
    """One link between two processes."""

    path: str
    bytes_per_s: float
    latency_s: float
    state: str = "up"
    "`up`, `down` (refuses) or `silent` (nothing comes through)."
    since: float = 0.0
    "Time of the last fault: a change of state, or a reset connection."
    free_at: float = 0.0
    attempts: list[PartAttempt] = field(default_factory=list)

    def change(self, state: str, now: float) -> None:
        self.state, self.since = state, now
        if state == "down":
            self.break_all(now, PEER_LOST)

    def break_all(self, now: float, status: int) -> None:
        self.since = now
        for attempt in list(self.attempts):
            attempt.end(status)


class SimTarget:
    """One incarnation of a process that registers memory for others."""

    def __init__(self, kernel: Kernel, name: str, size_bytes: int) -> None:
        self.name = name
        self.epoch = kernel.random.getrandbits(40)
        self.process = Process(kernel, name)
        self.memory = bytearray(kernel.random.randbytes(size_bytes))


@dataclass(eq=False)
class LateWrite:
    """A slice of an abandoned write that is still in the network."""

    target: SimTarget
    timer: Timer


class PartAttempt:
    """A part on a rail: its slices arrive one after the other, then the completion comes back."""

    def __init__(self, mover: SimInitiator, move: SimTransfer, carry: Carry, rail: SimRail) -> None:
        self.mover, self.move, self.carry, self.rail = mover, move, carry, rail
        self.kernel = mover.kernel
        self.is_over = False
        rows = range(len(move.lengths)) if carry.slices is None else [int(row) for row in carry.slices]
        self._rows = list(rows)
        self._left = list(rows)
        self._num_bytes = sum(move.lengths[row] for row in rows)
        rail.attempts.append(self)
        self._deadline = self.kernel.after(carry.deadline - self.kernel.now, self._too_late)
        begins_at = max(self.kernel.now, rail.free_at)
        rail.free_at = begins_at + self._num_bytes / rail.bytes_per_s
        self._timer = self.kernel.after(begins_at + rail.latency_s - self.kernel.now, self._begin)

    def _step(self, delay_s: float, action: Callable[[], None]) -> None:
        self._timer = self.kernel.after(delay_s, lambda: self._act(action))

    def _act(self, action: Callable[[], None]) -> None:
        if self.rail.state == "silent":
            self._step(0.02, action)  # nothing comes through; checked again later
        elif self.rail.state == "down" or not self.move.target.process.is_alive:
            self.end(PEER_LOST)
        else:
            action()

    def _begin(self) -> None:
        self._act(self._moves)

    def _moves(self) -> None:
        self.mover.fence(self.move.target)
        self._next()

    def _next(self) -> None:
        if self._left:
            self._step(self.move.lengths[self._left[0]] / self.rail.bytes_per_s, self._land)
        else:
            self._step(self.rail.latency_s, lambda: self.end(OK, self._num_bytes))

    def _land(self) -> None:
        row = self._left.pop(0)
        if self.kernel.chance(self.mover.faults.half_frame_chance):
            self.move.copy(row, self.kernel.random.randint(0, self.move.lengths[row]))
            self._left.insert(0, row)
            self.rail.since = self.kernel.now
            self.end(self.kernel.random.choice((PEER_LOST, PROTOCOL_ERROR)))
        else:
            self.move.copy(row, self.move.lengths[row])
            self._next()

    def _too_late(self) -> None:
        if not self.is_over:
            if self.rail.state == "silent":
                self.rail.since = self.kernel.now
            self.end(TIMED_OUT)

    def end(self, status: int, num_bytes: int = 0) -> None:
        """End it. What has not landed may land later if this was a write, and is then unwanted."""
        if self.is_over:
            return
        self.is_over = True
        self.rail.attempts.remove(self)
        self._deadline.cancel()
        self._timer.cancel()
        if status != OK and self.move.is_write:
            for row in self._left:
                if self.kernel.chance(0.5):
                    self.mover.late(self.move, row)
        failed = -1 if status == OK or not self._rows else 0
        self.mover.part_ended(self.move, PartDone(self.carry.part, status, failed, num_bytes))


class SimTransfer:
    """A batch on its way between the initiator's memory and a target's."""

    def __init__(
        self,
        mover: SimInitiator,
        target: SimTarget,
        is_write: bool,
        local: list[int],
        remote: list[int],
        lengths: list[int],
        deadline: float,
        finished: Callable[[Finish], None],
    ) -> None:
        self.mover, self.target, self.is_write = mover, target, is_write
        self.local, self.remote, self.lengths = local, remote, lengths
        self.lengths_array = np.array(lengths, dtype=np.uint64)
        self.finished = finished
        rails = mover.rails_to(target)
        self.batch = Batch(
            len(lengths),
            dict.fromkeys(rails.rails),
            deadline,
            PEER_LOST,
            lengths=self.lengths_array,
            rails=rails,
            piece_bytes=PIECE_BYTES if sum(lengths) >= SPRAY_BYTES else 0,
        )

    def copy(self, row: int, num_bytes: int) -> None:
        here, there = self.local[row], self.remote[row]
        if self.is_write:
            self.target.memory[there : there + num_bytes] = self.mover.memory[here : here + num_bytes]
        else:
            self.mover.memory[here : here + num_bytes] = self.target.memory[there : there + num_bytes]


class SimInitiator:
    """A process that reads and writes the memory of targets."""

    def __init__(self, kernel: Kernel, name: str, faults: LinkFaults, size_bytes: int) -> None:
        self.kernel, self.name, self.faults = kernel, name, faults
        self.memory = bytearray(size_bytes)
        self.links: dict[str, dict[str, SimRail]] = {}
        "Target's name -> path -> rail; the links stay when another process takes a target's place."
        self._rails: dict[int, Rails] = {}
        self._late: list[LateWrite] = []

    def rails_to(self, target: SimTarget) -> Rails:
        rails = self._rails.get(target.epoch)
        if rails is None:
            rails = Rails(list(self.links[target.name]), PATIENCE_S, BIG_BYTES)
            self._rails[target.epoch] = rails
        return rails

    def begin(self, move: SimTransfer) -> None:
        self._follow(move, move.batch.handle(StartBatch(), self.kernel.now))

    def part_ended(self, move: SimTransfer, event: PartDone | Wake) -> None:
        self._follow(move, move.batch.handle(event, self.kernel.now))

    def _follow(self, move: SimTransfer, effects: list[Carry | Finish]) -> None:
        move.batch.check()
        for effect in effects:
            if isinstance(effect, Finish):
                move.finished(effect)
            else:
                PartAttempt(self, move, effect, self.links[move.target.name][effect.path])

    def late(self, move: SimTransfer, row: int) -> None:
        """What was in the network when a write was abandoned: the bytes of then, not of now."""
        target, there = move.target, move.remote[row]
        here, length = move.local[row], move.lengths[row]
        data = bytes(self.memory[here : here + length])

        def land() -> None:
            if target.process.is_alive:
                target.memory[there : there + length] = data

        delay_s = self.kernel.random.expovariate(1 / self.faults.late_s)
        self._late.append(LateWrite(target, self.kernel.after(delay_s, land)))

    def fence(self, target: SimTarget) -> None:
        """Before anything moves, abandoned writes are cut off."""
        for late in [late for late in self._late if late.target is target]:
            late.timer.cancel()
            self._late.remove(late)


@dataclass(frozen=True)
class LinkFaults:
    """Mean times between faults in seconds (0: never), mean durations, probabilities per slice."""

    down_every_s: float = 0.0
    silent_every_s: float = 0.0
    reset_every_s: float = 0.0
    kill_every_s: float = 0.0
    name_service_outage_every_s: float = 0.0
    outage_s: float = 1.0
    half_frame_chance: float = 0.0
    late_s: float = 0.5
    "How long an abandoned write stays in the network."
