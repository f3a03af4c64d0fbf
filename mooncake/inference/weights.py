# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder on disk becomes a ``Decoder``, or a ``ModelError`` that names the fault.

It owns the names and shapes of checkpoints, and the digests that name their contents. Tensors are
mapped, not read, and converted one layer at a time, so that loading needs no second copy of a
model. Nothing stays mapped: a file that is overwritten in place would change the weights of a running
worker, while their digest stays. Every tensor is checked by name and shape before the first one is loaded:
a folder that is damaged should fail at start, with the file's name, and not in the middle of an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mooncake import clock
from mooncake.connectors.digests import SETTLED_S, file_digest
from mooncake.errors import ModelError
from mooncake.files import file_state
from mooncake.inference.model import Decoder, ModelConfig, Rope

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_KINDS = ("default", "linear", "llama3")


def load_model(
    folder: Path, dtype: str = "float32", device: str = "cpu", layers: range | None = None
) -> Decoder:
    """The decoder in ``folder`` with its weights in ``dtype`` on ``device``.

    ``layers``: load the weights of these only. Raises ModelError when the folder, its configuration or its
    tensors are not usable.
    """
    config = read_config(folder)
    files = Checkpoint(folder, DTYPES[dtype], torch.device(device))
    if "lm_head.weight" not in files and not config.has_tied_embeddings:
        raise ModelError(f"{folder}: tensor lm_head.weight is missing; fetch the model again")
    for name, shape in expected_shapes(config).items():
        files.require(name, shape)
    with torch.inference_mode():
        return Decoder(config, files, layers)


def load_with_digest(
    folder: Path,
    dtype: str = "float32",
    device: str = "cpu",
    layers: range | None = None,
    cache_dir: Path | None = None,
) -> tuple[Decoder, str]:
    """The decoder as ``load_model`` returns it, and the digest (``weights_digest``) of what was loaded.

    Raises ModelError also when a file has changed since the digest was begun: KV of one version under the
    name of another would be wrong for all workers that share the pool, for as long as it is there.
    """
    before = _file_states(folder)
    digest = weights_digest(folder, cache_dir)
    # Files that were written just now may change again without a change of their times: read once more then.
    newest_ns = max((max(times_ns) for _, _, _, *times_ns in before.values()), default=0)
    is_settled = clock.wall() - newest_ns / 1e9 > SETTLED_S
    model = load_model(folder, dtype, device, layers)
    is_same = _file_states(folder) == before and (is_settled or weights_digest(folder, cache_dir) == digest)
    if not is_same:
        raise ModelError(f"{folder} changed while it was read; start again when it is complete")
    return model, digest


def read_config(folder: Path) -> ModelConfig:
    """``config.json`` and ``generation_config.json`` of ``folder``. Raises ModelError."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} does not exist; give a Hugging Face folder (config.json and *.safetensors)")
    raw = _read_json(path)
    architectures = raw.get("architectures") or ["none"]
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise ModelError(f"{path}: architecture {architectures[0]} is unknown; known: {', '.join(FAMILIES)}")
    _refuse_unsupported(path, raw)
    try:
        return _parse_config(path, raw, family)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        what = f"a field is missing or no number ({type(error).__name__}: {error})"
        raise ModelError(f"{path}: {what}; fetch the model again") from error


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {raw['hidden_act']} is not supported; supported: silu")
    if raw.get("quantization_config"):
        raise ModelError(f"{path}: quantized weights are not supported; use the unquantized model")
    slides = raw.get("use_sliding_window", raw.get("model_type") == "mistral")
    has_window = raw.get("sliding_window") is not None
    if (slides and has_window) or "sliding_attention" in (raw.get("layer_types") or []):
        raise ModelError(f"{path}: sliding-window attention is not supported; use a full-attention model")


def _parse_config(path: Path, raw: dict[str, Any], family: str) -> ModelConfig:
    num_heads = int(raw["num_attention_heads"])
    has_attention_bias = bool(raw.get("attention_bias", False))
    tied = raw.get("tie_word_embeddings")
    if tied is None:
        tied = not any("lm_head.weight" in names for names in _tensor_names(path.parent).values())
    config = ModelConfig(
        family=family,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=int(raw["max_position_embeddings"]),
        rope=_parse_rope(path, raw),
        has_tied_embeddings=bool(tied),
        has_qkv_bias=family == "qwen2" or has_attention_bias,
        has_output_bias=family != "qwen2" and has_attention_bias,
        has_mlp_bias=bool(raw.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
        eos_token_ids=_eos_token_ids(path.parent, raw),
    )
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    if min(getattr(config, size) for size in sizes) < 1 or min(config.head_dim, config.max_positions) < 1:
        raise ModelError(f"{path}: a size is zero or negative; fetch the model again")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        what = "num_attention_heads must be a multiple of num_key_value_heads, head_dim even"
        raise ModelError(f"{path}: {what}; fetch the model again")
    return config


def _parse_rope(path: Path, raw: dict[str, Any]) -> Rope:
    """Rotary embedding from ``rope_parameters`` or, in older folders, ``rope_theta`` and ``rope_scaling``."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"{path}: rope scaling {kind} is not supported; supported: {', '.join(ROPE_KINDS)}")
    return Rope(
        theta=float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0))),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=int(scaling.get("original_max_position_embeddings", 8192)),
    )


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Tokens that end generation; ``generation_config.json`` takes precedence over ``config.json``."""
    path = folder / "generation_config.json"
    found = _read_json(path).get("eos_token_id") if path.is_file() else None
    found = raw.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of ``config`` must have."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (q_size, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.has_output_bias),
        "mlp.gate_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.up_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, inner, config.has_mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.has_qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.has_tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}.weight": (size,) for name, size in norms.items()}
        for name, (num_out, num_in, has_bias) in projections.items():
            shapes[f"{at}{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{at}{name}.bias"] = (num_out,)
    return shapes


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a folder, each converted on access, and a copy of what is mapped."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._files: dict[str, Any] = {}
        for path in tensor_files(folder):
            try:
                opened = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(_names_in(opened), opened)
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless there is a tensor ``name`` of that ``shape``."""
        if name not in self._files:
            raise ModelError(f"{self._folder}: tensor {name} is missing; fetch the model again")
        found = tuple(self._files[name].get_slice(name).get_shape())
        if found != shape:
            raise ModelError(f"{self._folder}: tensor {name} has shape {found}, config.json says {shape}")

    def __getitem__(self, name: str) -> Tensor:
        tensor = cast(Tensor, self._files[name].get_tensor(name))
        if name == "model.embed_tokens.weight" and self._device.type == "cpu":
            return tensor.clone()  # in the file's dtype, often half as large; the rows used are converted
        return tensor.to(self._device, self._dtype, copy=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder`` in a fixed order. Raises ModelError if one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} has no *.safetensors file; give a Hugging Face folder with weights")
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path} is named by {index.name} but does not exist; fetch the model again")
    return paths


def weights_digest(folder: Path, cache_dir: Path | None = None) -> str:
    """SHA-256 over the weights and the configuration fields that change their meaning.

    Hashing reads every byte once per host (``connectors.digests``); the result is kept in ``cache_dir``
    (default the user's cache).
    """
    contents = [file_digest(path, cache_dir) for path in tensor_files(folder)]
    config = dataclasses.replace(read_config(folder), eos_token_ids=())
    return hashlib.sha256(repr((contents, config)).encode()).hexdigest()


def _file_states(folder: Path) -> dict[Path, tuple[int, int, int, int, int]]:
    """States (``file_state``) of the files that a model is loaded from. Raises ModelError."""
    names = ("config.json", "generation_config.json", "model.safetensors.index.json")
    states = {}
    for path in [*tensor_files(folder), *(folder / name for name in names)]:
        with contextlib.suppress(OSError):  # one that is not there has no state, and later maybe one
            states[path] = file_state(path.stat())
    return states


def tokenizer_digest(folder: Path, cache_dir: Path | None = None) -> str:
    """SHA-256 over the files that decide which token ids a text becomes."""
    names = ["tokenizer.json"]
    if not (folder / "tokenizer.json").is_file():
        names = ["added_tokens.json", "merges.txt", "tokenizer.model", "tokenizer_config.json", "vocab.json"]
    paths = [folder / name for name in names if (folder / name).is_file()]
    if not paths:
        raise ModelError(f"{folder} has no tokenizer.json; fetch the model again")
    contents = [(path.name, file_digest(path, cache_dir)) for path in paths]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _names_in(opened: Any) -> list[str]:
    return list(opened.keys())


def _damaged(path: Path, error: Exception) -> ModelError:
    if not os.access(path, os.R_OK):  # which safetensors reports as a file that does not exist
        return ModelError(f"{path} may not be read by user {os.geteuid()}; change its owner or mode")
    return ModelError(f"{path} is truncated or damaged ({error}); fetch the model again")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; fetch the model again")
    return value


def _tensor_names(folder: Path) -> dict[Path, list[str]]:
    names: dict[Path, list[str]] = {}
    for path in tensor_files(folder):
        try:
            with safe_open(path, framework="pt") as opened:
                names[path] = _names_in(opened)
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
    return names
