# SPDX-License-Identifier: Apache-2.0
"""A publisher of KV events, as a router meets it: do events arrive, under which topic, are they replayed?

It subscribes to everything while an engine computes a known prompt, and looks for the blocks of that prompt.
What it keeps is bounded, whatever a publisher sends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from mooncake import clock
from mooncake.doctor.facts import PublisherFacts
from mooncake.kv_events import BlockStored, read_batch
from mooncake.kv_events.publisher import allow_ipv6

MAX_TOPICS = 8
MAX_MESSAGE_BYTES = 16 << 20
REPLAY_S = 3.0
CONNECT_S = 2.0


class EventProbe:
    """Follows one publisher. ``start`` it before the prompt is sent, ``finish`` it afterwards."""

    def __init__(self, context: zmq.asyncio.Context, facts: PublisherFacts, prompt: Sequence[int]) -> None:
        self._context, self._facts, self._prompt = context, facts, list(prompt)
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_sequence = 0
        self._is_seen = asyncio.Event()

    async def start(self) -> None:
        """Subscribe, and wait until the connection is made or can't be."""
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 10_000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        allow_ipv6(self._socket, self._facts.endpoint)
        monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.subscribe(b"")
            self._socket.connect(self._facts.endpoint)
        except zmq.ZMQError as error:
            self._facts.problem = f"{self._facts.endpoint}: {error}"
            return
        if not await monitor.poll(int(CONNECT_S * 1000)):
            self._facts.problem = f"no connection to {self._facts.endpoint} within {CONNECT_S:g} s"
        self._socket.disable_monitor()
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def finish(self, timeout_s: float) -> None:
        """Wait for the prompt's blocks, query a replay, and close."""
        try:
            if self._task is not None and not self._facts.problem:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._is_seen.wait()
            if self._facts.num_batches:
                self._facts.replay_answers = await self._replays()
        finally:
            self.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._socket is not None:
            self._socket.close()

    async def _read(self) -> None:
        assert self._socket is not None
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3:
                self._unreadable(f"a message has {len(frames)} frames, not 3")
                continue
            if len(frames[1]) != 8:
                self._unreadable(f"a message's sequence number has {len(frames[1])} bytes, not 8")
                continue
            self.take(frames[0].decode(errors="replace"), int.from_bytes(frames[1], "big"), frames[2])

    def take(self, topic: str, sequence: int, payload: bytes) -> None:
        """Read one batch."""
        facts = self._facts
        try:
            batch = read_batch(payload)
        except msgspec.MsgspecError as error:
            self._unreadable(str(error))
            return
        facts.num_batches += 1
        self._last_sequence = sequence
        if topic not in facts.topics and len(facts.topics) < MAX_TOPICS:
            facts.topics = (*facts.topics, topic)
        for event in batch.events:
            if isinstance(event, BlockStored) and self._is_of_prompt(event):
                facts.is_canary_seen = True
                facts.canary_hashes = tuple(_name(one) for one in event.block_hashes[:64])
                self._is_seen.set()

    def _is_of_prompt(self, event: BlockStored) -> bool:
        """Whether these are the first blocks of the prompt."""
        tokens = event.token_ids or []
        return bool(tokens) and tokens == self._prompt[: len(tokens)]

    def _unreadable(self, problem: str) -> None:
        self._facts.num_unreadable += 1
        self._facts.problem = problem[:300]

    async def _replays(self) -> bool:
        """Whether the publisher replays its latest batch, up to the end of the replay."""
        if not self._facts.replay_endpoint:
            return False
        dealer = self._context.socket(zmq.DEALER)
        deadline = clock.monotonic() + REPLAY_S
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            allow_ipv6(dealer, self._facts.replay_endpoint)
            dealer.connect(self._facts.replay_endpoint)
            await dealer.send_multipart([b"", self._last_sequence.to_bytes(8, "big")])
            num_batches = 0
            while (left_s := deadline - clock.monotonic()) > 0:
                if not await dealer.poll(int(left_s * 1000) + 1):
                    return False
                frames = await dealer.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    return False
                if int.from_bytes(frames[-2], "big", signed=True) < 0:
                    return num_batches > 0
                num_batches += 1
            return False
        except zmq.ZMQError:
            return False
        finally:
            dealer.close()


def _name(block_hash: bytes | int) -> str:
    return block_hash.hex() if isinstance(block_hash, bytes) else f"{block_hash & (1 << 64) - 1:016x}"
