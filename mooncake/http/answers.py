# SPDX-License-Identifier: Apache-2.0
"""Writers of OpenAI API response bodies from the pieces of an answer: whole or streamed, text or chat.

A *piece* is the increment of one choice since the last piece. The worker makes pieces from its
engine's tokens, the gateway from a worker's stream; both write them through this module, so that the
formats exist once. It knows no HTTP framework and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from mooncake.http.openai import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Delta,
    TokenLogprob,
    Usage,
    to_event,
)
from mooncake.http.worker_stats import ResumedStats


class AnswerPiece(msgspec.Struct):
    """Increment of one choice. Text never ends inside a UTF-8 character or a possible stop string."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weights: str = ""
    """In the first piece of a worker's answer: digest of the weights that compute it, if it is known."""
    resumed: ResumedStats | None = None
    """In the first piece of an answer that another worker began: where its KV came from."""

    def join(self, later: AnswerPiece) -> None:
        """Append a later piece."""
        self.text += later.text
        self.token_ids = self.token_ids + later.token_ids
        if later.logprobs is not None:
            joined = self.logprobs or CompletionLogprobs(content=[])
            self.logprobs = CompletionLogprobs(
                joined.text_offset + later.logprobs.text_offset,
                joined.token_logprobs + later.logprobs.token_logprobs,
                joined.tokens + later.logprobs.tokens,
                joined.top_logprobs + later.logprobs.top_logprobs,
                _rows(joined) + _rows(later.logprobs),
            )
        self.finish_reason = later.finish_reason or self.finish_reason
        self.stop_reason = later.stop_reason if later.stop_reason is not None else self.stop_reason


class CompletionWriter:
    """Writer of bodies of ``/v1/completions``."""

    def __init__(self, answer_id: str, created: int, model: str, with_token_ids: bool) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._with_token_ids = with_token_ids

    def opening(self, num_choices: int) -> bytes:
        """The first bytes of a stream: none."""
        return b""

    def chunk(self, piece: AnswerPiece, usage: Usage | None = None) -> bytes:
        """One server-sent event with a piece, and ``usage`` so far if it was requested."""
        params: dict[str, Any] = {}
        if self._with_token_ids and piece.weights:
            params["weights"] = piece.weights
        if self._with_token_ids and piece.resumed is not None:
            params["resumed"] = piece.resumed
        return to_event(self._response([self._choice(piece)], usage or UNSET, params or UNSET))

    def usage_chunk(self, usage: Usage, kv_transfer_params: dict[str, Any] | None = None) -> bytes:
        """The last event of a stream with ``include_usage``: no choice, only counts."""
        return to_event(self._response([], usage, kv_transfer_params or UNSET))

    def whole(
        self, choices: Sequence[AnswerPiece], usage: Usage, kv_transfer_params: dict[str, Any] | None = None
    ) -> msgspec.Struct:
        """The body of an answer that is not streamed; each piece is a whole choice."""
        return self._response([self._choice(piece) for piece in choices], usage, kv_transfer_params or UNSET)

    def _response(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType,
        kv_transfer_params: dict[str, Any] | UnsetType = UNSET,
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            kv_transfer_params=kv_transfer_params,
        )

    def _choice(self, piece: AnswerPiece) -> CompletionChoice:
        logprobs = piece.logprobs
        if logprobs is not None and not self._with_token_ids:
            logprobs = msgspec.structs.replace(logprobs, content=UNSET)
        return CompletionChoice(
            piece.index,
            piece.text,
            piece.finish_reason,
            logprobs,
            piece.stop_reason,
            piece.token_ids if self._with_token_ids else UNSET,
        )


class ChatWriter:
    """Writer of bodies of ``/v1/chat/completions``; the same methods as ``CompletionWriter``."""

    def __init__(self, answer_id: str, created: int, model: str, with_token_ids: bool) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._with_token_ids = with_token_ids

    def opening(self, num_choices: int) -> bytes:
        """The first events of a stream: the role of every choice."""
        opening = (ChatChunkChoice(index, Delta("assistant", "")) for index in range(num_choices))
        return b"".join(to_event(self._chunk([choice], UNSET)) for choice in opening)

    def chunk(self, piece: AnswerPiece, usage: Usage | None = None) -> bytes:
        choice = ChatChunkChoice(
            piece.index,
            Delta(content=piece.text) if piece.text or not piece.finish_reason else Delta(),
            piece.finish_reason,
            chat_logprobs(piece.logprobs),
            piece.stop_reason,
            piece.token_ids if self._with_token_ids else UNSET,
        )
        return to_event(self._chunk([choice], usage or UNSET))

    def usage_chunk(self, usage: Usage, kv_transfer_params: dict[str, Any] | None = None) -> bytes:
        return to_event(self._chunk([], usage))

    def whole(
        self, choices: Sequence[AnswerPiece], usage: Usage, kv_transfer_params: dict[str, Any] | None = None
    ) -> msgspec.Struct:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    piece.index,
                    AnswerMessage(piece.text),
                    piece.finish_reason,
                    chat_logprobs(piece.logprobs),
                    piece.stop_reason,
                    piece.token_ids if self._with_token_ids else UNSET,
                )
                for piece in choices
            ],
            usage=usage,
            kv_transfer_params=kv_transfer_params or UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )


def chat_logprobs(logprobs: CompletionLogprobs | None) -> ChatLogprobs | None:
    """The rows of a chat completion in the columns of a text completion."""
    return None if logprobs is None else ChatLogprobs(_rows(logprobs))


def _rows(logprobs: CompletionLogprobs) -> list[TokenLogprob]:
    return [] if logprobs.content is UNSET else logprobs.content
