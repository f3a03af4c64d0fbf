# SPDX-License-Identifier: Apache-2.0
"""``MooncakeBundleTransfer``: structured objects and DataProto in a store, by the existing package's calls.

Also the place from which ``mooncake.structured_object_store`` takes its public names.
The calls check their arguments and put together what the modules beside this one do. An object is written
once and never changed: fields that are appended go to new objects, and the reference that an append returns
is the only one that has them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mooncake.compat.objects.bundles import (
    DEFAULT_BUNDLE_CHUNK_BYTES,
    Bundles,
    MemberPlan,
    carry_out,
    group_of,
    in_group,
    new_group,
)
from mooncake.compat.objects.columns import read_column
from mooncake.compat.objects.dataproto import (
    BATCH,
    DATAPROTO_REF_HANDLE_TYPE,
    DATAPROTO_REF_HANDLE_VERSION,
    DataProtoRefLike,
    DataSections,
    MooncakeDataProtoRef,
    StructuredFieldLocation,
    construct,
    dataproto_ref,
    encode_fields,
    export_dataproto_ref,
    import_dataproto_ref,
    is_dataproto_ref_handle,
    object_array,
    sections_of,
    sections_of_dict,
)
from mooncake.compat.objects.manifest import BundleManifest, RemoteBundleRef, StoredMember
from mooncake.compat.objects.members import SPECS, encode_member, read_member, release_leases
from mooncake.compat.objects.values import (
    BundleStore,
    BundleTransferPolicy,
    FieldSchema,
    StructuredMemberSlice,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
    raw_destination,
    select_rows,
    tensor_object_buffer,
)
from mooncake.log import get_logger

log = get_logger("mooncake.store")

__all__ = [
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "BundleStore",
    "BundleTransferPolicy",
    "DataProtoRefLike",
    "FieldSchema",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "RemoteBundleRef",
    "StructuredFieldLocation",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]

export_ref = export_dataproto_ref
import_ref = import_dataproto_ref

WRAPPED = "__mooncake_wrapped_object__"
PAYLOAD_TYPES = ("dataproto", "dict")


class MooncakeBundleTransfer:
    """Structured objects of a store under ``key_prefix``.

    Args:
        store: a ``MooncakeDistributedStore``, or anything with ``put``, ``get`` and ``remove``.
        default_chunk_bytes: largest object; a larger member is stored in chunks of this size.
        buffer_pool: a ``BufferPool``, in whose leases parts are joined before a write, and arrays are read.
    """

    def __init__(
        self,
        store: BundleStore,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = DEFAULT_BUNDLE_CHUNK_BYTES,
        buffer_pool: Any = None,
    ) -> None:
        self._bundles = Bundles(store, key_prefix, default_chunk_bytes, buffer_pool)
        self._pool = buffer_pool
        self._takes_config = _takes_config(store)

    @property
    def key_prefix(self) -> str:
        return self._bundles.prefix

    # Bundles --------------------------------------------------------------------------------------------

    def put_bundle(
        self,
        meta: bytes | bytearray | memoryview,
        buffers: Mapping[str, Any],
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store metadata and named buffers.

        Raises:
            ValueError: a name or an option is invalid.
            RuntimeError: the store refused; nothing is left in it.
        """
        group_of(config)
        return self._bundles.put(
            bytes(meta),
            {name: encode_member(str(name), value)[1] for name, value in buffers.items()},
            partition=partition,
            chunk_bytes=chunk_bytes,
            policy=_policy(policy, max_inflight_put),
            config=config,
        )

    def remove_bundle(self, ref: RemoteBundleRef | Mapping[str, Any]) -> None:
        """Remove a bundle's objects. What is already gone is no error.

        Raises:
            RuntimeError: some are still there.
        """
        self._bundles.remove([ref])

    # Structured objects ---------------------------------------------------------------------------------

    def put_structured_object(
        self,
        payload: StructuredObjectPayload,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store an object of named arrays, tensors and bytes.

        Raises:
            TypeError, ValueError: something that cannot be stored.
            RuntimeError: the store refused; nothing is left in it.
        """
        group_of(config)
        specs, sources = _encode(payload.buffers)
        return self._bundles.put(
            _metadata_bytes(payload.metadata, specs),
            sources,
            partition=partition,
            chunk_bytes=chunk_bytes,
            policy=_policy(policy, max_inflight_put),
            config=config,
        )

    def read_spec(self, ref: RemoteBundleRef | Mapping[str, Any]) -> StructuredObjectReadSpec:
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        """Read what ``spec`` selects to new memory."""
        return self.materialize_into(spec, None)

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None
    ) -> StructuredObjectResult:
        """Read what ``spec`` selects; members in ``destinations`` to the memory that is given there.

        Raises:
            KeyError: no such member.
            RuntimeError: a part of the object is lost.
            TypeError, ValueError: a destination does not fit, or the object is damaged.
        """
        if spec.member_names is not None and not spec.member_names:
            raise ValueError("structured object read selected no members")
        found, metadata, specs = self._open(spec.ref)
        names = found.members if spec.member_names is None else spec.member_names
        unknown = [name for name in names if name not in found.members]
        if unknown:
            raise KeyError(f"unknown bundle buffers: {unknown}")
        plans = {
            name: read_member(
                self._bundles.reader,
                name,
                specs.get(name),
                found.members[name],
                rows=spec.member_slice(name),
                destination=(destinations or {}).get(name),
                pool=self._pool,
            )
            for name in names
        }
        return StructuredObjectResult(metadata, carry_out(self._bundles.reader, plans))

    def put_object(
        self,
        obj: Any,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store a mapping of arrays, tensors and bytes, or one of these."""
        is_mapping = isinstance(obj, Mapping)
        payload = StructuredObjectPayload(
            {} if is_mapping else {WRAPPED: True}, obj if is_mapping else {"value": obj}
        )
        return self.put_structured_object(payload, partition, chunk_bytes, policy, max_inflight_put, config)

    def get_object(self, ref: RemoteBundleRef | Mapping[str, Any]) -> Any:
        result = self.materialize(self.read_spec(ref))
        return result.objects["value"] if result.metadata.get(WRAPPED) is True else result.objects

    @staticmethod
    def release_result(result: Any) -> None:
        """Return the leases in which arrays of ``result`` lie; the result must not be used afterwards."""
        release_leases(result)

    # DataProto ------------------------------------------------------------------------------------------

    def put(
        self,
        data: Any,
        *,
        type: Literal["dataproto", "dict"] = "dataproto",
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        config: Any = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
    ) -> MooncakeDataProtoRef:
        """Store a DataProto, or a flat dict whose fields are sorted into its sections.

        Its objects are in one storage group, a new one unless ``config`` names one ("" is none).
        """
        _check_type(type)
        schemas = field_schemas or {}
        sections = sections_of_dict(data, schemas) if type == "dict" else sections_of(data)
        given = group_of(config)
        group = new_group() if given is None and (config is not None or self._takes_config) else given or None
        empty = MooncakeDataProtoRef(0, {}, {}, {}, namespace, partition, _storage_group_id=group)
        return self._write_stage(empty, sections, schemas, stage, False, chunk_bytes, policy, config)

    def get(
        self,
        ref: DataProtoRefLike,
        *,
        type: Literal["dataproto", "dict"] = "dataproto",
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any | None = None,
        destinations: Mapping[str, Any] | None = None,
        rows: slice | StructuredMemberSlice | Sequence[int] | None = None,
    ) -> Any:
        """Read a DataProto, or with ``type="dict"`` a flat dict in which columns are lists."""
        _check_type(type)
        found = dataproto_ref(ref)
        names = _selected_fields(found, fields, batch_fields, non_tensor_fields)
        values = self._read_fields(found, names, destinations or {}, rows)
        wanted = found.meta_info if meta_info_keys is None else dict.fromkeys(meta_info_keys)
        meta_info = {name: value for name, value in found.meta_info.items() if name in wanted}
        if type == "dict":
            both = meta_info.keys() & values.keys()
            if both:
                raise ValueError(f"Duplicate keys in meta_info and fields: {sorted(both)}")
            return meta_info | values
        sections: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for name, value in values.items():
            is_column = name in found.encoded_non_tensor
            into = sections[found.field_index[name].section != BATCH]
            into[name] = object_array(value) if is_column else value
        return construct(data_cls, *sections, meta_info)

    def put_dataproto(
        self,
        data: Any,
        *,
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        return self.put(
            data,
            namespace=namespace,
            partition=partition,
            stage=stage,
            chunk_bytes=chunk_bytes,
            policy=policy,
            config=config,
            field_schemas=field_schemas,
        )

    def append_dataproto_fields(
        self,
        ref: DataProtoRefLike,
        data: Any,
        *,
        stage: str,
        overwrite: bool = False,
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """Store more fields of the same rows; ``ref`` stays valid, unless ``overwrite`` replaces its stage.

        Raises:
            ValueError: a field is there already, or has the name of a part of another; the number of rows or
                the storage group differs.
        """
        found = dataproto_ref(ref)
        group, given = found._storage_group_id, group_of(config)
        if group is not None and given not in (None, group):
            raise ValueError(f"config.group_ids {given!r} conflicts with the ref's storage group {group!r}")
        return self._write_stage(
            found, sections_of(data), field_schemas or {}, stage, overwrite, chunk_bytes, policy, config
        )

    def dataproto_manifest_view(self, ref: DataProtoRefLike) -> dict[str, Any]:
        """What is stored: fields with their specifications, stages, keys of the metadata."""
        found = dataproto_ref(ref)
        stages: dict[str, Any] = {}
        specs: dict[str, Mapping[str, Any]] = {}
        for stage, bundle in found.stage_refs.items():
            _, metadata, specs[stage] = self._open(bundle)
            stages[stage] = {"manifest_key": bundle.manifest_key, "dataproto": metadata.get("dataproto")}
        fields: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for name, place in found.field_index.items():
            column = found.encoded_non_tensor.get(name)
            spec = specs[place.stage].get(place.member)
            if column is not None:
                members = _payload_members(name, column)
                spec = dict(column) | {
                    "payload_specs": {
                        part: specs[place.stage].get(member) for part, member in members.items()
                    }
                }
            fields[place.section != BATCH][name] = {
                "section": place.section,
                "stage": place.stage,
                "member": place.member,
                "spec": spec,
            }
        return {
            "namespace": found.namespace,
            "partition": found.partition,
            "batch_size": found.batch_size,
            "batch_fields": fields[0],
            "non_tensor_fields": fields[1],
            "meta_info_keys": list(found.meta_info),
            "stages": stages,
        }

    def get_dataproto(
        self,
        ref: DataProtoRefLike,
        *,
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any | None = None,
        destinations: Mapping[str, Any] | None = None,
        rows: slice | StructuredMemberSlice | Sequence[int] | None = None,
    ) -> Any:
        """Read fields and rows of a DataProto.

        Raises:
            KeyError: no such field.
            IndexError, TypeError, ValueError: rows or destinations do not fit, or the object is damaged.
            RuntimeError: a part of it is lost.
        """
        return self.get(
            ref,
            fields=fields,
            batch_fields=batch_fields,
            non_tensor_fields=non_tensor_fields,
            meta_info_keys=meta_info_keys,
            data_cls=data_cls,
            destinations=destinations,
            rows=rows,
        )

    def cleanup_dataproto(self, ref: DataProtoRefLike) -> None:
        """Remove the objects of all stages."""
        self._bundles.remove(dataproto_ref(ref).stage_refs.values())

    def cleanup_dataproto_append(self, previous: DataProtoRefLike, appended: DataProtoRefLike) -> None:
        """Remove what an append added, so that ``previous`` is the only valid reference."""
        before, after = (
            {bundle.manifest_key: bundle for bundle in dataproto_ref(ref).stage_refs.values()}
            for ref in (previous, appended)
        )
        # A bundle of both has no objects of another stage: nothing of it is asked for, and it stays.
        only_before = [bundle for name, bundle in before.items() if name not in after]
        keep = [key for bundle in only_before for key in self._bundles.keys(bundle)]
        self._bundles.remove([bundle for name, bundle in after.items() if name not in before], keep)

    # Inside ---------------------------------------------------------------------------------------------

    def _open(
        self, ref: RemoteBundleRef | Mapping[str, Any]
    ) -> tuple[BundleManifest, dict[str, Any], Mapping[str, Any]]:
        """Manifest, metadata and specifications of a structured object."""
        found = self._bundles.open(ref)
        try:
            metadata = json.loads(self._bundles.read_meta(found))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"bundle {found.object_id} is no structured object: {error}") from error
        specs = metadata.get(SPECS, {}) if isinstance(metadata, dict) else None
        if not isinstance(specs, Mapping):
            raise ValueError(f"bundle {found.object_id} is no structured object: its metadata has no fields")
        return found, metadata, specs

    def _write_stage(
        self,
        ref: MooncakeDataProtoRef,
        sections: DataSections,
        schemas: Mapping[str, FieldSchema],
        stage: str,
        overwrite: bool,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy | None,
        config: Any,
    ) -> MooncakeDataProtoRef:
        fields = encode_fields(sections, schemas, stage)
        result = replace(ref, meta_info=ref.meta_info | sections.meta_info)
        if not fields.field_index:
            return result
        if ref.field_index and fields.batch_size != ref.batch_size:
            sizes = f"append batch size {fields.batch_size} does not match ref batch size {ref.batch_size}"
            raise ValueError(f"DataProto {sizes}")
        old = ref.stage_refs.get(stage)
        _check_fields(ref, fields.field_index, stage, overwrite)
        specs, sources = _encode(fields.members)
        if old is not None and not overwrite:
            specs = {**self._open(old)[2], **specs}
        facts = {"version": 1, "namespace": ref.namespace, "partition": ref.partition, "stage": stage}
        facts["batch_size"] = fields.batch_size
        group = ref._storage_group_id
        result.stage_refs = ref.stage_refs | {
            stage: self._bundles.put(
                _metadata_bytes({"layout": "dataproto_stage", "dataproto": facts}, specs),
                sources,
                partition=ref.partition,
                chunk_bytes=chunk_bytes,
                policy=policy,
                config=in_group(config, group) if group_of(config) is None else config,
                base=None if overwrite else old,
            )
        }
        result.batch_size = fields.batch_size
        result.field_index = ref.field_index | fields.field_index
        columns = ref.encoded_non_tensor.items()
        kept = {name: column for name, column in columns if name not in fields.field_index}
        result.encoded_non_tensor = kept | fields.encoded
        if old is not None and overwrite:
            self._remove_replaced(old)
        return result

    def _remove_replaced(self, old: RemoteBundleRef) -> None:
        """Remove a stage that was replaced. An error is logged: the caller needs the new reference."""
        try:
            self._bundles.remove([old])
        except Exception as error:  # any store's; without the new reference its objects would be lost
            log.warning("replaced_stage_not_removed", manifest_key=old.manifest_key, error=str(error))

    def _read_fields(
        self, ref: MooncakeDataProtoRef, names: Sequence[str], destinations: Mapping[str, Any], rows: Any
    ) -> dict[str, Any]:
        selected = select_rows(rows, ref.batch_size)
        stages = dict.fromkeys(ref.field_index[name].stage for name in names)
        opened = {stage: self._open(ref.stage_refs[stage]) for stage in stages}
        plans: dict[str, MemberPlan] = {}
        for name in names:
            place = ref.field_index[name]
            found, _, specs = opened[place.stage]
            column = ref.encoded_non_tensor.get(name)
            destination = destinations.get(name)
            if column is None:
                spec, member = _member(found, specs, place.member)
                plans[name] = read_member(
                    self._bundles.reader,
                    name,
                    spec,
                    member,
                    rows=selected,
                    destination=destination,
                    pool=self._pool,
                )
                continue
            if destination is not None:
                raise ValueError(f"DataProto field {name!r} of Python objects does not support destinations")
            members = _payload_members(name, column)

            def access(
                part: str,
                members: Mapping[str, Any] = members,
                found: BundleManifest = found,
                specs: Mapping[str, Any] = specs,
            ) -> tuple[Any, StoredMember]:
                return _member(found, specs, members.get(part))

            plans[name] = read_column(self._bundles.reader, column, ref.batch_size, access, selected)
        return carry_out(self._bundles.reader, plans)


def _payload_members(name: str, column: Any) -> Mapping[str, str]:
    """Members of a column, by their names in it.

    Raises:
        ValueError: its description in the handle has none.
    """
    members = column.get("payload_members") if isinstance(column, Mapping) else None
    if not isinstance(members, Mapping) or not all(isinstance(member, str) for member in members.values()):
        raise ValueError(f"DataProto field {name!r} has no payload_members")
    return members


def _member(found: BundleManifest, specs: Mapping[str, Any], name: Any) -> tuple[Any, StoredMember]:
    member = found.members.get(name) if isinstance(name, str) else None
    if member is None:
        raise ValueError(f"bundle {found.object_id} has no member {name!r}")
    return specs.get(name), member


def _encode(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    encoded = {name: encode_member(str(name), value) for name, value in values.items()}
    return {name: spec for name, (spec, _) in encoded.items()}, {
        name: source for name, (_, source) in encoded.items()
    }


def _metadata_bytes(metadata: Any, specs: Mapping[str, Any]) -> bytes:
    if not isinstance(metadata, Mapping):
        raise TypeError(f"structured object metadata must be a mapping, not {type(metadata).__name__}")
    if SPECS in metadata:
        raise ValueError(f"structured object metadata key {SPECS!r} is reserved")
    document = {"layout": "structured", **metadata}
    if specs:
        document[SPECS] = dict(specs)
    try:
        return json.dumps(document, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"structured object metadata must be JSON-serializable: {error}") from error


def _policy(policy: BundleTransferPolicy | None, max_inflight_put: int | None) -> BundleTransferPolicy | None:
    if max_inflight_put is None:
        return policy
    return replace(policy or BundleTransferPolicy(), max_inflight_put=max_inflight_put)


def _check_type(name: str) -> None:
    if name not in PAYLOAD_TYPES:
        raise ValueError(f"unsupported Mooncake payload type: {name!r}")


def _check_fields(ref: MooncakeDataProtoRef, new: Mapping[str, Any], stage: str, overwrite: bool) -> None:
    there = sorted(str(name) for name in new if name in ref.field_index)
    if there and not overwrite:
        raise ValueError(f"DataProto fields already exist: {there}")
    lost = sorted(n for n, place in ref.field_index.items() if place.stage == stage and n not in new)
    if overwrite and lost:
        raise ValueError(f"DataProto overwrite for stage {stage!r} must include existing fields: {lost}")


def _selected_fields(
    ref: MooncakeDataProtoRef,
    fields: Sequence[str] | None,
    batch_fields: Sequence[str] | None,
    non_tensor_fields: Sequence[str] | None,
) -> list[str]:
    if fields is not None and (batch_fields is not None or non_tensor_fields is not None):
        raise ValueError("fields cannot be combined with batch_fields or non_tensor_fields")
    if fields is None and batch_fields is None and non_tensor_fields is None:
        return list(ref.field_index)
    wanted = dict.fromkeys((*(fields or ()), *(batch_fields or ()), *(non_tensor_fields or ())))
    unknown = [name for name in wanted if name not in ref.field_index]
    if unknown:
        raise KeyError(f"unknown DataProto fields: {unknown}")
    return list(wanted)


def _takes_config(store: Any) -> bool:
    """Whether puts can have a configuration, which a storage group needs."""
    try:
        return "config" in inspect.signature(store.put).parameters
    except (TypeError, ValueError):
        return False
