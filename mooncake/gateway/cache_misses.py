# SPDX-License-Identifier: Apache-2.0
"""Why prompts missed, as the gateway observes it: at their arrival, and when they were computed.

Owns the memory of recent prompts (``forensics/``), its metrics, and who may see what: numbers and texts are a
tenant's own, and where clients have no keys, a client sees the text of its own prompt only, because the
sibling may be another client's. Differences are classified when they are asked for, since most never are.
"""

from __future__ import annotations

import typing
from array import array
from collections import Counter
from collections.abc import Sequence

import msgspec
import prometheus_client
from fastapi import Request

from mooncake import clock, metrics
from mooncake.conductor.messages import Finished, Place
from mooncake.forensics.differences import Difference
from mooncake.forensics.findings import Finding, MissFindings, PromptParts, difference_of, divided
from mooncake.forensics.hygiene import AppliedRules
from mooncake.forensics.siblings import TOKEN_BYTES, Arrival, Departure, PromptContent, Scope, SiblingMemory
from mooncake.gateway.clients import Client
from mooncake.gateway.prompts import PromptKeys
from mooncake.gateway.retries import PlacedRequest
from mooncake.log import get_logger
from mooncake.prefix import BlockKey, block_hashes, root_hash, short_key

log = get_logger(__name__)

_FINDINGS_PART = 4
"""One part in so many of the memory is for findings, the rest for prompts."""

MAX_CLASSIFIED = 500
"""Most findings whose differences are classified for one query, the latest ones."""

_tokens = prometheus_client.Counter(
    "mooncake_gateway_prompt_parts_tokens",
    "Prompt tokens by tenant, model and what became of them: hit, new, or the cause of an avoidable miss.",
    ["tenant", "model", "part"],
    registry=metrics.registry,
)
_departures = prometheus_client.Counter(
    "mooncake_gateway_prompt_departures",
    "Prompts that differ from their nearest sibling before their end, by tenant and model.",
    ["tenant", "model"],
    registry=metrics.registry,
)
_gains = prometheus_client.Counter(
    "mooncake_gateway_hygiene_saved_tokens",
    "Cached tokens behind the place where a prompt would have left its sibling without hygiene rules.",
    ["tenant", "model"],
    registry=metrics.registry,
)
_memory = prometheus_client.Gauge(
    "mooncake_gateway_sibling_memory_bytes",
    "Memory of recent prompts and of the findings about them.",
    registry=metrics.registry,
)


class PromptDecoder(typing.Protocol):
    """The part of ``mooncake.inference.tokenizer.Tokenizer`` that is needed here."""

    def text_of(self, token_ids: Sequence[int]) -> str: ...


class PromptOrigin(typing.NamedTuple):
    """Whose prompt it is, and what rules did to its request."""

    tenant: str
    salt: str
    model: str
    hygiene: AppliedRules | None


def origin_of(http: Request, salt: str | None, model: str) -> PromptOrigin:
    client: Client | None = http.state.client
    tenant = client.entry.tenant_name if client is not None else ""
    return PromptOrigin(tenant, salt or "", model, getattr(http.state, "hygiene", None))


class DepartureReport(msgspec.Struct):
    """Where and how a prompt left its nearest sibling."""

    offset: int
    unit: str
    "``tokens``, or ``characters`` where the tokens are unknown."
    token: str
    "Text of the first token, or character, that differs."
    kind: str
    "Class of the difference (``forensics/differences.py``)."
    detail: str
    lost_tokens: int
    "Tokens behind the difference that the sibling has, too."
    sibling: str
    "Request id of the sibling."
    sibling_age_s: float
    is_same_session: bool
    ours: str | None
    "Text of this prompt there; None where texts are not shown."
    theirs: str | None
    "Text of the sibling there; None where it may be another client's."
    rule: str
    "Hygiene rule that would avoid the difference."


class MissReport(msgspec.Struct):
    """What became of one prompt's tokens, and why."""

    tokens: PromptParts | None
    "None until the prompt was computed."
    attainable_tokens: int
    hygiene: str
    "What hygiene rules changed in the request; empty for nothing."
    hygiene_gain_tokens: int
    "Cached tokens behind the place where it would have left its sibling without them, estimated."
    left_sibling: DepartureReport | None


class MissSums(msgspec.Struct):
    """The same in sum, for one tenant and model."""

    tenant: str
    model: str
    tokens: PromptParts
    hit_rate: float
    attainable_hit_rate: float


class ClassSums(msgspec.Struct):
    """The latest prompts that left their siblings in one way."""

    kind: str
    prompts: int
    lost_tokens: int
    rule: str = ""
    "Rule that would avoid most of them."


class MissesAnswer(msgspec.Struct):
    """The body of ``/v1/cache/misses``."""

    tenants: list[MissSums]
    differences: list[ClassSums]
    "Classes of differences among the remembered prompts, the most expensive first."
    prompts_remembered: int


class ObservedPrompt:
    """One prompt between its arrival and its end."""

    def __init__(self, misses: CacheMisses, arrival: Arrival, finding: Finding, num_tokens: int) -> None:
        self._misses, self._arrival, self._finding = misses, arrival, finding
        self._num_tokens = num_tokens

    def request_ended(self, request: PlacedRequest, finished: Finished, answer: Sequence[int]) -> None:
        """As ``ended``, as a listener of the request's end."""
        self.ended(request.num_cached_tokens, request.num_held_tokens, answer, finished.is_complete)

    def ended(self, num_cached: int, num_held: int, answer: Sequence[int], is_complete: bool) -> None:
        """Note the prompt's end. ``answer``: its tokens, as far as they are known."""
        self._misses.ended(
            self._arrival, self._finding, self._num_tokens, num_cached, num_held, answer, is_complete
        )


class CacheMisses:
    """Finds out why prompts missed; does nothing with ``max_bytes`` of 0."""

    def __init__(
        self,
        decoder: PromptDecoder | None,
        block_tokens: int,
        max_bytes: int,
        lifetime_s: float,
        shows_text: bool,
    ) -> None:
        for_findings = max_bytes // _FINDINGS_PART
        self._decoder = decoder
        self._block_tokens = block_tokens
        self._is_on = max_bytes > 0
        self._shows_text = shows_text
        self.siblings = SiblingMemory(max_bytes - for_findings, lifetime_s, block_tokens)
        self.findings = MissFindings(for_findings)
        self._counters: dict[tuple[str, str], list[prometheus_client.Counter]] = {}

    def tokens_arrived(self, place: Place, origin: PromptOrigin, tokens: array[int]) -> ObservedPrompt | None:
        """Note a prompt of known tokens."""
        if not self._is_on:
            return None
        content = PromptContent(tokens.tobytes(), place.keys)
        return self._arrived(place, origin, content)

    def prompt_arrived(self, place: Place, origin: PromptOrigin, prompt: PromptKeys) -> ObservedPrompt | None:
        """Note a prompt of another engine, whose tokens may be unknown or can't be shown as text."""
        if not self._is_on or not (prompt.tokens or prompt.text):
            return None
        if prompt.tokens and self._decoder is not None:
            return self.tokens_arrived(place, origin, array("I", prompt.tokens))
        keys: Sequence[BlockKey] = prompt.keys
        if not prompt.is_text:
            pieces = prompt.text[: len(prompt.text) // TOKEN_BYTES * TOKEN_BYTES]
            hashes = block_hashes(pieces, self._block_tokens, root_hash())
            keys = [short_key(one) for one in hashes]
        return self._arrived(place, origin, PromptContent(prompt.text, keys, is_text=True))

    def _arrived(self, place: Place, origin: PromptOrigin, content: PromptContent) -> ObservedPrompt:
        now = clock.monotonic()
        scope = Scope(origin.tenant, origin.salt, origin.model)
        arrival = self.siblings.arrive(place.request_id, scope, content, place.affinity, now)
        finding = self.findings.arrived(arrival, now)
        if origin.hygiene is not None:
            finding.rules = origin.hygiene
            sibling = self.findings.find(arrival.sibling) if arrival.sibling else None
            if sibling is not None and sibling.rules is not None:
                finding.left_without_rules = origin.hygiene.first_gain(sibling.rules)
        _memory.set(self.siblings.size_bytes + self.findings.size_bytes)
        return ObservedPrompt(self, arrival, finding, place.num_tokens)

    def ended(
        self,
        arrival: Arrival,
        finding: Finding,
        num_tokens: int,
        num_cached: int,
        num_held: int,
        answer: Sequence[int],
        is_complete: bool,
    ) -> None:
        """Note the end of a prompt; one that failed counts for nothing."""
        self.siblings.answered(arrival, array("I", answer).tobytes(), is_complete)
        if not is_complete:
            return
        parts = divided(arrival, num_tokens, num_cached, num_held, self._block_tokens)
        self.findings.computed(finding, parts)
        counters = self._counters_of(finding)
        for counter, num in zip(counters, msgspec.structs.astuple(parts), strict=True):
            if num:
                counter.inc(num)
        gain = finding.gain_tokens(self._block_tokens)
        if gain:
            _gains.labels(*self.findings.key_of(finding)).inc(gain)
        if finding.departure is not None:
            _departures.labels(*self.findings.key_of(finding)).inc()

    def _counters_of(self, finding: Finding) -> list[prometheus_client.Counter]:
        """The counters of a tenant's parts, which are looked up once: there are few tenants and models."""
        key = self.findings.key_of(finding)
        found = self._counters.get(key)
        if found is None:
            found = self._counters[key] = [
                _tokens.labels(*key, part) for part in PromptParts.__struct_fields__
            ]
        return found

    def report(self, request_id: str, may_see_sibling: bool) -> MissReport | None:
        """What is known of a prompt; ``may_see_sibling``: whether the asker may see its sibling's text."""
        finding = self.findings.find(request_id)
        if finding is None:
            return None
        parts = finding.parts
        departure, found = finding.departure, difference_of(finding, self._text_of)
        left = None
        if departure is not None and found is not None:
            left = self._departure_report(departure, found, parts, may_see_sibling)
        return MissReport(
            parts,
            parts.attainable if parts is not None else 0,
            finding.rules.header() if finding.rules is not None else "",
            finding.gain_tokens(self._block_tokens),
            left,
        )

    def _departure_report(
        self, departure: Departure, found: Difference, parts: PromptParts | None, may_see_sibling: bool
    ) -> DepartureReport:
        token = self._text_of(
            departure.ours[: departure.unit_bytes if not departure.is_text else 4], departure.is_text
        )
        return DepartureReport(
            offset=departure.offset_chars if departure.is_text else departure.offset,
            unit="characters" if departure.is_text else "tokens",
            token=(token[:1] if departure.is_text else token) if self._shows_text else "",
            kind=found.kind,
            detail=found.detail,
            lost_tokens=parts.prompt_changed if parts is not None else 0,
            sibling=departure.sibling if may_see_sibling else "",
            sibling_age_s=round(departure.sibling_age_s, 3),
            is_same_session=departure.is_same_session,
            ours=found.ours if self._shows_text else None,
            theirs=found.theirs if self._shows_text and may_see_sibling else None,
            rule=found.rule if self._shows_text else found.rule.partition(":")[0],
        )

    def sums(self, tenant: str | None) -> MissesAnswer:
        """Sums of a tenant, or of all. Classifies differences, which takes a while: call it in a thread."""
        rows = [
            MissSums(
                name,
                model,
                parts,
                round(parts.hit / max(1, parts.total), 6),
                round(parts.attainable / max(1, parts.total), 6),
            )
            for (name, model), parts in sorted(self.findings.sums.items())
            if tenant is None or name == tenant
        ]
        remembered = self.findings.of_tenant(tenant)
        by_class: dict[str, ClassSums] = {}
        rules: dict[str, Counter[str]] = {}
        left = [one for one in remembered if one.departure is not None and one.parts is not None]
        for finding in left[-MAX_CLASSIFIED:]:
            found = difference_of(finding, self._text_of)
            assert found is not None and finding.parts is not None
            row = by_class.setdefault(found.kind, ClassSums(found.kind, 0, 0))
            row.prompts += 1
            row.lost_tokens += finding.parts.prompt_changed
            rules.setdefault(found.kind, Counter())[found.rule] += 1
        for kind, row in by_class.items():
            [(row.rule, _)] = rules[kind].most_common(1)
            if not self._shows_text:
                row.rule = row.rule.partition(":")[0]
        differences = sorted(by_class.values(), key=lambda row: (-row.lost_tokens, row.kind))
        return MissesAnswer(rows, differences, len(remembered))

    def _text_of(self, data: bytes, is_text: bool) -> str:
        if is_text:
            return data.decode(errors="ignore")
        return "" if self._decoder is None else self._decoder.text_of(array("I", data).tolist())
