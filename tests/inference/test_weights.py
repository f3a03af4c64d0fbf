# SPDX-License-Identifier: Apache-2.0
"""A damaged or unknown model folder fails at the start with an error that names the file and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file

from mooncake.errors import ModelError
from mooncake.inference import weights
from mooncake.inference.model import Decoder
from mooncake.inference.weights import (
    load_model,
    load_with_digest,
    read_config,
    tokenizer_digest,
    weights_digest,
)
from tests.inference.conftest import Reference


@pytest.fixture
def folder(llama: Reference, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama.folder, tmp_path / "model"))


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(fields)
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, r"config\.json does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json does not exist"),
    "bad JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not readable JSON"),
    "not an object": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "binary config": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "not readable JSON"),
    "foreign": (lambda f: edit_config(f, architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is unknown"),
    "no architecture": (lambda f: edit_config(f, architectures=...), "architecture none is unknown"),
    "missing field": (lambda f: edit_config(f, hidden_size=...), "hidden_size"),
    "no number": (lambda f: edit_config(f, num_attention_heads="x"), r"config\.json"),
    "zero heads": (lambda f: edit_config(f, num_attention_heads=0), r"config\.json"),
    "zero kv heads": (lambda f: edit_config(f, num_key_value_heads=-1), r"config\.json"),
    "odd heads": (lambda f: edit_config(f, num_key_value_heads=4), "must be a multiple"),
    "activation": (lambda f: edit_config(f, hidden_act="gelu"), "hidden_act gelu"),
    "quantized": (lambda f: edit_config(f, quantization_config={"bits": 4}), "quantized"),
    "rope": (lambda f: edit_config(f, rope_parameters={"rope_type": "yarn"}), "rope scaling yarn"),
    "window": (lambda f: edit_config(f, layer_types=["sliding_attention"]), "sliding-window"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no \*\.safetensors"),
    "truncated": (lambda f: cut(f / "model.safetensors", 5000), r"model\.safetensors is truncated"),
    "empty": (lambda f: cut(f / "model.safetensors", 0), r"model\.safetensors is truncated"),
    "missing tensor": (
        lambda f: edit_tensors(f, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        r"model\.layers\.1\.mlp\.up_proj\.weight is missing",
    ),
    "no head": (lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight")), r"lm_head\.weight is missing"),
    "wrong shape": (lambda f: edit_config(f, vocab_size=7), "has shape"),
    "index without files": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "gone.safetensors"}}'
        ),
        r"gone\.safetensors is named by",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(folder: Path, damage: str) -> None:
    do, message = DAMAGES[damage]
    do(folder)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_shards_are_one_model(llama: Reference, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load_model(folder).config == load_model(llama.folder).config


def test_older_rope_fields_mean_the_same(folder: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    edit_config(folder, rope_parameters=..., rope_theta=5000.0, rope_scaling=scaling)
    rope = read_config(folder).rope
    assert (rope.theta, rope.kind, rope.factor) == (5000.0, "linear", 4.0)


def test_generation_config_knows_the_end_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_config(folder).eos_token_ids == (2, 7)


def test_dtypes(llama: Reference) -> None:
    for name in ("float32", "bfloat16", "float16"):
        model = load_model(llama.folder, name)
        assert str(model.dtype) == f"torch.{name}"


def other_tensors(folder: Path) -> bytes:
    """The file of ``folder`` with other numbers, and of the same size."""
    kept = (folder / "model.safetensors").read_bytes()
    tensors = load(kept)
    changed = save({name: tensor + 0.5 for name, tensor in tensors.items()}, {"format": "pt"})
    assert len(changed) == len(kept) and changed != kept
    return changed


def overwrite(path: Path, content: bytes) -> None:
    """As `cp` and `rsync --inplace` do."""
    with path.open("r+b") as file:
        file.write(content)


def replace(path: Path, content: bytes) -> None:
    path.with_name("new").write_bytes(content)
    path.with_name("new").replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "in place": lambda f: overwrite(f / "model.safetensors", other_tensors(f)),
    "by rename": lambda f: replace(f / "model.safetensors", other_tensors(f)),
    "configuration": lambda f: edit_config(f, rms_norm_eps=0.1),
    "a further file": lambda f: save_file({"unused": torch.ones(1)}, f / "more.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_changes_while_it_is_loaded_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The old weights under the digest of the new ones would give their KV a wrong name in the pool."""
    first = weights_digest(folder, tmp_path)

    def changed_behind(*arguments: Any) -> Decoder:
        found = Decoder(*arguments)
        CHANGES[change](folder)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(weights, "Decoder", changed_behind)
        with pytest.raises(ModelError, match="changed while it was read"):
            load_with_digest(folder, cache_dir=tmp_path)
    _, digest = load_with_digest(folder, cache_dir=tmp_path)
    assert digest == weights_digest(folder, tmp_path) != first


def test_a_change_within_the_resolution_of_the_files_times_is_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files written just now are read once more; older ones are judged by their times."""
    path = folder / "model.safetensors"

    def changed_behind(*arguments: Any) -> Decoder:
        found = Decoder(*arguments)
        overwrite(path, other_tensors(folder))
        return found

    monkeypatch.setattr(weights, "Decoder", changed_behind)
    unchanged = weights._file_states(folder)
    monkeypatch.setattr(weights, "_file_states", lambda folder: unchanged)
    with pytest.raises(ModelError, match="changed while it was read"):
        load_with_digest(folder, cache_dir=tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen3"])
def test_a_file_that_is_overwritten_does_not_change_what_is_loaded(
    references: Callable[[str], Reference], tmp_path: Path, name: str, dtype: str
) -> None:
    """A running worker has the digest of what it loaded. Its dtype is the file's: nothing is converted."""
    folder = Path(shutil.copytree(references(name).folder, tmp_path / "model"))
    path = folder / "model.safetensors"
    tensors = {key: value.to(weights.DTYPES[dtype]) for key, value in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    model = load_model(folder, dtype)
    tokens = torch.arange(3, 20)

    def computed() -> torch.Tensor:
        with torch.inference_mode():
            hidden = model.forward(tokens, tokens, lambda layer, q, k, v: q.flatten(1))
            return model.logits(hidden)

    before = computed()
    overwrite(path, other_tensors(folder))
    assert computed().equal(before)
    model = load_model(folder, dtype)
    assert not computed().equal(before)


def test_digest_follows_contents_and_meaning(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = weights_digest(folder, cache)
    assert len(first) == 64 and weights_digest(folder, cache) == first
    moved = folder.rename(tmp_path / "elsewhere")
    assert weights_digest(moved, cache) == first
    edit_config(moved, rope_parameters={"rope_type": "default", "rope_theta": 1234.0})
    other_rope = weights_digest(moved, cache)
    edit_tensors(moved, lambda tensors: tensors["model.norm.weight"].add_(1))
    other_weights = weights_digest(moved, cache)
    assert len({first, other_rope, other_weights}) == 3


def test_digest_without_a_writable_cache(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert weights_digest(folder, tmp_path / "file" / "below") == weights_digest(folder, tmp_path)


def test_tokenizer_digest(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        tokenizer_digest(folder, tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    first = tokenizer_digest(folder, tmp_path)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    assert tokenizer_digest(folder, tmp_path) != first


def test_a_file_that_may_not_be_read_is_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors reports it as a file that does not exist; root, as whom tests may run, can read all."""
    path = folder / "model.safetensors"
    cut(path, 0)
    monkeypatch.setattr("os.access", lambda asked, mode: Path(asked) != path)
    with pytest.raises(ModelError, match=r"model\.safetensors may not be read by user \d+; change its"):
        load_model(folder)
