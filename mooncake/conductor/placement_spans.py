# SPDX-License-Identifier: Apache-2.0
"""The conductor's span of a placement, in the trace of its request.

It has what the conductor knew and chose; ``mooncake explain`` has the candidates.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake.conductor.messages import Decision, Place, Refuse
from mooncake.tracing import process_tracing, read_traceparent

SERVICE = "mooncake-conductor"


def traced_placement(request: Place, place: Callable[[Place], Decision | Refuse]) -> Decision | Refuse:
    """``place(request)``, with a span below the gateway's where this process keeps or sends any."""
    tracing, parent = process_tracing(), read_traceparent(request.trace)
    if parent is None or not tracing.is_on:
        return place(request)
    scope = tracing.begin(
        "choose instances", SERVICE, "", parent, prompt_tokens=request.num_tokens, blocks=len(request.keys)
    )
    answer = place(request)
    if isinstance(answer, Refuse):
        scope.end(answer.refusal.code)
        return answer
    scope.note(
        policy=answer.policy,
        prefill=answer.prefill or "",
        decode=answer.decode,
        cached_tokens=answer.num_cached_tokens,
        degraded=answer.degraded,
        is_push=bool(answer.push_from),
    )
    if answer.prediction is not None:
        scope.note(predicted_ttft_s=answer.prediction.ttft_s, predicted_queue_s=answer.prediction.queue_s)
    scope.end()
    return answer
