"""Mooncake: serving of large language models around a shared KV cache.

A request walks through the rooms of this package from top to bottom::

    client -> gateway -> conductor -> inference (prefill) -> store -> inference (decode) -> client

The gateway speaks the OpenAI protocol; the conductor chooses the pair of workers; prefill computes
keys and values and parks them, layer by layer, in the store; decode loads them and makes tokens;
transfer moves the bytes. ``docs/journey.md`` follows one request through all of it.

Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``from mooncake import MooncakeDistributedStore, ReplicateConfig``, as some programs write it."""
    if name not in ("BufferPool", "MooncakeDistributedStore", "ReplicateConfig"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import mooncake.store

    return getattr(mooncake.store, name)
