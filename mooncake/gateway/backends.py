# SPDX-License-Identifier: Apache-2.0
"""Facts about the engines behind the gateway, which are queried rarely.

Owns which models they serve, whether they are our workers, and where their connectors listen. A fact that an
engine does not report is unknown, which is not an error: requests are then forwarded unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Collection
from typing import Any

import msgspec

from mooncake import clock
from mooncake.conductor.client import ConductorClient
from mooncake.gateway.handoff import EngineEndpoint, Protocol
from mooncake.gateway.worker_client import WorkerClient, WorkerFailed
from mooncake.http.openai import ModelCard
from mooncake.log import get_logger
from mooncake.types import InstanceId

log = get_logger(__name__)

BOOTSTRAP_PORT = 8998
"""Default port of the bootstrap server of vLLM's MooncakeConnector."""

_OURS = "mooncake"
_QUERY_INTERVAL_S = 10.0
_QUERY_AGAIN_TIMEOUT_S = 2.0
"""How long a request waits for the models of engines whose earlier ones are known."""
_LIST_AGAIN_S = 1.0


class Backends:
    """Facts about engines. ``ports``: where connectors listen, by instance."""

    def __init__(self, workers: WorkerClient, api_key: str, ports: dict[InstanceId, int]) -> None:
        self.ports = ports
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._workers = workers
        self._cards: list[ModelCard] = []
        self._queried_at = float("-inf")
        self._are_cards_stale = False
        self._ready: list[InstanceId] = []
        self._listed_at = float("-inf")
        self._ranks: dict[InstanceId, list[str]] = {}
        self._turns = itertools.count()

    async def models(self, scheduling: ConductorClient, wanted: str = "") -> list[ModelCard]:
        """The models of the first engine that answers; empty while none does.

        Queried again, at a limited rate, when ``wanted`` is not among them, since adapters are loaded at run
        time; and when it is empty, since engines may serve their model under another name after a restart.
        The known ones stay while no engine answers.
        """
        is_recent = clock.monotonic() < self._queried_at + _QUERY_INTERVAL_S
        is_known = any(card.id == wanted for card in self._cards) and not self._are_cards_stale
        if self._cards and (is_recent or is_known):
            return self._cards
        self._queried_at, self._are_cards_stale = clock.monotonic(), False
        if not self._cards:
            self._cards = await self._query_models(scheduling)
            return self._cards
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUERY_AGAIN_TIMEOUT_S):
                self._cards = await self._query_models(scheduling) or self._cards
        return self._cards

    async def _query_models(self, scheduling: ConductorClient) -> list[ModelCard]:
        """The models of the first engine that answers now; empty if none does."""
        rows = await scheduling.status()
        for row in sorted(rows, key=lambda row: row.health != "ready"):
            if row.health == "down":
                continue
            try:
                if found := await self._workers.models(row.instance, self.headers):
                    return found
            except WorkerFailed as error:
                log.info("model_list_unavailable", instance=row.instance, reason=error.reason)
        return []

    async def pick_instance(
        self, scheduling: ConductorClient, exclude: Collection[InstanceId] = ()
    ) -> InstanceId | None:
        """One of the ready instances that are not in ``exclude``, in turn; None while there is none."""
        if clock.monotonic() > self._listed_at + _LIST_AGAIN_S:
            self._ready = [row.instance for row in await scheduling.status() if row.health == "ready"]
            self._listed_at = clock.monotonic()
        ready = [one for one in self._ready if one not in exclude] if exclude else self._ready
        return ready[next(self._turns) % len(ready)] if ready else None

    @property
    def are_own_workers(self) -> bool | None:
        """Whether they are workers of this project; None while unknown."""
        return all(card.owned_by == _OURS for card in self._cards) if self._cards else None

    async def side(self, instance: InstanceId, protocol: Protocol) -> EngineEndpoint:
        """The endpoint of an instance, as the other side of a transfer needs it.

        Raises:
            WorkerFailed: its bootstrap server does not answer.
        """
        host, _, http_port = instance.rpartition(":")
        port = self.ports.get(instance)
        if protocol == "push" and port is None and http_port.isdecimal():
            port = int(http_port)  # our connector derives the port of its listener from this one
        if protocol != "bootstrap":
            return EngineEndpoint(host, port)
        port = port or BOOTSTRAP_PORT
        if instance not in self._ranks:
            self._ranks[instance] = await self._query_ranks(instance, f"{host}:{port}")
        ranks = self._ranks[instance]
        rank = next(self._turns) % len(ranks)
        return EngineEndpoint(host, port, ranks[rank], rank if len(ranks) > 1 else None)

    def joined(self, instance: InstanceId) -> None:
        """An instance was added: its address may be that of another process, with another model."""
        self.forget(instance)
        self._queried_at, self._are_cards_stale = float("-inf"), True

    def forget(self, instance: InstanceId) -> None:
        """Forget a failed instance: if it comes back, it may be another process."""
        self._ranks.pop(instance, None)

    async def _query_ranks(self, instance: InstanceId, address: str) -> list[str]:
        """The engine id of each data-parallel rank."""
        try:
            answer = await self._workers.get(address, "/query")
            found = msgspec.json.decode(answer, type=dict[str, dict[str, Any]])
            ranks = [str(found[rank]["engine_id"]) for rank in sorted(found, key=int)]
        except WorkerFailed as error:
            raise WorkerFailed(instance, f"bootstrap server {address}: {error.reason}") from error
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            raise WorkerFailed(instance, f"bootstrap server {address}: {error!r}") from error
        if not ranks:
            raise WorkerFailed(instance, f"bootstrap server {address} has no engine yet")
        return ranks
