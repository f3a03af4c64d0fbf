"""The surface of the existing package's ``mooncake.store``, on this store.

Programs written for that package keep their calls and their numbers. Where it answers with a bare number,
the reason is logged here (logger ``mooncake.store``); where it crashed, blocked or went on in silence,
this one answers. ``docs/store.md`` lists what differs. ``store.py`` puts the class together, ``life.py``
is what every call goes through, ``codes.py`` the one table of numbers.
"""

from __future__ import annotations

_VALUES = (
    *("Descriptor", "DiskDescriptor", "MemoryDescriptor", "ObjectDataType", "QueryTaskResponse"),
    *("ReplicaDescriptor", "ReplicaStatus", "ReplicateConfig", "SoftPinAction", "TaskStatus", "TaskType"),
    *("UNKNOWN", "KVCACHE", "TENSOR", "WEIGHT", "SAMPLE", "ACTIVATION", "GRADIENT", "OPTIMIZER_STATE"),
    *("METADATA", "GENERAL", "UNDEFINED", "INITIALIZED", "PROCESSING", "COMPLETE", "REMOVED", "FAILED"),
    *("REPLICA_COPY", "REPLICA_MOVE", "PENDING", "SUCCESS"),
)

_POOLS = (
    *("BufferLease", "BufferLeaseView", "BufferPool"),
    *("RegisteredBufferLease", "RegisteredBufferLeaseView", "RegisteredBufferPool"),
)
_HOST = ("MooncakeHostMemAllocator", "bind_to_numa_node", "get_alloc_func_addr", "get_free_func_addr")

OWNERS = {
    **dict.fromkeys(_POOLS, "mooncake.store.compat.pool"),
    **dict.fromkeys(_HOST, "mooncake.store.compat.host"),
    "BufferHandle": "mooncake.store.compat.buffers",
    **dict.fromkeys(("EngramStore", "EngramStoreConfig"), "mooncake.store.compat.engram"),
    **dict.fromkeys(("ParallelAxis", "ReadTarget", "TensorParallelism"), "mooncake.store.compat.parallelism"),
    **dict.fromkeys(
        ("_serialize_tensor", "_deserialize_tensor", "_tensor_metadata_size"),
        "mooncake.store.compat.tensors",
    ),
    "MooncakeDistributedStore": "mooncake.store.compat.store",
    **dict.fromkeys(_VALUES, "mooncake.store.compat.values"),
}
"""Which module each name of the existing package's ``mooncake.store`` comes from."""
