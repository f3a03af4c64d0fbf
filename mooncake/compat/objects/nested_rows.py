# SPDX-License-Identifier: Apache-2.0
"""Columns whose rows are dicts and lists of values that msgpack does not have: tensors, arrays, bytes.

Such a column is a tree. Each node is a dict or a list and has its children by key or position, each leaf is
a column that another codec encodes, with a row for each row of the whole column; so the same rows are
selected in every leaf. What a row does not have is marked as missing, which differs from None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mooncake.compat.objects.row_codecs import RECURSIVE, EncodedRows, Payload, encode_rows, infer_codec

MAX_DEPTH = 64
MAX_LEAVES = 4096


def encode_nested(path: str, values: Sequence[Any]) -> EncodedRows:
    """Encode a column whose rows are dicts or lists.

    Raises:
        ValueError: a value that no codec stores, too many of them or too deep.
    """
    tree = _Tree()
    tree.add(path, list(values), [False] * len(values), 0)
    metadata = {"structure_version": 1, "root_path": path, "nodes": tree.nodes, "leaves": tree.leaves}
    return EncodedRows(RECURSIVE, len(values), tree.payload, metadata)


class _Tree:
    """Nodes and leaves in the order of their numbers; a parent's number is below its children's."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.leaves: list[dict[str, Any]] = []
        self.payload: Payload = {}

    def add(self, path: str, values: list[Any], missing: list[bool], depth: int) -> list[Any]:
        """Add a child: returns ``["node" or "leaf", number]``."""
        if depth > MAX_DEPTH or len(self.leaves) >= MAX_LEAVES:
            limits = f"more than {MAX_DEPTH} levels or {MAX_LEAVES} leaves"
            raise ValueError(f"unsupported structured non-tensor field {path}: {limits}")
        codec = infer_codec(values)
        if codec is None:
            raise ValueError(f"unsupported structured non-tensor field {path}: no codec matched")
        if codec == RECURSIVE:
            return self._add_node(path, values, missing, depth)
        number = len(self.leaves)
        encoded = encode_rows(codec, values)
        self.leaves.append({"path": path, "codec": codec, "metadata": encoded.metadata})
        self.payload |= {f"leaf.{number}.{name}": value for name, value in encoded.payload.items()}
        self.payload[f"leaf.{number}.missing"] = np.array(missing, dtype=np.bool_)
        return ["leaf", number]

    def _add_node(self, path: str, values: list[Any], missing: list[bool], depth: int) -> list[Any]:
        number = len(self.nodes)
        is_list = any(isinstance(value, list) for value in values)
        if is_list:
            lengths = [len(value) if value is not None else 0 for value in values]
            names: list[Any] = list(range(max(lengths)))
            self.payload[f"node.{number}.lengths"] = np.array(lengths, dtype=np.int64)
        else:
            names = list(dict.fromkeys(key for value in values if value is not None for key in value))
        if not all(is_list or isinstance(name, str) for name in names):
            raise ValueError(f"unsupported structured non-tensor field {path}: keys of dicts must be strings")
        self.payload[f"node.{number}.missing"] = np.array(missing, dtype=np.bool_)
        self.payload[f"node.{number}.row_mask"] = np.array([v is not None for v in values], dtype=np.bool_)
        node: dict[str, Any] = {"path": path, "node_type": "list" if is_list else "dict", "children": names}
        self.nodes.append(node)
        refs = []
        for name in names:
            rows = [_has(value, name, is_list) for value in values]
            child = [value[name] if has else None for value, has in zip(values, rows, strict=True)]
            absent = [value is not None and not has for value, has in zip(values, rows, strict=True)]
            child_path = f"{path}[{name}]" if is_list else f"{path}.{name}"
            refs.append(self.add(child_path, child, absent, depth + 1))
        node["child_refs"] = refs
        return ["node", number]


def _has(value: Any, name: Any, is_list: bool) -> bool:
    if value is None:
        return False
    return name < len(value) if is_list else name in value


def node_arrays(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the arrays of all nodes."""
    names = [f"node.{number}.{kind}" for number in range(len(nodes)) for kind in ("missing", "row_mask")]
    return names + [
        f"node.{number}.lengths" for number, node in enumerate(nodes) if node.get("node_type") == "list"
    ]


def check_tree(metadata: Mapping[str, Any]) -> None:
    """Check that nodes and leaves are one tree.

    Raises:
        ValueError: they are not.
    """
    nodes, leaves = metadata.get("nodes"), metadata.get("leaves")
    if not isinstance(nodes, list) or not isinstance(leaves, list) or not nodes:
        raise ValueError(f"{RECURSIVE}: no nodes and leaves")
    wanted = {("node", number) for number in range(1, len(nodes))}
    wanted |= {("leaf", number) for number in range(len(leaves))}
    depths = {0: 0}
    for number, node in enumerate(nodes):
        names, refs = node.get("children"), node.get("child_refs")
        if node.get("node_type") not in ("dict", "list") or not isinstance(names, list):
            raise ValueError(f"{RECURSIVE}: node {number} is no dict or list")
        if (
            not isinstance(refs, list)
            or len(refs) != len(names)
            or depths.get(number, MAX_DEPTH + 1) > MAX_DEPTH
        ):
            raise ValueError(f"{RECURSIVE}: node {number} does not have its children")
        for ref in refs:
            child = tuple(ref) if isinstance(ref, list) and len(ref) == 2 else None
            if child not in wanted or (child[0] == "node" and child[1] <= number):
                raise ValueError(f"{RECURSIVE}: node {number} has the child {ref!r}")
            wanted.discard(child)
            if child[0] == "node":
                depths[child[1]] = depths[number] + 1
    if wanted:
        raise ValueError(f"{RECURSIVE}: {len(wanted)} nodes or leaves have no parent")


def assemble(
    metadata: Mapping[str, Any], arrays: Mapping[str, Any], columns: Sequence[Sequence[Any]], num_rows: int
) -> list[Any]:
    """Rows of a checked tree, from its arrays and the rows of its leaves.

    Raises:
        ValueError: an array does not fit.
    """
    nodes = metadata["nodes"]

    def flags(name: str) -> list[bool]:
        array = arrays[name]
        if array.dtype.kind != "b" or array.shape != (num_rows,):
            raise ValueError(f"{RECURSIVE}: {name}: {array.dtype} of {array.shape}")
        found: list[bool] = array.tolist()
        return found

    def rows_of(kind: str, number: int) -> tuple[list[Any], list[bool]]:
        missing = flags(f"{kind}.{number}.missing")
        if kind == "leaf":
            return list(columns[number]), missing
        node = nodes[number]
        children = [rows_of(*ref) for ref in node["child_refs"]]
        is_there = flags(f"node.{number}.row_mask")
        if node["node_type"] == "dict":
            return [
                {
                    name: values[row]
                    for name, (values, absent) in zip(node["children"], children, strict=True)
                    if not absent[row]
                }
                if is_there[row]
                else None
                for row in range(num_rows)
            ], missing
        lengths = arrays[f"node.{number}.lengths"]
        if lengths.dtype.kind != "i" or lengths.shape != (num_rows,) or (lengths > len(children)).any():
            raise ValueError(f"{RECURSIVE}: node {number}: a list is longer than its children")
        return [
            [values[row] for values, _ in children[: max(0, length)]] if is_there[row] else None
            for row, length in enumerate(lengths.tolist())
        ], missing

    return rows_of("node", 0)[0]
