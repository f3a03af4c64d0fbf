# SPDX-License-Identifier: Apache-2.0
"""Memory of recent prompts, in which a prompt's nearest sibling and the place where the two differ are found.

It owns the prompts of each scope (tenant, salt, model): prompts of two scopes are never compared. A prompt
that extends an earlier one, as the next turn of a session does, takes its place, so a session costs the
memory of its latest prompt. The sibling is the prompt with the longest common prefix in blocks; of several,
one of the same session comes first, then the one with the most similar beginning, then the latest.

Content is bytes: token ids of four bytes, or UTF-8 text of a prompt whose tokens are unknown. Blocks have the
same size in both. Where two contents differ is found by the keys of their blocks, and then inside one block.
How much of the rest they have in common is estimated from a sample of hashed n-grams, because a full
comparison would cost more than the rest of the gateway. What a difference means is ``differences.py``.
"""

from __future__ import annotations

import bisect
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake.prefix import BlockKey

TOKEN_BYTES = 4
"""Bytes of a token id."""

_MAX_SAMPLE = 320
"""Hashes by which a prompt's content is compared; a longer prompt has every second, fourth … of them."""

_PIECE = 4096
"""Positions that are hashed at a time."""

_NUM_FEATURES = 16
"""Hashes of a prompt's beginning by which similar prompts are found."""

_BEGINNING = 8192
"""Tokens, or fourths of a text's bytes, that count as a prompt's beginning."""

_MAX_PER_SESSION = 4
_MIN_VOTES = 3
"""Features that two prompts must share, to be similar without a common block."""

_CONTEXT_BYTES = 8 << 10
_WINDOW_BYTES = 24 << 10
"""PromptContent kept of both prompts before and behind their difference, for later explanations."""

_OVERHEAD_BYTES = 1_200
"""Upper estimate of the size of a prompt's record without its content."""

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.uint32]


class Scope(NamedTuple):
    """What two prompts must have in common to be compared."""

    tenant: str
    salt: str = ""
    model: str = ""


class PromptContent(NamedTuple):
    """A prompt as it arrives."""

    data: bytes
    keys: Sequence[BlockKey]
    "Keys of its full blocks."
    is_text: bool = False

    @property
    def unit_bytes(self) -> int:
        """Bytes of a token, or of a position in a text."""
        return 1 if self.is_text else TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Departure:
    """The place where a prompt left its sibling. Sizes are tokens, or bytes of a text."""

    offset: int
    offset_chars: int
    "The offset in characters, if the content is a text."
    is_text: bool
    sibling: str
    "Request id of the sibling."
    sibling_age_s: float
    is_same_session: bool
    context: bytes
    "PromptContent before the difference, which both have."
    is_from_start: bool
    "Whether ``context`` is all that is before the difference."
    ours: bytes
    theirs: bytes
    num_ours: int
    "Size of all that follows in the prompt."
    num_theirs: int
    ours_found: float
    "Part of what follows in the prompt that the sibling has, too."
    theirs_found: float
    answer_at: int | None
    "Position in ``theirs`` where the sibling's answer begins, if it does."

    @property
    def unit_bytes(self) -> int:
        return 1 if self.is_text else TOKEN_BYTES

    @property
    def num_found(self) -> int:
        """Size of what the prompt has in common with its sibling behind the difference, estimated."""
        return round(self.ours_found * self.num_ours)

    @property
    def size_bytes(self) -> int:
        return len(self.context) + len(self.ours) + len(self.theirs) + 400


@dataclass(slots=True)
class Arrival:
    """What was known of a prompt when it arrived. Sizes are tokens, or bytes of a text."""

    request_id: str
    scope: Scope
    size: int
    num_seen: int
    "Leading part that an earlier prompt or answer of this scope has, too."
    num_seen_in_prompts: int
    "The same without answers."
    num_computed: int
    "Leading part that had been computed by then."
    departure: Departure | None
    unit_bytes: int
    sibling: str = ""
    "Request id of the prompt that was the nearest."
    sequence: _Sequence | None = None
    "Where the answer is appended."


class _Sample:
    """Hashes of some n-grams of a content, with their positions."""

    __slots__ = ("_features", "_is_text", "end", "hashes", "level", "positions")

    def __init__(self, is_text: bool) -> None:
        self.hashes: Hashes = np.empty(0, np.uint64)
        self.positions: Positions = np.empty(0, np.uint32)
        self.level = 0
        """Number of low bits that are zero in all of the hashes."""
        self.end = 0
        """First position that is not hashed yet."""
        self._is_text = is_text
        self._features: tuple[int, list[int]] = (0, [])
        """With the ``end`` at which they were chosen."""

    @property
    def size_bytes(self) -> int:
        return 12 * len(self.hashes)

    def extend(self, data: bytes) -> None:
        """Sample the n-grams of ``data``, which begins with the content that was sampled before."""
        dtype: Any = np.uint8 if self._is_text else np.uint32
        width = 1 << (4 if self._is_text else 3)
        size = len(data) // (1 if self._is_text else TOKEN_BYTES)
        if size - self.end < width:
            return
        self._thin_out(size)  # before they are made: large arrays are expensive to allocate
        hashes, positions = [self.hashes], [self.positions]
        with memoryview(data) as view:
            while size - self.end >= width:  # in pieces that stay in the processor's cache
                end = min(size, self.end + _PIECE + width - 1)
                found = np.frombuffer(view, dtype, end - self.end, self.end * np.dtype(dtype).itemsize)
                sampled, at = self._sampled(found.astype(np.uint64), width)
                hashes.append(sampled)
                positions.append(at)
                self.end = end - width + 1
                del found
        self.hashes, self.positions = np.concatenate(hashes), np.concatenate(positions)
        self._thin_out(0)

    def _sampled(self, found: Hashes, width: int) -> tuple[Hashes, Positions]:
        """The sampled hashes of one piece, and their positions."""
        factor, step = np.uint64(0x9E3779B97F4A7C15), 1
        while step < width:
            mixed = found[:-step] * factor
            mixed += found[step:]
            found = mixed
            factor ^= factor >> np.uint64(31)
            step *= 2
        found ^= found >> np.uint64(29)
        found *= np.uint64(0xBF58476D1CE4E5B9)
        found ^= found >> np.uint64(32)
        if not self.level:
            return found, np.arange(self.end, self.end + len(found), dtype=np.uint32)
        at = np.flatnonzero(found & np.uint64((1 << self.level) - 1) == 0)
        return found[at], (at + self.end).astype(np.uint32)

    def _thin_out(self, size: int) -> None:
        """Keep fewer hashes, where there are too many or will be for a content of ``size``."""
        before = self.level
        while size >> self.level > _MAX_SAMPLE:
            self.level += 1
        if self.level > before:
            self._drop_others()
        while len(self.hashes) > _MAX_SAMPLE:
            self.level += 1
            self._drop_others()

    def _drop_others(self) -> None:
        """Drop the hashes that do not belong to the present level."""
        if len(self.hashes):
            is_sampled = self.hashes & np.uint64((1 << self.level) - 1) == 0
            self.hashes, self.positions = self.hashes[is_sampled], self.positions[is_sampled]

    def behind(self, position: int, level: int) -> list[int]:
        """The hashes from a position on, as sparse as at ``level``."""
        found: Hashes = self.hashes[int(self.positions.searchsorted(position)) :]
        if level > self.level:
            found = found[found & np.uint64((1 << level) - 1) == 0]
        hashes: list[int] = found.tolist()
        return hashes

    def features(self) -> list[int]:
        """A few hashes of the beginning, mostly the same ones in similar contents."""
        if self._features[0] == self.end:
            return self._features[1]
        most = _BEGINNING * (TOKEN_BYTES if self._is_text else 1)
        found = self.hashes[: int(self.positions.searchsorted(most))].copy()
        if len(found) > _NUM_FEATURES:
            found.partition(_NUM_FEATURES)
        features: list[int] = found[:_NUM_FEATURES].tolist()
        self._features = self.end, features
        return features


def _common_part(ours: _Sample, our_start: int, theirs: _Sample, their_start: int) -> tuple[float, float]:
    """Parts of both contents, from these positions on, that the other has as well."""
    level = max(ours.level, theirs.level)
    of_ours, of_theirs = ours.behind(our_start, level), theirs.behind(their_start, level)
    if not of_ours or not of_theirs:
        return 0.0, 0.0
    in_ours, in_theirs = set(of_ours), set(of_theirs)
    # Counted by occurrence: a prompt may say the same again and again.
    ours_found = sum(map(in_theirs.__contains__, of_ours)) / len(of_ours)
    return ours_found, sum(map(in_ours.__contains__, of_theirs)) / len(of_theirs)


class _SampledContent:
    """A content that is sampled at most once, and only where it is needed."""

    def __init__(self, content: PromptContent) -> None:
        self.content = content
        self._sample: _Sample | None = None

    @property
    def sample(self) -> _Sample:
        if self._sample is None:
            self._sample = _Sample(self.content.is_text)
            self._sample.extend(self.content.data)
        return self._sample


class _Sequence:
    """A prompt with its answer, and all earlier prompts that it extends."""

    __slots__ = (
        "answer",
        "computed_bytes",
        "data",
        "featured_bytes",
        "features",
        "is_text",
        "keys",
        "last_used",
        "request_id",
        "sample",
        "scope",
        "session",
        "size_bytes",
    )

    def __init__(self, scope: Scope, is_text: bool) -> None:
        self.scope, self.is_text = scope, is_text
        self.data = self.answer = b""
        """The latest prompt, and its answer as far as it is known."""
        self.keys: array[int] = array("Q")
        self.sample = _Sample(is_text)
        self.features: list[int] = []
        self.session = self.request_id = ""
        self.size_bytes = self.featured_bytes = 0
        self.computed_bytes = 0
        """Leading bytes of prompt and answer that are known to be computed."""
        self.last_used = 0.0

    def common_blocks(self, keys: Sequence[BlockKey]) -> int:
        """The number of leading blocks that these keys share with it."""
        low, high = 0, min(len(keys), len(self.keys))
        while low < high:  # equal keys are keys of equal prefixes
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keys[middle - 1] == self.keys[middle - 1] else (low, middle - 1)
        return low


@dataclass(slots=True)
class _ScopeMemory:
    """The prompts of one scope."""

    by_key: dict[BlockKey, _Sequence] = field(default_factory=dict)
    by_session: dict[str, list[_Sequence]] = field(default_factory=dict)
    by_feature: dict[int, _Sequence] = field(default_factory=dict)
    num_sequences: int = 0


class SiblingMemory:
    """Recent prompts, up to ``max_bytes``, each for ``lifetime_s`` after its last use."""

    def __init__(self, max_bytes: int, lifetime_s: float, block_tokens: int) -> None:
        self._max_bytes, self._lifetime_s = max_bytes, lifetime_s
        self._block_bytes = TOKEN_BYTES * block_tokens
        self._scopes: dict[tuple[Scope, bool], _ScopeMemory] = {}
        self._tenants: dict[str, OrderedDict[int, _Sequence]] = {}
        """By tenant: its sequences by identity, in order of their last use."""
        self._tenant_bytes: Counter[str] = Counter()
        self.size_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def arrive(
        self, request_id: str, scope: Scope, content: PromptContent, session: str, now: float
    ) -> Arrival:
        """Find a prompt's sibling, and remember the prompt."""
        self.expire(now)
        unit = content.unit_bytes
        memory = self._scopes.get((scope, content.is_text))
        best, num_seen, num_seen_in_prompts, num_computed = None, 0, 0, 0
        sampled = _SampledContent(content)
        if memory is not None:
            best = self._nearest(memory, sampled, session)
        departure = None
        sibling = best.request_id if best is not None else ""
        sequence: _Sequence | None = None
        if best is not None:
            shared = self._common_bytes(best, content) // unit * unit
            num_seen = shared // unit
            num_seen_in_prompts = min(shared, len(best.data)) // unit
            num_computed = min(shared, best.computed_bytes) // unit
            if shared < min(len(content.data), len(best.data) + len(best.answer)):
                found = 0.0, 0.0
                if shared < len(best.data):  # behind it there is more than an answer
                    best.sample.extend(best.data)
                    self._resized(best)
                    found = _common_part(sampled.sample, shared // unit, best.sample, shared // unit)
                departure = _departure(best, content, found, shared, session, now)
            if shared >= min(len(content.data), len(best.data)):
                sequence = best
        if sequence is None:
            sequence = _Sequence(scope, content.is_text)
            sequence.sample = sampled.sample
            self._add(sequence)
        self._use(sequence, request_id, content, session, now)
        self._shrink()
        size = len(content.data) // unit
        return Arrival(
            request_id,
            scope,
            size,
            num_seen,
            num_seen_in_prompts,
            num_computed,
            departure,
            unit,
            sibling,
            sequence,
        )

    def answered(self, arrival: Arrival, answer: bytes, is_complete: bool) -> None:
        """Note that a prompt was computed; ``answer``: its tokens, as far as they are known."""
        sequence, arrival.sequence = arrival.sequence, None
        if sequence is None or not is_complete or not self._is_kept(sequence):
            return
        size = arrival.size * arrival.unit_bytes
        sequence.computed_bytes = max(sequence.computed_bytes, size)
        if answer and not sequence.is_text and size == len(sequence.data) and not sequence.answer:
            sequence.answer = answer
            sequence.computed_bytes += len(answer)
            self._resized(sequence)
            self._shrink()

    def expire(self, now: float) -> None:
        """Forget what was not used for long."""
        for tenant in [*self._tenants]:
            oldest = next(iter(self._tenants[tenant].values()))
            while now - oldest.last_used > self._lifetime_s:
                self._forget(oldest)
                if tenant not in self._tenants:
                    break
                oldest = next(iter(self._tenants[tenant].values()))

    def check(self) -> None:
        sequences = [one for row in self._tenants.values() for one in row.values()]
        assert self.size_bytes == sum(one.size_bytes for one in sequences)
        assert self.size_bytes == sum(self._tenant_bytes.values())
        kept = {id(one) for one in sequences}
        for (scope, is_text), memory in self._scopes.items():
            assert memory.num_sequences
            found = [*memory.by_key.values(), *memory.by_feature.values()]
            found += [one for row in memory.by_session.values() for one in row]
            for one in found:
                assert id(one) in kept and one.scope == scope and one.is_text == is_text

    # --- the nearest sibling

    def _nearest(self, memory: _ScopeMemory, sampled: _SampledContent, session: str) -> _Sequence | None:
        content = sampled.content
        keys = content.keys
        deepest = bisect.bisect_left(range(len(keys)), True, key=lambda at: keys[at] not in memory.by_key)
        candidates: dict[int, _Sequence] = {}
        if deepest:
            found = memory.by_key[keys[deepest - 1]]
            candidates[id(found)] = found
        if session:
            candidates.update((id(one), one) for one in memory.by_session.get(session, ()))
        is_whole = deepest == len(keys) and bool(deepest)
        votes: Counter[int] = Counter()
        if not is_whole and (not candidates or deepest * self._block_bytes < len(content.data) // 2):
            for feature in sampled.sample.features():
                similar = memory.by_feature.get(feature)
                if similar is not None:
                    votes[id(similar)] += 1
                    candidates[id(similar)] = similar
        best: _Sequence | None = None
        best_rank: tuple[int, bool, int, float] | None = None
        for one in candidates.values():
            num_blocks = one.common_blocks(keys)
            is_same_session = bool(session) and one.session == session
            if not num_blocks and not is_same_session and votes[id(one)] < _MIN_VOTES:
                continue
            rank = (num_blocks, is_same_session, votes[id(one)], one.last_used)
            if best_rank is None or rank > best_rank:
                best, best_rank = one, rank
        return best

    def _common_bytes(self, sequence: _Sequence, content: PromptContent) -> int:
        """The number of leading bytes that both have."""
        start = sequence.common_blocks(content.keys) * self._block_bytes
        start = _common_end(sequence.data, content.data, start, self._block_bytes)
        if start < len(sequence.data) or start == len(content.data) or not sequence.answer:
            return start
        behind = content.data[start : start + len(sequence.answer)]
        return start + _common_end(sequence.answer, behind, 0, self._block_bytes)

    # --- memory

    def _add(self, sequence: _Sequence) -> None:
        memory = self._scopes.setdefault((sequence.scope, sequence.is_text), _ScopeMemory())
        memory.num_sequences += 1
        self._tenants.setdefault(sequence.scope.tenant, OrderedDict())[id(sequence)] = sequence

    def _is_kept(self, sequence: _Sequence) -> bool:
        return id(sequence) in self._tenants.get(sequence.scope.tenant, ())

    def _use(
        self, sequence: _Sequence, request_id: str, content: PromptContent, session: str, now: float
    ) -> None:
        """Note a prompt as the latest use of ``sequence``, which it extends or which has it whole."""
        memory = self._scopes[sequence.scope, sequence.is_text]
        row = self._tenants[sequence.scope.tenant]
        row.move_to_end(id(sequence))
        sequence.last_used = now
        if len(content.data) >= len(sequence.data):
            sequence.request_id = request_id
        if len(content.data) > len(sequence.data):
            sequence.data, sequence.answer = content.data, b""
            sequence.computed_bytes = min(sequence.computed_bytes, len(content.data))
        if len(content.keys) > len(sequence.keys):
            added = content.keys[len(sequence.keys) :]
            sequence.keys.extend(added)
            memory.by_key.update(dict.fromkeys(added, sequence))
        if session != sequence.session:
            self._leave_session(memory, sequence)
        if session and sequence not in (sessions := memory.by_session.setdefault(session, [])):
            sessions.append(sequence)
            del sessions[:-_MAX_PER_SESSION]
        sequence.session = session
        # Sampled when a prompt leaves it, which most sequences never see; the beginning, as it grows.
        most = _BEGINNING * TOKEN_BYTES
        if not sequence.features or sequence.featured_bytes < min(most, len(sequence.data) // 2):
            sequence.featured_bytes = len(sequence.data)
            sequence.sample.extend(sequence.data)
            features = sequence.sample.features()
            for one in sequence.features:
                if memory.by_feature.get(one) is sequence:
                    del memory.by_feature[one]
            sequence.features = features
            memory.by_feature.update(dict.fromkeys(features, sequence))
        self._resized(sequence)

    def _resized(self, sequence: _Sequence) -> None:
        size = _OVERHEAD_BYTES + len(sequence.data) + len(sequence.answer) + sequence.sample.size_bytes
        size += 4 * len(sequence.session) + 100 * len(sequence.keys)
        self.size_bytes += size - sequence.size_bytes
        self._tenant_bytes[sequence.scope.tenant] += size - sequence.size_bytes
        sequence.size_bytes = size

    def _shrink(self) -> None:
        """Forget the oldest prompts of the tenant that has the most, until all fit."""
        while self.size_bytes > self._max_bytes:
            [(tenant, _)] = self._tenant_bytes.most_common(1)
            self._forget(next(iter(self._tenants[tenant].values())))

    def _forget(self, sequence: _Sequence) -> None:
        tenant = sequence.scope.tenant
        memory = self._scopes[sequence.scope, sequence.is_text]
        self._forget_keys(sequence, 0)
        for one in sequence.features:
            if memory.by_feature.get(one) is sequence:
                del memory.by_feature[one]
        self._leave_session(memory, sequence)
        memory.num_sequences -= 1
        if not memory.num_sequences:
            del self._scopes[sequence.scope, sequence.is_text]
        del self._tenants[tenant][id(sequence)]
        self.size_bytes -= sequence.size_bytes
        self._tenant_bytes[tenant] -= sequence.size_bytes
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._tenant_bytes[tenant]

    def _forget_keys(self, sequence: _Sequence, num_kept: int) -> None:
        memory = self._scopes[sequence.scope, sequence.is_text]
        for key in sequence.keys[num_kept:]:
            if memory.by_key.get(key) is sequence:
                del memory.by_key[key]
        del sequence.keys[num_kept:]

    @staticmethod
    def _leave_session(memory: _ScopeMemory, sequence: _Sequence) -> None:
        row = memory.by_session.get(sequence.session)
        if row is not None:
            row[:] = (one for one in row if one is not sequence)
            if not row:
                del memory.by_session[sequence.session]


def _common_end(ours: bytes, theirs: bytes, start: int, step: int) -> int:
    """The first position from ``start`` on at which two contents differ, or where the shorter one ends."""
    most = min(len(ours), len(theirs))
    while start < most:
        end = min(most, start + step)
        if ours[start:end] != theirs[start:end]:
            return next(at for at in range(start, end) if ours[at] != theirs[at])
        start = end
    return most


def _departure(
    sibling: _Sequence,
    content: PromptContent,
    found: tuple[float, float],
    shared: int,
    session: str,
    now: float,
) -> Departure:
    unit = content.unit_bytes
    if content.is_text:  # not in the middle of a character
        while shared and content.data[shared] & 0xC0 == 0x80:
            shared -= 1
    offset = shared // unit
    ours_found, theirs_found = found
    window = _WINDOW_BYTES if ours_found or theirs_found else _WINDOW_BYTES // 8
    start = max(0, shared - (_CONTEXT_BYTES if ours_found or theirs_found else _CONTEXT_BYTES // 4))
    num_theirs = len(sibling.data) + len(sibling.answer) - shared
    theirs = sibling.data[shared : shared + window]
    answer_at = None
    if sibling.answer and len(theirs) < window:
        answer_at = max(0, len(sibling.data) - shared) // unit
        theirs += sibling.answer[max(0, shared - len(sibling.data)) :][: window - len(theirs)]
    return Departure(
        offset=offset,
        offset_chars=len(content.data[:shared].decode(errors="replace")) if content.is_text else 0,
        is_text=content.is_text,
        sibling=sibling.request_id,
        sibling_age_s=now - sibling.last_used,
        is_same_session=bool(session) and sibling.session == session,
        context=content.data[start:shared],
        is_from_start=start == 0,
        ours=content.data[shared : shared + window],
        theirs=theirs,
        num_ours=(len(content.data) - shared) // unit,
        num_theirs=num_theirs // unit,
        ours_found=ours_found,
        theirs_found=theirs_found,
        answer_at=answer_at,
    )
