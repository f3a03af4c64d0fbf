# SPDX-License-Identifier: Apache-2.0
"""One request as bars on a line of time: queue, load, prefill, transfer, decode.

A trace of the request, where the gateway has one, gives the bars with their true instants. Without a trace
they come from the conductor's explanation: its durations in their order, which is true for one placement and
leaves out what was not measured. Which of the two it was is part of the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SPANS = 500
STAGE_PHASES = ("queue", "load", "prefill", "transfer", "decode")


def waterfall(explanation: Mapping[str, Any] | None, trace: Mapping[str, Any] | None) -> dict[str, Any]:
    """``source`` and ``spans``, each with its name, its phase, and when it began and ended, in seconds."""
    if trace is not None and trace.get("spans"):
        return {"source": "trace", "spans": _traced(trace["spans"]), "trace_id": trace.get("trace_id")}
    if explanation is None:
        return {"source": "none", "spans": []}
    return {"source": "explanation", "spans": _explained(explanation)}


def _traced(spans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Spans in the order of their beginning, each below its parent.

    The first of ``spans`` is the root, whose parent is chosen by a client, which may name one of them.
    """
    first = min(float(span["start_s"]) for span in spans)
    children: dict[Any, list[Mapping[str, Any]]] = {}
    known = {span["span_id"] for span in spans}
    for span in sorted(spans, key=lambda one: float(one["start_s"])):
        parent = span.get("parent_id")
        children.setdefault(parent if parent in known else None, []).append(span)
    found: list[dict[str, Any]] = []
    waiting = [(0, span) for span in reversed(children.get(None, spans[:1]))]
    seen: set[Any] = set()
    while waiting and len(found) < MAX_SPANS:
        depth, span = waiting.pop()
        if span["span_id"] in seen:
            continue  # a parent that is its own descendant
        seen.add(span["span_id"])
        name = str(span["name"])
        found.append(
            {
                "name": name,
                "phase": phase_of(name),
                "where": str(span.get("instance") or span.get("service") or ""),
                "depth": depth,
                "start_s": float(span["start_s"]) - first,
                "end_s": max(float(span["end_s"] or span["start_s"]), float(span["start_s"])) - first,
                "attributes": dict(span.get("attributes") or {}),
            }
        )
        waiting += [(depth + 1, child) for child in reversed(children.get(span["span_id"], []))]
    return found


_PHASES = {
    "queue": ("queue", "wait", "waiting", "schedule", "place", "admission", "choose"),
    "load": ("load", "lookup", "fetch"),
    "transfer": ("transfer", "push", "store", "save", "put"),
    "prefill": ("prefill", "compute", "chunk", "layer", "layers", "stage"),
    "decode": ("decode", "step", "stream"),
}


def phase_of(name: str) -> str:
    """The phase that a span's name belongs to, by its words; "" for a span around others."""
    words = set(re.findall(r"[a-z]+", name.lower()))
    return next((phase for phase, known in _PHASES.items() if not words.isdisjoint(known)), "")


def _explained(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    actual = found["actual"]
    predicted = found.get("prediction") or {}
    prefill, decode = found.get("prefill") or found.get("decode") or "", found.get("decode") or ""
    spans: list[dict[str, Any]] = []
    at = 0.0

    def add(phase: str, seconds: float, where: str, expected: float | None, **attributes: Any) -> None:
        nonlocal at
        if seconds > 0:
            spans.append(
                {
                    "name": phase,
                    "phase": phase,
                    "where": where,
                    "depth": 0,
                    "start_s": at,
                    "end_s": at + seconds,
                    "predicted_s": expected,
                    "attributes": attributes,
                }
            )
            at += seconds

    add("queue", actual["queue_s"], prefill, predicted.get("queue_s"))
    add("load", actual["load_s"], prefill, predicted.get("fetch_s"), tokens=actual["loaded_tokens"])
    began = at
    computed = max(0, found["num_tokens"] - actual["cached_tokens"] - actual["loaded_tokens"])
    add("prefill", actual["prefill_s"], prefill, predicted.get("prefill_s"), tokens=computed)
    for number, stage in enumerate(actual.get("stages") or []):
        layers = f"{stage['first_layer']}-{stage['end_layer'] - 1}"
        spans.append(
            {
                "name": f"stage {number}, layers {layers}",
                "phase": "prefill",
                "where": prefill,
                "depth": 1,
                "start_s": began + stage["began_s"],
                "end_s": began + stage["ended_s"],
                "attributes": {"computed_s": stage["computed_s"], "idle_s": stage["waited_s"]},
            }
        )
    # The first token comes after the KV has reached the decode instance and its first step.
    add("transfer", actual["ttft_s"] - at, decode, None, note="until the first token, incl. the first step")
    num_gaps = max(0, actual["output_tokens"] - 1)
    add("decode", actual["tbt_s"] * num_gaps, decode, None, tokens=actual["output_tokens"])
    return spans
