# SPDX-License-Identifier: Apache-2.0
"""A bundle's manifest: under which keys its bytes lie, and how many bytes each has.

    PREFIX/PARTITION/ID/manifest                      written last, so that what can be found is complete,
                                                      and removed last, so that a removal can be repeated
    PREFIX/PARTITION/ID/meta                          the bundle's metadata
    PREFIX/PARTITION/ID/buffer/NAME[/chunk/NUMBER]    a member, in chunks if it is large

Owns that format, which is the existing package's, and its checks: a manifest is read from a store that
others write to, so every key must lie in the bundle's namespace and every size must be consistent before
memory is allocated. Knows no store and no types of members.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
LAYOUT = "bundle"
MAX_MANIFEST_BYTES = 64 << 20
MAX_MEMBER_BYTES = 1 << 48
TENSOR = "tensor"
"""``kind`` of a member that the store's own tensor calls wrote."""
TORCH_SAVE = "torch_save"
"""``format`` of a tensor that only ``torch.save`` can represent."""


@dataclass
class RemoteBundleRef:
    """Name of a stored bundle, with its manifest if that is known; an empty manifest is read when needed."""

    manifest_key: str
    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredMember:
    """Bytes of one member, in the order of its chunks."""

    key: str
    size_bytes: int
    chunks: tuple[StoredChunk, ...]
    kind: str | None = None
    format: str | None = None
    header_bytes: int = 0
    """Bytes in front of a tensor's elements."""
    dtype: str | None = None
    shape: tuple[int, ...] = ()

    def document(self) -> dict[str, Any]:
        """The member as it is written to the manifest."""
        found: dict[str, Any] = {"key": self.key}
        if self.kind is not None:
            found["kind"] = self.kind
        found["bytes"] = self.size_bytes
        if self.dtype is not None:
            found |= {"dtype": self.dtype, "shape": list(self.shape)}
        found["chunks"] = [{"key": chunk.key, "bytes": chunk.size_bytes} for chunk in self.chunks]
        if self.format is not None:
            found["format"] = self.format
        if self.header_bytes:
            found["metadata_bytes"] = self.header_bytes
        return found


@dataclass(frozen=True, slots=True)
class BundleManifest:
    """A checked manifest.

    ``other_ids`` are bundles whose members this one refers to as well, ``replaced_keys`` objects of those
    that nothing else refers to: both are there after fields were appended to a bundle.
    """

    object_id: str
    meta: StoredMember
    members: dict[str, StoredMember]
    other_ids: tuple[str, ...] = ()
    replaced_keys: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "version": VERSION,
            "layout": LAYOUT,
            "object_id": self.object_id,
            "meta": self.meta.document(),
            "buffers": {name: member.document() for name, member in self.members.items()},
        }
        if self.other_ids:
            found["buffer_object_ids"] = [self.object_id, *self.other_ids]
        if self.replaced_keys:
            found["cleanup_keys"] = list(self.replaced_keys)
        return found

    def keys(self) -> list[str]:
        """All keys of the bundle but the manifest's, without which nothing finds them."""
        members = (self.meta, *self.members.values())
        found = (key for member in members for key in keys_of(member))
        return list(dict.fromkeys((*found, *self.replaced_keys)))


def keys_of(member: StoredMember) -> list[str]:
    return [chunk.key for chunk in member.chunks]


def encode(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, separators=(",", ":")).encode()


def decode(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Decode a manifest's bytes, unchecked.

    Raises:
        ValueError: not a manifest.
    """
    if not 0 < len(data) <= MAX_MANIFEST_BYTES:
        raise ValueError(f"bundle manifest of {len(data)} bytes: 1 to {MAX_MANIFEST_BYTES}")
    try:
        found = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"bundle manifest is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"bundle manifest is a {type(found).__name__}, not a JSON object")
    return found


def check(manifest: Mapping[str, Any], manifest_key: str, prefix: str) -> BundleManifest:
    """Check a manifest that was found under ``manifest_key``.

    Raises:
        ValueError: it refers to anything that does not belong to this bundle, or contradicts itself.
    """
    if manifest.get("version") != VERSION or manifest.get("layout") != LAYOUT:
        kind = (manifest.get("version"), manifest.get("layout"))
        raise ValueError(f"unsupported bundle manifest: version and layout {kind}, not {(VERSION, LAYOUT)}")
    object_id = _object_id(manifest.get("object_id"))
    known_ids = [_object_id(other) for other in _list(manifest, "buffer_object_ids")]
    other_ids = tuple(other for other in known_ids if other != object_id)
    roots = BundleNamespace(f"{prefix}/", frozenset((object_id, *other_ids)))
    if manifest_key != f"{prefix}/{object_id}/manifest":
        raise ValueError(
            f"manifest_key {manifest_key!r} is outside the bundle namespace of object {object_id!r}"
        )
    replaced = tuple(_list(manifest, "cleanup_keys"))
    if not all(roots.has(key) for key in replaced):
        raise ValueError("bundle manifest: cleanup_keys outside the bundle namespace")
    buffers = manifest.get("buffers")
    if not isinstance(buffers, Mapping):
        raise ValueError("bundle manifest: buffers is not an object")
    members = {check_name(name): _member(member, roots) for name, member in buffers.items()}
    found = BundleManifest(object_id, _member(manifest.get("meta"), roots), members, other_ids, replaced)
    keys = [key for member in (found.meta, *members.values()) for key in keys_of(member)]
    if len(set(keys)) < len(keys):
        raise ValueError("bundle manifest: a chunk is named twice")  # so few objects fill no memory
    return found


def check_name(name: Any, what: str = "buffer name") -> str:
    """Name of a member or a partition, which becomes a part of a key."""
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"invalid bundle {what}: {name!r}")
    return name


def runs_in_chunks(
    chunks: Iterable[StoredChunk], runs: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Parts of ``runs`` (start, length) of a member: (number of the chunk, offset there, place, length).

    ``place`` counts the bytes of the runs before. Runs may be in any order and overlap.
    """
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk.size_bytes)
    place = number = 0
    for start, length in runs:
        assert start >= 0 and length >= 0 and start + length <= starts[-1], "runs are checked by their makers"
        end = start + length
        if not starts[number] <= start < starts[min(number + 1, len(starts) - 1)]:
            number = bisect_right(starts, start) - 1
        while start < end:
            size = min(end, starts[number + 1]) - start
            yield number, start - starts[number], place, size
            start += size
            place += size
            number += start == starts[number + 1] and start < end


def _object_id(value: Any) -> str:
    parts = value.split("/") if isinstance(value, str) else []
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"bundle manifest: object_id {value!r} is not PARTITION/ID")
    return f"{parts[0]}/{parts[1]}"


def _list(manifest: Mapping[str, Any], name: str) -> list[Any]:
    found = manifest.get(name, [])
    if not isinstance(found, list):
        raise ValueError(f"bundle manifest: {name} is not a list")
    return found


@dataclass(frozen=True, slots=True)
class BundleNamespace:
    """What keys of a bundle begin with: the prefix, then one of some ids, which may be very many."""

    prefix: str
    ids: frozenset[str]

    def has(self, key: Any) -> bool:
        """Whether it is a key under one of them."""
        if not isinstance(key, str) or not key.startswith(self.prefix) or key.endswith("/"):
            return False
        parts = key[len(self.prefix) :].split("/", 2)
        return len(parts) == 3 and f"{parts[0]}/{parts[1]}" in self.ids


def _member(value: Any, roots: BundleNamespace) -> StoredMember:
    if not isinstance(value, Mapping) or not isinstance(value.get("chunks"), list):
        raise ValueError("bundle manifest: a payload is not an object with chunks")
    key, size_bytes = value.get("key"), _size(value.get("bytes"))
    if not roots.has(key):
        raise ValueError(f"bundle payload key {key!r} is outside the bundle namespace")
    chunks = []
    for chunk in value["chunks"]:
        if not isinstance(chunk, Mapping) or not roots.has(chunk.get("key")):
            raise ValueError(f"bundle payload {key!r} has a chunk outside the bundle namespace")
        chunks.append(StoredChunk(chunk["key"], _size(chunk.get("bytes"))))
    if sum(chunk.size_bytes for chunk in chunks) != size_bytes or not all(c.size_bytes for c in chunks):
        raise ValueError(f"bundle payload {key!r}: its chunks do not have its {size_bytes} bytes")
    kind, stored_format = value.get("kind"), value.get("format")
    if kind not in (None, TENSOR) or stored_format not in (None, TORCH_SAVE):
        raise ValueError(f"bundle payload {key!r}: unknown kind {kind!r} or format {stored_format!r}")
    header_bytes = _size(value.get("metadata_bytes", 0))
    if header_bytes > size_bytes:
        raise ValueError(f"bundle payload {key!r}: header of {header_bytes} bytes in {size_bytes}")
    dtype = value.get("dtype")
    shape = tuple(_size(length) for length in _list(value, "shape"))
    return StoredMember(
        str(key),
        size_bytes,
        tuple(chunks),
        kind,
        stored_format,
        header_bytes,
        None if dtype is None else str(dtype),
        shape,
    )


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_MEMBER_BYTES:
        raise ValueError(f"bundle manifest: size {value!r}")
    return value
