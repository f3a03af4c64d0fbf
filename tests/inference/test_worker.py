# SPDX-License-Identifier: Apache-2.0
"""A worker's settings, as far as they follow from its device, and what it loads."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from mooncake.errors import InvalidArgument, ModelError
from mooncake.inference import weights
from mooncake.inference.model import Decoder
from mooncake.inference.weight_versions import WeightVersions
from mooncake.inference.weights import weights_digest
from mooncake.inference.worker import WorkerSettings, check_device, running
from tests.inference.conftest import Reference
from tests.inference.test_api import make_tokenizer
from tests.inference.test_weights import other_tensors, replace


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", (512, 64, "float32", True)), ("cuda:1", (2048, 0, "bfloat16", False))],
)
def test_defaults_follow_the_device(device: str, expected: tuple[int, int, str, bool]) -> None:
    settings = WorkerSettings(device=device, master="127.0.0.1:1")
    limits = settings.engine_settings()
    found = (limits.max_batch_tokens, limits.saturating_tokens, settings.torch_dtype, settings.may_push)
    assert found == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_given_is_taken(device: str) -> None:
    settings = WorkerSettings(device=device, max_batch_tokens=100, saturating_tokens=0, max_running=7)
    limits = settings.engine_settings()
    assert (limits.max_batch_tokens, limits.saturating_tokens, limits.max_running) == (100, 0, 7)


@pytest.mark.parametrize("device", ["foo", "cuda:", "cuda:x", "mps", "CPU", ""])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(InvalidArgument, match=r"device is .*cuda:N"):
        WorkerSettings(device=device)


def test_a_gpu_that_is_not_there_is_refused_before_the_model_is_loaded() -> None:
    check_device("cpu")
    check_device("auto")
    with pytest.raises(InvalidArgument, match=r"device is 'cuda:999'.*torch finds \d+ GPUs here"):
        check_device("cuda:999")


async def test_a_folder_that_a_trainer_saves_into_meanwhile_is_not_loaded(
    llama: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start of a worker and when it prepares other weights: they would have the digest of the next."""
    folder = Path(shutil.copytree(llama.folder, tmp_path / "model"))
    make_tokenizer(folder)
    settings = WorkerSettings(
        model=str(folder), device="cpu", port=0, kv_cache_size_bytes=1 << 20, warm_up_s=0, block_tokens=16
    )

    def saved_behind(*arguments: Any) -> Decoder:
        found = Decoder(*arguments)
        replace(folder / "model.safetensors", other_tensors(folder))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(weights, "Decoder", saved_behind)
        with pytest.raises(ModelError, match="changed while it was read"):
            async with running(settings):
                raise AssertionError("it was loaded")
    async with running(settings) as api:
        assert isinstance(api.add_routes, functools.partial)
        versions: WeightVersions = api.add_routes.keywords["versions"]
        active = versions.active.digest
        assert active == weights_digest(folder)
        with monkeypatch.context() as patch:
            patch.setattr(weights, "Decoder", saved_behind)
            with pytest.raises(ModelError, match="changed while it was read"):
                await versions.prepare(folder)
        assert versions.prepared is None and versions.active.digest == active
        prepared = await versions.prepare(folder)
        assert prepared.digest == weights_digest(folder) != active


async def test_weights_with_another_tokenizer_are_refused(llama: Reference, tmp_path: Path) -> None:
    """The worker would go on with its own, whose tokens mean other texts to these weights."""
    names = ("own", "other", "damaged", "weights", "trained")
    folders = [Path(shutil.copytree(llama.folder, tmp_path / name)) for name in names]
    own, other, damaged, weights_alone, trained = folders
    make_tokenizer(own)
    content = (own / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(content.replace("</s>", "<end>"))
    (damaged / "tokenizer.json").write_text(content[:-20])
    as_in_training = tokenizers.Tokenizer.from_str(content)
    as_in_training.enable_padding(length=64)
    as_in_training.enable_truncation(max_length=64)
    as_in_training.save(str(trained / "tokenizer.json"))
    settings = WorkerSettings(
        model=str(own), device="cpu", port=0, kv_cache_size_bytes=1 << 20, warm_up_s=0, block_tokens=16
    )
    async with running(settings) as api:
        assert isinstance(api.add_routes, functools.partial)
        versions: WeightVersions = api.add_routes.keywords["versions"]
        for folder in (other, damaged):
            with pytest.raises(ModelError, match="another tokenizer"):
                await versions.prepare(folder)
        assert versions.prepared is None
        for folder in (weights_alone, trained):
            assert await versions.prepare(folder) is versions.prepared
