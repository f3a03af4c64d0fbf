# SPDX-License-Identifier: Apache-2.0
"""Answers of the gateway's endpoints in the form of the console's pages.

Owns which of their fields are shown: never those with text of a prompt. Fields that another version of an
endpoint lacks are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_CAUSES = 30
_REPORT_FIELDS = ("tokens", "attainable_tokens", "hygiene_gain_tokens")
_SIBLING_FIELDS = (
    *("offset", "unit", "kind", "lost_tokens", "sibling", "sibling_age_s"),
    "is_same_session",
)


def listed_requests(answer: Any) -> list[dict[str, Any]] | None:
    """The rows of ``/v1/requests``; None where there is no such list, or none is kept."""
    if isinstance(answer, dict):
        if answer.get("kept") == 0:
            return None
        answer = next((answer[name] for name in ("requests", "data") if name in answer), None)
    if not isinstance(answer, list):
        return None
    return [request_row(row) for row in answer if isinstance(row, dict) and row.get("id")]


def request_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row, with its state by the status of its answer; without it, it is in progress."""
    status, latency_s = row.get("status"), row.get("latency_s")
    state = row.get("state")
    if state is None and isinstance(status, int) and status >= 400:
        state = "refused" if status in (429, 503) else "failed"
    elif state is None and latency_s is not None:
        state = "finished"
    return {**row, "state": state, "start": row.get("start", row.get("start_s"))}


def missed_tokens(answer: Any) -> dict[str, int] | None:
    """Tokens by the cause of their miss, all tenants and models of the answer together; None without any."""
    if not isinstance(answer, dict):
        return None
    rows = answer.get("tenants")
    found: dict[str, int] = {}
    for row in rows if isinstance(rows, list) else [answer]:
        parts: dict[str, Any] = next(
            (row[name] for name in ("tokens", "causes") if isinstance(row.get(name), dict)), {}
        )
        for cause, num in parts.items():
            if cause != "hit" and isinstance(num, int) and (cause in found or len(found) < MAX_CAUSES):
                found[cause] = found.get(cause, 0) + num
    return found


def miss_facts(report: Any) -> dict[str, Any] | None:
    """Where a prompt left its nearest sibling, without the text there."""
    if not isinstance(report, dict):
        return None
    found = {name: report[name] for name in _REPORT_FIELDS if name in report}
    sibling = report.get("left_sibling")
    if isinstance(sibling, dict):
        found["left_sibling"] = {name: sibling[name] for name in _SIBLING_FIELDS if name in sibling}
        if rule := sibling.get("rule"):
            # The expression behind the action is text of the prompt.
            found["left_sibling"]["rule"] = str(rule).partition(":")[0]
    return found


def what_if_rows(answer: Any) -> list[dict[str, Any]]:
    """What is expected after a change, by quantity, with the change and its interval where it is known."""
    if not isinstance(answer, dict):
        return []
    expected, effects = answer.get("expected"), answer.get("effect")
    if isinstance(expected, dict) and isinstance(effects, dict):
        return [
            {"name": name, "after": value, "effect": effects.get(name)} for name, value in expected.items()
        ]
    before, after = answer.get("before") or {}, answer.get("after") or {}
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    names = {**before, **after}
    return [{"name": name, "before": before.get(name), "after": after.get(name)} for name in names]
