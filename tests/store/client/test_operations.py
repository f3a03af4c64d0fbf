# SPDX-License-Identifier: Apache-2.0
"""The operations against a real master, with all effects performed, or failed, by the test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.errors import DeadlineExceeded, InvalidArgument, PeerLost, Refusal
from mooncake.sim.faults.nodes import checksum, combine
from mooncake.store import messages as m
from mooncake.store.client.effects import (
    CallMaster,
    Effect,
    MasterReply,
    MoveSlices,
    OpenSegment,
    Operation,
    Pause,
    SlicesMoved,
)
from mooncake.store.client.grants import PutGrant, ReadGrant
from mooncake.store.client.operations import Operations
from mooncake.store.ha.leader_search import DOUBT_S
from mooncake.store.master.objects import DEFAULT_POLICY
from mooncake.types import Tier
from tests.store.conftest import SETTINGS, Voice

BASE = 1 << 20
"""Address at which ``Voice.mount`` places a node's memory."""


class World:
    """Performs effects on a master, nodes' memories and local memory; injects failures on request."""

    def __init__(self, **pools: int) -> None:
        self.voice = Voice(SETTINGS)
        self.nodes = {name: bytearray(size) for name, size in (pools or {"a": 65536}).items()}
        for name, memory in self.nodes.items():
            self.voice.mount(name, len(memory))
        self.local = bytearray(1 << 20)
        self.operations = Operations("h", combine, 1000)
        self.sent: list[msgspec.Struct] = []
        self.moves: list[MoveSlices] = []
        self.before_ask: Callable[[msgspec.Struct], PeerLost | None] = lambda message: None
        self.after_ask: Callable[[msgspec.Struct], PeerLost | None] = lambda message: None
        self.before_move: Callable[[str], str] = lambda segment: ""
        self.slow_move_s = 0.0
        self.has_deadlines = False
        """Send nothing after the deadline of a request."""
        self.damaged_moves = 0
        """Number of upcoming reads that get a flipped bit."""

    @property
    def deadline(self) -> float:
        return self.voice.now + 5.0

    def run(self, operation: Operation[Any]) -> Any:
        outcome: Any = None
        while True:
            try:
                effect = operation.send(outcome)
                try:
                    outcome = self._perform(effect)
                except Exception as error:
                    outcome = self._perform(operation.throw(error))
            except StopIteration as stop:
                return stop.value

    def _perform(self, effect: Effect) -> Any:
        if isinstance(effect, CallMaster):
            return self._ask(effect)
        if isinstance(effect, OpenSegment):
            return effect.segment if effect.segment in self.nodes else None
        if isinstance(effect, Pause):
            self.voice.now += effect.seconds_from(self.voice.now)
            return None
        assert isinstance(effect, MoveSlices), "all memory is shared, so no bytes travel in messages"
        if self.voice.now >= effect.deadline:
            return [SlicesMoved(None, "timed_out", self.voice.now) for _ in effect.transfers]
        self.moves.append(effect)
        self.voice.now += self.slow_move_s
        return [self._move(effect, slices) for slices in effect.transfers]

    def _ask(self, effect: CallMaster) -> MasterReply:
        asked_at = self.voice.now
        if self.has_deadlines and asked_at >= effect.deadline:
            return MasterReply(None, DeadlineExceeded("nothing was sent"), asked_at, asked_at)
        self.sent.append(effect.message)
        error = self.before_ask(effect.message)
        if error is None:
            reply = self.voice.say(effect.message)
            error = self.after_ask(effect.message)
            if error is None:
                return MasterReply(reply, None, asked_at, self.voice.now)
        return MasterReply(None, error, asked_at, self.voice.now)

    def _move(self, effect: MoveSlices, slices: Any) -> SlicesMoved:
        reason = self.before_move(slices.handle)
        if reason:
            return SlicesMoved(None, reason, self.voice.now)
        memory, sums = self.nodes[slices.handle], []
        for local, remote, length in zip(
            slices.local.tolist(), slices.remote.tolist(), slices.lengths.tolist(), strict=True
        ):
            at = remote - BASE
            if effect.is_write:
                memory[at : at + length] = self.local[local : local + length]
            else:
                self.local[local : local + length] = memory[at : at + length]
                if self.damaged_moves:
                    self.local[local] ^= 1
            sums.append(checksum(bytes(self.local[local : local + length])))
        self.damaged_moves -= not effect.is_write and self.damaged_moves > 0
        checksums = np.array(sums if slices.is_checked else [], dtype=np.uint32)
        return SlicesMoved(checksums, "", self.voice.now)

    def look(self) -> int:
        """Run the checks that the master requests of the nodes."""

        def is_right(entry: m.SegmentEntry, segment: str) -> bool:
            pieces = range(entry.offset, entry.offset + entry.size_bytes, entry.chunk_bytes)
            end = entry.offset + entry.size_bytes
            memory = self.nodes[segment]
            sums = [checksum(bytes(memory[at : min(at + entry.chunk_bytes, end)])) for at in pieces]
            return np.array(sums, dtype="<u4").tobytes() == entry.checksums

        return self.voice.look(is_right)

    def put(
        self,
        *values: bytes,
        chunk_bytes: int = 100,
        policy: m.PutPolicy = DEFAULT_POLICY,
        replace: bool = False,
    ) -> list[Refusal | None]:
        """Put values under keys k0, k1, ..."""
        addresses, at = [], 0
        for value in values:
            self.local[at : at + len(value)] = value
            addresses.append(at)
            at += len(value)
        keys = [f"k{i}" for i in range(len(values))]
        sizes = [len(value) for value in values]
        result = self.run(
            self.operations.put(keys, addresses, sizes, chunk_bytes, self.deadline, policy, replace=replace)
        )
        assert isinstance(result, list)
        return result

    def get(self, *keys: str) -> list[bytes | None]:
        places = [500_000 + 1000 * i for i in range(len(keys))]
        sizes = self.run(self.operations.get_into(keys, places, [1000] * len(keys), self.deadline))
        return [
            None if size is None else bytes(self.local[at : at + size])
            for at, size in zip(places, sizes, strict=True)
        ]

    def open_read(self, key: str) -> ReadGrant:
        grant = self.run(self.operations.open_reads([key], self.deadline))[0]
        assert isinstance(grant, ReadGrant)
        return grant

    def start_put(self, key: str, size: int, chunk_bytes: int) -> PutGrant:
        grant = self.run(self.operations.start_puts([key], [size], [chunk_bytes], self.deadline))[0]
        assert isinstance(grant, PutGrant)
        return grant


def test_a_put_value_is_read_back() -> None:
    world = World()
    values = [bytes([i]) * (i * 90 + 1) for i in range(5)]
    assert world.put(*values) == [None] * 5
    assert world.get("k4", "missing", "k0") == [values[4], None, values[0]]


def test_a_broken_connection_only_costs_a_repetition() -> None:
    world = World()
    rounds = {"before": 2, "after": 2}

    def lose(side: str) -> Callable[[msgspec.Struct], PeerLost | None]:
        def maybe(message: msgspec.Struct) -> PeerLost | None:
            rounds[side] -= 1
            return PeerLost("gone") if rounds[side] >= 0 else None

        return maybe

    world.before_ask, world.after_ask = lose("before"), lose("after")
    assert world.put(b"value") == [None]
    assert world.get("k0") == [b"value"]
    starts = [message for message in world.sent if isinstance(message, m.PutStart)]
    assert len(starts) == 5 and len({start.put_id for start in starts}) == 1
    assert world.operations.counts.repeated_requests == 4
    assert world.voice.allocated_bytes == 64


def test_a_reservation_counts_from_the_first_request() -> None:
    world = World()
    world.after_ask = lambda message: PeerLost("gone") if len(world.sent) == 1 else None
    began = world.voice.now
    grant = world.start_put("k", 10, 10)
    assert world.voice.now > began
    assert grant.expires_at == began + SETTINGS.put_s


def test_an_operation_ends_when_the_master_stays_away() -> None:
    world = World()
    world.before_ask = lambda message: PeerLost("gone")
    with pytest.raises(DeadlineExceeded, match="gone"):
        world.get("k")
    assert world.voice.now <= 5.0


def test_a_put_looks_for_another_node_when_one_cannot_be_reached() -> None:
    world = World(a=65536, b=4096)
    world.before_move = lambda segment: "connection refused" if segment == "a" else ""
    assert world.put(b"one", b"two") == [None, None]
    found = world.voice.find("k0")
    assert found is not None and found.replicas[0].segment == "b"
    world.before_move = lambda segment: ""
    assert world.get("k0", "k1") == [b"one", b"two"]


def test_when_no_node_can_be_reached_the_put_is_refused() -> None:
    world = World(a=4096)
    world.before_move = lambda segment: "connection refused"
    refusal = world.put(b"one")[0]
    assert refusal is not None and refusal.code == "no_space"
    assert world.voice.master.objects.writing == {}
    assert world.get("k0") == [None]


@pytest.mark.parametrize("sizes", [[50], [150], [50, 50]], ids=str)
def test_a_put_that_raises_releases_its_reservations(sizes: list[int]) -> None:
    """Another put of these keys would be refused until the deadline of the first."""

    def fail(segment: str) -> str:
        raise InvalidArgument("local[0]", "memory", "registered memory")

    world = World()
    world.before_move = fail
    values = [bytes(size) for size in sizes]
    with pytest.raises(InvalidArgument):
        world.put(*values)
    assert world.voice.master.objects.writing == {}
    world.before_move = lambda segment: ""
    assert world.put(*values) == [None] * len(values)


@pytest.mark.parametrize("num_values", [1, 2])
def test_a_put_whose_segment_is_not_described_releases_its_reservations(num_values: int) -> None:
    world = World()
    world.before_ask = lambda message: PeerLost("gone") if isinstance(message, m.DescribeSegments) else None
    with pytest.raises(DeadlineExceeded):
        world.put(*[b"value"] * num_values)
    assert world.voice.master.objects.writing == {}


def test_a_batch_over_two_nodes_moves_concurrently() -> None:
    world = World(a=4096, b=4096)
    values = [bytes([i]) * 900 for i in range(6)]
    assert world.put(*values) == [None] * 6
    assert [len(move.transfers) for move in world.moves] == [2]
    assert world.get(*[f"k{i}" for i in range(6)]) == values
    assert [len(move.transfers) for move in world.moves] == [2, 2]


def test_corrupt_bytes_are_a_miss_and_are_reported_to_the_master() -> None:
    world = World()
    world.put(b"x" * 250, b"y" * 250)
    world.nodes["a"][120] ^= 1
    assert world.get("k0", "k1") == [None, b"y" * 250]
    assert world.operations.counts.checksum_mismatches == 2, "it was read twice"
    assert [type(message) for message in world.sent][-1] is m.Corrupt
    assert world.voice.find("k0") is not None and world.look() == 1, "its own node decides"
    assert world.voice.find("k0") is None


def test_bytes_corrupted_in_transit_are_read_again_without_a_report() -> None:
    """After one damaged transfer there is no miss and no report, and no replica is dropped."""
    world = World()
    world.put(b"x" * 250)
    num_sent = len(world.sent)
    world.damaged_moves = 1
    assert world.get("k0") == [b"x" * 250]
    assert world.operations.counts.checksum_mismatches == 1
    assert [type(message) for message in world.sent[num_sent:]] == [m.LookupObjects]


def test_a_reader_with_bad_memory_costs_no_replicas() -> None:
    """It reports every replica as corrupt, but the replicas in memory and elsewhere stay."""
    world = two()
    put_twice(world, b"value")
    for _ in range(3):
        world.damaged_moves = 1000
        assert world.get("k0") == [None]
        assert world.voice.where("k0") == ["a", "b"], "not because of one reader's report"
        world.look()
    world.damaged_moves = 0
    assert world.voice.where("k0") == ["a", "b"] and world.get("k0") == [b"value"]
    (reporter,) = world.voice.say(m.GetMasterStatus()).reporters
    assert (reporter.num_reports, reporter.num_refuted, reporter.num_confirmed) == (6, 6, 0)


def stop_for_a_lease(world: World, num_times: int) -> None:
    """Let as many transfers end after the lease, as on a busy host; the nodes send their heartbeats."""
    left = iter(range(num_times))

    def wait(segment: str) -> str:
        if next(left, None) is not None:
            world.voice.keep_alive(SETTINGS.lease_s, *world.nodes)
        return ""

    world.before_move = wait


def sent_types(world: World) -> list[type]:
    return [type(message) for message in world.sent]


@pytest.mark.parametrize("num_keys", [1, 3])
@pytest.mark.parametrize("size", [50, 250])
def test_what_arrives_after_its_lease_is_leased_and_read_again(num_keys: int, size: int) -> None:
    world = World()
    values = [bytes([65 + number]) * size for number in range(num_keys)]
    world.put(*values)
    keys, places = [f"k{number}" for number in range(num_keys)], [500_000 + 1000 * i for i in range(num_keys)]
    world.get(*keys)
    world.local[500_000:510_000] = bytes(10_000)
    world.sent.clear()
    stop_for_a_lease(world, 2)
    sizes = world.run(world.operations.get_into(keys, places, [1000] * num_keys, world.voice.now + 100))
    assert sizes == [size] * num_keys
    assert [bytes(world.local[at : at + size]) for at in places] == values
    assert sent_types(world) == [m.LookupObjects] * 3, "the segment is not described again"
    assert world.operations.counts.expired_leases == 2 * num_keys
    assert world.operations.counts.checksum_mismatches == 0


def test_an_object_whose_lease_ended_before_the_read_began_is_leased_again() -> None:
    world = World()
    world.put(b"x" * 250)
    grant = world.open_read("k0")
    world.voice.keep_alive(SETTINGS.lease_s + 1)
    world.moves.clear()
    columns = ([0, 100], [6000, 7000], [100, 150])
    assert world.run(world.operations.read_ranges([grant], *columns, world.deadline)) == [True]
    assert bytes(world.local[6000:6100] + world.local[7000:7150]) == b"x" * 250
    assert len(world.moves) == 1 and grant.expires_at > world.voice.now


@pytest.mark.parametrize("event", ["removed", "replaced", "master lost"])
def test_what_cannot_be_leased_again_is_a_miss_and_the_others_of_the_batch_are_read(event: str) -> None:
    world = World()
    world.put(b"first", b"other")
    grants = [world.open_read("k0")]
    world.voice.keep_alive(SETTINGS.lease_s - 1)
    grants.append(world.open_read("k1"))
    world.voice.keep_alive(2)
    if event == "removed":
        world.voice.remove("k0")
    elif event == "replaced":
        assert world.put(b"again", replace=True) == [None]
    else:
        world.before_ask = lambda message: PeerLost("gone")
    until, num_moves = world.deadline, len(world.moves)
    assert world.run(world.operations.read_whole(grants, [6000, 7000], until)) == [False, True]
    assert world.local[7000:7005] == b"other"
    assert len(world.moves) == num_moves + 1 and world.voice.now <= until


def test_an_object_that_takes_longer_than_its_lease_every_time_is_a_miss_at_the_deadline() -> None:
    world = World()
    world.put(b"value")
    grant, until = world.open_read("k0"), world.voice.now + 3.5 * SETTINGS.lease_s
    num_moves = len(world.moves)
    stop_for_a_lease(world, 100)
    world.nodes["a"][0] ^= 1
    assert world.run(world.operations.read_whole([grant], [0], until)) == [False]
    assert until <= world.voice.now < until + SETTINGS.lease_s
    assert len(world.moves) == num_moves + 4 and world.operations.counts.expired_leases == 4
    assert world.operations.counts.checksum_mismatches == 0, "late bytes prove nothing"


def test_a_node_that_answers_nothing_costs_two_leases_and_not_the_whole_deadline() -> None:
    world = World()
    world.put(b"value")
    grant, began = world.open_read("k0"), world.voice.now
    num_moves = len(world.moves)

    def wait_in_vain(segment: str) -> str:
        world.voice.keep_alive(SETTINGS.lease_s, *world.nodes)
        return "no answer"

    world.before_move = wait_in_vain
    assert world.run(world.operations.read_whole([grant], [0], began + 10 * SETTINGS.lease_s)) == [False]
    assert len(world.moves) == num_moves + 2
    assert 2 * SETTINGS.lease_s <= world.voice.now - began < 3 * SETTINGS.lease_s
    world.before_move = lambda segment: ""
    world.sent.clear()
    assert world.get("k0") == [b"value"]
    assert m.DescribeSegments in sent_types(world), "how the segment is reached was forgotten"


def test_a_replica_elsewhere_is_read_when_the_first_one_left_with_the_lease() -> None:
    world = two()
    put_twice(world, b"value")
    grant = world.open_read("k0")
    assert grant.replica.segment == "a"
    world.voice.keep_alive(SETTINGS.lease_s + 1, "a", "b")
    assert world.run(world.operations.drop_replicas(["k0"], "a", world.deadline)) == [True]
    assert world.run(world.operations.read_whole([grant], [6000], world.deadline)) == [True]
    assert world.local[6000:6005] == b"value" and grant.replica.segment == "b"


def test_verifying_late_does_not_read_one_replica_instead_of_another() -> None:
    world = two()
    put_twice(world, b"value")
    world.nodes["b"][0] ^= 1
    grants = [world.open_read("k0")]
    world.voice.keep_alive(SETTINGS.lease_s + 1, "a", "b")
    world.moves.clear()
    assert world.run(world.operations.verify(grants, [6000], world.deadline)) == [False]
    assert [part.handle for move in world.moves for part in move.transfers] == ["a", "b", "b"]


def test_a_write_that_ends_after_the_deadline_does_not_count() -> None:
    world = World()
    grant = world.start_put("k", 100, 100)
    world.slow_move_s = SETTINGS.put_s
    refusals = world.run(world.operations.write_ranges([grant], [0], [0], [100], world.deadline + 100))
    assert refusals[0].code == "expired"
    assert world.run(world.operations.end_puts([grant], world.deadline))[0].code == "expired"
    assert world.voice.find("k") is None


def test_a_failed_read_is_a_miss_and_the_segment_is_described_again() -> None:
    world = World()
    world.put(b"value")
    world.before_move = lambda segment: "reset"
    assert world.get("k0") == [None]
    world.before_move = lambda segment: ""
    assert world.get("k0") == [b"value"]
    assert sum(isinstance(message, m.DescribeSegments) for message in world.sent) == 2


def test_a_segment_that_cannot_be_opened_is_a_miss_or_a_refusal() -> None:
    world = World(a=4096)
    world.put(b"value")
    other = Operations("h", combine, 5)
    del world.nodes["a"]
    assert world.run(other.get_into(["k0"], [0], [100], world.deadline)) == [None]
    refusal = world.run(other.put(["new"], [0], [10], 10, world.deadline))[0]
    assert refusal.code == "no_space"


def test_large_batches_are_split() -> None:
    world = World(a=1 << 20)
    count = m.MAX_KEYS + 5
    keys = [f"k{i}" for i in range(count)]
    assert (
        world.run(world.operations.put(keys, [0] * count, [8] * count, 8, world.deadline)) == [None] * count
    )
    assert world.run(world.operations.exists(keys, world.deadline)) == [True] * count
    assert world.run(world.operations.remove(keys, True, world.deadline)) == [True] * count


def test_an_object_larger_than_its_buffer_is_an_error() -> None:
    world = World()
    world.put(b"x" * 200)
    with pytest.raises(InvalidArgument, match="200 bytes"):
        world.run(world.operations.get_into(["k0"], [0], [199], world.deadline))


def test_a_key_that_exists_is_neither_granted_nor_refused() -> None:
    world = World()
    world.put(b"value")
    assert world.run(world.operations.start_puts(["k0"], [1], [1], world.deadline)) == [None]
    assert world.put(b"other") == [None]
    assert world.get("k0") == [b"value"]


def test_a_put_avoids_as_many_unreachable_segments_as_a_master_accepts() -> None:
    world = World()
    avoid = [f"n{number}" for number in range(m.MAX_AVOIDED + 1)]
    world.run(world.operations.start_puts(["k0"], [1], [1], world.deadline, avoid))
    (start,) = [message for message in world.sent if isinstance(message, m.PutStart)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=m.PutStart).avoid == avoid[1:]


def test_an_incomplete_put_is_given_up() -> None:
    world = World()
    grant = world.start_put("k", 250, 100)
    world.run(world.operations.write_ranges([grant], [0, 200], [0, 0], [100, 50], world.deadline))
    refusal = world.run(world.operations.end_puts([grant], world.deadline))[0]
    assert refusal == Refusal(
        "incomplete", "'k': 1 chunks were not written, or only in part since they were complete"
    )
    assert world.voice.master.objects.writing == {}


def test_an_aborted_put_cannot_be_ended() -> None:
    world = World()
    grant = world.start_put("k", 10, 10)
    world.run(world.operations.abort_puts([grant], world.deadline))
    assert world.run(world.operations.end_puts([grant], world.deadline))[0].code == "aborted"


@pytest.mark.parametrize(("offset", "length"), [(0, 251), (250, 1), (300, 0), (2**63, 2**63)])
def test_ranges_stay_within_the_object(offset: int, length: int) -> None:
    world = World()
    grant = world.start_put("k", 250, 100)
    with pytest.raises(InvalidArgument, match="within its 250 bytes"):
        world.run(world.operations.write_ranges([grant], [offset], [0], [length], world.deadline))


def test_columns_must_fit_together() -> None:
    world = World()
    grants = [world.start_put("k", 250, 100), world.start_put("l", 250, 100)]
    for columns in (([0, 1, 2],) * 3, ([0, 0], [0], [0, 0])):
        with pytest.raises(InvalidArgument, match="columns"):
            world.run(world.operations.write_ranges(grants, *columns, world.deadline))


def test_a_part_of_a_chunk_cannot_be_read_alone() -> None:
    world = World()
    world.put(b"x" * 250)
    grant = world.open_read("k0")
    for offsets, lengths in (([10], [90]), ([0], [99]), ([200], [49]), ([0, 40], [50, 60])):
        with pytest.raises(InvalidArgument, match="whole chunks"):
            world.run(
                world.operations.read_ranges([grant], offsets, [0] * len(offsets), lengths, world.deadline)
            )


def test_a_chunk_may_be_read_in_parts_to_different_places() -> None:
    world = World()
    value = Random(1).randbytes(250)
    world.put(value)
    grant = world.open_read("k0")
    good = world.run(
        world.operations.read_ranges(
            [grant], [200, 120, 100], [5000, 7000, 6000], [50, 80, 20], world.deadline
        )
    )
    assert good == [True]
    assert world.local[5000:5050] == value[200:]
    assert world.local[6000:6020] + world.local[7000:7080] == value[100:200]
    world.nodes["a"][150] ^= 1
    good = world.run(
        world.operations.read_ranges([grant], [120, 100], [7000, 6000], [80, 20], world.deadline)
    )
    assert good == [False]


def test_a_lease_counts_from_the_request_however_late_the_reply_arrives() -> None:
    """The master counts from an instant between request and reply, so only the request time is safe."""
    world = World()
    world.put(b"value")

    def late(message: msgspec.Struct) -> None:
        world.voice.now += 2.0

    world.after_ask = late
    began = world.voice.now
    grant = world.open_read("k0")
    assert world.voice.now == began + 2.0 and grant.expires_at == began + SETTINGS.lease_s
    began = world.voice.now
    assert world.run(world.operations.renew([grant], world.deadline)) == [True]
    assert grant.expires_at == began + SETTINGS.lease_s


def test_renewing_moves_the_end_of_the_lease() -> None:
    world = World()
    world.put(b"value")
    grant = world.open_read("k0")
    before = grant.expires_at
    world.voice.keep_alive(3)
    assert world.run(world.operations.renew([grant], world.deadline)) == [True]
    assert grant.expires_at == before + 3
    world.voice.remove("k0", force=True)
    assert world.run(world.operations.renew([grant], world.deadline)) == [False]
    assert grant.expires_at == before + 3


def test_more_leases_than_one_message_names_are_renewed_in_several() -> None:
    world = World()
    world.put(b"value")
    grant = world.open_read("k0")
    grants = [dataclasses.replace(grant) for _ in range(m.MAX_KEYS + 1)]
    world.voice.keep_alive(3)
    assert world.run(world.operations.renew(grants, world.deadline)) == [True] * len(grants)
    assert {one.expires_at for one in grants} == {grant.expires_at + 3}
    assert sent_types(world)[-2:] == [m.Renew, m.Renew]


@given(
    size=st.integers(1, 400),
    chunk_bytes=st.integers(1, 150),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    seed=st.integers(0, 2**32),
)
def test_parts_in_any_order_make_the_object(size: int, chunk_bytes: int, cuts: list[int], seed: int) -> None:
    """This also holds when a part is written twice, crosses chunks, or is empty."""
    world = World()
    random = Random(seed)
    value = random.randbytes(size)
    world.local[:size] = value
    grant = world.start_put("k", size, chunk_bytes)
    borders = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = list(itertools.pairwise(borders))
    parts += random.choices(parts, k=2)
    random.shuffle(parts)
    for start, end in parts:
        columns = ([start], [start], [end - start])
        assert world.run(world.operations.write_ranges([grant], *columns, world.deadline)) == [None]
    assert world.run(world.operations.end_puts([grant], world.deadline)) == [None]
    assert world.get("k") == [value]


@given(
    chunk_bytes=st.integers(1, 20),
    writes=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40)), max_size=12),
)
def test_an_object_whose_put_is_acknowledged_has_what_was_written_last(
    chunk_bytes: int, writes: list[tuple[int, int]]
) -> None:
    """Parts and whole chunks are written over each other, each time with other bytes."""
    world = World()
    grant = world.start_put("k", 40, chunk_bytes)
    value = bytearray(40)
    for number, (start, length) in enumerate(writes, 1):
        length = min(length, 40 - start)
        value[start : start + length] = bytes([number]) * length
        world.local[:40] = value
        columns = ([start], [start], [length])
        assert world.run(world.operations.write_ranges([grant], *columns, world.deadline)) == [None]
    (refusal,) = world.run(world.operations.end_puts([grant], world.deadline))
    if refusal is None:
        assert world.get("k") == [bytes(value)]
    else:
        assert refusal.code == "incomplete" and (0, 40) not in writes[-1:]


def test_a_part_written_over_a_whole_chunk_makes_it_incomplete() -> None:
    """The checksum of the chunk's other bytes is unknown, also if they were once written as a part."""
    world = World()
    grants = [world.start_put(key, 8, 8) for key in ("whole", "part")]
    parts = [(0, 4, b"A"), (0, 8, b"B"), (4, 4, b"C"), (0, 4, b"D")]
    for grant, num_writes in zip(grants, (4, 3), strict=True):
        for start, length, content in parts[:num_writes]:
            world.local[start : start + length] = content * length
            columns = ([start], [start], [length])
            world.run(world.operations.write_ranges([grant], *columns, world.deadline))
    ended = world.run(world.operations.end_puts(grants, world.deadline))
    assert ended[0] is None and world.get("whole") == [b"DDDDCCCC"]
    assert isinstance(ended[1], Refusal) and ended[1].code == "incomplete"


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_the_simulators_checksum_combines(a: bytes, b: bytes) -> None:
    if a and b:
        assert combine(checksum(a), checksum(b), len(b)) == checksum(a + b)


# Several replicas


def two() -> World:
    """World with two nodes: ``a`` is on this host, ``b`` elsewhere."""
    world = World(a=65536)
    world.nodes["b"] = bytearray(65536)
    world.voice.mount("b", 65536, host="far")
    return world


def put_twice(world: World, *values: bytes) -> list[Refusal | None]:
    return world.put(*values, policy=m.PutPolicy(num_replicas=2))


def test_every_replica_is_written_at_once() -> None:
    world = two()
    assert put_twice(world, b"x" * 250, b"y") == [None, None]
    assert [len(move.transfers) for move in world.moves] == [2]
    assert world.nodes["a"][:250] == world.nodes["b"][:250] == b"x" * 250
    assert world.voice.where("k0") == ["a", "b"]


def test_a_replica_that_cannot_be_written_is_left_out() -> None:
    world = two()
    for number, lost in enumerate("ab"):
        world.before_move = lambda segment, lost=lost: "reset" if segment == lost else ""  # type: ignore[misc]
        keys = [f"n{number}"]
        done = world.run(
            world.operations.put(keys, [0], [5], 100, world.deadline, m.PutPolicy(num_replicas=2))
        )
        assert done == [None]
        assert world.voice.where(keys[0]) == ["b" if lost == "a" else "a"]


def test_when_no_replica_can_be_written_the_put_tries_other_segments() -> None:
    world = two()
    world.nodes["c"] = bytearray(4096)
    world.voice.mount("c", 4096, host="third")
    world.before_move = lambda segment: "" if segment == "c" else "reset"
    policy = m.PutPolicy(num_replicas=2, preferred_segments=["a", "b"])
    assert world.put(b"value", policy=policy) == [None]
    assert world.voice.where("k0") == ["c"]


def test_a_target_that_cannot_be_opened_does_not_fail_the_put() -> None:
    world = two()
    del world.nodes["b"]
    assert put_twice(world, b"value") == [None]
    assert world.voice.where("k0") == ["a"]


def test_replicas_that_differ_are_not_both_kept() -> None:
    """The source changed between two transfers: only replicas with the announced checksums stay."""
    world = two()
    move = world._move

    def changing(effect: MoveSlices, slices: Any) -> SlicesMoved:
        moved = move(effect, slices)
        world.local[0] ^= effect.is_write
        return moved

    world._move = changing  # type: ignore[method-assign]
    assert put_twice(world, b"value") == [None]
    assert world.voice.where("k0") == ["a"]


def test_a_caller_that_writes_itself_sees_one_target_and_gives_up_the_others() -> None:
    world = two()
    policy = m.PutPolicy(num_replicas=2)
    grants = world.run(world.operations.start_puts(["k"], [5], [5], world.deadline, (), policy))
    (grant,) = grants
    assert (grant.segment, grant.address, grant.replica.segment) == ("a", BASE, "a")
    world.nodes["a"][:5] = b"value"
    grant.checksums[0] = checksum(b"value")
    grant.is_written[0] = True
    assert world.run(world.operations.end_puts(grants, world.deadline)) == [None]
    assert world.voice.where("k") == ["a"] and world.get("k") == [b"value"]


def test_the_nearest_replica_is_read() -> None:
    world = two()
    put_twice(world, b"value")
    assert world.open_read("k0").replica.segment == "a"
    other = Operations("far", combine, 5)
    (grant,) = world.run(other.open_reads(["k0"], world.deadline))
    assert grant.replica.segment == "b" and [one.segment for one, _ in grant.others] == ["a"]


def test_a_replica_on_a_device_is_read_first_only_into_memory_of_that_device() -> None:
    world = two()
    world.nodes["hbm"] = bytearray(4096)
    device = m.Mount("hbm", 7, "h", BASE, 4096, b"how", 0.0, Tier.DEVICE)
    world.voice.say(device, "node hbm")
    world.voice.say(m.Heartbeat("hbm", 7), "node hbm")
    put_twice(world, b"value", b"other")
    catalog = world.voice.master.catalog
    stored = catalog.objects.readable["k0"]
    extent = catalog.add_extent(stored, catalog.segments.mounted["hbm"], world.voice.now, 1e9)
    assert extent is not None
    world.nodes["hbm"][extent.offset : extent.offset + 5] = b"value"
    catalog.complete_extent(stored, extent, world.voice.now)
    asked: list[tuple[Any, int, int]] = []

    def is_on_one_device(handle: Any, remote: int, local: int) -> bool:
        asked.append((handle, remote, local))
        return local >= 1000

    reader = Operations("h", combine, 5, is_on_one_device=is_on_one_device)
    grants = world.run(reader.open_reads(["k0", "k1"], world.deadline))
    for local, names in ((0, ["a", "hbm", "b"]), (1000, ["hbm", "a", "b"]), (0, ["a", "hbm", "b"])):
        assert world.run(reader.read_whole(grants, [local, local + 10], world.deadline)) == [True, True]
        assert world.local[local : local + 5] == b"value"
        assert [replica.segment for replica, _ in grants[0].places] == names
        assert asked.pop() == ("hbm", BASE + extent.offset, local)
    assert not asked, "nothing is asked about an object without a replica on a device"
    far = Operations("far", combine, 9, is_on_one_device=is_on_one_device)
    grants = world.run(far.open_reads(["k0"], world.deadline))
    world.run(far.read_whole(grants, [1000], world.deadline))
    assert not asked and grants[0].replica.segment == "b", "the device is another host's"


@pytest.mark.parametrize("fault", ["reset", "wrong"])
def test_the_next_replica_is_tried_when_one_fails_or_is_wrong(fault: str) -> None:
    world = two()
    values = [bytes([65 + number]) * 250 for number in range(3)]
    put_twice(world, *values)
    if fault == "wrong":
        world.nodes["a"][300] ^= 1
    else:
        world.before_move = lambda segment: "reset" if segment == "a" else ""
    first = len(world.moves)
    assert world.get("k0", "k1", "k2") == values
    others = [part.has_others for move in world.moves[first:] for part in move.transfers]
    assert others == ([True, True, False] if fault == "wrong" else [True, False])
    if fault == "wrong":
        world.look()
        assert [world.voice.where(f"k{number}") for number in range(3)] == [["a", "b"], ["b"], ["a", "b"]]
        assert sum(len(part.lengths) for part in world.moves[-1].transfers) == 3, "only the corrupt replica"
    else:
        assert world.voice.where("k1") == ["a", "b"]


def test_a_slow_read_is_cut_short_only_where_all_of_it_has_other_replicas() -> None:
    world = two()
    put_twice(world, b"x")
    world.run(world.operations.put(["alone"], [0], [5], 100, world.deadline))
    world.get("k0", "alone")
    assert [part.has_others for part in world.moves[-1].transfers] == [False]
    world.get("k0")
    assert [part.has_others for part in world.moves[-1].transfers] == [True]


def test_when_every_replica_is_corrupt_it_is_a_miss_and_all_are_dropped() -> None:
    world = two()
    put_twice(world, b"value")
    world.nodes["a"][0] ^= 1
    world.nodes["b"][0] ^= 1
    assert world.get("k0") == [None]
    assert world.operations.counts.checksum_mismatches == 4
    assert world.look() == 2 and world.voice.inspect("k0") is None


def test_verifying_reads_every_replica_and_drops_corrupt_ones() -> None:
    world = two()
    put_twice(world, b"x" * 250, b"y" * 250)
    world.nodes["b"][10] ^= 1
    grants = world.run(world.operations.open_reads(["k0", "k1"], world.deadline))
    assert world.run(world.operations.verify(grants, [0, 1000], world.deadline)) == [False, True]
    assert world.look() == 1
    assert world.voice.where("k0") == ["a"] and world.voice.where("k1") == ["a", "b"]
    world.before_move = lambda segment: "reset"
    assert world.run(world.operations.verify(grants[1:], [0], world.deadline)) == [False]
    assert world.voice.where("k1") == ["a", "b"], "an unreachable replica may be right"


def test_only_memory_on_this_host_may_be_read_unchecked() -> None:
    world = two()
    world.put(b"value")
    world.nodes["a"][0] ^= 1
    trusting = Operations("h", combine, 5, verify_local=False)
    assert world.run(trusting.get_into(["k0"], [0], [100], world.deadline)) == [5]
    assert not world.moves[-1].transfers[0].is_checked
    far = Operations("far", combine, 6, verify_local=False)
    assert world.run(far.get_into(["k0"], [0], [100], world.deadline)) == [None]
    assert world.look() == 1 and world.voice.inspect("k0") is None
    world.put(b"value")
    grants = world.run(trusting.open_reads(["k0"], world.deadline))
    world.nodes["a"][grants[0].address - BASE] ^= 1
    assert world.run(trusting.verify(grants, [0], world.deadline)) == [False]


# Tenants, and requests about many keys


def test_a_client_acts_for_its_tenant() -> None:
    world = two()
    red = Operations("h", combine, 5, tenant="red")
    world.local[:5] = b"value"
    assert world.run(red.put(["k"], [0], [5], 100, world.deadline, groups=["g"], parents=["p"])) == [None]
    assert world.get("k") == [None]
    assert world.run(red.get_into(["k"], [100], [5], world.deadline)) == [5]
    assert world.run(red.exists(["k"], world.deadline)) == [True]
    (status,) = world.run(red.inspect(["k"], world.deadline))
    assert (status.group, status.parent, status.num_uses) == ("g", "p", 1)
    assert world.run(red.pin(["k", "none"], None, world.deadline)) == [True, False]
    (grant,) = world.run(red.open_reads(["k"], world.deadline))
    assert world.run(red.renew([grant], world.deadline)) == [True]
    assert world.run(red.drop_replicas(["k"], "", world.deadline))[0].code == "leased"
    assert world.run(red.remove(["k"], True, world.deadline)) == [True]


def test_a_new_value_replaces_the_old_one() -> None:
    world = two()
    world.put(b"old")
    assert world.put(b"new value", replace=True) == [None]
    assert world.get("k0") == [b"new value"]


# Puts of a key that another client is writing


class OtherWriter:
    """A client that has started a put of a key and ends it ``after_s`` with a method, or never."""

    def __init__(self, world: World, key: str, how: str, after_s: float = 1.0) -> None:
        other = Operations("h", combine, 9_000_000)
        (grant,) = world.run(other.start_puts([key], [5], [5], world.deadline))
        assert isinstance(grant, PutGrant)
        ends_at = world.voice.now + after_s
        world.local[900_000:900_005] = b"other"
        self.has_ended = how == "killed"

        def before_ask(message: msgspec.Struct) -> None:
            if self.has_ended or world.voice.now < ends_at:
                return
            self.has_ended = True
            if how == "ends":
                assert world.run(other.write_ranges([grant], [0], [900_000], [5], world.deadline)) == [None]
                assert world.run(other.end_puts([grant], world.deadline)) == [None]
            else:
                world.run(other.abort_puts([grant], world.deadline))

        world.before_ask = before_ask


def patient(**pools: int) -> World:
    world = World(**pools)
    world.operations = Operations("h", combine, 1000, patience_s=2.5)
    return world


@pytest.mark.parametrize("policy", [DEFAULT_POLICY, m.PutPolicy(num_replicas=2)])
@pytest.mark.parametrize(
    ("how", "replace", "value"),
    [
        ("ends", False, b"other"),
        ("ends", True, b"mine"),
        ("aborts", False, b"mine"),
        ("aborts", True, b"mine"),
    ],
)
def test_a_put_waits_for_another_writer_of_its_key(
    how: str, replace: bool, value: bytes, policy: m.PutPolicy
) -> None:
    """What it returns is true then: the key is stored."""
    world = patient(a=65536, b=65536)
    other = OtherWriter(world, "k0", how)
    assert world.put(b"mine", policy=policy, replace=replace) == [None]
    assert other.has_ended and world.get("k0") == [value]


@pytest.mark.parametrize("replace", [False, True])
def test_a_put_is_refused_while_a_writer_that_was_killed_holds_its_key(replace: bool) -> None:
    world = patient()
    OtherWriter(world, "k1", "killed")
    first, second = world.put(b"zero", b"one", replace=replace)
    assert first is None and world.get("k0", "k1") == [b"zero", None], "the others are not held up"
    assert second is not None and second.code == "being_written" and "s longer" in second.reason
    assert world.voice.now <= 2.5
    world.voice.keep_alive(30.0)
    assert world.put(b"zero", b"one", replace=replace) == [None, None]
    assert world.get("k1") == [b"one"]


def test_a_put_into_preallocated_space_waits_for_another_writer_too() -> None:
    world = patient()
    assert put_many(world, 2) == [None, None]
    OtherWriter(world, "s7", "aborts")
    assert put_many(world, 1, first=7) == [None]
    assert "PutWritten" in requests_of(world)
    assert world.get("s7") == [bytes([7]) * 100]


def test_a_put_stops_waiting_at_its_deadline() -> None:
    """Requests may be slow, too; what was refused before is the outcome."""
    world = patient()
    OtherWriter(world, "k0", "killed")
    world.has_deadlines = True
    deadline = world.voice.now + 0.3
    put = world.operations.put(["k0", "k1"], [0, 0], [9, 9], 100, deadline, replace=True)
    refusal, other = world.run(put)
    assert refusal.code == "being_written" and other is None
    assert world.voice.now <= deadline


@pytest.mark.parametrize(("replace", "value"), [(False, b"1"), (True, b"3")])
def test_a_key_given_more_than_once_is_put_in_order(replace: bool, value: bytes) -> None:
    world = World()
    world.local[:3] = b"123"
    keys = ["d", "d", "d"]
    put = world.operations.put(keys, [0, 1, 2], [1, 1, 1], 100, world.deadline, replace=replace)
    assert world.run(put) == [None] * 3
    assert world.get("d") == [value]


# Small puts in one step


def put_many(world: World, count: int, first: int = 0, size: int = 100) -> list[Refusal | None]:
    """Put different values, one call each."""
    outcomes = []
    for number in range(first, first + count):
        world.local[:size] = bytes([number]) * size
        outcomes += world.run(world.operations.put([f"s{number}"], [0], [size], 1 << 20, world.deadline))
    return outcomes


def requests_of(world: World) -> list[str]:
    return [type(message).__name__ for message in world.sent if not isinstance(message, m.DescribeSegments)]


def after_two(**pools: int) -> World:
    """A client that has preallocated pieces, because it has put twice."""
    world = World(**pools)
    assert put_many(world, 2) == [None, None]
    assert len(world.operations.preallocated) == 4
    world.sent.clear()
    return world


def test_small_puts_send_one_request_each() -> None:
    world = after_two()
    assert put_many(world, 30, first=2) == [None] * 30
    # Pools are small here: a share of 4096 bytes is 32 pieces.
    assert requests_of(world) == ["PutWritten"] * 30
    world.local[:100] = bytes(100)
    assert world.get(*(f"s{number}" for number in range(32))) == [bytes([n]) * 100 for n in range(32)]


def test_puts_with_options_are_started_and_ended() -> None:
    world = after_two(a=65536, b=65536)
    for number, policy in enumerate((m.PutPolicy(num_replicas=2), m.PutPolicy(preferred_segments=["b"]))):
        assert world.run(
            world.operations.put([f"p{number}"], [0], [100], 1 << 20, world.deadline, policy)
        ) == [None]
    assert world.run(world.operations.put(["s0"], [0], [100], 1 << 20, world.deadline, replace=True)) == [
        None
    ]
    assert (
        world.run(world.operations.put(["x", "y"], [0, 0], [100, 100], 1 << 20, world.deadline)) == [None] * 2
    )
    assert requests_of(world) == ["PutStart", "PutEnd"] * 4


def test_group_and_parent_are_sent_with_a_small_put() -> None:
    world = after_two()
    put = world.operations.put(["k"], [0], [100], 1 << 20, world.deadline, DEFAULT_POLICY, ["g"], ["s0"])
    assert world.run(put) == [None]
    assert requests_of(world) == ["PutWritten"]
    found = world.voice.inspect("k")
    assert found is not None and (found.group, found.parent) == ("g", "s0")


def test_the_piece_of_a_taken_key_is_used_by_the_next_put() -> None:
    world = after_two()
    assert put_many(world, 2) == [None, None], "s0 and s1 exist"
    assert len(world.operations.preallocated) == 4
    assert put_many(world, 1, first=2) == [None]
    assert world.get("s0", "s2") == [bytes(100), bytes([2]) * 100]


def test_a_refusal_is_returned_and_the_piece_is_used_by_the_next_put() -> None:
    world = after_two()
    outcome = world.run(world.operations.put(["k" * 2000], [0], [100], 1 << 20, world.deadline))[0]
    assert isinstance(outcome, Refusal) and outcome.code == "invalid_key"
    assert len(world.operations.preallocated) == 4


def test_a_new_master_knows_no_pieces_and_the_put_is_repeated() -> None:
    world = after_two()
    successor = Voice(SETTINGS)
    successor.master.restore(world.voice.master.snapshot(), world.voice.now)
    successor.now = world.voice.now
    world.voice = successor
    successor.mount("a", 65536)
    assert put_many(world, 1, first=2) == [None]
    assert requests_of(world) == ["PutWritten", "PutStart", "PutEnd"]
    assert len(world.operations.preallocated) in (0, 8)
    assert world.get("s2", "s1") == [bytes([2]) * 100, bytes([1]) * 100]


class ScriptedWorld(World):
    """A world whose master answers puts with these replies, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations("h", combine, 1000, patience_s=2.0)
        self.replies: list[msgspec.Struct] = []
        (self.segment,) = self.voice.master.segments.mounted.values()

    def _ask(self, effect: CallMaster) -> MasterReply:
        if isinstance(effect.message, m.DescribeSegments):
            return super()._ask(effect)
        self.sent.append(effect.message)
        return MasterReply(self.replies.pop(0), None, self.voice.now, self.voice.now)

    def replica(self, number: int) -> m.Replica:
        return m.Replica("a", self.segment.epoch, self.segment.address + 1024 * number)

    def started(self, number: int, advance: m.PreallocatedSpace | None = None) -> m.PutStarted:
        return m.PutStarted(40.0, [m.Reserved(number, [self.replica(number)])], {}, advance)

    def put_durably(self, key: str) -> Refusal | None:
        put = self.operations.put([key], [0], [100], 1 << 20, self.deadline, m.PutPolicy(is_durable=True))
        outcome: Refusal | None = self.run(put)[0]
        assert not self.replies
        return outcome


def after_two_durable(*, is_durable: bool = True) -> ScriptedWorld:
    """A client that has 4 pieces for durable objects, if the master gives such."""
    world = ScriptedWorld()
    space = m.PreallocatedSpace(9, 40.0, 128, [world.replica(10 + n) for n in range(4)], is_durable)
    for number, advance in ((1, None), (2, space)):
        world.replies += [world.started(number, advance), m.Outcomes([True])]
        assert world.put_durably(f"k{number}") is None
    assert requests_of(world) == ["PutStart", "PutEnd"] * 2
    world.sent.clear()
    return world


def test_a_small_durable_put_sends_one_request() -> None:
    world = after_two_durable()
    world.replies.append(m.PutsWritten([True]))
    assert world.put_durably("k") is None
    (message,) = world.sent
    assert isinstance(message, m.PutWritten) and message.policy == m.PutPolicy(is_durable=True)
    assert len(world.operations.preallocated) == 3


def test_a_durable_object_that_is_not_on_ssd_keeps_its_piece() -> None:
    """It can be read, so no other object may be written there."""
    world = after_two_durable()
    world.replies.append(m.PutsWritten([Refusal("no_ssd", "no copy was on SSD in time")]))
    outcome = world.put_durably("k")
    assert outcome is not None and outcome.code == "no_ssd"
    assert len(world.operations.preallocated) == 3


def test_a_durable_put_that_has_to_wait_for_room_is_started() -> None:
    world = after_two_durable()
    world.replies += [
        m.PutsWritten([Refusal("not_here", "no room")]),
        world.started(3),
        m.Outcomes([True]),
    ]
    assert world.put_durably("k") is None
    assert requests_of(world) == ["PutWritten", "PutStart", "PutEnd"]
    assert isinstance(world.sent[1], m.PutStart) and world.sent[1].wait_s > 0
    assert len(world.operations.preallocated) == 4


def test_pieces_of_an_earlier_master_are_not_used_for_durable_objects() -> None:
    world = after_two_durable(is_durable=False)
    world.replies += [world.started(3), m.Outcomes([True])]
    assert world.put_durably("k") is None
    assert requests_of(world) == ["PutStart", "PutEnd"]


def test_a_master_of_an_earlier_release_takes_over_and_durable_puts_are_started() -> None:
    world = after_two_durable()
    world.replies += [m.PutsWritten([Refusal("invalid_policy", "takes PutStart")]), world.started(3)]
    world.replies += [m.Outcomes([True])]
    assert world.put_durably("k") is None
    assert requests_of(world) == ["PutWritten", "PutStart", "PutEnd"]
    assert len(world.operations.preallocated) == 0


def test_no_piece_is_written_that_may_have_expired() -> None:
    world = after_two()
    world.voice.keep_alive(0.75 * SETTINGS.put_s, "a")
    assert put_many(world, 1, first=2) == [None]
    assert requests_of(world)[0] == "PutStart"
    assert all(move.deadline <= world.voice.now + 5 for move in world.moves)


def test_a_late_write_is_not_announced_and_its_piece_is_not_used_again() -> None:
    world = after_two()
    world.slow_move_s = SETTINGS.put_s + 1
    assert isinstance(put_many(world, 1, first=2)[0], Refusal)
    assert "PutWritten" not in requests_of(world)
    assert len(world.operations.preallocated) == 0


def test_a_lost_reply_consumes_the_piece_and_the_request_is_repeated() -> None:
    world = after_two()
    lost = [PeerLost("gone")]
    world.after_ask = lambda message: lost.pop() if lost and isinstance(message, m.PutWritten) else None
    assert put_many(world, 1, first=2) == [None]
    assert requests_of(world) == ["PutWritten"] * 2
    assert put_many(world, 1, first=3) == [None]
    assert world.get("s2", "s3") == [bytes([2]) * 100, bytes([3]) * 100]


def test_a_piece_of_a_repeated_request_is_not_used_for_another() -> None:
    """The first request may still arrive, and its content must stay true."""
    world = after_two()
    lost = [PeerLost("gone")]
    world.before_ask = lambda message: lost.pop() if lost and isinstance(message, m.PutWritten) else None
    assert put_many(world, 1) == [None], "s0 exists"
    assert len(world.operations.preallocated) == 3


def test_a_request_that_was_carried_out_by_an_earlier_leader_keeps_its_piece() -> None:
    """It answers that it does not lead, and the request goes to its successor without the caller's doing."""
    world = after_two()
    earlier = world.voice

    def fail_over(message: msgspec.Struct) -> None:
        if isinstance(message, m.PutWritten) and world.voice is earlier:
            earlier.say(message)
            successor = Voice(SETTINGS)
            successor.master.restore(earlier.master.snapshot(), earlier.now)
            successor.now = earlier.now
            successor.mount("a", 65536)
            world.voice = successor

    world.before_ask = fail_over
    assert put_many(world, 4, first=2) == [None] * 4
    assert world.get("s2", "s3", "s4") == [bytes([number]) * 100 for number in (2, 3, 4)]


def test_a_piece_of_a_request_that_was_answered_late_is_not_used_for_another() -> None:
    """It may have been sent twice, so another copy of it may still arrive."""
    world = after_two()

    def delay(message: msgspec.Struct) -> None:
        world.voice.keep_alive(DOUBT_S, "a")

    world.after_ask = delay
    assert put_many(world, 1) == [None], "s0 exists"
    assert len(world.operations.preallocated) == 3


def test_a_failed_write_to_a_piece_falls_back_to_the_general_path() -> None:
    world = after_two(a=65536, b=4096)
    world.before_move = lambda segment: "connection refused" if segment == "a" else ""
    assert put_many(world, 1, first=2) == [None]
    assert "PutWritten" not in requests_of(world)
    found = world.voice.find("s2")
    assert found is not None and found.replicas[0].segment == "b"
    assert all(
        one.replica.segment == "b" for one in iter(lambda: world.operations.preallocated.take(100), None)
    )
