# SPDX-License-Identifier: Apache-2.0
"""A folder on its way: what survives an end of the process, what is not believed, and the one rename."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from mooncake.errors import InvalidArgument, OutOfSpace
from mooncake.p2p import content as content_module
from mooncake.p2p import partial_folder
from mooncake.p2p.content import FolderContent, find_files, make_manifest
from mooncake.p2p.manifest import Manifest
from mooncake.p2p.partial_folder import PartialFolder
from tests.p2p.peers import contents, write_model


@pytest.fixture
def version(tmp_path: Path) -> tuple[Manifest, FolderContent]:
    folder = write_model(tmp_path / "model")
    items = find_files(folder)
    content = FolderContent(folder, items)
    return make_manifest("folder", items, content), content


def put(partial: PartialFolder, version: tuple[Manifest, FolderContent], *chunks: int) -> None:
    manifest, source = version
    for chunk in chunks:
        place = manifest.chunks[chunk]
        partial.content.write(place.item, place.offset, source.read(*place))
        partial.record(chunk)


def test_chunks_that_were_written_are_there_after_a_restart(
    tmp_path: Path, version: tuple[Manifest, FolderContent]
) -> None:
    partial = PartialFolder(tmp_path / "copy", version[0])
    assert not partial.have.any()
    put(partial, version, 3, 1)
    partial.close()
    again = PartialFolder(tmp_path / "copy", version[0])
    assert np.flatnonzero(again.have).tolist() == [1, 3]
    put(again, version, *np.flatnonzero(~again.have).tolist())
    again.finish()
    again.content.close()
    assert contents(tmp_path / "copy") == contents(tmp_path / "model")
    assert not (tmp_path / "copy.partial").exists()


def test_a_log_is_not_believed(tmp_path: Path, version: tuple[Manifest, FolderContent]) -> None:
    partial = PartialFolder(tmp_path / "copy", version[0])
    put(partial, version, 2)
    partial.close()
    with (tmp_path / "copy.partial" / "chunks").open("ab") as log:
        log.write(np.array([2, 4, 1 << 30], dtype="<u4").tobytes() + b"\x01\x02")
    again = PartialFolder(tmp_path / "copy", version[0])
    assert np.flatnonzero(again.have).tolist() == [2]
    put(again, version, 4)
    again.close()
    once_more = PartialFolder(tmp_path / "copy", version[0])
    assert np.flatnonzero(once_more.have).tolist() == [2, 4]
    once_more.remove()
    assert not (tmp_path / "copy.partial").exists()


def test_files_that_became_shorter_are_loaded_again(
    tmp_path: Path, version: tuple[Manifest, FolderContent]
) -> None:
    partial = PartialFolder(tmp_path / "copy", version[0])
    put(partial, version, 1, 2)
    partial.close()
    (tmp_path / "copy.partial" / "content" / "model.safetensors").write_bytes(b"")
    again = PartialFolder(tmp_path / "copy", version[0])
    assert not again.have.any()
    again.close()


def test_another_version_begins_anew(tmp_path: Path, version: tuple[Manifest, FolderContent]) -> None:
    partial = PartialFolder(tmp_path / "copy", version[0])
    put(partial, version, 1)
    partial.close()
    other = Manifest("folder", version[0].items[:1], [], b"")
    again = PartialFolder(tmp_path / "copy", other)
    again.finish()
    again.content.close()
    assert contents(tmp_path / "copy") == {"empty": b""}


def test_a_link_in_the_partial_folder_is_not_followed(
    tmp_path: Path, version: tuple[Manifest, FolderContent]
) -> None:
    partial = PartialFolder(tmp_path / "copy", version[0])
    partial.close()
    target = tmp_path / "victim"
    target.write_text("untouched")
    place = tmp_path / "copy.partial" / "content" / "model.safetensors"
    place.unlink()
    place.symlink_to(target)
    with pytest.raises(Exception, match=r"model\.safetensors"):
        PartialFolder(tmp_path / "copy", version[0])
    assert target.read_text() == "untouched"


def test_a_disk_without_room_is_named_before_anything_is_loaded(
    tmp_path: Path, version: tuple[Manifest, FolderContent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_folder, "RESERVE_BYTES", 1 << 62)
    with pytest.raises(OutOfSpace, match="make room"):
        PartialFolder(tmp_path / "copy", version[0])


def test_chunks_are_read_while_the_folder_gets_its_name(
    tmp_path: Path, version: tuple[Manifest, FolderContent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that comes in between must not take the chunk for damaged."""
    monkeypatch.setattr(content_module, "MAX_OPEN_FILES", 0)  # each read opens the file by its path
    manifest, source = version
    partial = PartialFolder(tmp_path / "copy", manifest)
    put(partial, version, *range(len(manifest.chunks)))
    content = partial.content
    is_ending = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        while not is_ending.is_set():
            for item in (1, 2):
                try:
                    assert content.read(item, 0, 8) == source.read(item, 0, 8) and content.is_unchanged(item)
                except BaseException as error:
                    failures.append(error)
                    return

    reader = threading.Thread(target=read)
    reader.start()
    partial.finish()
    is_ending.set()
    reader.join()
    assert not failures
    assert content.root == tmp_path / "copy" and content.is_unchanged(1)
    content.close()


def test_a_folder_that_exists_stays(tmp_path: Path, version: tuple[Manifest, FolderContent]) -> None:
    (tmp_path / "copy").symlink_to("nowhere")
    with pytest.raises(InvalidArgument, match="does not exist"):
        PartialFolder(tmp_path / "copy", version[0])
    (tmp_path / "copy").unlink()
    partial = PartialFolder(tmp_path / "copy", version[0])
    put(partial, version, *range(len(version[0].chunks)))
    (tmp_path / "copy").mkdir()
    with pytest.raises(InvalidArgument, match="does not exist"):
        partial.finish()
    partial.close()


@pytest.mark.parametrize("name", ["precious", "content/precious"])
def test_a_folder_that_no_load_made_is_left_alone(
    tmp_path: Path, version: tuple[Manifest, FolderContent], name: str
) -> None:
    precious = tmp_path / "copy.partial" / name
    precious.parent.mkdir(parents=True, mode=0o700)
    precious.write_text("kept")
    with pytest.raises(InvalidArgument, match="not a load's"):
        PartialFolder(tmp_path / "copy", version[0])
    assert precious.read_text() == "kept"
    with pytest.raises(InvalidArgument, match="does not end"):
        PartialFolder(tmp_path / "other.partial", version[0])


def test_files_that_the_version_lacks_do_not_come_along(
    tmp_path: Path, version: tuple[Manifest, FolderContent]
) -> None:
    PartialFolder(tmp_path / "copy", version[0]).close()
    content = tmp_path / "copy.partial" / "content"
    (content / "more").mkdir()
    (content / "more" / "file").write_text("x")
    (content / "tokenizer" / "other").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (content / "link").symlink_to(tmp_path / "elsewhere")
    (content / "tokenizer" / "vocab.json").unlink()
    (content / "tokenizer" / "other").rename(content / "tokenizer" / "vocab.json")
    again = PartialFolder(tmp_path / "copy", version[0])
    put(again, version, *range(len(version[0].chunks)))
    again.finish()
    again.content.close()
    assert contents(tmp_path / "copy") == contents(tmp_path / "model")
    assert sorted(one.name for one in (tmp_path / "copy").iterdir()) == [
        "empty",
        "model.safetensors",
        "tokenizer",
    ]


def test_a_link_in_the_place_of_a_folder_is_removed(
    tmp_path: Path, version: tuple[Manifest, FolderContent]
) -> None:
    PartialFolder(tmp_path / "copy", version[0]).close()
    folder = tmp_path / "copy.partial" / "content" / "tokenizer"
    (folder / "vocab.json").unlink()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    again = PartialFolder(tmp_path / "copy", version[0])
    put(again, version, *range(len(version[0].chunks)))
    again.close()
    assert not list((tmp_path / "elsewhere").iterdir()) and not folder.is_symlink()
