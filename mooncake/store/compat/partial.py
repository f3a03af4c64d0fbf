"""Reads parts of objects under leases, to addresses: what ``ranges.py`` plans, done.

Shared by whatever reads less than an object, or does not know its size before: sessions, fragments,
tensors. What can't be believed is left alone or overwritten, never announced.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from mooncake.store.compat.arguments import is_good_key
from mooncake.store.compat.lending import lent
from mooncake.store.compat.ranges import Part, plan_parts
from mooncake.store.compat.session import Session
from mooncake.store.operations import ReadGrant


def open_reads(session: Session, keys: Sequence[str]) -> list[ReadGrant | None]:
    """Leases, None for a miss and for a key that cannot be."""
    at = [number for number, key in enumerate(keys) if is_good_key(key)]
    grants: list[ReadGrant | None] = [None] * len(keys)
    for number, grant in zip(at, session.store.open_reads([keys[i] for i in at]), strict=True):
        grants[number] = grant
    return grants


def read_parts(session: Session, grants: Sequence[ReadGrant], parts: Sequence[Sequence[Part]]) -> list[bool]:
    """Read ``parts[i]`` of the object of ``grants[i]``; which objects' parts may be believed.

    The parts lie within their objects.
    """
    plans = [
        plan_parts(grant.size_bytes, grant.chunk_bytes, of_grant)
        for grant, of_grant in zip(grants, parts, strict=True)
    ]
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
    with lent(session, spans):
        is_good = session.store.read_ranges(grants, *columns_of(rows))
    for plan, start, good in zip(plans, starts, is_good, strict=True):
        if good:
            for offset, address, length in plan.copies:
                ctypes.memmove(address, start + offset, length)
    return is_good


def columns_of(rows: Sequence[Sequence[Part]]) -> tuple[list[int], list[int], list[int]]:
    """Columns of ``read_ranges`` and ``write_ranges``: rows made as long as the longest by empty slices."""
    longest = max((len(row) for row in rows), default=0)
    padded = [part for row in rows for part in (*row, *((0, 0, 0),) * (longest - len(row)))]
    return [part[0] for part in padded], [part[1] for part in padded], [part[2] for part in padded]
