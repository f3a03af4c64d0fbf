# SPDX-License-Identifier: Apache-2.0
"""The map of the cluster: hosts with their instances and segments, and which requests wait for what.

Turns the conductor's rows and the master's status into rows by host. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mooncake.console.access import host_of

MAX_WAITING = 200
"""Most requests in the list of those that wait."""


def cluster_map(
    status: Mapping[str, Any], segments: Sequence[Mapping[str, Any]], requests: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The page's content, from ``/status``, the segments of the master's status, and recent requests."""
    hosts: dict[str, dict[str, Any]] = {}

    def host(name: str) -> dict[str, Any]:
        return hosts.setdefault(name, {"host": name, "instances": [], "segments": []})

    waiting = [waits_for(one) for one in requests if one.get("state") in ("prefill", "decode")]
    for row in status.get("instances", []):
        here = [one for one in waiting if one["instance"] == row["instance"]]
        host(host_of(row["instance"]))["instances"].append(
            {**row, "waiting": {what: sum(one["what"] == what for one in here) for what in WAITS}}
        )
    for segment in segments:
        host(_host_of_segment(segment))["segments"].append(dict(segment))
    names = ("model", "conductor", "scheduling", "degraded", "requests_in_flight", "scaling", "protocol")
    return {
        **{name: status.get(name) for name in names},
        "hosts": [hosts[name] for name in sorted(hosts)],
        "tiers": tiers_of(segments),
        "waiting": waiting[:MAX_WAITING],
        "num_waiting": len(waiting),
    }


WAITS = ("prefill", "decode")


def waits_for(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a request in progress waits for, and where."""
    is_prefill = request.get("state") == "prefill"
    return {
        "id": request.get("id"),
        "what": "prefill" if is_prefill else "decode",
        "instance": (request.get("prefill") or request.get("decode"))
        if is_prefill
        else request.get("decode"),
        "seconds": request.get("seconds_ago", 0.0),
        "tokens": request.get("prompt_tokens"),
    }


def tiers_of(segments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Size and use of each tier, all hosts together."""
    found: dict[str, dict[str, Any]] = {}
    for one in segments:
        tier = found.setdefault(
            str(one["tier"]),
            {
                "tier": str(one["tier"]),
                "size_bytes": 0,
                "allocated_bytes": 0,
                "num_objects": 0,
                "segments": 0,
            },
        )
        for name in ("size_bytes", "allocated_bytes", "num_objects"):
            tier[name] += one[name]
        tier["segments"] += 1
    return [found[name] for name in sorted(found)]


def _host_of_segment(segment: Mapping[str, Any]) -> str:
    """A segment's address if its name is one, else the node's name."""
    name = str(segment["segment"])
    host, colon, port = name.rpartition(":")
    if colon and port.isdecimal():
        return host.strip("[]")
    return str(segment.get("node") or name)
