"""Put, get and the rest, written once: generators that yield what they need and get what came of it.

An operation decides (what to ask, where to move bytes, whether to believe them, when to give up) and
does nothing: it yields ``Ask``, ``Open``, ``Move`` or ``Pause`` and is resumed with the outcome.
``client.py`` runs these generators blocking and on asyncio, the simulator on virtual time with
faults. Memory is addresses and lengths here; whose it is and that it is registered with transfer,
the caller sees to.

What a reader may believe: bytes whose transfer ended before the lease did *and* whose CRC32C match
what the writer announced. Anything else is a miss. What a writer may announce: an object every
chunk of which was written, in one transfer or many, before the reservation's deadline.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.errors import DeadlineExceeded, InvalidArgument, MooncakeError, PeerLost, Refusal
from mooncake.store import messages as m
from mooncake.types import ObjectKey

Addresses: TypeAlias = npt.NDArray[np.uint64]
Checksums: TypeAlias = npt.NDArray[np.uint32]

DEFAULT_CHUNK_BYTES = 1 << 20
FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 0.5
MAX_PUT_ATTEMPTS = 3
"""How often a put looks for another segment after a node could not be reached."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """Ask the master; resumed with an ``Answer``."""

    message: msgspec.Struct
    deadline: float


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """``reply``, or why there is none."""

    reply: Any
    error: MooncakeError | None
    asked_at: float
    now: float


@dataclasses.dataclass(frozen=True, slots=True)
class Open:
    """Make a segment reachable; resumed with transfer's handle, or None when it can't be reached."""

    segment: str
    epoch: int
    descriptor: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Slices:
    """Columns of one transfer with one segment."""

    handle: Any
    local: Addresses
    remote: Addresses
    lengths: Addresses


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """Move bytes, all transfers at once; resumed with one ``Moved`` for each.

    When ``deadline`` has passed already, nothing may be started: a write then could land in space that
    belongs to somebody else.
    """

    is_write: bool
    transfers: list[Slices]
    deadline: float


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """``checksums``: CRC32C of every slice, or None when the transfer failed. ``reason``: why."""

    checksums: Checksums | None
    reason: str
    now: float


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """Wait; resumed with None."""

    seconds: float


Effect = Ask | Open | Move | Pause
ResultT = TypeVar("ResultT")
Operation: TypeAlias = Generator[Effect, Any, ResultT]


@dataclasses.dataclass(slots=True, eq=False)
class PutGrant:
    """Space in a segment, to be written before ``expires_at`` (this process's monotonic clock)."""

    key: ObjectKey
    size_bytes: int
    chunk_bytes: int
    segment: Any
    """Transfer's handle."""
    address: int
    """Of the object's first byte, absolute in the peer."""
    checksums: Checksums
    """CRC32C per chunk; filled by ``write_ranges``, or by whoever else writes a whole chunk."""
    is_written: npt.NDArray[np.bool_]
    """Which chunks are complete; set together with ``checksums``."""
    expires_at: float
    object_id: int
    replica: m.Replica
    failure: Refusal | None = None
    """Why this put can't succeed any more."""
    pieces: dict[int, list[tuple[int, int, int]]] = dataclasses.field(default_factory=dict)
    """Chunk -> (offset in it, length, CRC32C) of parts of a chunk that isn't complete yet."""


@dataclasses.dataclass(slots=True, eq=False)
class ReadGrant:
    """A readable object under a lease that ends at ``expires_at`` (this process's monotonic clock)."""

    key: ObjectKey
    size_bytes: int
    chunk_bytes: int
    segment: Any
    address: int
    checksums: Checksums
    expires_at: float
    object_id: int
    replica: m.Replica


Grant: TypeAlias = PutGrant | ReadGrant


@dataclasses.dataclass
class Counts:
    """What this client saw; the shell exports it."""

    checksum_mismatches: int = 0
    expired_leases: int = 0
    failed_transfers: int = 0
    repeated_requests: int = 0


class Operations:
    """The operations of one client. Safe to use from several threads: shared state is one dict.

    ``combine(crc_a, crc_b, length_b)`` is transfer's ``crc32c_combine``. ``first_put_id`` must be
    random over 62 bits, so that no two clients share a put id.
    """

    def __init__(self, host: str, combine: Callable[[int, int, int], int], first_put_id: int) -> None:
        self._host = host
        self._combine = combine
        self._put_ids = itertools.count(first_put_id, m.MAX_KEYS)
        self._handles: dict[str, tuple[int, Any]] = {}
        """Segment -> (epoch, transfer's handle)."""
        self.counts = Counts()

    # Whole objects

    def put(
        self,
        keys: Sequence[ObjectKey],
        addresses: Sequence[int],
        sizes: Sequence[int],
        chunk_bytes: int,
        deadline: float,
    ) -> Operation[list[Refusal | None]]:
        """Store objects that lie at ``addresses``. None: stored (or was already)."""
        outcomes: list[Refusal | None] = [None] * len(keys)
        wanted, avoid = list(range(len(keys))), list[str]()
        for attempt in range(MAX_PUT_ATTEMPTS):
            grants = yield from self.start_puts(
                [keys[i] for i in wanted],
                [sizes[i] for i in wanted],
                [min(chunk_bytes, max(1, sizes[i])) for i in wanted],
                deadline,
                avoid,
            )
            held: list[tuple[int, PutGrant]] = []
            for index, grant in zip(wanted, grants, strict=True):
                if isinstance(grant, PutGrant):
                    held.append((index, grant))
                elif attempt == 0 or grant is not None:
                    outcomes[index] = grant
            yield from self._write_whole([g for _, g in held], [addresses[i] for i, _ in held], deadline)
            ended = yield from self.end_puts([grant for _, grant in held], deadline)
            wanted = []
            for (index, grant), outcome in zip(held, ended, strict=True):
                outcomes[index] = outcome
                if outcome is not None and outcome.code == "peer_lost":
                    wanted.append(index)
                    if grant.replica.segment not in avoid:
                        avoid.append(grant.replica.segment)
            if not wanted:
                break
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
        """Read every grant's whole object to its address; which ones may be believed."""
        return (yield from self._read(grants, _whole(grants, addresses), deadline))

    def _write_whole(
        self, grants: Sequence[PutGrant], addresses: Sequence[int], deadline: float
    ) -> Operation[None]:
        yield from self._write(grants, _whole(grants, addresses), deadline)

    # Parts of objects

    def start_puts(
        self,
        keys: Sequence[ObjectKey],
        sizes: Sequence[int],
        chunk_bytes: Sequence[int],
        deadline: float,
        avoid: Sequence[str] = (),
    ) -> Operation[list[PutGrant | Refusal | None]]:
        """Reserve space. None: the object exists, or another writer is at it."""
        outcomes: list[PutGrant | Refusal | None] = []
        for start in range(0, len(keys), m.MAX_KEYS):
            part = slice(start, start + m.MAX_KEYS)
            message = m.PutStart(
                next(self._put_ids),
                self._host,
                list(keys[part]),
                list(sizes[part]),
                list(chunk_bytes[part]),
                list(avoid),
            )
            answer, first_asked_at = yield from self._ask(message, deadline)
            # Asked twice, the promise may stem from the first time.
            expires_at = first_asked_at + answer.reply.put_s
            started: m.PutStarted = answer.reply
            handles = yield from self._open([r for r in started.reserved if r is not None], deadline)
            for offset, reserved in enumerate(started.reserved):
                at = start + offset
                if reserved is None:
                    outcomes.append(started.refusals.get(offset))
                    continue
                grant = _put_grant(keys[at], sizes[at], chunk_bytes[at], reserved, expires_at)
                grant.segment = handles.get(grant.replica.segment)
                if grant.segment is None:
                    grant.failure = _lost(grant.replica, "it can't be opened")
                outcomes.append(grant)
        return outcomes

    def write_ranges(
        self,
        grants: Sequence[PutGrant],
        object_offsets: npt.ArrayLike,
        local_addresses: npt.ArrayLike,
        lengths: npt.ArrayLike,
        deadline: float,
    ) -> Operation[list[Refusal | None]]:
        """Write parts of objects: k slices for each grant, the slices of one grant in a row.

        Columns are u64 [k * len(grants)]. None: written. A refused grant stays refused; end or abort it.
        """
        columns = _columns(grants, object_offsets, local_addresses, lengths)
        _check_bounds(grants, columns)
        yield from self._write(grants, columns.cut_at_chunks(grants), deadline)
        return [grant.failure for grant in grants]

    def read_ranges(
        self,
        grants: Sequence[ReadGrant],
        object_offsets: npt.ArrayLike,
        local_addresses: npt.ArrayLike,
        lengths: npt.ArrayLike,
        deadline: float,
    ) -> Operation[list[bool]]:
        """Read parts of objects, columns as in ``write_ranges``; which grants' parts may be believed.

        Raises:
            InvalidArgument: the parts of one object don't make up whole chunks: a part of a chunk
                can't be verified.
        """
        columns = _columns(grants, object_offsets, local_addresses, lengths)
        _check_bounds(grants, columns)
        columns = columns.cut_at_chunks(grants)
        _check_whole_chunks(grants, columns)
        return (yield from self._read(grants, columns, deadline))

    def end_puts(self, grants: Sequence[PutGrant], deadline: float) -> Operation[list[Refusal | None]]:
        """Make complete objects visible; the others are given up, with the reason."""
        for grant in grants:
            if grant.failure is None and b"\0" in grant.is_written.tobytes():
                missing = int(grant.is_written.size - grant.is_written.sum())
                grant.failure = Refusal("incomplete", f"{missing} chunks of {grant.key!r} were not written")
        good = [grant for grant in grants if grant.failure is None]
        for start in range(0, len(good), m.MAX_KEYS):
            part = good[start : start + m.MAX_KEYS]
            message = m.PutEnd(
                [grant.key for grant in part],
                [grant.object_id for grant in part],
                [grant.checksums.tobytes() for grant in part],
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
        """Give reservations up. Best effort: what the master does not hear, its deadline does."""
        for start in range(0, len(grants), m.MAX_KEYS):
            part = grants[start : start + m.MAX_KEYS]
            yield Ask(m.PutAbort([grant.key for grant in part], [g.object_id for g in part]), deadline)
        for grant in grants:
            grant.failure = grant.failure or Refusal("aborted", "this put was given up")

    def open_reads(self, keys: Sequence[ObjectKey], deadline: float) -> Operation[list[ReadGrant | None]]:
        """Find objects and lease them."""
        grants: list[ReadGrant | None] = []
        for start in range(0, len(keys), m.MAX_KEYS):
            part = list(keys[start : start + m.MAX_KEYS])
            answer, _ = yield from self._ask(m.Lookup(part), deadline)
            expires_at = answer.asked_at + answer.reply.lease_s
            found = answer.reply.objects
            handles = yield from self._open([stored for stored in found if stored is not None], deadline)
            for key, stored in zip(part, found, strict=True):
                grant = None if stored is None else _read_grant(key, stored, expires_at, handles)
                grants.append(grant)
        return grants

    # Metadata

    def exists(self, keys: Sequence[ObjectKey], deadline: float) -> Operation[list[bool]]:
        """Which keys can be read now; they are leased."""
        flags: list[bool] = []
        for start in range(0, len(keys), m.MAX_KEYS):
            answer, _ = yield from self._ask(m.Exists(list(keys[start : start + m.MAX_KEYS])), deadline)
            flags += map(bool, answer.reply.flags)
        return flags

    def remove(
        self, keys: Sequence[ObjectKey], force: bool, deadline: float
    ) -> Operation[list[bool | Refusal]]:
        """True: removed; False: there was none; a Refusal: a reader holds it and not ``force``."""
        outcomes: list[bool | Refusal] = []
        for start in range(0, len(keys), m.MAX_KEYS):
            message = m.Remove(list(keys[start : start + m.MAX_KEYS]), force)
            answer, _ = yield from self._ask(message, deadline)
            outcomes += answer.reply.outcomes
        return outcomes

    def renew(self, grants: Sequence[ReadGrant], deadline: float) -> Operation[list[bool]]:
        """Extend leases; False: that object is gone, stop reading when the old lease ends."""
        message = m.Renew([grant.key for grant in grants], [grant.object_id for grant in grants])
        answer, _ = yield from self._ask(message, deadline)
        for grant, flag in zip(grants, answer.reply.flags, strict=True):
            if flag:
                grant.expires_at = max(grant.expires_at, answer.asked_at + answer.reply.lease_s)
        return [bool(flag) for flag in answer.reply.flags]

    def ask(self, message: msgspec.Struct, deadline: float) -> Operation[Any]:
        """Any other message, repeated while the master can't be reached."""
        answer, _ = yield from self._ask(message, deadline)
        return answer.reply

    # Steps

    def _ask(self, message: msgspec.Struct, deadline: float) -> Operation[tuple[Answer, float]]:
        """The answer, and when the question was put for the first time.

        Every message may arrive twice without harm (``messages.py``), so a broken connection only
        costs the question again.
        """
        pause_s = FIRST_PAUSE_S
        first_asked_at: float | None = None
        while True:
            answer: Answer = yield Ask(message, deadline)
            if first_asked_at is None:
                first_asked_at = answer.asked_at
            if answer.error is None:
                return answer, first_asked_at
            if not isinstance(answer.error, PeerLost):
                raise answer.error
            if answer.now + pause_s >= deadline:
                raise DeadlineExceeded(f"{answer.error}; no more time to ask again") from answer.error
            self.counts.repeated_requests += 1
            yield Pause(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _open(self, found: Sequence[m.Reserved | m.Stored], deadline: float) -> Operation[dict[str, Any]]:
        """Transfer's handles of every segment in ``found``, by name; None where there is none."""
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
            answer, _ = yield from self._ask(m.Describe(missing), deadline)
            for (name, epoch), descriptor in zip(missing, answer.reply.descriptors, strict=True):
                self._handles.pop(name, None)
                if descriptor is not None:
                    handle = yield Open(name, epoch, descriptor)
                    if handle is not None:
                        self._handles[name] = (epoch, handle)
        handles: dict[str, Any] = {}
        for name, epoch in wanted.items():
            known = self._handles.get(name)
            handles[name] = known[1] if known is not None and known[0] == epoch else None
        return handles

    def _write(self, grants: Sequence[PutGrant], columns: _Columns, deadline: float) -> Operation[None]:
        """``columns`` lie within their objects and cross no chunk's border."""
        columns = columns.only([grant.failure is None for grant in grants])
        if not columns.grant.size:
            return
        until = min(deadline, *(grants[i].expires_at for i in _distinct(columns.grant)))
        for moved, part in (yield from self._move(True, grants, columns, until)):
            for index in _distinct(part.grant):
                grant = grants[index]
                if moved.now >= grant.expires_at:
                    grant.failure = Refusal("expired", "the deadline for writing has passed")
                elif moved.checksums is None:
                    grant.failure = _lost(grant.replica, moved.reason)
            if moved.checksums is not None:
                self._account(grants, part, moved.checksums)

    def _account(self, grants: Sequence[PutGrant], part: _Columns, checksums: Checksums) -> None:
        """Enter the checksums of what was written, chunk by chunk."""
        offsets, lengths = part.offset.tolist(), part.length.tolist()
        for index, offset, length, crc in zip(
            part.grant.tolist(), offsets, lengths, checksums.tolist(), strict=True
        ):
            grant = grants[index]
            chunk, start = divmod(offset, grant.chunk_bytes)
            whole = min(grant.chunk_bytes, grant.size_bytes - chunk * grant.chunk_bytes)
            if length != whole:
                pieces = grant.pieces.setdefault(chunk, [])
                pieces[:] = [p for p in pieces if p[0] + p[1] <= start or p[0] >= start + length]
                pieces.append((start, length, crc))
                combined = self._tiled(pieces, whole)
                grant.is_written[chunk] = combined is not None
                if combined is None:
                    continue
                crc = combined
            grant.checksums[chunk] = crc
            grant.is_written[chunk] = True

    def _tiled(self, pieces: list[tuple[int, int, int]], whole: int) -> int | None:
        """The checksum of a chunk of ``whole`` bytes that ``pieces`` cover exactly, else None."""
        pieces.sort()
        at, crc = 0, 0
        for start, length, piece_crc in pieces:
            if start != at:
                return None
            crc = piece_crc if at == 0 else self._combine(crc, piece_crc, length)
            at += length
        return crc if at == whole else None

    def _read(self, grants: Sequence[ReadGrant], columns: _Columns, deadline: float) -> Operation[list[bool]]:
        """``columns`` make up whole chunks and cross no chunk's border."""
        is_good = [grant.segment is not None for grant in grants]
        columns = columns.only(is_good)
        if not columns.grant.size:
            return is_good
        until = min(deadline, max(grants[i].expires_at for i in _distinct(columns.grant)))
        corrupt: dict[int, None] = {}
        for moved, part in (yield from self._move(False, grants, columns, until)):
            if moved.checksums is None:
                for index in _distinct(part.grant):
                    is_good[index] = False
                continue
            for index in _distinct(part.grant):
                if moved.now >= grants[index].expires_at:
                    is_good[index] = False
                    self.counts.expired_leases += 1
            for index in self._mismatches(grants, part, moved.checksums):
                if is_good[index]:
                    is_good[index] = False
                    corrupt[index] = None
        if corrupt:
            self.counts.checksum_mismatches += len(corrupt)
            yield from self._report_corrupt([grants[index] for index in corrupt], deadline)
        return is_good

    def _report_corrupt(self, grants: list[ReadGrant], deadline: float) -> Operation[None]:
        """Best effort: whoever reads it next finds out as well."""
        for start in range(0, len(grants), m.MAX_KEYS):
            part = grants[start : start + m.MAX_KEYS]
            yield Ask(m.Corrupt([g.key for g in part], [g.object_id for g in part]), deadline)

    def _mismatches(self, grants: Sequence[ReadGrant], part: _Columns, checksums: Checksums) -> list[int]:
        """Indices of grants whose bytes aren't what the writer announced."""
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
            if self._tiled(parts, whole) != grant.checksums[chunk]:
                bad[index] = None
        return list(bad)

    def _move(
        self, is_write: bool, grants: Sequence[Grant], columns: _Columns, deadline: float
    ) -> Operation[list[tuple[Moved, _Columns]]]:
        """One transfer per segment, all at once."""
        bases = np.array([grant.address for grant in grants], dtype=np.uint64)
        segments: dict[str, int] = {}
        numbers = [segments.setdefault(grant.replica.segment, len(segments)) for grant in grants]
        of_slice = np.array(numbers)[columns.grant]
        transfers: list[Slices] = []
        parts: list[_Columns] = []
        for number in range(len(segments)):
            part = columns if len(segments) == 1 else columns.where(of_slice == number)
            if part.grant.size:
                remote = bases[part.grant] + part.offset
                handle = grants[int(part.grant[0])].segment
                transfers.append(Slices(handle, part.local, remote, part.length))
                parts.append(part)
        outcomes: list[Moved] = yield Move(is_write, transfers, deadline)
        for moved, part in zip(outcomes, parts, strict=True):
            if moved.checksums is None:
                self.counts.failed_transfers += 1
                # The next operation asks the master afresh how this segment is reached.
                self._handles.pop(grants[int(part.grant[0])].replica.segment, None)
        return list(zip(outcomes, parts, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class _Columns:
    """Slices: which grant, where in its object, where in local memory, how long."""

    grant: npt.NDArray[np.intp]
    offset: Addresses
    local: Addresses
    length: Addresses

    def where(self, mask: npt.NDArray[np.bool_]) -> _Columns:
        if mask.all():
            return self
        return _Columns(self.grant[mask], self.offset[mask], self.local[mask], self.length[mask])

    def only(self, flags: list[bool]) -> _Columns:
        """The slices of the grants whose flag is set."""
        return self if all(flags) else self.where(np.array(flags, dtype=bool)[self.grant])

    def cut_at_chunks(self, grants: Sequence[Grant]) -> _Columns:
        """The same bytes in slices none of which crosses a chunk's border; empty ones left out."""
        chunk = np.array([grant.chunk_bytes for grant in grants], dtype=np.uint64)[self.grant]
        kept = self if self.length.all() else self.where(self.length > 0)
        if kept is not self:
            return kept.cut_at_chunks(grants)
        first = self.offset // chunk
        num_cuts = (self.offset + self.length - np.uint64(1)) // chunk - first + np.uint64(1)
        if not (num_cuts > 1).any():
            return self
        of = np.repeat(np.arange(len(self.grant)), num_cuts.astype(np.intp))
        starts = np.concatenate(([0], np.cumsum(num_cuts.astype(np.intp))[:-1]))
        turn = (np.arange(len(of)) - starts[of]).astype(np.uint64)
        begin = np.maximum((first[of] + turn) * chunk[of], self.offset[of])
        end = np.minimum((first[of] + turn + np.uint64(1)) * chunk[of], self.offset[of] + self.length[of])
        return _Columns(self.grant[of], begin, self.local[of] + (begin - self.offset[of]), end - begin)


def _distinct(column: npt.NDArray[np.intp]) -> list[int]:
    """Each number once, in order of appearance; for short columns this beats ``np.unique``."""
    return list(dict.fromkeys(column.tolist()))


def _columns(
    grants: Sequence[Grant],
    object_offsets: npt.ArrayLike,
    local_addresses: npt.ArrayLike,
    lengths: npt.ArrayLike,
) -> _Columns:
    offset = np.asarray(object_offsets, dtype=np.uint64).reshape(-1)
    local = np.asarray(local_addresses, dtype=np.uint64).reshape(-1)
    length = np.asarray(lengths, dtype=np.uint64).reshape(-1)
    if not offset.size == local.size == length.size or (grants and offset.size % len(grants)):
        sizes = (offset.size, local.size, length.size)
        raise InvalidArgument("columns", sizes, f"equal lengths, a multiple of the {len(grants)} grants")
    num_slices = offset.size // len(grants) if grants else 0
    return _Columns(np.repeat(np.arange(len(grants)), num_slices), offset, local, length)


def _whole(grants: Sequence[Grant], addresses: Sequence[int]) -> _Columns:
    """Every byte of every object, cut at the borders of its chunks."""
    columns = _Columns(
        np.arange(len(grants)),
        np.zeros(len(grants), dtype=np.uint64),
        np.array(addresses, dtype=np.uint64),
        np.array([grant.size_bytes for grant in grants], dtype=np.uint64),
    )
    if all(grant.size_bytes <= grant.chunk_bytes for grant in grants):
        return columns
    return columns.cut_at_chunks(grants)


def _check_bounds(grants: Sequence[Grant], columns: _Columns) -> None:
    sizes = np.array([grant.size_bytes for grant in grants], dtype=np.uint64)[columns.grant]
    bad = (columns.offset > sizes) | (columns.length > sizes - np.minimum(columns.offset, sizes))
    if bad.any():
        at = int(np.argmax(bad))
        grant = grants[int(columns.grant[at])]
        value = (int(columns.offset[at]), int(columns.length[at]))
        raise InvalidArgument(f"range of {grant.key!r}", value, f"within its {grant.size_bytes} bytes")


def _check_whole_chunks(grants: Sequence[ReadGrant], columns: _Columns) -> None:
    """Every chunk that is read at all is read completely, and no byte of it twice."""
    chunk = np.array([grant.chunk_bytes for grant in grants], dtype=np.uint64)[columns.grant]
    sizes = np.array([grant.size_bytes for grant in grants], dtype=np.uint64)[columns.grant]
    number = columns.offset // chunk
    whole = np.minimum(chunk, sizes - number * chunk)
    partial = np.flatnonzero(columns.length != whole)
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for at in partial.tolist():
        place = (int(columns.grant[at]), int(number[at]))
        start = int(columns.offset[at] - number[at] * chunk[at])
        covered.setdefault(place, []).append((start, int(columns.length[at])))
    for (index, number_of_chunk), pieces in covered.items():
        grant = grants[index]
        size = min(grant.chunk_bytes, grant.size_bytes - number_of_chunk * grant.chunk_bytes)
        at = 0
        for start, length in sorted(pieces):
            if start != at:
                break
            at += length
        if at != size:
            raise InvalidArgument(
                f"ranges of {grant.key!r}", sorted(pieces), f"whole chunks of {grant.chunk_bytes} bytes"
            )


def _put_grant(
    key: ObjectKey, size_bytes: int, chunk_bytes: int, reserved: m.Reserved, expires_at: float
) -> PutGrant:
    num_chunks = -(-size_bytes // chunk_bytes)
    replica = reserved.replicas[0]
    return PutGrant(
        key=key,
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
        segment=None,
        address=replica.address,
        checksums=np.zeros(num_chunks, dtype="<u4"),
        is_written=np.zeros(num_chunks, dtype=np.bool_),
        expires_at=expires_at,
        object_id=reserved.object_id,
        replica=replica,
    )


def _read_grant(
    key: ObjectKey, stored: m.Stored, expires_at: float, handles: dict[str, Any]
) -> ReadGrant | None:
    """A grant on the first replica that can be reached, or None."""
    for replica in stored.replicas:
        handle = handles.get(replica.segment)
        if handle is not None:
            return ReadGrant(
                key=key,
                size_bytes=stored.size_bytes,
                chunk_bytes=stored.chunk_bytes,
                segment=handle,
                address=replica.address,
                checksums=np.frombuffer(stored.checksums, dtype="<u4"),
                expires_at=expires_at,
                object_id=stored.object_id,
                replica=replica,
            )
    return None


def _lost(replica: m.Replica, reason: str) -> Refusal:
    return Refusal("peer_lost", f"the node of segment {replica.segment!r} can't be reached: {reason}")
