# SPDX-License-Identifier: Apache-2.0
"""The contract of ``mooncake/files/__init__.py``, for the operating system's files and the simulated ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from mooncake.files import Directory, OsDirectory, check_in_place
from mooncake.sim.faults.disks import SimDirectory

Make = Callable[[], Directory]


@pytest.fixture(params=["system", "simulated"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Opens the same directory each time."""
    if request.param == "system":
        return lambda: OsDirectory(tmp_path / "folder", is_private=True)
    simulated = SimDirectory(Random(1))
    return lambda: simulated


def test_what_is_appended_is_read_by_who_opens_it_next(make: Make) -> None:
    first = make().open("log")
    first.append(b"one ")
    first.append(b"two")
    assert (first.read(), first.size_bytes) == (b"one two", 7)
    first.close()
    again = make().open("log")
    again.append(b" three")
    assert again.read() == b"one two three"


def test_it_is_cut_and_appended_to_from_there(make: Make) -> None:
    file = make().open("log")
    file.append(b"one two")
    file.truncate(3)
    file.append(b"!")
    file.sync()
    assert file.read() == b"one!"


def test_a_lock_keeps_others_out_until_it_is_closed(make: Make) -> None:
    directory = make()
    holder = directory.open("log", is_locked=True)
    with pytest.raises(BlockingIOError):
        directory.open("log", is_locked=True)
    directory.open("log").close()  # who asks for no lock needs none
    holder.close()
    holder.close()
    directory.open("log", is_locked=True).close()


def test_a_renamed_file_takes_the_place_of_the_other(make: Make) -> None:
    directory = make()
    old, new = directory.open("log"), directory.open("log.new")
    old.append(b"old")
    new.append(b"new")
    directory.rename("log.new", "log")
    directory.sync()
    assert directory.names() == ["log"] and directory.open("log").read() == b"new"
    assert old.read() == b"old"
    new.append(b"er")
    assert directory.open("log").read() == b"newer"


def test_a_removed_file_is_gone_and_none_can_be_removed_twice(make: Make) -> None:
    directory = make()
    directory.open("log").close()
    directory.remove("log")
    assert directory.names() == []
    with pytest.raises(FileNotFoundError):
        directory.remove("log")
    with pytest.raises(FileNotFoundError):
        directory.rename("log", "other")


def test_a_removed_or_replaced_file_is_not_the_one_at_its_path(make: Make) -> None:
    directory = make()
    file, other = directory.open("log"), directory.open("other")
    check_in_place(file, directory.path / "log")
    directory.rename("other", "log")
    check_in_place(other, directory.path / "log")
    with pytest.raises(OSError, match="log was removed or replaced"):
        check_in_place(file, directory.path / "log")
    directory.remove("log")
    with pytest.raises(OSError, match="log was removed or replaced"):
        check_in_place(other, directory.path / "log")


def test_a_closed_file_refuses(make: Make) -> None:
    file = make().open("log")
    file.close()
    for call in (file.read, partial(file.append, b"x"), file.sync, partial(file.truncate, 0)):
        with pytest.raises(OSError):
            call()
