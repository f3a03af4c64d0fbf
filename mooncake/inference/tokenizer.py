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
from mooncake.http.api_requests import PromptTokenizer
from mooncake.log import get_logger

log = get_logger(__name__)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of bytes that are not a character, or not a complete one."""


UNKNOWN_CHARS = 256
"""Most characters that a token for an unknown word is assumed to represent."""

CONTEXT_TOKENS = 7
"""Tokens of a prompt that its answer is decoded with: a character of four bytes, and half of another one."""

MAX_UNREAD_TOKENS = 32
"""Tokens behind the last whole character beyond which replacements are emitted as text."""

MAX_CUT_TOKENS = 256
"""The same where this cuts a character, because every token has parts of two."""

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


class AnyTokenizer(PromptTokenizer, Protocol):
    """Interface of ``Tokenizer`` and of the tokenizer of an engine without a model."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

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
        self._text_before = ""
        """Until the first text is returned: text of the window with the tokens of ``before`` alone."""
        for token_id in before[_first_whole(decode, before) :]:
            self.feed(token_id)
        if self._window:
            self._text_before = self._text(len(self._window))

    def feed(self, token_id: int) -> str:
        """The text that ``token_id`` completes: often a word, sometimes empty."""
        self._window.append(token_id)
        text = self._text(len(self._window))
        num_unread = len(self._window) - self._num_read
        if text == self._read_text:
            # It has no text, as special tokens, whose number would make each later token slow; or it is a
            # space at the beginning or the end, which the next token shows.
            if num_unread > MAX_CUT_TOKENS or not self._decode([token_id, token_id]):
                self._window.pop()
            return ""
        num_held = 0
        if text.endswith(REPLACEMENT):
            if num_unread <= MAX_UNREAD_TOKENS:
                return ""
            num_held = self._num_to_hold(text)
            if not num_held and num_unread <= MAX_CUT_TOKENS:
                return ""
        return self._emitted(text, num_held)

    def finish(self) -> str:
        """The remaining text at the end; bytes of an incomplete character appear as replacements."""
        text = self._fresh(self._text(len(self._window)))
        self._window, self._num_read = [], 0
        self._read_text = self._text_before = ""
        return text

    def _text(self, end: int) -> str:
        """Text of the window up to ``end``, which begins with the text that has been emitted.

        Some decoders replace all bytes in a row where one of them is wrong, those of earlier characters, too.
        """
        text = self._decode(self._window[:end])
        if not text.startswith(self._read_text):
            text = self._read_text + self._decode(self._window[self._num_read : end])
        return text

    def _emitted(self, text: str, num_held: int) -> str:
        """What is new in ``text``, that of the window, without its last tokens, which the next ones need."""
        end = len(self._window) - num_held
        fresh = self._fresh(self._text(end) if num_held else text)
        self._window, self._num_read = self._window[self._num_read :], end - self._num_read
        self._read_text = self._decode(self._window[: self._num_read])
        self._text_before = ""
        return fresh

    def _fresh(self, text: str) -> str:
        """The part of ``text`` that was not emitted, and is not the text of ``before``."""
        num_before = 0
        for character, before in zip(text, self._text_before, strict=False):
            if character != before:
                break
            num_before += 1
        return text[max(len(self._read_text), num_before) :]

    def _num_to_hold(self, text: str) -> int:
        """Number of the window's last tokens that may become a character with the next ones; 0 if not found.

        A character has at most four bytes, so at least the last three. With more of them than one character
        has, others are not cut in two: the parts are decoded as they are together.
        """
        for number in range(3, 7):
            end = len(self._window) - number
            if self._text(end) + self._decode(self._window[end:]) == text:
                return number
        return 0


def _first_whole(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> int:
    """Index of the first token with which a character begins, or 0.

    The bytes of a character's rest are decoded as replacements, by some decoders with all bytes behind them.
    """
    for first in range(len(tokens)):
        for end in range(len(tokens), first, -1):
            text = decode(tokens[first:end])
            if text and not text.startswith(REPLACEMENT):
                return first
    return 0


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
