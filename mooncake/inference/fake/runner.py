# SPDX-License-Identifier: Apache-2.0
"""The fake model as the engine's runner: its tokens are bytes, and computing takes a configured time.

Answers are greedy at every temperature, and each token is certain: its log probability is 0. Pool, model and
vocabulary look to the engine like a real model's; so lookups, loads, saves and preemption are those of our
worker, and results here hold there.
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
    """Simulated computing time."""

    prefill_token_s: float = 0.0
    """Time for each token of a prompt that is computed."""
    decode_token_s: float = 0.0
    """Time for each step that decodes, independent of the number of requests in it."""


class FakeRunner:
    """Runs steps of a fake model."""

    vocab_size = 1 << 32
    """Any token id is accepted; answers consist of bytes."""
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
        num_logprobs = [chunk.request.sampling.logprobs for chunk in chunks if chunk.samples]
        logprobs = [
            None if most is None else TokenLogprobs(token, 0.0, ((token, 0.0),)[:most])
            for most, token in zip(num_logprobs, tokens, strict=True)
        ]
        return tokens, logprobs

    def _pass_time(self, chunks: Sequence[Chunk]) -> None:
        num_prompt = sum(c.num_tokens for c in chunks if c.start < c.request.num_prompt_tokens)
        has_answers = any(c.start >= c.request.num_prompt_tokens for c in chunks)
        seconds = num_prompt * self._latency.prefill_token_s + has_answers * self._latency.decode_token_s
        if seconds:
            time.sleep(seconds)


class ByteTokenizer:
    """A tokenizer whose tokens are bytes of UTF-8; bytes that are not ASCII are not decoded."""

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
