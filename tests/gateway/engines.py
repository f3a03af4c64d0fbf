# SPDX-License-Identifier: Apache-2.0
"""A third-party engine as a gateway sees it: the OpenAI API with ``kv_transfer_params``, and no model.

The next token is a function of all before it. Its KV is the prompt's tokens, and a decode skips computing
only the KV that it received: from a store that engines share, by the parameters in a prefill's answer, or by
a push to a concurrent decode. Errors of the gateway show as tokens computed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.gateway.conftest import Stack, opened
from tests.gateway.doubles import next_token, text_of

BLOCK = 4
PUSH_TIMEOUT_S = 5.0


def words_to_ids(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split() if word[0] == "w" and word[1:].isdigit()]


@dataclass
class Wire:
    """The means of moving KV between engines: the shared store, the blocks kept for a reader, the pushes."""

    store: dict[tuple[int, ...], None] = field(default_factory=dict)
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pushes: dict[str, asyncio.Future[tuple[int, ...]]] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    "Transfers that a decode waits for, with the engine that it expects them from."

    def push(self, transfer_id: str) -> asyncio.Future[tuple[int, ...]]:
        return self.pushes.setdefault(transfer_id, asyncio.get_running_loop().create_future())


@dataclass
class Engine:
    wire: Wire
    name: str = ""
    num_ranks: int = 1
    has_tokenize: bool = True
    models: tuple[tuple[str, str], ...] = (("org/tiny", "org/tiny"),)
    "Names and roots."

    refuse: tuple[int, Any] | None = None
    die_after: int | None = None
    "Cut the connection after this many tokens, once."
    fail_load: bool = False
    "End a stream, once, with an error before its first token, as vLLM does when KV can't be loaded."
    late_refusal: dict[str, Any] | None = None
    "End streams with this error before their first token, as engines do that find it while they answer."
    give_up: tuple[int, str] | None = None
    "After this many tokens report 'error', 'refused', 'replaced' or 'abort', once, and end normally."
    stall: asyncio.Event | None = None
    "No answer is sent before it is set."
    hold: asyncio.Event | None = None
    "A prefill that has transferred its KV answers when this is set."
    gate: asyncio.Event | None = None
    "Answers pause after the first token until it is set."
    has_token_details: bool = True
    has_named_apis: bool = True
    "Whether it serves messages and responses."
    plain: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = field(default_factory=dict)
    "Answers of other endpoints, by path."
    sent: list[bytes] = field(default_factory=list)
    "The bodies and streams of its messages and responses."

    local: dict[tuple[int, ...], None] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    "Number of prompt tokens that each call computed."
    num_tokenized: int = 0
    num_cancelled: int = 0
    address: str = ""
    _runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/query", self._query)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        if self.has_named_apis:
            app.router.add_post("/v1/messages", self._generate)
            app.router.add_post("/v1/responses", self._generate)
        if self.has_tokenize:
            app.router.add_post("/tokenize", self._tokenize)
        app.router.add_route("*", "/{path:.*}", self._plain)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", int(self.address.rpartition(":")[2] or 0)).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        self.name = self.name or f"engine-{self.port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def rank_name(self, rank: int) -> str:
        return f"{self.name}_dp{rank}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _plain(self, request: web.Request) -> web.Response:
        if request.path not in self.plain:
            return web.json_response({"detail": "Not Found"}, status=404)
        return await self.plain[request.path](request)

    async def _models(self, request: web.Request) -> web.Response:
        cards = [
            {"id": name, "object": "model", "created": 1, "owned_by": "vllm", "root": root}
            for name, root in self.models
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _query(self, request: web.Request) -> web.Response:
        ranks = range(self.num_ranks)
        return web.json_response({str(rank): {"engine_id": self.rank_name(rank)} for rank in ranks})

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.num_tokenized += 1
        tokens = self._ids(await request.json())
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    def _ids(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            texts = [body.get("system"), *(one["content"] for one in body["messages"])]
            return [3, *words_to_ids(" ".join(map(_flat, texts))), 4]
        if "input" in body:
            items = body["input"] if isinstance(body["input"], list) else [{"content": body["input"]}]
            texts = [body.get("instructions"), *(one["content"] for one in items)]
            return [3, *words_to_ids(" ".join(map(_flat, texts))), 4]
        prompt = body["prompt"]
        return words_to_ids(prompt) if isinstance(prompt, str) else list(prompt)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        self.paths.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.refuse is not None:
            status, error = self.refuse
            return web.json_response({"error": error}, status=status)
        try:
            if self.stall is not None:
                await self.stall.wait()
            if request.path in ("/v1/messages", "/v1/responses"):
                return await self._answer_named(request, body)
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.num_cancelled += 1
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompts = body.get("prompt")
        batch = prompts if isinstance(prompts, list) and isinstance(prompts[0], str) else [prompts]
        choices: list[list[int]] = []
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        cached = 0
        for prompt in batch:
            ids = self._ids({**body, "prompt": prompt})
            cached += await self._load(ids, body.get("kv_transfer_params") or {})
            usage["prompt_tokens"] += len(ids)
            for number in range(body.get("n") or 1):
                out = list(ids)
                for _ in range(body.get("max_completion_tokens") or body.get("max_tokens") or 16):
                    out.append(next_token(out, (body.get("seed") or 0) + number))
                choices.append(out[len(ids) :])
            self._save(ids, body)
        usage["completion_tokens"] = sum(map(len, choices))
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        found: dict[str, Any] = dict(usage)
        if self.has_token_details:
            found["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.die_after == 0:
            self._die(request)
        if body.get("stream"):
            return await self._stream(request, body, choices[0], found)
        is_chat = "messages" in body
        shown = [
            {
                "index": index,
                "finish_reason": "length",
                **self._part(is_chat, "message", "".join(map(text_of, choice))),
            }
            for index, choice in enumerate(choices)
        ]
        whole: dict[str, Any] = {**self._frame(body), "choices": shown, "usage": found}
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            whole["kv_transfer_params"] = self._handed_over(body)
            if self.hold is not None:
                await self.hold.wait()
        return web.json_response(whole)

    async def _answer_named(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        ids = self._ids(body)
        cached = await self._load(ids, body.get("kv_transfer_params") or {})
        out = list(ids)
        for _ in range(body.get("max_tokens") or body.get("max_output_tokens") or 16):
            out.append(next_token(out))
        self._save(ids, body)
        if self.die_after == 0:
            self._die(request)
        texts = [text_of(token) for token in out[len(ids) :]]
        make = message_events if request.path == "/v1/messages" else response_events
        whole, events = make(body["model"], texts, len(ids), cached)
        if not body.get("stream"):
            if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
                whole["kv_transfer_params"] = self._handed_over(body)
                if self.hold is not None:
                    await self.hold.wait()
            self.sent.append(json.dumps(whole).encode())
            return web.Response(body=self.sent[-1], content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.sent.append(b"")
        num_sent = 0
        for event in events:
            if self.give_up is not None and self.give_up[0] == num_sent:
                self.give_up = None
                event = {"type": "error", "error": {"type": "internal_error", "message": "boom"}}
            line = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
            self.sent[-1] += line
            for piece in (line[:7], line[7:]):
                await response.write(piece)
            if event["type"] == "error":
                break
            if "delta" in event["type"]:
                num_sent += 1
                if self.gate is not None:
                    await self.gate.wait()
                if self.die_after == num_sent:
                    self._die(request)
        return response

    async def _load(self, ids: list[int], params: dict[str, Any]) -> int:
        """Load KV. Returns the tokens that need not be computed, as engines count them."""
        known = [end for end in range(len(ids) + 1) if tuple(ids[:end]) in (self.local | self.wire.store)]
        cached = max(known, default=0)
        if params.get("do_remote_prefill"):
            if "transfer_id" in params:
                self.wire.waiting[params["transfer_id"]] = params.get("remote_engine_id") or ""
                async with asyncio.timeout(PUSH_TIMEOUT_S):
                    received = await self.wire.push(params["transfer_id"])
            else:
                received = self.wire.kept.pop(params["remote_block_ids"][0])
            assert received == tuple(ids), "another prompt's blocks"
            cached = len(ids) - 1
        self.num_computed.append(len(ids) - cached)
        return cached

    def _save(self, ids: list[int], body: dict[str, Any]) -> None:
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            self.local[tuple(ids[:end])] = None
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode") and "transfer_id" in params:
            self.wire.push(params["transfer_id"]).set_result(tuple(ids))

    def _handed_over(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if "transfer_id" in body["kv_transfer_params"]:
            return None
        block = uuid.uuid4().hex
        self.wire.kept[block] = tuple(self._ids(body))
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.name,
            "remote_block_ids": [block],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        }

    async def _stream(
        self, request: web.Request, body: dict[str, Any], ids: list[int], usage: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.fail_load:
            self.fail_load = False
            error = {"message": "KV load failed", "type": "InternalServerError", "code": 500}
            await self._event(response, {"error": error})
            await response.write(b"data: [DONE]\n\n")
            return response
        if self.late_refusal is not None:
            await self._event(response, {"error": self.late_refusal})
            await response.write(b"data: [DONE]\n\n")
            return response
        for number, token in enumerate(ids):
            finish = "length" if number + 1 == len(ids) else None
            if self.give_up is not None and self.give_up[0] == number:
                (_, how), self.give_up = self.give_up, None
                end = {"index": 0, "finish_reason": "abort", **self._part("messages" in body, "delta", "")}
                error = {"message": "boom", "code": {"replaced": "weights_replaced", "refused": 400}.get(how)}
                ending = {"choices": [end]} if how == "abort" else {"error": error}
                await self._event(response, {**self._frame(body), **ending})
                break
            part = self._part("messages" in body, "delta", text_of(token))
            choice = {"index": 0, "finish_reason": finish, **part, "of_this_engine": {"only": number}}
            await self._event(response, {**self._frame(body), "choices": [choice]})
            if self.gate is not None:
                await self.gate.wait()
            if self.die_after == number + 1:
                self._die(request)
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._event(response, {**self._frame(body), "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _die(self, request: web.Request) -> None:
        self.die_after = None
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    def _frame(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"id": "x", "object": "whatever", "created": 1, "model": body.get("model")}

    def _part(self, is_chat: bool, name: str, text: str) -> dict[str, Any]:
        return {name: {"role": "assistant", "content": text}} if is_chat else {"text": text}

    async def _event(self, response: web.StreamResponse, fields: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(fields).encode() + b"\n\n")


def _flat(content: Any) -> str:
    """The text of strings and of blocks in which there is text."""
    if isinstance(content, list):
        return " ".join(map(_flat, content))
    return _flat(content.get("text")) if isinstance(content, dict) else str(content or "")


def message_events(
    model: str, texts: list[str], num_prompt: int, cached: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An answer of Anthropic's API, whole and as the events of its stream."""
    counts = {"input_tokens": num_prompt - cached, "cache_read_input_tokens": cached}
    frame = {"id": "msg_x", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}
    end = {"stop_reason": "max_tokens", "stop_sequence": None}
    content = [{"type": "text", "text": "".join(texts)}]
    whole = {**frame, **end, "content": content, "usage": {**counts, "output_tokens": len(texts)}}
    start: dict[str, Any] = {
        **frame,
        "content": [],
        "stop_reason": None,
        "usage": {**counts, "output_tokens": 0},
    }
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    for text in texts:
        delta = {"type": "text_delta", "text": text}
        events.append({"type": "content_block_delta", "index": 0, "delta": delta})
    events.append({"type": "content_block_stop", "index": 0})
    events.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": len(texts)}})
    return whole, [*events, {"type": "message_stop"}]


def response_events(
    model: str, texts: list[str], num_prompt: int, cached: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An answer of OpenAI's responses, whole and as the events of its stream."""
    frame: dict[str, Any] = {
        "id": "resp_x",
        "object": "response",
        "created_at": 1,
        "model": model,
        "error": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    usage = {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": len(texts),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + len(texts),
    }
    part = {"type": "output_text", "text": "".join(texts), "annotations": []}
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
    whole = {**frame, "status": "completed", "output": [item], "usage": usage}
    place = {"item_id": "m", "output_index": 0, "content_index": 0}
    begun = {**frame, "status": "in_progress", "output": [], "usage": None}
    opened = {**item, "status": "in_progress", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": opened},
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        *({"type": "response.output_text.delta", **place, "delta": text} for text in texts),
        {"type": "response.output_text.done", **place, "text": part["text"]},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return whole, [{**event, "sequence_number": number} for number, event in enumerate(events)]


@dataclass
class Front(Stack):
    """A gateway with third-party engines."""

    prefill: list[Engine]  # type: ignore[assignment]
    decode: list[Engine]  # type: ignore[assignment]

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]


@contextlib.asynccontextmanager
async def fronting(
    num_prefill: int = 1, num_decode: int = 1, tokenizer: Any = None, engine: Any = None, **settings: Any
) -> AsyncIterator[Front]:
    """A gateway whose engines are all ready. ``engine``: fields of each engine."""
    wire = Wire()
    engines = [Engine(wire, **(engine or {})) for _ in range(num_prefill + num_decode)]
    for one in engines:
        if settings.get("protocol") == "pool":
            one.local = wire.store
        await one.start()
    prefill, decode = engines[:num_prefill], engines[num_prefill:]
    fields: dict[str, Any] = {
        "prefill": tuple(word for one in prefill for word in (one.address, str(one.port))),
        "block_tokens": BLOCK,
        "probe_interval_s": 0.05,
        "suspect_probe_interval_s": 0.02,
        "max_probe_interval_s": 0.05,
    }
    try:
        async with opened(Front, prefill, decode, tokenizer, **{**fields, **settings}) as front:
            yield front
    finally:
        for one in engines:
            await one.stop()
