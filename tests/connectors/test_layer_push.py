# SPDX-License-Identifier: Apache-2.0
"""A push layer by layer: in steps, in either order, and with an end that fails in the middle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from mooncake import clock
from mooncake.connectors import layer_push
from mooncake.connectors.layer_push import LayerReceiver, LayerSender, PushedLoad, PushPart, PushProgress
from mooncake.connectors.peer_push import BlockRequest, PushOutcome
from mooncake.errors import PeerLost
from tests.connectors.test_peer_push import LAYOUT, NUM_BLOCKS, NUM_LAYERS, SLAB_BYTES, TIMEOUT_S, Memory

PROMPT = b"digest of the prompt"


class Pair:
    """Both ends of a push, with what they report."""

    def __init__(self, hold_s: float, timeout_s: float) -> None:
        self.computed, self.decoding = Memory(1), Memory(2)
        self.computed.transfer.register_all(self.computed.slabs.buffers)
        self.ended: list[PushPart] = []
        self.outcomes: list[PushOutcome] = []
        self.news = asyncio.Event()
        self.sender = LayerSender(
            *(self.computed.transfer, LAYOUT, "kind", self.computed.slabs, hold_s),
            self._ended,
            self.outcomes.append,
        )
        self.receiver = LayerReceiver(
            *(self.decoding.transfer, LAYOUT, "kind", self.decoding.slabs, timeout_s),
            on_progress=self.news.set,
        )

    def _ended(self, part: PushPart) -> None:
        self.ended.append(part)
        self.news.set()

    def load(self, block_ids: list[int], first: int = 0, prompt: bytes = PROMPT) -> PushedLoad:
        wanted = BlockRequest("one", prompt, first, block_ids, f"127.0.0.1:{self.sender.port}")
        return PushedLoad(wanted, NUM_LAYERS)

    def start(self, load: PushedLoad) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(self.receiver.load(load))

    def begin(self, first: int, block_ids: list[int], num_blocks: int) -> PushPart:
        part = PushPart("one", PROMPT, num_blocks, first, block_ids)
        self.sender.begin(part)
        return part

    def compute(self, part: PushPart, num_layers: int = NUM_LAYERS) -> None:
        for _ in range(num_layers):
            self.sender.layer_computed(part, clock.monotonic())

    async def until(self, is_true: Callable[[], Any]) -> None:
        """Return when ``is_true``; every change that tests wait for sets ``news``."""
        async with asyncio.timeout(TIMEOUT_S):
            while not is_true():
                self.news.clear()
                await self.news.wait()

    async def until_requested(self) -> None:
        """Return when the sender has a request that waits."""
        async with asyncio.timeout(TIMEOUT_S):
            while not any(one.num_waiting for one in self.sender._outgoing.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def layer(self, memory: Memory, layer: int, ids: list[int]) -> bytes:
        return memory.layers[layer, ids].tobytes()


@contextlib.asynccontextmanager
async def a_pair(hold_s: float = TIMEOUT_S, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Pair]:
    pair = Pair(hold_s, timeout_s)
    await pair.sender.start("127.0.0.1", 0)
    try:
        yield pair
    finally:
        await pair.receiver.close()
        await pair.sender.close()
        pair.decoding.close()
        pair.computed.close()


async def test_a_layer_arrives_before_the_next_is_computed() -> None:
    async with a_pair() as pair:
        load = pair.load([5, 3, 0])
        loading = pair.start(load)
        part = pair.begin(0, [0, 1, 2], 3)
        for layer in range(NUM_LAYERS):
            pair.compute(part, 1)
            await pair.until(lambda: load.num_layers_loaded == layer + 1)  # noqa: B023
            assert pair.layer(pair.decoding, layer, [5, 3, 0]) == pair.layer(pair.computed, layer, [0, 1, 2])
            assert load.done == (layer == NUM_LAYERS - 1)
        await loading
        assert load.done and not load.failed and part.done
        assert [(one.outcome, one.num_blocks) for one in pair.outcomes] == [("pushed", 3)]
        assert pair.outcomes[0].num_bytes == 3 * NUM_LAYERS * SLAB_BYTES


async def test_no_layer_counts_before_the_last_step_has_computed_it() -> None:
    async with a_pair() as pair:
        load = pair.load([4, 5, 1])
        loading = pair.start(load)
        first = pair.begin(0, [2, 3], 3)
        pair.compute(first)
        await pair.until(lambda: first.done)
        assert load.num_layers_loaded == 0
        second = pair.begin(2, [0], 3)
        pair.compute(second, 2)
        await pair.until(lambda: load.num_layers_loaded == 2)
        pair.compute(second, 1)
        await loading
        assert not load.failed
        assert pair.decoding.blocks([4, 5, 1]) == pair.computed.blocks([2, 3, 0])


@pytest.mark.parametrize("seed", range(20))
async def test_steps_and_requests_in_any_order(seed: int) -> None:
    """Random cuts of a prompt, a random number of blocks that the receiver has, and a random time of its
    request: all wanted blocks are the sender's, and no other block is written."""
    random = Random(seed)
    async with a_pair() as pair:
        num_blocks = random.randint(1, NUM_BLOCKS)
        source, target = (random.sample(range(NUM_BLOCKS), num_blocks) for _ in range(2))
        have = random.randrange(num_blocks)
        others = [block for block in range(NUM_BLOCKS) if block not in target[have:]]
        before = pair.decoding.blocks(others)
        load = pair.load(target[have:], have)
        loading: asyncio.Task[None] | None = None
        cuts = sorted(random.sample(range(1, num_blocks), random.randrange(num_blocks)))
        for first, end in zip([0, *cuts], [*cuts, num_blocks], strict=True):
            part = pair.begin(first, source[first:end], num_blocks)
            for _ in range(NUM_LAYERS):
                if loading is None and random.random() < 0.3:
                    loading = pair.start(load)
                if random.random() < 0.5:
                    await asyncio.sleep(0)
                pair.compute(part, 1)
        await (loading or pair.start(load))
        assert not load.failed, load.reason
        assert pair.decoding.blocks(target[have:]) == pair.computed.blocks(source[have:]), seed
        assert pair.decoding.blocks(others) == before, seed
        await pair.until(lambda: len(pair.ended) == len(cuts) + 1)


@pytest.mark.parametrize("num_layers", range(NUM_LAYERS))
async def test_a_prompt_that_fails_in_the_middle_fails_the_load_and_revokes_nothing(num_layers: int) -> None:
    async with a_pair() as pair:
        load = pair.load([4, 5])
        loading = pair.start(load)
        part = pair.begin(0, [0, 1], 2)
        pair.compute(part, num_layers)
        if num_layers:
            await pair.until(lambda: load.num_layers_loaded == num_layers)
        pair.sender.drop("one", "its step has failed")
        await loading
        assert load.failed and load.reason == "its step has failed"
        assert part.done and pair.receiver._generation == 0
        late = pair.begin(0, [0, 1], 2)
        assert late.done, "a part of a transfer that has ended is not kept"


async def test_a_sender_that_is_lost_fails_the_load_after_its_access_was_revoked() -> None:
    async with a_pair() as pair:
        load = pair.load([4])
        loading = pair.start(load)
        part = pair.begin(0, [0], 1)
        pair.compute(part, 1)
        await pair.until(lambda: load.num_layers_loaded == 1)
        old = {region.key for region in pair.decoding.transfer.describe().regions}
        await pair.sender._server.close()
        await loading
        assert load.failed and load.num_layers_loaded == 1
        new = {region.key for region in pair.decoding.transfer.describe().regions}
        assert pair.receiver._generation == 1 and old.isdisjoint(new)
        load.wait_layer(2)  # it has failed: no wait


async def test_a_withdrawn_load_ends_and_its_sender_keeps_no_block() -> None:
    async with a_pair() as pair:
        load = pair.load([4])
        loading = pair.start(load)
        part = pair.begin(0, [0], 1)
        pair.compute(part, 1)
        await pair.until(lambda: load.num_layers_loaded == 1)
        pair.receiver.withdraw(load)
        await loading
        assert load.failed and part.done and pair.receiver._generation == 0
        before = pair.decoding.blocks([4])
        pair.compute(part, 2)
        await asyncio.sleep(0)
        assert pair.decoding.blocks([4]) == before


async def test_a_withdrawal_over_another_connection_costs_a_revocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request's connection is lost here; the sender may not know it yet, and go on writing."""
    async with a_pair() as pair:
        load = pair.load([4])
        loading = pair.start(load)
        part = pair.begin(0, [0], 1)
        pair.compute(part, 1)
        await pair.until(lambda: load.num_layers_loaded == 1)
        fresh = LayerReceiver(
            pair.decoding.transfer, LAYOUT, "kind", pair.decoding.slabs, TIMEOUT_S, regions=()
        )
        monkeypatch.setattr(pair.receiver, "_client", fresh._client)
        pair.receiver.withdraw(load)
        await loading
        assert load.failed and pair.receiver._generation == 1
        await fresh.close()


async def test_a_load_that_is_withdrawn_before_its_prompt_is_begun() -> None:
    async with a_pair() as pair:
        load = pair.load([4])
        loading = pair.start(load)
        await asyncio.sleep(0)
        pair.receiver.withdraw(load)
        await loading
        assert load.failed and pair.receiver._generation == 0


async def test_a_sender_that_stops_in_the_middle_costs_a_bounded_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_push, "PROGRESS_TIMEOUT_S", 0.05)
    async with a_pair() as pair:
        load = pair.load([4])
        loading = pair.start(load)
        part = pair.begin(0, [0], 1)
        pair.compute(part, 1)
        await loading
        assert load.failed and "too long" in load.reason
        assert part.done


async def test_kv_of_weights_that_replaced_others_meanwhile_is_not_pushed() -> None:
    async with a_pair() as pair:
        before = pair.decoding.layers.copy()
        load = pair.load([4])
        loading = pair.start(load)
        await pair.until_requested()
        pair.sender.digest = "of other weights"
        part = pair.begin(0, [0], 1)
        pair.compute(part)
        await loading
        assert load.reason == "the blocks have layout of other weights, not kind" and part.done
        assert (pair.decoding.layers == before).all()


async def test_a_write_that_fails_costs_a_revocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it, what its connections still carry may land."""

    async def fail(*arguments: Any, **more: Any) -> None:
        raise PeerLost("a lane was reset")

    async with a_pair() as pair:
        monkeypatch.setattr(pair.computed.transfer, "write", fail)
        load = pair.load([4])
        loading = pair.start(load)
        part = pair.begin(0, [0], 1)
        pair.compute(part)
        await loading
        assert "a lane was reset" in load.reason and part.done
        assert pair.receiver._generation == 1


async def test_no_transfer_begins_in_the_middle_of_a_prompt() -> None:
    """The name of one that is forgotten, or that there were too many to know."""
    async with a_pair() as pair:
        load = pair.load([4, 5])
        loading = pair.start(load)
        part = pair.begin(1, [1], 2)
        pair.compute(part)
        await loading
        assert load.reason == "its first blocks are not pushed" and part.done


async def test_a_late_request_for_an_ended_transfer_does_not_wait() -> None:
    async with a_pair(hold_s=0.02) as pair:
        part = pair.begin(0, [0], 1)
        pair.compute(part)
        await pair.until(lambda: part.done)
        async with asyncio.timeout(TIMEOUT_S):
            while pair.sender._outgoing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        load = pair.load([4])
        await pair.start(load)
        assert "no receiver has requested it" in load.reason and not pair.sender._outgoing
        assert pair.begin(0, [0], 1).done, "the name is not used again"


async def test_a_request_whose_connection_is_lost_leaves_nothing() -> None:
    async with a_pair() as pair:
        loading = pair.start(pair.load([4]))
        await pair.until_requested()
        await pair.receiver.close()
        async with asyncio.timeout(TIMEOUT_S):
            while pair.sender._outgoing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await loading


async def test_what_does_not_match_is_refused_and_not_written() -> None:
    async with a_pair() as pair:
        before = pair.decoding.layers.copy()
        part = pair.begin(0, [0, 1], 2)
        pair.compute(part)
        other = pair.load([4, 5], prompt=b"other")
        await pair.start(other)
        assert other.failed and other.reason == "the prompts differ" and part.done
        assert (pair.decoding.layers == before).all()
    for block_ids, first in (([4], 0), ([4, 5, 3], 0), ([4, 5], 1), ([4, 5, 1], -1)):
        async with a_pair() as pair:
            part = pair.begin(0, [0, 1], 2)
            load = pair.load(block_ids, first)
            await pair.start(load)
            assert load.reason == "the blocks don't fit each other" and part.done
    async with a_pair() as pair:
        pair.sender.digest = "other"
        load = pair.load([4])
        await pair.start(load)
        assert load.reason == "the blocks have layout other, not kind"


async def test_a_prompt_that_is_not_requested_is_kept_for_a_while_only() -> None:
    async with a_pair(hold_s=0.05) as pair:
        part = pair.begin(0, [0], 1)
        pair.compute(part)
        await pair.until(lambda: part.done)
        assert [(one.outcome, one.num_blocks) for one in pair.outcomes] == [("refused", 1)]


async def test_a_prompt_that_is_never_computed_ends_the_wait_for_it() -> None:
    async with a_pair(timeout_s=0.05) as pair:
        load = pair.load([4])
        await pair.start(load)
        assert "not computed within" in load.reason
        assert not pair.sender._outgoing


async def test_a_second_receiver_gets_nothing_and_disturbs_nothing() -> None:
    async with a_pair() as pair:
        load, other = pair.load([4]), pair.load([5])
        loading = pair.start(load)
        part = pair.begin(0, [0], 1)
        pair.compute(part, 1)
        await pair.until(lambda: load.num_layers_loaded == 1)
        stranger = Memory(3)
        second = LayerReceiver(stranger.transfer, LAYOUT, "kind", stranger.slabs, TIMEOUT_S)
        await second.load(other)
        assert other.reason == "another receiver has taken it"
        client = second._client(f"127.0.0.1:{pair.sender.port}")
        answer = await client.call(PushProgress("one", 0, 1.0), TIMEOUT_S)
        assert answer.reason == "there is no such transfer"
        answer = await client.call(layer_push.PushWithdrawal("one"), TIMEOUT_S)
        assert answer.has_begun, "what another connection has begun is not known to be over"
        await second.close()
        stranger.close()
        pair.compute(part, 2)
        await loading
        assert not load.failed and np.array_equal(pair.decoding.layers[:, 4], pair.computed.layers[:, 0])


async def test_a_sender_knows_a_bounded_number_of_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_push, "MAX_TRANSFERS", 0)
    async with a_pair() as pair:
        load = pair.load([4])
        await pair.start(load)
        assert "0 transfers are under way" in load.reason
        assert pair.begin(0, [0], 1).done
