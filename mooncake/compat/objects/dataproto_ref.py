# SPDX-License-Identifier: Apache-2.0
"""A reference to a stored DataProto, and its handle: the same as JSON, for another process.

Owns that format. A reference names bundles (one per stage) and says in which of them each field lies; dtypes,
shapes and places stay in the bundles. A handle comes from another process and is checked when it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from mooncake.compat.objects.manifest import RemoteBundleRef

DATAPROTO_REF_HANDLE_TYPE = "mooncake_dataproto_ref"
DATAPROTO_REF_HANDLE_VERSION = 1
READABLE_VERSIONS = (1, 2)
KIND = "bundle_stages"
BATCH = "batch"
NON_TENSOR = "non_tensor_batch"
META = "meta_info"


@dataclass(frozen=True)
class StructuredFieldLocation:
    stage: str
    member: str
    section: Literal["batch", "non_tensor_batch"]


@dataclass
class MooncakeDataProtoRef:
    """A stored DataProto.

    ``encoded_non_tensor`` has the codecs of fields that are Python objects, ``_storage_group_id`` the group
    in which the store keeps its objects.
    """

    batch_size: int
    stage_refs: dict[str, RemoteBundleRef]
    field_index: dict[str, StructuredFieldLocation]
    meta_info: dict[str, Any]
    namespace: str = "default"
    partition: str = "default"
    global_indexes: list[int] | None = None
    encoded_non_tensor: dict[str, Any] = field(default_factory=dict)
    _storage_group_id: str | None = None


DataProtoRefLike: TypeAlias = MooncakeDataProtoRef | Mapping[str, Any]


def export_dataproto_ref(ref: MooncakeDataProtoRef) -> dict[str, Any]:
    """Make the handle of a reference.

    Raises:
        TypeError: ``meta_info`` has a value that JSON does not have.
    """
    handle: dict[str, Any] = {
        "type": DATAPROTO_REF_HANDLE_TYPE,
        "version": DATAPROTO_REF_HANDLE_VERSION,
        "kind": KIND,
        "batch_size": int(ref.batch_size),
        "namespace": ref.namespace,
        "partition": ref.partition,
        "global_indexes": None if ref.global_indexes is None else [int(row) for row in ref.global_indexes],
        "stage_refs": {
            stage: {"manifest_key": found.manifest_key} for stage, found in ref.stage_refs.items()
        },
        "field_index": {
            name: {"stage": place.stage, "member": place.member, "section": place.section}
            for name, place in ref.field_index.items()
        },
        "meta_info": _plain(ref.meta_info),
        "encoded_non_tensor": _plain(ref.encoded_non_tensor),
    }
    if ref._storage_group_id is not None:
        handle["storage_group_id"] = ref._storage_group_id
    return handle


def import_dataproto_ref(handle: Mapping[str, Any]) -> MooncakeDataProtoRef:
    """Make a reference from a handle.

    Raises:
        ValueError: it is not one, or of a version that is not known.
    """
    if not is_dataproto_ref_handle(handle):
        raise ValueError("not a Mooncake DataProto ref handle")
    if handle.get("version") not in READABLE_VERSIONS:
        raise ValueError(f"unsupported DataProto ref handle version: {handle.get('version')!r}")
    if handle.get("kind") != KIND:
        raise ValueError(f"unsupported DataProto ref handle kind: {handle.get('kind')!r}")
    batch_size, indexes = handle.get("batch_size"), handle.get("global_indexes")
    if type(batch_size) is not int or batch_size < 0:
        raise ValueError(f"DataProto ref handle batch_size is {batch_size!r}")
    if indexes is not None and not (isinstance(indexes, list) and all(type(row) is int for row in indexes)):
        raise ValueError("DataProto ref handle global_indexes must contain integers")
    group = handle.get("storage_group_id")
    if group is not None and not (isinstance(group, str) and group):
        raise ValueError("DataProto ref handle has invalid storage_group_id")
    stage_refs = {
        _text(stage, "stage"): RemoteBundleRef(
            _text(_mapping(found, "stage").get("manifest_key"), "manifest_key"), {}
        )
        for stage, found in _mapping(handle.get("stage_refs"), "stage_refs").items()
    }
    return MooncakeDataProtoRef(
        batch_size=batch_size,
        stage_refs=stage_refs,
        field_index={
            name: _location(name, place, stage_refs)
            for name, place in _mapping(handle.get("field_index"), "field_index").items()
        },
        meta_info=dict(_mapping(handle.get("meta_info", {}), "meta_info")),
        namespace=_text(handle.get("namespace", "default"), "namespace"),
        partition=_text(handle.get("partition", "default"), "partition"),
        global_indexes=None if indexes is None else list(indexes),
        encoded_non_tensor=dict(_mapping(handle.get("encoded_non_tensor", {}), "encoded_non_tensor")),
        _storage_group_id=group,
    )


def is_dataproto_ref_handle(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == DATAPROTO_REF_HANDLE_TYPE


def dataproto_ref(value: Any) -> MooncakeDataProtoRef:
    """Reference from itself or its handle.

    Raises:
        TypeError: neither.
        ValueError: a handle that is not valid.
    """
    if isinstance(value, MooncakeDataProtoRef):
        return value
    if isinstance(value, Mapping):
        return import_dataproto_ref(value)
    raise TypeError(f"expected MooncakeDataProtoRef or DataProto handle, got {type(value).__name__}")


def _location(name: Any, place: Any, stages: Mapping[str, Any]) -> StructuredFieldLocation:
    found = _mapping(place, f"field {name!r}")
    section, stage = found.get("section"), _text(found.get("stage"), "stage")
    if section not in (BATCH, NON_TENSOR):
        raise ValueError(f"invalid DataProto field section: {section!r}")
    if stage not in stages:
        raise ValueError(f"DataProto field {name!r} refers to unknown stage {stage!r}")
    return StructuredFieldLocation(stage, _text(found.get("member"), "member"), section)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"DataProto ref handle {what} must be a mapping")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"DataProto ref handle {what} must be a non-empty string")
    return value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(f"DataProto ref handles support only JSON-safe values, got {type(value).__name__}")
