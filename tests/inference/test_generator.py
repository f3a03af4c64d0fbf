# SPDX-License-Identifier: Apache-2.0
"""Tokens of an answer become its text and columns, whatever is held back on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from mooncake.http.answers import AnswerPiece, JoinedPieces
from mooncake.inference.engine import Engine, InferenceSettings, Output
from mooncake.inference.fake_engine import ByteTokenizer, FakeEngineSettings, FakeRunner
from mooncake.inference.generator import INLINE_PRIOR_TOKENS, Generator, TokenCounts, _Text
from mooncake.inference.request import FinishReason, Request, SamplingParams
from mooncake.inference.scheduler import TokenLogprobs
from mooncake.inference.tokenizer import Tokenizer
from tests.inference.test_tokenizer import marked_tokenizer


def byte_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer each of whose tokens is one byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    make: Any = transformers.PreTrainedTokenizerFast
    make(tokenizer_object=backend).save_pretrained(folder)
    return Tokenizer(folder)


def answered(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tokens: Sequence[int],
    prior: Sequence[int] = (),
    text_offset: int = 0,
    finish: FinishReason = FinishReason.LENGTH,
    **sampling: Any,
) -> AnswerPiece:
    """The whole answer whose ``tokens`` come one by one after ``prior`` ones of another worker."""
    params = SamplingParams(max_tokens=100, logprobs=0, **sampling)
    request = Request("r", [*prompt, *prior], params, num_prior_output_tokens=len(prior))
    text = _Text(tokenizer, request, text_offset)
    joined = JoinedPieces(0)
    for number, token in enumerate(tokens, 1):
        reason = finish if number == len(tokens) else None
        output = Output("r", (token,), reason, logprobs=(TokenLogprobs(token, -1.0, ()),))
        joined.add(text.take(output))
        if text.is_stopped:
            break
    return joined.whole()


def offsets(piece: AnswerPiece) -> list[int]:
    assert piece.logprobs is not None
    return piece.logprobs.text_offset


@pytest.mark.parametrize(
    ("text", "shown", "found"),
    [
        ("xabxy", "xabxy", [0, 1, 2, 3, 4]),
        ("xabcy", "x", [0, 1, 2, 3]),
        ("a😀é", "a😀é", [0, 1, 1, 1, 1, 2, 2]),
        ("ababx", "ababx", [0, 1, 2, 3, 4]),
    ],
)
def test_text_offsets_are_where_tokens_begin(tmp_path: Path, text: str, shown: str, found: list[int]) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    piece = answered(tokenizer, tokenizer.encode("p"), tokenizer.encode(text), stop=("abc",))
    assert (piece.text, offsets(piece)) == (shown, found)


def test_text_offsets_of_an_answer_that_another_worker_began(tmp_path: Path) -> None:
    """The first worker had held back `ab`, which the second one returns."""
    tokenizer = byte_tokenizer(tmp_path)
    prior = tokenizer.encode("xab")
    piece = answered(tokenizer, [1], tokenizer.encode("xy"), prior, text_offset=1, stop=("abc",))
    assert (piece.text, offsets(piece)) == ("abxy", [3, 4])


def test_a_stop_token_begins_where_the_text_ends(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    tokens = tokenizer.encode("xa!")
    piece = answered(
        tokenizer, [1], tokens, finish=FinishReason.STOP, stop=("abc",), stop_token_ids=tuple(tokens[2:])
    )
    assert (piece.text, piece.stop_reason, offsets(piece)) == ("xa", tokens[2], [0, 1, 2])


def test_an_answer_begins_with_the_space_behind_its_prompt(tmp_path: Path) -> None:
    """As vLLM's does; also where another worker has begun it, and where a stop string is in it."""
    tokenizer = marked_tokenizer(tmp_path, "▁is", "▁Paris", "▁in", ".")
    prompt = [1] * 20
    whole = answered(tokenizer, prompt, [2, 3, 4])
    assert (whole.text, offsets(whole)) == (" Paris in.", [0, 6, 9])
    assert whole.logprobs is not None and "".join(whole.logprobs.tokens) == whole.text
    for num_prior in (1, 2):
        sent = len(answered(tokenizer, prompt, [2, 3][:num_prior]).text)
        rest = answered(tokenizer, prompt, [2, 3, 4][num_prior:], [2, 3][:num_prior], text_offset=sent)
        assert whole.text[:sent] + rest.text == whole.text
    assert answered(tokenizer, prompt, [2, 3, 4], stop=(" in",)).text == " Paris"
    assert answered(tokenizer, prompt, [2, 3, 4], skip_special_tokens=False).text == whole.text


async def test_a_long_beginning_of_an_answer_is_no_work_for_the_event_loop() -> None:
    threads: list[int] = []

    class Observed(ByteTokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            threads.append(threading.get_ident())
            return super().decode(token_ids)

    engine = Engine(InferenceSettings(), FakeRunner(FakeEngineSettings().model()))
    generator = Generator(engine, Observed(), asyncio.get_running_loop())
    generator.start()
    try:
        num_prior = 4 * INLINE_PRIOR_TOKENS
        params = SamplingParams(max_tokens=num_prior + 1)
        request = Request("r", [65] * (num_prior + 1), params, num_prior_output_tokens=num_prior)
        pieces = [
            piece async for piece in generator.pieces(request, TokenCounts(), text_offset=num_prior - 2)
        ]
    finally:
        await asyncio.to_thread(generator.stop)
    assert [len(piece.text) for piece in pieces] == [3], "two characters were held back"
    assert len(threads) > num_prior
    assert threads.count(threading.get_ident()) < INLINE_PRIOR_TOKENS


async def test_a_hand_over_while_a_long_beginning_becomes_text_is_not_lost() -> None:
    entered, handed_over = threading.Event(), threading.Event()

    class Waiting(ByteTokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            entered.set()
            assert handed_over.wait(30)
            return super().decode(token_ids)

    engine = Engine(InferenceSettings(), FakeRunner(FakeEngineSettings().model()))
    generator = Generator(engine, Waiting(), asyncio.get_running_loop())
    num_prior = INLINE_PRIOR_TOKENS + 1
    params = SamplingParams(max_tokens=num_prior + 3)
    request = Request("r", [65] * (num_prior + 1), params, num_prior_output_tokens=num_prior)

    async def ends() -> list[str | None]:
        return [piece.finish_reason async for piece in generator.pieces(request, TokenCounts())]

    answer = asyncio.create_task(ends())
    await asyncio.to_thread(entered.wait, 30)
    engine.hand_over("r", "")
    handed_over.set()
    generator.start()
    try:
        assert (await answer)[-1] == FinishReason.MOVED
    finally:
        await asyncio.to_thread(generator.stop)
