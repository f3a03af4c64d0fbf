# SPDX-License-Identifier: Apache-2.0
"""Behaviour of the operating system's files only; the rest is in ``contract/test_files.py``."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mooncake.files import OsDirectory, UntrustedFile, check_file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_directory_and_its_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "above" / "folder"
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
