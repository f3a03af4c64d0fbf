# SPDX-License-Identifier: Apache-2.0
import gzip
import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mooncake.errors import InvalidArgument
from mooncake.sim.silicon.measured_rows import (
    ASSUMED_CONCURRENCY,
    ESTIMATES,
    MOST_ROWS,
    MeasuredRow,
    SeenMeasurements,
    card_name,
    engine_name,
    first_of,
    precision_name,
    read_rows,
    read_table,
    reloaded_row,
)
from tests.sim.silicon.row_table import fields_of, random_rows, write_rows


def row_of(**changes: object) -> dict[str, object]:
    return {**fields_of(Random(0), 0), **changes}


def test_compressed_files_and_unknown_columns_are_read(tmp_path: Path) -> None:
    rows = random_rows(tmp_path / "rows.csv", 5)
    compressed = tmp_path / "rows.csv.gz"
    compressed.write_bytes(gzip.compress((tmp_path / "rows.csv").read_bytes()))
    assert read_rows(compressed) == rows
    fields = [{"colour": "blue", **fields_of(Random(5), 0)}]
    text = write_rows(tmp_path / "more.csv", fields).read_text()
    (tmp_path / "more.csv").write_text("\ufeff" + text)  # as spreadsheets write it
    assert read_rows(tmp_path / "more.csv") == rows[:1]


def test_cards_of_both_sides_are_counted(tmp_path: Path) -> None:
    sides: dict[str, object] = {
        "prefill_tp_size": 2,
        "prefill_num_workers": 3,
        "decode_tp_size": 1,
        "decode_attention_dp_size": 8,
        "decode_num_workers": 2,
    }
    (row,) = read_rows(write_rows(tmp_path / "rows.csv", [row_of(mode="disagg", **sides)]))
    assert (row.num_gpus, row.has_worker_counts) == (2 * 3 + 8 * 2, True)
    sides["decode_num_workers"] = ""
    (row,) = read_rows(write_rows(tmp_path / "rows.csv", [row_of(mode="disagg", **sides)]))
    assert (row.num_gpus, row.has_worker_counts) == (2 * 3 + 8, False)
    experts = {"tp_size": 1, "moe_ep_size": 4, "moe_tp_size": 2, "pp_size": 2}
    (row,) = read_rows(write_rows(tmp_path / "rows.csv", [row_of(mode="agg", **experts)]))
    assert (row.num_gpus, row.has_worker_counts) == (16, True)


def test_the_stages_of_a_pipeline_take_their_turns(tmp_path: Path) -> None:
    sizes = [(8, 1), (1, 8), (1, 1)]
    load = {"mode": "agg", "silicon_data_source": "silicon_concurrency=1", "model_path": "Llama-3.1-70B"}
    rows = [row_of(**load, tp_size=tensor, pp_size=stages) for tensor, stages in sizes]
    tensor, stages, alone = read_rows(write_rows(tmp_path / "rows.csv", rows))
    assert tensor.num_gpus == stages.num_gpus == 8 and tensor.quantities != stages.quantities
    assert stages.estimates[:2] == pytest.approx(alone.estimates[:2], rel=0.05)
    assert stages.estimates[0] > 4 * tensor.estimates[0]
    loaded = [reloaded_row(row, 1024.0, 1024.0, 512.0) for row in (tensor, stages, alone)]
    waits = [row.estimates[ESTIMATES.index("all_prompts")] for row in loaded]
    assert waits[1] == pytest.approx(waits[2] / 8), "eight prompts are in work at once"
    sides = {f"{side}_{name}": 1 for side in ("prefill", "decode") for name in ("num_workers", "tp_size")}
    apart = row_of(**load | {"mode": "disagg"}, **sides, prefill_pp_size=4, decode_pp_size=2)
    (row,) = read_rows(write_rows(tmp_path / "rows.csv", [apart]))
    assert (row.quantity("prefill_gpus"), row.quantity("decode_gpus"), row.num_gpus) == (4, 2, 6)


def measured(path: Path, *rows: dict[str, object]) -> list[MeasuredRow]:
    table = read_table(write_rows(path, list(rows)))
    return [*table.rows, *table.unmeasured]


def test_a_measurement_is_the_same_when_it_is_rounded(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    times = {"silicon_ttft_ms": 205.123456, "silicon_tpot_ms": 10.987654}
    rounded = {"silicon_ttft_ms": 205.12, "silicon_tpot_ms": 10.99}
    cut = {"silicon_ttft_ms": 205.12, "silicon_tpot_ms": 10.98}
    whole, coarse = (SeenMeasurements(measured(path, row_of(**one))) for one in (times, rounded))
    for other, expected in (
        (row_of(**times, backend="other"), True),
        (row_of(**times, osl=7), True),
        (row_of(**rounded), True),
        (row_of(**cut), True),
        (row_of(**rounded, osl=7), False),
        (row_of(**rounded, silicon_data_source="silicon_concurrency=7"), False),
        (row_of(**rounded, system="h200"), False),
        (row_of(**times | {"silicon_ttft_ms": 205.123457}), False),
        (row_of(**rounded | {"silicon_tpot_ms": 11.0}), False),
    ):
        (row,) = measured(path, other)
        assert (row in whole) is expected, other
    assert measured(path, row_of(**times))[0] in coarse
    (row,) = measured(path, row_of(silicon_ttft_ms=205, silicon_tpot_ms=11))
    assert row not in whole, "such times may be equal by chance"


def test_a_row_without_a_time_is_the_same_measurement_by_the_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    times = {"silicon_ttft_ms": 205.123456, "silicon_tpot_ms": 10.987654}
    whole = SeenMeasurements(measured(path, row_of(**times)))
    for changes, expected in (
        ({"silicon_tpot_ms": ""}, True),
        ({"silicon_ttft_ms": "nan"}, True),
        ({"silicon_ttft_ms": "", "silicon_tpot_ms": 10.99}, False),
        ({"silicon_ttft_ms": "", "silicon_tpot_ms": 10.987655}, False),
        ({"silicon_ttft_ms": "", "silicon_tpot_ms": ""}, False),
    ):
        (row,) = measured(path, row_of(**times | changes))
        assert (row in whole) is expected, changes


def test_decimal_commas_are_read_where_semicolons_separate(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    names = "model_path;system;mode;isl;osl;concurrency;silicon_ttft_ms;silicon_tpot_ms\n"
    start = "m;h100;agg;1024;64;"
    lines = (f"{start}12,5;205,5;10,25", f"{start}8;1024;9", f"{start}8;1.024;9", f"{start}8;1.234,5;9")
    path.write_text(names + "\n".join(lines))
    table = read_table(path)
    (first, second) = table.rows
    assert (first.quantity("concurrency"), first.ttft_s, first.tpot_s) == (12.5, 0.2055, 0.01025)
    assert (second.ttft_s, second.tpot_s) == (1.024, 0.009)
    assert [line.partition("silicon_")[2].partition(" is")[0] for line in table.damaged] == [
        "ttft_ms: '1.024'",
        "ttft_ms: '1.234,5'",
    ]
    path.write_text(names + f"{start}8;1.024;9.5")
    (row,) = read_rows(path)
    assert row.ttft_s == 0.001024, "without any decimal comma, the point is the decimal one"


def test_one_architecture_has_one_name(tmp_path: Path) -> None:
    models = (
        "deepseek-ai/DeepSeek-R1",
        "deepseek-ai/DeepSeek-V3",
        "nvidia/DeepSeek-R1-NVFP4",
        "x/Unheard-Of",
    )
    rows = read_rows(write_rows(tmp_path / "rows.csv", [row_of(model_path=one) for one in models]))
    assert [one.named("architecture") for one in rows] == ["deepseek-v3"] * 3 + ["x/unheard-of"]
    assert [math.isnan(one.estimate_s("tpot")) for one in rows] == [False, False, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"silicon_tpot_ms": "fast"}, "row 2, column silicon_tpot_ms: 'fast'"),
        ({"silicon_ttft_ms": "-3"}, "row 2, column silicon_ttft_ms: '-3'"),
        ({"isl": "many"}, "row 2, column isl: 'many'"),
        ({"isl": ""}, "row 2, column isl: ''"),
        ({"isl": "1.024"}, "row 2, column isl: '1.024' is not a whole number"),
        ({"osl": "1024.7"}, "row 2, column osl: '1024.7' is not a whole number"),
        ({"tp_size": "0.5", "mode": "agg"}, "row 2, column tp_size: '0.5' is not a whole number"),
        ({"pp_size": "1.5", "mode": "agg"}, "row 2, column pp_size: '1.5'"),
        ({"decode_num_workers": "2.5", "mode": "disagg"}, "row 2, column decode_num_workers: '2.5'"),
        ({"osl": "nan"}, "row 2, column osl: 'nan'"),
        ({"tp_size": "1e300", "mode": "agg"}, "row 2, column tp_size: '1e300'"),
        ({"mode": "both"}, "row 2, column mode: 'both' is not agg or disagg"),
        ({"model_path": ""}, "line 3, row 2, column model_path"),
        ({"silicon_data_source": "silicon_concurrency=999999999"}, "row 2, column concurrency: '999999999'"),
    ],
)
def test_a_damaged_row_is_named_with_its_column(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        read_rows(write_rows(tmp_path / "rows.csv", [row_of(), row_of(**changes)]))
    assert message in str(error.value)


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", [row_of()])
    header, row = path.read_text().splitlines()
    for text, message in {
        "": "column model_path",
        header.replace("silicon_ttft_ms", "ttft"): "column silicon_ttft_ms",
        header: "at least one row",
        f"{header}\n\n{row},more": "line 3, row 1 has cells behind the last column",
        header + f"\n{row}" * (MOST_ROWS + 1): f"not {MOST_ROWS + 1}",
    }.items():
        path.write_text(text)
        with pytest.raises(InvalidArgument) as error:
            read_rows(path)
        assert message in str(error.value)
    (tmp_path / "broken.gz").write_bytes(gzip.compress(row.encode())[:-5])
    (tmp_path / "latin.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("broken.gz", "latin.csv", "missing.csv"):
        with pytest.raises(InvalidArgument, match="CSV file"):
            read_rows(tmp_path / name)


def test_rows_without_a_time_are_kept_apart(tmp_path: Path) -> None:
    rows = [row_of(), row_of(silicon_tpot_ms="nan"), row_of(silicon_ttft_ms="", silicon_tpot_ms="N/A")]
    path = write_rows(tmp_path / "rows.csv", rows)
    table = read_table(path)
    assert table.rows == read_rows(path) and len(table.rows) == 1
    first, second = table.unmeasured
    assert first.ttft_s == table.rows[0].ttft_s and math.isnan(first.tpot_s)
    assert math.isnan(second.ttft_s) and math.isnan(second.tpot_s)
    path = write_rows(tmp_path / "rows.csv", rows[1:])
    assert len(read_table(path).unmeasured) == 2
    with pytest.raises(InvalidArgument, match="at least one row"):
        read_rows(path)


def test_short_rows_and_absent_names_are_read(tmp_path: Path) -> None:
    names = ("silicon_ttft_ms", "silicon_tpot_ms", "model_path", "system", "mode", "isl", "osl", "backend")
    path = tmp_path / "rows.csv"
    path.write_text(",".join(names) + "\n100,10,m,h100,agg,512,64\n")
    (row,) = read_rows(path)
    assert (row.id, row.named("backend"), row.num_gpus) == ("row 1", "", 1)
    assert not row.has_concurrency and row.quantity("concurrency") == ASSUMED_CONCURRENCY


@pytest.mark.parametrize(
    ("changes", "concurrency"),
    [
        ({"silicon_data_source": "table; silicon_concurrency=24", "id": "x_c7_1", "concurrency": 5}, 5),
        ({"silicon_data_source": "table; silicon_concurrency=24", "id": "x_c7_1"}, 24),
        ({"id": "model_agg_1024x1024_c128_cfg7"}, 128),
        ({"id": "c16"}, 16),
        ({"id": "a_c128x_abc7_", "batch_size": 9, "attention_dp_size": 4}, 36),
        ({"batch_size": 9}, 9),
        (
            {"mode": "disagg", "batch_size": 9, "decode_batch_size": 10, "decode_num_workers": 3}
            | {"decode_attention_dp_size": 2},
            60,
        ),
    ],
)
def test_the_concurrency_is_taken_from_what_states_it(
    tmp_path: Path, changes: dict[str, object], concurrency: float
) -> None:
    row = row_of(**{"mode": "agg", "silicon_data_source": "table", **changes})
    (found,) = read_rows(write_rows(tmp_path / "rows.csv", [row]))
    assert found.has_concurrency and found.quantity("concurrency") == concurrency


def test_one_thing_has_one_name_however_it_is_spelled(tmp_path: Path) -> None:
    plain = row_of(system="h100_sxm", backend="trtllm", precision="fp8", mode="disagg", backend_version="1.0")
    others = [
        {"system": "H100_SXM", "backend": "TRTLLM", "precision": "FP8", "mode": "DISAGG"},
        {"system": "H100", "backend": "TensorRT-LLM", "mode": "disaggregated", "backend_version": "v1.0"},
        {"system": "NVIDIA H100 SXM", "backend": "tensorrt_llm", "precision": "fp8_block"},
        {"precision": "", "gemm_quant_mode": "fp8", "backend": "TRT-LLM"},
    ]
    rows = read_rows(write_rows(tmp_path / "rows.csv", [plain, *({**plain, **one} for one in others)]))
    assert {row.names for row in rows} == {rows[0].names}
    assert len({row.estimates for row in rows}) == 1 and rows[0].is_disaggregated
    assert card_name("Abacus") == "abacus" and engine_name(" My-Engine") == "my-engine"
    assert [precision_name(one) for one in ("NVFP4", "int4_wo", "Odd", "")] == ["fp4", "int4", "odd", ""]


def test_methods_of_quantization_are_named_by_their_precision() -> None:
    for name, spellings in {
        "int4": "AWQ gptq w4a16 int4",
        "w4a8": "w4a8 W4AFP8",
        "fp4": "mxfp4 nvfp4",
        "fp8": "fp8_e4m3 FP8-E5M2",
        "int8": "w8a8 smoothquant",
    }.items():
        assert {precision_name(one) for one in spellings.split()} == {name}


def test_damaged_rows_are_kept_apart(tmp_path: Path) -> None:
    rows = [row_of(), row_of(isl="x" * 99), row_of(silicon_ttft_ms=""), row_of(mode="both")]
    table = read_table(write_rows(tmp_path / "rows.csv", rows))
    assert (len(table.rows), len(table.unmeasured)) == (1, 1)
    assert table.damaged == [
        f"line 3, row 2, column isl: '{'x' * 40}...' is not a number from 0 to 1,000,000,000",
        "line 5, row 4, column mode: 'both' is not agg or disagg",
    ]
    assert first_of(list("abcde")) == "a; b; c; and 2 more" and first_of(list("abc")) == "a; b; c"


def test_a_disaggregated_prompt_is_estimated_without_the_wait_for_unstated_workers(tmp_path: Path) -> None:
    loads = [
        row_of(silicon_data_source=f"silicon_concurrency={load}", mode="disagg", osl=1) for load in (1, 4096)
    ]
    few, many = read_rows(write_rows(tmp_path / "rows.csv", loads))
    waiting = ESTIMATES.index("waiting")
    assert many.estimates[waiting] > 100 * few.estimates[waiting] > 0
    assert many.estimate_s("ttft") == few.estimate_s("ttft") > 0
    assert many.estimate_s("tpot") > few.estimate_s("tpot")


@pytest.mark.parametrize(
    "form",
    [
        lambda text: text.partition("\n")[0].upper() + "\n" + text.partition("\n")[2],
        lambda text: text.replace(",", ", "),
        lambda text: text.replace(";", ":").replace(",", ";"),
        lambda text: text.replace(",", "\t"),
        lambda text: text.replace("\n", "\r"),
        lambda text: text.replace("\n", ",,\n").replace(",,\n", "\n", 1),
        lambda text: text.replace("silicon_ttft_ms", "ttft_ms").replace("silicon_tpot_ms", "tpot_ms"),
        lambda text: text.replace(",agg,", ",Aggregated,").replace(",disagg,", ",DISAGG,"),
        lambda text: text.replace(",,", ",NaN,").replace(",,", ",N/A,"),
        lambda text: text.rstrip() + "\n" + "," * text.partition("\n")[0].count(",") + "\n",
    ],
)
def test_other_forms_of_a_file_are_the_same_rows(tmp_path: Path, form: Callable[[str], str]) -> None:
    rows = random_rows(tmp_path / "rows.csv", 8)
    text = (tmp_path / "rows.csv").read_text()
    (tmp_path / "other.csv").write_bytes(form(text).encode())
    assert form(text) != text
    changed = read_rows(tmp_path / "other.csv")
    assert [one.quantities for one in changed] == [one.quantities for one in rows]
    assert [(one.named("mode"), one.ttft_s) for one in changed] == [
        (one.named("mode"), one.ttft_s) for one in rows
    ]


def test_a_fraction_of_requests_at_once_is_kept(tmp_path: Path) -> None:
    (row,) = read_rows(
        write_rows(tmp_path / "rows.csv", [row_of(silicon_data_source="silicon_concurrency=12.5")])
    )
    assert row.quantity("concurrency") == 12.5


def test_more_rows_than_can_be_fitted_can_be_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", [row_of()])
    header, row = path.read_text().splitlines()
    path.write_text(header + f"\n{row}" * (MOST_ROWS + 1))
    assert len(read_table(path).rows) == MOST_ROWS + 1
    with pytest.raises(InvalidArgument, match=f"--costs is .* not {MOST_ROWS + 1}"):
        read_rows(path, "--costs")
