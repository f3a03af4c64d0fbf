# SPDX-License-Identifier: Apache-2.0
"""Groups of any size and single workers share blocks in the store; damage costs a recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from mooncake.inference.request import Request
from mooncake.inference.weights import read_config
from mooncake.kvlayout import KvIdentity, KvLayout
from tests.contract.connectors import StoreConnector
from tests.inference.conftest import Reference, prompt_of
from tests.inference.groups import BLOCK, LiveEngine, running_group, running_worker
from tests.inference.test_engine import NUM_TOKENS, greedy

pytestmark = [pytest.mark.processes]

identities = (f"weights {number}" for number in itertools.count())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreConnector]:
    running = StoreConnector()
    running.start(tmp_path_factory.mktemp("store"))
    yield running
    running.stop()


def prefill(prompt: list[int], name: str = "prefill") -> Request:
    return greedy(prompt, 1, name=name, save_tail=True)


async def cached(engine: LiveEngine, reference: Reference, prompt: list[int]) -> int:
    """Answer ``prompt``; the number of tokens that came from the store."""
    answer = await engine.ask(greedy(prompt, name=f"r{len(prompt)}"))
    assert answer.tokens == reference.greedy(prompt, NUM_TOKENS)
    return answer.last.num_external_cached


@pytest.mark.parametrize("is_staged", [False, True])
async def test_what_a_group_saves_others_load(
    llama: Reference, store: StoreConnector, is_staged: bool
) -> None:
    prompt, identity = prompt_of(10 * BLOCK + 5), next(identities)
    async with running_group(llama, 2, store=store, identity=identity, is_staged=is_staged) as group:
        answer = await group.ask(prefill(prompt))
        assert answer.tokens == llama.greedy(prompt, 1)
        assert answer.last.num_stored_tokens == len(prompt)
    async with running_worker(llama, store, identity) as worker:
        assert await cached(worker, llama, prompt) == len(prompt)
    async with running_group(llama, 3, store=store, identity=identity, is_staged=is_staged) as group:
        assert await cached(group, llama, prompt) == len(prompt)
        longer = prompt[: 10 * BLOCK] + prompt_of(70, 3)
        assert await cached(group, llama, longer) == 0  # these are in its own memory by now
    async with running_group(llama, 2, store=store, identity=identity, is_staged=is_staged) as group:
        assert await cached(group, llama, longer) == 10 * BLOCK + 64


async def test_what_a_worker_saves_a_group_loads(llama: Reference, store: StoreConnector) -> None:
    prompt, identity = prompt_of(6 * BLOCK + 1), next(identities)
    async with running_worker(llama, store, identity) as worker:
        assert (await worker.ask(prefill(prompt))).last.num_stored_tokens == len(prompt)
    for num_stages in (2, 3):
        async with running_group(llama, num_stages, store=store, identity=identity) as group:
            assert await cached(group, llama, prompt) == len(prompt)


@pytest.mark.parametrize("layer", [0, 1, 2])
async def test_a_flipped_bit_in_any_stage_is_recomputed(
    llama: Reference, store: StoreConnector, layer: int
) -> None:
    prompt, identity = prompt_of(4 * BLOCK), next(identities)
    async with running_group(llama, 3, store=store, identity=identity) as group:
        await group.ask(prefill(prompt))
    layout = layout_of(llama)
    hashes = prefill(prompt).hash_blocks(BLOCK)
    offset = layout.object_offsets(layer, BLOCK)[1] + 3
    await store.spoil(KvIdentity(identity, "t", layout), hashes[1], offset)
    async with running_group(llama, 3, store=store, identity=identity) as group:
        assert await cached(group, llama, prompt) == 0
        assert group.engine.stats().num_failed_loads == 1


async def test_a_small_pool_of_blocks_is_used_again_and_again(
    llama: Reference, store: StoreConnector
) -> None:
    """Blocks pass from chunks to loads and saves while stages are behind: nothing is overwritten."""
    identity = next(identities)
    prompts = [prompt_of(5 * BLOCK + n, n) for n in range(8)]
    for num_stages in (3, 2):
        async with running_group(llama, num_stages, store=store, identity=identity, num_blocks=24) as group:
            waiting = []
            for turn in range(2):
                for number, prompt in enumerate(prompts):
                    name = f"{num_stages} {turn} {number}"
                    waiting.append((prompt, group.add(greedy(prompt, 6, name=name))))
            for prompt, answer in waiting:
                assert (await answer).tokens == llama.greedy(prompt, 6)


def layout_of(reference: Reference) -> KvLayout:
    import torch

    return read_config(reference.folder).kv_layout(torch.float32, BLOCK)
