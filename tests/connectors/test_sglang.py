# SPDX-License-Identifier: Apache-2.0
"""The store behind SGLang, called as SGLang calls it, on doubles of its pools.

With SGLang's own modules: ``tests/upstream_clients/test_real_clients.py``, which needs them.
"""

from __future__ import annotations

import hashlib
import signal
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncake.connectors.sglang import MooncakeHiCache, server_start, usable_prefixes
from tests.connectors.sglang_pools import MhaPool, MlaPool, storage_config, tokens_of
from tests.contract.connectors import StoreConnector

pytestmark = pytest.mark.processes


@pytest.fixture
def weights(request: pytest.FixtureRequest) -> str:
    """A model of its own for each test, so that they share a daemon without sharing pages."""
    return str(request.node.name)


class Engines:
    """Backends as SGLang makes them, closed at the end."""

    def __init__(self, address: str, weights: str, lookup_timeout_s: float = 20.0) -> None:
        self._extra = {"mooncake_store_addr": address, "weights_digest": weights, "interface_v1": 1}
        self._extra |= {"lookup_timeout_s": lookup_timeout_s, "load_timeout_s": 20.0}
        self._open: list[MooncakeHiCache] = []

    def start(self, pool: Any, extra: dict[str, Any] | None = None, **changes: Any) -> MooncakeHiCache:
        options = {**self._extra, **(extra or {})}
        backend = MooncakeHiCache(storage_config(extra_config=options, **changes), {})
        self._open.append(backend)
        backend.register_mem_pool_host(pool)
        return backend

    def close(self) -> None:
        for backend in self._open:
            backend.close()


@pytest.fixture
def engines(daemon: StoreConnector, weights: str) -> Iterator[Engines]:
    running = Engines(daemon.address, weights)
    yield running
    running.close()


def hashes(count: int) -> list[str]:
    return [hashlib.sha256(bytes([number])).hexdigest() for number in range(count)]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (MhaPool, "layer_first"),
        (MhaPool, "page_first"),
        (MhaPool, "page_head"),
        (MlaPool, "layer_first"),
        (MlaPool, "page_first"),
    ],
)
def test_pages_come_back_in_other_places(engines: Engines, layout: str, kind: Any) -> None:
    is_mla = kind is MlaPool
    ours, theirs = kind(layout, 1), kind(layout, 2)
    writer = engines.start(ours, is_mla_model=is_mla)
    reader = engines.start(theirs, is_mla_model=is_mla)
    keys, untouched = hashes(3), theirs.page(4)
    assert writer.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys[:2], tokens_of([5, 1])) == [True, True]
    assert writer.batch_set_v1(keys[:2], tokens_of([5, 1])) == [True, True], "it has them already"
    assert reader.batch_exists(keys) == 2
    assert reader.batch_get_v1(keys, tokens_of([0, 7, 3])) == [True, True, False]
    assert torch.equal(theirs.page(0), ours.page(5))
    assert torch.equal(theirs.page(7), ours.page(1))
    assert torch.equal(theirs.page(4), untouched)


def test_pages_are_moved_in_copies_too(engines: Engines) -> None:
    """Without ``interface_v1`` SGLang copies each page into a tensor, and out of one."""
    ours = MhaPool("layer_first", 1)
    copies, in_place = {"interface_v1": 0}, {"interface_v1": 1}
    writer, reader = engines.start(ours, copies), engines.start(MhaPool("layer_first", 2), copies)
    keys = hashes(3)
    assert writer.batch_set(keys[:2], [ours.get_data_page(0), ours.get_data_page(8)])
    assert writer.set(keys[2], ours.get_data_page(4))
    assert reader.exists(keys[1])
    targets = [ours.get_dummy_flat_data_page() for _ in range(4)]
    found = reader.batch_get([*keys, "none"], targets)
    assert [page is not None for page in found] == [True, True, True, False]
    assert torch.equal(targets[1], ours.get_data_page(8))
    single = reader.get(keys[2], ours.get_dummy_flat_data_page())
    assert single is not None and torch.equal(single, ours.get_data_page(4))
    # A page's copy has another order than the page in place.
    assert engines.start(MhaPool("layer_first", 3), in_place).batch_exists(keys) == 0


@pytest.mark.parametrize(
    ("pool", "changes"),
    [
        (MhaPool("page_first", 2, tokens=8), {}),
        (MhaPool("layer_first", 2), {}),
        (MhaPool("page_first", 2, dtype=torch.float16), {}),
        (MlaPool("page_first", 2), {"is_mla_model": True}),
        (MhaPool("page_first", 2), {"tp_rank": 1, "tp_size": 2}),
        (MhaPool("page_first", 2), {"pp_rank": 1, "pp_size": 2}),
        (MhaPool("page_first", 2), {"extra": {"weights_digest": "others"}}),
        (MhaPool("page_first", 2), {"extra": {"extra_backend_tag": "experiment"}}),
        (MhaPool("page_first", 2), {"extra": {"tenant_id": "others"}}),
    ],
    ids=["page size", "layout", "dtype", "kind", "heads", "stage", "weights", "tag", "tenant"],
)
def test_pages_of_another_identity_are_not_found(
    engines: Engines, pool: Any, changes: dict[str, Any]
) -> None:
    keys = hashes(2)
    assert all(engines.start(MhaPool("page_first", 1)).batch_set_v1(keys, tokens_of([0, 1])))
    other, before = engines.start(pool, **changes), pool.kv_buffer.clone()
    assert other.batch_exists(keys) == 0
    assert other.batch_get_v1(keys, tokens_of([0, 1], pool.page_size)) == [False, False]
    assert torch.equal(pool.kv_buffer, before)


def test_pages_of_unknown_weights_are_not_shared(daemon: StoreConnector, weights: str) -> None:
    engines, keys = Engines(daemon.address, ""), hashes(1)
    try:
        assert all(engines.start(MhaPool("page_first", 1)).batch_set_v1(keys, tokens_of([0])))
        assert engines.start(MhaPool("page_first", 1)).batch_exists(keys) == 0
    finally:
        engines.close()


def test_latents_are_one_for_all_ranks_and_states_are_not(engines: Engines) -> None:
    keys, states = hashes(2), MhaPool("page_first", 5)
    first = engines.start(MlaPool("page_first", 1), is_mla_model=True, tp_rank=0, tp_size=2)
    second = engines.start(MlaPool("page_first", 2), is_mla_model=True, tp_rank=1, tp_size=2)
    first.register_mem_host_pool_v2(states, "mamba")
    second.register_mem_host_pool_v2(states, "mamba")
    assert all(first.batch_set_v1(keys, tokens_of([0, 1])))
    assert second.batch_exists(keys) == 2
    transfer = Transfer("mamba", keys, tokens_of([0, 1]))
    assert first.batch_set_v2([transfer]) == {"mamba": [True, True]}
    assert first.batch_get_v2([transfer]) == {"mamba": [True, True]}
    assert second.batch_get_v2([transfer]) == {"mamba": [False, False]}


def test_ranks_of_other_sizes_share_heads(engines: Engines) -> None:
    """With ``tp_lcm_size`` a page is an object for each group of heads: one rank writes, two read."""
    whole, split = MhaPool("page_head", 1), dict[str, Any](tp_lcm_size=2)
    writer = engines.start(whole, tp_size=1, should_split_heads=True, **split)
    keys = hashes(2)
    assert writer.batch_set_v1(keys, tokens_of([2, 6])) == [True, True]
    assert writer.batch_exists(keys) == 2
    mine = MhaPool("page_head", 2)
    same = engines.start(mine, tp_size=1, should_split_heads=True, **split)
    assert same.batch_get_v1(keys, tokens_of([0, 1])) == [True, True]
    assert torch.equal(mine.page(1), whole.page(6))
    half = MhaPool("page_head", 3, heads=1)
    second = engines.start(half, tp_rank=1, tp_size=2, **split)
    assert second.batch_get_v1(keys, tokens_of([0, 1])) == [True, True]
    assert torch.equal(half.page(1), whole.page(6)[:, 1:])


class Transfer:
    """SGLang's ``PoolTransfer``."""

    def __init__(self, name: str, keys: list[str], host_indices: torch.Tensor) -> None:
        self.name, self.keys, self.host_indices = name, keys, host_indices


def test_pages_of_several_pools(engines: Engines) -> None:
    pool, side = MhaPool("page_first", 1), MhaPool("layer_first", 2)
    backend = engines.start(pool)
    backend.register_mem_host_pool_v2(side, "indexer")
    keys, was = hashes(2), side.page(3)
    assert backend.batch_set_v2([Transfer("indexer", keys, tokens_of([3, 4]))]) == {"indexer": [True, True]}
    side.kv_buffer.zero_()
    found = backend.batch_get_v2([Transfer("indexer", [*keys, "none"], tokens_of([5, 6, 7]))])
    assert found == {"indexer": [True, True, False]}
    assert torch.equal(side.page(5), was)
    assert backend.batch_exists(keys) == 0, "the other pool's pages do not count"


@pytest.mark.parametrize(
    ("flags", "policy", "trailing", "ends"),
    [
        ([True, True, False, True], "all_pages", 0, [1, 2]),
        ([False, True, True, True], "trailing_pages", 2, [3, 4]),
        ([True, False, True], "trailing_pages", 1, [1, 3]),
        ([True], "block_groups", 1, None),
    ],
)
def test_prefixes_that_a_pool_can_end(
    flags: list[bool], policy: str, trailing: int, ends: list[int] | None
) -> None:
    assert usable_prefixes(flags, policy, trailing) == ends


async def test_a_corrupted_page_is_a_miss(daemon: StoreConnector, engines: Engines) -> None:
    backend, keys = engines.start(MhaPool("layer_first", 1)), hashes(3)
    assert all(backend.batch_set_v1(keys, tokens_of([0, 1, 2])))
    (digest,) = backend._pools["kv"].digests
    await daemon.spoil(Named(digest), bytes.fromhex(keys[1]), 1000)
    assert backend.batch_get_v1(keys, tokens_of([3, 4, 5])) == [True, False, True]


class Named:
    """An identity that consists of a digest."""

    def __init__(self, digest: str) -> None:
        self._digest = digest

    layout: Any = None

    def key(self, block_hash: bytes) -> str:
        return f"kv/{self._digest}/{block_hash.hex()}"


def test_clearing_leaves_what_others_have(engines: Engines) -> None:
    keys = hashes(1)
    mine, other = engines.start(MhaPool("page_first", 1)), engines.start(MhaPool("layer_first", 1))
    assert all(mine.batch_set_v1(keys, tokens_of([0])) + other.batch_set_v1(keys, tokens_of([0])))
    mine.clear()
    assert (mine.batch_exists(keys), other.batch_exists(keys)) == (0, 1)


def test_pages_that_another_server_saves_after_clearing_are_not_found(engines: Engines) -> None:
    """The other one still has the weights that were replaced here."""
    keys = hashes(2)
    updated, behind = engines.start(MhaPool("page_first", 1)), engines.start(MhaPool("page_first", 2))
    updated.clear()
    assert all(behind.batch_set_v1(keys, tokens_of([0, 1])))
    assert (updated.batch_exists(keys), behind.batch_exists(keys)) == (0, 2)
    assert updated.batch_get_v1(keys, tokens_of([0, 1])) == [False, False]
    assert all(updated.batch_set_v1(keys[:1], tokens_of([3])))
    assert (updated.batch_exists(keys), behind.batch_exists(keys)) == (1, 2)
    updated.clear()
    assert (updated.batch_exists(keys), behind.batch_exists(keys)) == (0, 2)


def test_a_backend_that_is_attached_again_does_not_find_pages_from_before_clearing(engines: Engines) -> None:
    keys, pool = hashes(1), MhaPool("page_first", 1)
    first, behind = engines.start(pool), engines.start(pool)
    first.clear()
    assert all(behind.batch_set_v1(keys, tokens_of([0])))
    again = engines.start(pool)
    assert again.batch_exists(keys) == 0
    assert all(again.batch_set_v1(keys, tokens_of([0])))
    assert first.batch_exists(keys) == 1
    assert engines.start(pool, {"extra_backend_tag": "new weights"}).batch_exists(keys) == 0


def test_ranks_share_latents_after_clearing_too(engines: Engines) -> None:
    """One rank writes them, so all ranks have to move to the same identity."""
    keys, extra = hashes(1), dict[str, Any](is_mla_model=True, tp_size=2)
    first, second = (engines.start(MlaPool("page_first", rank), tp_rank=rank, **extra) for rank in range(2))
    for rank in (first, second):
        rank.clear()
    assert all(first.batch_set_v1(keys, tokens_of([0])))
    assert second.batch_exists(keys) == 1
    second.clear()
    assert second.batch_exists(keys) == 0


@pytest.fixture
def no_start() -> Iterator[None]:
    server_start.cache_clear()
    yield
    server_start.cache_clear()


def test_ranks_of_a_server_have_one_name_of_its_start(no_start: None) -> None:
    names = []
    distributed: Any = torch.distributed
    for store in (ranks := distributed.HashStore(), ranks, distributed.HashStore()):
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            names.append(server_start())
        finally:
            torch.distributed.destroy_process_group()
        server_start.cache_clear()  # the next one is another process
    first, same, other = names
    assert first == same != other and first and other


def test_a_process_without_a_process_group_has_a_start_of_its_own(no_start: None) -> None:
    names = [server_start(), server_start()]
    server_start.cache_clear()
    assert names[0] == names[1] != server_start()


@pytest.mark.parametrize(
    ("name", "num_target_layers", "is_separate"),
    [("draft", 3, True), ("draft_swa", 3, True), ("indexer", 2, True), ("indexer", 3, False)],
)
def test_pools_with_kv_of_another_draft_model_are_separate(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    num_target_layers: int,
    is_separate: bool,
) -> None:
    """SGLang keeps it in pools of its own, or as further layers in those of the model."""

    def start(draft: str) -> MooncakeHiCache:
        arguments = types.SimpleNamespace(speculative_draft_model_path=draft)
        monkeypatch.setattr("mooncake.connectors.sglang.sglang_arguments", lambda: arguments)
        pool, side = MhaPool("page_first", 1), MhaPool("page_first", 2)
        for each, count in ((pool, pool.layer_num), (side, num_target_layers)):
            each.target_layer_num = count  # type: ignore[attr-defined]
        backend = engines.start(pool)
        backend.register_mem_host_pool_v2(side, name)
        return backend

    one, same, other = (start(draft)._pools for draft in ("a", "a", "b"))
    assert one[name].digests == same[name].digests
    assert (one[name].digests != other[name].digests) is is_separate
    assert one["kv"].digests == other["kv"].digests, "the model's own pages are shared"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_daemon_everything_is_a_miss(tmp_path: Path, weights: str, number: int) -> None:
    daemon = StoreConnector()
    daemon.start(tmp_path)
    engines = Engines(daemon.address, weights, lookup_timeout_s=5.0)
    pool, keys = MhaPool("page_first", 1), hashes(2)
    try:
        backend = engines.start(pool)
        assert all(backend.batch_set_v1(keys, tokens_of([0, 1])))
        daemon.signal(number)
        before = pool.kv_buffer.clone()
        assert backend.batch_get_v1(keys, tokens_of([2, 3])) == [False, False]
        assert backend.batch_exists(keys) == 0
        assert backend.batch_set_v1(hashes(4)[2:], tokens_of([0, 1])) == [False, False]
        backend.clear()
        backend.close()
        assert backend.batch_exists(keys) == 0, "after close, too, it is a miss"
        assert torch.equal(pool.kv_buffer, before)
    finally:
        daemon.stop()
        engines.close()
