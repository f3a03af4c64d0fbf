"""How objects get from the store to where a program wants them: whole, in a row of places, in fragments."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from mooncake.compat.store.arguments import Span, is_good_key, total_bytes
from mooncake.compat.store.caller_memory import are_accessible, is_accessible
from mooncake.compat.store.error_codes import StoreCode
from mooncake.compat.store.range_reads import open_reads, read_parts
from mooncake.compat.store.read_plan import Part
from mooncake.compat.store.store_session import StoreSession
from mooncake.errors import InvalidArgument
from mooncake.store.client.grants import ReadGrant

INVALID = int(StoreCode.INVALID_PARAMS)
MISS = int(StoreCode.OBJECT_NOT_FOUND)


def read_objects(session: StoreSession, keys: list[str], parts: list[Sequence[Span]]) -> list[int]:
    """Sizes or codes. The usual case, one good buffer per object, leaves all of it to the store."""
    spans = [row[0] for row in parts if len(row) == 1]
    if len(spans) == len(parts) and all(map(is_good_key, keys)) and all(are_accessible(session, parts)):
        with contextlib.suppress(InvalidArgument):  # one is too small; which one, the slow way tells
            sizes = session.store.get_batch_into(keys, spans)
            session.client_metrics.moved("read", sum(size or 0 for size in sizes))
            return [MISS if size is None else size for size in sizes]
    return read_granted(session, open_reads(session, keys), parts)


def read_granted(
    session: StoreSession, grants: Sequence[ReadGrant | None], parts: Sequence[Sequence[Span]]
) -> list[int]:
    """Sizes or codes."""
    codes = [MISS] * len(grants)
    wanted: dict[int, tuple[ReadGrant, list[Part]]] = {}
    are_there = are_accessible(session, parts)
    for at, (grant, spans) in enumerate(zip(grants, parts, strict=True)):
        if grant is None:
            continue
        if total_bytes(spans) < grant.size_bytes or not are_there[at]:
            codes[at] = INVALID
        else:
            wanted[at] = grant, _filled(spans, grant.size_bytes)
    are_good = read_parts(
        session, [grant for grant, _ in wanted.values()], [row for _, row in wanted.values()]
    )
    for (at, (grant, _)), is_good in zip(wanted.items(), are_good, strict=True):
        if is_good:
            codes[at] = grant.size_bytes
    session.client_metrics.moved("read", sum(code for code in codes if code > 0))
    return codes


def _filled(spans: Sequence[Span], size_bytes: int) -> list[Part]:
    """What of ``spans`` an object of this size fills."""
    filled: list[Part] = []
    offset = 0
    for address, room in spans:
        taken = min(room, size_bytes - offset)
        if taken:
            filled.append((offset, address, taken))
            offset += taken
    return filled


def read_fragments(
    session: StoreSession, grants: Sequence[ReadGrant | None], fragments: Sequence[Sequence[Part]]
) -> list[list[int]]:
    """Per object, sizes or codes of its fragments."""
    codes: list[list[int]] = []
    wanted: list[tuple[int, ReadGrant, list[Part]]] = []
    for at, (grant, row) in enumerate(zip(grants, fragments, strict=True)):
        codes.append([MISS if grant is None else INVALID] * len(row))
        if grant is None:
            continue
        good = [
            offset >= 0 and offset + size <= grant.size_bytes and is_accessible(session, (address, size))
            for offset, address, size in row
        ]
        codes[at] = [size if is_good else INVALID for (_, _, size), is_good in zip(row, good, strict=True)]
        wanted.append((at, grant, [part for part, is_good in zip(row, good, strict=True) if is_good]))
    are_good = read_parts(session, [grant for _, grant, _ in wanted], [parts for _, _, parts in wanted])
    for (at, _, _), is_good in zip(wanted, are_good, strict=True):
        if not is_good:
            codes[at] = [MISS if code >= 0 else code for code in codes[at]]
    return codes
