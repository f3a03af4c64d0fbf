# SPDX-License-Identifier: Apache-2.0
"""``mooncake grade`` on files that are not as they should be."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.cli.simulation.grade import grade_command
from mooncake.errors import InvalidArgument
from tests.sim.silicon.row_table import fields_of, write_rows


def grade(capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    """The printed JSON."""
    grade_command(
        options.pop("run_folder", None),
        options.pop("share", None),
        options.pop("fit_on", None),
        options.pop("test_on", None),
        options.pop("seed", 0),
        True,
    )
    assert not options
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def fields(num_rows: int, seed: int = 5) -> list[dict[str, object]]:
    random = Random(seed)
    return [fields_of(random, number) for number in range(num_rows)]


def test_damaged_rows_are_left_out_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = fields(40)
    whole = write_rows(tmp_path / "whole.csv", rows)
    damage = [("isl", "many"), ("osl", ""), ("isl", "nan"), ("silicon_tpot_ms", "-3"), ("osl", "inf")]
    wrong = [{**rows[number], column: value} for number, (column, value) in enumerate(damage)]
    some = write_rows(tmp_path / "some.csv", [*rows[:20], *wrong, *rows[20:]])
    expected, found = (grade(capsys, fit_on=whole, test_on=file) for file in (whole, some))
    assert (expected["num_damaged"], found["num_damaged"], found["num_predicted"]) == (0, 5, 40)
    (note,) = found["notes"]
    assert note.startswith("5 rows of --test-on are damaged and left out: line 22, row 21, column isl: 'm")
    assert "column osl: ''" in note and note.endswith("; and 2 more.") and "silicon_tpot_ms" not in note
    fitted = grade(capsys, fit_on=some, test_on=whole)
    assert (fitted["num_fitted"], fitted["num_damaged"]) == (40, 5)
    assert [one["tpot_s"] for one in fitted["rows"]] == [one["tpot_s"] for one in expected["rows"]]


def test_a_table_without_a_usable_row_is_refused_with_the_reason(tmp_path: Path) -> None:
    rows = fields(3)
    whole = write_rows(tmp_path / "whole.csv", rows)
    damaged = write_rows(tmp_path / "damaged.csv", [one | {"isl": "many"} for one in rows])
    blank = write_rows(tmp_path / "blank.csv", [rows[0] | {"silicon_ttft_ms": ""}, rows[1] | {"osl": "x"}])
    for option, files, reason in (
        ("--fit-on", (damaged, whole), "3 rows are damaged: line 2, row 1, column isl: 'many'"),
        ("--test-on", (whole, damaged), "3 rows are damaged: line 2, row 1, column isl: 'many'"),
        ("--fit-on", (damaged, None), "3 rows are damaged"),
        ("--fit-on", (blank, whole), "1 rows lack a time; 1 rows are damaged: line 3, row 2, column osl"),
    ):
        with pytest.raises(InvalidArgument) as error:
            grade_command(None, None, *files)
        assert str(error.value).startswith(f"{option} is ") and reason in str(error.value)


def test_a_measurement_that_is_fitted_is_not_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = fields(60)
    fit_on = write_rows(tmp_path / "fit.csv", rows[:40])
    again = [{**one, "id": f"again {one['id']}"} for one in rows[:20]]
    found = grade(capsys, fit_on=fit_on, test_on=write_rows(tmp_path / "test.csv", [*again, *rows[40:]]))
    apart = grade(capsys, fit_on=fit_on, test_on=write_rows(tmp_path / "apart.csv", rows[40:]))
    assert (found["num_same_measurement"], apart["num_same_measurement"]) == (20, 0)
    for name in ("ttft", "tpot"):
        every = found["errors"]["all"][name]
        assert (every["all"]["num_rows"], every["held out"]["num_rows"]) == (40, 20)
        assert every["held out"] == apart["errors"]["all"][name]["all"]
        assert "held out" not in apart["errors"]["all"][name]
        for group in ("model_path", "mode"):
            assert found["errors"][group][name] == apart["errors"][group][name]
    assert "mode_held_out" not in apart and found["mode_held_out"] == apart["mode"] != found["mode"]


def test_random_halves_say_what_both_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = fields(30)
    again = [{**one, "id": f"again {one['id']}"} for one in rows]
    found = grade(capsys, fit_on=write_rows(tmp_path / "rows.csv", [*rows, *again]))
    predicted = {one["id"].removeprefix("again ") for one in found["rows"]}
    num_same = 2 * len(predicted) - 30  # the other row of each of these is fitted on
    assert 0 < found["num_same_measurement"] == num_same < 30
    assert found["errors"]["all"]["tpot"]["held out"]["num_rows"] == 30 - num_same
    grade_command(None, None, tmp_path / "rows.csv")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{num_same} of 30 predicted rows are measurements that the fit has, too" in printed


def test_a_run_with_incomplete_requests_is_graded_on_what_the_fit_has_not_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free_at = 0.0
    lines: list[dict[str, object]] = []
    for number in range(40):
        at, num_output = number * 500.0, 5 + number % 7
        free_at = max(free_at, at) + 100.0 * (num_output + 1)
        times = {"first_token_ts": free_at - 100.0 * (num_output - 1), "last_token_ts": free_at}
        lengths = {"request_id": f"r{number % 39}", "input_toks": 10, "output_toks": num_output}
        lines.append({**lengths, "queued_ts": at, **times})
    lines[7]["last_token_ts"] = None
    lines[8]["output_toks"] = 0
    lines[9]["output_toks"] = None
    lines.append(lines[10])
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "meta.json").write_text('{"engine_kwargs": {"max_num_seqs": 1}}')
    found = grade(capsys, run_folder=tmp_path)
    counts = [found[f"num_{name}"] for name in ("fitted", "graded", "left_out", "without_times", "repeated")]
    assert counts == [18, 19, 2, 1, 1] and found["num_shared_ids"] == 1 and found["time_unit"] == "ms"
    by_id = {one["request_id"]: one for one in found["requests"]}
    assert by_id["r7"]["measured_latency_s"] is None and by_id["r7"]["predicted_latency_s"] > 0
    assert not by_id["r7"]["fitted"]
    assert abs(found["errors"]["tpot"]["mean"]["error"]) < 0.05
    grade_command(tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    for said in (
        "19 requests, none of which the fit has seen; fitted on 18.",
        "Requests without times: 1; --json predicts them. They are not graded.",
        "2 requests of the file had no answer or no time and are left out.",
        "TTFT and latency count from queued_ts.",
        "1 lines repeat an earlier one word for word and are left out.",
        "1 requests have the id of another: each is a request of its own.",
        "They are taken as ms.",
    ):
        assert said in printed


def test_times_from_the_arrival_at_the_server_are_graded_beside_those_from_the_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free_at, lines = 0.0, []
    for number in range(40):
        at, num_output = 50.0 + number, 5 + number % 7
        free_at = max(free_at, at) + 0.1 * (num_output + 1)
        lines.append(
            {
                "request_id": str(number),
                "input_toks": 10,
                "output_toks": num_output,
                "arrival_time": 1.7e9 + at - 0.5 * (number > 0),
                "queued_ts": at,
                "first_token_ts": free_at - 0.1 * (num_output - 1),
                "last_token_ts": free_at,
            }
        )
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    limits: dict[str, object] = {"engine_kwargs": {"max_num_seqs": 1}}
    limits["resolved_config"] = {"cache_config": {"kv_cache_size_tokens": 4096}}
    (tmp_path / "meta.json").write_text(json.dumps(limits))
    found = grade(capsys, run_folder=tmp_path)
    assert found["arrival"] == "queued_ts" and set(found["errors_from_arrival_time"]) == {"ttft", "latency"}
    for name, later in found["errors_from_arrival_time"].items():
        sooner = found["errors"][name]["mean"]
        assert 0.4 < later["mean"]["measured_s"] - sooner["measured_s"] <= 0.5
        assert abs(later["mean"]["error"]) < 0.1
    grade_command(tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "count from queued_ts. arrival_time is 4" in printed and "error of the mean TTFT is" in printed
    assert "KV memory limit: 4096 tokens, as stated." in printed


def test_a_table_in_seconds_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = fields(40)
    times = ("silicon_ttft_ms", "silicon_tpot_ms")
    whole = write_rows(tmp_path / "whole.csv", rows)
    in_s = [row | {name: float(str(row[name])) / 1000 for name in times} for row in rows]
    (note,) = grade(capsys, fit_on=whole, test_on=write_rows(tmp_path / "s.csv", in_s))["notes"]
    assert note.startswith("The predicted rows take 0.0") and note.endswith(
        "are their times in milliseconds?"
    )
    in_us = [row | {name: float(str(row[name])) * 1e3 for name in times} for row in rows]
    (note,) = grade(capsys, fit_on=write_rows(tmp_path / "us.csv", in_us), test_on=whole)["notes"]
    assert note.startswith("The fitted rows take") and note.endswith("are their times in milliseconds?")
