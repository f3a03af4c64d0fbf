"""Closes what a program leaves open: when the interpreter ends, and when it is told to by a signal.

A signal is only taken where nobody else wants it: a program's own handler stays, and whoever sets one
later replaces ours. After closing, the signal does what it would have done.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Closes(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[Closes] = weakref.WeakSet()
_lock = threading.Lock()
_is_registered = False


def close_at_exit(session: Closes) -> None:
    """``session.close()`` is called when the process ends, if it still lives."""
    global _is_registered
    with _lock:
        _open.add(session)
        if not _is_registered:
            atexit.register(close_all)
            _is_registered = True
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _end)


def close_all() -> None:
    """Close every session that is open."""
    for session in list(_open):
        session.close()


def _end(number: int, _: FrameType | None) -> None:
    close_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
