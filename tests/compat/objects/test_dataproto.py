# SPDX-License-Identifier: Apache-2.0
"""DataProto: fields and rows of stages, appends, handles, and flat dicts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from mooncake.compat.objects.dataproto import object_array
from mooncake.compat.objects.transfer import (
    FieldSchema,
    MooncakeBundleTransfer,
    StructuredMemberSlice,
    export_ref,
    import_ref,
    is_dataproto_ref_handle,
    raw_destination,
    tensor_object_buffer,
)
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from tests.compat.objects.plain_store import PlainStore

IDS = np.arange(24).reshape(6, 4)
TEXT = object_array(["", "b", None, "dd", "e", "f"])


class Batch:
    """What verl's DataProto looks like from here."""

    def __init__(self, batch: Any = None, non_tensor_batch: Any = None, meta_info: Any = None) -> None:
        self.batch = batch
        self.non_tensor_batch = non_tensor_batch
        self.meta_info = meta_info

    @classmethod
    def from_dict(cls, tensors: Any, non_tensors: Any = None, meta_info: Any = None) -> Batch:
        return cls(tensors, non_tensors, meta_info)


@pytest.fixture
def transfer(plain: PlainStore) -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(plain, default_chunk_bytes=50)


def a_batch() -> Batch:
    return Batch(
        {"ids": IDS, "scores": torch.arange(6.0)}, {"text": TEXT, "n": np.arange(6)}, {"step": 7, "x": 1}
    )


@pytest.mark.parametrize("rows", [None, slice(1, 5), [5, 0, 5], StructuredMemberSlice(0, 1, 6, 2), []])
def test_fields_and_rows_from_another_process(store: MooncakeDistributedStore, rows: Any) -> None:
    handle = json.loads(json.dumps(export_ref(MooncakeBundleTransfer(store, "rl").put_dataproto(a_batch()))))
    reader = MooncakeBundleTransfer(store, "rl")
    found = reader.get_dataproto(handle, rows=rows, data_cls=Batch, meta_info_keys=["step", "none"])
    picked = np.arange(6)
    if rows is not None:
        picked = picked[slice(1, 6, 2) if isinstance(rows, StructuredMemberSlice) else rows].astype(int)
    assert np.array_equal(found.batch["ids"], IDS[picked])
    assert found.batch["scores"].tolist() == picked.tolist()
    assert found.non_tensor_batch["text"].tolist() == TEXT[picked].tolist()
    assert found.non_tensor_batch["n"].tolist() == picked.tolist()
    assert found.meta_info == {"step": 7}
    some = reader.get_dataproto(handle, fields=["text"], rows=rows)
    assert some["batch"] == {} and some["non_tensor_batch"].keys() == {"text"}
    reader.cleanup_dataproto(handle)
    with pytest.raises(RuntimeError, match="not in the store"):
        reader.get_dataproto(handle)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([6], IndexError),
        ([-7], IndexError),
        (["0"], TypeError),
        ([True], TypeError),
        ("01", TypeError),
        (3, TypeError),
        (slice(None, None, -1), ValueError),
        (StructuredMemberSlice(1, 0, 2), ValueError),
    ],
)
def test_rows_that_are_not_there(transfer: MooncakeBundleTransfer, rows: Any, error: type[Exception]) -> None:
    ref = transfer.put_dataproto(a_batch())
    with pytest.raises(error):
        transfer.get_dataproto(ref, rows=rows)


def test_appends_leave_what_was_there(transfer: MooncakeBundleTransfer, plain: PlainStore) -> None:
    first = transfer.put_dataproto({"ids": IDS}, stage="rollout")
    written = dict(plain.objects)
    second = transfer.append_dataproto_fields(first, {"values": IDS * 2}, stage="critic")
    third = transfer.append_dataproto_fields(export_ref(second), {"rewards": IDS * 3}, stage="rollout")
    assert written.items() <= plain.objects.items()
    assert transfer.get_dataproto(first)["batch"].keys() == {"ids"}
    found = transfer.get_dataproto(third, rows=[2])["batch"]
    assert {name: value.tolist() for name, value in found.items()} == {
        "ids": IDS[[2]].tolist(),
        "values": (IDS[[2]] * 2).tolist(),
        "rewards": (IDS[[2]] * 3).tolist(),
    }
    with pytest.raises(ValueError, match="already exist"):
        transfer.append_dataproto_fields(third, {"ids": IDS}, stage="other")
    with pytest.raises(ValueError, match="batch size"):
        transfer.append_dataproto_fields(third, {"more": IDS[:5]}, stage="other")
    transfer.cleanup_dataproto_append(second, third)
    assert transfer.get_dataproto(second)["batch"].keys() == {"ids", "values"}
    transfer.cleanup_dataproto(second)
    assert plain.objects == {}


def test_one_cleanup_removes_what_many_appends_wrote(
    transfer: MooncakeBundleTransfer, plain: PlainStore
) -> None:
    ref = transfer.put_dataproto({"f0": IDS}, stage="s")
    for number in range(1, 4):
        ref = transfer.append_dataproto_fields(ref, {f"f{number}": IDS}, stage="s")
    assert transfer.get_dataproto(ref)["batch"].keys() == {"f0", "f1", "f2", "f3"}
    transfer.cleanup_dataproto(export_ref(ref))
    assert plain.objects == {}


def test_a_field_with_the_name_of_a_part_of_another_is_refused(
    transfer: MooncakeBundleTransfer, plain: PlainStore
) -> None:
    first = transfer.put_dataproto(Batch({}, {"text": TEXT}), stage="s")
    before = dict(plain.objects)
    with pytest.raises(ValueError, match=r"non_tensor_batch\.text\.nulls"):
        transfer.append_dataproto_fields(first, Batch({}, {"text.nulls": np.arange(6)}), stage="s")
    assert plain.objects == before
    other = transfer.append_dataproto_fields(first, Batch({}, {"text.nulls": np.arange(6)}), stage="t")
    assert transfer.get_dataproto(other)["non_tensor_batch"]["text"].tolist() == TEXT.tolist()


def test_an_append_is_undone_when_what_it_was_based_on_is_gone(
    transfer: MooncakeBundleTransfer, plain: PlainStore
) -> None:
    first = export_ref(transfer.put_dataproto({"ids": IDS}, stage="s"))
    second = export_ref(transfer.append_dataproto_fields(first, {"more": IDS}, stage="t"))
    MooncakeBundleTransfer(plain).cleanup_dataproto(first)
    transfer.cleanup_dataproto_append(first, second)
    assert plain.objects == {}


def test_an_overwrite_that_cannot_remove_returns_the_new_reference(
    transfer: MooncakeBundleTransfer, plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = transfer.put_dataproto({"ids": IDS}, stage="s")

    def lose(key: str, force: bool = False) -> int:
        raise ConnectionError(key)

    monkeypatch.setattr(plain, "remove", lose)
    new = transfer.append_dataproto_fields(ref, {"ids": IDS + 1}, stage="s", overwrite=True)
    assert transfer.get_dataproto(new)["batch"]["ids"].tolist() == (IDS + 1).tolist()


def test_an_overwrite_replaces_a_stage(transfer: MooncakeBundleTransfer, plain: PlainStore) -> None:
    ref = transfer.put_dataproto(Batch({"ids": IDS}, {"text": TEXT}), stage="s")
    with pytest.raises(ValueError, match=r"must include existing fields: \['text'\]"):
        transfer.append_dataproto_fields(ref, {"ids": IDS}, stage="s", overwrite=True)
    new = transfer.append_dataproto_fields(
        ref, Batch({"ids": IDS + 1}, {"text": np.arange(6)}), stage="s", overwrite=True
    )
    assert new.encoded_non_tensor == {}
    assert transfer.get_dataproto(new)["batch"]["ids"].tolist() == (IDS + 1).tolist()
    assert ref.stage_refs["s"].manifest_key not in plain.objects
    transfer.cleanup_dataproto(new)
    assert plain.objects == {}


def test_a_failed_append_leaves_the_first_reference(plain: PlainStore) -> None:
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put_dataproto({"ids": IDS})
    before = dict(plain.objects)
    plain.fail_at = len(plain.order) + 1
    with pytest.raises(RuntimeError, match="-200"):
        transfer.append_dataproto_fields(ref, {"more": IDS}, stage="default")
    assert plain.objects == before
    assert transfer.get_dataproto(ref)["batch"]["ids"].tolist() == IDS.tolist()


def test_objects_of_a_dataproto_are_in_one_group(store: MooncakeDistributedStore) -> None:
    transfer = MooncakeBundleTransfer(store, default_chunk_bytes=64)
    config = ReplicateConfig()
    ref = transfer.put_dataproto(a_batch(), config=config)
    group = export_ref(ref)["storage_group_id"]
    assert group.startswith("structured-") and config.group_ids is None
    other = ReplicateConfig()
    other.group_ids = ["other"]
    with pytest.raises(ValueError, match="conflicts"):
        transfer.append_dataproto_fields(ref, {"more": IDS}, stage="s", config=other)
    more = transfer.append_dataproto_fields(export_ref(ref), {"more": IDS}, stage="s")
    assert export_ref(more)["storage_group_id"] == group
    other.group_ids = ["a", "b"]
    with pytest.raises(ValueError, match="group_ids"):
        transfer.put_dataproto(a_batch(), config=other)
    transfer.cleanup_dataproto(more)


def test_metadata_alone_is_not_stored(transfer: MooncakeBundleTransfer, plain: PlainStore) -> None:
    ref = transfer.put_dataproto(Batch(meta_info={"step": 1}))
    ref = transfer.append_dataproto_fields(ref, Batch(meta_info={"step": 2, "x": 3}), stage="s")
    assert plain.order == []
    assert transfer.get_dataproto(ref) == {
        "batch": {},
        "non_tensor_batch": {},
        "meta_info": {"step": 2, "x": 3},
    }
    assert transfer.append_dataproto_fields(ref, {"ids": IDS}, stage="s").batch_size == 6


def test_memory_of_the_caller_receives_rows(store: MooncakeDistributedStore) -> None:
    transfer = MooncakeBundleTransfer(store, default_chunk_bytes=50)
    ref = transfer.put_dataproto(a_batch())
    ids, scores = np.zeros((2, 4), IDS.dtype), np.zeros(304 + 8, np.uint8)
    found = transfer.get_dataproto(
        ref,
        batch_fields=["ids", "scores"],
        rows=[4, 1],
        destinations={"ids": ids, "scores": raw_destination(scores.ctypes.data, scores.nbytes, scores)},
    )["batch"]
    assert found["ids"] is ids and ids.tolist() == IDS[[4, 1]].tolist()
    assert scores[304:].view(np.float32).tolist() == [4.0, 1.0]
    small = raw_destination(scores.ctypes.data, 311, scores)
    with pytest.raises(ValueError, match="do not fit"):
        transfer.get_dataproto(ref, batch_fields=["scores"], rows=[4, 1], destinations={"scores": small})
    with pytest.raises(ValueError, match="does not support destinations"):
        transfer.get_dataproto(ref, fields=["text"], destinations={"text": ids})


def test_a_tensor_object_is_put_from_its_memory(store: MooncakeDistributedStore) -> None:
    from mooncake.store import _serialize_tensor

    head, _, _, keep = _serialize_tensor(torch.arange(6).reshape(3, 2))
    memory = np.concatenate([np.frombuffer(head, np.uint8), keep.reshape(-1).view(torch.uint8).numpy()])
    transfer = MooncakeBundleTransfer(store)
    source = tensor_object_buffer(memory.ctypes.data, memory.nbytes, memory, batch_size=3)
    ref = transfer.put_dataproto({"x": source})
    assert torch.equal(transfer.get_dataproto(ref, rows=[2, 0])["batch"]["x"], keep[[2, 0]])
    with pytest.raises(TypeError, match="batch_size"):
        transfer.put_dataproto({"x": tensor_object_buffer(memory.ctypes.data, memory.nbytes)})


def test_a_flat_dict_comes_back_flat(transfer: MooncakeBundleTransfer) -> None:
    data = {
        "ids": IDS,
        "tokens": [[1], [2, 3], [], [4], [5], [6]],
        "text": TEXT.tolist(),
        "tags": ["a", "b"],
        "step": 3,
        "none": [],
    }
    ref = transfer.put(data, type="dict")
    found = transfer.get(ref, type="dict")
    assert np.array_equal(found.pop("ids"), IDS)
    assert found == {name: value for name, value in data.items() if name != "ids"}
    assert set(ref.meta_info) == {"tags", "step", "none"}
    with pytest.raises(ValueError, match="ambiguous"):
        transfer.put({"a": [1], "b": [1, 2]}, type="dict")
    schema = FieldSchema("auto", metadata={"section": "meta_info"})
    ref = transfer.put({"a": [1], "b": [1, 2]}, type="dict", field_schemas={"a": schema})
    assert transfer.get(ref, type="dict", rows=[1]) == {"a": [1], "b": [2]}


@pytest.mark.parametrize(
    "change",
    [
        {"type": "x"},
        {"version": 9},
        {"kind": "x"},
        {"batch_size": -1},
        {"batch_size": "6"},
        {"stage_refs": []},
        {"stage_refs": {"default": {"manifest_key": ""}}},
        {"stage_refs": {}},
        {"field_index": {"ids": {"stage": "default", "member": "", "section": "batch"}}},
        {"field_index": {"ids": {"stage": "default", "member": "batch.ids", "section": "x"}}},
        {"meta_info": 5},
        {"encoded_non_tensor": 5},
        {"global_indexes": "0,1"},
        {"storage_group_id": ""},
    ],
)
def test_a_handle_that_is_none_is_refused(transfer: MooncakeBundleTransfer, change: dict[str, Any]) -> None:
    handle = export_ref(transfer.put_dataproto({"ids": IDS}))
    assert is_dataproto_ref_handle(handle) and import_ref(handle).batch_size == 6
    with pytest.raises(ValueError, match=r"handle|section|stage"):
        import_ref({**handle, **change})


def test_a_handle_with_too_many_rows_reads_nothing(transfer: MooncakeBundleTransfer) -> None:
    handle = export_ref(transfer.put_dataproto({"ids": IDS, "more": IDS}))
    handle["batch_size"] = 1 << 40
    with pytest.raises(IndexError, match="out of range"):
        transfer.get_dataproto(handle, rows=[1 << 39])
    with pytest.raises(IndexError, match="out of range"):
        transfer.get_dataproto(handle, rows=slice(0, 1 << 40))
    handle["batch_size"] = 1 << 80
    with pytest.raises(ValueError, match="batch_size"):
        transfer.get_dataproto(handle, rows=slice(None))


@pytest.mark.parametrize(
    "column", [None, {}, {"payload_members": ["data"]}, {"payload_members": {"data": []}}]
)
def test_a_column_without_members_is_refused(transfer: MooncakeBundleTransfer, column: Any) -> None:
    handle = export_ref(transfer.put_dataproto(Batch({}, {"text": TEXT})))
    handle["encoded_non_tensor"]["text"] = column
    with pytest.raises(ValueError, match=r"member"):
        transfer.get_dataproto(handle)
    if column is not None:
        with pytest.raises(ValueError, match="payload_members"):
            transfer.dataproto_manifest_view(handle)


def test_fields_contradict_each_other(transfer: MooncakeBundleTransfer, plain: PlainStore) -> None:
    for data, reason in (
        ({"a": IDS, "b": IDS[:2]}, "inconsistent batch sizes"),
        (Batch({"a": IDS}, {"a": TEXT}), "overlap"),
        (Batch({}, {"a": TEXT, "a.data": np.arange(6)}), "part of another field"),
        ({"a/b": IDS}, "buffer name"),
    ):
        with pytest.raises(ValueError, match=reason):
            transfer.put_dataproto(data)
    for value in (5, np.array(5), torch.tensor(5)):
        with pytest.raises(TypeError, match="rows"):
            transfer.put_dataproto({"a": value})
    assert plain.objects == {}
