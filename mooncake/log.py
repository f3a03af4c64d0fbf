# SPDX-License-Identifier: Apache-2.0
"""Logs are events with fields, not prose: ``evicted key=kv/… tier=memory reason=watermark``.

``--log-format json`` prints one JSON object per line for machines. Every role writes to standard error;
storing logs is left to the program that started it.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_CONTROL_CHARACTERS = {
    code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}
"""Would change a terminal, or what it shows of the line; clients choose keys and names."""


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
    handler = logging.StreamHandler(sys.stderr)
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
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_TextFormatter(role))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False


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
