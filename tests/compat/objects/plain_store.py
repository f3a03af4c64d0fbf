# SPDX-License-Identifier: Apache-2.0
"""A store with ``put``, ``get`` and ``remove`` only, whose puts can be made to fail."""

from __future__ import annotations

from typing import Any


class PlainStore:
    def __init__(self, fail_at: int | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.order: list[str] = []
        self.fail_at = fail_at
        """Number of the put that fails, from 0."""

    def put(self, key: str, value: Any) -> int:
        if self.fail_at is not None and len(self.order) >= self.fail_at:
            return -200
        self.order.append(key)
        self.objects[key] = bytes(value)
        return 0

    def get(self, key: str) -> bytes:
        return self.objects.get(key, b"")

    def remove(self, key: str, force: bool = False) -> int:
        return 0 if self.objects.pop(key, None) is not None else -704
