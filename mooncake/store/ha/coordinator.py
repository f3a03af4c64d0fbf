# SPDX-License-Identifier: Apache-2.0
"""Shell of the leader election: queries the lease store, follows the leader, informs its server.

``election.py`` decides when to lead and when to stop; ``standby_replication.py`` is the leader's side of
replication. The lease store is queried in a thread, one request at a time, because its clients block.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mooncake import clock
from mooncake.driver import Driver
from mooncake.errors import MooncakeError, NotLeader
from mooncake.log import get_logger
from mooncake.machine import Wake
from mooncake.rpc import AsyncClient
from mooncake.security import Identity, process_identity
from mooncake.store.ha.election import (
    CaughtUp,
    CompareAndSet,
    CompareAndSetDone,
    Effect,
    Election,
    Event,
    InSync,
    Lead,
    LeaderChanged,
    LeaderLease,
    LeaderLost,
    LeaseRead,
    NoAnswer,
    ReadLease,
    Resign,
    Resigned,
    Standby,
    StepDown,
)
from mooncake.store.ha.standby_replication import ANSWER_S, RETRY_S, Followed, StandbyCursor

if TYPE_CHECKING:
    from mooncake.store.ha.lease_store import LeaseStore  # which brings transfer, and takes long to load

log = get_logger(__name__)

LOG_AGAIN_S = 60.0
"""Time after which the loss of the leader is logged again for the same reason."""


class LeadershipListener(Protocol):
    """How a server reacts to changes of leadership. No method blocks."""

    def lead(self, term: int, is_complete: bool) -> None: ...

    def step_down(self, reason: str) -> None: ...

    def begin_to_follow(self) -> None:
        """Expect a complete copy of the leader's state next."""
        ...

    def take(self, answer: Followed) -> None:
        """Enter the leader's records; they must be written down before this returns."""
        ...


class Coordinator:
    """Runs one ``Election``."""

    def __init__(
        self,
        election: Election,
        lease_store: LeaseStore,
        listener: LeadershipListener,
        identity: Identity | None = None,
    ) -> None:
        self._identity = identity or process_identity()
        self.election = election
        self._lease_store = lease_store
        self._listener = listener
        self._driver: Driver[Event, Effect] = Driver(election, self._perform)
        self._request_task: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._followed: LeaderLease | None = None
        self._resigned: asyncio.Future[Standby | None] = asyncio.get_running_loop().create_future()
        self._listed: tuple[Standby, ...] = ()
        self.on_change: Callable[[], None] = lambda: None
        """Called after every event."""
        self._is_silent = False
        """The lease store does not answer, and a warning was logged."""
        self.is_in_sync = False
        """The leader lists this standby as complete, or this master leads."""

    @property
    def leader(self) -> str:
        """Address of the leader as far as this master knows; "" when it does not."""
        record = self.election.record
        return "" if record is None else record.address

    def leads(self) -> bool:
        return self.election.leads(clock.monotonic())

    def start(self) -> None:
        self._post(Wake())

    def list_as_in_sync(self, standbys: tuple[Standby, ...]) -> None:
        if standbys != self._listed:
            self._listed = standbys
            log.info("standbys_in_sync", standbys=[one.address for one in standbys])
            self._post(InSync(standbys))

    async def resign(self, timeout_s: float) -> Standby | None:
        """Stop leading; returns the standby that leads now, if one could be named in time."""
        self._stop_following()
        self._post(Resign())
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self._resigned), timeout_s)
        return None

    async def close(self) -> None:
        self._driver.close()
        self._stop_following()
        if self._request_task is not None:
            self._request_task.cancel()
        await asyncio.to_thread(self._lease_store.close)

    def _post(self, event: Event | Wake) -> None:
        self._driver.post(event)
        self.on_change()

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, ReadLease | CompareAndSet):
            self._request_task = asyncio.create_task(self._request(effect))
        elif isinstance(effect, Lead):
            self._stop_following()
            self._listed = tuple(self.election.record.standbys) if self.election.record else ()
            self.is_in_sync = True
            self._listener.lead(effect.term, effect.is_complete)
        elif isinstance(effect, StepDown):
            self.is_in_sync = False
            self._listener.step_down(effect.reason)
        elif isinstance(effect, LeaderChanged):
            self._stop_following()
            self._followed = effect.record
            if effect.record.leader not in ("", self.election.me.id):
                self._following = asyncio.create_task(self._follow(effect.record))
        else:
            assert isinstance(effect, Resigned)
            if not self._resigned.done():
                self._resigned.set_result(effect.successor)

    async def _request(self, what: ReadLease | CompareAndSet) -> None:
        event: Event
        try:
            if isinstance(what, ReadLease):
                event = LeaseRead(await asyncio.to_thread(self._lease_store.read))
            else:
                event = CompareAndSetDone(await asyncio.to_thread(self._lease_store.swap, what.old, what.new))
        except MooncakeError as error:
            if not self._is_silent:
                log.warning("lease_store_unreachable", reason=str(error))
            self._is_silent = True
            event = NoAnswer(str(error))
        else:
            if self._is_silent:
                log.info("lease_store_reachable")
            self._is_silent = False
        self._post(event)

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    async def _follow(self, record: LeaderLease) -> None:
        """Follow until another master leads."""
        logged, log_again_at = "", 0.0
        while True:
            link = AsyncClient(record.address, (Followed,), "the leader", identity=self._identity)
            try:
                await link.connect(ANSWER_S)
                await self._take_all(link, record)
            except MooncakeError as error:
                reason, now = self._loss_reason(error, record), clock.monotonic()
                if self.is_in_sync or reason != logged or now >= log_again_at:
                    log.warning("leader_lost", leader=record.address, term=record.term, reason=reason)
                    logged, log_again_at = reason, now + LOG_AGAIN_S
            finally:
                self.is_in_sync = False
                await link.close()
            self._post(LeaderLost())
            await asyncio.sleep(RETRY_S)

    def _loss_reason(self, error: MooncakeError, record: LeaderLease) -> str:
        """Why the leader can't be followed."""
        if isinstance(error, NotLeader) and error.leader == record.address:  # it names itself
            silent = " and the election service does not answer" if self._is_silent else ""
            return f"the leader at {record.address} does not lead now: its lease has run out{silent}"
        return str(error)

    async def _take_all(self, link: AsyncClient, record: LeaderLease) -> None:
        following = StandbyCursor(self.election.me, record.term)
        while True:
            answer: Followed = await link.call(following.question(), ANSWER_S)
            if following.begins_anew(answer):
                self._listener.begin_to_follow()
            self._listener.take(answer)
            following.entered(answer)
            if following.is_in_sync and not self.is_in_sync:
                self._post(CaughtUp())
            self.is_in_sync = following.is_in_sync
