"""The store's cluster on the kernel: a master, nodes and clients made of the cores that ship.

Simulated are only the shells: a connection carries encoded messages, a node's pool is a bytearray,
a transfer copies slice by slice at instants of its own, so that readers can see torn objects and
writes can land after their writer gave up.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np

from mooncake.errors import DeadlineExceeded, PeerLost
from mooncake.machine import Wake
from mooncake.rpc.wire import Failure, decoder_for, error_of
from mooncake.sim.checkers import Checkers
from mooncake.sim.faults import Faults
from mooncake.sim.kernel import Kernel, Process, SimDriver
from mooncake.sim.links import End, Network, over_the_wire
from mooncake.store import membership
from mooncake.store import messages as m
from mooncake.store.effects import ConnectionLost, Effect, Event, Keep, Received, Reply
from mooncake.store.master import Master
from mooncake.store.membership import Membership
from mooncake.store.operations import Answer, Ask, Move, Moved, Open, Operation, Operations, Pause, Slices
from mooncake.store.records import decode, encode
from mooncake.store.settings import MasterSettings

MASTER = "master"
NODE_ADDRESS = 1 << 30
"""Where a node's pool begins in its address space: far from zero, so that offsets are no addresses."""

_requests = decoder_for(m.REQUESTS)
_replies = decoder_for(m.REPLIES)

_PRIME = 1_000_003
_MASK = 0xFFFFFFFF


def checksum(data: bytes) -> int:
    """A polynomial hash: as combinable as a CRC, in one line."""
    value = len(data) and 1
    for byte in data:
        value = (value * _PRIME + byte + 1) & _MASK
    return value


def combine(a: int, b: int, length_b: int) -> int:
    """``checksum(x + y)`` from those of x and y."""
    # b = P^n + rest, for the leading 1; a * P^n + rest is wanted.
    power = pow(_PRIME, length_b, 1 << 32)
    return (a * power + b - power) & _MASK


class SimMaster:
    """One life of the master process."""

    def __init__(self, cluster: Cluster) -> None:
        self.process = Process(cluster.kernel, MASTER)
        self.master = Master(cluster.settings, cluster.kernel.random.getrandbits(40) << 20)
        self._cluster = cluster
        if cluster.faults.has_oplog:
            records, _ = decode(bytes(cluster.oplog))
            self.master.restore(records, cluster.kernel.now)
            cluster.oplog[:] = encode(self.master.snapshot())
            self.master.check()
        self._driver: SimDriver[Event, Effect] = SimDriver(self.process, self.master, self._perform)
        self._driver.after_step = lambda: cluster.checkers.master_stepped(self.master)
        cluster.network.listen(MASTER, self.process, self._accept)

    def _accept(self, end: End) -> None:
        def received(frame: tuple[int, msgspec.Struct]) -> None:
            request_id, message = frame
            self._driver.post(Received((end, request_id), end, message))

        end.on_message = received
        end.on_closed = lambda reason: self._driver.post(ConnectionLost(end))

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            end, request_id = effect.origin
            end.send((request_id, over_the_wire(effect.message, _replies)))
        elif isinstance(effect, Keep):
            self._cluster.oplog += encode(effect.records)
        else:
            fields = {name: value for name, value in effect.fields.items() if name != "host"}
            self._cluster.kernel.tell(f"master: {effect.event} {fields}")


class SimNode:
    """One life of a node: a pool of memory and its membership."""

    def __init__(self, cluster: Cluster, name: str, host: str, size_bytes: int) -> None:
        self._cluster = cluster
        kernel = cluster.kernel
        self.name = name
        self.epoch = kernel.random.getrandbits(32)
        self.process = Process(kernel, name)
        self.memory = bytearray(size_bytes)
        core = Membership(
            name, self.epoch, host, NODE_ADDRESS, size_bytes, b"", Random(kernel.random.getrandbits(32))
        )
        self._end: End | None = None
        self._attempt = 0
        self._driver: SimDriver[membership.Event, membership.Effect] = SimDriver(
            self.process, core, self._perform
        )
        self._driver.post(Wake())

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    def read(self, address: int, length: int) -> bytes:
        start = address - NODE_ADDRESS
        assert start >= 0 and start + length <= len(self.memory), (address, length)
        return bytes(self.memory[start : start + length])

    def write(self, address: int, data: bytes) -> None:
        start = address - NODE_ADDRESS
        assert start >= 0 and start + len(data) <= len(self.memory), (address, len(data))
        self.memory[start : start + len(data)] = data

    def _perform(self, effect: membership.Effect) -> None:
        if isinstance(effect, membership.Connect):
            self._connect()
        elif isinstance(effect, membership.Disconnect):
            self._attempt += 1
            if self._end is not None:
                self._end.on_closed = None
                self._end.close()
                self._end = None
        elif isinstance(effect, membership.Send):
            assert self._end is not None
            self._end.send((0, over_the_wire(effect.message, _requests)))
        elif isinstance(effect, membership.Note):
            self._cluster.kernel.tell(f"{self.name}: {effect.event} {effect.fields}")

    def _connect(self) -> None:
        self._attempt += 1
        attempt = self._attempt

        def opened(end: End) -> None:
            if attempt != self._attempt:
                end.close()
                return
            self._end = end
            end.on_message = lambda frame: self._driver.post(membership.Answered(frame[1]))
            end.on_closed = closed
            self._driver.post(membership.Opened())

        def closed(reason: str) -> None:
            if attempt == self._attempt:
                self._end = None
                self._driver.post(membership.Closed(reason))

        self._cluster.network.connect(self.process, MASTER, opened, closed)


class SimClient:
    """A client process: runs operations on virtual time."""

    def __init__(self, cluster: Cluster, name: str, host: str) -> None:
        self.cluster = cluster
        self.kernel = cluster.kernel
        self.name = name
        self.process = Process(cluster.kernel, name)
        joined = combine if cluster.faults.has_checksums else lambda a, b, length_b: 0
        self.operations = Operations(host, joined, cluster.kernel.random.getrandbits(62))
        self.memory = bytearray(1 << 20)
        self._allocated = 0
        self._end: End | None = None
        self._is_connecting = False
        self._waiting: dict[int, Callable[[Any], None]] = {}
        """Request id -> what to do with the reply; with None when the connection is lost."""
        self._queued: list[tuple[int, Any]] = []
        self._last_id = 0

    def allocate(self, length: int) -> int:
        """An address in this client's memory, in turn; old content is overwritten after a while."""
        if self._allocated + length > len(self.memory):
            self._allocated = 0
        self._allocated += length
        return self._allocated - length

    def run(
        self, operation: Operation[Any], deadline: float, done: Callable[[Any, Exception | None], None]
    ) -> None:
        """Run to the end, then ``done(result, error)``. The checkers see to it that the end comes."""
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

    def _perform(self, effect: Ask | Open | Move | Pause, resume: Callable[[Any], None]) -> None:
        if isinstance(effect, Ask):
            self._ask(effect, resume)
        elif isinstance(effect, Move):
            self._move(effect, resume)
        elif isinstance(effect, Open):
            node = self.cluster.nodes.get(effect.segment)
            is_there = node is not None and node.is_alive and node.epoch == effect.epoch
            # As in transfer, opening connects to nobody yet.
            self.process.after(0.0, lambda: resume(node if is_there else None))
        else:
            self.process.after(effect.seconds, lambda: resume(None))

    # Asking the master

    def _ask(self, effect: Ask, resume: Callable[[Any], None]) -> None:
        asked_at = self.kernel.now
        self._last_id += 1
        request_id = self._last_id

        def answered(reply: Any) -> None:
            timer.cancel()
            now = self.kernel.now
            if reply is None:
                resume(Answer(None, PeerLost("lost the master"), asked_at, now))
            elif isinstance(reply, Failure):
                resume(Answer(None, error_of(reply, "the master"), asked_at, now))
            else:
                resume(Answer(reply, None, asked_at, now))

        def too_late() -> None:
            del self._waiting[request_id]
            error = DeadlineExceeded("the master didn't answer")
            resume(Answer(None, error, asked_at, self.kernel.now))

        timer = self.process.after(effect.deadline - asked_at, too_late)
        self._waiting[request_id] = answered
        frame = (request_id, over_the_wire(effect.message, _requests))
        if self._end is not None:
            self._end.send(frame)
        else:
            self._queued.append(frame)
            self._connect()

    def _connect(self) -> None:
        if self._is_connecting:
            return
        self._is_connecting = True

        def opened(end: End) -> None:
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

        self.cluster.network.connect(self.process, MASTER, opened, refused)

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

    def _move(self, effect: Move, resume: Callable[[Any], None]) -> None:
        if self.kernel.now >= effect.deadline:
            late = [Moved(None, "timed_out", self.kernel.now) for _ in effect.transfers]
            self.process.after(0.0, lambda: resume(late))
            return
        outcomes: list[Moved | None] = [None] * len(effect.transfers)

        def ended(number: int, moved: Moved) -> None:
            outcomes[number] = moved
            if all(outcome is not None for outcome in outcomes):
                resume(list(outcomes))

        for number, slices in enumerate(effect.transfers):
            self._transfer(effect, slices, lambda moved, number=number: ended(number, moved))  # type: ignore[misc]

    def _transfer(self, effect: Move, slices: Slices, ended: Callable[[Moved], None]) -> None:
        """Copy each slice at an instant of its own; fail, be slow, or write late as the faults say."""
        node: SimNode = slices.handle
        faults, kernel = self.cluster.faults, self.kernel
        took_s = 0.001 * kernel.random.uniform(0.1, 2.0)
        if kernel.chance(faults.slow_transfer_chance):
            took_s = kernel.random.uniform(0.0, faults.slow_transfer_s)
        start_s = self._delay(node.name)
        fails = kernel.chance(faults.transfer_failure_chance)
        end_s = start_s + took_s
        limit_s = max(0.0, effect.deadline - kernel.now)
        is_late = end_s > limit_s
        reported_s = min(end_s, limit_s)
        sums: list[int] = [0] * len(slices.lengths)

        def copy(index: int, local: int, remote: int, length: int) -> None:
            if not node.is_alive:
                return
            if effect.is_write:
                data = bytes(self.memory[local : local + length])
                node.write(remote, data)
            elif self.process.is_alive:
                data = node.read(remote, length)
                self.memory[local : local + length] = data
            else:
                return
            sums[index] = checksum(data) if faults.has_checksums else 0

        rows = zip(slices.local.tolist(), slices.remote.tolist(), slices.lengths.tolist(), strict=True)
        for index, (local, remote, length) in enumerate(rows):
            at_s = kernel.random.uniform(start_s, end_s)
            if fails or is_late:
                if not effect.is_write and at_s >= reported_s:
                    continue  # a reader's memory is left alone once it has been told
                if effect.is_write:
                    if kernel.chance(0.3):
                        continue
                    # Already sent, it lands whatever became of the sender.
                    at_s = min(at_s, reported_s + kernel.random.uniform(0, faults.late_write_s))
            action = lambda i=index, a=local, b=remote, n=length: copy(i, a, b, n)  # noqa: E731
            (kernel if effect.is_write else self.process).after(at_s, action)

        def report() -> None:
            if fails or is_late or not node.is_alive:
                ended(Moved(None, "timed_out" if is_late else "peer_lost", kernel.now))
            else:
                ended(Moved(np.array(sums, dtype=np.uint32), "", kernel.now))

        self.process.after(reported_s, report)

    def _delay(self, peer: str) -> float:
        return self.cluster.network.delay_s(self.name, peer)


class Cluster:
    """Everything that runs under one seed."""

    def __init__(self, kernel: Kernel, faults: Faults, settings: MasterSettings) -> None:
        self.kernel = kernel
        self.faults = faults
        self.settings = settings
        self.network = Network(kernel, faults)
        self.oplog = bytearray()
        """What the master wrote down, if it does; outlives its process."""
        self.nodes: dict[str, SimNode] = {}
        self.clients: dict[str, SimClient] = {}
        self.checkers = Checkers(self)
        self.master = SimMaster(self)

    def start_master(self) -> None:
        self.kernel.tell("master starts")
        self.master = SimMaster(self)
        self.checkers.master_started()

    def start_node(self, name: str, host: str, size_bytes: int) -> None:
        self.kernel.tell(f"{name} starts")
        self.nodes[name] = SimNode(self, name, host, size_bytes)

    def start_client(self, name: str, host: str) -> SimClient:
        self.kernel.tell(f"{name} starts")
        self.clients[name] = SimClient(self, name, host)
        return self.clients[name]
