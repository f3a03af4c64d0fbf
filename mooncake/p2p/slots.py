# SPDX-License-Identifier: Apache-2.0
"""Registered memory for chunks, in slots of equal size."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator

from mooncake.p2p.manifest import MAX_CHUNK_BYTES
from mooncake.transfer import TransferEngine
from mooncake.transfer.memory import span_of


class Slots:
    """``number`` slots of ``MAX_CHUNK_BYTES``, whose pages are taken when they are first used.

    ``is_shown``: peers may read them, and write nothing to them; otherwise they are for this process only.
    """

    def __init__(self, engine: TransferEngine, number: int, *, is_shown: bool) -> None:
        self._engine = engine
        self._memory = mmap.mmap(-1, number * MAX_CHUNK_BYTES)
        self._view = memoryview(self._memory)
        self.address, _, _ = span_of(self._view)
        memory = self._view.toreadonly() if is_shown else self._view
        self._region = engine.register(memory, is_brief=not is_shown)
        self._free = list(range(number))
        self._returned = asyncio.Condition()

    def view(self, slot: int) -> memoryview:
        return self._view[slot * MAX_CHUNK_BYTES : (slot + 1) * MAX_CHUNK_BYTES]

    def address_at(self, slot: int) -> int:
        return self.address + slot * MAX_CHUNK_BYTES

    def address_of(self, view: memoryview) -> int:
        """Address of a slot that ``one`` gave out."""
        address, _, _ = span_of(view)
        return address

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[memoryview]:
        """Context manager: a slot that nothing else uses; waits for one."""
        async with self._returned:
            await self._returned.wait_for(lambda: self._free)
            slot = self._free.pop()
        try:
            yield self.view(slot)
        finally:
            self._free.append(slot)
            with contextlib.suppress(asyncio.CancelledError):
                async with self._returned:
                    self._returned.notify()

    def close(self) -> None:
        """Unregister the memory; it is freed with the last view of it."""
        self._engine.unregister(self._region)
