# SPDX-License-Identifier: Apache-2.0
"""Deltas: the result is the new version, small changes make small deltas, damaged ones are refused."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mooncake.errors import ProtocolError
from mooncake.p2p import delta as deltas
from mooncake.p2p.content import BufferContent, make_manifest
from mooncake.p2p.delta import MAGIC, MAX_PARTS, DeltaPart, apply_delta, write_delta
from mooncake.p2p.manifest import Manifest

Buffers = dict[str, NDArray[Any]]


def made(buffers: Buffers) -> tuple[Manifest, BufferContent]:
    content = BufferContent(buffers)
    return make_manifest("buffers", content.items, content), content


def delta_of(old: Buffers, new: Buffers, limit: int = 1 << 30) -> bytes | None:
    file = io.BytesIO()
    return file.getvalue() if write_delta(*made(old), *made(new), file, limit) else None


def applied(delta: bytes, old: Buffers, new: Buffers) -> Buffers:
    result = {name: np.zeros_like(array) for name, array in new.items()}
    sink = BufferContent(result, is_writable=True)
    source = BufferContent({"delta": np.frombuffer(delta, dtype=np.uint8)})
    apply_delta(source, len(delta), *made(old), made(new)[0], sink)
    return result


def same(a: Buffers, b: Buffers) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("kind", [np.uint16, np.float32, np.int64, np.uint8])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.4])
def test_elements_that_differ_are_enough(kind: type, share: float) -> None:
    random = np.random.default_rng(1)
    old = {"w": random.integers(0, 250, 200_000).astype(kind), "same": np.arange(1000, dtype=np.uint16)}
    new = {name: array.copy() for name, array in old.items()}
    places = np.flatnonzero(random.random(200_000) < share)
    new["w"][places] += 1
    delta = delta_of(old, new)
    assert delta is not None and same(applied(delta, old, new), new)
    assert len(delta) < len(places) * (new["w"].itemsize + 3) + 1000


def test_one_percent_of_a_model_of_bfloat16_takes_far_less_than_12_mb() -> None:
    random = np.random.default_rng(2)
    old = {"w": random.integers(0, 1 << 16, 13_500_000).astype(np.uint16)}
    new = {"w": old["w"].copy()}
    places = np.flatnonzero(random.random(13_500_000) < 0.01)
    new["w"][places] ^= random.integers(1, 1 << 16, len(places)).astype(np.uint16)
    delta = delta_of(old, new)
    assert delta is not None
    assert len(delta) < 12e6 / 269 * 27  # a tenth of such a model
    assert same(applied(delta, old, new), new)


@given(st.data())
def test_any_change_is_applied(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 400))
    old = {"w": np.frombuffer(data.draw(st.binary(min_size=2 * size, max_size=2 * size)), dtype="<u2").copy()}
    new = {"w": old["w"].copy()}
    for place in data.draw(st.lists(st.integers(0, size - 1), max_size=40)):
        new["w"][place] ^= 1
    if data.draw(st.booleans()):
        new["x"] = np.frombuffer(data.draw(st.binary(min_size=1, max_size=300)), dtype=np.uint8).copy()
    delta = delta_of(old, new)
    assert delta is not None and same(applied(delta, old, new), new)


def test_gaps_that_are_wider_than_a_byte() -> None:
    old = {"w": np.zeros(3_000_000, dtype=np.uint16)}
    for places in ([0], [254], [255], [256], [510, 511], [2_999_999], [0, 70_000, 2_999_999]):
        new = {"w": old["w"].copy()}
        new["w"][places] = 7
        delta = delta_of(old, new)
        assert delta is not None and len(delta) < 20_000 and same(applied(delta, old, new), new), places


def test_tensors_of_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "PIECE_BYTES", 1000)
    old = {"w": np.arange(5_001, dtype=np.uint16)}
    new = {"w": old["w"] ^ (np.arange(5_001) % 97 == 0).astype(np.uint16)}
    delta = delta_of(old, new)
    assert delta is not None and same(applied(delta, old, new), new)


def test_a_delta_that_is_too_large_is_given_up() -> None:
    random = np.random.default_rng(3)
    old, new = ({"w": random.integers(0, 256, 10_000).astype(np.uint8)} for _ in range(2))
    assert delta_of(old, new, limit=5_000) is None


def table(delta: bytes) -> tuple[list[Any], int]:
    at = int.from_bytes(delta[-8:], "little")
    return msgspec.msgpack.decode(delta[at:-8]), at


def with_part(delta: bytes, number: int, **changes: Any) -> bytes:
    at = int.from_bytes(delta[-8:], "little")
    parts = msgspec.msgpack.decode(delta[at:-8], type=list[DeltaPart])
    parts[number] = msgspec.structs.replace(parts[number], **changes)
    return delta[:at] + msgspec.msgpack.encode(parts) + delta[-8:]


@pytest.fixture
def versions() -> tuple[Buffers, Buffers, bytes]:
    old = {"w": np.arange(4000, dtype=np.uint16)}
    new = {"w": old["w"].copy()}
    new["w"][::100] += 1
    delta = delta_of(old, new)
    assert delta is not None
    return old, new, delta


@pytest.mark.parametrize(
    "changes",
    [
        {"base_item": 1},
        {"base_offset": 8},
        {"base_offset": -2},
        {"size_bytes": 1 << 40},
        {"size_bytes": 7998},
        {"size_bytes": 0},
        {"body_bytes": 1 << 30},
        {"body_bytes": -1},
        {"num_changed": 0},
        {"num_changed": 1 << 40},
        {"num_changed": 39},
        {"element_bytes": 3},
        {"element_bytes": 0},
        {"gap_width": 3},
        {"gap_bytes": 0},
        {"gap_bytes": 1 << 30},
        {"kind": "program"},
        {"kind": "raw"},
    ],
)
def test_impossible_parts_are_refused(
    versions: tuple[Buffers, Buffers, bytes], changes: dict[str, Any]
) -> None:
    old, new, delta = versions
    with pytest.raises(ProtocolError, match="damaged"):
        applied(with_part(delta, 0, **changes), old, new)


def test_damage_is_refused_or_changes_bytes_only(versions: tuple[Buffers, Buffers, bytes]) -> None:
    old, new, delta = versions
    for cut in (0, 5, len(MAGIC) + 3, len(delta) - 9, len(delta) - 1):
        with pytest.raises(ProtocolError):
            applied(delta[:cut], old, new)
    for place in range(0, len(delta), 3):
        wrong = bytearray(delta)
        wrong[place] ^= 0x55
        try:
            applied(bytes(wrong), old, new)
        except ProtocolError:
            continue


def test_a_part_that_decompresses_to_more_than_announced_is_refused() -> None:
    old = {"w": np.zeros(100, dtype=np.uint8)}
    new = {"w": np.zeros(100, dtype=np.uint8), "x": np.zeros(5_000, dtype=np.uint8)}
    delta = delta_of(old, new)
    assert delta is not None
    smaller = {"w": new["w"], "x": np.zeros(50, dtype=np.uint8)}
    with pytest.raises(ProtocolError, match="another size"):
        applied(with_part(delta, 1, size_bytes=50), old, smaller)


def test_a_table_of_too_many_parts_is_refused_before_it_takes_memory() -> None:
    versions = {"w": np.zeros(100, dtype=np.uint8)}
    table = msgspec.msgpack.encode([["raw", 1]] * (MAX_PARTS + 1))
    delta = MAGIC + table + len(MAGIC).to_bytes(8, "little")
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="table of parts"):
            applied(delta, versions, versions)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_part_reads_no_more_than_its_own_bytes(versions: tuple[Buffers, Buffers, bytes]) -> None:
    old, new, _ = versions
    body = b"r" + bytes(1 << 20)
    table = msgspec.msgpack.encode([["raw", 8000, len(body)]])
    delta = MAGIC + body + table + (len(MAGIC) + len(body)).to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="outside"):
        applied(delta, old, new)
