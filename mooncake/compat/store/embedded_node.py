# SPDX-License-Identifier: Apache-2.0
"""A node in a program's own process: its segments are the program's memory, its loop has its own thread.

The existing package works that way; here it is the exception, because ``mooncaked`` keeps data that would
be lost with the program. The thread is a daemon thread: a program that forgets to close still ends, and
``exit_hooks.py`` unmounts its segments.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from mooncake.errors import MooncakeError, Unavailable
from mooncake.log import get_logger
from mooncake.store import messages as m
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.node.shared_directory import ADVICE
from mooncake.transfer import Region, TransferEngine

log = get_logger("mooncake.store")

CLOSE_S = 5.0

START_S = 300.0
"""Time to allocate the memory, which no other process delays: a large pool takes minutes."""

ResultT = TypeVar("ResultT")


class EmbeddedNode:
    """Runs one ``Node`` on the program's engine until ``close``. Thread-safe.

    Raises:
        OutOfMemory: the host does not have the memory.
        InvalidArgument: the SSD's directory cannot be used.
        Unavailable: the memory was not allocated within ``START_S``, or the master did not accept the
            segments within ``timeout_s``.
    """

    def __init__(self, settings: NodeSettings, engine: TransferEngine, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-node", daemon=True)
        self._thread.start()
        self._node = Node(settings, engine)
        try:
            self._wait(self._node.start(), START_S)
            if self._node.segments:
                self._wait(self._mounted(), timeout_s + CLOSE_S)
        except BaseException:
            self.close()
            raise

    def is_on_own_thread(self) -> bool:
        """Whether the caller runs on the node's thread."""
        return threading.current_thread() is self._thread

    def mount(self, region: Region, name: str) -> None:
        """Mount a further segment.

        Raises:
            InvalidArgument: the name is in use.
            Unavailable: the master did not accept it in time.
        """

        async def mount_segment() -> None:
            self._node.mount_region(region, name)
            try:
                await self._mounted()
            except Unavailable:
                await self._node.unmount(name)
                raise

        self._wait(mount_segment(), self._timeout_s + CLOSE_S)

    def unmount(self, name: str, grace_s: float = 0.0) -> None:
        """Unmount a segment; readers that hold a lease may go on for ``grace_s``.

        Raises:
            InvalidArgument: no segment has that name.
        """
        self._wait(self._node.unmount(name, grace_s), self._timeout_s + CLOSE_S + grace_s)

    def start_drain(self, name: str) -> None:
        """Place nothing new on a segment, and begin to have its objects copied elsewhere.

        Raises:
            Unavailable: the master can't be reached, or refuses.
        """
        reply = self._wait(self._node.start_drain([name]), self._timeout_s + CLOSE_S)
        if isinstance(reply, m.RefusedReply):
            raise Unavailable(str(reply.refusal))

    async def _mounted(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._node.mounted.wait()
        except TimeoutError:
            raise Unavailable(
                f"the master at {self._node.settings.master} did not accept {', '.join(self._node.segments)} "
                f"within {self._timeout_s:g} s; is a name in use?"
            ) from None
        error, self._node.root_fs_dir_error = self._node.root_fs_dir_error, None
        if error is not None:  # in prose: a program's own log format shows no fields of the node's event
            log.warning(f"setup: {error}; {ADVICE}")

    def close(self) -> None:
        """Unmount the segments and release the memory. Idempotent."""
        if self._loop.is_closed():
            return
        try:
            self._wait(self._node.close(), CLOSE_S)
        except (RuntimeError, MooncakeError) as error:
            # At the interpreter's exit no thread can be started; the segments are already unmounted.
            log.debug("node_close_failed", reason=str(error))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, ResultT], timeout_s: float) -> ResultT:
        future: Future[ResultT] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise Unavailable(f"a call to this process's node did not end within {timeout_s:g} s") from None
