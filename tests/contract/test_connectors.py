# SPDX-License-Identifier: Apache-2.0
"""What every connector owes an engine, seen by an engine whose answer depends on every byte it is brought.

The truth is always the same: the answer of an engine that computes everything itself. An engine's seed
is its weights; each test takes new ones, so that tests share a cache without meeting in it. ``SAVES``
requests end when their blocks are stored, so nothing here waits for anything but an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.connectors.kv_link import AnyLink, KvLookup, KvSave
from mooncake.inference.blocks import BlockEvent, PoolBlocksStored
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.fake_engine import (
    ByteTokenizer,
    FakeModel,
    FakeRunner,
    FaultyLink,
    FaultyLoad,
    LoadFaults,
)
from mooncake.inference.generator import Generator, TokenCounts
from mooncake.inference.request import Request, SamplingParams
from mooncake.kvlayout import KvLayout
from mooncake.prefix import BlockHash, block_hashes, root_hash
from tests.cluster import wait_for
from tests.contract.connectors import CONNECTORS, PATIENCE_S, Connector

LAYOUT = KvLayout(num_layers=4, num_kv_heads=1, head_dim=16, dtype="float32", block_tokens=16)
ANSWER_TOKENS = 8
LONGEST_S = 4 * PATIENCE_S + 10.0
"""An answer takes no longer whatever happens to the cache: a few waits of the link's, and computing."""

NO_FAULTS = LoadFaults()
seeds = itertools.count(1)


@dataclasses.dataclass
class Answer:
    """What a request came to."""

    tokens: list[int]
    counts: TokenCounts

    @property
    def num_loaded_tokens(self) -> int:
        return self.counts.num_cached_tokens - self.counts.num_local_tokens


class Subject:
    """An engine and the ways a test asks it."""

    def __init__(self, generator: Generator, model: FakeModel, events: list[BlockEvent]) -> None:
        self.events = events
        self.engine = generator.engine
        self.model = model
        self._generator = generator

    async def ask(self, prompt: Sequence[int], saves: bool = False, most: int = ANSWER_TOKENS) -> Answer:
        request = Request(f"r{next(seeds)}", list(prompt), SamplingParams(max_tokens=most), save_tail=saves)
        answer = Answer([], TokenCounts())
        async with (
            asyncio.timeout(LONGEST_S),
            contextlib.aclosing(self._generator.pieces(request, answer.counts)) as pieces,
        ):
            async for piece in pieces:
                answer.tokens += piece.token_ids
        return answer


class Bench:
    """One connector and the engines of one test."""

    def __init__(self, connector: Connector, stack: contextlib.AsyncExitStack) -> None:
        self.connector = connector
        self._stack = stack
        self.seed = next(seeds)

    async def engine(
        self,
        faults: LoadFaults = NO_FAULTS,
        wrap: Callable[[AnyLink], AnyLink] = lambda link: link,
        num_blocks: int = 256,
        seed: int | None = None,
        **layout: Any,
    ) -> Subject:
        """An engine with a link to the cache."""
        model = self._model(num_blocks, seed, **layout)
        link = await self._stack.enter_async_context(self.connector.link(model.identity, model.memory()))
        faulty = FaultyLink(wrap(link), faults, model.layout.num_layers, model.flip)
        return self._subject(model, faulty)

    def alone(self, num_blocks: int = 256, **more: Any) -> Subject:
        """An engine without one: what it answers is the truth."""
        return self._subject(self._model(num_blocks, **more), None)

    async def bare(self) -> tuple[FakeModel, AnyLink]:
        """Memory and a link without an engine: the test is the engine."""
        model = self._model(64)
        model.pool[:] = model.seed
        return model, await self._stack.enter_async_context(
            self.connector.link(model.identity, model.memory())
        )

    def _model(self, num_blocks: int, seed: int | None = None, **layout: Any) -> FakeModel:
        shape = dataclasses.replace(LAYOUT, **layout)
        return FakeModel(self.seed if seed is None else seed, shape, num_blocks)

    def _subject(self, model: FakeModel, link: AnyLink | None) -> Subject:
        engine = Engine(InferenceSettings(), FakeRunner(model, link), link)
        events: list[BlockEvent] = []
        generator = Generator(engine, ByteTokenizer(), asyncio.get_running_loop(), events.extend)
        generator.start()

        async def close() -> None:
            assert await asyncio.to_thread(generator.stop, LONGEST_S), "a load or a save never ended"
            engine.check()

        self._stack.push_async_callback(close)
        return Subject(generator, model, events)


@pytest.fixture(scope="module", params=CONNECTORS, ids=lambda one: one.__name__)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connector]:
    """A cache that the tests share, which do it no harm."""
    connector: Connector = request.param()
    connector.start(tmp_path_factory.mktemp("cache"))
    yield connector
    connector.stop()


@pytest.fixture(params=CONNECTORS, ids=lambda one: one.__name__)
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connector]:
    """A cache of the test's own, to be killed."""
    connector: Connector = request.param()
    connector.start(tmp_path)
    yield connector
    connector.stop()


@pytest.fixture
async def bench(shared: Connector) -> AsyncIterator[Bench]:
    async with contextlib.AsyncExitStack() as stack:
        yield Bench(shared, stack)


def prompt_of(num_tokens: int, number: int = 0) -> list[int]:
    random = Random(number)
    return [random.randrange(256) for _ in range(num_tokens)]


def hashes_of(prompt: Sequence[int]) -> list[BlockHash]:
    return block_hashes(prompt, LAYOUT.block_tokens, root_hash(), include_partial=True)


# ── what is brought is what was computed ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_tokens", [1, 16, 96, 103, 1000])
async def test_what_one_engine_computes_another_loads(bench: Bench, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    truth = await bench.alone().ask(prompt)
    saved = await (await bench.engine()).ask(prompt, saves=True)
    assert saved.tokens == truth.tokens
    assert saved.counts.num_stored_tokens == num_tokens
    loaded = await (await bench.engine()).ask(prompt)
    assert loaded.tokens == truth.tokens
    assert loaded.num_loaded_tokens == num_tokens


async def test_what_an_engine_loaded_stays_in_its_own_memory(bench: Bench) -> None:
    """So a fetch that the conductor decides makes a copy, and hot prefixes need no order of their own."""
    prompt = prompt_of(96)
    await (await bench.engine()).ask(prompt, saves=True)
    other = await bench.engine()
    assert (await other.ask(prompt)).counts.num_local_tokens == 0
    again = await other.ask(prompt)
    assert (again.num_loaded_tokens, again.counts.num_local_tokens) == (0, 96)
    published = [one for event in other.events if isinstance(event, PoolBlocksStored) for one in event.hashes]
    assert published[:6] == hashes_of(prompt), "so the conductor knows"


async def test_a_prefix_is_loaded_and_the_rest_computed(bench: Bench) -> None:
    first, second = prompt_of(80), prompt_of(80)[:48] + prompt_of(40, number=1)
    await (await bench.engine()).ask(first, saves=True)
    found = await (await bench.engine()).ask(second)
    assert found.num_loaded_tokens == 48
    assert found.tokens == (await bench.alone().ask(second)).tokens


async def test_a_prefix_ends_at_the_first_gap(bench: Bench) -> None:
    _, link = await bench.bare()
    hashes = hashes_of(prompt_of(64))
    blocks = [(block_hash, 16, 1 + at) for at, block_hash in enumerate(hashes)]
    await save(link, [blocks[0], blocks[1], blocks[3]])
    found = await look_up(link, [(block_hash, 16) for block_hash in hashes])
    assert found.num_blocks == 2
    link.release(found)


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {"seed": 0},
    "dtype": {"dtype": "bfloat16"},
    "half": {"dtype": "float16"},
    "block": {"block_tokens": 8},
    "layers": {"num_layers": 3},
    "heads": {"num_kv_heads": 2, "head_dim": 8},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
async def test_blocks_of_another_kind_are_never_found(bench: Bench, other: dict[str, Any]) -> None:
    prompt = prompt_of(96)
    await (await bench.engine()).ask(prompt, saves=True)
    other_model = await (await bench.engine(**other)).ask(prompt)
    assert other_model.num_loaded_tokens == 0
    assert other_model.tokens == (await bench.alone(**other).ask(prompt)).tokens


async def test_this_suite_would_notice_one_wrong_bit(bench: Bench) -> None:
    prompt = prompt_of(96)
    truth = await (await bench.engine()).ask(prompt, saves=True)
    deceived = await (await bench.engine(LoadFaults(corrupt_load_every=1))).ask(prompt)
    assert deceived.num_loaded_tokens == 96
    assert deceived.tokens != truth.tokens


# ── what fails costs time and nothing else ────────────────────────────────────────────────────────


async def test_a_failed_load_is_computed(bench: Bench) -> None:
    prompt = prompt_of(103)
    truth = await (await bench.engine()).ask(prompt, saves=True)
    reader = await bench.engine(LoadFaults(fail_load_every=1))
    answer = await reader.ask(prompt)
    assert reader.engine.stats().num_failed_loads == 1
    assert answer.num_loaded_tokens == 0
    assert answer.tokens == truth.tokens


@pytest.mark.parametrize("block", [0, 5])
@pytest.mark.parametrize("share", [0.0, 0.999], ids=["first layer", "last layer"])
async def test_a_spoilt_block_is_computed(bench: Bench, block: int, share: float) -> None:
    prompt = prompt_of(96)
    writer = await bench.engine()
    truth = await writer.ask(prompt, saves=True)
    offset = int(share * LAYOUT.object_bytes(16))
    await bench.connector.spoil(writer.model.identity, hashes_of(prompt)[block], offset)
    reader = await bench.engine()
    assert (await reader.ask(prompt)).tokens == truth.tokens
    assert reader.engine.stats().num_failed_loads == 1


async def test_an_aborted_save_is_never_seen(bench: Bench) -> None:
    _, link = await bench.bare()
    (block_hash,) = hashes_of(prompt_of(16))
    assert await save(link, [(block_hash, 16, 1)], num_layers=2) == 0
    assert (await look_up(link, [(block_hash, 16)])).num_blocks == 0
    assert await save(link, [(block_hash, 16, 1)]) == 1, "a later save is not hindered by it"


async def test_blocks_may_be_reused_once_a_save_is_done(bench: Bench) -> None:
    model, link = await bench.bare()
    hashes = hashes_of(prompt_of(16 * 12))
    for at, block_hash in enumerate(hashes):
        model.pool[:, :, 1] = at
        assert await save(link, [(block_hash, 16, 1)]) == 1
        model.pool[:, :, 1] = 2**64 - 1
    found = await look_up(link, [(block_hash, 16) for block_hash in hashes])
    assert found.num_blocks == len(hashes)
    await load(link, found, range(2, 2 + len(hashes)))
    for at in range(len(hashes)):
        assert (model.pool[:, :, 2 + at] == at).all()


async def test_preemption_while_saves_are_under_way(bench: Bench) -> None:
    prompts = [prompt_of(48, number) for number in range(8)]
    alone = bench.alone()
    truth = [(await alone.ask(prompt, most=40)).tokens for prompt in prompts]
    cramped = await bench.engine(num_blocks=24)
    answers = await asyncio.gather(*(cramped.ask(prompt, most=40) for prompt in prompts))
    assert cramped.engine.scheduler.num_preemptions > 0
    assert [answer.tokens for answer in answers] == truth
    again = await bench.engine()
    answers = await asyncio.gather(*(again.ask(prompt, most=40) for prompt in prompts))
    assert [answer.tokens for answer in answers] == truth


async def test_fifty_requests_at_once_on_three_engines(bench: Bench) -> None:
    stems = [prompt_of(64, number) for number in range(5)]
    prompts = [stems[number % 5] + prompt_of(number, number) for number in range(50)]
    alone = bench.alone()
    truth = [(await alone.ask(prompt)).tokens for prompt in prompts]
    engines = [await bench.engine(LoadFaults(fail_load_every=every)) for every in (0, 2, 3)]
    for _ in range(2):
        answers = await asyncio.gather(
            *(engines[at % 3].ask(prompt, saves=at % 2 == 0) for at, prompt in enumerate(prompts))
        )
        assert [answer.tokens for answer in answers] == truth
    assert sum(answer.counts.num_cached_tokens for answer in answers) > 0


# ── every wait has a deadline ─────────────────────────────────────────────────────────────────────


class At(FaultyLink):
    """Does something to the cache when a load, the lookup before it, or a save has come so far."""

    def __init__(self, link: AnyLink, moment: str, do: Callable[[], None]) -> None:
        super().__init__(link, NO_FAULTS, LAYOUT.num_layers, lambda block, layer: None)
        self._moment = moment
        self._do = do

    def lookup(self, blocks: Sequence[tuple[BlockHash, int]]) -> KvLookup:
        self._reach("before the lookup")
        return super().lookup(blocks)

    def start_load(self, lookup: KvLookup, block_ids: Sequence[int]) -> FaultyLoad:
        self._reach("before the load")
        load = super().start_load(lookup, block_ids)
        self._reach("in the load")
        return load

    def save_layer(self, save: KvSave, layer: int) -> None:
        super().save_layer(save, layer)
        if layer == LAYOUT.num_layers // 2:
            self._reach("in the save")

    def _reach(self, moment: str) -> None:
        if moment == self._moment:
            self._moment = ""
            self._do()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("moment", ["before the lookup", "before the load", "in the load"])
async def test_a_cache_that_is_gone(mortal: Connector, moment: str, number: signal.Signals) -> None:
    async with contextlib.AsyncExitStack() as stack:
        bench = Bench(mortal, stack)
        prompt = prompt_of(4000)
        truth = await (await bench.engine(num_blocks=300)).ask(prompt, saves=True)
        reader = await bench.engine(
            wrap=lambda link: At(link, moment, lambda: mortal.signal(number)), num_blocks=300
        )
        assert (await reader.ask(prompt)).tokens == truth.tokens
        # Not cached here, no longer there: it is looked up, missed, computed and not saved.
        other = prompt_of(100, number=1)
        assert (await reader.ask(other, saves=True)).tokens == (await bench.alone().ask(other)).tokens
        if number == signal.SIGSTOP:
            mortal.signal(signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_cache_that_goes_while_it_is_written_to(mortal: Connector, number: signal.Signals) -> None:
    async with contextlib.AsyncExitStack() as stack:
        bench = Bench(mortal, stack)
        prompt = prompt_of(4000)
        truth = await bench.alone(num_blocks=300).ask(prompt)
        sent: list[signal.Signals] = []

        def send() -> None:
            mortal.signal(number)
            sent.append(number)

        writer = await bench.engine(wrap=lambda link: At(link, "in the save", send), num_blocks=300)
        assert (await writer.ask(prompt, saves=True)).tokens == truth.tokens
        assert sent == [number]
        if number == signal.SIGSTOP:
            mortal.signal(signal.SIGCONT)
        # What came of it is either not found or whole.
        reader = await bench.engine(num_blocks=300)
        assert (await reader.ask(prompt)).tokens == truth.tokens
        assert (await writer.ask(prompt, saves=True)).tokens == truth.tokens


# ── a link driven by hand, on a thread, as by an engine ───────────────────────────────────────────


async def save(link: AnyLink, blocks: Sequence[tuple[BlockHash, int, int]], num_layers: int = 4) -> int:
    """How many of ``blocks`` were stored; with fewer layers than there are, the save is aborted."""

    def engine() -> int:
        begun = link.start_save(blocks)
        for layer in range(num_layers):
            link.save_layer(begun, layer)
        if num_layers == LAYOUT.num_layers:
            link.finish_save(begun)
        else:
            link.abort_save(begun)
        wait_for(lambda: begun.done, "the save to be done", LONGEST_S)
        return int(begun.num_stored_blocks)

    return await asyncio.to_thread(engine)


async def look_up(link: AnyLink, blocks: Sequence[tuple[BlockHash, int]]) -> KvLookup:
    def engine() -> KvLookup:
        lookup: KvLookup = link.lookup(blocks)
        wait_for(lambda: lookup.done, "the lookup to be done", LONGEST_S)
        return lookup

    return await asyncio.to_thread(engine)


async def load(link: AnyLink, lookup: KvLookup, block_ids: Sequence[int]) -> None:
    def engine() -> None:
        begun = link.start_load(lookup, block_ids)
        for layer in range(LAYOUT.num_layers):
            link.wait_layer([begun], layer)
        wait_for(lambda: begun.done, "the load to be done", LONGEST_S)
        assert not begun.failed

    await asyncio.to_thread(engine)
