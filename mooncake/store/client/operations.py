# SPDX-License-Identifier: Apache-2.0
"""Client operations (put, get and the rest) as generators of effects, written once for all clients.

An operation decides (what to send, where to move bytes, whether to trust them, when to give up) and performs
no I/O: it yields ``CallMaster``, ``OpenSegment``, ``MoveSlices`` or ``Pause`` and is resumed with the
outcome. ``store.py`` runs these generators blocking and on asyncio, the simulator on virtual time with
faults. Memory is addresses and lengths here; the caller owns it and registers it with transfer.

A reader may trust bytes whose transfer ended before the lease did *and* whose CRC32C match the checksums
that the writer announced. When only the lease ended too early, the object is leased and read again, until the
operation's deadline; anything else is a miss. A writer may announce an object when every chunk of it
was written, in one transfer or many, before the reservation's deadline.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake.errors import DeadlineExceeded, InvalidArgument, MooncakeError, PeerLost, Refusal
from mooncake.store import messages as m
from mooncake.store.client.effects import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    CallMaster,
    MasterReply,
    MoveSlices,
    OpenSegment,
    Operation,
    Pause,
    ReadLocal,
    Slices,
    SlicesMoved,
    WriteLocal,
    pauses_within,
)
from mooncake.store.client.grants import (
    Checksums,
    OneSlice,
    Place,
    PutGrant,
    PutTarget,
    ReadGrant,
    ReadOutcome,
    SliceColumns,
    check_bounds,
    check_whole_chunks,
    columns_of,
    distinct,
    peer_lost,
    put_grant,
    read_grant,
    spread,
    tiled_checksum,
    whole_objects,
)
from mooncake.store.client.preallocated import (
    MAX_SMALL_BYTES,
    PreallocatedPieces,
    may_be_preallocated,
    piece_bytes,
)
from mooncake.store.client.small_values import SmallValues
from mooncake.store.ha.leader_search import DOUBT_S
from mooncake.store.master.objects import DEFAULT_POLICY
from mooncake.transfer.batch import Addresses
from mooncake.types import ObjectKey, Tier

DEFAULT_CHUNK_BYTES = 1 << 20
MAX_PUT_ATTEMPTS = 3
"""Number of attempts of a put, each after the first on other segments because a node could not be reached."""

MAX_ABORTED = 500
"""Number of puts that one message aborts: a connection takes it at once, when there is no time to wait."""


@dataclasses.dataclass
class OperationCounts:
    """Counters of one client, exported as metrics by ``store.py``."""

    checksum_mismatches: int = 0
    expired_leases: int = 0
    failed_transfers: int = 0
    repeated_requests: int = 0


class Operations:
    """The operations of one client. Safe to use from several threads: shared state is one dict.

    ``combine(crc_a, crc_b, length_b)`` is transfer's ``crc32c_combine``. ``first_put_id`` must be
    random over 62 bits, so that no two clients share a put id.
    """

    def __init__(
        self,
        host: str,
        combine: Callable[[int, int, int], int],
        first_put_id: int,
        tenant: str = "",
        verify_local: bool = True,
        reporter: str = "",
        patience_s: float = 0.0,
        is_on_one_device: Callable[[Any, int, int], bool] = lambda handle, remote, local: False,
        is_direct: Callable[[Any], bool] = lambda handle: True,
    ) -> None:
        """``reporter``: name of this machine, sent with reports of corrupt bytes. ``patience_s``: how long a
        put may wait for another one of its key, and a durable one for space; less than the timeout of an
        operation. ``is_on_one_device``: whether
        an address behind a transfer handle and a local one are memory of the same device. ``is_direct``:
        whether this process moves bytes of that handle itself, without a message."""
        self._is_on_one_device = is_on_one_device
        self._is_direct = is_direct
        self.small_values = SmallValues()
        self._patience_s = patience_s
        self._host = host
        self._reporter = reporter or host
        self._verify_local = verify_local
        self.tenant = "" if tenant == "default" else tenant
        self._combine = combine
        self._put_ids = itertools.count(first_put_id, m.MAX_KEYS)
        self._handles: dict[str, tuple[int, Any]] = {}
        """Segment -> (epoch, transfer handle)."""
        self._hosts: dict[str, str] = {}
        """Segment -> its host; a stale entry only makes a read choose a more distant replica."""
        self.preallocated = PreallocatedPieces()
        self.counts = OperationCounts()

    # Whole objects

    def put(
        self,
        keys: Sequence[ObjectKey],
        addresses: Sequence[int],
        sizes: Sequence[int],
        chunk_bytes: int,
        deadline: float,
        policy: m.PutPolicy = DEFAULT_POLICY,
        groups: Sequence[str] = (),
        parents: Sequence[ObjectKey] = (),
        replace: bool = False,
    ) -> Operation[list[Refusal | None]]:
        """Store the objects at ``addresses``. None: stored, or the key existed already.

        At least one replica was written; further ones are best effort. While another put of a key is under
        way, that key is asked for again, until ``patience_s`` is over.
        """
        outcomes: list[Refusal | None] = [None] * len(keys)
        wanted, avoid = list(range(len(keys))), list[str]()
        if len(keys) == 1 and sizes[0] <= chunk_bytes and not replace:
            is_settled, outcome = False, None
            if may_be_preallocated(sizes[0], policy):
                is_settled, outcome = yield from self._put_written(
                    keys[0], addresses[0], sizes[0], deadline, policy, groups, parents
                )
            if not (is_settled or groups or parents):
                is_settled, outcome = yield from self._put_small(
                    keys[0], addresses[0], sizes[0], deadline, policy, avoid
                )
            if is_settled:
                return [outcome]
        pauses, num_lost = pauses_within(self._patience_s), 0
        while wanted:
            try:
                grants = yield from self.start_puts(
                    [keys[i] for i in wanted],
                    [sizes[i] for i in wanted],
                    [min(chunk_bytes, max(1, sizes[i])) for i in wanted],
                    deadline,
                    avoid,
                    policy,
                    [groups[i] for i in wanted] if groups else (),
                    [parents[i] for i in wanted] if parents else (),
                    replace,
                )
            except DeadlineExceeded:
                if None in (outcomes[i] for i in wanted):
                    raise
                break  # they were refused before
            held: list[tuple[int, PutGrant]] = []
            for index, grant in zip(wanted, grants, strict=True):
                if isinstance(grant, PutGrant):
                    held.append((index, grant))
                elif grant is not None or _code(outcomes[index]) != "peer_lost":
                    outcomes[index] = grant
            ended = yield from self._write_and_end(
                [grant for _, grant in held], [addresses[i] for i, _ in held], deadline
            )
            for (index, grant), outcome in zip(held, ended, strict=True):
                outcomes[index] = outcome
                if _code(outcome) == "peer_lost":
                    segments = (target.replica.segment for target in grant.targets)
                    avoid += [segment for segment in segments if segment not in avoid]
            lost = [i for i, _ in held if _code(outcomes[i]) == "peer_lost"]
            num_lost += bool(lost)
            # Keys of this very call, given twice, are written one after the other, without a pause.
            wanted = [i for i in wanted if _code(outcomes[i]) == "being_written"]
            if wanted and not held:
                pause_s = next(pauses, None)
                if pause_s is None:
                    break
                yield Pause(pause_s, deadline)
            wanted = sorted(wanted + lost) if num_lost < MAX_PUT_ATTEMPTS else wanted
        return outcomes

    def get_into(
        self,
        keys: Sequence[ObjectKey],
        addresses: Sequence[int],
        capacities: Sequence[int],
        deadline: float,
    ) -> Operation[list[int | None]]:
        """Read objects to ``addresses``; their sizes, or None for a miss.

        Raises:
            InvalidArgument: an object is larger than its buffer (nothing was read).
        """
        if len(keys) == 1:
            answer = yield from self.look_up(keys[0], capacities[0], deadline)
            if (yield from self._get_small(answer, addresses[0], capacities[0], deadline)):
                return [answer.reply.objects[0].size_bytes]
            grants = yield from self.granted(keys, answer, deadline)
        else:
            grants = yield from self.open_reads(keys, deadline)
        for grant, capacity in zip(grants, capacities, strict=True):
            if grant is not None and grant.size_bytes > capacity:
                raise InvalidArgument(f"buffer of {grant.key!r}", capacity, f"{grant.size_bytes} bytes")
        held = [index for index, grant in enumerate(grants) if grant is not None]
        readable = [grant for grant in grants if grant is not None]
        arrived = yield from self.read_whole(readable, [addresses[i] for i in held], deadline)
        sizes: list[int | None] = [None] * len(keys)
        for index, grant, is_good in zip(held, readable, arrived, strict=True):
            if is_good:
                sizes[index] = grant.size_bytes
        return sizes

    def read_whole(
        self, grants: Sequence[ReadGrant], addresses: Sequence[int], deadline: float
    ) -> Operation[list[bool]]:
        """Read the whole object of each grant to its address; which of them arrived and are right."""
        return (yield from self._read(grants, whole_objects(grants, addresses), deadline))

    def _write_and_end(
        self, grants: Sequence[PutGrant], addresses: Sequence[int], deadline: float
    ) -> Operation[list[Refusal | None]]:
        """Write whole objects and end their puts, or abort them when that raises."""
        try:
            yield from self._write(grants, whole_objects(grants, addresses), deadline)
            return (yield from self.end_puts(grants, deadline))
        except BaseException as error:
            yield from self._abort_after(error, [(grant.key, grant.object_id) for grant in grants])
            raise

    # Fast path for one object of one chunk and one replica: without columns of slices, which would cost more
    # than moving its bytes. In all other cases the general path continues from that point.

    def _put_small(
        self,
        key: ObjectKey,
        address: int,
        size_bytes: int,
        deadline: float,
        policy: m.PutPolicy,
        avoid: list[str],
    ) -> Operation[tuple[bool, Refusal | None]]:
        """Whether the put is settled, and its outcome. If not, ``avoid`` has the unreachable segments."""
        chunk_bytes = max(1, size_bytes)
        put_id = next(self._put_ids)
        wanted = self._wanted(size_bytes, policy) if may_be_preallocated(size_bytes, policy) else 0
        message = m.PutStart(
            put_id,
            self._host,
            [key],
            [size_bytes],
            [chunk_bytes],
            policy=policy,
            tenant=self.tenant,
            num_pieces=wanted,
            piece_bytes=piece_bytes(size_bytes) if wanted else 0,
            wait_s=self._patience_s if policy.is_durable else 0.0,
        )
        answer, first_asked_at = yield from self._ask(message, deadline)
        if wanted:
            self.preallocated.add(answer.reply.advance, size_bytes, first_asked_at, policy.is_durable)
            self.small_values.takes_values = False  # these pieces may be those of another, earlier master
        reserved = answer.reply.reserved[0]
        if reserved is None:
            refusal = answer.reply.refusals.get(0)
            return _code(refusal) != "being_written", refusal
        expires_at = first_asked_at + answer.reply.put_s
        try:
            handles = yield from self._open([reserved], deadline)
            replica = reserved.replicas[0]
            if len(reserved.replicas) == 1 and handles[replica.segment] is not None:
                slices = OneSlice(handles[replica.segment], address, replica.address, size_bytes)
                moved = (yield MoveSlices(True, [slices], min(deadline, expires_at)))[0]
                self.moved_small(slices.handle)
                if moved.checksums is not None and moved.now < expires_at:
                    checksums = [moved.checksums.tobytes()]
                    ended = m.PutEnd([key], [reserved.object_id], checksums, [], self.tenant)
                    answer, _ = yield from self._ask(ended, deadline)
                    outcome = answer.reply.outcomes[0]
                    return True, outcome if isinstance(outcome, Refusal) else None
        except BaseException as error:
            yield from self._abort_after(error, [(key, reserved.object_id)])
            raise
        grant = put_grant(key, size_bytes, chunk_bytes, reserved, expires_at, handles)
        outcome = (yield from self._write_and_end([grant], [address], deadline))[0]
        if outcome is None or outcome.code != "peer_lost":
            return True, outcome
        avoid += [target.replica.segment for target in grant.targets]
        return False, None

    def _put_written(
        self,
        key: ObjectKey,
        address: int,
        size_bytes: int,
        deadline: float,
        policy: m.PutPolicy,
        groups: Sequence[str],
        parents: Sequence[ObjectKey],
    ) -> Operation[tuple[bool, Refusal | None]]:
        """As ``_put_small``, but written before the master is contacted, into preallocated space."""
        preallocated = self.preallocated
        piece = preallocated.take(size_bytes, policy.is_durable)
        if piece is None:
            return False, None
        replica = piece.replica
        epoch, handle = self._handles.get(replica.segment, (None, None))
        if epoch != replica.epoch:
            handle = (yield from self._open([m.Reserved(0, [replica])], deadline))[replica.segment]
            if handle is None:
                preallocated.drop_on(replica.segment)
                return False, None
        value: tuple[bytes, int] | None = None
        if self.small_values.takes_values and self.small_values.sends(size_bytes):
            value = yield ReadLocal(address, size_bytes)
            if value is None:
                self.small_values.answered(False)
        if value is None:
            slices = OneSlice(handle, address, replica.address, size_bytes)
            moved = (yield MoveSlices(True, [slices], min(deadline, piece.write_until)))[0]
            self.moved_small(handle)
            if moved.checksums is None or moved.now >= piece.expires_at:
                if moved.now >= piece.write_until:
                    preallocated.drop_late(moved.now)
                elif moved.now < deadline:
                    self._lost(replica.segment)
                return False, None
            checksum = moved.checksums.tobytes()
        else:
            checksum = value[1].to_bytes(4, "little")
        wanted = self._wanted(size_bytes, policy)
        message = m.PutWritten(
            next(self._put_ids),
            self._host,
            [key],
            [size_bytes],
            [checksum],
            [(piece.advance_id, piece.number)],
            None if policy is DEFAULT_POLICY else policy,
            list(groups),
            list(parents),
            self.tenant,
            wanted,
            piece_bytes(size_bytes) if wanted else 0,
            value is None and self.small_values.sends(size_bytes),
            [] if value is None else [value[0]],
        )
        first: MasterReply = yield CallMaster(message, deadline)
        answer = first if first.error is None else (yield from self._ask_again(message, deadline, first))
        outcome = answer.reply.outcomes[0]
        if message.is_remote:
            self.small_values.takes_values = answer.reply.takes_values
            self.small_values.answered(answer.reply.takes_values)
        code = outcome.code if isinstance(outcome, Refusal) else ""
        # An earlier release that leads now refuses all durable puts of this kind.
        if code == "expired" or (code == "invalid_policy" and policy.is_durable):
            preallocated.clear()
            self.small_values.takes_values = False
            return False, None
        if value is not None:
            self.small_values.answered(outcome is True)
        if wanted:
            preallocated.add(answer.reply.advance, size_bytes, first.asked_at, policy.is_durable)
        # If the message was sent twice, the first one may still arrive and use the piece. And a durable
        # object that is not on SSD in time is in the piece all the same.
        is_there = outcome is True or code == "no_ssd"
        was_sent_once = answer is first and answer.now - answer.asked_at < DOUBT_S
        if was_sent_once and not is_there:
            preallocated.give_back(piece)
        if code == "not_here":
            return False, None
        return True, outcome if isinstance(outcome, Refusal) else None

    def _wanted(self, size_bytes: int, policy: m.PutPolicy) -> int:
        """Number of pieces to request with the put of an object of that size."""
        is_far = size_bytes > MAX_SMALL_BYTES and self.small_values.is_remote
        return 0 if is_far else self.preallocated.wanted(size_bytes, policy.is_durable)

    def _lost(self, segment: str) -> None:
        """Forget how ``segment`` is reached after a failed transfer, so that the master is queried again."""
        self.counts.failed_transfers += 1
        self._handles.pop(segment, None)
        self.preallocated.drop_on(segment)

    def _get_small(
        self, answer: MasterReply, address: int, capacity: int, deadline: float
    ) -> Operation[bool]:
        """Fast path of a get: whether the one object that was found has arrived and is right."""
        stored: m.Stored | None = answer.reply.objects[0]
        if stored is None or stored.size_bytes > min(stored.chunk_bytes, capacity):
            return False
        if answer.reply.values and (yield from self.take_value(answer, address)):
            return True
        if len(stored.replicas) > 1:
            return False
        replica, size_bytes = stored.replicas[0], stored.size_bytes
        epoch, handle = self._handles.get(replica.segment, (None, None))
        if epoch != replica.epoch:
            handle = (yield from self._open([stored], deadline))[replica.segment]
        if handle is None:
            return False
        expires_at = answer.asked_at + answer.reply.lease_s
        slices = OneSlice(handle, address, replica.address, size_bytes)
        moved = (yield MoveSlices(False, [slices], min(deadline, expires_at)))[0]
        self.moved_small(handle)
        if moved.checksums is not None and moved.now >= expires_at:
            self.counts.expired_leases += 1
            return False
        return moved.checksums is not None and moved.checksums.tobytes() == stored.checksums

    def look_up(self, key: ObjectKey, capacity: int, deadline: float) -> Operation[MasterReply]:
        """Look one object up, with its bytes if the master may have them at hand (``small_values.py``)."""
        wanted = min(capacity, m.MAX_VALUE_BYTES) if self.small_values.wants() else 0
        answer, _ = yield from self._ask(m.LookupObjects([key], self.tenant, wanted), deadline)
        found: m.Stored | None = answer.reply.objects[0]
        if wanted and found is not None and found.size_bytes <= wanted and not answer.reply.values:
            self.small_values.answered(False)
        return answer

    def take_value(self, answer: MasterReply, address: int) -> Operation[bool]:
        """Copy the bytes of the one object in an answer with values; whether they are right."""
        stored: m.Stored = answer.reply.objects[0]
        (value,) = answer.reply.values
        checksum: int | None = None
        if len(value) == stored.size_bytes:
            checksum = yield WriteLocal(address, value)
        is_right = checksum is not None and checksum.to_bytes(4, "little") == stored.checksums
        self.small_values.answered(is_right)
        return is_right

    def moved_small(self, handle: Any) -> None:
        """Note how a small object was moved: over a network the master may do it next time."""
        self.small_values.moved(self._is_direct(handle))

    # Parts of objects

    def start_puts(
        self,
        keys: Sequence[ObjectKey],
        sizes: Sequence[int],
        chunk_bytes: Sequence[int],
        deadline: float,
        avoid: Sequence[str] = (),
        policy: m.PutPolicy = DEFAULT_POLICY,
        groups: Sequence[str] = (),
        parents: Sequence[ObjectKey] = (),
        replace: bool = False,
    ) -> Operation[list[PutGrant | Refusal | None]]:
        """Reserve space. None: the object exists, and is not to be replaced. Waits for no other writer."""
        outcomes: list[PutGrant | Refusal | None] = []
        held: list[tuple[ObjectKey, int]] = []
        try:
            for start in range(0, len(keys), m.MAX_KEYS):
                part = slice(start, start + m.MAX_KEYS)
                message = m.PutStart(
                    next(self._put_ids),
                    self._host,
                    list(keys[part]),
                    list(sizes[part]),
                    list(chunk_bytes[part]),
                    list(avoid[-m.MAX_AVOIDED :]),
                    policy,
                    list(groups[part]),
                    list(parents[part]),
                    replace,
                    self.tenant,
                    wait_s=self._patience_s if policy.is_durable else 0.0,
                )
                answer, first_asked_at = yield from self._ask(message, deadline)
                # If the message was sent twice, the reservation may stem from the first time.
                expires_at = first_asked_at + answer.reply.put_s
                started: m.PutStarted = answer.reply
                pairs = zip(keys[part], started.reserved, strict=True)
                held += [(key, place.object_id) for key, place in pairs if place is not None]
                handles = yield from self._open([r for r in started.reserved if r is not None], deadline)
                for offset, reserved in enumerate(started.reserved):
                    at = start + offset
                    if reserved is None:
                        outcomes.append(started.refusals.get(offset))
                        continue
                    outcomes.append(
                        put_grant(keys[at], sizes[at], chunk_bytes[at], reserved, expires_at, handles)
                    )
        except BaseException as error:
            yield from self._abort_after(error, held)
            raise
        return outcomes

    def write_ranges(
        self,
        grants: Sequence[PutGrant],
        object_offsets: Addresses,
        local_addresses: Addresses,
        lengths: Addresses,
        deadline: float,
    ) -> Operation[list[Refusal | None]]:
        """Write parts of objects: k slices for each grant, the slices of one grant in a row.

        Columns are u64 [k * len(grants)]. None: written. A grant that failed stays failed; end or abort it.
        """
        columns = columns_of(grants, object_offsets, local_addresses, lengths)
        check_bounds(grants, columns)
        yield from self._write(grants, columns.cut_at_chunks(grants), deadline)
        return [grant.failure for grant in grants]

    def read_ranges(
        self,
        grants: Sequence[ReadGrant],
        object_offsets: Addresses,
        local_addresses: Addresses,
        lengths: Addresses,
        deadline: float,
    ) -> Operation[list[bool]]:
        """Read parts of objects, columns as in ``write_ranges``; for which grants the parts are right.

        Raises:
            InvalidArgument: the parts of one object don't make up whole chunks: a part of a chunk
                can't be verified.
        """
        columns = columns_of(grants, object_offsets, local_addresses, lengths)
        check_bounds(grants, columns)
        columns = columns.cut_at_chunks(grants)
        check_whole_chunks(grants, columns)
        return (yield from self._read(grants, columns, deadline))

    def end_puts(self, grants: Sequence[PutGrant], deadline: float) -> Operation[list[Refusal | None]]:
        """Make complete objects visible; incomplete ones are aborted and returned with the reason."""
        failed = {id(grant): grant.settle() for grant in grants}
        good = [grant for grant in grants if grant.failure is None]
        for start in range(0, len(good), m.MAX_KEYS):
            part = good[start : start + m.MAX_KEYS]
            lost = [failed[id(grant)] for grant in part]
            message = m.PutEnd(
                [grant.key for grant in part],
                [grant.object_id for grant in part],
                [grant.checksums.tobytes() for grant in part],
                lost if any(lost) else [],
                self.tenant,
            )
            answer, _ = yield from self._ask(message, deadline)
            for grant, outcome in zip(part, answer.reply.outcomes, strict=True):
                if isinstance(outcome, Refusal):
                    grant.failure = outcome
        bad = [grant for grant in grants if grant.failure is not None]
        if bad:
            yield from self.abort_puts(bad, deadline)
        return [grant.failure for grant in grants]

    def abort_puts(self, grants: Sequence[PutGrant], deadline: float) -> Operation[None]:
        """Release reservations. Best effort: if the message is lost, they end with their deadline."""
        yield from self._abort([(grant.key, grant.object_id) for grant in grants], deadline)
        for grant in grants:
            grant.failure = grant.failure or Refusal("aborted", "this put was given up")

    def _abort(self, held: Sequence[tuple[ObjectKey, int]], deadline: float) -> Operation[None]:
        for start in range(0, len(held), MAX_ABORTED):
            keys, ids = zip(*held[start : start + MAX_ABORTED], strict=True)
            message = m.PutAbort(list(keys), list(ids), self.tenant)
            answer: MasterReply = yield CallMaster(message, deadline, may_be_late=True)
            if answer.asked_at >= deadline and isinstance(answer.error, PeerLost):
                return  # there is no time to connect again

    def _abort_after(self, error: BaseException, held: Sequence[tuple[ObjectKey, int]]) -> Operation[None]:
        """Release the reservations of a put that has failed with ``error``, without waiting for the answer.

        Otherwise they would keep their keys from other writers, and their space, until their deadline.
        """
        if not isinstance(error, GeneratorExit):  # the operation is closed: it can send nothing more
            yield from self._abort(held, 0.0)

    def open_reads(self, keys: Sequence[ObjectKey], deadline: float) -> Operation[list[ReadGrant | None]]:
        """Look objects up and lease them. None: a miss."""
        grants: list[ReadGrant | None] = []
        for start in range(0, len(keys), m.MAX_KEYS):
            part = list(keys[start : start + m.MAX_KEYS])
            answer, _ = yield from self._ask(m.LookupObjects(part, self.tenant), deadline)
            grants += yield from self.granted(part, answer, deadline)
        return grants

    def granted(
        self, keys: Sequence[ObjectKey], answer: MasterReply, deadline: float
    ) -> Operation[list[ReadGrant | None]]:
        """Grants for the objects in the master's answer to a lookup of ``keys``."""
        expires_at = answer.asked_at + answer.reply.lease_s
        found = answer.reply.objects
        handles = yield from self._open([stored for stored in found if stored is not None], deadline)
        return [
            None if stored is None else read_grant(key, stored, expires_at, handles, self._distance)
            for key, stored in zip(keys, found, strict=True)
        ]

    # Metadata

    def exists(self, keys: Sequence[ObjectKey], deadline: float) -> Operation[list[bool]]:
        """Which keys can be read now; those that can are leased."""
        flags: list[bool] = []
        for start in range(0, len(keys), m.MAX_KEYS):
            part = list(keys[start : start + m.MAX_KEYS])
            answer, _ = yield from self._ask(m.Exists(part, self.tenant), deadline)
            flags += map(bool, answer.reply.flags)
        return flags

    def remove(
        self, keys: Sequence[ObjectKey], force: bool, deadline: float
    ) -> Operation[list[bool | Refusal]]:
        """Remove objects. True: removed; False: there was none; a Refusal: leased, and ``force`` is false."""
        return (yield from self._each(keys, lambda part: m.Remove(part, force, self.tenant), deadline))

    def pin(
        self, keys: Sequence[ObjectKey], ttl_s: float | None, deadline: float
    ) -> Operation[list[bool | Refusal]]:
        """Pin objects (``ttl_s`` None: hard; 0: unpin; else softly for so long). True: done; False: none."""
        return (yield from self._each(keys, lambda part: m.Pin(part, ttl_s, self.tenant), deadline))

    def drop_replicas(
        self, keys: Sequence[ObjectKey], segment: str, deadline: float
    ) -> Operation[list[bool | Refusal]]:
        """Drop replicas. True: dropped; False: none on ``segment`` ("": in memory); a Refusal: leased."""
        return (
            yield from self._each(keys, lambda part: m.DropReplicas(part, segment, self.tenant), deadline)
        )

    def inspect(self, keys: Sequence[ObjectKey], deadline: float) -> Operation[list[m.ObjectStatus | None]]:
        """Status of objects: replicas, pins, leases. Grants no lease."""
        found: list[m.ObjectStatus | None] = []
        for start in range(0, len(keys), m.MAX_KEYS):
            part = list(keys[start : start + m.MAX_KEYS])
            answer, _ = yield from self._ask(m.Inspect(part, self.tenant), deadline)
            found += answer.reply.objects
        return found

    def _each(
        self, keys: Sequence[ObjectKey], message: Callable[[list[ObjectKey]], msgspec.Struct], deadline: float
    ) -> Operation[list[bool | Refusal]]:
        """Send a message about many keys in parts; returns their outcomes."""
        outcomes: list[bool | Refusal] = []
        for start in range(0, len(keys), m.MAX_KEYS):
            part = list(keys[start : start + m.MAX_KEYS])
            answer, _ = yield from self._ask(message(part), deadline)
            outcomes += answer.reply.outcomes
        return outcomes

    def verify(
        self, grants: Sequence[ReadGrant], addresses: Sequence[int], deadline: float
    ) -> Operation[list[bool]]:
        """Read every replica to the object's address; whether all of them could be read and are right.

        Corrupt ones are reported, and dropped if their nodes confirm it.
        """
        are_good = [True] * len(grants)
        replicas = [grant.each() for grant in grants]
        for number in range(max(map(len, replicas), default=0)):
            held = [index for index, each in enumerate(replicas) if number < len(each)]
            some = [replicas[index][number] for index in held]
            columns = whole_objects(some, [addresses[index] for index in held])
            arrived = yield from self._read(some, columns, deadline, is_checked=True)
            for index, is_good in zip(held, arrived, strict=True):
                are_good[index] &= is_good
        return are_good

    def renew(self, grants: Sequence[ReadGrant], deadline: float) -> Operation[list[bool]]:
        """Extend leases. False: that replica is gone; stop reading before the old lease ends."""
        flags: list[bool] = []
        for start in range(0, len(grants), m.MAX_KEYS):
            part = grants[start : start + m.MAX_KEYS]
            keys, ids = [grant.key for grant in part], [grant.object_id for grant in part]
            message = m.Renew(keys, ids, self.tenant, [grant.replica for grant in part])
            answer, _ = yield from self._ask(message, deadline)
            for grant, flag in zip(part, answer.reply.flags, strict=True):
                if flag:
                    grant.expires_at = max(grant.expires_at, answer.asked_at + answer.reply.lease_s)
            flags += map(bool, answer.reply.flags)
        return flags

    def ask(self, message: msgspec.Struct, deadline: float) -> Operation[Any]:
        """Send any other message, repeatedly while the master can't be reached; returns the reply."""
        answer, _ = yield from self._ask(message, deadline)
        return answer.reply

    # Steps

    def _ask(self, message: msgspec.Struct, deadline: float) -> Operation[tuple[MasterReply, float]]:
        """Send a message until it is answered; returns the reply and the time of the first attempt."""
        answer: MasterReply = yield CallMaster(message, deadline)
        if answer.error is None:
            return answer, answer.asked_at
        return (yield from self._ask_again(message, deadline, answer)), answer.asked_at

    def _ask_again(
        self, message: msgspec.Struct, deadline: float, answer: MasterReply
    ) -> Operation[MasterReply]:
        """Repeat a message until it is answered. ``answer``: the failed first attempt.

        All messages are idempotent (``messages.py``), so a broken connection only costs a repetition.
        """
        pause_s = FIRST_PAUSE_S
        while answer.error is not None:
            if not isinstance(answer.error, PeerLost):
                raise answer.error
            if answer.now + pause_s >= deadline:
                raise DeadlineExceeded(f"{answer.error}; no time left to retry") from answer.error
            self.counts.repeated_requests += 1
            yield Pause(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            answer = yield CallMaster(message, deadline)
        return answer

    def _open(self, found: Sequence[m.Reserved | m.Stored], deadline: float) -> Operation[dict[str, Any]]:
        """Transfer handles of all segments in ``found``, by name; None where a segment can't be reached."""
        wanted: dict[str, int] = {}
        for item in found:
            for replica in item.replicas:
                wanted[replica.segment] = replica.epoch
        missing = [
            (name, epoch)
            for name, epoch in wanted.items()
            if self._handles.get(name, (None, None))[0] != epoch
        ]
        if missing:
            answer, _ = yield from self._ask(m.DescribeSegments(missing), deadline)
            self._hosts.update(zip((name for name, _ in missing), answer.reply.hosts, strict=False))
            for (name, epoch), descriptor in zip(missing, answer.reply.descriptors, strict=True):
                self._handles.pop(name, None)
                if descriptor is not None:
                    handle = yield OpenSegment(name, epoch, descriptor)
                    if handle is not None:
                        self._handles[name] = (epoch, handle)
        handles: dict[str, Any] = {}
        for name, epoch in wanted.items():
            known = self._handles.get(name)
            handles[name] = known[1] if known is not None and known[0] == epoch else None
        return handles

    def _write(self, grants: Sequence[PutGrant], columns: SliceColumns, deadline: float) -> Operation[None]:
        """Write to all replicas at once. ``columns`` lie within their objects and cross no chunk border."""
        places, owners, columns = spread(grants, columns)
        if not columns.grant.size:
            return
        until = min(deadline, *(owners[i].expires_at for i in distinct(columns.grant)))
        for moved, part in (yield from self._move(True, places, columns, until)):
            for index in distinct(part.grant):
                grant = owners[index]
                if moved.now >= grant.expires_at:
                    grant.failure = Refusal("expired", "the deadline for writing has passed")
                elif moved.checksums is None:
                    grant.give_up(places[index], peer_lost(places[index].replica, moved.reason))
            if moved.checksums is not None:
                self._account(places, part, moved.checksums)

    def _account(self, places: Sequence[PutTarget], part: SliceColumns, checksums: Checksums) -> None:
        """Record the checksums of the written slices."""
        columns = part.grant.tolist(), part.offset.tolist(), part.length.tolist(), checksums.tolist()
        for index, offset, length, crc in zip(*columns, strict=True):
            places[index].wrote(offset, length, crc)
        for index in distinct(part.grant):
            places[index].join(self._combine)

    def _read(
        self, grants: Sequence[ReadGrant], columns: SliceColumns, deadline: float, is_checked: bool = False
    ) -> Operation[list[bool]]:
        """Read slices; for which grants they are right. ``columns`` are whole chunks, cut at their borders.

        When a replica can't be read, the next nearest is used. Corrupt bytes are first read once more from
        the same replica, before another is tried and the replica is reported to the master. When the lease
        ended before the bytes arrived, the object is leased and read again, but only once if none came.
        ``is_checked``: verify also what is read from memory on this host, and read no other replicas.
        """
        self._prefer_devices(grants, columns)
        is_good = [True] * len(grants)
        pause_s = FIRST_PAUSE_S
        wrong: list[tuple[ReadGrant, str]] = []
        doubted: dict[int, str] = {}
        """Grant -> segment whose bytes were wrong once; the error may have occurred on the path."""
        unfinished: set[int] = set()
        """Grants whose bytes have not come by the end of a lease."""
        left = columns
        while left.grant.size:
            outcome = yield from self._read_once(grants, left, deadline, is_checked)
            failed, late = outcome.failed, outcome.late
            self.counts.checksum_mismatches += len(outcome.mismatched)
            again: list[int] = []
            for index in outcome.mismatched:
                grant = grants[index]
                if doubted.get(index) != grant.replica.segment:
                    doubted[index] = grant.replica.segment
                    again.append(index)
                    continue
                wrong.append((grant, grant.replica.segment))
                failed.append(index)
            again += [index for index in failed if grants[index].turn_to_next()]
            # A second time, it is not this process that is slow but a node that has stopped.
            retried = [index for index in late if index not in outcome.unfinished & unfinished]
            for index in outcome.unfinished & unfinished:
                self._lost(grants[index].replica.segment)
            unfinished |= outcome.unfinished
            if retried and outcome.now + pause_s < deadline:
                yield Pause(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                again += yield from self._lease_again(grants, retried, deadline, is_checked)
            for index in (*failed, *late):
                is_good[index] = False
            for index in again:
                is_good[index] = True
            wanted = [False] * len(grants)
            for index in again:
                wanted[index] = True
            left = left.only(wanted)
        if wrong:
            yield from self._report_corrupt(wrong, deadline)
        return is_good

    def _read_once(
        self, grants: Sequence[ReadGrant], columns: SliceColumns, deadline: float, is_checked: bool
    ) -> Operation[ReadOutcome]:
        """Read the current replica of each grant."""
        indices = distinct(columns.grant)
        until = min(deadline, max(grants[index].expires_at for index in indices))
        moving = self._move(False, grants, columns, until, is_checked=is_checked)
        outcome = ReadOutcome()
        for moved, part in (yield from moving):
            outcome.now = max(outcome.now, moved.now)
            of_part = distinct(part.grant)
            late = {index: None for index in of_part if moved.now >= grants[index].expires_at}
            outcome.late += late
            if moved.checksums is None:
                outcome.failed += [index for index in of_part if index not in late]
                outcome.unfinished.update(late)
                continue
            self.counts.expired_leases += len(late)
            if moved.checksums.size:
                wrong = self._mismatches(grants, part, moved.checksums)
                outcome.mismatched += [index for index in wrong if index not in late]
        return outcome

    def _lease_again(
        self, grants: Sequence[ReadGrant], late: list[int], deadline: float, is_same_replica: bool
    ) -> Operation[list[int]]:
        """Lease objects again whose lease has ended; returns those that are still there, unless replaced.

        A process that a busy host stops for longer than the lease is no reason to return a miss. Nothing is
        raised when the deadline passes first: the other objects of the batch have been read.
        """
        again: list[int] = []
        try:
            found = yield from self.open_reads([grants[index].key for index in late], deadline)
        except MooncakeError:
            return again
        for index, fresh in zip(late, found, strict=True):
            grant = grants[index]
            if fresh is None or fresh.object_id != grant.object_id:
                continue
            places = [place for place in fresh.places if not is_same_replica or place[0] == grant.replica]
            if places:
                grant.use(places)
                grant.expires_at = fresh.expires_at
                again.append(index)
        return again

    def report_corrupt(self, grants: Sequence[ReadGrant], deadline: float) -> Operation[None]:
        """Report that the bytes of the current replicas of these grants are wrong."""
        yield from self._report_corrupt([(grant, grant.replica.segment) for grant in grants], deadline)

    def _report_corrupt(self, wrong: list[tuple[ReadGrant, str]], deadline: float) -> Operation[None]:
        """Report corrupt replicas. Best effort: the next reader detects them as well."""
        for start in range(0, len(wrong), m.MAX_KEYS):
            part = wrong[start : start + m.MAX_KEYS]
            keys, ids = [grant.key for grant, _ in part], [grant.object_id for grant, _ in part]
            segments = [segment for _, segment in part]
            request = m.Corrupt(keys, ids, segments, self.tenant, self._reporter)
            yield CallMaster(request, deadline, may_be_late=True)

    def _mismatches(self, grants: Sequence[ReadGrant], part: SliceColumns, checksums: Checksums) -> list[int]:
        """Indices of grants whose bytes don't match the checksums that the writer announced."""
        bad: dict[int, None] = {}
        pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for index, offset, length, crc in zip(
            part.grant.tolist(), part.offset.tolist(), part.length.tolist(), checksums.tolist(), strict=True
        ):
            grant = grants[index]
            chunk, start = divmod(offset, grant.chunk_bytes)
            whole = min(grant.chunk_bytes, grant.size_bytes - chunk * grant.chunk_bytes)
            if length == whole:
                if crc != grant.checksums[chunk]:
                    bad[index] = None
            else:
                pieces.setdefault((index, chunk), []).append((start, length, crc))
        for (index, chunk), parts in pieces.items():
            grant = grants[index]
            whole = min(grant.chunk_bytes, grant.size_bytes - chunk * grant.chunk_bytes)
            if tiled_checksum(parts, whole, self._combine) != grant.checksums[chunk]:
                bad[index] = None
        return list(bad)

    def _move(
        self,
        is_write: bool,
        places: Sequence[Place],
        columns: SliceColumns,
        deadline: float,
        is_checked: bool = True,
    ) -> Operation[list[tuple[SlicesMoved, SliceColumns]]]:
        """One transfer per segment, all at once. ``columns.grant`` is an index of ``places``."""
        bases = np.array([place.address for place in places], dtype=np.uint64)
        segments: dict[str, int] = {}
        numbers = [segments.setdefault(place.replica.segment, len(segments)) for place in places]
        of_slice = np.array(numbers)[columns.grant]
        transfers: list[Slices] = []
        parts: list[SliceColumns] = []
        for number in range(len(segments)):
            part = columns if len(segments) == 1 else columns.where(of_slice == number)
            if part.grant.size:
                remote = bases[part.grant] + part.offset
                first = places[int(part.grant[0])]
                checks = is_checked or self._must_be_checked(first.replica)
                has_others = isinstance(first, ReadGrant) and _have_others(places, part)
                transfers.append(Slices(first.segment, part.local, remote, part.length, checks, has_others))
                parts.append(part)
        outcomes: list[SlicesMoved] = yield MoveSlices(is_write, transfers, deadline)
        for moved, part in zip(outcomes, parts, strict=True):
            if moved.checksums is None and not is_write and moved.now >= deadline:
                self.counts.failed_transfers += 1  # out of time, which does not mean that the node is lost
            elif moved.checksums is None:
                self._lost(places[int(part.grant[0])].replica.segment)
        return list(zip(outcomes, parts, strict=True))

    def _prefer_devices(self, grants: Sequence[ReadGrant], columns: SliceColumns) -> None:
        """Read a replica in device memory first where the bytes go to that device; elsewhere memory is."""
        choices = [
            index
            for index, grant in enumerate(grants)
            if grant.others and any(replica.tier is Tier.DEVICE for replica, _ in grant.places)
        ]
        if not choices:
            return
        numbers, first = np.unique(columns.grant, return_index=True)
        addresses = dict(zip(numbers.tolist(), columns.local[first].tolist(), strict=True))
        for index in choices:
            if index in addresses:
                local = addresses[index]
                places = grants[index].places
                ranked = [
                    (not self._is_beside(replica, handle, local), *self._distance(replica), number)
                    for number, (replica, handle) in enumerate(places)
                ]
                grants[index].use([places[rank[-1]] for rank in sorted(ranked)])

    def _is_beside(self, replica: m.Replica, handle: Any, local: int) -> bool:
        """Whether ``replica`` is in memory of the device on this host that has the address ``local``."""
        is_candidate = replica.tier is Tier.DEVICE and self._hosts.get(replica.segment) == self._host
        return is_candidate and self._is_on_one_device(handle, replica.address, local)

    def _must_be_checked(self, replica: m.Replica) -> bool:
        """Whether reads from ``replica`` are verified: always if the bytes leave a machine or an SSD."""
        return self._verify_local or any(self._distance(replica))

    def _distance(self, replica: m.Replica) -> tuple[bool, bool, bool]:
        """Sort key: memory on this host, memory elsewhere, SSD on this host, SSD elsewhere; devices after
        memory."""
        is_far = self._hosts.get(replica.segment) != self._host
        return replica.tier is Tier.SSD, is_far, replica.tier is Tier.DEVICE


def _code(outcome: Refusal | None) -> str:
    return "" if outcome is None else outcome.code


def _have_others(places: Sequence[Place], part: SliceColumns) -> bool:
    """Whether every object that is read has another replica."""
    read = (places[index] for index in distinct(part.grant))
    return all(isinstance(place, ReadGrant) and place.others for place in read)
