# SPDX-License-Identifier: Apache-2.0
"""Follows the KV events of one instance and turns them into facts for the index.

It owns the subscription: sequence gaps are filled by replay, a restarted publisher is noticed and its old
blocks are cleared. It refuses to know why an instance is followed and how the facts are used; the formats of
events are those of ``mooncake.kv_events``, the meaning of their block hashes is ``key_translation.py``'s.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio
from prometheus_client import Counter

from mooncake import metrics
from mooncake.conductor.events.key_translation import Fact, KeyTranslation, OwnKeys, tier_of
from mooncake.conductor.messages import BlocksCleared, BlocksRemoved, BlocksStored
from mooncake.kv_events import AllBlocksCleared, BlockStored, read_batch
from mooncake.log import get_logger
from mooncake.types import InstanceId

log = get_logger(__name__)

_batches = Counter(
    "mooncake_conductor_kv_event_batches",
    "Batches of KV events that were read, replayed ones included.",
    registry=metrics.registry,
)
_gaps = Counter(
    "mooncake_conductor_kv_event_gaps",
    "Gaps in publishers' sequences: filled by replay, or lost with all known blocks of the publisher.",
    ["outcome"],
    registry=metrics.registry,
)
_restarts = Counter(
    "mooncake_conductor_kv_event_restarts",
    "Restarts of publishers, at which all their known blocks were forgotten.",
    registry=metrics.registry,
)

REPLAY_TIMEOUT_S = 3.0


class EventSource(msgspec.Struct, frozen=True):
    """One entry of a worker's ``GET /kv_event_sources``."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    may_connect: bool = False
    "Whether the publisher may connect there rather than listen."

    def with_host_of(self, instance: InstanceId) -> EventSource:
        """This source with the instance's host where the worker names a wildcard address."""
        host = instance.rpartition(":")[0]

        def reachable(endpoint: str) -> str:
            return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\]):", lambda _: f"tcp://{host}:", endpoint)

        replay = None if self.replay_endpoint is None else reachable(self.replay_endpoint)
        return EventSource(reachable(self.endpoint), replay, self.topic, self.may_connect)


class EventReader:
    """Converts batches of one publisher, in any order of arrival, to facts about its instance."""

    def __init__(self, instance: InstanceId, translation: KeyTranslation | None = None) -> None:
        self.next_sequence = 0
        self.instance = instance
        self._latest_ts = 0.0
        self._translation = translation or OwnKeys()

    def is_restart(self, sequence: int, payload: bytes) -> bool:
        """Whether the publisher counts from the start again (a late duplicate has an old timestamp)."""
        return sequence < self.next_sequence and read_batch(payload).ts > self._latest_ts

    def restart(self) -> list[Fact]:
        """Forget everything."""
        self.next_sequence = 0
        self._translation.clear()
        return [BlocksCleared(self.instance, "restarted")]

    def read(self, sequence: int, payload: bytes) -> list[Fact]:
        """The facts in one batch, those of equal kind together; none when it was read before.

        Raises:
            msgspec.MsgspecError: not a batch of events.
        """
        if sequence < self.next_sequence:
            return []
        batch = read_batch(payload)
        _batches.inc()
        self.next_sequence = sequence + 1
        self._latest_ts = max(self._latest_ts, batch.ts)
        facts: list[Fact] = []
        for event in batch.events:
            fact: Fact
            if isinstance(event, AllBlocksCleared):
                self._translation.clear()
                facts.append(BlocksCleared(self.instance))
                continue
            if isinstance(event, BlockStored):
                scope, keys = self._translation.stored(event)
                fact = BlocksStored(self.instance, keys, tier_of(event), scope)
            else:
                scope, keys = self._translation.removed(event)
                fact = BlocksRemoved(self.instance, keys, tier_of(event), scope, event.reason or "evicted")
            if keys and not (facts and _joined(facts[-1], fact)):
                facts.append(fact)
        return facts


def _joined(before: Fact, fact: BlocksStored | BlocksRemoved) -> bool:
    """Whether ``fact`` was merged into ``before``, because they differ only in their blocks."""
    if isinstance(before, BlocksCleared) or msgspec.structs.replace(fact, keys=before.keys) != before:
        return False
    before.keys.extend(fact.keys)
    return True


class GaplessStream:
    """The messages of one publisher in order and without gaps, which are filled by replay."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        reader: EventReader,
        source: EventSource,
        post: Callable[[Fact], None],
    ) -> None:
        self._context, self._reader, self._source, self._post = context, reader, source, post

    async def begin(self) -> None:
        """Forget everything known of the publisher, and read all that it can replay."""
        _post_all(self._post, self._reader.restart())
        await _catch_up(self._context, self._reader, self._source, self._post)

    async def take(self, frames: list[bytes], was_lost: bool = False) -> None:
        """Read one message; ``was_lost``: the connection broke since the previous one."""
        reader, instance = self._reader, self._reader.instance
        if len(frames) != 3:
            log.warning("kv_event_malformed", instance=instance, reason="not 3 frames")
            return
        sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
        try:
            if was_lost or reader.is_restart(sequence, payload):
                log.info("kv_events_restarted", instance=instance)
                _restarts.inc()
                _post_all(self._post, reader.restart())
            if sequence > reader.next_sequence:
                log.info("kv_events_gap", instance=instance, first=reader.next_sequence, last=sequence - 1)
                await _catch_up(self._context, reader, self._source, self._post)
                is_whole = sequence <= reader.next_sequence
                _gaps.labels("replayed" if is_whole else "lost").inc()
                if not is_whole:  # no hints are better than stale ones
                    _post_all(self._post, reader.restart())
            _post_all(self._post, reader.read(sequence, payload))
        except msgspec.MsgspecError as error:
            log.warning("kv_event_malformed", instance=instance, reason=str(error))


async def subscribe(
    context: zmq.asyncio.Context, reader: EventReader, source: EventSource, post: Callable[[Fact], None]
) -> None:
    """Follow one publisher until cancelled, beginning with everything it can replay."""
    subscriber = context.socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.RCVHWM, 100_000)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        # A publisher that restarts may have counted beyond our position before we are connected again, so
        # that its numbers alone would look like a small gap: a lost connection counts as a restart.
        losses = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        subscriber.connect(source.endpoint)
        following = GaplessStream(context, reader, source, post)
        await following.begin()
        while True:
            frames = await subscriber.recv_multipart()
            await following.take(frames, await _drained(losses))
    finally:
        subscriber.disable_monitor()
        subscriber.close()


class EventListener:
    """A socket that publishers connect to; a message's topic identifies its publisher."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        """Raises zmq.ZMQError: the address is not one of this host, or is in use."""
        self._context = context
        self._queues: dict[bytes, asyncio.Queue[list[bytes]]] = {}
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 100_000)
        self._socket.subscribe(b"")
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._task = asyncio.get_running_loop().create_task(self._sort())

    def close(self) -> None:
        self._task.cancel()
        self._socket.close()

    def expects(self, topic: str) -> bool:
        """Whether this topic is followed already."""
        return topic.encode() in self._queues

    async def follow(self, reader: EventReader, source: EventSource, post: Callable[[Fact], None]) -> None:
        """Like ``subscribe``, for the publisher that connects here and sends under the source's topic."""
        topic = source.topic.encode()
        assert topic not in self._queues
        queue = self._queues[topic] = asyncio.Queue()
        try:
            following = GaplessStream(self._context, reader, source, post)
            await following.begin()
            while True:
                await following.take(await queue.get())
        finally:
            del self._queues[topic]

    async def _sort(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            queue = self._queues.get(frames[0])
            if queue is not None:
                queue.put_nowait(frames)


async def _drained(monitor: zmq.asyncio.Socket) -> bool:
    """Whether the monitor had events."""
    was_lost = False
    while await monitor.poll(0):
        await monitor.recv_multipart()
        was_lost = True
    return was_lost


async def _catch_up(
    context: zmq.asyncio.Context, reader: EventReader, source: EventSource, post: Callable[[Fact], None]
) -> None:
    """Request a replay from the reader's next sequence; warn and return if no answer comes in time."""
    if source.replay_endpoint is None:
        return
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(source.replay_endpoint)
        await dealer.send_multipart([b"", reader.next_sequence.to_bytes(8, "big")])
        while True:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                frames = await dealer.recv_multipart()
            sequence = int.from_bytes(frames[-2], "big", signed=True)
            if sequence < 0:
                return
            _post_all(post, reader.read(sequence, frames[-1]))
    except TimeoutError:
        log.warning("kv_event_replay_timed_out", endpoint=source.replay_endpoint)
    finally:
        dealer.close()


def _post_all(post: Callable[[Fact], None], facts: list[Fact]) -> None:
    for fact in facts:
        post(fact)
