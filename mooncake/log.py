# SPDX-License-Identifier: Apache-2.0
"""Logs are events with fields, not prose: ``evicted key=kv/… tier=memory reason=watermark``.

``--log-format json`` prints one JSON object per line for machines. Every role writes to standard error;
storing logs is left to the program that started it. Where that program no longer reads, lines are dropped and
counted, because a server must not wait for the reader of its log.
"""

from __future__ import annotations

import datetime
import io
import json
import logging
import os
import select
import stat
import sys
import threading
import time
import traceback
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_CONTROL_CHARACTERS = {
    code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}
"""Would change a terminal, or what it shows of the line; clients choose keys and names."""
MAX_BACKLOG_BYTES = 1 << 20
"""Lines that are kept for a slow reader of standard error; further ones are dropped and counted."""
FLUSH_S = 0.5
"""How long a process that ends waits for a slow reader of its last lines."""


class EventLogger:
    """A logger whose calls are ``log.info("event", field=value, …)``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """As ``error``, with the traceback of the exception being handled."""
        self._log(logging.ERROR, event, fields, trace=True)

    def _log(self, level: int, event: str, fields: dict[str, Any], trace: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=trace)


def get_logger(name: str) -> EventLogger:
    return EventLogger(name)


def setup_logging(level: str = "info", log_format: str = "text", role: str = "") -> None:
    """Send this process's events to standard error. ``role`` is printed with every line."""
    handler = _StandardErrorHandler()
    handler.setFormatter(_JsonFormatter(role) if log_format == "json" else _TextFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def show_early_fields() -> None:
    """Print the fields of warnings in a process that has not called ``setup_logging``, or never calls it."""
    assert logging.lastResort is not None
    logging.lastResort.setFormatter(_TextFormatter(""))


def setup_library_logging(role: str) -> None:
    """Send the events of this package, and no others, to standard error: for use inside another program."""
    ours = logging.getLogger("mooncake")
    if not ours.handlers:
        handler = _StandardErrorHandler()
        handler.setFormatter(_TextFormatter(role))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False


class _StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes lines to standard error, and never waits for the reader of a pipe or socket.

    What such a reader has not made room for waits in a backlog, which a thread writes. The thread exists only
    while there is a backlog. Regular files and terminals are written as ``logging.StreamHandler`` does.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._backlog = bytearray()
        self._num_dropped = 0
        self._writer: threading.Thread | None = None
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        fd = _bounded_fd(self.stream)
        if fd is None:
            super().emit(record)
            return
        try:
            text = self.format(record)
        except Exception:  # as logging.Handler.handleError, which would wait for the reader
            text = f"{record.name}: a line can't be formatted\n{traceback.format_exc()}"
        self._offer(fd, (text + self.terminator).encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Write the backlog if its reader makes room within ``FLUSH_S``; called when the process ends."""
        super().flush()
        self.acquire()
        try:
            self._forget_after_fork()
            fd = _bounded_fd(self.stream) if self._backlog else None
            until = time.monotonic() + FLUSH_S
            while fd is not None and self._backlog and (left_s := until - time.monotonic()) > 0:
                if _has_room(fd, left_s):
                    del self._backlog[: _write_now(fd, self._backlog)]
            self._report_dropped()
        finally:
            self.release()

    def _offer(self, fd: int, line: bytes) -> None:
        self._forget_after_fork()
        if self._num_dropped or len(self._backlog) + len(line) > MAX_BACKLOG_BYTES:
            self._num_dropped += 1
            return
        if not self._backlog:
            line = line[_write_now(fd, line) :]
        self._backlog += line
        if self._backlog and self._writer is None:
            self._writer = threading.Thread(target=self._write_backlog, args=(fd,), name="log", daemon=True)
            try:
                self._writer.start()
            except RuntimeError:  # the interpreter ends, and flushes
                self._writer = None

    def _write_backlog(self, fd: int) -> None:
        while self._writer is not None:
            _has_room(fd, 1.0)
            self.acquire()
            try:
                del self._backlog[: _write_now(fd, self._backlog)]
                if len(self._backlog) <= MAX_BACKLOG_BYTES // 2:
                    self._report_dropped()
                if not self._backlog:
                    self._writer = None
            finally:
                self.release()

    def _report_dropped(self) -> None:
        """Log how many lines are missing here. An error, so that no level hides it."""
        num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            _log.error("log_lines_dropped", num_lines=num_dropped)

    def _forget_after_fork(self) -> None:
        """In a child, which has no writer: its parent writes the backlog that both have."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._backlog.clear()
            self._num_dropped, self._writer = 0, None


_log = EventLogger(__name__)


def _bounded_fd(stream: TextIO) -> int | None:
    """File descriptor of a pipe or socket, whose reader may stall; None for anything else."""
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or no file, as in tests
        return None
    return fd if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


def _has_room(fd: int, timeout_s: float) -> bool:
    """Wait until a pipe or socket takes ``PIPE_BUF`` bytes, or has lost its reader."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))


def _write_now(fd: int, content: bytes | bytearray) -> int:
    """Write what a pipe or socket takes at once; returns how many bytes that was.

    It writes whole lines where they are not longer than ``PIPE_BUF``: the kernel does not tear those, even
    when several processes write to one pipe. What a reader that has ended would have got is discarded.
    """
    written = 0
    while written < len(content):
        chunk = bytes(content[written : written + select.PIPE_BUF])
        chunk = chunk[: chunk.rfind(b"\n") + 1] or chunk
        try:
            written += _write_chunk(fd, chunk)
        except BlockingIOError:
            break
        except OSError:
            return len(content)
    return written


def _write_chunk(fd: int, chunk: bytes) -> int:
    """Write without waiting, and without O_NONBLOCK on a file description that other processes have, too.

    Raises:
        BlockingIOError: there is no room.
    """
    if not _has_room(fd, 0.0):
        raise BlockingIOError
    try:
        # A file description of our own: another process may take the room between poll and write.
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # a socket, which has room for many chunks after poll; another user's pipe
        return os.write(fd, chunk)
    with io.FileIO(own, "wb") as file:
        return file.write(chunk) or 0


class _TextFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = f" {role}" if role else ""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        fields = getattr(record, "fields", {})
        text = "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        line = f"{stamp} {record.levelname.lower()}{self._role} {record.getMessage()}{text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line.translate(_CONTROL_CHARACTERS)


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(),
            "level": record.levelname.lower(),
            "role": self._role,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _shown(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if is_plain else json.dumps(text)
