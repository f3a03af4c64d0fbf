# SPDX-License-Identifier: Apache-2.0
"""Reads parts of stored members to memory, the parts of many members in one call of the store.

Sizes were checked with the manifest and places are checked here, so no byte is written outside the
memory of a read. A chunk that is lost, or has another size than the manifest says, is an error: memory that
was partly filled is never returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mooncake.compat.objects.chunk_writer import registered
from mooncake.compat.objects.manifest import StoredChunk, StoredMember, runs_in_chunks

Runs: TypeAlias = list[tuple[int, int]]
"""(start, length) in a member's bytes, which arrive in memory one after the other."""


@dataclass(frozen=True, slots=True)
class MemberRead:
    """``runs`` of ``member`` to ``address``, where ``size_bytes`` belong to the reader."""

    member: StoredMember
    runs: Runs
    address: int
    size_bytes: int
    is_registered: bool = False
    is_callers: bool = False
    """The memory was given by the caller of this package."""
    by_chunk: bool = False
    """All chunks are read as whole objects."""

    def check(self) -> None:
        """Check that the runs lie in the member and fit in the memory.

        Raises:
            ValueError: they do not.
        """
        limit = self.member.size_bytes
        if any(start < 0 or length < 0 or start + length > limit for start, length in self.runs):
            raise ValueError(f"read of {self.member.key}: outside its {limit} bytes")
        wanted = sum(length for _, length in self.runs)
        if wanted > self.size_bytes:
            raise ValueError(f"read of {self.member.key}: {wanted} bytes do not fit in {self.size_bytes}")


MemberPlan: TypeAlias = Generator[Sequence[MemberRead], None, Any]
"""Steps to read a value: yields what must be in memory before it goes on, returns the value."""


def whole(member: StoredMember) -> Runs:
    return [(0, member.size_bytes)]


def together(plans: Mapping[str, MemberPlan]) -> MemberPlan:
    """Plan of several plans, whose steps are taken together; its value is a dict of theirs."""
    values: dict[str, Any] = {}
    active = dict(plans)
    try:
        while active:
            reads: list[MemberRead] = []
            for name, plan in list(active.items()):
                try:
                    reads.extend(next(plan))
                except StopIteration as end:
                    values[name] = end.value
                    del active[name]
            if reads:
                yield reads
    finally:
        for plan in active.values():
            plan.close()
    return {name: values[name] for name in plans}


def carry_out(reader: ChunkReader, plans: Mapping[str, MemberPlan]) -> dict[str, Any]:
    """Run plans, the reads of a step in one call of the store; returns their values."""
    steps = together(plans)
    while True:
        try:
            reads = next(steps)
        except StopIteration as end:
            values: dict[str, Any] = end.value
            return values
        try:
            reader.read(reads)
        except BaseException:
            steps.close()
            raise


class ChunkReader:
    """Reads with the fastest calls that the store has."""

    def __init__(self, store: Any) -> None:
        self._store = store
        can_register = self._has("register_buffer") and self._has("unregister_buffer")
        self._has_ranges = can_register and self._has("get_into_ranges")
        self._has_get_into = can_register and self._has("get_into")
        self._has_batch = can_register and self._has("batch_get_into")

    def read_manifest(self, key: str) -> bytes:
        """Bytes of a manifest, whose size is not known.

        Raises:
            RuntimeError: there is none.
        """
        found = self._store.get(key)
        if not found:
            raise RuntimeError(f"bundle manifest {key} is not in the store; it was removed or evicted")
        return bytes(found)

    def get_tensor(self, key: str) -> Any:
        """Tensor that the store's own call wrote.

        Raises:
            RuntimeError: it is lost, or this store cannot read tensors.
        """
        if not self._has("get_tensor"):
            raise RuntimeError(f"read of {key}: the store does not support get_tensor")
        tensor = self._store.get_tensor(key)
        if tensor is None:
            raise RuntimeError(f"get_tensor failed for {key}: it is not in the store")
        return tensor

    def read(self, reads: Iterable[MemberRead]) -> None:
        """Carry out reads.

        Raises:
            RuntimeError: a chunk is lost.
            ValueError: a read is outside its member or its memory.
        """
        by_chunk: list[MemberRead] = []
        in_ranges: list[MemberRead] = []
        for read in reads:
            read.check()
            if any(length for _, length in read.runs):
                (by_chunk if read.by_chunk else in_ranges).append(read)
        if by_chunk and not (self._has_batch and self._with_registration(by_chunk, self._read_chunks)):
            self._copy(by_chunk)
        if in_ranges and not (self._has_ranges and self._with_registration(in_ranges, self._read_ranges)):
            self._copy(in_ranges)

    def _with_registration(self, reads: list[MemberRead], act: Any) -> bool:
        with ExitStack() as stack:
            for read in reads:
                if not read.is_registered and not stack.enter_context(
                    registered(self._store, read.address, read.size_bytes)
                ):
                    return False
            act(reads)
        return True

    def _read_chunks(self, reads: list[MemberRead]) -> None:
        chunks: list[StoredChunk] = []
        addresses: list[int] = []
        for read in reads:
            address = read.address
            for chunk in read.member.chunks:
                chunks.append(chunk)
                addresses.append(address)
                address += chunk.size_bytes
        keys, sizes = [chunk.key for chunk in chunks], [chunk.size_bytes for chunk in chunks]
        for chunk, got in zip(chunks, self._store.batch_get_into(keys, addresses, sizes), strict=True):
            _expect("batch_get_into", chunk, got)

    def _read_ranges(self, reads: list[MemberRead]) -> None:
        if self._has_get_into and len(reads) == 1 and _is_one_object(reads[0]):
            chunk = reads[0].member.chunks[0]
            _expect("get_into", chunk, self._store.get_into(chunk.key, reads[0].address, chunk.size_bytes))
            return
        keys: list[list[str]] = []
        places: list[list[list[int]]] = []
        sources: list[list[list[int]]] = []
        sizes: list[list[list[int]]] = []
        for read in reads:
            of_chunk: dict[int, tuple[list[int], list[int], list[int]]] = {}
            for number, source, place, length in runs_in_chunks(read.member.chunks, read.runs):
                row = of_chunk.setdefault(number, ([], [], []))
                row[0].append(place)
                row[1].append(source)
                row[2].append(length)
            keys.append([read.member.chunks[number].key for number in of_chunk])
            places.append([row[0] for row in of_chunk.values()])
            sources.append([row[1] for row in of_chunk.values()])
            sizes.append([row[2] for row in of_chunk.values()])
        found = self._store.get_into_ranges([read.address for read in reads], keys, places, sources, sizes)
        for keys_of_read, wanted, got in zip(keys, sizes, found, strict=True):
            for key, lengths, results in zip(keys_of_read, wanted, got, strict=True):
                if list(results) != lengths:
                    raise RuntimeError(
                        f"get_into_ranges failed for {key}: expected {lengths[:4]}, got {results[:4]}"
                    )

    def _copy(self, reads: list[MemberRead]) -> None:
        """Read with ``get``."""
        for read in reads:
            held: tuple[int, bytes] = (-1, b"")
            for number, source, place, length in runs_in_chunks(read.member.chunks, read.runs):
                if held[0] != number:
                    held = (number, self._get(read.member.chunks[number]))
                part = np.frombuffer(held[1], dtype=np.uint8, count=length, offset=source)
                ctypes.memmove(read.address + place, part.ctypes.data, length)

    def _get(self, chunk: StoredChunk) -> bytes:
        found = self._store.get(chunk.key)
        _expect("get", chunk, len(found))
        return bytes(found)

    def _has(self, name: str) -> bool:
        return callable(getattr(self._store, name, None))


def _is_one_object(read: MemberRead) -> bool:
    return len(read.member.chunks) == 1 and not read.is_callers and read.runs == whole(read.member)


def _expect(call: str, chunk: StoredChunk, got: int) -> None:
    if got != chunk.size_bytes:
        raise RuntimeError(f"{call} failed for {chunk.key}: expected {chunk.size_bytes} bytes, got {got}")
