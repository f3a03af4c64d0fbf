# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib

import msgspec
import pytest

from mooncake.gateway.request_recorder import aes_ids
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.recorded_requests import (
    MAX_RECORDED_ID,
    KeyedIds,
    RecordedRequest,
    RecordingHeader,
    coarsened,
    decode_lines,
)


def toy_ids(key: bytes) -> KeyedIds:
    """Ids by a slow permutation of the same form."""

    def encipher(plain: bytes) -> bytes:
        blocks = [plain[at : at + 16] for at in range(0, len(plain), 16)]
        return b"".join(hashlib.blake2b(one, key=key, digest_size=16).digest() for one in blocks)

    return KeyedIds(encipher, key)


def keys_of(prompt: list[int]) -> list[int]:
    return [short_key(one) for one in block_hashes(prompt, 4, root_hash())]


@pytest.mark.parametrize("ids", [toy_ids(b"a"), aes_ids()], ids=["toy", "aes"])
def test_equal_prefixes_have_equal_ids_and_nothing_else_has(ids: KeyedIds) -> None:
    first, other = keys_of(list(range(40))), keys_of([*range(20), *range(60, 80)])
    one, two = ids.blocks(first), ids.blocks(other)
    assert one[:5] == two[:5]
    assert not set(one[5:]) & set(two[5:])
    assert len(set(one)) == len(first)
    assert all(0 <= each <= MAX_RECORDED_ID for each in one)
    assert ids.blocks([]) == []


def test_ids_of_another_key_have_nothing_in_common() -> None:
    keys = keys_of(list(range(400)))
    assert not set(aes_ids().blocks(keys)) & set(aes_ids().blocks(keys))


def test_an_id_of_a_name_shows_neither_the_name_nor_its_kind() -> None:
    ids = toy_ids(b"a")
    assert ids.name("session", "alice") == ids.name("session", "alice")
    assert ids.name("session", "alice") != ids.name("tenant", "alice")
    assert ids.name("session", "alice") != toy_ids(b"b").name("session", "alice")
    assert ids.name("session", "") == ""


def test_a_longer_block_is_named_by_its_last_part() -> None:
    assert coarsened([1, 2, 3, 4, 5], 2) == [2, 4]
    assert coarsened([1, 2, 3], 1) == [1, 2, 3]


def test_lines_are_read_back() -> None:
    header = RecordingHeader(1, 4, "k", 1.0, 60.0)
    row = RecordedRequest(1.5, 9, 3, [1, 2], [3], session="s", status="rejected", reason="busy")
    lines = [msgspec.json.encode(one) for one in (header, row)]
    assert decode_lines(lines) == (header, [row])
    with pytest.raises(msgspec.MsgspecError):
        decode_lines([])
