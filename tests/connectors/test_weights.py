# SPDX-License-Identifier: Apache-2.0
"""Models that differ in any byte have different digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mooncake.connectors import weights as module
from mooncake.connectors.weights import weights_of
from mooncake.errors import InvalidArgument, ModelError

ROWS, COLUMNS = 512, 256


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own for each test."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def model(folder: Path, change: str = "") -> Path:
    folder.mkdir()
    tensors = {f"layer.{number}": torch.arange(4096.0) + number for number in range(4)}
    tensors["embedding"] = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    if change == "tensor":
        tensors["layer.2"] = tensors["layer.2"] * 1.5
    if change == "name":
        tensors["layer.9"] = tensors.pop("layer.3")
    if change == "order":
        tensors["layer.0"], tensors["layer.1"] = tensors["layer.1"], tensors["layer.0"]
    if change == "rows":  # between the samples of the fast mode
        tensors["embedding"][50:200] += 1
    if change == "one number":
        tensors["embedding"][100, 7] += 1
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"rope_theta": 2 if change == "config" else 1}))
    (folder / "modeling.py").write_text("HEADS = 2" if change == "code" else "HEADS = 1")
    return folder


CHANGES = ["tensor", "name", "order", "rows", "one number", "config", "code"]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_same_model_elsewhere_is_the_same(tmp_path: Path, sampled: bool) -> None:
    first, second = model(tmp_path / "a"), model(tmp_path / "b")
    (second / "README.md").write_text("read me")
    assert module.folder_digest(first, sampled) == module.folder_digest(second, sampled)


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_another(tmp_path: Path, change: str) -> None:
    one, other = model(tmp_path / "a"), model(tmp_path / "b", change)
    assert weights_of(str(one), "owner") != weights_of(str(other), "owner")


@pytest.mark.parametrize("change", CHANGES)
def test_differences_that_the_fast_mode_finds_and_misses(tmp_path: Path, change: str) -> None:
    digests = [
        module.folder_digest(one, True) for one in (model(tmp_path / "a"), model(tmp_path / "b", change))
    ]
    is_equal = digests[0] == digests[1]
    assert is_equal == (change in ("rows", "one number")), "its documents say so"


def test_the_two_ways_never_agree(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    assert module.folder_digest(folder) != module.folder_digest(folder, is_sampled=True)


def test_a_file_of_a_format_we_do_not_read_counts_by_its_bytes(tmp_path: Path) -> None:
    for name, byte in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / f"{name}").mkdir()
        (tmp_path / name / "model.gguf").write_bytes(byte * 100_000)
    a, b, c = (module.folder_digest(tmp_path / name) for name in "abc")
    assert a == b != c
    assert module.folder_digest(tmp_path / "a" / "model.gguf") == a


def test_code_of_another_repository_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = model(tmp_path / "a"), tmp_path / "code"
    elsewhere.mkdir()
    (elsewhere / "modeling.py").write_text("HEADS = 1")
    named = {"auto_map": {"AutoModel": "owner/code--modeling.Model", "AutoTokenizer": ["modeling.T", None]}}
    (folder / "config.json").write_text(json.dumps(named))
    found = module._folder_of

    def folder_of(name: str, revision: str | None, cache_dir: str | None) -> Path:
        return elsewhere if name == "owner/code" else found(name, revision, cache_dir)

    monkeypatch.setattr(module, "_folder_of", folder_of)
    before = module.folder_digest(folder)
    (elsewhere / "modeling.py").write_text("HEADS = 2")
    assert module.folder_digest(folder) != before


def test_weights_that_can_not_be_read_belong_to_their_owner(tmp_path: Path) -> None:
    assert weights_of(str(tmp_path), "engine 1") == "engine 1", "no weights"
    assert weights_of(str(model(tmp_path / "a")), "engine 1", is_made_up=True) == "engine 1"


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        module.folder_digest(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        module.folder_digest(tmp_path, is_sampled=True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not readable"):
        module.folder_digest(tmp_path)


def test_the_fast_mode_is_selected_by_true_alone() -> None:
    assert (module.is_sampled({}), module.is_sampled({"sampled_weights": True})) == (False, True)
    wrong: Any = {"sampled_weights": "no"}
    with pytest.raises(InvalidArgument, match="sampled_weights"):
        module.is_sampled(wrong)
