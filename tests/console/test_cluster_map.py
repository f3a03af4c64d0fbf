# SPDX-License-Identifier: Apache-2.0
"""Hosts, tiers and waiting requests."""

from __future__ import annotations

from typing import Any

from mooncake.console.cluster_map import MAX_WAITING, cluster_map, tiers_of


def instance(name: str, role: str) -> dict[str, Any]:
    return {"instance": name, "role": role, "health": "ready", "num_requests": 1}


def segment(name: str, tier: str, size: int, used: int, node: str = "") -> dict[str, Any]:
    return {
        "segment": name,
        "tier": tier,
        "size_bytes": size,
        "allocated_bytes": used,
        "num_objects": 3,
        "node": node,
    }


def test_instances_and_segments_stand_at_their_hosts() -> None:
    status = {
        "model": "m",
        "instances": [instance("10.0.0.1:8100", "prefill"), instance("[::2]:8200", "decode")],
    }
    segments = [segment("10.0.0.1:9", "memory", 100, 40), segment("left-0", "ssd", 900, 90, node="left")]
    found = cluster_map(status, segments, [])
    hosts = {host["host"]: (len(host["instances"]), len(host["segments"])) for host in found["hosts"]}
    assert hosts == {"10.0.0.1": (1, 1), "::2": (1, 0), "left": (0, 1)}
    assert found["model"] == "m"
    assert [(one["tier"], one["size_bytes"], one["segments"]) for one in found["tiers"]] == [
        ("memory", 100, 1),
        ("ssd", 900, 1),
    ]


def test_requests_wait_at_the_instance_of_their_phase() -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "state": "prefill", "prefill": "p:1", "decode": "d:1", "seconds_ago": 2.0},
        {"id": "b", "state": "prefill", "prefill": None, "decode": "d:1"},
        {"id": "c", "state": "decode", "prefill": "p:1", "decode": "d:1"},
        {"id": "d", "state": "finished", "prefill": "p:1", "decode": "d:1"},
    ]
    found = cluster_map({"instances": [instance("p:1", "prefill"), instance("d:1", "decode")]}, [], rows)
    assert [(one["id"], one["what"], one["instance"]) for one in found["waiting"]] == [
        ("a", "prefill", "p:1"),
        ("b", "prefill", "d:1"),
        ("c", "decode", "d:1"),
    ]
    [prefill] = [host["instances"][0] for host in found["hosts"] if host["host"] == "p"]
    assert prefill["waiting"] == {"prefill": 1, "decode": 0}


def test_list_of_waiting_requests_is_bounded_and_says_how_many_there_are() -> None:
    rows = [{"id": str(number), "state": "decode", "decode": "d:1"} for number in range(MAX_WAITING + 7)]
    found = cluster_map({"instances": []}, [], rows)
    assert len(found["waiting"]) == MAX_WAITING and found["num_waiting"] == MAX_WAITING + 7


def test_tiers_of_several_hosts_are_added_up() -> None:
    [tier] = tiers_of([segment("a", "memory", 100, 10), segment("b", "memory", 50, 20)])
    assert (tier["size_bytes"], tier["allocated_bytes"], tier["num_objects"]) == (150, 30, 6)
