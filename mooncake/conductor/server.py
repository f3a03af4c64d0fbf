"""The conductor's shell: the core on a driver, with its probes, event subscriptions and wire.

``ConductorService`` runs the core in this process, ``ConductorServer`` lends it to others by RPC, and
``RemoteConductor`` is the client's side; service and client have the same methods (``Scheduling``),
so that a gateway need not know whether its conductor lives inside it. Nothing here decides where a request
goes, with one exception: while the conductor is unreachable a client serves its known instances in turn,
because a late answer helps nobody and any worker can do any work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from prometheus_client import Counter

from mooncake import metrics
from mooncake.conductor.conductor import (
    AddInstance,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Conductor,
    Decision,
    Drain,
    Effect,
    Event,
    Failed,
    Finished,
    InstanceStatus,
    Place,
    Prefilled,
    Probe,
    Probed,
    Refuse,
    RemoveInstance,
    StateChanged,
    Unwatch,
    Watch,
)
from mooncake.conductor.events import EventSource, follow
from mooncake.conductor.load import ProbeOutcome, SchedulingSettings
from mooncake.config import Port
from mooncake.driver import Driver
from mooncake.errors import MooncakeError, Refusal
from mooncake.log import get_logger
from mooncake.rpc import AsyncClient, Call, Connection, RpcServer
from mooncake.types import InstanceId, Role

log = get_logger(__name__)

CALL_TIMEOUT_S = 1.0
"""A conductor answers in microseconds; after so long it is treated as gone."""

_REFRESH_S = 2.0

_placements = Counter(
    "mooncake_conductor_placements",
    "Placements asked for, by outcome: placed, degraded or the code of the refusal.",
    ["outcome"],
    registry=metrics.registry,
)
_state_changes = Counter(
    "mooncake_conductor_state_changes",
    "Instances that entered a state.",
    ["role", "state"],
    registry=metrics.registry,
)


@dataclass(frozen=True)
class ConductorSettings(SchedulingSettings):
    """Choose the workers of each request by their cached blocks and load."""

    host: str = "127.0.0.1"
    "Address to listen on for gateways."

    port: Port = 8400
    "Port to listen on; 0 takes a free one."


async def serve(settings: ConductorSettings) -> None:
    """Run a conductor until cancelled.

    Raises:
        AddressInUse: the port is taken.
    """
    service = ConductorService(settings)
    server = ConductorServer(service)
    try:
        port = await server.start(settings.host, settings.port)
        await service.start()
        log.info("ready", role="conductor", address=f"{settings.host}:{port}", scheduling=settings.scheduling)
        await asyncio.get_running_loop().create_future()
    finally:
        await server.close()
        await service.close()


class Scheduling(Protocol):
    """What a gateway needs of a conductor."""

    async def place(self, request: Place) -> Decision | Refuse: ...

    def post(self, event: Event) -> None:
        """Report a fact. Returns at once; never raises."""
        ...

    async def change(self, event: AddInstance | RemoveInstance | Drain) -> None:
        """Change the membership; done when it returns. Raises Unavailable."""
        ...

    async def status(self) -> list[InstanceStatus]: ...

    async def story(self, key: str) -> list[str]: ...


class ConductorService:
    """The core in this process. Use it on one event loop: ``start``, then anything, then ``close``."""

    def __init__(self, settings: SchedulingSettings) -> None:
        self.settings = settings
        self.core = Conductor(settings, Random())
        self._driver: Driver[Event, Effect] = Driver(self.core, self._perform)
        self._answer: Decision | Refuse | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._followers: dict[InstanceId, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._zmq = zmq.asyncio.Context()

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self.settings.probe_timeout_s)
        self._session = aiohttp.ClientSession(timeout=timeout)

    async def close(self) -> None:
        self._driver.close()
        tasks = [*self._tasks, *self._followers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        self._zmq.destroy(linger=0)

    async def place(self, request: Place) -> Decision | Refuse:
        return self.place_now(request)

    def place_now(self, request: Place) -> Decision | Refuse:
        self._driver.post(request)
        answer, self._answer = self._answer, None
        assert answer is not None
        if isinstance(answer, Decision):
            _placements.labels("degraded" if answer.degraded else "placed").inc()
        else:
            _placements.labels(answer.refusal.code).inc()
        return answer

    def post(self, event: Event) -> None:
        self._driver.post(event)

    async def change(self, event: AddInstance | RemoveInstance | Drain) -> None:
        self.post(event)

    async def status(self) -> list[InstanceStatus]:
        return self.core.status()

    async def story(self, key: str) -> list[str]:
        return self.core.story(key)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Decision() | Refuse():
                self._answer = effect
            case Probe():
                self._spawn(self._probe(effect.instance))
            case Watch():
                self._unfollow(effect.instance)
                task = asyncio.get_running_loop().create_task(self._follow(effect.instance))
                self._followers[effect.instance] = task
            case Unwatch():
                self._unfollow(effect.instance)
            case StateChanged():
                _state_changes.labels(effect.role, effect.after).inc()
                log.info(
                    "instance_changed",
                    instance=effect.instance,
                    role=effect.role.value,
                    before=effect.before,
                    after=effect.after,
                    reason=effect.reason,
                )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def _unfollow(self, instance: InstanceId) -> None:
        task = self._followers.pop(instance, None)
        if task is not None:
            task.cancel()

    async def _probe(self, instance: InstanceId) -> None:
        outcome, detail = ProbeOutcome.FAILED, "the probe was cancelled"
        try:
            outcome, detail = await self._ask(instance)
        except TimeoutError:
            detail = f"no answer to a probe within {self.settings.probe_timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            detail = f"probe failed: {error}"
        self._driver.post(Probed(instance, outcome, detail))

    async def _ask(self, instance: InstanceId) -> tuple[ProbeOutcome, str]:
        assert self._session is not None
        async with self._session.get(f"http://{instance}/ready") as response:
            if response.status == 200:
                return ProbeOutcome.READY, "answers"
            if response.status != 404:
                return ProbeOutcome.ALIVE, f"/ready answers {response.status}"
        # vLLM has no /ready; there /health tells all.
        async with self._session.get(f"http://{instance}/health") as response:
            if response.status == 200:
                return ProbeOutcome.READY, "answers"
            return ProbeOutcome.FAILED, f"/health answers {response.status}"

    async def _follow(self, instance: InstanceId) -> None:
        """Subscribe to every source that the instance names; without any the index stays empty for it."""
        assert self._session is not None
        try:
            async with self._session.get(f"http://{instance}/kv_event_sources") as response:
                answer = msgspec.json.decode(await response.read(), type=_Sources)
                found = answer.sources if response.status == 200 else []
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.info("no_kv_events", instance=instance, reason=str(error))
            return
        if found and answer.block_size != self.settings.block_tokens:
            log.warning(
                "kv_events_ignored",
                instance=instance,
                reason=f"its blocks have {answer.block_size} tokens, ours {self.settings.block_tokens}",
            )
            return
        try:
            async with asyncio.TaskGroup() as group:
                for source in found:
                    reachable = source.as_seen_from_afar(instance)
                    group.create_task(follow(self._zmq, instance, reachable, self._driver.post))
        except* zmq.ZMQError as errors:
            reason = str(errors.exceptions[0])
            log.warning("kv_events_ignored", instance=instance, sources=found, reason=reason)


class _Sources(msgspec.Struct):
    sources: list[EventSource]
    block_size: int


# --- by RPC ------------------------------------------------------------------------------------------


class Noted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to every fact."""


class GetStatus(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Status(msgspec.Struct, frozen=True, array_like=True, tag=True):
    rows: list[InstanceStatus]


class GetStory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str


class Story(msgspec.Struct, frozen=True, array_like=True, tag=True):
    lines: list[str]


REPLIES = (Decision, Refuse, Noted, Status, Story)
_FACTS = (
    Prefilled,
    Finished,
    Failed,
    AddInstance,
    RemoveInstance,
    Drain,
    BlocksStored,
    BlocksRemoved,
    BlocksCleared,
)


class ConductorServer:
    """Serves a ``ConductorService`` to gateways; a lost gateway's requests count as finished."""

    def __init__(self, service: ConductorService) -> None:
        self._service = service
        self._placed: dict[Connection, dict[str, None]] = {}
        handlers: dict[type[msgspec.Struct], Any] = dict.fromkeys(_FACTS, self._note)
        handlers |= {Place: self._place, GetStatus: self._status, GetStory: self._story}
        self.rpc = RpcServer(handlers, self._on_lost)

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 takes a free one. Returns the port. Raises as ``RpcServer.start``."""
        return await self.rpc.start(host, port)

    async def close(self) -> None:
        await self.rpc.close()

    def _place(self, request: Place, call: Call) -> Decision | Refuse:
        self._placed.setdefault(call.connection, {})[request.request_id] = None
        return self._service.place_now(request)

    def _note(self, event: Event, call: Call) -> Noted:
        if isinstance(event, Finished):
            self._placed.get(call.connection, {}).pop(event.request_id, None)
        self._service.post(event)
        return Noted()

    def _status(self, message: GetStatus, call: Call) -> Status:
        return Status(self._service.core.status())

    def _story(self, message: GetStory, call: Call) -> Story:
        return Story(self._service.core.story(message.key))

    def _on_lost(self, connection: Connection) -> None:
        for request_id in self._placed.pop(connection, {}):
            self._service.post(Finished(request_id))


class RemoteConductor:
    """A conductor in another process, and what is done while it is away."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address, REPLIES, "the conductor")
        self._known: dict[InstanceId, Role] = {}
        self._rows: list[InstanceStatus] = []
        self._is_connected = False
        self._next_turn = 0
        self._outbox: asyncio.Queue[Event] = asyncio.Queue(10_000)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep_connected()), loop.create_task(self._send_facts())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def place(self, request: Place) -> Decision | Refuse:
        if self._is_connected:
            try:
                answer = await self._client.call(request, CALL_TIMEOUT_S)
            except MooncakeError as error:
                log.warning("conductor_lost", reason=str(error))
                self._is_connected = False
            else:
                assert isinstance(answer, Decision | Refuse)
                return answer
        return self._place_in_turn(request)

    def post(self, event: Event) -> None:
        self._remember(event)
        # A full queue means a conductor that is long gone: what it misses, it learns by probing.
        with contextlib.suppress(asyncio.QueueFull):
            self._outbox.put_nowait(event)

    async def change(self, event: AddInstance | RemoveInstance | Drain) -> None:
        await self._client.call(event, CALL_TIMEOUT_S)
        self._remember(event)

    async def status(self) -> list[InstanceStatus]:
        try:
            answer = await self._client.call(GetStatus(), CALL_TIMEOUT_S)
        except MooncakeError as error:
            known = {row.instance: row for row in self._rows}
            detail = f"as known before the conductor was lost: {error}"
            rows = [
                known.get(one) or InstanceStatus(one, role, "unknown", detail, 0, 0, 0, 0)
                for one, role in self._known.items()
            ]
            return [msgspec.structs.replace(row, detail=detail) for row in rows]
        assert isinstance(answer, Status)
        return answer.rows

    async def story(self, key: str) -> list[str]:
        answer = await self._client.call(GetStory(key), CALL_TIMEOUT_S)
        assert isinstance(answer, Story)
        return answer.lines

    def _remember(self, event: Event) -> None:
        if isinstance(event, AddInstance):
            self._known[event.instance] = event.role
        elif isinstance(event, RemoveInstance | Drain):
            self._known.pop(event.instance, None)

    def _place_in_turn(self, request: Place) -> Decision | Refuse:
        self._next_turn += 1
        prefills = self._in_turn(Role.PREFILL, request.exclude)
        decodes = self._in_turn(Role.DECODE, request.exclude)
        if not prefills and not decodes:
            refusal = Refusal("no_instance", "the conductor can't be reached and no other instance is known")
            return Refuse(request.request_id, refusal, _REFRESH_S)
        reason = "the conductor can't be reached: in turn"
        decode_pool = decodes or prefills
        decode = decode_pool[self._next_turn % len(decode_pool)]
        prefill = None
        if prefills and decodes and request.needs_prefill:
            prefill = prefills[self._next_turn % len(prefills)]
        return Decision(request.request_id, prefill, decode, reason, degraded="no conductor")

    def _in_turn(self, role: Role, exclude: list[InstanceId]) -> list[InstanceId]:
        """Those of a role that were last seen ready; all of it when none was."""
        pool = [one for one, its_role in self._known.items() if its_role is role and one not in exclude]
        last_ready = {row.instance: None for row in self._rows if row.health == "ready"}
        return [one for one in pool if one in last_ready] or pool

    async def _keep_connected(self) -> None:
        """Register the known instances at every new connection, then keep them as the conductor has them."""
        while True:
            try:
                await self._client.connect(CALL_TIMEOUT_S)
                if not self._is_connected:
                    await self._register()
                    self._is_connected = True
                    log.info("conductor_connected", peer=self._client.peer)
                answer = await self._client.call(GetStatus(), CALL_TIMEOUT_S)
                assert isinstance(answer, Status)
                self._rows = answer.rows
                self._known = {row.instance: row.role for row in answer.rows if row.health != "draining"}
            except MooncakeError as error:
                if self._is_connected:
                    log.warning("conductor_lost", reason=str(error))
                self._is_connected = False
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REFRESH_S):
                    await self._client.lost.wait()
                self._is_connected = False

    async def _register(self) -> None:
        for instance, role in self._known.items():
            await self._client.call(AddInstance(instance, role), CALL_TIMEOUT_S)
        # A conductor that was just started believes nobody ready until it has probed them.
        for _ in range(20):
            answer = await self._client.call(GetStatus(), CALL_TIMEOUT_S)
            assert isinstance(answer, Status)
            if not answer.rows or any(row.health == "ready" for row in answer.rows):
                return
            await asyncio.sleep(0.1)

    async def _send_facts(self) -> None:
        while True:
            event = await self._outbox.get()
            try:
                await self._client.call(event, CALL_TIMEOUT_S)
            except MooncakeError as error:
                log.debug("fact_not_delivered", fact=type(event).__name__, reason=str(error))
