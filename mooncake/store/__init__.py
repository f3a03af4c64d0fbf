"""The store: immutable objects in the memory of every node, one master that knows where.

Names load on first use, because a process that only needs a core (the simulator) or a message (a
dashboard) should not open sockets or load the native extension. The existing package's names are here,
too; ``compat`` owns them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mooncake.store.compat import OWNERS

if TYPE_CHECKING:
    from mooncake.errors import Refusal
    from mooncake.store.client import AsyncStore, Store, StoreSettings
    from mooncake.store.compat.buffers import BufferHandle
    from mooncake.store.compat.parallelism import ParallelAxis, ReadTarget, TensorParallelism
    from mooncake.store.compat.store import MooncakeDistributedStore
    from mooncake.store.compat.values import ReplicateConfig
    from mooncake.store.grants import PutGrant, ReadGrant

__all__ = [
    "AsyncStore",
    "BufferHandle",
    "MooncakeDistributedStore",
    "ParallelAxis",
    "PutGrant",
    "ReadGrant",
    "ReadTarget",
    "Refusal",
    "ReplicateConfig",
    "Store",
    "StoreSettings",
    "TensorParallelism",
]

_OWNERS = {
    "AsyncStore": "mooncake.store.client",
    "PutGrant": "mooncake.store.grants",
    "PutPolicy": "mooncake.store.messages",
    "ReadGrant": "mooncake.store.grants",
    "Refusal": "mooncake.errors",
    "Store": "mooncake.store.client",
    "StoreSettings": "mooncake.store.client",
    **OWNERS,
}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWNERS})
