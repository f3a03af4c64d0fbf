# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from mooncake.errors import ProtocolError
from mooncake.transfer.descriptor import (
    Column,
    RegionIndex,
    RegionInfo,
    SegmentDescriptor,
    common_schemes,
    decode_descriptor,
)


def descriptor(host: str = "here", **endpoints: str) -> SegmentDescriptor:
    return SegmentDescriptor(
        "name", host, 2**63 - 1, endpoints, [RegionInfo(2**64 - 8192, 4096, 2**64 - 1, True)]
    )


def column(*values: int) -> Column:
    return np.array(values, dtype=np.uint64)


def test_a_descriptor_survives_its_encoding() -> None:
    original = descriptor(tcp="127.0.0.1:1", shm="x")
    assert decode_descriptor(original.encode()) == original


@pytest.mark.parametrize("encoded", [b"", b"{}", b"[1]", b'{"name": 1}', b"\xff\xfe"])
def test_other_bytes_are_no_descriptor(encoded: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a segment descriptor"):
        decode_descriptor(encoded)


@pytest.mark.parametrize("number", [-1, 1 << 64])
@pytest.mark.parametrize("field", ["address", "size_bytes", "key", "epoch"])
def test_numbers_that_no_process_has_are_refused(field: str, number: int) -> None:
    """Else they would raise errors of other libraries where the descriptor is used."""
    described = descriptor(tcp="127.0.0.1:1")
    if field == "epoch":
        described = msgspec.structs.replace(described, epoch=number)
    else:
        region = msgspec.structs.replace(described.regions[0], **{field: number})
        described = msgspec.structs.replace(described, regions=[region])
    with pytest.raises(ProtocolError, match="64 bits"):
        decode_descriptor(json.dumps(msgspec.to_builtins(described)).encode())


def test_paths_in_common() -> None:
    everything = descriptor(shm="x", tcp="t", local="77")
    assert common_schemes(everything, "here", "77", ("local", "shm", "tcp")) == ("local", "shm", "tcp")
    assert common_schemes(everything, "here", "78", ("tcp", "shm", "local")) == ("tcp", "shm")
    assert common_schemes(descriptor(file="x"), "here", "77", ("file",)) == ("file",)
    assert common_schemes(descriptor(file="x"), "there", "77", ("file",)) == ()
    assert common_schemes(everything, "there", "77", ("local", "shm", "tcp")) == ("tcp",)
    assert common_schemes(descriptor(tcp="t"), "here", "77", ("shm",)) == ()


def test_regions_of_releases_without_the_field_may_be_written() -> None:
    """A peer refuses writes to its read-only regions in any case."""
    encoded = descriptor(tcp="t").encode()
    assert b'"is_writable":true' in encoded
    assert decode_descriptor(encoded.replace(b',"is_writable":true', b"")) == descriptor(tcp="t")


def test_slices_in_shared_memory() -> None:
    top = 2**64 - 1
    regions = [
        RegionInfo(1000, 100, 1, True),
        RegionInfo(1100, 100, 2, False),
        RegionInfo(5000, 50, 3, True),
        RegionInfo(top - 99, 99, 4, True),
    ]
    index = RegionIndex(regions)
    assert not index.carries_all("shm") and index.carries_all("tcp") and index.carries_all("local")
    cases = [
        (1000, 100, True),
        (1000, 101, False),
        (1099, 1, True),
        (1100, 1, False),
        (999, 2, False),
        (999, 0, True),
        (5010, 40, True),
        (5050, 0, True),
        (6000, 1, False),
        (0, 1, False),
        (top - 99, 99, True),
        (top - 1, 2, False),
        (5010, top, False),
    ]
    found = index.carried("shm", column(*(c[0] for c in cases)), column(*(c[1] for c in cases)))
    assert found.tolist() == [c[2] for c in cases]
    files = [RegionInfo(1000, 100, 1, True), RegionInfo(2000, 100, 2, True, "file")]
    files.append(RegionInfo(3000, 100, 3, False, "file"))  # of a release that opened files for itself only
    there = column(1000, 2099, 3000), column(1, 1, 1)
    assert RegionIndex(files).carried("file", *there).tolist() == [False, True, False]
    assert RegionIndex(files[:1]).carried("file", column(1, 2), column(0, 1)).tolist() == [True, False]
