# SPDX-License-Identifier: Apache-2.0
"""Reuse of prefixes in a trace: the hit rate of a cache of any size, and how long a block must be kept.

One pass gives the hit rates of all sizes at once, exactly, for a cache that evicts what was used longest ago.
Such a cache of N blocks has a block if fewer than N other blocks were used since: the *rank* of the block. A
request uses its blocks from the last to the first, so that a prefix is never evicted before what continues
it, and a rank within the size means a hit. Ranks are counted in columns, one call for each request, because a
recording has a million blocks.

Error bars are 90 % intervals of a bootstrap: sessions (or, without them, runs of requests) are drawn with
replacement, in groups. They cover what another day with such sessions would have shown; they do not cover
that the load changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.sim.traces.trace import TraceRow

_Ints: TypeAlias = NDArray[np.int64]
_Floats: TypeAlias = NDArray[np.float64]

NUM_GROUPS = 512
"""Sessions are resampled in at most so many groups."""
ROWS_PER_GROUP = 64
"""Consecutive requests of a group, in a trace without sessions."""
NUM_RESAMPLES = 400
INTERVAL = (0.05, 0.95)
SIZES_PER_OCTAVE = 4
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Parts of the hits for which a time to live is given."""
_CHUNK_BITS = 12
_CHUNK = 1 << _CHUNK_BITS
_MOST_OCTAVES = 40
_TTL_EDGES = np.geomspace(0.01, 30 * 86_400.0, 600)


class CurvePoint(msgspec.Struct, frozen=True):
    """Hit rate of one cache of this size."""

    size_tokens: int
    hit_rate: float
    low: float
    high: float


class TtlPoint(msgspec.Struct, frozen=True):
    """How long blocks must be kept after each use for this part of the hits."""

    share: float
    ttl_s: float
    low_s: float
    high_s: float
    resident_tokens: int
    "Mean number of tokens that such a cache keeps."


class ReuseReport(msgspec.Struct, frozen=True):
    """Reuse in a whole trace."""

    num_requests: int
    num_sessions: int
    input_tokens: int
    unique_tokens: int
    "Tokens of all different blocks: a cache of this size never evicts."
    span_s: float
    block_tokens: int
    best: CurvePoint
    "The cache that never evicts."
    curve: list[CurvePoint]
    ttl: list[TtlPoint]
    recorded: CurvePoint | None = None
    "Hit rate that was measured when the trace was recorded, with the size at which the curve has it."

    def at(self, size_tokens: float) -> CurvePoint:
        """The point of the largest size of the curve that is not above ``size_tokens``."""
        found = CurvePoint(0, 0.0, 0.0, 0.0)
        for point in self.curve:
            if point.size_tokens > size_tokens:
                break
            found = point
        return found


class RecencyRanks:
    """Which blocks were used how recently. A position is the instant of a use; a block's last one is live."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self._live = np.zeros(16 * _CHUNK, np.int8)
        self._keys = np.zeros(16 * _CHUNK, np.uint64)
        self._counts = np.zeros(16, np.int64)
        self._end = 0

    def __len__(self) -> int:
        """Number of different blocks."""
        return len(self._at)

    def ranks(self, keys: tuple[int, ...]) -> _Ints:
        """Ranks (from 1) of the leading keys that were used before."""
        positions: list[int] = []
        for key in keys:
            at = self._at.get(key)
            if at is None:
                break
            positions.append(at)
        if not positions:
            return np.empty(0, np.int64)
        at_all = np.array(positions)
        chunks = at_all >> _CHUNK_BITS
        behind = np.cumsum(self._counts[::-1])[::-1] - self._counts
        found = behind[chunks]
        for chunk in np.unique(chunks):
            begin = int(chunk) << _CHUNK_BITS
            within = np.cumsum(self._live[begin : begin + _CHUNK][::-1], dtype=np.int64)[::-1]
            here = chunks == chunk
            found[here] += within[at_all[here] - begin]
        return np.asarray(found)

    def use(self, keys: tuple[int, ...]) -> None:
        """Use all of them, the last one first."""
        if not keys:
            return
        at = self._at
        before = np.array([one for one in map(at.get, keys) if one is not None], np.int64)
        self._live[before] = 0
        np.subtract.at(self._counts, before >> _CHUNK_BITS, 1)
        if self._end + len(keys) > len(self._live):
            self._compact(len(keys))
        begin, self._end = self._end, self._end + len(keys)
        at.update(zip(reversed(keys), range(begin, self._end), strict=True))
        self._live[begin : self._end] = 1
        self._keys[begin : self._end] = np.array(keys[::-1], np.uint64)
        fresh = np.arange(begin, self._end) >> _CHUNK_BITS
        np.add.at(self._counts, fresh, 1)

    def _compact(self, num_more: int) -> None:
        """Renumber the live positions, and make room."""
        kept = self._keys[: self._end][self._live[: self._end] == 1]
        num_chunks = max(16, -(-2 * (len(kept) + num_more) // _CHUNK))
        self._end = len(kept)
        self._live = np.zeros(num_chunks * _CHUNK, np.int8)
        self._live[: self._end] = 1
        self._keys = np.zeros(num_chunks * _CHUNK, np.uint64)
        self._keys[: self._end] = kept
        self._counts = self._live.reshape(-1, _CHUNK).sum(axis=1, dtype=np.int64)
        self._at.update(zip(map(int, kept), range(self._end), strict=True))


class ReuseProfile:
    """Counts of the rows that were added, in the order of arrival."""

    def __init__(self, block_tokens: int, *, keeps_answers: bool = False) -> None:
        """``keeps_answers``: whether a cache also has the KV of answers, where the trace has their ids."""
        self._block_tokens = block_tokens
        self._keeps_answers = keeps_answers
        self._ranks = RecencyRanks()
        self._used_at: dict[int, float] = {}
        # A bucket for each size: rank r is a hit from size 2 ** (bucket / SIZES_PER_OCTAVE) on.
        self._edges = np.unique(
            np.ceil(2 ** (np.arange(_MOST_OCTAVES * SIZES_PER_OCTAVE) / SIZES_PER_OCTAVE)).astype(np.int64)
        )
        self._hits = np.zeros((NUM_GROUPS, len(self._edges)))
        self._by_ttl = np.zeros((NUM_GROUPS, len(_TTL_EDGES) + 1))
        self._input = np.zeros(NUM_GROUPS)
        self._recorded = np.zeros((NUM_GROUPS, 2))
        self._kept = np.zeros(len(_TTL_EDGES) + 1)
        self._kept_s = np.zeros(len(_TTL_EDGES) + 1)
        self._longest_s = float(_TTL_EDGES[-1])
        """The longest time between two uses of a block, if it is above the last edge."""
        self._sessions: dict[str, int] = {}
        self._num_rows = 0
        self._first_s = self._last_s = 0.0

    def add(self, row: TraceRow) -> None:
        now, group = row.timestamp_s, self._group_of(row)
        if not self._num_rows:
            self._first_s = now
        self._last_s = max(self._last_s, now)
        self._num_rows += 1
        self._input[group] += row.num_input
        if row.recorded is not None and row.recorded.is_done:
            self._recorded[group] += (row.recorded.cached_tokens, row.num_input)
        keys = row.keys[: row.num_input // self._block_tokens]
        ranks = self._ranks.ranks(keys)
        if len(ranks):
            # The last token is always computed, to have an output.
            tokens = np.full(len(ranks), float(self._block_tokens))
            tokens[-1] -= max(0, len(ranks) * self._block_tokens - (row.num_input - 1))
            sizes = np.searchsorted(self._edges, ranks)
            np.add.at(self._hits[group], np.minimum(sizes, len(self._edges) - 1), tokens)
            gaps = now - np.array([self._used_at[key] for key in keys[: len(ranks)]])
            self._longest_s = max(self._longest_s, float(gaps.max()))
            buckets = np.searchsorted(_TTL_EDGES, gaps)
            np.add.at(self._by_ttl[group], buckets, tokens)
            np.add.at(self._kept, buckets, 1.0)
            np.add.at(self._kept_s, buckets, gaps)
        if self._keeps_answers and row.recorded is not None:
            keys += tuple(row.recorded.output_hash_ids)
        self._ranks.use(keys)
        self._used_at.update(dict.fromkeys(keys, now))

    def _group_of(self, row: TraceRow) -> int:
        if row.session is None:
            return (self._num_rows // ROWS_PER_GROUP) % NUM_GROUPS
        return self._sessions.setdefault(row.session, len(self._sessions)) % NUM_GROUPS

    def report(self, seed: int = 0) -> ReuseReport:
        used = np.flatnonzero(self._input)
        weights = np.random.default_rng(seed).multinomial(
            max(1, len(used)), np.full(max(1, len(used)), 1 / max(1, len(used))), NUM_RESAMPLES
        )
        hits, total = np.cumsum(self._hits[used], axis=1), self._input[used]
        means = hits.sum(axis=0) / max(1.0, total.sum())
        drawn = _ratio(weights @ hits, (weights @ total)[:, None])
        lows, highs = np.quantile(drawn, INTERVAL, axis=0)
        num_blocks = len(self._ranks)
        last = min(int(np.searchsorted(self._edges, num_blocks)), len(self._edges) - 1)
        points = [
            CurvePoint(int(self._edges[n]) * self._block_tokens, *map(float, (means[n], lows[n], highs[n])))
            for n in range(last + 1)
        ]
        best = msgspec.structs.replace(points[-1], size_tokens=num_blocks * self._block_tokens)
        return ReuseReport(
            num_requests=self._num_rows,
            num_sessions=len(self._sessions),
            input_tokens=int(self._input.sum()),
            unique_tokens=num_blocks * self._block_tokens,
            span_s=self._last_s - self._first_s,
            block_tokens=self._block_tokens,
            best=best,
            curve=[*points[:-1], best],
            ttl=self._ttl(weights, used),
            recorded=self._measured(weights, used, points),
        )

    def _ttl(self, weights: _Ints, used: _Ints) -> list[TtlPoint]:
        counts = self._by_ttl[used]
        if not counts.sum():
            return []
        edges = np.append(_TTL_EDGES, self._longest_s)
        drawn = weights @ counts
        found = []
        for share in SHARES:
            ttl_s = float(_first_at(counts.sum(axis=0)[None], share, edges)[0])
            low_s, high_s = np.quantile(_first_at(drawn, share, edges), INTERVAL, method="nearest")
            found.append(TtlPoint(share, ttl_s, float(low_s), float(high_s), self._resident_tokens(ttl_s)))
        return found

    def _resident_tokens(self, ttl_s: float) -> int:
        """A block is kept from each use until the next, and for ``ttl_s`` at most."""
        bucket = int(np.searchsorted(_TTL_EDGES, ttl_s))
        block_s = self._kept_s[: bucket + 1].sum() + self._kept[bucket + 1 :].sum() * ttl_s
        last_uses = self._last_s - np.fromiter(self._used_at.values(), float, len(self._used_at))
        block_s += np.minimum(last_uses, ttl_s).sum()
        return int(block_s * self._block_tokens / max(1e-9, self._last_s - self._first_s))

    def _measured(self, weights: _Ints, used: _Ints, points: list[CurvePoint]) -> CurvePoint | None:
        cached, total = self._recorded[used].T
        if not total.sum():
            return None
        rate = float(cached.sum() / total.sum())
        low, high = np.quantile(_ratio(weights @ cached, weights @ total), INTERVAL)
        size = next((point.size_tokens for point in points if point.hit_rate >= rate), points[-1].size_tokens)
        return CurvePoint(size, rate, float(low), float(high))


def reuse_of(rows: Iterable[TraceRow], block_tokens: int, *, keeps_answers: bool = False) -> ReuseReport:
    """The reuse in a trace."""
    profile = ReuseProfile(block_tokens, keeps_answers=keeps_answers)
    for row in rows:
        profile.add(row)
    return profile.report()


def _ratio(above: _Floats, below: _Floats) -> _Floats:
    return np.asarray(above / np.maximum(below, 1e-9))


def _first_at(counts: _Floats, share: float, edges: _Floats) -> _Floats:
    """For each row of counts: the edge up to which ``share`` of them lie."""
    sums = np.cumsum(counts, axis=1)
    reached = sums >= share * sums[:, -1:] - 1e-9
    return np.asarray(edges[np.argmax(reached, axis=1)])
