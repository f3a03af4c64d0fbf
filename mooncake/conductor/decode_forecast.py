# SPDX-License-Identifier: Apache-2.0
"""Forecast of how many requests will be decoding at a later instant, from the admitted ones.

It owns the paper's forecast (§7): every request decodes for ``mean_stay_s`` from the end of its prefill on.
Those whose prefill ends by ``t`` are there at ``t``, those older than the mean stay are gone. Requests that
end early stay in the forecast for their time, as those that end late leave it early: arrivals times mean stay
is the right number of requests (Little's law), arrivals less known departures would be too few. The law holds
for tokens with the mean stay of a *token*: where long prompts get long answers, contexts stay longer than
requests do. Time is cut into buckets, so that ``at`` costs two sums at any number of requests, and other
queries one pass over the buckets that they ask for. It refuses to know instances and SLOs.

``followed`` is ours: stays grow with the load, since each request more makes all steps longer. Where answers
are short and come faster than they can be made, the mean stay is always that of the emptier pool before, and
the forecast of a constant stay admits twice as many requests as there is room for. So lengths are learned in
steps, a clock counts the steps that were made, and the forecast goes forward from now piece by piece, in
which steps take as long as the load then makes them: a request is gone when the clock has counted its length
since it began.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BUCKET_S = 0.05
_NUM_BUCKETS = 1 << 15
_AHEAD = _NUM_BUCKETS // 2
_FIRST_GUESS_S = 10.0
_FORGETS = 0.01
"""The part of the learned stays that is forgotten with each departure."""
_GUESSED_UNTIL = 8
"""Departures after which the first guess says nothing of lengths in steps."""
_DOUBT = 4.0
"""Lengths in steps are taken as longer than their mean by this over the number of departures: the first to
leave are the short ones."""
_PIECES_PER_STAY = 16
_MOST_PIECES = 400
_SHORTEST_STEP_S = 1e-4


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


@dataclass(slots=True)
class _MeanStay:
    """A mean that is learned from what was spent over departures, not from the stays of ended requests: at
    first, and whenever load grows, these are the short ones."""

    spent: float = 0.0
    left: float = 0.0

    @property
    def mean(self) -> float:
        return self.spent / self.left if self.left else 0.0

    def leave(self, weight: float) -> None:
        self.spent *= 1.0 - _FORGETS
        self.left = self.left * (1.0 - _FORGETS) + weight


class DecodeForecast:
    """Requests that decode now, and those that will."""

    def __init__(self, first_guess_s: float = _FIRST_GUESS_S) -> None:
        self._stay_s = _MeanStay(first_guess_s, 1.0)
        # The same by tokens of context; the guess counts as one request like the first.
        self._token_stay_s = _MeanStay()
        self._first_guess_s = first_guess_s
        # Lengths in steps, without the guess.
        self._length, self._token_length = _MeanStay(), _MeanStay()
        self._num_departures = 0
        self._step_s = 0.0  # of a step now; 0: not known yet
        self._clock = 0.0  # steps so far
        # By bucket: the clock at its end, or now.
        self._clocks: npt.NDArray[np.float64] = np.zeros(_NUM_BUCKETS)
        self._clocked_until = -_AHEAD
        self._counted_until = 0.0
        self._members: dict[str, _Member] = {}
        self._admitted_tokens = 0
        self._num_decoding = 0
        self._decoding_tokens = 0
        # By bucket of time, as a ring: requests and tokens that begin to decode then, as far as is known.
        self._starts: npt.NDArray[np.int64] = np.zeros(_NUM_BUCKETS, np.int64)
        self._tokens: npt.NDArray[np.int64] = np.zeros(_NUM_BUCKETS, np.int64)
        self._first = -_AHEAD  # the oldest bucket in the ring
        self._latest = -_AHEAD  # the last in which a request begins

    @property
    def mean_stay_s(self) -> float:
        return self._stay_s.mean

    @property
    def mean_token_stay_s(self) -> float:
        """How long a token of context stays: the mean over requests, weighted by their tokens."""
        return self._token_stay_s.mean or self.mean_stay_s

    @property
    def decoding(self) -> DecodeLoad:
        """The load of requests whose prefill is known to be over and that have not ended."""
        return DecodeLoad(self._num_decoding, self._decoding_tokens)

    def expect(self, request_id: str, starts_at: float, num_tokens: int, now: float) -> None:
        """Add an admitted request that should begin to decode at ``starts_at``."""
        self.forget(request_id)
        self._advance(now)
        self._members[request_id] = self._enter(starts_at, num_tokens)
        self._admitted_tokens += num_tokens

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
        if not self._token_stay_s.left:
            self._token_stay_s = _MeanStay(member.num_tokens * self._first_guess_s, float(member.num_tokens))

    def left(self, request_id: str, now: float) -> None:
        """Record that the request has ended; one that decoded is a sample of the stay."""
        member = self._members.get(request_id)
        if member is None or member.started_at is None:
            self.forget(request_id)
            return
        self._count_time(now)
        self._no_longer_decodes(request_id, member)
        self._stay_s.leave(1.0)
        self._token_stay_s.leave(member.num_tokens)
        if self._step_s:  # else its steps were not counted, and its length would be a sample of 0
            self._num_departures += 1
            self._length.leave(1.0)
            self._token_length.leave(member.num_tokens)

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

    def set_step_s(self, step_s: float, now: float) -> None:
        """Record that a step takes so long from now on."""
        self._advance(now)
        self._count_time(now)
        self._step_s = step_s

    @property
    def most(self) -> DecodeLoad:
        """The load if all admitted requests decoded at once: none is higher."""
        return DecodeLoad(len(self._members), self._admitted_tokens)

    def followed(self, instant: float, now: float, step_s: Callable[[DecodeLoad], float]) -> DecodeLoad:
        """The highest load while a request that begins to decode at ``instant`` does so, as ``peak``, but
        with the stays that the load itself causes: ``step_s`` is the duration of a step at a load."""
        self._advance(now)
        self._count_time(now)
        lengths, begin = self._lengths(), _bucket(now)
        oldest = begin - 64
        while oldest > self._first and self._clocks[oldest % _NUM_BUCKETS] > self._clock - max(lengths):
            oldest = begin - 2 * (begin - oldest)
        past, start = _slots(max(oldest, self._first), begin + 1), max(0, self._clipped(instant) - begin)
        clocks = np.concatenate([self._clocks[slots] for slots in past])
        ahead = _slots(begin + 1, max(begin + 1, self._latest) + 1)
        rings = [
            (
                length,
                np.concatenate([ring[slots] for slots in past]).cumsum(),
                np.concatenate([ring[slots] for slots in ahead]).cumsum(),
            )
            for length, ring in zip(lengths, (self._starts, self._tokens), strict=True)
        ]
        more = self._unforeseen(instant, now)
        track = _Track(self._clock)
        highest, begun = DecodeLoad(0, 0), None
        for _ in range(_MOST_PIECES):
            found = []
            for length, before, after in rings:
                gone_at = track.clock - length
                num = int(before[-1]) + _entered(after, track.at)
                if gone_at > self._clock:
                    num -= int(before[-1]) + _entered(after, track.when(gone_at))
                elif place := int(clocks.searchsorted(gone_at, side="right")):
                    num -= int(before[place - 1])
                found.append(num)
            load = DecodeLoad(found[0] + more.num_requests, found[1] + more.num_tokens)
            if track.at >= start:
                begun = track.clock if begun is None else begun
                highest = DecodeLoad(
                    max(highest.num_requests, load.num_requests), max(highest.num_tokens, load.num_tokens)
                )
                if track.clock - begun >= lengths[0]:
                    break
            took_s = max(_SHORTEST_STEP_S, step_s(load))
            piece = max(1.0, lengths[0] * took_s / (_PIECES_PER_STAY * _BUCKET_S))
            if track.at < start:  # in half of the pieces, so that the others are left for the stay
                piece = max(1.0, min(max(piece, 2.0 * start / _MOST_PIECES), start - track.at))
            track.go(piece, piece * _BUCKET_S / took_s)
        return highest

    def falls_to(self, most_requests: float, instant: float, now: float) -> float:
        """The first instant from ``instant`` on with at most so many requests, without further arrivals."""
        self._advance(now)
        begin, stay = self._clipped(instant), self._stay
        there = self._there(self._starts, begin, self._first + _NUM_BUCKETS, stay)
        found = np.flatnonzero(there <= most_requests)
        return instant + (int(found[0]) if len(found) else len(there) + stay) * _BUCKET_S

    def check(self) -> None:
        decoding = [one for one in self._members.values() if one.started_at is not None]
        assert self._admitted_tokens == sum(one.num_tokens for one in self._members.values())
        assert self._num_decoding == len(decoding)
        assert self._decoding_tokens == sum(one.num_tokens for one in decoding)
        assert (self._starts >= 0).all() and (self._tokens >= 0).all()
        assert self._length.spent >= 0 and self._token_length.spent >= 0

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

    def _lengths(self) -> tuple[float, float]:
        """Steps that a request stays, and a token of context."""
        guessed = max(0.0, 1.0 - self._num_departures / _GUESSED_UNTIL)
        guess = guessed * self._first_guess_s / max(_SHORTEST_STEP_S, self._step_s)
        mean = (self._length.spent + guess) / (self._length.left + guessed)
        mean *= 1.0 + min(1.0, _DOUBT / max(1, self._num_departures))
        ratio = self._token_length.mean / self._length.mean if self._length.mean else 0.0
        return mean, mean * (ratio or 1.0)

    def _count_time(self, now: float) -> None:
        passed_s = now - self._counted_until
        if self._num_decoding:
            self._stay_s.spent += self._num_decoding * passed_s
            self._token_stay_s.spent += self._decoding_tokens * passed_s
        if self._step_s and passed_s > 0:
            num_steps = passed_s / self._step_s
            self._clock += num_steps
            self._length.spent += self._num_decoding * num_steps
            self._token_length.spent += self._decoding_tokens * num_steps
        self._counted_until = now
        bucket = min(self._first + _NUM_BUCKETS - 1, _bucket(now))
        for slots in _slots(min(bucket, max(self._clocked_until + 1, self._first)), bucket + 1):
            self._clocks[slots] = self._clock
        self._clocked_until = max(bucket, self._clocked_until)

    def _no_longer_decodes(self, request_id: str, member: _Member) -> None:
        del self._members[request_id]
        self._admitted_tokens -= member.num_tokens
        if member.started_at is not None:
            self._num_decoding -= 1
            self._decoding_tokens -= member.num_tokens

    def _enter(self, starts_at: float, num_tokens: int) -> _Member:
        member = _Member(self._clipped(starts_at), num_tokens)
        self._latest = max(self._latest, member.bucket)
        self._starts[member.bucket % _NUM_BUCKETS] += 1
        self._tokens[member.bucket % _NUM_BUCKETS] += num_tokens
        return member

    def _withdraw(self, member: _Member) -> None:
        if member.bucket >= self._first:
            self._starts[member.bucket % _NUM_BUCKETS] -= 1
            self._tokens[member.bucket % _NUM_BUCKETS] -= member.num_tokens

    def _clipped(self, instant: float) -> int:
        """The bucket of an instant; one too far away counts at the edge."""
        return min(self._first + _NUM_BUCKETS - 1, max(self._first, _bucket(instant)))

    def _advance(self, now: float) -> None:
        """Move the ring so that it covers as much time before ``now`` as after."""
        first = _bucket(now) - _AHEAD
        if first <= self._first:
            return
        for slots in _slots(self._first, min(first, self._first + _NUM_BUCKETS)):
            self._starts[slots] = 0
            self._tokens[slots] = 0
        self._first = first


class _Track:
    """The clock of steps over time, from now on, in buckets."""

    def __init__(self, clock: float) -> None:
        self.at, self.clock = 0.0, clock
        self._times, self._clocks = [0.0], [clock]

    def go(self, piece: float, num_steps: float) -> None:
        self.at += piece
        self.clock += num_steps
        self._times.append(self.at)
        self._clocks.append(self.clock)

    def when(self, clock: float) -> float:
        """The instant at which the clock showed this, which is not after the last one."""
        after = min(bisect_right(self._clocks, clock), len(self._clocks) - 1)
        first, last = self._times[after - 1], self._times[after]
        passed = (clock - self._clocks[after - 1]) / (self._clocks[after] - self._clocks[after - 1])
        return first + (last - first) * passed


def _entered(cumulated: npt.NDArray[np.int64], at: float) -> int:
    """How many entered in the first ``at`` buckets."""
    return int(cumulated[min(len(cumulated), int(at)) - 1]) if at >= 1 else 0


def _bucket(instant: float) -> int:
    return int(instant // _BUCKET_S)


def _in_buckets(stay_s: float) -> int:
    return min(_AHEAD // 2, max(1, round(stay_s / _BUCKET_S)))


def _slots(begin: int, end: int) -> list[slice]:
    """The ring's slots of the buckets from ``begin`` to before ``end``, in order."""
    if end <= begin:
        return []
    low, high = begin % _NUM_BUCKETS, (end - 1) % _NUM_BUCKETS + 1
    return [slice(low, high)] if low < high else [slice(low, _NUM_BUCKETS), slice(0, high)]
