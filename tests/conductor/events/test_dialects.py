"""Four dialects are read into the same events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.conductor.events.dialects import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    read_batch,
)

STORED = BlockStored([1, 2], None, [7, 8, 9, 10], 2, "GPU")
EXPECTED = EventBatch(1.5, [STORED, BlockRemoved([1], "GPU"), AllBlocksCleared()], 3)
MAPS: list[dict[str, Any]] = [
    {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [7, 8, 9, 10],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    },
    {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0},
    {"type": "AllBlocksCleared"},
]
ARRAYS: list[list[Any]] = [
    ["BlockStored", [1, 2], None, [7, 8, 9, 10], 2, None, "GPU"],
    ["BlockRemoved", [1], "GPU"],
    ["AllBlocksCleared"],
]


@pytest.mark.parametrize(
    "batch",
    [
        [1.5, MAPS, 3],
        {"ts": 1.5, "events": MAPS, "data_parallel_rank": 3},
        [1.5, ARRAYS, 3],
    ],
    ids=["vLLM", "vLLM, newer", "SGLang"],
)
def test_engines(batch: Any) -> None:
    assert read_batch(msgspec.msgpack.encode(batch)) == EXPECTED


def test_the_first_sglang_without_medium_and_rank() -> None:
    batch = [2.0, [["BlockStored", [1], 9, [7, 8], 2, None], ["BlockRemoved", [1]]]]
    assert read_batch(msgspec.msgpack.encode(batch)) == EventBatch(
        2.0, [BlockStored([1], 9, [7, 8], 2), BlockRemoved([1])]
    )


def test_a_store_without_the_legacy_fields() -> None:
    fields = {"event_id": 1, "timestamp": 2, "tenant_id": "t", "medium": "disk", "seq_hashes": [2**64 - 1]}
    events = [
        {**fields, "event_type": "stored", "token_ids": None, "parent_hash": None},
        {**fields, "event_type": "removed", "reason": "removed"},
        {"event_type": "cleared"},
    ]
    assert read_batch(msgspec.msgpack.encode([1000, events, 0])).events == [
        BlockStored(medium="disk", seq_hashes=[2**64 - 1], tenant_id="t"),
        BlockRemoved(medium="disk", seq_hashes=[2**64 - 1], tenant_id="t", reason="removed"),
        AllBlocksCleared(),
    ]


@pytest.mark.parametrize(
    "batch", [7, [1.0], {"ts": 1.0}, [1.0, [["Unheard"]]], [1.0, [{"event_type": "unheard"}]], [1.0, [5]]]
)
def test_other_payloads_are_refused(batch: Any) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_batch(msgspec.msgpack.encode(batch))
