# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import get_args

from mooncake.store import messages as m
from mooncake.store.master import catalog_events as events
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.log_records import Record
from mooncake.store.master.master import Master
from mooncake.types import Tier
from tests.store.conftest import SETTINGS, Voice
from tests.store.nodes import Nodes, with_ssd

TWO = m.PutPolicy(num_replicas=2)


class Observer:
    """Records the events of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.events: list[events.CatalogEvent] = []
        catalog.observe(dict.fromkeys(get_args(events.CatalogEvent), self.events.append))

    @property
    def lines(self) -> list[str]:
        """``event key [segment: reason]`` of each."""
        return [" ".join([type(one).__name__, one.stored.key, *_details(one)]) for one in self.events]


def _details(event: events.CatalogEvent) -> list[str]:
    if isinstance(event, events.ReplicaRemoved):
        return [f"{event.extent.segment.name}: {event.reason}"]
    return [event.extent.segment.name] if isinstance(event, events.ReplicaCompleted) else []


def test_observers_get_their_events_in_the_order_of_registration(voice: Voice) -> None:
    calls: list[str] = []
    voice.master.catalog.observe({events.ObjectShown: lambda event: calls.append("first")})
    voice.master.catalog.observe({events.ObjectRemoved: lambda event: calls.append("removed")})
    voice.master.catalog.observe({events.ObjectShown: lambda event: calls.append("second")})
    voice.mount()
    voice.put("k")
    assert calls == ["first", "second"]
    voice.remove("k")
    assert calls == ["first", "second", "removed"]


def test_each_replica_is_removed_before_the_object(voice: Voice) -> None:
    observer = Observer(voice.master.catalog)
    voice.mount("a")
    voice.mount("b", host="other")
    voice.put("k", policy=TWO)
    voice.remove("k")
    assert observer.lines == [
        "ObjectShown k",
        "ReplicaRemoved k a: removed",
        "ReplicaRemoved k b: removed",
        "ObjectRemoved k",
    ]


def test_an_eviction_and_a_move_are_known_by_their_reasons() -> None:
    nodes = Nodes(SETTINGS)
    with_ssd(nodes)
    nodes.put("k", host="a")
    catalog = nodes.master.catalog
    stored = nodes.master.objects.readable["k"]
    ssd = nodes.master.segments.mounted["a/ssd"]
    observer = Observer(catalog)
    extent = catalog.add_extent(stored, ssd, nodes.now, nodes.now + 10.0)
    assert extent is not None
    catalog.complete_extent(stored, extent, nodes.now)
    catalog.evict(stored, stored.complete(Tier.MEMORY)[0], "watermark", nodes.now)
    completed, removed = observer.events
    assert isinstance(completed, events.ReplicaCompleted) and completed.extent is extent
    assert isinstance(removed, events.ReplicaRemoved) and removed.stored.is_readable
    assert (removed.reason, removed.is_evicted, removed.is_moved) == ("evicted: watermark", True, False)
    assert nodes.find("k") is not None
    assert isinstance(observer.events[-1], events.ColdHit)
    moved = events.ReplicaRemoved(stored, extent, events.DRAINED, nodes.now)
    assert moved.is_moved and not moved.is_evicted


def test_of_the_records_of_another_master_only_removals_are_reported(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b", host="other")
    voice.put("k", "l", policy=TWO)
    catalog, follower = voice.master.catalog, Master(SETTINGS)
    stored = voice.master.objects.readable["k"]
    catalog.drop_extent(stored, stored.extents[0], "test", voice.now)
    voice.remove("l")
    observer = Observer(follower.catalog)
    records: list[Record] = voice.records
    follower.apply(records, 0.0)
    removed = [one for one in observer.events if isinstance(one, events.ReplicaRemoved)]
    assert all(one.is_replayed for one in removed)
    assert [(one.stored.key, one.extent.segment.name) for one in removed] == [
        ("k", "a"),
        ("l", "a"),
        ("l", "b"),
    ]
    assert [type(one) for one in observer.events[3:]] == [events.ObjectRemoved]
    assert not follower.catalog.is_replaying
