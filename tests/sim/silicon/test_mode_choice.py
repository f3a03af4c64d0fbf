# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from random import Random

import numpy as np
import pytest

from mooncake.sim.silicon.measured_rows import Floats, MeasuredRow, read_rows
from mooncake.sim.silicon.mode_choice import mode_choices, tokens_per_s_and_gpu
from tests.sim.silicon.row_table import fields_of, random_rows, write_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[MeasuredRow]:
    return random_rows(tmp_path_factory.mktemp("rows") / "rows.csv", 400)


def exact(rows: list[MeasuredRow]) -> tuple[Floats, Floats]:
    return np.array([[row.ttft_s for row in rows]]), np.array([[row.tpot_s for row in rows]])


def test_measured_times_choose_what_was_measured(rows: list[MeasuredRow]) -> None:
    perfect = mode_choices(rows, exact)
    cells = [one for one in perfect if one.tpot_s is None]
    assert len(cells) == len({row.cell for row in rows}) == 12
    assert all(one.is_right and one.is_sure for one in perfect)
    assert {one.probability for one in perfect} <= {0.0, 0.5, 1.0}


def test_a_mode_that_is_predicted_slow_is_never_chosen(rows: list[MeasuredRow]) -> None:
    def slow(compared: list[MeasuredRow]) -> tuple[Floats, Floats]:
        factor = np.array([100.0 if row.is_disaggregated else 1.0 for row in compared])
        ttft_s, tpot_s = exact(compared)
        return ttft_s * factor, tpot_s * factor

    for one in mode_choices(rows, slow):
        assert one.probability <= 0.5 and one.is_right is (one.measured_gain <= 1)


def test_draws_vote(rows: list[MeasuredRow]) -> None:
    def half(compared: list[MeasuredRow]) -> tuple[Floats, Floats]:
        factors = np.array(
            [[0.01 if row.is_disaggregated else 1.0 for row in compared]] * 3 + [[1.0] * len(compared)]
        )
        factors[3] = 1 / factors[0]
        ttft_s, tpot_s = exact(compared)
        return ttft_s * factors, tpot_s * factors

    whole = [one for one in mode_choices(rows, half) if one.tpot_s is None]
    assert {one.probability for one in whole} == {0.75}
    assert not any(one.is_sure for one in whole)


def test_cells_measured_in_one_mode_are_not_compared(rows: list[MeasuredRow]) -> None:
    assert mode_choices([row for row in rows if row.is_disaggregated], exact) == []


def test_throughput_counts_the_cards_of_both_sides(tmp_path: Path) -> None:
    row = {
        **fields_of(Random(0), 0),
        "mode": "disagg",
        "osl": 101,
        "prefill_tp_size": 2,
        "prefill_num_workers": 3,
        "decode_tp_size": 4,
        "silicon_data_source": "silicon_concurrency=20",
    }
    (found,) = read_rows(write_rows(tmp_path / "rows.csv", [row]))
    speed = tokens_per_s_and_gpu(found, np.array([1.0]), np.array([0.01]))
    assert speed == pytest.approx([20 * 101 / 2.0 / 10])
