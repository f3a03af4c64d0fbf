"""The life of a ``MooncakeDistributedStore``: nothing, then a session with a master, then nothing again.

Every call goes through ``_do``, which is why none of them raises or crashes, before ``setup``, after
``close``, while another thread closes, in a forked child, or without a master: it becomes a number.

For the modules beside this one (tensors, sessions, ...), what to build on::

    self._store                          the client of ``mooncake.store``, or None
    self._do(what, act, failed)          act(store), or failed(code) when it cannot be
    self._put(what, keys, parts, config) one code per key; parts: per key, a list of (address, size)
    self._get_into(what, keys, parts)    sizes or codes per key
    self.put_parts, get_buffer, ...      the public calls, which are all in the same object
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

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
    """Knows when there is a store to talk to, and turns what goes wrong into numbers."""

    def __init__(self) -> None:
        self._life_lock = threading.Lock()
        self._session: StoreSession | None = None
        self._finalizer: weakref.finalize[..., StoreLifecycle] | None = None

    @property
    def _store(self) -> Store | None:
        session = self._session
        return None if session is None else session.store

    # Beginning and end ------------------------------------------------------------------------------

    def _begin(
        self, words: Callable[[], SetupArguments], opened: Callable[[StoreSession], None] = lambda _: None
    ) -> int:
        """Open a session with what ``words`` says; 0, or a code with the reason in the log."""
        with self._life_lock:
            if self._session is not None and self._session.is_usable:
                log.error("setup: this store is set up already; close() it first")
                return int(StoreCode.INVALID_PARAMS)
            try:
                session = open_session(words().checked())
                opened(session)
                self._session = session
            except InvalidArgument as error:
                log.error(f"setup: {error}")
                return int(StoreCode.INVALID_PARAMS)
            except MooncakeError as error:
                log.error(f"setup: {error}")
                return -1 if isinstance(error, Unavailable) else code_of_error(error)
            self._finalizer = weakref.finalize(self, _close_in_thread, session)
            self._finalizer.atexit = False  # exits.py sees to that
            return int(StoreCode.OK)

    def close(self) -> int:
        """0, however often and whenever it is called. Calls under way end first, or fail."""
        with self._life_lock:
            session, self._session = self._session, None
            if self._finalizer is not None:
                self._finalizer.detach()
                self._finalizer = None
        if session is not None:
            session.close()
        return 0

    def health_check(self) -> int:
        """0: well; 1: not set up, or closed; 2: the master does not answer."""
        session = self._session
        if session is None or not session.enter():
            return 1
        try:
            return 0 if session.has_master() else 2
        finally:
            session.leave()

    def get_hostname(self) -> str:
        """``host:port``, the name of the segment that this process contributes; empty before ``setup``."""
        session = self._session
        return session.hostname if session is not None else ""

    def _local_buffer(self) -> LocalBuffer | None:
        """Registered memory of the size that ``setup`` was told, for pools of buffers."""
        session = self._session
        return None if session is None else session.local

    # Every call ---------------------------------------------------------------------------------------

    def _do(self, what: str, act: Callable[[Store], ResultT], failed: Callable[[int], ResultT]) -> ResultT:
        """``act`` with the store, or ``failed`` with the number of what is wrong, which the log explains."""
        return self._in_session(what, lambda session: act(session.store), failed)

    def _in_session(
        self, what: str, act: Callable[[StoreSession], ResultT], failed: Callable[[int], ResultT]
    ) -> ResultT:
        session = self._session
        if session is None or not session.enter():
            log.error(f"{what}: this store is not set up; call setup() and see that it returns 0")
            return failed(int(StoreCode.INVALID_PARAMS))
        began = time.perf_counter()
        try:
            if session.is_cut_off and not session.has_master():
                return failed(int(StoreCode.RPC_FAIL))
            result = act(session)
            session.client_metrics.took(what, time.perf_counter() - began)
            return result
        except Unavailable as error:
            session.is_cut_off = True
            log.error(f"{what}: {error}")
            return failed(int(StoreCode.RPC_FAIL))
        except MooncakeError as error:
            log.error(f"{what}: {error}")
            return failed(code_of_error(error))
        except (UnicodeError, OverflowError) as error:  # text or a number that no message can carry
            log.error(f"{what}: {error}")
            return failed(int(StoreCode.INVALID_PARAMS))
        finally:
            session.leave()


def _close_in_thread(session: StoreSession) -> None:
    """The garbage collector calls from any thread, also the node's own, which must not wait."""
    closing = threading.Thread(target=session.close, name="store-close", daemon=True)
    closing.start()
    if not session.is_on_node():
        closing.join()
