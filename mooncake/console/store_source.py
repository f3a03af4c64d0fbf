# SPDX-License-Identifier: Apache-2.0
"""Where the console's pages get the store's data: its master, by the master's own messages.

A pass over the keys is made at most every few seconds and is shared by all visitors, so that many open pages
cost the master no more than one.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from mooncake import clock
from mooncake.console.contents import PoolContents
from mooncake.errors import Unavailable
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.ha.master_client import AsyncMasterClient

_MASTER_TIMEOUT_S = 3.0
_CONTENTS_EVERY_S = 10.0
_KEYS_PER_TENANT = 10_000
_KEYS_PER_CALL = 1024
_MAX_TENANTS = 64


class AskMaster(Protocol):
    """Sends a message to the store's master and returns its reply. Raises MooncakeError."""

    async def __call__(self, message: msgspec.Struct) -> Any: ...


class StoreSource:
    """The master's data."""

    def __init__(self, ask: AskMaster) -> None:
        self._ask = ask
        self._contents: tuple[float, PoolContents, list[m.QuotaStatus]] | None = None
        self._reading = asyncio.Lock()

    async def ask(self, message: msgspec.Struct) -> Any:
        """Raises MooncakeError, also for a refusal."""
        reply = await self._ask(message)
        if isinstance(reply, Failure):
            raise Unavailable(f"the master refused: {reply.message or reply.code}")
        if isinstance(reply, m.RefusedReply):
            raise Unavailable(str(reply.refusal))
        return reply

    async def status(self) -> m.MasterStatus:
        found: m.MasterStatus = await self.ask(m.GetMasterStatus())
        return found

    async def contents(self) -> tuple[float, PoolContents, list[m.QuotaStatus]]:
        """The age of the latest pass over the keys, its sum, and the tenants."""
        async with self._reading:
            now = clock.monotonic()
            if self._contents is None or now - self._contents[0] > _CONTENTS_EVERY_S:
                self._contents = (now, *await self._pass())
            read_at, contents, quotas = self._contents
            return clock.monotonic() - read_at, contents, quotas

    async def _pass(self) -> tuple[PoolContents, list[m.QuotaStatus]]:
        reply: m.Quotas = await self.ask(m.AskQuotas())
        quotas = reply.quotas
        tenants = {"" if one.tenant in ("", "default") else one.tenant: None for one in quotas[:_MAX_TENANTS]}
        contents = PoolContents()
        for tenant in {"": None, **tenants}:
            if not contents.has_room:
                break
            listed: m.Keys = await self.ask(m.ListKeys("", _KEYS_PER_TENANT, tenant))
            for start in range(0, len(listed.keys), _KEYS_PER_CALL):
                part = listed.keys[start : start + _KEYS_PER_CALL]
                seen: m.Inspected = await self.ask(m.Inspect(part, tenant))
                contents.add(tenant or "default", zip(part, seen.objects, strict=True))
        return contents, quotas

    async def story(self, key: str, tenant: str) -> tuple[m.ObjectStatus | None, list[str]]:
        tenant = "" if tenant == "default" else tenant
        inspected: m.Inspected = await self.ask(m.Inspect([key], tenant))
        lines: m.StoryLines = await self.ask(m.ObjectStory(key, tenant))
        return inspected.objects[0], lines.lines


class RemoteMaster:
    """The master in another process."""

    def __init__(self, address: str) -> None:
        """Raises InvalidArgument: it is no address of a master."""
        self._client = AsyncMasterClient(address, m.REPLIES)

    async def __call__(self, message: msgspec.Struct) -> Any:
        return await self._client.call(message, _MASTER_TIMEOUT_S)

    async def close(self) -> None:
        await self._client.close()
