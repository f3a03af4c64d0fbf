# SPDX-License-Identifier: Apache-2.0
"""Costs of a node from measured rows, or from physical estimates where there are none, with error bars.

Rows are few and scattered, so costs are fitted to what ``row_prediction.py`` predicts of the node at several
lengths and loads: near its rows that is their smooth continuation, far from them a physical estimate that the
other rows correct. A row is an engine that always has as many requests as its concurrency. A token of an
answer waits for a step and for its share of the other requests' prompts, a request alone waits for its own
prompt: both are linear in the coefficients of prefill and of a step, which are found together. The error bar
is that of the predictions and of the fit to them. Memory and links are those of the card's data sheet and of
the built-in nodes, because rows don't tell.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from mooncake.conductor.prediction import DecodeModel, PrefillModel
from mooncake.errors import InvalidArgument
from mooncake.sim.serving.node_costs import NodeCosts, fit_costs
from mooncake.sim.silicon.measured_rows import (
    MeasuredRow,
    configured_row,
    engine_name,
    precision_name,
    read_rows,
    reloaded_row,
)
from mooncake.sim.silicon.physical_estimates import (
    CardFacts,
    ModelFacts,
    card_facts,
    known_precision,
    model_facts,
    precision_facts,
)
from mooncake.sim.silicon.row_prediction import RowPredictor, TimePrediction

FORM = "FILE.csv:MODEL@SYSTEM, /ENGINE, /PRECISION and /tpN behind it where wanted"
LONG_TOKENS = 8192.0
"""Longer prompts are hardly measured: their predictions shape the costs, and are not in their errors."""
LEAST_ERROR = 0.03
"""What two measurements of one configuration differ by."""
DRAM_BYTES, NIC_BYTES_PER_S, NIC_LATENCY_S = 256e9, 23.75e9, 0.0005
SSD_BYTES_PER_S, LOAD_BYTES_PER_S = 6.5e9, 32e9
"""Per card, as the built-in nodes have."""
_FORM = re.compile(r"(?P<file>.+?\.csv(?:\.gz)?):(?P<model>[^@]+)@(?P<system>[^/]+)(?P<rest>(?:/[^/]+){0,3})")
_NUM_GPUS = re.compile(r"tp([1-9]\d{0,3})", re.IGNORECASE)
_ALONE = tuple(
    (num_input, 1024.0, 1.0) for num_input in (512.0, 1024.0, 2048.0, 4096.0, 8192.0, 32_768.0, 131_072.0)
)
"""Input tokens, output tokens and concurrency at which the time to first token is asked for."""
_LOADED = tuple(
    (*lengths, concurrency)
    for lengths in ((1024.0, 1024.0), (8192.0, 1024.0), (1024.0, 8192.0), (32_768.0, 1024.0))
    for concurrency in (1.0, 4.0, 16.0, 64.0)
)
"""The same for the time per output token."""


class RowCosts(msgspec.Struct, frozen=True):
    """The name of a kind of node whose costs come from rows: ``FORM``."""

    file: str
    model: str
    system: str
    engine: str = ""
    "Empty: the one with most rows."
    precision: str = ""
    "The same."
    num_gpus: int = 0
    "Cards of an instance; 0: the number with most rows."

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None: another kind of costs. Raises InvalidArgument."""
        match = _FORM.fullmatch(text)
        if match is None:
            if ".csv" in text and "@" in text:
                raise InvalidArgument("--costs", text, FORM)
            return None
        parts: dict[str, str] = {}
        for part in match["rest"].split("/")[1:]:
            if number := _NUM_GPUS.fullmatch(part):
                kind, part = "num_gpus", number[1]
            else:
                kind = "precision" if known_precision(part) is not None else "engine"
            if kind in parts or (kind == "engine" and re.match(r"tp\d", part, re.IGNORECASE)):
                raise InvalidArgument("--costs", text, FORM)
            parts[kind] = part
        return cls(
            match["file"],
            match["model"],
            match["system"],
            parts.get("engine", ""),
            parts.get("precision", ""),
            int(parts.get("num_gpus", 0)),
        )

    def costs(self) -> NodeCosts:
        """Raises InvalidArgument: no such file, or neither rows nor physical facts of the model and card."""
        rows = read_rows(Path(self.file), "--costs")
        model, card = model_facts(self.model), card_facts(self.system)
        if model is None or card is None:
            allowed = f"a {'model' if model is None else 'card'} whose size and memory are known"
            raise InvalidArgument("--costs", self.model if model is None else self.system, allowed)
        found = [
            row
            for row in rows
            if not row.is_disaggregated
            and row.named("architecture") == model.name
            and card_facts(row.named("system")) == card
        ]
        # Neither engines nor precisions nor numbers of cards are mixed.
        engine = engine_name(self.engine) or _most_common([row.named("backend") for row in found or rows])
        found = [row for row in found if row.named("backend") == engine]
        precision = precision_name(self.precision) or _most_common(
            [row.named("precision") for row in found or rows]
        )
        found = [row for row in found if row.named("precision") == precision]
        num_gpus = self.num_gpus or int(float(_most_common([f"{row.num_gpus:g}" for row in found]) or 1))
        found = [row for row in found if row.num_gpus == num_gpus]
        place = f"{model.name} on {num_gpus} x {card.name}"
        like = min(found, key=lambda row: (row.names, row.id), default=None) or configured_row(
            self.model, self.system, engine, precision, num_gpus
        )
        fit = fit_node(RowPredictor(rows), like)
        file = Path(self.file).name
        source = (
            f"Fitted to {len(found)} measured rows of {file} and to what is like them"
            if found
            else f"PHYSICAL ESTIMATE, no measured rows in {file}, corrected by its rows of other nodes"
        )
        source += (
            f" ({engine or 'engine unnamed'}, {precision or 'precision unnamed'}). Nine of ten errors: TTFT "
            f"{fit.prefill_error:.0%}, TPOT {fit.decode_error:.0%}."
        )
        title = f"{place} ({'measured rows' if found else 'physical estimate'})"
        weight_bytes = precision_facts(precision, self.model).weight_bytes
        return _node(title, source, model, card, num_gpus, weight_bytes, fit)

    def hardware(self, costs: NodeCosts) -> str:
        """A short name that ends in the card's, which prices are given for."""
        card = card_facts(self.system)
        name = card.name.upper() if card is not None else self.system
        return f"{self.model.rpartition('/')[2]}-{costs.num_gpus}x{name}"


class NodeFit(msgspec.Struct, frozen=True):
    """Costs, and the relative errors that nine of ten measurements stay below."""

    prefill: PrefillModel
    decode: DecodeModel
    first_token_s: float
    prefill_error: float
    decode_error: float


def fit_node(predictor: RowPredictor, like: MeasuredRow) -> NodeFit:
    """Costs of the node that an aggregated row describes."""
    alone, loaded = ([reloaded_row(like, *load) for load in loads] for loads in (_ALONE, _LOADED))
    ttft, tpot = predictor.predict(alone)["ttft"], predictor.predict(loaded)["tpot"]
    prompts = [(1.0, *_prompt(row), 0.0, 0.0, 0.0) for row in alone]
    steps = []
    for row in loaded:
        num_input, num_output, batch = (row.quantity(one) for one in ("isl", "osl", "concurrency"))
        share = (batch - 1) / num_output
        step = (1.0, batch, batch * (num_input + num_output / 2))
        steps.append((0.0, *(share * one for one in _prompt(row)), *step))
    # What precedes the first token and takes none of the others' time shows in the first kind only. No step
    # reads the KV faster than the cards' memory allows.
    least = (0.0,) * 6 + (_kv_s_per_token(like),)
    seconds = [*ttft.seconds.tolist(), *tpot.seconds.tolist()]
    found = fit_costs([*prompts, *steps], seconds, least).coefficients
    first_token_s, c0, c1, c2, base_s, per_request_s, per_token_s = found
    errors = (
        _error(one, terms, found, [row.quantity("isl") <= LONG_TOKENS for row in rows])
        for one, terms, rows in ((ttft, prompts, alone), (tpot, steps, loaded))
    )
    return NodeFit(
        PrefillModel(c0, c1, c2), DecodeModel(base_s, per_request_s, per_token_s), first_token_s, *errors
    )


def _kv_s_per_token(like: MeasuredRow) -> float:
    """Time to read a token's KV from the memory of all cards; 0: model or card unknown."""
    model, card = model_facts(like.named("model_path")), card_facts(like.named("system"))
    if model is None or card is None:
        return 0.0
    return model.kv_bytes_per_token / (like.num_gpus * card.bytes_per_s)


def _prompt(row: MeasuredRow) -> tuple[float, float, float]:
    num_input = row.quantity("isl")
    return 1.0, num_input, num_input**2


def _error(
    prediction: TimePrediction,
    terms: Sequence[tuple[float, ...]],
    coefficients: tuple[float, ...],
    is_usual: Sequence[bool],
) -> float:
    """Nine of ten errors of the usual predictions."""
    fitted = np.maximum(np.array(terms) @ np.array(coefficients), 1e-9)
    misfit = float(np.quantile(np.abs(np.log(fitted / prediction.seconds))[is_usual], 0.9))
    spread = float(np.median(np.log(prediction.interval()[1] / prediction.seconds)[is_usual]))
    return max(LEAST_ERROR, math.expm1(min(math.hypot(misfit, spread), 10.0)))


def _most_common(names: Sequence[str]) -> str:
    return min(Counter(names).items(), key=lambda item: (-item[1], item[0]), default=("", 0))[0]


def _node(
    title: str,
    source: str,
    model: ModelFacts,
    card: CardFacts,
    num_gpus: int,
    weight_bytes: float,
    fit: NodeFit,
) -> NodeCosts:
    kv_bytes = model.kv_bytes_per_token
    free_bytes = num_gpus * (0.92 * card.memory_bytes - 2e9) - model.num_parameters * weight_bytes
    if free_bytes < kv_bytes * 1024:
        allowed = f"cards with room for the weights: {num_gpus} x {card.name} have none for KV"
        raise InvalidArgument("--costs", title, allowed)
    return NodeCosts(
        title=title,
        source=source,
        kv_bytes_per_token=kv_bytes,
        num_layers=model.num_layers,
        prefill=fit.prefill,
        decode=fit.decode,
        device_tokens=int(free_bytes / kv_bytes),
        cache_tokens=int(num_gpus * DRAM_BYTES / kv_bytes),
        nic_bytes_per_s=num_gpus * NIC_BYTES_PER_S,
        nic_latency_s=NIC_LATENCY_S,
        ssd_bytes_per_s=num_gpus * SSD_BYTES_PER_S,
        device_load_bytes_per_s=num_gpus * LOAD_BYTES_PER_S,
        first_token_s=fit.first_token_s,
        num_gpus=num_gpus,
        prefill_error=fit.prefill_error,
        decode_error=fit.decode_error,
    )
