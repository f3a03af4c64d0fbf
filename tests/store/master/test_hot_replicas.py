# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

from tests.store.conftest import SETTINGS
from tests.store.master.test_tiering import where, work
from tests.store.nodes import Nodes, Place

HOT = dataclasses.replace(SETTINGS, hot_uses_per_s=10.0, max_hot_replicas=3)


def use(nodes: Nodes, rate: int, seconds: int, *places: Place, key: str = "k") -> None:
    for _ in range(seconds):
        for _ in range(rate):
            nodes.find(key)
        nodes.wait(1.0)
        for place in places:
            place.beat()
        work(nodes, *places)


def test_a_hot_object_gets_replicas_and_loses_them_when_it_is_cool() -> None:
    nodes = Nodes(HOT)
    places = [Place(nodes, name) for name in "abcd"]
    nodes.put("k", "other", host="a")
    use(nodes, 9, 4, *places)
    assert where(nodes, "k") == ["a"]
    use(nodes, 12, 3, *places)
    assert len(where(nodes, "k")) == 2, "hot once over"
    use(nodes, 100, 3, *places)
    assert len(where(nodes, "k")) == 3, "as many as it may have"
    assert where(nodes, "other") == ["a"]
    use(nodes, 16, 12, *places)
    assert len(where(nodes, "k")) == 3, "cool, but not for each of them"
    use(nodes, 1, 12, *places)
    assert where(nodes, "k") == ["a"]
    assert nodes.allocated_bytes == 4 * 1024, "a reader may still have two of them"
    assert any("cool again" in line for line in nodes.master.story("k"))


def test_requested_replicas_stay() -> None:
    nodes = Nodes(HOT)
    places = [Place(nodes, name) for name in "abc"]
    nodes.put("k", host="a")
    stored = nodes.master.objects.readable["k"]
    nodes.master.tasks.plan(stored, nodes.master.segments.mounted["b"], "copy", nodes.now)
    work(nodes, *places)
    use(nodes, 100, 3, *places)
    assert len(where(nodes, "k")) == 3
    use(nodes, 1, 12, *places)
    assert where(nodes, "k") == ["a", "b"]


def test_a_hot_replica_evicts_nothing_and_is_on_another_host() -> None:
    nodes = Nodes(dataclasses.replace(HOT, high_watermark=0.5))
    a, b = Place(nodes, "a", host="one"), Place(nodes, "b", host="one")
    c, d = Place(nodes, "c", 4096, host="two"), Place(nodes, "d", 4096, host="two")
    nodes.put("k", host="one")
    nodes.put("full", size_bytes=2000, host="two")
    full = where(nodes, "full")[0]
    (other,) = {"c", "d"} - {full}
    first = where(nodes, "k")[0]
    use(nodes, 12, 3, a, b, c, d)
    assert where(nodes, "k") == [first, other]


def test_hot_replicas_can_be_turned_off_and_end_with_the_object() -> None:
    nodes = Nodes(dataclasses.replace(HOT, hot_uses_per_s=0.0))
    places = [Place(nodes, name) for name in "ab"]
    nodes.put("k", host="a")
    use(nodes, 100, 3, *places)
    assert where(nodes, "k") == ["a"]

    nodes = Nodes(HOT)
    places = [Place(nodes, name) for name in "ab"]
    nodes.put("k", host="a")
    use(nodes, 100, 3, *places)
    assert len(where(nodes, "k")) == 2
    nodes.remove("k", force=True)
    use(nodes, 1, 3, *places)
    assert repr(nodes.master.hot) == "<HotReplicas 0 objects>"


def test_lookups_of_nothing_cost_nothing_later() -> None:
    nodes = Nodes(HOT)
    Place(nodes, "a")
    assert nodes.master.hot.deadline() is None
    nodes.find("nothing")
    assert nodes.master.hot.deadline() is not None
    nodes.wait(1.0)
    assert nodes.master.hot.deadline() is None
