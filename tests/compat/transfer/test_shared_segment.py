# SPDX-License-Identifier: Apache-2.0
"""``SharedSegment``: memory that every rank of a host maps."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake.engine import SharedSegment
from mooncake.errors import InvalidArgument

RANK_1 = """
import ctypes, json, sys
from mooncake.engine import SharedSegment
segment, blob = SharedSegment.create("pool", 8192, 2, 1)
assert not segment.ready() and segment.base_addr() == 0
print(blob.decode(), flush=True)
segment.complete([sys.stdin.readline(), blob])
assert segment.ready() and segment.size() == 8192
assert ctypes.string_at(segment.base_addr() + 100, 5) == b"hello"
ctypes.memmove(segment.base_addr() + 200, b"world", 5)
"""


def test_two_ranks_see_the_same_bytes() -> None:
    segment, blob = SharedSegment.create("pool", 8192, 2, 0)
    other = subprocess.Popen(
        [sys.executable, "-c", RANK_1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    theirs = other.stdout.readline()
    segment.complete([blob, theirs])
    assert segment.ready()
    ctypes.memmove(segment.base_addr() + 100, b"hello", 5)
    other.communicate(blob.decode() + "\n", timeout=60)
    assert other.returncode == 0
    assert ctypes.string_at(segment.base_addr() + 200, 5) == b"world"


def test_completing_twice_leaves_the_mapping_in_its_place() -> None:
    segment, blob = SharedSegment.create("pool", 8192, 1, 0)
    segment.complete([blob])
    address = segment.base_addr()
    ctypes.memmove(address, b"hello", 5)
    segment.complete([blob])
    assert segment.base_addr() == address and ctypes.string_at(address, 5) == b"hello"


def test_blobs_of_another_segment_are_refused() -> None:
    segment, blob = SharedSegment.create("pool", 4096, 2, 1)
    _, owner = SharedSegment.create("pool", 4096, 2, 0)
    _, other = SharedSegment.create("other", 4096, 2, 0)
    wrong: list[list[bytes]] = [[], [blob], [blob, b"{"], [blob, other]]
    for blobs in wrong:
        with pytest.raises(InvalidArgument, match="create"):
            segment.complete(blobs)
    gone = {**json.loads(owner), "process": 2**30}
    with pytest.raises(RuntimeError, match="one host"):
        segment.complete([blob, json.dumps(gone)])
    assert not segment.ready()


def test_unsupported_kinds_are_refused() -> None:
    assert SharedSegment.supported() and not SharedSegment.supported(host_register=True)
    with pytest.raises(RuntimeError, match="host_register"):
        SharedSegment.create("pool", 4096, 1, 0, host_register=True)
    with pytest.raises(InvalidArgument):
        SharedSegment.create("pool", 4096, 2, 2)
    segment, blob = SharedSegment.create("pool", 4096, 1, 0)
    segment.complete([blob])
    assert segment.device_addr() == 0


def test_huge_pages_are_those_of_the_hosts_pool() -> None:
    assert SharedSegment.supported(hugetlb=True) and not SharedSegment.supported(mmap=False, hugetlb=True)
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(line for line in lines if line.startswith("HugePages_Free"))
    segment, blob = SharedSegment.create("huge", 4096, 1, 0, hugetlb=True)
    if int(free.split()[1]):
        segment.complete([blob])
        assert segment.ready() and segment.size() == 4096
    else:
        with pytest.raises(RuntimeError, match="nr_hugepages"):
            segment.complete([blob])


@pytest.mark.parametrize("size", [(1 << 63) - 1, 1 << 64])
@pytest.mark.parametrize("hugetlb", [False, True])
def test_memory_that_the_kernel_refuses(size: int, hugetlb: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="cannot be made"):
        SharedSegment.create("pool", size, 1, 0, hugetlb=hugetlb)
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(RuntimeError, match="Too many open files"):
        SharedSegment.create("pool", 4096, 1, 0)


@pytest.mark.parametrize("name", ["\0", "\u6708" * 200, "a/b c", "\udcff", ""])
def test_any_name_will_do(name: str) -> None:
    segment, blob = SharedSegment.create(name, 4096, 2, 1)
    owning, of_owner = SharedSegment.create(name, 4096, 2, 0)
    for one in (segment, owning):
        one.complete([blob, of_owner])
        assert one.ready()


def test_an_owner_that_ends_while_its_memory_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    segment, blob = SharedSegment.create("pool", 4096, 2, 1)
    owner, of_owner = SharedSegment.create("pool", 4096, 2, 0)
    opened = os.open

    def open_and_end(*arguments: Any) -> int:
        nonlocal owner
        found = opened(*arguments)
        del owner
        return found

    monkeypatch.setattr(os, "open", open_and_end)
    segment.complete([blob, of_owner])
    assert segment.ready(), "the memory is there as long as one process has it open"


def test_numbers_of_numpy() -> None:
    ranks: tuple[Any, ...] = (np.int64(1), np.int32(0), np.int8(0))
    size: Any = np.prod((4, 1024))
    segment, blob = SharedSegment.create("numbers", size, *ranks)
    segment.complete([blob])
    assert segment.ready() and segment.size() == 4096 and type(segment.size()) is int
    for size in (4096.0, "4096", None):
        with pytest.raises(TypeError):
            SharedSegment.create("numbers", size, 1, 0)
