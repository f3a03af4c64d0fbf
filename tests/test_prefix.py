# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.prefix import block_hashes, extend, root_hash

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def test_one_hash_for_each_full_block() -> None:
    root = root_hash()
    assert len(block_hashes(range(64), 16, root)) == 4
    assert len(block_hashes(range(63), 16, root)) == 3
    assert len(block_hashes(range(63), 16, root, include_partial=True)) == 4
    assert block_hashes([], 16, root, include_partial=True) == []


def test_the_hash_is_sha256_over_parent_and_little_endian_tokens() -> None:
    root = root_hash()
    expected = hashlib.sha256(root + b"\x01\x00\x00\x00\x02\x00\x00\x00").digest()
    assert block_hashes([1, 2], 2, root) == [expected]


@given(tokens, st.integers(1, 40))
def test_extending_block_by_block_is_the_same_chain(ids: list[int], block_tokens: int) -> None:
    parent = root_hash("tenant", "adapter")
    hashes = block_hashes(ids, block_tokens, parent, include_partial=True)
    for index, block_hash in enumerate(hashes):
        parent = extend(parent, ids[index * block_tokens : (index + 1) * block_tokens])
        assert parent == block_hash


@given(tokens, tokens, st.integers(1, 40))
def test_hashes_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int], size: int) -> None:
    root = root_hash()
    hashes = zip(block_hashes(a, size, root), block_hashes(b, size, root), strict=False)
    for index, (left, right) in enumerate(hashes):
        end = (index + 1) * size
        assert (left == right) == (a[:end] == b[:end])


def test_a_partial_tail_is_no_full_block() -> None:
    root = root_hash()
    assert block_hashes([7], 2, root, include_partial=True) != block_hashes([7, 0], 2, root)


def test_salt_and_adapter_separate_prefixes() -> None:
    roots = {root_hash(), root_hash("a"), root_hash("", "a"), root_hash("a", "a"), root_hash("aa")}
    assert len(roots) == 5


def test_a_token_id_must_fit() -> None:
    with pytest.raises(OverflowError):
        extend(root_hash(), [2**32])
