# SPDX-License-Identifier: Apache-2.0
"""``mooncake dev fake-engine``: our worker without a model, a fast and exact test of engine and cache.

``FakeModel`` computes with whole numbers what a transformer computes with tensors: every layer's keys and
values depend on all those below, and the answer on reading them, so that a block that is wrong, torn, late or
another prompt's changes the answer. A token's state is one 64-bit word. In each layer the keys and values of
a position are mixed from its state and written to its block, and the state is mixed with the sum over *all*
positions up to there of what lies in the pool. Sums of whole numbers don't depend on how a prompt is cut into
steps or batches; any bit of any block does change them, as does the order of blocks. There are no tolerances
to choose.

``FakeRunner`` runs it in our engine: its tokens are bytes, and computing takes a configured time. Answers are
greedy at every temperature, and each token is certain: its log probability is 0. Pool, model and vocabulary
look to the engine like a real model's; so lookups, loads, saves and preemption are those of our worker, and
results here hold there.

``FaultyLink`` corrupts, delays or fails the loads of any link, counted and repeatable. It keeps the contract
of a ``KvLink``, except where the settings break it: a load that is slow or fails is within the contract;
wrong bytes and the death of the process are what the contract is there to survive. Faults are injected where
the engine waits for a layer, in the middle of a load.

All else is the worker's: the engine, its KV events, the API. In addition, an answer repeats the
``kv_transfer_params`` of its request, so that a test sees what a gateway sends. Nothing here loads torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from mooncake.config import Port
from mooncake.connectors.kv_link import AnyLink, KvLoad, KvLookup, KvSave
from mooncake.connectors.memory import SlabMemory
from mooncake.errors import InvalidArgument
from mooncake.inference import engine_process
from mooncake.inference.api import Api
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.scheduler import Chunk, Sampled, TokenLogprobs
from mooncake.kvlayout import KvIdentity, KvLayout
from mooncake.prefix import BlockHash
from mooncake.transfer import DEFAULT_TRANSFER, TransferSettings
from mooncake.types import WorkerRole

Words = npt.NDArray[np.uint64]

ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."
"""Answers are made of these 64 characters; a token is a byte."""

_WORD_BYTES = 8
_GOLDEN = 0x9E3779B97F4A7C15


class FakeModel:
    """Weights derived from a seed, and a pool of KV blocks laid out as our own worker's is."""

    def __init__(self, seed: int, layout: KvLayout, num_blocks: int) -> None:
        """Raises InvalidArgument when a token's keys are not a whole number of 64-bit words."""
        if layout.token_bytes % _WORD_BYTES:
            raise InvalidArgument("head_dim", layout.head_dim, "keys of a multiple of 8 bytes per token")
        self.layout = layout
        self.seed = seed
        num_words = layout.token_bytes // _WORD_BYTES
        shape = (layout.num_layers, 2, num_blocks, layout.block_tokens, num_words)
        self.pool: Words = np.zeros(shape, dtype=np.uint64)
        weights = _mix(np.arange(1, 2 + 4 * layout.num_layers * num_words, dtype=np.uint64) + _word(seed))
        self._embedding = weights[0]
        parts = weights[1:].reshape(2, layout.num_layers, 2 * num_words)
        self._into: Words = parts[0]
        """[layer, k and v]: factors from the state to the keys and values of the layer."""
        self._out_of: Words = parts[1] | np.uint64(1)
        """Factors from keys and values to the state: odd, so that a changed word changes every sum."""

    @property
    def identity(self) -> KvIdentity:
        """The identity of these blocks, with everything that changes their bytes."""
        return KvIdentity(f"fake-{self.seed}", "bytes", self.layout)

    def memory(self) -> SlabMemory:
        """Memory of the blocks, as a connector needs it."""
        num_blocks = self.pool.shape[2]
        first = [
            self.layout.pool_addresses(self.pool.ctypes.data, num_blocks, layer, [0])
            for layer in range(self.layout.num_layers)
        ]
        return SlabMemory([self.pool], np.stack(first), self.layout.chunk_bytes(self.layout.block_tokens))

    def flip(self, block_id: int, layer: int) -> None:
        """Invert one bit of a block."""
        self.pool[layer, 1, block_id, 0, 0] ^= np.uint64(1)

    def run(
        self, chunks: Sequence[Chunk], link: AnyLink | None, loads: Sequence[KvLoad], saves: Sequence[KvSave]
    ) -> list[int]:
        """The next token of each chunk, while layers are written by ``loads`` and read by ``saves``."""
        states = [self._embed(chunk) for chunk in chunks]
        for layer in range(self.layout.num_layers):
            for chunk, state in zip(chunks, states, strict=True):
                self._write(layer, chunk, state)
            if link is not None:
                if loads:
                    link.wait_layer(loads, layer)
                for save in saves:
                    link.save_layer(save, layer)
            states = [self._attend(layer, c, state) for c, state in zip(chunks, states, strict=True)]
        return [ALPHABET[int(state[-1] >> np.uint64(58))] for state in states]

    def _embed(self, chunk: Chunk) -> Words:
        tokens = np.array(chunk.request.token_ids[chunk.start : chunk.end], dtype=np.uint64)
        positions = np.arange(chunk.start, chunk.end, dtype=np.uint64)
        return _mix(_mix(tokens + self._embedding) + positions)

    def _write(self, layer: int, chunk: Chunk, state: Words) -> None:
        """Write the keys and values of the positions that no block holds yet."""
        first = max(chunk.start, chunk.num_cached)
        positions = np.arange(first, chunk.end)
        blocks = np.array(chunk.request.block_ids)[positions // self.layout.block_tokens]
        words = _mix(state[first - chunk.start :, None] + self._into[layer])
        keys, values = np.split(words, 2, axis=1)
        offsets = positions % self.layout.block_tokens
        self.pool[layer, 0, blocks, offsets] = keys
        self.pool[layer, 1, blocks, offsets] = values

    def _attend(self, layer: int, chunk: Chunk, state: Words) -> Words:
        """Read every position up to the chunk's end out of the pool."""
        num_blocks = -(-chunk.end // self.layout.block_tokens)
        found = self.pool[layer][:, chunk.request.block_ids[:num_blocks]]
        keys, values = found.reshape(2, -1, found.shape[-1])[:, : chunk.end]
        out_of_keys, out_of_values = np.split(self._out_of[layer], 2)
        read = (keys * out_of_keys).sum(axis=1) + (values * out_of_values).sum(axis=1)
        read = _mix(read + np.arange(chunk.end, dtype=np.uint64) * np.uint64(_GOLDEN))
        return _mix(state ^ np.cumsum(read)[chunk.start :])


def _word(number: int) -> np.uint64:
    return np.uint64(number * _GOLDEN % 2**64)


def _mix(words: Words) -> Words:
    """SplitMix64's finalizer: a permutation of the words in which every bit depends on every other."""
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


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

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()


@dataclasses.dataclass(frozen=True)
class LoadFaults:
    """Faults to inject. Loads are counted from 1; 0 is never."""

    load_layer_s: float = 0.0
    """Delay added to each layer of each load."""
    fail_load_every: int = 0
    """Every n-th load fails when half of its layers have arrived."""
    corrupt_load_every: int = 0
    """Every n-th load brings one wrong bit without reporting a failure."""
    die_in_load: int = 0
    """The process is killed (SIGKILL) in the middle of this load."""


class FaultyLoad:
    """A load and the faults that are due in it."""

    def __init__(
        self, real: KvLoad, number: int, faults: LoadFaults, block_ids: Sequence[int], most: int
    ) -> None:
        def is_due(every: int) -> bool:
            return every > 0 and number % every == 0

        self.real = real
        self.block_ids = list(block_ids)
        self.is_failing = is_due(faults.fail_load_every)
        self.is_corrupt = is_due(faults.corrupt_load_every)
        self.is_last = number == faults.die_in_load
        self._most = most

    @property
    def num_layers_loaded(self) -> int:
        return (
            min(self.real.num_layers_loaded, self._most) if self.is_failing else self.real.num_layers_loaded
        )

    @property
    def failed(self) -> bool:
        return self.real.failed or (self.is_failing and self.real.done)

    @property
    def done(self) -> bool:
        return self.real.done

    @property
    def moved(self) -> tuple[int, float] | None:
        return self.real.moved


class FaultyLink:
    """``link`` with ``faults`` in its loads. ``flip(block id, layer)`` inverts a bit of the pool."""

    def __init__(
        self, link: AnyLink, faults: LoadFaults, num_layers: int, flip: Callable[[int, int], None]
    ) -> None:
        self._link = link
        self._faults = faults
        self._num_layers = num_layers
        self._flip = flip
        self.num_loads = 0

    def attach(self, wake: Callable[[], None]) -> None:
        self._link.attach(wake)

    def lookup(self, blocks: Sequence[tuple[BlockHash, int]]) -> KvLookup:
        found: KvLookup = self._link.lookup(blocks)
        return found

    def release(self, lookup: KvLookup) -> None:
        self._link.release(lookup)

    def start_load(self, lookup: KvLookup, block_ids: Sequence[int]) -> FaultyLoad:
        self.num_loads += 1
        real = self._link.start_load(lookup, block_ids)
        return FaultyLoad(real, self.num_loads, self._faults, block_ids, self._num_layers // 2)

    def wait_layer(self, loads: Sequence[FaultyLoad], layer: int) -> None:
        for load in loads:
            time.sleep(self._faults.load_layer_s)
            is_middle = layer == self._num_layers // 2
            if load.is_last and is_middle:
                os.kill(os.getpid(), signal.SIGKILL)
            # A failed load must write nothing afterwards: let all of it arrive before reporting the failure.
            last = self._num_layers - 1 if load.is_failing and layer >= self._num_layers // 2 else layer
            for each in range(layer, last + 1):
                self._link.wait_layer([load.real], each)
            if load.is_corrupt and is_middle and not load.failed:
                self._flip(load.block_ids[0], layer)

    def start_save(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> KvSave:
        save: KvSave = self._link.start_save(blocks)
        return save

    def save_layer(self, save: KvSave, layer: int) -> None:
        self._link.save_layer(save, layer)

    def finish_save(self, save: KvSave) -> None:
        self._link.finish_save(save)

    def abort_save(self, save: KvSave) -> None:
        self._link.abort_save(save)


Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


@dataclasses.dataclass(frozen=True)
class FakeEngineSettings:
    """Run an engine without a model: real KV bytes, one answer for one prompt, faults on request."""

    role: WorkerRole = WorkerRole.PREFILL
    "What the gateway uses this engine for; it can do both."

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 8100
    "Port of the HTTP server; 0 takes a free one."

    master: str = ""
    "`host:port` of the store's master; empty runs without a store."

    served_model_name: str = "fake"
    "The model's name in the API."

    seed: Count = 0
    "The weights. Engines of other seeds give other answers and can't read each other's blocks."

    num_layers: Positive = 4
    "Layers of KV."

    head_dim: Positive = 16
    "Numbers in a key; a token has one key and one value of this length in each layer."

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    "Number type in the KV layout; decides how many bytes a number has."

    block_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    "Tokens of one KV block."

    num_blocks: Annotated[int, Meta(ge=2)] = 1024
    "Blocks of this engine's own KV pool."

    max_model_len: Positive = 8192
    "Most tokens of prompt and answer together."

    max_running: Annotated[int, Meta(ge=1, le=512)] = 64
    "Most requests computed at the same time."

    kv_events_port: Port = 0
    "Port where KV events are published (ZeroMQ); 0 takes a free one."

    prefill_token_s: Seconds = 0.0
    "How long computing one token of a prompt takes."

    decode_token_s: Seconds = 0.0
    "How long one step of decoding takes."

    load_layer_s: Seconds = 0.0
    "Delay added to each layer of each load."

    fail_load_every: Count = 0
    "Every n-th load fails half-way; 0: none does."

    corrupt_load_every: Count = 0
    "Every n-th load brings one wrong bit without reporting a failure; 0: none does."

    die_in_load: Count = 0
    "The process kills itself in the middle of the load with this number (counted from 1); 0: never."

    transfer: TransferSettings = DEFAULT_TRANSFER

    @property
    def faults(self) -> LoadFaults:
        return LoadFaults(self.load_layer_s, self.fail_load_every, self.corrupt_load_every, self.die_in_load)

    def model(self) -> FakeModel:
        layout = KvLayout(self.num_layers, 1, self.head_dim, self.dtype, self.block_tokens)
        return FakeModel(self.seed, layout, self.num_blocks)


async def serve(settings: FakeEngineSettings) -> None:
    """Run a fake engine until cancelled. Raises AddressInUse when the port is taken."""
    await engine_process.serve(running(settings), settings.host, settings.port)


@contextlib.asynccontextmanager
async def running(settings: FakeEngineSettings) -> AsyncIterator[Api]:
    """Run everything of a fake engine but its HTTP server."""
    model = settings.model()
    async with contextlib.AsyncExitStack() as stack:
        link: AnyLink | None = None
        if settings.master:
            real = await stack.enter_async_context(
                engine_process.connect_store_link(
                    settings.master,
                    settings.transfer.for_role(settings.host),
                    model.identity,
                    model.memory(),
                )
            )
            link = FaultyLink(real, settings.faults, settings.num_layers, model.flip)
        latency = Latency(settings.prefill_token_s, settings.decode_token_s)
        limits = InferenceSettings(max_model_len=settings.max_model_len, max_running=settings.max_running)
        engine = Engine(limits, FakeRunner(model, link, latency), link, weights=model.identity.weights)
        yield await stack.enter_async_context(
            engine_process.run_api(
                engine,
                ByteTokenizer(),
                settings.host,
                settings.kv_events_port,
                model=settings.served_model_name,
                role=settings.role,
                kv_identity=model.identity.digest if settings.master else "",
                echoes_transfers=True,
            )
        )
