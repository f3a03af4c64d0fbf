# SPDX-License-Identifier: Apache-2.0
"""The catalog: places of keys, and when a fragment is retired."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.compat.objects.catalog import DataProtoCatalog


def a_handle(name: str, fields: list[str], rows: int = 2, **more: Any) -> dict[str, Any]:
    place = {"stage": "s", "section": "batch"}
    return {
        "type": "mooncake_dataproto_ref",
        "version": 1,
        "kind": "bundle_stages",
        "batch_size": rows,
        "partition": "p",
        "stage_refs": {"s": {"manifest_key": name}},
        "field_index": {field: {**place, "member": f"batch.{field}"} for field in fields},
        **more,
    }


def retired(answer: dict[str, Any]) -> list[str]:
    return [handle["stage_refs"]["s"]["manifest_key"] for handle in answer["retired_handles"]]


def test_fields_are_found_in_the_order_of_keys() -> None:
    catalog = DataProtoCatalog()
    catalog.update("p", ["a", "b"], tags=[{"x": 1}, {}], handle=a_handle("one", ["f", "g"]))
    catalog.update("p", ["b", "a"], tags=[{"y": 2}, {}], handle=a_handle("two", ["h"]))
    found = catalog.resolve("p", ["b", "a"])
    assert found["tags"] == [{"y": 2}, {"x": 1}]
    assert found["field_groups"] == [
        {"fields": ["f", "g"], "locations": [("one", 1), ("one", 0)]},
        {"fields": ["h"], "locations": [("two", 0), ("two", 1)]},
    ]
    assert found["handles"].keys() == {"one", "two"}
    assert catalog.list("p") == {"p": {"a": {"x": 1}, "b": {"y": 2}}} and catalog.list("q") == {}


def test_a_published_fragment_is_retired_with_its_last_use() -> None:
    catalog = DataProtoCatalog()
    catalog.publish("1", "p", ["a", "b"], handle=a_handle("one", ["f"]))
    token = catalog.resolve("p", ["a"], pin=True)["read_token"]
    assert retired(catalog.publish("2", "p", ["a"], handle=a_handle("two", ["f"], 1))) == []
    assert retired(catalog.remove("p", ["b", "unknown"])) == []
    assert retired(catalog.release_read(token)) == ["one"]
    assert retired(catalog.release_read(token)) == ["one"]
    with pytest.raises(ValueError, match="pending retirement"):
        catalog.publish("3", "p", ["a", "b"], handle=a_handle("one", ["f"]))
    with pytest.raises(ValueError, match="mismatch"):
        catalog.ack_retired([a_handle("one", ["other"])])
    assert retired(catalog.ack_retired([a_handle("one", ["f"])])) == []
    assert retired(catalog.drain()) == ["two"]
    with pytest.raises(RuntimeError, match="drained"):
        catalog.update("p", ["a"], tags=[{}])


def test_an_updated_fragment_belongs_to_the_caller() -> None:
    catalog = DataProtoCatalog()
    catalog.update("p", ["a", "b"], handle=a_handle("one", ["f"]))
    assert retired(catalog.remove("p", ["a", "b"])) == []
    assert catalog.list() == {}


def test_a_publication_has_its_effect_once() -> None:
    catalog = DataProtoCatalog()
    first = catalog.publish("1", "p", ["a"], tags=[{"x": 1}])
    catalog.update("p", ["a"], tags=[{"x": 2}])
    assert catalog.publish("1", "p", ["a"], tags=[{"x": 1}]) == first
    assert catalog.list() == {"p": {"a": {"x": 2}}}
    catalog.ack_publication("1")
    catalog.publish("1", "p", ["a"], tags=[{"x": 1}])
    assert catalog.list() == {"p": {"a": {"x": 1}}}


def test_a_publication_is_known_until_it_is_acknowledged() -> None:
    catalog = DataProtoCatalog()
    assert catalog.publication("1") is None
    answer = catalog.publish("1", "p", ["a"], tags=[{"x": 1}])
    assert catalog.publication("1") == answer
    with pytest.raises(ValueError, match="unique"):
        catalog.publish("2", "p", ["a", "a"], tags=[{}, {}])
    assert catalog.publication("2") is None
    catalog.ack_publication("1")
    assert catalog.publication("1") is None
    catalog.drain()
    assert catalog.publication("1") == {"append_rejected": "DataProto catalog is drained"}


def test_an_append_replaces_the_handle_of_a_fragment() -> None:
    catalog = DataProtoCatalog()
    old, new = a_handle("one", ["f"]), a_handle("one-and-more", ["f", "g"])
    catalog.publish("1", "p", ["a", "b"], handle=old)
    answer = catalog.publish_append("2", "one", "p", ["a", "b"], previous_handle=old, handle=new)
    assert answer["fields"] == ["f", "g"]
    found = catalog.resolve("p", ["b"], ["g", "f"])
    assert found["field_groups"] == [{"fields": ["g", "f"], "locations": [("one", 1)]}]
    assert found["handles"]["one"]["stage_refs"] == new["stage_refs"]
    assert retired(catalog.remove("p", ["a", "b"])) == ["one-and-more"]
    assert retired(catalog.ack_retired(catalog.drain()["retired_handles"])) == []


@pytest.mark.parametrize(
    ("fragment", "keys", "previous", "handle", "reason"),
    [
        ("two", ["a", "b"], a_handle("one", ["f"]), a_handle("new", ["f", "g"]), "stale"),
        ("one", ["a", "b"], a_handle("one", ["x"]), a_handle("new", ["x", "g"]), "stale"),
        ("one", ["b", "a"], a_handle("one", ["f"]), a_handle("new", ["f", "g"]), "no longer row"),
        ("one", ["a"], a_handle("one", ["f"]), a_handle("new", ["f", "g"]), "identity"),
        ("one", ["a", "b"], a_handle("one", ["f"]), a_handle("new", ["f", "g"], 3), "identity"),
        ("one", ["a", "b"], a_handle("one", ["f"]), a_handle("new", ["f", "g"], partition="q"), "identity"),
        ("one", ["a", "b"], a_handle("one", ["f"]), a_handle("new", ["g"]), "lost fields"),
    ],
)
def test_an_append_that_lost_is_rejected(
    fragment: str, keys: list[str], previous: Any, handle: Any, reason: str
) -> None:
    catalog = DataProtoCatalog()
    catalog.publish("1", "p", ["a", "b"], handle=a_handle("one", ["f"]))
    before = catalog.resolve("p", ["a", "b"])
    answer = catalog.publish_append("2", fragment, "p", keys, previous_handle=previous, handle=handle)
    assert reason in answer["append_rejected"]
    assert catalog.resolve("p", ["a", "b"]) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update("", ["c"], tags=[{}]),
        lambda c: c.update("p", [], tags=[]),
        lambda c: c.update("p", "c", tags=[{}]),
        lambda c: c.update("p", ["c", "c"], tags=[{}, {}]),
        lambda c: c.update("p", ["c"]),
        lambda c: c.update("p", ["c"], tags=[5]),
        lambda c: c.update("p", ["c"], tags=[{}, {}]),
        lambda c: c.update("p", ["c"], handle=a_handle("new", ["f"])),
        lambda c: c.update("p", ["c", "d"], handle=a_handle("new", [])),
        lambda c: c.update("p", ["c", "d"], handle=a_handle("one", ["g"])),
        lambda c: c.publish("9", "p", ["c", "d"], handle=a_handle("one", ["f"])),
        lambda c: c.resolve("p", ["c"]),
        lambda c: c.resolve("p", ["a"], ["nothing"]),
        lambda c: c.resolve("p", ["a"], []),
    ],
)
def test_what_is_refused_changes_nothing(change: Any) -> None:
    catalog = DataProtoCatalog()
    catalog.update("p", ["a", "b"], handle=a_handle("one", ["f"]))
    with pytest.raises((TypeError, ValueError)):
        change(catalog)
    assert catalog.list() == {"p": {"a": {}, "b": {}}}
    assert catalog.resolve("p", ["a", "b"])["handles"].keys() == {"one"}


def test_metadata_of_fragments_must_agree() -> None:
    catalog = DataProtoCatalog()
    catalog.update("p", ["a"], handle=a_handle("one", ["f"], 1, meta_info={"m": 1}))
    catalog.update("p", ["b"], handle=a_handle("two", ["f"], 1, meta_info={"m": 2}))
    with pytest.raises(ValueError, match="conflicting"):
        catalog.resolve("p", ["a", "b"])
    assert catalog.resolve("p", ["a"])["meta_info"] == {"m": 1}


def test_a_catalog_with_readers_is_not_drained() -> None:
    catalog = DataProtoCatalog()
    catalog.publish("1", "p", ["a", "b"], handle=a_handle("one", ["f"]))
    token = catalog.resolve("p", ["a"], pin=True)["read_token"]
    with pytest.raises(RuntimeError, match=r"1 active read"):
        catalog.drain()
    catalog.release_read(token)
    assert retired(catalog.drain()) == ["one"] == retired(catalog.drain())
