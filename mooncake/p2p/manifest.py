# SPDX-License-Identifier: Apache-2.0
"""Manifest of a version: its files or buffers, cut into chunks that are named by their digests.

The digest is SHA-256, as everywhere in this package where contents are named. A manifest is itself named by
the digest of its encoding, so a reader that has been given that digest accepts only these bytes. Chunks begin
anew at the start of each large tensor and of each file, so that a tensor that moved within a file keeps its
chunks. A manifest comes from the network: ``decode_manifest`` checks every name and size before anything is
allocated. It opens no file.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

from mooncake.errors import InvalidArgument, ProtocolError

FORMAT = "mooncake-p2p-1"
DIGEST_BYTES = 32
MIN_CHUNK_BYTES = 4 << 10
DEFAULT_CHUNK_BYTES = 1 << 20
LARGE_CHUNK_BYTES = 4 << 20
MAX_CHUNK_BYTES = LARGE_CHUNK_BYTES
"""A chunk is read, hashed and moved as one, through memory that is reserved for several of them."""
LARGE_BYTES = 16 << 30
"""Size of a version from which the larger chunks are used."""
MAX_CHUNKS = 1 << 20
MAX_ITEMS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_MANIFEST_BYTES = 60 << 20
_MAX_ITEMS_BYTES = MAX_MANIFEST_BYTES - MAX_CHUNKS * (DIGEST_BYTES + 5) - 1024
"""Part of a manifest for names, beside the digests and sizes of the most chunks."""
MAX_NAME_BYTES = 1024
MAX_BELIEVED_NUMBER = 1 << 31
"""Numbers of versions above it are not counted on from: a peer may announce any."""
MAX_DEPTH = 32
"""Folders in the path of a file."""
KINDS = ("folder", "buffers", "delta")


class TensorSpan(msgspec.Struct, frozen=True, array_like=True):
    """Place of a tensor in its item: ``offset`` and ``size_bytes``; its elements have ``element_bytes``
    each."""

    name: str
    element_bytes: int
    offset: int
    size_bytes: int


class ManifestItem(msgspec.Struct, frozen=True, array_like=True):
    """A file (``name`` is its path in the folder, with slashes) or a buffer."""

    name: str
    size_bytes: int
    tensors: list[TensorSpan] = []


class ManifestChunk(NamedTuple):
    """Place of a chunk: ``size_bytes`` at ``offset`` of the item number ``item``."""

    item: int
    offset: int
    size_bytes: int


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    format: str
    kind: str
    items: list[ManifestItem]
    chunk_sizes: list[int]
    digests: bytes


class _ReceivedItem(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size_bytes: int
    tensors: msgspec.Raw = msgspec.Raw(b"\x90")
    """Decoded when it is known how many there may be."""


class _Received(msgspec.Struct, frozen=True, array_like=True):
    """An ``_Encoded`` of the network: its lists are bounded before they are made."""

    format: str
    kind: str
    items: Annotated[list[_ReceivedItem], msgspec.Meta(max_length=MAX_ITEMS)]
    chunk_sizes: Annotated[list[int], msgspec.Meta(max_length=MAX_CHUNKS)]
    digests: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Received)
_tensors_decoder = msgspec.msgpack.Decoder(Annotated[list[TensorSpan], msgspec.Meta(max_length=MAX_TENSORS)])


class Manifest:
    """Contents of one version.

    Args:
        kind: ``folder``, ``buffers`` or ``delta``.
        items: in the order of their names.
        chunk_sizes: sizes of the chunks in bytes, item by item.
        digests: the chunks' digests of 32 bytes each, one after another.
    """

    def __init__(
        self, kind: str, items: Sequence[ManifestItem], chunk_sizes: Sequence[int], digests: bytes
    ) -> None:
        self.kind = kind
        self.items = list(items)
        self.digests = digests
        self.encoded = _encoder.encode(_Encoded(FORMAT, kind, self.items, list(chunk_sizes), digests))
        self.digest = hashlib.sha256(self.encoded).hexdigest()
        self.size_bytes = sum(item.size_bytes for item in self.items)
        self.chunks = list(_places(self.items, chunk_sizes))

    def chunk_digest(self, index: int) -> bytes:
        """Digest of a chunk, 32 bytes."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def holds(self, index: int, content: bytes | memoryview) -> bool:
        """Whether ``content`` is that of the chunk."""
        return hashlib.sha256(content).digest() == self.chunk_digest(index)

    @property
    def largest_chunk_bytes(self) -> int:
        return max((chunk.size_bytes for chunk in self.chunks), default=0)

    def check(self) -> None:
        """Assert that the chunks cover every item exactly once."""
        covered = [0] * len(self.items)
        for chunk in self.chunks:
            assert chunk.offset == covered[chunk.item], chunk
            covered[chunk.item] += chunk.size_bytes
        assert covered == [item.size_bytes for item in self.items]
        assert len(self.digests) == DIGEST_BYTES * len(self.chunks)

    def __repr__(self) -> str:
        return (
            f"<Manifest {self.digest[:12]} {self.kind} [{len(self.chunks)} chunks, {self.size_bytes} bytes]>"
        )


def decode_manifest(encoded: bytes, digest: str) -> Manifest:
    """Decode and check the manifest that is named ``digest``.

    Raises:
        ProtocolError: it is another one, or it has a name or a size that it may not have.
    """
    if len(encoded) > MAX_MANIFEST_BYTES:
        raise ProtocolError(f"manifest {digest[:12]} has {len(encoded)} bytes; at most {MAX_MANIFEST_BYTES}")
    if hashlib.sha256(encoded).hexdigest() != digest:
        raise ProtocolError(f"the bytes sent as manifest {digest[:12]} have another digest; ask another peer")
    try:
        found = _bounded(_decoder.decode(encoded))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"manifest {digest[:12]} can't be decoded: {error}") from error
    trouble = _trouble(found)
    if trouble:
        raise ProtocolError(f"manifest {digest[:12]} is invalid: {trouble}; do not use that version")
    manifest = Manifest(found.kind, found.items, found.chunk_sizes, found.digests)
    if manifest.digest != digest:  # fields that this version does not know, or another encoding
        raise ProtocolError(f"manifest {digest[:12]} has another form than this version writes; update it")
    return manifest


def sendable_items(items: Sequence[ManifestItem]) -> list[ManifestItem]:
    """The items of a new manifest, by the rules of ``decode_manifest``: a peer that registers what all others
    refuse would be excluded by them. Without tensors, which only save bytes, where these are too many.

    Raises:
        InvalidArgument: a name is wrong, or there are too many items.
    """
    if len(items) > MAX_ITEMS:
        raise InvalidArgument("contents", len(items), f"at most {MAX_ITEMS} files or buffers")
    trouble = _items_trouble(items)
    if trouble:
        raise InvalidArgument("contents", trouble, "names and sizes that peers accept")
    num_tensors = sum(len(item.tensors) for item in items)
    if num_tensors > MAX_TENSORS or len(_encoder.encode(list(items))) > _MAX_ITEMS_BYTES:
        items = [ManifestItem(item.name, item.size_bytes) for item in items]
        if len(_encoder.encode(items)) > _MAX_ITEMS_BYTES:
            raise InvalidArgument("contents", len(items), "shorter names, or fewer files or buffers")
    return list(items)


def is_digest(text: str) -> bool:
    """Whether ``text`` has the form of a version's digest: 64 hexadecimal digits in lower case."""
    return len(text) == 2 * DIGEST_BYTES and all(c in "0123456789abcdef" for c in text)


def is_version_name(name: str) -> bool:
    """Whether versions may have this name: printable, so that a list of names can be shown."""
    return 0 < len(name) <= 256 and len(name.encode()) <= 256 and name.isprintable() and "@" not in name


def check_version_name(name: str, number: int = 0) -> None:
    """Check the name, and the number, under which a version is registered; 0 stands for the next number.

    Raises:
        InvalidArgument: the name is empty, too long, or has a character that can't be printed, or an ``@``;
            or the number is negative or too large.
    """
    if not is_version_name(name):
        raise InvalidArgument("name", name, "1 to 256 bytes of printable characters without @")
    if not 0 <= number < 1 << 62:
        raise InvalidArgument("number", number, "0 for the next one, or a number below 2**62")


def next_version_number(numbers: Iterable[int]) -> int:
    """The number that follows ``numbers``."""
    return 1 + max((number for number in numbers if number <= MAX_BELIEVED_NUMBER), default=0)


def path_trouble(name: str) -> str:
    """Why ``name`` may not be the path of a file below a folder; empty when it may."""
    if not 0 < len(name.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES:
        return "it is empty or too long"
    if not name.isprintable() or "\\" in name:
        return "it has characters that are not allowed"
    if name.count("/") > MAX_DEPTH:
        return f"it lies in more than {MAX_DEPTH} folders"
    if any(part in ("", ".", "..") or len(part.encode()) > 255 for part in name.split("/")):
        return "it is absolute, or has an empty part, `.`, `..` or a part that is too long"
    return ""


def chunk_bytes_for(size_bytes: int) -> int:
    """Size of chunks for a version of ``size_bytes``."""
    return DEFAULT_CHUNK_BYTES if size_bytes < LARGE_BYTES else LARGE_CHUNK_BYTES


def chunk_sizes_of(size_bytes: int, tensors: Sequence[TensorSpan], chunk_bytes: int) -> list[int]:
    """Cut an item into chunks of at most ``chunk_bytes``.

    Large tensors begin and end with a chunk. Others begin one if the chunk before would have at least a
    quarter of the size. So an insertion into a file changes only the chunks near it.
    """
    edges, soft = {size_bytes}, set[int]()
    for tensor in tensors:
        ends = {tensor.offset, tensor.offset + tensor.size_bytes}
        (edges if tensor.size_bytes >= chunk_bytes else soft).update(ends)
    firsts = [tensor.offset for tensor in tensors]
    edges.update([min(firsts)] if firsts else [])
    cuts = sorted(cut for cut in edges if 0 < cut <= size_bytes)
    softer = sorted(cut for cut in soft if 0 < cut < size_bytes)
    sizes: list[int] = []
    at = 0
    for cut in cuts:
        while at < cut:
            stop = min(cut, at + chunk_bytes)
            place = bisect_left(softer, at + chunk_bytes // 4)
            if place < len(softer) and softer[place] < stop:
                stop = softer[place]
            sizes.append(stop - at)
            at = stop
    return sizes


def _places(items: Sequence[ManifestItem], chunk_sizes: Sequence[int]) -> Iterator[ManifestChunk]:
    item, offset = 0, 0
    for size in chunk_sizes:
        while offset == items[item].size_bytes:
            item, offset = item + 1, 0
        yield ManifestChunk(item, offset, size)
        offset += size


def _bounded(found: _Received) -> _Encoded:
    """Decode the tensors, too, while there are not too many. Raises msgspec.MsgspecError."""
    items: list[ManifestItem] = []
    num_tensors = 0
    for item in found.items:
        tensors = _tensors_decoder.decode(item.tensors)
        num_tensors += len(tensors)
        if num_tensors > MAX_TENSORS:
            raise msgspec.ValidationError(f"it has more than {MAX_TENSORS} tensors")
        items.append(ManifestItem(item.name, item.size_bytes, tensors))
    return _Encoded(found.format, found.kind, items, found.chunk_sizes, found.digests)


def _trouble(found: _Encoded) -> str:
    if found.format != FORMAT or found.kind not in KINDS:
        return f"its format is {found.format[:40]!r}, kind {found.kind[:40]!r}"
    if len(found.digests) != DIGEST_BYTES * len(found.chunk_sizes):
        return "the number of its digests is wrong"
    return _items_trouble(found.items) or _size_trouble(found)


def _items_trouble(items: Sequence[ManifestItem]) -> str:
    names = [item.name for item in items]
    if names != sorted(set(names)):
        return "its names are not in order, or not distinct"
    files = set(names)
    for item in items:
        why = path_trouble(item.name) or _item_trouble(item)
        if not why and any(folder in files for folder in _folders_of(item.name)):
            why = "one of its folders is a file"
        if why:
            return f"{item.name[:80]!r}: {why}"
    return ""


def _folders_of(name: str) -> Iterator[str]:
    at = name.find("/")
    while at >= 0:
        yield name[:at]
        at = name.find("/", at + 1)


def _item_trouble(item: ManifestItem) -> str:
    if not 0 <= item.size_bytes <= MAX_CHUNKS * MAX_CHUNK_BYTES:
        return f"its size is {item.size_bytes}"
    for tensor in item.tensors:
        ends = tensor.offset + tensor.size_bytes
        if tensor.element_bytes < 1 or min(tensor.offset, tensor.size_bytes) < 0 or ends > item.size_bytes:
            return f"tensor {tensor.name[:80]!r} is not within it"
        if tensor.size_bytes % tensor.element_bytes:
            return f"tensor {tensor.name[:80]!r} has half an element"
    return ""


def _size_trouble(found: _Encoded) -> str:
    sizes = iter(found.chunk_sizes)
    for item in found.items:
        left = item.size_bytes
        while left > 0:
            size = next(sizes, 0)
            if not 0 < size <= min(left, MAX_CHUNK_BYTES):
                return f"the chunks of {item.name[:80]!r} do not cover it"
            left -= size
    return "" if next(sizes, None) is None else "it has more chunks than bytes"
