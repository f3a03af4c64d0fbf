# SPDX-License-Identifier: Apache-2.0
"""Begins and ends the spans of requests at an HTTP server: ASGI middleware.

Owns the root span of a request in its process, from the first byte of the header to the last of the answer,
and the client's ``traceparent``. The application adds the rest through ``span_scope.current``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from mooncake.tracing.span_scope import Tracing, code_of, enter, leave
from mooncake.tracing.spans import TRACEPARENT, SpanContext, read_traceparent

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_HEADER = TRACEPARENT.encode()


class TracedRequests:
    """Middleware that traces the requests to the paths of ``names``, which has the name of each one's root.

    Args:
        only_continued: a request without a ``traceparent`` is not traced.
        first_phase: name of the phase with which each request begins; empty for none.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        tracing: Tracing,
        service: str,
        instance: str,
        names: Mapping[str, str],
        only_continued: bool = False,
        first_phase: str = "",
    ) -> None:
        self._app = app
        self._tracing = tracing
        self._service, self._instance = service, instance
        self._names = names
        self._only_continued = only_continued
        self._first_phase = first_phase

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._names.get(scope.get("path", "")) if scope["type"] == "http" else None
        parent = _parent_of(scope) if name is not None else None
        if name is None or (self._only_continued and parent is None):
            await self._app(scope, receive, send)
            return
        spans = self._tracing.begin(
            name,
            self._service,
            self._instance,
            parent,
            http__request__method=scope["method"],
            url__path=scope["path"],
        )
        if self._first_phase:
            spans.phase(self._first_phase)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                spans.note(http__response__status_code=status)
                if status >= 400:
                    spans.span.error = str(status)
            await send(message)

        token = enter(spans)
        error = ""
        try:
            await self._app(scope, receive, noted)
        except BaseException as raised:
            error = code_of(raised)
            raise
        finally:
            leave(token)
            spans.end(error)


def _parent_of(scope: Scope) -> SpanContext | None:
    found = [value for name, value in scope["headers"] if name == _HEADER]
    # Several are none: the specification lets no one choose among them.
    return read_traceparent(found[0].decode("latin-1")) if len(found) == 1 else None
