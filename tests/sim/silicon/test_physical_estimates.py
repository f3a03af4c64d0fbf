# SPDX-License-Identifier: Apache-2.0
import pytest

from mooncake.sim.silicon.physical_estimates import (
    bytes_per_weight,
    card_facts,
    decode_step_s,
    model_facts,
    prefill_s,
)


def test_cards_are_found_by_the_longest_name() -> None:
    names = {"gb200": "gb200", "b200_sxm": "b200", "h200_sxm": "h200", "RTX PRO 6000": "rtxpro6000"}
    found = {system: card_facts(system) for system in names}
    assert {system: one.name if one else None for system, one in found.items()} == names
    assert card_facts("abacus") is None


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


def test_weights_have_the_size_of_their_precision() -> None:
    given = [("fp8", ""), ("nvfp4", ""), ("int4", ""), ("bf16", ""), ("", "m-FP8"), ("", "m")]
    assert [bytes_per_weight(*one) for one in given] == [1, 0.5, 0.5, 2, 1, 2]


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
        assert bytes_per_weight(name) == size, name
        assert bytes_per_weight("", f"maker/Model-7B-{name}") == size, name


def test_steps_follow_the_roofline() -> None:
    dense, mixture, card = model_facts("Llama-3.1-70B"), model_facts("DeepSeek-V3"), card_facts("h200")
    assert dense and mixture and card
    alone = decode_step_s(dense, card, 1, 1, 1, 1000)
    # An 8-bit 70B model on one card reads 70.6 GB: 14.7 ms at full bandwidth, measured 19.7.
    assert 0.0147 < alone < 0.025
    assert decode_step_s(dense, card, 1, 2, 1, 1000) < 0.6 * alone
    assert decode_step_s(dense, card, 1, 1, 64, 100_000) > 5 * alone
    few, many = (decode_step_s(mixture, card, 1, 8, batch, 1000) for batch in (1, 64))
    assert many > 4 * few  # more requests read more of the experts
    assert prefill_s(dense, card, 1, 1, 8192) == pytest.approx(
        2 * prefill_s(dense, card, 1, 1, 4096), rel=0.05
    )
