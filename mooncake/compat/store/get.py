# SPDX-License-Identifier: Apache-2.0
"""The calls that read objects and query them: whole, to pointers, in fragments.

A miss, or any other failure of one key, is that key's number (or empty bytes, or None); the other keys of
the batch are read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from mooncake.compat.store.arguments import (
    MAX_ADDRESS,
    Span,
    check_key,
    check_keys,
    is_good_key,
    numbers,
    rows,
    total_bytes,
)
from mooncake.compat.store.batches import cut, is_late, pick, read_again
from mooncake.compat.store.buffer_pool import BufferHandle
from mooncake.compat.store.caller_memory import (
    BufferRegistrationCalls,
    allocated,
    are_accessible,
    is_accessible,
)
from mooncake.compat.store.error_codes import StoreCode
from mooncake.compat.store.public_types import ExistOptions
from mooncake.compat.store.range_reads import open_reads, read_parts
from mooncake.compat.store.read_plan import Part
from mooncake.compat.store.store_session import StoreSession
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.store.client.grants import ReadGrant
from mooncake.types import Tier

INVALID = int(StoreCode.INVALID_PARAMS)
MISS = int(StoreCode.OBJECT_NOT_FOUND)
MAX_PREFETCHES = 128
"""Most copies to memory that one call starts; further ones are left to the reads."""


class ReadCalls(BufferRegistrationCalls):
    """Reads and queries of objects."""

    # To bytes -----------------------------------------------------------------------------------------

    def get(self, key: str, /) -> bytes:
        """Bytes of the object; empty for a miss and for any failure."""
        key = check_key("get", key)
        return self._get("get", [key])[0]

    def get_batch(self, keys: Sequence[str], /) -> list[bytes]:
        """As ``get`` of each; one empty value when there are no keys."""
        keys = check_keys("get_batch", keys)
        return self._get("get_batch", keys) if keys else [b""]

    def get_buffer(self, key: str, /) -> BufferHandle | None:
        """Object in memory of its own, or None."""
        key = check_key("get_buffer", key)
        return self._get_buffers("get_buffer", [key])[0]

    def batch_get_buffer(self, keys: Sequence[str], /) -> list[BufferHandle | None]:
        """As ``get_buffer`` of each."""
        return self._get_buffers("batch_get_buffer", check_keys("batch_get_buffer", keys))

    # To pointers ----------------------------------------------------------------------------------------

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read an object: its size; -704 for a miss, -600 when the buffer is too small."""
        return self._get_pointers("get_into", [key], [[buffer_ptr]], [[size]])[0]

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """As ``get_into`` of each."""
        what = "batch_get_into"
        pointers = [[pointer] for pointer in numbers(what, "buffer_ptrs", buffer_ptrs)]
        return self._get_pointers(what, keys, pointers, [[size] for size in numbers(what, "sizes", sizes)])

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read objects, each to its buffers in order: their sizes; -600 for one that does not fit."""
        return self._get_pointers("batch_get_into_multi_buffers", keys, all_buffer_ptrs, all_sizes)

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Read fragments of objects ``all_keys[i][j]`` to ``buffer_ptrs[i]``: for each its size, or a code.

        -704 for a miss; -600 for a fragment that does not lie in its object, or not in the registered buffer
        that its pointer points to, and for all fragments of lists of unequal lengths.
        """
        what = "get_into_ranges"
        pointers = numbers(what, "buffer_ptrs", buffer_ptrs)
        keys = [check_keys(what, row) for row in all_keys]
        columns = [
            [rows(what, name, row) for row in values]
            for name, values in (
                ("all_dst_offsets", all_dst_offsets),
                ("all_src_offsets", all_src_offsets),
                ("all_sizes", all_sizes),
            )
        ]
        shape = [[len(sizes) for sizes in row] for row in columns[2]]
        longest = [
            [max(map(len, of_key)) for of_key in zip_longest(*of_buffer, fillvalue=())]
            for of_buffer in zip_longest(*columns, fillvalue=())
        ]
        bad = [[[INVALID] * num for num in row] for row in longest]
        if len(pointers) != len(keys) or [len(row) for row in keys] != [len(row) for row in shape]:
            return bad
        if any([[len(sizes) for sizes in row] for row in column] != shape for column in columns):
            return bad

        def get(session: StoreSession) -> list[list[list[int]]]:
            places = [(i, j) for i, row in enumerate(keys) for j in range(len(row))]
            grants = open_reads(session, [keys[i][j] for i, j in places])
            ends = [session.registered.end_of(pointer) or MAX_ADDRESS for pointer in pointers]

            def fragment(i: int, target: int, source: int, size: int) -> Part:
                is_inside = 0 <= target <= ends[i] - pointers[i] - size
                return source if is_inside else -1, pointers[i] + target, size

            fragments = [
                [fragment(i, *of) for of in zip(*(column[i][j] for column in columns), strict=True)]
                for i, j in places
            ]
            found = iter(read_fragments(session, grants, fragments))
            return [[next(found) for _ in row] for row in keys]

        return self._in_session(what, get, lambda code: [[[code] * num for num in row] for row in shape])

    # Queries --------------------------------------------------------------------------------------------

    def get_size(self, key: str, /) -> int:
        """Size of the object; -704 for a miss."""
        key = check_key("get_size", key)

        def query(session: StoreSession) -> int:
            found = session.store.open_reads([key])[0] if is_good_key(key) else None
            return MISS if found is None else found.size_bytes

        return self._in_session("get_size", query, int)

    def is_exist(self, key: str, /, options: ExistOptions | None = None) -> int:
        """Return 1 or 0; negative on failure. A key that exists is leased, so that a get finds it."""
        key = check_key("is_exist", key)
        return self._exist("is_exist", [key], options)[0]

    def batch_is_exist(self, keys: Sequence[str], options: ExistOptions | None = None) -> list[int]:
        """As ``is_exist`` of each."""
        return self._exist("batch_is_exist", check_keys("batch_is_exist", keys), options)

    def _exist(self, what: str, keys: list[str], options: ExistOptions | None) -> list[int]:
        def query(session: StoreSession) -> list[int]:
            at = [i for i, key in enumerate(keys) if is_good_key(key)]
            flags = [0] * len(keys)
            for i, flag in zip(at, session.store.exists(pick(keys, at)), strict=True):
                flags[i] = int(flag)
            if options is not None and options.prefetch_to_memory:
                with contextlib.suppress(MooncakeError):  # the answer stands without it
                    _start_prefetch(session, [key for key, flag in zip(keys, flags, strict=True) if flag])
            return flags

        return self._in_session(what, query, lambda code: [code] * len(keys))

    # Implementation -------------------------------------------------------------------------------------

    def _get(self, what: str, keys: list[str]) -> list[bytes]:
        def get(session: StoreSession) -> list[bytes]:
            values = [b""] * len(keys)
            at = [i for i, key in enumerate(keys) if is_good_key(key)]
            began, has_room = time.monotonic(), True
            try:
                for i, value in zip(at, session.store.get_batch(pick(keys, at)), strict=True):
                    values[i] = value or b""
            except MemoryError:  # for all of them together
                has_room = False
            missing = [i for i in at if not values[i]]
            was_slow = is_late(time.monotonic() - began, session.store.settings.timeout_s)
            session.client_metrics.count_bytes("read", sum(map(len, values)))
            if missing and (was_slow or not has_room):
                # These are counted by the function that moves them.
                read_again(values, missing, lambda at: read_bytes(session, what, pick(keys, at)))
            return values

        return self._in_session(what, get, lambda _: [b""] * len(keys))

    def _get_buffers(self, what: str, keys: list[str]) -> list[BufferHandle | None]:
        return self._in_session(
            what, lambda session: read_buffers(session, what, keys), lambda _: [None] * len(keys)
        )

    def _get_pointers(self, what: str, keys: Any, pointers: Any, sizes: Any) -> list[int]:
        keys = check_keys(what, keys)
        addresses, lengths = rows(what, "buffer_ptrs", pointers), rows(what, "sizes", sizes)
        if not len(keys) == len(addresses) == len(lengths):
            return [INVALID] * len(keys)
        if any(len(row) != len(other) for row, other in zip(addresses, lengths, strict=True)):
            return [INVALID] * len(keys)
        parts = [list(zip(row, other, strict=True)) for row, other in zip(addresses, lengths, strict=True)]
        return self._get_into(what, keys, parts)

    def _get_into(self, what: str, keys: list[str], parts: Sequence[Sequence[Span]]) -> list[int]:
        """Sizes or codes per key; ``parts``: per key the spans to fill, in order."""

        def get(session: StoreSession) -> list[int]:
            codes: list[int] = []
            for at in cut([total_bytes(spans) for spans in parts]):
                codes += read_objects(session, pick(keys, at), pick(parts, at))
            return codes

        return self._in_session(what, get, lambda code: [code] * len(keys))


def read_bytes(session: StoreSession, what: str, keys: Sequence[str]) -> list[bytes]:
    """Read whole objects; empty for a miss, and when this host has no memory for one."""
    handles = read_buffers(session, what, keys)
    return [b"" if handle is None else _bytes_of(what, handle) for handle in handles]


def _bytes_of(what: str, handle: BufferHandle) -> bytes:
    """Copy of an object; empty when this host has no memory for one."""
    return allocated(what, handle.size(), lambda _: bytes(handle)) or b""


def read_buffers(session: StoreSession, what: str, keys: Sequence[str]) -> list[BufferHandle | None]:
    """Read whole objects to memory of their own; None for a miss."""
    grants = open_reads(session, keys)
    handles = [None if grant is None else allocated(what, grant.size_bytes, BufferHandle) for grant in grants]
    parts = [[] if handle is None else [(handle.ptr(), handle.size())] for handle in handles]
    wanted = [None if handle is None else grant for grant, handle in zip(grants, handles, strict=True)]
    codes = read_granted(session, wanted, parts)
    return [handle if code >= 0 else None for handle, code in zip(handles, codes, strict=True)]


def read_objects(session: StoreSession, keys: list[str], parts: list[Sequence[Span]]) -> list[int]:
    """Read whole objects: sizes or codes. The store handles the usual case, one good buffer per object."""
    spans = [row[0] for row in parts if len(row) == 1]
    is_usual = len(spans) == len(parts) and all(map(is_good_key, keys))
    if is_usual and all(are_accessible(session, parts, to_write=True)):
        with contextlib.suppress(InvalidArgument):  # too small; which one is found below
            began = time.monotonic()
            use = session.registered.begin_use(spans)
            try:
                sizes = session.store.get_batch_into(keys, spans)
            finally:
                session.registered.end_use(use)
            session.client_metrics.count_bytes("read", sum(size or 0 for size in sizes))
            codes = [MISS if size is None else size for size in sizes]
            missing = [at for at, code in enumerate(codes) if code == MISS]
            if missing and is_late(time.monotonic() - began, session.store.settings.timeout_s):
                read_again(
                    codes,
                    missing,
                    lambda at: read_granted(session, open_reads(session, pick(keys, at)), pick(parts, at)),
                )
            return codes
    return read_granted(session, open_reads(session, keys), parts)


def read_granted(
    session: StoreSession, grants: Sequence[ReadGrant | None], parts: Sequence[Sequence[Span]]
) -> list[int]:
    """Read whole objects under leases: sizes or codes."""
    codes = [MISS] * len(grants)
    wanted: dict[int, tuple[ReadGrant, list[Part]]] = {}
    are_there = are_accessible(session, parts, to_write=True)
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
    session.client_metrics.count_bytes("read", sum(code for code in codes if code > 0))
    return codes


def _filled(spans: Sequence[Span], size_bytes: int) -> list[Part]:
    """Parts of ``spans`` that an object of this size fills."""
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
    """Read fragments of objects: per object, their sizes or codes."""
    codes: list[list[int]] = []
    wanted: list[tuple[int, ReadGrant, list[Part]]] = []
    for at, (grant, row) in enumerate(zip(grants, fragments, strict=True)):
        codes.append([MISS if grant is None else INVALID] * len(row))
        if grant is None:
            continue
        good = [
            offset >= 0
            and offset + size <= grant.size_bytes
            and is_accessible(session, (address, size), to_write=True)
            for offset, address, size in row
        ]
        codes[at] = [size if is_good else INVALID for (_, _, size), is_good in zip(row, good, strict=True)]
        wanted.append((at, grant, [part for part, is_good in zip(row, good, strict=True) if is_good]))
    are_good = read_parts(session, [grant for _, grant, _ in wanted], [parts for _, _, parts in wanted])
    for (at, _, _), is_good in zip(wanted, are_good, strict=True):
        if not is_good:
            codes[at] = [MISS if code >= 0 else code for code in codes[at]]
    return codes


def _start_prefetch(session: StoreSession, keys: Sequence[str]) -> None:
    """Start copies of objects that are only on an SSD, each to the memory of the SSD's process."""
    left = MAX_PREFETCHES
    for key, status in zip(keys, session.store.inspect(list(keys)), strict=True):
        readable = (
            [] if status is None else [one for one in status.replicas if one.is_alive and one.is_complete]
        )
        if left and readable and all(one.tier is Tier.SSD for one in readable):
            session.store.copy(key, [readable[0].segment.removesuffix("/ssd")])
            left -= 1
