# SPDX-License-Identifier: Apache-2.0
"""Why prompts missed, through the gateway: what explain shows to whom, and that the causes add up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.inference.tokenizer import Tokenizer
from mooncake.metrics import registry
from tests.gateway.conftest import ADMIN_KEY, Stack, running
from tests.gateway.engines import fronting
from tests.gateway.test_clients import ANNA, BORIS, CLARA, bearer, written

HEAD = [f"w{number}" for number in range(20, 32)]
TAIL = [f"w{number}" for number in range(40, 60)]


def prompt(changed: str, *more: str) -> str:
    return " ".join([*HEAD, changed, *TAIL, *more])


async def misses_of(stack: Stack, answer_id: str, headers: dict[str, str]) -> tuple[int, Any]:
    """The answer to explain, once the prompt's parts are known."""
    path = f"{stack.url}/v1/requests/{answer_id}/explain"
    async with asyncio.timeout(5):
        while True:
            async with stack.session.get(path, headers=headers) as response:
                body = await response.json()
            if response.status != 200:
                return response.status, body
            [report] = body["misses"]
            if report is None or report["tokens"] is not None:
                return response.status, report
            await asyncio.sleep(0.01)


async def completed(stack: Stack, text: str, headers: dict[str, str] | None = None) -> str:
    body = {"prompt": text, "max_tokens": 2}
    status, answer, found = await stack.post("/v1/completions", body, headers)
    assert status == 200, answer
    return found["x-mooncake-id"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    rows = [
        {"name": "anna", "key": ANNA, "tenant": "a"},
        {"name": "boris", "key": BORIS},
        {"name": "clara", "key": CLARA, "tenant": "a"},
    ]
    return written(tmp_path, rows)


async def test_explain_names_the_token_at_which_a_prompt_left_its_sibling(stack: Stack) -> None:
    first = await completed(stack, prompt("w80"))
    second = await completed(stack, prompt("w81", "w70"))
    status, report = await misses_of(stack, second, {"X-API-Key": ADMIN_KEY})
    assert status == 200
    left, tokens = report["left_sibling"], report["tokens"]
    assert (left["offset"], left["unit"], left["token"]) == (12, "tokens", "w81")
    assert left["sibling"] == first
    assert "w81 w40 w41" in left["ours"] and "w80 w40 w41" in left["theirs"]
    assert tokens["hit"] == 12 and sum(tokens.values()) == 34
    # Of the 20 words behind it, some n-grams reach over the difference.
    assert 10 <= tokens["prompt_changed"] == left["lost_tokens"] <= 21
    assert report["attainable_tokens"] == 34 - tokens["new"]


async def test_the_first_prompt_is_new_and_the_second_one_is_a_hit(stack: Stack) -> None:
    first = await completed(stack, prompt("w80"))
    _, report = await misses_of(stack, first, {})
    assert report["left_sibling"] is None
    assert report["tokens"]["new"] == 33 == sum(report["tokens"].values())
    again = await completed(stack, prompt("w80"))
    _, report = await misses_of(stack, again, {})
    assert report["left_sibling"] is None
    tokens = report["tokens"]
    assert (tokens["hit"], tokens["block_tail"], tokens["new"]) == (32, 1, 0)


async def test_what_was_computed_and_is_gone_counts_as_evicted(stack: Stack) -> None:
    await completed(stack, prompt("w80"))
    for worker in (*stack.prefill, *stack.decode):
        worker.pool.clear()
    again = await completed(stack, prompt("w80"))
    _, report = await misses_of(stack, again, {})
    tokens = report["tokens"]
    assert tokens["hit"] == 0 and sum(tokens.values()) == 33
    assert tokens["evicted"] + tokens["elsewhere"] == 32 and tokens["block_tail"] == 1


async def test_without_keys_a_client_sees_its_own_text_only(stack: Stack) -> None:
    await completed(stack, prompt("w80"))
    second = await completed(stack, prompt("w81"))
    _, report = await misses_of(stack, second, {})
    left = report["left_sibling"]
    assert "w81" in left["ours"]
    assert left["theirs"] is None and left["sibling"] == ""
    assert "w80" not in msgspec.json.encode(report).decode()


async def test_another_tenant_s_prompt_is_no_sibling_and_is_never_shown(
    tokenizer: Tokenizer, keys: Path
) -> None:
    async with running(tokenizer, api_keys_file=str(keys)) as stack:
        await completed(stack, prompt("w80"), bearer(BORIS))
        of_anna = await completed(stack, prompt("w81"), bearer(ANNA))
        status, report = await misses_of(stack, of_anna, bearer(ANNA))
        assert status == 200 and report["left_sibling"] is None
        assert (await misses_of(stack, of_anna, bearer(BORIS)))[0] == 404
        # Clara's prompts are of the same tenant as Anna's.
        of_clara = await completed(stack, prompt("w82"), bearer(CLARA))
        status, report = await misses_of(stack, of_clara, bearer(CLARA))
        assert report["left_sibling"]["sibling"] == of_anna
        assert "w81" in report["left_sibling"]["theirs"]
        assert "w80" not in msgspec.json.encode(report).decode()


async def test_sums_are_those_of_the_asking_tenant(tokenizer: Tokenizer, keys: Path) -> None:
    async with running(tokenizer, api_keys_file=str(keys)) as stack:
        labels = {"tenant": "boris", "model": "tiny", "part": "new"}
        before = registry.get_sample_value("mooncake_gateway_prompt_parts_tokens_total", labels) or 0.0
        for key, word in ((ANNA, "w80"), (BORIS, "w81"), (ANNA, "w82"), (CLARA, "w80")):
            await completed(stack, prompt(word), bearer(key))

        async def sums(headers: dict[str, str]) -> tuple[int, Any]:
            async with stack.session.get(f"{stack.url}/v1/cache/misses", headers=headers) as response:
                return response.status, await response.json()

        async def all_tokens() -> int:
            _, found = await sums({"X-API-Key": ADMIN_KEY})
            return sum(sum(row["tokens"].values()) for row in found["tenants"])

        async with asyncio.timeout(5):
            while await all_tokens() < 4 * 33:  # noqa: ASYNC110 (the end is noted behind the answer)
                await asyncio.sleep(0.01)
        status, found = await sums(bearer(ANNA))
        assert status == 200
        [row] = found["tenants"]
        assert row["tenant"] == "a" and sum(row["tokens"].values()) == 3 * 33
        assert found["prompts_remembered"] == 3
        assert 0 < row["hit_rate"] < row["attainable_hit_rate"] < 1
        attainable = 1 - row["tokens"]["new"] / (3 * 33)
        assert abs(row["attainable_hit_rate"] - attainable) < 1e-5
        [difference] = found["differences"]
        assert difference["prompts"] == 1 and difference["lost_tokens"] == row["tokens"]["prompt_changed"]
        status, found = await sums({"X-API-Key": ADMIN_KEY})
        assert [row["tenant"] for row in found["tenants"]] == ["a", "boris"]
        assert (await sums({}))[0] == 401
        counted = registry.get_sample_value("mooncake_gateway_prompt_parts_tokens_total", labels)
        assert counted is not None and counted - before == found["tenants"][1]["tokens"]["new"] > 0


async def test_without_keys_sums_are_for_operators(stack: Stack) -> None:
    async with stack.session.get(f"{stack.url}/v1/cache/misses") as response:
        assert response.status == 401
    status, found = await stack.get("/v1/cache/misses")
    assert status == 200 and found == {"tenants": [], "differences": [], "prompts_remembered": 0}


async def test_it_can_be_switched_off(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, sibling_memory_bytes=0) as stack:
        await completed(stack, prompt("w80"))
        second = await completed(stack, prompt("w81"))
        assert await misses_of(stack, second, {"X-API-Key": ADMIN_KEY}) == (200, None)
        assert len(stack.gateway.misses.siblings) == 0


async def test_texts_can_be_switched_off(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, explained_text=False) as stack:
        await completed(stack, prompt("w80"))
        second = await completed(stack, prompt("w81"))
        _, report = await misses_of(stack, second, {"X-API-Key": ADMIN_KEY})
        left = report["left_sibling"]
        assert (left["offset"], left["ours"], left["theirs"], left["token"]) == (12, None, None, "")


async def test_a_prompt_that_failed_counts_for_nothing(stack: Stack) -> None:
    stack.prefill[0].refuse = (400, {"message": "no", "type": "invalid_request_error"})
    body = {"prompt": prompt("w80"), "max_tokens": 2}
    assert (await stack.post("/v1/completions", body))[0] == 400
    assert stack.gateway.misses.findings.sums == {}


async def test_other_engines_without_a_tokenizer_here_have_offsets_in_characters() -> None:
    system = "Follow the rules of the project and report each failure with its output. " * 3
    behind = " Read the files first, then change what was asked for, then run the tests again." * 6

    def chat(request: str) -> dict[str, Any]:
        content = f"{system}\nX-Request-Id: {request}\n{behind}"
        return {"messages": [{"role": "user", "content": f"w20 w21 {content} w22"}], "max_tokens": 2}

    async with fronting(0, 1, tokenizing="text", scheduling="overlap") as front:
        ids = []
        for request in ("7f3c9a10ab", "01be77d2c4"):
            status, answer, headers = await front.post("/v1/chat/completions", chat(request))
            assert status == 200, answer
            ids.append(headers["x-mooncake-id"])
        _, report = await misses_of(front, ids[1], {"X-API-Key": ADMIN_KEY})
        left = report["left_sibling"]
        text = "user\n" + chat("")["messages"][0]["content"]
        assert (left["unit"], left["offset"]) == ("characters", text.index("X-Request-Id: ") + 14)
        assert (left["kind"], left["token"]) == ("nonce", "0")
        assert left["rule"].startswith("drop-line:")
        total = sum(report["tokens"].values())
        assert report["tokens"]["prompt_changed"] > total * 0.5


# --- hygiene rules


async def test_rules_are_applied_only_where_they_are_set(tokenizer: Tokenizer) -> None:
    """A line that changes costs the hits behind it; without the line they are hits, and that is reported."""

    def text(word: str) -> str:
        return "\n".join([" ".join(HEAD), f"w90 {word}", " ".join(TAIL)])

    for rules, num_hit in (((), 12), (("drop-line:^w90 ",), 32)):
        async with running(tokenizer, hygiene_rules=rules) as stack:
            await completed(stack, text("w80"))
            body = {"prompt": text("w81"), "max_tokens": 2}
            status, _, headers = await stack.post("/v1/completions", body)
            assert status == 200
            assert headers.get("x-mooncake-hygiene") == ("drop-line=1" if rules else None)
            _, report = await misses_of(stack, headers["x-mooncake-id"], {})
            assert report["tokens"]["hit"] == num_hit
            assert (report["left_sibling"] is None) == bool(rules)
            # The gain is estimated by characters: the line stood behind 12 of 32 words of equal length.
            assert report["hygiene_gain_tokens"] == (20 if rules else 0)
            assert report["hygiene"] == ("drop-line=1" if rules else "")
            sent = stack.prefill[0].calls[-1]["prompt"]
            assert (90 in sent) == (not rules)


async def test_a_rule_that_finds_nothing_is_not_reported(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, hygiene_rules=("drop-line:^w99 ",)) as stack:
        status, _, headers = await stack.post("/v1/completions", {"prompt": prompt("w80"), "max_tokens": 2})
        assert status == 200 and "x-mooncake-hygiene" not in headers
        status, answer, _ = await stack.post("/v1/completions", b"{not json")
        assert (status, answer["error"]["code"]) == (400, "invalid_json")


async def test_tools_of_other_engines_are_sorted() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("b", "a", "c")]
    body = {"messages": [{"role": "user", "content": "w20 w21"}], "max_tokens": 2, "tools": tools}
    async with fronting(0, 1, hygiene_rules=("sort-tools",)) as front:
        status, _, headers = await front.post("/v1/chat/completions", body)
        assert status == 200 and headers["x-mooncake-hygiene"] == "sort-tools=1"
        assert [one["function"]["name"] for one in front.decode[0].calls[-1]["tools"]] == ["a", "b", "c"]
