from __future__ import annotations

from mooncake.store import messages as m
from mooncake.types import Tier
from tests.store.conftest import SETTINGS, Voice
from tests.store.nodes import Nodes, Place, with_ssd


class Watched(Nodes):
    """Hears of cold hits."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.cold: list[str] = []
        for watcher in self.master.catalog.watchers:
            watcher.cold_hit = lambda stored, now: self.cold.append(stored.key)  # type: ignore[method-assign]


def test_memory_is_named_before_ssd_and_what_is_on_ssd_alone_is_a_cold_hit() -> None:
    nodes = Watched()
    memory, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    stored = nodes.master.objects.readable["k"]
    catalog = nodes.master.catalog
    segment = nodes.master.segments.mounted["a/ssd"]
    extent = catalog.add_extent(stored, segment, nodes.now, nodes.now + 10.0)
    assert extent is not None
    found = nodes.find("k")
    assert found is not None and [one.tier for one in found.replicas] == [Tier.MEMORY]
    catalog.complete_extent(stored, extent, nodes.now)
    nodes.master.check()
    found = nodes.find("k")
    assert found is not None and [one.tier for one in found.replicas] == [Tier.MEMORY, Tier.SSD]
    assert found.replicas[1].segment == "a/ssd" and not nodes.cold
    nodes.lose(memory.connection)
    found = nodes.find("k")
    assert found is not None and [one.tier for one in found.replicas] == [Tier.SSD]
    assert set(nodes.cold) == {"k"}
    nodes.lose(ssd.connection)
    assert nodes.find("k") is None
    assert nodes.say(m.Exists(["k"])).flags == b"\0"


def test_uses_are_counted_by_lookups_alone(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.find("k")
    voice.say(m.Exists(["k"]))
    voice.find("k")
    status = voice.inspect("k")
    assert status is not None and status.num_uses == 2 and status.leased_s == 10.0


def test_inspecting_shows_what_is_being_written_too(voice: Voice) -> None:
    voice.mount(host="left")
    voice.start("k", group="g", parents=["p"], tenant="red", policy=m.PutPolicy(data_type=3))
    status = voice.inspect("k", "red")
    assert status is not None
    assert (status.is_writing, status.group, status.parent, status.data_type) == (True, "g", "p", 3)
    replica = status.replicas[0]
    assert (replica.segment, replica.host, replica.is_complete) == ("a", "left", False)
    assert status.leased_s == 0.0 and voice.inspect("none") is None


def test_one_lookup_leases_the_whole_group(voice: Voice) -> None:
    voice.mount()
    voice.put("a", "b", group="g")
    for ask in (m.Lookup(["a"]), m.Exists(["a"])):
        voice.say(ask)
        status = voice.inspect("b")
        assert status is not None and status.leased_s == 10.0
        voice.keep_alive(5)
    ids = [voice.master.objects.readable["a"].object_id]
    voice.say(m.Renew(["a"], ids))
    status = voice.inspect("b")
    assert status is not None and status.leased_s == 10.0


def test_a_place_that_is_not_there_yet_is_named_to_nobody() -> None:
    nodes = Nodes(SETTINGS)
    Place(nodes, "a")
    Place(nodes, "b")
    nodes.put("k", host="a")
    stored = nodes.master.objects.readable["k"]
    assert nodes.master.catalog.add_extent(stored, nodes.master.segments.mounted["b"], 0.0, 5.0) is not None
    nodes.master.check()
    assert nodes.where("k") == ["a"]
