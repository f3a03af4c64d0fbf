# SPDX-License-Identifier: Apache-2.0
"""Subscriptions to KV events: discovery of the publishers, and their events as facts for the index.

Owns which instance is followed and how. Our workers and vLLM name their publishers at
``GET /kv_event_sources``, each in its own form; for engines that name none the settings can. Most publishers
listen and are connected to. One whose endpoint names a single address either listens there or connects to a
subscriber that does: so we listen, if the address is ours and free, and connect if it is not. An instance
without events is reported (``Silent``), since its blocks must then be inferred from the prompts it was given.

Sequence gaps are filled by replay, a restarted publisher is noticed and its old blocks are cleared. It
refuses to know how the facts are used; the formats of events are ``kv_events/__init__.py``'s, the meaning of
their block hashes is ``key_translation.py``'s.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp
import msgspec
import numpy as np
import zmq
import zmq.asyncio
from prometheus_client import Counter

from mooncake import metrics
from mooncake.conductor.cache_groups import CacheGroups
from mooncake.conductor.key_table import KeyLookup, Keys, KeyTable, key_column
from mooncake.conductor.key_translation import (
    EngineKeys,
    Fact,
    KeyTranslation,
    OwnKeys,
    is_remote,
    tier_of,
)
from mooncake.conductor.messages import POOL, BlocksCleared, BlocksRemoved, BlocksStored, Event, Silent
from mooncake.conductor.settings import SchedulingSettings
from mooncake.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent, read_batch
from mooncake.kv_events.publisher import allow_ipv6
from mooncake.log import get_logger
from mooncake.security.http_auth import HttpClientAuth
from mooncake.types import InstanceId, Tier

log = get_logger(__name__)

# --- one publisher


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
for _outcome in ("replayed", "lost"):  # a series that began with its first loss would show no rise
    _gaps.labels(_outcome)
_restarts = Counter(
    "mooncake_conductor_kv_event_restarts",
    "Restarts of publishers, at which all their known blocks were forgotten.",
    registry=metrics.registry,
)
_unjudged = Counter(
    "mooncake_conductor_kv_event_groups_unjudged",
    "Times that a publisher's KV cache groups were such that its blocks count as unknown, by reason.",
    ["reason"],
    registry=metrics.registry,
)

_replay_retries = Counter(
    "mooncake_conductor_kv_event_replay_retries",
    "Replays that were requested once more, because batches were missing or no more came.",
    registry=metrics.registry,
)

_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""An idle connection is tested after 10 s, and made anew when three tests 5 s apart fail."""
REPLAY_TIMEOUT_S = 3.0
_REPLAY_TRIES = 5
SOURCES_PAUSE_S = 5.0
"""Pause before an instance that did not answer is asked again where it publishes."""

_BATCHES_PER_TURN = 16
_LAST_SEQUENCE = (1 << 63) - 1
"""A replay is requested from a signed number of 64 bits on."""


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
        self._groups = CacheGroups(instance, self._translation)
        self._warned: set[str] = set()

    def is_restart(self, sequence: int, payload: bytes) -> bool:
        """Whether the publisher counts from the start again (a late duplicate has an old timestamp)."""
        return sequence < self.next_sequence and read_batch(payload).ts > self._latest_ts

    def restart(self) -> list[Fact]:
        """Forget everything."""
        self.next_sequence = 0
        self._groups.restart()
        return [BlocksCleared(self.instance, "restarted")]

    def read_or_skip(self, sequence: int, payload: bytes) -> list[Fact]:
        """Like ``read``, but a batch that can't be read is skipped, and all blocks are forgotten: what it
        changed is unknown, and asking for it again would bring the same bytes."""
        try:
            return self.read(sequence, payload)
        except msgspec.MsgspecError as error:
            log.warning("kv_event_malformed", instance=self.instance, reason=str(error))
            facts = self.restart()
            self.next_sequence = sequence + 1
            return facts

    def read(self, sequence: int, payload: bytes) -> list[Fact]:
        """The facts in one batch, those of equal kind together; none when it was read before.

        Raises:
            msgspec.MsgspecError: not a batch of events, or its blocks can't be translated.
        """
        if sequence < self.next_sequence:
            return []
        try:
            facts = self._read(read_batch(payload))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise msgspec.ValidationError(f"its values can't be used: {error!r}") from error
        self.next_sequence = sequence + 1
        return facts

    def _read(self, batch: EventBatch) -> list[Fact]:
        _batches.inc()
        self._latest_ts = max(self._latest_ts, batch.ts)
        facts = self._learn(batch.events)
        groups = self._groups
        for is_clear, run in itertools.groupby(batch.events, lambda one: isinstance(one, AllBlocksCleared)):
            if is_clear:
                groups.clear()
                facts.append(BlocksCleared(self.instance))
                if groups.refusal:
                    facts.append(Silent(self.instance))
                continue
            if groups.refusal:
                continue
            blocks = [one for one in run if not isinstance(one, AllBlocksCleared)]
            events = [one for one in blocks if not is_remote(one)]
            if not groups.is_plain:
                facts += groups.facts(events)
                continue
            for event in itertools.chain.from_iterable(map(self._translation.parts, events)):
                fact = self._plain_fact(event)
                if fact.keys and not (facts and _joined(facts[-1], fact)):
                    facts.append(fact)
        return facts

    def _learn(self, events: Sequence[KvEvent]) -> list[Fact]:
        """What follows for the index from the KV cache groups that a batch names."""
        before = self._groups.refusal
        facts = self._groups.learn(events)
        reason = self._groups.refusal
        if reason and reason != before:
            _unjudged.labels(reason).inc()
            if reason not in self._warned:
                self._warned.add(reason)
                log.warning("kv_event_groups_unjudged", instance=self.instance, reason=reason)
        return facts

    def _plain_fact(self, event: BlockStored | BlockRemoved) -> BlocksStored | BlocksRemoved:
        if isinstance(event, BlockStored):
            scope, keys = self._translation.stored(event)
            return BlocksStored(self.instance, keys, tier_of(event), scope)
        scope, keys = self._translation.removed(event)
        return BlocksRemoved(self.instance, keys, tier_of(event), scope, event.reason or "evicted")


def _joined(before: Fact, fact: BlocksStored | BlocksRemoved) -> bool:
    """Whether ``fact`` was merged into ``before``, because they differ only in their blocks."""
    if not isinstance(before, BlocksStored | BlocksRemoved):
        return False
    if msgspec.structs.replace(fact, keys=before.keys) != before:
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
        self._post_all(self._reader.restart())
        await self._catch_up()

    async def take(self, frames: list[bytes], was_lost: bool = False) -> None:
        """Read one message; ``was_lost``: the connection broke since the previous one."""
        reader, instance = self._reader, self._reader.instance
        if len(frames) != 3:
            log.warning("kv_event_malformed", instance=instance, reason="not 3 frames")
            return
        sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
        if sequence > _LAST_SEQUENCE:
            log.warning("kv_event_malformed", instance=instance, reason="its sequence has more than 63 bits")
            return
        try:
            is_restart = was_lost or reader.is_restart(sequence, payload)
        except msgspec.MsgspecError as error:  # a duplicate; the next one shows a restart if it is one
            log.warning("kv_event_malformed", instance=instance, reason=str(error))
            return
        if is_restart:
            log.info("kv_events_restarted", instance=instance)
            _restarts.inc()
            self._post_all(reader.restart())
        if sequence > reader.next_sequence:
            log.info("kv_events_gap", instance=instance, first=reader.next_sequence, last=sequence - 1)
            has_all = await self._catch_up()
            is_whole = sequence <= reader.next_sequence
            _gaps.labels("replayed" if has_all and is_whole else "lost").inc()
            if not is_whole:  # no hints are better than stale ones
                self._post_all(reader.restart())
        self._post_all(reader.read_or_skip(sequence, payload))

    async def _catch_up(self) -> bool:
        """Read all that the publisher can replay from the reader's next sequence on. Returns whether all that
        was read before still counts.

        A replay that lacks batches, or that stops, is requested again from where it was whole: the queues on
        its way drop what they have no room for while one of both processes is slow. Returns with a warning
        when several requests in a row bring nothing.
        """
        endpoint, has_all = self._source.replay_endpoint, True
        num_idle = 0
        while endpoint is not None and num_idle < _REPLAY_TRIES:
            before = self._reader.next_sequence
            is_whole, is_continued = await self._replay(endpoint)
            has_all = has_all and is_continued
            if is_whole:
                return has_all
            _replay_retries.inc()
            num_idle = num_idle + 1 if self._reader.next_sequence == before else 0
        if num_idle:
            log.warning("kv_event_replay_timed_out", endpoint=endpoint)
        return has_all

    async def _replay(self, endpoint: str) -> tuple[bool, bool]:
        """Request one replay. Returns whether it came without gaps and to its end, and whether it continues
        what was read before."""
        reader, is_continued = self._reader, True
        dealer = self._context.socket(zmq.DEALER)  # one for each request: a late answer is not read
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, 100_000)
            allow_ipv6(dealer, endpoint)
            dealer.connect(endpoint)
            await dealer.send_multipart([b"", reader.next_sequence.to_bytes(8, "big")])
            for number in itertools.count(1):
                # Polled twice, as the loop may have been busy all that time with what is there to be read.
                if not (await dealer.poll(int(REPLAY_TIMEOUT_S * 1000)) or await dealer.poll(0)):
                    return False, is_continued
                frames = await dealer.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    return False, is_continued
                sequence = int.from_bytes(frames[-2], "big", signed=True)
                if sequence < 0:
                    return True, is_continued
                if number == 1 and reader.next_sequence and sequence != reader.next_sequence:
                    # The batches in between are gone for good, and what they removed is not known; or a
                    # summary of the present content begins here.
                    is_continued = False
                    self._post_all(reader.restart())
                elif number > 1 and sequence > reader.next_sequence:
                    return False, is_continued
                self._post_all(reader.read_or_skip(sequence, frames[-1]))
                if not number % _BATCHES_PER_TURN:
                    await asyncio.sleep(0)  # reading what is there does not yield, and a replay has thousands
        finally:
            dealer.close()
        raise AssertionError("the loop has no end")

    def _post_all(self, facts: list[Fact]) -> None:
        for fact in facts:
            self._post(fact)


async def subscribe(
    context: zmq.asyncio.Context, reader: EventReader, source: EventSource, post: Callable[[Fact], None]
) -> None:
    """Follow one publisher until cancelled, beginning with everything it can replay."""
    subscriber = context.socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.RCVHWM, 100_000)
        # Nothing is sent to a publisher: that its host is lost, or that a firewall has forgotten the
        # connection, would never be noticed.
        for option, value in _KEEPALIVE.items():
            subscriber.setsockopt(option, value)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        # A publisher that restarts may have counted beyond our position before we are connected again, so
        # that its numbers alone would look like a small gap: a lost connection counts as a restart.
        losses = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        allow_ipv6(subscriber, source.endpoint)
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
        allow_ipv6(self._socket, endpoint)
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


# --- the ranks of one engine


_Place = tuple[str, Tier]
"""A scope and a tier."""

_IS_HELD = np.array([False, True])


class RankHoldings:
    """Passes the facts of an engine's data-parallel ranks on as those of one instance.

    Each rank has a cache of its own and publishes its own events, but a request names the engine, which
    chooses the rank. So a block is held as long as any rank has it, and what one rank forgets is gone only
    as far as no other has it.
    """

    def __init__(self, post: Callable[[Fact], None]) -> None:
        self._post = post
        self._held: dict[int, dict[_Place, KeyTable]] = {}  # by rank: 1 for each of its blocks
        self._counts: dict[_Place, KeyTable] = {}  # how many ranks hold each block

    def take(self, rank: int, fact: Fact) -> None:
        """Take what the events of one rank say of the instance."""
        if isinstance(fact, BlocksStored):
            self._store(rank, fact)
        elif isinstance(fact, BlocksRemoved):
            table = self._held.get(rank, {}).get((fact.scope, fact.tier))
            if table is not None:
                self._remove(table, table.find(key_column(fact.keys)), fact)
            return
        elif isinstance(fact, BlocksCleared):
            held = self._held.pop(rank, {})
            if self._held:
                self._clear(held, fact.instance, fact.reason)
                return
            self._counts.clear()
        self._post(fact)

    def _store(self, rank: int, fact: BlocksStored) -> None:
        place = fact.scope, fact.tier
        table = self._held.setdefault(rank, {}).setdefault(place, KeyTable())
        counts = self._counts.setdefault(place, KeyTable())
        found = table.find(key_column(fact.keys))
        counted = counts.find(found.keys)
        counts.put(counted, counted.values + (found.values == 0))
        table.put(found, np.ones_like(found.values))

    def _remove(self, table: KeyTable, found: KeyLookup, fact: BlocksRemoved) -> None:
        """Remove blocks of one rank, and pass on those that no other has."""
        counts = self._counts[fact.scope, fact.tier]
        was_held = found.values != 0
        counted = counts.find(found.keys)
        rest = counted.values - was_held
        table.put(found, np.zeros_like(found.values))
        counts.put(counted, rest)
        gone: Keys = found.keys[was_held & (rest == 0)]
        if len(gone):
            self._post(msgspec.structs.replace(fact, keys=gone.tolist()))

    def _clear(self, held: dict[_Place, KeyTable], instance: InstanceId, reason: str) -> None:
        for (scope, tier), table in held.items():
            found = table.find(table.keys_with(_IS_HELD))
            self._remove(table, found, BlocksRemoved(instance, [], tier, scope, reason))


# --- all publishers of one conductor


class EventSubscriptions:
    """One task per followed instance. Use it on one event loop."""

    def __init__(
        self,
        settings: SchedulingSettings,
        post: Callable[[Event], None],
        caller: HttpClientAuth | None = None,
    ) -> None:
        """``caller``: sends the requests to instances; by default with this process's identity."""
        self.identities: dict[InstanceId, str] = {}
        """Digest under which each instance's blocks lie in the pool."""
        self._settings = settings
        self._post = post
        self._caller = caller or HttpClientAuth()
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._followed: dict[InstanceId, _Sources] = {}
        """The publishers of each instance whose events are followed."""
        self._checks: dict[InstanceId, asyncio.Task[None]] = {}
        self._context = zmq.asyncio.Context()
        self._listeners: dict[str, EventListener] = {}
        self._given = read_sources(settings.event_sources)
        self._session: aiohttp.ClientSession | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Follow the store, if it publishes.

        Raises:
            zmq.ZMQError: the endpoint for engines that connect can't be bound.
        """
        self._session = session
        settings = self._settings
        if settings.kv_events_listen:
            self._listeners[""] = EventListener(self._context, settings.kv_events_listen)
        if settings.pool_events:
            source = EventSource(settings.pool_events, settings.pool_events_replay or None)
            self._begin(POOL, subscribe(self._context, EventReader(POOL), source, self._post))

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners.values():
            listener.close()
        self._context.destroy(linger=0)

    def follow(self, instance: InstanceId, was_suspect: bool = False) -> None:
        """Follow an instance from the oldest event it can replay.

        One that ``was_suspect`` is followed as before unless it names other publishers: a failed request must
        not cost what is known of its blocks, of which an engine replays a part at most. The end of a
        connection is noticed by itself.
        """
        task = self._tasks.get(instance)
        if was_suspect and task is not None and not task.done() and instance in self._followed:
            if instance not in self._checks:
                self._checks[instance] = asyncio.get_running_loop().create_task(self._check(instance))
            return
        was_followed = instance in self._followed
        self._stop(instance)
        self._begin(instance, self._follow(instance, was_followed))

    def unfollow(self, instance: InstanceId) -> None:
        """Follow an instance no longer, and forget it."""
        self._stop(instance)
        self.identities.pop(instance, None)

    def _stop(self, instance: InstanceId) -> None:
        self._followed.pop(instance, None)
        for tasks in (self._tasks, self._checks):
            task = tasks.pop(instance, None)
            if task is not None:
                task.cancel()

    async def _check(self, instance: InstanceId) -> None:
        """Follow an instance anew if it names other publishers than those that are followed."""
        try:
            found = self._given_sources(instance) or await self._query_sources(instance)
        except msgspec.MsgspecError:
            found = None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return  # that says nothing of its events
        finally:
            self._checks.pop(instance, None)
        if found != self._followed.get(instance):
            self.follow(instance)

    def _begin(self, instance: InstanceId, following: Awaitable[None]) -> None:
        async def run_until_error() -> None:
            try:
                await following
            except zmq.ZMQError as error:
                log.warning("kv_events_ignored", instance=instance, reason=str(error))
                self._post(Silent(instance))
            except Exception as error:  # whatever it is, the index must not keep what is no longer followed
                log.exception("kv_events_ignored", instance=instance, reason=repr(error))
                self._post(BlocksCleared(instance, "lost: its events are not followed"))
                self._post(Silent(instance))

        self._tasks[instance] = asyncio.get_running_loop().create_task(run_until_error())

    async def _follow(self, instance: InstanceId, was_followed: bool) -> None:
        if was_followed:  # what its events said until now: it may not publish, or not answer, any longer
            self._post(BlocksCleared(instance, "lost: its events are not followed"))
        answer = self._given_sources(instance) or await self._known_sources(instance)
        self.identities[instance] = answer.kv_identity
        ours = self._settings.block_tokens
        if answer.is_ours and answer.sources and answer.block_size != ours:
            reason = f"its blocks have {answer.block_size} tokens, ours {ours}"
            log.warning("kv_events_ignored", instance=instance, reason=reason)
            answer.sources.clear()
        if not answer.sources:
            self._post(Silent(instance))
            return
        self._followed[instance] = answer
        posts = [self._post]
        if len(answer.sources) > 1:
            holdings = RankHoldings(self._post)
            posts = [partial(holdings.take, rank) for rank in range(len(answer.sources))]
        await self._gather(
            [
                self._one(instance, source.with_host_of(instance), answer.is_ours, post)
                for source, post in zip(answer.sources, posts, strict=True)
            ]
        )

    def _given_sources(self, instance: InstanceId) -> _Sources | None:
        given = self._given.get(instance)
        return None if given is None else _Sources([*given], is_ours=False)

    async def _gather(self, followings: Sequence[Awaitable[None]]) -> None:
        """Await all concurrently; the first that fails cancels the others."""
        tasks = [asyncio.ensure_future(one) for one in followings]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(
        self, instance: InstanceId, source: EventSource, is_ours: bool, post: Callable[[Fact], None]
    ) -> None:
        """Follow one publisher of an instance."""
        if is_ours:
            await subscribe(self._context, EventReader(instance), source, post)
            return
        reader = EventReader(instance, EngineKeys(self._settings.block_tokens))
        listener = self._listener_for(source)
        if listener is None:
            await subscribe(self._context, reader, source, post)
        elif listener.expects(source.topic):
            reason = (
                f"another engine that connects here has the topic {source.topic!r}, too: give each its own"
            )
            log.warning("kv_events_ignored", instance=instance, reason=reason)
            self._post(Silent(instance))
        else:
            await listener.follow(reader, source, post)

    def _listener_for(self, source: EventSource) -> EventListener | None:
        """The listener for a publisher that connects; None when the publisher listens itself."""
        if not source.may_connect:
            return None
        if "" in self._listeners:
            return self._listeners[""]
        if source.endpoint not in self._listeners:
            try:
                self._listeners[source.endpoint] = EventListener(self._context, source.endpoint)
            except zmq.ZMQError:
                return None  # the publisher has that address
        return self._listeners[source.endpoint]

    async def _known_sources(self, instance: InstanceId) -> _Sources:
        """What the instance names; asked again while it only fails to answer, which says nothing of its
        events. Until then its blocks are inferred."""
        for number in itertools.count():
            try:
                return await self._query_sources(instance)
            except msgspec.MsgspecError as error:
                log.info("kv_event_sources_unavailable", instance=instance, reason=str(error))
                return _Sources([], is_ours=False)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if not number:
                    log.info("kv_event_sources_unavailable", instance=instance, reason=repr(error))
            self._post(Silent(instance))
            await asyncio.sleep(SOURCES_PAUSE_S)
        raise AssertionError("the loop has no end")

    async def _query_sources(self, instance: InstanceId) -> _Sources:
        assert self._session is not None, "start() first"
        path = "/kv_event_sources"
        url, headers = self._caller.url(instance, path), self._caller.headers("GET", path)
        async with self._session.get(url, headers=headers) as response:
            body = await response.read()
            if response.status >= 500:
                response.raise_for_status()
            if response.status != 200:
                return _Sources([], is_ours=False)
        found: Mapping[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        if "sources" in found:
            return msgspec.convert({**found, "is_ours": True}, _Sources)
        ranks = msgspec.convert([*found.values()], list[_EngineSource])
        sources = [
            EventSource(one.endpoint, one.replay_endpoint, one.topic, may_connect=one.may_connect)
            for one in ranks
            if one.publisher == "zmq" and one.enable_kv_cache_events
        ]
        return _Sources(sources, is_ours=False)


class _Sources(msgspec.Struct):
    """Our worker's answer; an engine's answer is converted to this form."""

    sources: list[EventSource]
    is_ours: bool
    block_size: int = 0
    kv_identity: str = ""


class _EngineSource(msgspec.Struct):
    """vLLM's configuration of one data-parallel rank."""

    endpoint: str
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""

    @property
    def may_connect(self) -> bool:
        """Whether it may connect: vLLM listens on a wildcard address, and mostly connects to a single one."""
        is_tcp = self.endpoint.startswith("tcp://")
        return is_tcp and not any(any_address in self.endpoint for any_address in ("*", "::"))


def read_sources(given: Sequence[str]) -> dict[InstanceId, list[EventSource]]:
    """``host:port=endpoint[=replay endpoint]`` by instance, one for each of its data-parallel ranks."""
    found: dict[InstanceId, list[EventSource]] = {}
    for one in given:
        instance, _, endpoints = one.partition("=")
        endpoint, _, replay = endpoints.partition("=")
        found.setdefault(instance, []).append(EventSource(endpoint, replay or None))
    return found
