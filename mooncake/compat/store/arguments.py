"""What callers pass, checked the way the existing package's bindings do it: a wrong type raises TypeError.

A wrong value does not: it costs its own key a number, and the other keys of a batch nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

from mooncake.store.client.buffers import span_to_read
from mooncake.store.messages import MAX_KEY_BYTES

Span: TypeAlias = tuple[int, int]
"""(address, size in bytes)."""

MAX_ADDRESS = 1 << 57


def check_key(what: str, key: Any) -> None:
    if not isinstance(key, str):
        raise TypeError(f"{what}(): key must be str, not {type(key).__name__}")


def check_keys(what: str, keys: Any) -> list[str]:
    """The keys as a list."""
    if isinstance(keys, str | bytes) or not hasattr(keys, "__iter__"):
        raise TypeError(f"{what}(): keys must be a list of str, not {type(keys).__name__}")
    found = list(keys)
    for key in found:
        check_key(what, key)
    return found


def is_good_key(key: str) -> bool:
    """The store can have such a key."""
    try:
        return 0 < len(key.encode()) <= MAX_KEY_BYTES and "\0" not in key
    except UnicodeEncodeError:
        return False


def numbers(what: str, name: str, values: Any) -> list[int]:
    """A list of integers; numpy's count, too."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(f"{what}(): {name} must be a list of int, not {type(values).__name__}")
    return [number(what, name, value) for value in values]


def number(what: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what}(): {name} must be int, not {type(value).__name__}") from None


def rows(what: str, name: str, values: Any) -> list[list[int]]:
    """A list of lists of integers."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(f"{what}(): {name} must be a list of lists of int, not {type(values).__name__}")
    return [numbers(what, name, row) for row in values]


def is_span(span: Span) -> bool:
    """The numbers could be those of memory; whether they are, is found out when it is used."""
    address, size_bytes = span
    return size_bytes >= 0 and (size_bytes == 0 or 0 < address < MAX_ADDRESS - size_bytes)


def span_of_value(what: str, value: Any) -> tuple[Span, Any]:
    """Where a bytes-like value lies, and what must stay referenced for as long as that is true."""
    if type(value) is bytes:
        return span_to_read(value), value
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{what}(): value must be bytes-like, not {type(value).__name__}") from None
    kept = view if view.c_contiguous else view.tobytes()
    return span_to_read(kept), kept


def total_bytes(spans: Sequence[Span]) -> int:
    return sum(size_bytes for _, size_bytes in spans)
