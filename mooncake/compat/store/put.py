# SPDX-License-Identifier: Apache-2.0
"""The calls that store objects: from bytes, from pointers, whole or in parts, new or as a replacement.

All of them use ``store_parts``: per key the spans of its bytes, and one number per key as the result.
An object that exists is not changed and counts as stored. Objects of one span are put by the store, unless
they are large; the others are written span by span, in chunks such that each span can be read by itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mooncake.compat.store import batches
from mooncake.compat.store.arguments import (
    Span,
    check_key,
    check_keys,
    is_good_key,
    number,
    numbers,
    rows,
    span_of_value,
    total_bytes,
)
from mooncake.compat.store.batches import cut, on_good, pick
from mooncake.compat.store.caller_memory import BufferRegistrationCalls, are_accessible, registered_spans
from mooncake.compat.store.error_codes import StoreCode, code_of
from mooncake.compat.store.public_types import ReplicateConfig
from mooncake.compat.store.put_options import PutOptions, put_options
from mooncake.compat.store.read_plan import chunk_bytes_for
from mooncake.compat.store.store_session import StoreSession
from mooncake.errors import MooncakeError, Refusal
from mooncake.log import get_logger
from mooncake.store.client.effects import pauses_within
from mooncake.store.client.grants import PutGrant
from mooncake.store.client.store import Store
from mooncake.store.messages import MAX_KEY_BYTES

log = get_logger("mooncake.store")

INVALID = int(StoreCode.INVALID_PARAMS)
_DEFAULT = ReplicateConfig()
MAX_SHOWN = 100
"""Characters of a key in the log."""
MAX_ATTEMPTS = 3
"""Most attempts to place an object of several spans when a node cannot be reached."""


class WriteCalls(BufferRegistrationCalls):
    """Puts and upserts of objects."""

    # From bytes ---------------------------------------------------------------------------------------

    def put(self, key: str, value: Any, config: ReplicateConfig = _DEFAULT) -> int:
        """Store a value: 0, also when the key exists, unchanged; -200: no space; -600: empty or too large."""
        return self._put_values("put", [key], [[value]], config)[0]

    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig = _DEFAULT) -> int:
        """As ``put`` of all parts concatenated; 0 and nothing stored when there are none."""
        for part in parts:
            _check_part(part)
        if not any(memoryview(part).nbytes for part in parts):
            return self._nothing("put_parts", key)
        return self._put_values("put_parts", [key], [parts], config)[0]

    def put_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig = _DEFAULT
    ) -> int:
        """As ``put`` of each; the first number that is not 0."""
        return _first(self._put_values("put_batch", keys, [[value] for value in values], config))

    def upsert(self, key: str, value: Any, config: ReplicateConfig = _DEFAULT) -> int:
        """As ``put``, replacing an existing object."""
        return self._put_values("upsert", [key], [[value]], config, replace=True)[0]

    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig = _DEFAULT) -> int:
        """As ``put_parts``, replacing an existing object."""
        for part in parts:
            _check_part(part)
        if not any(memoryview(part).nbytes for part in parts):
            return self._nothing("upsert_parts", key)
        return self._put_values("upsert_parts", [key], [parts], config, replace=True)[0]

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig = _DEFAULT
    ) -> int:
        """As ``put_batch``, replacing existing objects."""
        parts = [[value] for value in values]
        return _first(self._put_values("upsert_batch", keys, parts, config, replace=True))

    # From pointers ------------------------------------------------------------------------------------

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = _DEFAULT) -> int:
        """As ``put`` of the ``size`` bytes at ``buffer_ptr``, which are not copied here.

        0 and nothing stored when there are none.
        """
        if number("put_from", "size", size) == 0:
            return self._nothing("put_from", key)
        return self._put_pointers("put_from", [key], [[buffer_ptr]], [[size]], config)[0]

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig = _DEFAULT,
    ) -> int:
        """Store one object of the metadata followed by the data."""
        what = "put_from_with_metadata"
        if number(what, "size", size) == 0 == number(what, "metadata_size", metadata_size):
            return self._nothing(what, key)
        pointers, sizes = [metadata_buffer_ptr, buffer_ptr], [metadata_size, size]
        return self._put_pointers(what, [key], [pointers], [sizes], config)[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig = _DEFAULT,
    ) -> list[int]:
        """As ``put_from`` of each: 0 or a negative number."""
        what = "batch_put_from"
        pointers = [[pointer] for pointer in numbers(what, "buffer_ptrs", buffer_ptrs)]
        return self._put_pointers(
            what, keys, pointers, [[size] for size in numbers(what, "sizes", sizes)], config
        )

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig = _DEFAULT,
    ) -> list[int]:
        """Store objects of several buffers each: 0 or a negative number for each. [] before ``setup``."""
        what = "batch_put_from_multi_buffers"
        if self._store is None:
            return []
        return self._put_pointers(what, keys, all_buffer_ptrs, all_sizes, config)

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = _DEFAULT) -> int:
        """As ``put_from``, replacing an existing object; one that is replaced by nothing stays."""
        if number("upsert_from", "size", size) == 0:
            return self._nothing("upsert_from", key)
        return self._put_pointers("upsert_from", [key], [[buffer_ptr]], [[size]], config, replace=True)[0]

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig = _DEFAULT,
    ) -> list[int]:
        """As ``batch_put_from``, replacing existing objects."""
        what = "batch_upsert_from"
        pointers = [[pointer] for pointer in numbers(what, "buffer_ptrs", buffer_ptrs)]
        lengths = [[size] for size in numbers(what, "sizes", sizes)]
        return self._put_pointers(what, keys, pointers, lengths, config, replace=True)

    # Implementation -------------------------------------------------------------------------------------

    def _nothing(self, what: str, key: str) -> int:
        """Store nothing; an error before ``setup``."""
        check_key(what, key)
        return self._do(what, lambda _: 0, int)

    def _put_values(
        self,
        what: str,
        keys: Any,
        values: Sequence[Sequence[Any]],
        config: ReplicateConfig,
        replace: bool = False,
    ) -> list[int]:
        """Store bytes-like values, none of which may be larger than the local buffer."""
        keys = check_keys(what, keys)
        kept, parts = [], []
        for row in values:
            spans = []
            for value in row:
                span, keep = span_of_value(what, value)
                spans.append(span)
                kept.append(keep)
            parts.append(spans)

        def put(session: StoreSession) -> list[int]:
            def put_those(at: list[int]) -> list[int]:
                return store_parts(session, pick(keys, at), pick(parts, at), options.at(at), replace)

            options = put_options(config, len(keys))
            limit = session.arguments.local_buffer_size
            fits = [total_bytes(spans) <= limit for spans in parts]
            if not all(fits):
                reason = "{} bytes, which do not fit into local_buffer_size ({})"
                _log_refused(what, keys, fits, lambda at: reason.format(total_bytes(parts[at]), limit))
            return on_good(fits, put_those)

        if len(keys) != len(parts):
            log.error(f"{what}: {len(keys)} keys, but {len(parts)} values")
            return [INVALID] * max(1, len(keys))
        return self._in_session(what, put, lambda code: [code] * len(keys))

    def _put_pointers(
        self, what: str, keys: Any, pointers: Any, sizes: Any, config: ReplicateConfig, replace: bool = False
    ) -> list[int]:
        keys = check_keys(what, keys)
        addresses, lengths = rows(what, "buffer_ptrs", pointers), rows(what, "sizes", sizes)
        if not len(keys) == len(addresses) == len(lengths):
            log.error(f"{what}: {len(keys)} keys, {len(addresses)} buffers and {len(lengths)} sizes")
            return [INVALID] * len(keys)
        fits = [len(row) == len(other) for row, other in zip(addresses, lengths, strict=True)]
        parts = [list(zip(row, other, strict=False)) for row, other in zip(addresses, lengths, strict=True)]

        def put(session: StoreSession) -> list[int]:
            def put_those(at: list[int]) -> list[int]:
                return store_parts(session, pick(keys, at), pick(parts, at), options.at(at), replace)

            options = put_options(config, len(keys))
            good = [
                fit and is_there for fit, is_there in zip(fits, are_accessible(session, parts), strict=True)
            ]
            if not all(good):
                reason = "its buffers are not memory that can be read, or not as many as their sizes"
                _log_refused(what, keys, good, lambda _: reason)
            return on_good(good, put_those)

        return self._in_session(what, put, lambda code: [code] * len(keys))

    def _put(
        self,
        what: str,
        keys: Sequence[str],
        parts: Sequence[Sequence[Span]],
        config: ReplicateConfig,
        replace: bool = False,
    ) -> list[int]:
        """Store objects: one code per key; ``parts``: per key its spans, checked by the caller."""
        return self._in_session(
            what,
            lambda session: store_parts(session, keys, parts, put_options(config, len(keys)), replace),
            lambda code: [code] * len(keys),
        )


def _check_part(part: Any) -> None:
    try:
        view = memoryview(part)
    except TypeError:
        raise TypeError(f"parts must be 1-D bytes-like, not {type(part).__name__}") from None
    if view.ndim != 1:
        raise RuntimeError("parts must be 1-D bytes-like")


def _log_refused(
    what: str, keys: Sequence[str], good: Sequence[bool], reason_of: Callable[[int], str]
) -> None:
    """Log how many of the objects are not stored, those not ``good``, and why the first of them is not."""
    first, num_refused = good.index(False), good.count(False)
    others = f", and {num_refused - 1} more" if num_refused > 1 else ""
    log.error(f"{what}: {keys[first][:MAX_SHOWN]!r} is not stored{others}: {reason_of(first)}")


def _first(codes: Sequence[int]) -> int:
    return next((code for code in codes if code), 0)


def store_parts(
    session: StoreSession,
    keys: Sequence[str],
    parts: Sequence[Sequence[Span]],
    options: PutOptions,
    replace: bool,
) -> list[int]:
    """Store objects of several spans: one code per key; empty spans are skipped."""
    spans = [[span for span in row if span[1]] for row in parts]
    good = [is_good_key(key) and bool(row) for key, row in zip(keys, spans, strict=True)]
    if not all(good):
        bad_key = f"a key is 1 to {MAX_KEY_BYTES} bytes of UTF-8 without NUL"
        _log_refused("put", keys, good, lambda at: "it is empty" if is_good_key(keys[at]) else bad_key)

    def put(at: list[int]) -> list[int]:
        if replace:
            return _replace(session, pick(keys, at), pick(spans, at), options.at(at))
        codes: list[int] = []
        for part in cut([total_bytes(spans[i]) for i in at]):
            chosen = [at[i] for i in part]
            codes += _put_some(session, pick(keys, chosen), pick(spans, chosen), options.at(chosen), replace)
        return codes

    return on_good(good, put)


def _replace(
    session: StoreSession, keys: list[str], spans: list[list[Span]], options: PutOptions
) -> list[int]:
    """Replace objects; groups and hard pins are inherited, and soft pins unless ``options`` change them."""
    found = session.store.inspect(keys)
    stays = [there is None or options.keeps_group(at, there) for at, there in enumerate(found)]
    if not all(stays):
        _log_refused("upsert", keys, stays, lambda _: "it is in another group than the one in group_ids")
    codes = [0 if does_stay else INVALID for does_stay in stays]
    plain = []
    for at, there in enumerate(found):
        if not stays[at]:
            continue
        if there is None or (there.pinned_s == 0 and not there.group):
            plain.append(at)
        else:
            inherited = options.at([at]).inheriting(there)
            codes[at] = _put_some(session, [keys[at]], [spans[at]], inherited, True)[0]
    for part in cut([total_bytes(spans[at]) for at in plain]):
        chosen = [plain[i] for i in part]
        again = _put_some(session, pick(keys, chosen), pick(spans, chosen), options.at(chosen), True)
        for at, code in zip(chosen, again, strict=True):
            codes[at] = code
    return codes


def _put_some(
    session: StoreSession, keys: list[str], parts: list[list[Span]], options: PutOptions, replace: bool
) -> list[int]:
    num_bytes = sum(map(total_bytes, parts))
    # A put by the store has one deadline for all its steps; here, the bytes of a large one have their own.
    # Durable puts are left to the store, which copies a part of them to SSD while it writes the next.
    is_left_to_store = num_bytes <= batches.SLOW_PART_BYTES or options.policy.is_durable
    if is_left_to_store and all(len(spans) == 1 for spans in parts):
        spans = [spans[0] for spans in parts]
        use = session.registered.begin_use(spans)
        try:
            outcomes = session.store.put_batch(
                keys, spans, options.policy, groups=options.groups, replace=replace
            )
        finally:
            session.registered.end_use(use)
        return _counted(session, keys, parts, outcomes)
    with registered_spans(session, [span for spans in parts for span in spans]):
        outcomes = [None] * len(keys)
        wanted, num_lost = list(range(len(keys))), 0
        pauses = pauses_within(session.store.settings.timeout_s / 2)
        timeout_s = session.transfer_s(num_bytes)
        while wanted:
            there, where = pick(keys, wanted), pick(parts, wanted)
            found = _write(session.store, there, where, options.at(wanted), replace, timeout_s)
            for at, outcome in zip(wanted, found, strict=True):
                outcomes[at] = outcome
            codes = ["" if outcome is None else outcome.code for outcome in outcomes]
            num_lost += "peer_lost" in codes
            again = ("peer_lost", "being_written") if num_lost < MAX_ATTEMPTS else ("being_written",)
            left = [at for at in wanted if codes[at] in again]
            if left and all(codes[at] == "being_written" for at in wanted):
                pause_s = next(pauses, None)
                if pause_s is None:
                    break
                time.sleep(pause_s)
            wanted = left
    return _counted(session, keys, parts, outcomes)


def _counted(
    session: StoreSession, keys: list[str], parts: list[list[Span]], outcomes: Sequence[Refusal | None]
) -> list[int]:
    good = [outcome is None for outcome in outcomes]
    if not all(good):
        _log_refused("put", keys, good, lambda at: str(outcomes[at]))
    stored = [spans for spans, outcome in zip(parts, outcomes, strict=True) if outcome is None]
    session.client_metrics.count_bytes("write", sum(map(total_bytes, stored)))
    return [code_of(outcome) for outcome in outcomes]


def _write(
    store: Store,
    keys: list[str],
    parts: list[list[Span]],
    options: PutOptions,
    replace: bool,
    timeout_s: float,
) -> list[Refusal | None]:
    """Write objects of several spans, each span at its offset."""
    sizes = [total_bytes(spans) for spans in parts]
    largest = store.settings.chunk_bytes
    chunk_bytes = [
        min(size_bytes, chunk_bytes_for([length for _, length in spans], largest))
        for size_bytes, spans in zip(sizes, parts, strict=True)
    ]
    started = store.start_puts(
        keys, sizes, chunk_bytes, options.policy, groups=options.groups, replace=replace
    )
    outcomes = [grant if isinstance(grant, Refusal) else None for grant in started]
    held = [(at, grant) for at, grant in enumerate(started) if isinstance(grant, PutGrant)]
    grants = [grant for _, grant in held]
    try:
        for num_slices in dict.fromkeys(len(parts[at]) for at, _ in held):
            alike = [(at, grant) for at, grant in held if len(parts[at]) == num_slices]
            columns = np.array([parts[at] for at, _ in alike], dtype=np.uint64)
            ends = np.cumsum(columns[:, :, 1], axis=1)
            lengths = columns[:, :, 1]
            offsets = (ends - lengths).ravel()
            addresses = columns[:, :, 0].ravel()
            store.write_ranges([grant for _, grant in alike], offsets, addresses, lengths.ravel(), timeout_s)
        ended = store.end_puts(grants)
    except BaseException:
        # Otherwise they would keep their keys from other writers until their deadline. No answer is awaited.
        with contextlib.suppress(MooncakeError):
            store.abort_puts(grants, deadline=0.0)
        raise
    for (at, _), outcome in zip(held, ended, strict=True):
        outcomes[at] = outcome
    return outcomes
