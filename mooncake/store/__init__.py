# SPDX-License-Identifier: Apache-2.0
"""The store: immutable objects in the memory of all nodes, and a master that knows where each object lies.

Names load on first use, because a process that only needs a core (the simulator) or a message (a dashboard)
should not open sockets or load the native extension. The names of the existing package are exported as well;
``compat`` owns them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mooncake.installation import check_folder

if TYPE_CHECKING:
    from mooncake.compat.store.buffer_pool import BufferHandle
    from mooncake.compat.store.parallelism import ParallelAxis, ReadTarget, TensorParallelism
    from mooncake.compat.store.public_types import ReplicateConfig
    from mooncake.compat.store.store import MooncakeDistributedStore
    from mooncake.errors import Refusal
    from mooncake.store.client.calls import StoreSettings
    from mooncake.store.client.grants import PutGrant, ReadGrant
    from mooncake.store.client.store import AsyncStore, Store

check_folder()  # again: mooncake/__init__.py may be that of another distribution

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

_VALUES = (
    *("Descriptor", "DiskDescriptor", "MemoryDescriptor", "ObjectDataType", "QueryTaskResponse"),
    *(
        "ExistOptions",
        "ReplicaDescriptor",
        "ReplicaStatus",
        "ReplicateConfig",
        "SoftPinAction",
        "TaskStatus",
        "TaskType",
    ),
    *("UNKNOWN", "KVCACHE", "TENSOR", "WEIGHT", "SAMPLE", "ACTIVATION", "GRADIENT", "OPTIMIZER_STATE"),
    *("METADATA", "GENERAL", "UNDEFINED", "INITIALIZED", "PROCESSING", "COMPLETE", "REMOVED", "FAILED"),
    *("REPLICA_COPY", "REPLICA_MOVE", "PENDING", "SUCCESS"),
)

_POOLS = (
    *("BufferHandle", "BufferLease", "BufferLeaseView", "BufferPool"),
    *("RegisteredBufferLease", "RegisteredBufferLeaseView", "RegisteredBufferPool"),
)
_HOST = ("MooncakeHostMemAllocator", "bind_to_numa_node", "get_alloc_func_addr", "get_free_func_addr")

_UPSTREAM = {
    **dict.fromkeys(_POOLS, "mooncake.compat.store.buffer_pool"),
    **dict.fromkeys(_HOST, "mooncake.compat.store.host_memory"),
    **dict.fromkeys(("EngramStore", "EngramStoreConfig"), "mooncake.compat.store.engram"),
    **dict.fromkeys(("ParallelAxis", "ReadTarget", "TensorParallelism"), "mooncake.compat.store.parallelism"),
    **dict.fromkeys(
        ("_serialize_tensor", "_deserialize_tensor", "_tensor_metadata_size"),
        "mooncake.compat.store.tensors",
    ),
    "MooncakeDistributedStore": "mooncake.compat.store.store",
    **dict.fromkeys(_VALUES, "mooncake.compat.store.public_types"),
}
"""Name of the existing package's ``mooncake.store`` -> module that defines it."""

__all__ += [name for name in _UPSTREAM if name not in __all__ and not name.startswith("_")]

_OWNERS = {
    "AsyncStore": "mooncake.store.client.store",
    "PutGrant": "mooncake.store.client.grants",
    "PutPolicy": "mooncake.store.messages",
    "ReadGrant": "mooncake.store.client.grants",
    "Refusal": "mooncake.errors",
    "Store": "mooncake.store.client.store",
    "StoreSettings": "mooncake.store.client.calls",
    **_UPSTREAM,
}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWNERS})
