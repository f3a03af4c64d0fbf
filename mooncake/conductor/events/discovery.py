# SPDX-License-Identifier: Apache-2.0
"""Discovery of the instances' KV-event publishers, and a subscription to each of them.

Owns the subscriptions of one conductor: which instance is followed, and how. Our workers and vLLM name their
publishers at ``GET /kv_event_sources``, each in its own form; for engines that name none the settings can.
Most publishers listen and are connected to. One whose endpoint names a single address either listens there or
connects to a subscriber that does: so we listen, if the address is ours and free, and connect if it is not.
An instance without events is reported (``Silent``), since its blocks must then be inferred from the prompts
it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from mooncake.conductor.events.key_translation import EngineKeys
from mooncake.conductor.events.subscriber import EventListener, EventReader, EventSource, subscribe
from mooncake.conductor.messages import POOL, Event, Silent
from mooncake.conductor.settings import SchedulingSettings
from mooncake.log import get_logger
from mooncake.security.http_auth import HttpClientAuth
from mooncake.types import InstanceId

log = get_logger(__name__)


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
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for listener in self._listeners.values():
            listener.close()
        self._context.destroy(linger=0)

    def follow(self, instance: InstanceId) -> None:
        """Follow an instance from the oldest event it can replay."""
        self.unfollow(instance)
        self._begin(instance, self._follow(instance))

    def unfollow(self, instance: InstanceId) -> None:
        task = self._tasks.pop(instance, None)
        if task is not None:
            task.cancel()

    def _begin(self, instance: InstanceId, following: Awaitable[None]) -> None:
        async def run_until_error() -> None:
            try:
                await following
            except zmq.ZMQError as error:
                log.warning("kv_events_ignored", instance=instance, reason=str(error))
                self._post(Silent(instance))

        self._tasks[instance] = asyncio.get_running_loop().create_task(run_until_error())

    async def _follow(self, instance: InstanceId) -> None:
        answer = _Sources([], is_ours=False)
        if instance in self._given:
            answer = _Sources([self._given[instance]], is_ours=False)
        else:
            try:
                answer = await self._query_sources(instance)
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
                log.info("kv_event_sources_unavailable", instance=instance, reason=str(error))
        self.identities[instance] = answer.kv_identity
        ours = self._settings.block_tokens
        if answer.is_ours and answer.sources and answer.block_size != ours:
            reason = f"its blocks have {answer.block_size} tokens, ours {ours}"
            log.warning("kv_events_ignored", instance=instance, reason=reason)
            answer.sources.clear()
        if not answer.sources:
            self._post(Silent(instance))
            return
        await self._gather(
            [self._one(instance, source.with_host_of(instance), answer.is_ours) for source in answer.sources]
        )

    async def _gather(self, followings: Sequence[Awaitable[None]]) -> None:
        """Await all concurrently; the first that fails cancels the others."""
        tasks = [asyncio.ensure_future(one) for one in followings]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, instance: InstanceId, source: EventSource, is_ours: bool) -> None:
        if is_ours:
            await subscribe(self._context, EventReader(instance), source, self._post)
            return
        reader = EventReader(instance, EngineKeys(self._settings.block_tokens))
        listener = self._listener_for(source)
        if listener is None:
            await subscribe(self._context, reader, source, self._post)
        elif listener.expects(source.topic):
            reason = (
                f"another engine that connects here has the topic {source.topic!r}, too: give each its own"
            )
            log.warning("kv_events_ignored", instance=instance, reason=reason)
            self._post(Silent(instance))
        else:
            await listener.follow(reader, source, self._post)

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

    async def _query_sources(self, instance: InstanceId) -> _Sources:
        assert self._session is not None, "start() first"
        path = "/kv_event_sources"
        url, headers = self._caller.url(instance, path), self._caller.headers("GET", path)
        async with self._session.get(url, headers=headers) as response:
            body = await response.read()
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


def read_sources(given: Sequence[str]) -> dict[InstanceId, EventSource]:
    """``host:port=endpoint[=replay endpoint]`` by instance."""
    found: dict[InstanceId, EventSource] = {}
    for one in given:
        instance, _, endpoints = one.partition("=")
        endpoint, _, replay = endpoints.partition("=")
        found[instance] = EventSource(endpoint, replay or None)
    return found
