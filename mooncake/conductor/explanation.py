# SPDX-License-Identifier: Apache-2.0
"""Why a request was placed where it was, how it ended, and whether each block of its prompt was a hit.

It owns a record per request (candidates, choice, prediction, measurements), bounded by number and by bytes
for operators' queries, and decides nothing. The verdicts on blocks are computed on demand, because most
requests are never queried. Causes of misses are tested in order from certain to likely, and the worker's
measurements take precedence over the index. Runs of equal verdicts are one row. The verdicts:

``hit``            where, on which tier
``elsewhere``      another instance has it, and it was not fetched from there
``being_written``  another request was computing just this block
``evicted``        (or ``cleared``, ``restarted``, ``lost``): it was removed; when, and by which rule
``removed``        it was removed for another reason, which is given
``other_digest``   the pool has these tokens, computed by other weights or in another layout
``other_salt``     the same tokens were requested under another salt
``never_stored``   no event ever reported it
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.conductor.admission import AdmissionResult
from mooncake.conductor.messages import Decision, Finished, Place, Prediction, Prefilled, Refuse
from mooncake.conductor.prediction import Floats
from mooncake.conductor.prefix_index import PrefixIndex
from mooncake.http.worker_stats import StageStats
from mooncake.kvlayout import KEY_PREFIX
from mooncake.types import InstanceId, Tier

# --- why blocks missed


_TIERS = list(Tier)
_REMOVAL_VERDICTS = frozenset({"evicted", "cleared", "restarted", "lost"})


class BlockVerdict(msgspec.Struct, frozen=True):
    """The verdict on ``num`` blocks from ``first`` on."""

    first: int
    num: int
    verdict: str
    where: str = ""
    "Instance and tier, salt or digest."
    rule: str = ""
    "Rule by which it was removed."
    seconds_before: float = 0.0
    "Seconds from its removal to the request."


@dataclass(slots=True)
class PromptBlocks:
    """The blocks of a prompt, with what is known of each."""

    keys: array[int]
    bare_keys: array[int]
    "Keys without salt; empty if there was none."
    tiers: bytes
    "By block: the tiers on which ``instance`` was believed to have it, as bits."
    scope: str
    instance: InstanceId
    "Instance that computes the prompt."
    at: float
    others: dict[InstanceId, int] = field(default_factory=dict)
    "Number of leading blocks that other instances had."
    pools: dict[str, int] = field(default_factory=dict)
    "Number of leading blocks that the pool had, by scope."
    written_at: float | None = None
    "When its blocks were computed and stored."
    is_measured: bool = False
    num_cached: int = 0
    "Leading blocks that were found on the instance."
    num_loaded: int = 0
    "Blocks after those that came from the pool or another instance."


def block_verdicts(
    prompt: PromptBlocks,
    in_flight: Sequence[PromptBlocks],
    index: PrefixIndex,
    identity: str,
) -> list[BlockVerdict]:
    """The verdicts on all blocks.

    Args:
        in_flight: prompts that were being computed when this one arrived.
        identity: the digest under which the instance's blocks lie in the pool; empty when it has none.
    """
    num_hit, found = _hits(prompt)
    if num_hit < len(prompt.keys):
        found += _Causes(prompt, in_flight, index, identity).of(num_hit)
    return _joined(found)


def _hits(prompt: PromptBlocks) -> tuple[int, list[BlockVerdict]]:
    """The number of leading blocks that were found, and where."""
    tiers, num_blocks = np.frombuffer(prompt.tiers, np.uint8), len(prompt.keys)
    if prompt.is_measured:
        num_hit = min(num_blocks, prompt.num_cached + prompt.num_loaded)
        num_local = min(num_hit, prompt.num_cached)
    else:
        missing = (tiers == 0).nonzero()[0]
        num_hit = num_local = int(missing[0]) if len(missing) else num_blocks
    found = [
        BlockVerdict(first, num, "hit", _place(prompt, first)) for first, num in _runs([tiers], 0, num_local)
    ]
    if num_local < num_hit:
        found.append(BlockVerdict(num_local, num_hit - num_local, "hit", "pool"))
    return num_hit, found


def _runs(columns: Sequence[npt.NDArray[Any]], first: int, end: int) -> list[tuple[int, int]]:
    """The blocks from ``first`` to ``end`` in runs in which no column changes: their first ones and lengths.

    Whatever holds for a block of a prompt mostly holds for its neighbours, of which there are thousands.
    """
    if first == end:
        return []
    is_first = np.zeros(end - first, np.bool_)
    is_first[0] = True
    for column in columns:
        part = column[first:end]
        is_first[1:] |= part[1:] != part[:-1]
    starts = is_first.nonzero()[0]
    return list(zip((starts + first).tolist(), np.diff(starts, append=end - first).tolist(), strict=True))


def _place(prompt: PromptBlocks, number: int) -> str:
    tiers = prompt.tiers[number]
    tier = next((tier for bit, tier in enumerate(_TIERS) if tiers >> bit & 1), Tier.DEVICE)
    return f"{prompt.instance} {tier}"


class _Causes:
    """Finds out why blocks of one prompt were missing."""

    def __init__(
        self, prompt: PromptBlocks, in_flight: Sequence[PromptBlocks], index: PrefixIndex, identity: str
    ) -> None:
        self._prompt = prompt
        self._pool = KEY_PREFIX + identity if identity else ""
        keys, log = np.frombuffer(prompt.keys, np.uint64), index.removal_log
        # By block: the last of the prompts in flight that begin with all blocks up to it; -1 for none.
        self._written = np.full(len(keys), -1)
        self._writers = in_flight
        for number, other in enumerate(in_flight):
            self._written[: _num_common(prompt, other)] = number
        self._removals = [log.removals(keys, prompt.scope)]
        if self._pool:
            self._removals.append(log.removals(keys, self._pool))
        bare_keys = np.frombuffer(prompt.bare_keys or prompt.keys, np.uint64)
        self._has_other_salt = log.has_other_salt(keys, bare_keys)

    def of(self, first: int) -> list[BlockVerdict]:
        """The verdicts on the blocks from ``first`` on."""
        num_blocks = len(self._prompt.keys)
        ends = sorted({*self._prompt.others.values(), *self._prompt.pools.values()})
        holders = np.searchsorted(ends, np.arange(num_blocks), side="right")
        removals = (one.numbers for one in self._removals)
        columns = [self._written, holders, *removals, self._has_other_salt]
        return [self._cause(start, num) for start, num in _runs(columns, first, num_blocks)]

    def _cause(self, number: int, num: int) -> BlockVerdict:
        """The verdict on ``num`` blocks from this one on, for which the same holds."""
        prompt = self._prompt
        if (writer := int(self._written[number])) >= 0:
            return BlockVerdict(number, num, "being_written", self._writers[writer].instance)
        holders = self._holders(number)
        if holders:
            return BlockVerdict(number, num, "elsewhere", ", ".join(holders))
        gone = [one.of(number) for one in self._removals]
        before = [removal for removal in gone if removal is not None and removal.at <= prompt.at]
        if before:
            last = max(before, key=lambda removal: removal.at)
            verdict, rule = _named(last.reason)
            where = last.instance if last.tier is None else f"{last.instance} {last.tier}"
            return BlockVerdict(number, num, verdict, where, rule, prompt.at - last.at)
        digests = [scope.removeprefix(KEY_PREFIX) for scope, end in prompt.pools.items() if number < end]
        if self._pool and digests:
            return BlockVerdict(number, num, "other_digest", ", ".join(digests))
        if self._has_other_salt[number]:
            return BlockVerdict(number, num, "other_salt")
        return BlockVerdict(number, num, "never_stored")

    def _holders(self, number: int) -> list[str]:
        """Other holders of the block, including the pool."""
        found = [name for name, num in self._prompt.others.items() if number < num]
        return found + ["pool"] * (number < self._prompt.pools.get(self._pool, 0))


def _num_common(one: PromptBlocks, other: PromptBlocks) -> int:
    """Number of leading blocks that both prompts have: a key names all blocks up to its own."""
    num = min(len(one.keys), len(other.keys))
    if one.scope != other.scope or not num or one.keys[0] != other.keys[0]:
        return 0
    keys, others = (np.frombuffer(prompt.keys, np.uint64, num) for prompt in (one, other))
    return int(np.count_nonzero(keys == others))


def _named(reason: str) -> tuple[str, str]:
    """The verdict and rule of a removal's reason (``evicted: lru``); an unknown reason is a rule."""
    verdict, _, rule = reason.partition(": ")
    return (verdict, rule) if verdict in _REMOVAL_VERDICTS else ("removed", reason)


def _joined(found: Sequence[BlockVerdict]) -> list[BlockVerdict]:
    """Adjacent blocks with equal verdicts as one row."""
    rows: list[BlockVerdict] = []
    for one in found:
        last = rows[-1] if rows else None
        if last is not None and (last.verdict, last.where, last.rule) == (one.verdict, one.where, one.rule):
            rows[-1] = msgspec.structs.replace(last, num=last.num + one.num)
        else:
            rows.append(one)
    return rows


# --- why a request was placed where it was


_RECORD_BYTES = 3_000
"""Upper estimate of a record's size without its blocks and stages."""

_STAGE_BYTES = 300


class Explain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request what is known of a request. Answered with ``Explained``."""

    request_id: str


class CandidateInstance(msgspec.Struct, frozen=True):
    """An instance that was considered, or the reason why it was not."""

    instance: InstanceId
    score_s: float = 0.0
    "Score that the policy compared; lower is better."
    queue_s: float = 0.0
    fetch_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0
    why_not: str = ""


@dataclass(slots=True)
class CandidateSet:
    """Candidates in the policy's columns, converted only on demand: most requests are never queried."""

    names: list[InstanceId]
    "Best first."
    columns: Iterable[Floats]
    "Score, queue, fetch and prefill in seconds, and cached tokens."
    not_weighed: list[tuple[InstanceId, str]]
    "Instances that were not considered, with the reason."

    def candidates(self) -> list[CandidateInstance]:
        rows = zip(self.names, *(column.tolist() for column in self.columns), strict=True)
        found = [
            CandidateInstance(name, score_s, queue_s, fetch_s, prefill_s, int(cached_tokens))
            for name, score_s, queue_s, fetch_s, prefill_s, cached_tokens in rows
        ]
        return found + [CandidateInstance(one, why_not=why_not) for one, why_not in self.not_weighed]


class AdmissionOutcome(msgspec.Struct, frozen=True):
    """The result of admission, with the loads it saw as parts of what the SLOs allow."""

    rule: str
    is_admitted: bool
    code: str = ""
    reason: str = ""
    retry_after_s: float = 0.0
    is_audited: bool = False
    prefill_load: float = 0.0
    decode_load: float = 0.0


class PredictedTimes(msgspec.Struct, frozen=True):
    """A ``Prediction`` with field names."""

    queue_s: float
    fetch_s: float
    prefill_s: float
    ttft_s: float
    tbt_s: float
    output_tokens: int


class ActualTimes(msgspec.Struct):
    """Measured times; 0: not measured yet."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    output_tokens: int = 0
    is_complete: bool = False
    stages: list[StageStats] = []
    "The part of each stage, if a prefill group computed the prompt."
    e2e_s: float = 0.0
    "Time from the placement to the end; known of answers that came whole, too."


class Explanation(msgspec.Struct):
    """Everything known of one request's placement."""

    request_id: str
    seconds_ago: float
    num_tokens: int
    state: str
    "``refused``, ``prefill``, ``decode``, ``finished`` or ``failed``."
    policy: str
    reason: str
    prefill: InstanceId | None
    decode: InstanceId
    degraded: str
    num_placements: int
    candidates: list[CandidateInstance]
    prediction: PredictedTimes | None
    actual: ActualTimes
    admission: AdmissionOutcome | None
    blocks: list[BlockVerdict]


class Explained(msgspec.Struct, array_like=True, tag=True):
    """``explanation`` is None when nothing is known: the request never arrived, or was forgotten."""

    explanation: Explanation | None


@dataclass(slots=True)
class _Record:
    place: Place
    prompt: PromptBlocks
    candidate_set: CandidateSet
    placed_at: float
    outcome: Decision | Refuse
    admission: AdmissionOutcome | None
    num_placements: int = 1
    actual: ActualTimes = field(default_factory=ActualTimes)
    finished_at: float | None = None

    @property
    def size_bytes(self) -> int:
        num_stages = len(self.actual.stages)
        return _RECORD_BYTES + 17 * len(self.prompt.keys) + _STAGE_BYTES * num_stages


class Explainer:
    """Remembers the latest requests, up to ``max_requests`` in up to ``max_bytes``."""

    def __init__(self, max_requests: int, max_bytes: int, block_tokens: int) -> None:
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._block_tokens = block_tokens
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_on(self) -> bool:
        return self._max_requests > 0

    def placed(
        self,
        place: Place,
        outcome: Decision | Refuse,
        candidate_set: CandidateSet,
        prompt: PromptBlocks,
        rule: str,
        verdict: AdmissionResult | None,
        now: float,
    ) -> None:
        """Record a placement or refusal; ``prompt``: its blocks, as the index knew them then."""
        if not self.is_on:
            return
        record = _Record(place, prompt, candidate_set, now, outcome, _admitted(rule, verdict))
        before = self._records.pop(place.request_id, None)
        if before is not None:
            self._size_bytes -= before.size_bytes
            record.num_placements += before.num_placements
            record.admission = record.admission or before.admission
        # The prompt itself is not needed again, and its lists of blocks are the bulk of it.
        record.place = msgspec.structs.replace(place, keys=[], bare_keys=[])
        self._records[place.request_id] = record
        self._size_bytes += record.size_bytes
        self._forget_oldest()

    def prefilled(self, event: Prefilled, now: float) -> None:
        record = self._records.get(event.request_id)
        if record is None or record.prompt.written_at is not None:
            return
        record.prompt.written_at = now
        self._size_bytes -= record.size_bytes
        actual, prompt = record.actual, record.prompt
        actual.queue_s, actual.prefill_s, actual.load_s = event.queued_s, event.computed_s, event.loaded_s
        actual.cached_tokens, actual.loaded_tokens = event.num_cached_tokens, event.num_loaded_tokens
        prompt.num_cached = event.num_cached_tokens // self._block_tokens
        prompt.num_loaded = event.num_loaded_tokens // self._block_tokens
        prompt.is_measured = event.num_computed_tokens > 0
        actual.stages = event.stages
        self._size_bytes += record.size_bytes
        self._forget_oldest()

    def finished(self, event: Finished, now: float) -> None:
        record = self._records.get(event.request_id)
        if record is None:
            return
        record.finished_at = now
        record.actual.e2e_s = now - record.placed_at
        record.prompt.written_at = record.prompt.written_at or now
        record.actual.ttft_s, record.actual.tbt_s = event.ttft_s, event.tbt_s
        record.actual.output_tokens, record.actual.is_complete = event.num_output_tokens, event.is_complete

    def rejected_late(self, refuse: Refuse, rule: str, verdict: AdmissionResult, now: float) -> None:
        """Record a rejection after the prompt was computed in vain."""
        record = self._records.get(refuse.request_id)
        if record is not None:
            record.outcome, record.admission = refuse, _admitted(rule, verdict)
            record.prompt.written_at = record.prompt.written_at or now

    def explain(
        self, request_id: str, index: PrefixIndex, identity_of: Callable[[InstanceId], str], now: float
    ) -> Explanation | None:
        """Everything about a request; None when it is not remembered.

        ``identity_of`` an instance: the digest under which its blocks lie in the pool, or "".
        """
        record = self._records.get(request_id)
        if record is None:
            return None
        outcome, is_refused = record.outcome, isinstance(record.outcome, Refuse)
        in_flight = [other.prompt for other in self._others_in_flight(record)]
        return Explanation(
            request_id=request_id,
            seconds_ago=now - record.placed_at,
            num_tokens=record.place.num_tokens,
            state=_state(record),
            policy=outcome.policy if isinstance(outcome, Decision) else "",
            reason=str(outcome.refusal) if isinstance(outcome, Refuse) else outcome.reason,
            prefill=None if isinstance(outcome, Refuse) else outcome.prefill,
            decode="" if isinstance(outcome, Refuse) else outcome.decode,
            degraded="" if isinstance(outcome, Refuse) else outcome.degraded,
            num_placements=record.num_placements,
            candidates=record.candidate_set.candidates(),
            prediction=_predicted(outcome.prediction),
            actual=record.actual,
            admission=record.admission,
            blocks=[]
            if is_refused
            else block_verdicts(record.prompt, in_flight, index, identity_of(record.prompt.instance)),
        )

    def check(self) -> None:
        assert self._size_bytes == sum(record.size_bytes for record in self._records.values())
        assert len(self._records) <= self._max_requests

    def _forget_oldest(self) -> None:
        while len(self._records) > self._max_requests or self._size_bytes > self._max_bytes:
            self._size_bytes -= self._records.popitem(last=False)[1].size_bytes

    def _others_in_flight(self, record: _Record) -> Iterator[_Record]:
        """Requests whose prompts were being computed when this one was placed."""
        at = record.placed_at
        for other in self._records.values():
            is_placed = isinstance(other.outcome, Decision) and other.placed_at <= at
            written_at = other.prompt.written_at
            if other is not record and is_placed and (written_at is None or written_at > at):
                yield other


def _predicted(prediction: Prediction | None) -> PredictedTimes | None:
    return None if prediction is None else PredictedTimes(**msgspec.structs.asdict(prediction))


def _admitted(rule: str, verdict: AdmissionResult | None) -> AdmissionOutcome | None:
    if verdict is None:
        return None
    return AdmissionOutcome(
        rule,
        verdict.is_admitted,
        verdict.code,
        verdict.reason,
        verdict.retry_after_s,
        verdict.is_audited,
        verdict.prefill_load,
        verdict.decode_load,
    )


def _state(record: _Record) -> str:
    if isinstance(record.outcome, Refuse):
        return "refused"
    if record.finished_at is not None:
        return "finished" if record.actual.is_complete else "failed"
    return "prefill" if record.prompt.written_at is None else "decode"
