# SPDX-License-Identifier: Apache-2.0
"""The pieces of text join to the whole text, for every way of cutting the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from mooncake.errors import InvalidArgument, ModelError
from mooncake.inference.tokenizer import (
    CONTEXT_TOKENS,
    REPLACEMENT,
    Detokenizer,
    StopMatcher,
    Tokenizer,
)

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of all bytes and a few pairs: most characters outside ASCII take several tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, "he", "ll", "Ġw"])}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    make: Any = transformers.PreTrainedTokenizerFast
    fast = make(tokenizer_object=backend, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return Tokenizer(folder)


@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.feed(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + detokenizer.finish() == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


@given(text=st.text(min_size=1, max_size=20), data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_answer_continues_elsewhere(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text)
    first = Detokenizer(tokenizer.decode)
    cut = data.draw(st.integers(0, len(ids)))
    shown = "".join(first.feed(token) for token in ids[:cut])
    shown = shown[: data.draw(st.integers(0, len(shown)))]  # a stop string may have held some back
    second = Detokenizer(tokenizer.decode)
    unsent = "".join(second.feed(token) for token in ids[:cut])[len(shown) :]
    assert shown + unsent + "".join(second.feed(token) for token in ids[cut:]) + second.finish() == text


def test_half_a_character_waits(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.feed(token) for token in tokenizer.encode("a😀b")]
    assert pieces == ["a", "", "", "", "😀", "b"]


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.decode)
    assert [detokenizer.feed(token) for token in tokenizer.encode("é")[:1]] == [""]
    assert detokenizer.finish() == REPLACEMENT


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("<end>")
    assert len(end) == 1 and tokenizer.decode(end) == "" and tokenizer.token_bytes(end[0]) == b"<end>"


@given(text=st.text(max_size=20))
@settings(max_examples=30, deadline=None)
def test_bytes_of_tokens_join_to_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text)) == text.encode()


def test_a_token_that_is_in_no_vocabulary_has_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(10**6) == b""


def marked_tokenizer(folder: Path, *pieces: str) -> Tokenizer:
    """A tokenizer of ``pieces`` (after ``<unk>``) that decodes as those of Llama 2 and Mistral do.

    Without merges it encodes each character by itself, as bytes where no piece has it.
    """
    vocabulary = {piece: number for number, piece in enumerate(("<unk>", *pieces))}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    make: Any = transformers.PreTrainedTokenizerFast
    make(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    return Tokenizer(folder)


def test_bytes_of_tokens_with_marked_spaces(tmp_path: Path) -> None:
    tokenizer = marked_tokenizer(tmp_path, "▁the", "the", "<0xC3>", "<0xA9>", "<0x0A>")
    found = [tokenizer.token_bytes(token) for token in range(6)]
    assert found == [b"<unk>", b" the", b"the", b"\xc3", b"\xa9", b"\n"]


def test_an_answer_keeps_the_space_behind_its_prompt(tmp_path: Path) -> None:
    tokenizer = marked_tokenizer(tmp_path, "▁is", "▁Paris", ".", "<0xC3>", "<0xA9>")
    alone = Detokenizer(tokenizer.decode)
    assert [alone.feed(token) for token in (2, 3, 2)] == ["Paris", ".", " Paris"]
    behind = Detokenizer(tokenizer.decode, before=[2, 1])
    assert [behind.feed(token) for token in (2, 3, 2)] == [" Paris", ".", " Paris"]
    with_half = Detokenizer(tokenizer.decode, before=[1, 4])
    assert [with_half.feed(token) for token in (5, 2)] == ["é", " Paris"]
    assert Detokenizer(tokenizer.decode, before=[1, 4]).finish() == "", "the half character is the prompt's"
    special = Detokenizer(tokenizer.decode, before=[1, 0])
    assert special.feed(2) == " Paris", "a special token at the end of a prompt has no text"


def test_an_answer_begins_behind_the_last_character_of_its_prompt(tmp_path: Path) -> None:
    """The last tokens of a prompt may begin within a character, whose bytes this decoder replaces, and with
    them all bytes behind them."""
    smile = [f"<0x{byte:02X}>" for byte in "😀".encode()]
    tokenizer = marked_tokenizer(tmp_path, "▁is", *smile)
    is_, face = 1, [2, 3, 4, 5]

    def pieces(prompt: list[int], answer: list[int]) -> list[str]:
        detokenizer = Detokenizer(tokenizer.decode, before=prompt[-CONTEXT_TOKENS:])
        return [*map(detokenizer.feed, answer), detokenizer.finish()]

    assert pieces([is_, *face, *face], [is_, is_]) == [" is", " is", ""]
    assert pieces([is_, *face, *face], [*face, is_]) == ["", "", "", "😀", " is", ""]
    assert pieces([is_, *face, 2], [3, 4, 5, is_]) == ["", "", "😀", " is", ""], "it ends in the answer"
    assert pieces([is_, *face, 2], [is_]) == [" is", ""], "the byte without a character is the prompt's"


CHARACTERS = "a é日😀"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def with_byte_tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of bytes and a few others, which replaces all bytes in a row where one of them is wrong."""
    return marked_tokenizer(tmp_path_factory.mktemp("tokenizer"), *BYTES, "a", "▁", "▁is")


@pytest.mark.parametrize("of", ["tokenizer", "with_byte_tokens"])
@given(
    prompt=st.text(st.sampled_from(CHARACTERS + REPLACEMENT), min_size=1, max_size=8),
    answer=st.text(st.sampled_from(CHARACTERS + REPLACEMENT), min_size=1, max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_an_answer_has_nothing_of_its_prompt(
    tokenizer: Tokenizer, with_byte_tokens: Tokenizer, of: str, prompt: str, answer: str
) -> None:
    one = tokenizer
    if of == "with_byte_tokens":  # where bytes of a replacement look like wrong ones
        one, prompt = with_byte_tokens, prompt.replace(REPLACEMENT, "é")
    detokenizer = Detokenizer(one.decode, before=one.encode("a" + prompt)[-CONTEXT_TOKENS:])
    pieces = [detokenizer.feed(token) for token in one.encode(answer)]
    assert "".join(pieces) + detokenizer.finish() == answer


@pytest.mark.parametrize("of", ["tokenizer", "with_byte_tokens"])
@given(text=st.text(st.sampled_from(CHARACTERS), min_size=1, max_size=8), data=st.data())
@settings(max_examples=200, deadline=None)
def test_an_answer_has_the_character_that_its_prompt_begins(
    tokenizer: Tokenizer, with_byte_tokens: Tokenizer, of: str, text: str, data: st.DataObject
) -> None:
    one = tokenizer if of == "tokenizer" else with_byte_tokens
    ids = one.encode("a" + text)
    cut = data.draw(st.integers(1, len(ids) - 1))
    detokenizer = Detokenizer(one.decode, before=ids[max(0, cut - CONTEXT_TOKENS) : cut])
    pieces = [detokenizer.feed(token) for token in ids[cut:]]
    prompt = b"".join(map(one.token_bytes, ids[:cut])).decode(errors="ignore")
    assert "".join(pieces) + detokenizer.finish() == ("a" + text)[len(prompt) :]


def test_a_wrong_byte_replaces_no_character_that_was_emitted(with_byte_tokens: Tokenizer) -> None:
    smile, is_ = [1 + byte for byte in "😀".encode()], 259
    for before in ([], [257]):
        wrong = Detokenizer(with_byte_tokens.decode, before)
        pieces = [wrong.feed(token) for token in (*smile, 1 + 0xFF, is_, is_)]
        assert pieces == ["", "", "", "😀", "", REPLACEMENT + " is", " is"]
        cut = Detokenizer(with_byte_tokens.decode, before)
        assert "".join(map(cut.feed, [*smile, *smile[:2]])) + cut.finish() == "😀" + 2 * REPLACEMENT
    behind = Detokenizer(with_byte_tokens.decode, smile)
    assert [behind.feed(token) for token in (1 + 0xFF, is_)] == ["", REPLACEMENT + " is"]


@pytest.mark.parametrize(
    "parts", [[b"\xc3", b"\xa9\xc3", b"\xa9"], [b"\xf0\x9f", b"\x98\x80\xf0\x9f", b"\x98\x80"]]
)
def test_characters_that_every_token_cuts_are_whole(parts: list[bytes]) -> None:
    detokenizer = Detokenizer(lambda ids: b"".join(parts[token] for token in ids).decode(errors="replace"))
    text = "".join(map(detokenizer.feed, [0, *[1] * 200, 2])) + detokenizer.finish()
    assert text == (parts[0] + parts[2]).decode() * 201


@pytest.mark.parametrize(
    ("pieces", "decoder"),
    [
        (
            ["a", " ", "b"],
            decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        ),
        (["a", "</w>", "b"], decoders.BPEDecoder()),
    ],
)
def test_a_space_that_only_the_next_token_shows_is_kept(pieces: list[str], decoder: Any) -> None:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({piece: at for at, piece in enumerate(pieces)})
    )
    backend.decoder = decoder
    detokenizer = Detokenizer(lambda ids: str(backend.decode(list(ids))))
    assert [detokenizer.feed(token) for token in (0, 1, 2)] == ["a", "", " b"]


def test_a_token_that_a_decoder_shows_once_does_not_make_later_ones_slow() -> None:
    num_decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return "".join(chr(token) for token, _ in itertools.groupby(token_ids))

    detokenizer = Detokenizer(decode)
    assert "".join(map(detokenizer.feed, [97] * 3000)) == "a"
    assert num_decoded < 3000 * 300
    assert detokenizer.feed(98) == "b"


def test_a_token_is_decoded_twice(tokenizer: Tokenizer) -> None:
    """This is the work for each token of each answer, on the event loop."""
    num_calls = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_calls
        num_calls += 1
        return tokenizer.decode(token_ids)

    detokenizer = Detokenizer(decode)
    num_calls = 0
    assert "".join(map(detokenizer.feed, tokenizer.encode("abc" * 10))) == "abc" * 10
    assert num_calls == 2 * 30


@pytest.mark.parametrize("before", ["", "a"])
@pytest.mark.parametrize(
    ("repeated", "text"), [("<end>", ""), (REPLACEMENT, REPLACEMENT)], ids=["special", "replacement"]
)
def test_tokens_without_a_whole_character_do_not_make_later_ones_slow(
    tokenizer: Tokenizer, before: str, repeated: str, text: str
) -> None:
    num_decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return tokenizer.decode(token_ids)

    detokenizer = Detokenizer(decode, before=tokenizer.encode(before))
    ids = tokenizer.encode(repeated * 2000)
    pieces = [detokenizer.feed(token) for token in ids]
    assert num_decoded < 200 * len(ids)
    assert "".join(pieces) + detokenizer.finish() == text * 2000
    assert detokenizer.feed(tokenizer.encode("b")[0]) == "b"


def test_a_space_at_the_beginning_of_a_text_is_kept(tmp_path: Path) -> None:
    """This decoder leaves out one space there; a second one is text."""
    tokenizer = marked_tokenizer(tmp_path, "▁", "▁is")
    detokenizer = Detokenizer(tokenizer.decode)
    assert [detokenizer.feed(token) for token in (1, 2)] == ["", " is"]


def test_bytes_of_tokens_of_other_tokenizers_are_their_text(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    make: Any = transformers.PreTrainedTokenizerFast
    make(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path)
    assert Tokenizer(tmp_path).token_bytes(1) == b"word"


def test_chat_uses_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids) == "<user>hello\n"
    with pytest.raises(InvalidArgument, match="messages"):
        tokenizer.chat([{"role": "user"}])


def test_no_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "found"),
    [
        (["hello world"], ["wor"], "hello ", "wor"),
        (["hel", "lo w", "orld"], ["wor"], "hello ", "wor"),
        (["ab", "ab", "ac"], ["abac"], "ab", "abac"),
        (["aaab"], ["b", "aab"], "a", "aab"),
        (["no stop here ST"], ["STOP"], "no stop here ST", None),
        (["x\n", "\n", "y"], ["\n\n"], "x", "\n\n"),
        (["text"], ["", "zzz"], "text", None),
    ],
)
def test_stop_strings(pieces: list[str], stops: list[str], shown: str, found: str | None) -> None:
    matcher = StopMatcher(stops)
    text, hit = "", None
    for piece in pieces:
        more, hit = matcher.feed(piece)
        text += more
        if hit is not None:
            break
    else:
        text += matcher.finish()
    assert (text, hit) == (shown, found)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_stop_string_may_be_part_of_the_text(size: int) -> None:
    matcher = StopMatcher(["lo w", "o wo"], includes_stop=True)
    shown, found = "", None
    for start in range(0, 11, size):
        more, found = matcher.feed("hello world"[start : start + size])
        shown += more
        if found is not None:
            break
    assert (shown, found) == ("hello w", "lo w")


def test_text_with_special_tokens(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.text_of)
    ids = [*tokenizer.encode("a"), *tokenizer.encode("<end>"), *tokenizer.encode("b")]
    assert "".join(map(detokenizer.feed, ids)) + detokenizer.finish() == "a<end>b"


@pytest.mark.parametrize(
    ("passed_over", "text", "stops", "shown", "found"),
    [
        ("STOP more ", "text STOP", ["STOP"], "STOP more text ", "STOP"),
        ("one ST", "OP", ["STOP"], "one ", "STOP"),
        ("aa", "a", ["aa"], "a", "aa"),
        ("xabc", "d", ["abcd", "b"], "x", "abcd"),
        ("STOP", "", ["STOP"], "STOP", None),
        (".", ".", ["."], ".", "."),
    ],
)
def test_no_stop_string_ends_in_text_that_is_passed_over(
    passed_over: str, text: str, stops: list[str], shown: str, found: str | None
) -> None:
    matcher = StopMatcher(stops)
    first = matcher.pass_over(passed_over)
    more, hit = matcher.feed(text)
    assert (first + more + ("" if hit else matcher.finish()), hit) == (shown, found)


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cut=st.integers(0, 30),
    size=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_the_first_stop_string_that_ends_behind_the_cut_is_found(
    text: str, stops: list[str], cut: int, size: int
) -> None:
    matcher = StopMatcher(stops)
    cut = min(cut, len(text))
    shown = "".join(matcher.pass_over(text[at : min(at + size, cut)]) for at in range(0, cut, size))
    found = None
    for at in range(cut, len(text)):
        more, found = matcher.feed(text[at])
        shown += more
        if found is not None:
            break
    else:
        shown += matcher.finish()
    ends = [
        (end, end - len(stop), -len(stop), stop)
        for stop in stops
        for end in range(max(cut + 1, len(stop)), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    if not ends:
        assert (shown, found) == (text, None)
        return
    first = min(end for end, *_ in ends)
    _, start, _, stop = min(one for one in ends if one[0] == first)
    assert (shown, found) == (text[:start], stop)


@given(text=st.text("ab", max_size=30), stop=st.text("ab", min_size=1, max_size=4), size=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_stops_are_found_however_the_text_is_cut(text: str, stop: str, size: int) -> None:
    matcher = StopMatcher([stop])
    shown, found = "", None
    for start in range(0, len(text), size):
        more, found = matcher.feed(text[start : start + size])
        shown += more
        if found is not None:
            break
    else:
        shown += matcher.finish()
    assert shown == text.split(stop)[0] and (found is not None) == (stop in text)


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", max_size=6)), size=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_of_several_stops_the_one_that_begins_first_is_found(text: str, stops: list[str], size: int) -> None:
    matcher, shown = StopMatcher(stops), ""
    for start in range(0, len(text), size):
        so_far = text[: start + size]
        more, found = matcher.feed(text[start : start + size])
        shown += more
        matches = [(so_far.find(stop), -len(stop), stop) for stop in stops if stop and stop in so_far]
        if matches:
            assert (len(shown), found) == min(matches)[::2] and shown == so_far[: len(shown)]
            return
        assert found is None
        held = so_far[len(shown) :]
        assert shown + held == so_far
        suffixes = [so_far[at:] for at in range(len(so_far)) if any(s.startswith(so_far[at:]) for s in stops)]
        assert held == max(suffixes, key=len, default=""), "as little as possible is held back"
    assert shown + matcher.finish() == text


class CountedText(str):
    """A string that counts how many of its characters and parts are read."""

    num_read = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        type(self).num_read += 1
        return super().__getitem__(key)


def test_a_long_text_that_is_held_back_costs_the_same_for_each_character() -> None:
    text = "".join(f"{number}, " for number in range(1000))
    CountedText.num_read = 0
    matcher = StopMatcher([CountedText(text + "X"), CountedText(text[: len(text) // 2] + "Y")])
    for at in range(0, len(text), 4):
        assert matcher.feed(text[at : at + 4]) == ("", None)
    assert CountedText.num_read < 20 * len(text)
    assert matcher.finish() == text
