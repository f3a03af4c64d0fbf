"""The fake model as what the engine runs: its tokens are bytes, and computing takes as long as it is told.

Answers are greedy whatever the temperature, and each token was certain: its log probability is 0. Whatever
an engine needs of a pool, a model and a vocabulary is the same as a true model's; so lookups, loads, saves
and preemption are those of our worker, and what holds here holds there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake.connectors.kv_link import AnyLink, KvLoad, KvSave
from mooncake.inference.fake.model import FakeModel
from mooncake.inference.step import Chunk, Sampled, TokenLogprobs


@dataclasses.dataclass(frozen=True)
class Latency:
    """How slow the engine pretends to be."""

    prefill_token_s: float = 0.0
    """For each token of a prompt that is computed."""
    decode_token_s: float = 0.0
    """For each step that decodes, however many requests are in it."""


class FakeRunner:
    """Runs steps of a fake model."""

    vocab_size = 1 << 32
    """Any token id is computed; those that answers are made of are bytes."""
    max_positions = 1 << 31
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, model: FakeModel, link: AnyLink | None = None, latency: Latency = Latency()) -> None:
        self.layout = model.layout
        self.num_blocks = model.pool.shape[2]
        self._model = model
        self._link = link
        self._latency = latency

    def run(self, chunks: Sequence[Chunk], loads: Sequence[KvLoad], saves: Sequence[KvSave]) -> Sampled:
        self._pass_time(chunks)
        found = self._model.run(chunks, self._link, loads, saves)
        tokens = [token for chunk, token in zip(chunks, found, strict=True) if chunk.samples]
        asked = [chunk.request.sampling.logprobs for chunk in chunks if chunk.samples]
        logprobs = [
            None if most is None else TokenLogprobs(token, 0.0, ((token, 0.0),)[:most])
            for most, token in zip(asked, tokens, strict=True)
        ]
        return tokens, logprobs

    def _pass_time(self, chunks: Sequence[Chunk]) -> None:
        num_prompt = sum(c.num_tokens for c in chunks if c.start < c.request.num_prompt_tokens)
        has_answers = any(c.start >= c.request.num_prompt_tokens for c in chunks)
        seconds = num_prompt * self._latency.prefill_token_s + has_answers * self._latency.decode_token_s
        if seconds:
            time.sleep(seconds)


class ByteTokenizer:
    """A token is a byte of UTF-8; what is no ASCII is not shown."""

    longest_token_chars = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        lines = [f"{message['role']}: {message.get('content') or ''}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: " if add_generation_prompt else ""]))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 128).decode("ascii")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])
