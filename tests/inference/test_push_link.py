# SPDX-License-Identifier: Apache-2.0
"""Prefill engines that push their KV to decode engines: the answers equal transformers', whatever fails."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch

from mooncake.connectors.kv_link import PushSource
from mooncake.inference.engine import Engine, EngineThread, InferenceSettings, Output
from mooncake.inference.push_link import PushLink, push_transfer, registered_pool
from mooncake.inference.request import FinishReason, Request
from mooncake.inference.runner import TorchRunner
from mooncake.inference.weights import load_model
from mooncake.kvlayout import KvIdentity
from mooncake.transfer import TransferEngine, TransferSettings
from tests.inference.conftest import Reference, prompt_of
from tests.inference.dictionary_link import DictionaryLink, DictionaryLoad, DictionaryLookup, Objects
from tests.inference.test_engine import BLOCK, LENGTHS, NUM_TOKENS, greedy

TIMEOUT_S = 60.0
_numbers = itertools.count()


class Loop:
    """An asyncio loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class WholeLink(DictionaryLink):
    """A cache whose loads arrive without a step that waits for them: requests here are not alone."""

    def start_load(self, lookup: DictionaryLookup, block_ids: Sequence[int]) -> DictionaryLoad:
        load = super().start_load(lookup, block_ids)
        while not load.done:
            self.load_layer(load)
        return load


class FragileRunner(TorchRunner):
    """A runner whose steps call ``before_layer`` before each layer; it may raise."""

    before_layer: Callable[[int], None] = staticmethod(lambda layer: None)

    def _logits(self, chunks: Any, loads: Any, saves: Any) -> torch.Tensor:
        link, before_layer = self._link, self.before_layer

        class Watched:
            def wait_layer(self, loads: Any, layer: int) -> None:
                assert link is not None
                link.wait_layer(loads, layer)

            def save_layer(self, save: Any, layer: int) -> None:
                before_layer(layer)
                assert link is not None
                link.save_layer(save, layer)

        self._link = Watched()  # type: ignore[assignment]
        try:
            return super()._logits(chunks, loads, saves)
        finally:
            self._link = link


class Worker:
    """An engine on its thread, with a cache outside and a push link."""

    def __init__(
        self, reference: Reference, loop: Loop, objects: Objects, max_batch_tokens: int = 512
    ) -> None:
        model = load_model(reference.folder)
        layout = model.config.kv_layout(model.dtype, BLOCK)
        self.loop, self.cache = loop, WholeLink(objects)
        self.transfer = TransferEngine(TransferSettings(listen_host="127.0.0.1"))
        region, self.pool = registered_pool(self.transfer, layout, 64 * layout.pool_bytes(1))
        self.pool.fill_(torch.nan)
        self.cache.pool = self.pool
        identity = KvIdentity("weights", "tokenizer", layout)
        self.link = PushLink(self.cache, self.transfer, identity, self.pool, region, loop.loop)
        loop.wait(self.link.start("127.0.0.1", 0))
        self.runner = FragileRunner(model, self.pool, self.link)
        settings = InferenceSettings(max_batch_tokens=max_batch_tokens, max_running=1, max_waiting=64)
        self.engine = Engine(settings, self.runner, self.link, pushing=self.link)
        self.outputs: dict[str, list[Output]] = {}
        self.leaves_after = {}
        self._changed = threading.Condition()
        self._thread = EngineThread(self.engine, self._on_step)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.link.sender.port}"

    leaves_after: dict[str, int]
    """Number of tokens after which a request leaves, by its id, which is the name of the transfer, too."""

    def _on_step(self, outputs: list[Output], events: Any) -> None:
        with self._changed:
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
                if len(self.outputs[output.request_id]) == self.leaves_after.get(output.request_id):
                    self.engine.hand_over(output.request_id, output.request_id)
            self._changed.notify_all()

    def answer(self, request_id: str) -> tuple[list[int], Output]:
        """The tokens and the last output of a request, when it has ended."""

        def has_ended() -> bool:
            return self.outputs.get(request_id, [])[-1:] != [] and (
                self.outputs[request_id][-1].finish_reason is not None
            )

        with self._changed:
            assert self._changed.wait_for(has_ended, TIMEOUT_S), self.engine.scheduler.story(request_id)
        outputs = self.outputs[request_id]
        return [token for output in outputs for token in output.token_ids], outputs[-1]

    def close(self) -> None:
        """Stop; every block is free afterwards."""
        self.loop.wait(self._end_holds())
        assert self._thread.stop(TIMEOUT_S)
        self.engine.check()
        assert self.engine.stats().num_free_blocks == self.engine.stats().num_blocks
        self.loop.wait(self.link.close())
        self.transfer.close()

    async def _end_holds(self) -> None:
        """Do at once what happens after ``HOLD_S``: blocks that no receiver has requested are free.

        How long they are held is a matter of ``tests/connectors/test_layer_push.py``.
        """
        sender = self.link.sender
        for one in list(sender._outgoing.values()):
            sender._expire(one)


class Cluster:
    """Workers that share a cache, and are closed at the end."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.objects: Objects = {}
        self.workers: list[Worker] = []

    def worker(self, reference: Reference, **settings: Any) -> Worker:
        self.workers.append(Worker(reference, self.loop, self.objects, **settings))
        return self.workers[-1]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.loop.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def pair(
    prefill: Worker, prompt: list[int], num_tokens: int = NUM_TOKENS, **more: Any
) -> tuple[Request, Request]:
    """Requests for prefill and decode whose KV is pushed."""
    name = f"r{next(_numbers)}"
    source = PushSource(name, prefill.address)
    computed = greedy(prompt, 1, f"{name}-prefill", save_tail=True, push_id=name)
    return computed, greedy(prompt, num_tokens, f"{name}-decode", push_source=source, **more)


def served(prefill: Worker, decode: Worker, computed: Request, decoded: Request) -> list[int]:
    """Both requests at once; the tokens of decode's answer."""
    assert decode.engine.add(decoded) is None and prefill.engine.add(computed) is None
    prefill.answer(computed.id)
    tokens, last = decode.answer(decoded.id)
    assert last.finish_reason == FinishReason.LENGTH
    return tokens


@pytest.mark.parametrize("length", LENGTHS)
def test_pushed_answers_equal_transformers(cluster: Cluster, reference: Reference, length: int) -> None:
    prompt = prompt_of(length)
    prefill, decode = cluster.worker(reference), cluster.worker(reference)
    computed, decoded = pair(prefill, prompt)
    assert served(prefill, decode, computed, decoded) == reference.greedy(prompt, NUM_TOKENS)
    assert not decode.cache.lookups, "everything was pushed"
    assert decode.outputs[decoded.id][-1].num_external_cached == length
    assert len(cluster.objects) == -(-length // BLOCK) + (length + NUM_TOKENS - 1) // BLOCK - length // BLOCK


@pytest.mark.parametrize("budget", [1, 7, BLOCK, 2 * BLOCK + 3])
def test_a_prompt_in_chunks(cluster: Cluster, llama: Reference, budget: int) -> None:
    prompt = prompt_of(4 * BLOCK + 5)
    prefill, decode = cluster.worker(llama, max_batch_tokens=budget), cluster.worker(llama)
    assert served(prefill, decode, *pair(prefill, prompt)) == llama.greedy(prompt, NUM_TOKENS)
    assert not decode.cache.lookups


def test_prefixes_that_either_side_has(cluster: Cluster, llama: Reference) -> None:
    prompt = prompt_of(4 * BLOCK + 5)
    first, second, decode = (cluster.worker(llama) for _ in range(3))
    stem = prompt[: 2 * BLOCK]
    assert served(first, decode, *pair(first, stem)) == llama.greedy(stem, NUM_TOKENS)
    expected = llama.greedy(prompt, NUM_TOKENS)
    assert served(first, decode, *pair(first, prompt)) == expected, "prefill and decode have two blocks"
    third = cluster.worker(llama)
    assert served(second, third, *pair(second, prompt)) == expected, "prefill loads all from the cache"
    assert second.cache.loads and not third.cache.lookups
    whole = prompt[: 4 * BLOCK]
    assert served(second, third, *pair(second, whole)) == llama.greedy(whole, NUM_TOKENS)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_prefill_step_that_fails_in_the_middle(cluster: Cluster, llama: Reference, layer: int) -> None:
    """Decode looks in the cache, which has the first chunk, and computes the rest."""
    prompt = prompt_of(3 * BLOCK + 5)
    prefill, decode = cluster.worker(llama, max_batch_tokens=2 * BLOCK), cluster.worker(llama)
    num_steps = itertools.count()

    def before_layer(number: int) -> None:
        # Every layer of a step is passed to its push and to its save.
        if number == layer and next(num_steps) >= 2:
            raise RuntimeError("the device is gone")

    prefill.runner.before_layer = before_layer
    computed, decoded = pair(prefill, prompt)
    assert decode.engine.add(decoded) is None and prefill.engine.add(computed) is None
    assert prefill.answer(computed.id)[1].finish_reason == FinishReason.ERROR
    assert decode.answer(decoded.id)[0] == llama.greedy(prompt, NUM_TOKENS)
    assert decode.cache.lookups
    assert any("push failed" in line for line in decode.engine.scheduler.story(decoded.id))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_prefill_worker_that_is_lost_in_the_middle(cluster: Cluster, llama: Reference, layer: int) -> None:
    prompt = prompt_of(3 * BLOCK + 5)
    prefill, decode = cluster.worker(llama), cluster.worker(llama)
    is_lost = threading.Event()

    def before_layer(number: int) -> None:
        if number == layer and not is_lost.is_set():
            is_lost.set()
            cluster.loop.wait(prefill.link.sender._server.close())

    prefill.runner.before_layer = before_layer
    computed, decoded = pair(prefill, prompt)
    assert served(prefill, decode, computed, decoded) == llama.greedy(prompt, NUM_TOKENS)
    assert is_lost.is_set() and decode.cache.lookups
    # The memory was revoked, and is used again by the next push.
    other = cluster.worker(llama)
    longer = [*prompt, *prompt_of(BLOCK, 7)]
    assert served(other, decode, *pair(other, longer)) == llama.greedy(longer, NUM_TOKENS)


def test_a_prefill_whose_own_load_fails_pushes_nothing_of_it(cluster: Cluster, llama: Reference) -> None:
    prompt = prompt_of(3 * BLOCK + 5)
    first, second, decode = (cluster.worker(llama) for _ in range(3))
    assert first.engine.add(greedy(prompt, 1, "stored", save_tail=True)) is None
    first.answer("stored")
    second.cache.fail_at_layer = 1
    expected = llama.greedy(prompt, NUM_TOKENS)
    assert served(second, decode, *pair(second, prompt)) == expected
    assert second.cache.loads


def test_an_address_where_nothing_listens(cluster: Cluster, llama: Reference) -> None:
    prompt = prompt_of(2 * BLOCK + 5)
    decode = cluster.worker(llama)
    source = PushSource("one", "127.0.0.1:1")
    assert decode.engine.add(greedy(prompt, NUM_TOKENS, push_source=source)) is None
    assert decode.answer("r")[0] == llama.greedy(prompt, NUM_TOKENS)


def test_a_push_that_can_not_be_received_is_looked_up(
    cluster: Cluster, llama: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither this request nor others end for it: the cache has the same blocks."""
    prompt, other = prompt_of(2 * BLOCK + 5), prompt_of(20, 7)
    prefill, decode = cluster.worker(llama), cluster.worker(llama)
    computed, decoded = pair(prefill, prompt)
    assert prefill.engine.add(computed) is None
    prefill.answer(computed.id)

    def broken(*arguments: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(decode.link, "start_receive", broken)
    assert decode.engine.add(greedy(other, NUM_TOKENS, "other")) is None
    assert decode.engine.add(decoded) is None
    assert decode.answer(decoded.id)[0] == llama.greedy(prompt, NUM_TOKENS)
    assert decode.answer("other")[0] == llama.greedy(other, NUM_TOKENS)
    first = decode.outputs[decoded.id][0]
    assert first.num_external_cached == len(prompt) and not first.was_pushed
    assert decode.engine.stats().num_failed_loads == 1


def test_a_decode_request_that_is_aborted_leaves_nothing_behind(cluster: Cluster, llama: Reference) -> None:
    prompt = prompt_of(3 * BLOCK)
    prefill, decode = cluster.worker(llama), cluster.worker(llama)
    computed, decoded = pair(prefill, prompt)
    may_go_on = threading.Event()

    def before_layer(layer: int) -> None:
        if layer == 2:
            assert may_go_on.wait(TIMEOUT_S)

    prefill.runner.before_layer = before_layer
    assert decode.engine.add(decoded) is None and prefill.engine.add(computed) is None
    decode.engine.abort(decoded.id)
    may_go_on.set()
    assert decode.answer(decoded.id)[1].finish_reason == FinishReason.ABORT
    prefill.answer(computed.id)
    assert served(prefill, decode, *pair(prefill, prompt)) == llama.greedy(prompt, NUM_TOKENS)


def moved(source: Worker, target: Worker, prompt: list[int], num_before: int) -> tuple[list[int], Request]:
    """An answer that leaves ``source`` after ``num_before`` tokens, and its request at ``target``."""
    name = f"m{next(_numbers)}"
    source.leaves_after[name] = num_before
    assert source.engine.add(greedy(prompt, NUM_TOKENS, name)) is None
    begun, last = source.answer(name)
    assert last.finish_reason == FinishReason.MOVED and len(begun) == num_before
    rest = greedy(
        prompt + begun,
        NUM_TOKENS,
        f"{name}-rest",
        num_prior_output_tokens=num_before,
        push_source=PushSource(name, source.address),
    )
    assert target.engine.add(rest) is None
    tokens, last = target.answer(rest.id)
    assert last.finish_reason == FinishReason.LENGTH
    return begun + tokens, rest


@pytest.mark.parametrize("num_before", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("length", [1, BLOCK - 2, 2 * BLOCK, 2 * BLOCK + 3])
def test_a_moved_answer_is_not_recomputed(
    cluster: Cluster, llama: Reference, length: int, num_before: int
) -> None:
    prompt, num_before = prompt_of(length), min(num_before, NUM_TOKENS - 1)
    source, target = cluster.worker(llama), cluster.worker(llama)
    tokens, rest = moved(source, target, prompt, num_before)
    assert tokens == llama.greedy(prompt, NUM_TOKENS)
    first = target.outputs[rest.id][0]
    assert first.was_pushed and first.num_external_cached == length + num_before
    assert not target.cache.lookups and target.engine.stats().num_prefill_tokens == 1
    back, _ = moved(source, target, prompt, num_before)
    assert back == tokens, "again, with blocks that both have"


def test_a_moved_answer_whose_push_fails_comes_from_the_cache(cluster: Cluster, llama: Reference) -> None:
    prompt = prompt_of(2 * BLOCK + 3)
    source, target, other = (cluster.worker(llama) for _ in range(3))
    cluster.loop.wait(source.link.sender._server.close())
    tokens, rest = moved(source, target, prompt, 4)
    assert tokens == llama.greedy(prompt, NUM_TOKENS)
    first = target.outputs[rest.id][0]
    assert not first.was_pushed and first.num_external_cached == 2 * BLOCK
    cluster.objects.clear()
    tokens, rest = moved(source, other, prompt, 4)
    assert tokens == llama.greedy(prompt, NUM_TOKENS) and not other.outputs[rest.id][0].num_external_cached


def test_a_request_that_waits_leaves_at_once(cluster: Cluster, llama: Reference) -> None:
    """The workers compute one request at a time. The one behind leaves before the first has ended."""
    worker = cluster.worker(llama)
    assert worker.engine.add(greedy(prompt_of(5), 40, "long")) is None
    assert worker.engine.add(greedy(prompt_of(BLOCK), 4, "behind")) is None
    worker.engine.hand_over("behind", "t")
    worker.engine.hand_over("unknown", "u")
    assert worker.answer("behind") == ([], worker.outputs["behind"][0])
    assert worker.outputs["behind"][0].finish_reason == FinishReason.MOVED
    assert len(worker.answer("long")[0]) == 40


@pytest.mark.parametrize("seed", range(4))
def test_many_pushes_at_random_with_failures(cluster: Cluster, llama: Reference, seed: int) -> None:
    """Prompts with common beginnings, some of whose steps fail: every answer is right."""
    random = Random(seed)
    budget = random.choice((2 * BLOCK, 512))
    prefills = [cluster.worker(llama, max_batch_tokens=budget) for _ in range(2)]
    decode = cluster.worker(llama)

    def before_layer(layer: int) -> None:
        if random.random() < 0.02:
            raise RuntimeError("planted")

    for prefill in prefills:
        prefill.runner.before_layer = before_layer
    asked = []
    for number in range(12):
        prompt = prompt_of(random.randint(1, 5 * BLOCK), random.randrange(3))
        prefill = random.choice(prefills)
        computed, decoded = pair(prefill, prompt, 6)
        assert decode.engine.add(decoded) is None and prefill.engine.add(computed) is None
        asked.append((prompt, decoded))
        if number % 3 == 2:
            decode.answer(decoded.id)
    for prompt, decoded in asked:
        tokens, last = decode.answer(decoded.id)
        assert last.finish_reason == FinishReason.LENGTH, (seed, last)
        assert tokens == llama.greedy(prompt, 6), (seed, decode.engine.scheduler.story(decoded.id))


@pytest.mark.parametrize("transports", [TransferSettings.transports, ("shm", "rdma", "tcp"), ("shm",)])
async def test_pushes_use_no_memory_that_both_processes_map(transports: tuple[str, ...]) -> None:
    """A process that maps the receiver's memory could be stopped in the midst of a copy, and go on later."""
    settings = TransferSettings(listen_host="127.0.0.1", transports=transports)
    async with push_transfer(settings) as transfer:
        endpoints = transfer.describe().endpoints.keys()
        assert "tcp" in endpoints and endpoints <= {"rdma", "tcp"}
