# SPDX-License-Identifier: Apache-2.0
"""Clients by their keys: tenants, quotas, and the protection of the file of keys."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mooncake import metrics
from mooncake.errors import InvalidArgument
from mooncake.gateway.clients import Bucket, ClientEntry, Clients, read_clients
from mooncake.gateway.gateway import GatewaySettings
from mooncake.http.openai import ApiError
from mooncake.inference.tokenizer import Tokenizer
from tests.gateway.conftest import ADMIN_KEY, Stack, running
from tests.gateway.engines import fronting
from tests.waiting import until

ANNA, BORIS, CLARA = "sk-anna-0123456789", "sk-boris-0123456789", "sk-clara-0123456789"
PROMPT = list(range(20, 32))
TEXT = "/v1/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def written(folder: Path, rows: Any, suffix: str = ".json", mode: int = 0o600) -> Path:
    file = folder / f"keys{suffix}"
    file.write_text(rows if isinstance(rows, str) else json.dumps({"keys": rows}))
    file.chmod(mode)
    return file


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    rows = [
        {"name": "anna", "key": ANNA, "tenant": "a"},
        {"name": "boris", "sha256": hashlib.sha256(BORIS.encode()).hexdigest(), "max_in_flight": 2},
        {"name": "clara", "key": CLARA, "tenant": "a", "requests_per_minute": 2},
    ]
    return written(tmp_path, rows)


@pytest.fixture
async def stack(tokenizer: Tokenizer, keys: Path) -> AsyncIterator[Stack]:
    async with running(tokenizer, api_keys_file=str(keys)) as stack:
        yield stack


# --- the file


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".toml", f'[[keys]]\nname = "n"\nkey = "{ANNA}"\n'),
        (".yaml", f"keys:\n- name: n\n  key: {ANNA}\n"),
        (".json", json.dumps({"keys": [{"name": "n", "key": ANNA}]})),
    ],
)
def test_a_file_may_be_written_in_three_ways(tmp_path: Path, suffix: str, text: str) -> None:
    [entry] = read_clients(written(tmp_path, text, suffix))
    assert (entry.name, entry.tenant_name, len(entry.cache_salt)) == ("n", "n", 64)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidArgument, match="chmod 600"):
        read_clients(written(tmp_path, [{"name": "n", "key": ANNA}], mode=mode))


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"name": "n"}],
        [{"name": "n", "key": ANNA, "sha256": "0" * 64}],
        [{"name": "n", "key": "short"}],
        [{"name": "n", "sha256": ANNA}],
        [{"name": "has space", "key": ANNA}],
        [{"name": "n", "key": ANNA, "max_inflight": 3}],
        [{"name": "n", "key": ANNA, "max_in_flight": -1}],
        [{"name": "n", "key": ANNA}, {"name": "n", "key": BORIS}],
        [{"name": "n", "key": ANNA}, {"name": "m", "key": ANNA}],
        f'{{"keys": [{{"name": "n", "key": "{ANNA}"',
        "[]",
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_clients(written(tmp_path, rows))
    assert ANNA not in str(refused.value) and "api_keys_file" in str(refused.value)


# --- quotas


def test_a_bucket_fills_again() -> None:
    bucket = Bucket(60.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == 0.0
    bucket.charge(60.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1.0, 0.5) == pytest.approx(0.5)
    bucket.charge(100.0, 0.5)
    assert bucket.wait_s(1.0, 0.5) == pytest.approx(100.5), "the overdraft is refilled first"
    assert bucket.wait_s(1000.0, 10_000.0) == 0.0, "a full bucket allows its capacity"


def test_each_quota_names_the_time_to_retry() -> None:
    rows = [ClientEntry("n", ANNA, max_in_flight=2, requests_per_minute=3, tokens_per_minute=600)]
    clients = Clients(rows, 0.0)
    client = clients.of({"authorization": f"bearer {ANNA}"})
    client.enter(2, 0.0)
    for num_answers, status, code in ((3, 400, "invalid_value"), (1, 429, "quota_in_flight")):
        with pytest.raises(ApiError) as refused:
            client.enter(num_answers, 0.0)
        assert (refused.value.status, refused.value.detail.code) == (status, code)
    client.leave(2)
    client.used(500, 700, 0.0)
    with pytest.raises(ApiError) as refused:
        client.enter(1, 0.0)
    assert refused.value.detail.code == "quota_tokens"
    assert refused.value.retry_after_s == pytest.approx(60.1), "600 too many at 10 a second, and one"
    for _ in range(2):
        client.enter(1, 100.0)
        client.leave(1)
    client.enter(1, 100.0)
    client.leave(1)
    with pytest.raises(ApiError) as refused:
        client.enter(1, 100.0)
    assert refused.value.detail.code == "quota_requests"
    assert refused.value.retry_after_s == pytest.approx(20.0)


def test_a_new_file_keeps_answers_in_progress() -> None:
    clients = Clients([ClientEntry("n", ANNA, max_in_flight=2)], 0.0)
    client = clients.of(bearer_lower(ANNA))
    client.enter(1, 0.0)
    clients.replace([ClientEntry("n", BORIS, max_in_flight=2, tenant="t")], 1.0)
    with pytest.raises(ApiError):
        clients.of(bearer_lower(ANNA))
    assert clients.of(bearer_lower(BORIS)) is client and client.entry.tenant == "t"
    assert client.num_in_flight == 1


def test_a_key_that_is_not_valid_unicode_is_a_wrong_one() -> None:
    with pytest.raises(ApiError) as refused:
        Clients([ClientEntry("n", ANNA)], 0.0).of({"authorization": "Bearer \ud800"})
    assert (refused.value.status, refused.value.detail.code) == (401, "invalid_api_key")


def bearer_lower(key: str) -> dict[str, str]:
    return {name.lower(): value for name, value in bearer(key).items()}


# --- through the gateway


@pytest.mark.parametrize("headers", [{}, bearer("sk-unknown-0123456789"), {"Authorization": f"Basic {ANNA}"}])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", TEXT, "/v1/chat/completions"])
async def test_without_a_key_every_request_is_refused(
    stack: Stack, path: str, headers: dict[str, str]
) -> None:
    method = "POST" if "completions" in path else "GET"
    async with stack.session.request(method, stack.url + path, data=b"{", headers=headers) as response:
        answer = await response.json()
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert (answer["error"]["type"], answer["error"]["code"]) == ("authentication_error", "invalid_api_key")
    for open_path in ("/health", "/ready", "/version"):
        assert (await stack.get(open_path, {}))[0] == 200


async def test_the_official_client_is_known_by_its_key(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=ANNA, max_retries=0) as client:
        answer = await client.completions.create(model="tiny", prompt="w20 w21", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens == 2
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-wrong-key-wrong").models.list()
    page = metrics.page().decode()
    assert 'mooncake_gateway_client_tokens_total{client="anna",kind="output"}' in page
    assert ANNA not in page and BORIS not in page


async def test_which_paths_there_are_is_for_clients_with_a_key(stack: Stack) -> None:
    for path, method, status in (("/v1/nothing", "GET", 404), (TEXT, "GET", 405), ("/health", "POST", 405)):
        for headers, expected in (
            (None, 401),
            (bearer("sk-unknown-0123456789"), 401),
            (bearer(ANNA), status),
        ):
            async with stack.session.request(method, stack.url + path, headers=headers) as response:
                assert response.status == expected, (path, headers)
                assert (await response.json())["error"]["type"]
        async with stack.session.request(
            method, stack.url + path, headers={"X-API-Key": ADMIN_KEY}
        ) as response:
            assert response.status == status


@pytest.mark.parametrize("salt", ["ab/cd+ef==", "a@b", "a\\b", "a\0b", "a" * 129])
def test_engines_get_the_digest_of_a_salt_that_vllm_refuses(salt: str) -> None:
    entry = ClientEntry("anna", key=ANNA, salt=salt)
    assert entry.cache_salt == salt
    assert entry.salt_at_engines == hashlib.sha256(salt.encode()).hexdigest()


@pytest.mark.parametrize("salt", ["", "ab-cd+ef==", "a" * 128])
def test_engines_get_any_other_salt_as_it_is(salt: str) -> None:
    entry = ClientEntry("anna", key=ANNA, salt=salt)
    assert entry.salt_at_engines == entry.cache_salt


async def test_the_salt_comes_from_the_key_and_not_from_the_request(stack: Stack) -> None:
    for key in (ANNA, BORIS, CLARA):
        body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": "of another tenant"}
        status, _, _ = await stack.post(TEXT, body, bearer(key))
        assert status == 200
    salts = [call["cache_salt"] for call in stack.prefill[0].calls]
    assert salts[0] == salts[2] != salts[1], "anna and clara are one tenant"
    assert "of another tenant" not in salts


async def test_other_engines_get_the_salt_and_not_the_key(keys: Path) -> None:
    async with fronting(api_keys_file=str(keys), engine_api_key="the engines' own") as front:
        body = {"prompt": "w20 w21 w22 w23 w24", "max_tokens": 2, "cache_salt": "x"}
        status, _, _ = await front.post(TEXT, body, bearer(ANNA))
        assert status == 200
        for one in front.engines:
            assert [call["cache_salt"] for call in one.calls] == [read_clients(keys)[0].salt_at_engines]
            assert one.headers[0]["authorization"] == "Bearer the engines' own"


async def test_sessions_of_two_tenants_differ_at_an_engine(keys: Path) -> None:
    """Anna and Clara are one tenant. Boris is another, and also gives the name of Anna's session there."""
    async with fronting(0, 1, api_keys_file=str(keys)) as front:
        [engine] = front.decode

        async def named(key: str, headers: dict[str, str], **fields: Any) -> tuple[Any, Any]:
            body = {"prompt": PROMPT, **fields}
            status, answer, _ = await front.post(TEXT, body, {**bearer(key), **headers})
            assert status == 200, answer
            return engine.headers[-1].get("x-session-id"), engine.calls[-1].get("session_id")

        anna, _ = await named(ANNA, {"X-Session-ID": "s"})
        assert (await named(CLARA, {}, session_id="s")) == (anna, anna)
        boris, in_body = await named(BORIS, {}, session_id="s")
        assert boris == in_body and len({anna, boris, "s"}) == 3
        assert (await named(BORIS, {"X-Session-ID": anna}))[0] not in (anna, boris)
        assert await named(BORIS, {}) == (None, None)
        await named(BORIS, {}, vllm_xargs={"session_id": anna, "kept": 1})
        assert engine.calls[-1]["vllm_xargs"] == {"kept": 1}


async def test_quotas_are_refused_with_a_pause(stack: Stack) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    for number in range(3):
        status, answer, headers = await stack.post(TEXT, body, bearer(CLARA))
        assert status == (200 if number < 2 else 429)
    assert answer["error"]["code"] == "quota_requests" and int(headers["retry-after"]) >= 1
    assert (await stack.post(TEXT, body, bearer(ANNA)))[0] == 200, "each has its own"
    status, answer, _ = await stack.post(TEXT, {**body, "n": 3}, bearer(BORIS))
    assert (status, answer["error"]["param"]) == (400, "n")
    assert stack.gateway.limiter.num_in_flight == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_ends_early_is_charged_for_what_was_computed(
    tokenizer: Tokenizer, tmp_path: Path, stream: bool
) -> None:
    """Our workers compute it; the prompt has 12 tokens."""
    keys = written(tmp_path, [{"name": "anna", "key": ANNA, "tokens_per_minute": 12}])
    async with running(tokenizer, api_keys_file=str(keys)) as stack:
        for worker in stack.decode:
            worker.stall_after = 3
        before = output_tokens_shown("anna")
        body = {"prompt": PROMPT, "max_tokens": 9, "stream": stream}
        asking = asyncio.ensure_future(stack.post(TEXT, body, bearer(ANNA)))
        await until(lambda: any(worker.calls for worker in stack.decode))
        asking.cancel()
        await until(lambda: not stack.gateway.limiter.num_in_flight)
        status, answer, _ = await stack.post(TEXT, body, bearer(ANNA))
        assert (status, answer["error"]["code"]) == (429, "quota_tokens")
        assert output_tokens_shown("anna") == before, "the metric counts completed answers"


@pytest.mark.parametrize(("num_prefill", "path"), [(1, TEXT), (0, TEXT), (0, "/v1/messages")])
async def test_an_answer_of_another_engine_that_ends_early_is_charged_too(
    tmp_path: Path, num_prefill: int, path: str
) -> None:
    keys = written(tmp_path, [{"name": "anna", "key": ANNA, "tokens_per_minute": 5}])
    async with fronting(num_prefill, 1, api_keys_file=str(keys)) as front:
        front.decode[0].gate = asyncio.Event()
        prompt = "w20 w21 w22 w23 w24"
        body: dict[str, Any] = {"model": "org/tiny", "max_tokens": 5, "stream": True}
        body |= {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
        url, headers = front.url + path, bearer(ANNA)
        async with front.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
        await until(lambda: not front.gateway.limiter.num_in_flight)
        status, answer, _ = await front.post(path, body, headers)
        assert status == 429 and "tokens a minute" in str(answer["error"])


def output_tokens_shown(client: str) -> float:
    labels = {"client": client, "kind": "output"}
    return metrics.registry.get_sample_value("mooncake_gateway_client_tokens_total", labels) or 0.0


async def test_an_explanation_is_only_for_the_client_of_the_request(stack: Stack) -> None:
    _, answer, headers = await stack.post(TEXT, {"prompt": PROMPT, "max_tokens": 1}, bearer(ANNA))
    for name in (answer["id"], headers["x-request-id"]):
        path = f"/v1/requests/{name}/explain"
        assert (await stack.get(path, bearer(ANNA)))[0] == 200
        assert (await stack.get(path, bearer(BORIS)))[0] == 404, "as if it did not exist"
        assert (await stack.get(path, {}))[0] == 401
        assert (await stack.get(path, {"X-API-Key": ADMIN_KEY}))[0] == 200


async def test_a_changed_file_applies_at_once_and_a_broken_one_does_not(stack: Stack, keys: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    written(keys.parent, [{"name": "dora", "key": "sk-dora-0123456789"}])
    stack.gateway.reload_clients(is_forced=False)
    assert (await stack.post(TEXT, body, bearer(ANNA)))[0] == 401
    assert (await stack.post(TEXT, body, bearer("sk-dora-0123456789")))[0] == 200
    written(keys.parent, "{")
    stack.gateway.reload_clients()
    os.remove(keys)
    stack.gateway.reload_clients(is_forced=False)
    assert (await stack.post(TEXT, body, bearer("sk-dora-0123456789")))[0] == 200


def test_https_needs_both_files() -> None:
    with pytest.raises(InvalidArgument, match="https_key"):
        GatewaySettings(https_cert="x")
    with pytest.raises(InvalidArgument, match="https_cert"):
        GatewaySettings(https_key="x")
