# SPDX-License-Identifier: Apache-2.0
"""The spans of a request in a worker: its wait, its lookup and load, its computation, its save or push.

Owns their names, and the translation of an engine's instants to spans once the answer has ended. The engine
only notes instants (``Timings``, ``Mark``), and only for requests that are traced.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.inference.request import Mark, Request
from mooncake.kvlayout import KvLayout
from mooncake.tracing import Span, SpanScope

SERVICE = "mooncake-worker"


def trace_requests(scope: SpanScope, name: str, requests: Sequence[Request], layout: KvLayout) -> None:
    """Add the spans of ``requests`` to their HTTP request's when it ends; it is called ``name`` then."""
    scope.span.name = name
    for request in requests:
        request.marks = []

    def add_all() -> None:
        for request in requests:
            parent = scope.span
            if len(requests) > 1:
                timings = request.timings
                ended = timings.finished or timings.first_token or timings.arrival
                parent = scope.add("choice", timings.arrival, ended)
            _add(scope, parent, request, layout)

    scope.at_end(add_all)


def _add(scope: SpanScope, parent: Span, request: Request, layout: KvLayout) -> None:
    """Add the spans of one request. Its stages follow each other without a gap."""
    timings, marks = request.timings, list(request.marks or ())
    scope.note(
        prompt_tokens=request.num_prompt_tokens - request.num_prior_output_tokens,
        local_tokens=request.num_local_hit_tokens,
        external_tokens=request.num_external_hit_tokens,
        output_tokens=request.num_output_tokens,
        finish_reason=str(request.finish_reason or ""),
    )
    if timings.admitted is None:
        return
    if parent is scope.span:
        scope.add("receive", scope.began, timings.arrival)
    scope.add("queue", timings.arrival, timings.admitted, parent)
    if timings.started is None:
        return
    fetch = scope.add("fetch", timings.admitted, timings.started, parent)
    if timings.first_token is None:
        return
    num_cached = request.num_local_hit_tokens + request.num_external_hit_tokens
    compute = scope.add(
        "compute prompt",
        timings.started,
        timings.first_token,
        parent,
        tokens=max(1, request.num_prompt_tokens - num_cached),
        preemptions=request.num_preemptions,
    )
    for stage in request.stages:
        began, ended = timings.started + stage.began_s, timings.started + stage.ended_s
        layers = f"{stage.first_layer}-{stage.end_layer - 1}"
        scope.add("stage", began, ended, compute, layers=layers, chunks=stage.num_chunks)
    if timings.finished is not None and request.num_output_tokens > request.num_prior_output_tokens + 1:
        num_tokens = request.num_output_tokens - request.num_prior_output_tokens
        scope.add("generate", timings.first_token, timings.finished, parent, tokens=num_tokens)
    block_bytes = layout.object_bytes(layout.block_tokens)
    for mark in marks:
        if mark.ended is None:
            continue
        if isinstance(blocks := mark.attributes.get("blocks"), int) and mark.name != "store lookup":
            mark.attributes["bytes"] = blocks * block_bytes
        scope.add(
            mark.name, mark.began, mark.ended, _parent_of(mark, fetch, compute, parent), **mark.attributes
        )


def _parent_of(mark: Mark, fetch: Span, compute: Span, parent: Span) -> Span:
    match mark.name:
        case "store lookup" | "load from pool" | "receive push":
            return fetch
        case "compute chunk":
            return compute
    return parent
