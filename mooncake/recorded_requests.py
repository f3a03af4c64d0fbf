# SPDX-License-Identifier: Apache-2.0
"""The form of recorded requests: JSON lines without content, from which a trace can be replayed.

The gateway writes them and the simulator reads them, so both import this module. The first line is a
``RecordingHeader``; each other line is a ``RecordedRequest``, in the order in which requests ended. The first
four fields are those of Mooncake's published traces. No line has a token, a text, a name or a key: what could
identify is replaced by ``KeyedIds``, which are a pseudorandom function of the thing under a key that exists
only in the memory of the gateway, is drawn at random for each file, and is never written.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mooncake.prefix import BlockKey

RECORDING_VERSION = 1
MAX_RECORDED_TOKENS = 100_000_000
MAX_RECORDED_ID = (1 << 60) - 1
MAX_LASTING_MS = 1e9

_Millis = Annotated[float, Meta(ge=0, le=1e12)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_RECORDED_TOKENS)]
_Id = Annotated[int, Meta(ge=0, le=MAX_RECORDED_ID)]
_Name = Annotated[str, Meta(max_length=64)]

Encipher = Callable[[bytes], bytes]
"""A pseudorandom permutation of each block of 16 bytes: AES without chaining, under a secret key."""


class RecordingHeader(msgspec.Struct, frozen=True):
    """The first line of a recording."""

    recording: int
    "Version of the form."
    block_tokens: Annotated[int, Meta(gt=0, le=MAX_RECORDED_TOKENS)]
    "Tokens of a block; `hash_ids` has one id for each full block."
    key_id: _Name
    "Random name of the file's key, which is in no file. Ids of different keys can't be compared."
    began_at: float
    "Unix time of `timestamp` 0."
    longest_s: Annotated[float, Meta(gt=0, le=1e9)]
    "No request lasts longer; so a reader can sort the rows by arrival in bounded memory."
    answers: bool = True
    "Whether `output_hash_ids` are known: tokens of answers are, of our workers."


class RecordedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request that has ended. Times are milliseconds; 0 is unknown."""

    timestamp: _Millis
    "Arrival, since the beginning of the recording."
    input_length: Annotated[int, Meta(ge=1, le=MAX_RECORDED_TOKENS)]
    output_length: _Tokens
    hash_ids: list[_Id]
    "One id for each full block of the prompt. An id names the whole prefix up to the end of the block."
    output_hash_ids: list[_Id] = []
    "Ids of the blocks behind them that the answer completes, in the same chain."
    status: Literal["done", "rejected", "failed"] = "done"
    reason: _Name = ""
    "Code of the refusal."
    session: _Name = ""
    tenant: _Name = ""
    gap_ms: _Millis = 0.0
    "Since the end of the request before in the session."
    ttft_ms: _Millis = 0.0
    tbt_ms: _Millis = 0.0
    "Mean of the longest tenth of the times between tokens, where tokens are seen one by one."
    e2e_ms: _Millis = 0.0
    cached_tokens: _Tokens = 0
    "Prompt tokens whose KV was found, in the instance or in the pool."
    loaded_tokens: _Tokens = 0
    "Those of them that came from the pool or another instance."
    queued_ms: _Millis = 0.0
    computed_ms: _Millis = 0.0
    "Computing `computed_tokens` of the prompt, measured by the instance."
    computed_tokens: _Tokens = 0
    prefill: Annotated[int, Meta(ge=-1, le=1 << 20)] = -1
    "Number of the instance within the file, in order of appearance; -1: none."
    decode: Annotated[int, Meta(ge=-1, le=1 << 20)] = -1
    is_text: bool = False
    "The tokens were unknown: lengths and blocks are those of text, at four bytes a token."

    @property
    def ends_ms(self) -> float:
        return self.timestamp + self.e2e_ms

    @property
    def is_done(self) -> bool:
        return self.status == "done"


class KeyedIds:
    """Ids under one secret key."""

    def __init__(self, encipher: Encipher, hash_key: bytes) -> None:
        """``encipher`` and ``hash_key`` are secret, random, and of one file only."""
        self._encipher = encipher
        self._hash_key = hash_key

    def blocks(self, keys: Sequence[BlockKey]) -> list[int]:
        """Ids of blocks. All are enciphered in one call: a long prompt has thousands."""
        plain = array("Q", bytes(16 * len(keys)))
        plain[::2] = array("Q", keys)
        enciphered = array("Q", self._encipher(plain.tobytes()))
        return [one & MAX_RECORDED_ID for one in enciphered[::2]]

    def name(self, kind: str, text: str) -> str:
        """The id of a session or a tenant; empty for the empty text."""
        if not text:
            return ""
        digest = hashlib.blake2b(f"{kind}\0{text}".encode(), key=self._hash_key, digest_size=8)
        return digest.hexdigest()


def coarsened(keys: Sequence[BlockKey], factor: int) -> Sequence[BlockKey]:
    """Keys of blocks that are ``factor`` times as long: the last key of each group names its prefix."""
    return keys[factor - 1 :: factor] if factor > 1 else keys


def decode_lines(lines: Iterable[bytes]) -> tuple[RecordingHeader, list[RecordedRequest]]:
    """A small recording, whole, in the order of its lines. Raises msgspec.MsgspecError."""
    rows = iter(lines)
    header = msgspec.json.decode(next(rows, b""), type=RecordingHeader)
    return header, [msgspec.json.decode(line, type=RecordedRequest) for line in rows]
