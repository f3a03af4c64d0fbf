# SPDX-License-Identifier: Apache-2.0
"""What the work of a language model takes at least on a card: times from bytes, operations and bandwidth.

It owns the published facts of cards and models that measurements name, and the times that follow from them
(the roofline model: Williams, Waterman and Patterson, 2009; its use for serving as in Pope et al., 2023).
Such an estimate is no measurement: it is what remains where a card or a model has no rows, and a quantity by
which rows of different cards and models are alike where they have.
"""

from __future__ import annotations

import re

import msgspec

MEMORY_SHARE = 0.7
"""Share of the memory's bandwidth that kernels of decode reach."""
COMPUTE_SHARE = 0.45
"""Share of the dense operations per second that kernels of prefill reach."""
LAYER_S = 15e-6
"""Fixed time of a layer's kernels, and again of its exchange between cards."""


class CardFacts(msgspec.Struct, frozen=True):
    """One accelerator, by its manufacturer's data sheet (dense, not sparse, operations)."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    bf16_per_s: float
    fp8_per_s: float
    fp4_per_s: float

    def operations_per_s(self, bytes_per_weight: float) -> float:
        if bytes_per_weight >= 2:
            return self.bf16_per_s
        return self.fp8_per_s if bytes_per_weight >= 1 else self.fp4_per_s


class ModelFacts(msgspec.Struct, frozen=True):
    """One model's architecture, by its published configuration."""

    name: str
    num_parameters: float
    num_active: float
    "Parameters that one token uses: all of a dense model."
    num_layers: int
    kv_bytes_per_token: int
    "In two bytes a value; latent attention and layers without a cache are included."

    def read_share(self, batch_size: float) -> float:
        """Share of the parameters that a batch reads: a mixture of experts is read in parts."""
        share = self.num_active / self.num_parameters
        return float(1 - (1 - share) ** max(1.0, batch_size))


CARDS = tuple(
    CardFacts(name, gigabytes * 1e9, terabytes * 1e12, bf16 * 1e12, fp8 * 1e12, fp4 * 1e12)
    for name, gigabytes, terabytes, bf16, fp8, fp4 in (
        ("gb300", 279, 8.0, 2500, 5000, 15000),
        ("gb200", 186, 8.0, 2500, 5000, 10000),
        ("b300", 270, 8.0, 2250, 4500, 13500),
        ("b200", 180, 8.0, 2250, 4500, 9000),
        ("h200", 141, 4.8, 989, 1979, 1979),
        ("h100", 80, 3.35, 989, 1979, 1979),
        ("h800", 80, 3.35, 989, 1979, 1979),
        ("h20", 96, 4.0, 148, 296, 296),
        ("a100", 80, 2.04, 312, 312, 312),
        ("a800", 80, 2.04, 312, 312, 312),
        ("l40s", 48, 0.864, 362, 733, 733),
        ("rtx4090", 24, 1.008, 165, 330, 330),
        ("rtxpro6000", 96, 1.79, 500, 1000, 2000),
    )
)
MODELS = tuple(
    ModelFacts(name, total * 1e9, active * 1e9, layers, kv_bytes)
    for name, total, active, layers, kv_bytes in (
        ("deepseek-v3", 671, 37, 61, 70_272),
        ("kimi-k2", 1040, 32, 61, 70_272),
        ("glm-5", 744, 40, 78, 89_856),
        ("minimax-m2", 230, 10, 62, 253_952),
        ("gpt-oss-120b", 117, 5.1, 36, 73_728),
        ("gpt-oss-20b", 21, 3.6, 24, 49_152),
        ("qwen3-235b-a22b", 235, 22, 94, 192_512),
        ("qwen3-30b-a3b", 30.5, 3.3, 48, 98_304),
        ("qwen3.5-397b-a17b", 397, 17, 60, 30_720),
        ("qwen3-32b", 32.8, 32.8, 64, 262_144),
        ("llama-3.1-8b", 8.0, 8.0, 32, 131_072),
        ("llama-3.1-70b", 70.6, 70.6, 80, 327_680),
        ("llama-3.3-70b", 70.6, 70.6, 80, 327_680),
        ("llama-3.1-405b", 405, 405, 126, 516_096),
        ("mixtral-8x7b", 46.7, 12.9, 32, 131_072),
    )
)
_SAME_MODEL = {"deepseek-r1": "deepseek-v3"}
"""A name and the one whose architecture it has."""
_EXPERTS = re.compile(r"\d+b-\d+e(?![a-z0-9])")
_SIZES = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?:-a(\d+(?:\.\d+)?)b)?(?![a-z0-9])")
_BYTES = {"fp4": 0.5, "int4": 0.5, "fp8": 1.0, "int8": 1.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
_PRECISIONS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        ("fp4|float4|e2m1", "fp4"),
        (r"w4a|u?int4|nf4|(?<!\d)4[-_]?bit|(?<![a-z0-9])q4_", "int4"),  # W4A8 has weights of 4 bits
        ("fp8|float8|e4m3|e5m2", "fp8"),
        (r"w8a|u?int8|(?<!\d)8[-_]?bit|(?<![a-z0-9])q8_|smooth-?quant", "int8"),
        ("awq|gptq", "int4"),  # methods: of 4 bits where the name says no other number
        ("bf16|bfloat16", "bf16"),
        (r"fp16|float16|(?<![a-z0-9])f16|(?<!\d)16[-_]?bit|w16a", "fp16"),
        (r"fp32|float32|(?<!\d)32[-_]?bit", "fp32"),
    )
)
"""Patterns of names, and the precision of the weights that they mean; the first one that is found counts."""


def card_facts(system: str) -> CardFacts | None:
    """The card that a system's name contains; None: not in the table."""
    text = re.sub(r"[^a-z0-9]", "", system.lower())
    found = [one for one in CARDS if one.name in text]
    return max(found, key=lambda one: len(one.name), default=None)


def model_facts(path: str) -> ModelFacts | None:
    """The model that a path names, or what the sizes in its name say ("30B-A3B"); None: neither is known."""
    text = path.lower().rpartition("/")[2]
    for name, same in _SAME_MODEL.items():
        text = text.replace(name, same)
    if _EXPERTS.search(text):  # "17B-128E": the active part alone, which says nothing about the whole
        return None
    sizes = _SIZES.search(text)
    found = [one for one in MODELS if one.name in text]
    if found:
        facts = max(found, key=lambda one: len(one.name))
        # "DeepSeek-R1-Distill-Llama-70B" is a model of 70 billion parameters, whatever it was distilled from.
        if sizes is None or abs(float(sizes[1]) * 1e9 / facts.num_parameters - 1) < 0.1:
            return facts
    if sizes is None:
        return None
    total, active = float(sizes[1]) * 1e9, float(sizes[2] or sizes[1]) * 1e9
    num_layers = round(10 * (total / 1e9) ** 0.47)
    # Eight heads of 128 values for keys and for values: grouped attention, as most models of today have.
    return ModelFacts(text, total, min(active, total), num_layers, num_layers * 8 * 128 * 2 * 2)


def known_precision(text: str) -> str | None:
    """The precision of the weights that a name contains ("nvfp4", "w4a16", "Qwen3-32B-AWQ"), in one of the
    names of ``_BYTES``; None: it says none."""
    return next((name for pattern, name in _PRECISIONS if pattern.search(text.lower())), None)


def bytes_per_weight(precision: str, path: str = "") -> float:
    """By the name of a precision, else by what the model's path says; two where neither does."""
    name = known_precision(precision) or known_precision(path)
    return _BYTES[name] if name is not None else 2.0


def decode_step_s(
    model: ModelFacts,
    card: CardFacts,
    weight_bytes: float,
    num_gpus: float,
    batch_size: float,
    context: float,
) -> float:
    """One step of a worker of ``num_gpus`` cards; each of ``batch_size`` answers has ``context`` tokens."""
    weights = model.num_parameters * model.read_share(batch_size) * weight_bytes
    kv = batch_size * context * model.kv_bytes_per_token
    memory_s = (weights + kv) / (num_gpus * card.bytes_per_s * MEMORY_SHARE)
    computed_s = _computed_s(model, card, weight_bytes, num_gpus, batch_size)
    return max(memory_s, computed_s) + _layers_s(model, num_gpus)


def prefill_s(
    model: ModelFacts, card: CardFacts, weight_bytes: float, num_gpus: float, num_tokens: float
) -> float:
    """A prompt alone on a worker. Reading the weights is the least that it takes."""
    weights = model.num_parameters * model.read_share(num_tokens) * weight_bytes
    read_s = weights / (num_gpus * card.bytes_per_s * MEMORY_SHARE)
    computed_s = _computed_s(model, card, weight_bytes, num_gpus, num_tokens)
    return max(read_s, computed_s) + _layers_s(model, num_gpus)


def _computed_s(
    model: ModelFacts, card: CardFacts, weight_bytes: float, num_gpus: float, num_tokens: float
) -> float:
    operations = 2 * model.num_active * num_tokens
    return operations / (num_gpus * card.operations_per_s(weight_bytes) * COMPUTE_SHARE)


def _layers_s(model: ModelFacts, num_gpus: float) -> float:
    return model.num_layers * LAYER_S * (2 if num_gpus > 1 else 1)
