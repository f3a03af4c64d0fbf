# SPDX-License-Identifier: Apache-2.0
"""Tensors are saved to files and loaded from them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mooncake.compat.store.store import MooncakeDistributedStore
from tests.compat.store.servers import LONG_LEASES

MASTER = LONG_LEASES
_numbers = itertools.count()


def new_key() -> str:
    return f"safetensor{next(_numbers)}"


def test_save_and_load(store: MooncakeDistributedStore, tmp_path: Path) -> None:
    key, path, tensor = new_key(), tmp_path / "one.safetensors", torch.randn(3, 5).to(torch.bfloat16)
    assert store.put_tensor(key, tensor) == 0
    assert store.save_tensor_to_safetensor(key, str(path)) == 0
    assert torch.equal(load_file(path)[key], tensor)
    other = new_key()
    loaded = store.load_tensor_from_safetensor(other, str(path))
    assert loaded is not None and torch.equal(loaded, tensor)
    stored = store.get_tensor(other)
    assert stored is not None and torch.equal(stored, tensor)


def test_the_file_is_named_after_the_key(
    store: MooncakeDistributedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    monkeypatch.chdir(tmp_path)
    assert store.put_tensor(key, torch.ones(2)) == 0
    assert store.save_tensor_to_safetensor(key) == 0
    loaded = store.load_tensor_from_safetensor(file_name=key)
    assert loaded is not None and torch.equal(loaded, torch.ones(2))


def test_the_named_tensor_of_several(store: MooncakeDistributedStore, tmp_path: Path) -> None:
    first, second = new_key(), new_key()
    save_file({first: torch.zeros(1), second: torch.ones(1)}, tmp_path / "two")
    loaded = store.load_tensor_from_safetensor(second, str(tmp_path / "two"))
    assert loaded is not None and loaded.item() == 1.0
    assert store.load_tensor_from_safetensor(new_key(), str(tmp_path / "two")) is None
    assert store.load_tensor_from_safetensor(None, str(tmp_path / "two")) is None


def test_missing_tensors_and_files(store: MooncakeDistributedStore, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"no safetensors")
    assert store.save_tensor_to_safetensor("missing", str(tmp_path / "x")) == -1100
    assert not (tmp_path / "x").exists()
    assert store.load_tensor_from_safetensor(None, str(tmp_path / "x")) is None
    assert store.load_tensor_from_safetensor(None, str(tmp_path / "noise")) is None
    key = new_key()
    assert store.put_tensor(key, torch.ones(1)) == 0
    assert store.save_tensor_to_safetensor(key, str(tmp_path / "no" / "folder")) == -600
