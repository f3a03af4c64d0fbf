# SPDX-License-Identifier: Apache-2.0
import csv
import gzip
import math
from pathlib import Path
from random import Random

import numpy as np
import pytest

from mooncake.errors import InvalidArgument
from mooncake.sim.silicon.measured_rows import (
    MeasuredRow,
    TimePredictor,
    group_errors,
    mode_choices,
    read_rows,
)


def fields_of(random: Random, number: int) -> dict[str, object]:
    """A row of a world with simple laws: bigger models and loads are slower, more cards faster."""
    model, slowness = random.choice([("small", 1.0), ("large", 6.0)])
    system, speed = random.choice([("old", 1.0), ("new", 2.0)])
    mode, gpus = random.choice(["agg", "disagg"]), random.choice([1, 2, 4, 8])
    concurrency, input_tokens = random.choice([1, 4, 16, 64]), random.choice([512, 2048, 8192])
    tpot_ms = 4 * slowness / speed * gpus**-0.7 * (1 + concurrency / 32) * (0.8 if mode == "disagg" else 1)
    ttft_ms = 0.02 * input_tokens * slowness / speed / gpus * (1 + concurrency / 8)
    sides = ("prefill_", "decode_") if mode == "disagg" else ("",)
    return {
        "id": str(number),
        "silicon_data_source": f"table; silicon_concurrency={concurrency}; image=x",
        "backend": "engine",
        "model_path": model,
        "system": system,
        "mode": mode,
        "isl": input_tokens,
        "osl": 1024,
        **{f"{side}tp_size": gpus for side in sides},
        "silicon_ttft_ms": ttft_ms * random.lognormvariate(0, 0.02),
        "silicon_tpot_ms": tpot_ms * random.lognormvariate(0, 0.02),
    }


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[MeasuredRow]:
    random = Random(5)
    path = write_rows(
        tmp_path_factory.mktemp("rows") / "rows.csv", [fields_of(random, n) for n in range(400)]
    )
    path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_rows(path.with_suffix(".gz")) == read_rows(path)
    return read_rows(path)


@pytest.mark.parametrize("target", ["ttft", "tpot"])
def test_rows_predict_others_with_honest_intervals(rows: list[MeasuredRow], target: str) -> None:
    known, others = rows[:300], rows[300:]
    prediction = TimePredictor(known, target).predict(others)
    found = group_errors(others, prediction, target)["all"]
    assert found.num_rows == 100
    assert found.median < 0.08
    assert 0.75 <= found.within <= 1.0
    by_model = group_errors(others, prediction, target, "model_path")
    assert set(by_model) == {"small", "large"}
    assert sum(one.num_rows for one in by_model.values()) == 100


def test_a_prediction_far_from_all_rows_says_so(rows: list[MeasuredRow]) -> None:
    predictor = TimePredictor(rows[:200], "tpot")
    known = rows[0]
    strange = MeasuredRow("x", ("?",) * len(known.names), tuple(1e6 for _ in known.quantities), 1.0, 1.0)
    near, far = predictor.predict([known, strange]).deviation
    assert far > 3 * near


def test_whether_disaggregation_pays_is_judged_by_cell(rows: list[MeasuredRow]) -> None:
    measured = np.array([row.ttft_s for row in rows]), np.array([row.tpot_s for row in rows])
    perfect = mode_choices(rows, *measured)
    cells = [one for one in perfect if one.tpot_s is None]
    assert len(cells) == len({row.cell for row in rows}) == 12
    assert all(one.is_right and one.measured_gain == one.predicted_gain for one in perfect)
    # Where disaggregation is predicted to be a hundred times slower, it is never chosen.
    slow = np.array([100.0 if row.is_disaggregated else 1.0 for row in rows])
    for one in mode_choices(rows, measured[0] * slow, measured[1] * slow):
        assert one.predicted_gain < 1 and one.is_right is (one.measured_gain <= 1)


def test_throughput_counts_the_cards_of_both_sides(tmp_path: Path) -> None:
    row = {
        **fields_of(Random(0), 0),
        "mode": "disagg",
        "silicon_ttft_ms": 1000,
        "silicon_tpot_ms": 10,
        "osl": 101,
    }
    row |= {"prefill_tp_size": 2, "prefill_num_workers": 3, "decode_tp_size": 4, "decode_num_workers": ""}
    row["silicon_data_source"] = "silicon_concurrency=20"
    (found,) = read_rows(write_rows(tmp_path / "rows.csv", [row]))
    assert found.tokens_per_s_and_gpu(1.0, 0.01) == pytest.approx(20 * 101 / 2.0 / 10)


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    good = fields_of(Random(0), 0)
    for name, rows in {
        "column .silicon_ttft_ms. is missing": [
            {key: value for key, value in good.items() if "ttft" not in key}
        ],
        "1 to": [{**good, "silicon_tpot_ms": 0}],
        "could not convert": [{**good, "isl": "many"}],
    }.items():
        with pytest.raises(InvalidArgument, match=name):
            read_rows(write_rows(tmp_path / "rows.csv", rows))
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8bbroken")
    for name in ("broken.gz", "missing.csv"):
        with pytest.raises(InvalidArgument, match="CSV file"):
            read_rows(tmp_path / name)


def test_rows_without_a_finite_time_are_left_out(tmp_path: Path) -> None:
    good = fields_of(Random(0), 0)
    rows = [good, {**good, "silicon_tpot_ms": "nan"}, {**good, "silicon_ttft_ms": ""}]
    assert len(read_rows(write_rows(tmp_path / "rows.csv", rows))) == 1
    assert math.isfinite(read_rows(tmp_path / "rows.csv")[0].tpot_s)
