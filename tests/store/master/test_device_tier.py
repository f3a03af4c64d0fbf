# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import dataclasses

import pytest

from mooncake.store import AsyncStore
from mooncake.store import messages as m
from mooncake.store.master.device_tier import MAX_COPIES, REPORT_INTERVAL_S
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.types import Tier
from tests.contract import cuda_double
from tests.store.conftest import SETTINGS
from tests.store.master import test_tiering
from tests.store.master.test_tiering import work
from tests.store.nodes import Nodes, Place

HEAT_CHECKS = 3
"""Examinations that find an object hot until it is copied: the first one begins the time."""
POLICY = dataclasses.replace(
    SETTINGS, device_uses_per_s=4.0, device_hot_s=2.0, device_cool_s=5.0, hot_uses_per_s=0.0
)


def where(nodes: Nodes, key: str) -> list[str]:
    return sorted(test_tiering.where(nodes, key))


def with_device(nodes: Nodes, device_bytes: int = 65536, name: str = "a", host: str = "") -> list[Place]:
    """A node with memory and device memory."""
    memory = Place(nodes, name, host=host or name)
    return [memory, Place(nodes, f"{name}/hbm", device_bytes, tier=Tier.DEVICE, node=name, host=host or name)]


def use(nodes: Nodes, places: list[Place], seconds: int, **rates: int) -> None:
    """Look objects up at these rates."""
    for _ in range(seconds):
        for key, rate in rates.items():
            for _ in range(rate):
                nodes.find(key)
        nodes.wait(1.0)
        for place in places:
            place.beat()
        work(nodes, *places)


def warmed(settings: MasterSettings = POLICY) -> tuple[Nodes, list[Place]]:
    """An object with a copy in device memory."""
    nodes = Nodes(settings)
    places = with_device(nodes)
    nodes.put("k", host="a")
    use(nodes, places, HEAT_CHECKS + 2, k=8)
    assert where(nodes, "k") == ["a", "a/hbm"]
    return nodes, places


def test_a_put_goes_to_memory_and_only_a_lastingly_hot_object_to_the_device() -> None:
    nodes = Nodes(POLICY)
    places = with_device(nodes)
    nodes.put("k", "warm", "burst", host="a")
    use(nodes, places, 2, k=8, warm=3, burst=50)
    assert where(nodes, "k") == ["a"], "not before it has been hot for several checks"
    use(nodes, places, 4, k=8, warm=3)
    assert where(nodes, "k") == ["a", "a/hbm"]
    assert where(nodes, "warm") == where(nodes, "burst") == ["a"]
    counts = nodes.master.counts
    assert (counts.device_copied_objects, counts.device_copied_bytes) == (1, 1000)
    assert any("copied to device memory a/hbm, because" in line for line in nodes.master.story("k"))


def test_the_copy_is_on_the_host_whose_memory_has_the_object() -> None:
    nodes = Nodes(POLICY)
    places = [*with_device(nodes, name="a"), *with_device(nodes, name="b")]
    nodes.put("k", host="b")
    use(nodes, places, 8, k=8)
    assert where(nodes, "k") == ["b", "b/hbm"]


def test_a_host_with_two_devices_has_one_copy() -> None:
    nodes = Nodes(POLICY)
    places = with_device(nodes, 2048)
    places.append(Place(nodes, "a/other", tier=Tier.DEVICE, node="a", host="a"))
    nodes.put("k", host="a")
    use(nodes, places, 8, k=8)
    assert where(nodes, "k") == ["a", "a/other"], "on the emptiest"


def test_it_can_be_turned_off() -> None:
    nodes = Nodes(dataclasses.replace(POLICY, device_uses_per_s=0.0))
    places = with_device(nodes)
    nodes.put("k", host="a")
    use(nodes, places, 8, k=50)
    assert where(nodes, "k") == ["a"]


def test_a_cool_object_loses_its_copy_and_one_at_the_threshold_keeps_it() -> None:
    nodes, places = warmed()
    use(nodes, places, 12, k=2)
    assert where(nodes, "k") == ["a", "a/hbm"], "less often, but not cool"
    use(nodes, places, 4)
    assert where(nodes, "k") == ["a", "a/hbm"], "not cool for long enough"
    use(nodes, places, 4)
    assert where(nodes, "k") == ["a"]
    assert any("left a/hbm: cool again" in line for line in nodes.master.story("k"))
    assert nodes.master.counts.device_dropped_bytes == 1000


def test_a_requested_replica_stays() -> None:
    nodes = Nodes(POLICY)
    places = with_device(nodes)
    nodes.put("k", host="a")
    nodes.say(m.CopyObject("k", ["a/hbm"]))
    use(nodes, places, 30)
    assert where(nodes, "k") == ["a", "a/hbm"]


def test_a_full_device_evicts_the_least_recently_used_and_never_an_object() -> None:
    nodes = Nodes(POLICY)
    places = with_device(nodes, 2048)
    nodes.put("one", "two", "three", host="a")
    use(nodes, places, 6, one=8, two=8)
    assert where(nodes, "one") == where(nodes, "two") == ["a", "a/hbm"]
    long = dataclasses.replace(POLICY, device_cool_s=1000.0)
    nodes.master.catalog.settings = long
    use(nodes, places, int(POLICY.lease_s) + 6, two=8, three=8)
    assert where(nodes, "one") == ["a"] and where(nodes, "three") == ["a", "a/hbm"]
    assert where(nodes, "two") == ["a", "a/hbm"]
    assert any("displaced by a hotter object" in line for line in nodes.master.story("one"))


def test_among_objects_in_use_only_a_much_hotter_one_displaces() -> None:
    nodes = Nodes(POLICY)
    places = with_device(nodes, 1024)
    nodes.put("k", "other", host="a")
    use(nodes, places, 6, k=8)
    use(nodes, places, 40, k=8, other=12)
    assert where(nodes, "other") == ["a"] and where(nodes, "k") == ["a", "a/hbm"], "they do not alternate"
    assert nodes.master.counts.device_copies_no_room > 0
    use(nodes, places, int(POLICY.lease_s) + 6, k=8, other=40)
    assert where(nodes, "other") == ["a", "a/hbm"] and where(nodes, "k") == ["a"]


def test_no_more_replicas_are_displaced_than_needed() -> None:
    """The space of the first one is free when its readers' leases have ended, and not before."""
    nodes = Nodes(dataclasses.replace(POLICY, device_cool_s=1000.0))
    places = with_device(nodes, 4096)
    keys = ["k0", "k1", "k2", "k3"]
    nodes.put(*keys, "hot", host="a")
    use(nodes, places, 8, **dict.fromkeys(keys, 8))
    assert all(where(nodes, key) == ["a", "a/hbm"] for key in keys)
    use(nodes, places, int(POLICY.lease_s) + 8, **dict.fromkeys(keys, 8), hot=40)
    assert where(nodes, "hot") == ["a", "a/hbm"]
    assert sorted(where(nodes, key) == ["a", "a/hbm"] for key in keys) == [False, True, True, True]
    assert nodes.master.counts.device_dropped_replicas == 1


def test_each_of_two_hot_objects_displaces_one() -> None:
    nodes = Nodes(dataclasses.replace(POLICY, device_cool_s=1000.0))
    places = with_device(nodes, 4096)
    keys = ["k0", "k1", "k2", "k3"]
    nodes.put(*keys, "hot", "hotter", host="a")
    use(nodes, places, 8, **dict.fromkeys(keys, 8))
    use(nodes, places, int(POLICY.lease_s) + 8, **dict.fromkeys(keys, 8), hot=40, hotter=50)
    assert where(nodes, "hot") == where(nodes, "hotter") == ["a", "a/hbm"]
    assert nodes.master.counts.device_dropped_replicas == 2


def test_nothing_leaves_for_an_object_that_finds_no_room_all_the_same() -> None:
    nodes = Nodes(dataclasses.replace(POLICY, device_cool_s=1000.0))
    places = with_device(nodes, 4096)
    nodes.put("used", "used too", "idle", "idle too", host="a")
    use(nodes, places, 8, **dict.fromkeys(["used", "used too", "idle", "idle too"], 8))
    nodes.put("large", size_bytes=3000, host="a")
    use(nodes, places, int(POLICY.lease_s) + 8, **{"used": 8, "used too": 8, "large": 12})
    assert where(nodes, "large") == ["a"] and nodes.master.counts.device_copies_no_room > 0
    assert nodes.master.counts.device_dropped_replicas == 0
    use(nodes, places, 8, **{"used too": 8, "large": 40})
    use(nodes, places, int(POLICY.lease_s) + 8, large=40)
    assert where(nodes, "large") == ["a", "a/hbm"]


def test_what_memory_evicts_leaves_the_device_too() -> None:
    nodes, places = warmed()
    use(nodes, places, int(POLICY.lease_s) - 6)
    nodes.master.catalog.settings = dataclasses.replace(POLICY, device_cool_s=1000.0)
    use(nodes, places, 10)
    stored = nodes.master.objects.readable["k"]
    nodes.master.catalog.evict(stored, stored.complete(Tier.MEMORY)[0], "a test", nodes.now)
    nodes.master.check()
    assert nodes.find("k") is None
    assert not nodes.master.segments.mounted["a/hbm"].holders


def test_what_memory_evicts_to_the_ssd_keeps_its_copy() -> None:
    nodes, places = warmed()
    ssd = Place(nodes, "a/ssd", tier=Tier.SSD, content_id=99)
    nodes.say(m.CopyObject("k", ["a/ssd"]))
    work(nodes, *places, ssd)
    stored = nodes.master.objects.readable["k"]
    nodes.master.catalog.evict(stored, stored.complete(Tier.MEMORY)[0], "a test", nodes.now)
    assert where(nodes, "k") == ["a/hbm", "a/ssd"]


def test_removing_an_object_from_memory_removes_its_extra_copy() -> None:
    nodes, places = warmed()
    nodes.master.catalog.settings = dataclasses.replace(POLICY, device_cool_s=1000.0)
    use(nodes, places, int(POLICY.lease_s) + 1)
    assert nodes.say(m.DropReplicas(["k"], "")).outcomes == [True]
    assert "k" not in nodes.master.objects.readable


def test_the_object_is_readable_from_the_device_when_its_memory_is_lost() -> None:
    nodes = Nodes(POLICY)
    places = with_device(nodes, name="a", host="h")
    other = Place(nodes, "b", host="h")
    nodes.put("k", host="h")
    stored = nodes.master.objects.readable["k"]
    first = stored.extents[0].segment.name
    use(nodes, [*places, other], 6, k=8)
    nodes.say(m.Unmount(first, 7), f"node {first} 7")
    found = nodes.find("k")
    assert found is not None and [one.tier for one in found.replicas] == [Tier.DEVICE]
    use(nodes, [one for one in (*places, other) if one.name != first], 20)
    assert where(nodes, "k") == ["a/hbm"], "the only replica is not removed for being cool"


def test_draining_a_device_moves_nothing_that_memory_has() -> None:
    nodes, places = warmed()
    ssd = Place(nodes, "a/ssd", tier=Tier.SSD, content_id=99)
    nodes.say(m.DrainSegments(["a/hbm"], [], 4))
    use(nodes, [*places, ssd], 2)
    assert where(nodes, "k") == ["a"]


def test_draining_memory_does_not_rely_on_the_copy() -> None:
    nodes, places = warmed()
    nodes.say(m.DrainSegments(["a"], [], 4))
    use(nodes, places, 2)
    assert where(nodes, "k") == ["a", "a/hbm"], "no other memory has room"


def test_a_new_master_continues_with_the_copies_that_it_finds() -> None:
    nodes, _ = warmed()
    again = Nodes(POLICY)
    again.now = nodes.now
    again.master.restore(nodes.master.snapshot(), nodes.now)
    places = with_device(again)
    assert where(again, "k") == ["a", "a/hbm"]
    again.find("k")
    use(again, places, 20)
    assert where(again, "k") == ["a"]


def test_copies_per_second_are_bounded() -> None:
    nodes = Nodes(dataclasses.replace(POLICY, tasks_per_segment=1000))
    memory = Place(nodes, "a", 1 << 20)
    device = Place(nodes, "a/hbm", 1 << 20, tier=Tier.DEVICE, node="a")
    keys = [f"k{number}" for number in range(MAX_COPIES + 10)]
    nodes.put(*keys, host="a")
    for _ in range(HEAT_CHECKS + 1):
        for _ in range(5):
            for key in keys:
                nodes.find(key)
        nodes.wait(1.0)
        memory.beat()
        device.beat()
    assert nodes.master.segments.mounted["a/hbm"].num_tasks == MAX_COPIES


def test_tasks_of_one_segment_are_bounded() -> None:
    nodes = Nodes(dataclasses.replace(POLICY, tasks_per_segment=2))
    places = with_device(nodes)
    keys = [f"k{number}" for number in range(5)]
    nodes.put(*keys, host="a")
    for _ in range(HEAT_CHECKS + 2):
        for _ in range(5):
            for key in keys:
                nodes.find(key)
        nodes.wait(1.0)
        for place in places:
            place.beat()
    assert nodes.master.segments.mounted["a/hbm"].num_tasks == 2


def test_a_device_that_fails_is_tried_again() -> None:
    nodes = Nodes(POLICY)
    places = with_device(nodes)
    nodes.put("k", host="a")
    for _ in range(HEAT_CHECKS + 1):
        for _ in range(8):
            nodes.find("k")
        nodes.wait(1.0)
        for place in places:
            place.beat()
    (task,) = places[1].poll()
    places[1].fail(task, "no_space")
    assert nodes.master.counts.device_copies_failed == 1
    use(nodes, places, 3, k=8)
    assert where(nodes, "k") == ["a", "a/hbm"]


def test_the_copy_counts_against_no_quota() -> None:
    nodes, _ = warmed()
    assert nodes.master.catalog.tenants.account_of("k").used_bytes == 1024


def test_the_log_sums_up_what_was_copied() -> None:
    nodes, places = warmed()
    use(nodes, places, int(REPORT_INTERVAL_S), k=8)
    (note,) = [note for note in nodes.notes if note.event == "device_copies"]
    assert note.fields["segment"] == "a/hbm"
    assert (note.fields["num_copied"], note.fields["num_dropped"]) == (1, 0)


def test_without_a_device_nothing_is_measured_for_it() -> None:
    nodes = Nodes(POLICY)
    Place(nodes, "a")
    nodes.put("k", host="a")
    nodes.find("k")
    assert nodes.master.hot.deadline() is None
    assert repr(nodes.master.hot.devices) == "<DeviceTier 0 segments, 0 copies planned>"


@pytest.mark.processes
async def test_bytes_are_copied_to_the_device_and_read_from_there_into_it() -> None:
    """A real master, node and client, with the test double of the driver."""
    if not cuda_double.built():
        pytest.skip("no C++ compiler for the test double of the CUDA driver; install g++")
    value = bytes(range(256)) * 256
    server = MasterServer(
        MasterSettings(port=0, device_uses_per_s=0.1, device_hot_s=0.0, device_cool_s=600.0)
    )
    address = f"127.0.0.1:{await server.start()}"
    settings = NodeSettings(
        master=address, name="n", pool_size_bytes=8 << 20, hbm_size_bytes=4 << 20, huge_pages=False
    )
    driver = TransferSettings(cuda_library=str(cuda_double.LIBRARY))
    with TransferEngine(driver) as serving, TransferEngine(driver) as own:
        node = Node(settings, serving)
        await node.start()
        await asyncio.wait_for(node.mounted.wait(), 10)
        here = own.allocate(len(value), huge_pages=False)
        there = own.allocate(len(value), device="cuda:0")
        async with AsyncStore(address, own) as store:
            assert await store.put("k", value) is None
            async with asyncio.timeout(30):
                while server.master.counts.device_copied_objects == 0:  # each get is a lookup
                    assert await store.get("k") == value
            (grant,) = await store.open_reads(["k"])
            assert grant is not None and grant.replica.segment == "n"
            assert await store.read_ranges([grant], [0], [there.address], [len(value)]) == [True]
            assert grant.replica.segment == "n/hbm", "the bytes stay on the device"
            assert await store.read_ranges([grant], [0], [here.address], [len(value)]) == [True]
            assert grant.replica.segment == "n" and bytes(here.view()) == value
            assert await store.get_into("k", (there.address, len(value))) == len(value)
            assert await store.verify(["k"]) == [True], "both replicas are right"
        await node.close()
        await server.close()
