# SPDX-License-Identifier: Apache-2.0
"""Reads parts of objects under leases to addresses, by the plans of ``read_plan.py``.

Shared by all calls that read less than an object, or do not know its size before: sessions, fragments,
tensors. Bytes that cannot be verified are reported as not read; their place may have been overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mooncake.compat.store import batches
from mooncake.compat.store.arguments import is_good_key
from mooncake.compat.store.batches import cut, is_late, pick, read_again
from mooncake.compat.store.caller_memory import registered_spans
from mooncake.compat.store.read_plan import Part, ReadPlan, plan_reads
from mooncake.compat.store.store_session import StoreSession
from mooncake.errors import Unavailable
from mooncake.store.client.grants import ReadGrant
from mooncake.transfer import Op, Status


def open_reads(session: StoreSession, keys: Sequence[str]) -> list[ReadGrant | None]:
    """Open leases; None for a miss and for an invalid key."""
    at = [number for number, key in enumerate(keys) if is_good_key(key)]
    grants: list[ReadGrant | None] = [None] * len(keys)
    for number, grant in zip(at, session.store.open_reads([keys[i] for i in at]), strict=True):
        grants[number] = grant
    return grants


def read_parts(
    session: StoreSession, grants: Sequence[ReadGrant], parts: Sequence[Sequence[Part]]
) -> list[bool]:
    """Read ``parts[i]`` of the object of ``grants[i]``; flags of the objects whose parts are verified.

    The parts lie within their objects; their addresses may be a device's. Large reads are split, each piece
    with a deadline of its own, and the leases are kept alive until the last one. What was large, or took
    long, and did not arrive is read again in smaller pieces.
    """
    began = time.monotonic()
    plans = [
        plan_reads(grant.size_bytes, grant.chunk_bytes, of_grant)
        for grant, of_grant in zip(grants, parts, strict=True)
    ]
    moved_bytes = [plan.moved_bytes for plan in plans]
    pieces = list(cut(moved_bytes))
    # Around all of it: the memory is in use between two pieces, too, and while bytes are copied to it.
    use = session.registered.begin_use([(address, length) for row in parts for _, address, length in row])
    try:
        if len(pieces) <= 1:
            good = _read(session, grants, plans)
        else:
            with _kept(session, grants):
                good = [one for at in pieces for one in _read(session, pick(grants, at), pick(plans, at))]
        missing = [at for at, is_good in enumerate(good) if not is_good]
        was_slow = is_late(time.monotonic() - began, session.store.settings.timeout_s)
        if missing and (was_slow or sum(moved_bytes) > batches.SLOW_PART_BYTES):
            read_again(good, missing, lambda at: _read_slowly(session, pick(grants, at), pick(plans, at)))
    finally:
        session.registered.end_use(use)
    return good


def _read_slowly(session: StoreSession, grants: Sequence[ReadGrant], plans: Sequence[ReadPlan]) -> list[bool]:
    """Read what did not arrive, under new leases and in pieces that a slow network moves within a lease."""
    good = [False] * len(grants)
    pieces: list[tuple[int, ReadGrant, ReadPlan]] = []
    again = open_reads(session, [grant.key for grant in grants])
    for at, (before, grant, plan) in enumerate(zip(grants, again, plans, strict=True)):
        if grant is not None and grant.object_id == before.object_id:
            good[at] = True
            parts = plan.split(grant.chunk_bytes, batches.SLOW_PART_BYTES)
            pieces += [(at, grant, part) for part in parts]
    with _kept(session, [grant for grant in again if grant is not None]):
        for group in cut([plan.moved_bytes for _, _, plan in pieces], batches.SLOW_PART_BYTES):
            wanted = [piece for piece in pick(pieces, group) if good[piece[0]]]
            plans_of_group = [plan for _, _, plan in wanted]
            timeout_s = session.transfer_s(sum(plan.moved_bytes for plan in plans_of_group))
            read = _read(session, [grant for _, grant, _ in wanted], plans_of_group, timeout_s)
            for (at, _, _), is_good in zip(wanted, read, strict=True):
                good[at] = good[at] and is_good
    return good


@contextlib.contextmanager
def _kept(session: StoreSession, grants: Sequence[ReadGrant]) -> Iterator[None]:
    """Keep leases alive within the block."""
    for grant in grants:
        session.store.keep(grant)
    try:
        yield
    finally:
        for grant in grants:
            session.store.let_go(grant)


def _read(
    session: StoreSession,
    grants: Sequence[ReadGrant],
    plans: Sequence[ReadPlan],
    timeout_s: float | None = None,
) -> list[bool]:
    staging = np.empty(sum(plan.staged_bytes for plan in plans), dtype=np.uint8)
    starts: list[int] = []
    rows: list[list[Part]] = []
    at = int(staging.ctypes.data)
    for plan in plans:
        starts.append(at)
        row = list(plan.direct)
        for offset, length in plan.staged:
            row.append((offset, at, length))
            at += length
        rows.append(row)
    spans = [(address, length) for plan in plans for _, address, length in plan.direct]
    if staging.size:
        spans.append((int(staging.ctypes.data), staging.size))
    with registered_spans(session, spans):
        is_good = session.store.read_ranges(grants, *columns_of(rows), timeout_s=timeout_s)
    copies = [
        (address, start + offset, length)
        for plan, start, good in zip(plans, starts, is_good, strict=True)
        if good
        for offset, address, length in plan.copies
    ]
    _copy(session, staging, copies)
    return is_good


def _copy(
    session: StoreSession, staging: npt.NDArray[np.uint8], copies: Sequence[tuple[int, int, int]]
) -> None:
    """Copy from ``staging``; ``copies``: (target, source, length).

    Raises:
        Unavailable: the copy to a device failed.
    """
    to_device: list[tuple[int, int, int]] = []
    for target, source, length in copies:
        if session.engine.is_device_memory(target):
            to_device.append((target, source, length))
        else:
            ctypes.memmove(target, source, length)
    if not to_device:
        return
    columns = np.array(to_device, dtype=np.uint64)
    region = session.engine.register(staging)
    try:
        own = session.engine.open(session.engine.describe())
        with registered_spans(session, [(target, length) for target, _, length in to_device]):
            done = session.engine.run(
                Op.READ,
                own,
                columns[:, 0].copy(),
                columns[:, 1].copy(),
                columns[:, 2].copy(),
                timeout_s=session.transfer_s(int(columns[:, 2].sum())),
            )
    finally:
        session.engine.unregister(region)
    if done.status != Status.OK:
        raise Unavailable(f"copy of {len(to_device)} parts to a device: {done.status.name.lower()}")


def columns_of(rows: Sequence[Sequence[Part]]) -> tuple[list[int], list[int], list[int]]:
    """Columns for ``read_ranges`` and ``write_ranges``: rows are padded with empty slices to one length."""
    longest = max((len(row) for row in rows), default=0)
    padded = [part for row in rows for part in (*row, *((0, 0, 0),) * (longest - len(row)))]
    return [part[0] for part in padded], [part[1] for part in padded], [part[2] for part in padded]
