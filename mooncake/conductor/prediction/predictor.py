# SPDX-License-Identifier: Apache-2.0
"""The conductor's estimates of times, and their accuracy.

One place for every estimate: how long each instance computes a prompt and makes a step of decode
(``regression.py``), how fast blocks travel (``bandwidth.py``), how long answers are (``output_length.py``).
Estimates begin with the cost models that were handed in and follow what is measured. Every prediction that a
decision rests on is compared with the measured value.
"""

from __future__ import annotations

from bisect import bisect_left

from mooncake.conductor.prediction.bandwidth import BandwidthEstimates
from mooncake.conductor.prediction.cost_models import CostModels, DecodeModel, PrefillModel
from mooncake.conductor.prediction.output_length import OutputLengths
from mooncake.conductor.prediction.regression import FittedColumns, Floats, Slots

QUANTITIES = ("queue_s", "fetch_s", "prefill_s", "ttft_s", "tbt_s", "output_tokens")
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
"""Upper bounds of the buckets of the measured value as a multiple of the predicted one."""

_PREFILL_SCALE = (1e-2, 1e-6, 1e-11)
_DECODE_SCALE = (1e-3, 1e-5, 1e-9)
"""Coefficients below which differences between fast machines don't matter."""


class PredictionAccuracy:
    """Accuracy of one quantity's predictions."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.ratio_sum = 0.0
        self.error_sum = 0.0
        "Sum of actual less predicted: the bias, in the quantity's unit."
        self.counts = [0] * (len(RATIOS) + 1)

    def add(self, predicted: float, actual: float) -> None:
        """Add one pair; values that were not predicted or not measured are ignored."""
        if predicted <= 0 or actual <= 0:
            return
        ratio = actual / predicted
        self.num_seen += 1
        self.ratio_sum += ratio
        self.error_sum += actual - predicted
        self.counts[bisect_left(RATIOS, ratio)] += 1


class Predictor:
    """The estimates of every instance by slot, and their accuracy."""

    def __init__(self, costs: CostModels) -> None:
        self.costs = costs
        prefill, decode = costs.prefill, costs.decode
        self.prefill = FittedColumns((prefill.c0, prefill.c1, prefill.c2), _PREFILL_SCALE)
        self.decode = FittedColumns((decode.base_s, decode.per_request_s, decode.per_token_s), _DECODE_SCALE)
        self.links = BandwidthEstimates(costs.link)
        self.lengths = OutputLengths()
        self.accuracy = {quantity: PredictionAccuracy() for quantity in QUANTITIES}

    def grow(self, num_slots: int) -> None:
        self.prefill.grow(num_slots)
        self.decode.grow(num_slots)
        self.links.grow(num_slots)

    def forget(self, slot: int) -> None:
        """Reset a slot, which another instance has now."""
        self.prefill.forget(slot)
        self.decode.forget(slot)
        self.links.forget(slot)

    def prefill_s(self, slots: Slots, first: Floats | float, end: float) -> Floats:
        """Seconds to compute the prompt tokens [first, end) on each of these instances."""
        return _prefill_s(self.prefill.of(slots), first, end)

    def prefill_everywhere_s(self, first: Floats, end: float) -> Floats:
        """The same for every slot, used or not."""
        return _prefill_s(self.prefill.columns, first, end)

    def prefill_model(self, slot: int) -> PrefillModel:
        return PrefillModel(*self.prefill.columns[:, slot].tolist())

    def decode_model(self, slot: int) -> DecodeModel:
        return DecodeModel(*self.decode.columns[:, slot].tolist())

    def step_s(self, slots: Slots, batch_size: Floats, context_tokens: Floats) -> Floats:
        """Seconds of a decode step on each of these instances with such a batch."""
        base, per_request, per_token = self.decode.of(slots)
        seconds: Floats = base + per_request * batch_size + per_token * context_tokens
        return seconds

    def chunk_measured(self, slot: int, first: int, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0:
            end = first + num_tokens
            self.prefill.add(slot, (1.0, num_tokens, end * end - first * first), seconds)

    def step_measured(self, slot: int, batch_size: int, context_tokens: int, seconds: float) -> None:
        if batch_size > 0:
            self.decode.add(slot, (1.0, batch_size, context_tokens), seconds)

    def check(self) -> None:
        self.prefill.check()
        self.decode.check()
        self.links.check()


def _prefill_s(terms: Floats, first: Floats | float, end: float) -> Floats:
    c0, c1, c2 = terms
    seconds: Floats = c0 + c1 * (end - first) + c2 * (end * end - first * first)
    return seconds
