# SPDX-License-Identifier: Apache-2.0
"""The master's handlers for writers: space is reserved, written by clients, and becomes an object or none.

For a put of a few KiB two requests would take longer than the transfer. So a writer of many may get a
*preallocation*: pieces of space of one size, promised like that of a started put, but for no object yet.
It writes into a piece and then reports once what it wrote, and where (``PutWritten``).

A preallocation is a promise like every other. Its pieces may be written for ``put_s``, and rest for
``grace_s`` when their use was not reported by then; a successor knows that they are held, but not for whom,
so it knows no preallocation. It must not starve others: nothing is evicted for it, and only a small share of
each segment is preallocated, while there is room.

Only the client to which it was given may use it: another's object would be in memory that this client still
writes, and a removal of it would give that memory to a third writer. So it has a name that only this client
was sent and that can't be guessed, and it is of this client's tenant. A connection is no owner: a question is
asked again on another one when its answer was lost.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Received
from mooncake.store.master.objects import (
    DEFAULT_POLICY,
    Extent,
    ObjectState,
    StoredObject,
    check_put,
    check_relation,
    replica_of,
    scoped,
    scoped_all,
    scoped_key,
)
from mooncake.store.master.placement import FreeSpace, SegmentPlacement, has_ssd
from mooncake.store.master.put_queue import DurablePuts, PutQueue
from mooncake.store.master.segments import Segment
from mooncake.store.master.tenants import Account, aligned, check_tenant
from mooncake.types import ObjectKey, Tier

MAX_REPLICAS = 64
MAX_PREFERRED = 1024
"""Most segments that a put may prefer."""
MAX_CYCLE = 64
"""Longer cycles of parents are not detected."""
MAX_PIECES = 64
MAX_PIECE_BYTES = 1 << 20
PREALLOCATED_SHARE = 1 / 16
"""Largest share of a segment that may be preallocated."""
FREE_SHARE = 1 / 32
"""Least share of a segment that must be free after a preallocation."""

NOT_ON_SSD = Refusal("no_ssd", "it is stored, but no copy of it is on SSD")
_MAY_WAIT = "no_space", "quota_exceeded"
"""Codes of refusals for which a put may wait."""
_NOT_GIVEN = Refusal(
    "expired", "the space was not preallocated for this client by this master, or its time is over"
)


class PutRequests:
    """Answers PutStart, PutEnd and PutAbort."""

    def __init__(
        self, catalog: Catalog, space: FreeSpace, preallocations: Preallocations, queue: PutQueue
    ) -> None:
        self._catalog = catalog
        self._queue = queue
        self._space = space
        self._preallocations = preallocations
        self.durable = DurablePuts(catalog)

    def put_start(self, message: m.PutStart, event: Received, now: float) -> m.PutStarted | Failure | None:
        count = len(message.keys)
        if not count == len(message.sizes) == len(message.chunk_bytes):
            return Failure("invalid_argument", "put_start: keys, sizes and chunk_bytes differ in length")
        if len(message.groups) not in (0, count) or len(message.parents) not in (0, count):
            return Failure("invalid_argument", "put_start: groups or parents, but not one for each key")
        reserved: list[m.Reserved | None] = [None] * count
        refusals: dict[int, Refusal] = {}
        placement = self._reserve_each(message, range(count), reserved, refusals, now)
        if refusals and self._queue.may_wait(message.wait_s) and _missing(refusals):

            def retry(now: float) -> bool:
                self._reserve_each(message, _missing(refusals), reserved, refusals, now)
                return bool(_missing(refusals))

            def answer(now: float) -> m.PutStarted:
                return self._started(message, reserved, refusals, None, now)

            self._queue.wait(event, message.wait_s, retry, answer, now)
            return None
        return self._started(message, reserved, refusals, placement, now)

    def _reserve_each(
        self,
        message: m.PutStart,
        indices: Sequence[int],
        reserved: list[m.Reserved | None],
        refusals: dict[int, Refusal],
        now: float,
    ) -> SegmentPlacement | None:
        """Reserve space for these keys, or refuse. None: the whole request is refused."""
        account: Account | Refusal = check_policy(message.policy) or self.admitted(message.tenant)
        placement = SegmentPlacement(self._catalog.segments, message.host, message.avoid, now, message.policy)
        if message.policy.preferred_segments:  # objects keep the policy, and need no names for it
            kept = msgspec.structs.replace(message.policy, preferred_segments=[])
            message = msgspec.structs.replace(message, policy=kept)
        if not isinstance(account, Refusal) and len(indices) > 1 and _is_uniform(message, account):
            indices = self._reserve_rows(message, indices, reserved, refusals, placement, account, now)
        least_refused: float = math.inf
        for index in indices:
            if index in refusals and message.sizes[index] >= least_refused:
                continue  # again: a thousand waiting puts of many keys would keep this master busy
            outcome: m.Reserved | Refusal | None
            if isinstance(account, Refusal):
                outcome = account
            else:
                outcome = self._reserve(message.put_id + index, message, index, placement, account, now)
            refusals.pop(index, None)
            if isinstance(outcome, Refusal):
                refusals[index] = outcome
                if outcome.code in _MAY_WAIT:
                    least_refused = min(least_refused, message.sizes[index])
            else:
                reserved[index] = outcome
        if isinstance(account, Refusal):
            return None
        self._catalog.tenants.tidy(account)
        return placement

    def _reserve_rows(
        self,
        message: m.PutStart,
        indices: Sequence[int],
        reserved: list[m.Reserved | None],
        refusals: dict[int, Refusal],
        placement: SegmentPlacement,
        account: Account,
        now: float,
    ) -> list[int]:
        """Reserve space for new keys of one size in rows: objects side by side in one segment.

        An object of a row costs half as much time as one alone. Returns the indices that are left: keys that
        are stored or being written, and those for which there is no such space.
        """
        catalog, keys = self._catalog, scoped_all(message.tenant, message.keys)
        readable, writing = catalog.objects.readable, catalog.objects.writing
        new = [index for index in indices if keys[index] not in readable and keys[index] not in writing]
        size_bytes, write_until = message.sizes[0], now + catalog.settings.put_s
        at, limit = 0, placement.row_length(size_bytes)
        while min(limit, len(new) - at) > 1:
            place = placement.allocate_row(size_bytes, min(limit, len(new) - at))
            if place is None:
                break
            segment, offsets = place
            row = new[at : at + len(offsets)]
            at += len(row)
            begun = catalog.begin_row(
                [keys[index] for index in row],
                [message.put_id + index for index in row],
                size_bytes,
                message.chunk_bytes[0],
                segment,
                offsets,
                account,
                write_until,
            )
            name, epoch, address, tier = segment.name, segment.epoch, segment.address, segment.tier
            for index, offset, stored in zip(row, offsets, begun, strict=True):
                stored.policy, stored.data_type = message.policy, message.policy.data_type
                replicas = [m.Replica(name, epoch, address + offset, tier)]
                reserved[index] = m.Reserved(stored.object_id, replicas)
                refusals.pop(index, None)
                catalog.add_story(now, stored.key, "put started as #{} on {}", stored.object_id, name)
        if not at:
            return list(indices)
        self._space.given(at * aligned(size_bytes))
        done = set(new[:at])
        return [index for index in indices if index not in done]

    def _started(
        self,
        message: m.PutStart,
        reserved: list[m.Reserved | None],
        refusals: dict[int, Refusal],
        placement: SegmentPlacement | None,
        now: float,
    ) -> m.PutStarted:
        """The answer; with preallocated space if there is a ``placement``."""
        for index, refusal in refusals.items():
            if refusal.code == "being_written":
                continue  # its writer asks again, possibly often
            self._catalog.counts.refused_puts += 1
            key = scoped_key(message.tenant, message.keys[index])
            self._catalog.add_story(now, key, "put refused: {}", refusal)
        preallocated = None
        if message.num_pieces and placement is not None:
            preallocated = self._preallocations.give(message, placement, now)
        self._space.evict_to_watermark(now)
        return m.PutStarted(self._catalog.settings.put_s, reserved, refusals, preallocated)

    def admitted(self, tenant: str) -> Account | Refusal:
        if not tenant:
            return self._catalog.tenants.account_of("")
        refusal = check_tenant(tenant)
        if refusal is not None:
            return refusal
        account = self._catalog.tenants.account_of(scoped(tenant, ""))
        is_known = account.quota_bytes is not None or not account.tenant
        if self._catalog.settings.strict_tenants and not is_known:
            self._catalog.tenants.tidy(account)  # or every name that a client makes up would have one
            return Refusal("unknown_tenant", f"tenant {tenant!r} has no quota here")
        return account

    def _reserve(
        self,
        put_id: int,
        message: m.PutStart,
        index: int,
        placement: SegmentPlacement,
        account: Account,
        now: float,
    ) -> m.Reserved | Refusal | None:
        catalog, policy = self._catalog, message.policy
        name, size_bytes, chunk_bytes = message.keys[index], message.sizes[index], message.chunk_bytes[index]
        refusal = check_put(name, size_bytes, chunk_bytes) or check_relations(message, index)
        if refusal is not None:
            return refusal
        key = scoped(message.tenant, name)
        known = self.known(key, put_id, message.replace, now)
        if known is not None:
            readable = catalog.objects.readable.get(key)
            if known is True and policy.is_durable and readable and not readable.complete(Tier.SSD):
                return NOT_ON_SSD
            catalog.must_last |= known is True and policy.is_durable
            return None if known is True else known
        if policy.is_durable and not placement.segments:
            return self._no_ssd(now)
        room = self._space.make_room(size_bytes, policy.num_replicas, placement, account, now)
        if isinstance(room, Refusal):
            return room
        write_until = now + catalog.settings.put_s
        stored = catalog.begin(key, put_id, size_bytes, chunk_bytes, room, write_until)
        stored.policy, stored.data_type = policy, policy.data_type
        self.relate(stored, message, index)
        where = room[0].segment.name if len(room) == 1 else ", ".join(one.segment.name for one in room)
        catalog.add_story(now, key, "put started as #{} on {}", stored.object_id, where)
        return m.Reserved(stored.object_id, stored.replicas())

    def _no_ssd(self, now: float) -> Refusal:
        """Why no segment may be tried for a durable put."""
        rests_s = [ssd.rests_until - now for ssd in self._catalog.alive(Tier.SSD) if ssd.rests_until > now]
        if not rests_s:
            return Refusal("no_ssd", "a durable put needs memory on a node whose SSD is mounted")
        reason = "what lay on the SSD before its node was started may still be read; it takes objects in"
        return Refusal("no_ssd", f"{reason} {min(rests_s):.3g} s")

    def relate(self, stored: StoredObject, message: m.PutStart | m.PutWritten, index: int) -> None:
        """Set the object's group and parent."""
        if message.groups and message.groups[index]:
            stored.group = scoped(message.tenant, message.groups[index])
        if message.parents and message.parents[index]:
            stored.parent = self._without_cycle(stored.key, scoped(message.tenant, message.parents[index]))

    def _without_cycle(self, key: ObjectKey, parent: ObjectKey) -> ObjectKey:
        """``parent``, or "" when it descends from ``key``: such objects would protect each other forever."""
        if self._catalog.settings.eviction_policy != "chain":
            return parent
        above = parent
        for _ in range(MAX_CYCLE):
            if above == key:
                return ""
            stored = self._catalog.objects.readable.get(above) or self._catalog.objects.writing.get(above)
            if stored is None or not stored.parent:
                break
            above = stored.parent
        return parent

    def known(
        self, key: ObjectKey, put_id: int, replaces: bool, now: float
    ) -> m.Reserved | Literal[True] | Refusal | None:
        """Return the answer for a repeated request; True if the key is stored; a refusal if another put is
        writing it, which may end without an object; None if it may be put."""
        stored = self._catalog.objects.readable.get(key)
        if stored is not None and stored.put_id == put_id:
            return True  # a late copy of the request that put it
        # One whose nodes are all suspected is missing, so the key may be put. It stays until that put ends
        # (``Catalog.show``): the put may be refused or never end, and the node may return.
        if stored is not None and not replaces and stored.is_visible:
            return True
        stored = self._catalog.objects.writing.get(key)
        if stored is None:
            return None
        is_reachable = stored.is_visible
        if stored.put_id == put_id and is_reachable:
            # A repeated request: its first answer was lost. Its deadline does not change, and the
            # writer counts from its first request, so the promise is not extended.
            return m.Reserved(stored.object_id, stored.replicas())
        if is_reachable:
            left_s = stored.write_until - now
            return Refusal("being_written", f"another put of the key may take {left_s:.3g} s longer")
        self._catalog.unlink(stored, "its node is suspected", now)
        return None

    def put_end(self, message: m.PutEnd, event: Received, now: float) -> m.Outcomes | Failure | None:
        count = len(message.keys)
        if not count == len(message.object_ids) == len(message.checksums):
            return Failure("invalid_argument", "put_end: keys, object_ids and checksums differ in length")
        if len(message.failed) not in (0, count):
            return Failure("invalid_argument", "put_end: failed, but not one for each key")
        outcomes: list[bool | Refusal] = []
        waiting: dict[int, StoredObject] = {}
        columns = zip(
            scoped_all(message.tenant, message.keys), message.object_ids, message.checksums, strict=True
        )
        for index, (key, object_id, checksums) in enumerate(columns):
            failed = message.failed[index] if message.failed else []
            outcome = self._end(key, object_id, checksums, failed, now)
            outcomes.append(outcome)
            if isinstance(outcome, Refusal):
                self._catalog.add_story(now, key, "put of #{} refused at its end: {}", object_id, outcome)
            elif self.durable.is_awaited(stored := self._catalog.objects.readable[key]):
                waiting[index] = stored
            else:
                self._catalog.must_last |= stored.policy.is_durable
        if not waiting:
            return m.Outcomes(outcomes)
        self.durable.park(event, m.Outcomes, outcomes, waiting, now)
        return None

    def _end(
        self, key: ObjectKey, object_id: int, checksums: bytes, failed: list[str], now: float
    ) -> bool | Refusal:
        stored = self._catalog.objects.find_writing(key, object_id, checksums, now)
        if not isinstance(stored, StoredObject):
            return stored or False
        for extent in list(stored.extents) if failed else ():
            if extent.segment.name in failed and stored.state is ObjectState.WRITING:
                self._catalog.drop_extent(stored, extent, "its writer could not write there", now)
        if stored.state is not ObjectState.WRITING:
            return Refusal("incomplete", "none of its replicas was written")
        self.finish(stored, checksums, now)
        self._catalog.add_story(now, key, "readable as #{}", object_id)
        return True

    def finish(self, stored: StoredObject, checksums: bytes, now: float) -> None:
        """Make an object readable whose bytes are all written."""
        policy = stored.policy
        stored.is_hard_pinned = policy.is_hard_pinned
        if policy.soft_pin_ttl_s is not None:
            stored.soft_pin_until = now + min(policy.soft_pin_ttl_s, self._catalog.settings.max_pin_s)
        self._catalog.counts.puts += 1
        self._catalog.show(stored, checksums, now)

    def put_abort(self, message: m.PutAbort, _: Received, now: float) -> m.Outcomes:
        outcomes: list[bool | Refusal] = []
        keys = scoped_all(message.tenant, message.keys)
        for key, object_id in zip(keys, message.object_ids, strict=False):
            stored = self._catalog.objects.writing.get(key)
            is_ours = stored is not None and stored.object_id == object_id
            if stored is not None and is_ours:
                self._catalog.unlink(stored, "put aborted", now)
            outcomes.append(is_ours)
        return m.Outcomes(outcomes)


@dataclasses.dataclass(slots=True)
class Preallocation:
    """One preallocation, until its deadline."""

    until: float
    owner: str
    """The scoped empty name of the tenant that may use it."""
    size_bytes: int
    pieces: list[Extent | int]
    """An int is the identity of the put that used the piece."""


class Preallocations:
    """Preallocations that may still be written."""

    def __init__(self, catalog: Catalog, space: FreeSpace, secret: bytes) -> None:
        self._catalog = catalog
        self._space = space
        self._secret = secret
        self._given: dict[int, Preallocation] = {}
        """By id, oldest first."""

    def give(
        self, message: m.PutStart | m.PutWritten, placement: SegmentPlacement, now: float
    ) -> m.PreallocatedSpace | None:
        """As many of the pieces that it requests as are available; None if none is."""
        num_pieces, size_bytes = min(message.num_pieces, MAX_PIECES), message.piece_bytes
        if num_pieces <= 0 or not 0 < size_bytes <= MAX_PIECE_BYTES:
            return None
        extents = self._in_a_row(num_pieces, size_bytes, placement)
        while len(extents) < num_pieces:
            place = placement.allocate(size_bytes)
            if place is None:
                break
            if not _has_room(place[0], size_bytes):
                place[0].allocator.free(place[1])
                placement.freed(place[0])
                break
            place[0].preallocated_bytes += size_bytes
            extents.append(Extent(*place))
        if not extents:
            return None
        self._space.given(aligned(size_bytes) * len(extents))
        put_s, advance_id, owner = self._catalog.settings.put_s, self._new_id(), scoped(message.tenant, "")
        self._given[advance_id] = Preallocation(now + put_s, owner, size_bytes, list[Extent | int](extents))
        replicas = [replica_of(extent) for extent in extents]
        self._catalog.preallocate(extents, size_bytes, now + put_s)
        return m.PreallocatedSpace(advance_id, put_s, size_bytes, replicas, placement.is_durable)

    def _new_id(self) -> int:
        """An id from which, and from those of objects, no client can derive that of another client."""
        number = self._catalog.objects.new_id().to_bytes(16)
        return int.from_bytes(hashlib.blake2b(number, key=self._secret, digest_size=8).digest()) >> 1

    def _in_a_row(self, num_pieces: int, size_bytes: int, placement: SegmentPlacement) -> list[Extent]:
        """All of them from one hole, or none: mostly there is one, and that costs less than many."""
        place = placement.allocate(num_pieces * size_bytes)
        if place is None:
            return []
        segment, offset = place
        if size_bytes % segment.allocator.alignment_bytes or not _has_room(segment, num_pieces * size_bytes):
            segment.allocator.free(offset)
            placement.freed(segment)
            return []
        segment.allocator.split(offset, size_bytes)
        segment.preallocated_bytes += num_pieces * size_bytes
        return [Extent(segment, offset + number * size_bytes) for number in range(num_pieces)]

    def find(
        self, piece: tuple[int, int], tenant: str, put_id: int, size_bytes: int, now: float
    ) -> Extent | Refusal | None:
        """The piece, if it may become an object of that size; None: it became one by this very put."""
        advance_id, number = piece
        given = self._given.get(advance_id)
        if given is None or now >= given.until or not 0 <= number < len(given.pieces):
            return _NOT_GIVEN
        if given.owner != scoped(tenant, ""):
            return _NOT_GIVEN  # not even that there is such a piece
        extent = given.pieces[number]
        if extent == put_id:
            return None
        if isinstance(extent, int):
            return Refusal("expired", "another object is there")
        if not extent.segment.takes_objects(now) or size_bytes > given.size_bytes:
            return Refusal("expired", f"an object of {size_bytes} bytes may not be put there now")
        return extent

    def use(self, piece: tuple[int, int], put_id: int) -> None:
        """Mark the piece, which was found, as used by an object."""
        given = self._given[piece[0]]
        extent, given.pieces[piece[1]] = given.pieces[piece[1]], put_id
        assert isinstance(extent, Extent)
        extent.segment.preallocated_bytes -= given.size_bytes

    def deadline(self) -> float | None:
        for given in self._given.values():
            return given.until
        return None

    def expire(self, now: float) -> None:
        """Let unused pieces rest; their use can no longer be reported."""
        while self._given:
            advance_id, given = next(iter(self._given.items()))
            if given.until > now:
                break
            del self._given[advance_id]
            for extent in given.pieces:
                if isinstance(extent, Extent):
                    extent.segment.preallocated_bytes -= given.size_bytes

    def check(self) -> None:
        preallocated: dict[Segment, int] = {}
        for given in self._given.values():
            for extent in given.pieces:
                if isinstance(extent, int):
                    continue
                segment = extent.segment
                preallocated[segment] = preallocated.get(segment, 0) + given.size_bytes
                if segment.is_mounted:
                    assert extent in segment.holders[extent.offset].resting, f"{extent} was allocated again"
        for segment in self._catalog.segments.mounted.values():
            assert segment.preallocated_bytes == preallocated.get(segment, 0), segment


def _has_room(segment: Segment, size_bytes: int) -> bool:
    """Whether these bytes, which have been allocated, may be preallocated."""
    allocator = segment.allocator
    is_little = segment.preallocated_bytes + size_bytes <= PREALLOCATED_SHARE * allocator.size_bytes
    return is_little and allocator.free_bytes >= FREE_SHARE * allocator.size_bytes


class PreallocatedPuts:
    """Answers PutWritten: makes the checks of PutStart and PutEnd in one step, by the same rules."""

    def __init__(
        self, catalog: Catalog, space: FreeSpace, preallocations: Preallocations, put: PutRequests
    ) -> None:
        self._catalog = catalog
        self._space = space
        self._preallocations = preallocations
        self._put_requests = put

    def put_written(
        self, message: m.PutWritten, event: Received, now: float
    ) -> m.PutsWritten | Failure | None:
        count = len(message.keys)
        if not count == len(message.sizes) == len(message.checksums) == len(message.pieces):
            return Failure(
                "invalid_argument", "put_written: keys, sizes, checksums and pieces differ in length"
            )
        if len(message.groups) not in (0, count) or len(message.parents) not in (0, count):
            return Failure("invalid_argument", "put_written: groups or parents, but not one for each key")
        policy = message.policy
        # Without a preallocation, only parts that observe the catalog set a deadline; they withdraw this.
        self._catalog.keeps_deadline = not message.num_pieces
        refusal = None if policy is None else check_policy(policy) or _check_simple(policy)
        account: Account | Refusal = refusal or self._put_requests.admitted(message.tenant)
        outcomes: list[bool | Refusal] = []
        waiting: dict[int, StoredObject] = {}
        for index in range(count):
            outcome = account if isinstance(account, Refusal) else self._put(message, index, account, now)
            if policy is not None and policy.is_durable:
                outcome = self._as_durable(message, index, outcome, waiting)
            outcomes.append(outcome)
            if isinstance(outcome, Refusal):
                self._catalog.counts.refused_puts += outcome.code not in m.PUT_AGAIN
                key = scoped_key(message.tenant, message.keys[index])
                self._catalog.add_story(now, key, "put into preallocated space refused: {}", outcome)
        if isinstance(account, Refusal):
            return m.PutsWritten(outcomes)
        self._catalog.tenants.tidy(account)
        preallocated: m.PreallocatedSpace | None = None
        if message.num_pieces:
            wanted = DEFAULT_POLICY if policy is None else policy
            placement = SegmentPlacement(self._catalog.segments, message.host, (), now, wanted)
            preallocated = self._preallocations.give(message, placement, now)
        if waiting:  # before anything may be evicted that is waited for
            answer = partial(m.PutsWritten, advance=preallocated)
            self._put_requests.durable.park(event, answer, outcomes, waiting, now)
        if message.num_pieces:
            self._space.evict_to_watermark(now)
        return None if waiting else m.PutsWritten(outcomes, preallocated)

    def _as_durable(
        self, message: m.PutWritten, index: int, outcome: bool | Refusal, waiting: dict[int, StoredObject]
    ) -> bool | Refusal:
        """The outcome for a durable object; ``waiting`` gets what is under the key if that is being copied to
        SSD. A writer whose piece is of another master may have put it under that one, and finds it on SSD
        then."""
        key = scoped_key(message.tenant, message.keys[index])
        stored = self._catalog.objects.readable.get(key)
        is_final = isinstance(outcome, Refusal) and outcome.code != "expired"
        if not is_final and stored is not None and self._put_requests.durable.is_awaited(stored):
            waiting[index] = stored
        elif isinstance(outcome, Refusal):
            return outcome
        elif stored is not None and not stored.complete(Tier.SSD):
            return NOT_ON_SSD
        elif stored is None and outcome:
            return Refusal("no_ssd", "the object was removed before its writer was answered")
        else:
            self._catalog.must_last = True
        return outcome

    def _put(self, message: m.PutWritten, index: int, account: Account, now: float) -> bool | Refusal:
        """True: readable now, or since an earlier copy of this request; False: the key is taken, and the
        piece is free. That is not known of a piece from another master, under which this request may have put
        the object that is there now."""
        catalog, name, size_bytes = self._catalog, message.keys[index], message.sizes[index]
        refusal = check_put(name, size_bytes, size_bytes) or check_relations(message, index)
        if refusal is not None:
            return refusal
        key, put_id = scoped(message.tenant, name), message.put_id + index
        piece = self._preallocations.find(message.pieces[index], message.tenant, put_id, size_bytes, now)
        if piece is None:
            return True  # a late copy of the request that put it; the object may have been removed since
        if isinstance(piece, Refusal):
            return piece
        known = self._put_requests.known(key, put_id, False, now)
        if isinstance(known, Refusal):
            return Refusal("not_here", known.reason)
        if known is not None:
            return False
        checksums = message.checksums[index]
        if len(checksums) != 4:
            return Refusal("invalid_checksums", f"{len(checksums)} bytes for 1 chunk")
        is_durable = message.policy is not None and message.policy.is_durable
        if is_durable and not has_ssd(catalog.segments, piece.segment, now):
            return Refusal("expired", "the SSD of that node does not take objects now")
        refusal = self._space.fit(size_bytes, account, now)
        if refusal is not None:
            return Refusal("not_here", refusal.reason) if is_durable else refusal
        self._preallocations.use(message.pieces[index], put_id)
        stored = catalog.begin_written(key, put_id, size_bytes, piece, now)
        if message.policy is not None:
            stored.policy, stored.data_type = message.policy, message.policy.data_type
        self._put_requests.relate(stored, message, index)
        self._put_requests.finish(stored, checksums, now)
        where = piece.segment.name
        catalog.add_story(now, key, "put as #{} in one step, readable on {}", stored.object_id, where)
        return True


def _is_uniform(message: m.PutStart, account: Account) -> bool:
    """Whether its objects are all of one valid size, under different valid keys, and have one replica."""
    keys, policy = message.keys, message.policy
    return (
        policy.num_replicas == 1
        and not (policy.is_durable or message.replace or message.groups or message.parents)
        and account.quota_bytes is None
        and message.sizes.count(message.sizes[0]) == len(keys)
        and message.chunk_bytes.count(message.chunk_bytes[0]) == len(keys)
        and len(set(keys)) == len(keys)
        and 4 * max(map(len, keys)) <= m.MAX_KEY_BYTES  # even if all characters take four bytes
        and "\0" not in "".join(keys)
        and check_put(min(keys, key=len), message.sizes[0], message.chunk_bytes[0]) is None
    )


def _missing(refusals: dict[int, Refusal]) -> list[int]:
    """The refused keys for which there is no room now."""
    return sorted(at for at, refusal in refusals.items() if refusal.code in _MAY_WAIT)


def check_relations(message: m.PutStart | m.PutWritten, index: int) -> Refusal | None:
    """Check one key of a request: an invalid group or parent would be another tenant's."""
    if not message.groups and not message.parents:
        return None
    group = message.groups[index] if message.groups else ""
    parent = message.parents[index] if message.parents else ""
    return check_relation(group) or check_relation(parent)


def check_policy(policy: m.PutPolicy) -> Refusal | None:
    if not 1 <= policy.num_replicas <= MAX_REPLICAS:
        return Refusal("invalid_policy", f"{policy.num_replicas} replicas; 1 to {MAX_REPLICAS}")
    if len(policy.preferred_segments) > MAX_PREFERRED:
        num_named = len(policy.preferred_segments)
        return Refusal("invalid_policy", f"{num_named} preferred segments; at most {MAX_PREFERRED}")
    if policy.soft_pin_ttl_s is not None and not policy.soft_pin_ttl_s >= 0:
        return Refusal("invalid_policy", f"a soft pin of {policy.soft_pin_ttl_s} s; at least 0")
    return None


def _check_simple(policy: m.PutPolicy) -> Refusal | None:
    if policy.num_replicas > 1 or policy.preferred_segments or policy.is_same_host:
        return Refusal("invalid_policy", "a put with such a policy takes PutStart and PutEnd")
    return None
