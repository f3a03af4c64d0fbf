# SPDX-License-Identifier: Apache-2.0
"""Mooncake: serving of large language models around a shared KV cache.

A request passes through the subpackages in this order::

    client -> gateway -> conductor -> inference (prefill) -> store -> inference (decode) -> client

The gateway speaks the OpenAI protocol; the conductor chooses the pair of workers; prefill computes
keys and values and puts them into the store, layer by layer; decode loads them and generates tokens;
transfer moves the bytes. ``docs/journey.md`` follows one request all the way.

Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import Any

from mooncake.installation import check_folder

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Names that some programs import from here: ``from mooncake import MooncakeDistributedStore``."""
    if name not in ("BufferPool", "MooncakeDistributedStore", "RegisteredBufferPool", "ReplicateConfig"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import mooncake.store

    return getattr(mooncake.store, name)


check_folder()
