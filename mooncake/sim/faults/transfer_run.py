# SPDX-License-Identifier: Apache-2.0
"""The transfer engine's world: batches over links that fail, and one run under one seed.

* Every batch ends by its deadline: done and right, or failed with a reason.
* Memory that a batch has written does not change until the next batch writes it.
* A batch fails only if every path to its peer failed, or its time ran out.
* After everything has healed, every batch arrives and every rail is used again.

The decisions are ``transfer.batch.Batch`` and ``transfer.rails.Rails``, as shipped. The transports are
simulated: a rail serves its parts one after the other; it can refuse, fall silent, be reset or break in
the middle of a slice. A transport's guarantee holds here too: when a part has ended, nothing accesses
local memory on its behalf, and a write that was abandoned may land later, but no longer after the next
operation of the same process has begun to move (the *fence* of the tcp wire).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from mooncake.machine import Wake
from mooncake.sim.faults.invariants import Invariant, Violation
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


AREA_BYTES = 96 << 10
AREAS = 2
"""Areas per initiator and target: batches on different areas are under way at the same time."""
SLACK_S = 0.05
PLENTY_S = 10.0
"""A batch with so much time left when its peer is found fails only if every path failed."""
CALM_BATCHES = 6
CALM_S = 150.0
"""More than the longest mask and every batch's time."""


def draw(random: Random) -> LinkFaults:
    """Draw a swarm: each kind of fault is present or absent, and then rare or frequent."""

    def often(*choices: float) -> float:
        return random.choice(choices) if random.random() < 0.5 else 0.0

    return LinkFaults(
        down_every_s=often(0.5, 3.0),
        silent_every_s=often(1.0, 5.0),
        reset_every_s=often(0.1, 1.0),
        kill_every_s=often(2.0, 10.0),
        name_service_outage_every_s=often(3.0, 10.0),
        outage_s=random.choice((0.1, 1.0, 4.0, 20.0)),
        half_frame_chance=often(0.001, 0.02),
        late_s=random.choice((0.05, 0.5, 3.0)),
    )


@dataclass(eq=False)
class TargetArea:
    """A stretch of a target's memory that one initiator uses, one batch at a time."""

    mover: SimInitiator
    target_name: str
    start: int
    here: int
    known: bytes | None = None
    "What must lie there, if the last batch that wrote it succeeded."
    epoch: int = 0


class TransferRun:
    """Prepare with a seed (and faults, else the seed draws them), then ``run()``."""

    def __init__(self, seed: int, num_batches: int = 100, faults: LinkFaults | None = None) -> None:
        self.kernel = Kernel(seed)
        self.faults = faults if faults is not None else draw(self.kernel.random)
        self.counts: dict[str, int] = {"batches": 0, "done": 0}
        self.targets: dict[str, SimTarget] = {}
        self.movers: list[SimInitiator] = []
        self._areas: list[TargetArea] = []
        self._left = num_batches
        self._is_rough = True
        self._name_service_back_at = 0.0
        self._open: dict[int, float] = {}

    def run(self) -> None:
        """Raises Violation, with the seed in its message."""
        try:
            self._run()
        except Exception as error:
            raise Violation.of_run(error, self.kernel, self.faults) from error

    def _run(self) -> None:
        self._build()
        self._plan_faults()
        for area in self._areas:
            self._next(area)
        while self._left or self._open:
            self.kernel.run(self.kernel.now + 0.25)
            self._check_ends()
        self._calm_down()

    # The simulated world

    def _build(self) -> None:
        random = self.kernel.random
        names = ["left", "right"][: random.randint(1, 2)]
        for i in range(random.randint(1, 2)):
            size = AREAS * len(names) * AREA_BYTES
            mover = SimInitiator(self.kernel, f"mover{i}", self.faults, size)
            self.movers.append(mover)
            for j, name in enumerate(names):
                paths = random.choice(
                    (["tcp"], ["tcp@a>x", "tcp@b>y"], ["rdma@a>x", "rdma@b>y", "tcp"], ["rdma@a>x", "tcp"])
                )
                mover.links[name] = {
                    path: SimRail(path, random.choice((3e5, 1e6, 1e7)), random.choice((1e-5, 1e-3)))
                    for path in paths
                }
                for k in range(AREAS):
                    start = (i * AREAS + k) * AREA_BYTES
                    self._areas.append(TargetArea(mover, name, start, (j * AREAS + k) * AREA_BYTES))
        for name in names:
            self._start(name)

    def _start(self, name: str) -> None:
        self.targets[name] = SimTarget(self.kernel, name, AREAS * len(self.movers) * AREA_BYTES)

    @property
    def _rails(self) -> list[SimRail]:
        return [rail for mover in self.movers for rails in mover.links.values() for rail in rails.values()]

    def _plan_faults(self) -> None:
        self._now_and_then(self.faults.down_every_s, lambda: self._outage("down"))
        self._now_and_then(self.faults.silent_every_s, lambda: self._outage("silent"))
        self._now_and_then(self.faults.reset_every_s, self._reset)
        self._now_and_then(self.faults.kill_every_s, self._kill)
        self._now_and_then(self.faults.name_service_outage_every_s, self._stop_name_service)

    def _now_and_then(self, every_s: float, action: Callable[[], None]) -> None:
        self.kernel.repeat_at_random(every_s, action, lambda: self._is_rough)

    def _outage(self, state: str) -> None:
        rail = self.kernel.random.choice(self._rails)
        if rail.state != "up":
            return
        rail.change(state, self.kernel.now)
        self.kernel.trace_line(f"{rail.path} is {state}")

        def back() -> None:
            if rail.state == state:
                rail.change("up", self.kernel.now)

        self.kernel.after(self.kernel.random.expovariate(1 / self.faults.outage_s), back)

    def _reset(self) -> None:
        rail = self.kernel.random.choice(self._rails)
        self.kernel.trace_line(f"a connection on {rail.path} is reset")
        rail.break_all(self.kernel.now, 1)

    def _kill(self) -> None:
        name = self.kernel.random.choice(list(self.targets))
        target = self.targets[name]
        if target.process.is_alive:
            target.process.crash()
            self.kernel.after(
                self.kernel.random.expovariate(1 / self.faults.outage_s), lambda: self._start(name)
            )

    def _stop_name_service(self) -> None:
        away_s = self.kernel.random.expovariate(1 / self.faults.outage_s)
        self.kernel.trace_line(f"the name service is down for {away_s:.2f} s")
        self._name_service_back_at = max(self._name_service_back_at, self.kernel.now + away_s)

    # The workload

    def _next(self, area: TargetArea) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        pause_s = self.kernel.random.choice((0.0, 0.01, 0.5, 2.0))
        self.kernel.after(
            pause_s, lambda: self._ask(area, self.kernel.random.choice((0.3, 1.0, PLENTY_S, 30.0)))
        )

    def _ask(self, area: TargetArea, timeout_s: float, ended: Callable[[int], None] | None = None) -> None:
        """Run one batch: find the peer, transfer, check the result."""
        self.counts["batches"] += 1
        number = self.counts["batches"]
        deadline = self.kernel.now + timeout_s
        self._open[number] = deadline

        def over(reason: str) -> None:
            _hold(
                self.kernel.now <= deadline + SLACK_S, Invariant.ENDS, f"batch {number} ended late: {reason}"
            )
            self.kernel.trace_line(f"batch {number}: {reason}")
            self.counts[reason] = self.counts.get(reason, 0) + 1
            del self._open[number]
            if ended is not None:
                ended(OK if reason == "done" else 1)
            else:
                self._next(area)

        def look() -> None:
            if self.kernel.now < self._name_service_back_at:
                if self.kernel.now + 0.1 > deadline:
                    over("the name service is down")
                else:
                    self.kernel.after(0.1, look)
            else:
                self._move(area, deadline, over)

        look()

    def _move(self, area: TargetArea, deadline: float, over: Callable[[str], None]) -> None:
        target, random = self.targets[area.target_name], self.kernel.random
        begin = self.kernel.now  # time without a name service, before this, is no path's fault
        if area.epoch != target.epoch:
            area.epoch, area.known = target.epoch, None
        self._check_area(area, target)
        lengths = self._lengths()
        order = list(range(len(lengths)))
        random.shuffle(order)
        local, remote = _packed(lengths, order, area.here), _packed(lengths, order[::-1], area.start)
        is_write = random.random() < 0.6
        memory = area.mover.memory
        memory[area.here : area.here + AREA_BYTES] = random.randbytes(AREA_BYTES)

        def finished(end: Finish) -> None:
            if end.status == OK:
                _hold(end.num_bytes == sum(lengths), Invariant.SLICES, "bytes are missing in the count")
                for here, there, length in zip(local, remote, lengths, strict=True):
                    same = memory[here : here + length] == target.memory[there : there + length]
                    what = f"slice at {there} is not what was moved"
                    _hold(same or not target.process.is_alive, Invariant.SLICES, what)
                if is_write and lengths:  # an empty batch moves nothing, and fences nothing off
                    area.known = bytes(target.memory[area.start : area.start + AREA_BYTES])
                over("done")
                return
            if is_write:
                area.known = None
            _hold(end.status in STATUSES, Invariant.STATUS, f"status {end.status} has no reason")
            self._check_need(area, target, end.status, begin, deadline)
            over(STATUSES[end.status])

        move = SimTransfer(area.mover, target, is_write, local, remote, lengths, deadline, finished)
        area.mover.begin(move)

    def _lengths(self) -> list[int]:
        random = self.kernel.random
        kind = random.random()
        if kind < 0.3:
            return [random.randint(0, 4000) for _ in range(random.randint(1, 4))]
        if kind < 0.4:
            return [0] * random.randint(0, 3)
        return [random.choice((0, 100, 2000, 4096)) for _ in range(random.randint(8, 23))]

    # Invariants

    def _check_area(self, area: TargetArea, target: SimTarget) -> None:
        """Only this initiator writes there, and its last completed write is unchanged."""
        if area.known is not None and target.process.is_alive:
            now = bytes(target.memory[area.start : area.start + AREA_BYTES])
            _hold(now == area.known, Invariant.KEPT, f"{target.name} changed after its write was done")

    def _check_need(
        self, area: TargetArea, target: SimTarget, status: int, begin: float, deadline: float
    ) -> None:
        """A failed batch had a reason to fail."""
        if not target.process.is_alive or target is not self.targets[area.target_name]:
            return
        if status == TIMED_OUT and deadline - begin < PLENTY_S:
            return
        rails = area.mover.links[area.target_name].values()
        well = [rail.path for rail in rails if rail.state == "up" and rail.since < begin]
        what = f"failed ({STATUSES[status]}) although {', '.join(well)} had no fault all the time"
        _hold(not well, Invariant.BLAME, what)

    def _check_ends(self) -> None:
        for number, deadline in self._open.items():
            in_time = self.kernel.now <= deadline + SLACK_S + 0.25
            _hold(in_time, Invariant.ENDS, f"batch {number} still waits")

    def _calm_down(self) -> None:
        """Everything heals; then all batches must arrive, and all rails be used again."""
        self._is_rough = False
        for mover in self.movers:
            mover.faults = LinkFaults(late_s=self.faults.late_s)
        self.kernel.run(self.kernel.now + 60.0)
        for rail in self._rails:
            rail.change("up", self.kernel.now)
        self._name_service_back_at = 0.0
        self.kernel.run(self.kernel.now + CALM_S)
        for area in self._areas:
            for _ in range(CALM_BATCHES):
                results: list[int] = []
                self._ask(area, PLENTY_S, results.append)
                self.kernel.run(self.kernel.now + PLENTY_S + 1.0)
                rule = Invariant.BLAME if results else Invariant.ENDS
                _hold(results == [OK], rule, "a batch failed after everything had healed")
        for mover in self.movers:
            for name, target in self.targets.items():
                rails = mover.rails_to(target)
                masked = [path for path, rail in rails.rails.items() if rail.is_masked]
                if masked and not set(masked) <= {"tcp"}:
                    what = f"{mover.name} to {name}: {masked} not taken back; {rails.story()}"
                    raise Violation(what, Invariant.RETURN)


def _hold(is_kept: bool, rule: Invariant, what: str) -> None:
    if not is_kept:
        raise Violation(what, rule)


def _packed(lengths: list[int], order: list[int], start: int) -> list[int]:
    """Addresses from ``start`` on, one slice after the other in ``order``."""
    addresses = [0] * len(lengths)
    for row in order:
        addresses[row] = start
        start += lengths[row] + 3
    return addresses
