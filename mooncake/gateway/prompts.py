# SPDX-License-Identifier: Apache-2.0
"""Block hashes of a prompt that another engine will tokenize, so that its cached prefix can be found.

Owns the choice of the source of tokens. First the model's tokenizer, when the gateway has it: it is fast, but
trusted only after it agreed with an engine about the first prompt of its kind. Else an engine
(``/tokenize``). Else pieces of text are hashed, which finds the same prefixes as long as requests come
through this gateway, but does not match the blocks in engines' KV events. A wrong hash costs speed, never an
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from mooncake.conductor.client import ConductorClient
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.gateway.backends import Backends
from mooncake.gateway.engine_apis import EngineApi, as_chat
from mooncake.gateway.worker_client import WorkerClient
from mooncake.http.openai import ApiError
from mooncake.log import get_logger
from mooncake.prefix import BlockKey, block_hashes, root_hash, short_key

log = get_logger(__name__)

Tokenizing = Literal["auto", "model", "engine", "text", "none"]

TOKENIZE_TIMEOUT_S = 2.0
BYTES_PER_TOKEN = 4
"""Bytes of text that count as one token where tokens are unknown: as many as a token id has."""

INLINE_CHARS = 4096
"""Shorter texts are tokenized on the event loop; a thread would cost more than it saves."""

_TEXT_ADAPTER = "\0text"
_OF_CHAT = (
    "model",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "tools",
)
_OF_TEXT = ("model", "prompt", "add_special_tokens")


class PromptKeys(msgspec.Struct):
    """The block hashes of a prompt, as a conductor needs them."""

    num_tokens: int
    keys: list[BlockKey] = []
    bare_keys: list[BlockKey] = []
    "Keys without the salt."
    is_text: bool = False
    tokens: list[int] = []
    "The prompt, where its tokens are known."
    text: bytes = b""
    "The prompt, where they are unknown or can't be shown as text here."
    num_other_tokens: int = 0
    "Tokens of the request's other prompts."

    @property
    def num_all_tokens(self) -> int:
        """Tokens of all prompts of the request, for quotas; the conductor places it by the first one."""
        return self.num_tokens + self.num_other_tokens


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _NamedPrompt:
    """The prompt whose keys are computed: messages of a chat, a text, or token ids."""

    def __init__(self, request: Mapping[str, Any], is_chat: bool, first: Any) -> None:
        """``request``: in the form of a chat, if it ``is_chat``; ``first``: its first prompt otherwise."""
        self.request, self.is_chat = request, is_chat
        self.prompt: Any = request["messages"] if is_chat else first if isinstance(first, str | list) else ""


class PromptHasher:
    """Computes ``PromptKeys``. ``tokenizer``: the model's, if there is one (``PromptTokenizer``)."""

    def __init__(
        self, tokenizer: Any, workers: WorkerClient, backends: Backends, block_tokens: int, how: Tokenizing
    ) -> None:
        self._tokenizer = tokenizer
        self._workers, self._backends = workers, backends
        self._block_tokens = block_tokens
        self._how = how
        self._agrees: dict[bool, bool] = {}
        """For chats and for texts: whether tokenizer and engine agreed about the first one."""
        self._engine_tokenizes = how in ("auto", "engine")

    async def name(
        self,
        api: EngineApi,
        request: Mapping[str, Any],
        adapter: str,
        headers: Mapping[str, str],
        scheduling: ConductorClient,
    ) -> PromptKeys:
        """Compute the keys of the first prompt of a request, and count the tokens of its other ones."""
        prompts = api.prompts(request)
        named = _NamedPrompt(as_chat(api, request), api.is_chat, prompts[0])
        found = await self._name(named, adapter, headers, scheduling)
        if len(prompts) > 1:
            found.num_other_tokens = await self._num_tokens(prompts[1:], bool(request.get("stream")))
        return found

    async def _name(
        self, named: _NamedPrompt, adapter: str, headers: Mapping[str, str], scheduling: ConductorClient
    ) -> PromptKeys:
        salt = str(named.request.get("cache_salt") or "")
        prompt = named.prompt
        if self._how == "none":
            return PromptKeys(_guessed_tokens(prompt))
        tokens = prompt if isinstance(prompt, list) and not named.is_chat else None
        if tokens is None and self._how != "text":
            tokens = await self._tokens(named, headers, scheduling)
        if tokens is None:
            text = _text_of(named)
            pieces = text[: len(text) - len(text) % BYTES_PER_TOKEN]  # four bytes are hashed like a token
            keys = self._keys(pieces, self._block_tokens, salt, adapter + _TEXT_ADAPTER)
            return PromptKeys(max(1, len(text) // BYTES_PER_TOKEN), keys, is_text=True, text=text)
        try:
            keys = self._keys(tokens, self._block_tokens, salt, adapter)
        except (OverflowError, TypeError):
            return PromptKeys(max(1, len(tokens)))  # no tokens; the engine will report the error
        bare = self._keys(tokens, self._block_tokens, "", adapter) if salt else []
        text = _text_of(named) if self._tokenizer is None and not isinstance(prompt, list) else b""
        return PromptKeys(max(1, len(tokens)), keys, bare, tokens=tokens, text=text)

    async def _num_tokens(self, prompts: Sequence[Any], is_stream: bool) -> int:
        """Tokens of prompts of which no keys are needed; estimated where the model's tokenizer is not used.

        ``is_stream``: whether the engine may report no usage; otherwise an estimate is enough.
        """
        tokenizer = self._tokenizer
        may_encode = is_stream and self._how in ("auto", "model") and self._agrees.get(False, True)

        def count(prompt: Any) -> int:
            if tokenizer is None or not may_encode or not isinstance(prompt, str):
                return _guessed_tokens(prompt)
            try:
                return len(tokenizer.encode(prompt))
            except (InvalidArgument, TypeError, ValueError):
                return _guessed_tokens(prompt)  # the engine will report the error

        def count_all() -> int:
            return sum(map(count, prompts))

        is_short = sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) < INLINE_CHARS
        return count_all() if is_short or not may_encode else await asyncio.to_thread(count_all)

    def _keys(self, items: Any, size: int, salt: str, adapter: str) -> list[BlockKey]:
        return [short_key(one) for one in block_hashes(items, size, root_hash(salt, adapter))]

    async def _tokens(
        self, named: _NamedPrompt, headers: Mapping[str, str], scheduling: ConductorClient
    ) -> list[int] | None:
        """The tokens of a prompt; None when unknown."""
        is_chat = named.is_chat
        ours = await self._by_tokenizer(named) if self._agrees.get(is_chat, True) else None
        if ours is not None and (is_chat in self._agrees or not self._engine_tokenizes):
            return ours
        theirs = await self._by_engine(named, headers, scheduling) if self._engine_tokenizes else None
        if ours is not None and theirs is not None:
            self._agrees[is_chat] = ours == theirs
            if ours != theirs:
                reason = f"the engine makes {len(theirs)} tokens of a prompt, the gateway's model {len(ours)}"
                log.warning("tokenizer_mismatch", is_chat=is_chat, reason=reason)
        return ours if theirs is None else theirs

    async def _by_tokenizer(self, named: _NamedPrompt) -> list[int] | None:
        tokenizer, request, prompt = self._tokenizer, named.request, named.prompt
        if tokenizer is None or self._how == "engine" or request.get("tools") or request.get("chat_template"):
            return None
        is_chat = named.is_chat
        if is_chat and not all(_is_plain(message) for message in prompt):
            return None

        def in_thread() -> list[int]:
            if not is_chat:
                return list(tokenizer.encode(prompt))
            return list(
                tokenizer.chat(
                    prompt,
                    request.get("add_generation_prompt", True),
                    continue_final_message=bool(request.get("continue_final_message")),
                    variables=dict(request.get("chat_template_kwargs") or {}),
                )
            )

        try:
            return in_thread() if len(str(prompt)) < INLINE_CHARS else await asyncio.to_thread(in_thread)
        except (InvalidArgument, TypeError, ValueError):
            return None  # the engine will report the error

    async def _by_engine(
        self, named: _NamedPrompt, headers: Mapping[str, str], scheduling: ConductorClient
    ) -> list[int] | None:
        instance = await self._backends.pick_instance(scheduling)
        if instance is None:
            return None
        names, request = _OF_CHAT if named.is_chat else _OF_TEXT, named.request
        body = {name: request[name] for name in names if request.get(name) is not None}
        if not named.is_chat:
            body["prompt"] = named.prompt
        try:
            async with asyncio.timeout(TOKENIZE_TIMEOUT_S):
                answer = await self._workers.whole(instance, "/tokenize", body, headers)
            return msgspec.json.decode(answer, type=_Tokens).tokens
        except ApiError as error:
            if error.status in (404, 405, 501):
                log.info("engine_tokenize_unsupported", instance=instance, reason=str(error))
                self._engine_tokenizes = False
        except (MooncakeError, TimeoutError, msgspec.MsgspecError) as error:
            log.info("engine_tokenize_failed", instance=instance, reason=str(error))
        return None


def _text_of(named: _NamedPrompt) -> bytes:
    prompt, tools = named.prompt, named.request.get("tools")
    if isinstance(prompt, str):
        return prompt.encode()
    begin = msgspec.json.encode(tools) if tools else b""
    if not all(_is_plain(message) for message in prompt):
        return begin + msgspec.json.encode(prompt)
    # With as little markup as possible, or all chats would seem to begin alike.
    return begin + "".join(f"{one.get('role')}\n{one['content']}\n" for one in prompt).encode()


def _is_plain(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), str)


def _guessed_tokens(prompt: Any) -> int:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    size = len(prompt.encode() if isinstance(prompt, str) else msgspec.json.encode(prompt))
    return max(1, size // BYTES_PER_TOKEN)
