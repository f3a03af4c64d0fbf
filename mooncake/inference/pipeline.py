# SPDX-License-Identifier: Apache-2.0
"""Chunked pipeline parallelism: which layers a stage has, how a prompt is cut, which chunk is in which stage.

A prefill group has X stages, each with a contiguous range of layers. A prompt passes through them in chunks
that follow each other, so that all stages compute at the same time::

    stage 0   │ 1 │ 2 │ 3 │ 4 │
    stage 1       │ 1 │ 2 │ 3 │ 4 │          K chunks of t seconds in X stages take (K + X - 1) * t

``ChunkPlan`` chooses the chunks. Attention grows with the prefix, so chunks of equal length take longer and
longer, and the longest one decides how long the other stages wait at the beginning and at the end: chunks
take equal time instead. More chunks make the wait shorter and cost a fixed time each; the best number follows
from both. ``Pipeline`` is the group's first stage's knowledge of the chunks under way, ``StageQueue`` each
other stage's of what it may do next. The chunks and stages are those of Mooncake's paper (FAST '25, section
3.3); the choice of chunks is the one of a permutation flow shop whose machines are alike. The simulator uses
the same plan and the same ``pass_through``. Nothing here computes, waits or sends.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from mooncake.errors import InvalidArgument, ProtocolError
from mooncake.http.worker_stats import StageStats

MAX_STAGES = 64

OVERHEAD_TOKENS = {"cpu": 32.0, "cuda": 512.0}
"""Fixed work of a chunk, in tokens of the whole model. A GPU reads all weights in the time of many tokens. A
CPU's is measured with SmolLM2 in two stages, with prompts of 64, 256 and 4,096 tokens: each further chunk
cost the stages together 0.07 to 0.09 s, a token 2.3 to 2.7 ms."""

KEPT_PASSES = 256
"""Number of the latest chunks whose passage through the stages is kept."""

BALANCE_AFTER = 1000
"""Number of chunks after which a group logs whether other ranges of layers would balance its stages."""


def layer_ranges(num_layers: int, num_stages: int, counts: Sequence[int] = ()) -> list[range]:
    """The layers of each stage: contiguous, and as equal as possible, or as many as ``counts`` says.

    The first stages have one layer more where they can't be equal: the last one has the head, too.
    Raises InvalidArgument when there are more stages than layers, or ``counts`` does not fit.
    """
    if not 1 <= num_stages <= min(num_layers, MAX_STAGES):
        raise InvalidArgument("num_stages", num_stages, f"1 to {min(num_layers, MAX_STAGES)}")
    if not counts:
        least, num_longer = divmod(num_layers, num_stages)
        counts = [least + (stage < num_longer) for stage in range(num_stages)]
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_layers:
        allowed = f"{num_stages} counts of 1 or more, {num_layers} layers together"
        raise InvalidArgument("pipeline_layers", list(counts), allowed)
    ends = itertools.accumulate(counts, initial=0)
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def balanced_counts(counts: Sequence[int], computed_s: Sequence[float]) -> list[int]:
    """Layers of each stage with which the slowest stage takes least.

    Args:
        counts: layers that the stages have now.
        computed_s: what each stage took for the same chunks with these. What it does beside its layers, the
            embedding or the head, counts as a part of them.
    """
    per_layer_s = [seconds / num for seconds, num in zip(computed_s, counts, strict=True)]
    found = [1] * len(counts)
    for _ in range(sum(counts) - len(counts)):
        ends_s = [(num + 1) * seconds for num, seconds in zip(found, per_layer_s, strict=True)]
        found[ends_s.index(min(ends_s))] += 1
    if max(map(operator.mul, found, per_layer_s)) < max(computed_s):
        return found
    return list(counts)


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """The lengths of a prompt's chunks in a group of ``num_stages``.

    Work is counted in tokens without a prefix: computing the tokens [first, end) is
    ``end - first + per_pair * (end² - first²) / 2`` of them.
    """

    num_stages: int
    per_pair: float
    """Work of one query that attends to one key."""
    overhead_tokens: float
    """Fixed work of one chunk in all stages together: reading the weights, passing on hidden states."""
    max_tokens: int
    """Most tokens of a chunk."""
    granularity: int = 1
    """Chunks end at multiples of this, if that leaves them at least so long."""

    def __post_init__(self) -> None:
        if self.per_pair < 0 or self.overhead_tokens <= 0 or not self.max_tokens >= self.granularity >= 1:
            raise InvalidArgument("chunk plan", self, "work of 0 or more, and max_tokens >= granularity >= 1")

    def work(self, first: float, end: float) -> float:
        """Work of the tokens [first, end), in tokens."""
        return end - first + self.per_pair * (end * end - first * first) / 2

    def num_chunks(self, first: int, end: int) -> int:
        """The number K of chunks that ends the tokens [first, end) soonest.

        It minimises ``(K + X - 1) * (work / K + overhead)``.
        """
        best = math.sqrt((self.num_stages - 1) * self.work(first, end) / self.overhead_tokens)
        return max(1, min(round(best), -(-(end - first) // self.granularity)))

    def chunk_end(self, first: int, start: int, end: int) -> int:
        """End of the chunk that begins at ``start``, of a prompt whose tokens [first, end) are computed.

        It follows from these three alone, so a prompt that was interrupted goes on with the same plan.
        """
        assert first <= start < end, (first, start, end)
        share = self.work(first, end) / self.num_chunks(first, end)
        begun = self.work(first, start)
        wanted = self._end_of(first, (math.floor(begun / share + 0.5) + 1) * share)
        found = round(wanted / self.granularity) * self.granularity
        found = max(found, start + min(self.granularity, end - start))
        if end - found < self.granularity / 2:
            found = end
        return min(found, start + self.max_tokens, end)

    def cuts(self, first: int, end: int) -> list[int]:
        """Ends of all chunks of the tokens [first, end)."""
        found, start = [], first
        while start < end:
            start = self.chunk_end(first, start, end)
            found.append(start)
        return found

    def _end_of(self, first: int, work: float) -> float:
        """The position up to which ``work`` suffices behind ``first``."""
        if not self.per_pair:
            return first + work
        a = self.per_pair
        return (math.sqrt(1 + 2 * a * (work + first + a * first * first / 2)) - 1) / a


def pass_through(
    free_at: list[float], begin_at: float, stage_s: Sequence[float], hop_s: float = 0.0
) -> float:
    """When a chunk leaves the last stage, that enters the first one at ``begin_at`` or when that is free.

    Args:
        free_at: when each stage is free; set to when it is free behind this chunk.
        stage_s: time in each stage.
        hop_s: time from a stage to the next.
    """
    leaves_at = begin_at
    for stage, seconds in enumerate(stage_s):
        enters_at = leaves_at + (hop_s if stage else 0.0)
        leaves_at = free_at[stage] = max(enters_at, free_at[stage]) + seconds
    return leaves_at


class StageTime(msgspec.Struct, frozen=True, array_like=True):
    """One stage's part in one chunk."""

    waited_s: float
    """Time without work before it; for the first stage, also the time without a free slot."""
    computed_s: float
    held_s: float = 0.0
    """Time for which the chunk was here and not computed: until the stage was free, or in the first stage,
    until a slot was free."""


class ChunkRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one request in a step, as every stage needs them."""

    start: int
    """Position of the first row."""
    num_tokens: int
    num_cached: int
    """Positions below this one are in the cache already and must not be written again."""
    samples: bool
    """Whether the last row's logits are needed."""
    block_ids: list[int]
    """Blocks of the positions up to the last row's; the same ids in every stage."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclasses.dataclass(slots=True)
class ChunkPass:
    """The passage of one step's rows through the stages."""

    number: int
    num_rows: int
    num_samples: int
    began: float
    busy_since: float
    """When the first of the chunks that followed each other without a break up to this one began."""
    ended: float | None = None
    times: list[StageTime] = dataclasses.field(default_factory=list)
    waited_s: list[float] = dataclasses.field(default_factory=list)
    """Time without work in each stage from the beginning of the group to this chunk."""

    @property
    def hop_s(self) -> float:
        """Time between two stages, and from the last one back to the first: all of them are taken as equal,
        because the clocks of two stages can't be compared."""
        assert self.ended is not None
        inside_s = sum(one.computed_s + one.held_s for one in self.times)
        return max(0.0, (self.ended - self.began - inside_s) / len(self.times))

    def began_in_stages(self) -> list[float]:
        """When each stage began to compute it, on the first stage's clock."""
        found, at = [self.began], self.began + self.times[0].computed_s + self.times[0].held_s
        for one in self.times[1:]:
            at += self.hop_s + one.held_s
            found.append(at)
            at += one.computed_s
        return found

    def bubbles_s(self, since: float) -> list[float]:
        """Time without work before it in each stage, not counting any before ``since``."""
        begun = self.began_in_stages()
        return [min(one.waited_s, max(0.0, at - since)) for one, at in zip(self.times, begun, strict=True)]


class PromptPassage:
    """The passage of one prompt's chunks through the stages, as the stages reported it.

    A chunk is added when it has left the last stage. Other prompts' chunks may be between this one's: they
    are no bubbles.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_chunks = 0
        self.first_token = self.end_token = 0
        """Range of the prompt's tokens that were computed."""
        self.is_alone = True
        """Whether no chunk had rows of another request, too."""
        self.alone_s = 0.0
        """Duration, if its chunks take as long as they did and no other request is in the group."""
        self._free_at = [0.0] * num_stages
        self._began = 0.0
        self._began_s, self._ended_s = [0.0] * num_stages, [0.0] * num_stages
        self._computed_s, self._waited_s = [0.0] * num_stages, [0.0] * num_stages
        self._waited_before = [0.0] * num_stages

    def add(self, one: ChunkPass, start: int, num_tokens: int, is_alone: bool) -> None:
        """Add an ended chunk that has ``num_tokens`` rows of this prompt from ``start`` on."""
        begun = one.began_in_stages()
        if not self.num_chunks:
            self.first_token, self._began = start, one.began
            self._began_s = [at - one.began for at in begun]
            bubbles_s = one.bubbles_s(since=one.began)
            self._waited_before = [
                whole - bubble for whole, bubble in zip(one.waited_s, bubbles_s, strict=True)
            ]
        self.num_chunks += 1
        self.end_token = start + num_tokens
        self.is_alone = self.is_alone and is_alone
        computed_s = [time.computed_s for time in one.times]
        self.alone_s = pass_through(self._free_at, 0.0, computed_s, one.hop_s) + one.hop_s
        for stage, seconds in enumerate(computed_s):
            self._computed_s[stage] += seconds
            self._waited_s[stage] = one.waited_s[stage] - self._waited_before[stage]
            self._ended_s[stage] = begun[stage] + seconds - self._began

    def stats(self, layers: Sequence[range]) -> list[StageStats]:
        """The part of each stage; ``layers``: those of each."""
        return [
            StageStats(
                one.start,
                one.stop,
                self.num_chunks,
                self._began_s[stage],
                self._ended_s[stage],
                self._computed_s[stage],
                self._waited_s[stage],
            )
            for stage, one in enumerate(layers)
        ]


class Pipeline:
    """What the first stage knows of the chunks under way.

    Each hop has a ring of ``num_slots`` buffers; chunk n uses slot n modulo that. A chunk begins only when
    the last stage is done with the one that used its slot before, so no stage needs to ask the next one.
    """

    def __init__(self, num_stages: int, num_slots: int) -> None:
        assert num_stages >= 2 and num_slots >= num_stages, (num_stages, num_slots)
        self.num_stages = num_stages
        self.num_slots = num_slots
        self._under_way: deque[ChunkPass] = deque()
        self._ended: deque[ChunkPass] = deque(maxlen=KEPT_PASSES)
        self._next = 0
        self._busy_since = 0.0
        self.waited_s = [0.0] * num_stages
        self.computed_s = [0.0] * num_stages
        self.bubble_s = [0.0] * num_stages
        """The part of ``waited_s`` in which other stages had work."""

    @property
    def latest(self) -> int:
        """Number of the latest chunk; -1 before the first."""
        return self._next - 1

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free for another chunk."""
        return len(self._under_way) < self.num_slots

    def slot(self, number: int) -> int:
        return number % self.num_slots

    def begin(self, num_rows: int, num_samples: int, now: float) -> int:
        """Begin a chunk; its number. ``now``: when the first stage began to compute it."""
        assert self.has_room, "a chunk was begun without a slot"
        number, self._next = self._next, self._next + 1
        if not self._under_way:
            self._busy_since = now
        self._under_way.append(ChunkPass(number, num_rows, num_samples, now, self._busy_since))
        return number

    def done(self, number: int, times: list[StageTime], now: float) -> ChunkPass:
        """The last stage is done with a chunk. ``times``: one for each stage.

        Raises ProtocolError when it is not the oldest one, or a stage is missing.
        """
        expected = self._under_way[0].number if self._under_way else None
        if number != expected or len(times) != self.num_stages:
            what = f"chunk {number} with the times of {len(times)} of {self.num_stages} stages"
            raise ProtocolError(f"the group's last stage ended {what}, chunk {expected} was next; restart it")
        if not all(0 <= part < math.inf for one in times for part in msgspec.structs.astuple(one)):
            raise ProtocolError(f"chunk {number} has impossible times: {times}; restart the group")
        found = self._under_way.popleft()
        found.ended, found.times = now, times
        self._ended.append(found)
        for stage, one in enumerate(times):
            self.waited_s[stage] += one.waited_s
            self.computed_s[stage] += one.computed_s
        found.waited_s = list(self.waited_s)
        for stage, seconds in enumerate(found.bubbles_s(found.busy_since)):
            self.bubble_s[stage] += seconds
        return found

    def check(self) -> None:
        assert len(self._under_way) <= self.num_slots
        numbers = [one.number for one in self._under_way]
        assert numbers == list(range(self._next - len(numbers), self._next)), numbers
        slots = [self.slot(number) for number in numbers]
        assert len(set(slots)) == len(slots), "two chunks share a slot"
        assert all(one.ended is not None for one in self._ended)

    def story(self, key: str) -> list[str]:
        """The latest chunks, oldest first: their rows, and how long each stage waited and computed."""
        lines = []
        for one in [*self._ended, *self._under_way]:
            if key in ("", str(one.number)):
                stages = " ".join(f"{t.waited_s:.3f}+{t.computed_s:.3f}" for t in one.times) or "under way"
                lines.append(
                    f"{one.began:.3f} chunk {one.number} rows={one.num_rows} waited+computed {stages}"
                )
        return lines

    def __repr__(self) -> str:
        return f"Pipeline({self.num_stages} stages, {len(self._under_way)} of {self.num_slots} under way)"


WorkT = TypeVar("WorkT")
DutyT = TypeVar("DutyT")


class StageQueue(Generic[WorkT, DutyT]):
    """What a stage may do next: its chunks in order, and duties that must not overtake a chunk.

    A duty (copy these blocks to the store, or from there) waits for the chunk that the group had begun last
    when it was ordered: until then that chunk may still write, or read, the same blocks.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, WorkT] = {}
        self._duties: list[tuple[int, DutyT]] = []
        self._next = 0

    @property
    def latest(self) -> int:
        """Number of the latest chunk that is computed; -1 before the first."""
        return self._next - 1

    def add_chunk(self, number: int, work: WorkT) -> None:
        """A chunk has arrived. Raises ProtocolError when it did before."""
        if number < self._next or number in self._chunks:
            raise ProtocolError(f"chunk {number} came twice, {self._next} is next; restart the group")
        self._chunks[number] = work

    def add_duty(self, after: int, duty: DutyT) -> None:
        """``duty`` may be done once chunk ``after`` is computed."""
        self._duties.append((after, duty))

    def take_duties(self) -> list[DutyT]:
        """Duties that may be done now, in the order in which they came."""
        ready = [duty for after, duty in self._duties if after < self._next]
        self._duties = [(after, duty) for after, duty in self._duties if after >= self._next]
        return ready

    def take_chunk(self) -> tuple[int, WorkT] | None:
        """The next chunk, if it has arrived. ``computed`` must follow."""
        if self._next not in self._chunks:
            return None
        return self._next, self._chunks.pop(self._next)

    def computed(self, number: int) -> None:
        assert number == self._next, (number, self._next)
        self._next += 1

    def check(self) -> None:
        assert all(number >= self._next for number in self._chunks)
