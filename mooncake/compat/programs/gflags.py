# SPDX-License-Identifier: Apache-2.0
"""Flags in the forms that the existing package's programs accept, and the types of their values.

``-f=v``, ``--f=v``, ``--f v``, hyphens or underscores, ``--f`` and ``--nof`` for booleans, ``--flagfile``,
``--fromenv``, ``--undefok``, and the flags of its logging library, which are accepted and ignored. Errors
name the flag.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake.config import parse_size
from mooncake.errors import InvalidArgument

LOGGING = {
    "alsologtostderr",
    "alsologtoemail",
    "colorlogtostderr",
    "colorlogtostdout",
    "drop_log_memory",
    "log_backtrace_at",
    "log_dir",
    "log_link",
    "log_prefix",
    "log_utc_time",
    "log_year_in_prefix",
    "logbuflevel",
    "logbufsecs",
    "logcleansecs",
    "logemaillevel",
    "logfile_mode",
    "logmailer",
    "logtostderr",
    "logtostdout",
    "max_log_size",
    "minloglevel",
    "stderrthreshold",
    "stop_logging_if_full_disk",
    "symbolize_stacktrace",
    "timestamp_in_logfile_name",
    "undefok",
    "v",
    "vmodule",
}
NO_ARENA = "memory is mapped once for each segment"
"""Why the flags of the existing programs' arena of mapped memory have no effect."""
_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")


def parse_flags(
    arguments: Sequence[str], defaults: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Parse the value of each flag in ``defaults`` to its default's type.

    With an ``environment``, flags of ``--flagfile``, ``--fromenv`` and ``--tryfromenv`` are read, too.

    Raises:
        InvalidArgument: an unknown flag, an argument that is not a flag, or a value of another type.
    """
    booleans = {name for name, default in defaults.items() if isinstance(default, bool)}
    given = split_flags(arguments, defaults.keys(), booleans, environment)
    return {**defaults, **{name: _typed(name, text, defaults[name]) for name, text in given.items()}}


def split_flags(
    arguments: Sequence[str],
    names: Collection[str],
    booleans: Collection[str],
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Text of each flag that was given; a later one replaces an earlier one.

    Raises:
        InvalidArgument: an unknown flag, an argument that is not a flag, a value that is missing.
    """
    given: dict[str, str] = {}
    remaining = list(arguments)
    may_be_unknown = _undefok(arguments)
    being_read: dict[str, int] = {}
    """Flag file -> number of arguments that are left behind its last line."""
    while remaining:
        being_read = {path: behind for path, behind in being_read.items() if behind < len(remaining)}
        argument = remaining.pop(0)
        if argument == "--":
            break
        if not argument.startswith("-") or not argument.strip("-"):
            raise InvalidArgument("argument", argument, "flags only; --help lists them")
        name, has_value, text = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in LOGGING or (name.startswith("no") and name[2:] in LOGGING):
            if not has_value and remaining and not remaining[0].startswith("-"):
                remaining.pop(0)
            continue
        if not has_value and name.startswith("no") and name[2:] in booleans:
            given[name[2:]] = "false"
            continue
        is_special = environment is not None and name in ("flagfile", "fromenv", "tryfromenv")
        if name not in names and not is_special:
            if name in may_be_unknown or name.removeprefix("no") in may_be_unknown:
                continue
            close = difflib.get_close_matches(name, names, 1)
            raise InvalidArgument("flag", argument, f"--{close[0]}?" if close else "what --help lists")
        if not has_value and name in booleans:
            text = remaining.pop(0) if remaining and remaining[0].lower() in _TRUE + _FALSE else "true"
        elif not has_value:
            if not remaining:
                raise InvalidArgument(f"--{name}", "", "a value")
            text = remaining.pop(0)
        if not is_special:
            given[name] = text
        elif name == "flagfile":
            for file in text.split(","):
                if os.path.realpath(file) in being_read:
                    raise InvalidArgument("--flagfile", file, "no file that is being read: it would not end")
            for file in reversed(text.split(",")):
                being_read[os.path.realpath(file)] = len(remaining)
                remaining[:0] = _lines(file)
        else:
            assert environment is not None
            remaining[:0] = _from(environment, text, must_exist=name == "fromenv")
    return given


def _undefok(arguments: Sequence[str]) -> set[str]:
    """Names of ``--undefok``: flags that are ignored when they are unknown, their values after ``=``."""
    names: set[str] = set()
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, has_value, text = argument.partition("=")
        if flag in ("-undefok", "--undefok"):
            listed = text if has_value else following
            names |= {name.strip().lstrip("-").replace("-", "_") for name in listed.split(",")}
    return names - {""}


def _lines(file: str) -> list[str]:
    """Flags of a flag file: one per line, ``#`` starts a comment."""
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("--flagfile", file, f"a readable file ({error})") from error
    return [line for line in lines if line and not line.startswith("#")]


def _from(environment: Mapping[str, str], names: str, must_exist: bool) -> list[str]:
    found: list[str] = []
    for name in names.split(","):
        variable = f"FLAGS_{name}"
        if variable in environment:
            found.append(f"--{name}={environment[variable]}")
        elif must_exist:
            raise InvalidArgument("--fromenv", name, f"a flag whose {variable} is set in the environment")
    return found


def parse_bool(name: str, text: str) -> bool:
    """Parse a boolean. Raises InvalidArgument when ``text`` is none."""
    if text.lower() not in _TRUE + _FALSE:
        raise InvalidArgument(name, text, "true or false")
    return text.lower() in _TRUE


def _typed(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return parse_bool(f"--{name}", text)
    try:
        return type(default)(text)
    except ValueError as error:
        raise InvalidArgument(f"--{name}", text, "a whole number") from error


@dataclass(frozen=True)
class FlagType:
    """Type of a flag: ``read(text)`` returns the value or raises ValueError; ``allowed`` names the values."""

    allowed: str
    read: Callable[[str], Any]

    def value(self, name: str, text: str) -> Any:
        """Parse ``text``. Raises InvalidArgument, naming the flag."""
        try:
            return self.read(text.strip())
        except (ValueError, OverflowError) as error:
            raise InvalidArgument(f"--{name}", text, self.allowed) from error


def whole(least: int = 0, most: int = (1 << 63) - 1) -> FlagType:
    def read(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise ValueError(text)
        return number

    return FlagType(
        f"a whole number from {least}" + ("" if most == (1 << 63) - 1 else f" to {most}"),
        read,
    )


def number(least: float, most: float = math.inf, is_open: bool = False) -> FlagType:
    """``is_open``: ``least`` itself is not allowed."""

    def read(text: str) -> float:
        value = float(text)
        if (
            not (least < value if is_open else least <= value)
            or not value <= most
            or not math.isfinite(value)
        ):
            raise ValueError(text)
        return value

    start = "more than" if is_open else "from"
    return FlagType(f"a number {start} {least:g}" + ("" if math.isinf(most) else f" to {most:g}"), read)


def choice(*values: str, empty: str | None = None) -> FlagType:
    """One of these words; with ``empty``, no word counts as that one."""

    def read(text: str) -> str:
        word = text.lower() or empty
        if word not in values:
            raise ValueError(text)
        return word

    return FlagType(", ".join(values), read)


def _read_duration(text: str) -> float:
    """Parse a duration to seconds; without a unit it is in milliseconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)", text.lower())
    if match is None:
        raise ValueError(text)
    return (
        float(match[1]) * {"": 0.001, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]
    )


def _read_positive_duration(text: str) -> float:
    seconds = _read_duration(text)
    if seconds <= 0:
        raise ValueError(text)
    return seconds


def _read_boolean(text: str) -> bool:
    try:
        return parse_bool("", text)
    except InvalidArgument as error:
        raise ValueError(text) from error


def _read_path(text: str) -> str:
    if "\0" in text:
        raise ValueError(text)
    return text


BOOLEAN = FlagType("true or false", _read_boolean)
TEXT = FlagType("text", _read_path)
PORT = whole(0, 65535)
SIZE = FlagType("a size, such as 4096, 64MiB or 4 GB", parse_size)
DURATION = FlagType("milliseconds, or a duration such as 5s, 30m or 1h", _read_duration)
POSITIVE_DURATION = FlagType(
    "more than 0: milliseconds, or a duration such as 5s, 30m or 1h", _read_positive_duration
)
SECONDS = number(0, is_open=True)
RATIO = number(0, 1)
