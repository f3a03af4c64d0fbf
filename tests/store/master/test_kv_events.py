# SPDX-License-Identifier: Apache-2.0
"""The store's KV events: fields, media, bounds, gaps, and the summary for late subscribers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.store import messages as m
from mooncake.store.master.kv_events import Batch, KvEvents
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier
from tests.store.conftest import Voice

MIB = 1 << 20


class Published:
    """A master whose events are read."""

    def __init__(self, **more: Any) -> None:
        self.voice = Voice(MasterSettings(demote_watermark=1.0))
        self.num_woken = 0
        for name, tier in (("a", Tier.MEMORY), ("b", Tier.MEMORY), ("a/ssd", Tier.SSD)):
            self.mount(name, tier)
        self.events = KvEvents(self.voice.master.catalog, "store-1", wall_s=1000.0, wake=self._wake, **more)

    def _wake(self) -> None:
        self.num_woken += 1

    def mount(self, name: str, tier: Tier) -> None:
        node = name.partition("/")[0]
        mount = m.Mount(name, 1, "h", 0, MIB, b"", 0.0, tier=tier, content_id=1, node=node)
        assert self.voice.say(mount, connection=name).refusal is None
        self.voice.say(m.ReportContents(name, 1, [], True), connection=name)
        self.voice.say(m.Heartbeat(name, 1), connection=name)

    def put(self, *keys: str, tenant: str = "", **policy: Any) -> list[int]:
        sizes = [100] * len(keys)
        ask = m.PutStart(1, "h", list(keys), sizes, sizes, policy=m.PutPolicy(**policy), tenant=tenant)
        ids = [one.object_id for one in self.voice.say(ask).reserved]
        ended = self.voice.say(m.PutEnd(list(keys), ids, [b"crc!"] * len(keys), tenant=tenant))
        assert ended.outcomes == [True] * len(keys)
        return ids

    def batches(self) -> list[Batch]:
        return self.events.take(self.voice.now)

    def read_all(self) -> list[dict[str, Any]]:
        return [event for batch in self.batches() for event in read(batch)]


def read(batch: Batch) -> list[dict[str, Any]]:
    _, events, rank = msgspec.msgpack.decode(batch[1])
    assert rank == 0
    assert isinstance(events, list)
    return events


@pytest.mark.parametrize("tenant", ["", "t"])
def test_a_group_has_the_name_that_its_writer_gave_it(tenant: str) -> None:
    scene = Published()
    scene.voice.put("k", tenant=tenant, group="g")
    assert [event["group_id"] for event in scene.read_all()] == ["g"]


def test_the_fields_of_the_existing_master() -> None:
    scene = Published()
    scene.voice.now = 2.0
    scene.put("17", tenant="t")
    batch = scene.batches()[0]
    assert batch[0] == 0
    assert msgspec.msgpack.decode(batch[1])[0] == 1_002_000
    assert read(batch) == [
        {
            "event_id": 1,
            "timestamp": 1_002_000,
            "event_type": "stored",
            "model_name": None,
            "block_size": None,
            "additional_salt": None,
            "lora_name": None,
            "dp_rank": None,
            "tenant_id": "t",
            "backend_id": "store-1",
            "group_id": None,
            "medium": "cpu",
            "seq_hashes": [17],
            "base_block_idx": 0,
            "parent_hash": None,
            "token_ids": None,
            "object_key": "17",
            "type": "BlockStored",
            "block_hashes": [17],
            "parent_block_hash": None,
        }
    ]
    scene.voice.say(m.Remove(["17"], True, tenant="t"))
    removed = scene.read_all()[0]
    assert (removed["event_type"], removed["type"], removed["event_id"]) == ("removed", "BlockRemoved", 2)
    assert not {"token_ids", "parent_hash", "parent_block_hash"} & removed.keys()


@pytest.mark.parametrize(
    ("key", "unsigned", "signed"),
    [
        ("0xffffffffffffffff", [(1 << 64) - 1], [-1]),
        ("18446744073709551615", [(1 << 64) - 1], [-1]),
        ("18446744073709551616", [], []),
        ("0X10", [16], [16]),
        ("007", [7], [7]),
        ("kv/ab/cd", [], []),
        ("-1", [], []),
        ("1_0", [], []),
    ],
)
def test_keys_that_are_hashes(key: str, unsigned: list[int], signed: list[int]) -> None:
    scene = Published()
    scene.put(key)
    event = scene.read_all()[0]
    assert (event["seq_hashes"], event["block_hashes"]) == (unsigned, signed)
    assert event["base_block_idx"] == (0 if unsigned else None)


def test_fields_that_can_be_left_out() -> None:
    scene = Published(is_legacy=False, has_object_key=False)
    scene.put("k")
    assert not {"type", "block_hashes", "object_key", "parent_block_hash"} & scene.read_all()[0].keys()


def test_one_event_for_each_medium() -> None:
    scene = Published()
    scene.put("k", num_replicas=2)
    assert [(event["event_type"], event["medium"]) for event in scene.read_all()] == [("stored", "cpu")]
    catalog = scene.voice.master.catalog
    stored = catalog.objects.readable["k"]
    extent = catalog.add_extent(stored, catalog.segments.mounted["a/ssd"], 0.0, 10.0)
    assert extent is not None
    catalog.complete_extent(stored, extent, 0.0)
    assert [(event["event_type"], event["medium"]) for event in scene.read_all()] == [("stored", "disk")]
    memory = [one for one in stored.extents if one is not extent]
    catalog.drop_extent(stored, memory[0], "test", 0.0)
    assert scene.read_all() == []
    catalog.drop_extent(stored, memory[1], "test", 0.0)
    assert [(event["event_type"], event["medium"]) for event in scene.read_all()] == [("removed", "cpu")]
    catalog.drop_extent(stored, extent, "test", 0.0)
    assert [(event["event_type"], event["medium"]) for event in scene.read_all()] == [("removed", "disk")]
    catalog.records = []


def test_two_replicas_that_go_at_once_are_one_event() -> None:
    scene = Published()
    scene.put("k", num_replicas=2)
    scene.read_all()
    scene.voice.say(m.Remove(["k"], True))
    assert [event["event_type"] for event in scene.read_all()] == ["removed"]
    scene.put("k")
    scene.voice.say(m.Unmount("a", 1))
    scene.voice.say(m.Unmount("b", 1))
    assert [event["event_type"] for event in scene.read_all()] == ["stored", "removed"]


def test_batches_are_bounded_and_numbered() -> None:
    scene = Published()
    scene.put(*(f"k{number}" for number in range(150)))
    assert scene.num_woken == 1
    batches = scene.batches()
    assert [(sequence, len(read((sequence, payload)))) for sequence, payload in batches] == [
        (0, 64),
        (1, 64),
        (2, 22),
    ]
    scene.put("more")
    assert scene.num_woken == 2


def test_dropped_events_leave_a_gap() -> None:
    scene = Published(capacity=10)
    scene.put("first")
    assert scene.batches()[0][0] == 0
    scene.put(*(f"k{number}" for number in range(13)))
    assert (scene.events.num_dropped, scene.events.num_queued) == (3, 10)
    (sequence, _), *others = scene.batches()
    assert sequence == 2 and not others
    scene.put("last")
    assert scene.batches()[0][0] == 3


@pytest.mark.parametrize("num_objects", [0, 1, 63, 64, 400])
def test_the_summary_is_all_there_is_and_fits_below(num_objects: int) -> None:
    before = Published()
    keys = [f"k{number}" for number in range(num_objects)]
    for start in range(0, num_objects, 100):
        before.put(*keys[start : start + 100])
    events = KvEvents(before.voice.master.catalog, "again")
    first = events.next_sequence
    batches = list(events.summary(first, 0.0))
    numbers = [sequence for sequence, _ in batches]
    assert numbers == sorted(set(numbers))
    assert all(0 <= number < first for number in numbers)
    scene = [event for batch in batches for event in read(batch)]
    if not num_objects:
        assert not batches
        return
    assert scene[0]["type"] == "AllBlocksCleared"
    assert numbers[-1] == first - 1
    assert [event["object_key"] for event in scene[1:]] == keys
    squeezed = list(events.summary(1, 0.0))
    assert [sequence for sequence, _ in squeezed] == [0]
    assert len(read(squeezed[0])) == num_objects + 1
