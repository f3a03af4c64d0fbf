# SPDX-License-Identifier: Apache-2.0
"""Value types of the existing package: enumerations, options of a write, descriptions of replicas.

Types are checked when a value is set, as the existing package's bindings do, and an attribute that
does not exist is an ``AttributeError``, because programs probe for attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mooncake.compat import public_in
from mooncake.compat.store.arguments import flag, number, text
from mooncake.compat.transfer.public_types import BoundEnum


class ObjectDataType(BoundEnum):
    """Kind of data in an object, for statistics."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class SoftPinAction(BoundEnum):
    """Effect of a write on the soft pin of its key."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicaStatus(BoundEnum):
    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskType(BoundEnum):
    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(BoundEnum):
    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


_WHAT = "ReplicateConfig"
_Check = Callable[[str, Any], Any]


def _count(name: str, value: Any) -> int:
    """An unsigned number of 64 bits."""
    count = number(_WHAT, name, value)
    if not 0 <= count < 1 << 64:
        raise TypeError(f"{_WHAT}(): {name} must be 0 to 2**64 - 1, not {count}")
    return count


def _text(name: str, value: Any) -> str:
    return text(_WHAT, name, value)


def _flag(name: str, value: Any) -> bool:
    return flag(_WHAT, name, value)


def _texts(name: str, value: Any) -> list[str]:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise TypeError(f"{_WHAT}(): {name} must be a list of str, not {type(value).__name__}")
    return [text(_WHAT, name, item) for item in value]


def _optional(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)


def _member_of(kind: type[BoundEnum]) -> _Check:
    def check(name: str, value: Any) -> BoundEnum:
        try:
            return kind(value)
        except ValueError as error:
            raise TypeError(f"{_WHAT}(): {name}: {error}") from None

    return check


_FIELDS: dict[str, tuple[Callable[[], Any], _Check]] = {
    "replica_num": (lambda: 1, _count),
    "nof_replica_num": (lambda: 0, _count),
    "dfs_replica_num": (lambda: 0, _count),
    "soft_pin_action": (lambda: SoftPinAction.PRESERVE, _member_of(SoftPinAction)),
    "soft_pin_ttl_ms": (lambda: None, _optional(_count)),
    "with_hard_pin": (lambda: False, _flag),
    "preferred_segments": (list, _texts),
    "preferred_segment": (str, _text),
    "preferred_nof_segments": (list, _texts),
    "prefer_alloc_in_same_node": (lambda: False, _flag),
    "data_type": (lambda: ObjectDataType.UNKNOWN, _member_of(ObjectDataType)),
    "group_ids": (lambda: None, _optional(_texts)),
    "session_ids": (lambda: None, _optional(_texts)),
}


class ReplicateConfig:
    """Options of a write. Set the attributes that differ from the defaults; there are no arguments.

    ``with_soft_pin`` (up to version 0.3.11) and ``session_ids`` (newer programs) are accepted as well.
    """

    __slots__ = tuple(_FIELDS)

    def __init__(self) -> None:
        for name, (default, _) in _FIELDS.items():
            object.__setattr__(self, name, default())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS:
            value = _FIELDS[name][1](name, value)
        object.__setattr__(self, name, value)

    @property
    def with_soft_pin(self) -> bool:
        """Soft pin without a lifetime, as in older versions."""
        action: SoftPinAction = object.__getattribute__(self, "soft_pin_action")
        return action is SoftPinAction.ENABLE

    @with_soft_pin.setter
    def with_soft_pin(self, value: bool) -> None:
        self.__setattr__("soft_pin_action", SoftPinAction.ENABLE if value else SoftPinAction.PRESERVE)

    def __getattr__(self, name: str) -> Any:  # only for missing names; type checkers see the fields
        raise AttributeError(f"'ReplicateConfig' object has no attribute {name!r}")

    def _items(self) -> Iterator[str]:
        """Fields in the existing package's form; the optional ones only when they are set."""
        for name in _FIELDS:
            value = getattr(self, name)
            if name == "soft_pin_ttl_ms" and value is None:
                value = "default"
            elif name in ("preferred_segment", "group_ids", "session_ids") and not value:
                continue
            if isinstance(value, BoundEnum):
                value = value.name
            elif isinstance(value, bool):
                value = int(value)
            elif isinstance(value, list):
                value = f"[{', '.join(value)}]"
            yield f"{name + ' (deprecated)' if name == 'preferred_segment' else name}: {value}"

    def __str__(self) -> str:
        return f"ReplicateConfig: {{ {', '.join(self._items())} }}"


class ExistOptions:
    """Options of ``is_exist``, of newer versions: attributes, no arguments."""

    __slots__ = ("prefetch_to_memory",)

    prefetch_to_memory: bool
    """Start to copy an object that is only on an SSD to the memory of the same process."""

    def __init__(self) -> None:
        self.prefetch_to_memory = False

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, flag("ExistOptions", name, value))


class Descriptor:
    """Location of a replica's bytes, as transfers name it."""

    __slots__ = ("buffer_address", "size", "transport_endpoint")

    def __init__(self, size: int = 0, buffer_address: int = 0, transport_endpoint: str = "") -> None:
        self.size = size
        self.buffer_address = buffer_address
        self.transport_endpoint = transport_endpoint

    def __repr__(self) -> str:
        return f"<Descriptor size={self.size} at {self.buffer_address:#x} of {self.transport_endpoint!r}>"


class MemoryDescriptor:
    __slots__ = ("buffer_descriptor",)

    def __init__(self, buffer_descriptor: Descriptor) -> None:
        self.buffer_descriptor = buffer_descriptor


class DiskDescriptor:
    """Location on an SSD; ``file_path`` is the segment's name, because its objects share one file."""

    __slots__ = ("file_path", "object_size")

    def __init__(self, file_path: str, object_size: int) -> None:
        self.file_path = file_path
        self.object_size = object_size


class ReplicaDescriptor:
    """One replica of an object. ``get_..._descriptor`` of the other kind is a RuntimeError."""

    __slots__ = ("_place", "status")

    def __init__(self, status: ReplicaStatus, place: MemoryDescriptor | DiskDescriptor) -> None:
        self.status = status
        self._place = place

    def is_memory_replica(self) -> bool:
        return isinstance(self._place, MemoryDescriptor)

    def is_disk_replica(self) -> bool:
        """Whether it is on a file system that all clients share; there is no such tier here."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Whether it is on the SSD of one node."""
        return isinstance(self._place, DiskDescriptor)

    def get_memory_descriptor(self) -> MemoryDescriptor:
        if not isinstance(self._place, MemoryDescriptor):
            raise RuntimeError("this replica is not in memory; check is_memory_replica() first")
        return self._place

    def get_disk_descriptor(self) -> DiskDescriptor:
        if not isinstance(self._place, DiskDescriptor):
            raise RuntimeError("this replica is not on disk; check is_local_disk_replica() first")
        return self._place


class QueryTaskResponse:
    """State of a copy or move task."""

    __slots__ = (
        "assigned_client",
        "created_at_ms_epoch",
        "id",
        "last_updated_at_ms_epoch",
        "message",
        "status",
        "type",
    )

    def __init__(self) -> None:
        self.id = (0, 0)
        self.type = TaskType.REPLICA_COPY
        self.status = TaskStatus.PENDING
        self.created_at_ms_epoch = 0
        self.last_updated_at_ms_epoch = 0
        self.assigned_client = (0, 0)
        self.message = ""

    def __repr__(self) -> str:
        return f"<QueryTaskResponse {self.id} {self.type} {self.status} {self.message!r}>"


public_in(
    "mooncake.store",
    ObjectDataType,
    SoftPinAction,
    ReplicaStatus,
    TaskType,
    TaskStatus,
    ReplicateConfig,
    ExistOptions,
    Descriptor,
    MemoryDescriptor,
    DiskDescriptor,
    ReplicaDescriptor,
    QueryTaskResponse,
)

UNKNOWN, KVCACHE, TENSOR, WEIGHT, SAMPLE, *_rest = ObjectDataType
ACTIVATION, GRADIENT, OPTIMIZER_STATE, METADATA, GENERAL = _rest
UNDEFINED, INITIALIZED, _, COMPLETE, REMOVED, _ = ReplicaStatus
REPLICA_COPY, REPLICA_MOVE = TaskType
PENDING, PROCESSING, FAILED, SUCCESS = TaskStatus
"""Members that are also names of the module; of two with one name it is the task's, as in that package."""
