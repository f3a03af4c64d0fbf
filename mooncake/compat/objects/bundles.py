# SPDX-License-Identifier: Apache-2.0
"""Bundles in a store: metadata and named members under one manifest.

The manifest is written last and removed first, so a bundle is found complete or not at all. An
interrupted put removes what it wrote. A bundle may be put on top of another: its manifest then also has the
members of that one, whose objects stay where they are and are removed with the new bundle.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from mooncake.compat.objects import manifest
from mooncake.compat.objects.chunk_reader import ChunkReader, MemberRead, whole
from mooncake.compat.objects.chunk_writer import ChunkWriter, remove_keys
from mooncake.compat.objects.manifest import BundleManifest, RemoteBundleRef, StoredMember
from mooncake.compat.objects.values import BundleTransferPolicy


class MemberSource(Protocol):
    """A member that can be written."""

    def write(self, writer: ChunkWriter, key: str) -> StoredMember: ...


class Bundles:
    """Bundles under ``prefix``."""

    def __init__(self, store: Any, prefix: str, chunk_bytes: int, pool: Any) -> None:
        if not isinstance(prefix, str) or not prefix.strip("/"):
            raise ValueError(f"key_prefix must not be empty: {prefix!r}")
        self.prefix = prefix.strip("/")
        self.reader = ChunkReader(store)
        self._store = store
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._writer(None, None, None)  # checks chunk_bytes

    def put(
        self,
        meta: bytes,
        members: Mapping[str, MemberSource],
        *,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        config: Any = None,
        base: RemoteBundleRef | None = None,
    ) -> RemoteBundleRef:
        """Store a bundle; with ``base``, on top of that one.

        Raises:
            ValueError: a name or an option is invalid.
            RuntimeError: the store refused; nothing is left in it.
        """
        manifest.check_name(partition, "partition")
        for name in members:
            manifest.check_name(name)
        writer = self._writer(chunk_bytes, policy, config)
        below = None if base is None else self.open(base)
        object_id = f"{partition}/{uuid.uuid4().hex}"
        root = f"{self.prefix}/{object_id}"
        manifest_key = f"{root}/manifest"
        try:
            stored_meta = writer.put_by_value(f"{root}/meta", meta)
            stored = {name: member.write(writer, f"{root}/buffer/{name}") for name, member in members.items()}
            found = BundleManifest(object_id, stored_meta, stored)
            if base is not None and below is not None:
                found = _on_top(found, below, base.manifest_key)
            writer.flush()
            document = found.document()
            writer.put_manifest(manifest_key, manifest.encode(document))
        except BaseException:
            writer.undo()
            raise
        return RemoteBundleRef(manifest_key, document)

    def open(self, ref: RemoteBundleRef | Mapping[str, Any]) -> BundleManifest:
        """Checked manifest of a bundle, read from the store if the reference has none.

        Raises:
            RuntimeError: it is not in the store.
            TypeError, ValueError: not a reference, or not a manifest of this prefix.
        """
        ref = ref_from(ref)
        document = ref.manifest or manifest.decode(self.reader.read_manifest(ref.manifest_key))
        return manifest.check(document, ref.manifest_key, self.prefix)

    def read_meta(self, found: BundleManifest) -> bytes:
        memory = np.empty(found.meta.size_bytes, dtype=np.uint8)
        address = int(memory.ctypes.data)
        self.reader.read([MemberRead(found.meta, whole(found.meta), address, memory.nbytes, by_chunk=True)])
        return memory.tobytes()

    def keys(self, ref: RemoteBundleRef | Mapping[str, Any]) -> list[str]:
        return self.open(ref).keys(ref_from(ref).manifest_key)

    def remove(self, refs: Iterable[RemoteBundleRef | Mapping[str, Any]], keep: Iterable[str] = ()) -> None:
        """Remove bundles, except for the keys in ``keep``.

        Raises:
            RuntimeError: some objects are still there.
        """
        kept = set(keep)
        remove_keys(self._store, [key for ref in refs for key in self.keys(ref) if key not in kept])

    def _writer(
        self, chunk_bytes: int | None, policy: BundleTransferPolicy | None, config: Any
    ) -> ChunkWriter:
        size = self._chunk_bytes if chunk_bytes is None else chunk_bytes
        return ChunkWriter(self._store, self._pool, size, policy or BundleTransferPolicy(), config)


def ref_from(value: Any) -> RemoteBundleRef:
    """Reference from what programs pass: itself, or a mapping with ``manifest_key``.

    Raises:
        TypeError: neither.
        ValueError: it names no manifest.
    """
    if isinstance(value, RemoteBundleRef):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"expected RemoteBundleRef or a mapping, got {type(value).__name__}")
    key, found = value.get("manifest_key"), value.get("manifest")
    if not isinstance(key, str) or not key:
        raise ValueError(f"bundle reference has no manifest_key: {key!r}")
    return RemoteBundleRef(key, dict(found) if isinstance(found, Mapping) else {})


def _on_top(found: BundleManifest, below: BundleManifest, below_key: str) -> BundleManifest:
    replaced = [member for name, member in below.members.items() if name in found.members]
    keys = [below_key, *manifest.keys_of(below.meta), *below.replaced_keys]
    keys += [key for member in replaced for key in manifest.keys_of(member)]
    return replace(
        found,
        members={**below.members, **found.members},
        other_ids=tuple(dict.fromkeys((below.object_id, *below.other_ids))),
        replaced_keys=tuple(dict.fromkeys(keys)),
    )
