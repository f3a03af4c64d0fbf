"""What a gateway is made of, and its settings; one object that endpoints and admin calls share.

Owns the order of starting and stopping and the one fact learned from workers, the model's context length.
It knows no HTTP server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from msgspec import Meta

from mooncake import clock
from mooncake.conductor.client import RemoteConductor, Scheduling
from mooncake.conductor.messages import AddInstance
from mooncake.conductor.server import ConductorService
from mooncake.conductor.settings import SchedulingSettings, Seconds
from mooncake.config import AlsoFrom, Port, Secret
from mooncake.errors import InvalidArgument
from mooncake.gateway.gate import Gate
from mooncake.gateway.naming import NamedRequests
from mooncake.gateway.workers import WorkerFailed, Workers
from mooncake.inference.openai import ApiError, ModelCard
from mooncake.log import get_logger
from mooncake.rpc.client import split_address
from mooncake.types import InstanceId, Role

log = get_logger(__name__)


@dataclass(frozen=True)
class GatewaySettings(SchedulingSettings):
    """Serve the OpenAI API and spread requests over workers."""

    model: str = "smollm2"
    "A local Hugging Face folder, or `smollm2`; only its tokenizer is used."

    served_model_name: str = ""
    "The model's name in the API; empty takes the last part of `model`."

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 8000
    "Port of the HTTP server; 0 takes a free one."

    prefill: tuple[str, ...] = ()
    "Prefill workers, `host:port`; more can be added while running."

    decode: tuple[str, ...] = ()
    "Decode workers, `host:port`; more can be added while running."

    conductor: str = ""
    "`host:port` of a conductor; empty runs one inside this process with the scheduling settings."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "What admin calls must send as X-API-Key; empty refuses them all."

    request_timeout_s: Seconds = 600.0
    "How long one answer may take, prefill and decode together."

    stall_timeout_s: Seconds = 120.0
    "A worker that sends nothing for so long counts as failed, even if it answers health probes."

    max_in_flight: Annotated[int, Meta(ge=1)] = 1024
    "Answers under way at a time; beyond that clients are told when to come back."

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            for address in getattr(self, name):
                try:
                    split_address(address)
                except InvalidArgument as error:
                    raise InvalidArgument(name, address, "host:port") from error

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]


class PromptTokenizer(Protocol):
    """What a gateway needs of ``mooncake.inference.tokenizer.Tokenizer``."""

    def encode(self, text: str) -> list[int]: ...

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]: ...


class Gateway:
    """Everything of the process but its HTTP server. ``start`` and ``close`` it on one loop."""

    def __init__(self, settings: GatewaySettings, tokenizer: PromptTokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.workers = Workers(settings.stall_timeout_s)
        self.gate = Gate(settings.max_in_flight)
        self.named = NamedRequests()
        self.created = int(clock.wall())
        self.max_model_len: int | None = None
        """Context of the model; known when a worker has been asked."""
        self._service: ConductorService | RemoteConductor | None = None

    @property
    def scheduling(self) -> Scheduling:
        assert self._service is not None, "start() first"
        return self._service

    @property
    def conductor_state(self) -> str:
        """Where the conductor is, in words."""
        if not self.settings.conductor:
            return "inside this gateway"
        assert isinstance(self._service, RemoteConductor)
        state = "connected" if self._service.is_connected else "can't be reached: workers are used in turn"
        return f"{self.settings.conductor} ({state})"

    async def start(self) -> None:
        settings = self.settings
        # Made here: what it holds belongs to the loop that runs now.
        self._service = (
            RemoteConductor(settings.conductor) if settings.conductor else ConductorService(settings)
        )
        await self.workers.open()
        await self._service.start()
        for role, instances in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
            for instance in instances:
                self._service.post(AddInstance(instance, role))

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()
        await self.workers.close()

    def model_card(self) -> ModelCard:
        name = self.settings.model_name
        return ModelCard(id=name, created=self.created, root=name, max_model_len=self.max_model_len)

    async def context_length(self) -> int:
        """Most tokens of prompt and answer together, asked of the workers once.

        Raises:
            ApiError: 503, no worker could be asked.
        """
        if self.max_model_len is not None:
            return self.max_model_len
        rows = await self.scheduling.status()
        for row in sorted(rows, key=lambda row: row.health != "ready"):
            found = None if row.health == "down" else await self._context_length_of(row.instance)
            if found is not None:
                self.max_model_len = found
                return found
        states = ", ".join(f"{row.instance} is {row.health}" for row in rows) or "none was added"
        message = f"no instance can serve: {states}"
        raise ApiError(503, message, code="no_instance", retry_after_s=1.0)

    async def _context_length_of(self, instance: InstanceId) -> int | None:
        try:
            cards = await self.workers.models(instance)
        except WorkerFailed as error:
            log.info("model_unknown", instance=instance, reason=error.reason)
            return None
        return cards[0].max_model_len if cards else None
