# SPDX-License-Identifier: Apache-2.0
"""Canaries are as long as they must be, and their answers are read whatever a server leaves out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from mooncake.doctor.canaries import (
    CanarySender,
    as_text,
    canary_length,
    count_hits,
    random_prompt,
    read_shot,
)
from mooncake.doctor.engine_probe import MetricsPage
from mooncake.doctor.facts import EngineFacts, Shot
from mooncake.doctor.http_probe import HttpProbe, HttpReply, HttpServerAt
from mooncake.security import Identity


@pytest.mark.parametrize(
    ("sizes", "limits", "length"),
    [
        ([], [], 264),
        ([16, 32], [2048, 8192], 72),
        ([None], [None], 264),
        ([784], [1000], 992),
        ([4096], [], 4088),
    ],
)
def test_length(sizes: list[int | None], limits: list[int | None], length: int) -> None:
    limits = limits or [None] * len(sizes)
    engines = [
        EngineFacts("a:1", block_tokens=size, max_model_len=limit)
        for size, limit in zip(sizes, limits, strict=True)
    ]
    assert canary_length(engines) == length


def test_prompts_are_random_and_repeatable() -> None:
    one = random_prompt(7, 100)
    assert one == random_prompt(7, 100) != random_prompt(8, 100)
    assert len(one) == 100 and all(32 < token < 256 for token in one)
    assert len(as_text(one).split()) == 100


def reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpReply:
    return HttpReply(status, json.dumps(body).encode(), headers or {}, 0.5)


def test_an_answer_with_everything() -> None:
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    logprobs = {"tokens": [" the", "x"], "token_logprobs": [-0.5, None]}
    headers = {"x-mooncake-prefill": "p:1", "x-mooncake-decode": "d:1", "x-mooncake-route": "prefill, decode"}
    shot = read_shot(
        reply({"usage": usage, "choices": [{"text": " thex", "logprobs": logprobs}]}, headers=headers)
    )
    assert (shot.prompt_tokens, shot.cached_tokens, shot.text, shot.logprob) == (40, 32, " the", -0.5)
    assert (shot.prefill, shot.decode, shot.route) == ("p:1", "d:1", "prefill, decode")


def test_an_answer_with_little() -> None:
    shot = read_shot(reply({"choices": [{"text": "x"}]}))
    assert shot.is_answered and shot.cached_tokens is None and shot.reused is None and shot.logprob is None
    assert read_shot(reply({"usage": {"prompt_tokens_details": None}})).cached_tokens is None


def test_an_error_and_what_is_no_completion() -> None:
    shot = read_shot(reply({"error": {"message": "too busy"}}, 503))
    assert (shot.status, shot.error) == (503, "too busy")
    assert not read_shot(HttpReply(200, b"<html>", {}, 0.1)).is_answered


def test_counters_say_what_an_answer_does_not() -> None:
    pages = [MetricsPage({"vllm:prefix_cache_hits": 10.0 + more}) for more in (0, 32)]
    shot = Shot(200)
    count_hits(shot, *pages)
    assert (shot.counted_hits, shot.counted_external_hits, shot.reused) == (32, None, 32)
    count_hits(shot, pages[1], pages[0])
    assert shot.counted_hits == 0, "the engine was started anew"
    unknown = Shot(200)
    count_hits(unknown, None, pages[0])
    assert unknown.reused is None


@asynccontextmanager
async def a_server(refused: set[str]) -> AsyncIterator[tuple[HttpServerAt, list[dict[str, Any]]]]:
    """A server that refuses some fields, or kinds of prompts."""
    bodies: list[dict[str, Any]] = []

    async def complete(http: web.Request) -> web.Response:
        body = await http.json()
        bodies.append(body)
        kinds = {*body, "ids" if isinstance(body["prompt"], list) else "text"}
        if kinds & refused:
            return web.json_response({"error": {"message": "refused"}}, status=400)
        return web.json_response({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 8}})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield HttpServerAt(f"http://127.0.0.1:{runner.addresses[0][1]}"), bodies
    await runner.cleanup()


@pytest.mark.parametrize(("refused", "num_first"), [(set(), 1), ({"logprobs"}, 2), ({"logprobs", "ids"}, 3)])
async def test_the_form_that_a_server_takes_is_found_once(refused: set[str], num_first: int) -> None:
    async with a_server(refused) as (server, bodies), HttpProbe(Identity(), 5.0) as http:
        sender = CanarySender(http, 5.0)
        assert (await sender.send(server, "m", [40] * 8)).is_answered
        assert len(bodies) == num_first
        assert (await sender.send(server, "m", [40] * 8)).is_answered
        assert len(bodies) == num_first + 1
    assert all(body["max_tokens"] == 4 and body["temperature"] == 0 for body in bodies)


async def test_a_salt_is_not_dropped() -> None:
    async with a_server({"cache_salt"}) as (server, bodies), HttpProbe(Identity(), 5.0) as http:
        shot = await CanarySender(http, 5.0).send(server, "m", [40] * 8, "salt")
    assert shot.status == 400 and len(bodies) == 1


async def test_a_server_that_refuses_everything() -> None:
    async with a_server({"prompt"}) as (server, bodies), HttpProbe(Identity(), 5.0) as http:
        shot = await CanarySender(http, 5.0).send(server, "m", [40] * 8)
    assert (shot.status, shot.error, len(bodies)) == (400, "refused", 3)


@pytest.mark.parametrize(
    "body",
    [
        [],
        7,
        {"usage": [1]},
        {"choices": [{"text": 7}]},
        {"usage": {"prompt_tokens_details": {"cached_tokens": "a"}}},
    ],
)
def test_answers_of_another_form(body: Any) -> None:
    shot = read_shot(reply(body))
    assert shot.status == 502 and "no completion" in shot.error
