# SPDX-License-Identifier: Apache-2.0
"""Which calls write a member, and that memory is registered only for their time."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from mooncake.compat.objects.chunk_writer import SMALL_BYTES, ByteSource, ChunkWriter, remove_keys, source_of
from mooncake.compat.objects.values import BundleTransferPolicy
from mooncake.store import BufferPool, MooncakeDistributedStore, ReplicateConfig
from tests.compat.objects.plain_store import PlainStore


class FastStore(PlainStore):
    """With batches and registered memory."""

    def __init__(self, register_code: int = 0) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.registered: set[int] = set()
        self.register_code = register_code

    def register_buffer(self, address: int, size: int) -> int:
        if not self.register_code:
            self.registered.add(address)
        return self.register_code

    def unregister_buffer(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.calls.append(("batch_put_from", len(keys)))
        return [
            self.put(key, ctypes.string_at(address, size))
            for key, address, size in zip(keys, addresses, sizes, strict=True)
        ]

    def put_batch(self, keys: list[str], values: list[Any]) -> int:
        self.calls.append(("put_batch", len(keys)))
        return next(
            (code for key, value in zip(keys, values, strict=True) if (code := self.put(key, value))), 0
        )


LARGE = np.arange(SMALL_BYTES // 4, dtype=np.int64)  # two chunks of SMALL_BYTES


def write(store: Any, sources: list[ByteSource], pool: Any = None, **policy: Any) -> list[bytes]:
    writer = ChunkWriter(store, pool, SMALL_BYTES, BundleTransferPolicy(**policy), None)
    members = [writer.put(f"k{number}", source) for number, source in enumerate(sources)]
    writer.flush()
    return [b"".join(store.get(chunk.key) for chunk in member.chunks) for member in members]


def parts(array: np.ndarray[Any, Any], num: int) -> ByteSource:
    return ByteSource(tuple(np.array_split(array.view(np.uint8), num)))


def test_small_members_are_put_in_one_call() -> None:
    store = FastStore()
    assert write(store, [source_of(b"abc"), source_of(b""), source_of(b"de")]) == [b"abc", b"", b"de"]
    assert store.calls == [("put_batch", 2)]


def test_a_large_member_is_put_from_its_memory() -> None:
    store = FastStore()
    assert write(store, [source_of(LARGE)]) == [LARGE.tobytes()]
    assert store.calls == [("batch_put_from", 2)] and not store.registered


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        ({"copy_mode": "copy"}, [("put_batch", 3)]),
        ({"copy_mode": "zero_copy"}, [("batch_put_from", 2), ("batch_put_from", 1)]),
        ({"put_mode": "batch"}, [("batch_put_from", 2), ("batch_put_from", 1)]),
    ],
)
def test_a_policy_chooses_the_calls(policy: dict[str, Any], calls: list[tuple[str, int]]) -> None:
    store = FastStore()
    assert write(store, [source_of(LARGE), source_of(b"x")], **policy) == [LARGE.tobytes(), b"x"]
    assert store.calls == calls and not store.registered


def test_memory_that_cannot_be_registered_is_copied_or_refused() -> None:
    assert write(FastStore(register_code=-1), [source_of(LARGE)]) == [LARGE.tobytes()]
    assert write(FastStore(register_code=-600), [source_of(LARGE)]) == [LARGE.tobytes()], "registered already"
    with pytest.raises(RuntimeError, match="zero-copy put"):
        write(FastStore(register_code=-1), [source_of(LARGE)], copy_mode="zero_copy")
    with pytest.raises(RuntimeError, match="zero-copy put"):
        write(PlainStore(), [source_of(b"x")], copy_mode="zero_copy")
    with pytest.raises(RuntimeError, match="zero-copy put"):
        write(FastStore(), [parts(LARGE, 2)], copy_mode="zero_copy")


@pytest.mark.parametrize("num", [1, 2, 7, 5000])
def test_parts_are_joined(num: int) -> None:
    assert write(FastStore(), [parts(LARGE, num)]) == [LARGE.tobytes()]
    assert write(PlainStore(), [parts(LARGE, num)]) == [LARGE.tobytes()]


def test_parts_are_joined_in_leases(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, max_bytes=2 * SMALL_BYTES)
    assert write(store, [parts(LARGE, 9), parts(LARGE[:10], 3)], pool) == [
        LARGE.tobytes(),
        LARGE[:10].tobytes(),
    ]
    pool.close()
    remove_keys(store, ["k0/chunk/0", "k0/chunk/1", "k1"])


def test_a_call_with_several_keys_has_a_group_for_each(store: MooncakeDistributedStore) -> None:
    config = ReplicateConfig()
    config.group_ids = ["g"]
    writer = ChunkWriter(store, None, SMALL_BYTES, BundleTransferPolicy(), config)
    writer.put("g0", source_of(LARGE))
    writer.put("g1", source_of(b"a"))
    writer.put("g2", source_of(b"b"))
    writer.flush()
    assert store.get("g0/chunk/1") and store.get("g2") == b"b"
    assert config.group_ids == ["g"]
    writer.undo()
    assert [store.is_exist(key) for key in ("g0/chunk/0", "g0/chunk/1", "g1", "g2")] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_inflight_put": 0}, "max_inflight_put"),
        ({"put_mode": "x"}, "put_mode"),
        ({"copy_mode": "x"}, "copy_mode"),
    ],
)
def test_a_policy_that_is_none_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        write(PlainStore(), [], **change)
    with pytest.raises(ValueError, match="chunk_bytes"):
        ChunkWriter(PlainStore(), None, 0, BundleTransferPolicy(), None)


def test_what_cannot_be_removed_is_named() -> None:
    class Busy(PlainStore):
        def remove(self, key: str, force: bool = False) -> int:
            return -706 if key == "b" else super().remove(key, force)

    store = Busy()
    store.objects = {"a": b"", "b": b""}
    with pytest.raises(RuntimeError, match="1 keys, one is b: -706"):
        remove_keys(store, ["a", "b", "gone"])
    assert store.objects.keys() == {"b"}
