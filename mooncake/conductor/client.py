# SPDX-License-Identifier: Apache-2.0
"""A gateway's side of the conductor: the interface that every conductor has, and the client of a remote one.

While the conductor is unreachable a client uses its known instances in turn, because waiting would only delay
requests that any worker can serve. This is the only placement that is decided outside the core.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import msgspec

from mooncake.conductor.explanation import Explain, Explained, Explanation
from mooncake.conductor.messages import (
    REPLIES,
    AddInstance,
    AdmissionStatus,
    Decision,
    Drain,
    Event,
    GetStatus,
    GetStory,
    InstanceStatus,
    Place,
    Prefilled,
    Refuse,
    RemoveInstance,
    Status,
    Story,
)
from mooncake.errors import MooncakeError, Refusal
from mooncake.log import get_logger
from mooncake.rpc import AsyncClient
from mooncake.types import InstanceId, WorkerRole

log = get_logger(__name__)

CALL_TIMEOUT_S = 1.0
"""A conductor answers in microseconds; one that takes this long is treated as gone."""

_REFRESH_S = 2.0


class ConductorClient(Protocol):
    """The conductor's interface that a gateway needs."""

    async def place(self, request: Place) -> Decision | Refuse: ...

    async def prefilled(self, event: Prefilled) -> Refuse | None:
        """Report that a prompt is computed; some rules of admission refuse only now."""
        ...

    def post(self, event: Event) -> None:
        """Report a fact. Returns at once; never raises."""
        ...

    async def change(self, event: AddInstance | RemoveInstance | Drain) -> None:
        """Change the membership; done when it returns. Raises Unavailable."""
        ...

    async def status(self) -> list[InstanceStatus]: ...

    async def admission(self) -> AdmissionStatus:
        """Counts of admitted and rejected requests, as last known."""
        ...

    async def story(self, key: str) -> list[str]: ...

    async def explain(self, request_id: str) -> Explanation | None:
        """The explanation of a request, if it is remembered. Raises Unavailable."""
        ...


class RemoteConductor:
    """A conductor in another process, with a fallback while it is unreachable."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address, (*REPLIES, Explained), "the conductor")
        self._known: dict[InstanceId, WorkerRole] = {}
        self._rows: list[InstanceStatus] = []
        self._admission = AdmissionStatus()
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

    async def prefilled(self, event: Prefilled) -> Refuse | None:
        if not self._is_connected:
            return None
        try:
            answer = await self._client.call(event, CALL_TIMEOUT_S)
        except MooncakeError as error:
            log.debug("conductor_event_not_delivered", fact="Prefilled", reason=str(error))
            return None
        return answer if isinstance(answer, Refuse) else None

    def post(self, event: Event) -> None:
        self._remember(event)
        # A full queue means a conductor that is long gone: it recovers the dropped facts by probing.
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
        self._admission = answer.admission
        return answer.rows

    async def admission(self) -> AdmissionStatus:
        return self._admission

    async def story(self, key: str) -> list[str]:
        answer = await self._client.call(GetStory(key), CALL_TIMEOUT_S)
        assert isinstance(answer, Story)
        return answer.lines

    async def explain(self, request_id: str) -> Explanation | None:
        answer = await self._client.call(Explain(request_id), CALL_TIMEOUT_S)
        assert isinstance(answer, Explained)
        return answer.explanation

    def _remember(self, event: Event) -> None:
        if isinstance(event, AddInstance):
            self._known[event.instance] = event.role
        elif isinstance(event, RemoveInstance | Drain):
            self._known.pop(event.instance, None)

    def _place_in_turn(self, request: Place) -> Decision | Refuse:
        self._next_turn += 1
        prefills = self._in_turn(WorkerRole.PREFILL, request.exclude)
        decodes = self._in_turn(WorkerRole.DECODE, request.exclude)
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

    def _in_turn(self, role: WorkerRole, exclude: list[InstanceId]) -> list[InstanceId]:
        """The role's instances that were last seen ready; all of them when none was."""
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
        # A conductor that was just started considers no instance ready until it has probed it.
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
                log.debug("conductor_event_not_delivered", fact=type(event).__name__, reason=str(error))
