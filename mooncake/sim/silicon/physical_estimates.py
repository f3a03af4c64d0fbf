# SPDX-License-Identifier: Apache-2.0
"""What the work of a language model takes at least on a card: times from bytes, operations and bandwidth.

It owns the published facts of cards and models that measurements name, and the times that follow from them
(the roofline model: Williams, Waterman and Patterson, 2009; its use for serving as in Pope et al., 2023).
Such an estimate is no measurement: it is what remains where a card or a model has no rows, and a quantity by
which rows of different cards and models are alike where they have.
"""

from __future__ import annotations

import math
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

    def operations_per_s(self, operand_bytes: float) -> float:
        if operand_bytes >= 2:
            return self.bf16_per_s
        return self.fp8_per_s if operand_bytes >= 1 else self.fp4_per_s


class ModelFacts(msgspec.Struct, frozen=True):
    """One model's architecture, by its published configuration."""

    name: str
    num_parameters: float
    num_active: float
    "Parameters that one token uses: all of a dense model."
    num_layers: int
    kv_bytes_per_token: int
    "In two bytes a value; latent attention and layers without a cache are included."
    attention_width: float
    """Heads times values of a head (of keys and values, the mean), by which every token attends to every
    earlier one: the mean of all layers, of which those with a window or a state of fixed size have none."""

    def read_share(self, batch_size: float) -> float:
        """Share of the parameters that a batch reads: a mixture of experts is read in parts."""
        share = self.num_active / self.num_parameters
        return float(1 - (1 - share) ** max(1.0, batch_size))


class PrecisionFacts(msgspec.Struct, frozen=True):
    """In how many bytes a model's weights are kept, and multiplied."""

    weight_bytes: float
    operand_bytes: float
    "Integer weights of four bits are only kept so: they are multiplied in 16 or, by name, in 8 bits."


CARDS = tuple(
    CardFacts(name, gigabytes * 1e9, terabytes * 1e12, bf16 * 1e12, fp8 * 1e12, fp4 * 1e12)
    for name, gigabytes, terabytes, bf16, fp8, fp4 in (
        ("gb300", 279, 8.0, 2500, 5000, 15000),
        ("gb200", 186, 8.0, 2500, 5000, 10000),
        ("b300", 270, 8.0, 2250, 4500, 13500),
        ("b200", 180, 8.0, 2250, 4500, 9000),
        ("gh200_144g", 144, 4.9, 989, 1979, 1979),
        ("gh200", 96, 4.0, 989, 1979, 1979),
        ("h200_nvl", 141, 4.8, 835, 1671, 1671),
        ("h200", 141, 4.8, 989, 1979, 1979),
        ("h100_pcie", 80, 2.0, 756, 1513, 1513),
        ("h100_nvl", 94, 3.9, 835, 1671, 1671),
        ("h100", 80, 3.35, 989, 1979, 1979),
        ("h800", 80, 3.35, 989, 1979, 1979),
        ("h20", 96, 4.0, 148, 296, 296),
        ("a100_40g", 40, 1.555, 312, 312, 312),
        ("a100_pcie", 80, 1.935, 312, 312, 312),
        ("a100", 80, 2.04, 312, 312, 312),
        ("a800", 80, 2.04, 312, 312, 312),
        ("l40s", 48, 0.864, 362, 733, 733),
        ("rtx4090", 24, 1.008, 165, 330, 330),
        ("rtxpro6000", 96, 1.79, 500, 1000, 2000),
    )
)
"""The first one whose name is found counts: a variant is before the card that it is one of."""
_CARD_PREFIXES = "".join(f"|(?<={prefix})" for prefix in (r"\dx", "nvidia", "geforce", "dgx", "hgx"))
"""What may be written before a card's name without a space; with other letters, it is another card."""
MODELS = tuple(
    ModelFacts(name, total * 1e9, active * 1e9, layers, kv_bytes, width)
    for name, total, active, layers, kv_bytes, width in (
        ("deepseek-v3", 671, 37, 61, 70_272, 20_480),
        ("kimi-k2", 1040, 32, 61, 70_272, 10_240),
        ("glm-5", 744, 40, 78, 89_856, 2048),  # sparse: of what chooses the tokens, keys only
        ("minimax-m2", 230, 10, 62, 253_952, 6144),
        ("gpt-oss-120b", 117, 5.1, 36, 73_728, 2048),
        ("gpt-oss-20b", 21, 3.6, 24, 49_152, 2048),
        ("qwen3-235b-a22b", 235, 22, 94, 192_512, 8192),
        ("qwen3-30b-a3b", 30.5, 3.3, 48, 98_304, 4096),
        ("qwen3.5-397b-a17b", 397, 17, 60, 30_720, 2048),
        ("qwen3-32b", 32.8, 32.8, 64, 262_144, 8192),
        ("llama-3.1-8b", 8.0, 8.0, 32, 131_072, 4096),
        ("llama-3.1-70b", 70.6, 70.6, 80, 327_680, 8192),
        ("llama-3.3-70b", 70.6, 70.6, 80, 327_680, 8192),
        ("llama-3.1-405b", 405, 405, 126, 516_096, 16_384),
        ("mixtral-8x7b", 46.7, 12.9, 32, 131_072, 4096),
    )
)
_SAME_MODEL = {"deepseekr1": "deepseekv3"}
"""A name and the one whose architecture it has, both as ``_bare`` has them."""
_PARTS = re.compile(r"\d+b-\d+e(?![a-z0-9])|(?<![a-z0-9])(\d+l-?\d+e|lite)(?![a-z0-9])")
"""Names of less than a model: "17B-128E" are its active parameters, "16L64E" are so many of its layers and
experts."""
_NAME_ENDS = ("instruct", "chat", "base", "it", "hf", "dynamic")
"""Ends of names which, as those of precisions, say nothing about the architecture."""
_SIZES = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?:-a(\d+(?:\.\d+)?)b)?(?![a-z0-9])")
_BYTES = {
    "fp4": PrecisionFacts(0.5, 0.5),
    "int4": PrecisionFacts(0.5, 2.0),
    "w4a8": PrecisionFacts(0.5, 1.0),
    "fp8": PrecisionFacts(1.0, 1.0),
    "int8": PrecisionFacts(1.0, 1.0),
    "bf16": PrecisionFacts(2.0, 2.0),
    "fp16": PrecisionFacts(2.0, 2.0),
    "fp32": PrecisionFacts(4.0, 4.0),
}
_PRECISIONS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        ("fp4|float4|e2m1", "fp4"),
        ("w4a(fp|int)?8", "w4a8"),
        (r"w4a|u?int4|nf4|(?<!\d)4[-_]?bit|(?<![a-z0-9])q4_", "int4"),
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
    text = system.lower()
    found = (card for card, patterns in _CARD_PATTERNS if all(one.search(text) for one in patterns))
    return next(found, None)


def _card_patterns(name: str) -> list[re.Pattern[str]]:
    """Those of a card's name, and of the words by which a variant differs."""
    base, *words = name.split("_")
    spaced = re.sub(r"rtx|[a-z](?=\d)", r"\g<0>[^a-z0-9]*", base)
    patterns = [rf"(?:(?<![a-z]){_CARD_PREFIXES}){spaced}(?!\d)"]
    return [re.compile(one) for one in (*patterns, *(rf"(?<!\d){word}(?!ink)" for word in words))]


_CARD_PATTERNS = tuple((card, _card_patterns(card.name)) for card in CARDS)


def model_facts(path: str) -> ModelFacts | None:
    """The model that a path names, or what the sizes in its name say ("30B-A3B"); None: neither is known."""
    text = _model_name(path)
    if _PARTS.search(text):
        return None
    sizes, bare = _SIZES.search(text), _bare(text)
    for name, same in _SAME_MODEL.items():
        bare = bare.replace(name, same)
    found = [one for one in MODELS if _bare(one.name) in bare]
    if found:
        facts = max(found, key=lambda one: len(one.name))
        # "DeepSeek-R1-Distill-Llama-70B" is a model of 70 billion parameters, whatever it was distilled from.
        if sizes is None or abs(float(sizes[1]) * 1e9 / facts.num_parameters - 1) < 0.1:
            return facts
    if sizes is None:
        return None
    total, active = float(sizes[1]) * 1e9, float(sizes[2] or sizes[1]) * 1e9
    num_layers = round(10 * (total / 1e9) ** 0.47)
    active = min(active, total)
    # Eight heads of 128 values for keys and for values: grouped attention, as most models of today have. A
    # layer of a dense model has some twelve matrices of its width.
    width = math.sqrt(active / (12 * num_layers))
    return ModelFacts(_architecture(text), total, active, num_layers, num_layers * 8 * 128 * 2 * 2, width)


def _model_name(path: str) -> str:
    """The part of a path that names the model, in lower case, with hyphens. A hub's cache has more around it:
    ``models--OWNER--NAME/snapshots/REVISION``."""
    parts = [one for one in path.lower().split("/") if one] or [""]
    if "snapshots" in parts[1:]:
        parts = parts[: parts.index("snapshots", 1)]
    return parts[-1].rpartition("--")[2].replace("_", "-")


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name)


def _architecture(name: str) -> str:
    """A model's name without its training and its precision."""
    parts = name.split("-")
    while len(parts) > 1 and (parts[-1] in _NAME_ENDS or known_precision(parts[-1])):
        parts.pop()
    return "-".join(parts)


def known_precision(text: str) -> str | None:
    """The precision of the weights that a name contains ("nvfp4", "w4a16", "Qwen3-32B-AWQ"), in one of the
    names of ``_BYTES``; None: it says none."""
    return next((name for pattern, name in _PRECISIONS if pattern.search(text.lower())), None)


def precision_facts(precision: str, path: str = "") -> PrecisionFacts:
    """By the name of a precision, else by what the model's path says; two bytes where neither does."""
    return _BYTES[known_precision(precision) or known_precision(path) or "bf16"]


def decode_step_s(
    model: ModelFacts,
    card: CardFacts,
    precision: PrecisionFacts,
    num_gpus: float,
    batch_size: float,
    context: float,
) -> float:
    """One step of a worker of ``num_gpus`` cards; each of ``batch_size`` answers has ``context`` tokens."""
    weights = model.num_parameters * model.read_share(batch_size) * precision.weight_bytes
    kv = batch_size * context * model.kv_bytes_per_token
    memory_s = (weights + kv) / (num_gpus * card.bytes_per_s * MEMORY_SHARE)
    computed_s = _computed_s(model, card, precision, num_gpus, batch_size)
    return max(memory_s, computed_s) + _layers_s(model, num_gpus)


def prefill_s(
    model: ModelFacts, card: CardFacts, precision: PrecisionFacts, num_gpus: float, num_tokens: float
) -> float:
    """A prompt alone on a worker. Reading the weights is the least that it takes."""
    weights = model.num_parameters * model.read_share(num_tokens) * precision.weight_bytes
    read_s = weights / (num_gpus * card.bytes_per_s * MEMORY_SHARE)
    computed_s = _computed_s(model, card, precision, num_gpus, num_tokens)
    attention_s = _attention_s(model, card, precision, num_gpus, num_tokens)
    return max(read_s, computed_s + attention_s) + _layers_s(model, num_gpus)


def _computed_s(
    model: ModelFacts, card: CardFacts, precision: PrecisionFacts, num_gpus: float, num_tokens: float
) -> float:
    operations = 2 * model.num_active * num_tokens
    return operations / (num_gpus * card.operations_per_s(precision.operand_bytes) * COMPUTE_SHARE)


def _attention_s(
    model: ModelFacts, card: CardFacts, precision: PrecisionFacts, num_gpus: float, num_tokens: float
) -> float:
    """A prompt's attention: each pair of tokens, which are half of the square, takes a product and a sum for
    every value of a key and of a value. It has no weights: where these have 4 bits, it is computed in 8."""
    operations = 2 * model.num_layers * model.attention_width * num_tokens**2
    operations_per_s = card.operations_per_s(max(1.0, precision.operand_bytes))
    return operations / (num_gpus * operations_per_s * COMPUTE_SHARE)


def _layers_s(model: ModelFacts, num_gpus: float) -> float:
    return model.num_layers * LAYER_S * (2 if num_gpus > 1 else 1)
