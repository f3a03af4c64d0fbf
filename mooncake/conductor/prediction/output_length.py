# SPDX-License-Identifier: Apache-2.0
"""Expected lengths of answers: running quantiles of the output tokens by scope.

A scope's answers are counted in buckets that grow by a fifth, and the counts are halved now and then, so that
a change in behaviour shows. A scope with few answers is estimated from those of all scopes.
"""

from __future__ import annotations

import math

_BUCKETS_PER_DOUBLING = 4
_NUM_BUCKETS = 24 * _BUCKETS_PER_DOUBLING
_HALVE_AT = 4096
_TRUSTED_ANSWERS = 16
_MAX_SCOPES = 1024


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
        return min(mean or at_most, at_most) if at_most else mean
