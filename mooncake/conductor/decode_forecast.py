# SPDX-License-Identifier: Apache-2.0
"""Forecast of how many requests will be decoding at a later instant, from the admitted ones.

It owns the paper's forecast (§7): every request decodes for ``mean_stay_s`` from the end of its prefill on.
Those whose prefill ends by ``t`` are there at ``t``, those older than the mean stay are gone. Requests that
end early stay in the forecast for their time, as those that end late leave it early: arrivals times mean stay
is the right number of requests (Little's law), arrivals less known departures would be too few. The law holds
for tokens with the mean stay of a *token*: where long prompts get long answers, contexts stay longer than
requests do. Time is cut into buckets, so that a query costs two sums at any number of requests. It refuses to
know instances and SLOs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BUCKET_S = 0.05
_NUM_BUCKETS = 1 << 15
_AHEAD = _NUM_BUCKETS // 2
_FIRST_GUESS_S = 10.0
_FORGETS = 0.01
"""The part of the learned stays that is forgotten with each departure."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The number of requests that decode at one instant, and the tokens of their contexts."""

    num_requests: int
    num_tokens: int


@dataclass(slots=True)
class _Member:
    bucket: int
    num_tokens: int
    started_at: float | None = None


class DecodeForecast:
    """Requests that decode now, and those that will."""

    def __init__(self, first_guess_s: float = _FIRST_GUESS_S) -> None:
        # Stays are learned from time spent over departures, not from the stays of ended requests: at first,
        # and whenever load grows, these are the short ones.
        self._spent_s = first_guess_s
        self._num_left = 1.0
        # The same by tokens of context; the guess counts as one request like the first.
        self._tokens_spent_s = 0.0
        self._tokens_left = 0.0
        self._first_guess_s = first_guess_s
        self._counted_until = 0.0
        self._members: dict[str, _Member] = {}
        self._num_decoding = 0
        self._decoding_tokens = 0
        # By bucket of time, as a ring: requests and tokens that begin to decode then, as far as is known.
        self._starts: npt.NDArray[np.int64] = np.zeros(_NUM_BUCKETS, np.int64)
        self._tokens: npt.NDArray[np.int64] = np.zeros(_NUM_BUCKETS, np.int64)
        self._first = -_AHEAD  # the oldest bucket in the ring

    @property
    def mean_stay_s(self) -> float:
        return self._spent_s / self._num_left

    @property
    def mean_token_stay_s(self) -> float:
        """How long a token of context stays: the mean over requests, weighted by their tokens."""
        return self._tokens_spent_s / self._tokens_left if self._tokens_left else self.mean_stay_s

    @property
    def decoding(self) -> DecodeLoad:
        """The load of requests whose prefill is known to be over and that have not ended."""
        return DecodeLoad(self._num_decoding, self._decoding_tokens)

    def expect(self, request_id: str, starts_at: float, num_tokens: int, now: float) -> None:
        """Add an admitted request that should begin to decode at ``starts_at``."""
        self.forget(request_id)
        self._advance(now)
        self._members[request_id] = self._enter(starts_at, num_tokens)

    def started(self, request_id: str, now: float) -> None:
        """Record that the request's prefill is over."""
        member = self._members.get(request_id)
        if member is None or member.started_at is not None:
            return
        self._advance(now)
        self._count_time(now)
        self._withdraw(member)
        member = self._members[request_id] = self._enter(now, member.num_tokens)
        member.started_at = now
        self._num_decoding += 1
        self._decoding_tokens += member.num_tokens
        if not self._tokens_left:
            self._tokens_left = float(member.num_tokens)
            self._tokens_spent_s = member.num_tokens * self._first_guess_s

    def left(self, request_id: str, now: float) -> None:
        """Record that the request has ended; one that decoded is a sample of the stay."""
        member = self._members.get(request_id)
        if member is None or member.started_at is None:
            self.forget(request_id)
            return
        self._count_time(now)
        self._no_longer_decodes(request_id, member)
        self._spent_s *= 1.0 - _FORGETS
        self._num_left = self._num_left * (1.0 - _FORGETS) + 1.0
        self._tokens_spent_s *= 1.0 - _FORGETS
        self._tokens_left = self._tokens_left * (1.0 - _FORGETS) + member.num_tokens

    def forget(self, request_id: str) -> None:
        """Drop a request that will not decode, or not here."""
        member = self._members.get(request_id)
        if member is not None:
            self._withdraw(member)
            self._no_longer_decodes(request_id, member)

    def at(self, instant: float, now: float) -> DecodeLoad:
        """The load at ``instant``, which is not before ``now``."""
        self._advance(now)
        end = self._clipped(instant) + 1
        num_requests = sum(int(self._starts[slots].sum()) for slots in _slots(end - self._stay, end))
        tokens = _slots(end - self._token_stay, end)
        return DecodeLoad(num_requests, sum(int(self._tokens[slots].sum()) for slots in tokens))

    def peak(self, instant: float, now: float) -> DecodeLoad:
        """The highest load while a request that begins to decode at ``instant`` does so."""
        self._advance(now)
        begin, stay = self._clipped(instant), self._stay
        end = min(begin + stay, self._first + _NUM_BUCKETS)
        if end - begin < 2:
            return self.at(instant, now)
        there = self._there(self._starts, begin, end, stay)
        tokens = self._there(self._tokens, begin, end, self._token_stay)
        more = self._unforeseen(instant, now)
        return DecodeLoad(int(there.max()) + more.num_requests, int(tokens.max()) + more.num_tokens)

    def falls_to(self, most_requests: float, instant: float, now: float) -> float:
        """The first instant from ``instant`` on with at most so many requests, without further arrivals."""
        self._advance(now)
        begin, stay = self._clipped(instant), self._stay
        there = self._there(self._starts, begin, self._first + _NUM_BUCKETS, stay)
        found = np.flatnonzero(there <= most_requests)
        return instant + (int(found[0]) if len(found) else len(there) + stay) * _BUCKET_S

    def check(self) -> None:
        decoding = [one for one in self._members.values() if one.started_at is not None]
        assert self._num_decoding == len(decoding)
        assert self._decoding_tokens == sum(one.num_tokens for one in decoding)
        assert (self._starts >= 0).all() and (self._tokens >= 0).all()

    def _unforeseen(self, instant: float, now: float) -> DecodeLoad:
        """Requests that decode now beyond the forecast for now, as far as they may still be there."""
        foreseen = self.at(now, now)
        part = max(0.0, 1.0 - (instant - now) / (2.0 * max(_BUCKET_S, self.mean_stay_s)))
        num_requests = max(0, self._num_decoding - foreseen.num_requests)
        num_tokens = max(0, self._decoding_tokens - foreseen.num_tokens)
        return DecodeLoad(int(num_requests * part), int(num_tokens * part))

    @property
    def _stay(self) -> int:
        """The mean stay in buckets."""
        return _in_buckets(self.mean_stay_s)

    @property
    def _token_stay(self) -> int:
        return _in_buckets(self.mean_token_stay_s)

    @staticmethod
    def _there(ring: npt.NDArray[np.int64], begin: int, end: int, stay: int) -> npt.NDArray[np.int64]:
        """Numbers present in each bucket from ``begin`` to before ``end``, given those entering in each."""
        present = np.cumsum(np.concatenate([ring[part] for part in _slots(begin - stay + 1, end)]))
        there = present[stay - 1 :].copy()
        there[1:] -= present[: len(there) - 1]
        return there

    def _count_time(self, now: float) -> None:
        if self._num_decoding:
            self._spent_s += self._num_decoding * (now - self._counted_until)
            self._tokens_spent_s += self._decoding_tokens * (now - self._counted_until)
        self._counted_until = now

    def _no_longer_decodes(self, request_id: str, member: _Member) -> None:
        del self._members[request_id]
        if member.started_at is not None:
            self._num_decoding -= 1
            self._decoding_tokens -= member.num_tokens

    def _enter(self, starts_at: float, num_tokens: int) -> _Member:
        member = _Member(self._clipped(starts_at), num_tokens)
        self._starts[member.bucket % _NUM_BUCKETS] += 1
        self._tokens[member.bucket % _NUM_BUCKETS] += num_tokens
        return member

    def _withdraw(self, member: _Member) -> None:
        if member.bucket >= self._first:
            self._starts[member.bucket % _NUM_BUCKETS] -= 1
            self._tokens[member.bucket % _NUM_BUCKETS] -= member.num_tokens

    def _clipped(self, instant: float) -> int:
        """The bucket of an instant; one too far away counts at the edge."""
        return min(self._first + _NUM_BUCKETS - 1, max(self._first, int(instant // _BUCKET_S)))

    def _advance(self, now: float) -> None:
        """Move the ring so that it covers as much time before ``now`` as after."""
        first = int(now // _BUCKET_S) - _AHEAD
        if first <= self._first:
            return
        for slots in _slots(self._first, min(first, self._first + _NUM_BUCKETS)):
            self._starts[slots] = 0
            self._tokens[slots] = 0
        self._first = first


def _in_buckets(stay_s: float) -> int:
    return min(_AHEAD // 2, max(1, round(stay_s / _BUCKET_S)))


def _slots(begin: int, end: int) -> list[slice]:
    """The ring's slots of the buckets from ``begin`` to before ``end``, in order."""
    if end <= begin:
        return []
    low, high = begin % _NUM_BUCKETS, (end - 1) % _NUM_BUCKETS + 1
    return [slice(low, high)] if low < high else [slice(low, _NUM_BUCKETS), slice(0, high)]
