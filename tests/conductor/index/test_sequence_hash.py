# SPDX-License-Identifier: Apache-2.0
"""The standard's names, byte by byte."""

from __future__ import annotations

import struct

import pytest
import xxhash

from mooncake.conductor.index.sequence_hash import extend_sequence, sequence_hashes


def test_names_are_chained_by_the_standard() -> None:
    first = xxhash.xxh3_64_intdigest(struct.pack("<4I", 1, 2, 3, 4), seed=7)
    local = xxhash.xxh3_64_intdigest(struct.pack("<4I", 5, 6, 7, 2**32 - 1), seed=7)
    second = xxhash.xxh3_64_intdigest(struct.pack("<2Q", first, local), seed=7)
    assert sequence_hashes([1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9], 4, 7) == [first, second]
    assert sequence_hashes([1, 2, 3], 4, 7) == sequence_hashes([], 4, 7) == []
    assert sequence_hashes([1, 2, 3, 4], 4, 8) != [first]


def test_known_values() -> None:
    """Constants, so that a change of the library or of our code is detected."""
    assert sequence_hashes(range(8), 4, 0) == [11660027832386793900, 15795048925959984383]
    assert extend_sequence(None, [], 0) == 0x2D06800538D394C2  # the published XXH3-64 of the empty input


def test_an_impossible_token_is_refused() -> None:
    with pytest.raises(OverflowError):
        extend_sequence(None, [-1], 0)
