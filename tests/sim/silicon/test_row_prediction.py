# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from mooncake.sim.silicon import row_prediction
from mooncake.sim.silicon.measured_rows import Floats, MeasuredRow, read_rows, reloaded_row
from mooncake.sim.silicon.row_prediction import RowPredictor, TimePredictor, group_errors
from tests.sim.silicon.row_table import fields_of, random_rows, write_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[MeasuredRow]:
    return random_rows(tmp_path_factory.mktemp("rows") / "rows.csv", 400)


@pytest.fixture(scope="module")
def predictor(rows: list[MeasuredRow]) -> RowPredictor:
    return RowPredictor(rows[:300])


@pytest.mark.parametrize("target", ["ttft", "tpot"])
def test_rows_predict_others_with_honest_intervals(
    rows: list[MeasuredRow], predictor: RowPredictor, target: str
) -> None:
    others = rows[300:]
    prediction = predictor.predict(others)[target]
    found = group_errors(others, prediction, target)["all"]
    assert found.num_rows == 100
    assert found.median < 0.08
    assert 0.75 <= found.within <= 1.0
    by_model = group_errors(others, prediction, target, lambda row: row.named("architecture"))
    assert set(by_model) == {"llama-3.1-8b", "llama-3.1-70b"}
    assert sum(one.num_rows for one in by_model.values()) == 100


def test_fitted_rows_are_predicted_from_the_others_only(rows: list[MeasuredRow]) -> None:
    whole = TimePredictor(rows[:60], "tpot")
    rest = TimePredictor(rows[:60], "tpot")
    # With the weights of the whole, the row's own measurement is taken out, the long way.
    number, kept = 7, [one for one in range(60) if one != 7]
    covariance = np.linalg.inv(whole._inverse)
    solved = np.linalg.solve(covariance[np.ix_(kept, kept)], whole._ratios[kept])
    predicted = covariance[number, kept] @ solved
    variance = covariance[number, number] - covariance[number, kept] @ np.linalg.solve(
        covariance[np.ix_(kept, kept)], covariance[kept, number]
    )
    expected = (whole._ratios[number] - predicted) / math.sqrt(variance)
    assert whole.residuals[number] == pytest.approx(expected, rel=1e-4)
    assert rest.residuals == pytest.approx(whole.residuals)  # nothing is drawn anew


def test_a_measurement_that_is_given_twice_is_one_sample(rows: list[MeasuredRow]) -> None:
    """Otherwise it would be predicted from its twin, without an error, and intervals would be too narrow."""
    again = [msgspec.structs.replace(row, id=f"again {number}") for number, row in enumerate(rows[:60])]
    once, twice = RowPredictor(rows[:60]), RowPredictor([*rows[:60], *again])
    assert len(twice.rows) == 60
    for target in ("ttft", "tpot"):
        expected, found = (one.predict(rows[300:320])[target].deviation for one in (once, twice))
        assert found == pytest.approx(expected)


def test_the_gradient_is_that_of_the_likelihood(rows: list[MeasuredRow]) -> None:
    one = TimePredictor(rows[:40], "ttft")
    known, target = one._known, one._ratios
    differing = [(column[:, None] != column[None, :]).astype(np.float64) for column in known.codes.T]

    def loss() -> float:
        matrix = one._kernels(known, known).total
        matrix[np.diag_indices_from(matrix)] += 1e-3
        _, determinant = np.linalg.slogdet(matrix)
        prior = ((one._weights - one._start) ** 2).sum() / 1.5**2 / 2
        return float(0.5 * target @ np.linalg.solve(matrix, target) + 0.5 * determinant + prior)

    gradient = one._gradient(known, target, differing)
    for place in (0, 2, 4, len(gradient) - 5, len(gradient) - 2, len(gradient) - 1):
        before = one._weights[place]
        values = []
        for step in (1e-4, -1e-4):
            one._weights[place] = before + step
            values.append(loss())
        one._weights[place] = before
        assert gradient[place] == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-3, abs=1e-4), place


def renamed(row: MeasuredRow, **names: str) -> MeasuredRow:
    places = {"system": 1, "backend": 2, "architecture": 7}
    changed = list(row.names)
    for name, value in names.items():
        changed[places[name]] = value
    return msgspec.structs.replace(row, names=tuple(changed))


def test_unseen_cards_models_and_engines_have_wide_intervals(
    rows: list[MeasuredRow], predictor: RowPredictor
) -> None:
    row = rows[0]
    kinds = {
        "known": row,
        "new card": renamed(row, system="unheard_of"),
        "new model": renamed(row, architecture="unheard-of"),
        "new model and card": renamed(row, system="unheard_of", architecture="unheard-of"),
        "new engine": renamed(row, backend="unheard-of"),
        "new card and engine": renamed(row, system="unheard_of", backend="unheard-of"),
    }
    assert [predictor.novelty(one) for one in kinds.values()] == list(kinds)
    for prediction in predictor.predict(list(kinds.values())).values():
        assert (prediction.deviation[1:] > 2 * prediction.deviation[0]).all()
        assert prediction.deviation[3] > prediction.deviation[1]
        assert prediction.deviation[5] > max(prediction.deviation[1], prediction.deviation[4])


def test_a_fit_without_facts_is_no_wiser_for_those_of_a_row(rows: list[MeasuredRow]) -> None:
    fitted = [without_facts(row) for row in rows[:60]]
    some = [row for row in rows[60:] if row.has_facts][:20]
    for target in ("ttft", "tpot"):
        predictor = TimePredictor(fitted, target)
        known, bare = (predictor.predict(one).seconds for one in (some, list(map(without_facts, some))))
        assert known == pytest.approx(bare)
        measured = np.array([getattr(row, f"{target}_s") for row in some])
        assert np.median(np.abs(known / measured - 1)) < 0.3


def test_what_is_beyond_the_fitted_range_has_wide_intervals(rows: list[MeasuredRow]) -> None:
    for column, end in (("isl", 8192), ("decode_gpus", 8)):
        fitted = [row for row in rows if row.quantity(column) != end]
        beyond = [row for row in rows if row.quantity(column) == end]
        predictor = RowPredictor(fitted)
        assert {predictor.novelty(row) for row in beyond} == {"new range"}
        assert {predictor.novelty(row) for row in fitted} == {"known"}
        known = predictor.predict(fitted)
        for target, prediction in predictor.predict(beyond).items():
            assert group_errors(beyond, prediction, target)["all"].within > 0.75, (column, target)
            assert np.median(prediction.deviation) > 1.5 * np.median(known[target].deviation)
    few = next(row for row in fitted if row.quantity("concurrency") == 1)
    assert predictor.novelty(reloaded_row(few, 512, 1024, 0.1)) == "known", "it is hardly another load"
    assert predictor.novelty(reloaded_row(few, 512, 1024, 256)) == "new range"
    nearly = reloaded_row(beyond[0], 1.1 * 8192, 1024, 16)
    assert predictor.novelty(nearly) == "new range", "of the cards"
    assert RowPredictor(rows).novelty(nearly) == "known"


def test_an_end_of_a_range_is_left_out_where_most_rows_remain(rows: list[MeasuredRow]) -> None:
    lengths = [row.quantity("isl") for row in rows]
    groups = row_prediction._outer_groups(rows)
    assert [number for number, one in enumerate(lengths) if one == 512] in groups
    assert all(len(one) <= 0.4 * len(rows) for one in groups)
    assert row_prediction._outer_groups([rows[0]] * 9) == []


def test_a_fit_to_some_rows_has_no_narrower_intervals_than_it_says(rows: list[MeasuredRow]) -> None:
    for target in ("ttft", "tpot"):
        predictor = TimePredictor(rows[:150], target)
        assert min(predictor._widths["known", mode] for mode in (False, True)) == 1.0


def test_a_fit_without_disaggregated_rows_knows_that_they_are_new(rows: list[MeasuredRow]) -> None:
    apart = next(one for one in rows if one.is_disaggregated)
    alone = RowPredictor([one for one in rows if not one.is_disaggregated])
    both = RowPredictor(rows)
    assert [one.novelty(apart) for one in (alone, both)] == ["new mode", "known"]
    for target, prediction in alone.predict([apart]).items():
        assert prediction.deviation[0] > 1.5 * both.predict([apart])[target].deviation[0]


def test_of_two_engines_each_says_how_far_a_third_may_be_off(rows: list[MeasuredRow]) -> None:
    """Here the other's times are the same, so a third one's interval is hardly wider."""
    two = [renamed(one, backend="ab"[number % 2]) for number, one in enumerate(rows)]
    predictor, row = RowPredictor(two), renamed(rows[0], backend="c")
    assert predictor.novelty(row) == "new engine"
    one_engine = RowPredictor(rows).predict([row])
    for target, prediction in predictor.predict([row]).items():
        assert prediction.deviation[0] < 0.7 * one_engine[target].deviation[0]


def test_what_no_table_knows_is_predicted_near_the_usual(
    rows: list[MeasuredRow], predictor: RowPredictor
) -> None:
    strange = msgspec.structs.replace(
        renamed(rows[0], system="unheard_of", architecture="unheard-of"),
        quantities=tuple(1e8 for _ in rows[0].quantities),
        estimates=tuple(math.nan for _ in rows[0].estimates),
    )
    for target, prediction in predictor.predict([strange]).items():
        low, high = (float(bound[0]) for bound in prediction.interval())
        usual = float(np.median([getattr(row, f"{target}_s") for row in rows]))
        assert math.isfinite(high) and low < usual < high * 100
        assert high / low > 10


def without_facts(row: MeasuredRow) -> MeasuredRow:
    return msgspec.structs.replace(row, estimates=tuple(math.nan for _ in row.estimates))


def models_of_many_sizes(path: Path, seed: int) -> list[MeasuredRow]:
    """Ten models, whose times grow with their sizes, which only their facts state."""
    random, rows = Random(seed), []
    for number in range(240):
        size = random.choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
        fields = fields_of(random, number) | {
            "model_path": f"maker/Model-{size}B",
            "mode": "agg",
            "tp_size": 1,
        }
        times = {f"silicon_{name}_ms": size * random.lognormvariate(1, 0.05) for name in ("ttft", "tpot")}
        rows.append(fields | times)
    return read_rows(write_rows(path, rows))


@pytest.mark.parametrize("target", ["ttft", "tpot"])
def test_intervals_without_facts_are_those_of_models_left_out_without_theirs(
    tmp_path: Path, target: str
) -> None:
    num_within, ratios = 0, []
    for size in (4, 8, 64, 128):
        rows = models_of_many_sizes(tmp_path / "rows.csv", size)
        fitted = [row for row in rows if row.named("architecture") != f"model-{size}b"]
        others = [row for row in rows if row.named("architecture") == f"model-{size}b"]
        predictor = TimePredictor(fitted, target)
        (known, bare) = (predictor.predict(some) for some in (others, list(map(without_facts, others))))
        low, high = bare.interval()
        measured = np.array([getattr(row, f"{target}_s") for row in others])
        num_within += int(((low < measured) & (measured < high)).mean() > 0.5)
        ratios.append(float((bare.deviation / known.deviation).min()))
    assert num_within == 4, "sizes in the middle lie inside the interval of an unknown one"
    assert min(ratios) > 3, "facts say more than anything else here"


def test_a_group_without_facts_is_predicted_from_the_others_only(
    rows: list[MeasuredRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [renamed(row, system="abcd"[number % 4]) for number, row in enumerate(rows[:60])]
    predictor = TimePredictor(some, "tpot")
    found: list[Floats] = []

    def most(values: Floats, *_: object) -> float:
        found.append(values)
        return float(values.max())

    monkeypatch.setattr(row_prediction, "_quantile_90", most)
    width = predictor._width_without_facts("card")
    assert width == found[0].max() / row_prediction.NORMAL_90
    # The long way, for the first group: the inverse of the others' covariances alone.
    group, kept = range(0, 60, 4), [number for number in range(60) if number % 4]
    covariance = np.linalg.inv(predictor._inverse)
    columns = predictor._columns([without_facts(some[number]) for number in group])
    between = predictor._kernels(columns, predictor._known).total[:, kept]
    own = np.diag(predictor._kernels(columns, columns).total) + row_prediction.NOISE
    inverse = np.linalg.inv(covariance[np.ix_(kept, kept)])
    deviation = np.sqrt(own - np.diag(between @ inverse @ between.T))
    logarithms = predictor._usual + predictor._mean + between @ inverse @ predictor._ratios[kept]
    errors = np.abs(np.log([some[number].tpot_s for number in group]) - logarithms) / deviation
    assert found[0][:15] == pytest.approx(errors, rel=1e-3)
    assert predictor._width_without_facts("card") == width and len(found) == 1, "it is found once"


def test_a_fit_to_a_few_rows_has_intervals(rows: list[MeasuredRow]) -> None:
    for some in (rows[:1], [rows[0], msgspec.structs.replace(rows[0], id="again")], rows[:3]):
        for prediction in RowPredictor(some).predict(rows[:1]).values():
            low, high = prediction.interval()
            assert high[0] / low[0] > 1.05, "one measurement is not exact, and is not the next one"
        near = reloaded_row(rows[0], *(1.5 * rows[0].quantity(one) for one in ("isl", "osl", "concurrency")))
        for prediction in RowPredictor(some).predict([near]).values():
            low, high = prediction.interval()
            assert high[0] / low[0] > 1.5


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_a_few_rows_are_enough_to_answer(rows: list[MeasuredRow], num_rows: int) -> None:
    found = RowPredictor(rows[:num_rows]).predict(rows[:20])
    for prediction in found.values():
        assert np.isfinite(prediction.seconds).all() and (prediction.seconds > 0).all()
        assert np.isfinite(prediction.deviation).all()


def test_draws_have_the_predicted_spread_and_err_together(
    rows: list[MeasuredRow], predictor: RowPredictor
) -> None:
    twins = [rows[301], rows[301], rows[302]]
    prediction = predictor.predict(twins)
    for target, drawn in zip(("ttft", "tpot"), predictor.draws(twins, 4000, 1), strict=True):
        logarithms = np.log(drawn)
        assert logarithms.mean(axis=0) == pytest.approx(np.log(prediction[target].seconds), abs=0.05)
        assert logarithms.std(axis=0) == pytest.approx(prediction[target].deviation, rel=0.1)
    again = predictor.draws(twins, 4000, 1)[0]
    assert (again == predictor.draws(twins, 4000, 1)[0]).all()


def test_rows_without_a_time_are_predicted_and_not_graded(
    rows: list[MeasuredRow], predictor: RowPredictor
) -> None:
    others = [msgspec.structs.replace(row, ttft_s=math.nan) for row in rows[300:310]]
    for target, num_rows in (("ttft", 30), ("tpot", 40)):
        prediction = predictor.predict([*others, *rows[310:340]])[target]
        assert np.isfinite(prediction.seconds).all()
        found = group_errors([*others, *rows[310:340]], prediction, target)["all"]
        assert found.num_rows == num_rows and found.median < 0.2
    assert group_errors(others, predictor.predict(others)["ttft"], "ttft") == {}


def test_loads_above_the_fitted_ones_do_not_explode(tmp_path: Path) -> None:
    random, rows = Random(3), []
    for number in range(150):
        fields = fields_of(random, number)
        del fields["id"]
        # Each load has as many prefill workers as it needs, and no row says how many.
        load, num_input = random.choice([1, 4, 16, 64, 8192, 65536]), random.choice([1024, 8192])
        fields |= {"mode": "disagg", "isl": num_input, "osl": 16, "decode_num_workers": ""}
        fields |= {"prefill_num_workers": "", "silicon_data_source": f"silicon_concurrency={load}"}
        rows.append(fields | {"silicon_ttft_ms": 0.03 * num_input * random.lognormvariate(0, 0.02)})
    found = read_rows(write_rows(tmp_path / "rows.csv", rows))
    low, high = (
        [row for row in found if (row.quantity("concurrency") < 100) is low] for low in (True, False)
    )
    errors = group_errors(high, RowPredictor(low).predict(high)["ttft"], "ttft")["all"]
    assert errors.median < 1 and errors.p90 < 2
