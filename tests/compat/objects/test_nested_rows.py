# SPDX-License-Identifier: Apache-2.0
"""The structure of nested rows: leaves and nodes by path, and a tree that someone else wrote."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mooncake.compat.objects.nested_rows import (
    MAX_DEPTH,
    MAX_LEAVES,
    MISSING,
    NestedLeaf,
    NestedNode,
    child_path,
    infer_structure,
    stored_nodes,
)
from mooncake.compat.objects.transfer import MooncakeBundleTransfer
from tests.compat.objects.plain_store import PlainStore

RECORDED = Path(__file__).with_name("nested_rows.json")
"""A column that version 0.3.13.post1 of the existing package wrote."""


def structure(values: list[Any], **options: Any) -> tuple[list[NestedLeaf], list[NestedNode]]:
    leaves: list[NestedLeaf] = []
    nodes: list[NestedNode] = []
    infer_structure("c", values, leaves, nodes, **options)
    return leaves, nodes


def test_rows_are_taken_apart() -> None:
    rows: list[Any] = [{"t": torch.arange(2), "l": [{"n": 1}, {"n": "x"}]}, None, {"t": None}, {"l": []}]
    leaves, nodes = structure(rows)
    assert [(node.path, node.node_type, node.children) for node in nodes] == [
        ("c", "dict", ["t", "l"]),
        ("c.l", "list", [0, 1]),
        ("c.l[0]", "dict", ["n"]),
        ("c.l[1]", "dict", ["n"]),
    ]
    assert nodes[0].row_mask == [True, False, True, True]
    assert nodes[1].lengths == [2, 0, 0, 0]
    assert nodes[1].row_mask == [True, False, False, True]
    assert nodes[1].missing == [False, False, True, False]
    assert [(leaf.path, leaf.decision.codec) for leaf in leaves] == [
        ("c.t", "ragged_tensor"),
        ("c.l[0].n", "ndarray"),
        ("c.l[1].n", "utf8_ragged"),
    ]
    assert leaves[0].values[1:] == [None, None, MISSING]


def test_plain_values_stay_one_leaf_where_asked() -> None:
    rows: list[Any] = [{"t": torch.arange(2), "info": {"a": 1}}, {"info": {"b": [{}]}}]
    leaves, nodes = structure(rows)
    assert [leaf.path for leaf in leaves] == ["c.t", "c.info.a"]
    assert [node.path for node in nodes] == ["c", "c.info", "c.info.b", "c.info.b[0]"]
    assert [leaf.path for leaf in structure(rows, whole_if_plain=True)[0]] == ["c.t", "c.info"]


def test_no_two_places_have_one_path() -> None:
    keys = ["a", "a.b", "a\\", "a\\.b", "[0]", "a[0]", "", "."]
    names: list[str | int] = [*keys, 0, 1]
    paths = {child_path(child_path("c", a), b) for a in keys for b in names}
    assert len(paths) == len(keys) * (len(keys) + 2)


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
def test_depth_is_bounded(levels: int) -> None:
    value: Any = b"x"
    for _ in range(levels):
        value = {"x": value}
    if levels > MAX_DEPTH:
        with pytest.raises(ValueError, match=f"at most {MAX_DEPTH} levels"):
            structure([value])
    else:
        assert len(structure([value])[1]) == levels


def test_leaves_are_bounded() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_LEAVES} leaves"):
        structure([{str(key): key for key in range(MAX_LEAVES + 1)}])


def test_a_column_of_the_existing_package_is_read() -> None:
    recorded = json.loads(RECORDED.read_text())
    store = PlainStore()
    store.objects = {key: base64.b64decode(value) for key, value in recorded["objects"].items()}
    transfer = MooncakeBundleTransfer(store, key_prefix="rl")
    whole = transfer.get_dataproto(recorded["handle"])["non_tensor_batch"]["c"].tolist()
    assert [item["x"].tolist() for item in whole[0].pop("l")] == [[0, 1], [0]]
    assert whole == [{"a.b": b"1"}, None, {"a.b": None}, {"l": [{"x": None}]}]
    rows = transfer.get_dataproto(recorded["handle"], rows=[3, 1])["non_tensor_batch"]["c"].tolist()
    assert rows == [{"l": [{"x": None}]}, None]


def test_our_description_names_what_the_existing_package_names() -> None:
    column = json.loads(RECORDED.read_text())["handle"]["encoded_non_tensor"]["c"]
    rows = np.empty(4, dtype=object)
    rows[:] = [{"a.b": b"1", "l": [{"x": np.arange(2)}, {"x": np.arange(1)}]}, None, {"a.b": None}, None]
    rows[3] = {"l": [{"x": None}]}
    transfer = MooncakeBundleTransfer(PlainStore(), key_prefix="rl")
    ref = transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"c": rows}})
    ours = ref.encoded_non_tensor["c"]
    assert ours["payload_members"] == column["payload_members"]
    assert ours["metadata"]["nodes"] == column["metadata"]["nodes"]
    for leaf, theirs in zip(ours["metadata"]["leaves"], column["metadata"]["leaves"], strict=True):
        assert leaf["metadata"].items() <= theirs["metadata"].items()
        assert leaf | {"metadata": 0} == theirs | {"metadata": 0}


def tree() -> dict[str, Any]:
    arrays = {"missing_payload": "m", "row_mask_payload": "r"}
    return {
        "root_path": "c",
        "nodes": [
            {"path": "c", "node_type": "dict", "children": ["a", "b"], **arrays},
            {"path": "c.b", "node_type": "list", "children": [0], "lengths_payload": "l", **arrays},
        ],
        "leaves": [{"path": "c.a"}, {"path": "c.b[0]"}],
    }


def test_nodes_find_their_children_by_path() -> None:
    root, child = stored_nodes(tree())
    assert root.children == [("a", "leaf", 0), ("b", "node", 1)]
    assert child.children == [(0, "leaf", 1)]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(nodes=[]),
        lambda t: t.update(leaves=None),
        lambda t: t.update(root_path="d"),
        lambda t: t["leaves"].pop(),
        lambda t: t["leaves"].append({"path": "c.x"}),
        lambda t: t["leaves"].append({"path": "c.a"}),
        lambda t: t["leaves"].append(None),
        lambda t: t["leaves"][0].update(path="c.b[1]"),
        lambda t: t["nodes"].reverse(),
        lambda t: t["nodes"][0]["children"].append("a"),
        lambda t: t["nodes"][0].update(children=["b", 0]),
        lambda t: t["nodes"][0].update(children=None),
        lambda t: t["nodes"][0].update(node_type="set"),
        lambda t: t["nodes"][0].pop("row_mask_payload"),
        lambda t: t["nodes"][1].pop("lengths_payload"),
        lambda t: t["nodes"][1].update(children=[1 << 40]),
        lambda t: t["nodes"][1].update(path="c"),
    ],
)
def test_what_is_no_tree_is_refused(change: Any) -> None:
    damaged = tree()
    change(damaged)
    with pytest.raises(ValueError, match="structured_recursive"):
        stored_nodes(damaged)


def test_a_stored_tree_that_is_too_deep_is_refused() -> None:
    """It is read with a bounded stack: the loop ends before the recursion begins."""
    paths = ["c" + ".x" * level for level in range(MAX_DEPTH + 3)]
    arrays = {"missing_payload": "m", "row_mask_payload": "r", "node_type": "dict", "children": ["x"]}
    nodes = [{"path": path, **arrays} for path in paths[:-1]]
    with pytest.raises(ValueError, match="does not have its children"):
        stored_nodes({"root_path": "c", "nodes": nodes, "leaves": [{"path": paths[-1]}]})
