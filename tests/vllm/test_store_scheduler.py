# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of ``MooncakeStoreConnector``: which blocks it saves, and when. No engine runs."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest

from mooncake.connectors.planner import SavePlan
from tests.vllm.test_push_scheduler import BLOCK_TOKENS, CountedBlocks

HASHES = [bytes([index]) * 32 for index in range(6)]
IDS = [1, 2, 3, 4, 5, 6]


class NoStore:
    """A session whose store is never asked: every lookup finds nothing."""

    def start(self, work: Any) -> None:
        work.close()


class CountedHashes(list[bytes]):
    """Hashes of a request's blocks; counts those that are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def a_side(role: str = "kv_both") -> Any:
    from mooncake.connectors.vllm.store_connector import StoreSchedulerSide

    transfer = types.SimpleNamespace(
        is_kv_producer=role != "kv_consumer", kv_connector_extra_config={}, engine_id="1"
    )
    config = types.SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=types.SimpleNamespace(world_size=1),
        max_concurrent_batches=1,
        kv_events_config=None,
    )
    spec = types.SimpleNamespace(kv_cache_spec=types.SimpleNamespace(block_size=BLOCK_TOKENS))
    session: Any = NoStore()
    side = StoreSchedulerSide(config, types.SimpleNamespace(kv_cache_groups=[spec]), session)
    side.pool = CountedBlocks()
    return side


def a_request(side: Any, name: str = "a", num_computed: int = 0) -> Any:
    """A request that the scheduler has announced, with ``num_computed`` blocks that it need not compute."""
    request = types.SimpleNamespace(
        request_id=name,
        lora_request=None,
        num_tokens=len(HASHES) * BLOCK_TOKENS,
        num_computed_tokens=num_computed * BLOCK_TOKENS,
        num_in_flight_tokens=0,
        block_hashes=CountedHashes(HASHES),
        all_token_ids=list(range(len(HASHES) * BLOCK_TOKENS)),
    )
    side.arrived(request)
    side.matched(request, 0)
    side.allocated(request, IDS, 0)
    return request


def a_step(num_blocks: dict[str, int], loads: bool = False) -> Any:
    """A step that fills so many blocks of each request. ``loads``: some connector loads blocks in it."""
    return types.SimpleNamespace(
        num_scheduled_tokens={name: count * BLOCK_TOKENS for name, count in num_blocks.items()},
        total_num_scheduled_tokens=sum(num_blocks.values()) * BLOCK_TOKENS,
        scheduled_spec_decode_tokens={},
        kv_connector_block_state=types.SimpleNamespace(get_block_ids=lambda name: (IDS,)),
        has_sync_kv_loads=loads,
    )


def a_report(step: int = 0, saved: Sequence[int] = ()) -> Any:
    from mooncake.connectors.vllm.store_connector import RankReport

    return RankReport(dict.fromkeys(saved, 1), {}, {}, set(), 0, step)


def saved_blocks(plans: Any) -> list[int]:
    return [block_id for plan in plans.saves for block_id in plan.block_ids]


def test_a_block_is_saved_with_the_step_that_fills_it() -> None:
    side = a_side()
    request = a_request(side)
    plans = side.plans(a_step({"a": 2}))
    assert saved_blocks(plans) == [1, 2] and not plans.step
    request.num_computed_tokens = 2 * BLOCK_TOKENS
    assert saved_blocks(side.plans(a_step({"a": 1}))) == [3]
    side.reported(a_report(saved=[0, 1]))
    assert [block.ref_cnt for block in side.pool.blocks[1:4]] == [1, 1, 1]


def test_beside_a_load_of_another_connector_nothing_is_saved_before_it_is_known_to_have_succeeded() -> None:
    """Under MultiConnector: what rests on a load that fails is computed again, and has to be saved then."""
    side = a_side()
    request = a_request(side, num_computed=4)
    plans = side.plans(a_step({"a": 1}, loads=True))
    assert not saved_blocks(plans) and plans.step
    request.num_computed_tokens = 5 * BLOCK_TOKENS
    assert not saved_blocks(side.plans(a_step({"a": 1}))), "planned before the end of the load is known"
    side.reported(a_report(step=plans.step))
    request.num_computed_tokens = BLOCK_TOKENS  # the second block has failed
    assert saved_blocks(side.plans(a_step({"a": 5}))) == IDS


def test_ranks_answer_a_step_with_loads_although_they_have_nothing_to_report() -> None:
    from mooncake.connectors.vllm.store_connector import StoreWorkerSide

    config: Any = types.SimpleNamespace(parallel_config=types.SimpleNamespace(enable_dbo=False))
    session: Any = NoStore()
    sides = [StoreWorkerSide(config, None, session) for _ in range(2)]
    assert all(side.report() is not None for side in sides), "the digests of its shards"
    assert all(side.report() is None for side in sides)
    for side in sides:
        side.step = 7
    first, second = (side.report() for side in sides)
    assert first is not None and second is not None and first.aggregate(second).step == 7
    assert all(side.report() is None for side in sides)


@pytest.mark.parametrize(("role", "num_names"), [("kv_consumer", 0), ("kv_both", 1)])
def test_a_step_names_blocks_that_it_saves_and_no_others(role: str, num_names: int) -> None:
    side = a_side(role)
    request = a_request(side, num_computed=4)
    side.plans(a_step({"a": 1}))
    request.num_computed_tokens = 5 * BLOCK_TOKENS
    request.block_hashes.num_read = 0
    side.plans(a_step({"a": 1}))
    assert request.block_hashes.num_read == num_names


def events_of(num_ranks: int, num_saves: int) -> Any:
    """``StoredEvents`` with overlapping saves of one block."""
    from mooncake.connectors.vllm.store_connector import StoredEvents

    request = types.SimpleNamespace(
        lora_request=None, block_hashes=HASHES, all_token_ids=list(range(BLOCK_TOKENS))
    )
    events = StoredEvents(num_ranks, BLOCK_TOKENS)
    for number in range(num_saves):
        events.saves(SavePlan(number, (b"n",), (number,), 0), request)
    return events


def test_a_block_that_all_ranks_store_twice_has_one_event() -> None:
    events = events_of(2, 2)
    events.stored({(0, b"n"): 1}, {0: 1})
    assert events.take() == []
    events.stored({(0, b"n"): 1, (1, b"n"): 1}, {0: 1, 1: 1})
    (event,) = events.take()
    assert len(event.block_hashes) == 1
    events.stored({(1, b"n"): 1}, {1: 1})
    assert events.take() == []


def test_the_first_save_may_fail_on_one_rank_and_the_second_succeed() -> None:
    events = events_of(2, 2)
    events.stored({(0, b"n"): 1}, {0: 2})
    events.stored({(1, b"n"): 2}, {1: 2})
    assert len(events.take()) == 1


def test_a_block_that_one_rank_stores_twice_and_another_never_has_no_event() -> None:
    events = events_of(2, 2)
    events.stored({(0, b"n"): 1}, {0: 2})
    events.stored({(1, b"n"): 1}, {1: 2})
    assert events.take() == []
    assert not events._pending and not events._names
