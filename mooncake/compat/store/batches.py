"""Batches whose items fare differently: the good ones go on, cut into parts that a deadline can cover."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from mooncake.compat.store.error_codes import StoreCode

ItemT = TypeVar("ItemT")

PART_BYTES = 512 << 20
"""A batch is cut into parts of about so much."""


def pick(values: Sequence[ItemT], at: Sequence[int]) -> list[ItemT]:
    return [values[i] for i in at]


def on_good(good: Sequence[bool], act: Callable[[list[int]], list[int]]) -> list[int]:
    """``act`` on the places of the good ones; -600 for the others."""
    at = [i for i, is_good in enumerate(good) if is_good]
    codes = [int(StoreCode.INVALID_PARAMS)] * len(good)
    if at:
        for i, code in zip(at, act(at), strict=True):
            codes[i] = code
    return codes


def cut(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Places in ``sizes``, in order, in groups of about ``PART_BYTES``."""
    group: list[int] = []
    in_group = 0
    for at, size_bytes in enumerate(sizes):
        if group and in_group + size_bytes > PART_BYTES:
            yield group
            group, in_group = [], 0
        group.append(at)
        in_group += size_bytes
    if group:
        yield group
