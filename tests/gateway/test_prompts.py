# SPDX-License-Identifier: Apache-2.0
"""A prompt that an engine has seen goes there again, with each source of its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.conductor.messages import BlocksStored
from mooncake.gateway.engine_apis import COMPLETIONS
from mooncake.gateway.prompts import PromptKeys
from mooncake.inference.tokenizer import Tokenizer
from mooncake.prefix import block_hashes, root_hash, short_key
from tests.gateway.engines import Front, fronting

SYSTEM = " ".join(f"w{number}" for number in range(20, 60))
IDS = list(range(20, 60))


async def same_place(front: Front, **fields: Any) -> None:
    """Check that two conversations with prefixes of their own each stay where they began."""
    places: dict[str, set[str]] = {}
    for turn in range(4):
        for who in ("w70", "w71", "w72"):
            text = f"{who} {SYSTEM} {' '.join(f'w{80 + number}' for number in range(turn))}"
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}
            status, answer, headers = await front.post("/v1/chat/completions", body)
            assert status == 200, answer
            places.setdefault(who, set()).add(headers["x-mooncake-decode"])
    assert all(len(seen) == 1 for seen in places.values()), places
    assert len(set.union(*places.values())) > 1, "not all in one place either"


@pytest.mark.parametrize("how", ["engine", "text", "auto", "model"])
@pytest.mark.parametrize("salt", [None, "pepper"])
async def test_later_turns_go_where_the_first_went(how: str, salt: str | None, tokenizer: Tokenizer) -> None:
    settings = {"tokenizing": how, "scheduling": "cache_aware", "protocol": "pool"}
    async with fronting(0, 3, tokenizer, **settings) as front:
        for engine in front.decode:
            engine.local = {}
        await same_place(front, **({"cache_salt": salt} if salt else {}))
        num_queries = sum(one.num_tokenized for one in front.decode)
        assert num_queries == {"engine": 12, "text": 0, "auto": 1, "model": 0}[how]


async def test_without_a_source_of_tokens_text_is_hashed() -> None:
    async with fronting(0, 3, engine={"has_tokenize": False}, scheduling="cache_aware") as front:
        await same_place(front)


async def test_a_tokenizer_that_disagrees_is_not_used(tokenizer: Tokenizer) -> None:
    async with fronting(0, 2, tokenizer, scheduling="cache_aware") as front:
        for _ in range(3):
            await front.complete("w20 s6 w21")  # the tokenizer knows s6, the engine does not
        assert sum(one.num_tokenized for one in front.decode) == 3


async def test_an_engine_s_kv_events_decide() -> None:
    async with fronting(0, 2, scheduling="cache_aware") as front:
        keys = [short_key(one) for one in block_hashes(IDS, 4, root_hash())]
        for engine in (front.decode[1], front.decode[0]):
            for instance in front.decode:
                front.gateway.scheduling.post(BlocksStored(instance.address, keys[:1]))
            front.gateway.scheduling.post(BlocksStored(engine.address, keys))
            answer = await front.complete(SYSTEM)
            assert answer["headers"]["x-mooncake-decode"] == engine.address
            for instance in front.decode:
                instance.local.clear()
                front.gateway.scheduling.core.index.clear(instance.address)  # type: ignore[attr-defined]


async def test_policies_that_ignore_caches_query_no_engine() -> None:
    async with fronting(0, 2, scheduling="load") as front:
        await front.complete(SYSTEM)
        assert not any(one.num_tokenized for one in front.decode)


@pytest.mark.parametrize("how", ["engine", "text", "model", "none"])
async def test_a_completion_with_messages_is_no_chat(how: str, tokenizer: Tokenizer) -> None:
    async with fronting(0, 1, tokenizer, tokenizing=how, scheduling="cache_aware") as front:

        async def name(**fields: Any) -> PromptKeys:
            request = {"prompt": SYSTEM, **fields}
            return await front.gateway.prompts.name(COMPLETIONS, request, "", {}, front.gateway.scheduling)

        expected = await name()
        assert await name(messages=[]) == expected
        assert await name(messages=[{"role": "user", "content": "w20"}]) == expected
        assert expected.num_tokens in (len(IDS), len(SYSTEM) // 4)
        assert bool(expected.keys) is (how != "none")


LONG = "a " * 3000
"""Longer than what is tokenized on the event loop, and half as many bytes a token as are guessed."""


@pytest.mark.parametrize(
    ("how", "stream", "num_long"),
    [("model", True, 3000), ("auto", True, 3000), ("text", True, 1500), ("model", False, 1500)],
)
async def test_tokens_of_further_prompts_are_counted(
    how: str, stream: bool, num_long: int, tokenizer: Tokenizer
) -> None:
    async with fronting(0, 1, tokenizer, tokenizing=how, scheduling="cache_aware") as front:

        async def num_others(prompt: Any) -> int:
            request = {"prompt": prompt, "stream": stream}
            found = await front.gateway.prompts.name(COMPLETIONS, request, "", {}, front.gateway.scheduling)
            return found.num_all_tokens - found.num_tokens

        assert await num_others(SYSTEM) == await num_others([SYSTEM]) == await num_others(IDS) == 0
        assert await num_others([IDS, IDS]) == len(IDS)
        assert await num_others([SYSTEM, LONG, LONG]) == 2 * num_long
