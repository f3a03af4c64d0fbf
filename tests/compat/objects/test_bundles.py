# SPDX-License-Identifier: Apache-2.0
"""A bundle is found complete or not at all, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake.compat.objects.transfer import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    StructuredObjectPayload,
)
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
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
