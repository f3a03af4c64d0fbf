"""Where descriptors lie so that peers find each other by name.

Entries are soft state: their owner puts them again before they expire, and a service that restarts
empty is full again a moment later. A backend knows keys and bytes, not what they mean.
"""

from __future__ import annotations

from typing import Protocol


class Backend(Protocol):
    """A small key-value service. Thread-safe. Every call may raise PeerLost or DeadlineExceeded."""

    def get(self, key: str) -> bytes | None:
        """The value, or None when there is none (any more)."""
        ...

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        """Set or replace; gone after ``ttl_s`` unless put again."""
        ...

    def remove(self, key: str) -> bool:
        """False when there was none."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys that start with ``prefix``, sorted."""
        ...
