# SPDX-License-Identifier: Apache-2.0
"""Registrations of publishers and the answers to other routers, without sockets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.conductor.event_subscriptions import EventReader
from mooncake.conductor.key_translation import sequence_hashes
from mooncake.conductor.messages import BlocksCleared, BlocksRemoved, BlocksStored
from mooncake.conductor.publisher_registry import (
    PublisherRegistry,
    Query,
    QueryByHash,
    Register,
    Unregister,
)
from mooncake.kv_events import BlockRemoved, BlockStored, EventBatch, KvEvent, encode_batch
from mooncake.types import Tier

SEED = 3
TOKENS = list(range(64))
NAMES = sequence_hashes(TOKENS, 16, SEED)


def registration(**fields: Any) -> Register:
    given: dict[str, Any] = {"endpoint": "tcp://10.0.0.1:5557", "type": "vLLM", "modelname": "m"}
    given |= {"instance_id": "a", "block_size": 16}
    return Register(**{**given, **fields})


def holding(
    registry: PublisherRegistry, one: Register, count: int, tier: Tier = Tier.DEVICE, first: int = 0
) -> None:
    registry.take(BlocksStored(one.holder, NAMES[first:count], tier, one.scope.name))


def query(**fields: Any) -> Query:
    return Query(**{"model": "m", "block_size": 16, "token_ids": TOKENS, **fields})


def test_the_best_rank_of_an_instance_answers_for_it() -> None:
    registry = PublisherRegistry(SEED)
    ranks = [registration(dp_rank=rank) for rank in (0, 1)]
    for one in ranks:
        registry.register(one)
    holding(registry, ranks[0], 1)
    holding(registry, ranks[1], 2)
    holding(registry, ranks[1], 3, Tier.SSD, first=2)
    row = registry.answer(query())["default"]["a"]
    assert row == {"longest_matched": 48, "DP": {"0": 16, "1": 48}, "GPU": 32, "CPU": 0, "DISK": 16}
    by_hash = QueryByHash(model="m", block_size=16, seq_hashes=NAMES)
    assert registry.answer(by_hash) == registry.answer(query())


def test_scopes_do_not_see_each_other() -> None:
    registry = PublisherRegistry(SEED)
    for changed in ({"modelname": "n"}, {"tenant_id": "t"}, {"lora_name": "l"}, {"additionalsalt": "s"}):
        one = registration(instance_id=str(changed), **changed)
        registry.register(one)
        holding(registry, one, 4)
    assert registry.answer(query()) == {"default": {}}
    assert list(registry.answer(query(tenant_id="t"))["t"]) == [str({"tenant_id": "t"})]
    assert list(registry.answer(query(cache_salt="s"))["default"]) == [str({"additionalsalt": "s"})]


def test_a_query_may_name_one_instance() -> None:
    registry = PublisherRegistry(SEED)
    for name in "ab":
        one = registration(instance_id=name)
        registry.register(one)
        holding(registry, one, 2)
    assert list(registry.answer(query(instance_id="b"))["default"]) == ["b"]
    assert {*registry.answer(query(instance_id=""))["default"]} == {"a", "b"}
    assert registry.answer(query(instance_id="c"))["default"] == {}


def test_a_renewed_registration_has_no_blocks() -> None:
    registry = PublisherRegistry(SEED)
    one = registration()
    registry.register(one)
    holding(registry, one, 4)
    registry.register(registration(endpoint="tcp://10.0.0.1:5558"))
    assert registry.answer(query()) == {"default": {}}
    assert len(registry.registered) == 1


def test_a_publisher_of_a_hybrid_model_may_be_followed_by_one_of_another() -> None:
    registry = PublisherRegistry(SEED)
    one = registration()

    def publish(*groups: int) -> Any:
        reader = EventReader(one.holder, registry.register(one))
        kinds = ["full_attention", "mamba"]
        events: list[KvEvent] = [
            BlockStored([7, 8], None, TOKENS[:32], 16, group_idx=at, kv_cache_spec_kind=kinds[at])
            for at in groups
        ]
        for fact in reader.read(0, encode_batch(EventBatch(1.0, events))):
            registry.take(fact)
        if len(groups) > 1:
            gone = EventBatch(2.0, [BlockRemoved([8], group_idx=1)])
            for fact in reader.read(1, encode_batch(gone)):
                registry.take(fact)
        return registry.answer(query())["default"]["a"]["longest_matched"]

    assert publish(0, 1) == 16
    assert publish(0) == 32


def test_unregistering_removes_every_salt_and_no_other_registration() -> None:
    registry = PublisherRegistry(SEED)
    for fields in ({}, {"additionalsalt": "s"}, {"dp_rank": 1}, {"instance_id": "b"}):
        registry.register(registration(**fields))
    gone = registry.unregister(Unregister("vLLM", "m", "a", 16))
    assert {one.additionalsalt for one in gone} == {None, "s"}
    assert {(one.instance_id, one.dp_rank) for one in registry.registered.values()} == {("a", 1), ("b", 0)}
    assert registry.unregister(Unregister("vLLM", "m", "a", 16)) == []
    late = BlocksStored(gone[0].holder, NAMES, Tier.DEVICE, gone[0].scope.name)
    registry.take(late)
    assert registry.answer(query()) == {"default": {}}, "events after the end of a registration are ignored"


def test_blocks_come_and_go() -> None:
    registry = PublisherRegistry(SEED)
    one = registration()
    registry.register(one)
    holding(registry, one, 4)
    registry.take(BlocksRemoved(one.holder, NAMES[2:3], Tier.DEVICE, one.scope.name))
    assert registry.answer(query())["default"]["a"]["longest_matched"] == 32
    registry.take(BlocksCleared(one.holder))
    assert registry.answer(query()) == {"default": {}}


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://10.0.0.1:0", "tcp://10.0.0.1:70000", "http://x"])
def test_an_endpoint_that_can_t_be_connected_to_is_named(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        registration(endpoint=endpoint)
    body = msgspec.json.encode({
        "endpoint": endpoint, "type": "vLLM", "modelname": "m", "instance_id": "a", "block_size": 16
    })  # fmt: skip
    with pytest.raises(msgspec.ValidationError, match="endpoint"):
        msgspec.json.decode(body, type=Register)


@pytest.mark.parametrize("name", [-1, 1 << 64])
def test_a_value_that_is_no_hash_is_named(name: int) -> None:
    with pytest.raises(ValueError, match=r"seq_hashes\[1\]"):
        QueryByHash(model="m", block_size=16, seq_hashes=[0, name])
