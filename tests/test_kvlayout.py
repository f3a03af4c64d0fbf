# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mooncake.errors import InvalidArgument
from mooncake.kvlayout import KvIdentity, KvLayout, SlabLayout

SMOLLM2 = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=32)
CHANGES: list[tuple[str, Any]] = [
    ("num_layers", 4),
    ("dtype", "float16"),
    ("block_tokens", 8),
    ("head_dim", 8),
]
TINY = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", block_tokens=4)


def test_smollm2_needs_the_known_bytes_per_token() -> None:
    assert SMOLLM2.object_bytes(1) == 23_040
    assert SMOLLM2.pool_bytes(10) == 10 * 32 * 23_040


def test_pool_addresses_agree_with_the_tensor() -> None:
    num_blocks = 5
    pool = np.arange(np.prod(TINY.pool_shape(num_blocks)), dtype=np.float32).reshape(
        TINY.pool_shape(num_blocks)
    )
    assert pool.nbytes == TINY.pool_bytes(num_blocks)
    base = pool.ctypes.data
    for layer in range(TINY.num_layers):
        column = TINY.pool_addresses(base, num_blocks, layer, [4, 0, 2])
        expected = [pool[layer, kv, block].ctypes.data for block in (4, 0, 2) for kv in (0, 1)]
        assert column.dtype == np.uint64
        assert column.tolist() == expected


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_an_object_is_its_chunks_end_to_end(num_tokens: int) -> None:
    chunk = TINY.chunk_bytes(num_tokens)
    offsets = [offset for layer in range(3) for offset in TINY.object_offsets(layer, num_tokens)]
    assert offsets == [index * chunk for index in range(TINY.num_chunks)]
    assert TINY.object_bytes(num_tokens) == TINY.num_chunks * chunk


def test_the_key_changes_with_anything_that_makes_bytes_invalid() -> None:
    base = KvIdentity("weights", "tokenizer", TINY)
    others = [
        dataclasses.replace(base, weights="other"),
        dataclasses.replace(base, tokenizer="other"),
        *(
            dataclasses.replace(base, layout=dataclasses.replace(TINY, **{field: value}))
            for field, value in CHANGES
        ),
    ]
    keys = {identity.key(b"\x01" * 32) for identity in (base, *others)}
    assert len(keys) == len(others) + 1
    assert base.key(b"\x01" * 32) == f"kv/{base.digest}/{'01' * 32}"


@pytest.mark.parametrize(("field", "value"), [("dtype", "int3"), ("block_tokens", 0), ("num_layers", 0)])
def test_a_senseless_layout_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=field):
        dataclasses.replace(TINY, **{field: value})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SlabLayout)])
def test_a_slab_layout_has_at_least_one_of_each(field: str) -> None:
    sizes = {"num_layers": 2, "num_slabs": 2, "slab_bytes": 2, "block_tokens": 2}
    assert SlabLayout(**{**sizes, field: 1}).object_bytes(1 if field == "block_tokens" else 2) > 0
    for wrong in (0, -1):
        with pytest.raises(InvalidArgument, match=field):
            SlabLayout(**{**sizes, field: wrong})


def test_slabs_lie_one_behind_the_other() -> None:
    layout = SlabLayout(num_layers=3, num_slabs=2, slab_bytes=100, block_tokens=16)
    assert [layout.object_offsets(layer, 16) for layer in range(3)] == [(0, 100), (200, 300), (400, 500)]
    assert layout.object_bytes(16) == 600
