# SPDX-License-Identifier: Apache-2.0
"""A DataProto: its fields, how they become members, and the reference to a stored one.

A DataProto is any object with ``batch``, ``non_tensor_batch`` and ``meta_info``, which are mappings. Fields
of ``batch`` are members as they are; those of ``non_tensor_batch`` too, unless they are Python objects, which
a codec encodes. A reference names bundles (one per stage) and says in which of them each field lies; dtypes,
shapes and places stay in the bundles. Its handle is the same as JSON, which comes from another process and is
checked when it is imported. Knows no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from mooncake.compat.objects.columns import encode_column
from mooncake.compat.objects.manifest import MAX_MEMBER_BYTES, RemoteBundleRef
from mooncake.compat.objects.members import is_tensor
from mooncake.compat.objects.values import FieldSchema, TensorObjectBuffer

# References ---------------------------------------------------------------------------------------------

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
    if type(batch_size) is not int or not 0 <= batch_size <= MAX_MEMBER_BYTES:
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


# Fields -------------------------------------------------------------------------------------------------

SECTIONS = (BATCH, META, NON_TENSOR)


@dataclass(frozen=True)
class DataSections:
    batch: dict[str, Any]
    non_tensor: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass
class EncodedFields:
    """Fields as members: values by member name, and where each field is."""

    batch_size: int
    members: dict[str, Any] = field(default_factory=dict)
    field_index: dict[str, StructuredFieldLocation] = field(default_factory=dict)
    encoded: dict[str, Any] = field(default_factory=dict)


def sections_of(data: Any) -> DataSections:
    """Sections of a DataProto or a dict; a dict with other keys than sections is all ``batch``."""
    if isinstance(data, Mapping):
        is_envelope = data.keys() <= set(SECTIONS) and all(
            value is None or _is_mapping(value) for value in data.values()
        )
        if not is_envelope:
            return DataSections(dict(data), {}, {})
        found = [data.get(name) for name in (BATCH, NON_TENSOR, META)]
    else:
        found = [getattr(data, name, None) for name in (BATCH, NON_TENSOR, META)]
    batch, non_tensor, meta_info = ({} if value is None else dict(value.items()) for value in found)
    return DataSections(batch, non_tensor, meta_info)


def sections_of_dict(data: Any, schemas: Mapping[str, FieldSchema]) -> DataSections:
    """Sections of a flat dict: by their schemas, else arrays and lists with a row for each of the batch.

    Raises:
        TypeError: not a dict.
        ValueError: the size of the batch is ambiguous.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"flat dict payload must be a mapping, not {type(data).__name__}")
    declared = {name: section_of(name, schemas[name]) for name in data if name in schemas}
    dense = {name for name, value in data.items() if declared.get(name) is None and _is_dense(value)}
    sizes = {
        len(value) for name, value in data.items() if name in dense or _has_rows(declared.get(name), value)
    }
    if len(sizes) > 1:
        raise ValueError(f"flat dict dense fields have ambiguous batch sizes: {sorted(sizes)}")
    lists = {name for name, value in data.items() if declared.get(name) is None and _is_list(value)}
    if not sizes:
        sizes = {len(data[name]) for name in lists} - {0}
        if len(sizes) > 1:
            raise ValueError(
                f"flat dict fields have ambiguous batch sizes: {sorted(sizes)}; pass FieldSchema "
                "metadata['section'] for list-valued metadata fields"
            )
    found = DataSections({}, {}, {})
    into = {BATCH: found.batch, NON_TENSOR: found.non_tensor, META: found.meta_info}
    for name, value in data.items():
        section = declared.get(name)
        if section is None:
            in_rows = name in lists and len(value) in sizes
            section = BATCH if name in dense else NON_TENSOR if in_rows else META
        into[section][name] = value
    return found


def encode_fields(data: DataSections, schemas: Mapping[str, FieldSchema], stage: str) -> EncodedFields:
    """Encode the fields of both sections.

    Raises:
        AttributeError, TypeError, ValueError: fields contradict each other, or a value does not fit.
    """
    both = data.batch.keys() & data.non_tensor.keys()
    if both:
        raise ValueError(f"DataProto batch and non_tensor_batch fields overlap: {sorted(both)}")
    for name, schema in schemas.items():
        _check_section(name, schema, data)
    sizes = {name: num_rows(name, value) for name, value in (data.batch | data.non_tensor).items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"DataProto fields have inconsistent batch sizes: {sizes}")
    found = EncodedFields(next(iter(sizes.values()), 0))
    for name, value in data.batch.items():
        declared = _schema_for(name, BATCH, schemas)
        if declared is not None and isinstance(value, list | tuple):
            value = np.asarray(value, dtype=declared.metadata.get("dtype"))
        _add(found, name, BATCH, stage, {f"{BATCH}.{name}": value})
    for name, value in data.non_tensor.items():
        _encode_non_tensor(found, name, value, _schema_for(name, NON_TENSOR, schemas), stage)
    return found


def num_rows(name: str, value: Any) -> int:
    """Rows of a field.

    Raises:
        TypeError: it has none.
    """
    if isinstance(value, TensorObjectBuffer):
        if value.batch_size is None:
            raise TypeError(f"DataProto field {name!r}: a tensor_object_buffer needs its batch_size")
        return value.batch_size
    if is_tensor(value) and value.dim():
        return int(value.size(0))
    try:
        return len(value)
    except TypeError as error:
        raise TypeError(f"DataProto field {name!r} has no rows: {error}") from None


def object_array(rows: Iterable[Any]) -> np.ndarray[Any, Any]:
    held = list(rows)
    array = np.empty(len(held), dtype=object)
    for row, value in enumerate(held):  # an assignment of all would look into lists
        array[row] = value
    return array


def construct(data_cls: Any, batch: Any, non_tensor: Any, meta_info: Any) -> Any:
    """An object of the program's class.

    Raises:
        TypeError: it takes neither form of arguments.
    """
    if data_cls is None or data_cls is dict:
        return {BATCH: batch, NON_TENSOR: non_tensor, META: meta_info}
    errors: list[str] = []
    from_dict = getattr(data_cls, "from_dict", None)
    if callable(from_dict):
        try:
            return from_dict(batch, non_tensor, meta_info=meta_info)
        except TypeError as error:
            errors.append(str(error))
    try:
        return data_cls(batch=batch, non_tensor_batch=non_tensor, meta_info=meta_info)
    except TypeError as error:
        errors.append(str(error))
    name = getattr(data_cls, "__name__", data_cls)
    raise TypeError(f"{name} cannot be constructed from a DataProto: {'; '.join(errors)}")


def section_of(name: str, schema: FieldSchema) -> str | None:
    section: Any = schema.metadata.get("section")
    if section is not None and section not in SECTIONS:
        raise ValueError(f"FieldSchema for {name!r} metadata['section'] must be one of {list(SECTIONS)}")
    return section if section is None else str(section)


def _encode_non_tensor(
    found: EncodedFields, name: str, value: Any, schema: FieldSchema | None, stage: str
) -> None:
    path = f"{NON_TENSOR}.{name}"
    is_array = isinstance(value, np.ndarray) and not value.dtype.hasobject
    if (schema is None or schema.codec == "auto") and (is_array or is_tensor(value)):
        _add(found, name, NON_TENSOR, stage, {path: value})
        return
    try:
        column = encode_column(path, list(value), schema)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        if schema is None:
            raise
        text = (
            f"failed to encode {NON_TENSOR} field {name!r} with FieldSchema codec {schema.codec!r}: {error}"
        )
        kind = AttributeError if isinstance(error, AttributeError) else ValueError
        raise (TypeError if isinstance(error, TypeError) else kind)(text) from error
    names = {member: f"{path}.{member}" for member in column.payload}
    found.encoded[name] = {
        "codec": column.codec,
        "rows": column.num_rows,
        "metadata": column.metadata,
        "payload_members": names,
    }
    _add(found, name, NON_TENSOR, stage, {names[member]: part for member, part in column.payload.items()})


def _add(found: EncodedFields, name: str, section: Any, stage: str, members: Mapping[str, Any]) -> None:
    if found.members.keys() & members.keys():
        raise ValueError(f"DataProto field {name!r} has the name of a part of another field")
    found.members |= members
    found.field_index[name] = StructuredFieldLocation(stage, f"{section}.{name}", section)


def _check_section(name: str, schema: FieldSchema, data: DataSections) -> None:
    section = section_of(name, schema)
    places = {BATCH: data.batch, NON_TENSOR: data.non_tensor, META: data.meta_info}
    actual = [place for place, fields in places.items() if name in fields]
    if section is not None and actual and section not in actual:
        raise ValueError(f"FieldSchema for {name!r} declares section {section!r}, but it is in {actual[0]!r}")


def _schema_for(name: str, section: str, schemas: Mapping[str, FieldSchema]) -> FieldSchema | None:
    schema = schemas.get(name)
    return schema if schema is not None and section_of(name, schema) in (None, section) else None


def _is_mapping(value: Any) -> bool:
    """Mappings and what behaves like them: a TensorDict is none by type."""
    return isinstance(value, Mapping) or (hasattr(value, "items") and hasattr(value, "keys"))


def _is_dense(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and not value.dtype.hasobject
    return is_tensor(value) and value.dim() > 0


def _is_list(value: Any) -> bool:
    is_column = isinstance(value, np.ndarray) and value.dtype.hasobject and value.ndim == 1
    return is_column or isinstance(value, list | tuple)


def _has_rows(section: str | None, value: Any) -> bool:
    return section in (BATCH, NON_TENSOR) and hasattr(value, "__len__")
