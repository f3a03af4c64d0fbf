# SPDX-License-Identifier: Apache-2.0
"""Parsing of the headers that the gateway uses, and the names by which a request is reported.

Body and prompts are ``http/api_requests.py``.
"""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from mooncake.forensics.hygiene import AppliedRules
from mooncake.gateway.clients import Client
from mooncake.gateway.metrics import Slo
from mooncake.http.openai import MAX_PRIORITY, ApiError

PRIORITY_HEADER = "X-Vllm-Priority"
RANK_HEADER = "X-data-parallel-rank"
MAX_RANK = 9999
MAX_SLO_MS = 1e12
"""The conductor's limit of a duration that a request asks for."""

SLO_HEADERS = {
    "ttft_ms": ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
    "tbt_ms": ("x-slo-tbt-ms", "x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"),
}
"""Headers of each SLO; of several in one request the first of this list counts."""

SESSION_HEADERS = (
    "X-Session-ID",
    "X-Session-Affinity",
    "X-Claude-Code-Session-ID",
    "Session-ID",
    "session_id",
    "X-SMG-Routing-Key",
    "X-Dynamo-Session-ID",
)
"""Headers in which programs name the session of a request, in the order in which they are read."""

LAST_SESSION_HEADER = "X-Correlation-ID"
"""Read after all other names: some programs make a new one for each request."""

MAX_SESSION_CHARS = 256


def slo_of(http: Request) -> Slo:
    """The SLOs in the request's headers. Raises ApiError, 400 naming the header."""
    return Slo(**{field: _milliseconds_of(http, names) for field, names in SLO_HEADERS.items()})


def _milliseconds_of(http: Request, names: tuple[str, ...]) -> float | None:
    """The value of the first of these headers that the request has."""
    name = next((one for one in names if one in http.headers), None)
    if name is None:
        return None
    text = http.headers[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SLO_MS:
        message = f"header {name} is {text[:40]!r}; allowed: milliseconds above 0, up to {MAX_SLO_MS:g}"
        raise ApiError(400, message, param=name, code="invalid_value")
    return value


def session_of(http: Request, body: Mapping[str, Any], operator_header: str) -> str:
    """The name of the request's session; empty without one that is fit for a header.

    The operator's header comes first, then the body's ``session_id``, because engines prefer it to headers.
    A name is a client's claim: it may only decide where a request goes.
    """
    names = (operator_header,) if operator_header else ()
    given = [http.headers.get(name) for name in names]
    given.append(body.get("session_id"))
    given += [http.headers.get(name) for name in SESSION_HEADERS]
    given += [body.get("prompt_cache_key"), http.headers.get(LAST_SESSION_HEADER)]
    return next((one for one in given if isinstance(one, str) and _is_session(one)), "")


def affinity_of(http: Request, session: str) -> str:
    """The conductor's name of a session: equal names of different tenants are different sessions."""
    client: Client | None = http.state.client
    # No session has a space in it.
    return f"{session} {client.entry.tenant_name}" if client is not None and session else session


def session_at_engines(http: Request, session: str) -> str:
    """The name of a session as engines get it, which is different for each tenant as well.

    It ends in a digest of the tenant, of fixed length, so that no tenant can choose a name of another's.
    """
    client: Client | None = http.state.client
    if client is None or not session:
        return session
    return f"{session}.{hashlib.sha256(client.entry.tenant_name.encode()).hexdigest()[:16]}"


def _is_session(name: str) -> bool:
    return re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_SESSION_CHARS}}}", name) is not None


def priority_of(http: Request) -> int | None:
    """The priority in the request's header, for a body without one. Raises ApiError, 400."""
    return _number_of(http, PRIORITY_HEADER, -MAX_PRIORITY, MAX_PRIORITY)


def rank_of(http: Request) -> int | None:
    """The data-parallel rank that a client wants its engine to use. Raises ApiError, 400."""
    return _number_of(http, RANK_HEADER, 0, MAX_RANK)


def _number_of(http: Request, name: str, least: int, most: int) -> int | None:
    text = http.headers.get(name)
    if text is None:
        return None
    if re.fullmatch(r"-?[0-9]{1,6}", text) and least <= int(text) <= most:
        return int(text)
    message = f"header {name} is {text[:40]!r}; allowed: a number from {least} to {most}"
    raise ApiError(400, message, param=name, code="invalid_value")


def request_id_of(http: Request) -> str:
    """The client's request id if it is fit for a header and a log, else a generated one."""
    found: str | None = getattr(http.state, "request_id", None)
    if found is None:
        given = http.headers.get("x-request-id", "")
        found = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex
        http.state.request_id = found
    return found


def names_of(http: Request) -> dict[str, str]:
    """Headers: the ids of a request, under which its explanation can be queried, and what rules changed."""
    answer_id = getattr(http.state, "answer_id", None)
    names = {"X-Request-ID": request_id_of(http)} | ({"X-Mooncake-ID": answer_id} if answer_id else {})
    applied: AppliedRules | None = getattr(http.state, "hygiene", None)
    if applied is not None and applied.counts:
        names["x-mooncake-hygiene"] = applied.header()
    return names
