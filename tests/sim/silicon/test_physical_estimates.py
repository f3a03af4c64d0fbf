# SPDX-License-Identifier: Apache-2.0
import pytest

from mooncake.sim.silicon.physical_estimates import (
    CARDS,
    CardFacts,
    ModelFacts,
    PrecisionFacts,
    card_facts,
    decode_step_s,
    model_facts,
    precision_facts,
    prefill_s,
)

FP8 = PrecisionFacts(1.0, 1.0)


def facts_of(model_name: str, system: str) -> tuple[ModelFacts, CardFacts]:
    model, card = model_facts(model_name), card_facts(system)
    assert model and card
    return model, card


@pytest.mark.parametrize(
    ("system", "name"),
    [
        ("gb200", "gb200"),
        ("GB200 NVL72", "gb200"),
        ("b200_sxm", "b200"),
        ("h200_sxm", "h200"),
        ("8xH100", "h100"),
        ("dgxh100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("RTX PRO 6000", "rtxpro6000"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("H100-PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("H100 SXM NVLink", "h100"),
        ("H200 NVL", "h200_nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("GH200 144GB HBM3e", "gh200_144g"),
        ("A100-PCIE-40GB", "a100_40g"),
        ("NVIDIA A100-SXM4-40GB", "a100_40g"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("H20", "h20"),
        ("RTX A1000", None),
        ("RTX PRO 4000", None),
        ("L40", None),
        ("MI300X", None),
        ("abacus", None),
    ],
)
def test_a_card_is_found_by_its_name_and_by_its_variant(system: str, name: str | None) -> None:
    found = card_facts(system)
    assert (found.name if found is not None else None) == name


def test_the_name_of_every_card_is_its_own() -> None:
    assert [card_facts(one.name) for one in CARDS] == list(CARDS)


@pytest.mark.parametrize(
    ("path", "total", "active"),
    [
        ("deepseek-ai/DeepSeek-R1", 671e9, 37e9),
        ("Qwen/Qwen3-235B-A22B-FP8", 235e9, 22e9),
        ("someone/New-Model-48B-A3.5B", 48e9, 3.5e9),
        ("someone/New-Model-13b-chat", 13e9, 13e9),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 70e9, 70e9),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", 8e9, 8e9),
        ("openai/gpt-oss-120b", 117e9, 5.1e9),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.7e9, 12.9e9),
    ],
)
def test_models_are_known_by_name_or_by_the_sizes_in_it(path: str, total: float, active: float) -> None:
    facts = model_facts(path)
    assert facts is not None
    assert (facts.num_parameters, facts.num_active) == (total, active)


def test_a_name_without_a_size_is_unknown() -> None:
    assert model_facts("someone/New-Model") is None
    assert model_facts("meta-llama/Llama-4-Maverick-17B-128E-Instruct") is None, "17B is a part of it"
    assert model_facts("deepseek-ai/DeepSeek-V3.2-Exp-16L64E") is None, "it has 16 of 61 layers"
    assert model_facts("deepseek-ai/DeepSeek-V3-Lite") is None
    assert model_facts("") is None and model_facts("/") is None


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        (
            "qwen3-32b",
            "Qwen/Qwen3-32B/ Qwen3_32B /models/Qwen3-32B/snapshots/9216db5781bf nvidia/Qwen3-32B-NVFP4 "
            "/hub/models--Qwen--Qwen3-32B/snapshots/ab/",
        ),
        ("deepseek-v3", "deepseek_r1 DeepSeek_R1 deepseek-ai/DeepSeek-R1-0528 deepseek-ai/DeepSeek-V3-0324/"),
        ("llama-3.1-8b", "meta-llama/Llama-3_1-8B Meta-Llama-3.1-8B-Instruct"),
        ("llama-3-18b", "someone/Llama-3-18B"),
        (
            "qwen2.5-72b",
            "Qwen/Qwen2.5-72B Qwen/Qwen2.5-72B-Instruct Qwen/Qwen2.5-72B-Instruct-AWQ "
            "someone/Qwen2.5-72B-quantized.w4a16 Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4",
        ),
    ],
)
def test_a_model_has_one_name_however_its_path_is_written(name: str, paths: str) -> None:
    for path in paths.split():
        facts = model_facts(path)
        assert facts is not None and facts.name == name, path


def test_weights_have_the_size_of_their_precision() -> None:
    given = [("fp8", ""), ("nvfp4", ""), ("int4", ""), ("bf16", ""), ("", "m-FP8"), ("", "m")]
    assert [precision_facts(*one).weight_bytes for one in given] == [1, 0.5, 0.5, 2, 1, 2]


def test_weights_that_are_only_kept_in_four_bits_are_multiplied_in_more() -> None:
    rates = {"awq": 2, "gptq": 2, "w4a16": 2, "int4_wo": 2, "w4a8": 1, "W4AFP8": 1, "nvfp4": 0.5, "fp8": 1}
    assert {name: precision_facts(name).operand_bytes for name in rates} == rates
    model, card = facts_of("Llama-3.1-70B", "b200")
    kept, multiplied, plain = (
        prefill_s(model, card, precision_facts(one), 1, 8192) for one in ("awq", "nvfp4", "bf16")
    )
    assert kept == plain > 3 * multiplied
    steps = [decode_step_s(model, card, precision_facts(one), 1, 1, 1024) for one in ("awq", "nvfp4", "bf16")]
    assert steps[0] == steps[1] < 0.5 * steps[2], "a small batch takes the time to read the weights"


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (
            0.5,
            "mxfp4 nvfp4 MXFP4 int4 int4_wo w4a16 w4a8 W4AFP8 awq awq_marlin gptq GPTQ-Int4 nf4 4bit q4_k_m",
        ),
        (1.0, "fp8 fp8_e4m3 fp8-e5m2 e4m3 mxfp8 fp8_block w8a8 w8a16 int8 int8_wo gptq-int8 8bit q8_0"),
        (2.0, "bf16 bfloat16 fp16 float16 w16a16 half unheard-of 14bit"),
        (4.0, "fp32 float32"),
    ],
)
def test_a_precision_has_its_size_however_it_is_spelled(size: float, names: str) -> None:
    for name in names.split():
        assert precision_facts(name).weight_bytes == size, name
        assert precision_facts("", f"maker/Model-7B-{name}").weight_bytes == size, name


def test_steps_follow_the_roofline() -> None:
    (dense, card), (mixture, _) = facts_of("Llama-3.1-70B", "h200"), facts_of("DeepSeek-V3", "h200")
    alone = decode_step_s(dense, card, FP8, 1, 1, 1000)
    # An 8-bit 70B model on one card reads 70.6 GB: 14.7 ms at full bandwidth, measured 19.7.
    assert 0.0147 < alone < 0.025
    assert decode_step_s(dense, card, FP8, 2, 1, 1000) < 0.6 * alone
    assert decode_step_s(dense, card, FP8, 1, 64, 100_000) > 5 * alone
    few, many = (decode_step_s(mixture, card, FP8, 8, batch, 1000) for batch in (1, 64))
    assert many > 4 * few  # more requests read more of the experts
    once, twice = (prefill_s(dense, card, FP8, 1, num_tokens) for num_tokens in (4096, 8192))
    assert 2 < twice / once < 2.2


def test_the_attention_of_a_long_prompt_takes_most_of_its_time() -> None:
    model, card = facts_of("Llama-3.1-8B", "h100")
    # Half the square of 131,072 tokens, four operations for each of the 32 layers' 4,096 values.
    attention_s = 131_072**2 / 2 * 4 * 32 * 4096 / (989e12 * 0.45)
    assert attention_s == pytest.approx(10.1, rel=0.01)
    bf16, fp4 = precision_facts("bf16"), precision_facts("fp4")
    long_s, short_s = (prefill_s(model, card, bf16, 1, num_tokens) for num_tokens in (131_072, 1024))
    assert attention_s < long_s < 1.6 * attention_s
    assert long_s > 200 * short_s
    b200 = facts_of("Llama-3.1-8B", "b200")[1]
    times = [prefill_s(model, b200, one, 1, 1_000_000) for one in (FP8, fp4)]
    assert times[1] > 0.9 * times[0], "attention has no weights"
