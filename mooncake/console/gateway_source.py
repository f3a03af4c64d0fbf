# SPDX-License-Identifier: Apache-2.0
"""Where the console's pages get the gateway's data: its own endpoints.

The gateway's endpoints are called in this process with the visitor's key, so that they decide what the
visitor may see, as for every other caller; the operators' application answers those who may see all. An
endpoint that this version does not have, or that fails, is None and the page says that it is not available.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from mooncake import clock
from mooncake.conductor.explanation import ActualTimes
from mooncake.console.access import Visitor
from mooncake.console.endpoint_answers import listed_requests
from mooncake.console.recorder import BoundedCache
from mooncake.errors import MooncakeError
from mooncake.gateway.gateway import Gateway
from mooncake.log import get_logger

log = get_logger(__name__)

MAX_REQUESTS = 500
_MAX_EXPLAINED = 60
"""Requests of a list whose explanation is looked up at a time."""
_MAX_ANSWER_BYTES = 16 << 20
_TIMEOUT_S = 10.0
_WHAT_IF_TIMEOUT_S = 200.0

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True)
class InnerAnswer:
    """The answer of an application in this process."""

    status: int
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None


async def call(
    app: Asgi,
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    query: str = "",
    timeout_s: float = _TIMEOUT_S,
) -> InnerAnswer:
    """Call an ASGI application without a connection. 502 when it raises, 504 when it takes too long."""
    fields = {"host": "console.invalid", "content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields.items()],
        "client": ("console.invalid", 0),
        "server": ("console.invalid", 0),
    }
    sent, status, is_read = bytearray(), 502, False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # the caller stays until the answer is complete
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body" and len(sent) <= _MAX_ANSWER_BYTES:
            sent.extend(message.get("body", b""))

    try:
        async with asyncio.timeout(timeout_s):
            await app(scope, receive, send)
    except TimeoutError:
        return InnerAnswer(504, b"{}")
    except Exception as error:
        log.warning("console_source_failed", path=path, reason=repr(error))
        return InnerAnswer(502, b"{}")
    if len(sent) > _MAX_ANSWER_BYTES:
        return InnerAnswer(502, b"{}")
    return InnerAnswer(status, bytes(sent))


class GatewaySource:
    """The gateway's data, as far as a visitor may see it."""

    def __init__(self, gateway: Gateway, app: Asgi, operator_app: Asgi) -> None:
        self._gateway, self._app, self._operator_app = gateway, app, operator_app
        self._ended = BoundedCache(4 * MAX_REQUESTS)
        """Summaries of requests that have ended, which change no more."""

    @property
    def _operator_headers(self) -> dict[str, str]:
        """Headers with which this process reads what a visitor who may see all asks for."""
        key = self._gateway.settings.admin_api_key
        return {"x-api-key": key} if key else {}

    async def get(self, visitor: Visitor, path: str, query: str = "") -> Any:
        """The JSON of an endpoint; None when it is not there or refuses."""
        if visitor.sees_all:
            answer = await call(self._operator_app, "GET", path, self._operator_headers, query=query)
            if answer.status == 404:  # an endpoint of the clients' port only
                answer = await call(self._app, "GET", path, self._operator_headers, query=query)
        else:
            answer = await call(self._app, "GET", path, _headers_of(visitor), query=query)
        return answer.json() if answer.status == 200 else None

    async def post(self, visitor: Visitor, path: str, body: Any) -> InnerAnswer:
        """Call an endpoint that acts, with the visitor's own key."""
        return await call(self._app, "POST", path, _headers_of(visitor), json.dumps(body).encode())

    async def what_if(self, visitor: Visitor, change: Any) -> InnerAnswer:
        """Predict the effect of a change; it changes nothing, so a reader of this host may ask for it."""
        body = json.dumps({"change": change}).encode()
        if not visitor.sees_all:
            return await call(
                self._app, "POST", "/v1/what_if", _headers_of(visitor), body, timeout_s=_WHAT_IF_TIMEOUT_S
            )
        answer = await call(
            self._operator_app,
            "POST",
            "/v1/what_if",
            self._operator_headers,
            body,
            timeout_s=_WHAT_IF_TIMEOUT_S,
        )
        if answer.status in (404, 405):
            answer = await call(
                self._app, "POST", "/v1/what_if", self._operator_headers, body, timeout_s=_WHAT_IF_TIMEOUT_S
            )
        return answer

    async def status(self) -> dict[str, Any]:
        found = (await call(self._operator_app, "GET", "/status", self._operator_headers)).json()
        return found if isinstance(found, dict) else {}

    async def rejected(self) -> dict[str, int]:
        """Rejected requests by code, as the conductor counts them."""
        return dict((await self._gateway.scheduling.admission()).rejected)

    async def requests(self, visitor: Visitor, most: int = MAX_REQUESTS) -> list[dict[str, Any]]:
        """The latest requests, the newest first."""
        listed = listed_requests(await self.get(visitor, "/v1/requests", f"limit={most}"))
        if listed is not None:
            num_asked = 0
            for row in listed[:most]:
                names = self._gateway.request_ids.find(str(row["id"]))
                if names is None:
                    continue
                row.setdefault("session", _session_name(names.session))
                row.setdefault("client", names.client)
                if row["state"] is None and num_asked < _MAX_EXPLAINED:  # in progress: where does it stand?
                    num_asked += 1
                    row.update(await self._summary(names.id, names.place_ids) or {})
            return listed[:most]
        found: list[dict[str, Any]] = []
        num_asked = 0
        for names in self._gateway.request_ids.latest(most):
            if not visitor.sees_all and names.client != visitor.name:
                continue
            known = self._ended.get(names.id)
            if known is None and num_asked < _MAX_EXPLAINED:
                num_asked += 1
                known = await self._summary(names.id, names.place_ids)
            found.append(
                {
                    "id": names.id,
                    "client": names.client,
                    "session": _session_name(names.session),
                    "model": self._gateway.settings.model_name,
                    **(known or {}),
                }
            )
        return found

    async def _summary(self, name: str, place_ids: list[str]) -> dict[str, Any] | None:
        """What a list shows of a request, from its first prompt's explanation."""
        try:
            one = await self._gateway.scheduling.explain(place_ids[0]) if place_ids else None
        except MooncakeError:
            return None
        if one is None:
            return None
        actual = one.actual
        found: dict[str, Any] = {
            "state": one.state,
            "start": round(clock.wall() - one.seconds_ago, 3),
            "prompt_tokens": one.num_tokens,
            "cached_tokens": actual.cached_tokens + actual.loaded_tokens,
            "output_tokens": actual.output_tokens,
            "ttft_s": actual.ttft_s or None,
            "latency_s": _latency_s(actual),
            "prefill": one.prefill,
            "decode": one.decode,
            "prefill_s": actual.prefill_s,
            "computed_tokens": max(0, one.num_tokens - actual.cached_tokens - actual.loaded_tokens),
        }
        if one.state in ("finished", "failed", "refused"):
            self._ended.put(name, found)
            return found
        return {**found, "seconds_ago": round(one.seconds_ago, 3)}

    async def costs(self) -> list[tuple[int, float]]:
        """Computed tokens and seconds of the latest prompts that have ended."""
        found: list[tuple[int, float]] = []
        for names in self._gateway.request_ids.latest(_MAX_EXPLAINED):
            row = self._ended.get(names.id) or await self._summary(names.id, names.place_ids)
            if row is not None and row.get("prefill_s"):
                found.append((int(row["computed_tokens"]), float(row["prefill_s"])))
        return found


def _latency_s(actual: ActualTimes) -> float | None:
    """The time of an answer; of one that came whole, whose first token was not seen, since its placement."""
    if actual.ttft_s:
        return actual.ttft_s + actual.tbt_s * max(0, actual.output_tokens - 1)
    return (actual.e2e_s or None) if actual.is_complete else None


def _headers_of(visitor: Visitor) -> dict[str, str]:
    if visitor.kind == "admin":
        return {"x-api-key": visitor.key}
    return {"authorization": f"Bearer {visitor.key}"} if visitor.key else {}


def _session_name(affinity: str) -> str:
    """A session without the tenant that the conductor appends to it."""
    return affinity.partition(" ")[0]
