# SPDX-License-Identifier: Apache-2.0
"""Delta between two versions: the elements of tensors that differ, and the files that are new.

A step of training changes few elements of most tensors, but some in nearly every chunk, so that chunks alone
save nothing. A delta is a sequence of parts, in the order of the new version's bytes:

``copy``
    bytes of the base version that are the same;
``raw``
    bytes of the new version, where a tensor is new or mostly different;
``sparse``
    a piece of a tensor of the base, and the elements of it that differ: the gaps between their positions in
    1, 2 or 4 bytes (the largest value means "as many, and go on"), then the XOR of old and new values, byte
    plane by byte plane, because small changes leave the planes of sign and exponent zero. Each is compressed
    if that helps.

The delta itself is distributed like any version. Each chunk of the result is checked by the
new version's own digests, so that a wrong delta costs time and nothing else; sizes are bounded before memory
is taken.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.errors import ProtocolError
from mooncake.p2p.manifest import Manifest

MAGIC = b"mooncake-delta-1"
PIECE_BYTES = 16 << 20
"""A tensor is compared and applied in pieces of this size, so that memory is bounded."""
MAX_PARTS = 1 << 20
MAX_PARTS_BYTES = 64 << 20
GAP_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
ZLIB_LEVEL = 1


class DeltaPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of the new version: ``size_bytes`` of it, from ``body_bytes`` of the delta's body.

    ``kind`` is copy, raw or sparse. ``base_item`` and ``base_offset``: place in the base. For sparse parts,
    ``element_bytes``; ``num_changed`` elements; the body is ``gap_bytes`` of gaps of ``gap_width`` bytes, and
    values.
    """

    kind: str
    size_bytes: int
    body_bytes: int = 0
    base_item: int = 0
    base_offset: int = 0
    element_bytes: int = 1
    num_changed: int = 0
    gap_width: int = 1
    gap_bytes: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Annotated[list[DeltaPart], msgspec.Meta(max_length=MAX_PARTS)])


class Source(Protocol):
    """What is read: see ``content.Content``."""

    def read(self, item: int, offset: int, size_bytes: int) -> bytes: ...


class Sink(Protocol):
    """What is written: see ``content.Content``."""

    def write(self, item: int, offset: int, content: bytes | memoryview) -> None: ...


@dataclass(frozen=True)
class _Piece:
    """Consecutive bytes of a new item, and where the base has their counterpart, if it has one."""

    item: int
    offset: int
    size_bytes: int
    element_bytes: int
    base: tuple[int, int] | None


def write_delta(
    base: Manifest, old: Source, new: Manifest, current: Source, file: BinaryIO, limit_bytes: int
) -> bool:
    """Write the delta from ``base`` to ``new`` into an empty file.

    Args:
        old, current: contents of the two.
        limit_bytes: size from which a delta is of no use.

    Returns:
        False when it would be larger; the file's content is then undefined.
    """
    parts: list[DeltaPart] = []
    file.write(MAGIC)
    size = len(MAGIC)
    for piece in _pieces(base, new):
        part, content = _encode_piece(piece, old, current)
        size += len(content)
        parts.append(part)
        if size > limit_bytes or len(parts) >= MAX_PARTS:
            return False
        file.write(content)
    table = _encoder.encode(parts)
    if len(table) > MAX_PARTS_BYTES:
        return False
    file.write(table)
    file.write(size.to_bytes(8, "little"))
    return True


def apply_delta(
    delta: Source, delta_bytes: int, base: Manifest, old: Source, new: Manifest, sink: Sink
) -> None:
    """Write the version ``new`` into ``sink``, from the base and item 0 of ``delta``.

    What is written has to be checked by the digests of ``new``.

    Raises:
        ProtocolError: the delta is damaged, or is one between other versions.
        StorageError: see ``Content``.
    """
    parts, body_at = _read_parts(delta, delta_bytes)
    at, table_at = len(MAGIC), body_at
    places = iter([(number, item.size_bytes) for number, item in enumerate(new.items) if item.size_bytes])
    item, left, offset = -1, 0, 0
    for part in parts:
        if not left:
            item, left = next(places, (-1, 0))
            offset = 0
        # No kind of part needs more than its own bytes and one that says how they are compressed.
        most = min(table_at - at, part.size_bytes + 1)
        if not 0 < part.size_bytes <= min(left, PIECE_BYTES) or not 0 <= part.body_bytes <= most:
            raise _damaged("a part lies outside of the version or of the delta")
        body = delta.read(0, at, part.body_bytes) if part.body_bytes else b""
        sink.write(item, offset, _decode_part(part, body, base, old))
        at += part.body_bytes
        left -= part.size_bytes
        offset += part.size_bytes
    if left or next(places, None) is not None or at != table_at:
        raise _damaged("it ends too early, or too late")


def _read_parts(delta: Source, delta_bytes: int) -> tuple[list[DeltaPart], int]:
    if delta_bytes < len(MAGIC) + 9 or delta.read(0, 0, len(MAGIC)) != MAGIC:
        raise _damaged("it has another form")
    table_at = int.from_bytes(delta.read(0, delta_bytes - 8, 8), "little")
    table_bytes = delta_bytes - 8 - table_at
    if table_at < len(MAGIC) or not 0 < table_bytes <= MAX_PARTS_BYTES:
        raise _damaged("its table of parts lies outside of it")
    try:
        parts = _decoder.decode(delta.read(0, table_at, table_bytes))
    except msgspec.MsgspecError as error:
        raise _damaged(f"its table of parts can't be decoded: {error}") from error
    return parts, table_at


def _damaged(why: str) -> ProtocolError:
    return ProtocolError(f"the delta is damaged: {why}; the version is loaded without it")


def _decode_part(part: DeltaPart, body: bytes, base: Manifest, old: Source) -> bytes:
    if part.kind == "raw":
        return _unpacked(body, part.size_bytes)
    if part.kind not in ("copy", "sparse"):
        raise _damaged(f"a part of kind {part.kind[:20]!r}")
    is_known = 0 <= part.base_item < len(base.items)
    end = part.base_offset + part.size_bytes
    if not is_known or not 0 <= part.base_offset <= end <= base.items[part.base_item].size_bytes:
        raise _damaged("a part lies outside of the base version")
    content = old.read(part.base_item, part.base_offset, part.size_bytes)
    return content if part.kind == "copy" else _changed(content, part, body)


def _changed(content: bytes, part: DeltaPart, body: bytes) -> bytes:
    """Apply a sparse part to the base's bytes."""
    width, element = part.gap_width, part.element_bytes
    num_elements = part.size_bytes // max(1, element)
    is_sized = element in (1, 2, 4, 8) and part.size_bytes % element == 0
    # A gap of at most all elements takes that many gap tokens more, at the most.
    if not is_sized or width not in GAP_TYPES or not 0 < part.num_changed <= num_elements:
        raise _damaged("a sparse part has impossible sizes")
    if not 0 < part.gap_bytes <= len(body):
        raise _damaged("a sparse part has no positions")
    most = width * (part.num_changed + num_elements // _largest(width) + 1)
    gaps = np.frombuffer(_unpacked(body[: part.gap_bytes], None, most), dtype=np.uint8)
    if len(gaps) % width:
        raise _damaged("a sparse part has half a position")
    positions = _positions(gaps.view(GAP_TYPES[width]))
    if len(positions) != part.num_changed or int(positions[-1]) >= num_elements:
        raise _damaged("a sparse part has positions outside of its tensor")
    planes = _unpacked(body[part.gap_bytes :], part.num_changed * element)
    values = np.frombuffer(planes, dtype=np.uint8).reshape(element, part.num_changed).T.copy()
    result = np.frombuffer(content, dtype=np.uint8).reshape(num_elements, element).copy()
    result[positions] ^= values
    return result.tobytes()


def _unpacked(packed: bytes, size_bytes: int | None, most: int = 0) -> bytes:
    """Undo ``_packed``. The result has ``size_bytes``, or any size up to ``most``."""
    limit = most if size_bytes is None else size_bytes
    if packed[:1] == b"r":
        found = packed[1:]
    elif packed[:1] == b"z":
        stream = zlib.decompressobj()
        try:
            found = stream.decompress(packed[1:], limit + 1)
        except zlib.error as error:
            raise _damaged(f"a part can't be decompressed: {error}") from error
    else:
        raise _damaged("a part of unknown compression")
    if len(found) > limit or (size_bytes is not None and len(found) != size_bytes):
        raise _damaged("a part has another size than announced")
    return found


def _packed(content: bytes) -> bytes:
    """Compress if that saves a tenth; the first byte says which."""
    small = zlib.compress(content, ZLIB_LEVEL)
    return b"z" + small if len(small) < 0.9 * len(content) else b"r" + content


def _encode_piece(piece: _Piece, old: Source, current: Source) -> tuple[DeltaPart, bytes]:
    after = current.read(piece.item, piece.offset, piece.size_bytes)
    if piece.base is None:
        body = _packed(after)
        return DeltaPart("raw", piece.size_bytes, len(body)), body
    before = old.read(*piece.base, piece.size_bytes)
    base_item, base_offset = piece.base
    if before == after:
        return DeltaPart("copy", piece.size_bytes, 0, base_item, base_offset), b""
    element = piece.element_bytes
    a = np.frombuffer(before, dtype=np.uint8).reshape(-1, element)
    b = np.frombuffer(after, dtype=np.uint8).reshape(-1, element)
    positions = np.flatnonzero(_elements(a) != _elements(b))
    body = b""
    if len(positions) * element < piece.size_bytes // 2:
        width, gaps = _gaps(positions)
        packed_gaps = _packed(gaps)
        planes = np.ascontiguousarray((a[positions] ^ b[positions]).T).tobytes()
        body = packed_gaps + _packed(planes)
        if len(body) < piece.size_bytes:
            part = DeltaPart(
                kind="sparse",
                size_bytes=piece.size_bytes,
                body_bytes=len(body),
                base_item=base_item,
                base_offset=base_offset,
                element_bytes=element,
                num_changed=len(positions),
                gap_width=width,
                gap_bytes=len(packed_gaps),
            )
            return part, body
    body = _packed(after)
    return DeltaPart("raw", piece.size_bytes, len(body)), body


def _elements(rows: NDArray[np.uint8]) -> NDArray[Any]:
    """Rows of bytes as integers of that width."""
    return rows.reshape(-1).view(f"u{rows.shape[1]}")


def _largest(width: int) -> int:
    """The gap token that means: as many, and go on."""
    return int((1 << 8 * width) - 1)


def _gaps(positions: NDArray[np.intp]) -> tuple[int, bytes]:
    """Width and bytes of the gaps, in the width that takes the fewest bytes."""
    gaps = np.diff(positions, prepend=-1).astype(np.int64) - 1
    sizes = {width: width * int(len(gaps) + (gaps // _largest(width)).sum()) for width in GAP_TYPES}
    width = min(sizes, key=lambda one: sizes[one])
    most = _largest(width)
    num_tokens = gaps // most + 1
    tokens = np.full(int(num_tokens.sum()), most, dtype=GAP_TYPES[width])
    tokens[np.cumsum(num_tokens) - 1] = gaps % most
    return width, tokens.tobytes()


def _positions(tokens: NDArray[Any]) -> NDArray[np.int64]:
    """Positions from gaps, as ``_gaps`` wrote them."""
    is_last = tokens != _largest(tokens.dtype.itemsize)
    if not len(tokens) or not is_last[-1]:
        raise _damaged("its last position is incomplete")
    totals = np.cumsum(tokens, dtype=np.int64)[is_last]
    found: NDArray[np.int64] = totals + np.arange(len(totals))
    return found


def _pieces(base: Manifest, new: Manifest) -> Iterator[_Piece]:
    """Cut the new version into pieces of one tensor, or of what lies between tensors."""
    tensors = {
        (span.name, span.element_bytes, span.size_bytes): (number, span.offset)
        for number, item in enumerate(base.items)
        for span in item.tensors
    }
    files = {(item.name, item.size_bytes): number for number, item in enumerate(base.items)}
    for number, item in enumerate(new.items):
        at = 0
        same = files.get((item.name, item.size_bytes))
        for span in item.tensors:
            if span.offset < at or not span.size_bytes:
                continue  # overlaps the one before: sent with it
            yield from _cut(number, at, span.offset - at, 1, None if same is None else (same, at))
            place = tensors.get((span.name, span.element_bytes, span.size_bytes))
            element = span.element_bytes if span.element_bytes in (1, 2, 4, 8) else 1
            yield from _cut(number, span.offset, span.size_bytes, element, place)
            at = span.offset + span.size_bytes
        yield from _cut(number, at, item.size_bytes - at, 1, None if same is None else (same, at))


def _cut(
    item: int, offset: int, size_bytes: int, element_bytes: int, base: tuple[int, int] | None
) -> Iterator[_Piece]:
    for at in range(0, size_bytes, PIECE_BYTES):
        place = None if base is None else (base[0], base[1] + at)
        yield _Piece(item, offset + at, min(PIECE_BYTES, size_bytes - at), element_bytes, place)
