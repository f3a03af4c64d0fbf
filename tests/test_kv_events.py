# SPDX-License-Identifier: Apache-2.0
"""Four dialects are read into the same events, and one is written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode_batch,
    read_batch,
)

STORED = BlockStored([1, 2], None, [7, 8, 9, 10], 2, "GPU")
OF_A_GROUP = msgspec.structs.replace(
    STORED,
    group_idx=1,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=512,
    locality="LOCAL",
)
EXPECTED = EventBatch(1.5, [STORED, BlockRemoved([1], "GPU"), AllBlocksCleared()], 3)
EXPECTED_OF_A_GROUP = EventBatch(
    1.5, [OF_A_GROUP, BlockRemoved([1], "GPU", group_idx=1, locality="REMOTE"), AllBlocksCleared()], 3
)
MAPS: list[dict[str, Any]] = [
    {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [7, 8, 9, 10],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 512,
        "locality": "LOCAL",
        "ownership": "tier",
        "session_id": "s",
    },
    {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 1, "locality": "REMOTE"},
    {"type": "AllBlocksCleared"},
]
ARRAYS: list[list[Any]] = [
    ["BlockStored", [1, 2], None, [7, 8, 9, 10], 2, None, "GPU"],
    ["BlockRemoved", [1], "GPU"],
    ["AllBlocksCleared"],
]
ARRAYS_OF_A_GROUP: list[list[Any]] = [
    [*ARRAYS[0], None, None, 1, "sliding_window", 512, "LOCAL", "tier", "s"],
    [*ARRAYS[1], 1, "REMOTE", "tier"],
    ARRAYS[2],
]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([1.5, MAPS, 3], EXPECTED_OF_A_GROUP),
        ({"ts": 1.5, "events": MAPS, "data_parallel_rank": 3}, EXPECTED_OF_A_GROUP),
        ([1.5, ARRAYS, 3], EXPECTED),
        ([1.5, ARRAYS_OF_A_GROUP, 3], EXPECTED_OF_A_GROUP),
    ],
    ids=["vLLM", "vLLM, newer", "SGLang", "vLLM, older"],
)
def test_engines(batch: Any, expected: EventBatch) -> None:
    assert read_batch(msgspec.msgpack.encode(batch)) == expected


def test_the_first_sglang_without_medium_and_rank() -> None:
    batch = [2.0, [["BlockStored", [1], 9, [7, 8], 2, None], ["BlockRemoved", [1]]]]
    assert read_batch(msgspec.msgpack.encode(batch)) == EventBatch(
        2.0, [BlockStored([1], 9, [7, 8], 2), BlockRemoved([1])]
    )


def test_sglang_with_salts_and_with_all_of_vllm_s_fields() -> None:
    """Salts are in a map in the place of the adapter's name, or later among the inputs of the hash."""
    salted = BlockStored([1], None, [7, 8], 2, "CPU_PINNED", extra_keys=[["pepper"]])
    batch = [2.0, [["BlockStored", [1], None, [7, 8], 2, None, "CPU_PINNED", {"cache_salt": "pepper"}]]]
    assert read_batch(msgspec.msgpack.encode(batch)) == EventBatch(2.0, [salted])
    long_stored = ["BlockStored", [1], None, [7, 8], 2, None, "CPU_PINNED", None, [["pepper"]], *[None] * 5]
    long_removed = ["BlockRemoved", [1], "GPU", 0, "full_attention", None, "REMOTE", None]
    batch = [2.0, [[*long_stored, {"cache_salt": "pepper"}], long_removed, ["AllBlocksCleared", None]]]
    removed = BlockRemoved([1], "GPU", group_idx=0, locality="REMOTE")
    expected = EventBatch(2.0, [salted, removed, AllBlocksCleared()])
    assert read_batch(msgspec.msgpack.encode(batch)) == expected


def test_an_adapter_may_have_a_number_only() -> None:
    batch = [2.0, [["BlockStored", [1], None, [7, 8], 2, 3, "GPU"]]]
    expected = EventBatch(2.0, [BlockStored([1], None, [7, 8], 2, "GPU", lora_id=3)])
    assert read_batch(msgspec.msgpack.encode(batch)) == expected


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


def test_our_own_batches_are_vllm_s_byte_for_byte() -> None:
    """The fields that vLLM's subscribers expect are there when they are None, others are not."""
    assert encode_batch(
        EventBatch(
            1.5,
            [
                AllBlocksCleared(),
                BlockStored([b"aaaa", b"bbbb"], None, [7, 8, 9, 300], 2, "GPU"),
                BlockStored([b"cccc"], b"bbbb", [], 2),
                BlockRemoved([b"aaaa"], "GPU"),
                BlockRemoved([b"bbbb"], "CPU", reason="evicted"),
            ],
        )
    ) == bytes.fromhex(
        "93cb3ff80000000000009581a474797065b0416c6c426c6f636b73436c656172656486a474797065ab426c6f636b53746f"
        "726564ac626c6f636b5f68617368657392c40461616161c40462626262b1706172656e745f626c6f636b5f68617368c0a9"
        "746f6b656e5f69647394070809cd012caa626c6f636b5f73697a6502a66d656469756da347505586a474797065ab426c6f"
        "636b53746f726564ac626c6f636b5f68617368657391c40463636363b1706172656e745f626c6f636b5f68617368c40462"
        "626262a9746f6b656e5f69647390aa626c6f636b5f73697a6502a66d656469756dc083a474797065ac426c6f636b52656d"
        "6f766564ac626c6f636b5f68617368657391c40461616161a66d656469756da347505584a474797065ac426c6f636b5265"
        "6d6f766564ac626c6f636b5f68617368657391c40462626262a66d656469756da3435055a6726561736f6ea76576696374"
        "6564c0"
    )


def test_what_is_written_is_read_back() -> None:
    batch = EventBatch(2.0, [STORED, BlockRemoved([b"1"], "CPU", reason="removed"), AllBlocksCleared()], 3)
    assert read_batch(encode_batch(batch)) == batch
