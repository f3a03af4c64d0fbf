# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from mooncake.store.master.log_records import (
    ObjectGone,
    ObjectReadable,
    Record,
    SegmentGone,
    SegmentMounted,
    decode,
    encode,
)

RECORDS: list[Record] = [
    SegmentMounted("a", 7, "host", 1 << 40, 4096, b"descriptor"),
    ObjectReadable("k", 1, 1000, 100, b"crc!" * 10, [("a", 64)]),
    ObjectGone("k", 1),
    SegmentGone("a", 7),
]


def test_records_survive_the_trip() -> None:
    content = encode(RECORDS)
    assert decode(content) == (RECORDS, len(content))
    assert decode(b"") == ([], 0)


@given(st.data())
def test_a_torn_tail_is_dropped(data: st.DataObject) -> None:
    """A write cut at any point leaves exactly the records before it."""
    content = encode(RECORDS)
    cut = data.draw(st.integers(0, len(content) - 1))
    records, num_bytes = decode(content[:cut])
    assert records == RECORDS[: len(records)] and len(records) < len(RECORDS)
    assert encode(records) == content[:num_bytes]


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_record_ends_the_log(place: int, change: int) -> None:
    content = bytearray(encode(RECORDS))
    content[place % len(content)] ^= change
    records, num_bytes = decode(bytes(content))
    assert records == RECORDS[: len(records)] and num_bytes <= place % len(content)


def test_masters_of_two_versions_read_each_others_records() -> None:
    """Later fields are ignored by the older version, and have defaults where they are missing."""

    class OldGone(msgspec.Struct, frozen=True, array_like=True, tag="object_gone"):
        key: str
        object_id: int

    class OldMounted(msgspec.Struct, frozen=True, array_like=True, tag="segment_mounted"):
        segment: str
        epoch: int
        host: str
        address: int
        size_bytes: int
        descriptor: bytes

    gone = ObjectGone("k", 0, 7)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(gone), type=OldGone) == OldGone("k", 0)
    encoded = msgspec.msgpack.encode(OldGone("k", 5))
    assert msgspec.msgpack.decode(encoded, type=Record) == ObjectGone("k", 5)
    mounted = SegmentMounted("a", 1, "h", 0, 64, b"", wants_report=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(mounted), type=OldMounted).segment == "a"
    older = msgspec.msgpack.encode(OldMounted("a", 1, "h", 0, 64, b""))
    assert msgspec.msgpack.decode(older, type=Record) == SegmentMounted("a", 1, "h", 0, 64, b"")
