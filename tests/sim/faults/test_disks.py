# SPDX-License-Identifier: Apache-2.0
"""The simulated directory: what the end of a process and a power loss take from its files."""

from __future__ import annotations

import errno
from random import Random

import pytest

from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.disks import SimDirectory, SimDisk
from mooncake.sim.faults.nodes import checksum
from mooncake.sim.kernel import Kernel
from mooncake.store.messages import SegmentEntry


def test_the_end_of_a_process_takes_nothing_but_what_was_open() -> None:
    disk = SimDirectory(Random(1))
    file = disk.open("log", is_locked=True)
    file.append(b"one")
    disk.crash()
    with pytest.raises(OSError):
        file.append(b"two")
    file.close()
    assert disk.open("log", is_locked=True).read() == b"one"


def test_a_power_loss_leaves_what_was_synced_and_any_part_of_the_rest() -> None:
    left: set[bytes] = set()
    for seed in range(300):
        disk = SimDirectory(Random(seed))
        file = disk.open("log")
        disk.sync()
        file.append(b"one")
        file.sync()
        file.append(b"two")
        file.append(b"six")
        disk.lose_power()
        left.add(disk.content("log"))
    whole = b"onetwosix"
    cut = {whole[:length] for length in range(3, 10)}
    zeros = {content for content in left if content not in cut}
    assert cut <= left and zeros
    assert all(content.rstrip(b"\0") in cut and len(content) in (6, 9) for content in zeros), zeros


def test_a_cut_that_was_not_synced_may_not_have_been() -> None:
    left: set[bytes] = set()
    for seed in range(50):
        disk = SimDirectory(Random(seed))
        file = disk.open("log")
        disk.sync()
        file.append(b"one two")
        file.sync()
        file.truncate(3)
        disk.lose_power()
        left.add(disk.content("log"))
    assert left == {b"one", b"one two"}


def test_a_rename_without_a_sync_of_the_directory_may_be_undone() -> None:
    left: set[bytes] = set()
    for seed in range(50):
        disk = SimDirectory(Random(seed))
        for name, content in (("log", b"old"), ("log.new", b"new")):
            file = disk.open(name)
            file.append(content)
            file.sync()
        disk.sync()
        disk.rename("log.new", "log")
        disk.lose_power()
        left.add(disk.content("log"))
    assert left == {b"old", b"new"}
    disk.rename("log.new", "log") if "log.new" in disk.names() else None
    disk.sync()
    disk.lose_power()
    assert disk.names() == ["log"]


def test_a_renamed_file_that_was_not_synced_may_be_empty() -> None:
    """Which is why a file is synced before it takes another's name."""
    left: set[bytes] = set()
    for seed in range(50):
        disk = SimDirectory(Random(seed))
        disk.open("log.new").append(b"new")
        disk.rename("log.new", "log")
        disk.sync()
        disk.lose_power()
        left.add(disk.content("log"))
    assert b"" in left and b"new" in left


def test_a_full_disk_takes_what_fits() -> None:
    disk = SimDirectory(Random(1))
    disk.capacity_bytes = 10
    file, other = disk.open("log"), disk.open("other")
    other.append(b"12345")
    with pytest.raises(OSError) as caught:
        file.append(b"1234567")
    assert caught.value.errno == errno.ENOSPC and file.read() == b"12345"
    disk.remove("other")
    file.append(b"67890")
    assert file.read() == b"1234567890"


def test_a_disk_with_errors_says_so_and_a_sync_that_failed_is_not_made_good_by_the_next() -> None:
    left: set[bytes] = set()
    for seed in range(50):
        disk = SimDirectory(Random(seed))
        file = disk.open("log")
        disk.sync()
        disk.write_error = errno.EIO
        with pytest.raises(OSError):
            file.append(b"no")
        file.truncate(0)
        disk.write_error, disk.sync_error = 0, errno.EIO
        file.append(b"yes")
        with pytest.raises(OSError):
            file.sync()
        disk.sync_error = 0
        file.sync()
        disk.lose_power()
        left.add(disk.content("log").rstrip(b"\0"))
    assert {b"", b"yes"} < left


def test_slow_writes_add_up_until_they_are_taken() -> None:
    disk = SimDirectory(Random(1))
    disk.delay_s = lambda what, num_bytes: {"write": 0.5, "sync": 2.0}[what]
    file = disk.open("log")
    file.append(b"x")
    file.sync()
    disk.sync()
    assert (disk.take_late_s(), disk.take_late_s(), disk.num_syncs) == (4.5, 0.0, 2)


def test_after_a_power_loss_no_entry_is_without_its_bytes() -> None:
    """Bytes and entry are flushed together; an older object elsewhere is not touched."""
    outcomes: set[tuple[int, ...]] = set()
    data = {number: bytes([number]) * 64 for number in (1, 2)}
    entries = {
        number: SegmentEntry("k", number, 64, 64, checksum(one).to_bytes(4, "little"), number * 64)
        for number, one in data.items()
    }
    for seed in range(200):
        disk = SimDisk(Kernel(seed), ClusterFaults(), 1 << 12)
        for number in (1, 2):
            disk.write(number * 64, data[number])
            disk.hold(entries[number], is_flushed=False)
            if number == 1:
                disk.flushed(disk.flush())
                disk.mark_flushed([1])
        assert list(disk.index.unflushed) == [2]
        disk.lose_power()
        disk.opened(checksum)
        assert not disk.index.unflushed
        outcomes.add(tuple(disk.index.entries))
        for number, entry in disk.index.entries.items():
            assert disk.data[entry.offset : entry.offset + 64] == data[number], seed
        disk.opened(checksum)
        assert not disk.index.unflushed
    assert outcomes == {(1,), (1, 2)}
