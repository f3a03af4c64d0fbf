# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of ``MooncakeConnector``: which blocks it offers, and when. No engine runs."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest

from mooncake.errors import InvalidArgument

BLOCK_TOKENS = 4


class CountedBlocks:
    """Stands for vLLM's ``BlockPool``."""

    def __init__(self) -> None:
        self.blocks = [types.SimpleNamespace(block_id=index, ref_cnt=1) for index in range(8)]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1


@pytest.fixture
def side() -> Any:
    from mooncake.connectors.vllm.push_connector import PushSchedulerSide

    spec = types.SimpleNamespace(kv_cache_spec=types.SimpleNamespace(block_size=BLOCK_TOKENS))
    extra = {"listen_addr": "127.0.0.1:1"}
    transfer = types.SimpleNamespace(
        is_kv_producer=True, is_kv_consumer=False, kv_connector_extra_config=extra, engine_id="1"
    )
    config = types.SimpleNamespace(
        kv_transfer_config=transfer, parallel_config=types.SimpleNamespace(world_size=1)
    )
    side = PushSchedulerSide(config, types.SimpleNamespace(kv_cache_groups=[spec]))
    side.pool = CountedBlocks()
    return side


def a_request(name: str) -> Any:
    return types.SimpleNamespace(
        request_id=name,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": name},
        prompt_token_ids=list(range(2 * BLOCK_TOKENS)),
        num_prompt_tokens=2 * BLOCK_TOKENS,
        num_computed_tokens=0,
        block_hashes=[],
        mm_features=[],
        cache_salt=None,
        lora_request=None,
    )


def a_step(blocks: dict[str, list[int]], loads: bool = False) -> Any:
    """A step that computes whole prompts. ``loads``: some connector loads blocks in it."""
    state = types.SimpleNamespace(get_block_ids=lambda name: (blocks[name],))
    num_tokens = dict.fromkeys(blocks, 2 * BLOCK_TOKENS)
    return types.SimpleNamespace(
        num_scheduled_tokens=num_tokens,
        total_num_scheduled_tokens=sum(num_tokens.values()),
        kv_connector_block_state=state,
        has_sync_kv_loads=loads,
    )


def offered(plans: Any) -> list[str]:
    return [offer.transfer_id for offer in (*plans.offers, *plans.confirmed)]


def test_a_prompt_is_offered_with_the_step_that_computes_it(side: Any) -> None:
    request = a_request("a")
    side.allocated(request, [1, 2], 0)
    plans = side.handovers(a_step({"a": [1, 2]}), now=0.0)
    assert [offer.block_ids for offer in plans.offers] == [[1, 2]] and not plans.step
    side.ended({"a": 1})
    assert not side.is_busy and side.pool.blocks[1].ref_cnt == 1


def test_beside_a_load_it_is_offered_once_the_load_has_succeeded(side: Any) -> None:
    side.allocated(a_request("a"), [1, 2], 0)
    side.allocated(a_request("b"), [1, 3], 0)
    plans = side.handovers(a_step({"a": [1, 2]}, loads=True), now=0.0)
    assert not offered(plans) and plans.step == 1
    # The next step is planned before the outcome of the first is known, and shares a block with it.
    plans = side.handovers(a_step({"b": [1, 3]}), now=0.0)
    assert not offered(plans) and not plans.step
    side.loaded(1, set())
    assert offered(side.handovers(a_step({}), now=0.0)) == ["a", "b"]


def test_a_prompt_with_a_bad_block_is_offered_when_it_is_computed_again(side: Any) -> None:
    ended, again = a_request("ended"), a_request("again")
    for request in (ended, again):
        side.allocated(request, [1, 2], 0)
    side.allocated(a_request("other"), [3, 4], 0)
    step = a_step({"ended": [1, 2], "again": [1, 2], "other": [3, 4]}, loads=True)
    assert not offered(side.handovers(step, now=0.0))
    side.finished(ended)
    side.loaded(1, {2})
    assert side.pool.blocks[1].ref_cnt == 1
    plans = side.handovers(a_step({"again": [1, 2]}), now=0.0)
    assert sorted(offered(plans)) == ["again", "other"]
    assert plans.dropped == [("ended", "a load of its blocks has failed")]


def test_preemption_waits_for_new_offers_of_requests_that_have_ended(side: Any) -> None:
    from mooncake.connectors.vllm.push_connector import SOON_S

    assert not side.will_free_blocks(0.0)
    side.allocated(a_request("a"), [1, 2], 0)
    side.handovers(a_step({"a": [1, 2]}), now=10.0)
    assert not side.will_free_blocks(10.0), "the request uses them, too"
    side.pool.free_blocks([side.pool.blocks[2]])
    assert side.will_free_blocks(10.0)
    assert not side.will_free_blocks(10.0 + SOON_S), "decode may have died"


@pytest.mark.parametrize(
    ("parallel", "role", "field"),
    [
        ({}, "producer", ""),
        ({"pipeline_parallel_size": 2}, "consumer", "pipeline_parallel_size"),
        ({"data_parallel_size": 2}, "producer", "data_parallel_size"),
        ({"data_parallel_index": 1}, "producer", "data_parallel_size"),
        ({"data_parallel_size": 2}, "consumer", ""),
        ({"data_parallel_index": 1, "data_parallel_external_lb": True}, "producer", ""),
    ],
)
def test_data_parallel_ranks_of_prefill_behind_one_server_are_refused(
    parallel: dict[str, Any], role: str, field: str
) -> None:
    """They would listen at the same port. With an HTTP server of its own each has other ports."""
    from mooncake.connectors.vllm.push_connector import check_parallelism

    usual = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "data_parallel_index": 0}
    usual["data_parallel_external_lb"] = False
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(**{**usual, **parallel}),
        kv_transfer_config=types.SimpleNamespace(is_kv_producer=role == "producer"),
    )
    if not field:
        check_parallelism(config)
        return
    with pytest.raises(InvalidArgument, match=field):
        check_parallelism(config)
