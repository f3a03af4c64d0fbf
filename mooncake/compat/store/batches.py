# SPDX-License-Identifier: Apache-2.0
"""Batches with good and bad items: the good ones are processed, in parts that a deadline can cover."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from mooncake.compat.store.error_codes import StoreCode
from mooncake.errors import MooncakeError

ItemT = TypeVar("ItemT")

PART_BYTES = 512 << 20
"""Approximate size of the parts into which a batch is split."""
SLOW_PART_BYTES = 64 << 20
"""Size of the parts in which bytes are read that did not arrive in time at first. Each of them must arrive
within the lease of its object, which is kept alive from one to the next. Also the largest put whose bytes
have the timeout of a call; those of a larger one have the timeout of transfers."""
LATE_S = 1.0
"""Time after which a read that found no object may only have been too slow; a miss takes less."""


def pick(values: Sequence[ItemT], at: Sequence[int]) -> list[ItemT]:
    return [values[i] for i in at]


def on_good(good: Sequence[bool], act: Callable[[list[int]], list[int]]) -> list[int]:
    """Results of ``act`` on the indices of the good items; -600 for the others."""
    at = [i for i, is_good in enumerate(good) if is_good]
    codes = [int(StoreCode.INVALID_PARAMS)] * len(good)
    if at:
        for i, code in zip(at, act(at), strict=True):
            codes[i] = code
    return codes


def is_late(seconds: float, timeout_s: float) -> bool:
    """Whether a read that took so long, and did not find an object, might have found it with more time."""
    return seconds >= min(LATE_S, timeout_s)


def read_again(results: list[ItemT], at: list[int], read: Callable[[list[int]], Sequence[ItemT]]) -> None:
    """Replace the results at these indices by those of ``read``; when that fails, they stay as they are."""
    with contextlib.suppress(MooncakeError):  # the others have arrived
        for i, result in zip(at, read(at), strict=True):
            results[i] = result


def cut(sizes: Sequence[int], part_bytes: int | None = None) -> Iterator[list[int]]:
    """Indices of ``sizes``, in order, in groups of about ``part_bytes``, by default ``PART_BYTES``."""
    most = PART_BYTES if part_bytes is None else part_bytes
    group: list[int] = []
    in_group = 0
    for at, size_bytes in enumerate(sizes):
        if group and in_group + size_bytes > most:
            yield group
            group, in_group = [], 0
        group.append(at)
        in_group += size_bytes
    if group:
        yield group
