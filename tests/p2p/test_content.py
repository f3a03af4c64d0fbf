# SPDX-License-Identifier: Apache-2.0
"""Contents on this host: files that are found, tensors that are placed, changes that are noticed."""

from __future__ import annotations

import gc
import hashlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mooncake.errors import InvalidArgument, StorageError
from mooncake.p2p.content import BufferContent, FolderContent, file_states, find_files, make_manifest
from mooncake.p2p.manifest import Manifest, ManifestItem, decode_manifest
from tests.p2p.peers import ELEMENTS, write_model


def test_files_are_found_with_their_tensors(tmp_path: Path) -> None:
    items = find_files(write_model(tmp_path / "m"))
    assert [item.name for item in items] == ["empty", "model.safetensors", "tokenizer/vocab.json"]
    large, small = items[1].tensors
    assert (large.name, large.element_bytes, large.size_bytes) == ("large", 2, 2 * (ELEMENTS - 1000))
    assert small.offset == large.offset + large.size_bytes
    assert small.offset + small.size_bytes == items[1].size_bytes


def safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(4)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x10" + b"\0" * 7 + b'{"t": {"dtype":1',
        safetensors(b'{"t":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        safetensors(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
        safetensors(b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0.5,4.0]}}'),
        safetensors(b'{"t":{"dtype":[1],"shape":[1],"data_offsets":[0,4]}}'),
    ],
    ids=["empty", "number", "list", "cut", "deep", "surrogate", "fraction", "type"],
)
def test_a_damaged_safetensors_file_is_one_without_tensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    assert find_files(tmp_path) == [ManifestItem("m.safetensors", len(content))]


def test_what_is_registered_is_what_peers_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would exclude the peer for a manifest that is as it was asked for."""
    content = BufferContent({"a": np.zeros(8), "a/b": np.zeros(8)})
    with pytest.raises(InvalidArgument, match="one of its folders is a file"):
        make_manifest("buffers", content.items, content)
    content = BufferContent({"a": np.zeros(8), "b": np.zeros(8)})
    assert accepted(make_manifest("buffers", content.items, content)).items == content.items
    with monkeypatch.context() as few:
        few.setattr("mooncake.p2p.manifest.MAX_TENSORS", 1)
        found = accepted(make_manifest("buffers", content.items, content))
        assert [(item.size_bytes, item.tensors) for item in found.items] == [(64, [])] * 2
    monkeypatch.setattr("mooncake.p2p.manifest.MAX_ITEMS", 1)
    with pytest.raises(InvalidArgument, match="at most 1 files or buffers"):
        make_manifest("buffers", content.items, content)


def accepted(manifest: Manifest) -> Manifest:
    return decode_manifest(manifest.encoded, manifest.digest)


def test_links_to_files_are_followed_and_may_be_confined(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "blob").write_bytes(b"12345")
    (folder / "weights").symlink_to(tmp_path / "blob")
    assert find_files(folder) == [ManifestItem("weights", 5)]
    assert find_files(folder, tmp_path) == [ManifestItem("weights", 5)]
    with pytest.raises(InvalidArgument, match="leads out"):
        find_files(folder, folder)


def test_folders_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="folder"):
        find_files(tmp_path / "absent")
    with pytest.raises(InvalidArgument, match="0"):
        find_files(tmp_path)
    (tmp_path / "a\nb").write_text("x")
    with pytest.raises(InvalidArgument, match="names"):
        find_files(tmp_path)


def test_digests_are_those_of_the_chunks(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    items = find_files(folder)
    content = FolderContent(folder, items, file_states(folder, items))
    shown: list[tuple[int, int]] = []
    manifest = make_manifest("folder", items, content, lambda done, total: shown.append((done, total)))
    manifest.check()
    whole = (folder / "model.safetensors").read_bytes()
    for number, chunk in enumerate(manifest.chunks):
        if items[chunk.item].name == "model.safetensors":
            expected = hashlib.sha256(whole[chunk.offset : chunk.offset + chunk.size_bytes]).digest()
            assert manifest.chunk_digest(number) == expected
    assert shown[-1] == (manifest.size_bytes, manifest.size_bytes)


def test_a_change_of_a_file_is_noticed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    items = find_files(folder)
    content = FolderContent(folder, items, file_states(folder, items))
    assert content.is_unchanged(1)
    os.utime(folder / "model.safetensors", (1, 1))
    assert not content.is_unchanged(1) and content.is_unchanged(2)
    (folder / "tokenizer" / "vocab.json").unlink()
    assert not content.is_unchanged(2)
    os.truncate(folder / "model.safetensors", 100)
    with pytest.raises(StorageError, match="shorter"):
        content.read(1, 0, 200)
    content.close()


def test_a_folder_with_more_files_than_are_kept_open(tmp_path: Path) -> None:
    for i in range(400):
        (tmp_path / f"{i:03}").write_bytes(bytes([i % 256]) * (i + 1))
    items = find_files(tmp_path)
    content = FolderContent(tmp_path, items)
    before = len(os.listdir("/proc/self/fd"))
    assert all(content.read(i, 0, i + 1) == bytes([i % 256]) * (i + 1) for i in range(400))
    assert len(os.listdir("/proc/self/fd")) - before <= 257
    content.close()
    assert len(os.listdir("/proc/self/fd")) - before <= 1


def test_buffers_of_several_kinds() -> None:
    tensor = torch.arange(10, dtype=torch.bfloat16)
    buffers = {
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bytes": bytearray(b"abc"),
        "t": tensor,
        "times": np.zeros(2, dtype="M8[s]"),
        "records": np.zeros(1, dtype=[("a", "f8", 3)]),
    }
    content = BufferContent(buffers, is_writable=True)
    sizes = {item.name: (item.size_bytes, item.tensors[0].element_bytes) for item in content.items}
    assert sizes == {"array": (24, 4), "bytes": (3, 1), "records": (24, 1), "t": (20, 2), "times": (16, 8)}
    content.write(3, 0, b"\0" * 20)
    assert not tensor.any() and content.read(1, 1, 2) == b"bc"
    with pytest.raises(InvalidArgument, match="contiguous"):
        BufferContent({"x": np.zeros((4, 4))[:, ::2]})
    with pytest.raises(InvalidArgument, match="written"):
        BufferContent({"x": b"read-only"}, is_writable=True)
    with pytest.raises(InvalidArgument, match="name"):
        BufferContent({"../x": bytearray(1)})


@pytest.mark.parametrize(
    "buffer",
    [
        np.array([object()], dtype=object),
        np.zeros(4, dtype=[("a", "O"), ("b", "i4")]),
        np.zeros((4, 4))[:, 1],
        torch.empty(4, device="meta"),
        "text",
        (1 << 20, 8),
        None,
    ],
    ids=["objects", "records", "strided", "meta", "text", "address", "none"],
)
def test_memory_that_does_not_hold_values_is_refused(buffer: object) -> None:
    with pytest.raises(InvalidArgument, match="buffer"):
        BufferContent({"a": buffer}, is_writable=True)


def test_buffers_live_as_long_as_they_are_registered() -> None:
    tensor = torch.arange(100, dtype=torch.float32)
    found = weakref.ref(tensor)
    content = BufferContent({"w": tensor})
    del tensor
    gc.collect()
    assert found() is not None and content.read(0, 4, 4) == np.float32(1).tobytes()
    content.close()
    gc.collect()
    assert found() is None
    with pytest.raises(StorageError, match="no longer served"):
        content.read(0, 0, 4)


def test_memory_that_belongs_to_two_contents_is_noticed() -> None:
    memory = np.arange(100, dtype=np.uint8)
    whole = BufferContent({"a": memory[:50], "b": memory[50:]})
    assert whole.is_same_memory(BufferContent({"a": memory[:50], "b": memory[50:]}))
    assert not whole.is_same_memory(BufferContent({"b": memory[:50], "a": memory[50:]}))
    assert whole.overlaps(BufferContent({"x": memory[49:50]})) and not whole.overlaps(
        BufferContent({"x": np.zeros(100), "empty": memory[:0]})
    )
    left, right = BufferContent({"x": memory[:50], "y": memory[:10]}), BufferContent({"x": memory[50:]})
    assert not left.overlaps(right) and not right.overlaps(left)
    assert BufferContent({"x": memory[40:60]}).overlaps(left)
    assert BufferContent({"x": memory[40:60]}).overlaps(right)


def test_buffers_that_are_whole_are_not_written_to() -> None:
    memory = bytearray(4)
    content = BufferContent({"w": memory}, is_writable=True)
    content.write(0, 0, b"abcd")
    content.finish()
    with pytest.raises(StorageError, match="whole"):
        content.write(0, 0, b"late")
    assert memory == b"abcd" and content.read(0, 0, 4) == b"abcd"


def test_a_folder_that_is_closed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file gets the descriptor's number as soon as it is closed."""
    (tmp_path / "file").write_bytes(b"right")
    (tmp_path / "other").write_bytes(b"wrong")
    content = FolderContent(tmp_path, [ManifestItem("file", 5)])
    content.read(0, 0, 5)
    pread, others = os.pread, []

    def closed_before(fd: int, size_bytes: int, offset: int) -> bytes:
        content.close()
        others.append(os.open(tmp_path / "other", os.O_RDONLY))
        return pread(fd, size_bytes, offset)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pread", closed_before)
    assert content.read(0, 0, 5) == b"right"
    os.close(others[0])
    assert len(os.listdir("/proc/self/fd")) == before - 1
    with pytest.raises(StorageError, match="no longer served"):
        content.read(0, 0, 5)


def test_a_folder_that_would_not_come_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "m")
    odd = folder / "odd"
    kinds: list[tuple[Callable[[], None], str]] = [
        (lambda: odd.symlink_to("nowhere"), "leads to nothing"),
        (lambda: odd.symlink_to(tmp_path, target_is_directory=True), "what this link leads to"),
        (lambda: os.mkfifo(odd), "special file"),
    ]
    for make, why in kinds:
        make()
        with pytest.raises(InvalidArgument, match=why):
            find_files(folder)
        odd.unlink()
    items = find_files(folder)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")  # a writer that has not ended
    with pytest.raises(StorageError, match="has changed"):
        file_states(folder, items)
    (folder / "empty").unlink()
    with pytest.raises(StorageError, match="empty: No such file"):
        file_states(folder, items)
    scandir = os.scandir

    def refused(path: str) -> object:
        if str(path).endswith("tokenizer"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(StorageError, match="Permission denied"):
        find_files(folder)


def test_a_file_that_becomes_a_link_out_of_the_allowed_folder_is_not_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "root" / "m")
    (tmp_path / "secret").write_text("x" * 8)
    items = find_files(folder, tmp_path / "root")
    content = FolderContent(folder, items, allowed=tmp_path / "root")
    assert content.read(2, 0, 8) == b'{"a": 1}'
    content = FolderContent(folder, items, allowed=tmp_path / "root")
    (folder / "tokenizer" / "vocab.json").unlink()
    (folder / "tokenizer" / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(StorageError, match="leads out"):
        content.read(2, 0, 8)
