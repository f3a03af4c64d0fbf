# SPDX-License-Identifier: Apache-2.0
"""Chunks are found by engines of the same identity only, even where LMCache does not expose it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mooncake.connectors.lmcache.cache_identity import Chunks

SHAPE = torch.Size((2, 3, 16, 64))


def chunks(**extra: Any) -> Chunks:
    config = types.SimpleNamespace(pre_caching_hash_algorithm="builtin", enable_blending=False)
    metadata = types.SimpleNamespace(
        model_name="model",
        engine_id="e",
        use_mla=False,
        worker_id=0,
        world_size=1,
        kv_dtype=torch.float32,
        kv_shape=(3, 2, 16, 1, 64),
        chunk_size=16,
        get_shapes=lambda num_tokens=16: [torch.Size((2, 3, num_tokens, 64))],
        get_dtypes=lambda: [torch.float32],
    )
    return Chunks(config, metadata, {"weights_digest": "w", **extra})


def key_of(some: Chunks) -> str:
    (name,) = some.keys([types.SimpleNamespace(chunk_hash=1, dtype=torch.float32, tags=None)])
    return name


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """vLLM in this process, with a configuration or without."""

    def start(version: str = "0.32", is_known: bool = True, **changes: Any) -> None:
        engine: Any = types.ModuleType("vllm")
        engine.__version__ = version
        fields: dict[str, Any] = {"rope_theta": 1.0, "quantization": None, "cache_dtype": "auto", **changes}
        hf_config = types.SimpleNamespace(to_dict=lambda: {"rope_theta": fields["rope_theta"]})
        model = types.SimpleNamespace(
            hf_config=hf_config,
            dtype=torch.float16,
            quantization=fields["quantization"],
            disable_sliding_window=False,
        )
        cache = types.SimpleNamespace(cache_dtype=fields["cache_dtype"])
        config = types.SimpleNamespace(model_config=model, cache_config=cache) if is_known else None
        settings: Any = types.ModuleType("vllm.config")
        settings.get_current_vllm_config_or_none = lambda: config
        monkeypatch.setitem(sys.modules, "vllm", engine)
        monkeypatch.setitem(sys.modules, "vllm.config", settings)

    return start


@pytest.mark.parametrize(
    "change",
    [{"version": "0.33"}, {"rope_theta": 2.0}, {"quantization": "fp8"}, {"cache_dtype": "fp8_e5m2"}],
    ids=lambda change: next(iter(change)),
)
def test_an_engine_with_other_values_or_another_layout_finds_nothing(
    vllm: Callable[..., None], change: dict[str, Any]
) -> None:
    vllm()
    first = key_of(chunks())
    assert key_of(chunks()) == first
    vllm(**change)
    assert key_of(chunks()) != first


def test_an_unknown_engine_shares_with_itself_only_unless_the_user_gives_its_facts(
    vllm: Callable[..., None],
) -> None:
    vllm(is_known=False)
    one, other = chunks(), chunks()
    assert key_of(one) == key_of(other), "the ranks of one engine"
    other._metadata.engine_id = "f"
    assert key_of(one) != key_of(Chunks(_config(), other._metadata, {"weights_digest": "w"}))
    vouched = [
        key_of(Chunks(_config(), some._metadata, {"weights_digest": "w", "engine_facts": "ours"}))
        for some in (one, other)
    ]
    assert vouched[0] == vouched[1]


def _config() -> Any:
    return types.SimpleNamespace(pre_caching_hash_algorithm="builtin", enable_blending=False)


def test_a_size_that_no_number_of_tokens_has_is_no_chunk() -> None:
    some, row_bytes = chunks(), 2 * 3 * 64 * 4
    assert some.shapes_of(5 * row_bytes) == [torch.Size((2, 3, 5, 64))]
    assert some.shapes_of(5 * row_bytes + 4) is None
    assert some.shapes_of(0) is None and some.shapes_of(17 * row_bytes) is None
