# SPDX-License-Identifier: Apache-2.0
"""Facts that let two engines share blocks or pages, and facts that separate them: any byte of a model."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mooncake.connectors import cache_identity as module
from mooncake.connectors.cache_identity import (
    ENCODER_OPTIONS,
    SGLANG_ARGUMENTS,
    SGLANG_DRAFT_ARGUMENTS,
    Adapters,
    Rank,
    draft_facts,
    encoder_facts,
    model_facts,
    model_weights,
    num_shards,
    pool_facts,
    processor_digest,
    rank_facts,
    sglang_facts,
    shard_facts,
    weights_of,
)
from mooncake.errors import InvalidArgument, ModelError
from tests.connectors.sglang_pools import storage_config

ROWS, COLUMNS = 512, 256


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own for each test."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def model(folder: Path, change: str = "") -> Path:
    folder.mkdir()
    tensors = {f"layer.{number}": torch.arange(4096.0) + number for number in range(4)}
    tensors["embedding"] = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    if change == "tensor":
        tensors["layer.2"] = tensors["layer.2"] * 1.5
    if change == "name":
        tensors["layer.9"] = tensors.pop("layer.3")
    if change == "order":
        tensors["layer.0"], tensors["layer.1"] = tensors["layer.1"], tensors["layer.0"]
    if change == "rows":  # between the samples of the fast mode
        tensors["embedding"][50:200] += 1
    if change == "one number":
        tensors["embedding"][100, 7] += 1
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"rope_theta": 2 if change == "config" else 1}))
    (folder / "modeling.py").write_text("HEADS = 2" if change == "code" else "HEADS = 1")
    return folder


CHANGES = ["tensor", "name", "order", "rows", "one number", "config", "code"]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_same_model_elsewhere_is_the_same(tmp_path: Path, sampled: bool) -> None:
    first, second = model(tmp_path / "a"), model(tmp_path / "b")
    (second / "README.md").write_text("read me")
    assert module.folder_digest(first, sampled) == module.folder_digest(second, sampled)


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_another(tmp_path: Path, change: str) -> None:
    one, other = model(tmp_path / "a"), model(tmp_path / "b", change)
    assert weights_of(str(one), "owner") != weights_of(str(other), "owner")


@pytest.mark.parametrize("change", CHANGES)
def test_differences_that_the_fast_mode_finds_and_misses(tmp_path: Path, change: str) -> None:
    digests = [
        module.folder_digest(one, True) for one in (model(tmp_path / "a"), model(tmp_path / "b", change))
    ]
    is_equal = digests[0] == digests[1]
    assert is_equal == (change in ("rows", "one number")), "its documents say so"


def test_the_two_ways_never_agree(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    assert module.folder_digest(folder) != module.folder_digest(folder, is_sampled=True)


def test_a_file_of_a_format_we_do_not_read_counts_by_its_bytes(tmp_path: Path) -> None:
    for name, byte in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / f"{name}").mkdir()
        (tmp_path / name / "model.gguf").write_bytes(byte * 100_000)
    a, b, c = (module.folder_digest(tmp_path / name) for name in "abc")
    assert a == b != c
    assert module.folder_digest(tmp_path / "a" / "model.gguf") == a


def test_code_of_another_repository_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = model(tmp_path / "a"), tmp_path / "code"
    elsewhere.mkdir()
    (elsewhere / "modeling.py").write_text("HEADS = 1")
    named = {"auto_map": {"AutoModel": "owner/code--modeling.Model", "AutoTokenizer": ["modeling.T", None]}}
    (folder / "config.json").write_text(json.dumps(named))
    found = module._folder_of

    def folder_of(name: str, revision: str | None, cache_dir: str | None) -> Path:
        return elsewhere if name == "owner/code" else found(name, revision, cache_dir)

    monkeypatch.setattr(module, "_folder_of", folder_of)
    before = module.folder_digest(folder)
    (elsewhere / "modeling.py").write_text("HEADS = 2")
    assert module.folder_digest(folder) != before


def test_weights_that_can_not_be_read_belong_to_their_owner(tmp_path: Path) -> None:
    assert weights_of(str(tmp_path), "engine 1") == "engine 1", "no weights"
    assert weights_of(str(model(tmp_path / "a")), "engine 1", unknown="they are random") == "engine 1"


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        module.folder_digest(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        module.folder_digest(tmp_path, is_sampled=True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not readable"):
        module.folder_digest(tmp_path)


def test_the_fast_mode_is_selected_by_true_alone() -> None:
    assert (module.is_sampled({}), module.is_sampled({"sampled_weights": True})) == (False, True)
    wrong: Any = {"sampled_weights": "no"}
    with pytest.raises(InvalidArgument, match="sampled_weights"):
        module.is_sampled(wrong)


def vllm_config(**changes: Any) -> Any:
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
    assert model_facts(vllm_config(**change)) != model_facts(vllm_config())


def test_where_a_copy_of_the_model_lies_is_none() -> None:
    assert model_facts(vllm_config(path="/elsewhere")) == model_facts(vllm_config())


def test_layers_backends_and_the_version_are_facts() -> None:
    base = ("1.0", "w", ["a", "b"], ["CPU"])
    others = [("1.1", *base[1:]), (*base[:1], "v", *base[2:]), (*base[:2], ["b", "a"], ["CPU"])]
    others.append((*base[:3], ["OTHER"]))
    found = [rank_facts(vllm_config(), *fields) for fields in (base, *others)]
    assert all(one != found[0] for one in found[1:])


def test_a_digest_that_the_user_gives_is_taken_and_made_up_weights_are_the_engines() -> None:
    assert model_weights(vllm_config(), {"weights_digest": "mine"}) == "mine"
    assert model_weights(vllm_config(load_format="dummy"), {}) == "engine e"


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


def test_an_adapter_with_a_link_to_nowhere_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "adapter.bin").write_bytes(bytes(100))
    adapter = types.SimpleNamespace(lora_path=str(tmp_path))
    whole = Adapters("e").digest(adapter)
    (tmp_path / "README.md").symlink_to(tmp_path / "removed")
    found = Adapters("e").digest(adapter)
    assert found == Adapters("e").digest(adapter) != Adapters("f").digest(adapter)
    assert found not in (whole, b"")


@pytest.mark.parametrize("name", SGLANG_ARGUMENTS)
def test_each_argument_that_changes_numbers_is_a_fact(name: str) -> None:
    def facts(value: str) -> dict[str, object]:
        arguments = types.SimpleNamespace(**{name: value})
        return pool_facts(storage_config(), {"weights_digest": "w"}, arguments)

    assert facts("a") == facts("a") != facts("b")


ADDED_ARGUMENTS = [
    {"modelopt_quant": "fp8"},
    {"modelopt_checkpoint_restore_path": "/checkpoint"},
    {"quantize_and_serve": True},
    {"rl_quant_profile": "/profile"},
    {"load_format": "bitsandbytes"},
    {"load_format": "pt"},
    {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "a"}'},
    {"custom_weight_loader": ["a.load"]},
    {"decrypted_config_file": "/config"},
    {"model_config_parser": "mistral"},
    {"prefill_attention_backend": "fa3"},
    {"decode_attention_backend": "fa3"},
    {"prefill_kv_cache_dequant_dtype": "nvfp4"},
    {"kt_weight_path": "/experts"},
    {"kt_method": "AMXINT4"},
]


@pytest.mark.parametrize("change", ADDED_ARGUMENTS, ids=lambda change: next(iter(change)))
def test_what_changes_the_weights_or_the_numbers_of_sglang_is_a_fact(change: dict[str, Any]) -> None:
    def facts(**arguments: Any) -> dict[str, object]:
        return pool_facts(storage_config(), {"weights_digest": "w"}, types.SimpleNamespace(**arguments))

    assert facts(**change) != facts()


@pytest.mark.parametrize(
    "same",
    [
        *({"load_format": one} for one in ("auto", "safetensors", "fastsafetensors", "instanttensor")),
        {"load_format": "runai_streamer"},
        {"quantize_and_serve": False},
        {"custom_weight_loader": []},
        {"model_loader_extra_config": "{}"},
        {"model_loader_extra_config": '{"enable_multithread_load": true, "num_threads": 8}'},
    ],
    ids=str,
)
def test_arguments_of_the_same_effect_do_not_separate_servers(same: dict[str, Any]) -> None:
    assert sglang_facts(types.SimpleNamespace(**same)) == sglang_facts(types.SimpleNamespace())


def test_a_file_that_an_argument_names_counts_by_its_contents(tmp_path: Path) -> None:
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).write_text(text)
    a, b, c = (
        sglang_facts(types.SimpleNamespace(rl_quant_profile=str(tmp_path / name))) for name in ("a", "b", "c")
    )
    assert a == b != c


UNKNOWN_WEIGHTS = [
    {"load_format": "dummy"},
    {"load_format": "remote_instance"},
    {"custom_weight_loader": ["a.load"]},
    {"checkpoint_engine_wait_weights_before_ready": True},
    {"weight_cache_mode": "client"},
]


@pytest.mark.parametrize("change", UNKNOWN_WEIGHTS, ids=lambda change: "-".join(map(str, change.values())))
def test_weights_that_may_not_be_the_folders_are_one_processes(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = str(model(tmp_path / "a"))
    arguments = types.SimpleNamespace(model_path=folder, **change)
    weights = [pool_facts(storage_config(), {}, arguments)["weights"] for _ in range(2)]
    assert weights[0] != weights[1]
    read = [
        pool_facts(storage_config(), {}, types.SimpleNamespace(model_path=folder))["weights"]
        for _ in range(2)
    ]
    assert read[0] == read[1] == weights_of(folder, "owner")


@pytest.mark.parametrize("name", SGLANG_DRAFT_ARGUMENTS)
def test_each_argument_of_a_draft_model_is_a_fact_of_its_pools(name: str) -> None:
    def facts(value: str) -> dict[str, object]:
        return draft_facts({"weights_digest": "w"}, types.SimpleNamespace(**{name: value}))

    assert facts("a") == facts("a") != facts("b")
    assert draft_facts({"weights_digest": "w"}, types.SimpleNamespace()) == {}


def test_a_draft_model_counts_with_its_weights(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    arguments = types.SimpleNamespace(speculative_draft_model_path=str(folder))
    before = draft_facts({}, arguments)
    copy = types.SimpleNamespace(speculative_draft_model_path=str(model(tmp_path / "copy")))
    assert draft_facts({}, arguments) == draft_facts({}, copy) == before
    for path in model(tmp_path / "b", "one number").iterdir():
        path.replace(folder / path.name)
    assert draft_facts({}, arguments) != before, "other weights under the same path"
    arguments.speculative_draft_load_format = "dummy"
    assert draft_facts({}, arguments) != draft_facts({}, arguments), "random weights"


def test_a_part_of_the_heads_is_named_so_that_servers_of_other_sizes_find_it() -> None:
    def heads(rank: int, size: int, number: int, num_shards: int) -> object:
        ranks: Any = storage_config(tp_rank=rank, tp_size=size)
        return shard_facts(ranks, False, number, num_shards)["heads"]

    assert heads(1, 2, 1, 2) == heads(3, 4, 0, 1) == "3 of 4"
    assert shard_facts(storage_config(tp_rank=1, tp_size=2), True, 0, 1)["heads"] == "all"


def encoder_config(folder: Path, **changes: Any) -> Any:
    config = vllm_config(model=str(folder), **changes)
    config.model_config.multimodal_config = types.SimpleNamespace(
        **{name: changes.get(name) for name in ENCODER_OPTIONS}
    )
    return config


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 2.0},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        *({one: "x"} for one in ENCODER_OPTIONS),
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_an_encoders_output_is_a_fact(tmp_path: Path, change: dict[str, Any]) -> None:
    facts = encoder_facts(encoder_config(tmp_path), "1.0", "w")
    assert encoder_facts(encoder_config(tmp_path, **change), "1.0", "w") != facts
    assert encoder_facts(encoder_config(tmp_path), "1.1", "w") != facts
    assert encoder_facts(encoder_config(tmp_path), "1.0", "v") != facts


def test_the_dtype_of_the_kv_cache_is_none_of_an_encoders(tmp_path: Path) -> None:
    facts = encoder_facts(encoder_config(tmp_path), "1.0", "w")
    assert encoder_facts(encoder_config(tmp_path, cache_dtype="fp8_e4m3"), "1.0", "w") == facts


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_a_processors_configuration_counts_with_all_its_bytes(tmp_path: Path, name: str) -> None:
    found = [processor_digest(str(tmp_path))]
    for text in ('{"image_mean": 0.5}', '{"image_mean": 0.4}'):
        (tmp_path / name).write_text(text)
        found.append(processor_digest(str(tmp_path)))
    assert len(set(found)) == 3
    (tmp_path / "tokenizer.json").write_text("{}")
    assert processor_digest(str(tmp_path)) == found[-1]


def test_weights_that_are_made_up_are_those_of_the_engine_that_asks() -> None:
    assert model_weights(vllm_config(load_format="dummy"), {}, "ec") == "engine ec"
