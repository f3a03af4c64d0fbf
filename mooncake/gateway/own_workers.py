# SPDX-License-Identifier: Apache-2.0
"""The OpenAI endpoints in front of our workers.

Owns the conversion of an HTTP request to an ``OwnWorkersAnswer`` and back: the prompts' tokens, their
``Place`` events, and the headers. A prompt's calls to workers are ``own_workers_request.py``; other engines
are ``any_engine.py``.
"""

from __future__ import annotations

import uuid

from fastapi import Request, Response

from mooncake import clock
from mooncake.conductor.messages import Place
from mooncake.gateway.clients import Client
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.limiter import Permit
from mooncake.gateway.metrics import Slo
from mooncake.gateway.own_workers_answer import AnyRequest, OwnWorkersAnswer
from mooncake.gateway.own_workers_request import OwnWorkersRequest
from mooncake.gateway.request_ids import RequestIds
from mooncake.gateway.request_parsing import names_of, request_id_of, slo_of, tokenize
from mooncake.http.openai import ChatCompletionRequest, CompletionRequest, model_not_found, to_json
from mooncake.http.sse import EventStreamResponse, cancel_on_disconnect
from mooncake.prefix import block_hashes, root_hash, short_key


async def serve_own_workers(gateway: Gateway, http: Request, request: AnyRequest) -> Response:
    """Answer a request, whole or streamed. Raises ApiError."""
    settings = gateway.settings
    if request.model is not None and request.model != settings.model_name:
        raise model_not_found(request.model, settings.model_name)
    slo = slo_of(http)
    num_prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    num_answers = num_prompts * request.n
    client: Client | None = http.state.client
    entry = Permit(gateway.limiter, client, num_answers, clock.monotonic())

    def leave() -> None:
        entry.leave(clock.monotonic())

    if client is not None:
        request.cache_salt = client.entry.cache_salt
    try:
        max_model_len = await gateway.context_length()
        assert gateway.tokenizer is not None, "without a tokenizer requests are proxied"
        prompts = await tokenize(gateway.tokenizer, request, max_model_len)
        answer = _answer(gateway, http, request, prompts, max_model_len, slo)
        if not request.stream:
            body = to_json(await cancel_on_disconnect(http, answer.whole()))
            leave()
            return Response(body, 200, {**names_of(http), **answer.headers()}, media_type="application/json")
        # The first event is awaited here, so that a refusal still has a status of its own.
        events = answer.stream()
        first = await cancel_on_disconnect(http, anext(events))
    except BaseException:
        leave()
        raise
    return EventStreamResponse(first, events, {**names_of(http), **answer.headers()}, leave, answer.deadline)


def _answer(
    gateway: Gateway,
    http: Request,
    request: AnyRequest,
    prompts: list[list[int]],
    max_model_len: int,
    slo: Slo,
) -> OwnWorkersAnswer:
    settings = gateway.settings
    prefix = "chatcmpl" if isinstance(request, ChatCompletionRequest) else "cmpl"
    answer_id = f"{prefix}-{uuid.uuid4().hex}"
    passed_on = {"X-Request-ID": request_id_of(http)}
    for name in ("traceparent", "tracestate"):
        if name in http.headers:
            passed_on[name] = http.headers[name]
    salt = request.cache_salt or ""

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
            priority=request.priority or 0,
            max_output_tokens=request.output_limit or 0,
            bare_keys=[short_key(block_hash) for block_hash in bare],
        )

    places = [place_of(number, prompt) for number, prompt in enumerate(prompts)]
    request_id = request_id_of(http)
    is_secret = request_id != http.headers.get("x-request-id")
    name = http.state.client.name if http.state.client is not None else ""
    gateway.request_ids.note(
        RequestIds(answer_id, request_id, is_secret, [place.request_id for place in places], name)
    )
    http.state.answer_id = answer_id
    worker_requests = [
        OwnWorkersRequest(
            gateway.scheduling,
            gateway.workers,
            place=place,
            prompt=prompt,
            headers=passed_on,
            block_tokens=settings.block_tokens,
        )
        for place, prompt in zip(places, prompts, strict=True)
    ]
    return OwnWorkersAnswer(
        request,
        worker_requests,
        answer_id=answer_id,
        model=settings.model_name,
        max_model_len=max_model_len,
        deadline=clock.monotonic() + settings.request_timeout_s,
        slo=slo,
        client=http.state.client,
    )
