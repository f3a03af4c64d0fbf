# SPDX-License-Identifier: Apache-2.0
"""What became of each prompt's tokens: found in a cache, lost by one of five causes, or new.

It owns the division of a prompt into these seven parts, which add up to the prompt, the sums by tenant and
model, and a bounded memory of the latest prompts for explanations. The *attainable* hit rate is that of hits
and the five causes together: what caches of any size and prompts without avoidable changes would reach. The
causes, in the order of the prompt's tokens:

``in_flight``       another request was computing the same prefix at that moment
``elsewhere``       an instance or the pool had it, or it is an answer that was generated elsewhere
``evicted``         it had been computed and was not held any longer, or never stored
``block_tail``      it was known, and fills no whole block, or is the token that is always computed
``prompt_changed``  the prompt had left its sibling before: the sibling has it, and no prefix can match

The rest is ``new``: content that no remembered prompt has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from mooncake.forensics.differences import Difference, Passages, difference
from mooncake.forensics.hygiene import AppliedRules
from mooncake.forensics.siblings import Arrival, Departure

CAUSES = ("prompt_changed", "evicted", "elsewhere", "in_flight", "block_tail")

MIN_CHANGED_PART = 0.15
"""Part of the rest of a prompt that its sibling must have, to count as lost by the change and no chance."""

_MAX_ROWS = 2_000
"""Most pairs of tenant and model with sums of their own; beyond that they are added up as others."""

_FINDING_BYTES = 900


class PromptParts(msgspec.Struct):
    """Tokens by what became of them."""

    hit: int = 0
    prompt_changed: int = 0
    evicted: int = 0
    elsewhere: int = 0
    in_flight: int = 0
    block_tail: int = 0
    new: int = 0

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))

    @property
    def attainable(self) -> int:
        """Hits, and what was lost by the five causes."""
        return self.total - self.new

    def add(self, other: PromptParts) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def divided(
    arrival: Arrival, num_tokens: int, num_cached: int, num_held: int, block_tokens: int
) -> PromptParts:
    """Divide a prompt of ``num_tokens``.

    Args:
        num_cached: tokens whose KV the instance had or loaded.
        num_held: leading tokens that some instance or the pool was believed to hold.
    """
    scale = num_tokens / max(1, arrival.size) if arrival.unit_bytes == 1 else 1.0
    hit = max(0, min(num_cached, num_tokens))
    seen = max(hit, min(num_tokens, round(arrival.num_seen * scale)))
    in_prompts = min(seen, round(arrival.num_seen_in_prompts * scale))
    computed = min(seen, round(arrival.num_computed * scale))
    # The last token is computed in any case, and with it its block.
    usable = max(hit, min(seen, num_tokens - 1) // block_tokens * block_tokens)
    parts = PromptParts(hit=hit, block_tail=seen - usable)
    held = max(hit, min(usable, num_held))
    parts.elsewhere = held - hit
    rest_at = held
    if computed < in_prompts:
        parts.in_flight = max(
            0, min(usable, in_prompts) - max(rest_at, computed // block_tokens * block_tokens)
        )
    answers = max(0, usable - max(rest_at, min(usable, in_prompts)))
    parts.elsewhere += answers
    parts.evicted = usable - rest_at - parts.in_flight - answers
    departure = arrival.departure
    unseen = num_tokens - seen
    if departure is not None and departure.ours_found >= MIN_CHANGED_PART:
        found = round(departure.num_found * scale)
        parts.prompt_changed = min(unseen, found) if found >= block_tokens else 0
    parts.new = unseen - parts.prompt_changed
    return parts


@dataclass(slots=True)
class Finding:
    """What is known of one prompt's hits and misses."""

    tenant: str
    model: str
    departure: Departure | None
    at: float
    parts: PromptParts | None = None
    "None until the prompt was computed."
    rules: AppliedRules | None = None
    "What hygiene rules changed in its request."
    left_without_rules: float | None = None
    "Part of the prompt after which it would have left its sibling without them; None if nowhere."
    difference: Difference | None = None
    "Made from ``departure`` when it is asked for."

    @property
    def size_bytes(self) -> int:
        return _FINDING_BYTES + (self.departure.size_bytes if self.departure is not None else 0)

    def gain_tokens(self, block_tokens: int) -> int:
        """Cached tokens behind the place where the prompt would have left its sibling without rules."""
        if self.parts is None or self.left_without_rules is None:
            return 0
        without = int(self.left_without_rules * self.parts.total) // block_tokens * block_tokens
        return max(0, self.parts.hit - without)


TextOf = Callable[[bytes, bool], str]
"""Text of a part of a prompt's content; the flag: whether it is text already."""


def difference_of(finding: Finding, text_of: TextOf) -> Difference | None:
    """The difference by which a prompt left its sibling; None if it did not."""
    departure = finding.departure
    if departure is not None and finding.difference is None:
        is_text, unit = departure.is_text, departure.unit_bytes
        finding.difference = difference(
            Passages(
                text_of(departure.context[len(departure.context) % unit :], is_text),
                text_of(departure.ours[: len(departure.ours) // unit * unit], is_text),
                text_of(departure.theirs[: len(departure.theirs) // unit * unit], is_text),
                ours_found=departure.ours_found,
                theirs_found=departure.theirs_found,
                num_ours=departure.num_ours,
                num_theirs=departure.num_theirs,
                is_in_answer=departure.answer_at == 0,
            )
        )
    return finding.difference


@dataclass
class MissFindings:
    """Findings of the latest prompts, up to ``max_bytes`` of them, and the sums of all."""

    max_bytes: int
    sums: dict[tuple[str, str], PromptParts] = field(default_factory=dict)
    "By tenant and model."
    size_bytes: int = 0
    _by_id: OrderedDict[str, Finding] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._by_id)

    def arrived(self, arrival: Arrival, now: float) -> Finding:
        finding = Finding(arrival.scope.tenant, arrival.scope.model, arrival.departure, now)
        before = self._by_id.pop(arrival.request_id, None)
        if before is not None:
            self.size_bytes -= before.size_bytes
        self._by_id[arrival.request_id] = finding
        self.size_bytes += finding.size_bytes
        while self.size_bytes > self.max_bytes and self._by_id:
            self.size_bytes -= self._by_id.popitem(last=False)[1].size_bytes
        return finding

    def computed(self, finding: Finding, parts: PromptParts) -> None:
        """Note what became of a prompt's tokens."""
        finding.parts = parts
        self.sums.setdefault(self.key_of(finding), PromptParts()).add(parts)

    def key_of(self, finding: Finding) -> tuple[str, str]:
        """The tenant and model under which a finding is summed: of very many, all further ones together."""
        key = (finding.tenant, finding.model)
        return key if key in self.sums or len(self.sums) < _MAX_ROWS else ("others", "others")

    def find(self, request_id: str) -> Finding | None:
        return self._by_id.get(request_id)

    def of_tenant(self, tenant: str | None) -> list[Finding]:
        """The remembered findings of a tenant, the oldest first; None: of all tenants."""
        return [one for one in [*self._by_id.values()] if tenant is None or one.tenant == tenant]

    def check(self) -> None:
        assert self.size_bytes == sum(one.size_bytes for one in self._by_id.values()) <= self.max_bytes
