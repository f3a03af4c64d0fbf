# SPDX-License-Identifier: Apache-2.0
"""The conductor's estimates of times, and their accuracy.

*Cost models* are the formulas for a prefill, a step of decode and a transfer, the one place where tokens
become seconds: the conductor predicts with them, the simulator computes with them. The forms are physics, not
fits: attention makes a prompt's cost grow with the square of its length, a step of decode reads all weights
once and every request's KV once.

Estimates begin with the cost models that were handed in and follow what is measured. ``LeastSquares`` forgets
old samples and is kept as its normal equations, so that a sample costs the same however many came before.
Guards, because measurements come from busy machines. It minimises *relative* errors, or one long prompt
would outweigh a thousand short ones. Where samples don't separate terms, the ratio of the prior coefficients
stays: prompts of one length carry no information about the square of the length. No coefficient goes below
zero, so that no work takes negative time. An instance whose times all become longer is followed within a few
samples, as a whole: idle machines measure themselves faster than they are under load. ``FittedColumns`` has a
fit for every instance and one for all: an instance is estimated from its own samples when it has some, from
those of all until then, from the prior when there are none.

The bandwidth of a path comes from the path's own samples, else from its source's, else from all. Small
transfers yield the latency, large ones the rate. A source that many read from is busy: its booked reads are
an account of time, like a queue of prompts.

Lengths of answers are running quantiles of the output tokens by scope. A scope's answers are counted in
buckets that grow by a fifth, and the counts are halved now and then, so that a change in behaviour shows. A
scope with few answers is estimated from those of all scopes.

Every prediction that a decision rests on is compared with the measured value.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

# --- cost models


class PrefillModel(msgspec.Struct, frozen=True):
    """Time to compute the prompt tokens [first, end) when the KV of those before is there."""

    c0: float
    "Seconds per prefill, whatever its length."
    c1: float
    "Seconds per token."
    c2: float
    "Seconds per pair of tokens that attend to each other, counted twice."

    def seconds(self, first: float, end: float) -> float:
        return self.c0 + self.c1 * (end - first) + self.c2 * (end * end - first * first)


class DecodeModel(msgspec.Struct, frozen=True):
    """Time of one step, which makes a token for every request of a batch."""

    base_s: float
    per_request_s: float
    per_token_s: float
    "Seconds per context token of all requests together."

    def seconds(self, batch_size: float, context_tokens: float) -> float:
        return self.base_s + self.per_request_s * batch_size + self.per_token_s * context_tokens


class LinkModel(msgspec.Struct, frozen=True):
    """Time to move bytes from one instance to another."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


class CostModels(msgspec.Struct, frozen=True):
    """Estimates for every instance before anything was measured."""

    prefill: PrefillModel = PrefillModel(0.01, 1e-4, 1e-9)
    decode: DecodeModel = DecodeModel(0.02, 1e-4, 2e-8)
    link: LinkModel = LinkModel(1e-3, 1e10)
    kv_bytes_per_token: int = 131_072
    num_layers: int = 32
    "Layers of the model: a prompt's KV is loaded layer by layer while others are computed."
    ssd: LinkModel = LinkModel(1e-4, 3e9)
    "Reads of blocks from an instance's own SSD."
    reuse_s: float = 0.0
    "Seconds that a cached prefix takes, whatever its length, before the rest is computed."
    decode_makes_first_token: bool = True
    """As our workers and vLLM do: a wait for decode's memory is part of the time to first token. Otherwise it
    comes after that token."""


# --- coefficients that follow measurements


Floats = NDArray[np.float64]
Slots = NDArray[np.int64]

MOST_TOKENS = 1 << 32
"""Nothing above this is a number of tokens."""

TRUSTED_SAMPLES = 8
"""Number of own samples from which on an instance is estimated from them."""

_KEPT = 0.5 ** (1 / 256)  # part of a sample's weight that is left after the next one
_RIDGE = 1e-5  # weight of the prior's shape beside all samples
_OUTLIER = 4.0
_OFTEN = 16  # the first samples each update the coefficients; later ones do in groups
_MOST_ERROR = 0.8  # a sample's logarithmic error counts as this at most
_SLACK = 0.15  # part of an error that is no sign of a drift
_DRIFTED = 1.4  # sum of what is beyond it: three samples of twice the time reach it, two of any time do not
_GATHERED = 8  # two roles' instances, before and after recent changes of membership
_SHORTEST_S, _LONGEST_S = 1e-9, 1e6


@dataclass(slots=True)
class _ErrorSum:
    """Cumulative sum of errors of one sign (E. S. Page, "Continuous inspection schemes", Biometrika 41,
    1954): it begins anew where it would be negative, which is the likeliest begin of a drift."""

    total: float = 0.0
    num: int = 0
    gram: list[list[float]] = field(default_factory=list)
    "The fit as it was when the sum began."
    moment: list[float] = field(default_factory=list)

    def add(self, error: float, gram: list[list[float]], moment: list[float]) -> float:
        """The mean error since the drift began, if there is one; 0: none."""
        self.total += error - _SLACK
        if self.total <= 0:
            self.total, self.num = 0.0, 0
            return 0.0
        if not self.num:
            self.gram, self.moment = [row[:] for row in gram], moment[:]
        self.num += 1
        return self.total / self.num + _SLACK if self.total > _DRIFTED else 0.0


class LeastSquares:
    """The coefficients of a sum of terms.

    ``has_drift``: the samples are of one instance, all of whose times may have become longer or shorter.
    """

    def __init__(self, prior: Sequence[float], scale: Sequence[float], *, has_drift: bool = False) -> None:
        self._has_drift = has_drift
        self.coefficients = list(prior)
        self.num_samples = 0
        # A prior of zero may be wrong: no term's scale is smaller than is plausible.
        self._prior = [max(pair) for pair in zip(prior, scale, strict=True)]
        self._gram = [[0.0] * len(prior) for _ in prior]
        self._moment = [0.0] * len(prior)
        self._later, self._sooner = _ErrorSum(), _ErrorSum()

    def expected(self, terms: Sequence[float]) -> float:
        return sum(term * one for term, one in zip(terms, self.coefficients, strict=True))

    def add(self, terms: Sequence[float], seconds: float) -> bool:
        """Add one sample; returns whether the coefficients changed. An impossible duration is ignored."""
        expected = self.expected(terms)
        if not (_SHORTEST_S < seconds < _LONGEST_S and expected > 0):
            return False
        # Errors are relative to the expected value; to the measured one while expectations may be far off.
        scale, has_drifted = seconds, False
        if self.num_samples >= TRUSTED_SAMPLES:
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
            scale = expected
            has_drifted = self._has_drift and self._follow_drift(math.log(seconds / expected))
        self.num_samples += 1
        # Plain loops: for three terms an array costs more to make than to fill.
        relative = [prior * term / scale for prior, term in zip(self._prior, terms, strict=True)]
        for row, one in zip(self._gram, relative, strict=True):
            for column, other in enumerate(relative):
                row[column] = row[column] * _KEPT + one * other
        for row_number, one in enumerate(relative):
            self._moment[row_number] = self._moment[row_number] * _KEPT + one * seconds / scale
        if self.num_samples > _OFTEN and self.num_samples % _OFTEN and not has_drifted:
            return False
        self._solve()
        return True

    def _follow_drift(self, error: float) -> bool:
        """Whether times as a whole have become longer or shorter: then the samples before that are taken as
        that much longer or shorter, too, which keeps what they say of the terms' proportions."""
        error = min(max(error, -_MOST_ERROR), _MOST_ERROR)
        for total, sign in ((self._later, 1), (self._sooner, -1)):
            drift = sign * total.add(sign * error, self._gram, self._moment)
            if drift:
                break
        else:
            return False
        # Each row was divided by the time that it took or was expected to take.
        kept, factor = _KEPT ** (total.num - 1), math.exp(-drift)
        for row, before in zip(self._gram, total.gram, strict=True):
            for column, one in enumerate(before):
                row[column] += kept * (factor**2 - 1) * one
        for place, one in enumerate(total.moment):
            self._moment[place] += kept * (factor - 1) * one
        self._later, self._sooner = _ErrorSum(), _ErrorSum()
        return True

    def _solve(self) -> None:
        """Solve the least squares over the coefficients that don't become negative.

        Where samples don't separate terms, these keep the proportion of the prior: the simplest assumption is
        that an instance is faster or slower as a whole.
        """
        gram, moment = np.array(self._gram), np.array(self._moment)
        ridge = _RIDGE * gram.trace()
        moment += ridge * moment.sum() / gram.sum()
        gram.reshape(-1)[:: len(gram) + 1] += ridge
        free = list(range(len(gram)))
        while free:
            is_whole = len(free) == len(gram)
            rows = gram if is_whole else gram[np.ix_(free, free)]
            found = np.linalg.solve(rows, moment if is_whole else moment[free])
            worst = int(found.argmin())
            if found[worst] >= 0:
                break
            del free[worst]
        self.coefficients = [0.0] * len(self._prior)
        for position, factor in zip(free, found.tolist(), strict=True):
            self.coefficients[position] = factor * self._prior[position]

    def check(self) -> None:
        assert all(0 <= one < math.inf for one in self.coefficients)


class FittedColumns:
    """Coefficients of all instances as ``columns[term, slot]``."""

    def __init__(self, prior: Sequence[float], scale: Sequence[float]) -> None:
        self.common = LeastSquares(prior, scale)
        self.columns: Floats = np.empty((len(prior), 0))
        self._prior, self._scale = tuple(prior), tuple(scale)
        self._own: dict[int, LeastSquares] = {}
        self._is_trusted = np.empty(0, dtype=bool)
        self._gathered: dict[int, tuple[Slots, Floats]] = {}  # valid until a coefficient changes

    @property
    def _unmeasured(self) -> Floats:
        """Coefficients of an instance with few samples or none."""
        is_known = self.common.num_samples >= TRUSTED_SAMPLES
        return np.array(self.common.coefficients if is_known else self._prior)

    def of(self, slots: Slots) -> Floats:
        """``columns`` of these instances, cached if ``slots`` is a read-only array."""
        known = self._gathered.get(id(slots))
        if known is not None and known[0] is slots:
            return known[1]
        columns = self.columns.take(slots, axis=1)
        if not slots.flags.writeable:
            if len(self._gathered) >= _GATHERED:
                self._gathered.clear()
            self._gathered[id(slots)] = (slots, columns)
        return columns

    def grow(self, num_slots: int) -> None:
        self._gathered.clear()
        added = num_slots - self.columns.shape[1]
        self.columns = np.hstack([self.columns, np.tile(self._unmeasured[:, None], added)])
        self._is_trusted = np.append(self._is_trusted, np.zeros(added, dtype=bool))

    def add(self, slot: int, terms: Sequence[float], seconds: float) -> None:
        if self.common.add(terms, seconds):
            self._gathered.clear()
            self.columns[:, ~self._is_trusted] = self._unmeasured[:, None]
        own = self._own.get(slot)
        if own is None:
            own = self._own[slot] = LeastSquares(self._prior, self._scale, has_drift=True)
        if own.add(terms, seconds) and own.num_samples >= TRUSTED_SAMPLES:
            self._gathered.clear()
            self._is_trusted[slot] = True
            self.columns[:, slot] = own.coefficients

    def forget(self, slot: int) -> None:
        """Reset a slot, which another instance has now."""
        self._gathered.clear()
        self._own.pop(slot, None)
        self._is_trusted[slot] = False
        self.columns[:, slot] = self._unmeasured

    def check(self) -> None:
        assert (self.columns >= 0).all() and np.isfinite(self.columns).all()
        for slots, columns in self._gathered.values():
            assert (columns == self.columns[:, slots]).all()


# --- bandwidth between instances


_LATENCY_BYTES = 65_536
_TRANSFER_WEIGHT = 0.1  # of a new sample
_TRUSTED_TRANSFERS = 4


@dataclass(slots=True)
class _LinkSource:
    s_per_byte: float
    path_s_per_byte: Floats
    mean_bytes: float
    num_samples: Floats = field(init=False)
    estimates: Floats | None = None
    "By target, as of the last sample; None: to be computed. Decisions ask more often than transfers end."

    def __post_init__(self) -> None:
        self.num_samples = np.zeros(len(self.path_s_per_byte))


class BandwidthEstimates:
    """Estimates by pairs of slots."""

    def __init__(self, prior: LinkModel) -> None:
        self.latency_s = prior.latency_s
        self.s_per_byte = 1 / prior.bytes_per_s
        self.egress_free_at: Floats = np.empty(0)
        self.ingress_free_at: Floats = np.empty(0)
        self.ssd_free_at: Floats = np.empty(0)
        self._sources: dict[int, _LinkSource] = {}

    def grow(self, num_slots: int) -> None:
        added = num_slots - len(self.egress_free_at)
        self.egress_free_at = np.append(self.egress_free_at, np.full(added, -math.inf))
        self.ingress_free_at = np.append(self.ingress_free_at, np.full(added, -math.inf))
        self.ssd_free_at = np.append(self.ssd_free_at, np.full(added, -math.inf))
        self._sources.clear()  # columns have another length now: learned again within a few transfers

    def forget(self, slot: int) -> None:
        """Reset a slot, which another instance has now."""
        self._sources.pop(slot, None)
        for source in self._sources.values():
            source.num_samples[slot] = 0
            source.estimates = None
        self.egress_free_at[slot] = self.ingress_free_at[slot] = self.ssd_free_at[slot] = -math.inf

    def add(self, source: int, target: int, size_bytes: int, seconds: float, is_general: bool = True) -> None:
        """Add one transfer as a sample; an impossible duration is ignored. ``is_general``: paths from sources
        that have no samples are estimated from it, too. Otherwise it weighs by its size: where latencies are
        longer than that of all paths, short transfers say little of the rate."""
        if not _SHORTEST_S < seconds < _LONGEST_S or size_bytes <= 0:
            return
        if size_bytes <= _LATENCY_BYTES:
            self.latency_s += _TRANSFER_WEIGHT * (seconds - self.latency_s)
            return
        # A transfer that seems faster than its latency still took a tenth of its time for its bytes.
        per_byte = max(seconds - self.latency_s, seconds / 10) / size_bytes
        known = self._sources.get(source)
        if known is None:
            path = np.full(len(self.egress_free_at), per_byte)
            known = self._sources[source] = _LinkSource(per_byte, path, size_bytes)
        weight = _TRANSFER_WEIGHT
        if is_general:
            self.s_per_byte += weight * (per_byte - self.s_per_byte)
        else:
            known.mean_bytes += weight * (size_bytes - known.mean_bytes)
            weight *= size_bytes / known.mean_bytes
        known.s_per_byte += weight * (per_byte - known.s_per_byte)
        before = known.path_s_per_byte[target] if known.num_samples[target] else per_byte
        known.path_s_per_byte[target] = before + weight * (per_byte - before)
        known.num_samples[target] += 1
        known.estimates = None

    def s_per_byte_from(self, source: int) -> Floats | float:
        """Seconds per byte by target slot, or one number for all."""
        known = self._sources.get(source)
        if known is None:
            return self.s_per_byte
        if known.estimates is None:
            is_trusted = known.num_samples >= _TRUSTED_TRANSFERS
            known.estimates = np.where(is_trusted, known.path_s_per_byte, known.s_per_byte)
        return known.estimates

    def book(self, source: int, target: int, seconds: float, now: float) -> None:
        """Book both network cards, or one instance's SSD, for a transfer that was decided now."""
        if source == target:
            self.ssd_free_at[source] = max(now, self.ssd_free_at[source]) + seconds
            return
        begin = max(now, self.egress_free_at[source], self.ingress_free_at[target])
        self.egress_free_at[source] = self.ingress_free_at[target] = begin + seconds

    def check(self) -> None:
        assert self.latency_s > 0 and self.s_per_byte > 0
        for source in self._sources.values():
            assert source.s_per_byte > 0 and (source.path_s_per_byte > 0).all()
            if source.estimates is not None:
                is_trusted = source.num_samples >= _TRUSTED_TRANSFERS
                assert (
                    source.estimates == np.where(is_trusted, source.path_s_per_byte, source.s_per_byte)
                ).all()


# --- lengths of answers


_BUCKETS_PER_DOUBLING = 4
_NUM_BUCKETS = 24 * _BUCKETS_PER_DOUBLING
_HALVE_AT = 4096
_TRUSTED_ANSWERS = 16
_MAX_SCOPES = 1024
_FIRST_GUESS = 512
"""Tokens of an answer of which only the client's limit is known. Limits are often the model's context, and no
work: taken as the length, one of them is booked as the load of a whole pool."""


class LengthHistogram:
    """The answer lengths seen in one scope."""

    def __init__(self) -> None:
        self.num_seen = 0.0
        self.mean = 0.0
        self._counts = [0.0] * _NUM_BUCKETS

    def add(self, num_tokens: int) -> None:
        self.num_seen += 1
        self.mean += (num_tokens - self.mean) / self.num_seen
        bucket = int(math.log2(max(num_tokens, 1)) * _BUCKETS_PER_DOUBLING)
        self._counts[min(bucket, _NUM_BUCKETS - 1)] += 1
        if self.num_seen >= _HALVE_AT:
            self.num_seen /= 2
            self._counts = [count / 2 for count in self._counts]

    def quantile(self, part: float) -> int:
        """The number of tokens that this part of the answers does not exceed."""
        wanted, seen = part * sum(self._counts), 0.0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return math.ceil(2 ** ((bucket + 1) / _BUCKETS_PER_DOUBLING))
        return 0


class OutputLengths:
    """The histograms of all scopes."""

    def __init__(self) -> None:
        self._all = LengthHistogram()
        self._scopes: dict[str, LengthHistogram] = {}

    def add(self, scope: str, num_tokens: int) -> None:
        self._all.add(num_tokens)
        known = self._scopes.pop(scope, None) or LengthHistogram()
        known.add(num_tokens)
        self._scopes[scope] = known  # the latest last
        if len(self._scopes) > _MAX_SCOPES:
            del self._scopes[next(iter(self._scopes))]

    def of(self, scope: str) -> LengthHistogram:
        known = self._scopes.get(scope)
        return known if known is not None and known.num_seen >= _TRUSTED_ANSWERS else self._all

    def expected(self, scope: str, at_most: int) -> int:
        """Expected tokens of the next answer; 0 when nothing is known. ``at_most`` 0: no bound is known."""
        mean = round(self.of(scope).mean)
        return min(mean or _FIRST_GUESS, at_most) if at_most else mean


# --- all estimates, and their accuracy


QUANTITIES = ("queue_s", "fetch_s", "prefill_s", "ttft_s", "tbt_s", "output_tokens")
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
"""Upper bounds of the buckets of the measured value as a multiple of the predicted one."""

_PREFILL_SCALE = (1e-2, 1e-6, 1e-11, 1e-3)
_DECODE_SCALE = (1e-3, 1e-5, 1e-9)
"""Coefficients below which differences between fast machines don't matter."""


def prefill_terms(first: int, end: int) -> tuple[float, float, float, float]:
    """What the coefficients of a prefill of the prompt tokens [first, end) are multiplied with."""
    return 1.0, end - first, end * end - first * first, float(first > 0)


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
        self.prefill = FittedColumns((prefill.c0, prefill.c1, prefill.c2, costs.reuse_s), _PREFILL_SCALE)
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

    def prefill_at(self, slot: int) -> Callable[[float, float], float]:
        """The same for one instance, as a function of the first token and the end."""
        *terms, reuse_s = self.prefill.columns[:, slot].tolist()
        model = PrefillModel(*terms)
        return lambda first, end: model.seconds(first, end) + (reuse_s if first else 0.0)

    def decode_model(self, slot: int) -> DecodeModel:
        return DecodeModel(*self.decode.columns[:, slot].tolist())

    def step_s(self, slots: Slots, batch_size: Floats, context_tokens: Floats) -> Floats:
        """Seconds of a decode step on each of these instances with such a batch."""
        base, per_request, per_token = self.decode.of(slots)
        seconds: Floats = base + per_request * batch_size + per_token * context_tokens
        return seconds

    def chunk_measured(self, slot: int, first: int, num_tokens: int, seconds: float) -> None:
        """Impossible numbers are ignored, as they are in a step's."""
        if first >= 0 and num_tokens > 0 and first + num_tokens <= MOST_TOKENS:
            end = first + num_tokens
            self.prefill.add(slot, prefill_terms(first, end), seconds)

    def step_measured(self, slot: int, batch_size: int, context_tokens: int, seconds: float) -> None:
        if 0 < batch_size <= MOST_TOKENS and 0 <= context_tokens <= MOST_TOKENS:
            self.decode.add(slot, (1.0, batch_size, context_tokens), seconds)

    def check(self) -> None:
        self.prefill.check()
        self.decode.check()
        self.links.check()


def _prefill_s(terms: Floats, first: Floats | float, end: float) -> Floats:
    c0, c1, c2, reuse_s = terms
    seconds: Floats = c0 + c1 * (end - first) + c2 * (end * end - first * first)
    seconds += reuse_s * (first > 0)
    return seconds
