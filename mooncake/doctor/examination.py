# SPDX-License-Identifier: Apache-2.0
"""One examination: probes and canaries of every link, in an order in which one does not disturb the next.

First everything is read that needs no prompt. Then each engine gets the same random prompt, one after
another: twice, to see its own cache, so that the first time at the second engine shows what came from
elsewhere; then with another salt. At last the gateway gets a prompt of its own, twice. Everything ends within
the budget; what was left out is among the facts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq.asyncio

from mooncake import clock
from mooncake.conductor.event_subscriptions import read_sources
from mooncake.doctor.canaries import CanarySender, canary_length, count_hits, random_prompt
from mooncake.doctor.checks import shares_blocks
from mooncake.doctor.engine_probe import EXTERNAL_QUERIES, read_engine, read_metrics
from mooncake.doctor.event_probe import EventProbe
from mooncake.doctor.facts import EngineFacts, Facts, GatewayFacts, Shot, Trouble
from mooncake.doctor.gateway_probe import read_gateway, read_status
from mooncake.doctor.host_probe import is_here, max_files_behind, read_host
from mooncake.doctor.http_probe import HttpProbe, HttpServerAt
from mooncake.doctor.settings import DoctorSettings, is_address
from mooncake.doctor.store_probe import StoreProbe, explain_trouble
from mooncake.rpc.client import split_address
from mooncake.security import tool_identity

T = TypeVar("T")

MAX_ENGINES = 64
MAX_AT_ONCE = 16
EVENTS_S = 3.0
"""How long events of a prompt may take."""

SAVED_S = 3.0
"""How long an engine may take to save a prompt's blocks in the store."""

INDEXED_S = 3.0
"""How long the conductor may take to enter an engine's events into its index."""

_POLL_S = 0.1


class EarlierCanary(msgspec.Struct):
    """The prompt of an earlier examination, as it is kept in the canary file."""

    seed: int
    num_tokens: int


class Examination:
    """Examines one deployment; ``run`` it as often as wanted on one event loop."""

    def __init__(self, settings: DoctorSettings) -> None:
        self.settings = settings
        self._given = read_sources(settings.events)
        self._earlier = _read_earlier(settings.canary_file)
        self._servers: dict[str, HttpServerAt] = {}
        """Servers as they were last read, by address."""

    async def run(self) -> Facts:
        """Collect all facts."""
        facts = Facts()
        deadline = clock.monotonic() + self.settings.budget_s
        store = StoreProbe(self.settings.master, self.settings.timeout_s) if self.settings.master else None
        try:
            async with asyncio.timeout(self.settings.budget_s):
                async with HttpProbe(tool_identity(), self.settings.timeout_s) as http:
                    await self._run(http, store, facts, deadline)
        except TimeoutError:
            facts.not_examined.append(
                ("this examination", f"it did not end within {self.settings.budget_s:g} s")
            )
        finally:
            if store is not None:
                await asyncio.to_thread(store.close)
        return facts

    async def _run(self, http: HttpProbe, store: StoreProbe | None, facts: Facts, deadline: float) -> None:
        host = asyncio.create_task(asyncio.to_thread(read_host, self.settings.disk))
        storing = asyncio.create_task(asyncio.to_thread(store.read)) if store is not None else None
        await self._read_servers(http, facts)
        if storing is not None:
            facts.store = await storing
            await explain_trouble(facts.store)
        facts.host = await host
        await asyncio.to_thread(self._look_at_processes, facts)
        if self.settings.canaries:
            usable = store if facts.store is not None and facts.store.reach.is_fine else None
            await _Canaries(self, http, usable, facts, deadline).run()

    async def _read_servers(self, http: HttpProbe, facts: Facts) -> None:
        settings = self.settings
        named = [self.server(url, settings.engine_api_key) for url in settings.engine]
        roles: dict[str, str] = {}
        if settings.gateway_url:
            server = self.server(settings.gateway_url, settings.api_key)
            facts.gateway = await read_gateway(http, server, settings.admin_api_key)
            skipped = {row.address for row in facts.gateway.absent} - {one.address for one in named}
            rows = [row for row in facts.gateway.instances or [] if row.address not in skipped]
            roles = {row.address: row.role for row in rows if is_address(row.address)}
            unreadable = [row.address for row in rows if row.address not in roles]
            facts.not_examined += [(one, "the gateway lists it, and it is no address") for one in unreadable]
        for one in named:
            roles.setdefault(one.address, "")
        written = {one.address: one for url, one in zip(settings.engine, named, strict=True) if "://" in url}
        if len(roles) > MAX_ENGINES:
            facts.not_examined.append(("engines", f"{len(roles) - MAX_ENGINES} of {len(roles)} engines"))
        limit = asyncio.Semaphore(MAX_AT_ONCE)

        async def read(address: str, role: str) -> EngineFacts:
            async with limit:
                return await self._read_engine(http, address, role, written.get(address))

        examined = list(roles.items())[:MAX_ENGINES]
        facts.engines = await asyncio.gather(*(read(address, role) for address, role in examined))
        # Those that compute prompts come first: what they save, the others should find.
        facts.engines.sort(key=lambda one: one.role == "decode")

    async def _read_engine(
        self, http: HttpProbe, address: str, role: str, written: HttpServerAt | None
    ) -> EngineFacts:
        """``written``: the server, if the operator wrote its scheme."""
        server = written or self.server(address, self.settings.engine_api_key)
        engine, page = await read_engine(http, server, role, self._given)
        if written is None and engine.reach.trouble is Trouble.TLS and server.url.startswith("https:"):
            # Engines of others have no certificate of the cluster.
            plain = self.server(f"http://{address}", self.settings.engine_api_key)
            engine, page = await read_engine(http, plain, role, self._given)
            server = plain
        self._servers[engine.address] = server
        looked = None if page is None else page.get(EXTERNAL_QUERIES)
        engine.has_external_lookups = None if looked is None else looked > 0
        return engine

    def server(self, url: str, api_key: str) -> HttpServerAt:
        """The server at a URL or ``host:port``."""
        if "://" not in url:
            url = f"{'https' if tool_identity().has_tls else 'http'}://{url}"
        return HttpServerAt(url.rstrip("/"), {"Authorization": f"Bearer {api_key}"} if api_key else {})

    def server_of(self, engine: EngineFacts) -> HttpServerAt:
        return self._servers[engine.address]

    def _look_at_processes(self, facts: Facts) -> None:
        """Limits of the processes on this host; blocks."""
        processes: list[EngineFacts | GatewayFacts] = [*facts.engines]
        processes += [facts.gateway] if facts.gateway is not None else []
        here = [one for one in processes if one.reach.is_fine and is_here(one.address)]
        for one in here:
            if one.max_files is None:
                one.max_files = max_files_behind(split_address(one.address)[1])
        assert facts.host is not None
        is_master_here = bool(self.settings.master) and is_here(self.settings.master.split(",")[0])
        facts.host.is_of_cluster = bool(here) or is_master_here

    def take_earlier(self) -> EarlierCanary | None:
        return self._earlier

    def keep(self, canary: EarlierCanary) -> None:
        """Keep a prompt for the next examination; a file that can't be written keeps nothing."""
        self._earlier = canary
        if self.settings.canary_file:
            path = Path(self.settings.canary_file).expanduser()
            with contextlib.suppress(OSError):
                partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
                partial.write_bytes(msgspec.json.encode(canary))
                os.replace(partial, path)


class _Canaries:
    """The prompts of one examination."""

    def __init__(
        self, owner: Examination, http: HttpProbe, store: StoreProbe | None, facts: Facts, deadline: float
    ) -> None:
        self._owner, self._http, self._store, self._facts = owner, http, store, facts
        self._deadline = deadline
        self._sender = CanarySender(http, owner.settings.canary_timeout_s)
        self._zmq = zmq.asyncio.Context()
        self._engines = [one for one in facts.engines if one.reach.is_fine]
        self._length = canary_length(self._engines)
        self._seed = secrets.randbits(63)
        self._num_prompts = 0
        self._shared = self._new_prompt()
        self._source: EngineFacts | None = None

    async def run(self) -> None:
        try:
            earlier = self._owner.take_earlier()
            for number, engine in enumerate(self._engines):
                # A slow engine must not take the time of the gateway's own prompt.
                if clock.monotonic() > self._deadline - self._owner.settings.canary_timeout_s and number:
                    engine.skipped = "the budget was used up by other engines"
                    continue
                if earlier is not None:
                    prompt = random_prompt(earlier.seed, earlier.num_tokens)
                    engine.earlier = await self._send(engine, prompt)
                await self._examine(engine)
            await self._examine_gateway()
            self._owner.keep(EarlierCanary(self._seed, self._length))
        finally:
            self._zmq.destroy(linger=0)

    def _new_prompt(self) -> list[int]:
        self._num_prompts += 1
        return random_prompt(self._seed + self._num_prompts - 1, self._length)

    async def _send(self, engine: EngineFacts, prompt: list[int], salt: str = "") -> Shot:
        server, model = self._owner.server_of(engine), self._model(engine)
        return await self._sender.to_engine(server, model, prompt, salt)

    def _model(self, engine: EngineFacts) -> str:
        return self._owner.settings.model or (engine.models[0] if engine.models else "")

    async def _examine(self, engine: EngineFacts) -> None:
        """The shared prompt twice, and under another salt."""
        probes = [EventProbe(self._zmq, one, self._shared) for one in engine.publishers or []]
        try:
            await asyncio.gather(*(probe.start() for probe in probes))
            num_stored = await self._num_stored()
            engine.first = await self._send(engine, self._shared)
            if engine.first.is_answered:
                await asyncio.gather(*(probe.finish(EVENTS_S) for probe in probes))
                if not engine.first.reused:
                    engine.store_growth = await self._growth(num_stored)
                engine.second = await self._send(engine, self._shared)
        finally:
            for probe in probes:
                probe.close()
        if not engine.first.is_answered:
            return
        if engine.second is not None and engine.second.reused:
            salted = await self._send(engine, self._shared, f"mooncake-doctor-{secrets.token_hex(8)}")
            engine.other_salt = salted if salted.is_answered else None
        page = await read_metrics(self._http, self._owner.server_of(engine))
        looked = None if page is None else page.get(EXTERNAL_QUERIES)
        engine.has_external_lookups = None if looked is None else looked > 0
        if self._source is None:
            self._source = engine
        else:
            await self._judge_crossing(engine, self._source)

    async def _judge_crossing(self, engine: EngineFacts, source: EngineFacts) -> None:
        """What the engine had of the prompt that ``source`` computed; tried twice: saving takes a while."""
        assert engine.first is not None
        engine.crossed_tokens = engine.first.reused
        is_meant = shares_blocks(self._facts, self._owner.settings.expectations)
        if engine.crossed_tokens == 0 and is_meant and engine.has_external_lookups is not False:
            prompt = self._new_prompt()
            num_stored = await self._num_stored()
            await self._send(source, prompt)
            if await self._growth(num_stored) is None:
                await asyncio.sleep(SAVED_S / 2)  # without the store's count there is nothing to wait for
            engine.crossed_tokens = (await self._send(engine, prompt)).reused

    async def _num_stored(self) -> int | None:
        return await asyncio.to_thread(self._store.num_stored) if self._store is not None else None

    async def _growth(self, before: int | None) -> int | None:
        """By how much the store grew, as soon as it does; None without a store."""
        if before is None:
            return None
        return await self._until(lambda: self._grown(before), SAVED_S)

    async def _grown(self, before: int) -> int:
        return (await self._num_stored() or before) - before

    async def _until(self, read: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """The first value that is true, or the last one."""
        end = clock.monotonic() + timeout_s
        while True:
            found = await read()
            if found or clock.monotonic() > end:
                return found
            await asyncio.sleep(_POLL_S)

    # The gateway

    async def _examine_gateway(self) -> None:
        gateway, settings = self._facts.gateway, self._owner.settings
        if gateway is None or not gateway.reach.is_fine or gateway.key_refused:
            return
        server = self._owner.server(settings.gateway_url, settings.api_key)
        if gateway.instances is not None:
            await self._until(lambda: self._is_indexed(server, gateway), INDEXED_S)
        model = settings.model or (gateway.models[0] if gateway.models else "")
        prompt = self._new_prompt()
        by_address = {one.address: one for one in self._engines}
        servers = {address: self._owner.server_of(one) for address, one in by_address.items()}
        pages = await asyncio.gather(*(read_metrics(self._http, one) for one in servers.values()))
        before = dict(zip(servers, pages, strict=True))
        gateway.first = await self._sender.send(server, model, prompt)
        decode = gateway.first.decode
        if decode in servers:
            count_hits(gateway.first, before[decode], await read_metrics(self._http, servers[decode]))
        if gateway.first.is_answered:
            await self._saved(by_address.get(decode))
            gateway.second = await self._sender.send(server, model, prompt)

    async def _saved(self, decode: EngineFacts | None) -> None:
        """Give engines the time in which they save blocks, as another one may get the second request."""
        if decode is not None or len(self._engines) > 1:
            await asyncio.sleep(SAVED_S / 6)

    async def _is_indexed(self, server: HttpServerAt, gateway: GatewayFacts) -> bool:
        """Whether the conductor has blocks of every engine that publishes."""
        await read_status(self._http, server, self._owner.settings.admin_api_key, gateway)
        publishing = {
            one.address for one in self._engines if any(each.num_batches for each in one.publishers or [])
        }
        rows = [row for row in gateway.instances or [] if row.address in publishing]
        return all(row.num_blocks for row in rows)


def _read_earlier(path: str) -> EarlierCanary | None:
    if not path:
        return None
    try:
        found = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=EarlierCanary)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if 0 < found.num_tokens <= 4096 else None
