"""What a program leaves open when it ends: closed at the interpreter's exit, unmounted on a signal.

A signal is only taken where nobody else wants it: a program's own handler stays, and whoever sets one
later replaces ours. The handler runs in the middle of whatever the main thread is doing, locks held, so
another thread does the work and is not waited for long; then the signal does what it would have done.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

UNMOUNT_TIMEOUT_S = 3.0
"""For the good-byes of a process that is told to end."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ClosableSession(Protocol):
    def close(self) -> None: ...

    def unmount(self) -> None:
        """Only tell the master that this process's memory goes away."""


_open: weakref.WeakSet[ClosableSession] = weakref.WeakSet()
_lock = threading.Lock()
_is_registered = False


def close_at_exit(session: ClosableSession) -> None:
    """``session`` is closed when the process ends, if it still lives."""
    global _is_registered
    with _lock:
        _open.add(session)
        if not _is_registered:
            atexit.register(_close_all)
            _is_registered = True
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _handle_signal)


def _close_all() -> None:
    for session in list(_open):
        session.close()


def _unmount_all() -> None:
    for session in list(_open):
        session.unmount()


def _handle_signal(number: int, _: FrameType | None) -> None:
    farewell = threading.Thread(target=_unmount_all, daemon=True)
    farewell.start()
    farewell.join(UNMOUNT_TIMEOUT_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
