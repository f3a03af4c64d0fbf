# SPDX-License-Identifier: Apache-2.0
"""The class of a difference: for hundreds of drawn pairs, and for texts that must not be over-claimed."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from mooncake.forensics.differences import Difference, Passages, difference
from mooncake.forensics.findings import Finding, difference_of
from mooncake.forensics.siblings import Departure, Scope, SiblingMemory
from tests.forensics.agent_prompts import SHAPES, PromptPair, WordTokenizer, pair_of
from tests.forensics.test_siblings import BLOCK_TOKENS, content_of, text_content

SEEDS = range(25)
RIGHT_PART = 0.95


def departure_of(pair: PromptPair, tokenizer: WordTokenizer | None, session: str) -> Departure:
    memory = SiblingMemory(1 << 24, 3600.0, BLOCK_TOKENS)
    contents = [
        text_content(one) if tokenizer is None else content_of(tokenizer.encode(one))
        for one in (pair.first, pair.second)
    ]
    memory.answered(memory.arrive("first", Scope("t"), contents[0], session, 0.0), b"", True)
    found = memory.arrive("second", Scope("t"), contents[1], session, 1.0).departure
    assert found is not None, f"{pair.shape}: no sibling"
    return found


@pytest.mark.parametrize("is_text", [False, True], ids=["tokens", "text"])
@pytest.mark.parametrize("shape", SHAPES)
def test_offset_and_class_of_every_shape(shape: str, is_text: bool) -> None:
    """Each offset is exact; of the classes of a shape 95 of 100 are right."""
    kinds: Counter[str] = Counter()
    num_right = 0
    for seed in SEEDS:
        pair, tokenizer = pair_of(shape, seed), WordTokenizer()
        session = "s" if seed % 2 else ""
        departure = departure_of(pair, None if is_text else tokenizer, session)
        if is_text:
            assert departure.offset_chars == pair.offset, f"seed {seed}"
        else:
            both = zip(tokenizer.encode(pair.first), tokenizer.encode(pair.second), strict=False)
            expected = next(at for at, (one, other) in enumerate(both) if one != other)
            assert departure.offset == expected, f"seed {seed}"

        def text_of(data: bytes, is_text: bool, tokenizer: WordTokenizer = tokenizer) -> str:
            return data.decode(errors="ignore") if is_text else tokenizer.text_of(array("I", data).tolist())

        found = difference_of(Finding("t", "m", departure, 0.0), text_of)
        assert found is not None
        kinds[found.kind] += 1
        num_right += found.kind in pair.kinds
    assert num_right >= RIGHT_PART * len(SEEDS), dict(kinds)


BEHIND = "\nYou are an agent. Follow the instructions, and change no file that was not named.\n" * 3


def between(first: str, second: str, **fields: float) -> Difference:
    """The difference of the second text from the first."""
    at = next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
    sizes = {"num_ours": len(second) - at, "num_theirs": len(first) - at}
    return difference(Passages(second[:at], second[at:], first[at:], **{**sizes, **fields}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("The model is called Falcon.", "The model is called Condor.", "other"),
        ("Working directory: /home/anna/shop", "Working directory: /home/boris/blog", "other"),
        ("Answer in French.", "Answer in German.", "other"),
        ("Be brief and polite.", "Be verbose and polite.", "other"),
        ("Platform: linux", "Platform: darwin", "other"),
    ],
)
def test_words_are_not_called_volatile(first: str, second: str, kind: str) -> None:
    assert between(first + BEHIND, second + BEHIND).kind == kind


def test_two_questions_with_other_numbers_are_not_counters() -> None:
    head = "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n"
    first, second = (
        head + one + "<|im_end|>\n<|im_start|>assistant\n" for one in ("What is 3*4?", "What is 5*6?")
    )
    assert between(first, second, ours_found=0.0, theirs_found=0.0).kind == "new_text"


def test_the_same_text_in_other_tokens() -> None:
    text = "tokenization of the same words" * 40
    assert difference(Passages("before ", text, text)).kind == "retokenized"


def test_reasoning_that_another_reasoning_replaces_was_not_dropped() -> None:
    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    first = head + "Let me look at the file first.\n</think>\nDone." + BEHIND
    second = head + "The user wants a greeting.\n</think>\nDone." + BEHIND
    assert between(first, second).kind != "dropped_reasoning"


def test_a_rule_is_proposed_with_its_line() -> None:
    found = between("X-Request-Id: 7f3c9a10aa" + BEHIND, "X-Request-Id: 01be77d2c4" + BEHIND)
    assert found.rule == r"drop-line:^\s*X\-Request\-Id:"
    assert found.ours.startswith("X-Request-Id: 01be77d2c4")
    assert found.theirs.startswith("X-Request-Id: 7f3c9a10aa")


def test_an_added_tool_is_named() -> None:
    tools = '[{"name": "read", "parameters": {}}, {"name": "write", "parameters": {}}]'
    more = tools.replace('"write"', '"grep", "parameters": {}}, {"name": "write"')
    found = between("Tools: " + tools + BEHIND, "Tools: " + more + BEHIND)
    assert (found.kind, "added grep, removed none" in found.detail) == ("other", True)
