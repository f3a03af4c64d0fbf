# SPDX-License-Identifier: Apache-2.0
"""Columns of a DataProto that are Python objects: their description in a handle, and how they are read.

``row_codecs.py`` and ``nested_rows.py`` know the codecs; this module reads the arrays of a column first, and
then only the bytes of the rows that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mooncake.compat.objects import row_codecs
from mooncake.compat.objects.bundles import ChunkReader, MemberPlan, MemberRead, memory_for, together, whole
from mooncake.compat.objects.manifest import StoredMember
from mooncake.compat.objects.members import array_layout, read_member
from mooncake.compat.objects.nested_rows import RECURSIVE, assemble, encode_nested, stored_nodes
from mooncake.compat.objects.row_codecs import EncodedRows
from mooncake.compat.objects.values import FieldSchema, RowSelection

Access: TypeAlias = Callable[[str], tuple[Any, StoredMember]]
"""Specification and place of a member of the column, by its name in the column."""


def encode_column(path: str, values: Sequence[Any], schema: FieldSchema | None) -> EncodedRows:
    """Encode a column by its schema, or with the codec that fits its values.

    Raises:
        AttributeError, TypeError, ValueError: a value does not fit, or no codec stores them.
    """
    if schema is not None and not schema.nullable and any(value is None for value in values):
        raise ValueError(f"FieldSchema for {path!r} is not nullable")
    if schema is not None and schema.codec != "auto":
        keys = schema.metadata.get("keys")
        return row_codecs.encode_rows(schema.codec, values, schema.metadata.get("dtype"), keys)
    decision = row_codecs.choose_leaf_codec(values)
    return (
        row_codecs.encode_rows(decision.codec, values) if decision.can_store else encode_nested(path, values)
    )


def read_column(
    reader: ChunkReader, document: Any, num_rows: int, access: Access, selected: RowSelection | None
) -> MemberPlan:
    """Plan to read the rows of a column that ``document`` describes.

    Raises:
        ValueError: the description is wrong, or its members do not fit it.
    """
    codec = document.get("codec") if isinstance(document, Mapping) else None
    metadata = document.get("metadata") if isinstance(document, Mapping) else None
    if not isinstance(metadata, Mapping) or document.get("rows") != num_rows:
        raise ValueError(f"column of codec {codec!r} does not describe {num_rows} rows")
    column = _Column(reader, num_rows, access, selected)
    if codec == RECURSIVE:
        return column.nested(metadata)
    if codec == row_codecs.TENSOR_DICT:
        return column.tensor_dicts(metadata)
    return column.leaf(str(codec), metadata, "")


class _Column:
    """Plans for the members of one column."""

    def __init__(
        self, reader: ChunkReader, num_rows: int, access: Access, selected: RowSelection | None
    ) -> None:
        self._reader = reader
        self._num_rows = num_rows
        self._access = access
        self._selected = selected
        self._num_selected = num_rows if selected is None else len(selected)

    def leaf(self, codec: str, metadata: Mapping[str, Any], prefix: str) -> MemberPlan:
        if codec in row_codecs.ROW_BYTES or codec == "media_bytes":
            return self._ragged(codec, metadata, prefix)
        if codec in row_codecs.TYPED:
            return self._typed(codec, metadata, prefix)
        if codec == "ndarray":
            return self._fixed(prefix)
        if codec == "media_list_ragged":
            return self._media_lists(metadata, prefix)
        raise ValueError(f"unsupported codec: {codec!r}")

    def nested(self, metadata: Mapping[str, Any]) -> MemberPlan:
        nodes = stored_nodes(metadata)
        names = [name for node in nodes for name in node.arrays.values()]
        plans = {f"node.{name}": self._array(name) for name in names}
        parts = [self._part(leaf) for leaf in metadata["leaves"]]
        names_of_leaves = [n for leaf in metadata["leaves"] for n in leaf["payload_members"].values()]
        if len({*names, *names_of_leaves}) < len(names) + len(names_of_leaves):
            raise ValueError(f"{RECURSIVE}: a member is named twice")  # so a short text reads no member often
        for number, (leaf, part) in enumerate(zip(metadata["leaves"], parts, strict=True)):
            plans[f"leaf.{number}"] = part.leaf(str(leaf.get("codec")), leaf["metadata"], "")
            plans[f"missing.{number}"] = part._array("missing")
        found = yield from together(plans)
        leaves = [(found[f"leaf.{n}"], found[f"missing.{n}"]) for n in range(len(metadata["leaves"]))]
        return assemble(nodes, {name: found[f"node.{name}"] for name in names}, leaves, self._num_selected)

    def _part(self, leaf: Mapping[str, Any]) -> _Column:
        """A leaf as a column: its members have names in the whole column's."""
        members = leaf.get("payload_members")
        if not isinstance(leaf.get("metadata"), Mapping) or not isinstance(members, Mapping):
            raise ValueError(f"leaf {leaf.get('path')!r} is no column")

        if not all(isinstance(name, str) for name in members.values()):
            raise ValueError(f"leaf {leaf.get('path')!r} names a member that is no text")

        def access(name: str) -> tuple[Any, StoredMember]:
            if name not in members:
                raise ValueError(f"leaf {leaf.get('path')!r} has no member {name!r}")
            return self._access(members[name])

        return _Column(self._reader, self._num_rows, access, self._selected)

    def tensor_dicts(self, metadata: Mapping[str, Any]) -> MemberPlan:
        keys, codecs = metadata.get("keys"), metadata.get("key_codecs")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ValueError(f"{row_codecs.TENSOR_DICT}: no keys")
        if not isinstance(codecs, Mapping) or codecs.keys() != set(keys):
            raise ValueError(f"{row_codecs.TENSOR_DICT}: no codecs of the keys")
        if not all(isinstance(found, Mapping) for found in codecs.values()):
            raise ValueError(f"{row_codecs.TENSOR_DICT}: a codec has no metadata")
        plans = {"null_mask": self._array("null_mask")}
        plans |= {f"{key}.": self.leaf("ragged_tensor", codecs[key], f"{key}.") for key in keys}
        found = yield from together(plans)
        nulls = found["null_mask"]
        row_codecs.check_nulls(row_codecs.TENSOR_DICT, nulls, self._num_selected)
        return [
            None
            if is_null
            else {key: found[f"{key}."][row] for key in keys if found[f"{key}."][row] is not None}
            for row, is_null in enumerate(nulls.tolist())
        ]

    def _array(self, name: str, rows: bool = True) -> MemberPlan:
        spec, member = self._access(name)
        if not isinstance(spec, Mapping) or spec.get("encoding") != "ndarray":
            raise ValueError(f"member {name} of a column is no array")
        _, shape = array_layout(name, spec, member.size_bytes)
        if rows and (not shape or shape[0] != self._num_rows):
            raise ValueError(f"member {name} of a column does not have {self._num_rows} rows")
        return read_member(self._reader, name, spec, member, rows=self._selected if rows else None)

    def _whole_arrays(self, prefix: str, names: Sequence[str]) -> MemberPlan:
        found = yield from together({name: self._array(f"{prefix}{name}", rows=False) for name in names})
        return {
            # Narrow offsets would wrap around when they are multiplied.
            name: array.astype(np.int64) if name.endswith("offsets") and array.dtype.kind == "i" else array
            for name, array in found.items()
        }

    def _ragged(self, codec: str, metadata: Mapping[str, Any], prefix: str) -> MemberPlan:
        _, member = self._access(f"{prefix}data")
        index = yield from self._whole_arrays(prefix, row_codecs.RAGGED_INDEX)
        row_codecs.check_index(codec, index, self._num_rows, member.size_bytes)
        data = yield from _bytes(member, self._runs(index["offsets"], 1, member))
        values = row_codecs.decode_ragged(codec, self._pick(index), data)
        if codec != "media_bytes":
            return values
        return row_codecs.decode_media(values, self._pick_list(metadata.get("media_encodings")))

    def _typed(self, codec: str, metadata: Mapping[str, Any], prefix: str) -> MemberPlan:
        spec, member = self._access(f"{prefix}data")
        dtype, shape = array_layout(f"{prefix}data", spec, member.size_bytes)
        index = yield from self._whole_arrays(prefix, row_codecs.TYPED_INDEX)
        if len(shape) != 1 or dtype.kind not in row_codecs.NUMBERS:
            raise ValueError(f"{codec}: data is {dtype} of {shape}")
        row_codecs.check_index(codec, index, self._num_rows, shape[0])
        data = yield from _bytes(member, self._runs(index["offsets"], dtype.itemsize, member))
        if metadata.get("row_format") == "mixed":
            metadata = {**metadata, "ndarray_rows": self._pick_list(metadata.get("ndarray_rows"))}
        return row_codecs.decode_typed(codec, metadata, self._pick(index), data.view(dtype))

    def _fixed(self, prefix: str) -> MemberPlan:
        plans = {name: self._array(f"{prefix}{name}") for name in ("nulls", "data")}
        found = yield from together(plans)
        row_codecs.check_nulls("ndarray", found["nulls"], self._num_selected)
        return row_codecs.decode_fixed(found["nulls"], found["data"])

    def _media_lists(self, metadata: Mapping[str, Any], prefix: str) -> MemberPlan:
        _, member = self._access(f"{prefix}data")
        index = yield from self._whole_arrays(prefix, ("row_offsets", "byte_offsets", "nulls"))
        ends, nulls = index["byte_offsets"], index["nulls"]
        num_items = ends.size - 1
        row_codecs.check_offsets("media_list_ragged", ends, num_items, member.size_bytes)
        row_codecs.check_offsets("media_list_ragged", index["row_offsets"], self._num_rows, num_items)
        row_codecs.check_nulls("media_list_ragged", nulls, self._num_rows)
        rows = np.arange(self._num_rows) if self._selected is None else self._selected.indices
        firsts, lasts = index["row_offsets"][rows].tolist(), index["row_offsets"][rows + 1].tolist()
        places = [place for first, last in zip(firsts, lasts, strict=True) for place in range(first, last)]
        items = RowSelection(np.array(places, dtype=np.int64))
        data = (yield from _bytes(member, items.ragged_runs(ends, 1))).tobytes()
        bounds = row_codecs.offsets_of((ends[items.indices + 1] - ends[items.indices]).tolist()).tolist()
        encodings = metadata.get("media_encodings")
        if isinstance(encodings, list) and len(encodings) == num_items:
            encodings = [encodings[place] for place in places]
        found = row_codecs.decode_media(
            [data[bounds[i] : bounds[i + 1]] for i in range(len(places))], encodings
        )
        sizes = row_codecs.offsets_of(
            last - first for first, last in zip(firsts, lasts, strict=True)
        ).tolist()
        return [
            None if is_null else found[sizes[row] : sizes[row + 1]]
            for row, is_null in enumerate(nulls[rows].tolist())
        ]

    def _runs(self, offsets: Any, unit: int, member: StoredMember) -> list[tuple[int, int]]:
        return whole(member) if self._selected is None else self._selected.ragged_runs(offsets, unit)

    def _pick(self, index: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays of the selected rows."""
        if self._selected is None:
            return dict(index)
        rows = self._selected.indices
        found = {name: array[rows] for name, array in index.items() if name != "offsets"}
        lengths = np.diff(index["offsets"])[rows]
        return found | {"offsets": row_codecs.offsets_of(lengths.tolist())}

    def _pick_list(self, values: Any) -> Any:
        if self._selected is None or not isinstance(values, list) or len(values) != self._num_rows:
            return values
        return [values[row] for row in self._selected.indices.tolist()]


def _bytes(member: StoredMember, runs: list[tuple[int, int]]) -> MemberPlan:
    memory = memory_for(member.key, (sum(length for _, length in runs),))
    yield [MemberRead(member, runs, int(memory.ctypes.data), memory.nbytes, by_chunk=runs == whole(member))]
    return memory
