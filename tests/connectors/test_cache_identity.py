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
    vllm_draft_facts,
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
    """A double of vLLM's configuration; changes name fields of any of its parts."""
    hf = {"rope_theta": 1.0, "_name_or_path": "a", **changes.pop("hf", {})}
    fields: dict[str, dict[str, Any]] = {
        "model_config": {
            "hf_config": types.SimpleNamespace(to_dict=lambda: hf),
            "model": "model",
            "revision": None,
            "dtype": "bfloat16",
            "quantization": None,
            "quantization_config": None,
            "disable_sliding_window": False,
            "max_model_len": 4096,
            "original_max_model_len": None,
            "model_impl": "auto",
            "model_class_overrides": {},
            "code_revision": None,
            "override_generation_config": {},
            "try_get_generation_config": dict,
            "multimodal_config": None,
        },
        "cache_config": {
            "cache_dtype": "auto",
            "prefix_caching_hash_algo": "sha256",
            "kv_cache_dtype_skip_layers": [],
            "kv_sharing_fast_prefill": False,
        },
        "load_config": {
            "download_dir": None,
            "load_format": "auto",
            "model_loader_extra_config": {},
            "safetensors_load_strategy": None,
        },
        "kv_transfer_config": {"engine_id": "e"},
    }
    for name, value in changes.items():
        (part,) = (part for part in fields.values() if name in part)
        part[name] = value
    return types.SimpleNamespace(**{name: types.SimpleNamespace(**part) for name, part in fields.items()})


@pytest.mark.parametrize(
    "change",
    [
        {"hf": {"rope_theta": 2.0}},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"quantization_config": {"linear": "mxfp8"}},
        {"model_impl": "transformers"},
        {"model_class_overrides": {"Model": "module:Other"}},
        {"code_revision": "abc"},
        {"cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype_skip_layers": ["0"]},
        {"kv_sharing_fast_prefill": True},
        {"disable_sliding_window": True},
        {"load_format": "mistral"},
        {"load_format": "safetensors"},
        {"model_loader_extra_config": {"pattern": "other-{rank}.safetensors"}},
        {"safetensors_load_strategy": "torchao"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_numbers_is_a_fact(change: dict[str, Any]) -> None:
    assert model_facts(vllm_config(**change)) != model_facts(vllm_config())


@pytest.mark.parametrize("form", ["fastsafetensors", "hf", "runai_streamer"])
def test_another_reader_of_the_same_files_is_no_other_fact(form: str) -> None:
    threads = {"enable_multithread_load": True, "num_threads": 8}
    streams = {"concurrency": 32, "memory_limit": -1, "distributed": True}
    same = {"model_loader_extra_config": threads | streams}
    assert model_facts(vllm_config(load_format=form, **same)) == model_facts(
        vllm_config(load_format="safetensors")
    )


def test_auto_is_the_format_of_the_files_that_it_loads(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")

    def facts(form: str) -> dict[str, object]:
        return model_facts(vllm_config(model=str(folder), load_format=form))

    assert facts("auto") == facts("safetensors") != facts("mistral")
    (folder / "consolidated.00.safetensors").write_bytes(b"x")
    assert facts("auto") == facts("mistral") != facts("safetensors")


@pytest.mark.parametrize(
    ("hf", "counts"),
    [
        ({}, False),
        ({"rope_parameters": {"rope_type": "yarn"}}, False),
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"text_config": {"rope_scaling": {"type": "su"}}}, True),
        ({"rope_parameters": {"full": {"rope_type": "dynamic"}, "sliding": {"rope_type": "default"}}}, False),
        ({"rope_parameters": {"full": {"rope_type": "another"}, "sliding": {"rope_type": "default"}}}, True),
        ({"quantization_config": {"type": "int"}}, False),
    ],
    ids=str,
)
def test_the_longest_prompt_counts_where_positions_depend_on_it(hf: dict[str, Any], counts: bool) -> None:
    short, long = (model_facts(vllm_config(hf=hf, max_model_len=length)) for length in (4096, 32768))
    assert (short != long) is counts
    automatic = model_facts(vllm_config(hf=hf, original_max_model_len=-1))
    assert (automatic != short) is counts, "vLLM reduces it after the model is made"


def test_for_longrope_it_counts_whether_prompts_may_exceed_the_length_of_training() -> None:
    hf = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}

    def facts(length: int) -> dict[str, object]:
        return model_facts(vllm_config(hf=hf, max_model_len=length))

    assert facts(2048) == facts(4096) != facts(4097) == facts(131072)
    automatic = model_facts(vllm_config(hf=hf, original_max_model_len=-1))
    assert automatic != facts(4096), "vLLM makes the model with a longer length and reduces it later"


def test_a_length_that_vllm_writes_into_the_configuration_is_no_fact() -> None:
    assert model_facts(vllm_config(hf={"max_model_len": 4096})) == model_facts(vllm_config())


def test_the_scaled_attention_of_llama_4_is_a_fact() -> None:
    def facts(**changes: Any) -> dict[str, object]:
        return model_facts(vllm_config(hf={"model_type": "llama4"}, **changes))

    assert facts(max_model_len=32768) == facts() != facts(max_model_len=32769)
    assert facts(original_max_model_len=-1) == facts(max_model_len=32769), "vLLM reduces it later"
    tuned = {"attn_temperature_tuning": True}
    assert facts(override_generation_config=tuned) == facts(max_model_len=32769)
    assert facts(try_get_generation_config=lambda: tuned) == facts(max_model_len=32769)


def test_in_a_multimodal_model_the_processor_and_the_encoder_count(tmp_path: Path) -> None:
    def facts(**options: Any) -> dict[str, object]:
        multimodal = types.SimpleNamespace(**options)
        return model_facts(vllm_config(model=str(tmp_path), multimodal_config=multimodal))

    before = facts()
    assert all(facts(**{name: "x"}) != before for name in ENCODER_OPTIONS)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert facts() != before


def test_where_a_copy_of_the_model_lies_is_none() -> None:
    assert model_facts(vllm_config(hf={"_name_or_path": "/elsewhere"})) == model_facts(vllm_config())


def test_layers_backends_and_the_version_are_facts() -> None:
    base = ("1.0", "w", ["a", "b"], ["CPU"])
    others = [("1.1", *base[1:]), (*base[:1], "v", *base[2:]), (*base[:2], ["b", "a"], ["CPU"])]
    others.append((*base[:3], ["OTHER"]))
    found = [rank_facts(vllm_config(), *fields) for fields in (base, *others)]
    assert all(one != found[0] for one in found[1:])


def test_a_digest_that_the_user_gives_is_taken_and_made_up_weights_are_the_engines() -> None:
    assert model_weights(vllm_config(), {"weights_digest": "mine"}) == "mine"
    assert model_weights(vllm_config(load_format="dummy"), {}) == "engine e"


@pytest.mark.parametrize(
    ("form", "is_known"),
    [
        *(
            (form, True)
            for form in ("auto", "hf", "safetensors", "runai_streamer", "mistral", "sharded_state")
        ),
        *((form, False) for form in ("pt", "npcache", "ipc_cache", "modelexpress", "tensorizer", "a_plugin")),
    ],
)
def test_weights_are_the_folders_only_where_vllm_loads_files_that_are_hashed(
    tmp_path: Path, form: str, is_known: bool
) -> None:
    folder = str(model(tmp_path / "a"))
    assert (model_weights(vllm_config(model=folder, load_format=form), {}) != "engine e") is is_known


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


def adapter_facts(path: Path | str, form: str = "text", **arguments: Any) -> dict[str, object]:
    """Facts of a server of SGLang with one adapter, in a form in which its arguments may have it."""
    given: dict[str, Any] = {
        "text": [f"sql={path}"],
        "mapping": {"sql": str(path)},
        "mappings": [{"lora_name": "sql", "lora_path": str(path)}],
        "objects": [types.SimpleNamespace(lora_name="sql", lora_path=str(path))],
    }
    named = types.SimpleNamespace(**{"enable_lora": True, "lora_paths": given[form], **arguments})
    return pool_facts(storage_config(), {"weights_digest": "w"}, named)


@pytest.mark.parametrize("form", ["text", "mapping", "mappings", "objects"])
def test_adapters_of_sglang_count_with_their_weights(tmp_path: Path, form: str) -> None:
    """Their pages are named by the name and the path alone, which may be the same on every host."""
    weights = tmp_path / "adapter_model.bin"
    weights.write_bytes(b"of Monday")
    before = adapter_facts(tmp_path, form)
    assert adapter_facts(tmp_path, form) == before == adapter_facts(tmp_path)
    weights.write_bytes(b"of Tuesday")
    assert adapter_facts(tmp_path, form) != before
    assert before != pool_facts(storage_config(), {"weights_digest": "w"}, types.SimpleNamespace())


def test_adapters_of_sglang_that_can_not_be_read_are_one_processes(tmp_path: Path) -> None:
    assert adapter_facts(tmp_path) != adapter_facts(tmp_path)
    none = pool_facts(storage_config(), {"weights_digest": "w"}, types.SimpleNamespace())
    assert adapter_facts(tmp_path, enable_lora=False) == none, "SGLang ignores them"


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


def with_draft(folder: Path, change: str = "", value: object = None) -> Any:
    """vLLM's configuration with a draft model; a change names a field of it or of speculative decoding."""
    draft = vllm_config(model=str(folder)).model_config
    fields = {
        "draft_model_config": draft,
        "draft_load_config": None,
        "method": "eagle",
        "kv_cache_dtype": None,
    }
    config = vllm_config()
    config.speculative_config = types.SimpleNamespace(**fields, parallel_drafting=False)
    part = draft if change in vars(draft) else config.speculative_config
    if change:
        setattr(part, change, value)
    return config


def test_a_draft_model_of_vllm_counts_with_its_weights(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    before = vllm_draft_facts(with_draft(folder), {})
    assert vllm_draft_facts(with_draft(model(tmp_path / "copy")), {}) == before
    assert vllm_draft_facts(with_draft(model(tmp_path / "b", "one number")), {}) != before
    random = types.SimpleNamespace(download_dir=None, load_format="dummy")
    one, other = (with_draft(folder, "draft_load_config", random) for _ in range(2))
    other.kv_transfer_config.engine_id = "other"
    assert vllm_draft_facts(one, {}) != vllm_draft_facts(other, {}), "random weights"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("method", "eagle3"), ("kv_cache_dtype", "fp8"), ("parallel_drafting", True)),
        *(("use_heterogeneous_vocab", True), ("quantization", "fp8"), ("dtype", "float32")),
        *(("draft_tensor_parallel_size", 2), ("index_share_for_mtp_iteration", True)),
    ],
)
def test_each_option_of_vllms_draft_model_is_a_fact(tmp_path: Path, name: str, value: object) -> None:
    folder = model(tmp_path / "a")
    assert vllm_draft_facts(with_draft(folder, name, value), {}) != vllm_draft_facts(with_draft(folder), {})


def test_without_a_draft_model_vllms_facts_are_as_before() -> None:
    config = vllm_config()
    assert vllm_draft_facts(config, {}) == {}
    for draft in (None, config.model_config):  # ngram has the model's own configuration
        config.speculative_config = types.SimpleNamespace(draft_model_config=draft)
        assert vllm_draft_facts(config, {}) == {}


def test_a_part_of_the_heads_is_named_so_that_servers_of_other_sizes_find_it() -> None:
    def heads(rank: int, size: int, number: int, num_shards: int) -> object:
        ranks: Any = storage_config(tp_rank=rank, tp_size=size)
        return shard_facts(ranks, False, number, num_shards)["heads"]

    assert heads(1, 2, 1, 2) == heads(3, 4, 0, 1) == "3 of 4"
    assert shard_facts(storage_config(tp_rank=1, tp_size=2), True, 0, 1)["heads"] == "all"


def encoder_config(folder: Path, **changes: Any) -> Any:
    options = {name: changes.pop(name, None) for name in ENCODER_OPTIONS}
    return vllm_config(model=str(folder), multimodal_config=types.SimpleNamespace(**options), **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"hf": {"rope_theta": 2.0}},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"quantization_config": {"linear": "mxfp8"}},
        {"load_format": "mistral"},
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


def test_scales_of_an_encoder_count_by_their_contents(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"

    def facts(text: str) -> dict[str, object]:
        scales.write_text(text)
        return encoder_facts(encoder_config(tmp_path, mm_encoder_fp8_scale_path=str(scales)), "1.0", "w")

    assert facts("1") == facts("1") != facts("2")


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
