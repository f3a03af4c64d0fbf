# SPDX-License-Identifier: Apache-2.0
"""One seed with real processes: workers move batches while faults occur; every batch is verified.

A batch must end done-and-right or failed-with-a-reason before its deadline, plus the time that a busy machine
needs to wake a thread. Done-and-right means that a read returned the content of the peer, and that a write is
in place there, in one process of the peer; at the end, after all faults, no byte of an abandoned batch may
have overwritten a later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt

from mooncake.errors import MooncakeError, Unavailable
from mooncake.transfer import (
    Completion,
    Op,
    Region,
    RemoteSegment,
    Status,
    TransferEngine,
    TransferSettings,
    crc32c,
)
from tests.faults.plan import AREA_BYTES, NUM_WORKERS, Fault, Plan, Transfer
from tests.faults.processes import PATIENCE_S, MetadataService, PeerProcess, start

GRACE_S = 2.0
"""Time for threads and processes to be scheduled."""
METADATA_TIMEOUT_S = 1.0
RECOVERY_S = 20.0
"""Time after the end of all faults within which every peer must accept a batch again."""

NO_LIFE = -1

Bytes = npt.NDArray[np.uint8]


@dataclass
class Outcome:
    """Result of a seed."""

    counts: Counter[str] = field(default_factory=Counter)
    "Batches by how they ended: ``ok``, or ``failed: <reason>``."
    wrong: list[str] = field(default_factory=list)
    "What must not happen and did."
    worst_overrun_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def accuse(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


def _crc32(data: Bytes, at: int, length: int) -> int:
    return zlib.crc32(data[at : at + length].tobytes())


class Area:
    """Known content of a worker's area in one peer."""

    def __init__(self, peer: PeerProcess, offset: int) -> None:
        self.peer = peer
        self.offset = offset
        self.number = NO_LIFE
        self.bytes: Bytes = np.zeros(AREA_BYTES, dtype=np.uint8)
        self.is_known = np.zeros(AREA_BYTES, dtype=np.bool_)

    def renew(self, number: int, contents: bytes) -> None:
        """Start with the initial content of a new process of the peer."""
        if number != self.number:
            self.number = number
            self.bytes = np.frombuffer(contents, dtype=np.uint8)[
                self.offset : self.offset + AREA_BYTES
            ].copy()
            self.is_known[:] = True

    def lose(self) -> None:
        """Mark the time between two processes: a read or write may still reach the former one."""
        self.number = NO_LIFE
        self.is_known[:] = False

    def forget(self, ranges: tuple[tuple[int, int], ...]) -> None:
        """Mark a range as unknown."""
        for at, length in ranges:
            self.is_known[at : at + length] = False

    def put(self, ranges: tuple[tuple[int, int], ...], data: Bytes) -> None:
        for at, length in ranges:
            self.bytes[at : at + length] = data[at : at + length]
            self.is_known[at : at + length] = True

    def agrees(self, ranges: tuple[tuple[int, int], ...], data: Bytes) -> bool:
        """Whether ``data`` agrees with the known content."""
        return all(
            bool(((self.bytes[at : at + n] == data[at : at + n]) | ~self.is_known[at : at + n]).all())
            for at, n in ranges
        )


class Worker:
    """Moves the batches of one worker, one after the other, from its own thread."""

    def __init__(
        self, number: int, plan: Plan, engine: TransferEngine, peers: list[PeerProcess], outcome: Outcome
    ) -> None:
        self.number = number
        self._plan = plan
        self._engine = engine
        self._outcome = outcome
        self._region: Region = engine.allocate(AREA_BYTES, huge_pages=False)
        self._memory: Bytes = np.frombuffer(self._region.view(), dtype=np.uint8)
        self._random = np.random.default_rng(plan.seed * 100 + number)
        self.areas = [Area(peer, number * AREA_BYTES) for peer in peers]
        self.thread = threading.Thread(target=self._work, name=f"worker-{number}")

    def _work(self) -> None:
        try:
            for step, transfer in enumerate(self._plan.transfers[self.number]):
                time.sleep(transfer.pause_s)
                self.step(transfer, f"batch {step} of worker {self.number}")
        except BaseException as error:
            self._outcome.accuse(f"worker {self.number} broke: {type(error).__name__}: {error}")
            raise

    def step(self, transfer: Transfer, what: str) -> bool:
        """Move one batch and verify it; True if it was done."""
        area = self.areas[transfer.peer]
        with area.peer.lock:
            if area.peer.is_alive:
                area.renew(area.peer.number, area.peer.contents())
            else:
                area.lose()
        data = self._random.integers(0, 256, AREA_BYTES, dtype=np.uint8)
        self._memory[:] = data  # for a write what is sent, for a read what must be replaced
        segment = self._find(area.peer.name)
        if segment is None:
            return False
        begin = time.monotonic()
        try:
            done = self._move(transfer, segment, area)
            reason = "" if done.status == Status.OK else done.status.name
        except MooncakeError as error:
            done, reason = None, f"{type(error).__name__}: {error}"
        overrun_s = time.monotonic() - begin - transfer.timeout_s
        with self._outcome.lock:
            self._outcome.worst_overrun_s = max(self._outcome.worst_overrun_s, overrun_s)
        if overrun_s > GRACE_S:
            self._outcome.accuse(f"{what} ended {overrun_s:.2f} s after its deadline with {reason or 'OK'}")
        if done is not None and not reason:
            self._outcome.count("ok")
            self._judge(transfer, area, data, done, what)
            return True
        self._outcome.count(f"failed: {reason}")
        if transfer.is_write:
            with area.peer.lock:  # perhaps it was the next life already that got some of it
                area.renew(area.peer.number, area.peer.contents())
            area.forget(transfer.ranges)
        return False

    def _find(self, name: str) -> RemoteSegment | None:
        begin = time.monotonic()
        try:
            segment, reason = self._engine.open_name(name), "nothing is published"
        except MooncakeError as error:
            segment, reason = None, type(error).__name__
        took_s = time.monotonic() - begin
        if took_s > METADATA_TIMEOUT_S + GRACE_S:
            self._outcome.accuse(f"the name {name} was looked for during {took_s:.2f} s")
        if segment is None:
            self._outcome.count(f"failed: name: {reason}")
            time.sleep(0.05)  # so that there are batches left when it is found again
        return segment

    def _move(self, transfer: Transfer, segment: RemoteSegment, area: Area) -> Completion:
        op = Op.WRITE if transfer.is_write else Op.READ
        offsets, lengths = (
            np.array(column, dtype=np.uint64) for column in zip(*transfer.ranges, strict=True)
        )
        local = offsets + np.uint64(self._region.address)
        remote = offsets + np.uint64(segment.descriptor.regions[0].address + area.offset)
        engine, timeout_s, checksum = self._engine, transfer.timeout_s, transfer.checksum
        if transfer.how == "run":
            return engine.run(op, segment, local, remote, lengths, timeout_s=timeout_s, checksum=checksum)
        if transfer.how == "await":
            return asyncio.run(
                engine.transfer(op, segment, local, remote, lengths, timeout_s=timeout_s, checksum=checksum)
            )
        queue = engine.new_queue()
        engine.submit(queue, 1, op, segment, local, remote, lengths, timeout_s=timeout_s, checksum=checksum)
        until = (
            time.monotonic() + timeout_s + PATIENCE_S
        )  # far beyond: the judge wants to know how late it is
        while time.monotonic() < until:
            for completion in queue.drain(timeout_s=0.2):
                return completion
        raise AssertionError("a submitted batch never ended")

    def _judge(self, transfer: Transfer, area: Area, sent: Bytes, done: Completion, what: str) -> None:
        """Verify a batch that was reported as done."""
        wrong = self._outcome.accuse
        if done.num_bytes != transfer.num_bytes:
            wrong(f"{what} moved {done.num_bytes} bytes instead of {transfer.num_bytes}")
        ranges = transfer.ranges
        if transfer.checksum:
            sums = [crc32c(self._memory[at : at + n].tobytes()) for at, n in ranges]
            if done.checksums is None or done.checksums.tolist() != sums:
                wrong(f"{what} has wrong checksums")
        with area.peer.lock:  # no life ends or begins meanwhile
            has_restarted = area.peer.number != area.number
            if not transfer.is_write:
                is_right = area.agrees(ranges, self._memory)
                if has_restarted:
                    area.renew(area.peer.number, area.peer.contents())
                    is_right |= area.agrees(ranges, self._memory)
                if not is_right:
                    lives = f"life {area.number}" + " and the one before" * has_restarted
                    wrong(
                        f"{what} read other bytes by {transfer.how} than lie in {lives} of {area.peer.name}"
                    )
                if not has_restarted:
                    area.put(ranges, self._memory)
                return
            if not area.peer.is_alive:
                self._outcome.count("(written to a peer that died before it could be checked)")
                return
            if has_restarted:  # all of it went to the former life, or all of it to this one
                area.renew(area.peer.number, area.peer.contents())
            expected = [_crc32(sent, at, n) for at, n in ranges]
            before = [_crc32(area.bytes, at, n) for at, n in ranges]
            there = area.peer.sums([(area.offset + at, n) for at, n in ranges])
            if there != expected and not (has_restarted and there == before):
                wrong(f"{what} was written, but other bytes lie there")
            if there == expected:
                area.put(ranges, sent)

    def look_again(self) -> None:
        """Verify the known content at the end, after all faults."""
        for index, area in enumerate(self.areas):
            area.renew(area.peer.number, area.peer.contents())
            edges = np.flatnonzero(np.diff(np.concatenate([[False], area.is_known, [False]]).astype(np.int8)))
            known = [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
            there = area.peer.sums([(area.offset + at, n) for at, n in known])
            for (at, n), crc in zip(known, there, strict=True):
                if crc != _crc32(area.bytes, at, n):
                    self._outcome.accuse(
                        f"at the end, other bytes than were written lie at [{at}, +{n}) of worker "
                        f"{self.number} in peer {index}: bytes of an earlier batch landed late"
                    )


def strike(plan: Plan, metadata: MetadataService, peers: list[PeerProcess]) -> None:
    """Inject all faults, each in its own thread, and end them."""
    began = time.monotonic()
    threads = []
    for fault in plan.faults:
        time.sleep(max(0.0, began + fault.at_s - time.monotonic()))
        threads.append(threading.Thread(target=_strike, args=(fault, metadata, peers[fault.peer])))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _strike(fault: Fault, metadata: MetadataService, peer: PeerProcess) -> None:
    match fault.kind:
        case "kill":
            with peer.lock:  # two kills of one peer don't overlap
                if not peer.is_alive:
                    return
                peer.kill()
            time.sleep(fault.duration_s)
            peer.restart()
        case "stop":
            child = peer.process
            child.freeze(True)
            time.sleep(fault.duration_s)
            child.freeze(False)
        case "reset":
            peer.proxy.reset()
        case "half_frame":
            peer.proxy.break_frame(fault.num_bytes, fault.to_peer)
        case "silence":
            peer.proxy.silence(True)
            time.sleep(fault.duration_s)
            peer.proxy.silence(False)
        case "metadata_kill":
            service = metadata.process
            service.kill()
            time.sleep(fault.duration_s)
            if metadata.process is service:
                metadata.restart()
        case "metadata_stop":
            service = metadata.process
            service.freeze(True)
            time.sleep(fault.duration_s)
            service.freeze(False)


def run(plan: Plan) -> Outcome:
    """Run one seed."""
    outcome = Outcome()
    metadata, peers = start(plan)
    engine = TransferEngine(
        TransferSettings(
            name="driver",
            transports=plan.transports,
            num_streams=plan.num_streams,
            metadata=f"http://127.0.0.1:{metadata.port}/metadata",
            metadata_timeout_s=METADATA_TIMEOUT_S,
        )
    )
    try:
        workers = [Worker(number, plan, engine, peers, outcome) for number in range(NUM_WORKERS)]
        _wait_until_known(engine, peers)
        for worker in workers:
            worker.thread.start()
        strike(plan, metadata, peers)
        for worker in workers:
            worker.thread.join(PATIENCE_S * 2)
            if worker.thread.is_alive():
                outcome.accuse(f"worker {worker.number} hangs")
                return outcome
        for peer in peers:
            peer.proxy.heal()
        _recover(plan, workers[0], outcome)
        for worker in workers:
            worker.look_again()
    finally:
        begin = time.monotonic()
        engine.close()
        if time.monotonic() - begin > GRACE_S + METADATA_TIMEOUT_S:
            outcome.accuse(f"the engine took {time.monotonic() - begin:.2f} s to close")
        for peer in peers:
            peer.close()
        metadata.process.kill()
    return outcome


def _wait_until_known(engine: TransferEngine, peers: list[PeerProcess]) -> None:
    until = time.monotonic() + PATIENCE_S
    for peer in peers:
        while True:
            with contextlib.suppress(Unavailable):
                if engine.open_name(peer.name) is not None:
                    break
            assert time.monotonic() < until, f"{peer.name} was not published within {PATIENCE_S:g} s"
            time.sleep(0.02)


def _recover(plan: Plan, worker: Worker, outcome: Outcome) -> None:
    """Write and read a batch at every peer after all faults."""
    random = Random(plan.seed)
    for index in range(plan.num_peers):
        until = time.monotonic() + RECOVERY_S
        for is_write in (True, False):
            length = random.randint(1, AREA_BYTES)
            probe = Transfer(index, is_write, ((0, length),), 3.0, "run", True, 0.0)
            while not worker.step(probe, f"after all faults, peer {index}"):
                if time.monotonic() > until:
                    outcome.accuse(f"peer {index} takes no batch {RECOVERY_S:g} s after the last fault")
                    return
                time.sleep(0.05)
