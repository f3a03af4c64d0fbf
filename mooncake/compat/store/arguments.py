# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments as in the existing package's bindings: a wrong type raises TypeError.

A wrong value does not: its own key gets an error number, and the other keys of a batch are not affected.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

from mooncake.errors import InvalidArgument
from mooncake.store.client.buffers import span_to_read
from mooncake.store.messages import MAX_KEY_BYTES

Span: TypeAlias = tuple[int, int]
"""Pair (address, size in bytes)."""

MAX_ADDRESS = 1 << 57


def text(what: str, name: str, value: Any) -> str:
    """Check a string and return it as ``str`` itself: programs also have bytes, and numpy's strings.

    Bytes that are not UTF-8 become a string that the store accepts as no key.
    """
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)  # what `str(value)` returns may be another text, such as an enumeration's
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "surrogateescape")
    raise TypeError(f"{what}(): {name} must be str, not {type(value).__name__}")


def check_key(what: str, key: Any) -> str:
    """Check a key and return it as ``text`` does."""
    return key if type(key) is str else text(what, "key", key)


def check_keys(what: str, keys: Any) -> list[str]:
    """Check the keys and return them as a list of ``str``."""
    if isinstance(keys, str | bytes) or not hasattr(keys, "__iter__"):
        raise TypeError(f"{what}(): keys must be a list of str, not {type(keys).__name__}")
    return [check_key(what, key) for key in keys]


def is_good_key(key: str) -> bool:
    """Whether the store accepts such a key."""
    try:
        return 0 < len(key.encode()) <= MAX_KEY_BYTES and "\0" not in key
    except UnicodeEncodeError:
        return False


def numbers(what: str, name: str, values: Any) -> list[int]:
    """Check a list of integers, also numpy's."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(f"{what}(): {name} must be a list of int, not {type(values).__name__}")
    return [number(what, name, value) for value in values]


def flag(what: str, name: str, value: Any) -> bool:
    """Check a boolean: anything that has a truth value of its own, such as a number, None, or numpy's."""
    if not hasattr(type(value), "__bool__"):
        raise TypeError(f"{what}(): {name} must be bool, not {type(value).__name__}")
    return bool(value)


def number(what: str, name: str, value: Any) -> int:
    """Check an integer, also numpy's, and return it as ``int`` itself."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{what}(): {name} must be int, not {type(value).__name__}") from None


def rows(what: str, name: str, values: Any) -> list[list[int]]:
    """Check a list of lists of integers."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(f"{what}(): {name} must be a list of lists of int, not {type(values).__name__}")
    return [numbers(what, name, row) for row in values]


def is_span(span: Span) -> bool:
    """Whether the numbers are a plausible address and size; the memory is checked when it is used."""
    address, size_bytes = span
    return size_bytes >= 0 and (size_bytes == 0 or 0 < address < MAX_ADDRESS - size_bytes)


def span_of_value(what: str, value: Any) -> tuple[Span, Any]:
    """Span of a bytes-like value, and the object that must stay referenced while the span is used."""
    if type(value) is bytes:
        return span_to_read(value), value
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{what}(): value must be bytes-like, not {type(value).__name__}") from None
    kept = view if view.c_contiguous else view.tobytes()
    try:
        return span_to_read(kept), kept
    except InvalidArgument as error:  # an array of objects: its bytes are addresses of this process
        raise TypeError(f"{what}(): value must be bytes-like: {error}") from None


def total_bytes(spans: Sequence[Span]) -> int:
    return sum(size_bytes for _, size_bytes in spans)
