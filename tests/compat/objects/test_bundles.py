# SPDX-License-Identifier: Apache-2.0
"""Bundles are found complete or not at all; their chunks are written and read without a byte elsewhere."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from mooncake.compat.objects.bundles import (
    SMALL_BYTES,
    ByteSource,
    ChunkReader,
    ChunkWriter,
    MemberRead,
    carry_out,
    registered,
    remove_keys,
    source_of,
)
from mooncake.compat.objects.manifest import StoredChunk, StoredMember
from mooncake.compat.objects.transfer import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    StructuredObjectPayload,
    export_ref,
)
from mooncake.compat.objects.values import RowSelection, select_rows
from mooncake.store import BufferPool, MooncakeDistributedStore, ReplicateConfig
from tests.compat.objects.plain_store import PlainStore

VALUES = {"a": np.arange(100), "b": b"x" * 70, "c": np.empty((3, 0))}
PAYLOAD = StructuredObjectPayload({"step": 1}, VALUES)


def num_puts() -> int:
    plain = PlainStore()
    MooncakeBundleTransfer(plain).put_structured_object(PAYLOAD, chunk_bytes=64)
    return len(plain.order)


@pytest.mark.parametrize("fail_at", range(num_puts()))
def test_an_interrupted_put_leaves_nothing(fail_at: int) -> None:
    plain = PlainStore(fail_at=fail_at)
    with pytest.raises(RuntimeError, match="-200"):
        MooncakeBundleTransfer(plain).put_structured_object(PAYLOAD, chunk_bytes=64)
    assert len(plain.order) == fail_at
    assert plain.objects == {}


def test_the_manifest_is_written_last_and_is_all_that_a_reader_needs(plain: PlainStore) -> None:
    ref = MooncakeBundleTransfer(plain).put_structured_object(PAYLOAD, chunk_bytes=64)
    assert plain.order[-1] == ref.manifest_key
    reader = MooncakeBundleTransfer(plain)
    found = reader.materialize(reader.read_spec({"manifest_key": ref.manifest_key}))
    assert found.metadata["step"] == 1
    assert found.objects["a"].tolist() == list(range(100))
    assert found.objects["b"] == VALUES["b"]
    assert found.objects["c"].shape == (3, 0)
    reader.remove_bundle({"manifest_key": ref.manifest_key})
    assert plain.objects == {}


@pytest.mark.parametrize("change", [lambda data: b"", lambda data: data[:-1], lambda data: data + b"x"])
def test_a_lost_or_cut_chunk_is_an_error(plain: PlainStore, change: object) -> None:
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put_structured_object(PAYLOAD, chunk_bytes=64)
    for key in [key for key in plain.order if key != ref.manifest_key]:
        data = plain.objects[key]
        plain.objects[key] = change(data)  # type: ignore[operator]
        with pytest.raises(RuntimeError, match="expected"):
            transfer.materialize(transfer.read_spec(ref))
        plain.objects[key] = data
    assert transfer.materialize(transfer.read_spec(ref)).objects["b"] == VALUES["b"]


def test_a_manifest_that_is_not_there_is_named(plain: PlainStore) -> None:
    transfer = MooncakeBundleTransfer(plain, key_prefix="rl")
    with pytest.raises(RuntimeError, match="rl/default/1/manifest is not in the store"):
        transfer.materialize(transfer.read_spec({"manifest_key": "rl/default/1/manifest"}))
    with pytest.raises(TypeError, match="RemoteBundleRef"):
        transfer.remove_bundle(5)  # type: ignore[arg-type]


def test_a_removal_that_failed_is_repeated_by_the_key(
    plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put_structured_object(PAYLOAD, chunk_bytes=64)
    busy = next(key for key in plain.order if "/buffer/b" in key)
    with monkeypatch.context() as patched:
        remove = plain.remove
        patched.setattr(plain, "remove", lambda key, force=False: -706 if key == busy else remove(key, force))
        with pytest.raises(RuntimeError, match="-706"):
            transfer.remove_bundle({"manifest_key": ref.manifest_key})
    assert plain.objects.keys() == {busy, ref.manifest_key}
    transfer.remove_bundle({"manifest_key": ref.manifest_key})
    assert plain.objects == {}
    transfer.remove_bundle({"manifest_key": ref.manifest_key})


def test_a_store_that_cannot_be_reached_is_no_removal(plain: PlainStore) -> None:
    class Unreachable(PlainStore):
        code = -900

        def get(self, key: str) -> bytes:
            return b""

        def is_exist(self, key: str) -> int:
            return self.code

    store = Unreachable()
    key = {"manifest_key": "bundle/default/1/manifest"}
    with pytest.raises(RuntimeError, match="cannot be read; try again"):
        MooncakeBundleTransfer(store).remove_bundle(key)
    store.code = 0
    MooncakeBundleTransfer(store).remove_bundle(key)


class Forgetful(PlainStore):
    """A store whose next ``get`` finds nothing, as when its connection breaks."""

    is_lost = False

    def get(self, key: str) -> bytes:
        if self.is_lost:
            self.is_lost = False
            return b""
        return super().get(key)


def test_keys_of_a_bundle_remove_nothing() -> None:
    store = Forgetful()
    transfer = MooncakeBundleTransfer(store)
    key = transfer.put_bundle(b"v1", {"x": b"abc"}).manifest_key
    there = dict(store.objects)
    store.is_lost = True
    with pytest.raises(RuntimeError, match="cannot be read; try again"):
        transfer._bundles.keys({"manifest_key": key})
    assert store.objects == there
    assert transfer._bundles.keys({"manifest_key": key})[-1] == key
    store.is_lost = True
    with pytest.raises(RuntimeError, match="cannot be read; try again"):
        transfer._bundles.remove([{"manifest_key": key}], keep=[key])
    assert store.objects == there


def test_a_removal_that_loses_the_manifest_names_what_is_left() -> None:
    store = Forgetful()
    transfer = MooncakeBundleTransfer(store)
    key = transfer.put_bundle(b"v1", {"x": b"abc"}).manifest_key
    store.is_lost = True
    with pytest.raises(RuntimeError, match="was removed: the objects under ") as caught:
        transfer.remove_bundle({"manifest_key": key})
    root = key.removesuffix("manifest")
    assert f"{root} " in str(caught.value)
    assert store.objects and all(one.startswith(root) for one in store.objects)


def test_one_damaged_bundle_does_not_keep_the_others(plain: PlainStore) -> None:
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put_dataproto({"a": np.arange(2)}, stage="first")
    ref = transfer.append_dataproto_fields(ref, {"b": np.arange(2)}, stage="second")
    plain.objects[ref.stage_refs["first"].manifest_key] = b"damaged"
    left = {key for key in plain.objects if key.startswith(ref.stage_refs["first"].manifest_key[:-9])}
    with pytest.raises(ValueError, match="manifest"):
        transfer.cleanup_dataproto(export_ref(ref))
    assert plain.objects.keys() == left


def test_metadata_of_any_size_is_an_error_that_says_so(plain: PlainStore) -> None:
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put_structured_object(PAYLOAD)
    meta = ref.manifest["meta"]
    meta |= {"bytes": 1 << 48, "chunks": [{"key": meta["key"], "bytes": 1 << 48}]}
    with pytest.raises(RuntimeError, match=meta["key"]):
        transfer.materialize(transfer.read_spec(ref))


@pytest.mark.parametrize("copy_mode", ["auto", "copy", "zero_copy"])
@pytest.mark.parametrize("put_mode", ["auto", "batch", "parallel"])
def test_the_store_returns_what_was_put(
    store: MooncakeDistributedStore, copy_mode: str, put_mode: str
) -> None:
    transfer = MooncakeBundleTransfer(store, default_chunk_bytes=1 << 20)
    values: dict[str, Any] = {
        "large": np.arange(300_000),
        "small": np.arange(7.0),
        "none": b"",
        "text": b"abc",
    }
    ref = transfer.put_structured_object(
        StructuredObjectPayload(buffers=values),
        policy=BundleTransferPolicy(put_mode=put_mode, copy_mode=copy_mode),
    )
    found = transfer.materialize(transfer.read_spec(ref)).objects
    assert np.array_equal(found["large"], values["large"])
    assert np.array_equal(found["small"], values["small"])
    assert (found["none"], found["text"]) == (b"", b"abc")
    transfer.remove_bundle(ref)
    assert store.get(ref.manifest_key) == b""
    with pytest.raises(RuntimeError):
        transfer.materialize(transfer.read_spec(ref))
    transfer.remove_bundle(ref)


def test_a_refusal_of_the_store_is_an_error(store: MooncakeDistributedStore) -> None:
    config = ReplicateConfig()
    config.replica_num = 0
    for value in (b"1", np.zeros(2 << 20, np.uint8)):
        with pytest.raises(RuntimeError, match=r"failed.*-600"):
            MooncakeBundleTransfer(store).put_bundle(b"meta", {"x": value}, config=config)


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


def test_memory_is_registered_until_its_last_user_is_done() -> None:
    store = FastStore()
    first, inner, last = (registered(store, 1000 + at, size) for at, size in ((0, 100), (20, 50), (0, 100)))
    assert first.__enter__() and inner.__enter__() and last.__enter__()
    assert store.registered == {1000}
    for done in (first, last):
        done.__exit__(None, None, None)
        assert store.registered == {1000}
    inner.__exit__(None, None, None)
    assert store.registered == set()


def test_memory_of_the_program_stays_registered() -> None:
    store = FastStore(register_code=-600)
    store.registered = {1000}
    with registered(store, 1000, 10) as is_registered:
        assert is_registered
    assert store.registered == {1000}
    with registered(FastStore(register_code=-1), 1000, 10) as is_registered:
        assert not is_registered


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


DATA = bytes(range(100))


def a_member(store: Any, name: str) -> StoredMember:
    sizes = (40, 40, 20)
    chunks = tuple(StoredChunk(f"{name}/{number}", size) for number, size in enumerate(sizes))
    for number, chunk in enumerate(chunks):
        store.put(chunk.key, DATA[number * 40 : number * 40 + chunk.size_bytes])
    return StoredMember(name, 100, chunks)


def a_read(member: StoredMember, runs: list[tuple[int, int]], memory: Any, **more: Any) -> MemberRead:
    return MemberRead(member, runs, int(memory.ctypes.data), memory.nbytes, **more)


RUNS = [[(0, 100)], [(39, 2)], [(99, 1), (0, 1), (35, 50)], [(10, 0)], [(5, 3), (5, 3)]]


@pytest.mark.parametrize("runs", RUNS)
def test_runs_arrive_one_after_the_other(
    store: MooncakeDistributedStore, plain: PlainStore, runs: list[tuple[int, int]]
) -> None:
    wanted = b"".join(DATA[start : start + length] for start, length in runs)
    for each in (store, plain):
        member = a_member(each, "runs")
        memory = np.full(len(wanted) + 8, 255, np.uint8)
        ChunkReader(each).read([a_read(member, runs, memory)])
        assert memory.tobytes() == wanted + b"\xff" * 8


@pytest.mark.parametrize("runs", [[(0, 101)], [(100, 1)], [(-1, 1)], [(0, 60), (0, 5)], [(5, -1)]])
def test_what_does_not_fit_is_not_read(plain: PlainStore, runs: list[tuple[int, int]]) -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match=r"outside its 100 bytes|do not fit"):
        ChunkReader(plain).read([a_read(a_member(plain, "x"), runs, memory)])
    assert not memory.any()


def _counted(calls: list[str], name: str, call: Any) -> Any:
    def counted(*args: Any) -> Any:
        calls.append(name)
        return call(*args)

    return counted


def test_many_members_are_one_call(store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("get_into_ranges", "batch_get_into", "get_into", "get"):
        monkeypatch.setattr(store, name, _counted(calls, name, getattr(store, name)))
    memories = [np.zeros(100, np.uint8) for _ in range(4)]
    reads = [
        a_read(a_member(store, f"many{n}"), [(0, 100)], memory, by_chunk=n > 1)
        for n, memory in enumerate(memories)
    ]

    def plan(read: MemberRead) -> Any:
        yield [read]
        return read.member.key

    found = carry_out(ChunkReader(store), {read.member.key: plan(read) for read in reads})
    assert list(found) == ["many0", "many1", "many2", "many3"]
    assert sorted(calls) == ["batch_get_into", "get_into_ranges"]
    assert all(memory.tobytes() == DATA for memory in memories)


def test_a_failed_read_ends_all_plans(plain: PlainStore) -> None:
    ended: list[str] = []

    def plan(name: str, member: StoredMember) -> Any:
        try:
            yield [a_read(member, [(0, 100)], np.zeros(100, np.uint8))]
        finally:
            ended.append(name)

    good, lost = a_member(plain, "good"), a_member(plain, "lost")
    plain.remove("lost/1")
    with pytest.raises(RuntimeError, match="lost/1: expected 40 bytes, got 0"):
        carry_out(ChunkReader(plain), {"good": plan("good", good), "lost": plan("lost", lost)})
    assert sorted(ended) == ["good", "lost"]


def test_neighbouring_rows_are_one_run() -> None:
    assert RowSelection(np.array([1, 2, 3, 7, 7, 0])).byte_runs(10) == [(10, 30), (70, 10), (70, 10), (0, 10)]
    assert RowSelection(np.array([], dtype=np.int64)).byte_runs(10) == []
    offsets = np.array([0, 2, 2, 5, 9])
    assert RowSelection(np.array([1, 2, 0])).ragged_runs(offsets, 4) == [(8, 12), (0, 8)]
    selected = select_rows([-1, 0], 4)
    assert selected is not None and selected.indices.tolist() == [3, 0]
    with pytest.raises(IndexError, match="3 of 2 rows"):
        select_rows(selected, 2)
