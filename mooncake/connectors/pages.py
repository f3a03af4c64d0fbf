# SPDX-License-Identifier: Apache-2.0
"""Pages of a cache that an engine keeps in host memory: found, loaded and saved by name while it waits.

Some engines (SGLang's HiCache, LMCache) have a cache of their own in host memory, name its pages
themselves, and call a storage backend from threads that may wait. What they need is simpler than
``store_link.py``: whole pages, in batches. A page is any number of pieces of memory, wherever the engine's
layout has them, and one object of the store; its bytes go straight from one to the other, on the
daemon's host from memory to memory. It knows no engine; a shell passes the pages' names and addresses.

Nothing raises here. A page counts as loaded only if every byte is as it was saved; a store that is slow,
full or gone is a miss, and gets no calls for a while. ``load`` and ``save`` begin nothing after their
deadline and return once nothing touches the pages' memory (``claim.py``), which a process that was stopped,
or a blocked loop, delays for as long as that takes: then a warning is logged each second.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client import Counter

from mooncake.connectors.block_transfer import DEFAULTS
from mooncake.connectors.bounded_call import BoundedCall, BoundedCalls
from mooncake.connectors.session import PoolSession, PoolSettings
from mooncake.connectors.store_link import LinkSettings, failures, loaded_bytes, saved_bytes
from mooncake.errors import MooncakeError, Refusal
from mooncake.kvlayout import Column
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.store import PutGrant, ReadGrant
from mooncake.store.client.buffers import LocalMemory, RegisteredBuffers
from mooncake.types import ObjectKey

log = get_logger(__name__)

Span = tuple[int, int]
"""A piece of memory: (address, size in bytes)."""

CHUNK_BYTES = 1 << 20
"""Bytes covered by one checksum, where the pieces of a page give no better size."""

loaded_pages = Counter(
    "mooncake_connectors_loaded_pages", "Pages loaded, by the tier they were in.", ["tier"], registry=registry
)


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """An object of the store, and the memory of its bytes."""

    key: ObjectKey
    spans: Sequence[Span]
    parent: ObjectKey = ""
    """The previous page of its prefix, which stays useful at least as long as this one."""

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.spans)

    @property
    def chunk_bytes(self) -> int:
        """Size of one piece, so that no checksum has to be combined from several."""
        first = self.spans[0][1]
        if first <= 4 * CHUNK_BYTES and all(size == first for _, size in self.spans):
            return first
        return min(CHUNK_BYTES, self.size_bytes)


class Pages:
    """A client of the store for such an engine. May be called from any thread.

    Pages of one call have the same number of pieces.
    """

    def __init__(self, pool: PoolSettings, settings: LinkSettings = DEFAULTS) -> None:
        self._session = PoolSession(pool, settings.lookup_timeout_s)
        self._settings = settings
        self._calls = BoundedCalls(self._session, settings)
        self._memory = LocalMemory(self._session.transfer)

    def register(self, spans: Sequence[Span]) -> None:
        """Register memory of pages until ``close``. Other memory is registered for each call."""
        for span in spans:
            try:
                self._session.transfer.register(span)
            except MooncakeError as error:
                log.warning("memory_not_registered", size_bytes=span[1], reason=str(error))
        self._session.mount_segment()

    def find(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether each page can be loaded; pages found are leased."""
        return self.begin_find(keys).wait()

    def begin_find(self, keys: Sequence[ObjectKey]) -> BoundedCall[list[bool]]:
        """Begin ``find`` without waiting for its result."""
        store = self._session.store
        return self._calls.look_up("lookup", lambda end: store.exists(keys, end), [False] * len(keys))

    def load(self, pages: Sequence[Page]) -> list[bool]:
        """Fill the memory of these pages. False: the contents of a page's memory are undefined."""
        return self._calls.move("load", lambda end: self._load(pages, end), [False] * len(pages)).wait()

    def open(self, keys: Sequence[ObjectKey]) -> BoundedCall[list[ReadGrant | None]]:
        """Find pages for ``read``, for a caller that allocates memory once it knows their sizes."""
        store = self._session.store
        return self._calls.look_up("load", lambda end: store.open_reads(keys, end), [None] * len(keys))

    def read(self, grants: Sequence[ReadGrant], spans: Sequence[Sequence[Span]]) -> BoundedCall[list[bool]]:
        """Fill memory, of the pages' sizes, with opened pages. False: the memory's contents are undefined."""
        return self._calls.move("load", lambda end: self._read(grants, spans, end), [False] * len(grants))

    def save(self, pages: Sequence[Page]) -> list[bool]:
        """Store these pages. True: the store has the page, or another client is writing it."""
        return self.begin_save(pages).wait()

    def begin_save(self, pages: Sequence[Page]) -> BoundedCall[list[bool]]:
        """Begin ``save``; the memory of the pages is read until the call is done."""
        return self._calls.move("save", lambda end: self._save(pages, end), [False] * len(pages))

    def remove(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Remove these pages; whether each existed."""
        call = self._calls.look_up("remove", lambda end: self._remove(keys, end), [False] * len(keys))
        return call.wait()

    def forget(self, prefix: str) -> int:
        """Remove all objects whose key begins with ``prefix``; returns their number."""
        pattern = "^" + re.escape(prefix)
        store = self._session.store
        return self._calls.look_up("forget", lambda _: store.remove_matching(pattern, force=True), 0).wait()

    def close(self) -> None:
        """Stop; nothing touches the engine's memory afterwards. May be called more than once."""
        if not self._calls.is_closed:
            self._calls.is_closed = True
            self._session.close()
            self._memory.close()

    async def _remove(self, keys: Sequence[ObjectKey], deadline: float) -> list[bool]:
        outcomes = await self._session.store.remove(keys, True, deadline)
        return [outcome is True for outcome in outcomes]

    async def _load(self, pages: Sequence[Page], deadline: float) -> list[bool]:
        loaded = [False] * len(pages)
        found = await self._session.store.open_reads([page.key for page in pages], deadline)
        held = [
            (at, grant)
            for at, grant in enumerate(found)
            if grant is not None and grant.size_bytes == pages[at].size_bytes
        ]
        grants, spans = [grant for _, grant in held], [pages[at].spans for at, _ in held]
        good = await self._read(grants, spans, deadline)
        for (at, _), is_good in zip(held, good, strict=True):
            loaded[at] = is_good
        return loaded

    async def _read(
        self, grants: Sequence[ReadGrant], spans: Sequence[Sequence[Span]], deadline: float
    ) -> list[bool]:
        if not grants:
            return []
        with self._memory.target([span for page in spans for span in page]) as prepared:
            columns = _columns(spans, prepared)
            timeout_s = self._settings.load_timeout_s
            good = await self._session.store.read_ranges(grants, *columns, timeout_s, deadline)
        for grant, is_good in zip(grants, good, strict=True):
            if is_good:
                loaded_bytes.inc(grant.size_bytes)
                loaded_pages.labels(grant.replica.tier.name.lower()).inc()
        if not all(good):
            failures.labels("load").inc()
            log.warning("pages_not_loaded", num_pages=len(good) - sum(good), of=len(good))
        return good

    async def _save(self, pages: Sequence[Page], deadline: float) -> list[bool]:
        store = self._session.store
        parents = [page.parent for page in pages]
        answers = await store.start_puts(
            [page.key for page in pages],
            [page.size_bytes for page in pages],
            [page.chunk_bytes for page in pages],
            parents=parents if any(parents) else (),
            deadline=deadline,
        )
        saved = [answer is None for answer in answers]
        refused = [answer for answer in answers if isinstance(answer, Refusal)]
        held = [(at, answer) for at, answer in enumerate(answers) if isinstance(answer, PutGrant)]
        if held:
            grants = [grant for _, grant in held]
            outcomes = await self._write(grants, [pages[at].spans for at, _ in held], deadline)
            for (at, grant), outcome in zip(held, outcomes, strict=True):
                saved[at] = outcome is None
                if outcome is None:
                    saved_bytes.inc(grant.size_bytes)
                else:
                    refused.append(outcome)
        if refused:
            failures.labels("save").inc()
            log.info(
                "pages_not_saved", num_pages=len(refused), code=refused[0].code, reason=refused[0].reason
            )
        return saved

    async def _write(
        self, grants: Sequence[PutGrant], spans: Sequence[Sequence[Span]], deadline: float
    ) -> list[Refusal | None]:
        """Fill the space of these grants and make it visible, or release it, also when this is cancelled."""
        store = self._session.store
        try:
            with self._memory.source([span for page in spans for span in page]) as prepared:
                columns = _columns(spans, prepared)
                await store.write_ranges(grants, *columns, self._settings.load_timeout_s, deadline)
            return await store.end_puts(grants, deadline)
        except BaseException:
            self._session.track(self._abort(grants))
            raise

    async def _abort(self, grants: Sequence[PutGrant]) -> None:
        try:
            await self._session.store.abort_puts(grants)
        except MooncakeError as error:  # the master releases the space by itself, later
            log.info("put_not_aborted", num_pages=len(grants), reason=str(error))


def link_settings_of(extra: Mapping[str, Any]) -> LinkSettings:
    """Link settings from an engine's extra configuration; the options are named as in ``LinkSettings``."""
    names = ("lookup_timeout_s", "load_timeout_s")
    return dataclasses.replace(DEFAULTS, **{name: float(extra[name]) for name in names if name in extra})


def num_leading(flags: Sequence[bool]) -> int:
    """Number of true flags before the first false one: a prefix ends at its first gap."""
    return next((count for count, flag in enumerate(flags) if not flag), len(flags))


def _columns(pages: Sequence[Sequence[Span]], prepared: RegisteredBuffers) -> tuple[Column, Column, Column]:
    """(object offsets, local addresses, lengths) of all pieces, page by page."""
    assert len({len(spans) for spans in pages}) == 1, "pages of one call have equally many pieces"
    lengths = np.array(prepared.sizes, dtype=np.uint64).reshape(len(pages), -1)
    offsets = np.cumsum(lengths, axis=1, dtype=np.uint64) - lengths
    return offsets.reshape(-1), np.array(prepared.addresses, dtype=np.uint64), lengths.reshape(-1)
