# SPDX-License-Identifier: Apache-2.0
"""A client on the kernel: runs the shipped operations on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake.errors import DeadlineExceeded, PeerLost
from mooncake.rpc.wire import Failure, error_of
from mooncake.sim.faults.invariants import SpaceGrant
from mooncake.sim.faults.network import ConnectionEnd, over_the_wire
from mooncake.sim.faults.nodes import SimSegment, checksum, combine, requests
from mooncake.sim.kernel import Process
from mooncake.store import messages as m
from mooncake.store.client.effects import (
    CallMaster,
    Effect,
    MasterReply,
    MoveSlices,
    OpenSegment,
    Operation,
    Pause,
    Slices,
    SlicesMoved,
)
from mooncake.store.client.grants import OneSlice
from mooncake.store.client.operations import Operations
from mooncake.store.client.preallocated import PreallocatedPiece, PreallocatedPieces

if TYPE_CHECKING:
    from mooncake.sim.faults.store_run import StoreCluster


class WatchedPreallocations(PreallocatedPieces):
    """Reports to the checkers which space this client may write."""

    def __init__(self, client: SimClient) -> None:
        super().__init__()
        self._client = client
        self._promises: dict[tuple[int, int], SpaceGrant] = {}

    def add(
        self,
        advance: m.PreallocatedSpace | None,
        size_bytes: int,
        asked_at: float,
        is_durable: bool = False,
    ) -> None:
        super().add(advance, size_bytes, asked_at, is_durable)
        for number, replica in enumerate(advance.replicas if advance is not None else ()):
            assert advance is not None
            expires_at = asked_at + advance.put_s
            self._watch(
                PreallocatedPiece(
                    advance.advance_id, number, replica, advance.size_bytes, expires_at, expires_at
                )
            )

    def give_back(self, piece: PreallocatedPiece) -> None:
        super().give_back(piece)
        self._watch(piece)

    def spent(self, pieces: list[tuple[int, int]]) -> None:
        """Everything that this client had to write there is written."""
        self._client.cluster.checkers.counts["written in advance"] += len(pieces)
        for name in pieces:
            promise = self._promises.pop(name, None)
            self._client.cluster.checkers.released([promise] if promise is not None else [])

    def _watch(self, piece: PreallocatedPiece) -> None:
        promise = self._client.cluster.checkers.piece_promised(self._client, piece)
        if promise is not None:
            self._promises[piece.advance_id, piece.number] = promise


class SimClient:
    """A client process that runs operations on virtual time."""

    def __init__(self, cluster: StoreCluster, name: str, host: str, tenant: str = "") -> None:
        self.cluster = cluster
        self.host = host
        self.tenant = tenant
        self.kernel = cluster.kernel
        self.name = name
        self.process = Process(cluster.kernel, name, cluster.new_clock())
        joined = combine if cluster.faults.has_checksums else lambda a, b, length_b: 0
        self.operations = Operations(
            host,
            joined,
            cluster.kernel.random.getrandbits(62),
            tenant,
            is_on_one_device=lambda segment, remote, local: local % 2 == 0,  # in half of the reads
        )
        self._preallocated = self.operations.preallocated = WatchedPreallocations(self)
        self.memory = bytearray(1 << 20)
        self._allocated = 0
        self._end: ConnectionEnd | None = None
        self._is_connecting = False
        self._waiting: dict[int, Callable[[Any], None]] = {}
        """Request id -> callback for the reply; called with None when the connection is lost."""
        self._queued: list[tuple[int, Any]] = []
        self._last_id = 0

    @property
    def now(self) -> float:
        return self.process.now

    def allocate(self, length: int) -> int:
        """Return an address in this client's memory, round-robin; old content is overwritten after a
        while."""
        if self._allocated + length > len(self.memory):
            self._allocated = 0
        self._allocated += length
        return self._allocated - length

    def run(
        self, operation: Operation[Any], deadline: float, done: Callable[[Any, Exception | None], None]
    ) -> None:
        """Run to the end, then call ``done(result, error)``. The checkers verify that the end comes."""
        ended = self.cluster.checkers.operation_began(self, operation, deadline)

        def step(outcome: Any) -> None:
            try:
                effect = operation.send(outcome)
            except StopIteration as stop:
                ended()
                done(stop.value, None)
            except (PeerLost, DeadlineExceeded) as error:
                ended()
                done(None, error)
            else:
                self._perform(effect, step)

        self.process.after(0.0, lambda: step(None))

    def _perform(self, effect: Effect, resume: Callable[[Any], None]) -> None:
        if isinstance(effect, CallMaster):
            self._ask(effect, resume)
        elif isinstance(effect, MoveSlices):
            self._move(effect, resume)
        elif isinstance(effect, OpenSegment):
            # As in transfer, opening a segment makes no connection yet.
            segment = self.cluster.segment(effect.segment, effect.epoch)
            self.process.after(0.0, lambda: resume(segment))
        else:
            assert isinstance(effect, Pause), "no bytes travel in messages here"
            self.process.after(effect.seconds_from(self.now), lambda: resume(None))

    # Requests to the master

    def _ask(self, effect: CallMaster, resume: Callable[[Any], None]) -> None:
        asked_at = self.now
        if isinstance(effect.message, m.PutWritten):
            self._preallocated.spent(effect.message.pieces)
        self._last_id += 1
        request_id = self._last_id

        def answered(reply: Any) -> None:
            timer.cancel()
            now = self.now
            if reply is None:
                resume(MasterReply(None, PeerLost("lost the master"), asked_at, now))
            elif isinstance(reply, Failure):
                resume(MasterReply(None, error_of(reply, "the master"), asked_at, now))
            else:
                resume(MasterReply(reply, None, asked_at, now))

        def too_late() -> None:
            del self._waiting[request_id]
            error = DeadlineExceeded("the master didn't answer")
            resume(MasterReply(None, error, asked_at, self.now))

        timer = self.process.after(effect.deadline - asked_at, too_late)
        self._waiting[request_id] = answered
        frame = (request_id, over_the_wire(effect.message, requests))
        if self._end is not None:
            self._end.send(frame)
        else:
            self._queued.append(frame)
            self._connect()

    def _connect(self) -> None:
        if self._is_connecting:
            return
        self._is_connecting = True

        def opened(end: ConnectionEnd) -> None:
            self._is_connecting = False
            self._end = end
            end.on_message = self._replied
            end.on_closed = self._lost
            queued, self._queued = self._queued, []
            for frame in queued:
                if frame[0] in self._waiting:
                    end.send(frame)

        def refused(reason: str) -> None:
            self._is_connecting = False
            self.process.after(0.05, lambda: self._connect() if self._queued else None)

        self.cluster.network.connect(self.process, self.cluster.leader, opened, refused)

    def _replied(self, frame: tuple[int, Any]) -> None:
        request_id, reply = frame
        answered = self._waiting.pop(request_id, None)
        if answered is not None:
            answered(reply)

    def _lost(self, reason: str) -> None:
        self._end = None
        queued = [request_id for request_id, _ in self._queued]
        for request_id in [number for number in self._waiting if number not in queued]:
            self._waiting.pop(request_id)(None)

    # Moving bytes

    def _move(self, effect: MoveSlices, resume: Callable[[Any], None]) -> None:
        if self.now >= effect.deadline:
            late = [SlicesMoved(None, "timed_out", self.now) for _ in effect.transfers]
            self.process.after(0.0, lambda: resume(late))
            return
        outcomes: list[SlicesMoved | None] = [None] * len(effect.transfers)

        def ended(number: int, moved: SlicesMoved) -> None:
            outcomes[number] = moved
            if all(outcome is not None for outcome in outcomes):
                resume(list(outcomes))

        for number, slices in enumerate(effect.transfers):
            self._transfer(effect, slices, lambda moved, number=number: ended(number, moved))  # type: ignore[misc]

    def _transfer(
        self, effect: MoveSlices, slices: Slices | OneSlice, ended: Callable[[SlicesMoved], None]
    ) -> None:
        """Copy each slice at its own instant; fail, be slow, or write late as the faults say."""
        segment: SimSegment = slices.handle
        faults, kernel = self.cluster.faults, self.kernel
        took_s = 0.001 * kernel.random.uniform(0.1, 2.0)
        if kernel.chance(faults.slow_transfer_chance) or segment.is_slow:
            took_s = kernel.random.uniform(0.0, faults.slow_transfer_s)
        if segment.disk is not None and kernel.chance(faults.slow_disk_chance):
            took_s += kernel.random.uniform(0.0, faults.slow_disk_s)
        peer = segment.process.name
        start_s = self._delay(peer)
        # Where only the return direction is held, the answer waits.
        took_s += max(0.0, self.cluster.network.held_s(peer, self.name) - start_s - took_s)
        fails = kernel.chance(faults.transfer_failure_chance)
        reason = "peer_lost"
        if segment.disk is not None and not effect.is_write and segment.disk.fails_to_read():
            fails, reason = True, "io_error"
        end_s = start_s + took_s
        limit_s = max(0.0, effect.deadline - self.now)
        is_late = end_s > limit_s
        reported_s = min(end_s, limit_s)
        sums: list[int] = [0] * len(slices.lengths)
        num_left = len(slices.lengths)
        is_reported = False

        def copy(index: int, local: int, remote: int, length: int) -> None:
            nonlocal num_left
            num_left -= 1
            if not segment.is_alive or (is_reported and not effect.is_write):
                return
            if effect.is_write:
                data = bytes(self.memory[local : local + length])
                segment.write(remote, data)
            elif self.process.is_alive:
                data = segment.read(remote, length)
                self.memory[local : local + length] = data
            else:
                return
            sums[index] = checksum(data) if faults.has_checksums else 0

        def copy_when_both_run(index: int, local: int, remote: int, length: int) -> None:
            """A process that is stopped sends and serves nothing, and continues afterwards."""
            copying = lambda: copy(index, local, remote, length)  # noqa: E731
            if segment.node.host == self.host:
                self.process.when_running(copying)  # shared memory: the node has no part in it
            else:
                self.process.when_running(lambda: segment.process.when_running(copying))

        rows = zip(slices.local.tolist(), slices.remote.tolist(), slices.lengths.tolist(), strict=True)
        for index, (local, remote, length) in enumerate(rows):
            at_s = kernel.random.uniform(start_s, end_s)
            if fails or is_late:
                if not effect.is_write and at_s >= reported_s:
                    continue  # a reader's memory is left alone once it has been notified
                if effect.is_write:
                    if kernel.chance(0.3):
                        continue
                    # Already sent, it lands whatever happened to the sender.
                    at_s = min(at_s, reported_s + kernel.random.uniform(0, faults.late_write_s))
            elif effect.is_write:
                at_s = min(at_s, self.process.clock.true_s(reported_s))  # its clock may be fast
            action = lambda i=index, a=local, b=remote, n=length: copy_when_both_run(i, a, b, n)  # noqa: E731
            kernel.after(at_s if effect.is_write else self.process.clock.true_s(at_s), action)

        def report() -> None:
            has_time = self.now < effect.deadline
            if not (fails or is_late) and num_left and segment.is_alive:
                if has_time:  # the node is stopped: it may continue until no time is left
                    wait_s = min(effect.deadline - self.now, segment.process.stopped_s + 1e-6)
                    self.process.after(wait_s, report)
                else:
                    give_up("timed_out")
            elif fails or is_late or not segment.is_alive:
                give_up("timed_out" if is_late else reason)
            else:
                ended(SlicesMoved(np.array(sums, dtype=np.uint32), "", self.now))

        def give_up(reason: str) -> None:
            nonlocal is_reported
            is_reported = True
            ended(SlicesMoved(None, reason, self.now))

        self.process.after(reported_s, report)

    def _delay(self, peer: str) -> float:
        return self.cluster.network.delay_s(self.name, peer)
