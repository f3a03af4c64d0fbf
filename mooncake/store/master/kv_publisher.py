# SPDX-License-Identifier: Apache-2.0
"""Publishes the store's KV events over the sockets of ``KvEventPublisher``, with an empty topic.

It owns the batches that are kept for a replay, and follows the master whose events they are. Batches are
msgpack ``[milliseconds, events, 0]``, from ``kv_events.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from mooncake import clock
from mooncake.kv_events.publisher import Batch, KvEventPublisher
from mooncake.log import get_logger
from mooncake.store.master.context import MasterContext
from mooncake.store.master.kv_events import KvEvents

log = get_logger(__name__)

REPLAY_BATCHES = 4096
CHECK_INTERVAL_S = 0.5


class MasterKvEventPublisher:
    """Runs on the event loop that it is made on. Only a leader's events are sent."""

    def __init__(self, context: MasterContext) -> None:
        settings = context.settings
        self._master_context, self._settings = context, settings
        self._loop = asyncio.get_running_loop()
        self.events = self._attach()
        self._kept: deque[Batch] = deque(maxlen=REPLAY_BATCHES)
        self._num_published = 0
        self._publisher = KvEventPublisher("", self._replay)
        self._tasks: list[asyncio.Task[None]] = []
        self.endpoint = self.replay_endpoint = ""

    def start(self) -> None:
        """Begin to listen.

        Raises:
            AddressInUse: an endpoint is taken.
            InvalidArgument: an endpoint is invalid.
        """
        endpoint, replay = self._settings.kv_events_endpoint, self._settings.kv_events_replay_endpoint
        self.endpoint = self._publisher.listen("kv_events_endpoint", endpoint)
        if replay:
            self.replay_endpoint = self._publisher.serve_replay("kv_events_replay_endpoint", replay)
        self._tasks.append(self._loop.create_task(self._follow_master()))
        log.info("kv_events", endpoint=self.endpoint, replay=self.replay_endpoint)

    def _attach(self) -> KvEvents:
        settings = self._settings
        self._followed = self._master_context.master
        return KvEvents(
            self._followed.catalog,
            settings.kv_events_backend,
            is_legacy=settings.kv_events_legacy,
            has_object_key=settings.kv_events_object_key,
            capacity=settings.kv_events_queue,
            wall_s=clock.wall() - clock.monotonic(),
            wake=self._wake,
        )

    def _wake(self) -> None:
        self._loop.call_soon(self._flush)

    async def _follow_master(self) -> None:
        """Attach again when a standby's state was replaced as a whole; subscribers then request a replay."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self._master_context.master is not self._followed:
                before = self.events.next_sequence
                self._kept.clear()
                self.events = self._attach()
                self.events.next_sequence = max(self.events.next_sequence, before) + 1

    def _flush(self) -> None:
        if self._publisher.is_closed:
            return
        batches = self.events.take(clock.monotonic())
        if not self._master_context.leadership.is_leader:
            return
        if batches and self._kept and batches[0][0] != self._kept[-1][0] + 1:
            # Events were dropped: a replay across that gap would end there, with old content.
            self._kept.clear()
        for sequence, payload in batches:
            self._kept.append((sequence, payload))
            self._publisher.send(sequence, payload)
        self._num_published += len(batches)

    def status(self) -> dict[str, Any]:
        events = self.events
        return {
            "enabled": True,
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "backend_id": self._settings.kv_events_backend,
            "published_batches": self._num_published,
            "stored_events": events.num_stored,
            "removed_events": events.num_removed,
            "dropped_events": events.num_dropped,
            "queue_size": events.num_queued,
            "queue_capacity": self._settings.kv_events_queue,
            "next_sequence": events.next_sequence,
        }

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._publisher.close()

    def _replay(self, start: int) -> Iterator[Batch]:
        kept = [batch for batch in self._kept if batch[0] >= start]
        oldest = self._kept[0][0] if self._kept else self.events.next_sequence
        if start < oldest:
            yield from self.events.summary(oldest, clock.monotonic())
        yield from kept
