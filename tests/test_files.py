# SPDX-License-Identifier: Apache-2.0
"""Directories and their files: owner, mode, names and locks; the rest is in ``contract/test_files.py``."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.errors import InvalidArgument
from mooncake.files import OsDirectory, UntrustedFile, check_file
from mooncake.store.node.ssd import Disk
from mooncake.transfer import TransferEngine, TransferSettings

MIB = 1 << 20
FILES = ("mooncake.data", "mooncake.index", "mooncake.ssd", "mooncake.lock")


def test_a_file_is_not_at_its_path_once_its_directory_was_removed(tmp_path: Path) -> None:
    directory = OsDirectory(tmp_path / "folder", is_private=True)
    file = directory.open("log")
    assert file.is_at(tmp_path / "folder" / "log")
    shutil.rmtree(tmp_path / "folder")
    assert not file.is_at(tmp_path / "folder" / "log")
    (tmp_path / "folder").write_bytes(b"")
    assert not file.is_at(tmp_path / "folder" / "log")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_directory_and_its_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    directory = OsDirectory(path, is_private=True)
    (path / "old").write_bytes(b"")
    (path / "old").chmod(0o644)
    for name in ("old", "new"):
        directory.open(name).close()
    assert (mode(path), mode(path / "old"), mode(path / "new")) == (0o700, 0o600, 0o600)
    directory.close()


@pytest.mark.parametrize("bits", [0o770, 0o702, 0o1777])
def test_a_directory_that_others_may_write_to_is_not_private(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    path.chmod(bits)
    with pytest.raises(UntrustedFile, match="only its owner may write to"):
        OsDirectory(path, is_private=True)


def test_a_private_directory_may_lie_where_the_sticky_bit_protects_it_and_nowhere_worse(
    tmp_path: Path,
) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o1777)
    OsDirectory(above / "folder", is_private=True).close()
    above.chmod(0o777)
    with pytest.raises(UntrustedFile, match="others may not write to"):
        OsDirectory(above / "folder", is_private=True)


def test_a_shared_directory_may_be_sticky_or_of_a_group(tmp_path: Path) -> None:
    for bits in (0o1777, 0o770, 0o755):
        tmp_path.chmod(bits)
        OsDirectory(tmp_path).close()
    tmp_path.chmod(0o777)
    with pytest.raises(UntrustedFile, match="chmod o-w"):
        OsDirectory(tmp_path)
    tmp_path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_owns_is_refused(tmp_path: Path) -> None:
    path, link = tmp_path / "folder", tmp_path / "link"
    directory = OsDirectory(path, is_private=True)
    (path / "file").write_bytes(b"")
    os.chown(path / "file", 12345, -1)
    with pytest.raises(UntrustedFile, match="of user 12345"):
        directory.open("file")
    link.symlink_to(path)
    OsDirectory(link, is_private=True).close()
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.raises(UntrustedFile, match="a link that user 12345 has made"):
        OsDirectory(link, is_private=True)
    os.chown(path, 12345, -1)
    with pytest.raises(UntrustedFile, match="of user 12345"):
        OsDirectory(path, is_private=True)


def test_links_and_other_things_are_not_opened(tmp_path: Path) -> None:
    directory, target = OsDirectory(tmp_path), tmp_path / "target"
    target.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(UntrustedFile):
            directory.open(name)
    assert target.read_bytes() == b"mine"


def test_a_file_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    path.chmod(0o666)
    with pytest.raises(UntrustedFile, match="chmod go-w"):
        OsDirectory(tmp_path).open("log")
    with pytest.raises(UntrustedFile):
        check_file(path, path.stat())


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(transports=("file",))) as engine:
        yield engine


def test_the_directory_and_its_files_are_accessible_by_their_owner_only(
    engine: TransferEngine, tmp_path: Path
) -> None:
    path = tmp_path / "ssd"
    Disk(engine, path, MIB).close()
    assert mode(path) == 0o700 and {mode(path / name) for name in FILES} == {0o600}


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_the_place_of_a_file_is_not_followed(
    engine: TransferEngine, tmp_path: Path, name: str
) -> None:
    """The user who made the link would choose a file to be extended, made private and overwritten."""
    path, victim = tmp_path / "ssd", tmp_path / "victim"
    path.mkdir(0o700)
    victim.write_bytes(b"precious")
    victim.chmod(0o644)
    (path / name).symlink_to(victim)
    with pytest.raises(InvalidArgument, match="is a link"):
        Disk(engine, path, MIB)
    assert victim.read_bytes() == b"precious" and mode(victim) == 0o644


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o770])
def test_a_directory_that_others_may_write_to_is_refused(
    engine: TransferEngine, tmp_path: Path, bits: int
) -> None:
    path = tmp_path / "ssd"
    path.mkdir()
    path.chmod(bits)
    with pytest.raises(InvalidArgument, match="chmod go-w"):
        Disk(engine, path, MIB)
    assert not list(path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_and_a_file_of_another_user_are_refused(engine: TransferEngine, tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    Disk(engine, path, MIB).close()
    os.chown(path / "mooncake.data", 12345, -1)
    with pytest.raises(InvalidArgument, match="of user 12345"):
        Disk(engine, path, MIB)
    os.chown(path / "mooncake.data", 0, -1)
    os.chown(path, 12345, -1)
    with pytest.raises(InvalidArgument, match="of user 12345"):
        Disk(engine, path, MIB)


def test_a_world_writable_parent_must_be_sticky(engine: TransferEngine, tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    Disk(engine, tmp_path / "ssd", MIB).close()
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidArgument, match="others may not write to"):
        Disk(engine, tmp_path / "ssd", MIB)
    tmp_path.chmod(0o700)


def test_the_native_core_follows_no_link_made_after_the_check(
    engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_bytes(b"precious")
    link.symlink_to(victim)
    monkeypatch.setattr(os.path, "realpath", lambda path, **more: str(path))
    with pytest.raises(Exception, match="Too many levels of symbolic links"):
        engine.open_file(link, MIB)
    assert victim.read_bytes() == b"precious"
