"""What a flag of the existing package may be, and how its text is read. Errors name the flag."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mooncake.compat.programs.gflags import parse_bool
from mooncake.config import parse_size
from mooncake.errors import InvalidArgument


@dataclass(frozen=True)
class FlagType:
    """``read(text)`` gives the value or raises ValueError; ``allowed`` says what it takes."""

    allowed: str
    read: Callable[[str], Any]

    def value(self, name: str, text: str) -> Any:
        """Raises InvalidArgument, naming the flag."""
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


def choice(*words: str) -> FlagType:
    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return FlagType(", ".join(words), read)


def _read_duration(text: str) -> float:
    """Seconds, from milliseconds without a unit."""
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
