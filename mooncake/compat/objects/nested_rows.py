# SPDX-License-Identifier: Apache-2.0
"""The structure of columns whose rows are nested dicts and lists: leaf columns, and a table of nodes.

Rows of values that msgpack does not have (tensors, arrays, bytes) are taken apart into leaves, each a column
that one codec encodes, with a row for each row of the whole column; so the same rows are selected in every
leaf. A node is a dict or a list with the keys or positions of its children. Leaves and nodes are named by
their path, in which keys are escaped, so that every path has one meaning; a node finds its children by it.
What a row does not have is marked as missing, which differs from None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake.compat.objects.row_codecs import (
    DEFAULT,
    CodecDecision,
    EncodedRows,
    Payload,
    choose_leaf_codec,
    encode_rows,
)

RECURSIVE = "structured_recursive"
"""Codec of such columns."""
MAX_DEPTH = 32
MAX_LEAVES = 4096


class Missing:
    """Value of a row that does not have this key or position."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing()


@dataclass(frozen=True, slots=True)
class NestedLeaf:
    """A column that one codec encodes."""

    path: str
    values: list[Any]
    decision: CodecDecision


@dataclass(frozen=True, slots=True)
class NestedNode:
    """Dicts or lists of a column.

    ``row_mask`` says which rows have one, and ``missing`` which do not even have None. ``lengths`` are those
    of lists; a dict has the keys for which its children are not missing.
    """

    path: str
    node_type: str
    children: list[Any]
    row_mask: list[bool]
    missing: list[bool]
    lengths: list[int] | None = None


def escape_key(key: str) -> str:
    """The key as a part of a path, in which a dot begins a key and a bracket a position."""
    return key.replace("\\", "\\\\").replace(".", "\\.").replace("[", "\\[")


def child_path(path: str, name: str | int) -> str:
    return f"{path}[{name}]" if isinstance(name, int) else f"{path}.{escape_key(name)}"


def infer_structure(
    path: str,
    values: list[Any],
    leaves: list[NestedLeaf],
    nodes: list[NestedNode],
    *,
    whole_if_plain: bool = False,
    depth: int = 0,
) -> None:
    """Take a column apart: append its leaves and nodes, each node before its children.

    Args:
        whole_if_plain: dicts and lists that msgpack returns unchanged stay one leaf. Without it only lists
            of numbers, texts and the like do.

    Raises:
        ValueError: it is too deep, or has too many leaves.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{path} exceeds the max depth: a column has at most {MAX_DEPTH} levels")
    decision = choose_leaf_codec([None if value is MISSING else value for value in values])
    there = [value for value in values if value is not None and value is not MISSING]
    node_type = _node_type(there, decision, whole_if_plain)
    if node_type is None:
        if len(leaves) >= MAX_LEAVES:
            raise ValueError(f"{path}: a column has at most {MAX_LEAVES} leaves")
        leaves.append(NestedLeaf(path, values, decision))
        return
    names: list[Any]
    held = [None if value is MISSING else value for value in values]
    if node_type == "list":
        names = list(range(max(map(len, there))))
        lengths = [0 if value is None else len(value) for value in held]
    else:
        names = list(dict.fromkeys(key for value in there for key in value))
    nodes.append(
        NestedNode(
            path,
            node_type,
            names,
            row_mask=[value is not None for value in held],
            missing=[value is MISSING for value in values],
            lengths=lengths if node_type == "list" else None,
        )
    )
    for name in names:
        child = [None if value is None else _child(value, name) for value in held]
        infer_structure(
            child_path(path, name), child, leaves, nodes, whole_if_plain=whole_if_plain, depth=depth + 1
        )


def _node_type(there: Sequence[Any], decision: CodecDecision, whole_if_plain: bool) -> str | None:
    """Whether the values are all dicts or all lists that are taken apart; None for a leaf."""
    if not there or (decision.accepted and (whole_if_plain or decision.codec != DEFAULT)):
        return None
    if all(isinstance(value, dict) for value in there):
        return "dict" if all(isinstance(key, str) for value in there for key in value) else None
    if not all(isinstance(value, list) for value in there):
        return None
    is_nested = any(isinstance(item, dict | list) for value in there for item in value)
    return "list" if is_nested or not decision.accepted else None


def _child(value: Any, name: Any) -> Any:
    if isinstance(value, list):
        return value[name] if name < len(value) else MISSING
    return value.get(name, MISSING)


def encode_nested(path: str, values: Sequence[Any]) -> EncodedRows:
    """Encode a column whose rows are dicts or lists.

    Raises:
        ValueError: a value that no codec stores, too many of them or too deep.
    """
    leaves: list[NestedLeaf] = []
    nodes: list[NestedNode] = []
    try:
        infer_structure(path, list(values), leaves, nodes, whole_if_plain=True)
    except ValueError as error:
        raise ValueError(f"unsupported structured non-tensor field {error}") from None
    for leaf in leaves:
        if not leaf.decision.can_store or not nodes:
            reason = f"unable to infer a safe codec: {leaf.decision.reason}"
            raise ValueError(f"unsupported structured non-tensor field {leaf.path}: {reason}")
    payload: Payload = {}
    node_documents = [_store_node(number, node, payload) for number, node in enumerate(nodes)]
    metadata = {
        "structure_version": 1,
        "root_path": path,
        "nodes": node_documents,
        "leaves": [_store_leaf(number, leaf, payload) for number, leaf in enumerate(leaves)],
    }
    return EncodedRows(RECURSIVE, len(values), payload, metadata)


def _store_node(number: int, node: NestedNode, payload: Payload) -> dict[str, Any]:
    """Add the arrays of a node to ``payload``; returns its description."""
    arrays: Payload = {
        "missing": np.array(node.missing, dtype=np.bool_),
        "row_mask": np.array(node.row_mask, dtype=np.bool_),
    }
    if node.lengths is not None:
        arrays["lengths"] = np.array(node.lengths, dtype=np.int64)
    payload |= {f"node.{number}.{kind}": array for kind, array in arrays.items()}
    document = {"id": number, "path": node.path, "node_type": node.node_type, "children": node.children}
    return document | {f"{kind}_payload": f"node.{number}.{kind}" for kind in arrays}


def _store_leaf(number: int, leaf: NestedLeaf, payload: Payload) -> dict[str, Any]:
    missing = [value is MISSING for value in leaf.values]
    values = [None if value is MISSING else value for value in leaf.values]
    encoded = encode_rows(leaf.decision.codec, values)
    parts = encoded.payload | {"missing": np.array(missing, dtype=np.bool_)}
    names = {part: f"leaf.{number}.{part}" for part in parts}
    payload |= {names[part]: value for part, value in parts.items()}
    return {
        "id": number,
        "path": leaf.path,
        "codec": encoded.codec,
        "rows": encoded.num_rows,
        "metadata": encoded.metadata,
        "payload_members": names,
    }


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A node as it was stored: names of its arrays, and its children by their place in nodes and leaves."""

    node_type: str
    arrays: Mapping[str, str]
    children: list[tuple[Any, str, int]]


def stored_nodes(metadata: Mapping[str, Any]) -> list[StoredNode]:
    """Nodes of a column, whose root is the first; every node and leaf is the child of exactly one node.

    Raises:
        ValueError: they are not one tree.
    """
    nodes, leaves = metadata.get("nodes"), metadata.get("leaves")
    if not isinstance(nodes, list) or not isinstance(leaves, list) or not nodes:
        raise ValueError(f"{RECURSIVE}: no nodes and leaves")
    places: dict[str, tuple[str, int]] = {}
    for kind, documents in (("node", nodes), ("leaf", leaves)):
        for number, document in enumerate(documents):
            path = document.get("path") if isinstance(document, Mapping) else None
            if not isinstance(path, str) or path in places:
                raise ValueError(f"{RECURSIVE}: {kind} {number} has no path of its own")
            places[path] = (kind, number)
    if nodes[0]["path"] != metadata.get("root_path"):
        raise ValueError(f"{RECURSIVE}: the first node is not at the root")
    del places[nodes[0]["path"]]
    depths = {0: 0}
    found = []
    for number, node in enumerate(nodes):
        names, node_type = node.get("children"), node.get("node_type")
        kinds = ("missing", "row_mask", "lengths") if node_type == "list" else ("missing", "row_mask")
        arrays = {kind: node.get(f"{kind}_payload") for kind in kinds}
        if node_type not in ("dict", "list") or not all(isinstance(name, str) for name in arrays.values()):
            raise ValueError(f"{RECURSIVE}: node {number} is no dict or list with its arrays")
        is_list = isinstance(names, list) and depths.get(number, MAX_DEPTH + 1) <= MAX_DEPTH
        wanted = int if node_type == "list" else str
        if not is_list or not all(type(name) is wanted for name in names):
            raise ValueError(f"{RECURSIVE}: node {number} does not have its children")
        if node_type == "list" and names != list(range(len(names))):
            raise ValueError(f"{RECURSIVE}: node {number} does not have the positions of a list")
        children = []
        for name in names:
            kind, place = places.pop(child_path(node["path"], name), ("", -1))
            if not kind or (kind == "node" and place <= number):
                raise ValueError(f"{RECURSIVE}: node {number} does not have its child {name!r}")
            if kind == "node":
                depths[place] = depths[number] + 1
            children.append((name, kind, place))
        found.append(StoredNode(node_type, arrays, children))
    if places:
        raise ValueError(f"{RECURSIVE}: {len(places)} nodes or leaves have no parent")
    return found


def assemble(
    nodes: Sequence[StoredNode],
    arrays: Mapping[str, Any],
    leaves: Sequence[tuple[Sequence[Any], Any]],
    num_rows: int,
) -> list[Any]:
    """Rows of a column, from the arrays of its nodes and the (rows, missing) of its leaves.

    Raises:
        ValueError: an array does not fit.
    """

    def flags(name: str, array: Any) -> list[bool]:
        if array.dtype.kind != "b" or array.shape != (num_rows,):
            raise ValueError(f"{RECURSIVE}: {name}: {array.dtype} of {array.shape}")
        found: list[bool] = array.tolist()
        return found

    def rows_of(kind: str, number: int) -> tuple[list[Any], list[bool]]:
        if kind == "leaf":
            values, missing = leaves[number]
            return list(values), flags(f"leaf {number}", missing)
        node = nodes[number]
        children = [rows_of(kind, place) for _, kind, place in node.children]
        names = [name for name, _, _ in node.children]
        held = {kind: arrays[name] for kind, name in node.arrays.items()}
        is_there, missing = (flags(f"node {number}", held[kind]) for kind in ("row_mask", "missing"))
        if node.node_type == "dict":
            return [
                {
                    name: values[row]
                    for name, (values, absent) in zip(names, children, strict=True)
                    if not absent[row]
                }
                if is_there[row]
                else None
                for row in range(num_rows)
            ], missing
        lengths = held["lengths"]
        if lengths.dtype.kind != "i" or lengths.shape != (num_rows,) or (lengths > len(children)).any():
            raise ValueError(f"{RECURSIVE}: node {number}: a list is longer than its children")
        return [
            [values[row] for values, _ in children[: max(0, length)]] if is_there[row] else None
            for row, length in enumerate(lengths.tolist())
        ], missing

    return rows_of("node", 0)[0]
