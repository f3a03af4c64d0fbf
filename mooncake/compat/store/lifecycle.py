# SPDX-License-Identifier: Apache-2.0
"""The lifecycle of a ``MooncakeDistributedStore``: no session, then one with a master, then none again.

Every call goes through ``_do``, which turns failures into numbers, so that no call raises or crashes before
``setup``, after ``close``, while another thread closes, in a forked child, or without a master.

The other modules of calls (tensors, sessions, ...) build on::

    self._store                          the client of ``mooncake.store``, or None
    self._do(what, act, failed)          act(store), or failed(code) when that fails
    self._put(what, keys, parts, config) one code per key; parts: per key, a list of (address, size)
    self._get_into(what, keys, parts)    sizes or codes per key
    self.put_parts, get_buffer, ...      the public calls, which are methods of the same object
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import NoReturn, TypeVar

from mooncake.compat.store.buffer_pool import LocalBuffer
from mooncake.compat.store.error_codes import StoreCode, code_of_error
from mooncake.compat.store.session_setup import open_session
from mooncake.compat.store.setup_arguments import SetupArguments
from mooncake.compat.store.store_session import StoreSession
from mooncake.errors import InvalidArgument, MooncakeError, Unavailable
from mooncake.log import get_logger
from mooncake.store.client.store import Store

log = get_logger("mooncake.store")

ResultT = TypeVar("ResultT")


class StoreLifecycle:
    """Holds the session, and turns failures of calls into numbers."""

    def __init__(self) -> None:
        self._life_lock = threading.Lock()
        self._session: StoreSession | None = None
        self._has_failed = False
        """Whether ``setup`` failed and ``close`` was not called since."""
        self._finalizer: weakref.finalize[..., StoreLifecycle] | None = None

    def __reduce__(self) -> NoReturn:
        """Refuse ``pickle`` and ``copy.copy``: two stores would close one session."""
        raise TypeError(f"cannot pickle {type(self).__qualname__!r} object: its session belongs to one store")

    @property
    def _store(self) -> Store | None:
        session = self._session
        return None if session is None else session.store

    # Setup and close --------------------------------------------------------------------------------

    def _begin(
        self, arguments: Callable[[], SetupArguments], opened: Callable[[StoreSession], None] = lambda _: None
    ) -> int:
        """Open a session with the result of ``arguments``; 0, or a code with the reason in the log."""
        with self._life_lock:
            if self._session is not None and self._session.is_usable:
                log.error("setup: this store is already set up; close() it first")
                return int(StoreCode.INVALID_PARAMS)
            if self._has_failed:
                log.error("setup: the last setup of this store failed; close() it before the next")
                return int(StoreCode.INVALID_PARAMS)
            self._has_failed = True
            try:
                session = open_session(arguments().checked())
                opened(session)
                self._session = session
            except InvalidArgument as error:
                log.error(f"setup: {error}")
                return int(StoreCode.INVALID_PARAMS)
            except MooncakeError as error:
                log.error(f"setup: {error}")
                return -1 if isinstance(error, Unavailable) else code_of_error(error)
            except ValueError as error:  # no host can have this name, or no file
                log.error(f"setup: {error}")
                return int(StoreCode.INVALID_PARAMS)
            self._has_failed = False
            self._finalizer = weakref.finalize(self, _close_in_thread, session)
            self._finalizer.atexit = False  # exit_hooks.py closes the session at exit
            return int(StoreCode.OK)

    def close(self) -> int:
        """Close the session; always 0. Calls in progress end first, or fail."""
        with self._life_lock:
            session, self._session, self._has_failed = self._session, None, False
            if self._finalizer is not None:
                self._finalizer.detach()
                self._finalizer = None
        if session is not None:
            session.close()
        return 0

    def health_check(self) -> int:
        """Health of the client, 0: good; 1: not set up, or closed; 2: the master does not answer."""
        session = self._session
        if session is None or not session.enter():
            return 1
        try:
            return 0 if session.has_master() else 2
        finally:
            session.leave()

    def get_hostname(self) -> str:
        """Name ``host:port`` of this process's segment; empty before ``setup``."""
        session = self._session
        return session.hostname if session is not None else ""

    def _local_buffer(self) -> LocalBuffer | None:
        """Registered memory of the size given to ``setup``, for pools of buffers."""
        session = self._session
        return None if session is None else session.local

    # Every call ---------------------------------------------------------------------------------------

    def _do(self, what: str, act: Callable[[Store], ResultT], failed: Callable[[int], ResultT]) -> ResultT:
        """Result of ``act`` with the store, or of ``failed`` with an error number whose reason is logged."""
        return self._in_session(what, lambda session: act(session.store), failed)

    def _in_session(
        self, what: str, act: Callable[[StoreSession], ResultT], failed: Callable[[int], ResultT]
    ) -> ResultT:
        session = self._session
        if session is None or not session.enter():
            log.error(f"{what}: this store is not set up; call setup() and check that it returns 0")
            return failed(int(StoreCode.INVALID_PARAMS))
        began = time.perf_counter()
        try:
            if session.is_cut_off and not session.has_master():
                return failed(int(StoreCode.RPC_FAIL))
            result = act(session)
            session.client_metrics.observe_call(what, time.perf_counter() - began)
            return result
        except Unavailable as error:
            session.is_cut_off = True
            log.error(f"{what}: {error}")
            return failed(int(StoreCode.RPC_FAIL))
        except MooncakeError as error:
            log.error(f"{what}: {error}")
            return failed(code_of_error(error))
        except MemoryError as error:
            log.error(f"{what}: this host has no memory left for it ({error})")
            return failed(int(StoreCode.NO_AVAILABLE_HANDLE))
        except (UnicodeError, OverflowError) as error:  # text or a number that a message cannot represent
            log.error(f"{what}: {error}")
            return failed(int(StoreCode.INVALID_PARAMS))
        finally:
            session.leave()


def _close_in_thread(session: StoreSession) -> None:
    """Close a session that is garbage-collected; on the node's own thread waiting would deadlock."""
    closing = threading.Thread(target=session.close, name="store-close", daemon=True)
    closing.start()
    if not session.is_on_node():
        closing.join()
