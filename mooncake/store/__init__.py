"""The store: immutable objects in the memory of every node, one master that knows where.

Names load on first use, because a process that only needs a core (the simulator) or a message (a
dashboard) should not open sockets or load the native extension.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake.errors import Refusal
    from mooncake.store.client import AsyncStore, Store, StoreSettings
    from mooncake.store.operations import PutGrant, ReadGrant

__all__ = ["AsyncStore", "PutGrant", "ReadGrant", "Refusal", "Store", "StoreSettings"]

_OWNERS = {
    "AsyncStore": "mooncake.store.client",
    "PutGrant": "mooncake.store.operations",
    "ReadGrant": "mooncake.store.operations",
    "Refusal": "mooncake.errors",
    "Store": "mooncake.store.client",
    "StoreSettings": "mooncake.store.client",
}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OWNERS[name]), name)
