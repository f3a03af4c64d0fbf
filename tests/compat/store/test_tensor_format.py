# SPDX-License-Identifier: Apache-2.0
"""The bytes are where the format defines them, and data that is not a tensor is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.compat.store.tensor_format import (
    DTYPES,
    HEADER_BYTES,
    Axis,
    AxisKind,
    TensorHeader,
    TensorManifest,
    decode,
    decode_manifest,
    encode,
    encode_manifest,
)

shapes = st.lists(st.integers(0, 5), max_size=8).map(tuple)
axes = st.lists(
    st.builds(
        Axis,
        st.sampled_from(list(AxisKind)),
        st.integers(0, 3),
        st.integers(4, 9),
        st.integers(-1, 7),
        st.integers(-1, 5),
        st.integers(0, 1 << 40),
    ),
    max_size=4,
).map(tuple)
headers = st.builds(lambda d, s, a: TensorHeader(d, s, s, a), st.sampled_from(list(DTYPES)), shapes, axes)


def test_every_field_has_its_place() -> None:
    axis = Axis(AxisKind.TP, rank=1, count=2, split_dim=1, member_id=7, extent=3)
    data = encode(TensorHeader("bfloat16", (4, 3), (4, 6), (axis,)))
    assert len(data) == HEADER_BYTES == 304
    assert struct.unpack_from("<IHHii", data) == (0x4D4F4F4E, 1, 304, 12, 2)
    assert struct.unpack_from("<IIQQ", data, 16) == (1, 0, 304, 4 * 3 * 2)
    assert struct.unpack_from("<8q", data, 40) == (4, 6, -1, -1, -1, -1, -1, -1)
    assert struct.unpack_from("<8q", data, 104) == (4, 3, -1, -1, -1, -1, -1, -1)
    assert struct.unpack_from("<II", data, 168) == (1, 0)
    assert struct.unpack_from("<6iq", data, 176) == (1, 0, 1, 2, 1, 7, 3)
    assert data[176 + 32 :] == bytes(96)


def test_numbers_of_the_types() -> None:
    wanted = "float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool float16 bfloat16"
    assert [DTYPES[name][0] for name in wanted.split()] == list(range(13))
    assert (DTYPES["float8_e4m3fn"][0], DTYPES["float8_e5m2"][0]) == (13, 14)


@given(headers)
def test_encoded_headers_are_decoded(header: TensorHeader) -> None:
    assert decode(encode(header), header.size_bytes) == header


@given(headers, st.integers(0, 303), st.binary(min_size=1, max_size=8))
def test_damaged_headers_are_refused_or_describe_a_tensor_that_fits(
    header: TensorHeader, at: int, noise: bytes
) -> None:
    data = bytearray(encode(header))
    data[at : at + len(noise)] = noise[: HEADER_BYTES - at]
    try:
        found = decode(data, header.size_bytes)
    except ValueError:
        return
    assert found.size_bytes <= header.size_bytes


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 304, b"x" * 400, encode(TensorHeader("int8", (9,), (9,)))[:303]]
)
def test_data_that_is_not_a_tensor(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a tensor"):
        decode(data, len(data))


@pytest.mark.parametrize("shape", [(-1,), (1 << 62, 1 << 62, 0), (1 << 62,), (-4, 0)])
def test_shapes_that_no_tensor_has(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        encode(TensorHeader("int64", (0,) * len(shape), shape))
    with pytest.raises(ValueError, match="shape"):
        decode_manifest(encode_manifest(TensorManifest("int64", shape, 0, 2)))


def test_a_truncated_tensor_is_refused() -> None:
    header = TensorHeader("int64", (4,), (4,))
    with pytest.raises(ValueError, match="not a tensor"):
        decode(encode(header), header.size_bytes - 1)


@pytest.mark.parametrize(
    "header",
    [
        TensorHeader("complex64", (1,), (1,)),
        TensorHeader("int8", (1,) * 9, (1,) * 9),
        TensorHeader("int8", (1,), (1,), (Axis(AxisKind.DP, 0, 1),) * 5),
    ],
)
def test_tensors_outside_the_format(header: TensorHeader) -> None:
    with pytest.raises(ValueError):
        encode(header)


@given(
    st.sampled_from(list(DTYPES)),
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(1, 99),
)
def test_manifests(dtype: str, shape: list[int], count: int) -> None:
    manifest = TensorManifest(dtype, tuple(shape), len(shape) - 1, count)
    data = encode_manifest(manifest)
    assert struct.unpack_from("<IHHiiiI", data) == (
        *(0x574D414E, 1, 96, DTYPES[dtype][0]),
        *(len(shape), len(shape) - 1, count),
    )
    assert decode_manifest(data) == manifest
    for wrong in (data[:-1], b"\0" * len(data), b""):
        with pytest.raises(ValueError):
            decode_manifest(wrong)
