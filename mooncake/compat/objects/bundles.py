# SPDX-License-Identifier: Apache-2.0
"""Bundles in a store: metadata and named members under one manifest, written and read in chunks.

The manifest is written last, so a put is found complete or not at all; an interrupted put removes what it
wrote. The manifest is also removed last: a removal that failed or died half way is repeated by its key, and a
bundle without a manifest has been removed. A reader finds an error in one that is being removed, never wrong
bytes. A bundle may be put on top of another: its manifest then also has the members of that one, whose
objects stay where they are and are removed with the new bundle. All objects of a bundle may be in one group
of the store, and are then evicted together.

A member is a list of spans that are stored one after the other. Small ones are collected and put by value in
one call, large ones are put from where they are; spans that must be joined first go through a lease of the
pool or through fresh memory, one chunk at a time. Every key is noted before it is written, so that ``undo``
removes all that an interrupted write may have left. The parts of many members are read in one call. Sizes
were checked with the manifest and places are checked here, so no byte is written outside the memory of a
read; a chunk that is lost, or has another size than the manifest says, is an error.
"""

from __future__ import annotations

import copy
import ctypes
import threading
import uuid
from bisect import bisect_right, insort
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake.compat.objects import manifest
from mooncake.compat.objects.manifest import (
    BundleManifest,
    RemoteBundleRef,
    StoredChunk,
    StoredMember,
    runs_in_chunks,
)
from mooncake.compat.objects.values import BundleTransferPolicy, TensorObjectBuffer
from mooncake.compat.store.public_types import ReplicateConfig
from mooncake.log import get_logger

# Groups of the store ------------------------------------------------------------------------------------


def new_group() -> str:
    return f"structured-{uuid.uuid4().hex}"


def group_of(config: Any) -> str | None:
    """Group that a configuration names: None if it names none, "" if it asks for no group.

    Raises:
        ValueError: several groups, or one that is not a string.
    """
    ids = getattr(config, "group_ids", None)
    if ids is None or isinstance(ids, str):
        return ids
    ids = list(ids)
    if not all(isinstance(group, str) for group in ids):
        raise ValueError("config.group_ids must contain strings")
    if len(ids) > 1:
        raise ValueError(f"config.group_ids names {len(ids)} groups; a structured object has one")
    return ids[0] if ids else None


def in_group(config: Any, group: str | None) -> Any:
    """``config`` with this group; without one, ``config`` itself."""
    if group is None:
        return config
    changed = ReplicateConfig() if config is None else copy.copy(config)
    changed.group_ids = [group]
    return changed


def for_keys(config: Any, num_keys: int) -> Any:
    """Configuration of a call with ``num_keys`` keys, which has a group for each of them."""
    if config is None or not hasattr(config, "group_ids"):
        return config
    group = group_of(config)
    wanted = None if group is None else [group] * num_keys
    if config.group_ids == wanted:
        return config
    changed = copy.copy(config)
    changed.group_ids = wanted
    return changed


# Writing ------------------------------------------------------------------------------------------------

log = get_logger("mooncake.store")

Bytes: TypeAlias = npt.NDArray[np.uint8]

DEFAULT_BUNDLE_CHUNK_BYTES = 64 << 20
AUTO_PARALLEL_MIN_BYTES = DEFAULT_BUNDLE_CHUNK_BYTES
"""Larger members are several chunks, which the store sends side by side."""
SMALL_BYTES = 1 << 20
"""Members below this size are put by value: registering memory costs more than copying it."""
MAX_COLLECTED_BYTES = 64 << 20
ALREADY_REGISTERED = -600
GONE = -704


@dataclass(frozen=True, slots=True)
class ByteSource:
    """A member's bytes: ``spans`` one after the other."""

    spans: tuple[Bytes, ...]

    @property
    def size_bytes(self) -> int:
        return sum(span.nbytes for span in self.spans)


def source_of(value: Any) -> ByteSource:
    """Bytes of a contiguous buffer."""
    view = np.frombuffer(value, dtype=np.uint8) if memoryview(value).nbytes else np.empty(0, np.uint8)
    return ByteSource((view,))


class ChunkWriter:
    """Writes one bundle with one policy and configuration; ``flush`` or ``undo`` ends it."""

    def __init__(
        self, store: Any, pool: Any, chunk_bytes: int, policy: BundleTransferPolicy, config: Any
    ) -> None:
        policy.check()
        if type(chunk_bytes) is not int or chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes!r}")
        self._store = store
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._policy = policy
        self._config = config
        self._keys: list[str] = []
        self._collected: list[tuple[str, Bytes]] = []
        self._collected_bytes = 0
        self._can_register = all(
            callable(getattr(store, name, None))
            for name in ("batch_put_from", "register_buffer", "unregister_buffer")
        )

    def put(self, key: str, source: ByteSource) -> StoredMember:
        """Write a member.

        Raises:
            RuntimeError: the store refused, or a copy would be needed and is not allowed.
        """
        size = source.size_bytes
        if self._policy.copy_mode == "zero_copy" and (len(source.spans) != 1 or not self._can_register):
            raise RuntimeError(
                f"zero-copy put of {key}: needs one span of memory and a store with batch_put_from"
            )
        chunks = self._chunks_of(key, size)
        if chunks:
            self._keys.extend(chunk.key for chunk in chunks)
            self._put_chunks(chunks, source)
        return StoredMember(key, size, chunks)

    def refuse_zero_copy(self, key: str) -> None:
        """Refuse a plain tensor, which has no header in front of it, in a put that must not copy.

        Raises:
            ValueError: this is one.
        """
        if self._policy.copy_mode == "zero_copy":
            raise ValueError(
                f"zero-copy put of {key}: a tensor must lie in a BufferPool tensor-object buffer"
            )

    def put_by_value(self, key: str, value: bytes) -> StoredMember:
        """Write metadata, which is small and always copied."""
        chunks = self._chunks_of(key, len(value))
        view = np.frombuffer(value, dtype=np.uint8)
        self._keys.extend(chunk.key for chunk in chunks)
        for number, chunk in enumerate(chunks):
            start = number * self._chunk_bytes
            self._collect(chunk.key, view[start : start + chunk.size_bytes])
        return StoredMember(key, len(value), chunks)

    def put_tensor(self, key: str, tensor: Any) -> bool:
        """Write a tensor with the store's own calls; False when it has none that take the configuration."""
        name = "put_tensor" if self._config is None else "pub_tensor"
        call = getattr(self._store, name, None)
        if not callable(call):
            return False
        self._keys.append(key)
        code = call(key, tensor) if self._config is None else call(key, tensor, config=self._for(1))
        if code:
            raise RuntimeError(f"{name} failed for {key}: {code}")
        return True

    def put_tensor_object(self, key: str, value: TensorObjectBuffer) -> StoredMember:
        """Write a tensor object from registered memory, as one chunk."""
        self._keys.append(key)
        call = getattr(self._store, "put_tensor_from", None)
        if self._config is None and callable(call):
            code = call(key, value.ptr, value.size)
        elif callable(getattr(self._store, "batch_put_from", None)):
            code = self._batch_put_from([key], [value.ptr], [value.size])[0]
        else:
            raise RuntimeError(
                f"zero-copy put of {key}: the store has neither put_tensor_from nor batch_put_from"
            )
        if code:
            raise RuntimeError(f"put of a tensor object failed for {key}: {code}")
        return StoredMember(key, value.size, (StoredChunk(key, value.size),) if value.size else ())

    def flush(self) -> None:
        """Write what was collected. Afterwards everything is stored."""
        collected, self._collected, self._collected_bytes = self._collected, [], 0
        if not collected:
            return
        keys = [key for key, _ in collected]
        put_batch = getattr(self._store, "put_batch", None)
        if len(keys) > 1 and callable(put_batch):
            code = put_batch(keys, [value.data for _, value in collected], **self._keyword(len(keys)))
            if code:
                raise RuntimeError(f"put_batch of {len(keys)} keys failed: {code}")
            return
        for key, value in collected:
            code = self._store.put(key, value.data, **self._keyword(1))
            if code:
                raise RuntimeError(f"put failed for {key}: {code}")

    def put_manifest(self, key: str, value: bytes) -> None:
        """Write the manifest, after everything else was written."""
        assert not self._collected, "flush first: the manifest is written last"
        self._keys.insert(0, key)
        self._collect(key, np.frombuffer(value, dtype=np.uint8))
        self.flush()

    def undo(self) -> None:
        """Remove everything that may have been written. An error is logged: another one is the reason."""
        self._collected.clear()
        try:
            remove_keys(self._store, self._keys)
        except Exception as error:  # any store's; the caller's own error must be seen
            log.warning("bundle_undo_failed", keys=len(self._keys), error=str(error))

    def _chunks_of(self, key: str, size: int) -> tuple[StoredChunk, ...]:
        if size <= self._chunk_bytes:
            return (StoredChunk(key, size),) if size else ()
        starts = range(0, size, self._chunk_bytes)
        return tuple(
            StoredChunk(f"{key}/chunk/{number}", min(self._chunk_bytes, size - start))
            for number, start in enumerate(starts)
        )

    def _put_chunks(self, chunks: Sequence[StoredChunk], source: ByteSource) -> None:
        size = source.size_bytes
        by_address = self._policy.put_mode != "auto" or self._policy.copy_mode == "zero_copy"
        if self._policy.copy_mode == "copy" or not self._can_register:
            self._put_values(chunks, source)
        elif len(source.spans) == 1 and (by_address or size >= SMALL_BYTES):
            self._put_in_place(chunks, source.spans[0])
        elif self._pool is not None:
            self._put_leased(chunks, source)
        elif size < SMALL_BYTES:
            self._put_values(chunks, source)
        else:
            for chunk, part in zip(chunks, _joined(chunks, source), strict=True):
                self._put_in_place([chunk], part)

    def _put_values(self, chunks: Sequence[StoredChunk], source: ByteSource) -> None:
        for chunk, part in zip(chunks, _joined(chunks, source), strict=True):
            self._collect(chunk.key, part)

    def _collect(self, key: str, value: Bytes) -> None:
        self._collected.append((key, value))
        self._collected_bytes += value.nbytes
        if self._collected_bytes >= MAX_COLLECTED_BYTES:
            self.flush()

    def _put_in_place(self, chunks: Sequence[StoredChunk], memory: Bytes) -> None:
        start = int(memory.ctypes.data)
        with registered(self._store, start, memory.nbytes) as is_registered:
            if not is_registered:
                if self._policy.copy_mode == "zero_copy":
                    raise RuntimeError(f"zero-copy put of {chunks[0].key}: register_buffer failed")
                self._put_values(chunks, ByteSource((memory,)))
                return
            addresses, sizes = [], [chunk.size_bytes for chunk in chunks]
            for size in sizes:
                addresses.append(start)
                start += size
            self._put_addresses(chunks, addresses)

    def _put_leased(self, chunks: Sequence[StoredChunk], source: ByteSource) -> None:
        cursor = _Cursor(source.spans)
        for chunk in chunks:
            lease = self._pool.acquire(chunk.size_bytes)
            try:
                cursor.copy_to(np.frombuffer(lease.buffer, dtype=np.uint8, count=chunk.size_bytes))
                self._put_addresses([chunk], [int(lease.ptr)])
            finally:
                lease.release()

    def _put_addresses(self, chunks: Sequence[StoredChunk], addresses: list[int]) -> None:
        keys = [chunk.key for chunk in chunks]
        codes = self._batch_put_from(keys, addresses, [chunk.size_bytes for chunk in chunks])
        for key, code in zip(keys, codes, strict=True):
            if code:
                raise RuntimeError(f"batch_put_from failed for {key}: {code}")

    def _batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        found: list[int] = self._store.batch_put_from(keys, addresses, sizes, **self._keyword(len(keys)))
        return found

    def _for(self, num_keys: int) -> Any:
        return for_keys(self._config, num_keys)

    def _keyword(self, num_keys: int) -> dict[str, Any]:
        """The ``config`` argument, left out without one: not every store has it."""
        return {} if self._config is None else {"config": self._for(num_keys)}


class _Cursor:
    """Position in a list of spans that are copied in order."""

    def __init__(self, spans: Sequence[Bytes]) -> None:
        self._spans = iter([span for span in spans if span.nbytes])
        self._rest: Bytes = np.empty(0, dtype=np.uint8)

    def copy_to(self, target: Bytes) -> None:
        done = 0
        while done < target.nbytes:
            if not self._rest.nbytes:
                self._rest = next(self._spans)
            size = min(self._rest.nbytes, target.nbytes - done)
            target[done : done + size] = self._rest[:size]
            self._rest = self._rest[size:]
            done += size


def _joined(chunks: Sequence[StoredChunk], source: ByteSource) -> Iterator[Bytes]:
    """Bytes of each chunk, copied only if they lie in several spans."""
    if len(source.spans) == 1:
        start = 0
        for chunk in chunks:
            yield source.spans[0][start : start + chunk.size_bytes]
            start += chunk.size_bytes
        return
    cursor = _Cursor(source.spans)
    for chunk in chunks:
        part = np.empty(chunk.size_bytes, dtype=np.uint8)
        cursor.copy_to(part)
        yield part


@dataclass(slots=True)
class HeldRegistration:
    """Memory that ``registered`` registered, and how many blocks use it."""

    end: int
    num_users: int = 0


class Registrations:
    """Memory that is registered for the duration of calls, in all threads of this process.

    Two threads may put the same array at a time. The store registers it for one of them and refuses it to
    the other, as it does what the program has registered; so it is unregistered only after both.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_stores: dict[int, tuple[list[int], dict[int, HeldRegistration]]] = {}
        """Sorted addresses and registrations, by the ``id`` of a store in use."""

    def begin(self, store: Any, address: int, size: int) -> tuple[bool, int | None]:
        """Register memory, or use the registration that it lies in.

        Returns whether it is registered, and the argument for ``end``: None when there is nothing to end.
        """
        with self._lock:
            starts, held = self._of_stores.setdefault(id(store), ([], {}))
            try:
                start = starts[at - 1] if (at := bisect_right(starts, address)) else -1
                if start in held and address + size <= held[start].end:
                    held[start].num_users += 1
                    return True, start
                code = store.register_buffer(address, size)
                if code == 0:
                    insort(starts, address)
                    held[address] = HeldRegistration(address + size, 1)
                    return True, address
                return code == ALREADY_REGISTERED, None
            finally:
                if not held:
                    del self._of_stores[id(store)]

    def end(self, store: Any, start: int) -> None:
        with self._lock:
            starts, held = self._of_stores[id(store)]
            held[start].num_users -= 1
            if held[start].num_users:
                return
            del held[start]
            starts.remove(start)
            if not held:
                del self._of_stores[id(store)]
            store.unregister_buffer(start)


_registrations = Registrations()


@contextmanager
def registered(store: Any, address: int, size: int) -> Iterator[bool]:
    """Register memory for the block, unless it is registered already; False when the store refuses."""
    is_registered, start = _registrations.begin(store, address, size)
    try:
        yield is_registered
    finally:
        if start is not None:
            _registrations.end(store, start)


def remove_keys(store: Any, keys: Sequence[str]) -> None:
    """Remove objects, leased ones too. What is already gone, by eviction or by another process, is no error.

    Raises:
        RuntimeError: some are still there.
    """
    left = list(dict.fromkeys(keys))
    batch_remove = getattr(store, "batch_remove", None)
    if callable(batch_remove) and left:
        codes = batch_remove(left, True)
        left = [key for key, code in zip(left, codes, strict=True) if code not in (0, GONE)]
    _remove_each(store, left)


def _remove_each(store: Any, keys: Sequence[str]) -> None:
    failed = {key: code for key in keys if (code := store.remove(key, True)) not in (0, GONE)}
    if failed:
        key, code = next(iter(failed.items()))
        raise RuntimeError(f"remove failed for {len(failed)} keys, one is {key}: {code}")


# Reading ------------------------------------------------------------------------------------------------

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


def memory_for(what: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> np.ndarray[Any, Any]:
    """New array to read ``what`` to; what the store holds may claim any size.

    Raises:
        RuntimeError: the host does not have this much memory.
    """
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise RuntimeError(f"read of {what}: {error}; read some of its rows, or use a larger host") from error


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

    def find_manifest(self, key: str, is_unwanted: bool = False) -> bytes | None:
        """Bytes of a manifest; None only if the store says that there is none.

        A store with the three calls only says it when asked to remove what its ``get`` did not find. That is
        done for a bundle that ``is_unwanted``, and can remove the manifest of one whose ``get`` has failed.

        Raises:
            RuntimeError: the store does not say so; an empty answer may be that of a lost connection.
        """
        found = self._store.get(key)
        if found:
            return bytes(found)
        if self._has("is_exist"):
            is_gone = self._store.is_exist(key) == 0
        elif not is_unwanted:
            raise RuntimeError(
                f"bundle manifest {key} cannot be read; try again when the store is reachable (it has no "
                "is_exist, which would say whether the bundle was removed)"
            )
        else:
            code = self._store.remove(key, True)
            if code == 0:
                raise RuntimeError(
                    f"bundle manifest {key} could not be read, but was removed: the objects under "
                    f"{key.removesuffix('manifest')} that it listed are left; remove them by their names"
                )
            is_gone = code == GONE
        if not is_gone:
            raise RuntimeError(f"bundle manifest {key} cannot be read; try again when the store is reachable")
        return None

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


# Bundles ------------------------------------------------------------------------------------------------


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
            ValueError: a name or an option is invalid, or the base has a member of this name.
            RuntimeError: the store refused; nothing is left in it.
        """
        manifest.check_name(partition, "partition")
        for name in members:
            manifest.check_name(name)
        writer = self._writer(chunk_bytes, policy, config)
        below = None if base is None else self.open(base)
        both = sorted(members.keys() & below.members.keys()) if below is not None else []
        if both:
            raise ValueError(
                f"the bundle already has members named {both[:4]}; give the new ones other names"
            )
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
        """Bytes of a bundle's metadata.

        Raises:
            RuntimeError: they are lost, or do not fit in this host's memory.
        """
        memory = memory_for(found.meta.key, (found.meta.size_bytes,))
        address = int(memory.ctypes.data)
        self.reader.read([MemberRead(found.meta, whole(found.meta), address, memory.nbytes, by_chunk=True)])
        return memory.tobytes()

    def keys(self, ref: RemoteBundleRef | Mapping[str, Any]) -> list[str]:
        """Keys of a bundle, its manifest last; none when it was removed.

        Raises:
            RuntimeError: the store cannot be asked, or does not say that there is none.
            TypeError, ValueError: not a reference, or not a manifest of this prefix.
        """
        return self._keys(ref)

    def _keys(
        self, ref: RemoteBundleRef | Mapping[str, Any], other_than: Container[str] | None = None
    ) -> list[str]:
        """As ``keys``; the bundle is to be removed if its manifest is ``other_than`` some keys."""
        ref = ref_from(ref)
        document = ref.manifest
        if not document:
            is_unwanted = other_than is not None and ref.manifest_key not in other_than
            data = self.reader.find_manifest(ref.manifest_key, is_unwanted)
            if data is None:
                return []
            document = manifest.decode(data)
        return [*manifest.check(document, ref.manifest_key, self.prefix).keys(), ref.manifest_key]

    def remove(self, refs: Iterable[RemoteBundleRef | Mapping[str, Any]], keep: Iterable[str] = ()) -> None:
        """Remove bundles, except for the keys in ``keep``. What is already gone is no error.

        Raises:
            RuntimeError: some objects are still there; call it again, unless the message says that a manifest
                is lost, and under which prefix its objects are left.
            TypeError, ValueError: something is no reference to a bundle; the others are removed.
        """
        kept = set(keep)
        found: list[list[str]] = []
        error: Exception | None = None
        for ref in refs:
            try:
                found.append(self._keys(ref, other_than=kept))
            except (RuntimeError, TypeError, ValueError) as unreadable:
                error = error or unreadable
        remove_keys(self._store, [key for keys in found for key in keys[:-1] if key not in kept])
        _remove_each(self._store, [key for keys in found for key in keys[-1:] if key not in kept])
        if error is not None:
            raise error

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
    keys = [below_key, *manifest.keys_of(below.meta), *below.replaced_keys]
    return replace(
        found,
        members={**below.members, **found.members},
        other_ids=tuple(dict.fromkeys((below.object_id, *below.other_ids))),
        replaced_keys=tuple(dict.fromkeys(keys)),
    )
