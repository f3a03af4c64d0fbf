"""The OpenAI endpoints in front of our workers.

Owns the way from an HTTP request to an ``Answer`` and back: the prompts' tokens, what the conductor is told
of each, and the headers. What happens to a prompt then is ``route.py``; other engines are ``relaying.py``.
"""

from __future__ import annotations

import uuid

from fastapi import Request, Response

from mooncake import clock
from mooncake.conductor.messages import Place
from mooncake.gateway.accounting import Slo
from mooncake.gateway.answer import Answer, AnyRequest
from mooncake.gateway.clients import Client
from mooncake.gateway.gate import Entry
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.naming import Names
from mooncake.gateway.reading import names_of, request_id_of, slo_of, tokenize
from mooncake.gateway.route import Walk
from mooncake.gateway.stream import EventStream, unless_left
from mooncake.inference.openai import ChatCompletionRequest, CompletionRequest, model_not_found, to_json
from mooncake.prefix import block_hashes, root_hash, short_key


async def route(gateway: Gateway, http: Request, asked: AnyRequest) -> Response:
    """The answer to a request, whole or streamed. Raises ApiError."""
    settings = gateway.settings
    if asked.model is not None and asked.model != settings.model_name:
        raise model_not_found(asked.model, settings.model_name)
    slo = slo_of(http)
    num_prompts = len(asked.prompts) if isinstance(asked, CompletionRequest) else 1
    num_answers = num_prompts * asked.n
    client: Client | None = http.state.client
    entry = Entry(gateway.gate, client, num_answers, clock.monotonic())

    def leave() -> None:
        entry.leave(clock.monotonic())

    if client is not None:
        asked.cache_salt = client.entry.cache_salt
    try:
        max_model_len = await gateway.context_length()
        assert gateway.tokenizer is not None, "else engines are served as they are"
        prompts = await tokenize(gateway.tokenizer, asked, max_model_len)
        answer = _answer(gateway, http, asked, prompts, max_model_len, slo)
        if not asked.stream:
            body = to_json(await unless_left(http, answer.whole()))
            leave()
            return Response(body, 200, {**names_of(http), **answer.headers()}, media_type="application/json")
        # The first event is awaited here, so that a refusal still has a status of its own.
        events = answer.stream()
        first = await unless_left(http, anext(events))
    except BaseException:
        leave()
        raise
    return EventStream(first, events, {**names_of(http), **answer.headers()}, leave, answer.deadline)


def _answer(
    gateway: Gateway,
    http: Request,
    asked: AnyRequest,
    prompts: list[list[int]],
    max_model_len: int,
    slo: Slo,
) -> Answer:
    settings = gateway.settings
    prefix = "chatcmpl" if isinstance(asked, ChatCompletionRequest) else "cmpl"
    answer_id = f"{prefix}-{uuid.uuid4().hex}"
    passed_on = {"X-Request-ID": request_id_of(http)}
    for name in ("traceparent", "tracestate"):
        if name in http.headers:
            passed_on[name] = http.headers[name]
    salt = asked.cache_salt or ""

    def place_of(number: int, prompt: list[int]) -> Place:
        hashes = block_hashes(prompt, settings.block_tokens, root_hash(salt))
        bare = block_hashes(prompt, settings.block_tokens, root_hash()) if salt else []
        return Place(
            answer_id if len(prompts) == 1 else f"{answer_id}/p{number}",
            len(prompt),
            [short_key(block_hash) for block_hash in hashes],
            http.headers.get("x-session-affinity", "")[:256],
            lifetime_s=settings.request_timeout_s + 60.0,
            slo_ttft_s=(slo.ttft_ms or 0.0) / 1000.0,
            slo_tbt_s=(slo.tbt_ms or 0.0) / 1000.0,
            priority=asked.priority or 0,
            max_output_tokens=asked.output_limit or 0,
            bare_keys=[short_key(block_hash) for block_hash in bare],
        )

    places = [place_of(number, prompt) for number, prompt in enumerate(prompts)]
    request_id = request_id_of(http)
    is_secret = request_id != http.headers.get("x-request-id")
    name = http.state.client.name if http.state.client is not None else ""
    gateway.named.note(Names(answer_id, request_id, is_secret, [place.request_id for place in places], name))
    http.state.answer_id = answer_id
    walks = [
        Walk(
            gateway.scheduling,
            gateway.workers,
            place=place,
            prompt=prompt,
            headers=passed_on,
            block_tokens=settings.block_tokens,
        )
        for place, prompt in zip(places, prompts, strict=True)
    ]
    return Answer(
        asked,
        walks,
        answer_id=answer_id,
        model=settings.model_name,
        max_model_len=max_model_len,
        deadline=clock.monotonic() + settings.request_timeout_s,
        slo=slo,
        client=http.state.client,
    )
