# SPDX-License-Identifier: Apache-2.0
"""Hygiene rules on requests of the gateway, before they are parsed; without rules it does nothing.

Owns the report of what was changed: a header of the answer, and metrics. The rules are
``forensics/hygiene.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from prometheus_client import Counter

from mooncake import metrics
from mooncake.forensics.hygiene import HygieneRule, apply_rules
from mooncake.http import large_json
from mooncake.log import get_logger

log = get_logger(__name__)

_changed = Counter(
    "mooncake_gateway_hygiene_requests",
    "Requests that a hygiene rule has changed, by rule.",
    ["rule"],
    registry=metrics.registry,
)


async def cleaned(rules: Sequence[HygieneRule], http: Request, content: bytes) -> bytes:
    """The body of a request after the rules, which are noted in its state; an unreadable one as it is."""
    if not rules:
        return content
    return await large_json.decoded(content, partial(_cleaned, rules, http))


def _cleaned(rules: Sequence[HygieneRule], http: Request, content: bytes) -> bytes:
    try:
        request: Any = large_json.decode(content)
    except msgspec.DecodeError:
        return content  # its error is reported by who parses it
    if not isinstance(request, dict):
        return content
    try:
        applied = apply_rules(rules, request, http.url.path)
        http.state.hygiene = applied
        if not applied.counts:
            return content
        changed = msgspec.json.encode(request)
    except (ValueError, TypeError, RecursionError, OverflowError, msgspec.MsgspecError) as error:
        log.warning("hygiene_rules_not_applied", error=repr(error)[:200])
        return content
    for rule in applied.counts:
        _changed.labels(rule).inc()
    return changed
