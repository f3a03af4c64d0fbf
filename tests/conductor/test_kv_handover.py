# SPDX-License-Identifier: Apache-2.0
"""The way of a prompt's KV from prefill to decode: by what is predicted, booked, possible and set."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import msgspec
import pytest

from mooncake.conductor.conductor import Conductor
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.kv_handover import MOST_RESERVED_S
from mooncake.conductor.messages import POOL, AddInstance, BlocksStored, Decision, Place, Probed
from mooncake.conductor.prediction import CostModels, LinkModel, PrefillModel
from mooncake.conductor.settings import SchedulingSettings
from mooncake.kvlayout import KEY_PREFIX
from mooncake.types import WorkerRole

SETTINGS = SchedulingSettings(block_tokens=16, slow_start_s=0.0, admission="none")
COSTS = CostModels(
    prefill=PrefillModel(0.01, 1e-3, 0.0),
    link=LinkModel(1e-3, 1e9),
    kv_bytes_per_token=100_000,
    num_layers=10,
)
"""1,000 tokens: 1.01 s to compute, 0.1 s to move."""


def conductor_of(costs: CostModels = COSTS, ports: tuple[int, int] = (7001, 7002), **more: Any) -> Conductor:
    """One with a prefill instance, a decode instance and the pool."""
    conductor = Conductor(dataclasses.replace(SETTINGS, **more), Random(0), costs)
    for name, role, port in (("p:1", WorkerRole.PREFILL, ports[0]), ("d:1", WorkerRole.DECODE, ports[1])):
        conductor.handle(AddInstance(name, role), 0.0)
        conductor.handle(Probed(name, ProbeOutcome.READY, push_port=port), 0.0)
    conductor.handle(BlocksStored(POOL, [1]), 0.0)
    return conductor


def decided(conductor: Conductor, request_id: str = "r", num_tokens: int = 1000, **fields: Any) -> Decision:
    [*_, decision] = conductor.handle(Place(request_id, num_tokens, **fields), 1.0)
    conductor.check()
    assert isinstance(decision, Decision)
    return decision


def test_a_push_leaves_the_last_layer_and_the_pool_everything() -> None:
    decision = decided(conductor_of())
    assert decision.push_from == "p:7001"
    assert "KV by push: 11.0 ms after prefill, by pool 112.0 ms" in decision.reason


def test_a_link_that_is_slower_than_prefill_makes_a_push_wait_for_it() -> None:
    slow = msgspec.structs.replace(COSTS, link=LinkModel(1e-3, 1e7))
    decision = decided(conductor_of(slow))
    assert "KV by push: 8991.0 ms after prefill, by pool 11002.0 ms" in decision.reason


def test_pushes_that_are_booked_count() -> None:
    conductor = conductor_of(msgspec.structs.replace(COSTS, link=LinkModel(1e-3, 5e6)))
    first, second = decided(conductor, "a", 100), decided(conductor, "b", 100)
    assert "KV by push: 1891.0 ms after prefill, by pool 2202.0 ms" in first.reason
    # Both ways end at decode's card, which is busy for 2 s.
    assert "KV by push: 3781.0 ms after prefill, by pool 3982.0 ms" in second.reason


@pytest.mark.parametrize("ports", [(0, 7002), (7001, 0), (0, 0)])
def test_what_can_not_push_uses_the_pool(ports: tuple[int, int]) -> None:
    for wanted in ("auto", "push"):
        decision = decided(conductor_of(ports=ports, kv_transfer=wanted))
        assert not decision.push_from and "KV by" not in decision.reason


def test_the_setting_decides() -> None:
    assert not decided(conductor_of(kv_transfer="pool")).push_from
    assert decided(conductor_of(kv_transfer="push"), num_tokens=10**6).push_from


def test_decode_s_memory_is_not_reserved_for_long_or_where_there_is_none() -> None:
    late = decided(conductor_of(), num_tokens=int(MOST_RESERVED_S * 1000) + 1000)
    assert not late.push_from and "prefill ends in 31.0 s" in late.reason
    conductor = conductor_of()
    conductor.loads.capacity_tokens[conductor.instances["d:1"].slot] = 1500.0
    assert decided(conductor, "a").push_from
    full = decided(conductor, "b")
    assert not full.push_from and "no room for 1000 tokens" in full.reason


def test_a_prompt_that_was_computed_before_or_has_no_prefill_is_not_pushed() -> None:
    conductor = conductor_of()
    assert not decided(conductor, needs_prefill=False).push_from
    alone = decided(conductor, exclude=["p:1"])
    assert alone.degraded and not alone.push_from


def test_an_instance_that_stops_pushing_is_not_asked() -> None:
    conductor = conductor_of()
    conductor.instances["p:1"].probe_started_at, conductor.instances["p:1"].next_probe_at = 2.0, None
    conductor.handle(Probed("p:1", ProbeOutcome.READY, push_port=0), 2.0)
    assert not decided(conductor).push_from


def loaded_tokens(**settings: Any) -> int:
    """Tokens that the prefill instance loads of a prompt that the pool has."""
    conductor = conductor_of(**settings)
    keys = list(range(1, 63))
    conductor.handle(BlocksStored(POOL, keys, scope=f"{KEY_PREFIX}one"), 0.5)
    decision = decided(conductor, keys=keys, slo_tbt_s=0.08)
    return sum(fetch.num_blocks for fetch in decision.fetches) * 16


def test_what_decode_reads_from_the_pool_is_not_late_for_being_loaded_at_prefill() -> None:
    assert loaded_tokens(kv_transfer="pool") == 912, "computing the rest takes as long as loading"
    # Moving it on takes 0.09 s from then on, and steps of 20 ms leave 60 of the 80 ms for that.
    assert loaded_tokens(kv_transfer="push") == 896
