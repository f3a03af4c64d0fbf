# SPDX-License-Identifier: Apache-2.0
"""Sessions that a program leaves open when it ends: closed at the interpreter's exit, unmounted on a signal.

The function for the exit is registered at import, because the last one that was registered runs first: one
that a program registers afterwards, even before its ``setup``, still finds the store open.

A signal is only handled where the program has no handler: its own handler stays, and one that is set
later replaces ours. The handler interrupts the main thread, which may hold locks, so another thread
does the work and is waited for briefly; then the signal has its default effect.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

import mooncake.transfer.engine  # noqa: F401  what it registers for the exit runs later than what is here

UNMOUNT_TIMEOUT_S = 3.0
"""Time for the unmounts of a process that is terminated."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ClosableSession(Protocol):
    """Session that can be closed or, when there is little time, only unmounted."""

    def close(self) -> None: ...

    def unmount(self) -> None:
        """Only unmount this process's segments at the master."""


_open: weakref.WeakSet[ClosableSession] = weakref.WeakSet()
_lock = threading.Lock()


def close_at_exit(session: ClosableSession) -> None:
    """Close ``session`` when the process ends, if it still exists."""
    with _lock:
        _open.add(session)
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _handle_signal)


@atexit.register
def _close_all() -> None:
    for session in list(_open):
        session.close()


def _unmount_all() -> None:
    for session in list(_open):
        session.unmount()


def _handle_signal(number: int, _: FrameType | None) -> None:
    unmounting = threading.Thread(target=_unmount_all, daemon=True)
    unmounting.start()
    unmounting.join(UNMOUNT_TIMEOUT_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
