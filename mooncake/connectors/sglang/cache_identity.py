# SPDX-License-Identifier: Apache-2.0
"""Facts that decide the meaning of the bytes in a page of SGLang's host cache, for the page's key.

If one of these differs, a page must not be found; so when in doubt a fact is included. Not included are the
tokens (SGLang's own page hash covers them, with salts and adapters), and options that change speed only.
Reads the objects it is given, and SGLang's arguments where it runs in SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mooncake.connectors.weights import is_sampled, weights_of

ARGUMENTS = (
    *("dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args"),
    *("attention_backend", "model_impl", "revision"),
)
"""Options of SGLang's command line that change the computed values or their layout."""


def server_arguments() -> Any:
    """SGLang's arguments in this process, or None where there are none (a test, an older SGLang)."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None


def version() -> str:
    """SGLang's version, or "" without SGLang."""
    try:
        import sglang
    except ImportError:
        return ""
    return str(getattr(sglang, "__version__", ""))


def facts_of(config: Any, extra: Mapping[str, Any], arguments: Any) -> dict[str, object]:
    """Facts that all pools of a process share; ``config`` is SGLang's ``HiCacheStorageConfig``.

    A ``weights_digest`` in ``extra`` replaces the computed one.
    """
    model = getattr(arguments, "model_path", None) or config.model_name or ""
    weights = extra.get("weights_digest") or weights_of(
        model,
        f"process {os.urandom(16).hex()}",
        revision=getattr(arguments, "revision", None),
        cache_dir=getattr(arguments, "download_dir", None),
        is_made_up=getattr(arguments, "load_format", None) == "dummy",
        is_sampled=is_sampled(extra),
    )
    return {
        "engine": "sglang",
        "version": version(),
        "weights": weights,
        "tag": extra.get("extra_backend_tag", ""),
        **{f"asked_{name}": getattr(arguments, name, None) for name in ARGUMENTS},
    }


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
