# SPDX-License-Identifier: Apache-2.0
"""Writers of OpenAI API response bodies from the pieces of an answer: whole or streamed, text or chat.

A *piece* is the increment of one choice since the last piece. The worker makes pieces from its
engine's tokens, the gateway from a worker's stream; both write them through this module, so that the
formats exist once. It knows no HTTP framework and no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from mooncake.http.openai import (
    AnswerMessage,
    AnyRequest,
    ApiError,
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

MAX_WHOLE_LOGPROBS = 1 << 19
"""Most log probabilities in an answer that is not streamed, those of alternatives included: all are in memory
until the answer ends, some hundred bytes each."""


def bound_logprobs(request: AnyRequest, rooms: Iterable[int]) -> None:
    """Bound the log probabilities of an answer that is not streamed, which are kept until it ends.

    A request without a limit of its tokens, which may fill the context, gets one here.

    Args:
        request: the client's.
        rooms: the most tokens that the model's context leaves for an answer to each prompt.

    Raises:
        ApiError: 400, the client asks for more of them.
    """
    if request.stream or request.num_logprobs is None:
        return
    limit = request.output_limit
    lengths = [room if limit is None else min(limit, room) for room in rooms]
    num_tokens, most_tokens = request.n * sum(lengths), MAX_WHOLE_LOGPROBS // (1 + request.num_logprobs)
    if num_tokens <= most_tokens:
        return
    default = most_tokens // (request.n * len(lengths))
    if limit is None and default >= max(1, request.min_tokens):
        request.max_tokens = default
        return
    message = (
        f"the answer may have {num_tokens * (1 + request.num_logprobs)} log probabilities; allowed: at most "
        f"{MAX_WHOLE_LOGPROBS} in an answer that is not streamed; ask for fewer tokens, answers or "
        "alternatives, or for a stream"
    )
    raise ApiError(400, message, param="logprobs", code="invalid_value")


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


class JoinedPieces:
    """One choice of an answer that is not streamed, while its pieces arrive: ``add`` each, then ``whole``.

    What has arrived is not copied for the next piece: the work of an answer would grow with the square of its
    length, on an event loop that serves others.
    """

    def __init__(self, index: int, *, has_columns: bool = True, has_rows: bool = True) -> None:
        """``has_columns``, ``has_rows``: whether log probabilities are kept in the form of a text completion,
        and in that of a chat. The form that will not be written would take as much memory again."""
        self._index = index
        self._has_columns, self._has_rows = has_columns, has_rows
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: CompletionLogprobs | None = None
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def add(self, piece: AnswerPiece) -> None:
        """Append the next piece, which is not changed, then or later."""
        self._texts.append(piece.text)
        self._token_ids.extend(piece.token_ids)
        if piece.logprobs is not None:
            self._add_logprobs(piece.logprobs)
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._stop_reason = piece.stop_reason if piece.stop_reason is not None else self._stop_reason

    def _add_logprobs(self, later: CompletionLogprobs) -> None:
        if self._logprobs is None:
            self._logprobs = CompletionLogprobs(content=[])
        joined = self._logprobs
        if self._has_columns:
            joined.text_offset.extend(later.text_offset)
            joined.token_logprobs.extend(later.token_logprobs)
            joined.tokens.extend(later.tokens)
            joined.top_logprobs.extend(later.top_logprobs)
        if self._has_rows:
            _rows(joined).extend(_rows(later))

    def whole(self) -> AnswerPiece:
        """The choice so far, as one piece."""
        return AnswerPiece(
            self._index,
            "".join(self._texts),
            self._token_ids,
            self._logprobs,
            self._finish_reason,
            self._stop_reason,
        )


class CompletionWriter:
    """Writer of bodies of ``/v1/completions``."""

    def __init__(self, answer_id: str, created: int, model: str, with_token_ids: bool) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._with_token_ids = with_token_ids

    def joined(self, index: int) -> JoinedPieces:
        """What joins the pieces of a choice for ``whole``."""
        return JoinedPieces(index, has_rows=self._with_token_ids)

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

    def joined(self, index: int) -> JoinedPieces:
        return JoinedPieces(index, has_columns=False)

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
