# SPDX-License-Identifier: Apache-2.0
"""The identity of cached KV: facts that decide the meaning of an engine's bytes, for the keys of its blocks.

If one of these facts differs, a block or page must not be found; so when in doubt a fact is included. Not
included are the tokens, which the engine's own hash covers, and options that change speed only. The hashes
of vLLM and SGLang also cover a request's images, its salt and the name of its adapter, whose weights count
here. LMCache's covers neither adapters nor salts, so ``lmcache.py`` refuses engines that have adapters.
Nothing here needs an engine: the functions read the objects they are given, and SGLang's arguments where it
runs in SGLang.

The identity of a model's weights is a digest of its folder. All bytes of all weights count, and with them the
files that change what is computed: configurations, and the code of models that bring their own. Models that
differ in a few rows (a vocabulary that was extended, an adapter merged into some heads, pruned or edited
weights) must not read each other's blocks, and no choice of samples finds every such difference. Each host
reads a model once for this (``digests.py``). ``is_sampled`` is a fast mode for users who know that they serve
no two models that differ in some rows only: it reads a few MB. With it, such models share blocks, and answers
are wrong without an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mooncake import clock
from mooncake.connectors.digests import file_digest
from mooncake.errors import InvalidArgument, ModelError
from mooncake.files import file_state
from mooncake.log import get_logger

log = get_logger(__name__)

SAMPLES = 3
"""Samples per tensor in the fast mode: its beginning, its middle and its end."""

SAMPLE_BYTES = 4096

FILE_SAMPLES = 256
"""Samples per file of an unknown format."""

_TENSORS = ("*.safetensors",)
_OTHER_FORMATS = ("*.gguf", "*.bin", "*.pt", "*.pth")
_CONFIGURATION = ("config.json", "params.json", "*quant*.json", "adapter_config.json", "*.index.json")
_SMALL = (".json", ".py")
"""Files that are read whole in the fast mode, too."""

_PROCESSOR = ("*processor_config.json", "*preprocessor*.json", "*feature_extractor*.json")

ENCODER_OPTIONS = (
    *("mm_processor_kwargs", "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
    *("mm_device_do_normalize", "video_pruning_rate", "video_pruning_method"),
)
"""Fields of vLLM's multimodal configuration that change what its processor and its encoder compute."""

MODEL_OPTIONS = (
    *("dtype", "quantization", "quantization_config"),
    *("model_impl", "model_class_overrides", "code_revision"),
)
"""Fields of vLLM's model configuration that change what the model and its encoder compute."""

CACHE_OPTIONS = ("cache_dtype", "kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill")
"""Fields of vLLM's cache configuration that change the values in the cache or their layout."""

DRAFT_OPTIONS = (
    *("method", "kv_cache_dtype", "parallel_drafting", "use_heterogeneous_vocab"),
    *("draft_tensor_parallel_size", "index_share_for_mtp_iteration"),
)
"""Fields of vLLM's speculative configuration that change the KV of a draft model, or its layout."""

_ROPE_OF_ANY_LENGTH = {
    *("default", "linear", "ntk", "dynamic", "llama3", "yarn", "proportional"),
    *("deepseek_yarn", "deepseek_llama_scaling", "mrope", "mllama4", "bailing_mrope", "openpangu"),
}
"""Kinds of rotary embedding whose values at a position do not depend on the longest prompt of vLLM.

``dynamic`` takes the length in the model's configuration. ``longrope`` is not here: it has long factors where
vLLM's longest prompt exceeds the length of the model's training.
"""

_ROPE_KINDS = ("rope_type", "type")
"""Names of the field with the kind, of which the second is that of older models."""

_AUTO = "auto"
"""Value of vLLM's ``load_format`` that depends on the folder."""

_TENSORS_ONLY = {"hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}
"""Values of vLLM's ``load_format`` that load the same files with another reader."""

_CONSOLIDATED = "consolidated*.safetensors"
"""Files that vLLM's ``auto`` loads instead where a folder has them, as ``mistral`` does."""

_OTHER_FILES = {"mistral", "sharded_state", "runai_streamer_sharded"}
"""Those that load other files with weights, which are hashed as well."""

_LLAMA4_TUNED_LENGTH = 32768
"""Value of ``max_model_len`` beyond which vLLM scales the attention of Llama 4 by the position."""

_RANDOM_WEIGHTS = "the weights are random (load_format dummy)"

SAMPLED = "sampled_weights"
"""The option of an engine's extra configuration that selects the fast mode."""

_VOLATILE = {"_name_or_path", "name_or_path", "transformers_version", "_attn_implementation", "max_model_len"}
"""Fields of a model's configuration that may differ in a copy of the model elsewhere.

Some models of vLLM write ``max_model_len`` into it; ``_length_facts`` has it where it counts.
"""

SGLANG_ARGUMENTS = (
    *("dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("prefill_kv_cache_dequant_dtype", "model_impl", "model_config_parser", "revision"),
    *("modelopt_quant", "modelopt_checkpoint_restore_path", "quantize_and_serve", "rl_quant_profile"),
    *("load_format", "model_loader_extra_config", "custom_weight_loader", "decrypted_config_file"),
    *("kt_method", "kt_weight_path"),
)
"""Options of SGLang's command line that change the computed values or their layout."""

SGLANG_DRAFT_ARGUMENTS = (
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision"),
    *("speculative_draft_load_format", "speculative_draft_model_quantization", "decrypted_draft_config_file"),
    *("speculative_draft_kv_cache_dtype", "speculative_draft_attention_backend"),
    *("speculative_draft_window_size", "speculative_draft_sink_size"),
)
"""Options of SGLang's command line that change what a draft model computes, or its layout."""

_SGLANG_FILES = {
    *("quantization_param_path", "modelopt_checkpoint_restore_path", "rl_quant_profile"),
    *("decrypted_config_file", "decrypted_draft_config_file", "kt_weight_path"),
}
"""Options that name a file or a folder, whose contents count, wherever it lies."""

_SAME_TENSORS = {"auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}
"""Values of ``load_format`` that load the same files with another reader.

Not ``pt``, ``npcache`` and ``mistral``: where a folder has several formats, they load other files than these.
"""

_ELSEWHERE = {"ipc_cache", "private", "rdma", "remote", "remote_instance"}
"""Values of ``load_format`` with which the weights do not come from the model's folder."""

_READER_OPTIONS = {
    *("enable_multithread_load", "num_threads", "enable_weights_track"),
    *("concurrency", "memory_limit", "distributed"),  # of runai_streamer and runai_streamer_sharded
}
"""Fields of ``model_loader_extra_config`` that change the time of a load only."""


def weights_of(
    model: str,
    owner: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    unknown: str = "",
    is_sampled: bool = False,
) -> str:
    """A digest of the weights of ``model``, a folder or the name of one that the hub's client has here.

    For weights that can't be read it is ``owner``, so that only engines with the same ``owner`` share blocks.

    Args:
        unknown: why the engine's weights are not those of ``model``; empty if they are.
    """
    reason = unknown
    if not unknown:
        try:
            began = clock.monotonic()
            digest = folder_digest(_folder_of(model, revision, cache_dir), is_sampled, cache_dir)
            seconds = round(clock.monotonic() - began, 2)
            log.info("weights_hashed", model=model, digest=digest[:16], sampled=is_sampled, seconds=seconds)
            return digest
        except (ModelError, OSError, ValueError, ImportError) as error:
            reason = str(error)
    log.warning("weights_unknown", model=model, reason=reason, consequence="blocks are not shared")
    return owner


def is_sampled(extra: Mapping[str, Any]) -> bool:
    """Whether an engine's extra configuration selects the fast mode. Raises InvalidArgument."""
    value = extra.get(SAMPLED, False)
    if not isinstance(value, bool):
        raise InvalidArgument(SAMPLED, value, "true or false")
    if value:
        log.warning(SAMPLED, risk="models that differ in some rows of a tensor share blocks: wrong answers")
    return value


def _folder_of(model: str, revision: str | None, cache_dir: str | None) -> Path:
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download  # installed only where models are named by hub names

    return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))


def folder_digest(folder: Path, is_sampled: bool = False, cache_dir: str | None = None) -> str:
    """SHA-256 over all weights of ``folder`` (or of the one file it is), their configuration and their code.

    ``cache_dir``: the hub client's cache, with code that the configuration names in another repository.

    Raises:
        ModelError: there are no weights, or a file is damaged or changes.
        OSError: a file can't be read.
    """
    kind = "sampled" if is_sampled else "all"
    total = hashlib.sha256(f"mooncake-weights-2 {kind}\n".encode())
    for name, path in _files_of(folder, cache_dir):
        digest = _sampled(path) if is_sampled else file_digest(path)
        total.update(f"{name}\0{digest}\n".encode())
    return total.hexdigest()


def _files_of(folder: Path, cache_dir: str | None) -> list[tuple[str, Path]]:
    """(name, path) of each file that counts, in a fixed order. Raises ModelError."""
    if folder.is_file():
        return [(folder.name, folder)]
    files = [path for pattern in _TENSORS for path in sorted(folder.glob(pattern))]
    if not files:
        files = [path for pattern in _OTHER_FORMATS for path in sorted(folder.glob(pattern))]
    if not files:
        raise ModelError(f"{folder} has no weights ({', '.join(_TENSORS + _OTHER_FORMATS)})")
    files += [path for pattern in _CONFIGURATION for path in sorted(folder.glob(pattern))]
    named = {path.name: path for path in files}
    named |= {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    for repository in _code_of_others(folder):
        elsewhere = _folder_of(repository, None, cache_dir)
        named |= {f"{repository}/{path.name}": path for path in sorted(elsewhere.rglob("*.py"))}
    return list(named.items())


def _code_of_others(folder: Path) -> list[str]:
    """Repositories whose code ``config.json`` names (``auto_map: {AutoModel: owner/name--file.Class}``)."""
    path = folder / "config.json"
    if not path.is_file():
        return []
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not readable JSON ({error}); fetch the model again") from error
    named = config.get("auto_map") if isinstance(config, dict) else None
    values = list(named.values()) if isinstance(named, dict) else []
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return sorted({one.partition("--")[0] for one in flat if isinstance(one, str) and "--" in one})


def _sampled(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        total.update(f"{size}\n".encode())
        if path.suffix in _SMALL:
            total.update(file.read())
            return total.hexdigest()
        spans = _tensors(path, size) if path.suffix == ".safetensors" else [(0, size, FILE_SAMPLES)]
        for start, length, samples in spans:
            for offset in _places(length, samples):
                total.update(os.pread(file.fileno(), SAMPLE_BYTES, start + offset))
    return total.hexdigest()


def _places(length: int, samples: int) -> list[int]:
    """Offsets, evenly from the beginning to the last full sample."""
    last = max(0, length - SAMPLE_BYTES)
    return sorted({last * index // (samples - 1) for index in range(samples)})


def _tensors(path: Path, size: int) -> list[tuple[int, int, int]]:
    """(offset, bytes, samples) of the header and of each tensor of a safetensors file."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= size - 8:
            raise ModelError(f"{path} is damaged: its header says {header_bytes} of {size} bytes")
        header = json.loads(file.read(header_bytes))
    start = 8 + header_bytes
    spans = [(0, start, -(-start // SAMPLE_BYTES) + 1)]  # all of it
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            spans.append((start + begin, end - begin, SAMPLES))
    return spans


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank's place among those of its engine."""

    tp_rank: int
    tp_size: int

    def heads(self, total: int, num_shards: int) -> list[tuple[int, int]]:
        """The range of KV heads, from and up to, in each of this rank's shards.

        Raises:
            InvalidArgument: the heads can't be divided into these shards.
        """
        local = max(1, total // self.tp_size)
        first = self.tp_rank * local if total >= self.tp_size else self.tp_rank * total // self.tp_size
        if local % num_shards:
            raise InvalidArgument("store_tp_size", num_shards * self.tp_size, f"a divisor of {total} heads")
        width = local // num_shards
        return [(first + shard * width, first + (shard + 1) * width) for shard in range(num_shards)]


def num_shards(store_tp_size: int | None, tp_size: int) -> int:
    """Number of shards into which a rank cuts its blocks.

    Raises:
        InvalidArgument: ``store_tp_size`` is not a multiple of this engine's tensor parallelism.
    """
    if not store_tp_size:
        return 1
    if store_tp_size < 1 or store_tp_size % tp_size:
        raise InvalidArgument("store_tp_size", store_tp_size, f"a multiple of {tp_size}")
    return store_tp_size // tp_size


def model_weights(config: Any, extra: Mapping[str, Any], engine_id: str = "") -> str:
    """A digest of the model's weights; a ``weights_digest`` in ``extra`` replaces it.

    ``engine_id``: owner of weights that can't be read, by default that of the KV connector's configuration.
    """
    owner = engine_id or config.kv_transfer_config.engine_id
    return _vllm_weights(config.model_config, config.load_config, extra, owner)


def _vllm_weights(model: Any, load: Any, extra: Mapping[str, Any], engine_id: str) -> str:
    """The same of any model of an engine; ``model``, ``load``: its ModelConfig and LoadConfig."""
    return extra.get("weights_digest") or weights_of(
        model.model,
        f"engine {engine_id}",
        revision=model.revision,
        cache_dir=load.download_dir,
        unknown=vllm_weights_unknown(load),
        is_sampled=is_sampled(extra),
    )


def vllm_draft_facts(config: Any, extra: Mapping[str, Any]) -> dict[str, object]:
    """Further facts of a rank whose blocks have KV of a draft model; empty where none drafts.

    A wrong draft's KV changes no token, but hardly any of the tokens that it proposes would be accepted. A
    ``weights_digest`` in ``extra`` stands for the draft model's weights, too.
    """
    speculative = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft is config.model_config:  # nothing drafts, or what needs no model (ngram)
        return {}
    load = getattr(speculative, "draft_load_config", None) or config.load_config
    facts = {
        "weights": _vllm_weights(draft, load, extra, config.kv_transfer_config.engine_id),
        "config": _config_digest(draft),
        **_options(speculative, DRAFT_OPTIONS),
        **_options(draft, MODEL_OPTIONS),
        **_length_facts(draft),
    }
    return {f"draft_{name}": value for name, value in facts.items()}


def vllm_weights_unknown(load: Any) -> str:
    """Why vLLM's weights are not known to be those that are hashed; empty if they are. ``load``: LoadConfig.

    Known are the formats whose files are always hashed. ``pt`` and ``npcache`` are not, because of a folder
    that has several formats only the safetensors are; nor are those that plugins of vLLM add.
    """
    form = str(load.load_format)
    if form == "dummy":
        return _RANDOM_WEIGHTS
    if form in {_AUTO, *_TENSORS_ONLY, *_OTHER_FILES}:
        return ""
    return f"load_format {form} may take the weights from elsewhere"


def _load_facts(config: Any) -> dict[str, object]:
    """Fields of vLLM's ``LoadConfig`` that change which weights are loaded."""
    load = config.load_config
    form = str(load.load_format)
    if form == _AUTO:
        form = _form_of_auto(config.model_config, load)
    return {
        "load_format": "tensors" if form in _TENSORS_ONLY else form,
        "load_options": _without_reader_options(getattr(load, "model_loader_extra_config", None)),
        "load_by_torchao": getattr(load, "safetensors_load_strategy", None) == "torchao",
    }


def _form_of_auto(model: Any, load: Any) -> str:
    """The ``load_format`` that vLLM chooses for ``auto``; ``auto`` itself if the folder can't be read."""
    try:
        folder = _folder_of(model.model, model.revision, load.download_dir)
    except (OSError, ValueError, ImportError):
        return _AUTO
    return "mistral" if any(folder.glob(_CONSOLIDATED)) else "hf"


class Adapters:
    """Digests of adapters (LoRA) from their folders' contents; vLLM's hashes have their names only."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._known: dict[tuple[object, ...], bytes] = {}

    def digest(self, adapter: Any) -> bytes:
        """The adapter's digest, empty without an adapter; one of this engine's own if it can't be read."""
        if adapter is None:
            return b""
        folder = Path(adapter.lora_path)
        own = f"{adapter.lora_path} of engine {self._engine_id}"
        try:
            files = sorted(folder.iterdir()) if folder.is_dir() else []
            state = (str(folder), *((path.name, *file_state(path.stat())) for path in files))
        except OSError:  # such as a link to nowhere, or a file that is removed now
            return hashlib.sha256(own.encode()).digest()
        if state not in self._known:
            try:
                found = folder_digest(folder)
            except (ModelError, OSError):
                found = own
            self._known[state] = hashlib.sha256(found.encode()).digest()
        return self._known[state]


def rank_facts(
    config: Any, version: str, weights: str, layers: Sequence[str], backends: Sequence[str]
) -> dict[str, object]:
    """Facts that all shards of a rank share.

    Args:
        layers: names of the layers whose tensors the rank has, in order.
        backends: description of each layer's packing of keys and values.
    """
    return {
        "engine": "vllm",
        "version": version,
        "weights": weights,
        **model_facts(config),
        "hash": config.cache_config.prefix_caching_hash_algo,
        "layers": ",".join(layers),
        "backends": ",".join(sorted(set(backends))),
    }


def model_facts(config: Any) -> dict[str, object]:
    """Fields of vLLM's configuration that change the values computed for a prompt, or their layout."""
    model = config.model_config
    return {
        **_options(model, MODEL_OPTIONS),
        **_options(config.cache_config, CACHE_OPTIONS),
        **_load_facts(config),
        **_length_facts(model),
        **(_processor_facts(config) if getattr(model, "multimodal_config", None) else {}),
        "config": _config_digest(model),
        "disable_sliding_window": model.disable_sliding_window,
    }


def _options(configuration: Any, names: Sequence[str]) -> dict[str, object]:
    """Fields of a configuration of vLLM; one that this vLLM lacks, or that is empty, is None."""
    return {name: getattr(configuration, name, None) or None for name in names}


def _length_facts(model: Any) -> dict[str, object]:
    """What changes values for ``max_model_len`` or for the configuration of generation, in some models."""
    config = model.hf_config.to_dict()
    facts: dict[str, object] = {}
    # With -1, vLLM computes with the longest length and reduces it later.
    is_automatic = getattr(model, "original_max_model_len", None) == -1
    for rope in _ropes(config):
        kinds = {str(rope[key]) for key in _ROPE_KINDS if rope.get(key)}
        trained = rope.get("original_max_position_embeddings")
        if kinds <= _ROPE_OF_ANY_LENGTH:
            continue
        if kinds == {"longrope"} and trained and not is_automatic:
            facts[f"is_longer_than_{trained}"] = model.max_model_len > trained
        else:
            facts["max_model_len"] = "auto" if is_automatic else model.max_model_len
    if str(config.get("model_type", "")).startswith("llama4"):
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        default = is_automatic or model.max_model_len > _LLAMA4_TUNED_LENGTH
        facts["attn_temperature_tuning"] = generation.get("attn_temperature_tuning", default)
    return facts


def _ropes(config: Mapping[str, Any], is_rope: bool = False) -> list[Mapping[str, Any]]:
    """Rotary embeddings in a model's configuration, which may have one per kind of layer."""
    found = [config] if is_rope and any(config.get(key) for key in _ROPE_KINDS) else []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _ropes(value, is_rope or str(key).startswith("rope_"))
    return found


def _config_digest(model: Any) -> str:
    text = json.dumps(_stable(model.hf_config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def encoder_facts(config: Any, version: str, weights: str) -> dict[str, object]:
    """Fields of vLLM's configuration that change what a multimodal encoder computes for an item.

    The weights are those of the whole model: where an encoder ends, and its projector, only the model's code
    knows. Tensor parallelism is not among the facts, because every rank has the whole output.
    """
    model = config.model_config
    return {
        "engine": "vllm",
        "version": version,
        "weights": weights,
        "config": _config_digest(model),
        **_options(model, MODEL_OPTIONS),
        **_load_facts(config),
        **_processor_facts(config),
    }


def _processor_facts(config: Any) -> dict[str, object]:
    """What changes the outputs of a multimodal model's processor and encoder."""
    model = config.model_config
    options = {name: getattr(model.multimodal_config, name, None) for name in ENCODER_OPTIONS}
    scales = options["mm_encoder_fp8_scale_path"]
    return {
        **options,
        "mm_encoder_fp8_scale_path": _content(Path(scales)) if scales else None,
        "processor": processor_digest(model.model, model.revision, config.load_config.download_dir),
    }


def processor_digest(model: str, revision: str | None = None, cache_dir: str | None = None) -> str:
    """SHA-256 of the files that configure a model's processor; "none" where they can't be read.

    With a folder that can't be read, the weights are not shared either (``weights_of``).
    """
    try:
        folder = _folder_of(model, revision, cache_dir)
        total = hashlib.sha256()
        for path in sorted({path for pattern in _PROCESSOR for path in folder.glob(pattern)}):
            total.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    except (OSError, ValueError, ImportError):
        return "none"
    return total.hexdigest()


def _stable(value: Any) -> Any:
    """A configuration without fields that may differ in a copy of the model elsewhere."""
    if isinstance(value, dict):
        return {str(key): _stable(inner) for key, inner in value.items() if key not in _VOLATILE}
    return value


def sglang_arguments() -> Any:
    """SGLang's arguments in this process, or None where there are none (a test, an older SGLang)."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None


def sglang_version() -> str:
    """SGLang's version, or "" without SGLang."""
    try:
        import sglang
    except ImportError:
        return ""
    return str(getattr(sglang, "__version__", ""))


def pool_facts(config: Any, extra: Mapping[str, Any], arguments: Any) -> dict[str, object]:
    """Facts that all pools of a process share; ``config`` is SGLang's ``HiCacheStorageConfig``.

    A ``weights_digest`` in ``extra`` replaces the computed one.
    """
    model = getattr(arguments, "model_path", None) or config.model_name or ""
    weights = extra.get("weights_digest") or weights_of(
        model,
        f"process {os.urandom(16).hex()}",
        revision=getattr(arguments, "revision", None),
        cache_dir=getattr(arguments, "download_dir", None),
        unknown=sglang_weights_unknown(arguments),
        is_sampled=is_sampled(extra),
    )
    return {
        "engine": "sglang",
        "version": sglang_version(),
        "weights": weights,
        "tag": extra.get("extra_backend_tag", ""),
        "adapters": _adapters_of(arguments),
        **sglang_facts(arguments),
    }


def _adapters_of(arguments: Any) -> list[tuple[str, str, str]]:
    """(name, path, digest) of each adapter of SGLang's command line; this process's own if it can't be read.

    The names of such an adapter's pages depend on its name and path only. One that is loaded into a running
    server has a random id in them, so its pages are found by that server alone.
    """
    if getattr(arguments, "enable_lora", None) is False:
        return []
    given = getattr(arguments, "lora_paths", None) or []
    pairs = given.items() if isinstance(given, Mapping) else map(_named_adapter, given)
    return sorted((name, path, weights_of(path, f"process {os.urandom(16).hex()}")) for name, path in pairs)


def _named_adapter(given: Any) -> tuple[str, str]:
    """(name, path) of an entry of ``lora_paths``: text of the command line, a mapping or a ``LoRARef``."""
    if isinstance(given, str):
        name, _, path = given.partition("=")
        return name, path or name
    if isinstance(given, Mapping):
        return str(given["lora_name"]), str(given["lora_path"])
    return str(given.lora_name), str(given.lora_path)


def draft_facts(extra: Mapping[str, Any], arguments: Any) -> dict[str, object]:
    """Further facts of pools with KV of a draft model; empty without speculative decoding.

    A ``weights_digest`` in ``extra`` stands for the draft model's weights, too.
    """
    facts = sglang_facts(arguments, SGLANG_DRAFT_ARGUMENTS)
    if not any(facts.values()):
        return {}
    model = getattr(arguments, "speculative_draft_model_path", None)
    if model and not extra.get("weights_digest"):
        facts["asked_speculative_draft_model_path"] = weights_of(
            model,
            f"process {os.urandom(16).hex()}",
            revision=getattr(arguments, "speculative_draft_model_revision", None),
            cache_dir=getattr(arguments, "download_dir", None),
            unknown=sglang_weights_unknown(arguments, "speculative_draft_load_format"),
            is_sampled=is_sampled(extra),
        )
    return facts


def sglang_facts(arguments: Any, names: Sequence[str] = SGLANG_ARGUMENTS) -> dict[str, object]:
    """The values of these of SGLang's arguments, equal where they have the same effect.

    An argument that this SGLang lacks, or that is off, is None.
    """
    return {f"asked_{name}": _asked(name, getattr(arguments, name, None)) for name in names}


def _asked(name: str, value: Any) -> object:
    if name.endswith("load_format"):
        return None if not value or str(value) in _SAME_TENSORS else str(value)
    if name == "model_loader_extra_config":
        return _without_reader_options(value)
    if name in _SGLANG_FILES and value:
        return _content(Path(value))
    return value or None


def _without_reader_options(value: Any) -> object:
    try:
        options = json.loads(value) if isinstance(value, str) else value
    except ValueError:  # SGLang refuses it, too
        return value
    if not isinstance(options, dict):
        return value
    kept = {key: inner for key, inner in options.items() if key not in _READER_OPTIONS}
    return json.dumps(kept, sort_keys=True, default=str) if kept else None


def _content(path: Path) -> str:
    """The digest of a file, or of a folder of weights; the path itself if it can't be read."""
    try:
        return file_digest(path) if path.is_file() else folder_digest(path)
    except (ModelError, OSError):
        return str(path)


def sglang_weights_unknown(arguments: Any, load_format: str = "load_format") -> str:
    """Why SGLang's weights are not known to be those of the model's folder; empty if they are.

    ``load_format``: the argument that has the format; without a value the main model's format applies.
    """
    form = getattr(arguments, load_format, None) or getattr(arguments, "load_format", None)
    if form == "dummy":
        return _RANDOM_WEIGHTS
    if form in _ELSEWHERE:
        return f"load_format {form} takes the weights from elsewhere"
    if getattr(arguments, "custom_weight_loader", None):
        return "custom_weight_loader may load any weights"
    if getattr(arguments, "checkpoint_engine_wait_weights_before_ready", False):
        return "a checkpoint engine brings the weights"
    if getattr(arguments, "weight_cache_mode", None) == "client":
        return "the daemon of weight_cache_mode may have read the folder before it was changed"
    return ""


def shard_facts(config: Any, is_replicated: bool, number: int, num_shards: int) -> dict[str, object]:
    """The part of the model in a rank's pool: all heads where every rank has all, else its own.

    ``number``: of the ``num_shards`` into which this rank cuts its pages, for other tensor-parallel sizes.
    """
    head = config.tp_rank * num_shards + number
    return {
        "heads": "all" if is_replicated else f"{head} of {config.tp_size * num_shards}",
        "stage": f"{config.pp_rank} of {config.pp_size}",
        "context": f"{config.attn_cp_rank} of {config.attn_cp_size}",
    }
