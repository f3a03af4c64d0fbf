# SPDX-License-Identifier: Apache-2.0
"""Writes the members of one bundle to the store, in chunks.

A member is a list of spans that are stored one after the other. Small ones are collected and put by value in
one call, large ones are put from where they are; spans that must be joined first go through a lease of the
pool or through fresh memory, one chunk at a time. Every key is noted before it is written, so that ``undo``
removes all that an interrupted write may have left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake.compat.objects.manifest import StoredChunk, StoredMember
from mooncake.compat.objects.storage_group import for_keys
from mooncake.compat.objects.values import BundleTransferPolicy, TensorObjectBuffer
from mooncake.log import get_logger

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


@contextmanager
def registered(store: Any, address: int, size: int) -> Iterator[bool]:
    """Register memory for the block, unless it is registered already; False when the store refuses."""
    code = store.register_buffer(address, size)
    try:
        yield code in (0, ALREADY_REGISTERED)
    finally:
        if code == 0:
            store.unregister_buffer(address)


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
    failed = {key: code for key in left if (code := store.remove(key, True)) not in (0, GONE)}
    if failed:
        key, code = next(iter(failed.items()))
        raise RuntimeError(f"remove failed for {len(failed)} keys, one is {key}: {code}")
