# SPDX-License-Identifier: Apache-2.0
"""A metadata backend in a dictionary, which counts its calls and fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mooncake.errors import PeerLost


class DictBackend:
    """A metadata backend in a dictionary."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.num_puts = 0
        self.num_attempts = 0
        self.is_away = False
        self.changed = threading.Condition()

    def get(self, key: str) -> bytes | None:
        if self.is_away:
            raise PeerLost("away")
        return self.entries.get(key)

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        with self.changed:
            self.num_attempts += 1
            self.changed.notify_all()
            if self.is_away:
                raise PeerLost("away")
            self.entries[key] = value
            self.num_puts += 1

    def remove(self, key: str) -> bool:
        return self.entries.pop(key, None) is not None

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.entries if key.startswith(prefix))

    def close(self) -> None: ...

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30), "it did not happen within 30 s"
