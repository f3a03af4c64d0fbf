# SPDX-License-Identifier: Apache-2.0
"""Real publishers and sockets, with a wire between them that loses the batches a test chooses.

KV events in vLLM's dialect reach the index, from sockets that listen and sockets that connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from mooncake.conductor import event_subscriptions
from mooncake.conductor.event_subscriptions import (
    EventListener,
    EventReader,
    EventSource,
    GaplessStream,
    RankHoldings,
    subscribe,
)
from mooncake.conductor.health import Health
from mooncake.conductor.key_translation import EngineKeys, Fact
from mooncake.conductor.messages import (
    AddInstance,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Failed,
    PrefixWindows,
    RemoveInstance,
    Silent,
)
from mooncake.conductor.prefix_index import PrefixIndex
from mooncake.conductor.server import ConductorService
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.inference.kv_events import WorkerKvEventPublisher
from mooncake.kv_events import BlockRemoved, BlockStored, KvEvent
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.rpc import AsyncClient
from mooncake.store import messages as m
from mooncake.store.master.kv_publisher import MasterKvEventPublisher as StoreEvents
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier, WorkerRole
from tests.conductor.test_server import SETTINGS
from tests.contract.metadata_servers import has_ipv6
from tests.waiting import LONG_HEARTBEAT_S, until

# --- one publisher


HASHES = block_hashes(range(64), 16, root_hash())
KEYS = [short_key(one) for one in HASHES]
END = b"e" * 32


def stored(*hashes: bytes, medium: str = "GPU") -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes), parent_block_hash=None, token_ids=[], block_size=16, medium=medium
    )


def apply(index: PrefixIndex, fact: Fact) -> None:
    if isinstance(fact, BlocksStored):
        index.store(fact.instance, fact.keys, fact.tier, fact.scope)
    elif isinstance(fact, BlocksRemoved):
        index.remove(fact.instance, fact.keys, fact.tier, fact.scope, fact.reason)
    elif isinstance(fact, BlocksCleared):
        index.clear(fact.instance)


class Follower:
    """Applies a source's events to an index, as the conductor does."""

    def __init__(self, context: zmq.asyncio.Context, source: EventSource) -> None:
        self.index = PrefixIndex()
        self.num_clears = 0
        self.task = asyncio.get_running_loop().create_task(
            subscribe(context, EventReader("w"), source, self.take)
        )

    def take(self, fact: Fact) -> None:
        self.num_clears += isinstance(fact, BlocksCleared)
        apply(self.index, fact)

    def has(self, *hashes: bytes, scope: str = "") -> bool:
        return all(self.index.matches([short_key(one)], scope) for one in hashes)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[WorkerKvEventPublisher]:
    publisher = WorkerKvEventPublisher()
    await publisher.start()
    yield publisher
    await publisher.close()


class LossyWire:
    """Forwards a publisher's live batches, except those that the test drops."""

    def __init__(self, context: zmq.asyncio.Context, publisher: WorkerKvEventPublisher) -> None:
        assert publisher.source is not None
        self.dropping = False
        self.num_forwarded = 0
        self.num_dropped = 0
        self._sub, self._pub = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._sub.subscribe("")
        self._sub.connect(publisher.source.endpoint)
        port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.source = EventSource(f"tcp://127.0.0.1:{port}", publisher.source.replay_endpoint, "kv-events")
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            frames = await self._sub.recv_multipart()
            if self.dropping:
                self.num_dropped += 1
            else:
                self.num_forwarded += 1
                await self._pub.send_multipart(frames)


async def test_a_dropped_sequence_is_replayed(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context
) -> None:
    publisher.publish([stored(HASHES[0])])  # before any subscriber: comes by the first replay
    wire = LossyWire(context, publisher)
    follower = Follower(context, wire.source)
    await until(lambda: follower.has(HASHES[0]))
    await until(lambda: follower.has(END), poke=lambda: publisher.publish([stored(END)]))  # live now

    wire.dropping = True
    publisher.publish([stored(HASHES[1]), BlockRemoved([HASHES[0]], "GPU")])
    await until(lambda: wire.num_dropped >= 1)
    assert not follower.has(HASHES[1])
    wire.dropping = False
    publisher.publish([stored(HASHES[2])])
    await until(lambda: follower.has(HASHES[2]))
    assert follower.has(HASHES[1]) and not follower.has(HASHES[0])
    assert follower.num_clears == 1  # only the one at the beginning
    await follower.stop()
    wire.task.cancel()


async def test_publishers_with_addresses_of_ipv6(context: zmq.asyncio.Context) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no ::1, so KV events over IPv6 were NOT TESTED")
    publisher = WorkerKvEventPublisher("::1")
    found = await publisher.start()
    assert found.endpoint.startswith("tcp://[::1]:")
    publisher.publish([stored(HASHES[0])])
    follower = Follower(context, EventSource(found.endpoint, found.replay_endpoint, found.topic))
    await until(lambda: follower.has(HASHES[0]))
    await until(lambda: follower.has(END), poke=lambda: publisher.publish([stored(END)]))
    await follower.stop()
    await publisher.close()
    EventListener(context, "tcp://[::1]:*").close()


async def test_a_gap_that_cannot_be_filled_clears_the_hints(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context
) -> None:
    wire = LossyWire(context, publisher)
    follower = Follower(context, EventSource(wire.source.endpoint, None, "kv-events"))
    await until(lambda: follower.has(END), poke=lambda: publisher.publish([stored(END)]))
    wire.dropping = True
    publisher.publish([stored(HASHES[1])])
    await until(lambda: wire.num_dropped >= 1)
    wire.dropping = False
    publisher.publish([stored(HASHES[2])])
    await until(lambda: follower.has(HASHES[2]))
    assert not follower.has(END)
    await follower.stop()
    wire.task.cancel()


async def test_a_restarted_publisher_starts_over(context: zmq.asyncio.Context) -> None:
    first = WorkerKvEventPublisher()
    source = await first.start()
    ports = [
        int((endpoint or "").rpartition(":")[2]) for endpoint in (source.endpoint, source.replay_endpoint)
    ]
    follower = Follower(context, EventSource(source.endpoint, source.replay_endpoint, source.topic))
    for _ in range(5):
        first.publish([stored(HASHES[0])])
    await until(lambda: follower.has(END), poke=lambda: first.publish([stored(END)]))
    await first.close()
    second = WorkerKvEventPublisher()
    await second.start(*ports)
    second.publish([stored(HASHES[1])])
    await until(lambda: follower.has(HASHES[2]), poke=lambda: second.publish([stored(HASHES[2])]))
    assert follower.has(HASHES[1]) and not follower.has(HASHES[0])
    await follower.stop()
    await second.close()


async def test_a_connection_that_is_idle_is_tested(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context
) -> None:
    """Else the end of a publisher whose host was lost would not be noticed."""
    assert publisher.source is not None
    source = EventSource(publisher.source.endpoint, None, publisher.source.topic)
    follower = Follower(context, source)
    await until(lambda: follower.has(END), poke=lambda: publisher.publish([stored(END)]))
    port = f":{int(source.endpoint.rpartition(':')[2]):04X}"
    table = await asyncio.to_thread(Path("/proc/net/tcp").read_text)
    rows = [line.split() for line in table.splitlines()]
    [timer] = {row[5] for row in rows if row[2].endswith(port) and row[3] == "01"}
    assert timer.startswith("02:"), "the timer of keepalive"
    await follower.stop()


class Replayer:
    """A publisher's replay that answers each request as the test says; its live batches never come."""

    def __init__(self, context: zmq.asyncio.Context, answers: list[list[int]]) -> None:
        """``answers``: the sequences of each answer in order, -1 for its end."""
        self.asked_for: list[int] = []
        self._answers = answers
        self._router = context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.source = EventSource(free_endpoint(), f"tcp://127.0.0.1:{port}", "kv-events")
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        for sequences in self._answers:
            who, _, start = await self._router.recv_multipart()
            self.asked_for.append(int.from_bytes(start, "big"))
            for number in sequences:
                payload = batch({"type": "BlockStored", "block_hashes": [HASHES[number]]} | EMPTY)
                sequence = number.to_bytes(8, "big", signed=True)
                await self._router.send_multipart([who, b"", b"kv-events", sequence, payload])


EMPTY: dict[str, object] = {
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 16,
    "medium": "GPU",
}


@pytest.mark.parametrize(
    ("answers", "asked_for"),
    [
        ([[0, 1, 3, -1], [2, 3, -1]], [0, 2]),
        ([[0, 1], [2, 3, -1]], [0, 2]),
        ([[], [0, 1, 2, 3, -1]], [0, 0]),
        ([[0, 1, 3, -1], [3, -1]], [0, 2]),
    ],
    ids=["batches are missing", "no end", "no answer", "a batch is gone for good"],
)
async def test_what_is_missing_of_a_replay_is_requested_again(
    answers: list[list[int]],
    asked_for: list[int],
    context: zmq.asyncio.Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_subscriptions, "REPLAY_TIMEOUT_S", 0.3)
    replayer = Replayer(context, answers)
    follower = Follower(context, replayer.source)
    await until(lambda: follower.has(HASHES[3]))
    is_whole = any(2 in answer for answer in answers)  # else what it removed is not known
    assert follower.has(HASHES[0], HASHES[1], HASHES[2]) is is_whole
    assert follower.has(HASHES[0]) is is_whole
    assert replayer.asked_for == asked_for
    await follower.stop()
    replayer.task.cancel()


@pytest.mark.parametrize(
    ("kept", "known"),
    [(range(1, 4), [0, 1, 2, 3]), (range(2, 4), [2, 3]), (range(4), [0, 1, 2, 3])],
    ids=["all", "not the first missing one", "a summary with lower numbers"],
)
async def test_a_gap_whose_first_batches_are_gone_clears_the_hints(
    kept: range, known: list[int], context: zmq.asyncio.Context
) -> None:
    """Batch 1 removed a block; a publisher that no longer keeps it replays the later ones."""

    def payload(number: int) -> bytes:
        removed: dict[str, object] = {"type": "BlockRemoved", "block_hashes": [END]}
        stores = {"type": "BlockStored", "block_hashes": [HASHES[number]]} | EMPTY
        return batch(*([removed] * (number == 1)), stores)

    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def replay() -> None:
        who, _, _ = await router.recv_multipart()
        for number in [*kept, -1]:
            sequence = number.to_bytes(8, "big", signed=True)
            await router.send_multipart([who, b"", b"", sequence, payload(number) if number >= 0 else b""])

    index, reader = PrefixIndex(), EventReader("w")
    post = partial(apply, index)
    source = EventSource(free_endpoint(), f"tcp://127.0.0.1:{port}")
    stream = GaplessStream(context, reader, source, post)
    lost = event_subscriptions._gaps.labels("lost")
    before = lost._value.get()
    for fact in reader.read(0, batch({"type": "BlockStored", "block_hashes": [HASHES[0], END]} | EMPTY)):
        post(fact)
    task = asyncio.get_running_loop().create_task(replay())
    await stream.take([b"", (3).to_bytes(8, "big"), payload(3)])
    await task
    held = [number for number in range(4) if index.matches([KEYS[number]])]
    assert held == known and reader.next_sequence == 4
    assert not index.matches([short_key(END)])
    assert lost._value.get() - before == (kept != range(1, 4))


async def test_a_publisher_that_never_replays_is_followed_all_the_same(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_subscriptions, "REPLAY_TIMEOUT_S", 0.01)
    assert publisher.source is not None
    source = EventSource(publisher.source.endpoint, free_endpoint(), "kv-events")
    follower = Follower(context, source)
    await until(lambda: follower.has(END), poke=lambda: publisher.publish([stored(END)]))
    await follower.stop()


# --- the reader alone


def batch(*tagged: dict[str, object], ts: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts, list(tagged), 0])


SIXTEEN: dict[str, object] = {"parent_block_hash": None, "block_size": 16}


def test_a_worker_on_all_addresses_is_reached_at_its_own() -> None:
    source = EventSource("tcp://0.0.0.0:5557", "tcp://*:5558", "t")
    assert source.with_host_of("10.0.0.7:8100") == EventSource(
        "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", "t"
    )
    plain = EventSource("tcp://10.0.0.9:5557")
    assert plain.with_host_of("10.0.0.7:8100") == plain


def test_duplicates_are_read_once() -> None:
    reader = EventReader("w")
    payload = batch({"type": "BlockStored", "block_hashes": [HASHES[0]], "medium": "cpu"})
    assert reader.read(0, payload) == [BlocksStored("w", KEYS[:1], Tier.MEMORY)]
    assert reader.read(0, payload) == []
    assert not reader.is_restart(0, payload)
    assert reader.is_restart(0, batch(ts=2.0))


def test_foreign_hashes_are_translated_by_their_tokens() -> None:
    reader = EventReader("w", EngineKeys(16))
    fields: dict[str, object] = {"type": "BlockStored", "block_size": 16, "group_idx": 0, "lora_id": None}
    first = {**fields, "block_hashes": [11, 22], "parent_block_hash": None, "token_ids": [*range(32)]}
    then = {**fields, "block_hashes": [33], "parent_block_hash": 22, "token_ids": [*range(32, 48)]}
    orphan = {**fields, "block_hashes": [44], "parent_block_hash": 99, "token_ids": [*range(16)]}
    facts = reader.read(0, batch(first, then, orphan, {"type": "BlockRemoved", "block_hashes": [22, 77]}))
    no_windows = PrefixWindows("w", [])
    assert facts == [no_windows, BlocksStored("w", KEYS[:3]), BlocksRemoved("w", KEYS[1:2])]
    salted = {**first, "block_hashes": [55, 66], "extra_keys": [["salt"], None]}
    keys = [short_key(one) for one in block_hashes(range(32), 16, root_hash("salt"))]
    assert reader.read(1, batch(salted)) == [BlocksStored("w", keys)]


def test_cleared_clears() -> None:
    assert EventReader("w").read(0, batch({"type": "AllBlocksCleared"})) == [BlocksCleared("w")]


def test_a_payload_that_is_not_a_batch_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        EventReader("w").read(0, b"\xc1")
    with pytest.raises(msgspec.MsgspecError):
        EventReader("w").read(0, batch({"type": "Unheard"}))


UNUSABLE: dict[str, bytes] = {
    "no batch": b"\xc1",
    "an event of an unknown type": batch({"type": "Unheard"}),
    "a type that is no string": msgspec.msgpack.encode([1.0, [[["BlockStored"]]], 0]),
    "a token below 0": batch({"type": "BlockStored", "block_hashes": [1], "token_ids": [-1] * 16} | SIXTEEN),
    "an input of the hash that is no list": batch(
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1] * 16, "extra_keys": [7]} | SIXTEEN
    ),
    "a string that is not UTF-8": b"\x93\xca?\x80\x00\x00\x91\x81\xa4type\xa1\xff\xc0",
}


@pytest.mark.parametrize("payload", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unreadable_batch_is_skipped_and_its_publisher_s_blocks_are_forgotten(payload: bytes) -> None:
    reader = EventReader("w", EngineKeys(16))
    with pytest.raises(msgspec.MsgspecError):
        reader.read(0, payload)
    assert reader.read_or_skip(0, payload) == [BlocksCleared("w", "restarted")]
    assert reader.next_sequence == 1
    then = {"type": "BlockStored", "block_hashes": [5], "token_ids": [*range(16)]} | SIXTEEN
    assert reader.read_or_skip(1, batch(then))[-1] == BlocksStored("w", KEYS[:1])


async def test_batches_after_an_unreadable_one_are_read(context: zmq.asyncio.Context) -> None:
    """It comes live, and by the replay of a subscription that begins after it."""
    engine = Engine()
    await engine.start()
    endpoint, replay = (
        engine.config[name].replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint")
    )
    source = EventSource(endpoint, replay)
    first = Follower(context, source)

    async def publish(block: bytes) -> None:
        await engine.publish({"type": "BlockStored", "block_hashes": [block]} | EMPTY)

    async def is_live() -> bool:
        await publish(HASHES[0])
        return first.has(HASHES[0]) and first.num_clears > 0

    await until(is_live)
    await engine.publish({"type": "Unheard"})
    await publish(HASHES[1])
    await until(lambda: first.has(HASHES[1]))
    assert not first.has(HASHES[0]), "whether the unreadable batch removed it is unknown"
    await publish(HASHES[2])
    await until(lambda: first.has(HASHES[2]))
    assert first.has(HASHES[1]), "batches that can be read clear nothing"
    second = Follower(context, source)
    await until(lambda: second.has(HASHES[1], HASHES[2]))
    for one in (first, second):
        await one.stop()
    await engine.stop()


def test_the_publisher_and_the_reader_agree() -> None:
    sent: list[KvEvent] = [stored(HASHES[0], medium="disk"), BlockRemoved([HASHES[1]], "GPU")]
    payload = msgspec.msgpack.encode([1.0, sent, None])
    assert EventReader("w").read(0, payload) == [
        BlocksStored("w", KEYS[:1], Tier.SSD),
        BlocksRemoved("w", KEYS[1:2]),
    ]


async def test_a_master_of_the_store_is_followed_like_a_worker(context: zmq.asyncio.Context) -> None:
    settings = MasterSettings(
        port=0,
        kv_events_endpoint="tcp://127.0.0.1:*",
        kv_events_replay_endpoint="tcp://127.0.0.1:*",
        heartbeat_s=LONG_HEARTBEAT_S,
    )
    server = MasterServer(settings)
    client = AsyncClient(f"127.0.0.1:{await server.start()}", m.REPLIES)
    await client.call(m.Mount("a", 1, "h", 0, 1 << 20, b"", 0.0), 5)
    await client.call(m.Heartbeat("a", 1), 5)

    async def put(*keys: str) -> None:
        sizes = [100] * len(keys)
        started = await client.call(m.PutStart(1, "h", list(keys), sizes, sizes), 5)
        ids = [one.object_id for one in started.reserved]
        await client.call(m.PutEnd(list(keys), ids, [b"crc!"] * len(keys)), 5)

    scope = "kv/0123456789abcdef"
    before, live = f"{scope}/{HASHES[0].hex()}", f"{scope}/{HASHES[1].hex()}"
    await put(before, "17", "no block's", "kv/0123456789abcdef/no hash")
    events = StoreEvents(server)
    events.start()
    follower = Follower(context, EventSource(events.endpoint, events.replay_endpoint))
    try:
        await until(
            lambda: follower.has(HASHES[0], scope=scope)
        )  # from the replay: it was there before the first event
        await put(live)
        others = itertools.count(18)

        async def is_known() -> bool:
            await put(str(next(others)))  # shows a gap if the follower was not connected yet
            return follower.has(HASHES[0], HASHES[1], scope=scope)

        await until(is_known)
        await client.call(m.Remove([live], True), 5)
        await until(lambda: not follower.has(HASHES[1], scope=scope))
        assert follower.has(HASHES[0], scope=scope)
    finally:
        await follower.stop()
        await events.close()
        await client.close()
        await server.close()


# --- the ranks of one engine


@pytest.mark.parametrize("seed", range(5))
def test_a_block_is_held_as_long_as_a_rank_has_it(seed: int) -> None:
    random, index = Random(seed), PrefixIndex()
    holdings = RankHoldings(partial(apply, index))
    held: list[set[tuple[int, Tier]]] = [set() for _ in range(40)]
    for _ in range(300):
        rank, tier = random.randrange(40), random.choice([Tier.DEVICE, Tier.MEMORY])
        keys = random.sample(range(1, 30), 5)
        match random.choice("ssrrc"):
            case "s":
                holdings.take(rank, BlocksStored("e", keys, tier))
                held[rank] |= {(key, tier) for key in keys}
            case "r":
                holdings.take(rank, BlocksRemoved("e", keys, tier))
                held[rank] -= {(key, tier) for key in keys}
            case "c":
                holdings.take(rank, BlocksCleared("e"))
                held[rank].clear()
        together = set[tuple[int, Tier]]().union(*held)
        for key in range(1, 30):
            match = index.match([key])
            tiers = match.tiers_of(index.slots["e"])[0] if "e" in index.slots else 0
            found = {(key, one) for bit, one in enumerate(Tier) if tiers >> bit & 1}
            assert found == {one for one in together if one[0] == key}, f"seed {seed}"
    index.check()


def test_facts_that_are_no_blocks_are_passed_on() -> None:
    facts: list[Fact] = []
    holdings = RankHoldings(facts.append)
    sent: list[Fact] = [BlocksCleared("e", "restarted"), PrefixWindows("e", []), Silent("e")]
    for fact in sent:
        holdings.take(0, fact)
    assert facts == sent
    holdings.take(1, BlocksRemoved("e", [1]))
    assert facts == sent, "no rank had it"


def test_the_reason_of_a_clear_is_that_of_the_removals() -> None:
    facts: list[Fact] = []
    holdings = RankHoldings(facts.append)
    holdings.take(0, BlocksStored("e", [1, 2]))
    holdings.take(1, BlocksStored("e", [2, 3]))
    holdings.take(0, BlocksCleared("e", "restarted"))
    assert facts[2:] == [BlocksRemoved("e", [1], reason="restarted")]
    holdings.take(1, BlocksCleared("e", "restarted"))
    assert facts[3:] == [BlocksCleared("e", "restarted")]


# --- all publishers of one conductor


ENGINE_TOKENS = [*range(500, 564)]
ENGINE_KEYS = [short_key(one) for one in block_hashes(ENGINE_TOKENS, 16, root_hash())]


@dataclass
class Engine:
    """The part of a vLLM server that a conductor uses. Its blocks have 32 tokens, ours 16."""

    topic: str = "kv@a"
    can_replay: bool = True
    names_sources: bool = True
    num_failures: int = 0
    "Times that it fails to say where it publishes."
    num_asked: int = 0
    address: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    _runner: web.AppRunner | None = None

    async def start(self, connect_to: str = "") -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        if self.names_sources:
            app.router.add_get("/kv_event_sources", self._sources)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        self._pub = self.context.socket(zmq.PUB)
        self._replay = self.context.socket(zmq.ROUTER)
        if connect_to:
            self._pub.connect(connect_to)
            endpoint = connect_to
        else:
            endpoint = f"tcp://*:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        port = self._replay.bind_to_random_port("tcp://127.0.0.1")
        self._task = asyncio.get_running_loop().create_task(self._answer())
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": f"tcp://*:{port}" if self.can_replay else None,
            "buffer_steps": 10_000,
            "topic": self.topic,
        }

    async def stop(self) -> None:
        self._task.cancel()
        self.context.destroy(linger=0)
        assert self._runner is not None
        await self._runner.cleanup()

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        sequence = len(self.sent)
        self.sent.append((sequence, payload))
        if not lost:
            await self._pub.send_multipart([self.topic.encode(), sequence.to_bytes(8, "big"), payload])

    async def store(self, block: int, lost: bool = False) -> None:
        """Publish that the engine's block of that number is stored; its hash is 100 plus the number."""
        parent = 100 + block - 1 if block else None
        tokens = ENGINE_TOKENS[block * 32 : block * 32 + 32]
        event = {"type": "BlockStored", "block_hashes": [100 + block], "parent_block_hash": parent}
        await self.publish({**event, "token_ids": tokens, "block_size": 32, "medium": "GPU"}, lost=lost)

    async def _answer(self) -> None:
        while True:
            who, _, start = await self._replay.recv_multipart()
            for sequence, payload in self.sent[int.from_bytes(start, "big") :]:
                await self._replay.send_multipart(
                    [who, b"", self.topic.encode(), sequence.to_bytes(8, "big"), payload]
                )
            end = (-1).to_bytes(8, "big", signed=True)
            await self._replay.send_multipart([who, b"", self.topic.encode(), end, b""])

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _sources(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        if self.num_failures:
            self.num_failures -= 1
            return web.Response(status=503)
        return web.json_response({"0": self.config})


@contextlib.asynccontextmanager
async def service_of(*engines: Engine, **settings: Any) -> AsyncIterator[ConductorService]:
    service = ConductorService(replace(SETTINGS, **settings))
    await service.start()
    try:
        for engine in engines:
            service.post(AddInstance(engine.address, WorkerRole.DECODE))
        yield service
        service.core.check()
    finally:
        await service.close()
        for engine in engines:
            await engine.stop()


async def has(service: ConductorService, engine: Engine, num_blocks: int) -> bool:
    return service.core.index.matches(ENGINE_KEYS).get(engine.address, 0) == num_blocks


def free_endpoint() -> str:
    context = zmq.Context()
    with context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
    context.destroy()
    return f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("way", ["listens", "connects", "connects as set"])
async def test_blocks_of_an_engine_are_known_whichever_side_connects(way: str) -> None:
    endpoint = free_endpoint()
    engine = Engine()
    await engine.start("" if way == "listens" else endpoint)
    settings = {"kv_events_listen": endpoint} if way == "connects as set" else {}
    if settings:  # the engine knows the conductor by another name
        engine.config["endpoint"] = "tcp://conductor.example:5557"
    await engine.store(0)  # before any subscriber: comes by replay
    async with service_of(engine, **settings) as service:
        await until(lambda: has(service, engine, 2))
        await engine.store(1)

        async def all_arrived() -> bool:
            await engine.publish()  # one that connects may not be connected yet, and then loses its messages
            return await has(service, engine, 4)

        await until(all_arrived)
        await engine.publish({"type": "BlockRemoved", "block_hashes": [101], "medium": "GPU"})
        await until(lambda: has(service, engine, 2))
        await engine.store(1, lost=True)
        await engine.publish()  # the gap is seen, and filled
        await until(lambda: has(service, engine, 4))
        await engine.publish({"type": "AllBlocksCleared"})
        await until(lambda: has(service, engine, 0))


async def test_two_engines_that_connect_are_distinguished_by_their_topics() -> None:
    endpoint = free_endpoint()
    engines = [Engine("kv@a"), Engine("kv@b"), Engine("kv@b")]
    for engine in engines:
        await engine.start(endpoint)
    first, second, third = engines
    await first.store(0)
    await second.store(0)
    await second.store(1)
    await third.store(0)
    async with service_of(first, second) as service:
        await until(lambda: has(service, first, 2))
        await until(lambda: has(service, second, 4))
        service.post(AddInstance(third.address, WorkerRole.DECODE))  # it has the second's topic: not followed
        instance = service.core.instances[third.address]

        async def is_silent() -> bool:
            return instance.is_silent

        await until(is_silent)
        assert await has(service, third, 0)
        service.post(RemoveInstance(first.address))
        await second.publish({"type": "AllBlocksCleared"})

        async def has_cleared() -> bool:
            await second.publish()
            return await has(service, second, 0)

        await until(has_cleared)
    await third.stop()


async def test_an_engine_without_events_is_known_to_be_silent() -> None:
    dumb, off = Engine(names_sources=False), Engine()
    await dumb.start()
    await off.start()
    off.config |= {"enable_kv_cache_events": False, "publisher": "null"}
    async with service_of(dumb, off) as service:

        async def are_silent() -> bool:
            return all(one.is_silent and one.is_engine for one in service.core.instances.values())

        await until(are_silent)


async def test_an_engine_that_did_not_answer_is_asked_again_where_it_publishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_subscriptions, "SOURCES_PAUSE_S", 0.05)
    engine = Engine(num_failures=3)
    await engine.start()
    await engine.store(0)
    async with service_of(engine) as service:
        await until(lambda: has(service, engine, 2))
        [instance] = service.core.instances.values()
        assert engine.num_failures == 0 and not instance.is_silent


async def test_an_instance_whose_events_can_t_be_followed_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    await engine.start()
    await engine.store(0)
    async with service_of(engine) as service:
        await until(lambda: has(service, engine, 2))

        def fail(reader: EventReader, sequence: int, payload: bytes) -> list[Fact]:
            raise AssertionError("a fault of the reader itself")

        monkeypatch.setattr(EventReader, "read", fail)
        await engine.store(1)
        [instance] = service.core.instances.values()
        await until(lambda: instance.is_silent)
        assert await has(service, engine, 0)


async def test_where_an_engine_publishes_can_be_set() -> None:
    engine = Engine(names_sources=False)
    await engine.start()
    endpoint, replay = (
        engine.config[name].replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint")
    )
    await engine.store(0)
    async with service_of(engine, event_sources=(f"{engine.address}={endpoint}={replay}",)) as service:
        await until(lambda: has(service, engine, 2))


@pytest.mark.parametrize("change", [{"topic": "another"}, {"enable_kv_cache_events": False}])
async def test_a_failed_request_does_not_cost_the_blocks_of_an_engine(change: dict[str, Any]) -> None:
    """It can't replay them. Other publishers than before are followed from their beginning, and blocks of an
    engine that has none any longer are unknown."""
    engine = Engine(can_replay=False)
    await engine.start()
    async with service_of(engine) as service:

        async def is_known() -> bool:
            await engine.store(0)
            return await has(service, engine, 2)

        await until(is_known)
        [instance] = service.core.instances.values()
        service.post(Failed(engine.address, "its stream ended"))
        assert instance.health is Health.SUSPECT
        await until(lambda: engine.num_asked == 2)
        await engine.store(1)
        await until(lambda: has(service, engine, 4))
        engine.config |= change
        service.post(Failed(engine.address, "its stream ended"))
        await until(lambda: has(service, engine, 0))


async def test_the_ranks_of_an_engine_are_one_instance() -> None:
    """Each has a publisher, as set; what one of them clears the other still has."""
    first, second = Engine(names_sources=False), Engine(names_sources=False)
    for engine in (first, second):
        await engine.start()
        await engine.store(0)
    await second.store(1)
    ranks = [
        [engine.config[name].replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint")]
        for engine in (first, second)
    ]
    sources = tuple(f"{first.address}={endpoint}={replay}" for endpoint, replay in ranks)
    async with service_of(first, event_sources=sources) as service:
        await until(lambda: has(service, first, 4))

        async def is_cleared() -> bool:
            await second.publish({"type": "AllBlocksCleared"})
            return await has(service, first, 2)

        await until(is_cleared)
        await first.publish({"type": "BlockRemoved", "block_hashes": [100], "medium": "GPU"})
        await until(lambda: has(service, first, 0))
    await second.stop()


@pytest.mark.parametrize("given", ["tcp://a:1", "a=tcp://a:1", "a:1", "a:1=5557"])
def test_a_source_that_can_t_be_read_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgument, match="event_sources"):
        SchedulingSettings(event_sources=(given,))


def test_counts_of_gaps_begin_at_0() -> None:
    """In a process of its own, as other tests lose batches: a series that began with 1 would show no rise."""
    program = "import mooncake.conductor.event_subscriptions; from mooncake.metrics import registry; "
    program += "name = 'mooncake_conductor_kv_event_gaps_total'; "
    program += "print([registry.get_sample_value(name, {'outcome': one}) for one in ('replayed', 'lost')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[0.0, 0.0]", done.stderr
