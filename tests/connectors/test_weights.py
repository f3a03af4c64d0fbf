"""The digest tells models apart by a little of each tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mooncake.connectors.weights import sampled_digest
from mooncake.errors import ModelError


def model(folder: Path, change: str = "") -> Path:
    folder.mkdir()
    tensors = {f"layer.{number}": torch.arange(4096.0) + number for number in range(4)}
    if change == "tensor":
        tensors["layer.2"] = tensors["layer.2"] * 1.5
    if change == "name":
        tensors["layer.9"] = tensors.pop("layer.3")
    if change == "order":
        tensors["layer.0"], tensors["layer.1"] = tensors["layer.1"], tensors["layer.0"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"rope_theta": 2 if change == "config" else 1}))
    return folder


def test_the_same_model_elsewhere_is_the_same(tmp_path: Path) -> None:
    first, second = model(tmp_path / "a"), model(tmp_path / "b")
    (second / "README.md").write_text("read me")
    assert sampled_digest(first) == sampled_digest(second)


@pytest.mark.parametrize("change", ["tensor", "name", "order", "config"])
def test_another_model_is_another(tmp_path: Path, change: str) -> None:
    assert sampled_digest(model(tmp_path / "a")) != sampled_digest(model(tmp_path / "b", change))


def test_a_file_of_a_format_we_do_not_read_counts_by_its_bytes(tmp_path: Path) -> None:
    for name, byte in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / f"{name}").mkdir()
        (tmp_path / name / "model.gguf").write_bytes(byte * 100_000)
    a, b, c = (sampled_digest(tmp_path / name) for name in "abc")
    assert a == b != c
    assert sampled_digest(tmp_path / "a" / "model.gguf") == a


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        sampled_digest(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        sampled_digest(tmp_path)
