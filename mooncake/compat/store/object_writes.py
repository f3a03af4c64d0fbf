"""How objects get into the store from the places where their bytes lie: in parts that a deadline can cover.

One place per object is the store's own business; several are written where they belong within the object,
which is then cut into chunks such that each of them can be read by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake.compat.store.arguments import Span, is_good_key, total_bytes
from mooncake.compat.store.batches import cut, on_good, pick
from mooncake.compat.store.caller_memory import registered_spans
from mooncake.compat.store.error_codes import code_of
from mooncake.compat.store.put_options import PutOptions
from mooncake.compat.store.read_plan import chunk_bytes_for
from mooncake.compat.store.store_session import StoreSession
from mooncake.errors import Refusal
from mooncake.store.client.grants import PutGrant
from mooncake.store.client.store import Store

MAX_ATTEMPTS = 3
"""How often an object in parts looks for another segment after a node could not be reached."""


def store_parts(
    session: StoreSession,
    keys: Sequence[str],
    parts: Sequence[Sequence[Span]],
    options: PutOptions,
    replace: bool,
) -> list[int]:
    """One code per key; empty parts are passed over."""
    spans = [[span for span in row if span[1]] for row in parts]
    good = [is_good_key(key) and bool(row) for key, row in zip(keys, spans, strict=True)]

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
    """In the place of what is there; one that is pinned or in a group stays so, unless told otherwise."""
    found = session.store.inspect(keys)
    codes = [0] * len(keys)
    plain = []
    for at, there in enumerate(found):
        if there is None or (there.pinned_s == 0 and not there.group):
            plain.append(at)
        else:
            alone = options.at([at]).inheriting(there)
            codes[at] = _put_some(session, [keys[at]], [spans[at]], alone, True)[0]
    for part in cut([total_bytes(spans[at]) for at in plain]):
        chosen = [plain[i] for i in part]
        again = _put_some(session, pick(keys, chosen), pick(spans, chosen), options.at(chosen), True)
        for at, code in zip(chosen, again, strict=True):
            codes[at] = code
    return codes


def _put_some(
    session: StoreSession, keys: list[str], parts: list[list[Span]], options: PutOptions, replace: bool
) -> list[int]:
    if all(len(spans) == 1 for spans in parts):
        spans = [spans[0] for spans in parts]
        outcomes = session.store.put_batch(
            keys, spans, options.policy, groups=options.groups, replace=replace
        )
        return _counted(session, parts, outcomes)
    with registered_spans(session, [span for spans in parts for span in spans]):
        outcomes = [None] * len(keys)
        wanted = list(range(len(keys)))
        for _ in range(MAX_ATTEMPTS):
            there, where = pick(keys, wanted), pick(parts, wanted)
            found = _write(session.store, there, where, options.at(wanted), replace)
            for at, outcome in zip(wanted, found, strict=True):
                outcomes[at] = outcome
            wanted = [at for at in wanted if (lost := outcomes[at]) is not None and lost.code == "peer_lost"]
            if not wanted:
                break
    return _counted(session, parts, outcomes)


def _counted(session: StoreSession, parts: list[list[Span]], outcomes: Sequence[Refusal | None]) -> list[int]:
    stored = [spans for spans, outcome in zip(parts, outcomes, strict=True) if outcome is None]
    session.client_metrics.moved("write", sum(map(total_bytes, stored)))
    return [code_of(outcome) for outcome in outcomes]


def _write(
    store: Store, keys: list[str], parts: list[list[Span]], options: PutOptions, replace: bool
) -> list[Refusal | None]:
    """Objects whose bytes lie in several places, each written where it belongs."""
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
    for num_slices in dict.fromkeys(len(parts[at]) for at, _ in held):
        alike = [(at, grant) for at, grant in held if len(parts[at]) == num_slices]
        columns = np.array([parts[at] for at, _ in alike], dtype=np.uint64)
        ends = np.cumsum(columns[:, :, 1], axis=1)
        lengths = columns[:, :, 1]
        offsets = (ends - lengths).ravel()
        store.write_ranges([grant for _, grant in alike], offsets, columns[:, :, 0].ravel(), lengths.ravel())
    for (at, _), outcome in zip(held, store.end_puts([grant for _, grant in held]), strict=True):
        outcomes[at] = outcome
    return outcomes
