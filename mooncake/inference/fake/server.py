# SPDX-License-Identifier: Apache-2.0
"""``mooncake dev fake-engine``: our worker without a model, with faults of its loads on request.

Owns the settings. All else is the worker's: the engine, its KV events, the API. In addition, an answer
repeats the ``kv_transfer_params`` of its request, so that a test sees what a gateway sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from mooncake.config import Port
from mooncake.connectors.kv_link import AnyLink
from mooncake.inference import engine_process
from mooncake.inference.api import Api
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.fake.faults import FaultyLink, LoadFaults
from mooncake.inference.fake.model import FakeModel
from mooncake.inference.fake.runner import ByteTokenizer, FakeRunner, Latency
from mooncake.kvlayout import KvLayout
from mooncake.types import WorkerRole

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
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
                    settings.master, settings.host, model.identity, model.memory()
                )
            )
            link = FaultyLink(real, settings.faults, settings.num_layers, model.flip)
        latency = Latency(settings.prefill_token_s, settings.decode_token_s)
        limits = InferenceSettings(max_model_len=settings.max_model_len, max_running=settings.max_running)
        engine = Engine(limits, FakeRunner(model, link, latency), link)
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
