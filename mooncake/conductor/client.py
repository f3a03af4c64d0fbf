# SPDX-License-Identifier: Apache-2.0
"""A gateway's side of the conductor: the interface that every conductor has, and the client of remote ones.

Of several conductors a gateway uses the one that leads. When that is lost it uses another one at once,
whether it leads already or not: a conductor that does not lead answers as well, only with a view that may
lack the latest requests of others. Of several conductors one that did not answer in time is mostly only slow,
so a placement waits ``RETURN_S`` for it. While no conductor is reachable for longer, waiting would only delay
requests that any worker can serve: a prompt goes where the last one with the same beginning was computed, as
its blocks are there, and any other to the known instances in turn. This is the only placement that is decided
outside the core.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from prometheus_client import Counter

from mooncake import clock, metrics
from mooncake.conductor.explanation import Explain, Explained, Explanation
from mooncake.conductor.messages import (
    REPLIES,
    AddInstance,
    AdmissionStatus,
    ClaimRequests,
    Decision,
    Drain,
    Finished,
    FoundSpans,
    GetSpans,
    GetStatus,
    GetStory,
    InstanceStatus,
    Moved,
    Place,
    Placed,
    Prefilled,
    Refuse,
    RemoveInstance,
    ReportedFact,
    Standing,
    Status,
    Story,
)
from mooncake.conductor.scaling_signal import ScalingStatus
from mooncake.errors import DeadlineExceeded, MooncakeError, PeerLost, Refusal
from mooncake.log import get_logger
from mooncake.prefix import BlockKey
from mooncake.rpc import AsyncClient
from mooncake.tracing import Span
from mooncake.types import InstanceId, WorkerRole

log = get_logger(__name__)

CALL_TIMEOUT_S = 1.0
"""A conductor answers in microseconds; one that takes this long is treated as gone."""

RETURN_S = 1.0
"""After all of several conductors were lost, placements wait for the first one that is back this long."""

_REFRESH_S = 2.0
_PAUSE_S = 0.05
_CLAIMS_PER_CALL = 256
_FACTS_AT_ONCE = 256
"""Facts that are sent before the first one's answer: far fewer than a server has open at a time."""
_MOST_UNSENT = 10_000
_FEW_PROMPTS = 2
"""Prompts by which one instance may be ahead of twice the others while no conductor chooses."""
_MOST_BEGINNINGS = 32_768

_changes = Counter(
    "mooncake_conductor_client_changes",
    "Times that a gateway began to use another conductor.",
    registry=metrics.registry,
)
_in_turn = Counter(
    "mooncake_conductor_client_in_turn",
    "Placements that a gateway made itself, because it could reach no conductor.",
    registry=metrics.registry,
)


class ConductorClient(Protocol):
    """The conductor's interface that a gateway needs."""

    async def place(self, request: Place) -> Decision | Refuse: ...

    async def prefilled(self, event: Prefilled) -> Refuse | None:
        """Report that a prompt is computed; some rules of admission refuse only now."""
        ...

    def post(self, event: ReportedFact) -> None:
        """Report a fact. Returns at once; never raises."""
        ...

    async def change(self, event: AddInstance | RemoveInstance | Drain) -> None:
        """Change the membership; done when it returns. Raises Unavailable."""
        ...

    async def status(self) -> list[InstanceStatus]: ...

    async def admission(self) -> AdmissionStatus:
        """Counts of admitted and rejected requests, as last known."""
        ...

    async def scaling(self) -> list[ScalingStatus]:
        """The numbers of instances that are desired, as last known."""
        ...

    async def story(self, key: str) -> list[str]: ...

    async def explain(self, request_id: str) -> Explanation | None:
        """The explanation of a request, if it is remembered. Raises Unavailable."""
        ...

    async def spans(self, parent_id: str) -> list[Span]:
        """The conductor's spans below a gateway's, as far as it has them; none where it can't be reached."""
        ...


class ConductorReach(msgspec.Struct, frozen=True):
    """One row of ``conductors`` in ``/status``: whether a gateway can ask the conductor at an address."""

    address: str
    is_connected: bool


class _ConductorLink:
    """The connection to one conductor."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = AsyncClient(address, (*REPLIES, Explained), "the conductor")
        self.is_connected = False
        self.standing = Standing(0)
        self.has_claims = False
        "It knows the requests in flight, and that this gateway reports their ends to it."
        self.is_doubted = asyncio.Event()
        "Set when it is lost; cleared when it is tried again."


class RemoteConductor:
    """Conductors in other processes: the one that leads is asked, another one when it is lost.

    A fallback places requests while none is reachable. The requests in flight are remembered, and reported to
    a conductor before it gets any other report: so it knows them, whichever conductor placed them.
    """

    def __init__(self, *addresses: str) -> None:
        """Raises InvalidArgument: an address is not ``host:port``."""
        self._links = [_ConductorLink(address) for address in addresses]
        self._used: _ConductorLink | None = None
        self._known: dict[InstanceId, WorkerRole] = {}
        self._rows: list[InstanceStatus] = []
        self._admission = AdmissionStatus()
        self._scaling: list[ScalingStatus] = []
        self._next_turn = 0
        self._in_flight: dict[str, tuple[Placed, float]] = {}
        """By request: its placement, and when that was made."""
        self._unanswered: dict[str, list[_ConductorLink]] = {}
        """By request: conductors that were asked to place it, have not answered, and may place it yet."""
        self._is_back = asyncio.Event()
        """Set while any conductor can be asked."""
        self._lost_at = -math.inf
        """When the last one that could be asked was lost."""
        self._reports: dict[asyncio.Task[None], None] = {}
        self._computed_by: collections.OrderedDict[BlockKey, InstanceId] = collections.OrderedDict()
        """By the last block of a prompt's beginning: the instance that computed it, the latest used last."""
        self._outbox: asyncio.Queue[ReportedFact | None] = asyncio.Queue(_MOST_UNSENT)
        self._unheard: dict[str, None] = {}
        """Requests in flight that no conductor has placed, and that were reported to none."""
        self._late_ends: dict[str, Finished] = {}
        """Ends of requests for which the outbox has had no room, by request."""
        self._asked: collections.Counter[str] = collections.Counter()
        """By request: how many calls ask a conductor to place it now."""
        self._ending: dict[str, None] = {}
        """Requests whose ends wait to be sent."""
        self._num_claims = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_connected(self) -> bool:
        """Whether any conductor can be asked."""
        return any(link.is_connected for link in self._links)

    @property
    def conductors(self) -> list[ConductorReach]:
        """All conductors, in the order of their addresses."""
        return [ConductorReach(link.address, link.is_connected) for link in self._links]

    def describe(self) -> str:
        """The state of each conductor, as text."""
        if len(self._links) == 1:
            state = "connected" if self.is_connected else "can't be reached: workers are chosen without it"
            return f"{self._links[0].address} ({state})"
        states = [
            (link.address, "can't be reached" * (not link.is_connected) or _role_of(link.standing))
            for link in self._links
        ]
        return ", ".join(f"{address} ({state})" for address, state in states)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep_connected(link)) for link in self._links]
        self._tasks.append(loop.create_task(self._send_facts()))

    async def close(self) -> None:
        tasks = [*self._tasks, *self._reports]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links:
            await link.client.close()

    async def place(self, request: Place) -> Decision | Refuse:
        self._asked[request.request_id] += 1
        try:
            return await self._place(request)
        finally:
            self._asked[request.request_id] -= 1
            if not self._asked[request.request_id]:
                del self._asked[request.request_id]

    async def _place(self, request: Place) -> Decision | Refuse:
        answer: Decision | Refuse | None = None
        for _ in range(2):
            if not await self._is_reachable():
                break
            with contextlib.suppress(MooncakeError):
                answer = await self._call(request)
            if answer is not None or self.is_connected:
                break
        if answer is None:
            _in_turn.inc()
            answer = self._place_in_turn(request)
            if isinstance(answer, Decision):
                self._unheard[request.request_id] = None
        else:
            self._unheard.pop(request.request_id, None)
        if isinstance(answer, Decision):
            # Of an earlier placement, which this one replaces.
            if self._late_ends.pop(request.request_id, None) is not None:
                self._ending.pop(request.request_id, None)
            self._note_placed(request, answer)
        else:
            self._in_flight.pop(request.request_id, None)
            self._report_late(Finished(request.request_id))
        return answer

    async def _is_reachable(self) -> bool:
        """Whether any conductor can be asked. Of several, one that was lost just now is waited for."""
        wait_s = self._lost_at + RETURN_S - clock.monotonic()
        if not self.is_connected and len(self._links) > 1 and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._is_back.wait()
        return self.is_connected

    async def prefilled(self, event: Prefilled) -> Refuse | None:
        self._remember(event)
        if not self.is_connected:
            return None
        try:
            answer = await self._call(event)
        except MooncakeError as error:
            log.debug("conductor_event_not_delivered", fact="Prefilled", reason=str(error))
            return None
        return answer if isinstance(answer, Refuse) else None

    def post(self, event: ReportedFact) -> None:
        is_unheard = isinstance(event, Finished) and event.request_id in self._unheard
        self._remember(event)
        try:
            self._outbox.put_nowait(event)
            if isinstance(event, Finished):
                self._ending[event.request_id] = None
        except asyncio.QueueFull:
            # A conductor that is back gets the requests in flight, and recovers other facts by probing. But
            # one that knows a request counts it as load until it expires: so its end is sent later. These are
            # no more than requests that conductors know; while none can be reached they become no more.
            if isinstance(event, Finished) and is_unheard:
                self._report_late(event)
            elif isinstance(event, Finished):
                self._late_ends[event.request_id] = event
                self._ending[event.request_id] = None

    async def change(self, event: AddInstance | RemoveInstance | Drain) -> None:
        await self._call(event)
        self._remember(event)

    async def status(self) -> list[InstanceStatus]:
        try:
            answer = await self._call(GetStatus())
        except MooncakeError as error:
            known = {row.instance: row for row in self._rows}
            detail = f"as known before the conductor was lost: {error}"
            rows = [
                known.get(one) or InstanceStatus(one, role, "unknown", detail, 0, 0, 0, 0)
                for one, role in self._known.items()
            ]
            return [msgspec.structs.replace(row, detail=detail) for row in rows]
        assert isinstance(answer, Status)
        self._admission, self._scaling = answer.admission, answer.scaling
        return answer.rows

    async def admission(self) -> AdmissionStatus:
        return self._admission

    async def scaling(self) -> list[ScalingStatus]:
        return self._scaling

    async def story(self, key: str) -> list[str]:
        answer = await self._call(GetStory(key))
        assert isinstance(answer, Story)
        return answer.lines

    async def explain(self, request_id: str) -> Explanation | None:
        """As in ``ConductorClient``: of the conductor that placed the request, whichever leads now."""
        lost: MooncakeError | None = None
        for link in self._in_order():
            try:
                answer = await link.client.call(Explain(request_id), CALL_TIMEOUT_S)
            except MooncakeError as error:
                lost = error
                continue
            assert isinstance(answer, Explained)
            if answer.explanation is not None:
                return answer.explanation
            lost = None
        if lost is not None:
            raise lost
        return None

    async def spans(self, parent_id: str) -> list[Span]:
        """As in ``ConductorClient``, of all conductors: each may have placed the request once."""
        found: list[Span] = []
        for link in self._links:
            if link.is_connected:
                with contextlib.suppress(MooncakeError):
                    answer = await link.client.call(GetSpans(parent_id), CALL_TIMEOUT_S)
                    assert isinstance(answer, FoundSpans)
                    found += answer.spans
        return found

    # --- which conductor is asked

    def _in_order(self) -> list[_ConductorLink]:
        """The conductors that can be asked, the leader first, else the one used so far.

        If there are none, those to try.
        """
        ready = [link for link in self._links if link.is_connected]
        ready = ready or [link for link in self._links if not link.client.lost.is_set()] or self._links
        return sorted(ready, key=lambda link: (link.standing.rank, link is self._used), reverse=True)

    async def _call(self, message: msgspec.Struct) -> Any:
        """The answer of the leader, or of another conductor if it is lost. Raises MooncakeError."""
        for link in (links := self._in_order()):
            self._use(link)
            try:
                return await link.client.call(message, CALL_TIMEOUT_S)
            except asyncio.CancelledError:
                self._note_unanswered(message, link)
                raise
            except (PeerLost, DeadlineExceeded) as error:
                # With a lost connection a conductor ends the requests that came by it.
                if isinstance(error, DeadlineExceeded):
                    self._note_unanswered(message, link)
                self._lost(link, str(error))
                if link is links[-1]:
                    raise
        raise AssertionError("there is at least one conductor")

    def _note_unanswered(self, message: msgspec.Struct, link: _ConductorLink) -> None:
        """A conductor that is slow places a request when it gets to it, whether a caller waits or not."""
        if isinstance(message, Place):
            self._unanswered.setdefault(message.request_id, []).append(link)

    def _use(self, link: _ConductorLink) -> None:
        if link is self._used:
            return
        if self._used is not None:
            _changes.inc()
            log.info("conductor_changed", peer=link.address, before=self._used.address)
        self._used = link
        for other in self._links:
            other.has_claims = False
        with contextlib.suppress(asyncio.QueueFull):
            self._outbox.put_nowait(None)

    def _lost(self, link: _ConductorLink, reason: str) -> None:
        if link.is_connected:
            log.warning("conductor_lost", peer=link.address, reason=reason)
        link.is_connected = link.has_claims = False
        link.is_doubted.set()
        if self._is_back.is_set() and not self.is_connected:
            self._is_back.clear()
            self._lost_at = clock.monotonic()

    async def _keep_connected(self, link: _ConductorLink) -> None:
        """Register the known instances at every new connection, then keep them as the leader has them."""
        while True:
            link.is_doubted.clear()
            try:
                await link.client.connect(CALL_TIMEOUT_S)
                if not link.is_connected:
                    await self._register(link)
                    link.is_connected = True
                    self._is_back.set()
                    log.info("conductor_connected", peer=link.client.peer)
                    with contextlib.suppress(asyncio.QueueFull):
                        self._outbox.put_nowait(None)
                    if link is not self._in_order()[0]:
                        await self._disclaim(link)
                answer = await link.client.call(GetStatus(), CALL_TIMEOUT_S)
                assert isinstance(answer, Status)
                link.standing = answer.standing or link.standing
                if link is self._in_order()[0]:
                    self._rows = answer.rows
                    self._known = {row.instance: row.role for row in answer.rows if row.health != "draining"}
            except MooncakeError as error:
                self._lost(link, str(error))
                await asyncio.sleep(_PAUSE_S)  # a refusal comes at once
                continue
            await _first_of(link.client.lost, link.is_doubted, _REFRESH_S)
            if link.client.lost.is_set():
                self._lost(link, "it closed the connection")

    async def _register(self, link: _ConductorLink) -> None:
        for instance, role in list(self._known.items()):
            await link.client.call(AddInstance(instance, role, is_reminder=True), CALL_TIMEOUT_S)
        # A conductor that was just started considers no instance ready until it has probed it.
        for _ in range(20):
            answer = await link.client.call(GetStatus(), CALL_TIMEOUT_S)
            assert isinstance(answer, Status)
            link.standing = answer.standing or link.standing
            if not answer.rows or any(row.health == "ready" for row in answer.rows):
                return
            await asyncio.sleep(0.1)

    # --- facts, and the requests in flight

    def _remember(self, event: ReportedFact) -> None:
        match event:
            case AddInstance():
                self._known[event.instance] = event.role
            case RemoveInstance() | Drain():
                self._known.pop(event.instance, None)
            case Finished():
                self._in_flight.pop(event.request_id, None)
                self._unheard.pop(event.request_id, None)
            case Moved() if event.request_id in self._in_flight and event.place_id in self._in_flight:
                (source, at), (target, _) = (
                    self._in_flight[event.request_id],
                    self._in_flight.pop(event.place_id),
                )
                decision = msgspec.structs.replace(source.decision, decode=target.decision.decode)
                placed = msgspec.structs.replace(source, decision=decision, is_prefilled=True)
                self._in_flight[event.request_id] = placed, at
                for one in (event.request_id, event.place_id):
                    self._unheard.pop(one, None)
            case Prefilled() if event.request_id in self._in_flight:
                placed, at = self._in_flight[event.request_id]
                self._in_flight[event.request_id] = msgspec.structs.replace(placed, is_prefilled=True), at

    def _note_placed(self, request: Place, decision: Decision) -> None:
        # Without keys, or the memory of a gateway would grow with its clients' prompts.
        place = msgspec.structs.replace(request, keys=[], bare_keys=[])
        decision = msgspec.structs.replace(decision, turn=0.0, fetches=[])
        self._in_flight[request.request_id] = Placed(place, decision), clock.monotonic()
        if not request.needs_prefill:
            return
        for key in _beginnings(request.keys):
            self._computed_by[key] = decision.prefill or decision.decode
            self._computed_by.move_to_end(key)
        while len(self._computed_by) > _MOST_BEGINNINGS:
            self._computed_by.popitem(last=False)

    async def _send_facts(self) -> None:
        while True:
            events = [await self._outbox.get()]
            await self._is_back.wait()  # what is sent while none can be asked is lost
            while len(events) < _FACTS_AT_ONCE and not self._outbox.empty():
                events.append(self._outbox.get_nowait())
            while self._late_ends and not self._outbox.full():
                self._outbox.put_nowait(self._late_ends.pop(next(iter(self._late_ends))))
            facts = [one for one in events if one is not None]
            try:
                # One that is only slow reads both in this order, so the facts are sent there, too.
                with contextlib.suppress(DeadlineExceeded):
                    await self._claim(self._in_order()[0])
            except MooncakeError as error:
                log.debug("conductor_event_not_delivered", fact="ClaimRequests", reason=str(error))
            # They begin, and so are written to the connection, in this order; a conductor reads them in it.
            await asyncio.gather(*map(self._send_fact, facts))

    async def _send_fact(self, fact: ReportedFact) -> None:
        try:
            await self._call(fact)
        except MooncakeError as error:
            log.debug("conductor_event_not_delivered", fact=type(fact).__name__, reason=str(error))
        if isinstance(fact, Finished):
            self._ending.pop(fact.request_id, None)
            self._report_late(fact)

    def _report_late(self, event: Finished) -> None:
        """Report a request's end to conductors that may have placed it after this gateway had given up.

        They read it after the request, as it comes by the same connection. Only this gateway knows of both:
        what another conductor passes on may be read before.
        """
        for link in self._unanswered.pop(event.request_id, []):
            if link is not self._used:
                task = asyncio.get_running_loop().create_task(_report_end(link, event))
                self._reports[task] = None
                task.add_done_callback(self._reports.pop)

    async def _claim(self, link: _ConductorLink) -> None:
        """Report the requests in flight to a conductor that does not know them from this gateway."""
        if link.has_claims:
            return
        self._use(link)
        link.has_claims = True
        now, placed = clock.monotonic(), list[Placed]()
        for request_id, (one, at) in list(self._in_flight.items()):
            if now - at > one.place.lifetime_s:
                del self._in_flight[request_id]
            elif request_id not in self._asked:  # else it is placed anew
                placed.append(msgspec.structs.replace(one, age_s=now - at))
        self._unheard.clear()
        self._num_claims += 1
        number, pending = self._num_claims, [*self._asked, *self._ending]
        for first in range(0, max(len(placed), 1), _CLAIMS_PER_CALL):
            part = placed[first : first + _CLAIMS_PER_CALL]
            is_last = first + len(part) == len(placed)
            claim = ClaimRequests(part, number, first == 0, is_last, pending if is_last else [])
            try:
                await link.client.call(claim, CALL_TIMEOUT_S)
            except MooncakeError:
                link.has_claims = False
                raise

    async def _disclaim(self, link: _ConductorLink) -> None:
        """Report to a conductor that is back while another one is used which requests have not ended: it may
        hold others, whose ends it missed. Raises MooncakeError."""
        self._num_claims += 1
        pending = [*self._in_flight, *self._asked, *self._ending]
        claim = ClaimRequests([], self._num_claims, is_first=True, is_last=True, pending=pending)
        await link.client.call(claim, CALL_TIMEOUT_S)

    # --- without a conductor

    def _place_in_turn(self, request: Place) -> Decision | Refuse:
        self._next_turn += 1
        prefills = self._in_turn(WorkerRole.PREFILL, request.exclude)
        decodes = self._in_turn(WorkerRole.DECODE, request.exclude)
        if not prefills and not decodes:
            refusal = Refusal("no_instance", "the conductor can't be reached and no other instance is known")
            return Refuse(request.request_id, refusal, _REFRESH_S)
        before = [self._computed_by[key] for key in _beginnings(request.keys) if key in self._computed_by]
        decode_pool = decodes or prefills
        decode = decode_pool[self._next_turn % len(decode_pool)]
        prefill = None
        is_known = False
        if prefills and decodes and request.needs_prefill:
            is_known = bool(before) and before[0] in prefills and not self._is_crowded(before[0], prefills)
            prefill = before[0] if is_known else prefills[self._next_turn % len(prefills)]
        elif before and before[0] in decode_pool and not self._is_crowded(before[0], decode_pool):
            is_known, decode = True, before[0]
        how = "where its beginning was computed last" if is_known else "in turn"
        reason = f"the conductor can't be reached: {how}"
        return Decision(request.request_id, prefill, decode, reason, degraded="no conductor")

    def _is_crowded(self, instance: InstanceId, pool: list[InstanceId]) -> bool:
        """Whether an instance computes far more prompts of this gateway than the others of its pool."""
        running = collections.Counter(
            placed.decision.prefill or placed.decision.decode
            for placed, _ in self._in_flight.values()
            if not placed.is_prefilled
        )
        mean = sum(running[one] for one in pool) / len(pool)
        return running[instance] > 2 * mean + _FEW_PROMPTS

    def _in_turn(self, role: WorkerRole, exclude: list[InstanceId]) -> list[InstanceId]:
        """The role's instances that were last seen ready; all of them when none was."""
        pool = [one for one, its_role in self._known.items() if its_role is role and one not in exclude]
        last_ready = {row.instance: None for row in self._rows if row.health == "ready"}
        return [one for one in pool if one in last_ready] or pool


def _beginnings(keys: Sequence[BlockKey]) -> list[BlockKey]:
    """The last blocks of the beginnings by which a prompt is recognised, the longest first.

    They have a power of two blocks, a quarter of the prompt or more: the next turn of a session and another
    prompt with the same documents have one of them, too, and what all prompts share is mostly too short.
    """
    longest = 1 << len(keys).bit_length() >> 1
    return [keys[length - 1] for length in (longest, longest >> 1) if length]


async def _report_end(link: _ConductorLink, event: Finished) -> None:
    with contextlib.suppress(MooncakeError):
        await link.client.call(event, CALL_TIMEOUT_S)


async def _first_of(one: asyncio.Event, other: asyncio.Event, timeout_s: float) -> None:
    """Return when one of both is set, or after the timeout."""
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _role_of(standing: Standing) -> str:
    return "leads" if standing.is_leader else "follows"
