# SPDX-License-Identifier: Apache-2.0
"""A manifest is refused when it refers to anything outside its bundle, or contradicts itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mooncake.compat.objects import manifest
from mooncake.compat.objects.manifest import StoredChunk, check, decode, encode, runs_in_chunks

ROOT = "rl/train/1"
KEY = f"{ROOT}/manifest"


def a_manifest() -> dict[str, Any]:
    chunks = [{"key": f"{ROOT}/buffer/x/chunk/{n}", "bytes": size} for n, size in enumerate((4, 4, 2))]
    return {
        "version": 1,
        "layout": "bundle",
        "object_id": "train/1",
        "meta": {"key": f"{ROOT}/meta", "bytes": 2, "chunks": [{"key": f"{ROOT}/meta", "bytes": 2}]},
        "buffers": {"x": {"key": f"{ROOT}/buffer/x", "bytes": 10, "chunks": chunks}},
    }


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(a_manifest())
    inner: Any = found
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return found


def test_a_manifest_comes_back_as_it_was_written() -> None:
    found = check(decode(encode(a_manifest())), KEY, "rl")
    assert found.document() == a_manifest()
    assert found.keys() == [f"{ROOT}/meta", *(f"{ROOT}/buffer/x/chunk/{number}" for number in range(3))]
    appended = a_manifest() | {
        "buffer_object_ids": ["train/1", "train/0"],
        "cleanup_keys": ["rl/train/0/manifest"],
    }
    found = check(appended, KEY, "rl")
    assert found.document() == appended and found.other_ids == ("train/0",)
    assert found.keys()[-1] == "rl/train/0/manifest"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("version",), 2, "unsupported"),
        (("object_id",), "train", "PARTITION/ID"),
        (("object_id",), "train/2", "manifest_key"),
        (("buffer_object_ids",), ["x"], "PARTITION/ID"),
        (("buffer_object_ids",), "train/2", "not a list"),
        (("cleanup_keys",), ["rl/other/1/meta"], "cleanup_keys"),
        (("buffers", "x", "key"), "rl/train/11/buffer/x", "namespace"),
        (("buffers", "x", "chunks", 0, "key"), "other/object", "namespace"),
        (("buffers", "x", "chunks", 0, "bytes"), 5, "do not have its 10 bytes"),
        (("buffers", "x", "chunks", 0, "bytes"), -4, "size -4"),
        (("buffers", "x", "chunks", 0, "key"), "rl/train/1", "namespace"),
        (("buffers", "x", "chunks", 0, "key"), "rl/train/1/", "namespace"),
        (("buffers", "x", "chunks", 0, "key"), f"{ROOT}/buffer/x/chunk/1", "named twice"),
        (("buffers", "x", "chunks", 2), {"key": f"{ROOT}/meta", "bytes": 2}, "named twice"),
        (("buffers", "x", "bytes"), True, "size True"),
        (("buffers", "x", "bytes"), 1 << 60, "size"),
        (("buffers", "x", "metadata_bytes"), 11, "header of 11 bytes in 10"),
        (("buffers", "x", "kind"), "pickle", "unknown kind"),
        (("buffers", "x", "chunks"), None, "chunks"),
        (("buffers",), [], "buffers"),
        (("meta",), None, "chunks"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(path: tuple[Any, ...], value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check(changed(path, value), KEY, "rl")


def test_a_name_that_would_be_another_key_is_refused() -> None:
    found = a_manifest()
    found["buffers"]["a/b"] = found["buffers"].pop("x")
    with pytest.raises(ValueError, match="buffer name"):
        check(found, KEY, "rl")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"[" * 100_000])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="manifest"):
        decode(data)


def test_a_manifest_that_is_too_large_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 10)
    with pytest.raises(ValueError, match="1 to 10"):
        decode(encode(a_manifest()))


def test_runs_are_cut_at_chunks() -> None:
    chunks = [StoredChunk(str(number), size) for number, size in enumerate((4, 4, 2))]
    assert list(runs_in_chunks(chunks, [(0, 10)])) == [(0, 0, 0, 4), (1, 0, 4, 4), (2, 0, 8, 2)]
    assert list(runs_in_chunks(chunks, [(9, 1), (3, 2), (4, 4)])) == [
        (2, 1, 0, 1),
        (0, 3, 1, 1),
        (1, 0, 2, 1),
        (1, 0, 3, 4),
    ]
    assert list(runs_in_chunks(chunks, [(5, 0), (0, 1)])) == [(0, 0, 0, 1)]
    assert list(runs_in_chunks([], [(0, 0)])) == []
