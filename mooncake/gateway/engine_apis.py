# SPDX-License-Identifier: Apache-2.0
"""APIs of other engines that the gateway proxies: what it reads in their requests, answers and events.

Owns the names that differ between completions, chats, Anthropic's messages and OpenAI's responses: the field
with the prompt, the limit of the answer, the usage, and the events that begin, end and fail a stream. It also
converts a request to the chat from which block hashes are made, because engines tokenize it as one. The
conversion may differ from an engine's, which costs speed and never an answer. Nothing is sent here, and
requests and answers themselves are passed on as they came.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mooncake.http import large_json
from mooncake.http.openai import MAX_PRIORITY, ApiError, PromptTokensDetails, Usage
from mooncake.http.sse import unnamed_error

LONG_ITEM_CHARS = 4096
"""Items without text, such as images, that are larger are hashed by their digest."""

_BILLING = "x-anthropic-billing-header"
"""Beginning of a block in the system prompt of Claude Code that differs in each request; engines drop it."""


@dataclass(frozen=True)
class EngineApi:
    """One endpoint. Streams with ``endings`` have events with names; the others have data and ``[DONE]``."""

    path: str
    answer_prefix: str
    prompt: str
    "Field with the prompt."
    kinds: type | tuple[type, ...]
    "Types that it may have."
    kinds_in_words: str
    limits: tuple[str, ...] = ("max_tokens",)
    "Fields that limit the tokens of an answer; the first that is present counts."
    openings: tuple[str, ...] = ()
    "Names of events that an engine sends before the first token."
    endings: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def has_named_events(self) -> bool:
        return bool(self.endings)

    def is_opening(self, event_name: str) -> bool:
        """Whether an event of this name comes before the first token; one without a name does."""
        return not event_name or event_name in self.openings

    @property
    def is_chat(self) -> bool:
        """Whether it takes a chat, or another form of one, and not prompts that are continued."""
        return self.path != COMPLETIONS.path

    def prompts(self, request: Mapping[str, Any]) -> list[Any]:
        """The prompts that are answered: only completions take more than one.

        Which fields have them is a matter of the endpoint. An engine ignores those of another one, so that a
        completion with ``messages`` is no chat.
        """
        found = request.get(self.prompt)
        if self.is_chat or not isinstance(found, list) or not found or isinstance(found[0], int):
            return [found]
        return found

    def num_answers(self, request: Mapping[str, Any]) -> int:
        """Answers to a request: its prompts times ``n``. Embedded prompts are answered beside the others."""
        if self.has_named_events:
            return 1
        embedded = None if self.is_chat else request.get("prompt_embeds")
        num_embedded = len(embedded) if isinstance(embedded, list) else int(embedded is not None)
        return max(1, request.get("n") or 1) * (len(self.prompts(request)) + num_embedded)

    def max_output_tokens(self, request: Mapping[str, Any]) -> Any:
        """The limit of the answer, unchecked; None without one."""
        return next((request[name] for name in self.limits if request.get(name)), None)

    def framed(self, piece: bytes) -> bytes:
        """An event's data, or a whole event where events have names, as it is sent to the client."""
        return piece if self.has_named_events else b"data: " + piece + b"\n\n"

    def error_body(self, error: ApiError) -> bytes:
        """The error as clients of this API expect it."""
        if self.path != MESSAGES.path:
            return error.body()
        return msgspec.json.encode({"type": "error", "error": error.detail})

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a stream with an error."""
        if not self.has_named_events:
            return unnamed_error(error)
        found = self.error_body(error)
        if self.path == RESPONSES.path:
            detail = error.detail
            fields = {"message": detail.message, "code": detail.code, "param": detail.param}
            found = msgspec.json.encode({"type": "error", **fields, "sequence_number": 0})
        return b"event: error\ndata: " + found + b"\n\n"


COMPLETIONS = EngineApi("/v1/completions", "cmpl", "prompt", (str, list), "text or a list")
CHAT = EngineApi(
    "/v1/chat/completions",
    "chatcmpl",
    "messages",
    list,
    "a list",
    limits=("max_completion_tokens", "max_tokens"),
)
MESSAGES = EngineApi(
    "/v1/messages",
    "msg",
    "messages",
    list,
    "a list",
    openings=("message_start", "ping"),
    endings=("message_stop",),
    failures=("error",),
)
RESPONSES = EngineApi(
    "/v1/responses",
    "resp",
    "input",
    (str, list),
    "text or a list",
    limits=("max_output_tokens",),
    openings=("response.created", "response.queued", "response.in_progress"),
    endings=("response.completed", "response.incomplete"),
    failures=("error", "response.failed"),
)


# --- requests


def read_object(content: bytes) -> dict[str, Any]:
    """Parse a body whose fields the engine checks. Raises ApiError, 400."""
    try:
        request: Any = large_json.decode(content)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(request, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    _check_kind(request, "model", str, "a string")
    return request


def read_request(api: EngineApi, content: bytes) -> dict[str, Any]:
    """Parse a body and check the fields that the gateway reads. Raises ApiError, 400."""
    request = read_object(content)
    param = api.prompt
    if request.get(param) is None:
        raise ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    _check_kind(request, param, api.kinds, api.kinds_in_words)
    _check_kind(request, "stream", bool, "true or false")
    _check_kind(request, "n", int, "a number")
    _check_kind(request, "kv_transfer_params", dict, "an object")
    _check_kind(request, "priority", int, "a whole number")  # engines would read one in text as well
    priority = request.get("priority")
    if priority is not None and abs(priority) > MAX_PRIORITY:
        message = f"priority is {str(priority)[:100]}; allowed: {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ApiError(400, message, param="priority", code="invalid_value")
    if not request[param]:
        raise ApiError(400, f"{param} may not be empty", param=param, code="invalid_value")
    if api is RESPONSES:
        if request.get("background"):
            message = "background is true; allowed: false, because the gateway keeps no answers to be fetched"
            raise ApiError(400, message, param="background", code="invalid_value")
        # An engine would store its answer under this id, in the place of another client's.
        request.pop("request_id", None)
    return request


def _check_kind(request: Mapping[str, Any], name: str, kind: type | tuple[type, ...], allowed: str) -> None:
    found = request.get(name)
    if found is not None and not isinstance(found, kind):
        message = f"{name} is {str(found)[:100]!r}; allowed: {allowed}"
        raise ApiError(400, message, param=name, code="invalid_type")


# --- prompts


def as_chat(api: EngineApi, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request whose prompt is hashed: a chat, for the APIs that are another form of one."""
    if not api.has_named_events:
        return request
    chat = {
        name: request[name] for name in ("model", "cache_salt", "chat_template_kwargs") if request.get(name)
    }
    system = request.get("system" if api is MESSAGES else "instructions")
    texts = [text for text in _texts(system) if not text.startswith(_BILLING)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "".join(texts)}] if texts else []
    found = request[api.prompt]
    for item in [{"role": "user", "content": found}] if isinstance(found, str) else found:
        messages += _of_message(item) if api is MESSAGES else _of_item(item)
    tools = request.get("tools")
    if isinstance(tools, list) and tools:
        chat["tools"] = [_tool(tool) for tool in tools]
    return {**chat, "messages": messages}


def _of_message(message: Any) -> Iterable[dict[str, Any]]:
    """Messages of a chat that are one message of Anthropic's API."""
    role, content = _role(message), message.get("content") if isinstance(message, Mapping) else message
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    block: Any
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, Mapping) else ""
        if kind == "tool_result":
            text = "\n".join(_texts(block.get("content")))
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text}
        elif kind == "tool_use":
            # Spaces as in the engine's own conversion, since they become tokens.
            arguments = json.dumps(block.get("input") or {})
            calls.append(_call(block.get("id"), block.get("name"), arguments))
        elif kind not in ("thinking", "redacted_thinking"):
            texts += _texts(block)
    texts = [text for text in texts if not text.startswith(_BILLING)]
    if texts or calls:
        yield {"role": role, "content": "\n".join(texts), **({"tool_calls": calls} if calls else {})}


def _of_item(item: Any) -> Iterable[dict[str, Any]]:
    """Messages of a chat that are one item of a response's input."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else ""
    if kind == "function_call":
        arguments = str(item.get("arguments") or "{}")
        call = _call(item.get("call_id"), item.get("name"), arguments)
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind == "function_call_output":
        text = "\n".join(_texts(item.get("output")))
        yield {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": text}
    elif kind == "message":
        yield {"role": _role(item), "content": "\n".join(_texts(item.get("content")))}
    elif kind != "reasoning":
        yield {"role": "user", "content": "\n".join(_texts(item))}


def _role(message: Any) -> str:
    return str(message.get("role") or "user") if isinstance(message, Mapping) else "user"


def _call(call_id: object, name: object, arguments: str) -> dict[str, Any]:
    function = {"name": str(name or ""), "arguments": arguments}
    return {"id": str(call_id or ""), "type": "function", "function": function}


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or "function" in tool:
        return tool
    parameters = tool.get("input_schema", tool.get("parameters"))
    named = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {"type": "function", "function": {**named, "parameters": parameters}}


def _texts(content: Any) -> list[str]:
    """The texts of content blocks; a digest or the JSON of those without text."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [text for block in content for text in _texts(block)]
    if isinstance(content, Mapping) and isinstance(content.get("text"), str):
        return [content["text"]]
    encoded = msgspec.json.encode(content)
    return [encoded.decode() if len(encoded) < LONG_ITEM_CHARS else hashlib.sha256(encoded).hexdigest()]


# --- answers


class EngineUsage(msgspec.Struct):
    """Token counts under the names of every API."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: PromptTokensDetails | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def counted(self) -> Usage:
        if not (self.input_tokens or self.output_tokens):
            details = self.prompt_tokens_details
            return Usage(self.prompt_tokens, self.completion_tokens, self.total_tokens, details)
        # Messages count cached tokens beside the input, responses in it.
        cached = self.cache_read_input_tokens
        num_prompt = self.input_tokens + (cached or 0) + (self.cache_creation_input_tokens or 0)
        details = self.input_tokens_details if cached is None else PromptTokensDetails(cached)
        return Usage(num_prompt, self.output_tokens, num_prompt + self.output_tokens, details)


class _Part(msgspec.Struct):
    usage: EngineUsage | None = None
    error: Any = None


class _NamedEvent(msgspec.Struct):
    usage: EngineUsage | None = None
    message: _Part | str | None = None
    response: _Part | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_NamedEvent).decode


def usage_in(data: bytes) -> Usage | None:
    """The usage in an event's data, or in a whole answer, of an API with named events; None without one."""
    if b'"usage"' not in data:
        return None
    try:
        event = _decode_event(data)
    except msgspec.MsgspecError:
        return None
    parts = (event, event.message, event.response)
    found = next((one.usage for one in parts if isinstance(one, _NamedEvent | _Part) and one.usage), None)
    return None if found is None else found.counted()


def failure_in(data: bytes) -> str:
    """Why the engine aborted, from an event of a failure or a whole answer; empty if it did not."""
    try:
        event = _decode_event(data)
    except msgspec.MsgspecError:
        return ""
    of_response = event.response.error if event.response is not None else None
    error = event.error or of_response or (event.message if isinstance(event.message, str) else None)
    return reason_of(error) if error else ""


def reason_of(error: Any) -> str:
    """The message of an error object."""
    reason = error.get("message") if isinstance(error, Mapping) else None
    return f"it aborted: {str(reason or error)[:500]}"
