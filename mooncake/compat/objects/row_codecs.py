# SPDX-License-Identifier: Apache-2.0
"""Codecs of columns of Python objects: the bytes of all rows, and arrays that say where each row lies.

Owns the codecs and their choice for a column. What is decoded may come from anyone: offsets must ascend
within the data and shapes must fit their rows, or the column is refused. No codec pickles. An image of
Pillow is stored as its pixels, and made again from them: no decoder of image files runs on what was read
from the store. Pillow is imported only when an image is read.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np

from mooncake.compat.objects.members import MAX_ARRAY_DIMS, ScatteredBuffers, is_tensor
from mooncake.compat.store.tensor_memory import load_torch

# Media --------------------------------------------------------------------------------------------------

PIXEL_BYTES = {"L": 1, "P": 1, "LA": 2, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBA": 4, "CMYK": 4} | {
    "RGBX": 4,
    "I": 4,
    "F": 4,
    "I;16": 2,
    "PA": 2,
    "RGBa": 4,
    "La": 2,
}
"""Modes of Pillow whose pixels are stored, with the bytes of one; mode "1" has eight in a byte."""


MAX_EMPTY_PIXELS = 1 << 16
"""Longest side of an image without pixels: Pillow allocates memory for each of its rows."""


def is_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_media(value: Any) -> bool:
    return isinstance(value, bytes | bytearray | memoryview) or is_image(value)


def encode_media(items: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Bytes of each item (None for None), and the metadata that describes them.

    Raises:
        TypeError, ValueError: an item that is no media.
    """
    found: list[Any] = []
    encodings: list[dict[str, Any]] = []
    for item in items:
        if item is None:
            found.append(None)
            encodings.append({"kind": "null"})
        elif is_image(item):
            found.append(item.tobytes())
            encodings.append(_describe_image(item))
        elif is_media(item):
            found.append(bytes(item))
            encodings.append({"kind": "bytes"})
        else:
            raise TypeError(f"media codec: {type(item).__name__} is neither bytes nor an image")
    metadata: dict[str, Any] = {"encode_source": "raw_pixels_from_object", "media_encodings": encodings}
    if any(encoding["kind"] == "pil_raw" for encoding in encodings):
        metadata["media_types"] = ["image/raw"]
    return found, metadata


def decode_media(items: Sequence[bytes | None], encodings: Any) -> list[Any]:
    """Items from their bytes.

    Raises:
        ValueError: a description does not fit its bytes.
    """
    if encodings is None:
        return list(items)
    if not isinstance(encodings, list) or len(encodings) != len(items):
        raise ValueError(f"media codec: no descriptions of {len(items)} items")
    return [
        None if item is None else _decode_media(item, encoding)
        for item, encoding in zip(items, encodings, strict=True)
    ]


def _describe_image(image: Any) -> dict[str, Any]:
    if image.mode != "1" and image.mode not in PIXEL_BYTES:
        raise ValueError(f"media codec: an image of mode {image.mode} cannot be stored; convert it")
    found = {"kind": "pil_raw", "mode": image.mode, "size": list(image.size), "format": image.format}
    if image.mode in ("P", "PA"):
        found["palette"] = image.getpalette()
    return found


def _decode_media(item: bytes, encoding: Any) -> Any:
    kind = encoding.get("kind") if isinstance(encoding, Mapping) else None
    if kind == "bytes":
        return item
    if kind != "pil_raw":
        raise ValueError(f"media codec: unknown kind {kind!r}")
    mode, size, palette = encoding.get("mode"), encoding.get("size"), encoding.get("palette")
    is_size = (
        isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 <= n < 1 << 31 for n in size)
    )
    if is_size and min(size) == 0:
        is_size = max(size) <= MAX_EMPTY_PIXELS
    if not is_size or not isinstance(mode, str) or (mode != "1" and mode not in PIXEL_BYTES):
        raise ValueError(f"media codec: no image of mode {mode!r} and size {size!r}")
    width, height = size
    wanted = -(-width // 8) * height if mode == "1" else width * height * PIXEL_BYTES[mode]
    if wanted != len(item):
        raise ValueError(f"media codec: {len(item)} bytes are no image of mode {mode} and size {size}")
    image = importlib.import_module("PIL.Image").frombytes(mode, (width, height), item)
    if palette is not None:
        if not isinstance(palette, list) or not all(type(n) is int and 0 <= n < 256 for n in palette):
            raise ValueError("media codec: the palette is no list of bytes")
        image.putpalette(palette)
    image.format = encoding.get("format")
    return image


# Columns ------------------------------------------------------------------------------------------------

Array: TypeAlias = np.ndarray[Any, Any]
Payload: TypeAlias = dict[str, Any]

NUMBERS = "biufc"
"""Kinds of dtypes that the numeric codecs store."""
RAGGED_INDEX = ("offsets", "nulls")
TYPED_INDEX = ("offsets", "shapes", "ndims", "nulls")


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """A column: its members by name, and what decoding needs beside them."""

    codec: str
    num_rows: int
    payload: Payload
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Codec of rows that are each some bytes."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _from_json(data: bytes) -> Any:
    return json.loads(data)


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _to_msgpack(value: Any) -> bytes:
    if not is_plain(value, with_bytes=True):
        raise ValueError(f"msgpack codec cannot encode value of type {type(value).__name__}")
    return msgspec.msgpack.encode(value)


def _to_utf8(value: Any) -> bytes:
    encoded: bytes = value.encode("utf-8")
    return encoded


ROW_BYTES = {
    "utf8_ragged": RowBytes(_to_utf8, lambda data: data.decode("utf-8")),
    "bytes_ragged": RowBytes(bytes, bytes),
    "json_ragged": RowBytes(_to_json, _from_json),
    "msgpack_ragged": RowBytes(_to_msgpack, msgspec.msgpack.decode),
}
TYPED = ("typed_ragged", "ragged_tensor")
MEDIA = ("media_bytes", "media_list_ragged")
TENSOR_DICT = "ragged_tensor_dict"
DEFAULT = "msgpack_ragged"
NO_VALUES = "no values"


def encode_rows(
    codec: str, values: Sequence[Any], dtype: Any = None, keys: Iterable[str] | None = None
) -> EncodedRows:
    """Encode a column with a codec that stores it as a whole.

    Raises:
        AttributeError, TypeError, ValueError: a value does not fit, or there is no such codec.
    """
    if codec in ROW_BYTES:
        return EncodedRows(codec, len(values), _encode_ragged(values, ROW_BYTES[codec].encode))
    if codec == "ndarray":
        return _encode_fixed(values, dtype)
    if codec == "typed_ragged":
        return _encode_typed(codec, [_array_of(value) for value in values], values, dtype)
    if codec == "ragged_tensor":
        return _encode_tensors(values)
    if codec == TENSOR_DICT:
        return _encode_tensor_dicts(values, keys)
    if codec == "media_bytes":
        items, metadata = encode_media(values)
        return EncodedRows(codec, len(values), _encode_ragged(items, bytes), metadata)
    if codec == "media_list_ragged":
        return _encode_media_lists(values)
    raise ValueError(f"unsupported schema codec: {codec!r}")


@dataclass(frozen=True, slots=True)
class CodecDecision:
    """The codec for a column, and whether it returns the values of the column unchanged.

    A column without values decides nothing: it is not ``accepted``, but the codec stores its Nones.
    """

    codec: str
    accepted: bool
    reason: str

    @property
    def can_store(self) -> bool:
        return self.accepted or self.reason == NO_VALUES


def choose_leaf_codec(values: Sequence[Any]) -> CodecDecision:
    """Choose the codec of a column that is stored as a whole, by all its values."""
    there = [value for value in values if value is not None]
    if not there:
        return CodecDecision(DEFAULT, False, NO_VALUES)
    if all(is_tensor(value) for value in there):
        dtypes = sorted({str(value.dtype) for value in there})
        if len(dtypes) > 1:
            return CodecDecision("ragged_tensor", False, f"mixed tensor dtype: {', '.join(dtypes)}")
        return CodecDecision("ragged_tensor", True, "tensors of one dtype")
    if all(isinstance(value, np.ndarray) for value in there):
        kinds = sorted({value.dtype.kind for value in there} - set(NUMBERS))
        reason = f"arrays of kind {', '.join(kinds)}" if kinds else "arrays of numbers"
        return CodecDecision("typed_ragged", not kinds, reason)
    codec = _codec_of(there)
    if codec is None:
        return CodecDecision(DEFAULT, False, "no codec returns the values unchanged")
    return CodecDecision(codec, True, "all values are of its type")


def _codec_of(there: Sequence[Any]) -> str | None:
    if all(isinstance(value, str) for value in there):
        return "utf8_ragged"
    if all(isinstance(value, bytes | bytearray | memoryview) for value in there):
        return "bytes_ragged"
    if all(is_image(value) for value in there):
        return "media_bytes"
    if _are_numbers(there):
        return "ndarray"
    if all(isinstance(value, list | tuple) for value in there):
        return _codec_of_lists(there)
    return DEFAULT if all(is_plain(value) for value in there) else None


def is_plain(value: Any, with_bytes: bool = False, depth: int = 0) -> bool:
    """Whether msgpack returns exactly this value."""
    if depth > 64:
        return False
    if value is None or type(value) in (bool, float, str) or (with_bytes and type(value) is bytes):
        return True
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    if type(value) is list:
        return all(is_plain(item, with_bytes, depth + 1) for item in value)
    if type(value) is not dict:
        return False
    return all(type(key) is str and is_plain(item, with_bytes, depth + 1) for key, item in value.items())


# Decoding: ``index`` are checked arrays of whole or selected rows, ``data`` the bytes of those rows -------


def decode_ragged(codec: str, index: Mapping[str, Array], data: Array) -> list[Any]:
    """Rows of bytes."""
    decode = ROW_BYTES[codec].decode if codec in ROW_BYTES else bytes
    offsets = index["offsets"].tolist()
    held = data.tobytes()
    try:
        return [
            None if is_null else decode(held[offsets[row] : offsets[row + 1]])
            for row, is_null in enumerate(index["nulls"].tolist())
        ]
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"{codec}: a row cannot be decoded: {error}") from error


def decode_fixed(nulls: Array, data: Array) -> list[Any]:
    """Numbers, or arrays of one shape as lists."""
    values = data.tolist()
    return [None if is_null else value for value, is_null in zip(values, nulls.tolist(), strict=True)]


def decode_typed(
    codec: str, metadata: Mapping[str, Any], index: Mapping[str, Array], data: Array
) -> list[Any]:
    """Arrays, lists or tensors of any shape; arrays and tensors are views of ``data``."""
    offsets, shapes, ndims = index["offsets"].tolist(), index["shapes"].tolist(), index["ndims"].tolist()
    flat: Any = data
    if codec == "ragged_tensor":
        flat = load_torch().from_numpy(data)
        if metadata.get("dtype") != str(flat.dtype):
            raise ValueError(f"{codec}: data of {flat.dtype}, not of {metadata.get('dtype')!r}")
    is_array = _array_rows(metadata, len(ndims))
    rows: list[Any] = []
    for row, is_null in enumerate(index["nulls"].tolist()):
        if is_null:
            rows.append(None)
            continue
        value = flat[offsets[row] : offsets[row + 1]].reshape(tuple(shapes[row][: ndims[row]]))
        rows.append(value if codec == "ragged_tensor" or is_array[row] else value.tolist())
    return rows


def check_index(codec: str, index: Mapping[str, Array], num_rows: int, num_units: int) -> None:
    """Check the arrays of a ragged column with ``num_units`` bytes or elements of data.

    Raises:
        ValueError: they point outside the data, or contradict each other.
    """
    check_offsets(codec, index["offsets"], num_rows, num_units)
    _check_array(codec, "nulls", index["nulls"], "b", (num_rows,))
    if "shapes" not in index:
        return
    shapes, ndims = index["shapes"], index["ndims"]
    _check_array(codec, "ndims", ndims, "i", (num_rows,))
    if shapes.dtype.kind != "i" or shapes.ndim != 2 or len(shapes) != num_rows:
        raise ValueError(f"{codec}: shapes are {shapes.dtype} of {shapes.shape}")
    width = shapes.shape[1]
    if width > MAX_ARRAY_DIMS or (shapes < 0).any() or (ndims < 0).any() or (ndims > width).any():
        raise ValueError(f"{codec}: a shape is not one")
    used = np.where(np.arange(width)[None, :] < ndims[:, None], shapes, 1)
    sizes = used.astype(object).prod(axis=1) if width else np.ones(num_rows, dtype=object)
    lengths = np.diff(index["offsets"])
    if not all(n or size == length for n, size, length in zip(index["nulls"], sizes, lengths, strict=True)):
        raise ValueError(f"{codec}: a shape does not have the elements of its row")


def check_offsets(codec: str, offsets: Array, num_rows: int, num_units: int) -> None:
    _check_array(codec, "offsets", offsets, "i", (num_rows + 1,), what="offsets length")
    # Differences could wrap around before it is known that the offsets ascend.
    if num_rows < 0 or offsets[0] != 0 or offsets[-1] != num_units or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{codec}: offsets do not ascend from 0 to {num_units}")


def _check_array(
    codec: str, name: str, array: Array, kind: str, shape: tuple[int, ...], what: str = ""
) -> None:
    if array.dtype.kind != kind or array.shape != shape:
        raise ValueError(f"{codec}: {what or name}: {array.dtype} of {array.shape}, not of {shape}")


def check_nulls(codec: str, nulls: Array, num_rows: int) -> None:
    _check_array(codec, "nulls", nulls, "b", (num_rows,))


# Encoding -----------------------------------------------------------------------------------------------


def _nulls(values: Sequence[Any]) -> Array:
    return np.array([value is None for value in values], dtype=np.bool_)


def offsets_of(sizes: Iterable[int]) -> Array:
    return np.cumsum([0, *sizes], dtype=np.int64)


def _encode_ragged(values: Sequence[Any], encode: Callable[[Any], bytes]) -> Payload:
    parts = [b"" if value is None else encode(value) for value in values]
    return {"data": b"".join(parts), "offsets": offsets_of(map(len, parts)), "nulls": _nulls(values)}


def _encode_fixed(values: Sequence[Any], dtype: Any) -> EncodedRows:
    nulls = _nulls(values)
    there = _cast(_joined_array([value for value in values if value is not None]), dtype)
    if there.dtype.kind not in NUMBERS:
        raise ValueError(f"ndarray codec: {there.dtype} are no numbers")
    data = np.zeros((len(values), *there.shape[1:]), dtype=there.dtype)
    data[~nulls] = there
    metadata = {"dtype": data.dtype.name, "shape": list(data.shape)}
    return EncodedRows("ndarray", len(values), {"data": data, "nulls": nulls}, metadata)


def _array_of(value: Any) -> Array | None:
    if value is None:
        return None
    if is_tensor(value):
        return value.detach().cpu().numpy()  # type: ignore[no-any-return]
    return value if isinstance(value, np.ndarray) else _joined_array(value)


def _joined_array(value: Any) -> Array:
    """Array of numbers, or of lists or arrays of them; whole numbers among others must stay what they are."""
    array = np.asarray(value)
    if array.dtype.kind not in "fc" or _has_only_floats(value):
        return array
    if not _are_whole_numbers_kept(np.asarray(value, dtype=object), array):
        raise ValueError(f"whole numbers do not fit {array.dtype}, which other values of the column have")
    return array


def _has_only_floats(value: Any) -> bool:
    """Whether ``value`` is known to have no whole numbers from the types of its arrays and lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "fc"
    if not isinstance(value, list | tuple):
        return type(value) is float
    return set(map(type, value)) <= {float} or all(map(_has_only_floats, value))


def _cast(array: Array, dtype: Any) -> Array:
    """``array`` with ``dtype``; numbers that do not fit are an error, but fractions may be rounded."""
    if dtype is None or array.dtype == np.dtype(dtype):
        return array
    kind, wanted = array.dtype.kind, np.dtype(dtype).kind
    with np.errstate(all="ignore"):  # what changes is found below
        cast = (array.real if kind == "c" and wanted != "c" else array).astype(dtype)
    if kind not in NUMBERS or wanted not in NUMBERS:
        return cast
    if wanted in "fc":
        is_good = wanted == "c" or kind != "c" or not array.imag.any()
        is_good = is_good and (kind not in "iu" or _are_whole_numbers_kept(array, cast))
    else:  # Python compares whole numbers with floats exactly, numpy does not
        pair = (cast, array) if kind in "biu" else (cast.astype(object), array.astype(object))
        is_good = bool((pair[0] == pair[1]).all())
    if not is_good:
        raise ValueError(f"values of {array.dtype} do not fit {cast.dtype}")
    return cast


def _are_whole_numbers_kept(before: Array, after: Array) -> bool:
    """Whether the whole numbers of ``before`` are the same in ``after``, an array of floats."""
    old = before.ravel().tolist()
    places = [place for place, value in enumerate(old) if isinstance(value, int | np.integer)]
    if not places:
        return True
    new = after.ravel()[places].tolist()
    return all(int(old[place]) == value for place, value in zip(places, new, strict=True))


def _encode_typed(
    codec: str, arrays: Sequence[Array | None], values: Sequence[Any], dtype: Any
) -> EncodedRows:
    if dtype is None:
        dtype = np.result_type(
            *{array.dtype for array in arrays if array is not None and array.size} or {"f8"}
        )
    wanted = np.dtype(dtype)
    if wanted.kind not in NUMBERS:
        raise ValueError(f"{codec}: {wanted} are no numbers")
    held = [None if array is None else _cast(array, wanted) for array in arrays]
    max_ndim = max((array.ndim for array in held if array is not None), default=1)
    shapes = np.zeros((len(held), max_ndim), dtype=np.int64)
    ndims = np.zeros(len(held), dtype=np.int16)
    for row, array in enumerate(held):
        if array is not None:
            shapes[row, : array.ndim] = array.shape
            ndims[row] = array.ndim
    are_arrays = [isinstance(value, np.ndarray) for value in values]
    there = [is_array for is_array, value in zip(are_arrays, values, strict=True) if value is not None]
    row_format = "ndarray" if all(there) else "mixed" if any(there) else "list"
    metadata = {
        "dtype": wanted.name,
        "max_ndim": max_ndim,
        "shape_policy": "ragged",
        "row_format": row_format,
        "ndarray_rows": are_arrays if row_format == "mixed" else None,
        "physical_layout": "contiguous_flat",
    }
    payload = {
        "data": ScatteredBuffers(
            tuple(np.ascontiguousarray(array) for array in held if array is not None), dtype=wanted.str
        ),
        "offsets": offsets_of(0 if array is None else array.size for array in held),
        "shapes": shapes,
        "ndims": ndims,
        "nulls": _nulls(values),
    }
    return EncodedRows(codec, len(values), payload, metadata)


def _array_rows(metadata: Mapping[str, Any], num_rows: int) -> list[bool]:
    if metadata.get("row_format") != "mixed":
        return [metadata.get("row_format") == "ndarray"] * num_rows
    found = metadata.get("ndarray_rows")
    if not isinstance(found, list) or len(found) != num_rows:
        raise ValueError(f"typed_ragged: ndarray_rows is not a list of {num_rows}")
    return [bool(flag) for flag in found]


def _encode_tensors(values: Sequence[Any]) -> EncodedRows:
    there = [value for value in values if value is not None]
    if not all(is_tensor(value) for value in there):
        raise TypeError("ragged_tensor: every row must be a torch.Tensor or None")
    dtypes = sorted({str(value.dtype) for value in there}) or ["torch.float32"]
    if len(dtypes) > 1:
        raise ValueError(f"ragged_tensor: mixed tensor dtype: {', '.join(dtypes)}")
    try:
        arrays = [_array_of(value) for value in values]
    except TypeError as error:
        raise ValueError(f"ragged_tensor: rows of {dtypes[0]} cannot be stored: {error}") from error
    dtype = next((array.dtype for array in arrays if array is not None), np.dtype(np.float32))
    encoded = _encode_typed("ragged_tensor", arrays, values, dtype)
    encoded.metadata.update(dtype=dtypes[0], row_format="ndarray", ndarray_rows=None)
    return encoded


def _encode_tensor_dicts(values: Sequence[Any], keys: Iterable[str] | None) -> EncodedRows:
    for row in values:
        if row is not None and not isinstance(row, dict):
            raise TypeError(f"{TENSOR_DICT}: every row must be a dict or None, not {type(row).__name__}")
    present = dict.fromkeys(key for row in values if row is not None for key in row)
    for key in present:
        if not isinstance(key, str) or not key:
            raise ValueError(f"{TENSOR_DICT}: a key must not be empty or other than a string: {key!r}")
        if any(mark in key for mark in "./\\"):
            raise ValueError(f"{TENSOR_DICT}: a key must not contain '.', '/' or a backslash: {key!r}")
    declared = list(present) if keys is None else list(keys)
    if not present.keys() <= set(declared):
        raise ValueError(f"{TENSOR_DICT}: keys not declared: {sorted(present.keys() - set(declared))}")
    payload: Payload = {"null_mask": _nulls(values)}
    codecs: dict[str, Any] = {}
    for key in declared:
        if any(row is not None and key in row and row[key] is None for row in values):
            raise TypeError(f"{TENSOR_DICT}: explicit None for key {key!r}; leave the key out")
        column = _encode_tensors([None if row is None else row.get(key) for row in values])
        codecs[key] = column.metadata
        payload |= {f"{key}.{name}": value for name, value in column.payload.items()}
    return EncodedRows(TENSOR_DICT, len(values), payload, {"keys": declared, "key_codecs": codecs})


def _encode_media_lists(values: Sequence[Any]) -> EncodedRows:
    items, metadata = encode_media([item for row in values if row is not None for item in row])
    payload = {
        "data": b"".join(items),
        "row_offsets": offsets_of(0 if row is None else len(row) for row in values),
        "byte_offsets": offsets_of(map(len, items)),
        "nulls": _nulls(values),
    }
    return EncodedRows("media_list_ragged", len(values), payload, metadata)


def _are_numbers(values: Sequence[Any]) -> bool:
    """Whether all are numbers that one dtype represents exactly; booleans are not mixed with others."""
    if not all(isinstance(value, bool | int | float | np.number | np.bool_) for value in values):
        return False
    if any(isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 for value in values):
        return False
    kinds = _kinds(values)
    return (kinds == {bool} or bool not in kinds) and _is_joined(values)


def _is_joined(values: Sequence[Any]) -> bool:
    """Whether one array can have all of them."""
    try:
        return _joined_array(values).dtype.kind in NUMBERS
    except (ValueError, OverflowError):
        return False


def _codec_of_lists(rows: Sequence[Any]) -> str | None:
    items = [item for row in rows for item in row]
    if items and all(isinstance(row, list) for row in rows) and all(is_media(i) for i in items):
        return "media_list_ragged"
    if items and all(_is_numeric_list(row) for row in rows if len(row)):
        is_plain_mix = len(_kinds(rows)) > 1 and all(is_plain(row) for row in rows)
        return DEFAULT if is_plain_mix else "typed_ragged"
    return DEFAULT if all(is_plain(row) for row in rows) else None


def _is_numeric_list(row: Any) -> bool:
    """Whether it is a list, or a list of lists of equal lengths, of numbers of one kind."""
    kinds = _kinds(row)
    if kinds not in ({int}, {float}):
        return False
    try:
        array = np.asarray(row)
    except (ValueError, OverflowError):
        return False
    return array.dtype.kind in ("i" if kinds == {int} else "f")


def _kinds(value: Any) -> set[type]:
    if isinstance(value, list | tuple):
        return {kind for item in value for kind in _kinds(item)}
    if isinstance(value, bool | np.bool_):
        return {bool}
    if isinstance(value, int | np.integer):
        return {int}
    return {float} if isinstance(value, float | np.floating) else {type(value)}
