# SPDX-License-Identifier: Apache-2.0
"""Chunks that need not be loaded: those that other versions here have, and those that a delta makes.

Nothing is written that has not been compared with its digest, wherever it came from. Each delta has a folder
of its own below the state's folder, so that a new one never takes the place of one that is being deleted.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mooncake.errors import StorageError
from mooncake.p2p.content import (
    NUM_HASH_THREADS,
    Content,
    FolderContent,
    file_states,
    find_files,
    make_manifest,
)
from mooncake.p2p.delta import write_delta
from mooncake.p2p.download import Bits
from mooncake.p2p.held_version import HeldVersion
from mooncake.p2p.manifest import Manifest

DELTA_PREFIX = "delta-"
"""Beginning of the names of the folders that deltas are in."""

WriteChunk = Callable[[int, memoryview], None]
"""``write(chunk, content)`` stores a verified chunk."""


def reuse_chunks(manifest: Manifest, missing: Bits, others: Iterable[HeldVersion], write: WriteChunk) -> int:
    """Copy missing chunks that other versions have under another number. Returns the bytes; blocks."""
    places: dict[bytes, list[int]] = {}
    for one in missing.nonzero()[0].tolist():
        places.setdefault(manifest.chunk_digest(one), []).append(one)
    done = 0
    for other in others:
        if not places:
            break
        for number, place in enumerate(other.manifest.chunks):
            digest = other.manifest.chunk_digest(number)
            if digest not in places or not other.have[number]:
                continue
            try:
                content = other.content.read(*place)
            except StorageError:
                continue
            for chunk in places.pop(digest) if other.manifest.holds(number, content) else ():
                write(chunk, memoryview(content))
                done += len(content)
    return done


def is_whole(manifest: Manifest, content: Content) -> bool:
    """Whether ``content`` has every chunk's bytes now; blocks."""
    with ThreadPoolExecutor(NUM_HASH_THREADS) as threads:
        try:
            chunks = range(len(manifest.chunks))
            for at in range(0, len(chunks), 256):
                group = chunks[at : at + 256]
                held = threads.map(lambda i: manifest.holds(i, content.read(*manifest.chunks[i])), group)
                if not all(held):
                    return False
        except StorageError:  # it was dropped meanwhile
            return False
    return True


class ChunkAssembly:
    """Sink for a version's bytes in their order: cuts them into chunks, and writes the right ones.

    Args:
        missing: chunks that are wanted; all others are dropped.
        write: stores a verified chunk.
    """

    def __init__(self, manifest: Manifest, missing: Bits, write: WriteChunk) -> None:
        self._manifest = manifest
        self._missing = missing
        self._store = write
        self._next = 0
        self._buffer = bytearray()
        self.num_wrong = 0

    def write(self, item: int, offset: int, content: bytes | memoryview) -> None:
        """Take the bytes at ``offset`` of an item, which follow those of the call before."""
        self._buffer += content
        chunks = self._manifest.chunks
        while self._next < len(chunks) and len(self._buffer) >= chunks[self._next].size_bytes:
            chunk, self._next = self._next, self._next + 1
            size = chunks[chunk].size_bytes
            found = bytes(self._buffer[:size])
            del self._buffer[:size]
            if self._missing[chunk]:
                if self._manifest.holds(chunk, found):
                    self._store(chunk, memoryview(found))
                else:
                    self.num_wrong += 1


def chunk_writer(manifest: Manifest, content: Content, note: Callable[[int], None]) -> WriteChunk:
    """Writer of verified chunks into ``content``; ``note`` is called after each one."""

    def write(chunk: int, found: memoryview) -> None:
        place = manifest.chunks[chunk]
        content.write(place.item, place.offset, found)
        note(chunk)

    return write


def make_delta_folder(state_dir: Path) -> Path:
    """Path for the files of a delta, alone in a new folder, which is deleted with it."""
    state_dir.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=DELTA_PREFIX, dir=state_dir)) / "content"


def remove_deltas(state_dir: Path) -> None:
    """Delete the folders of all deltas."""
    for folder in state_dir.glob(f"{DELTA_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def make_delta(state_dir: Path, base: HeldVersion, new: HeldVersion, limit_bytes: int) -> HeldVersion | None:
    """The delta from ``base`` to ``new``; None when it would be larger than ``limit_bytes``. Blocks.

    Raises:
        StorageError, OSError: a version can't be read, or the delta can't be written.
    """
    folder = make_delta_folder(state_dir)
    found = None
    try:
        folder.mkdir()
        with (folder / "delta").open("wb") as file:
            is_useful = write_delta(base.manifest, base.content, new.manifest, new.content, file, limit_bytes)
        if is_useful:
            items = find_files(folder)
            content = FolderContent(folder, items, file_states(folder, items))
            manifest = make_manifest("delta", items, content)
            have = np.ones(len(manifest.chunks), dtype=np.bool_)
            found = HeldVersion("", new.number, manifest, content, have, folder=folder)
    finally:
        if found is None:
            shutil.rmtree(folder.parent, ignore_errors=True)
    return found
