# SPDX-License-Identifier: Apache-2.0
"""The parts of a gateway and its settings, as one object that endpoints and admin calls share.

Owns the order of starting and stopping and the one fact learned from workers, the model's context length.
It knows no HTTP server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta

from mooncake import clock
from mooncake.conductor.client import ConductorClient, ConductorReach, RemoteConductor
from mooncake.conductor.messages import AddInstance
from mooncake.conductor.server import ConductorService
from mooncake.conductor.settings import SchedulingSettings, Seconds
from mooncake.config import AlsoFrom, Port, Secret, Size
from mooncake.errors import InvalidArgument
from mooncake.files import file_state
from mooncake.forensics.hygiene import read_rules
from mooncake.gateway.backends import Backends
from mooncake.gateway.cache_misses import CacheMisses
from mooncake.gateway.clients import Clients, read_clients
from mooncake.gateway.handoff import Protocol
from mooncake.gateway.limiter import ConcurrencyLimiter
from mooncake.gateway.moves import Moves
from mooncake.gateway.prompts import PromptHasher, Tokenizing
from mooncake.gateway.request_ids import RequestIdTable
from mooncake.gateway.request_recorder import RecordingLimits, RequestRecorder
from mooncake.gateway.worker_client import WorkerClient, WorkerFailed
from mooncake.http.api_requests import PromptTokenizer
from mooncake.http.openai import ApiError, ModelCard
from mooncake.log import get_logger
from mooncake.rpc.client import split_address
from mooncake.security import Identity
from mooncake.security.http_auth import AdminKey, HttpClientAuth
from mooncake.types import InstanceId, WorkerRole

log = get_logger(__name__)


class Public(StrEnum):
    """The protocol between a gateway and its clients."""

    HTTP = "http"
    HTTPS = "https"
    "Ordinary HTTPS: clients present no certificate."
    MUTUAL = "mutual"
    "HTTPS, and clients present a certificate of the cluster's authority."


AnswerSeconds = Annotated[float, Meta(gt=0, le=1e8)]
"""Time that an answer may take. The conductor refuses to account for a longer one, with each request."""

_BY_CACHE = ("overlap", "kvcache_centric", "cache_aware")


@dataclass(frozen=True)
class ServingSettings(SchedulingSettings):
    """Settings common to gateway and endpoint picker: model, conductors, keys of clients, operators."""

    model: str = "smollm2"
    "A local Hugging Face folder, or `smollm2`; only its tokenizer is used."

    served_model_name: str = ""
    "The model's name in the API; empty takes the last part of `model`. Engines' own names serve, too."

    engine_api_key: Annotated[str, Secret] = ""
    "Key for engines that need one; a client's `Authorization` takes precedence."

    conductor: str = ""
    "`host:port[,host:port]` of the conductors; empty runs one inside this process, with these settings."

    metrics_host: str = "127.0.0.1"
    "Address of the operators' port. It needs no key on loopback, and the admin key elsewhere."

    metrics_port: Port = 0
    "Operators' port: `/metrics`, `/status`, `/story`, every request's `explain`; 0 takes a free one."

    api_keys_file: str = ""
    "File with clients' keys, tenants and quotas (`docs/gateway.md`); empty: clients need no key."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "Key that operators send as X-API-Key to make changes or see details; empty refuses them all."

    session_header: str = ""
    "A header of your own that names a request's session, read before all others (`docs/gateway.md`)."

    max_in_flight: Annotated[int, Meta(ge=1)] = 1024
    "Answers in progress at a time; beyond that requests are refused with a time to retry."

    drain_s: Annotated[float, Meta(ge=0, le=1e8)] = 5.0
    "How long a process that stops waits for answers in progress; new requests get 503 meanwhile."

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_header("session_header")
        for address in self.conductor_addresses:
            try:
                split_address(address)
            except InvalidArgument as error:
                raise InvalidArgument("conductor", self.conductor, "host:port[,host:port]") from error

    @property
    def conductor_addresses(self) -> list[str]:
        """Addresses of the conductors; empty for the one inside this process."""
        return [one.strip() for one in self.conductor.split(",")] if self.conductor else []

    def check_header(self, name: str) -> None:
        """Raise InvalidArgument unless the setting is a header's name, or empty."""
        if not re.fullmatch(r"[A-Za-z0-9_-]{0,64}", getattr(self, name)):
            raise InvalidArgument(name, getattr(self, name), "a header's name")

    def check_pair(self, cert: str, key: str) -> None:
        """Raise InvalidArgument where only one of two settings is set."""
        for name, other in ((cert, key), (key, cert)):
            if getattr(self, other) and not getattr(self, name):
                raise InvalidArgument(name, "", f"the path of a PEM file, since {other} is set")


@dataclass(frozen=True)
class GatewaySettings(ServingSettings):
    """Serve the OpenAI API and spread requests over workers."""

    protocol: Protocol = "auto"
    "How engines hand KV over; `workers` are ours; `auto` detects them and uses `sequential` for others."

    tokenizing: Tokenizing = "auto"
    "Source of prompts' tokens for other engines: the model's tokenizer or the engine; else text is hashed."

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 8000
    "Port of the HTTP server; 0 takes a free one."

    prefill: tuple[str, ...] = ()
    "Instances that compute prompts, `host:port`, each with its connector's port behind it if that is needed."

    decode: tuple[str, ...] = ()
    "Instances that decode, in the same form; without any of `prefill` they compute prompts, too."

    https_cert: str = ""
    "PEM file with a certificate to serve clients over HTTPS, without client certificates."

    https_key: str = ""
    "PEM file with that certificate's private key, without a password."

    console: bool = True
    "Whether `/` and `/console` serve the pages that show the cluster (`docs/console.md`)."

    master: str = ""
    "Address of the store's master, whose contents the console shows; empty: no pages about the store."

    trust_clients: bool = False
    "Whether clients' `kv_transfer_params` reach other engines; never fields that name a host or a transfer."

    request_timeout_s: AnswerSeconds = 600.0
    "How long one answer may take, prefill and decode together."

    stall_timeout_s: Seconds = 120.0
    "A worker that sends nothing for this long within a stream counts as failed, though it answers probes."

    max_body_bytes: Annotated[int, Size, Meta(ge=1 << 10)] = 8 << 20
    "The largest body of a request; a larger one is refused with 413 before it is read."

    max_bodies_bytes: Annotated[int, Size, Meta(ge=1 << 10)] = 256 << 20
    "Memory for bodies until their answers have ended, at least twice the largest; beyond it 503."

    sibling_memory_bytes: Annotated[int, Size, Meta(ge=0)] = 64 << 20
    "Memory for recent prompts: `explain` shows where a prompt left its nearest sibling; 0 is off."

    sibling_lifetime_s: Seconds = 3600.0
    "How long a prompt is remembered for that after its last use."

    explained_text: bool = True
    "Whether `explain` shows the text by which prompts differ, to their tenant and to operators."

    hygiene_rules: tuple[str, ...] = ()
    "Changes to requests that keep prompts' beginnings the same, such as `sort-tools` (`docs/gateway.md`)."

    max_connections: Annotated[int, Meta(ge=0)] = 0
    "Most client connections; at most, and for 0, half of the files that the process may open."

    record_folder: str = ""
    "Folder for recordings of requests without their content (`docs/simulator.md`); empty writes none."

    record_file_size: Annotated[int, Size, Meta(ge=1 << 16)] = 256 << 20
    "A recording that has this size ends, and another one begins under another key."

    record_file_s: Seconds = 86_400.0
    "A recording that is this old ends, and another one begins under another key."

    record_keep_s: Seconds = 14 * 86_400.0
    "Recordings older than this are deleted."

    record_keep_size: Annotated[int, Size, Meta(ge=1 << 16)] = 4 << 30
    "The oldest recordings are deleted while all together are larger than this."

    record_block_tokens: Annotated[int, Meta(ge=0)] = 0
    "Tokens of a block in recordings, a multiple of `block_tokens`; 0 is `block_tokens`, the most exact."

    recent_requests: Annotated[int, Meta(ge=0)] = 4096
    "Ended requests kept in memory, without their content, to compute what a change would do; 0 keeps none."

    recent_blocks: Annotated[int, Meta(ge=0)] = 1 << 20
    "Most blocks of all these requests; a block takes 8 bytes."

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefill", "decode"):
            read_instances(name, getattr(self, name))
        read_rules(self.hygiene_rules)
        self.check_pair("https_cert", "https_key")

    def public(self, identity: Identity) -> Public:
        """The protocol for clients of a gateway with ``identity``.

        HTTPS where they have keys or a certificate is set; else, where the cluster has TLS, with certificates
        on both sides.
        """
        if self.https_cert or (identity.has_tls and self.api_keys_file):
            return Public.HTTPS
        return Public.MUTUAL if identity.has_tls else Public.HTTP

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]


def read_instances(field: str, items: Sequence[str]) -> list[tuple[InstanceId, int | None]]:
    """Instances with the ports of their connectors, from items such as ``host:8100 8998 http://other:8100``.

    Raises:
        InvalidArgument: naming ``field``.
    """
    found: list[tuple[InstanceId, int | None]] = []
    for item in items:
        if found and item.isdecimal() and 0 < int(item) < 1 << 16:
            found[-1] = (found[-1][0], int(item))
            continue
        if found and item.lower() == "none":
            continue
        address = item.removeprefix("http://").rstrip("/")
        try:
            split_address(address)
        except InvalidArgument as error:
            raise InvalidArgument(field, item, "host:port, and maybe its connector's port") from error
        found.append((address, None))
    return found


def _recorder(settings: GatewaySettings) -> RequestRecorder:
    limits = RecordingLimits(
        settings.record_folder,
        settings.record_file_size,
        settings.record_file_s,
        settings.record_keep_s,
        settings.record_keep_size,
        settings.block_tokens,
        settings.record_block_tokens or settings.block_tokens,
        settings.request_timeout_s + 60.0,
    )
    return RequestRecorder(limits, settings.recent_requests, settings.recent_blocks)


def _stamp(path: str) -> tuple[int, ...]:
    """A value that changes when the file does."""
    try:
        found = Path(path).expanduser().stat()
    except OSError:
        return ()
    return file_state(found)


class Gateway:
    """Everything in the process but its HTTP server. ``start`` and ``close`` it on one loop."""

    def __init__(self, settings: GatewaySettings, tokenizer: PromptTokenizer | None) -> None:
        """Without a ``tokenizer`` all engines, ours too, are treated as other engines."""
        self.settings = settings
        self.tokenizer = tokenizer
        # Other engines have no certificates of our cluster.
        is_plain = settings.plain_engines or settings.protocol not in ("auto", "workers")
        self._as_conductor = replace(settings, plain_engines=is_plain)
        self.workers = WorkerClient(settings.stall_timeout_s, HttpClientAuth(is_plain=is_plain))
        self.admin_key = AdminKey(settings.admin_api_key)
        self.clients: Clients | None = None
        """Clients by key; None where clients need none."""
        self._keys_seen: tuple[int, ...] = ()
        if settings.api_keys_file:
            self._keys_seen = _stamp(settings.api_keys_file)
            self.clients = Clients(read_clients(settings.api_keys_file), clock.monotonic())
        self.instances = {
            WorkerRole.PREFILL: read_instances("prefill", settings.prefill),
            WorkerRole.DECODE: read_instances("decode", settings.decode),
        }
        ports = {one: port for pairs in self.instances.values() for one, port in pairs if port is not None}
        self.backends = Backends(self.workers, settings.engine_api_key, ports)
        # A policy that ignores caches needs no block hashes.
        how = settings.tokenizing if settings.scheduling in _BY_CACHE else "none"
        self.prompts = PromptHasher(tokenizer, self.workers, self.backends, settings.block_tokens, how)
        self.hygiene_rules = read_rules(settings.hygiene_rules)
        self.misses = CacheMisses(
            tokenizer,
            settings.block_tokens,
            settings.sibling_memory_bytes,
            settings.sibling_lifetime_s,
            settings.explained_text,
        )
        self.limiter = ConcurrencyLimiter(settings.max_in_flight)
        self.recorder = _recorder(settings)
        self.request_ids = RequestIdTable()
        self.created = int(clock.wall())
        self.max_model_len: int | None = None
        """Context length of the model; known after a worker was queried."""
        self._service: ConductorService | RemoteConductor | None = None
        self._moves: Moves | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def scheduling(self) -> ConductorClient:
        assert self._service is not None, "start() first"
        return self._service

    @property
    def moves(self) -> Moves:
        assert self._moves is not None, "start() first"
        return self._moves

    @property
    def conductor_state(self) -> str:
        """Location and state of the conductor, or of each of them, as text."""
        if not self.settings.conductor:
            return "inside this gateway"
        assert isinstance(self._service, RemoteConductor)
        return self._service.describe()

    @property
    def conductors(self) -> list[ConductorReach]:
        """The conductors outside of this process; none where it runs its own."""
        return self._service.conductors if isinstance(self._service, RemoteConductor) else []

    async def start(self) -> None:
        settings = self.settings
        # Made here: its contents belong to the running loop.
        self._service = (
            RemoteConductor(*settings.conductor_addresses)
            if settings.conductor
            else ConductorService(replace(self._as_conductor, engines_share_blocks=self._engines_share))
        )
        await self.workers.open()
        await self.recorder.start()
        await self._service.start()
        for role, instances in self.instances.items():
            for instance, _ in instances:
                self._service.post(AddInstance(instance, role))
        self._moves = Moves(self._service, self.workers)
        self._following = asyncio.get_running_loop().create_task(self._moves.run())

    @property
    def protocol(self) -> Protocol:
        """How engines that are not our workers hand KV over."""
        given = self.settings.protocol
        return "sequential" if given in ("auto", "workers") else given

    @property
    def _engines_share(self) -> bool:
        return self.settings.engines_share_blocks or self.protocol == "pool"

    async def fronts_engines(self) -> bool:
        """Whether requests are proxied to other engines rather than served by our workers."""
        if self.tokenizer is not None and self.settings.protocol == "auto":
            await self.backends.models(self.scheduling)
        return self.seems_to_front_engines

    @property
    def seems_to_front_engines(self) -> bool:
        """``fronts_engines`` as far as it is known without a query."""
        settings = self.settings
        return self.tokenizer is None or (
            settings.protocol != "workers"
            and (settings.protocol != "auto" or self.backends.are_own_workers is False)
        )

    async def drain(self) -> None:
        """Admit no more answers, and wait until those in progress have ended, at most ``drain_s``."""
        self.limiter.stop()
        if not self.limiter.num_in_flight:
            return
        log.info("draining", answers=self.limiter.num_in_flight, drain_s=self.settings.drain_s)
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self.limiter.wait_until_empty()
        except TimeoutError:
            log.warning("answers_cut", answers=self.limiter.num_in_flight, drain_s=self.settings.drain_s)

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._service is not None:
            await self._service.close()
        await self.recorder.close()
        await self.workers.close()

    def reload_clients(self, is_forced: bool = True) -> None:
        """Read the file of keys again; with ``is_forced`` false only if it has changed.

        A file that can't be used changes nothing; the log has the reason.
        """
        path = self.settings.api_keys_file
        if self.clients is None:
            return
        seen = _stamp(path)
        if seen == self._keys_seen and not is_forced:
            return
        self._keys_seen = seen
        try:
            entries = read_clients(path)
        except InvalidArgument as error:
            log.error("client_keys_not_reloaded", reason=str(error))
            return
        self.clients.replace(entries, clock.monotonic())
        log.info("client_keys_reloaded", keys=len(entries))

    def model_card(self) -> ModelCard:
        name = self.settings.model_name
        length = UNSET if self.max_model_len is None else self.max_model_len
        return ModelCard(id=name, created=self.created, root=name, max_model_len=length)

    async def context_length(self) -> int:
        """Most tokens of prompt and answer together, queried from the workers until one has answered.

        Raises:
            ApiError: 503, no worker answered.
        """
        if self.max_model_len is not None:
            return self.max_model_len
        rows = await self.scheduling.status()
        for row in sorted(rows, key=lambda row: row.health != "ready"):
            found = None if row.health == "down" else await self._context_length_of(row.instance)
            if found is not None:
                self.max_model_len = found
                return found
        raise await self.no_instance()

    async def no_instance(self) -> ApiError:
        """The error while no instance has answered, with the health of each."""
        rows = await self.scheduling.status()
        states = ", ".join(f"{row.instance} is {row.health}" for row in rows) or "none was added"
        return ApiError(503, f"no instance can serve: {states}", code="no_instance", retry_after_s=1.0)

    async def _context_length_of(self, instance: InstanceId) -> int | None:
        try:
            cards = await self.workers.models(instance)
        except WorkerFailed as error:
            log.info("context_length_unknown", instance=instance, reason=error.reason)
            return None
        length = cards[0].max_model_len if cards else None
        return length if isinstance(length, int) else None
