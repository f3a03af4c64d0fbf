# SPDX-License-Identifier: Apache-2.0
"""What became of a prompt's tokens: seven parts that add up, and the sums of tenants."""

from __future__ import annotations

import random

import msgspec
import pytest

from mooncake.forensics.findings import CAUSES, Finding, MissFindings, PromptParts, difference_of, divided
from mooncake.forensics.hygiene import AppliedRules
from mooncake.forensics.siblings import Arrival, Departure, Scope, SiblingMemory
from tests.forensics.agent_prompts import SHAPES, WordTokenizer, pair_of
from tests.forensics.test_siblings import BLOCK_TOKENS, content_of, text_content

SCOPE = Scope("tenant", "", "model")


def departure_at(offset: int, num_ours: int, found: float, is_text: bool = False) -> Departure:
    return Departure(
        offset, offset, is_text, "r1", 1.0, True, b"", True, b"", b"", num_ours, num_ours, found, found, None
    )


def arrival_of(
    size: int, seen: int = 0, in_prompts: int = -1, computed: int = -1, found: float = 0.0
) -> Arrival:
    in_prompts = seen if in_prompts < 0 else in_prompts
    computed = in_prompts if computed < 0 else computed
    departure = departure_at(seen, size - seen, found) if found else None
    return Arrival("r", SCOPE, size, seen, in_prompts, computed, departure, 4)


def parts_of(arrival: Arrival, num_cached: int, num_held: int = 0) -> dict[str, int]:
    """The parts that are not 0."""
    found = msgspec.structs.asdict(divided(arrival, arrival.size, num_cached, num_held, 16))
    return {name: num for name, num in found.items() if num}


def test_the_causes_are_five_and_the_parts_seven() -> None:
    assert {*PromptParts.__struct_fields__} == {"hit", "new", *CAUSES} and len(CAUSES) == 5


def test_a_prompt_that_no_one_has_sent_before_is_new() -> None:
    assert parts_of(arrival_of(100), 0) == {"new": 100}


def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed() -> None:
    assert parts_of(arrival_of(100, 100), 96) == {"hit": 96, "block_tail": 4}
    assert parts_of(arrival_of(96, 96), 80) == {"hit": 80, "block_tail": 16}


def test_hits_of_prompts_that_are_not_remembered_are_hits() -> None:
    assert parts_of(arrival_of(100), 64) == {"hit": 64, "new": 36}


def test_what_was_computed_and_is_held_by_none_was_evicted() -> None:
    assert parts_of(arrival_of(100, 100), 32) == {"hit": 32, "evicted": 64, "block_tail": 4}


def test_what_others_hold_is_elsewhere() -> None:
    assert parts_of(arrival_of(100, 100), 32, 64) == {
        "hit": 32,
        "elsewhere": 32,
        "evicted": 32,
        "block_tail": 4,
    }


def test_an_answer_was_generated_elsewhere() -> None:
    assert parts_of(arrival_of(200, 160, in_prompts=96), 96) == {"hit": 96, "elsewhere": 64, "new": 40}


def test_what_is_being_computed_is_in_flight() -> None:
    assert parts_of(arrival_of(100, 100, computed=0), 0) == {"in_flight": 96, "block_tail": 4}
    assert parts_of(arrival_of(100, 100, computed=48), 16) == {
        "hit": 16,
        "in_flight": 48,
        "evicted": 32,
        "block_tail": 4,
    }


def test_what_the_sibling_has_behind_the_difference_is_lost_by_the_change() -> None:
    assert parts_of(arrival_of(100, 20, found=0.75), 16) == {
        "hit": 16,
        "block_tail": 4,
        "prompt_changed": 60,
        "new": 20,
    }


@pytest.mark.parametrize("found", [0.1, 0.0])
def test_a_few_words_in_common_are_chance(found: float) -> None:
    assert "prompt_changed" not in parts_of(arrival_of(100, 20, found=found), 16)


@pytest.mark.parametrize("seed", range(50))
def test_the_parts_add_up_whatever_is_reported(seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(100):
        size = random_.randrange(1, 400)
        seen = random_.randrange(size + 1)
        in_prompts = random_.randrange(seen + 1)
        arrival = arrival_of(
            size,
            seen,
            in_prompts,
            random_.randrange(seen + 1),
            random_.random() if seen < size and random_.random() < 0.5 else 0.0,
        )
        parts = divided(arrival, size, random_.randrange(2 * size), random_.randrange(2 * size), 16)
        assert parts.total == size, f"seed {seed}"
        assert min(msgspec.structs.astuple(parts)) >= 0, f"seed {seed}: {parts}"


@pytest.mark.parametrize("is_text", [False, True], ids=["tokens", "text"])
def test_hits_and_causes_of_all_shapes_add_up(is_text: bool) -> None:
    """Sessions of every shape, with an ideal cache: hits, causes and new tokens are 100 % of the prompts."""
    memory, findings = SiblingMemory(1 << 24, 3600.0, BLOCK_TOKENS), MissFindings(1 << 22)
    num_tokens = 0
    for shape in SHAPES:
        for seed in range(4):
            pair, tokenizer = pair_of(shape, seed), WordTokenizer()
            for number, text in enumerate((pair.first, pair.second)):
                tokens = tokenizer.encode(text)
                content = text_content(text) if is_text else content_of(tokens)
                scope = Scope(shape, str(seed), "m")
                arrival = memory.arrive(f"{shape} {seed} {number}", scope, content, "s", 0.0)
                finding = findings.arrived(arrival, 0.0)
                memory.answered(arrival, b"", True)
                seen = round(arrival.num_seen * len(tokens) / arrival.size)
                num_cached = min(seen, len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                findings.computed(finding, divided(arrival, len(tokens), num_cached, 0, BLOCK_TOKENS))
                num_tokens += len(tokens)
    whole = PromptParts()
    for parts in findings.sums.values():
        whole.add(parts)
    assert whole.total == num_tokens
    by_shape = {tenant: parts for (tenant, _), parts in findings.sums.items()}
    # One line at the head loses what both prompts have; a new question loses nothing.
    first = by_shape["nonce header"]
    assert first.prompt_changed > 0.3 * first.total
    # Some n-grams are in both by chance, where the tokenizer has few words.
    assert by_shape["new question"].prompt_changed == 0
    assert by_shape["new question"].hit > 0


def test_findings_are_bounded_and_sums_are_kept() -> None:
    findings = MissFindings(max_bytes=10_000)
    for number in range(100):
        arrival = numbered(number)
        findings.computed(findings.arrived(arrival, 0.0), PromptParts(hit=3, new=1))
        findings.check()
    assert 0 < len(findings) <= 11 and findings.find("r99") is not None and findings.find("r0") is None
    assert findings.sums == {("tenant", "model"): PromptParts(hit=300, new=100)}
    assert findings.of_tenant("other") == [] and len(findings.of_tenant(None)) == len(findings)


def numbered(number: int) -> Arrival:
    return Arrival(f"r{number}", SCOPE, 4, 0, 0, 0, None, 4)


def test_sums_of_very_many_tenants_are_added_up() -> None:
    findings = MissFindings(max_bytes=1 << 20)
    for number in range(2_100):
        arrival = Arrival("r", Scope(f"t{number}"), 4, 0, 0, 0, None, 4)
        findings.computed(findings.arrived(arrival, 0.0), PromptParts(new=1))
    assert len(findings.sums) == 2_001
    assert findings.sums["others", "others"].new == 100


def test_without_a_departure_there_is_no_difference() -> None:
    assert difference_of(Finding("t", "m", None, 0.0), lambda data, is_text: "") is None


def test_the_gain_of_rules_is_the_hits_behind_the_place() -> None:
    finding = Finding("t", "m", None, 0.0, PromptParts(hit=96, new=4), AppliedRules(), 0.25)
    assert finding.gain_tokens(16) == 96 - 16
    finding.left_without_rules = None
    assert finding.gain_tokens(16) == 0
