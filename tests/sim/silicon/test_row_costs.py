# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from mooncake.errors import InvalidArgument
from mooncake.sim.silicon.measured_rows import MeasuredRow, configured_row, reloaded_row
from mooncake.sim.silicon.row_costs import RowCosts, fit_node
from mooncake.sim.silicon.row_prediction import RowPredictor, TimePrediction
from tests.sim.silicon.row_table import write_rows

PROMPT_S, STEP_S, REQUEST_S = 1e-4, 0.01, 2e-4
"""Seconds of a prompt's token, of a step, and of a request in it, on two cards."""


def measured(num_input: int, concurrency: int, slowness: float = 1.0, **changes: object) -> dict[str, object]:
    """A row of an engine whose costs are known exactly."""
    prompt_s = num_input * PROMPT_S * slowness
    step_s = (STEP_S + REQUEST_S * concurrency) * slowness
    return {
        "id": f"{num_input}-{concurrency}-{slowness}",
        "silicon_data_source": f"table; silicon_concurrency={concurrency}",
        "backend": "vllm",
        "model_path": "meta-llama/Llama-3.1-8B",
        "system": "h100_sxm",
        "precision": "fp8",
        "mode": "agg",
        "isl": num_input,
        "osl": 1024,
        "tp_size": 2,
        "silicon_ttft_ms": 1000 * prompt_s * max(1, concurrency / 4),
        "silicon_tpot_ms": 1000 * (step_s + (concurrency - 1) * prompt_s / 1024),
        **changes,
    }


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths, loads = (512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16, 32, 64)
    rows = [measured(length, load) for length in lengths for load in loads]
    # Twice as slow, on another engine and on another number of cards: neither is to be mixed in.
    rows += [measured(length, 4, 2.0, backend="sglang") for length in lengths]
    rows += [measured(length, 4, 2.0, tp_size=1) for length in lengths]
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.csv", rows)


def test_costs_of_a_measured_node_are_found(table: Path) -> None:
    name = RowCosts.parse(f"{table}:meta-llama/Llama-3.1-8B@h100_sxm")
    assert name is not None
    costs = name.costs()
    assert costs.num_gpus == 2 and "35 measured rows" in costs.source and "vllm" in costs.source
    assert costs.prefill.seconds(0, 4096) + costs.first_token_s == pytest.approx(4096 * PROMPT_S, rel=0.2)
    assert costs.decode.seconds(1, 2000) == pytest.approx(STEP_S, rel=0.15)
    assert costs.decode.seconds(64, 64 * 1500) == pytest.approx(STEP_S + 64 * REQUEST_S, rel=0.25)
    assert 0 < costs.decode_error < 1 and 0 < costs.prefill_error < 2
    assert name.hardware(costs) == "Llama-3.1-8B-2xH100"
    spelled = RowCosts(str(table), "meta-llama/Llama-3.1-8B", "H100", "vLLM", "FP8")
    assert spelled.costs().prefill == costs.prefill
    # Two cards of 80 GB hold 8 GB of weights, and KV of 131,072 bytes a token.
    assert 900_000 < costs.device_tokens < 160e9 / 131_072


def test_what_has_no_rows_is_an_estimate_with_wide_errors(table: Path) -> None:
    near, far = (
        RowCosts.parse(f"{table}:meta-llama/{model}@{system}")
        for model, system in (("Llama-3.1-8B", "h100_sxm"), ("Llama-3.1-70B", "h200/vllm/fp8/tp4"))
    )
    assert near is not None and far is not None
    assert far == RowCosts(str(table), "meta-llama/Llama-3.1-70B", "h200", "vllm", "fp8", 4)
    known, estimated = near.costs(), far.costs()
    assert "PHYSICAL ESTIMATE" in estimated.source and "physical estimate" in estimated.title
    assert estimated.decode_error > known.decode_error and estimated.prefill_error > known.prefill_error
    assert estimated.num_gpus == 4


class _FlatPredictor:
    """Predictions in which the context of answers costs nothing."""

    def predict(self, rows: Sequence[MeasuredRow]) -> dict[str, TimePrediction]:
        prompt_s = np.array([row.quantity("isl") * PROMPT_S for row in rows])
        batch = np.array([row.quantity("concurrency") for row in rows])
        tpot_s = (
            STEP_S
            + REQUEST_S * batch
            + (batch - 1) * prompt_s / np.array([row.quantity("osl") for row in rows])
        )
        return {
            name: TimePrediction(seconds, np.full(len(rows), 0.1))
            for name, seconds in (("ttft", prompt_s), ("tpot", tpot_s))
        }


def test_no_step_reads_the_kv_faster_than_the_memory_allows() -> None:
    like = configured_row("meta-llama/Llama-3.1-70B", "h100", "vllm", "fp8", 4)
    fit = fit_node(cast(RowPredictor, _FlatPredictor()), like)
    read_s = 327_680 / (4 * 3.35e12)
    assert fit.decode.per_token_s == pytest.approx(read_s)
    assert fit.decode.seconds(1, 1024) == pytest.approx(STEP_S, rel=0.3)
    unknown = configured_row("someone/Unheard-Of", "h100", "vllm", "fp8", 4)
    assert fit_node(cast(RowPredictor, _FlatPredictor()), unknown).decode.per_token_s < 0.01 * read_s


def test_a_long_prompt_takes_the_time_of_its_attention(table: Path) -> None:
    name = RowCosts.parse(f"{table}:meta-llama/Llama-3.1-70B@h200/vllm/fp8/tp4")
    assert name is not None
    costs = name.costs()
    attention_s = 131_072**2 / 2 * 4 * 80 * 8192 / (4 * 1979e12)
    assert costs.prefill.c2 > 0 and costs.prefill.seconds(0, 131_072) > attention_s


def test_a_bound_is_slower_or_faster_by_the_errors(table: Path) -> None:
    name = RowCosts.parse(f"{table}:meta-llama/Llama-3.1-8B@h100_sxm")
    assert name is not None
    costs = name.costs()
    slow, fast = costs.at_bound(1), costs.at_bound(-1)
    assert slow.decode.seconds(8, 8000) / fast.decode.seconds(8, 8000) == pytest.approx(
        (1 + costs.decode_error) ** 2
    )
    assert slow.prefill.seconds(0, 999) == pytest.approx(
        (1 + costs.prefill_error) * costs.prefill.seconds(0, 999)
    )
    assert not slow.has_errors and slow.at_bound(1) == slow


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x/Unheard-Of@h100_sxm", "Unheard-Of"),
        ("meta-llama/Llama-3.1-8B@abacus", "abacus"),
        ("deepseek-ai/DeepSeek-R1@h100/fp8/tp1", "room for the weights"),
    ],
)
def test_what_nothing_is_known_of_is_refused(table: Path, text: str, named: str) -> None:
    name = RowCosts.parse(f"{table}:{text}")
    assert name is not None
    with pytest.raises(InvalidArgument, match=named):
        name.costs()


def test_a_precision_may_be_a_method_of_quantization() -> None:
    name = RowCosts.parse("rows.csv:m@h100/w8a8/vllm/tp2")
    assert name == RowCosts("rows.csv", "m", "h100", "vllm", "w8a8", 2)


@pytest.mark.parametrize("text", ["TP8/fp8/vllm", "vllm/fp8/tp8", "FP8/Tp8/vllm"])
def test_parts_have_any_order_and_case(text: str) -> None:
    name = RowCosts.parse(f"rows.csv:m@h100/{text}")
    assert name is not None and (name.engine, name.precision.lower(), name.num_gpus) == ("vllm", "fp8", 8)


@pytest.mark.parametrize("rest", ["tp0", "tp8x", "tp99999", "vllm/sglang", "fp8/bf16", "tp4/tp8"])
def test_parts_that_say_nothing_or_say_it_twice_are_refused(rest: str) -> None:
    with pytest.raises(InvalidArgument, match=r"FILE\.csv:MODEL@SYSTEM"):
        RowCosts.parse(f"rows.csv:m@h100/{rest}")


def test_other_names_are_not_of_rows() -> None:
    assert RowCosts.parse("llama3-70b-8xH100") is None
    with pytest.raises(InvalidArgument, match=r"FILE\.csv:MODEL@SYSTEM"):
        RowCosts.parse("rows.csv:model@card/a/b/c/d")


def test_a_row_at_another_load_is_the_same_engine() -> None:
    row = configured_row("Llama-3.1-8B", "h100", "vllm", "fp8", 2)
    other = reloaded_row(row, 8192.0, 64.0, 16.0)
    assert (other.num_gpus, other.quantity("load"), other.quantity("isl")) == (2, 8, 8192)
    assert other.names == row.names
    assert other.estimate_s("ttft") > 4 * row.estimate_s("ttft") > 0
