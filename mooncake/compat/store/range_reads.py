# SPDX-License-Identifier: Apache-2.0
"""Reads parts of objects under leases to addresses, by the plans of ``read_plan.py``.

Shared by all calls that read less than an object, or do not know its size before: sessions, fragments,
tensors. Bytes that cannot be verified are reported as not read; their place may have been overwritten.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake.compat.store.arguments import is_good_key
from mooncake.compat.store.batches import cut, pick
from mooncake.compat.store.caller_memory import on_device, registered_spans
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
    with a deadline of its own, and the leases are kept alive until the last one.
    """
    plans = [
        plan_reads(grant.size_bytes, grant.chunk_bytes, of_grant)
        for grant, of_grant in zip(grants, parts, strict=True)
    ]
    pieces = list(cut([plan.moved_bytes for plan in plans]))
    if len(pieces) <= 1:
        return _read(session, grants, plans)
    for grant in grants:
        session.store.keep(grant)
    try:
        return [good for at in pieces for good in _read(session, pick(grants, at), pick(plans, at))]
    finally:
        for grant in grants:
            session.store.let_go(grant)


def _read(session: StoreSession, grants: Sequence[ReadGrant], plans: Sequence[ReadPlan]) -> list[bool]:
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
        is_good = session.store.read_ranges(grants, *columns_of(rows))
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
        if on_device(session, target):
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
                timeout_s=session.store.settings.timeout_s,
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
