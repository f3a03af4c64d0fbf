# SPDX-License-Identifier: Apache-2.0
"""Columns of Python objects: they come back unchanged, whole and in rows, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mooncake.compat.objects import row_codecs
from mooncake.compat.objects.dataproto import object_array
from mooncake.compat.objects.row_codecs import check_index, check_offsets, choose_leaf_codec
from mooncake.compat.objects.transfer import FieldSchema, MooncakeBundleTransfer
from tests.compat.objects.plain_store import PlainStore

IMAGE = Image.frombytes("RGB", (2, 3), bytes(range(18)))
COLUMNS: dict[str, tuple[str, list[Any]]] = {
    "text": ("utf8_ragged", ["", None, "三", "abc"]),
    "bytes": ("bytes_ragged", [b"a", None, b"", b"bcd"]),
    "json": ("msgpack_ragged", [{"a": [1, {"b": None}]}, None, {}, {"c": 1.5}]),
    "mixed": ("msgpack_ragged", ["a", 1, None, [True]]),
    "none": ("msgpack_ragged", [None, None, None, None]),
    "large": ("msgpack_ragged", [1 << 63, 1, None, 2]),
    "empty": ("msgpack_ragged", [[], [], None, []]),
    "flags": ("ndarray", [True, None, False, True]),
    "numbers": ("ndarray", [1, None, -3, 4]),
    "floats": ("ndarray", [1.5, None, float("inf"), 2.0]),
    "lists": ("typed_ragged", [[1, 2], None, [], [3]]),
    "matrices": ("typed_ragged", [[[1, 2], [3, 4]], None, [[5, 6]], [[7, 8]]]),
    "mixed_numbers": ("msgpack_ragged", [1, 2.5, None, (1 << 53) + 1]),
    "mixed_lists": ("msgpack_ragged", [[(1 << 53) + 1], [0.5], None, [1]]),
    "uneven": ("msgpack_ragged", [[[1], [2, 3]], None, [], [[]]]),
    "arrays": ("typed_ragged", [np.arange(3), None, np.zeros((2, 2), np.int64), np.array(7)]),
    "tensors": (
        "ragged_tensor",
        [torch.arange(2), None, torch.zeros(2, 3, dtype=torch.int64), torch.tensor(7)],
    ),
    "images": ("media_bytes", [IMAGE, None, IMAGE.convert("L"), IMAGE.convert("1")]),
    "image_lists": ("media_list_ragged", [[IMAGE, b"png"], None, [], [b"", IMAGE]]),
    "dicts": (
        "structured_recursive",
        [{"t": torch.arange(2), "n": None}, None, {}, {"t": None, "l": [{"b": b"x"}, np.arange(2)]}],
    ),
    "tensor_lists": (
        "structured_recursive",
        [[torch.arange(2), torch.arange(3)], None, [], [torch.ones(1).long()]],
    ),
    "dotted": ("structured_recursive", [{"a.b": b"1", "a": {"b": b"2"}}, {"a[0]": b"3"}, None, {"": b"4"}]),
}


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Image.Image):
        return bool(a.mode == b.mode and a.size == b.size and a.tobytes() == b.tobytes())
    return bool(a == b)


@pytest.fixture
def transfer(plain: PlainStore) -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(plain, default_chunk_bytes=7)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("rows", [None, slice(1, 3), [3, 0, 3], slice(0, 4, 3), [], [-1]])
def test_a_column_comes_back(transfer: MooncakeBundleTransfer, name: str, rows: Any) -> None:
    codec, values = COLUMNS[name]
    ref = transfer.put_dataproto({"batch": {}, "non_tensor_batch": {name: object_array(values)}})
    assert ref.encoded_non_tensor[name]["codec"] == codec
    found = transfer.get_dataproto(ref, rows=rows)["non_tensor_batch"][name]
    assert same(list(found), list(object_array(values)[slice(None) if rows is None else rows]))


@pytest.mark.parametrize(
    "values",
    [
        [object()],
        [{1}],
        [{1: b"x"}],
        [("a",)],
        [1 << 64],
        [np.array(["a"])],
        [{"x": object()}],
        [torch.zeros(1), torch.zeros(1, dtype=torch.int8)],
        [torch.zeros(1, dtype=torch.bfloat16)],
        [b"x", 1],
        [np.int64((1 << 53) + 1), 0.5],
        [[np.int64((1 << 53) + 1)], [0.5]],
        [np.array([(1 << 53) + 1]), np.array([0.5])],
        [np.array([(1 << 63) + 1], np.uint64), np.array([-1])],
    ],
)
def test_a_column_that_would_change_is_refused(plain: PlainStore, values: list[Any]) -> None:
    transfer = MooncakeBundleTransfer(plain)
    with pytest.raises((TypeError, ValueError)):
        transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"x": object_array(values)}})
    assert plain.objects == {}


def test_a_tree_that_is_too_deep_is_refused(transfer: MooncakeBundleTransfer) -> None:
    value: Any = b"x"
    for _ in range(100):
        value = {"x": value}
    with pytest.raises(ValueError, match="levels"):
        transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"x": object_array([value])}})


@pytest.mark.parametrize(
    ("schema", "values", "reason"),
    [
        (FieldSchema("typed_ragged", metadata={"dtype": "int32"}), [[1 << 40]], "do not fit"),
        (FieldSchema("typed_ragged", metadata={"dtype": "int32"}), [[1.5]], "do not fit"),
        (FieldSchema("ndarray", metadata={"dtype": "uint8"}), [-1], "do not fit"),
        (FieldSchema("ndarray"), ["a"], "no numbers"),
        (FieldSchema("ndarray"), [(1 << 53) + 1, 0.5], "whole numbers do not fit"),
        (FieldSchema("ndarray", metadata={"dtype": "float32"}), [(1 << 24) + 1], "do not fit"),
        (FieldSchema("ndarray", metadata={"dtype": "float16"}), [1 << 20], "do not fit"),
        (FieldSchema("ndarray", metadata={"dtype": "int64"}), [2.0**63], "do not fit"),
        (FieldSchema("typed_ragged"), [[(1 << 53) + 1, 0.5]], "whole numbers do not fit"),
        (FieldSchema("typed_ragged"), [[(1 << 53) + 1], [0.5]], "do not fit"),
        (FieldSchema("typed_ragged", metadata={"dtype": "float64"}), [np.array([1j])], "do not fit"),
        (FieldSchema("msgpack_ragged"), [{"a": (1, 2)}], "cannot encode"),
        (FieldSchema("pickle"), [1], "unsupported schema codec"),
        (FieldSchema("ragged_tensor"), [1], "torch.Tensor"),
        (FieldSchema("utf8_ragged", nullable=False), ["a", None], "not nullable"),
    ],
)
def test_values_that_do_not_fit_their_schema(
    transfer: MooncakeBundleTransfer, schema: FieldSchema, values: list[Any], reason: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"failed to encode.*'x'.*{reason}"):
        transfer.put({"x": values}, type="dict", field_schemas={"x": schema})


def test_numbers_that_survive_have_one_dtype(transfer: MooncakeBundleTransfer) -> None:
    ref = transfer.put({"x": [np.int64(3), 0.5], "y": [[1 << 53], [np.int8(5), 1]]}, type="dict")
    assert [ref.encoded_non_tensor[name]["codec"] for name in "xy"] == ["ndarray", "typed_ragged"]
    assert transfer.get(ref, type="dict") == {"x": [3, 0.5], "y": [[1 << 53], [5, 1]]}
    schema = FieldSchema("typed_ragged", metadata={"dtype": "float32"})
    ref = transfer.put({"x": [[0.1], [1 << 24]]}, type="dict", field_schemas={"x": schema})
    assert transfer.get(ref, type="dict")["x"] == [[np.float32(0.1)], [1 << 24]]


def test_integers_of_numpy_stay_integers(transfer: MooncakeBundleTransfer) -> None:
    ref = transfer.put({"x": [[np.int64(1 << 62)], [2], []]}, type="dict")
    assert transfer.get(ref, type="dict")["x"] == [[1 << 62], [2], []]


def test_a_codec_is_never_guessed_from_nothing() -> None:
    nothing = choose_leaf_codec([None])
    assert (nothing.codec, nothing.accepted, nothing.can_store) == ("msgpack_ragged", False, True)
    assert choose_leaf_codec([True, 1]).codec == "msgpack_ragged"
    assert choose_leaf_codec([1, 2.0, 3]).codec == "ndarray", (
        "as the existing package, where a float is exact"
    )
    assert choose_leaf_codec([(1 << 53) + 1, 2.0]).codec == "msgpack_ragged"
    assert not choose_leaf_codec([object()]).can_store
    assert "mixed tensor dtype" in choose_leaf_codec([torch.zeros(1), torch.zeros(1).long()]).reason


GOOD = {
    "offsets": np.array([0, 2, 2, 8]),
    "shapes": np.array([[2, 0], [0, 0], [2, 3]]),
    "ndims": np.array([1, 0, 2], dtype=np.int16),
    "nulls": np.array([False, True, False]),
}


def test_arrays_of_a_good_column() -> None:
    check_index("typed_ragged", GOOD, 3, 8)


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([0, 2, 2, 9])},
        {"offsets": np.array([-1, 2, 2, 8])},
        {"offsets": np.array([0, 3, 2, 8])},
        {"offsets": np.array([0, 2, 8])},
        {"offsets": np.array([0.0, 2, 2, 8])},
        {"shapes": np.array([[2, 0], [0, 0], [2, 4]])},
        {"shapes": np.array([[2, 0], [0, 0], [-2, -3]])},
        {"shapes": np.array([[2, 0], [0, 0], [1 << 62, 1 << 62]])},
        {"shapes": np.array([2, 0, 6])},
        {"shapes": np.ones((3, 1000), np.int64), "ndims": np.array([1000] * 3), "nulls": np.ones(3, bool)},
        {"ndims": np.array([1, 0, 3], dtype=np.int16)},
        {"ndims": np.array([1, 0, -1], dtype=np.int16)},
        {"nulls": np.array([False, True])},
        {"nulls": np.array([0, 1, 0])},
    ],
)
def test_arrays_that_point_elsewhere_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="typed_ragged"):
        check_index("typed_ragged", GOOD | change, 3, 8)


@pytest.mark.parametrize(
    "offsets",
    [
        np.array([0, 100, -100, 8], dtype=np.int8),
        np.array([0, (1 << 63) - 1, -2, 8]),
        np.array([0, 9, 3, 8], dtype=np.uint8),
    ],
)
def test_offsets_whose_differences_wrap_around_are_refused(offsets: Any) -> None:
    with pytest.raises(ValueError, match="offsets"):
        check_offsets("utf8_ragged", offsets, 3, 8)
    with pytest.raises(ValueError, match="offsets"):
        check_offsets("utf8_ragged", np.empty(0, np.int64), -1, 8)


def test_narrow_offsets_are_multiplied_as_wide_ones(
    transfer: MooncakeBundleTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [list(range(60)), [1 << 40], None, [7, 8]]
    with monkeypatch.context() as patched:
        wide = row_codecs.offsets_of
        patched.setattr(row_codecs, "offsets_of", lambda sizes: wide(sizes).astype(np.int8))
        ref = transfer.put({"x": values}, type="dict")
    assert transfer.get(ref, type="dict")["x"] == values
    assert transfer.get(ref, type="dict", rows=[3, 1])["x"] == [values[3], values[1]]


@pytest.mark.parametrize(
    ("codec", "row"),
    [
        ("json_ragged", b"[" * 100_000),
        ("json_ragged", b"{"),
        ("msgpack_ragged", b"\x91" * 100_000),
        ("msgpack_ragged", b"\xc1"),
        ("utf8_ragged", b"\xff"),
    ],
)
def test_a_row_that_cannot_be_decoded_is_named(codec: str, row: bytes) -> None:
    index = {"offsets": np.array([0, len(row)]), "nulls": np.array([False])}
    with pytest.raises(ValueError, match=f"{codec}: a row cannot be decoded"):
        row_codecs.decode_ragged(codec, index, np.frombuffer(row, np.uint8))


def test_an_image_without_pixels_takes_no_memory() -> None:
    described = {"kind": "pil_raw", "mode": "L", "size": [0, (1 << 31) - 1]}
    with pytest.raises(ValueError, match="no image"):
        row_codecs.decode_media([b""], [described])
    (small,) = row_codecs.decode_media([b""], [described | {"size": [0, 5]}])
    assert small.size == (0, 5)


@pytest.mark.parametrize(
    "change",
    [{"keys": [["a"]]}, {"keys": "a"}, {"key_codecs": {"a": None}}, {"key_codecs": {}}],
)
def test_dicts_of_tensors_with_a_damaged_description(
    transfer: MooncakeBundleTransfer, change: dict[str, Any]
) -> None:
    schema = {"x": FieldSchema("ragged_tensor_dict")}
    ref = transfer.put({"x": [{"a": torch.arange(2)}]}, type="dict", field_schemas=schema)
    ref.encoded_non_tensor["x"]["metadata"] |= change
    with pytest.raises(ValueError, match="ragged_tensor_dict"):
        transfer.get(ref, type="dict")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dicts", lambda m: m["nodes"][0].__setitem__("row_mask_payload", "node.1.lengths")),
        ("dicts", lambda m: m["nodes"][0].__setitem__("row_mask_payload", "leaf.0.data")),
        ("dicts", lambda m: m["nodes"][1].__setitem__("lengths_payload", "none")),
        ("dicts", lambda m: m["leaves"][0]["payload_members"].pop("missing")),
        ("dicts", lambda m: m["leaves"][0].__setitem__("metadata", None)),
        ("dicts", lambda m: m["leaves"][0]["payload_members"].__setitem__("nulls", 1)),
        ("dicts", lambda m: m["nodes"][0]["children"].pop()),
        ("dicts", lambda m: m["leaves"].append({"codec": "utf8_ragged", "metadata": {}})),
        ("dicts", lambda m: m["leaves"][0].__setitem__("codec", "pickle")),
        ("dicts", lambda m: m.__setitem__("nodes", [])),
        ("images", lambda m: m["media_encodings"][0].__setitem__("size", [1 << 30, 1 << 30])),
        ("images", lambda m: m["media_encodings"][0].__setitem__("mode", "P;4")),
        ("images", lambda m: m["media_encodings"].pop()),
        ("tensors", lambda m: m.__setitem__("dtype", "torch.float64")),
    ],
)
def test_a_damaged_description_is_refused(transfer: MooncakeBundleTransfer, name: str, change: Any) -> None:
    values = object_array(COLUMNS[name][1])
    ref = transfer.put_dataproto({"batch": {}, "non_tensor_batch": {name: values}})
    change(ref.encoded_non_tensor[name]["metadata"])
    with pytest.raises(ValueError, match=r"."):
        transfer.get_dataproto(ref)


def test_a_leaf_cannot_name_the_members_of_another(transfer: MooncakeBundleTransfer) -> None:
    values = object_array(COLUMNS["dotted"][1])
    ref = transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"x": values}})
    leaves = ref.encoded_non_tensor["x"]["metadata"]["leaves"]
    leaves[1]["payload_members"] = leaves[0]["payload_members"]
    with pytest.raises(ValueError, match="named twice"):
        transfer.get_dataproto(ref)


FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "values",
    [
        [FLOATS, FLOATS + 1],
        (np.float16(1), np.float64(2)),
        [np.complex64(1j), FLOATS[0, 0]],
        [1.5, float("inf")],
        [[1.5, 2.5], [np.float32(3), 4.5]],
        [FLOATS.tolist(), FLOATS],
        FLOATS,
    ],
)
def test_floats_are_joined_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch, values: Any) -> None:
    def never(before: Any, after: Any) -> bool:
        raise AssertionError("there are no whole numbers")

    monkeypatch.setattr(row_codecs, "_are_whole_numbers_kept", never)
    found = row_codecs._joined_array(values)
    assert found.dtype == np.asarray(values).dtype and np.array_equal(found, np.asarray(values))


@pytest.mark.parametrize(
    "values",
    [
        [np.array([0.5]), np.array([(1 << 53) + 1])],
        [[0.5], [(1 << 53) + 1]],
        [np.float32(0.5), np.int64((1 << 53) + 1)],
        [[0.5, 1.5], ((1 << 53) + 1, 0.5)],
        [[FLOATS[0, :2]], [[(1 << 53) + 1, 1.5]]],
    ],
)
def test_whole_numbers_among_floats_are_found(values: Any) -> None:
    with pytest.raises(ValueError, match="whole numbers do not fit float64"):
        row_codecs._joined_array(values)
