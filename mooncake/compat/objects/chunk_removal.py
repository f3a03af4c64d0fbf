# SPDX-License-Identifier: Apache-2.0
"""Removes the objects of a bundle. What is already gone, by eviction or by another process, is no error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GONE = -704


def remove_keys(store: Any, keys: Sequence[str]) -> None:
    """Remove objects, leased ones too: their readers fail or have finished.

    Raises:
        RuntimeError: some are still there.
    """
    left = list(dict.fromkeys(keys))
    batch_remove = getattr(store, "batch_remove", None)
    if callable(batch_remove) and left:
        codes = batch_remove(left, True)
        left = [key for key, code in zip(left, codes, strict=True) if code not in (0, GONE)]
    failed = {key: code for key in left if (code := store.remove(key, True)) not in (0, GONE)}
    if failed:
        key, code = next(iter(failed.items()))
        raise RuntimeError(f"remove failed for {len(failed)} keys, one is {key}: {code}")
