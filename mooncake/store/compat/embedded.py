"""A node in a program's own process: its segment is the program's memory, its loop a thread of its own.

The existing package works that way; here it is the exception (``mooncaked`` keeps what a program that
dies would lose). The thread is a daemon: a program that forgets to close still ends, and ``exits.py``
unmounts what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import Any

from mooncake.errors import MooncakeError, Unavailable
from mooncake.log import get_logger
from mooncake.store.node import Node, NodeSettings
from mooncake.transfer import TransferEngine

log = get_logger("mooncake.store")

CLOSE_S = 5.0


class EmbeddedNode:
    """Runs one ``Node`` until ``close``.

    Raises:
        OutOfMemory: the machine does not have the memory.
        AddressInUse: the node's port is taken.
        Unavailable: the master did not take the segment in ``timeout_s``.
    """

    def __init__(self, settings: NodeSettings, timeout_s: float) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-node", daemon=True)
        self._thread.start()
        self._node: Node | None = None
        try:
            self._wait(self._start(timeout_s), timeout_s + CLOSE_S)
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> TransferEngine:
        assert self._node is not None
        return self._node.engine

    async def _start(self, timeout_s: float) -> None:
        self._node = Node(self.settings)
        await self._node.start()
        try:
            async with asyncio.timeout(timeout_s):
                await self._node.mounted.wait()
        except TimeoutError:
            raise Unavailable(
                f"the master at {self.settings.master} did not take segment {self.settings.name!r} "
                f"within {timeout_s:g} s; is the name in use?"
            ) from None

    def close(self) -> None:
        """Tell the master, and give the memory back. Harmless when repeated."""
        if self._loop.is_closed():
            return
        node, self._node = self._node, None
        if node is not None:
            try:
                self._wait(node.close(), CLOSE_S)
            except (RuntimeError, MooncakeError, TimeoutError) as error:
                # At the interpreter's exit there are no more threads to be had: the master has been told.
                log.debug("node_close", reason=str(error))
                node.engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.close()

    def _wait(self, work: Any, timeout_s: float) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise
