# SPDX-License-Identifier: Apache-2.0
"""One prompt on our workers: placement, prefill, decode, and retries where one of them fails.

It hides from clients which workers there are and that they fail. The prompt travels as token ids. An answer
is followed token by token; when its decode worker is lost, the tokens generated so far are appended to the
prompt and another worker continues, so that the client sees one uninterrupted answer. Correctness never
depends on the transfer of KV: a decode worker that finds no KV computes it. HTTP towards the client, and
several choices or prompts in one request, are above (``own_workers_answer.py``); calls are below
(``worker_client.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake import clock
from mooncake.conductor.client import ConductorClient
from mooncake.conductor.messages import Decision, Place, Prefilled
from mooncake.gateway.retries import Attempts, PlacedRequest, Route, as_error
from mooncake.gateway.worker_client import WorkerBusy, WorkerClient, WorkerFailed
from mooncake.http.answers import AnswerPiece
from mooncake.http.openai import Usage
from mooncake.http.worker_stats import PromptStats
from mooncake.types import InstanceId

RESUME_TIMEOUT_S = 30.0
"""How long an answer that has begun waits for another worker: long, as its client has part of it."""


@dataclass
class AnswerChoice:
    """One choice of an answer, as far as it was generated."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    is_finished: bool = False


class OwnWorkersRequest(PlacedRequest):
    """One prompt: ``prefill`` once, then ``decode`` once per choice, then ``end``."""

    def __init__(
        self,
        scheduling: ConductorClient,
        workers: WorkerClient,
        *,
        place: Place,
        prompt: list[int],
        headers: Mapping[str, str],
        block_tokens: int,
    ) -> None:
        """``place``: the event that places the prompt."""
        super().__init__(scheduling, place)
        self.prompt = prompt
        self.num_cached_tokens = 0
        """Prompt tokens whose KV the prefill instance found in its memory or the pool."""
        self._workers = workers
        self._block_tokens = block_tokens
        self._headers = headers
        self._transfer: dict[str, Any] = {}
        self._is_prefilled = False
        self._is_computed = False
        self._decision: Decision | None = None

    async def prefill(self, cache_salt: str | None) -> None:
        """Place the prompt and have its KV computed.

        Raises:
            ApiError: the request was refused, or no instance can serve it.
        """
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": False,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        attempts = Attempts()
        while True:
            decision = await self._place(self._request_id, attempts, True, 0.0)
            self._decision = decision
            self.route = Route(decision.prefill, decision.decode, decision.degraded)
            if decision.prefill is None:
                return
            body["kv_transfer_params"] = self._hints(decision)
            began = clock.monotonic()
            try:
                answer = await self._workers.complete(decision.prefill, body, self._headers)
            except (WorkerFailed, WorkerBusy) as error:
                self._note(error, self._request_id, attempts, "prefill")
                continue
            self._transfer = answer.kv_transfer_params or {}
            measured = self._transfer.pop("measured", None)
            self._is_prefilled = self._is_computed = True
            if answer.usage is not None:
                self._count_cached(answer.usage)
            fact = self._prefilled(measured, decision, clock.monotonic() - began)
            refused = await self._scheduling.prefilled(fact)
            if refused is not None:
                raise as_error(refused)
            return

    async def decode(
        self, choice: AnswerChoice, sampling: Mapping[str, Any], max_tokens: int
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the pieces of one choice; the last has a ``finish_reason``. Raises as ``prefill``."""
        decision, self._decision = self._decision, None
        place_id = self._request_id if decision is not None else f"{self._request_id}/{choice.index}"
        attempts = Attempts()
        while not choice.is_finished:
            if decision is None:
                timeout_s = RESUME_TIMEOUT_S if choice.token_ids else 0.0
                decision = await self._place(place_id, attempts, False, timeout_s)
                self.route.decode = decision.decode
                self.route.degraded = self.route.degraded or decision.degraded
            if len(choice.token_ids) >= max_tokens:
                # The worker was lost between its last token and its finish reason.
                choice.is_finished = True
                yield AnswerPiece(choice.index, finish_reason="length")
                return
            pieces = self._follow(decision.decode, choice, sampling, max_tokens)
            try:
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        yield piece
            except (WorkerFailed, WorkerBusy) as error:
                if not choice.is_finished:
                    self._note(error, place_id, attempts, "resumed" if choice.token_ids else "decode")
            decision = None

    def _hints(self, decision: Decision) -> dict[str, Any]:
        """Fields for our prefill workers that others don't know."""
        hints: dict[str, Any] = {"do_remote_decode": True}
        if decision.turn > 0:
            hints["turn"] = round(decision.turn * 1000)
        if decision.fetches:
            end = max(fetch.first_block + fetch.num_blocks for fetch in decision.fetches)
            hints["max_load_tokens"] = end * self._block_tokens
        return hints

    def _prefilled(self, measured: Any, decision: Decision, elapsed_s: float) -> Prefilled:
        """The worker's measurements; for one that measures nothing, estimates from here."""
        with contextlib.suppress(msgspec.ValidationError):
            found = msgspec.convert(measured, PromptStats)
            return Prefilled(
                self._request_id,
                found.queued_s,
                found.computed_s,
                found.num_computed_tokens,
                found.num_local_tokens,
                found.loaded_s,
                found.num_loaded_tokens,
            )
        return self._estimated_prefilled(decision, len(self.prompt), self.num_cached_tokens, elapsed_s)

    async def _follow(
        self, instance: InstanceId, choice: AnswerChoice, sampling: Mapping[str, Any], max_tokens: int
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Yield pieces from one worker, which continues after the tokens of ``choice``."""
        transfer = dict(self._transfer)
        if choice.token_ids:
            transfer |= {
                "num_output_tokens": len(choice.token_ids),
                "output_text_offset": choice.num_chars,
            }
        body: dict[str, Any] = {
            **sampling,
            "prompt": self.prompt + choice.token_ids,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if transfer:
            body["kv_transfer_params"] = transfer
        chunks = self._workers.stream(instance, body, self._headers)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if chunk.usage is not None and not self._is_prefilled:
                    self._count_cached(chunk.usage)
                if chunk.choices and not self._is_computed:
                    # There was no prefill instance: this one has computed the prompt.
                    self._is_computed = True
                    self._scheduling.post(Prefilled(self._request_id, has_begun=True))
                for part in chunk.choices:
                    if part.finish_reason == "abort":
                        raise WorkerFailed(instance, "it aborted the answer")
                    token_ids = list(part.token_ids or [])
                    choice.token_ids += token_ids
                    choice.num_chars += len(part.text)
                    choice.is_finished = part.finish_reason is not None
                    yield AnswerPiece(
                        choice.index,
                        part.text,
                        token_ids,
                        part.logprobs,
                        part.finish_reason,
                        part.stop_reason,
                    )
        if not choice.is_finished:
            raise WorkerFailed(instance, "its stream ended before the answer did")

    def _count_cached(self, usage: Usage) -> None:
        if usage.prompt_tokens_details is not None:
            self.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
