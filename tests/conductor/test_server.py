# SPDX-License-Identifier: Apache-2.0
"""The conductor with real sockets: probes, events, workers' measurements, and a client that outlives it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from mooncake import metrics
from mooncake.conductor import client
from mooncake.conductor.client import RemoteConductor
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.messages import (
    POOL,
    AddInstance,
    ChunkMeasured,
    Decision,
    Drain,
    FetchMeasured,
    Finished,
    Moved,
    Place,
    Prefilled,
    Probed,
    Refuse,
    RemoveInstance,
    StepMeasured,
)
from mooncake.conductor.server import (
    ConductorServer,
    ConductorService,
    ConductorSettings,
    new_samples,
    read_engine_memory,
    read_kv_memory,
    read_step_stats,
)
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.http.worker_stats import KvMemoryStats, StepStats
from mooncake.inference.kv_events import WorkerKvEventPublisher
from mooncake.kv_events import BlockStored
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.types import WorkerRole
from tests.faults.proxy import Proxy
from tests.waiting import until

SETTINGS = SchedulingSettings(
    block_tokens=16,
    slow_start_s=0.0,
    probe_interval_s=0.05,
    suspect_probe_interval_s=0.02,
    max_probe_interval_s=0.1,
    probe_timeout_s=5.0,
)
HASHES = block_hashes(range(64), 16, root_hash())


@dataclass
class Worker:
    """The part of a worker that a conductor uses."""

    ready_status: int = 200
    ready_body: bytes = b""
    block_size: int = 16
    metrics: bytes | None = None
    publisher: WorkerKvEventPublisher = field(default_factory=WorkerKvEventPublisher)
    address: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/kv_event_sources", self._sources)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        if self.publisher.source is None:
            await self.publisher.start()

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=self.ready_status, body=self.ready_body)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.metrics is None:
            return web.Response(status=404)
        return web.Response(body=self.metrics, content_type="text/plain")

    async def _sources(self, request: web.Request) -> web.Response:
        source = self.publisher.source
        assert source is not None
        entry = {
            "endpoint": source.endpoint,
            "replay_endpoint": source.replay_endpoint,
            "topic": source.topic,
        }
        return web.json_response({"sources": [entry], "block_size": self.block_size})


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    await worker.start()
    yield worker
    await worker.stop()
    await worker.publisher.close()


@pytest.fixture
async def service() -> AsyncIterator[ConductorService]:
    service = ConductorService(SETTINGS)
    await service.start()
    yield service
    service.core.check()
    await service.close()


async def health(service: ConductorService | RemoteConductor, instance: str) -> str | None:
    return next((row.health for row in await service.status() if row.instance == instance), None)


async def is_ready(service: ConductorService | RemoteConductor, instance: str) -> bool:
    return await health(service, instance) == "ready"


async def test_an_instance_becomes_ready_goes_down_and_comes_back(
    service: ConductorService, worker: Worker
) -> None:
    service.post(AddInstance(worker.address, WorkerRole.DECODE))
    assert await health(service, worker.address) == "starting"
    await until(lambda: is_ready(service, worker.address))
    port = int(worker.address.rpartition(":")[2])
    await worker.stop()

    async def is_down() -> bool:
        return await health(service, worker.address) == "down"

    await until(is_down)
    await worker.start(port)
    await until(lambda: is_ready(service, worker.address))


async def test_a_vllm_server_without_ready_endpoint_is_ready(
    service: ConductorService, worker: Worker
) -> None:
    worker.ready_status = 404
    worker.metrics = SGLANG_PAGE
    service.post(AddInstance(worker.address, WorkerRole.DECODE))
    await until(lambda: is_ready(service, worker.address))
    loads = service.core.loads
    assert loads.capacity_tokens[service.core.instances[worker.address].slot] == 161_721


async def test_an_engine_without_metrics_is_ready_and_its_memory_unknown(
    service: ConductorService, worker: Worker
) -> None:
    worker.ready_status = 404
    service.post(AddInstance(worker.address, WorkerRole.DECODE))
    await until(lambda: is_ready(service, worker.address))
    loads = service.core.loads
    assert np.isinf(loads.capacity_tokens[service.core.instances[worker.address].slot])


async def test_what_answers_503_is_starting(service: ConductorService, worker: Worker) -> None:
    worker.ready_status = 503
    service.post(AddInstance(worker.address, WorkerRole.DECODE))

    async def was_probed() -> bool:
        return (await service.status())[0].detail == "/ready answers 503"

    await until(was_probed)
    assert await health(service, worker.address) == "starting"


async def test_block_events_reach_the_decision(service: ConductorService, worker: Worker) -> None:
    stored = BlockStored([*HASHES[:2]], None, [], 16, "GPU")
    worker.publisher.publish([stored])
    service.post(AddInstance(worker.address, WorkerRole.PREFILL))
    await until(lambda: is_ready(service, worker.address))

    async def is_known() -> bool:
        answer = await service.place(Place("r", 64, [short_key(one) for one in HASHES]))
        assert isinstance(answer, Decision)
        return answer.num_cached_tokens == 32

    await until(is_known)
    assert any("32 of 64 tokens cached" in line or "placed r" in line for line in await service.story("r"))


async def test_what_the_store_holds_is_followed(worker: Worker) -> None:
    """A publisher stands in for the master; ``test_event_subscriptions.py`` follows a real one."""
    source = worker.publisher.source
    assert source is not None
    settings = replace(SETTINGS, pool_events=source.endpoint, pool_events_replay=source.replay_endpoint or "")
    stored = BlockStored([*HASHES[:2]], None, [], 16, "GPU")
    worker.publisher.publish([stored])
    service = ConductorService(settings)
    await service.start()

    async def is_known() -> bool:
        return service.core.index.matches([short_key(one) for one in HASHES]) == {POOL: 2}

    await until(is_known)
    assert await service.status() == [], "the pool serves no requests"
    await service.close()


async def test_blocks_of_another_size_are_not_mixed_in(service: ConductorService, worker: Worker) -> None:
    worker.block_size = 128
    stored = BlockStored([*HASHES[:2]], None, [], 128, "GPU")
    worker.publisher.publish([stored])
    service.post(AddInstance(worker.address, WorkerRole.PREFILL))
    await until(lambda: is_ready(service, worker.address))
    assert service.core.index.num_blocks == 0


@contextlib.asynccontextmanager
async def served(port: int = 0) -> AsyncIterator[tuple[ConductorService, ConductorServer]]:
    service = ConductorService(SETTINGS)
    await service.start()
    server = ConductorServer(service)
    await server.start("127.0.0.1", port)
    yield service, server
    await server.close()
    await service.close()


async def test_a_client_outlives_its_conductor(worker: Worker) -> None:
    async with served() as (_, server):
        port = server.rpc.port
        remote = RemoteConductor(f"127.0.0.1:{port}")
        await remote.start()
        remote.post(AddInstance(worker.address, WorkerRole.DECODE))

        async def is_placed_by_conductor() -> bool:
            answer = await remote.place(Place("r", 64))
            return isinstance(answer, Decision) and answer.policy == "overlap"

        await until(is_placed_by_conductor)
        assert any("placed r" in line for line in await remote.story("r"))

    # The conductor is gone: known instances are used at once.
    answer = await remote.place(Place("r2", 64))
    assert isinstance(answer, Decision)
    assert (answer.decode, answer.degraded) == (worker.address, "no conductor")
    [row] = await remote.status()
    assert row.instance == worker.address and "lost" in row.detail
    refused = await remote.place(Place("r3", 64, exclude=[worker.address]))
    assert isinstance(refused, Refuse) and refused.refusal.code == "no_instance"

    # A new conductor knows no instances; the client registers those that it knows.
    async with served(port) as (service, _):
        await until(is_placed_by_conductor)
        assert await health(service, worker.address) == "ready"

    await remote.close()


async def test_without_a_conductor_a_prompt_goes_where_its_beginning_was_computed() -> None:
    remote = RemoteConductor("127.0.0.1:1")
    for number in range(3):
        remote.post(AddInstance(f"127.0.0.1:{number}", WorkerRole.DECODE))

    async def chosen(keys: list[int], exclude: Sequence[str] = ()) -> str:
        answer = await remote.place(Place("r", 16 * len(keys), keys, exclude=list(exclude)))
        assert isinstance(answer, Decision) and answer.degraded == "no conductor"
        return answer.decode

    session, other = [*range(100, 140)], [*range(200, 240)]
    home, others = await chosen(session), [await chosen(other)]
    assert others[0] != home
    assert [await chosen([*session, number]) for number in range(8)] == [home] * 8
    assert await chosen([*session, *range(300, 340)]) == home, "its next turn, twice as long"
    assert await chosen(session[:20]) == home
    assert {await chosen([number] * 9) for number in range(8)} != {home}, "unknown ones go in turn"
    assert await chosen(session, [home]) != home
    with_prefill = RemoteConductor("127.0.0.1:1")
    for role in WorkerRole.PREFILL, WorkerRole.DECODE:
        for number in range(2):
            with_prefill.post(AddInstance(f"{role}:{number}", role))
    decisions = [await with_prefill.place(Place(str(n), 640, session)) for n in range(4)]
    assert len({one.prefill for one in decisions if isinstance(one, Decision)}) == 1
    assert len({one.decode for one in decisions if isinstance(one, Decision)}) == 2


async def test_requests_of_a_lost_client_are_finished(worker: Worker) -> None:
    async with served() as (service, server):
        remote = RemoteConductor(f"127.0.0.1:{server.rpc.port}")
        await remote.start()
        remote.post(AddInstance(worker.address, WorkerRole.DECODE))
        await until(lambda: is_ready(remote, worker.address))

        async def has_requests(number: int) -> bool:
            return service.core.status()[0].num_requests == number

        async def placed(request_id: str) -> bool:
            answer = await remote.place(Place(request_id, 64))
            return isinstance(answer, Decision) and not answer.degraded.startswith("no conductor")

        await until(lambda: placed("a"))
        await until(lambda: placed("b"))
        remote.post(Finished("a"))
        await until(lambda: has_requests(1))
        await remote.close()
        await until(lambda: has_requests(0))


async def test_a_moved_answer_is_one_request_at_its_new_instance(worker: Worker) -> None:
    other = Worker()
    await other.start()
    async with served() as (service, server):
        remote = RemoteConductor(f"127.0.0.1:{server.rpc.port}")
        await remote.start()
        for one in (worker, other):
            remote.post(AddInstance(one.address, WorkerRole.DECODE))
        await until(lambda: is_ready(remote, worker.address))
        await until(lambda: is_ready(remote, other.address))
        await until(lambda: remote.is_connected)
        first = await remote.place(Place("a", 64))
        assert isinstance(first, Decision)
        moved = await remote.place(Place("a/m", 64, exclude=[first.decode], needs_prefill=False))
        assert isinstance(moved, Decision) and moved.decode != first.decode
        remote.post(Moved("a", "a/m", "pool"))
        remote.post(Finished("a/m"))
        await until(lambda: [*service.core.placements] == ["a"])
        assert service.core.placements["a"].decode == moved.decode
        assert any("moved a from" in line for line in await remote.story("a"))
        # A conductor that takes over gets this placement.
        assert {key: one.decision.decode for key, (one, _) in remote._in_flight.items()} == {
            "a": moved.decode
        }
        await remote.close()
    await other.stop()
    await other.publisher.close()


async def test_the_end_of_a_request_reaches_a_conductor_that_was_too_slow(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as (service, server):
        proxy = await asyncio.to_thread(Proxy, server.rpc.port)  # it runs an event loop of its own
        remote = RemoteConductor(f"127.0.0.1:{proxy.port}")
        await remote.start()
        remote.post(AddInstance(worker.address, WorkerRole.DECODE))
        await until(lambda: is_ready(remote, worker.address))
        await until(lambda: remote.is_connected)

        async def has_requests(number: int) -> bool:
            return service.core.status()[0].num_requests == number

        for number, request_id in enumerate(("a", "b"), 1):
            await remote.place(Place(request_id, 64))
            assert await has_requests(number)
        # It answers neither the report of the requests in flight nor that of the end before their timeout.
        monkeypatch.setattr(client, "CALL_TIMEOUT_S", 0.1)
        [link] = remote._links
        link.has_claims = False
        proxy.silence(True)
        remote.post(Finished("a"))
        await until(lambda: asyncio.sleep(0, not link.is_connected))
        await asyncio.sleep(0.3)
        proxy.heal()
        await until(lambda: has_requests(1))
        await remote.close()
        proxy.close()


async def test_a_drain_through_the_client_is_remembered(worker: Worker) -> None:
    async with served() as (service, server):
        remote = RemoteConductor(f"127.0.0.1:{server.rpc.port}")
        await remote.start()
        remote.post(AddInstance(worker.address, WorkerRole.DECODE))
        await until(lambda: is_ready(service, worker.address))
        remote.post(Drain(worker.address))

        async def is_gone() -> bool:
            return await health(service, worker.address) is None

        await until(is_gone)
        await remote.close()


async def test_the_metrics_page_compares_predictions_with_measurements(service: ConductorService) -> None:
    service.core.predict.accuracy["ttft_s"].add(1.0, 1.2)
    page = metrics.page().decode()
    assert 'mooncake_conductor_prediction_ratio_bucket{le="1.25",quantity="ttft_s"} 1.0' in page
    assert 'mooncake_conductor_prediction_ratio_bucket{le="1.1",quantity="ttft_s"} 0.0' in page


async def test_an_unawaited_refusal_is_not_returned_to_another_caller() -> None:
    """A fact that is only posted may be answered with a refusal, too."""
    service = ConductorService(replace(SETTINGS, admission="baseline", audit_share=0.0))
    try:
        for name, role in (("127.0.0.1:1", WorkerRole.PREFILL), ("127.0.0.1:2", WorkerRole.DECODE)):
            service.core.handle(AddInstance(name, role), 0.0)
            service.core.handle(Probed(name, ProbeOutcome.READY), 0.0)
        for _ in range(20):
            service.core.handle(StepMeasured("127.0.0.1:2", 1, 64, 0.01), 0.0)
        for request in ("refused", "fine"):
            slo_tbt_s = 0.03 if request == "refused" else 0.0
            assert isinstance(service.place_now(Place(request, 64, slo_tbt_s=slo_tbt_s)), Decision)
        for number in range(200):
            seconds = min(5.0, 0.01 * 1.2 ** (number // 8))
            service.core.handle(StepMeasured("127.0.0.1:2", 1, 64, seconds), 0.0)
        service.post(Prefilled("refused"))
        assert service.prefilled_now(Prefilled("fine")) is None
    finally:
        await service.close()


# --- the measurements of workers


BODY = b"""{"status": "ok", "measured": {
    "num_chunks": 3, "chunks": [[0, 512, 0.5], [512, 100, 0.2]], "num_steps": 1, "steps": [[4, 900, 0.03]]
}}"""


def test_rows_are_read_once() -> None:
    first = read_step_stats(BODY)
    assert first is not None
    assert list(new_samples(first, None, "p")) == [
        ChunkMeasured("p", 0, 512, 0.5),
        ChunkMeasured("p", 512, 100, 0.2),
        StepMeasured("p", 4, 900, 0.03),
    ]
    assert list(new_samples(first, first, "p")) == []
    later = StepStats(4, [*first.chunks, (0, 7, 0.1)], 1, first.steps)
    assert list(new_samples(later, first, "p")) == [ChunkMeasured("p", 0, 7, 0.1)]
    loaded = read_step_stats(b'{"measured": {"num_loads": 9, "loads": [[1000, 0.5], [3000, 0.25]]}}')
    assert loaded is not None
    loads = [FetchMeasured("p", 1000, 0.5), FetchMeasured("p", 3000, 0.25)]
    assert list(new_samples(loaded, None, "p")) == loads
    assert list(new_samples(loaded, StepStats(num_loads=8), "p")) == loads[1:]


def test_a_restarted_worker_counts_from_the_start() -> None:
    restarted = StepStats(1, [(0, 7, 0.1)], 0, [])
    assert list(new_samples(restarted, StepStats(50, [(0, 1, 0.1)], 9, []), "p")) == [
        ChunkMeasured("p", 0, 7, 0.1)
    ]
    restarted = StepStats(num_loads=1, loads=[(5, 0.1)])
    assert list(new_samples(restarted, StepStats(num_loads=2), "p")) == [FetchMeasured("p", 5, 0.1)]


async def test_nothing_is_kept_of_an_instance_that_left(service: ConductorService, worker: Worker) -> None:
    worker.ready_body = BODY
    service.post(AddInstance(worker.address, WorkerRole.DECODE))
    kept: list[dict[str, Any]] = [service._read, service._followers.identities]
    await until(lambda: all(worker.address in one for one in kept))
    service.post(RemoveInstance(worker.address))
    assert not any(kept)
    service._take_measured(worker.address, BODY)  # the answer to a probe that was in flight
    assert not any(kept)


def test_other_servers_measure_nothing() -> None:
    for body in (b"", b"OK", b"[]", b"{}", b'{"measured": 3}', b'{"measured": {"chunks": [[1]]}}'):
        assert read_step_stats(body) is None


@pytest.mark.parametrize("number", ["-1", "1" + 400 * "0"])
def test_a_number_that_counts_nothing_is_not_read(number: str) -> None:
    for measured in (
        f'{{"num_chunks": {number}}}',
        f'{{"num_chunks": 1, "chunks": [[{number}, 1, 0.1]]}}',
        f'{{"num_chunks": 1, "chunks": [[0, {number}, 0.1]]}}',
        f'{{"num_steps": 1, "steps": [[1, {number}, 0.1]]}}',
    ):
        assert read_step_stats(f'{{"measured": {measured}}}'.encode()) is None
    memory = f'{{"total_tokens": {number}, "used_tokens": 0, "num_requests": 0}}'
    assert read_kv_memory(f'{{"kv_memory": {memory}}}'.encode()) is None


async def test_an_instance_whose_probe_broke_is_probed_again(
    service: ConductorService, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_once(instance: str, body: bytes) -> None:
        monkeypatch.undo()
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(service, "_take_measured", break_once)
    service.post(AddInstance(worker.address, WorkerRole.DECODE))
    await until(lambda: is_ready(service, worker.address))
    assert service._take_measured != break_once, "the first probe has reached it"


# --- the memory of workers and engines


VLLM_PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:request_prompt_tokens_bucket{le="1.0",engine="0"} 8.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",engine="0",hash_block_size="None"%s,\
num_gpu_blocks="100",num_gpu_blocks_override="None"} 1.0
""".replace(b"\\\n", b"")
SGLANG_PAGE = b"""sglang:max_total_num_tokens{model_name="m"} 161721.0
sglang:num_used_tokens{model_name="m"} 4000.0
sglang:num_running_reqs{model_name="m"} 3.0
"""


def test_the_memory_of_a_worker_is_read_from_what_it_says_of_itself() -> None:
    stats = KvMemoryStats(1000, 100, 3, 250)
    body = msgspec.json.encode({"status": "ok", "kv_memory": stats})
    assert read_kv_memory(body) == stats
    for other in (b"", b"OK", b"{}", b'{"kv_memory": 3}', b'{"kv_memory": {"total_tokens": -1}}'):
        assert read_kv_memory(other) is None


def test_the_memory_of_other_engines_is_read_from_their_metrics() -> None:
    assert read_engine_memory(VLLM_PAGE % b"") == KvMemoryStats(12_800, 3200, 4)
    assert read_engine_memory(VLLM_PAGE % b',kv_cache_size_tokens="6400"') == KvMemoryStats(6400, 1600, 4)
    two = VLLM_PAGE % b"" + (VLLM_PAGE % b"").replace(b'engine="0"', b'engine="1"').replace(b"0.25", b"0.75")
    assert read_engine_memory(two) == KvMemoryStats(25_600, 12_800, 8)
    assert read_engine_memory(SGLANG_PAGE) == KvMemoryStats(161_721, 4000, 3)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>",
        b"vllm:num_requests_running 4.0\n",
        SGLANG_PAGE.replace(b"161721.0", b"1e999"),
        SGLANG_PAGE.replace(b"4000.0", b"-1"),
        SGLANG_PAGE.replace(b"4000.0", b"+.-"),
        (VLLM_PAGE % b"").replace(b'"100"', b'"' + b"9" * 10_000 + b'"'),
    ],
)
def test_metrics_without_a_memory_or_with_an_impossible_one_say_nothing(page: bytes) -> None:
    assert read_engine_memory(page) is None


@pytest.mark.parametrize("peers", [("foo",), ("10.0.0.2:8400", "10.0.0.3:0"), ("",)])
def test_an_address_of_a_peer_that_is_none_is_refused_by_the_name_of_the_setting(
    peers: tuple[str, ...],
) -> None:
    with pytest.raises(InvalidArgument, match=r"^peers is '.*'; allowed: host:port of another conductor"):
        ConductorSettings(peers=peers)
    assert ConductorSettings(peers=("10.0.0.2:8400", "[::1]:8400")).peers
