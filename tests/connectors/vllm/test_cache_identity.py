# SPDX-License-Identifier: Apache-2.0
"""Facts that let two vLLM ranks share blocks, and facts that separate them."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from mooncake.connectors.vllm.cache_identity import (
    Adapters,
    Rank,
    facts_of,
    model_facts,
    model_weights,
    num_shards,
)
from mooncake.errors import InvalidArgument


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def config(**changes: Any) -> Any:
    fields = {"rope_theta": 1.0, "dtype": "bfloat16", "quantization": None, "cache_dtype": "auto", **changes}
    hf = {"rope_theta": fields["rope_theta"], "_name_or_path": fields.get("path", "a")}
    model = types.SimpleNamespace(
        hf_config=types.SimpleNamespace(to_dict=lambda: hf),
        model=fields.get("model", "model"),
        revision=None,
        dtype=fields["dtype"],
        quantization=fields["quantization"],
        disable_sliding_window=fields.get("disable_sliding_window", False),
    )
    cache = types.SimpleNamespace(cache_dtype=fields["cache_dtype"], prefix_caching_hash_algo="sha256")
    return types.SimpleNamespace(
        model_config=model,
        cache_config=cache,
        load_config=types.SimpleNamespace(download_dir=None, load_format=fields.get("load_format", "auto")),
        kv_transfer_config=types.SimpleNamespace(engine_id="e"),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 2.0},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8_e4m3"},
        {"disable_sliding_window": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_numbers_is_a_fact(change: dict[str, Any]) -> None:
    assert model_facts(config(**change)) != model_facts(config())


def test_where_a_copy_of_the_model_lies_is_none() -> None:
    assert model_facts(config(path="/elsewhere")) == model_facts(config())


def test_layers_backends_and_the_version_are_facts() -> None:
    base = ("1.0", "w", ["a", "b"], ["CPU"])
    others = [("1.1", *base[1:]), (*base[:1], "v", *base[2:]), (*base[:2], ["b", "a"], ["CPU"])]
    others.append((*base[:3], ["OTHER"]))
    found = [facts_of(config(), *fields) for fields in (base, *others)]
    assert all(one != found[0] for one in found[1:])


def test_a_digest_that_the_user_gives_is_taken_and_made_up_weights_are_the_engines() -> None:
    assert model_weights(config(), {"weights_digest": "mine"}) == "mine"
    assert model_weights(config(load_format="dummy"), {}) == "engine e"


def test_heads_are_divided_over_ranks_and_shards() -> None:
    assert Rank(1, 2).heads(8, 2) == [(4, 6), (6, 8)]
    assert [Rank(rank, 4).heads(2, 1) for rank in range(4)] == [[(0, 1)], [(0, 1)], [(1, 2)], [(1, 2)]]
    with pytest.raises(InvalidArgument, match="store_tp_size"):
        Rank(0, 1).heads(3, 2)
    assert (num_shards(None, 2), num_shards(4, 2)) == (1, 2)
    for wrong in (-2, 3):
        with pytest.raises(InvalidArgument, match="store_tp_size"):
            num_shards(wrong, 2)


def test_an_adapter_counts_with_all_its_bytes_and_not_its_name(tmp_path: Path) -> None:
    adapters = Adapters("e")
    weights = bytearray(100_000)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter.bin").write_bytes(weights)
    one, other = (types.SimpleNamespace(lora_path=str(tmp_path / name)) for name in "ab")
    assert adapters.digest(None) == b""
    first = adapters.digest(one)
    assert first == adapters.digest(other) != b""
    weights[43_210] = 1
    (tmp_path / "a" / "adapter.bin").write_bytes(weights)
    assert adapters.digest(one) != first
    nowhere = types.SimpleNamespace(lora_path=str(tmp_path / "none"))
    assert Adapters("e").digest(nowhere) != Adapters("f").digest(nowhere), "not shared"
