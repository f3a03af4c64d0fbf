# SPDX-License-Identifier: Apache-2.0
"""A worker that keeps the HTTP contract and computes nothing: the next token is a function of all before it.

It is a real HTTP server, so that faults that a test injects (kill, stall, refuse) look like those of a
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

VOCABULARY = 100
MAX_MODEL_LEN = 64
BLOCK_TOKENS = 4


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    # Never one of the first ten, which are the tokenizer's special tokens.
    return 10 + (sum(token_ids) * 31 + len(token_ids) * 7 + seed) % (VOCABULARY - 10)


def text_of(token_id: int) -> str:
    return f" w{token_id}"


def answer_ids(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """Every worker's answer to ``prompt``."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids, seed))
    return ids[len(prompt) :]


def answer_text(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> str:
    return "".join(text_of(token) for token in answer_ids(prompt, num_tokens, seed))


_pushes: dict[str, asyncio.Event] = {}
_held: dict[str, tuple[int, ...]] = {}
"""Tokens of answers that were handed over, by their transfer."""


def _pushed(transfer_id: str) -> asyncio.Event:
    """Whether the prompt of a transfer is computed."""
    return _pushes.setdefault(transfer_id, asyncio.Event())


@dataclass
class WorkerDouble:
    """A worker double. Set the fields to inject faults; read ``calls`` for its requests."""

    pool: dict[tuple[int, ...], None] = field(default_factory=dict)
    "Prefixes whose KV some worker stored; share it between doubles."

    die_after: int | None = None
    "Cut the connection after this many tokens of an answer (0: at once), once."

    stall_after: int | None = None
    "Send nothing more after this many tokens of an answer."

    abort_after: int | None = None
    "End the stream with finish_reason abort after this many tokens, once."

    replace_after: int | None = None
    "Replace the weights after this many tokens of an answer, once, which ends it with an error."

    version: int = 0
    "Number of the weights, which the tokens depend on."

    refuse: tuple[int, dict[str, Any]] | None = None
    "Answer every completion with this status and error."

    measured: dict[str, Any] | None = None
    "Measurements that it reports of its prompts."

    is_measuring: bool = False
    "Report where the KV of its prompts was, instead of ``measured``."

    own: dict[tuple[int, ...], None] = field(default_factory=dict)
    "Prefixes whose KV is in its own memory."

    push_port: int = 0
    "Port at which it claims to answer requests for KV. Decode waits until prefill has computed the transfer."

    hand_over_status: int = 200
    "Status of its answers to requests to hand an answer over; 0: it hands over and does not answer."

    token_pause_s: float = 0.0
    is_ready: bool = True
    calls: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_cancelled: int = 0
    leaving: dict[str, str] = field(default_factory=dict)
    "By ``move_id`` of a stream that is to be handed over: the transfer of its KV."

    streams: dict[str, None] = field(default_factory=dict)
    "The ``move_id`` of every stream in progress."

    resumed: list[dict[str, Any]] = field(default_factory=list)
    "Reports of the KV of answers that it continued."
    address: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/kv/hand_over", self._hand_over)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port or self.port).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    @property
    def weights(self) -> str:
        return f"weights-{self.version}"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2] or 0)

    async def stop(self) -> None:
        """Stop as if the process was killed; ``start`` brings it back at the same address."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({"push_port": self.push_port}, status=200 if self.is_ready else 503)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "tiny", "object": "model", "created": 1, "max_model_len": MAX_MODEL_LEN}
        return web.json_response({"object": "list", "data": [card]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        self.headers.append(dict(request.headers))
        if self.refuse is not None:
            status, error = self.refuse
            return web.json_response({"error": error}, status=status, headers={"Retry-After": "7"})
        if (body.get("kv_transfer_params") or {}).get("weights", self.weights) != self.weights:
            error = {"message": "other weights", "type": "conflict_error", "code": "weights_replaced"}
            return web.json_response({"error": error}, status=409)
        if self.replace_after == 0:
            return web.json_response({"error": self._replaced()}, status=409)
        prompt: list[int] = body["prompt"]
        if max(prompt) >= VOCABULARY:
            error = {"message": "no such token", "type": "invalid_request_error", "param": "prompt"}
            return web.json_response({"error": {**error, "code": "invalid_value"}}, status=400)
        move_id = (body.get("kv_transfer_params") or {}).get("move_id", "")
        try:
            if body.get("stream"):
                self.streams[move_id] = None
                return await self._stream(request, body)
            return await self._prefill(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.num_cancelled += 1
            raise
        finally:
            self.streams.pop(move_id, None)

    async def _hand_over(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.hand_over_status not in (0, 200):
            return web.json_response({"error": {"message": "no"}}, status=self.hand_over_status)
        if body["move_id"] not in self.streams:
            return web.json_response({"error": {"message": "unknown"}}, status=404)
        self.leaving[body["move_id"]] = body["transfer_id"]
        if self.hand_over_status == 0:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        return web.json_response({"status": "leaving", "push_port": self.push_port})

    def _resumed(self, ids: Sequence[int], transfer: dict[str, Any]) -> dict[str, Any]:
        num_loaded = max((end for end in range(len(ids) + 1) if tuple(ids[:end]) in self.pool), default=0)
        is_pushed = bool(transfer.get("push_from")) and bool(self.push_port)
        if is_pushed:
            assert _held.get(transfer["transfer_id"]) == tuple(ids), "other tokens than those that are pushed"
            num_loaded = len(ids)
        found = {
            "num_local_tokens": 0,
            "num_loaded_tokens": num_loaded,
            "num_computed_tokens": len(ids) - num_loaded,
            "is_pushed": is_pushed,
        }
        self.resumed.append(found)
        return found

    async def _prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert body["kv_transfer_params"]["do_remote_decode"] is True
        assert body["max_tokens"] == 1
        await self._misbehave(request, 0)
        prompt = body["prompt"]
        usage = self._usage(prompt, 1)
        measured = self._measured(prompt) if self.is_measuring else self.measured
        for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
            self.pool[tuple(prompt[:end])] = self.own[tuple(prompt[:end])] = None
        token = next_token(prompt)
        if "transfer_id" in body["kv_transfer_params"]:
            _pushed(body["kv_transfer_params"]["transfer_id"]).set()
        return web.json_response(
            {
                "id": "x",
                "object": "text_completion",
                "created": 1,
                "model": "tiny",
                "choices": [{"index": 0, "text": text_of(token), "finish_reason": "length"}],
                "usage": usage,
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "num_stored_tokens": len(prompt),
                    **({"measured": measured} if measured else {}),
                },
            }
        )

    def _measured(self, prompt: list[int]) -> dict[str, Any]:
        own, pool = (
            max((end for end in range(len(prompt) + 1) if tuple(prompt[:end]) in found), default=0)
            for found in (self.own, self.pool)
        )
        num_loaded = max(0, pool - own)
        return {
            "queued_s": 0.0,
            "loaded_s": 0.0,
            "computed_s": 0.001,
            "num_local_tokens": own,
            "num_loaded_tokens": num_loaded,
            "num_computed_tokens": max(1, len(prompt) - own - num_loaded),
        }

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        transfer = body.get("kv_transfer_params") or {}
        num_prior = transfer.get("num_output_tokens", 0)
        ids = list(body["prompt"])
        prompt = ids[: len(ids) - num_prior]
        if transfer.get("push_from"):
            await self._misbehave(request, 0)
            await _pushed(transfer["transfer_id"]).wait()
        whole = "".join(text_of(token) for token in ids[len(prompt) :])
        num_sent = transfer.get("output_text_offset", 0)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        finish, is_first = None, True
        named: dict[str, Any] = {"weights": self.weights}
        if num_prior:
            named["resumed"] = self._resumed(ids, transfer)
        while finish is None:
            if transfer_id := self.leaving.pop(transfer.get("move_id", ""), ""):
                _held[transfer_id] = tuple(ids)
                _pushed(transfer_id).set()
                moved = {"index": 0, "text": "", "finish_reason": "moved", "token_ids": []}
                await self._event(response, {"choices": [moved]})
                break
            await self._misbehave(request, len(ids) - len(prompt))
            if self.replace_after == len(ids) - len(prompt):
                await self._event(response, {"error": self._replaced()})
                return response
            token = next_token(ids, body.get("seed", 0) + self.version)
            ids.append(token)
            whole += text_of(token)
            text, num_sent = whole[num_sent:], len(whole)
            stop = next((stop for stop in body.get("stop", []) if stop in whole), None)
            if stop is not None:
                finish = "stop"
                text = text[: max(0, len(text) - (len(whole) - whole.index(stop)))]
            elif len(ids) - len(prompt) >= body["max_tokens"]:
                finish = "length"
            if self.abort_after == len(ids) - len(prompt):
                self.abort_after, finish = None, "abort"
            choice = {"index": 0, "text": text, "finish_reason": finish, "stop_reason": stop}
            if body.get("logprobs") is not None:
                name = text_of(token)
                top = [{"token": name, "logprob": -0.5, "bytes": [*name.encode()]}]
                choice["logprobs"] = {
                    "text_offset": [len(whole) - len(name)],
                    "token_logprobs": [-0.5],
                    "tokens": [name],
                    "top_logprobs": [{name: -0.5}],
                    "content": [{**top[0], "top_logprobs": top}],
                }
            extra = {"kv_transfer_params": named} if is_first else {}
            is_first = False
            await self._event(response, {"choices": [{**choice, "token_ids": [token]}], **extra})
            await asyncio.sleep(self.token_pause_s)
        await self._event(response, {"choices": [], "usage": self._usage(prompt, len(ids) - len(prompt))})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, fields: dict[str, Any]) -> None:
        fields = {"id": "x", "object": "text_completion", "created": 1, "model": "tiny", **fields}
        await response.write(b"data: " + json.dumps(fields).encode() + b"\n\n")

    async def _misbehave(self, request: web.Request, num_tokens: int) -> None:
        if self.die_after == num_tokens:
            self.die_after = None
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if self.stall_after is not None and num_tokens >= self.stall_after:
            await asyncio.get_running_loop().create_future()

    def _replaced(self) -> dict[str, Any]:
        self.replace_after = None
        self.version += 1
        return {"message": "weights replaced", "type": "conflict_error", "code": "weights_replaced"}

    def _usage(self, prompt: list[int], num_output: int) -> dict[str, Any]:
        cached = [end for end in range(len(prompt) + 1) if tuple(prompt[:end]) in self.pool]
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_output,
            "total_tokens": len(prompt) + num_output,
            "prompt_tokens_details": {"cached_tokens": max(cached, default=0)},
        }


@contextlib.asynccontextmanager
async def doubles(
    num_prefill: int, num_decode: int
) -> AsyncIterator[tuple[list[WorkerDouble], list[WorkerDouble]]]:
    """Running doubles that share one pool."""
    pool: dict[tuple[int, ...], None] = {}
    workers = [WorkerDouble(pool) for _ in range(num_prefill + num_decode)]
    for worker in workers:
        await worker.start()
    try:
        yield workers[:num_prefill], workers[num_prefill:]
    finally:
        for worker in workers:
            await worker.stop()


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of the words w10 … w99 with a chat template, in the Hugging Face format."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    special = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "<system>", "s6", "s7", "s8", "s9"]
    vocabulary = [*special, *(f"w{number}" for number in range(10, VOCABULARY))]
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
