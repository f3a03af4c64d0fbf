# SPDX-License-Identifier: Apache-2.0
"""Sessions on objects: found or reserved once, then read or written in ranges without the master.

A get session holds a lease that is kept alive until the session ends; a put session holds a reservation,
and its object is not visible before the end. Sessions belong to a key of this client: a second one on
the same key replaces the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from mooncake.compat.store.arguments import check_keys, numbers, rows
from mooncake.compat.store.batches import cut, pick
from mooncake.compat.store.caller_memory import are_accessible, registered_spans
from mooncake.compat.store.error_codes import StoreCode, code_of_refusal
from mooncake.compat.store.get import ReadCalls
from mooncake.compat.store.public_types import ReplicateConfig
from mooncake.compat.store.put import WriteCalls
from mooncake.compat.store.put_options import put_options
from mooncake.compat.store.range_reads import columns_of, open_reads, read_parts
from mooncake.compat.store.read_plan import Part
from mooncake.compat.store.store_session import StoreSession
from mooncake.errors import Refusal
from mooncake.store.client.grants import PutGrant, ReadGrant
from mooncake.store.client.store import Store

SESSION_CHUNK_BYTES = 64 << 10
"""Chunk size; small, because later reads of ranges fetch whole chunks."""
MAX_SESSION_CHUNKS = 4096

Rows: TypeAlias = Sequence[Sequence[int]]


class ObjectSessionCalls(ReadCalls, WriteCalls):
    """Calls on get and put sessions. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions_lock = threading.Lock()
        self._gets: dict[str, tuple[Store, ReadGrant]] = {}
        self._puts: dict[str, tuple[Store, PutGrant]] = {}

    def close(self) -> int:
        """As that of the lifecycle; all sessions on objects end with it."""
        code = super().close()
        with self._sessions_lock:  # those of a setup that came meanwhile stay
            self._gets = {key: held for key, held in self._gets.items() if held[0] is self._store}
            self._puts = {key: held for key, held in self._puts.items() if held[0] is self._store}
        return code

    def _failed(self, keys: Sequence[str]) -> Callable[[int], list[int]]:
        """Result of a failed call: one code per key, or an empty list before ``setup``."""
        return lambda code: [code] * len(keys) if self._store is not None else []

    # Reading ------------------------------------------------------------------------------------------

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Start get sessions: 0 for each key that can be read until the session's end; -704 for a miss."""
        keys = check_keys("batch_get_session_start", keys)

        def act(session: StoreSession) -> list[int]:
            grants = open_reads(session, keys)
            for key, grant in zip(keys, grants, strict=True):
                if grant is not None:
                    self._begin_get(key, session.store, grant)
            return [
                int(StoreCode.OK if grant is not None else StoreCode.OBJECT_NOT_FOUND) for grant in grants
            ]

        return self._in_session("batch_get_session_start", act, self._failed(keys))

    def batch_get_into_multi_buffer_ranges(
        self, keys: Sequence[str], all_buffer_ptrs: Rows, all_sizes: Rows, all_src_offsets: Rows
    ) -> list[int]:
        """Read ranges: bytes read for each key in total; -600 without a session or out of bounds."""
        what = "batch_get_into_multi_buffer_ranges"
        keys = check_keys(what, keys)
        wanted = _parts(what, keys, all_src_offsets, all_buffer_ptrs, all_sizes)

        def act(session: StoreSession) -> list[int]:
            results = [int(StoreCode.INVALID_PARAMS)] * len(keys)
            grants = [self._open_get(key, session.store) for key in keys]
            for again in (False, True):
                open_ones = [
                    (number, grant, parts)
                    for number, (grant, parts) in enumerate(zip(grants, wanted, strict=True))
                    if grant is not None and parts is not None
                    if _fits(session, parts, grant.size_bytes, to_write=True)
                ]
                good = read_parts(session, [g for _, g, _ in open_ones], [parts for _, _, parts in open_ones])
                failed: list[int] = []
                for (number, grant, parts), is_good in zip(open_ones, good, strict=True):
                    results[number] = sum(length for _, _, length in parts)
                    if is_good:
                        self._keep_get(keys[number], session.store, grant)
                    else:
                        results[number] = int(StoreCode.OBJECT_NOT_FOUND)
                        failed.append(number)
                if again or not failed:
                    break
                grants = self._reopened(session, keys, grants, failed)
            session.client_metrics.count_bytes("read", sum(size for size in results if size > 0))
            return results

        return self._in_session("batch_get_into_multi_buffer_ranges", act, self._failed(keys))

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """End get sessions: 0, also for keys without one; the objects may be evicted again."""
        keys = check_keys("batch_get_session_end", keys)

        def act(session: StoreSession) -> int:
            for key in keys:
                with self._sessions_lock:
                    held = self._gets.pop(key, None)
                if held is not None:
                    held[0].let_go(held[1])
            return 0

        return self._in_session("batch_get_session_end", act, lambda _: -1)

    def _begin_get(
        self, key: str, store: Store, grant: ReadGrant, instead_of: ReadGrant | None = None
    ) -> None:
        """Begin a session, or have one use ``grant`` ``instead_of`` its own, unless it has ended."""
        with self._sessions_lock:
            before = self._gets.get(key)
            if instead_of is not None and (before is None or before[1] is not instead_of):
                return
            self._gets[key] = (store, grant)
            store.keep(grant)
        if before is not None:
            before[0].let_go(before[1])

    def _keep_get(self, key: str, store: Store, grant: ReadGrant) -> None:
        """Keep the lease of a session alive that may have ended and been granted again."""
        with self._sessions_lock:
            held = self._gets.get(key)
            if held is not None and held[1] is grant:
                store.keep(grant)

    def _reopened(
        self,
        session: StoreSession,
        keys: Sequence[str],
        grants: Sequence[ReadGrant | None],
        failed: Sequence[int],
    ) -> list[ReadGrant | None]:
        """Open new grants for the ``failed``: a replica or the lease was lost; others may exist."""
        again: list[ReadGrant | None] = [None] * len(keys)
        for number, grant in zip(failed, open_reads(session, [keys[i] for i in failed]), strict=True):
            before = grants[number]
            if grant is not None and before is not None and grant.object_id == before.object_id:
                again[number] = grant
                self._begin_get(keys[number], session.store, grant, instead_of=before)
        return again

    def _open_get(self, key: str, store: Store) -> ReadGrant | None:
        with self._sessions_lock:
            held = self._gets.get(key)
        return held[1] if held is not None and held[0] is store else None

    # Writing ------------------------------------------------------------------------------------------

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Start put sessions: 0 for each key that may be written until the end; -705 if the object exists, or
        another put of it is under way."""
        what = "batch_put_session_start"
        keys, sizes = check_keys(what, keys), numbers(what, "sizes", sizes)

        def act(session: StoreSession) -> list[int]:
            if len(keys) != len(sizes):
                return [int(StoreCode.INVALID_PARAMS)] * len(keys)
            chunks = [max(SESSION_CHUNK_BYTES, -(-size // MAX_SESSION_CHUNKS)) for size in sizes]
            options = put_options(ReplicateConfig() if config is None else config, len(keys))
            codes: list[int] = []
            grants = session.store.start_puts(keys, sizes, chunks, options.policy, groups=options.groups)
            for key, grant in zip(keys, grants, strict=True):
                if isinstance(grant, PutGrant):
                    with self._sessions_lock:
                        self._puts[key] = (session.store, grant)
                    codes.append(int(StoreCode.OK))
                elif grant is None or grant.code == "being_written":
                    codes.append(int(StoreCode.OBJECT_ALREADY_EXISTS))
                else:
                    codes.append(code_of_refusal(grant))
            return codes

        return self._in_session("batch_put_session_start", act, self._failed(keys))

    def batch_put_from_multi_buffer_ranges(
        self, keys: Sequence[str], all_buffer_ptrs: Rows, all_sizes: Rows, all_dst_offsets: Rows
    ) -> list[int]:
        """Write ranges: their bytes for each key; -600 without a session or out of bounds."""
        what = "batch_put_from_multi_buffer_ranges"
        keys = check_keys(what, keys)
        given = _parts(what, keys, all_dst_offsets, all_buffer_ptrs, all_sizes)

        def act(session: StoreSession) -> list[int]:
            results = [int(StoreCode.INVALID_PARAMS)] * len(keys)
            open_ones: list[tuple[int, PutGrant, list[Part]]] = []
            for number, (key, parts) in enumerate(zip(keys, given, strict=True)):
                grant = self._open_put(key, session.store)
                if grant is not None and parts is not None and _fits(session, parts, grant.size_bytes):
                    open_ones.append((number, grant, parts))
            for at in cut([sum(length for _, _, length in parts) for _, _, parts in open_ones]):
                some = pick(open_ones, at)
                with registered_spans(session, [(a, n) for _, _, parts in some for _, a, n in parts]):
                    columns = columns_of([parts for _, _, parts in some])
                    timeout_s = session.transfer_s(sum(columns[2]))
                    outcomes = session.store.write_ranges([g for _, g, _ in some], *columns, timeout_s)
                for (number, _, parts), outcome in zip(some, outcomes, strict=True):
                    num_bytes = sum(length for _, _, length in parts)
                    results[number] = num_bytes if outcome is None else _code(outcome)
                    if outcome is None:
                        session.client_metrics.count_bytes("write", num_bytes)
            return results

        return self._in_session("batch_put_from_multi_buffer_ranges", act, self._failed(keys))

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """End put sessions: 0 for a stored object; a code for an incomplete one, -600 without a session."""
        keys = check_keys("batch_put_session_end", keys)

        def act(session: StoreSession) -> list[int]:
            grants = [self._pop_put(key, session.store) for key in keys]
            outcomes = iter(session.store.end_puts([grant for grant in grants if grant is not None]))
            return [int(StoreCode.INVALID_PARAMS) if g is None else _code(next(outcomes)) for g in grants]

        return self._in_session("batch_put_session_end", act, self._failed(keys))

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Revoke put sessions: 0 for each released reservation; -600 without a session."""
        keys = check_keys("batch_put_session_revoke", keys)

        def act(session: StoreSession) -> list[int]:
            grants = [self._pop_put(key, session.store) for key in keys]
            session.store.abort_puts([grant for grant in grants if grant is not None])
            return [int(StoreCode.INVALID_PARAMS if grant is None else StoreCode.OK) for grant in grants]

        return self._in_session("batch_put_session_revoke", act, self._failed(keys))

    def _open_put(self, key: str, store: Store) -> PutGrant | None:
        with self._sessions_lock:
            held = self._puts.get(key)
        return held[1] if held is not None and held[0] is store else None

    def _pop_put(self, key: str, store: Store) -> PutGrant | None:
        with self._sessions_lock:
            held = self._puts.pop(key, None)
        return held[1] if held is not None and held[0] is store else None


def _parts(what: str, keys: Sequence[str], *columns: Rows) -> list[list[Part] | None]:
    """Triples (offset, address, length) of each key; None where the lists differ in length."""
    names = ("all_offsets", "all_buffer_ptrs", "all_sizes")
    offsets, addresses, sizes = (
        rows(what, name, column) for name, column in zip(names, columns, strict=True)
    )
    if not len(keys) == len(offsets) == len(addresses) == len(sizes):
        return [None] * len(keys)
    return [
        list(zip(offset, address, size, strict=True)) if len(offset) == len(address) == len(size) else None
        for offset, address, size in zip(offsets, addresses, sizes, strict=True)
    ]


def _fits(session: StoreSession, parts: Sequence[Part], size_bytes: int, to_write: bool = False) -> bool:
    """Whether the parts lie within the object, and ``are_accessible``."""
    if not all(offset >= 0 and 0 <= length <= size_bytes - offset for offset, _, length in parts):
        return False
    return are_accessible(session, [[(address, length) for _, address, length in parts]], to_write)[0]


def _code(outcome: Refusal | None) -> int:
    return int(StoreCode.OK) if outcome is None else code_of_refusal(outcome)
