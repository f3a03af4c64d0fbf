# SPDX-License-Identifier: Apache-2.0
"""``mooncake grade``: predictions beside what was measured on GPUs.

Two kinds of measurements: one engine's run with the times of every request, and a table of TTFT and TPOT by
model, card, engine and parallelism. In both, nothing that is graded was seen by the fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray

from mooncake.cli.output import wide_console
from mooncake.cli.simulation.report import PlainTable
from mooncake.errors import InvalidArgument
from mooncake.sim.silicon.engine_run import (
    LONGEST_TOKEN_S,
    TIME_UNITS,
    EngineFit,
    EngineRun,
    EngineTimes,
    Floats,
    PredictionError,
    fit_engine,
    fitted_share,
    graded,
    refit_engine,
    simulate_engines,
)
from mooncake.sim.silicon.measured_rows import (
    ASSUMED_CONCURRENCY,
    MOST_ROWS,
    TARGETS,
    MeasuredRow,
    SeenMeasurements,
    first_of,
    read_table,
)
from mooncake.sim.silicon.mode_choice import ModeChoice, mode_choices
from mooncake.sim.silicon.row_prediction import GroupError, RowPredictor, TimePrediction, group_errors

MEASURES = ("ttft", "tpot", "latency")
GROUPS = ("model_path", "system", "backend", "mode")
SAME = "same measurement"
"""Label of a row whose measurement the fit has, too, under another id: published tables overlap."""
HELD_OUT = "held out"
"""Label of all other rows, where there are such."""
NUM_DRAWS = 400
LONGEST_RUN_S = 86_400.0
"""A run that took longer was most likely not recorded in seconds."""
SHORTEST_TOKEN_S = 2e-4
"""No published row takes less per token, in the median: such a table is most likely in seconds."""
LONG_TOKEN_S = 1.0
"""The same of a median time per token, which is too short to be sure."""


def grade_command(
    run_folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN_DIR",
            help="Folder of a run: requests.jsonl and meta.json, as LLMServingSim writes them.",
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            "--fit-share",
            min=0.01,
            max=0.99,
            help="Share of a run's requests that the fit sees. Default `0.5`.",
        ),
    ] = None,
    fit_on: Annotated[
        Path | None,
        typer.Option("--fit-on", metavar="FILE.csv", help="Measured rows of TTFT and TPOT to fit on."),
    ] = None,
    test_on: Annotated[
        Path | None,
        typer.Option(
            "--test-on",
            metavar="FILE.csv",
            help="Measured rows to predict; without it, a random half of --fit-on.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random halves.")] = 0,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every prediction.")] = False,
) -> None:
    """Grade predictions against measurements on GPUs.

    RUN_DIR: an engine's costs are fitted to a random half of the requests, and the times of the other half
    are predicted from their arrivals and lengths. --fit-on: TTFT and TPOT of other rows are predicted, and
    whether disaggregation makes more tokens per card.
    """
    if (run_folder is None) == (fit_on is None):
        given = "missing" if run_folder is None else str(run_folder)
        raise InvalidArgument("RUN_DIR", given, "a run's folder, or --fit-on FILE.csv, not both")
    if test_on is not None and fit_on is None:
        raise InvalidArgument("--test-on", str(test_on), "used with --fit-on")
    if share is not None and run_folder is None:
        raise InvalidArgument("--fit-share", share, "used with RUN_DIR; of rows, a half is fitted on")
    if run_folder is not None:
        document, tables = _grade_run(EngineRun.read(run_folder), 0.5 if share is None else share, seed)
    else:
        assert fit_on is not None
        document, tables = _grade_rows(_halves(fit_on, test_on, seed), seed)
    if is_json:
        print(json.dumps(document, indent=1))
        return
    console = wide_console()
    for table in tables:
        console.print(table.on_console())


class _Halves(NamedTuple):
    rows: list[MeasuredRow]
    "Rows to fit on."
    tested: list[MeasuredRow]
    "Rows to predict, with or without measured times."
    num_left_out: int
    "Rows of the file to fit on that are neither fitted on nor predicted: they lack a time, or are too many."
    damaged: dict[str, list[str]]
    "By option: rows of the file that cannot be read."


def _halves(fit_on: Path, test_on: Path | None, seed: int) -> _Halves:
    """A random half each where one file is given; its rows that lack a time are predicted, too. Of more than
    ``MOST_ROWS`` to fit on, a random part is taken."""
    table = read_table(fit_on, "--fit-on")
    rows, random = list(table.rows), Random(seed)
    damaged = {"--fit-on": table.damaged}
    if test_on is not None:
        if not rows:
            allowed = f"at least one row with both times{table.shortage}"
            raise InvalidArgument("--fit-on", str(fit_on), allowed)
        others = read_table(test_on, "--test-on")
        tested, damaged["--test-on"] = [*others.rows, *others.unmeasured], others.damaged
        if not tested:
            raise InvalidArgument("--test-on", str(test_on), f"at least one row{others.shortage}")
    elif len(rows) < 2:
        allowed = f"at least 2 rows with both times, or used with --test-on{table.shortage}"
        raise InvalidArgument("--fit-on", str(fit_on), allowed)
    else:
        random.shuffle(rows)
        tested = [*rows[len(rows) // 2 :], *table.unmeasured]
        rows = rows[: len(rows) // 2]
    fitted = rows if len(rows) <= MOST_ROWS else random.sample(rows, MOST_ROWS)
    num_unmeasured = len(table.unmeasured) if test_on is not None else 0
    return _Halves(fitted, tested, num_unmeasured + len(rows) - len(fitted), damaged)


# --- a run


def _grade_run(run: EngineRun, share: float, seed: int) -> tuple[dict[str, Any], list[PlainTable]]:
    is_known, has_times = fitted_share(run, share, Random(seed)), run.has_times
    fit = fit_engine(run, is_known)
    predicted = simulate_engines(fit.costs, fit.limits, run.load)
    num_blank = int((~has_times).sum())
    if num_blank:
        # What has no times is not graded, so its prediction may come from all that have.
        whole = refit_engine(run, has_times, fit)
        predicted = predicted.where(has_times, simulate_engines(whole.costs, whole.limits, run.load))
    times = {
        name: (getattr(predicted, f"{name}_s")(run.load), getattr(run.measured, f"{name}_s")(run.load))
        for name in MEASURES
    }
    is_graded = has_times & ~is_known
    errors = {name: graded(ours[is_graded], theirs[is_graded]) for name, (ours, theirs) in times.items()}
    late, late_caption = _from_arrival_time(run, times, is_known, is_graded)
    document = {
        "run": run.name,
        "num_fitted": int(is_known.sum()),
        "num_graded": int(is_graded.sum()),
        "num_left_out": run.num_left_out,
        "num_without_times": num_blank,
        "num_repeated": run.num_repeated,
        "num_shared_ids": run.num_shared_ids,
        "time_unit": run.time_unit,
        "costs": msgspec.to_builtins(fit.costs),
        "limits": msgspec.to_builtins(fit.limits),
        "default_limits": list(run.default_limits),
        "span_s": run.span_s,
        "arrival": run.arrival,
        "errors": _errors_of(errors),
        "errors_from_arrival_time": _errors_of(late),
        "requests": _requests_of(run, predicted, is_known),
    }
    rows: list[tuple[str, ...]] = [
        (
            f"{name.upper() if name != 'latency' else 'latency'} {statistic}",
            f"{one.measured * 1000:,.1f}",
            f"{one.predicted * 1000:,.1f}",
            f"{one.relative:+.1%}",
        )
        for name, found in errors.items()
        for statistic, one in found.items()
    ]
    caption = (
        f"{is_graded.sum()} requests, none of which the fit has seen; fitted on {is_known.sum()}. "
        f"{_memory_of(run, fit)} {_limits_of(run)} TTFT and latency count "
        f"from {run.arrival}.{late_caption}{_oddities_of(run)}"
    )
    headings = ("", "measured ms", "predicted ms", "error")
    return document, [PlainTable(run.name, headings, rows, caption)]


def _errors_of(errors: dict[str, dict[str, PredictionError]]) -> dict[str, Any]:
    return {
        name: {
            statistic: {"measured_s": one.measured, "predicted_s": one.predicted, "error": one.relative}
            for statistic, one in found.items()
        }
        for name, found in errors.items()
    }


def _from_arrival_time(
    run: EngineRun,
    times: dict[str, tuple[Floats, Floats]],
    is_known: NDArray[np.bool_],
    is_graded: NDArray[np.bool_],
) -> tuple[dict[str, dict[str, PredictionError]], str]:
    """Errors of TTFT and latency that count from the request's arrival at the server, and what the caption
    says of them. ``times`` are predicted and measured ones by measure, from the engine's queue on. The time
    before it is predicted as the mean of that of fitted requests."""
    if run.delay_s is None or np.isnan(run.delay_s[is_known]).all():
        return {}, ""
    mean_s = float(np.nanmean(run.delay_s[is_known]))
    errors = {
        name: graded((ours + mean_s)[is_graded], (theirs + run.delay_s)[is_graded])
        for name, (ours, theirs) in times.items()
        if name != "tpot"
    }
    if not errors["ttft"]:
        return {}, ""
    return errors, (
        f" arrival_time is {mean_s * 1000:,.1f} ms earlier in the mean (beyond the smallest difference); "
        f"from there, the error of the mean TTFT is {errors['ttft']['mean'].relative:+.1%}."
    )


def _limits_of(run: EngineRun) -> str:
    """The limits by name, and which of them the run does not state."""
    named = (
        f"{name} {getattr(run.limits, name)}{' (default)' if name in run.default_limits else ''}"
        for name in ("max_num_seqs", "max_num_batched_tokens")
    )
    return f"Limits: {', '.join(named)}."


def _memory_of(run: EngineRun, fit: EngineFit) -> str:
    if run.limits.kv_tokens:
        return f"KV memory limit: {run.limits.kv_tokens} tokens, as stated."
    return f"KV memory limit: {fit.limits.kv_tokens or 'none reached'}."


def _oddities_of(run: EngineRun) -> str:
    """What of the file is not as it should be, and what was made of it."""
    found = []
    if num_blank := int((~run.has_times).sum()):
        found.append(f"Requests without times: {num_blank}; --json predicts them. They are not graded.")
    factor = 1000 ** TIME_UNITS.index(run.time_unit)
    days, token_s = run.span_s * factor / 86_400, run.median_token_s * factor
    if factor > 1:
        found.append(
            f"As written, a token takes {token_s:,.0f} s and the run {days:,.1f} days: are its times in "
            f"seconds? They are taken as {run.time_unit}."
        )
    elif run.span_s > LONGEST_RUN_S:
        found.append(f"The run takes {days:,.0f} days: are its times in seconds?")
    elif token_s > LONG_TOKEN_S:
        found.append(f"A token takes {token_s:,.1f} s: are the run's times in seconds?")
    if run.num_left_out:
        found.append(f"{run.num_left_out} requests of the file had no answer or no time and are left out.")
    if run.num_repeated:
        found.append(f"{run.num_repeated} lines repeat an earlier one word for word and are left out.")
    if run.num_shared_ids:
        found.append(f"{run.num_shared_ids} requests have the id of another: each is a request of its own.")
    return "".join(f" {one}" for one in found)


def _requests_of(run: EngineRun, predicted: EngineTimes, is_known: Any) -> list[dict[str, Any]]:
    columns = {
        f"{kind}_{name}_s": getattr(times, f"{name}_s")(run.load)
        for kind, times in (("predicted", predicted), ("measured", run.measured))
        for name in MEASURES
    }
    return [
        {
            "request_id": request_id,
            "fitted": bool(is_known[number]),
            **{
                name: None if np.isnan(column[number]) else float(column[number])
                for name, column in columns.items()
            },
        }
        for number, request_id in enumerate(run.load.ids)
    ]


# --- rows


def _grade_rows(halves: _Halves, seed: int) -> tuple[dict[str, Any], list[PlainTable]]:
    rows, tested, num_left_out, damaged = halves
    predictor = RowPredictor(rows, seed)
    predictions = predictor.predict(tested)
    fitted = SeenMeasurements(rows)
    same = {id(row) for row in tested if row in fitted}
    num_same = len(same)
    measured = [row for row in tested if row.has_both_times]

    def standing(row: MeasuredRow) -> str:
        return SAME if id(row) in same else predictor.novelty(row)

    def held_out(label: Callable[[MeasuredRow], str]) -> Callable[[MeasuredRow], str | None]:
        return lambda row: None if id(row) in same else label(row)

    def errors(label: Callable[[MeasuredRow], str | None]) -> dict[str, dict[str, GroupError]]:
        return {name: group_errors(tested, predictions[name], name, label) for name in TARGETS}

    every = errors(lambda _: "all")
    unseen = errors(held_out(lambda _: HELD_OUT)) if num_same else {}
    groups = {
        "all": {name: found | unseen.get(name, {}) for name, found in every.items()},
        **{column: errors(held_out(partial(MeasuredRow.named, column=column))) for column in GROUPS},
        "what the fit has seen": errors(standing),
    }

    def draw(cell: list[MeasuredRow]) -> tuple[Any, Any]:
        return predictor.draws(cell, NUM_DRAWS, seed)

    choices = {
        "": mode_choices(measured, draw),
        "_with_cards": mode_choices([row for row in measured if row.has_worker_counts], draw),
    }
    if num_same:
        apart = [row for row in measured if id(row) not in same]
        choices["_held_out"] = mode_choices(apart, draw)
    document = {
        "num_fitted": len(rows),
        "num_predicted": len(tested),
        "num_graded": sum(not (math.isnan(row.ttft_s) and math.isnan(row.tpot_s)) for row in tested),
        "num_without_a_time": sum(not row.has_both_times for row in tested),
        "num_left_out": num_left_out,
        "num_damaged": sum(map(len, damaged.values())),
        "num_same_measurement": num_same,
        "errors": {
            column: {name: msgspec.to_builtins(found) for name, found in targets.items()}
            for column, targets in groups.items()
        },
        **{f"mode{suffix}": _choices_of(found) for suffix, found in choices.items()},
        "notes": (notes := _notes(halves, predictor)),
        "rows": _rows_of(tested, predictions, standing),
    }
    if num_same:
        which = f"{num_same} of {len(tested)} predicted rows are measurements that the fit has, too"
        notes = [*notes, f"{which}: the line '{HELD_OUT}' and the tables by a column are without them."]
    tables = [_error_table(column, targets, notes) for column, targets in groups.items()]
    tables.append(_choice_table(choices))
    return document, tables


def _notes(halves: _Halves, predictor: RowPredictor) -> list[str]:
    """What the rows lack, so that they or their predictions say less."""
    notes = [
        f"{len(some)} rows of {option} are damaged and left out: {first_of(some)}."
        for option, some in halves.damaged.items()
        if some
    ]
    if halves.num_left_out:
        notes.append(f"{halves.num_left_out} rows of --fit-on lack a time or are too many: left out.")
    if lacking := sum(not row.has_both_times for row in halves.tested):
        which = f"{lacking} of {len(halves.tested)} predicted rows"
        notes.append(f"{which} lack a measured time: that time is not graded, --json has its prediction.")
    if beyond := sum(predictor.is_beyond(row) for row in halves.tested):
        which = f"{beyond} of {len(halves.tested)} predicted rows"
        notes.append(
            f"{which} have lengths, loads or numbers of cards beyond all fitted ones: intervals are wide."
        )
    for verb, some in (("fitted", halves.rows), ("predicted", halves.tested)):
        token_s = float(np.median([row.tpot_s for row in some if row.tpot_s > 0] or [0.1]))
        if not SHORTEST_TOKEN_S < token_s < LONGEST_TOKEN_S:
            which = f"{verb} rows take {token_s * 1000:,.3g} ms per token in the median"
            notes.append(f"The {which}: are their times in milliseconds?")
        if lacking := sum(not row.has_concurrency for row in some):
            which = f"{lacking} of {len(some)} {verb} rows"
            notes.append(f"{which} state no concurrency: {ASSUMED_CONCURRENCY:g} is assumed.")
        if lacking := sum(not row.has_worker_counts and not row.is_disaggregated for row in some):
            which = f"{lacking} of {len(some)} {verb} rows"
            notes.append(f"{which} are aggregated and state no number of cards: one is assumed.")
        if lacking := sum(not row.has_facts for row in some):
            which = f"{lacking} of {len(some)} {verb} rows"
            notes.append(f"{which} have a card or a model of which no facts are known: intervals are wide.")
    return notes


def _choices_of(choices: list[ModeChoice]) -> dict[str, Any]:
    cells, objectives = _by_objective(choices)
    return {
        "cells": len(cells),
        "cells_right": _share_right(cells),
        "objectives": len(objectives),
        "objectives_right": _share_right(objectives),
        "choices": [
            {**msgspec.to_builtins(one), "is_right": one.is_right, "is_sure": one.is_sure} for one in choices
        ],
    }


def _by_objective(choices: list[ModeChoice]) -> tuple[list[ModeChoice], list[ModeChoice]]:
    """Those of whole cells, and those within an objective."""
    cells, objectives = ([one for one in choices if (one.tpot_s is None) is whole] for whole in (True, False))
    return cells, objectives


def _share_right(choices: list[ModeChoice]) -> float:
    return sum(one.is_right for one in choices) / max(1, len(choices))


_CHOICES = {
    "": "",
    "_held_out": ", held-out rows",
    "_with_cards": ", rows that state their numbers of workers",
}
"""Kinds of comparisons by the rows that they compare, and what the table says of them."""


def _choice_table(choices: dict[str, list[ModeChoice]]) -> PlainTable:
    titles = ("most tokens per card", "most tokens per card within an objective of TPOT")
    rows: list[tuple[str, ...]] = []
    for kind, found in choices.items():
        for title, some in zip(titles, _by_objective(found), strict=True):
            sure = [one for one in some if one.is_sure]
            shares = (f"{_share_right(one):.1%}" if one else "-" for one in (some, sure))
            constant = sum(one.measured_gain > 1 for one in some) / max(1, len(some))
            cells = (str(len(some)), next(shares), str(len(sure)), next(shares), f"{constant:.1%}")
            rows.append((title + _CHOICES[kind], *cells))
    caption = (
        "Cells of equal model, card, engine, precision and lengths that were measured both ways. Sure: four "
        "of five draws agree. Disaggregated: the share of comparisons that it wins. Rows that do not state "
        "their numbers of workers count as one worker of each kind."
    )
    headings = ("", "comparisons", "right", "sure", "right", "disaggregated")
    return PlainTable("Aggregated or disaggregated", headings, rows, caption)


def _error_table(column: str, targets: dict[str, dict[str, GroupError]], notes: list[str]) -> PlainTable:
    rows: list[tuple[str, ...]] = []
    for label in sorted({label for found in targets.values() for label in found}):
        errors = [targets[name].get(label) for name in TARGETS]
        counts = dict.fromkeys(str(one.num_rows if one is not None else 0) for one in errors)
        rows.append((label, "/".join(counts), *(cell for one in errors for cell in _error_cells(one))))
    kinds = ("median", "p90", "in 90 %", "width")
    headings = ("", "rows", *(f"{name.upper()}\n{kind}" for name in TARGETS for kind in kinds))
    caption = " ".join(
        (
            "Relative errors of the graded rows; in 90 %: share inside the predicted interval of 90 %;",
            "width: the factor from the prediction to the interval's ends, median.",
            *notes,
        )
    )
    return PlainTable(
        f"By {column}" if column != "all" else "", headings, rows, caption if column == "all" else ""
    )


def _error_cells(error: GroupError | None) -> tuple[str, ...]:
    """None: nothing was measured."""
    if error is None:
        return ("-",) * 4
    shares = (error.median, error.p90, error.within)
    return *(f"{one:.1%}" for one in shares), f"{error.median_width:.2f}x"


def _rows_of(
    rows: list[MeasuredRow],
    predictions: dict[str, TimePrediction],
    standing: Callable[[MeasuredRow], str],
) -> list[dict[str, Any]]:
    intervals = {name: one.interval() for name, one in predictions.items()}
    return [
        {
            "id": row.id,
            "standing": standing(row),
            **{
                key: value
                for name in TARGETS
                for time_s in [getattr(row, f"{name}_s")]
                for key, value in (
                    (f"{name}_s", float(predictions[name].seconds[number])),
                    (f"{name}_low_s", float(intervals[name][0][number])),
                    (f"{name}_high_s", float(intervals[name][1][number])),
                    (f"measured_{name}_s", None if math.isnan(time_s) else time_s),
                )
            },
        }
        for number, row in enumerate(rows)
    ]
