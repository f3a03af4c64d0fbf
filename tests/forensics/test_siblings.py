# SPDX-License-Identifier: Apache-2.0
"""The nearest sibling of a prompt, the exact place of their difference, and the bounds of the memory."""

from __future__ import annotations

import random
from array import array

import pytest

from mooncake.forensics.siblings import Arrival, PromptContent, Scope, SiblingMemory
from mooncake.prefix import block_hashes, root_hash, short_key

BLOCK_TOKENS = 16
SCOPE = Scope("tenant")


def content_of(tokens: list[int], salt: str = "") -> PromptContent:
    keys = [short_key(one) for one in block_hashes(tokens, BLOCK_TOKENS, root_hash(salt))]
    return PromptContent(array("I", tokens).tobytes(), keys)


def text_content(text: str) -> PromptContent:
    data = text.encode()
    pieces = data[: len(data) // 4 * 4]
    keys = [short_key(one) for one in block_hashes(pieces, BLOCK_TOKENS, root_hash())]
    return PromptContent(data, keys, is_text=True)


class Prompts:
    """A memory with its clock."""

    def __init__(self, max_bytes: int = 1 << 22, lifetime_s: float = 100.0) -> None:
        self.memory = SiblingMemory(max_bytes, lifetime_s, BLOCK_TOKENS)
        self.now = 0.0
        self._number = 0

    def send(
        self, tokens: list[int], session: str = "", scope: Scope = SCOPE, answer: tuple[int, ...] | None = ()
    ) -> Arrival:
        """A prompt; ``answer`` None leaves it in flight."""
        self._number += 1
        found = self.memory.arrive(f"r{self._number}", scope, content_of(tokens), session, self.now)
        if answer is not None:
            self.memory.answered(found, array("I", answer).tobytes(), True)
        self.memory.check()
        self.now += 1.0
        return found


def tokens(seed: int, num: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(50_000) for _ in range(num)]


@pytest.mark.parametrize("offset", [0, 1, 15, 16, 17, 100, 255, 256, 399])
def test_the_offset_is_exact(offset: int) -> None:
    prompts, first = Prompts(), tokens(1, 400)
    prompts.send(first, "s")
    second = [*first[:offset], 60_000, *first[offset + 1 :]]
    departure = prompts.send(second, "s").departure
    assert departure is not None and departure.offset == offset
    assert departure.sibling == "r1" and departure.is_same_session
    assert departure.sibling_age_s == 1.0
    ours, theirs = array("I", departure.ours), array("I", departure.theirs)
    assert [*ours] == second[offset:] and [*theirs] == first[offset:]
    if offset < 390:
        assert departure.ours_found > 0.85


def test_the_next_turn_left_nothing_and_takes_the_place_of_the_last() -> None:
    prompts, first = Prompts(), tokens(1, 100)
    prompts.send(first, "s", answer=(1, 2, 3))
    second = prompts.send([*first, 1, 2, 3, *tokens(2, 50)], "s")
    assert second.departure is None
    assert (second.num_seen, second.num_seen_in_prompts, second.num_computed) == (103, 100, 103)
    assert len(prompts.memory) == 1


def test_the_same_prompt_again_and_a_shorter_one_left_nothing() -> None:
    prompts, first = Prompts(), tokens(1, 100)
    for one in (first, first, first[:70]):
        found = prompts.send(one)
        assert found.departure is None
    assert found.num_seen == 70 and len(prompts.memory) == 1


def test_an_answer_that_was_not_taken_over_is_a_difference() -> None:
    prompts, first = Prompts(), tokens(1, 100)
    prompts.send(first, "s", answer=(1, 2, 3, 4))
    departure = prompts.send([*first, 3, 4, *tokens(2, 50)], "s").departure
    assert departure is not None and (departure.offset, departure.answer_at) == (100, 0)
    assert len(prompts.memory) == 1, "the session goes on"


def test_what_is_computed_is_known_when_the_answer_is() -> None:
    prompts, first = Prompts(), tokens(1, 100)
    in_flight = prompts.send(first, answer=None)
    assert prompts.send(first, answer=None).num_computed == 0
    prompts.memory.answered(in_flight, b"", True)
    assert prompts.send(first, answer=None).num_computed == 100
    longer = prompts.send([*first, *tokens(2, 50)], answer=None)
    assert (longer.num_seen, longer.num_computed) == (100, 100)
    again = prompts.send([*first, *tokens(2, 50)])
    assert (again.num_seen, again.num_computed) == (150, 100)


def test_of_equal_prefixes_the_one_of_the_session_comes_first() -> None:
    prompts, system = Prompts(), tokens(1, 64)
    prompts.send([*system, *tokens(2, 64)], "mine")
    prompts.send([*system, *tokens(3, 64)], "other")
    departure = prompts.send([*system, *tokens(4, 64)], "mine").departure
    assert departure is not None and departure.sibling == "r1" and departure.is_same_session


def test_a_longer_prefix_comes_before_the_session() -> None:
    prompts, system = Prompts(), tokens(1, 640)
    prompts.send([*system[:32], *tokens(2, 64)], "mine")
    prompts.send([*system, *tokens(3, 64)], "other")
    departure = prompts.send([*system, *tokens(4, 64)], "mine").departure
    assert departure is not None and departure.sibling == "r2" and not departure.is_same_session


def test_a_prompt_that_differs_in_its_first_block_is_found_by_its_content() -> None:
    prompts, body = Prompts(), tokens(1, 800)
    prompts.send([1, 2, 3, 7, *body])
    for seed in range(5):
        prompts.send(tokens(10 + seed, 800))
    departure = prompts.send([1, 2, 3, 8, 9, *body]).departure
    assert departure is not None and (departure.offset, departure.sibling) == (3, "r1")
    assert departure.ours_found > 0.95


def test_prompts_with_nothing_in_common_are_no_siblings() -> None:
    prompts = Prompts()
    prompts.send(tokens(1, 400))
    found = prompts.send(tokens(2, 400))
    assert found.departure is None and found.num_seen == 0 and len(prompts.memory) == 2


@pytest.mark.parametrize(
    "other", [Scope("boris"), Scope("tenant", "salt"), Scope("tenant", "", "another model")]
)
def test_scopes_are_never_compared(other: Scope) -> None:
    prompts, first = Prompts(), tokens(1, 400)
    prompts.send(first, "s")
    found = prompts.send([*first[:200], *tokens(2, 200)], "s", other)
    assert found.departure is None and found.num_seen == 0


def test_a_text_has_its_offset_in_characters() -> None:
    memory = SiblingMemory(1 << 20, 100.0, BLOCK_TOKENS)
    behind = "The rest of the prompt stays as it was. " * 20
    memory.arrive("a", SCOPE, text_content("für 日本 é" + behind), "s", 0.0)
    departure = memory.arrive("b", SCOPE, text_content("für 日本 è" + behind), "s", 1.0).departure
    assert departure is not None and departure.offset_chars == len("für 日本 ")
    assert departure.ours.decode().startswith("è") and departure.theirs.decode().startswith("é")


def test_the_heaviest_tenant_loses_its_oldest_prompts() -> None:
    prompts = Prompts(max_bytes=150_000)
    small = Scope("small")
    prompts.send(tokens(0, 400), scope=small)
    for seed in range(1, 40):
        prompts.send(tokens(seed, 1000), f"s{seed}")
        assert prompts.memory.size_bytes <= 150_000
    again = prompts.send([*tokens(0, 400), 5], scope=small)
    assert again.num_seen == 400, "another tenant's flood did not remove it"
    assert prompts.send([*tokens(1, 1000), 5], "x").num_seen == 0


def test_a_prompt_larger_than_the_memory_is_not_kept() -> None:
    prompts = Prompts(max_bytes=20_000)
    prompts.send(tokens(1, 20_000))
    assert len(prompts.memory) == 0 and prompts.memory.size_bytes == 0
    assert prompts.send(tokens(1, 20_000)).num_seen == 0


def test_prompts_expire() -> None:
    prompts = Prompts(lifetime_s=10.0)
    prompts.send(tokens(1, 100))
    prompts.now = 9.0
    assert prompts.send(tokens(1, 100)).num_seen == 100
    prompts.now = 30.0
    assert prompts.send(tokens(1, 100)).num_seen == 0
    assert len(prompts.memory) == 1


@pytest.mark.parametrize("seed", range(30))
def test_the_memory_is_consistent_whatever_is_sent(seed: int) -> None:
    """Random sessions grow, are edited, repeated and abandoned in a memory that holds a part of them."""
    random_ = random.Random(seed)
    prompts = Prompts(max_bytes=60_000, lifetime_s=25.0)
    sessions: dict[str, list[int]] = {f"s{number}": tokens(number, 50) for number in range(6)}
    scopes = [Scope("a"), Scope("b"), Scope("b", "salt")]
    for _ in range(120):
        name = random_.choice([*sessions])
        found = sessions[name]
        action = random_.randrange(5)
        if action == 0:
            found = [*found[: random_.randrange(len(found))], 60_000, *found]
        elif action <= 3:
            found = [*found, *tokens(random_.randrange(99), random_.randrange(1, 90))]
        found = found[: 50 + random_.randrange(900)]
        sessions[name] = found
        answer = random_.choice([None, (), (1, 2, 3)])
        arrival = prompts.send(found, random_.choice([name, ""]), random_.choice(scopes), answer)
        assert 0 <= arrival.num_seen <= len(found)
        if arrival.departure is not None:
            assert arrival.departure.offset == arrival.num_seen
            assert arrival.departure.num_ours == len(found) - arrival.num_seen
