# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mooncake import tracing
from mooncake.tracing import RequestSpans, Tracing
from mooncake.tracing.asgi import TracedRequests

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


async def serve(
    path: str = "/v1/completions",
    headers: Mapping[str, str] | None = None,
    status: int = 200,
    error: Exception | None = None,
    **options: Any,
) -> RequestSpans | None:
    """The spans of a request to an application that answers ``status``, or raises ``error``."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tracing.note(seen=tracing.current() is not None)
        if error is not None:
            raise error
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    spans = Tracing(4)
    traced = TracedRequests(
        app, spans, "gateway", "host:1", {"/v1/completions": "text_completion"}, **options
    )
    given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": given}
    try:
        await traced(scope, receive, send)
    except ValueError:
        assert error is not None
    else:
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert tracing.current() is None
    return next(iter(spans.ring.latest("gateway")), None)


async def test_a_request_begins_a_trace() -> None:
    found = await serve(first_phase="receive")
    assert found is not None
    root = found.root
    assert (root.name, root.kind, root.parent_id, root.error) == ("text_completion", "server", "", "")
    assert root.attributes["http.response.status_code"] == 200 and root.attributes["mooncake.seen"] is True
    assert [span.name for span in found.spans] == ["text_completion", "receive"]
    assert root.end_s >= root.start_s


async def test_it_continues_its_client_s() -> None:
    found = await serve(headers={"traceparent": TRACEPARENT}, only_continued=True)
    assert found is not None
    assert (found.root.trace_id, found.root.parent_id) == (TRACE, PARENT)


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}])
async def test_a_worker_traces_only_what_is_continued(headers: dict[str, str]) -> None:
    assert await serve(headers=headers, only_continued=True) is None
    begun = await serve(headers=headers)
    assert begun is not None and begun.root.parent_id == ""


async def test_other_paths_are_not_traced() -> None:
    assert await serve("/metrics", {"traceparent": TRACEPARENT}) is None


async def test_a_refusal_and_a_failure_are_errors() -> None:
    refused = await serve(status=429)
    assert refused is not None and refused.root.error == "429"
    failed = await serve(error=ValueError("my secret"))
    assert failed is not None and failed.root.error == "ValueError"
