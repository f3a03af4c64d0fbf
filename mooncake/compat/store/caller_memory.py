# SPDX-License-Identifier: Apache-2.0
"""A program's own memory: registered by the program, or for the duration of one call.

Pointers that were never registered work, as programs expect, and so do device pointers where there is a
CUDA driver. An invalid pointer is refused before it is dereferenced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from mooncake.compat.store.arguments import MAX_ADDRESS, Span, is_span, number
from mooncake.compat.store.lifecycle import StoreLifecycle
from mooncake.compat.store.store_session import StoreSession
from mooncake.compat.transfer.error_codes import EngineCodeError
from mooncake.errors import InvalidArgument
from mooncake.log import get_logger
from mooncake.transfer.memory import is_readable, is_writable

log = get_logger("mooncake.store")

ResultT = TypeVar("ResultT")


class BufferRegistrationCalls(StoreLifecycle):
    """Registration of a program's memory, which then moves without per-call registration."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory: 0; -600 when it overlaps registered memory, or is not memory of this process."""
        what = "register_buffer"
        address, size_bytes = number(what, "buffer_ptr", buffer_ptr), number(what, "size", size)

        def register(session: StoreSession) -> int:
            try:
                session.registered.add([address], [size_bytes])
            except EngineCodeError as error:
                raise InvalidArgument("buffer", hex(address), str(error)) from error
            return 0

        return self._in_session(what, register, int)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Unregister memory: 0; -600 when nothing registered begins there."""
        what = "unregister_buffer"
        address = number(what, "buffer_ptr", buffer_ptr)

        def unregister(session: StoreSession) -> int:
            try:
                session.registered.remove([address])
            except EngineCodeError as error:
                raise InvalidArgument("buffer", hex(address), str(error)) from error
            return 0

        return self._in_session(what, unregister, int)


def allocated(what: str, size_bytes: int, make: Callable[[int], ResultT]) -> ResultT | None:
    """Memory for an object that a call reads; None, with a log line, when the host has none."""
    try:
        return make(size_bytes)
    except MemoryError:
        log.error(f"{what}: this host has no memory for {size_bytes} bytes")
        return None


def is_accessible(session: StoreSession, span: Span, to_write: bool = False) -> bool:
    """Whether these bytes may be moved, or with ``to_write`` be replaced by others.

    They may be registered memory, any memory of this process that permits it, or a device's.
    """
    if not is_span(span):
        return False
    address, size_bytes = span
    if not size_bytes:
        return True
    columns = np.array([address], dtype=np.uint64), np.array([size_bytes], dtype=np.uint64)
    if session.registered.uncovered(*columns, to_write=to_write) is None:
        return True
    if is_writable(address, size_bytes) if to_write else is_readable(address, size_bytes):
        return True
    if not session.engine.is_device_memory(address):
        return False
    try:
        session.engine.unregister(session.engine.register(span))
    except InvalidArgument:
        return False
    return True


def are_accessible(
    session: StoreSession, rows: Sequence[Sequence[Span]], to_write: bool = False
) -> list[bool]:
    """Whether all of each row ``is_accessible``. Fast when all of them lie in registered memory."""
    spans = [span for row in rows for span in row]
    with contextlib.suppress(OverflowError):
        columns = np.array(spans, dtype=np.int64).reshape(-1, 2)
        addresses, sizes = columns[:, 0], columns[:, 1]
        good = (sizes == 0) | ((sizes > 0) & (addresses > 0) & (addresses < MAX_ADDRESS - sizes))
        where = addresses.astype(np.uint64), sizes.astype(np.uint64)
        if good.all() and session.registered.uncovered(*where, to_write=to_write) is None:
            return [True] * len(rows)
    return [all(is_accessible(session, span, to_write) for span in row) for row in rows]


@contextlib.contextmanager
def registered_spans(session: StoreSession, spans: Sequence[Span]) -> Iterator[None]:
    """Keep ``spans`` registered within the block, whatever other threads register and unregister.

    Raises:
        InvalidArgument: part of it is not memory of this process.
    """
    addresses = np.array([address for address, _ in spans], dtype=np.uint64)
    sizes = np.array([size_bytes for _, size_bytes in spans], dtype=np.uint64)
    use = session.registered.begin_use(spans)
    try:
        missing = session.registered.uncovered(addresses, sizes)
        if missing is None:
            yield
            return
        host: list[int] = []
        device: list[int] = []
        for at in np.flatnonzero(missing).tolist():
            (device if session.engine.is_device_memory(spans[at][0]) else host).append(at)
        regions = [session.engine.register(spans[at]) for at in device]
        try:
            temporary = session.temporary_registrations.begin(addresses[host], sizes[host]) if host else []
            try:
                yield
            finally:
                session.temporary_registrations.end(temporary)
        finally:
            for region in regions:
                session.engine.unregister(region)
    finally:
        session.registered.end_use(use)
