# SPDX-License-Identifier: Apache-2.0
"""The shapes of the OpenAI HTTP API: requests, answers, errors.

The worker and the gateway share these shapes, so that a client sees no difference between them,
and a vLLM server can replace the worker. The module knows no models,
tokenizers, HTTP frameworks or KV blocks. Requests are pydantic models, because input from
outside needs errors that name the field; answers are msgspec structs, because one is encoded per token.

In addition to the public API, a request has fields that move a sequence between workers: ``cache_salt``
(separates tenants' prefixes), ``return_token_ids`` (each choice also has ``token_ids``, its new
tokens) and ``kv_transfer_params``, a map that a gateway passes on unread, except for these keys:

``do_remote_decode``    request to prefill: compute the prompt's KV and store it; another worker decodes
``do_remote_prefill``   answer of prefill, request to decode: KV of the prompt is in the pool
``num_stored_tokens``   number of prompt tokens whose KV is in the pool
``turn``                request to prefill: waiting prompts are computed in this order, lower first
``max_load_tokens``     request to prefill: load at most this many leading tokens, compute the rest
``measured``            answer of prefill: timings of its first token (``worker_stats.PromptStats``)
``num_output_tokens``   request to decode: this many last prompt tokens are output already generated
                        elsewhere; they count for ``max_tokens``, ``min_tokens``, ``seed`` and ``stop``
``output_text_offset``  characters of that output which the client has already received
``weights``             first event of a stream with token ids: digest of the weights that compute the answer;
                        request to decode with ``num_output_tokens``: of those that computed this output
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import pydantic
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mooncake.errors import MooncakeError
from mooncake.http import large_json
from mooncake.security.http_auth import challenge

MAX_LOGPROBS = 20
"""Largest number of alternatives per token, as in the public API."""

MAX_CHOICES = 128
"""Largest ``n``."""

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 16 << 10
"""Most characters of all stop strings together: each choice's call to a worker repeats them."""

MAX_PRIORITY = 1000
"""Largest absolute value of a client's ``priority``."""

_MAX_INT = 2**63 - 1


# --- errors ------------------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct):
    """Error object: ``type`` and ``code`` are for programs, ``param`` names the request's field."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorDetail


WEIGHTS_REPLACED = "weights_replaced"
"""Code of the error (409) of an answer that ends because its worker's weights were replaced, or because they
are others than those that began it. What was computed of it may not be continued: the rest would be another
version's."""

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(MooncakeError):
    """Error returned to a client: HTTP ``status`` and the fields of an OpenAI error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message, _ERROR_TYPES.get(status, "server_error"), param, code)
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON error object."""
        return to_json(ErrorResponse(self.detail))

    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds, at least one, when a later retry may succeed; the scheme of a key
        where one is needed."""
        headers = challenge(self.status)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, -int(-self.retry_after_s // 1)))
        return headers


def check_content_type(headers: Mapping[str, str]) -> None:
    """Check that no page of another site has a browser send the body.

    A browser sends these types without asking the server, and says from which page (Fetch standard, "CORS
    protocol"). Programs that leave the type to their library, as curl and urllib do, send no origin.

    Raises:
        ApiError: 415.
    """
    content_type = headers.get("content-type", "")
    is_form = content_type.partition(";")[0].strip().lower() in _FORM_TYPES
    if is_form and any(name in headers for name in _SENT_BY_BROWSERS):
        message = f"the Content-Type is {content_type[:80]!r}; allowed from a page: application/json"
        raise ApiError(415, message, param="Content-Type", code="unsupported_media_type")


_FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
_SENT_BY_BROWSERS = ("origin", "sec-fetch-site")


SHOWN_CHARS = 80
"""Most characters of a client's value that an error repeats."""


def gateway_stopping() -> ApiError:
    """The error for a request that a gateway does not answer, or not to its end, because it stops."""
    message = "the gateway is stopping; try again"
    return ApiError(503, message, code="gateway_stopping", retry_after_s=1.0)


def internal_error(server: str) -> ApiError:
    """Error for a fault of the program."""
    return ApiError(500, f"the {server} failed; its log has the traceback", code="internal_error")


def model_not_found(model: str, served: str) -> ApiError:
    shown = repr(model[:SHOWN_CHARS])
    message = f"the model {shown} does not exist here; this server serves {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def context_length_exceeded(
    num_tokens: int, max_model_len: int, param: str = "messages", is_at_least: bool = False
) -> ApiError:
    """Error for a prompt whose ``num_tokens`` leave no room for an answer within ``max_model_len``.

    ``is_at_least``: ``num_tokens`` is a lower bound.
    """
    has = f"has at least {num_tokens}" if is_at_least else f"has {num_tokens}"
    message = (
        f"this model's maximum context length is {max_model_len} tokens, but the prompt {has} "
        "tokens and at least one more is needed for the answer; shorten the prompt"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


# --- requests ----------------------------------------------------------------------------------------


class _Shape(BaseModel):
    # Strict: "5" is not 5 and true is not 1, as in the public API. Unknown fields are harmless.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_default(cls, value: object, info: pydantic.ValidationInfo) -> object:
        # Clients generated from OpenAI's schema send null for fields that the user left out.
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        if value is not None or field.is_required():
            return value
        return field.get_default(call_default_factory=True)


def _rule(field: str, has: str, allowed: str) -> PydanticCustomError:
    """Error for a violated rule over several fields; ``field`` is the one to change."""
    return PydanticCustomError(
        "rule", "{field} is {has}; allowed: {allowed}", {"field": field, "has": has, "allowed": allowed}
    )


def _unsupported(field: str, value: object, allowed: tuple[Any, ...]) -> PydanticCustomError:
    """Error for a field that would change the answer, and does nothing here."""
    values = " or ".join(json.dumps(one) for one in (*allowed, None))
    has = json.dumps(value)
    fields = {"field": field, "has": has if len(has) <= 120 else f"{has[:117]}...", "allowed": values}
    message = "{field} is {has}; allowed: {allowed}, because this server does not have it"
    return PydanticCustomError("unsupported", message, fields)


# Input types of the validators below, for /openapi.json.
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKENS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    "minItems": 1,
}
_STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]
}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _TEXT,
        _TOKENS,
        {"type": "array", "items": _TEXT, "minItems": 1},
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}
_CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ]
}


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "min_p": (0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "regex": (),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's API, vLLM and SGLang which change an answer and which our workers do not have, with
the values, besides null, that ask for nothing. Fields that are neither here nor below are ignored."""


class StreamOptions(_Shape):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _GenerationRequest(_Shape):
    """Fields that a completion and a chat completion share. None means the server's default."""

    model_config = ConfigDict(extra="allow")  # only until they are checked
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    min_tokens: int = Field(0, ge=0, le=_MAX_INT)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT)
    seed: int | None = Field(None, ge=-_MAX_INT - 1, le=_MAX_INT)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[str], WithJsonSchema(_STOP_SCHEMA)] = Field(
        default_factory=list, max_length=MAX_STOP_STRINGS
    )
    stop_token_ids: list[Annotated[int, Field(ge=-_MAX_INT - 1, le=_MAX_INT)]] = Field(
        default_factory=list, max_length=1024
    )
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    session_id: Any = None
    prompt_cache_key: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, stop: object) -> object:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _can_stop(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("a stop string may not be empty")
        if (num_chars := sum(map(len, stop))) > MAX_STOP_CHARS:
            raise ValueError(f"stop strings have {num_chars} characters; allowed: {MAX_STOP_CHARS} together")
        return stop

    @model_validator(mode="after")
    def _nothing_unsupported(self) -> _GenerationRequest:
        others = self.model_extra or {}
        for name, value in others.items():
            allowed = self.neutral.get(name)
            if allowed is not None and value is not None and value not in allowed:
                raise _unsupported(name, value, allowed)
        others.clear()
        return self

    @model_validator(mode="after")
    def _consistent(self) -> _GenerationRequest:
        limit = self.output_limit
        if limit is not None and self.min_tokens > limit:
            raise _rule("min_tokens", str(self.min_tokens), f"at most max_tokens ({limit})")
        if self.stream_options is not None and not self.stream:
            raise _rule("stream_options", "set", "only with stream=true")
        return self

    @property
    def output_limit(self) -> int | None:
        """Largest number of tokens to generate, or None for the server's default."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


Prompt = str | list[int] | list[str] | list[list[int]]
_PROMPT_ALLOWED = "allowed: a string, a list of token ids, a list of strings or a list of lists of token ids"


class CompletionRequest(_GenerationRequest):
    """Body of ``POST /v1/completions``. By default 16 tokens are generated, as in the public API."""

    neutral = {**UNSUPPORTED, "add_special_tokens": (True,)}

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, prompt: object) -> object:
        if not isinstance(prompt, str | list):
            raise ValueError(_PROMPT_ALLOWED)
        if len(prompt) == 0:
            raise ValueError("a prompt may not be empty")
        if isinstance(prompt, str) or _are_token_ids(prompt):
            return prompt
        if not all(isinstance(one, str) or (isinstance(one, list) and _are_token_ids(one)) for one in prompt):
            raise ValueError(_PROMPT_ALLOWED)
        if any(len(one) == 0 for one in prompt):
            raise ValueError("a prompt may not be empty")
        return prompt

    @model_validator(mode="after")
    def _supported(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise _rule("best_of", str(self.best_of), f"the value of n ({self.n})")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompt as a batch: one element per prompt, in order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        batch: list[str] | list[list[int]] = self.prompt
        return batch

    @property
    def output_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to each token; None when no log probabilities are wanted."""
        return self.logprobs


def _are_token_ids(prompt: list[Any]) -> bool:
    return all(type(token) is int and 0 <= token < 2**32 for token in prompt)


class TextPart(_Shape):
    type: Literal["text"]
    text: str


_TEMPLATE_ARGUMENTS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "conversations",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
)
"""Names that the template renderer uses itself; a client may only set the template's own variables. The
tokenizer also refuses every name in the signature of the function that it calls."""

_text_parts = pydantic.TypeAdapter(list[TextPart])


class CalledFunction(_Shape):
    name: str
    arguments: str = ""


class ToolCall(_Shape):
    """Call of a tool in an earlier answer, as clients send it back."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def num_chars(self) -> int:
        return len(self.id or "") + len(self.function.name) + len(self.function.arguments)

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it: with arguments as an object, which is how they format it."""
        arguments: Any = self.function.arguments
        # A model may have written arguments that are no JSON, and a client sends back what it got.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {**({"id": self.id} if self.id else {}), "type": self.type, "function": function}


class ChatMessage(_Shape):
    """Message of a chat. ``content`` is text, or parts of text that are joined."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: object) -> object:
        if not isinstance(content, list):
            return content
        try:
            parts = _text_parts.validate_python(content)
        except pydantic.ValidationError:
            raise ValueError('allowed: text, or a list of parts {"type": "text", "text": "…"}') from None
        return "".join(part.text for part in parts)

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise _rule("content", "null", "text, or a list of text parts")
        if self.tool_calls and self.role != "assistant":
            raise _rule("tool_calls", "set", "only in messages of the assistant")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it. They expect a text, where OpenAI's API allows null."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatCompletionRequest(_GenerationRequest):
    """Body of ``POST /v1/chat/completions``. Without a limit the answer may fill the context."""

    neutral = {**UNSUPPORTED, "add_special_tokens": (False,)}

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    @model_validator(mode="after")
    def _supported(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise _rule("top_logprobs", str(self.top_logprobs), "only with logprobs=true")
        if self.tools and self.tool_choice != "none":
            raise _rule("tools", "set", 'only with tool_choice "none", as tool calls are not parsed here')
        if self.tool_choice not in (None, "none", "auto"):
            raise _unsupported("tool_choice", self.tool_choice, ("none", "auto"))
        reserved = [name for name in _TEMPLATE_ARGUMENTS if name in (self.chat_template_kwargs or {})]
        if reserved:
            raise _rule("chat_template_kwargs", f"holding {reserved[0]}", "variables of the model's template")
        if self.continue_final_message and self.add_generation_prompt:
            raise _rule("continue_final_message", "true", "only with add_generation_prompt=false")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As in ``CompletionRequest``."""
        return (self.top_logprobs or 0) if self.logprobs else None


AnyRequest = CompletionRequest | ChatCompletionRequest

RequestT = TypeVar("RequestT", CompletionRequest, ChatCompletionRequest)


def parse_request(shape: type[RequestT], body: bytes) -> RequestT:
    """Parse the request in ``body``.

    Raises:
        ApiError: 400 for bytes that are no JSON object, or naming the first wrong field in ``param``.
    """
    try:
        if len(body) > large_json.LARGE_BYTES:
            return shape.model_validate(large_json.decode(body))
        return shape.model_validate_json(body)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except pydantic.ValidationError as error:
        raise _bad_request(error) from None


def _bad_request(error: pydantic.ValidationError) -> ApiError:
    problem = error.errors(include_url=False)[0]
    kind, message = problem["type"], problem["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {message}", code="invalid_json")
    param = _field_path(problem["loc"])
    if kind == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    if kind in ("rule", "unsupported"):
        param = _field_path((*problem["loc"], problem["ctx"]["field"]))
        code = "unsupported" if kind == "unsupported" else "invalid_value"
        return ApiError(400, message, param=param, code=code)
    if param is None:
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    shown = json.dumps(problem["input"], default=str)
    shown = shown if len(shown) <= 120 else f"{shown[:117]}..."
    code = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
    return ApiError(400, f"{param} is {shown}; {message}", param=param, code=code)


def _field_path(location: tuple[int | str, ...]) -> str | None:
    """Format ``("messages", 0, "role")`` as ``messages[0].role``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None


# --- answers -----------------------------------------------------------------------------------------
# A field that defaults to UNSET is left out of the JSON; None is written as null.


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Token counts. ``cached_tokens`` are prompt tokens whose KV was found rather than computed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        details = PromptTokensDetails(cached_tokens)
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


FinishReason = Literal["stop", "length", "abort"]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities in columns, one element per token. ``text_offset`` counts from the answer's start.

    ``top_logprobs`` has the token of the answer and the likeliest ones. ``content`` has the same as the rows
    of a chat, with the tokens' bytes; it is written with ``return_token_ids`` only, and a gateway reads it.
    """

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []
    content: list[TokenLogprob] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the answer; None for the end-of-sequence token."""
    token_ids: list[int] | UnsetType | None = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Completion, or with ``stream`` one chunk of it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class AnswerMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType | None = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType | None = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "mooncake"
    root: str | None = None
    max_model_len: int | UnsetType | None = UNSET


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class KvEventSource(msgspec.Struct):
    """Address at which a worker publishes its KV events (``inference/kv_events.py``)."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class KvEventSources(msgspec.Struct):
    """Answer of ``GET /kv_event_sources``. ``block_size`` is in tokens; ``kv_identity`` is the digest in the
    keys of the worker's blocks in the pool, empty without one."""

    sources: list[KvEventSource]
    block_size: int
    kv_identity: str = ""


_encoder = msgspec.json.Encoder()


def to_json(answer: msgspec.Struct) -> bytes:
    """Encode an answer, chunk or error as JSON."""
    return _encoder.encode(answer)


def to_event(answer: msgspec.Struct) -> bytes:
    """Encode a chunk as one server-sent event."""
    return b"data: " + _encoder.encode(answer) + b"\n\n"


STREAM_END = b"data: [DONE]\n\n"
"""The last server-sent event of every stream that ended without an error."""
