# SPDX-License-Identifier: Apache-2.0
"""What the conductor remembers of a request: its placement, its admission, and the reasons of the choice.

Connects admission and explanations to the conductor's events, and owns nothing but this connection, the form
of a placement, and the instants at which placements expire (``DueTimes``; it holds those of probes as well).
With admission "none" and no memory for explanations it costs one comparison, as the simulator needs.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from mooncake.conductor.admission import AdmissionController, AdmissionRequest, AdmissionResult, PoolCapacity
from mooncake.conductor.explanation import CandidateSet, Explainer, Explanation, PromptBlocks
from mooncake.conductor.health import Health, Instance
from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.conductor.messages import (
    AdmissionStatus,
    Decision,
    Finished,
    Place,
    Placed,
    Prediction,
    Prefilled,
    Refuse,
)
from mooncake.conductor.policies import PRIORITY_S, InstanceChoice
from mooncake.conductor.prediction import MOST_TOKENS
from mooncake.conductor.prefix_index import PrefixIndex, PrefixMatch
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument, Refusal
from mooncake.kvlayout import KEY_PREFIX
from mooncake.types import InstanceId

MeasuredT = TypeVar("MeasuredT", Prefilled, Finished)

_MAX_OTHERS = 8
_MOST_S = 86_400.0
"""Limit of durations that another process predicts."""
_LONGEST_S = 1e9
"""Limit of those that a request asks for, or that were measured."""
_MOST_LIMIT = (1 << 63) - 1
"""Limit of an answer's length as clients state it: one that no answer reaches is none."""
_MOST_PRIORITY = 1_000_000
_LAST_TURN = (_MOST_PRIORITY + 1) * PRIORITY_S

_NUMBERS: tuple[tuple[str, float, float], ...] = (
    ("num_tokens", 0, MOST_TOKENS),
    ("lifetime_s", 0, _LONGEST_S),
    ("slo_ttft_s", 0, _LONGEST_S),
    ("slo_tbt_s", 0, _LONGEST_S),
    ("priority", -_MOST_PRIORITY, _MOST_PRIORITY),
    ("max_output_tokens", 0, _MOST_LIMIT),
)
_MEASURED: dict[type[Prefilled | Finished], tuple[tuple[str, float], ...]] = {
    Prefilled: (
        ("queued_s", _LONGEST_S),
        ("computed_s", _LONGEST_S),
        ("num_computed_tokens", MOST_TOKENS),
        ("num_cached_tokens", MOST_TOKENS),
        ("loaded_s", _LONGEST_S),
        ("num_loaded_tokens", MOST_TOKENS),
    ),
    Finished: (("num_output_tokens", MOST_TOKENS), ("ttft_s", _LONGEST_S), ("tbt_s", _LONGEST_S)),
}


def invalid_number(place: Place) -> InvalidArgument | None:
    """The first of a request's numbers that the accounts can't take, as an error; None if they take all."""
    for name, least, most in _NUMBERS:
        if not least <= (value := getattr(place, name)) <= most:  # NaN is in no range
            return InvalidArgument(name, value, f"{least:.15g} to {most:.15g}")
    return None


def measured(event: MeasuredT) -> MeasuredT:
    """A report in which what can't be a measurement is 0, "not measured": no number, or one that is negative
    or too large. The report itself counts, or the request would stay in the accounts."""
    wrong = {name: 0 for name, most in _MEASURED[type(event)] if not 0 <= getattr(event, name) <= most}
    return msgspec.structs.replace(event, **wrong) if wrong else event


def bounded(event: Placed) -> Placed:
    """A placement as another process reports it, with all numbers within what the accounts can take: what is
    no number, or too large a one, would fail halfway and stay in some of them."""
    place, decision, prediction = event.place, event.decision, event.decision.prediction
    if prediction is not None:
        prediction = Prediction(
            _duration(prediction.queue_s),
            _duration(prediction.fetch_s),
            _duration(prediction.prefill_s),
            _duration(prediction.ttft_s),
            _duration(prediction.tbt_s),
            _tokens(prediction.output_tokens),
        )
    place = msgspec.structs.replace(
        place,
        num_tokens=_tokens(place.num_tokens),
        lifetime_s=_duration(place.lifetime_s),
        slo_ttft_s=_duration(place.slo_ttft_s),
        slo_tbt_s=_duration(place.slo_tbt_s),
        priority=min(max(place.priority, -_MOST_PRIORITY), _MOST_PRIORITY),
        max_output_tokens=_tokens(place.max_output_tokens),
    )
    turn = _between(decision.turn, -_LAST_TURN, _LAST_TURN)
    num_cached = _tokens(decision.num_cached_tokens)
    decision = msgspec.structs.replace(
        decision, turn=turn, num_cached_tokens=num_cached, prediction=prediction
    )
    return msgspec.structs.replace(event, place=place, decision=decision, age_s=_duration(event.age_s))


def _duration(seconds: float) -> float:
    """Up to a day."""
    return _between(seconds, 0.0, _MOST_S)


def _between(seconds: float, least: float, most: float) -> float:
    """0 for what is no number."""
    return min(max(seconds, least), most) if seconds == seconds else 0.0


def _tokens(number: int) -> int:
    return min(max(number, 0), MOST_TOKENS)


Kind = Literal["expiry", "probe"]

_FEW = 1024
"""Entries that are never worth a search for those that no longer count."""


class DueTimes:
    """The instants of all kinds, by key.

    One that is set again or cancelled leaves its entry in the heap, where it no longer counts; when most
    entries do not, they are dropped: that of a request that has ended would stay for an hour.
    """

    def __init__(self) -> None:
        self._due: dict[tuple[Kind, str], float] = {}
        self._heap: list[tuple[float, Kind, str]] = []

    def __len__(self) -> int:
        """Number of entries, including those that no longer count."""
        return len(self._heap)

    @property
    def next_at(self) -> float | None:
        """The instant of the next entry, which may no longer count; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def at(self, kind: Kind, key: str) -> float | None:
        """The instant that is set for a key; None if there is none."""
        return self._due.get((kind, key))

    def keys(self, kind: Kind) -> list[str]:
        """The keys of a kind."""
        return [key for one, key in self._due if one == kind]

    def set(self, kind: Kind, key: str, at: float) -> None:
        """Set the instant of a key, in the place of an earlier one."""
        self._due[kind, key] = at
        heapq.heappush(self._heap, (at, kind, key))
        if len(self._heap) >= _FEW + 4 * len(self._due):
            self._heap = [(at, *key) for key, at in self._due.items()]
            heapq.heapify(self._heap)

    def cancel(self, kind: Kind, key: str) -> None:
        self._due.pop((kind, key), None)

    def take_due(self, now: float) -> Iterator[tuple[Kind, str]]:
        """Yield what is due, in order, each no longer set then; more may be set meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            at, kind, key = heapq.heappop(self._heap)
            if self._due.get((kind, key)) == at:
                del self._due[kind, key]
                yield kind, key

    def check(self) -> None:
        entries = dict.fromkeys(self._heap)
        assert all((at, *key) in entries for key, at in self._due.items())


class ActivePlacement(msgspec.Struct):
    """A request that was placed and whose end was not reported yet."""

    prefill: InstanceId | None
    decode: InstanceId
    placed_at: float
    expires_at: float
    place: Place
    prediction: Prediction
    is_refused: bool = False
    "It was refused when its prompt was computed. Its account stays until its end is reported."


class ObservedPlacement(NamedTuple):
    """What was to choose from when a request was placed, and who held its prompt."""

    candidate_set: CandidateSet
    prompt: PromptBlocks


class RequestLifecycle:
    """Admission by the rule of the settings, and the memory of decisions."""

    def __init__(self, settings: SchedulingSettings) -> None:
        self.admission = AdmissionController(
            settings.admission, audit_share=settings.audit_share, turn_share=settings.turn_share
        )
        self.explainer = Explainer(
            settings.explained_requests, settings.explained_size_bytes, settings.block_tokens
        )
        self._settings = settings

    @property
    def is_admitting_all(self) -> bool:
        return self.admission.rule == "none"

    def decide(
        self,
        event: Place,
        prediction: Prediction,
        busy_s: float,
        prompt: KeyedPrompt,
        pools: PoolCapacity,
        is_measured: tuple[bool, bool],
        now: float,
    ) -> AdmissionResult | None:
        """Whether a request is admitted; None for one that was already, and only needs another instance.

        ``is_measured``: whether predictions of prefill, and of decode, rest on measurements. No request is
        rejected because of a guess.
        """
        if not event.needs_prefill or self.admission.knows(event.request_id):
            return None
        applicant = self._applicant(event, prediction, busy_s, is_measured)
        return self.admission.decide(applicant, pools, now, prompt)

    def placed_elsewhere(
        self,
        event: Place,
        prediction: Prediction,
        busy_s: float,
        pools: PoolCapacity,
        is_measured: tuple[bool, bool],
        now: float,
    ) -> None:
        """Record that another conductor has admitted and placed a request; arguments as of ``decide``."""
        if event.needs_prefill and not self.admission.knows(event.request_id):
            applicant = self._applicant(event, prediction, busy_s, is_measured)
            self.admission.placed_elsewhere(applicant, pools, now)

    def _applicant(
        self, event: Place, prediction: Prediction, busy_s: float, is_measured: tuple[bool, bool]
    ) -> AdmissionRequest:
        return AdmissionRequest(
            event.request_id,
            event.num_tokens,
            prediction.queue_s,
            busy_s,
            prediction.ttft_s,
            prediction.tbt_s,
            prediction.output_tokens,
            is_measured[0] * (event.slo_ttft_s or self._settings.slo_ttft_s),
            is_measured[1] * (event.slo_tbt_s or self._settings.slo_tbt_s),
            event.priority,
        )

    def placed(
        self,
        event: Place,
        outcome: Decision | Refuse,
        observed: ObservedPlacement | None,
        verdict: AdmissionResult | None,
        now: float,
    ) -> None:
        """Record that a request was placed or refused; see ``Explainer.placed``. ``observed`` None: it won't
        be explained."""
        if observed is not None:
            self.explainer.placed(event, outcome, *observed, self.admission.rule, verdict, now)

    def prefilled(self, event: Prefilled, pools: Callable[[], PoolCapacity], now: float) -> Refuse | None:
        """Record that a prompt is computed; the paper's rules may still reject its request."""
        self.explainer.prefilled(event, now)
        if not self.admission.knows(event.request_id):
            return None
        verdict = self.admission.prefilled(event.request_id, pools(), now, event.has_begun)
        if verdict.is_admitted:
            return None
        refuse = refusal_of(event.request_id, verdict, None)
        self.explainer.rejected_late(refuse, self.admission.rule, verdict, now)
        return refuse

    def finished(self, event: Finished, now: float) -> None:
        self.explainer.finished(event, now)
        self.admission.finished(
            event.request_id, event.ttft_s, event.tbt_s, event.is_complete, now, event.num_output_tokens
        )

    def explain(
        self, request_id: str, index: PrefixIndex, identity_of: Callable[[InstanceId], str], now: float
    ) -> Explanation | None:
        return self.explainer.explain(request_id, index, identity_of, now)

    def status(self) -> AdmissionStatus:
        audit, rejected, settings = self.admission.audit, dict(self.admission.num_rejected), self._settings
        return AdmissionStatus(
            self.admission.rule,
            rejected,
            audit.num_admitted,
            audit.num_ended,
            audit.num_in_slo,
            settings.scheduling,
            settings.slo_ttft_s,
            settings.slo_tbt_s,
            settings.audit_share,
            settings.turn_share,
        )

    def check(self) -> None:
        self.admission.check()
        self.explainer.check()


def refusal_of(request_id: str, verdict: AdmissionResult, prediction: Prediction | None) -> Refuse:
    """The refusal that a rejected request gets."""
    return Refuse(request_id, Refusal(verdict.code, verdict.reason), verdict.retry_after_s, prediction)


def prompt_blocks_of(
    event: Place, match: PrefixMatch, index: PrefixIndex, computing: InstanceId, now: float
) -> PromptBlocks:
    """The blocks of a prompt and their holders now; ``computing``: the instance it was placed on, or ""."""
    num_blocks = len(match.keys)
    prompt = PromptBlocks(
        array("Q", match.keys.tobytes()),
        array("Q", event.bare_keys[:num_blocks]),
        bytes(num_blocks),
        "",
        computing,
        now,
    )
    if not num_blocks:
        return prompt
    slot = index.slots.get(computing)
    if slot is not None:
        prompt.tiers = match.tiers_of(slot)
    if match.num_held:
        leading = match.leading.copy()
        if slot is not None:
            leading[slot] = 0
        best = int(leading.argmax())
        if leading[best]:
            prompt.others[index.instance_at(best)] = int(leading[best])
    for scope in index.scopes_of(event.keys[0], KEY_PREFIX):
        prompt.pools[scope] = index.match(event.keys[:num_blocks], scope).num_held
    return prompt


def passed_over(
    exclude: Sequence[InstanceId],
    full: Sequence[InstanceId],
    limit: int,
    instances: Iterable[Instance],
) -> Iterator[tuple[InstanceId, str]]:
    """Instances that could not be chosen, and why: the request excludes them, they are ``full`` with
    ``limit`` requests, or they are those of ``instances`` that are not ready."""
    for name in dict.fromkeys(exclude):
        yield name, "excluded: it failed this request before, or a proxy does not allow it"
    for name in full:
        if name not in exclude:
            yield name, f"full: it has {limit} requests, as many as it may"
    for one in instances:
        if one.id not in exclude and not (one.may_be_chosen and one.health is Health.READY):
            yield one.id, f"{one.state}: {one.detail}"


def candidates_of(
    names: Sequence[InstanceId], choice: InstanceChoice | None, others: Iterable[tuple[InstanceId, str]]
) -> CandidateSet:
    """The instances that came closest, and some that were not considered, with the reason."""
    not_weighed = list(islice(others, _MAX_OTHERS))
    if choice is None:
        return CandidateSet([], np.empty((5, 0)), not_weighed)
    seen = choice.considered
    if seen is None:
        alone = np.array([[0.0], [choice.queue_s], [choice.fetch_s], [choice.prefill_s], [0.0]])
        return CandidateSet([names[choice.slot]], alone, not_weighed)
    columns = (seen.score_s, seen.queue_s, seen.fetch_s, seen.prefill_s, seen.cached_tokens)
    return CandidateSet([names[slot] for slot in seen.slots.tolist()], columns, not_weighed)
