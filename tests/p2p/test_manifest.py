# SPDX-License-Identifier: Apache-2.0
"""Manifests: how contents are cut, and what is refused of the network."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import msgspec
import pytest

from mooncake.errors import InvalidArgument, ProtocolError
from mooncake.p2p.manifest import (
    FORMAT,
    MAX_ITEMS,
    MAX_TENSORS,
    Manifest,
    ManifestItem,
    TensorSpan,
    check_version_name,
    chunk_sizes_of,
    decode_manifest,
    path_trouble,
)


def digests(number: int) -> bytes:
    return b"".join(hashlib.sha256(bytes([i])).digest() for i in range(number))


def encoded(items: list[Any], sizes: list[int], **changes: Any) -> tuple[bytes, str]:
    fields = {
        "format": FORMAT,
        "kind": "folder",
        "items": items,
        "sizes": sizes,
        "digests": digests(len(sizes)),
    }
    content = msgspec.msgpack.encode(list((fields | changes).values()))
    return content, hashlib.sha256(content).hexdigest()


def test_a_manifest_is_read_as_it_was_written() -> None:
    items = [ManifestItem("a/b", 5, [TensorSpan("t", 1, 0, 4)]), ManifestItem("c", 0), ManifestItem("d", 7)]
    manifest = Manifest("folder", items, [3, 2, 7], digests(3))
    again = decode_manifest(manifest.encoded, manifest.digest)
    assert again.chunks == [(0, 0, 3), (0, 3, 2), (2, 0, 7)] and again.digest == manifest.digest
    assert again.items == items and again.size_bytes == 12 and again.largest_chunk_bytes == 7
    assert again.holds(1, b"\x01") and not again.holds(1, b"\x02")
    again.check()


def test_other_bytes_than_named_are_refused() -> None:
    manifest = Manifest("folder", [ManifestItem("a", 1)], [1], digests(1))
    with pytest.raises(ProtocolError, match="another digest"):
        decode_manifest(manifest.encoded[:-1] + b"\0", manifest.digest)


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a\\b", "a\0b", "a\nb", "x" * 2000, "a/", "."],
)
def test_names_that_lead_out_of_the_folder_are_refused(name: str) -> None:
    assert path_trouble(name)
    with pytest.raises(ProtocolError, match="invalid"):
        decode_manifest(*encoded([[name, 1, []]], [1]))


@pytest.mark.parametrize(
    ("items", "sizes", "changes"),
    [
        ([["a", 1, []], ["a", 1, []]], [1, 1], {}),
        ([["b", 1, []], ["a", 1, []]], [1, 1], {}),
        ([["a", 1, []], ["a/b", 1, []]], [1, 1], {}),
        ([["a", 5, []]], [3], {}),
        ([["a", 5, []]], [3, 3], {}),
        ([["a", 5, []]], [5, 1], {}),
        ([["a", 5, []]], [0, 5], {}),
        ([["a", -5, []]], [], {}),
        ([["a", 1 << 60, []]], [1], {}),
        ([["a", 64 << 20, []]], [64 << 20], {}),
        ([["a", 5, [["t", 2, 0, 5]]]], [5], {}),
        ([["a", 5, [["t", 1, 3, 5]]]], [5], {}),
        ([["a", 5, [["t", 0, 0, 5]]]], [5], {}),
        ([["a", 5, []]], [5], {"digests": b"x" * 31}),
        ([["a", 5, []]], [5], {"kind": "program"}),
        ([["a", 5, []]], [5], {"format": "other"}),
        ("text", [5], {}),
    ],
)
def test_impossible_manifests_are_refused(
    items: list[Any], sizes: list[int], changes: dict[str, Any]
) -> None:
    with pytest.raises(ProtocolError):
        decode_manifest(*encoded(items, sizes, **changes))


def test_chunks_begin_with_large_tensors_so_that_a_moved_tensor_keeps_them() -> None:
    def cuts(header: int) -> list[tuple[int, int]]:
        small = [TensorSpan(f"s{i}", 2, header + 10 * i, 10) for i in range(20)]
        large = TensorSpan("l", 2, header + 200, 5000)
        sizes = chunk_sizes_of(header + 5300, [*small, large], 1000)
        assert max(sizes) <= 1000 and sum(sizes) == header + 5300 and min(sizes) > 0
        at, found = 0, []
        for size in sizes:
            found.append((at - header, size))
            at += size
        return [one for one in found if one[0] >= 0]

    assert cuts(100) == cuts(164)
    assert (200, 1000) in cuts(100) and (5200, 100) in cuts(100)


def test_a_file_without_tensors_is_cut_evenly() -> None:
    assert chunk_sizes_of(2500, [], 1000) == [1000, 1000, 500]
    assert chunk_sizes_of(0, [], 1000) == []


@pytest.mark.parametrize("name", ["", "a@b", "a\n", "x" * 300])
def test_version_names_are_bounded(name: str) -> None:
    with pytest.raises(InvalidArgument):
        check_version_name(name)


@pytest.mark.parametrize(
    "items",
    [
        [[f"{i:03}/" + "a/" * 500 + "f", 0, []] for i in range(300)],
        [["", 0]] * (20 * MAX_ITEMS),
        [["a", 0, [["", 1, 0, 0]] * (8 * MAX_TENSORS)]],
        [[f"{i:03}", 0, [["", 1, 0, 0]] * 10_000] for i in range(300)],
    ],
    ids=["depth", "files", "tensors", "tensors of several files"],
)
def test_a_manifest_is_refused_before_it_takes_memory(items: list[Any]) -> None:
    content, digest = encoded(items, [])
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_manifest(content, digest)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_manifest_with_more_fields_is_refused_as_it_would_get_another_name() -> None:
    with pytest.raises(ProtocolError, match="another form"):
        decode_manifest(*encoded([["a", 0, [], "more"]], []))
