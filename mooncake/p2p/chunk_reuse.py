# SPDX-License-Identifier: Apache-2.0
"""Chunks that need not be loaded: those that other versions here have, and those that a delta makes.

Nothing is written that has not been compared with its digest, wherever it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mooncake.errors import StorageError
from mooncake.p2p.content import Content
from mooncake.p2p.download import Bits
from mooncake.p2p.held_version import HeldVersion
from mooncake.p2p.manifest import Manifest

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
