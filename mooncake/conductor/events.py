"""Follows the KV events of one instance and turns them into facts for the index.

It owns the subscription: sequence gaps are filled by replay, a restarted publisher is noticed and its old
blocks are cleared, foreign block hashes are translated. It refuses to know why an instance is followed and
what the facts are good for. The wire format is vLLM's (``inference/kv_events.py`` publishes it); as it
belongs to neither room, this side has its own, more tolerant reading of it.

Our workers send block hashes of ``mooncake.prefix`` as bytes. Other engines send integers of their own
making; those are translated by hashing the tokens that travel beside them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from mooncake.conductor.messages import BlocksCleared, BlocksRemoved, BlocksStored
from mooncake.log import get_logger
from mooncake.prefix import BlockHash, BlockKey, extend, root_hash, short_key
from mooncake.types import InstanceId, Tier

log = get_logger(__name__)

REPLAY_TIMEOUT_S = 3.0
_TIERS = {"gpu": Tier.DEVICE, "cpu": Tier.MEMORY, "disk": Tier.SSD}

ForeignHash = bytes | int
Fact = BlocksStored | BlocksRemoved | BlocksCleared


class _Event(msgspec.Struct, frozen=True, tag_field="type", tag=str):
    pass


class BlockStored(_Event, frozen=True):
    block_hashes: list[ForeignHash]
    parent_block_hash: ForeignHash | None = None
    token_ids: list[int] | None = None
    block_size: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[object] | None = None
    object_key: str | None = None
    """Of a store that names its objects by our block hashes; such events carry no hashes that mean more."""


class BlockRemoved(_Event, frozen=True):
    block_hashes: list[ForeignHash]
    medium: str | None = None
    object_key: str | None = None


class AllBlocksCleared(_Event, frozen=True):
    pass


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(_Batch)


class EventSource(msgspec.Struct, frozen=True):
    """One entry of a worker's ``GET /kv_event_sources``."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    def as_seen_from_afar(self, instance: InstanceId) -> EventSource:
        """With the instance's host where the worker says "any of my addresses"."""
        host = instance.rpartition(":")[0]

        def reachable(endpoint: str) -> str:
            return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\]):", lambda _: f"tcp://{host}:", endpoint)

        replay = None if self.replay_endpoint is None else reachable(self.replay_endpoint)
        return EventSource(reachable(self.endpoint), replay, self.topic)


class EventReader:
    """Batches of one publisher, in whatever order they arrive, to facts about its instance."""

    def __init__(self, instance: InstanceId) -> None:
        self.next_sequence = 0
        self._instance = instance
        self._latest_ts = 0.0
        self._own_hashes: dict[int, BlockHash] = {}  # of engines whose block hashes are not ours

    def is_restart(self, sequence: int, payload: bytes) -> bool:
        """Whether the publisher counts from the start again (a late duplicate has an old timestamp)."""
        return sequence < self.next_sequence and _decoder.decode(payload).ts > self._latest_ts

    def restart(self) -> list[Fact]:
        """Forget everything."""
        self.next_sequence = 0
        self._own_hashes.clear()
        return [BlocksCleared(self._instance, "restarted")]

    def read(self, sequence: int, payload: bytes) -> list[Fact]:
        """The facts in one batch; none when it was read before.

        Raises:
            msgspec.MsgspecError: not a batch of events.
        """
        if sequence < self.next_sequence:
            return []
        batch = _decoder.decode(payload)
        self.next_sequence = sequence + 1
        self._latest_ts = max(self._latest_ts, batch.ts)
        facts: list[Fact] = []
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._own_hashes.clear()
                facts.append(BlocksCleared(self._instance))
                continue
            tier = _TIERS.get((event.medium or "gpu").lower(), Tier.DEVICE)
            if isinstance(event, BlockStored):
                facts.append(BlocksStored(self._instance, _keys(self._stored(event)), tier))
            else:
                facts.append(BlocksRemoved(self._instance, _keys(self._removed(event)), tier))
        return facts

    def _stored(self, event: BlockStored) -> list[BlockHash]:
        if event.object_key is not None:
            return _named_by(event.object_key)
        if not any(isinstance(block_hash, int) for block_hash in event.block_hashes):
            return [block_hash for block_hash in event.block_hashes if isinstance(block_hash, bytes)]
        if event.lora_name or any(event.extra_keys or ()):
            return []  # salted in a way that is not ours
        parent: BlockHash | None = root_hash()
        if isinstance(event.parent_block_hash, int):
            parent = self._own_hashes.get(event.parent_block_hash)
        own: list[BlockHash] = []
        for number, foreign in enumerate(event.block_hashes):
            size = event.block_size or 0
            tokens = (event.token_ids or [])[number * size : (number + 1) * size]
            if parent is None or not size or len(tokens) < size or not isinstance(foreign, int):
                break
            parent = extend(parent, tokens)
            self._own_hashes[foreign] = parent
            own.append(parent)
        return own

    def _removed(self, event: BlockRemoved) -> list[BlockHash]:
        if event.object_key is not None:
            return _named_by(event.object_key)
        found = [one if isinstance(one, bytes) else self._own_hashes.get(one) for one in event.block_hashes]
        return [one for one in found if one is not None]


def _keys(hashes: list[BlockHash]) -> list[BlockKey]:
    return [short_key(block_hash) for block_hash in hashes]


def _named_by(key: str) -> list[BlockHash]:
    """The block that our own store keeps under ``key`` (``KvIdentity.key``); none when it is no block's."""
    kind, _, block = key.rpartition("/")
    if not kind.startswith("kv/"):
        return []
    try:
        return [bytes.fromhex(block)]
    except ValueError:
        return []


async def follow(
    context: zmq.asyncio.Context, instance: InstanceId, source: EventSource, post: Callable[[Fact], None]
) -> None:
    """Follow one publisher until cancelled, beginning with everything it can replay."""
    reader = EventReader(instance)
    subscriber = context.socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.RCVHWM, 100_000)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        # A publisher that restarts may have counted past our position before we are connected again, so
        # that its numbers alone would look like a small gap: a lost connection counts as a restart.
        losses = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        subscriber.connect(source.endpoint)
        _post_all(post, reader.restart())
        await _catch_up(context, reader, source, post)
        while True:
            frames = await subscriber.recv_multipart()
            if len(frames) != 3:
                log.warning("kv_event_refused", instance=instance, reason="not 3 frames")
                continue
            sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
            try:
                if await _drained(losses) or reader.is_restart(sequence, payload):
                    log.info("kv_events_restarted", instance=instance)
                    _post_all(post, reader.restart())
                if sequence > reader.next_sequence:
                    log.info(
                        "kv_events_missed", instance=instance, first=reader.next_sequence, last=sequence - 1
                    )
                    await _catch_up(context, reader, source, post)
                if sequence > reader.next_sequence:
                    # What was missed can't be had any more: better no hints than stale ones.
                    _post_all(post, reader.restart())
                _post_all(post, reader.read(sequence, payload))
            except msgspec.MsgspecError as error:
                log.warning("kv_event_refused", instance=instance, reason=str(error))
    finally:
        subscriber.disable_monitor()
        subscriber.close()


async def _drained(monitor: zmq.asyncio.Socket) -> bool:
    """Whether the monitor had something to say."""
    was_lost = False
    while await monitor.poll(0):
        await monitor.recv_multipart()
        was_lost = True
    return was_lost


async def _catch_up(
    context: zmq.asyncio.Context, reader: EventReader, source: EventSource, post: Callable[[Fact], None]
) -> None:
    """Replay from the reader's next sequence; gives up silently when nobody answers in time."""
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
