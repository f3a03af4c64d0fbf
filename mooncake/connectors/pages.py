# SPDX-License-Identifier: Apache-2.0
"""Pages of a cache that an engine keeps in host memory: found, loaded and saved by name while it waits.

Some engines (SGLang's HiCache, LMCache) have a cache of their own in host memory, name its pages
themselves, and call a storage backend from threads, or from a loop, that may wait. What they need is simpler
than ``store_link.py``: whole pages, in batches. A page is any number of pieces of memory, wherever the
engine's layout has them, and one object of the store; its bytes go straight from one to the other, on the
daemon's host from memory to memory. It knows no engine; a shell passes the pages' names and addresses.

Nothing raises here. A page counts as loaded only if every byte is as it was saved; a store that is slow,
full or gone is a miss, and gets no calls for a while. Every operation is a ``BoundedCall`` with one
deadline, made when it begins and passed to each of its steps. It returns once nothing touches the pages'
memory (``claim.py``), which a process that was stopped, or a blocked loop, delays for as long as that
takes: then a warning is logged each second.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from prometheus_client import Counter

from mooncake import clock
from mooncake.connectors.block_transfer import DEFAULTS
from mooncake.connectors.claim import LOG_EVERY_S, Claim
from mooncake.connectors.session import PoolSession, PoolSettings, TransferThread
from mooncake.connectors.store_link import CircuitBreaker, LinkSettings, failures, loaded_bytes, saved_bytes
from mooncake.errors import InvalidArgument, MooncakeError, Refusal
from mooncake.kvlayout import Column
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.store import PutGrant, ReadGrant
from mooncake.store.client.buffers import LocalMemory, RegisteredBuffers
from mooncake.types import ObjectKey

log = get_logger(__name__)

ResultT = TypeVar("ResultT")

ENDING_S = 0.5
"""Time beyond its deadline in which an operation may report its end, before it is cancelled."""

FORGET_S = 60.0
"""Time that ``Pages.forget`` waits for: the master removes a few thousand objects per second."""

Steps = Callable[[float], Coroutine[Any, Any, ResultT]]
"""An operation's work as a coroutine function of the deadline of all its steps."""

Span = tuple[int, int]
"""A piece of memory: (address, size in bytes)."""

CHUNK_BYTES = 1 << 20
"""Bytes covered by one checksum, where the pieces of a page give no better size."""

loaded_pages = Counter(
    "mooncake_connectors_loaded_pages", "Pages loaded, by the tier they were in.", ["tier"], registry=registry
)


class BoundedCall(Generic[ResultT]):
    """One operation at the store, which always returns a result.

    The result is available once the operation can no longer touch the engine's memory, and not before:
    a blocked loop, or a process that was stopped, delays it for as long as that takes. An operation that
    touches no memory (``is_lookup``) is not waited for beyond its deadline.
    """

    def __init__(
        self, thread: TransferThread, operation: str, otherwise: ResultT, deadline: float, is_lookup: bool
    ) -> None:
        self.claim = Claim(operation, deadline)
        self._thread = thread
        self._otherwise = otherwise
        self._result = otherwise
        self._is_lookup = is_lookup
        self._task: asyncio.Task[ResultT] | None = None

    def begin(self, work: Coroutine[Any, Any, ResultT]) -> None:
        """Begin ``work`` on the session's loop."""
        is_entered = self.claim.enter(clock.monotonic())
        self.claim.close()
        if not is_entered:
            work.close()
            return
        try:
            self._thread.loop.call_soon_threadsafe(self._begin, work)
        except RuntimeError:  # the loop is closed
            work.close()
            self.claim.leave()

    def _begin(self, work: Coroutine[Any, Any, ResultT]) -> None:
        self._task = self._thread.track(work)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[ResultT]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._result = task.result()
        self.claim.leave()

    def give_up(self) -> None:
        """Cancel the operation, from any thread; its end is visible in the claim."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._thread.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def wait(self) -> ResultT:
        """Wait for the result, on any thread but the session's.

        An interrupt (Ctrl-C) is raised when the memory is free.
        """
        interrupt: BaseException | None = None
        until = self.claim.deadline + ENDING_S
        while not self.claim.is_free:
            try:
                if self.claim.wait(until):
                    break
                self.give_up()
                if not self._is_lookup:
                    self.claim.outlast(self._thread.has_released_memory)
                break
            except BaseException as error:
                interrupt, until = error, clock.monotonic()
        if interrupt is not None:
            raise interrupt
        return self._result if self.claim.is_free else self._otherwise

    async def on_this_loop(self) -> ResultT:
        """Wait for the result on the engine's own loop. Cancelling it cancels the work and awaits its end."""
        loop, is_free = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the engine's loop is closed
                loop.call_soon_threadsafe(is_free.set)

        self.claim.when_free(notify)
        interrupt: asyncio.CancelledError | None = None
        until = self.claim.deadline + ENDING_S
        while not is_free.is_set():
            try:
                async with asyncio.timeout(max(0.0, until - clock.monotonic())):
                    await is_free.wait()
            except TimeoutError:
                self.give_up()
                if self._is_lookup or self._thread.has_released_memory():
                    break
                if until > self.claim.deadline + ENDING_S:
                    self.claim.log_overdue()
                until = clock.monotonic() + LOG_EVERY_S
            except asyncio.CancelledError as error:
                interrupt = error
                self.give_up()
        if interrupt is not None:
            raise interrupt
        return self._result if self.claim.is_free else self._otherwise

    def then(self, done: Callable[[ResultT], None]) -> None:
        """Call ``done`` with the result, on the session's thread."""
        self.claim.when_free(lambda: done(self._result))


class BoundedCalls:
    """Starts operations on the session's loop. May be called from any thread."""

    def __init__(self, thread: TransferThread, settings: LinkSettings) -> None:
        self._thread = thread
        self._settings = settings
        self._breaker = CircuitBreaker(settings.retry_after_s)
        self.is_closed = False
        """Whether new operations end at once, without a call to the store."""

    def look_up(self, operation: str, steps: Steps[ResultT], otherwise: ResultT) -> BoundedCall[ResultT]:
        """Begin an operation that touches no memory of the engine."""
        return self._begin(operation, steps, otherwise, self._settings.lookup_timeout_s, is_lookup=True)

    def move(self, operation: str, steps: Steps[ResultT], otherwise: ResultT) -> BoundedCall[ResultT]:
        """Begin an operation that reads or writes memory of the engine."""
        return self._begin(operation, steps, otherwise, self._settings.load_timeout_s, is_lookup=False)

    def insist(
        self, operation: str, steps: Steps[ResultT], otherwise: ResultT, timeout_s: float
    ) -> BoundedCall[ResultT]:
        """Begin an operation that touches no memory of the engine, also while the circuit breaker is open."""
        return self._begin(operation, steps, otherwise, timeout_s, is_lookup=True, insists=True)

    def _begin(
        self,
        operation: str,
        steps: Steps[ResultT],
        otherwise: ResultT,
        timeout_s: float,
        is_lookup: bool,
        insists: bool = False,
    ) -> BoundedCall[ResultT]:
        """``otherwise``: the result of a failed operation."""
        now = clock.monotonic()
        work = BoundedCall(self._thread, operation, otherwise, now + timeout_s, is_lookup)
        if self.is_closed or (self._breaker.is_open and not insists):
            work.claim.close()
        else:
            work.begin(self._guarded(operation, steps, work.claim.deadline, otherwise))
        return work

    async def _guarded(
        self, operation: str, steps: Steps[ResultT], deadline: float, otherwise: ResultT
    ) -> ResultT:
        try:
            return await steps(deadline)
        except asyncio.CancelledError:
            failures.labels(operation).inc()
            log.warning("operation_abandoned", operation=operation)
            raise
        except (MooncakeError, TimeoutError) as error:
            failures.labels(operation).inc()
            if isinstance(error, InvalidArgument):
                log.error("operation_refused", operation=operation, error=str(error))
            else:
                self._breaker.trip(operation, error)
        except Exception:  # a bug of ours is no reason to fail the engine's request
            failures.labels(operation).inc()
            log.exception("operation_failed", operation=operation)
        return otherwise


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

    def forget(self, prefixes: Sequence[str]) -> list[int | None]:
        """Remove all objects whose key begins with a prefix; returns their number for each, None if unknown.

        It is unknown where the master did not answer, or not within ``FORGET_S``: then it may be removing
        them still. All removals begin at once, so that several take no longer than one.
        """
        calls = [
            self._calls.insist("forget", functools.partial(self._forget, prefix), None, FORGET_S)
            for prefix in prefixes
        ]
        found = [call.wait() for call in calls]
        for prefix, number in zip(prefixes, found, strict=True):
            if number is None:
                log.warning("removal_not_confirmed", prefix=prefix)
        return found

    def close(self) -> None:
        """Stop; nothing touches the engine's memory afterwards. May be called more than once."""
        if not self._calls.is_closed:
            self._calls.is_closed = True
            self._session.close()
            self._memory.close()

    async def _forget(self, prefix: str, _: float) -> int | None:
        return await self._session.store.remove_matching("^" + re.escape(prefix), force=True)

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
        saved = [_is_known(answer) for answer in answers]
        refused = [
            answer
            for answer, is_saved in zip(answers, saved, strict=True)
            if isinstance(answer, Refusal) and not is_saved
        ]
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


def _is_known(answer: PutGrant | Refusal | None) -> bool:
    """Whether the page is stored, or another process is writing the same bytes, whose failure is a miss."""
    return answer is None or (isinstance(answer, Refusal) and answer.code == "being_written")


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
