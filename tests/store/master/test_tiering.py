# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from mooncake.errors import Refusal
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.store.master import tiering
from mooncake.store.master.catalog import DISK_FAILING_S
from mooncake.store.master.tiering import Frequency
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier
from tests.store.conftest import SETTINGS
from tests.store.nodes import SSD_BYTES, Nodes, Place, with_ssd
from tests.store.test_processes import MIB, Processes, content, num_writable
from tests.waiting import wait_until


def settings(**changed: float) -> MasterSettings:
    return dataclasses.replace(SETTINGS, **changed)  # type: ignore[arg-type]


def where(nodes: Nodes, key: str) -> list[str]:
    """Its segments, without a lookup that counts."""
    stored = nodes.master.objects.readable.get(key)
    return [] if stored is None else [extent.segment.name for extent in stored.complete()]


def work(nodes: Nodes, *places: Place) -> int:
    """Work until nothing is left; returns the number of tasks."""
    count = 0
    while True:
        todo = [(place, place.poll()) for place in places]
        if not any(tasks for _, tasks in todo):
            return count
        for place, tasks in todo:
            while tasks:
                count += len(tasks)
                tasks = place.work(*tasks)


def test_at_watermark_0_every_object_is_copied_at_once() -> None:
    nodes = Nodes(settings(demote_watermark=0.0))
    memory, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    assert where(nodes, "k") == ["a"]
    assert work(nodes, memory, ssd) == 1
    assert where(nodes, "k") == ["a", "a/ssd"]
    assert len(ssd.held) == 1


def test_the_coldest_are_copied_once_too_much_has_no_copy() -> None:
    nodes = Nodes(settings(demote_watermark=0.5))
    memory, ssd = with_ssd(nodes, memory_bytes=10 * 1024)
    nodes.put(*"abcde", size_bytes=1024, host="a")
    assert work(nodes, ssd) == 0, "half of the memory may be without"
    nodes.wait(1.0)
    nodes.find("a")
    nodes.put("f", size_bytes=1024, host="a")
    assert work(nodes, ssd) == 1
    assert where(nodes, "b") == ["a", "a/ssd"], "the least recently used"
    nodes.put("g", "h", size_bytes=1024, host="a")
    work(nodes, ssd)
    assert [key for key in "abcdefgh" if len(where(nodes, key)) == 2] == ["b", "c", "d"]
    assert memory


def test_what_has_a_copy_is_evicted_from_memory_and_stays_readable() -> None:
    nodes = Nodes(settings(demote_watermark=0.0))
    memory, ssd = with_ssd(nodes, memory_bytes=4 * 1024)
    for key in "abcdefgh":
        nodes.put(key, size_bytes=1024, host="a")
        work(nodes, ssd)
    assert [where(nodes, key) for key in "abcd"] == [["a/ssd"]] * 4
    assert [where(nodes, key) for key in "efgh"] == [["a", "a/ssd"]] * 4
    found = nodes.find("a")
    assert found is not None and found.replicas[0].tier is Tier.SSD
    assert nodes.master.counts.evicted_objects == 0
    assert memory


def test_a_full_ssd_gives_its_coldest_away() -> None:
    nodes = Nodes(settings(demote_watermark=0.0, promote_after_hits=0.0))
    memory, ssd = with_ssd(nodes, memory_bytes=4096, ssd_bytes=4 * 4096)
    for key in "abcdefgh":
        nodes.put(key, size_bytes=1024, host="a")
        work(nodes, ssd)
        nodes.wait(0.5)
        memory.beat()
        ssd.beat()
    assert [where(nodes, key) for key in "abcd"] == [[]] * 4
    assert [where(nodes, key) for key in "efgh"] == [["a", "a/ssd"]] * 4
    nodes.wait(0.1)
    ssd.poll()
    assert len(ssd.held) == 4, "the index gets the removals"


def test_what_the_ssd_gave_away_is_not_copied_there_again() -> None:
    nodes = Nodes(settings(demote_watermark=0.0))
    memory, ssd = with_ssd(nodes, memory_bytes=65536, ssd_bytes=2 * 4096)
    nodes.wait(1.1)
    nodes.put(*"abcd", size_bytes=1024, host="a")
    assert work(nodes, ssd) == 2
    for _ in range(2):
        nodes.wait(1.1)
        memory.beat()
        ssd.beat()
    assert work(nodes, ssd) == 2
    assert [len(where(nodes, key)) for key in "abcd"] == [1, 1, 2, 2]
    nodes.wait(1.5)
    assert work(nodes, ssd) == 0


def test_objects_from_before_the_ssd_came_are_found() -> None:
    nodes = Nodes(settings(demote_watermark=0.0))
    memory = Place(nodes, "a")
    nodes.put("k", "n", host="a")
    ssd = Place(nodes, "a/ssd", SSD_BYTES, tier=Tier.SSD, content_id=9)
    nodes.wait(1.1)
    memory.beat()
    assert work(nodes, ssd) == 2
    assert where(nodes, "k") == ["a", "a/ssd"]


def test_an_object_that_can_not_be_copied_is_tried_again_later() -> None:
    nodes = Nodes(settings(demote_watermark=0.0))
    _, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    todo = ssd.poll()
    for _ in range(3):
        todo = ssd.fail(todo[0], "disk_failed", "no")
    assert todo == []
    nodes.wait(0.9)
    assert ssd.poll() == [], "not again at once"
    nodes.wait(1.2)
    ssd.answered()
    assert len(ssd.poll()) == 1


FULL = "/ssd: No space left on device; make room"


def with_full_disk() -> tuple[Nodes, Place, Place]:
    """An SSD that was full of a to d when its disk had no space for a copy of e."""
    nodes = Nodes(settings(demote_watermark=0.0))
    memory, ssd = with_ssd(nodes, ssd_bytes=4 * 4096)
    for key in "abcd":
        nodes.put(key, size_bytes=1024, host="a")
        work(nodes, ssd)
    nodes.put("e", size_bytes=1024, host="a")
    (task,) = ssd.poll()
    assert where(nodes, "a") == ["a"], "it makes room, because the disk is not known to be full"
    ssd.fail(task, "no_space", FULL)
    return nodes, memory, ssd


def test_nothing_is_evicted_from_an_ssd_whose_disk_is_full() -> None:
    nodes, memory, ssd = with_full_disk()
    for number in range(20):
        nodes.put(f"more {number}", size_bytes=1024 * (1 + number % 2), host="a")
        for task in ssd.poll():
            ssd.fail(task, "no_space", FULL)
        nodes.wait(0.5)
        memory.beat()
        ssd.beat()
    assert [where(nodes, key) for key in "bcd"] == [["a", "a/ssd"]] * 3
    assert nodes.master.counts.evicted_replicas == 1 and nodes.master.counts.evicted_objects == 0
    tries = []
    for _ in range(2):
        nodes.wait(1.1)
        memory.beat()
        ssd.beat()
        tries += ssd.answered() or ssd.poll()
    (task,) = tries
    assert len(ssd.work(task)) > 1, "one copy has shown that there is space again"


def test_a_copy_that_only_an_eviction_has_room_for_is_tried_later() -> None:
    nodes, _, _ = with_full_disk()
    catalog, segment = nodes.master.catalog, nodes.master.segments.mounted["a/ssd"]
    assert not catalog.make_room(segment, 2 * 4096, nodes.now + DISK_FAILING_S - 0.1)
    assert [where(nodes, key) for key in "bcd"] == [["a", "a/ssd"]] * 3
    assert catalog.make_room(segment, 2 * 4096, nodes.now + DISK_FAILING_S), (
        "only it may show that there is space"
    )


def test_one_copy_at_a_time_shows_whether_a_disk_has_space_again() -> None:
    nodes = Nodes(settings(demote_watermark=0.0))
    memory, ssd = with_ssd(nodes)
    nodes.put(*(f"k{number}" for number in range(10)), size_bytes=1024, host="a")
    put_durable(nodes, "durable")
    put_durable(nodes, "another")
    failed = ssd.poll()
    assert len(failed) == 12
    assert ssd.poll(*(m.TaskDone(one.task_id, Refusal("no_space", FULL)) for one in failed)) == []
    for _ in range(3):
        nodes.wait(1.1)
        memory.beat()
        ssd.beat()
        (task,) = ssd.answered() or ssd.poll()
        assert ssd.poll() == [], "others wait for its end"
        ssd.fail(task, "no_space", FULL)


def test_a_durable_object_is_copied_to_another_disk_while_one_is_full() -> None:
    nodes = Nodes(settings(demote_watermark=1.0))
    memory, ssd = with_ssd(nodes)
    other = Place(nodes, "b/ssd", SSD_BYTES, tier=Tier.SSD, content_id=98)
    put_durable(nodes, "k")
    (task,) = ssd.poll()
    ssd.fail(task, "no_space", FULL)
    assert nodes.late.get("end") is None, "the other disk may take it"
    nodes.wait(1.1)
    assert (other.answered() or other.poll()) and not ssd.poll()
    for _ in range(int(DISK_FAILING_S)):
        nodes.wait(1.0)
        for place in (memory, ssd, other):
            place.beat()
    put_durable(nodes, "l")
    assert ssd.poll(), "its own disk may have space again"


FAILURES = ["io_error", "storage_error", "invalid_argument", "busy"]


def fail_always(place: Place, todo: list[m.CopyTask], code: str) -> None:
    while todo:
        todo = place.poll(*(m.TaskDone(one.task_id, Refusal(code, "it does")) for one in todo))


@pytest.mark.parametrize("code", FAILURES)
def test_a_durable_object_is_copied_to_another_disk_while_one_fails(code: str) -> None:
    nodes = Nodes(settings(demote_watermark=1.0))
    _, ssd = with_ssd(nodes)
    other = Place(nodes, "b/ssd", SSD_BYTES, tier=Tier.SSD, content_id=98)
    put_durable(nodes, "k")
    fail_always(ssd, ssd.poll(), code)
    assert nodes.late.get("end") is None, "the other disk may take it"
    nodes.wait(1.1)
    assert other.work() == [] and not ssd.poll()
    assert nodes.late.pop("end") == [m.Outcomes([True])]


def test_one_copy_at_a_time_is_tried_on_a_disk_that_fails_and_nothing_is_evicted_for_it() -> None:
    """Its content can be read, and each failure is a line in its node's log."""
    nodes = Nodes(settings(demote_watermark=0.0))
    memory, ssd = with_ssd(nodes, ssd_bytes=8 * 4096)
    for key in "abcdefgh":
        nodes.put(key, size_bytes=1024, host="a")
        work(nodes, ssd)
    nodes.put("more", size_bytes=1024, host="a")
    todo = ssd.poll()
    assert where(nodes, "a") == ["a"], "it makes room, because the disk is not known to fail"
    fail_always(ssd, todo, "io_error")
    for number in range(20):
        nodes.put(f"more {number}", size_bytes=1024, host="a")
        nodes.wait(0.4)
        memory.beat()
        ssd.beat()
        todo = ssd.answered() or ssd.poll()
        assert len(todo) <= 1
        fail_always(ssd, todo, "io_error")
    assert [where(nodes, key) for key in "bcdefgh"] == [["a", "a/ssd"]] * 7
    for _ in range(int(DISK_FAILING_S) + 2):
        nodes.wait(1.0)
        memory.beat()
        ssd.beat()
    assert len(ssd.work(*(ssd.answered() or ssd.poll()))) > 1, "one copy has shown that it works again"


def put_durable(nodes: Nodes, key: str, host: str = "a") -> None:
    """Put it; its put-end may be answered later."""
    (place,) = nodes.start(key, host=host).reserved
    assert place is not None
    nodes.master.objects.writing[key].policy = m.PutPolicy(is_durable=True)
    nodes.post(m.PutEnd([key], [place.object_id], [b"crc!"]), "client", "end")


def test_many_durable_objects_without_a_copy_are_looked_at_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While all disks are full they may become millions, and each look at all of them would take seconds."""
    monkeypatch.setattr(tiering, "MAX_OWED", 4)
    nodes = Nodes(settings(demote_watermark=1.0))
    memory, ssd = with_ssd(nodes)
    for _ in range(2):  # until both are known to be of one node
        nodes.wait(1.0)
        memory.beat()
        ssd.beat()
    for number in range(20):
        put_durable(nodes, f"k{number}")
    failed = ssd.poll(max_tasks=64)
    assert len(failed) == 20
    ssd.poll(*(m.TaskDone(one.task_id, Refusal("no_space", FULL)) for one in failed), max_tasks=64)
    refused: list[str] = []
    nodes.master.tiers.on_failed = lambda stored, refusal: refused.append(stored.key)
    seen: dict[str, None] = {}
    for _ in range(7):
        refused.clear()
        nodes.wait(1.0)
        memory.beat()
        ssd.beat()
        assert len(refused) <= 4
        seen |= dict.fromkeys(refused)
    assert len(seen) == 19, "all but the one that is tried"
    assert len(ssd.answered() or ssd.poll(max_tasks=64)) == 1
    nodes.master.catalog.set_disk_full(nodes.master.segments.mounted["a/ssd"], "", nodes.now)
    for _ in range(8):
        nodes.wait(0.2)
        memory.beat()
        ssd.beat()
    assert nodes.master.segments.mounted["a/ssd"].num_tasks == 20, "without a pause once they can be planned"


def test_a_durable_object_is_copied_though_there_is_room() -> None:
    nodes = Nodes(SETTINGS)
    _, ssd = with_ssd(nodes)
    put_durable(nodes, "k")
    assert work(nodes, ssd) == 1 and where(nodes, "k") == ["a", "a/ssd"]


def test_a_durable_object_is_copied_before_others() -> None:
    nodes = Nodes(settings(demote_watermark=0.0, tasks_per_segment=1))
    _, ssd = with_ssd(nodes)
    nodes.put("k", "n", host="a")
    assert [task.entry.key for task in ssd.poll()] == ["k"]
    put_durable(nodes, "d")
    assert [task.entry.key for task in ssd.poll(m.TaskDone(1, None))] == ["d"]


def test_a_durable_object_is_copied_when_its_ssd_can_take_it() -> None:
    nodes = Nodes(SETTINGS)
    a, ssd = with_ssd(nodes)
    put_durable(nodes, "k")
    todo = ssd.poll()
    for _ in range(3):
        todo = ssd.fail(todo[0], "disk_failed")
    assert todo == []
    nodes.lose(ssd.connection)
    nodes.wait(2.0)
    a.beat()
    again = Place(nodes, "a/ssd", SSD_BYTES, tier=Tier.SSD, content_id=99, epoch=8)
    nodes.wait(1.0)
    again.beat()
    assert work(nodes, again) == 1 and where(nodes, "k") == ["a", "a/ssd"]


def test_the_ssd_of_another_node_makes_durable_where_the_own_has_none() -> None:
    nodes = Nodes(SETTINGS)
    Place(nodes, "a")
    _, ssd = with_ssd(nodes, "b")
    put_durable(nodes, "k")
    work(nodes, ssd)
    assert where(nodes, "k") == ["a", "b/ssd"]


def test_a_durable_object_whose_copy_was_wrong_is_copied_again() -> None:
    nodes = Nodes(SETTINGS)
    _, ssd = with_ssd(nodes)
    put_durable(nodes, "k")
    work(nodes, ssd)
    stored = nodes.master.objects.readable["k"]
    nodes.master.catalog.drop_extent(stored, stored.complete(Tier.SSD)[0], "for the test", nodes.now)
    assert work(nodes, ssd) == 1 and where(nodes, "k") == ["a", "a/ssd"]


def demoted(nodes: Nodes, memory: Place, ssd: Place, key: str) -> None:
    """Put it, copy it, and evict it from memory."""
    nodes.put(key, size_bytes=1024, host="a")
    work(nodes, ssd)
    stored = nodes.master.objects.readable[key]
    extent = stored.complete(Tier.MEMORY)[0]
    nodes.master.catalog.drop_extent(stored, extent, "for the test", nodes.now)
    assert where(nodes, key) == [ssd.name]
    assert memory


def test_an_object_found_cold_repeatedly_returns_to_memory() -> None:
    nodes = Nodes(settings(demote_watermark=0.0))
    memory, ssd = with_ssd(nodes)
    demoted(nodes, memory, ssd, "k")
    nodes.find("k")
    assert memory.poll() == [], "once is not enough"
    nodes.find("k")
    (task,) = memory.poll()
    assert task.source.tier is Tier.SSD and task.source.segment == "a/ssd"
    nodes.find("k")
    memory.work(task)
    assert where(nodes, "k") == ["a", "a/ssd"]
    nodes.find("k")
    assert work(nodes, memory, ssd) == 0
    counts = nodes.master.counts
    assert (counts.demoted_objects, counts.demoted_bytes) == (1, 1024)
    assert (counts.promotions_too_rare, counts.promotions_admitted, counts.promoted_bytes) == (1, 1, 1024)
    assert (counts.done_tasks, counts.failed_tasks) == (2, 0)


def test_promotion_stays_below_the_watermark_and_colder_ones_on_ssd_make_room() -> None:
    nodes = Nodes(settings(demote_watermark=0.0, high_watermark=0.75))
    memory, ssd = with_ssd(nodes, memory_bytes=4 * 1024)
    demoted(nodes, memory, ssd, "cold")
    for key in "abc":
        nodes.put(key, size_bytes=1024, host="a")
        work(nodes, ssd)
    nodes.find("b")
    nodes.find("c")
    for _ in range(2):
        nodes.find("cold")
    assert work(nodes, memory) == 1
    assert where(nodes, "cold") == ["a", "a/ssd"] and where(nodes, "a") == ["a/ssd"]
    assert nodes.allocated_bytes == 3 * 1024


def test_promotion_waits_where_everything_in_memory_is_in_use() -> None:
    nodes = Nodes(settings(demote_watermark=0.0))
    memory, ssd = with_ssd(nodes, memory_bytes=4 * 1024)
    demoted(nodes, memory, ssd, "cold")
    nodes.put(*"abcd", size_bytes=1024, host="a")
    work(nodes, ssd)
    for key in "abcd":
        nodes.find(key)
    for _ in range(3):
        nodes.find("cold")
    assert work(nodes, memory) == 0
    nodes.wait(1.0)
    for _ in range(10):
        memory.beat()
        ssd.beat()
        nodes.wait(1.0)
    nodes.find("cold")
    assert work(nodes, memory) == 1, "their leases have ended"


@pytest.mark.parametrize("after_hits", [0, 5])
def test_the_hits_before_a_promotion_are_a_setting(after_hits: int) -> None:
    nodes = Nodes(settings(demote_watermark=0.0, promote_after_hits=after_hits))
    memory, ssd = with_ssd(nodes)
    demoted(nodes, memory, ssd, "k")
    for _ in range(4):
        nodes.find("k")
    assert memory.poll() == []
    nodes.find("k")
    assert len(memory.poll()) == (1 if after_hits else 0)


def test_counts_are_of_recent_hits() -> None:
    frequency = Frequency(sample_size=10)
    assert [frequency.add(1) for _ in range(4)] == [1, 2, 3, 4]
    for other in range(100, 106):
        frequency.add(other)
    assert frequency.add(1) == 3, "halved, and one more"
    frequency.forget(1)
    assert frequency.add(1) == 1


@pytest.mark.processes
def test_more_than_fits_into_memory_is_kept_and_what_is_read_again_comes_back(tmp_path: Path) -> None:
    """With real processes and bytes."""
    keys = [f"k{number}" for number in range(40)]
    with contextlib.closing(Processes()) as processes:
        processes.start_master("--demote-watermark", "0.3", "--no-evict-undemoted")
        ssd = ("--ssd-path", str(tmp_path / "ssd"), "--ssd-size", "128MiB")
        processes.start_node("node", "12MiB", *ssd)
        with Store(processes.address, settings=StoreSettings(timeout_s=20.0)) as store:
            wait_until(lambda: num_writable(store) == 2)
            for number, key in enumerate(keys):
                wait_until(lambda: store.put(key, content(number, MIB + number)) is None)  # noqa: B023
            assert store.put("durable", content(99, MIB), m.PutPolicy(is_durable=True)) is None
            for number, key in enumerate(keys):
                assert store.get(key) == content(number, MIB + number), key

            def tiers() -> list[Tier]:
                (found,) = store.inspect(["k0"])
                assert found is not None
                return [one.tier for one in found.replicas if one.is_complete]

            def is_back() -> bool:
                assert store.get("k0") == content(0, MIB)
                return Tier.MEMORY in tiers()

            wait_until(is_back)
            counts = store.ask(m.GetMasterStatus()).counts
            assert counts["demoted_objects"] >= 28 and counts["promoted_objects"] >= 1, counts
            assert counts["evicted_objects"] == 0 and counts["failed_tasks"] == 0, counts
