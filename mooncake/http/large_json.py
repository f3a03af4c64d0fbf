# SPDX-License-Identifier: Apache-2.0
"""Decoder of a large JSON object that does not block the other threads of the process for long.

A decoder in C does not release the interpreter lock while it runs: a body of 8 MiB with a million token ids
takes 0.1 s in one call, and the event loop is blocked meanwhile, although the decoding runs in a thread of
its own. So an object is first cut into its fields, which makes no objects, and large arrays are decoded in
pieces, between which other threads run. The result is the same as that of one call, for any content but one
with values inside values too deep to be walked by recursion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple, Unpack

import msgspec

LARGE_BYTES = 1 << 20
"""Size from which bodies are decoded in a thread, by this module."""

PIECE_BYTES = 128 << 10
MAX_NESTING = 200
"""Levels of arrays and objects: far from the interpreter's limit, since the values are walked later."""
_TRIES = 16

ShapeT = TypeVar("ShapeT")
ResultT = TypeVar("ResultT")
Arguments = TypeVarTuple("Arguments")

_large = ThreadPoolExecutor(1, "large-requests")
"""Thread for what takes long of large requests, one at a time to leave other cores free."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.decode


async def beside(call: Callable[[Unpack[Arguments]], ResultT], *args: *Arguments) -> ResultT:
    """``call(...)`` beside the event loop. Raises what it raises."""
    return await asyncio.get_running_loop().run_in_executor(_large, call, *args)


async def decoded(content: bytes, decode: Callable[[bytes], ResultT]) -> ResultT:
    """``decode(content)``, beside the event loop when ``content`` is large. Raises what it raises."""
    return decode(content) if len(content) <= LARGE_BYTES else await beside(decode, content)


def decode(content: bytes) -> Any:
    """Decode ``content``.

    Raises:
        msgspec.DecodeError: it is not JSON, or nested deeper than ``MAX_NESTING``.
    """
    try:
        found = _decode_whole(content)
    except RecursionError:
        is_too_deep = True
    except UnicodeDecodeError as error:  # of a string in it; msgspec 0.23 raises its own
        raise msgspec.DecodeError(f"a string is not valid UTF-8: {error.reason}") from error
    else:
        num_opened = content.count(b"[") + content.count(b"{")
        is_too_deep = num_opened > MAX_NESTING and _is_nested_deeper(found, MAX_NESTING)
    if is_too_deep:
        raise msgspec.DecodeError(f"arrays and objects are nested more than {MAX_NESTING} levels deep")
    return found


def decode_as(content: bytes, shape: type[ShapeT]) -> ShapeT:
    """Decode a small body, in one call, as ``shape``.

    Raises:
        msgspec.ValidationError: it has another shape.
        msgspec.DecodeError: it is not JSON, or nested too deep.
    """
    try:
        return _decode(content, type=shape)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"a string is not valid UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise msgspec.DecodeError("arrays and objects are nested too deep") from error


def _decode_whole(content: bytes) -> Any:
    try:
        fields = _decode_fields(content)
    except msgspec.ValidationError:
        return _decode(content)  # no object: the caller reports that
    found: dict[str, Any] = {}
    for name, raw in fields.items():
        value = bytes(raw)
        found[name] = _array(value) if len(value) > PIECE_BYTES else _decode(value)
    return found


def _is_nested_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most + 1):
        if not level:
            return False
        inner = (one.values() if type(one) is dict else one for one in level)
        level = [one for items in inner for one in items if type(one) is list or type(one) is dict]
    return True


def _array(value: bytes) -> Any:
    """Decode a large value: piece by piece if it is an array of small items, else in one call.

    A comma separates two items exactly if the text before it is an array by itself.
    """
    if value[:1] != b"[" or value[-1:] != b"]":
        return _decode(value)
    items: list[Any] = []
    start, end = 1, len(value) - 1
    while end - start > PIECE_BYTES:
        cut = start + PIECE_BYTES
        piece: list[Any] | None = None
        for _ in range(_TRIES):
            cut = value.find(b",", cut, end)
            if cut < 0:
                break
            piece = _piece(value[start:cut])
            if piece is not None:
                break
            cut += 1
        if piece is None:
            return _decode(value)
        items += piece
        start = cut + 1
        time.sleep(0)  # releases the interpreter lock
    items += _decode(b"[" + value[start:end] + b"]")
    return items


def _piece(text: bytes) -> list[Any] | None:
    try:
        found: list[Any] = _decode(b"[" + text + b"]")
    except msgspec.DecodeError:
        return None
    return found if found else None
