# SPDX-License-Identifier: Apache-2.0
"""Images and encoded media of rows, as bytes with a description of each item.

An image of Pillow is stored as its pixels, and made again from them: no decoder of image files runs on
what was read from the store. Pillow is imported only when an image is read.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

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


def is_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_media(value: Any) -> bool:
    return isinstance(value, bytes | bytearray | memoryview) or is_image(value)


def encode(items: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
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
            encodings.append(_describe(item))
        elif is_media(item):
            found.append(bytes(item))
            encodings.append({"kind": "bytes"})
        else:
            raise TypeError(f"media codec: {type(item).__name__} is neither bytes nor an image")
    metadata: dict[str, Any] = {"encode_source": "raw_pixels_from_object", "media_encodings": encodings}
    if any(encoding["kind"] == "pil_raw" for encoding in encodings):
        metadata["media_types"] = ["image/raw"]
    return found, metadata


def decode(items: Sequence[bytes | None], encodings: Any) -> list[Any]:
    """Items from their bytes.

    Raises:
        ValueError: a description does not fit its bytes.
    """
    if encodings is None:
        return list(items)
    if not isinstance(encodings, list) or len(encodings) != len(items):
        raise ValueError(f"media codec: no descriptions of {len(items)} items")
    return [
        None if item is None else _decode(item, encoding)
        for item, encoding in zip(items, encodings, strict=True)
    ]


def _describe(image: Any) -> dict[str, Any]:
    if image.mode != "1" and image.mode not in PIXEL_BYTES:
        raise ValueError(f"media codec: an image of mode {image.mode} cannot be stored; convert it")
    found = {"kind": "pil_raw", "mode": image.mode, "size": list(image.size), "format": image.format}
    if image.mode in ("P", "PA"):
        found["palette"] = image.getpalette()
    return found


def _decode(item: bytes, encoding: Any) -> Any:
    kind = encoding.get("kind") if isinstance(encoding, Mapping) else None
    if kind == "bytes":
        return item
    if kind != "pil_raw":
        raise ValueError(f"media codec: unknown kind {kind!r}")
    mode, size, palette = encoding.get("mode"), encoding.get("size"), encoding.get("palette")
    is_size = (
        isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 <= n < 1 << 31 for n in size)
    )
    if not is_size or (mode != "1" and mode not in PIXEL_BYTES):
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
