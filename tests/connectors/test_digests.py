# SPDX-License-Identifier: Apache-2.0
"""A digest is computed once per host, trusted only where this user wrote it, and never after a change."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from mooncake.connectors import digests as module
from mooncake.connectors.digests import file_digest
from mooncake.errors import ModelError


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_S", -1.0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of files that were read, one entry per read."""
    seen: list[int] = []
    computed = module._computed

    def counted(descriptor: int, size_bytes: int) -> str:
        seen.append(size_bytes)
        return computed(descriptor, size_bytes)

    monkeypatch.setattr(module, "_computed", counted)
    return seen


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(os.urandom(10_000))
    return path


def kept(cache: Path) -> Path:
    (file,) = (cache / "digests").iterdir()
    return file


def test_it_is_computed_once(path: Path, tmp_path: Path, reads: list[int]) -> None:
    cache = tmp_path / "cache"
    first = file_digest(path, cache)
    assert file_digest(path, cache) == first and reads == [10_000]
    assert stat.S_IMODE(kept(cache).stat().st_mode) == 0o600
    assert stat.S_IMODE((cache / "digests").stat().st_mode) == 0o700


def test_any_byte_counts_also_across_parts(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 1 << 10)
    monkeypatch.setattr(module, "READ_BYTES", 300)
    content, seen = bytearray(path.read_bytes()), {file_digest(path, tmp_path / "cache")}
    for at in (0, 1023, 1024, 5000, 9999):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        seen.add(file_digest(path, tmp_path / f"cache {at}"))
    path.write_bytes(content[1024:2048] + content[:1024] + content[2048:])
    seen.add(file_digest(path, tmp_path / "swapped"))
    path.write_bytes(content[:-1])
    seen.add(file_digest(path, tmp_path / "shorter"))
    assert len(seen) == 8


def test_a_change_that_keeps_size_and_modification_time_is_seen(
    path: Path, tmp_path: Path, reads: list[int]
) -> None:
    """Size and modification time can be set back; the time of the change and the inode can't."""
    cache, status = tmp_path / "cache", path.stat()
    first = file_digest(path, cache)
    other = tmp_path / "other"
    other.write_bytes(bytes(10_000))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert file_digest(path, cache) != first and len(reads) == 2


def test_a_damaged_or_foreign_cache_is_ignored(path: Path, tmp_path: Path, reads: list[int]) -> None:
    cache = tmp_path / "cache"
    first = file_digest(path, cache)
    line = kept(cache).read_text()
    damaged = ["", line[:-20], line.replace(line.split()[2][:4], "0000", 1), "\xff" * 200]
    for text in damaged:
        kept(cache).write_text(text)
        assert file_digest(path, cache) == first
    assert len(reads) == 1 + len(damaged)
    kept(cache).chmod(0o666)
    assert file_digest(path, cache) == first and len(reads) == 2 + len(damaged), (
        "any user could have written it"
    )


def test_what_is_kept_for_another_file_is_not_taken(path: Path, tmp_path: Path, reads: list[int]) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other.bin"
    other.write_bytes(bytes(10_000))
    file_digest(path, cache)
    mine = kept(cache)
    file_digest(other, cache)
    (others,) = [one for one in (cache / "digests").iterdir() if one != mine]
    others.write_text(mine.read_text())
    others.chmod(0o600)
    assert file_digest(other, cache) != file_digest(path, cache)


def test_a_link_in_the_cache_is_not_followed(path: Path, tmp_path: Path, reads: list[int]) -> None:
    cache = tmp_path / "cache"
    first = file_digest(path, cache)
    elsewhere = kept(cache).rename(tmp_path / "elsewhere")
    (cache / "digests" / elsewhere.name).unlink(missing_ok=True)
    name = hashlib.sha256(repr((module.FORM, module._state(path, path.stat()))).encode()).hexdigest()
    (cache / "digests" / name).symlink_to(elsewhere)
    assert file_digest(path, cache) == first and len(reads) == 2


def test_a_folder_that_others_may_write_is_cleaned_and_closed(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "digests"
    folder.mkdir(parents=True)
    (folder / "planted").write_text("anything")
    folder.chmod(0o777)
    file_digest(path, tmp_path / "cache")
    assert not (folder / "planted").exists() and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_used(
    path: Path, tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, me = tmp_path / "cache" / "digests", os.geteuid()
    folder.mkdir(parents=True)
    monkeypatch.setattr("mooncake.connectors.digests.os.geteuid", lambda: me + 1)
    assert file_digest(path, tmp_path / "cache") == file_digest(path, tmp_path / "cache")
    assert len(reads) == 2 and not list(folder.iterdir())


def test_a_cache_that_can_not_be_written_costs_time_only(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert file_digest(path, tmp_path / "file" / "below") == file_digest(path, tmp_path / "cache")


def test_a_file_that_changes_while_it_is_read_has_no_digest(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = module._computed

    def changing(descriptor: int, size_bytes: int) -> str:
        digest = computed(descriptor, size_bytes)
        with path.open("ab") as file:
            file.write(b"more")
        return digest

    monkeypatch.setattr(module, "_computed", changing)
    with pytest.raises(ModelError, match="changed while it was read"):
        file_digest(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_digest_of_a_file_that_has_just_changed_is_not_kept(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_S", 1e6)
    file_digest(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
