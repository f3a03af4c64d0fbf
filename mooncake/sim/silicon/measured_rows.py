# SPDX-License-Identifier: Apache-2.0
"""Measured TTFT and TPOT by model, card, engine and parallelism, as aiconfigurator's table keeps them.

It owns the form of a row: names, quantities on logarithmic scales, and the physical estimates of both times,
by which rows of unlike cards and models are compared. Where a row does not say how many workers its sides
have, they are counted as one and the row is marked, because its tokens per card are then unknown. Knows
nothing of how rows predict others; ``row_prediction.py`` does.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.errors import InvalidArgument
from mooncake.sim.silicon.physical_estimates import (
    PrecisionFacts,
    card_facts,
    decode_step_s,
    known_precision,
    model_facts,
    precision_facts,
    prefill_s,
)

Floats = NDArray[np.float64]

NAMES = ("model_path", "system", "backend", "mode", "precision", "backend_version", "moe_quant_mode")
"""Columns whose values are equal or not. Cards, engines and precisions have one name each, however a file
spells them: ``card_name``, ``engine_name``, ``precision_name``."""
DERIVED_NAMES = ("architecture", "worker_counts", "measured_on", "concurrency_basis")
"""The same, from other columns: the model's architecture by whatever name, whether numbers of workers are
stated, the day of the measurement (or the table), because engines were started alike on one day, and whether
the concurrency is stated."""
QUANTITIES = (
    "isl",
    "osl",
    "concurrency",
    "load",
    "prefill_gpus",
    "decode_gpus",
    "prefill_workers",
    "decode_workers",
)
"""What every row has; cards are those of one worker."""
PARALLELISM = ("tp", "attention_dp", "moe_ep", "moe_tp", "pp")
"""Columns that each side has."""
ESTIMATES = (
    "step",
    "prompt",
    "all_prompts",
    "waiting",
    "num_parameters",
    "num_active",
    "bytes_per_s",
)
"""Physical quantities of a row; unknown where its card or its model is in no table."""
TARGETS = ("ttft", "tpot")
MOST_ROWS = 8_000
"""Rows to fit on: a fit needs memory with the square of them, and time with the cube."""
NAMED = 3
"""Damaged rows that a message names."""
ASSUMED_CONCURRENCY = 32.0
"""Requests at once of a row that states no number: the median of published rows."""
_MODES = {
    "agg": "agg",
    "aggregated": "agg",
    "disagg": "disagg",
    "disaggregated": "disagg",
}
"""A mode as files spell it, and its name."""
_ENGINES = {"tensorrtllm": "trtllm", "trtllm": "trtllm", "vllm": "vllm", "sglang": "sglang"}
"""The same of engines, without what is neither letter nor digit."""
_MOST = 1e9
"""Nothing that a row counts is more: such a number is damage."""
_MOST_SHOWN = 40
"""Characters of a damaged cell that a message shows."""
_MOST_REQUESTS = 1e6
"""The same of requests at once."""
_CHANCE = 1e-5
"""Times that are equal with few decimals may be so by chance: not where the product of what they are rounded
to, as shares of them, is below this."""


class MeasuredRow(msgspec.Struct, frozen=True):
    """One measured configuration."""

    id: str
    names: tuple[str, ...]
    "In the order of ``NAMES``, then ``DERIVED_NAMES``."
    quantities: tuple[float, ...]
    "In the order of ``QUANTITIES``, then ``PARALLELISM`` of prefill and of decode."
    estimates: tuple[float, ...]
    "In the order of ``ESTIMATES``; NaN: unknown."
    ttft_s: float
    "NaN: not measured."
    tpot_s: float
    "NaN: not measured."

    def named(self, column: str) -> str:
        return self.names[(*NAMES, *DERIVED_NAMES).index(column)]

    def quantity(self, column: str) -> float:
        return self.quantities[QUANTITIES.index(column)]

    @property
    def has_facts(self) -> bool:
        """Whether its card and its model are in the tables of physical facts."""
        return not math.isnan(self.estimates[0])

    @property
    def has_both_times(self) -> bool:
        return not math.isnan(self.ttft_s + self.tpot_s)

    @property
    def is_disaggregated(self) -> bool:
        return self.named("mode") == "disagg"

    @property
    def has_worker_counts(self) -> bool:
        """Whether its number of cards is known."""
        return self.named("worker_counts") == "stated"

    @property
    def has_concurrency(self) -> bool:
        """Whether its load is known; else it is ``ASSUMED_CONCURRENCY``."""
        return self.named("concurrency_basis") == "stated"

    @property
    def cell(self) -> tuple[object, ...]:
        """What is equal in rows that are compared: all but the mode and the engine's cards and load."""
        return (
            *(self.named(one) for one in ("model_path", "system", "precision", "backend")),
            *self.quantities[:2],
        )

    @property
    def num_gpus(self) -> float:
        """Cards of all workers together."""
        decode = self.quantity("decode_gpus") * self.quantity("decode_workers")
        if not self.is_disaggregated:
            return decode
        return decode + self.quantity("prefill_gpus") * self.quantity("prefill_workers")

    def estimate_s(self, target: str) -> float:
        """Physical estimate of one of ``TARGETS``; NaN: card or model unknown. Most disaggregated rows do not
        say how many workers prefill, so what they wait for it is unknown: their estimate is the prompt's."""
        if target == "tpot":
            return self.estimates[ESTIMATES.index("step")]
        return self.estimates[ESTIMATES.index("prompt" if self.is_disaggregated else "waiting")]


class MeasuredTable(NamedTuple):
    """A file's rows."""

    rows: list[MeasuredRow]
    "Those with both times."
    unmeasured: list[MeasuredRow]
    "Those without a measured TTFT or TPOT: they can be predicted, not fitted on."
    damaged: list[str]
    "Those with a cell that cannot be read: line, column and value of each."

    @property
    def shortage(self) -> str:
        """How many rows cannot be fitted on, and why, behind a refusal of what remains; empty: none."""
        reasons = []
        if self.unmeasured:
            reasons.append(f"{len(self.unmeasured)} rows lack a time")
        if self.damaged:
            reasons.append(f"{len(self.damaged)} rows are damaged: {first_of(self.damaged)}")
        return f" ({'; '.join(reasons)})" if reasons else ""


class SeenMeasurements:
    """What some rows measured, whatever their ids: published tables overlap, and some are rounded.

    Another row is one of these where the model's architecture, the card and, to a nanosecond, both times are
    the same; or where the lengths and the concurrency are, too, and all times that both rows have are the
    same with as many decimals as the coarser one, if these are so many that this is no chance.
    """

    def __init__(self, rows: Sequence[MeasuredRow]) -> None:
        self._exact = {self._exactly(row) for row in rows if row.has_both_times}
        self._alike: dict[tuple[object, ...], list[MeasuredRow]] = {}
        for row in rows:
            self._alike.setdefault(self._loads(row), []).append(row)

    def __contains__(self, row: MeasuredRow) -> bool:
        if row.has_both_times and self._exactly(row) in self._exact:
            return True
        return any(_is_same(row, other) for other in self._alike.get(self._loads(row), ()))

    def _exactly(self, row: MeasuredRow) -> tuple[object, ...]:
        return row.named("architecture"), row.named("system"), round(row.ttft_s, 9), round(row.tpot_s, 9)

    def _loads(self, row: MeasuredRow) -> tuple[object, ...]:
        return row.named("architecture"), row.named("system"), *row.quantities[:3]


def _is_same(row: MeasuredRow, other: MeasuredRow) -> bool:
    """Whether the times that both rows have are equal, of two rows with equal lengths and loads."""
    chance, unit_s = 1.0, 10 ** -min(map(_num_decimals, (row, other))) / 1000
    for target in TARGETS:
        one_s, two_s = (getattr(each, f"{target}_s") for each in (row, other))
        if math.isnan(one_s + two_s):
            continue
        if abs(one_s - two_s) > 0.999 * unit_s:  # rounded or cut
            return False
        chance *= unit_s / max(one_s, two_s)
    return chance < _CHANCE


def _num_decimals(row: MeasuredRow) -> int:
    """Decimals of a row's milliseconds, at most six: more are those of a number in binary."""
    times = (f"{getattr(row, f'{target}_s') * 1000:.6f}" for target in TARGETS)
    return max(len(text.rstrip("0").partition(".")[2]) for text in times)


def first_of(damaged: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f"; and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
    return "; ".join(damaged[:NAMED]) + more


def card_name(system: str) -> str:
    """One name of a card, whatever follows it ("H100-SXM", "h100"); an unknown one in lower case."""
    card = card_facts(system)
    return card.name if card is not None else system.strip().lower()


def engine_name(engine: str) -> str:
    """One name of an engine, in lower case."""
    text = engine.strip().lower()
    return _ENGINES.get(re.sub(r"[^a-z0-9]", "", text), text)


def precision_name(precision: str) -> str:
    """One name of the weights' precision, whatever its scales are ("NVFP4", "fp8_block"); an unknown one in
    lower case."""
    return known_precision(precision) or precision.strip().lower()


def read_table(path: Path, origin: str = "rows") -> MeasuredTable:
    """Rows of a CSV file, which may be compressed with gzip; semicolons or tabs may separate its cells. A row
    with a cell that cannot be read is kept apart: one of them is no reason to refuse thousands of others.

    Errors name ``origin``, the option that gave the path.

    Raises:
        InvalidArgument: it is no such file, or it has no rows.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
        delimiter = max(",;\t", key=next(iter(text.splitlines()), "").count)
        file = io.StringIO(text, newline=None)  # any of the three ends of a line
        reader = csv.DictReader(file, delimiter=delimiter, skipinitialspace=True)
        columns = [one.strip().lower() for one in reader.fieldnames or ()]
        columns = [name if (name := _COLUMNS.get(one, one)) not in columns else one for one in columns]
        reader.fieldnames = columns
        rows = [(reader.line_num, fields) for fields in reader if any(map(fields.get, columns))]
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:
        raise InvalidArgument(origin, str(path), f"a CSV file of measured TTFT and TPOT ({error})") from error
    missing = [one for one in _REQUIRED if one not in columns]
    if missing:
        allowed = f"a CSV file with the column {missing[0]} (and {', '.join(_REQUIRED)})"
        raise InvalidArgument(origin, str(path), allowed)
    if not rows:
        raise InvalidArgument(origin, str(path), "a file with at least one row")
    has_commas = delimiter == ";" and any(_has_decimal_comma(fields) for _, fields in rows)
    table = MeasuredTable([], [], [])
    for number, (line, fields) in enumerate(rows, 1):
        try:
            row = _row(_Cells(f"line {line}, row {number}", number, fields, has_commas))
        except _DamagedRow as error:
            table.damaged.append(str(error))
        else:
            (table.rows if row.has_both_times else table.unmeasured).append(row)
    return table


def read_rows(path: Path, origin: str = "rows") -> list[MeasuredRow]:
    """Those with both times, which can be fitted on.

    Raises:
        InvalidArgument: as ``read_table``, a row is damaged, or it has none or too many.
    """
    table = read_table(path, origin)
    if table.damaged:
        raise InvalidArgument(origin, str(path), f"readable: {table.damaged[0]}")
    if not table.rows:
        allowed = f"a file with at least one row with both times, not {len(table.unmeasured)} without"
        raise InvalidArgument(origin, str(path), allowed)
    if len(table.rows) > MOST_ROWS:
        allowed = f"a file with 1 to {MOST_ROWS} rows, not {len(table.rows)}"
        raise InvalidArgument(origin, str(path), allowed)
    return table.rows


_REQUIRED = ("model_path", "system", "mode", "isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms")
_COLUMNS = {
    "ttft_ms": "silicon_ttft_ms",
    "tpot_ms": "silicon_tpot_ms",
    "silicon_concurrency": "concurrency",
    "model": "model_path",
    "engine": "backend",
}
"""Other names of columns."""
_FRACTIONS = ("silicon_ttft_ms", "silicon_tpot_ms", "concurrency")
"""Columns whose numbers may have decimals."""
_THOUSANDS = re.compile(r"\d{1,3}(\.\d{3})+")
"""What is read in two ways where other numbers have decimal commas."""
_BLANK = ("", "nan", "none", "null", "n/a", "na", "-")
"""Cells without a value."""
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+(?:\.\d+)?)|(?:^|_)c(\d{1,6})(?:_|$)")
"""As a row's source or its id states it."""


def _has_decimal_comma(fields: dict[str | None, Any]) -> bool:
    return any(re.fullmatch(r"\s*\d+,\d+\s*", fields.get(one) or "") for one in _FRACTIONS)


class _DamagedRow(ValueError):
    """A row with a cell that cannot be read: its place, column and value."""


class _Cells:
    """The cells of one row, with errors that name it and the column."""

    def __init__(
        self, place: str, number: int, fields: dict[str | None, Any], has_commas: bool = False
    ) -> None:
        """``place`` is the line, as editors count it, and the row's number. ``has_commas``: in numbers."""
        self._place, self._number, self._fields, self._has_commas = place, number, fields, has_commas
        if any(one.strip() for one in fields.get(None) or ()):
            raise _DamagedRow(f"{place} has cells behind the last column")

    def text(self, column: str) -> str:
        return (self._fields.get(column) or "").strip()

    def name(self, column: str) -> str:
        value = self.text(column)
        if not value:
            raise self.damaged(column, "a name")
        return value

    def mode(self) -> str:
        value = _MODES.get(self.text("mode").lower())
        if value is None:
            raise self.damaged("mode", "agg or disagg")
        return value

    def time_s(self, column: str) -> float:
        """NaN: not measured, as 0 is."""
        text = self.text(column)
        if text.lower() in (*_BLANK, "inf"):
            return math.nan
        return self._number_of(column, text) / 1000 or math.nan

    def count(self, column: str, default: float = 1.0) -> float:
        """An absent number, and 0, are the default."""
        text = self.text(column)
        return (0.0 if text.lower() in _BLANK else self._number_of(column, text)) or default

    def whole(self, column: str, default: float = 1.0) -> float:
        value = self.count(column, default)
        if value % 1:
            raise self.damaged(column, "a whole number")
        return value

    def length(self, column: str) -> float:
        value = self.whole(column, 0.0)
        if not value:
            raise self.damaged(column, "a number of tokens of at least 1")
        return value

    @property
    def id(self) -> str:
        return self.text("id") or f"row {self._number}"

    def _number_of(self, column: str, text: str) -> float:
        if self._has_commas and _THOUSANDS.fullmatch(text):
            raise self.damaged(column, "a number that is sure where others have decimal commas")
        try:
            value = float(text.replace(",", ".") if self._has_commas else text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= _MOST:
            raise self.damaged(column, f"a number from 0 to {_MOST:,.0f}")
        return value

    def damaged(self, column: str, allowed: str, text: str | None = None) -> _DamagedRow:
        value = self.text(column) if text is None else text
        value = value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}..."
        return _DamagedRow(f"{self._place}, column {column}: {value!r} is not {allowed}")


class _Side(NamedTuple):
    """One kind of worker."""

    parallelism: tuple[float, ...]
    num_gpus: float
    num_workers: float
    is_stated: bool


def _side(cells: _Cells, prefix: str) -> _Side:
    parallelism = tuple(cells.whole(f"{prefix}{one}_size") for one in PARALLELISM)
    tensor, attention, expert, expert_tensor, num_stages = parallelism
    # Tables differ: some give all cards as tensor parallel, others the parts of attention and of the experts.
    num_gpus = max(tensor * attention, expert * expert_tensor) * num_stages
    if prefix:
        num_workers = cells.whole(f"{prefix}num_workers", 0.0)
    else:  # one, of as many cards as its parallelism says
        num_workers = float(any(cells.count(f"{one}_size", 0.0) for one in PARALLELISM if one != "pp"))
    return _Side(parallelism, num_gpus, num_workers or 1.0, num_workers > 0)


def _concurrency(cells: _Cells, source: str, is_disaggregated: bool) -> float:
    """Requests at once by the first column that says so; 0: none does. A batch size is that of one rank of
    attention, and of one worker."""
    if value := cells.count("concurrency", 0.0):
        return value
    for text in (source, cells.text("id")):
        if (found := _CONCURRENCY.search(text)) and (value := float(found[1] or found[2])):
            return value
    side = "decode_" if is_disaggregated else ""
    num_workers = cells.count("decode_num_workers") if is_disaggregated else 1.0
    return cells.count(f"{side}batch_size", 0.0) * num_workers * cells.count(f"{side}attention_dp_size")


def _row(cells: _Cells) -> MeasuredRow:
    mode = cells.mode()
    ttft_s, tpot_s = (cells.time_s(f"silicon_{name}_ms") for name in TARGETS)
    prefill, decode = (
        _side(cells, one) for one in (("prefill_", "decode_") if mode == "disagg" else ("", ""))
    )
    source = cells.text("silicon_data_source")
    stated = _concurrency(cells, source, mode == "disagg")
    if stated > _MOST_REQUESTS:
        raise cells.damaged("concurrency", f"a number from 0 to {_MOST_REQUESTS:,.0f}", f"{stated:.12g}")
    concurrency = stated or ASSUMED_CONCURRENCY
    num_input, num_output = cells.length("isl"), cells.length("osl")
    quantities = (
        num_input,
        num_output,
        concurrency,
        concurrency / (decode.num_gpus * decode.num_workers),
        prefill.num_gpus,
        decode.num_gpus,
        prefill.num_workers,
        decode.num_workers,
        *prefill.parallelism,
        *decode.parallelism,
    )
    model, system = cells.name("model_path"), card_name(cells.name("system"))
    precision = precision_name(cells.text("precision")) or precision_name(cells.text("gemm_quant_mode"))
    facts = model_facts(model)
    day = re.search(r"measured=(\d{4}-\d\d-\d\d)", source)
    names = (
        model,
        system,
        engine_name(cells.text("backend")),
        mode,
        precision,
        cells.text("backend_version").lower().removeprefix("v"),
        cells.text("moe_quant_mode").lower(),
        facts.name if facts is not None else model.lower(),
        "stated" if prefill.is_stated and decode.is_stated else "not stated",
        day[1] if day else source.partition(";")[0],
        "stated" if stated else "not stated",
    )
    facts_of_precision = precision_facts(precision, model)
    estimates = physical_estimates(model, system, facts_of_precision, mode == "disagg", quantities)
    return MeasuredRow(cells.id, names, quantities, estimates, ttft_s, tpot_s)


def physical_estimates(
    model: str,
    system: str,
    precision: PrecisionFacts,
    is_disaggregated: bool,
    quantities: Sequence[float],
) -> tuple[float, ...]:
    """In the order of ``ESTIMATES``, from a row's quantities; NaN where card or model is in no table."""
    facts, card = model_facts(model), card_facts(system)
    if facts is None or card is None:
        return (math.nan,) * len(ESTIMATES)
    num_input, num_output, concurrency, _, prefill_gpus, decode_gpus, prefills, decodes = quantities[
        : len(QUANTITIES)
    ]
    sides = quantities[len(QUANTITIES) :]
    prefill_stages, decode_stages = sides[len(PARALLELISM) - 1], sides[-1]
    batch_size = concurrency / decodes
    # Work passes through the stages of a pipeline one after the other, and each has other work meanwhile: a
    # token takes as long as with the cards of one stage, and what many take is divided by all cards.
    step_s = decode_step_s(
        facts,
        card,
        precision,
        decode_gpus / decode_stages,
        max(min(batch_size, 1.0), batch_size / decode_stages),
        num_input + num_output / 2,
    )
    prompt_s = prefill_s(facts, card, precision, prefill_gpus / prefill_stages, num_input)
    if not is_disaggregated:
        # Each token waits for its share of the other requests' prompts.
        step_s += batch_size * prompt_s / prefill_stages / num_output
    all_prompts_s = concurrency * prompt_s / prefill_stages / prefills
    # Where prefill can't keep up with decode, requests wait for it: what is not being decoded.
    waiting_s = max(prompt_s, all_prompts_s - num_output * step_s)
    return (
        step_s,
        prompt_s,
        all_prompts_s,
        waiting_s,
        facts.num_parameters,
        facts.num_active,
        card.bytes_per_s,
    )


def configured_row(model: str, system: str, engine: str, precision: str, num_gpus: float) -> MeasuredRow:
    """An aggregated configuration without measured times, with one request of 1,024 tokens."""
    facts = model_facts(model)
    architecture = facts.name if facts is not None else model.lower()
    names = (
        model,
        card_name(system),
        engine_name(engine),
        "agg",
        precision_name(precision),
        "",
        "",
        architecture,
        "stated",
        "",
        "stated",
    )
    cards = (num_gpus, num_gpus, 1.0, 1.0, *(num_gpus, 1.0, 1.0, num_gpus, 1.0) * 2)
    row = MeasuredRow("not measured", names, (0.0, 0.0, 0.0, 0.0, *cards), (), 0.0, 0.0)
    return reloaded_row(row, 1024.0, 1024.0, 1.0)


def reloaded_row(row: MeasuredRow, num_input: float, num_output: float, concurrency: float) -> MeasuredRow:
    """The same engine with other lengths and another load, without measured times."""
    cards = row.quantities[4:]
    load = concurrency / (row.quantity("decode_gpus") * row.quantity("decode_workers"))
    quantities = (num_input, num_output, concurrency, load, *cards)
    model, system = row.named("model_path"), row.named("system")
    precision = precision_facts(row.named("precision"), model)
    estimates = physical_estimates(model, system, precision, row.is_disaggregated, quantities)
    return MeasuredRow("not measured", row.names, quantities, estimates, math.nan, math.nan)
