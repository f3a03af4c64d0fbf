# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, one token at a time.

It owns the chat template, the incremental detokenizer and the search for stop strings. It does not
know requests and streams: a detokenizer takes ids and returns text, a matcher takes text and
returns what may be emitted.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mooncake.errors import InvalidArgument, ModelError
from mooncake.log import get_logger

log = get_logger(__name__)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of bytes that are not a character, or not a complete one."""


UNKNOWN_CHARS = 256
"""Most characters that a token for an unknown word is assumed to represent."""

CONTEXT_TOKENS = 5
"""Tokens of a prompt that its answer is decoded with: enough for the bytes of a character and one before."""

_MARKED_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in the vocabularies of SentencePiece."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A token of SentencePiece that is one byte."""


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in the vocabulary of a byte-level tokenizer."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def stay_offline() -> None:
    """Switch ``transformers`` to offline use; call it before the import.

    Otherwise it queries a model hub for local folders too, and waits for a network that may not be there."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


class AnyTokenizer(Protocol):
    """Interface of ``Tokenizer`` and of the tokenizer of an engine without a model."""

    longest_token_chars: int

    def encode(self, text: str) -> list[int]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def text_of(self, token_ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Tokenizer:
    """The tokenizer of a Hugging Face folder. May be used from several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError when ``folder`` holds no usable tokenizer."""
        stay_offline()
        from transformers import AutoTokenizer  # late: it takes seconds, and weights don't need it

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # it raises whatever its parsers raise
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ModelError(f"{folder}: no usable tokenizer ({what}); fetch the model again") from error
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        self.longest_token_chars = max(longest, UNKNOWN_CHARS)
        """Most characters that one token represents."""
        self._added = {number: text for text, number in self._tokenizer.get_added_vocab().items()}
        decoder = None if self._fast is None else self._fast.decoder
        state = "" if decoder is None else decoder.__getstate__().decode()
        self._is_byte_level = '"ByteLevel"' in state
        self._has_marked_spaces = _MARKED_SPACE in state
        signature = inspect.signature(self._tokenizer.apply_chat_template)
        self._template_arguments = {*signature.parameters} | {"messages", "self"}

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens the model wants around it."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation by the model's own template, which sees ``variables``.

        Raises InvalidArgument when there is no template or it does not take these messages; with the field
        ``chat_template_kwargs`` when a variable has the name of a parameter of the rendering function.
        """
        variables = variables or {}
        for name in variables:
            if name in self._template_arguments:
                raise InvalidArgument("chat_template_kwargs", name, "variables of the model's template")
        more = {**variables, "continue_final_message": True} if continue_final_message else variables
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                **more,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # templates are programs, which may raise anything
            log.info("chat_template_failed", error=repr(error))
            allowed = f"a conversation that the model's chat template accepts ({_shown(error)})"
            raise InvalidArgument("messages", f"{len(messages)} messages", allowed) from error
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens."""
        source = self._tokenizer if self._fast is None else self._fast
        text: str = source.decode(list(token_ids), skip_special_tokens=True)
        return text

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens included."""
        source = self._tokenizer if self._fast is None else self._fast
        text: str = source.decode(list(token_ids), skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a single token represents, special tokens included; maybe a part of a character.

        They come from the vocabulary, because a decoder replaces incomplete characters."""
        name = self._added.get(token_id)
        if name is not None:
            return name.encode()
        if self._is_byte_level or self._has_marked_spaces:
            name = self._fast.id_to_token(token_id) or ""
            if self._is_byte_level and all(character in _BYTES for character in name):
                return bytes(_BYTES[character] for character in name)
            if self._has_marked_spaces:
                byte = _BYTE_TOKEN.fullmatch(name)
                return name.replace(_MARKED_SPACE, " ").encode() if byte is None else bytes.fromhex(byte[1])
        return self.text_of([token_id]).encode()


def _shown(error: Exception) -> str:
    """The part of ``error`` for the client: the template's message, nothing about this server."""
    is_of_template = type(error).__module__.partition(".")[0] == "jinja2"
    return f"it says: {str(error)[:200]}" if is_of_template else f"it failed: {type(error).__name__}"


class Detokenizer:
    """Text of a growing list of tokens, never half a character.

    Each new token is decoded together with the few before it, since a token's text depends on its
    neighbours (spaces, bytes of one character): the text is what the longer window has more than
    the shorter one. The window moves on whenever it ends with a whole character.

    The neighbours of an answer's first tokens are the last ones of its prompt: many decoders leave out the
    space that a text begins with, and an answer would lose the one between it and its prompt.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        """
        Args:
            decode: ``AnyTokenizer.decode``, or ``text_of`` for text with special tokens.
            before: the tokens that the list continues, the last ``CONTEXT_TOKENS`` or fewer. Of their text
                only a character that ends in the list is returned.
        """
        self._decode = decode
        self._window: list[int] = []
        self._num_read = 0
        """Leading tokens of the window whose text has been emitted."""
        self._read_text = ""
        """Their text."""
        for token_id in before:
            self.feed(token_id)
        self._has_fed = False

    def feed(self, token_id: int) -> str:
        """The text that ``token_id`` completes: often a word, sometimes empty."""
        self._has_fed = True
        self._window.append(token_id)
        text = self._decode(self._window)
        fresh = text[len(self._read_text) :]
        if not fresh or fresh.endswith(REPLACEMENT):
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return fresh

    def finish(self) -> str:
        """The remaining text at the end; bytes of an incomplete character appear as replacements."""
        text = self._decode(self._window)[len(self._read_text) :] if self._has_fed else ""
        self._window, self._num_read, self._read_text = [], 0, ""
        return text


class StopMatcher:
    """Finds the first stop string in a stream of text, and holds back what might become one."""

    def __init__(self, stops: Sequence[str], includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        self._stops = [_StopProgress(stop) for stop in stops if stop]
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that may be emitted, the stop string found or None). After a match no more text is returned.

        Of several stop strings the one that begins first wins; it is part of the text only with
        ``includes_stop``.
        """
        num_before = len(self._held)
        ends = [(stop, stop.feed(text)) for stop in self._stops]
        matches = [
            (num_before + end - stop.size, -stop.size, stop.text) for stop, end in ends if end is not None
        ]
        if matches:
            at, _, found = min(matches)
            text, self._held = self._held + text, ""
            return text[: at + len(found) if self._includes_stop else at], found
        return self._emitted(text), None

    def _emitted(self, text: str) -> str:
        """The text so far but the end that may become a stop string, which is held back."""
        text, self._held = self._held + text, ""
        num_held = max((stop.num_matched for stop in self._stops), default=0)
        if num_held:
            text, self._held = text[:-num_held], text[-num_held:]
        return text

    def pass_over(self, text: str) -> str:
        """As ``feed``, for text in which no stop string may end: the text that may be emitted."""
        for stop in self._stops:
            stop.pass_over(text)
        return self._emitted(text)

    def finish(self) -> str:
        """The text held back, when the answer ended without a match."""
        text, self._held = self._held, ""
        return text


class _StopProgress:
    """How much of one stop string a text ends with, after each of its characters (Knuth, Morris and Pratt).

    Each character takes constant time on average, however long the stop string and what is held back are:
    both are the client's choice, and this runs on the worker's event loop.
    """

    __slots__ = ("_borders", "num_matched", "size", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.size = len(text)
        self.num_matched = 0
        """Length of the longest prefix of the stop string that is a suffix of the text so far."""
        self._borders = [0]
        """For each prefix that was matched: length of the longest shorter one that it ends with."""

    def feed(self, text: str, start: int = 0) -> int | None:
        """Number of characters of ``text`` up to the end of the stop string; None if it is not complete.

        Characters before ``start`` are not read."""
        for at in range(start, len(text)):
            character = text[at]
            num = self._longer(self.num_matched, character)
            if num > len(self._borders):
                self._borders.append(self._longer(self._borders[-1], character))
            if num == self.size:
                self.num_matched = self._borders[-1]
                return at + 1
            self.num_matched = num
        return None

    def pass_over(self, text: str) -> None:
        """As ``feed``, whatever is complete in ``text``; a later match may begin in it."""
        start = 0
        while (end := self.feed(text, start)) is not None:
            start = end

    def _longer(self, num: int, character: str) -> int:
        """The longest prefix that ends with ``character`` after one of ``num`` characters."""
        while num and self.text[num] != character:
            num = self._borders[num - 1]
        return num + (self.text[num] == character)
