# SPDX-License-Identifier: Apache-2.0
"""Requests by session: which conversations reuse what they computed before, and which do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MAX_SESSION_ROWS = 500
NO_SESSION = ""


def session_rows(requests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sessions of the given requests, the latest first; requests without a session are one row.

    Tokens are those of finished requests: of the others it is not known what was cached.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    num_requests = 0
    for one in requests:
        num_requests += 1
        session, client = str(one.get("session") or NO_SESSION), str(one.get("client") or "")
        row = found.setdefault(
            (session, client),
            {
                "session": session,
                "client": client,
                "requests": 0,
                "in_progress": 0,
                "prompt_tokens": 0,
                "cached_tokens": 0,
                "output_tokens": 0,
                "last_start": None,
                "ttft_s": [],
            },
        )
        row["requests"] += 1
        row["in_progress"] += one.get("state") in ("prefill", "decode")
        if one.get("state", "finished") == "finished":
            for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
                row[name] += one.get(name) or 0
        if one.get("start") is not None:
            row["last_start"] = max(row["last_start"] or 0.0, one["start"])
        if one.get("ttft_s"):
            row["ttft_s"].append(one["ttft_s"])
    rows = sorted(found.values(), key=lambda row: -(row["last_start"] or 0.0))
    for row in rows:
        ttfts = row.pop("ttft_s")
        row["mean_ttft_s"] = sum(ttfts) / len(ttfts) if ttfts else None
        prompt = row["prompt_tokens"]
        row["hit_rate"] = min(1.0, row["cached_tokens"] / prompt) if prompt else None
    return {"sessions": rows[:MAX_SESSION_ROWS], "num_sessions": len(rows), "num_requests": num_requests}
