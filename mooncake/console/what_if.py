# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/what_if``: the effect of a change to the live cluster, simulated on its latest requests.

Owns the endpoint and the process in which the simulation runs: beside the gateway's, with a lower priority,
one at a time, and ended after a time limit, so that requests do not wait for it. The answer has sums only, of
all tenants together, and so it is for operators. The computation itself is ``sim/serving/what_if.py``.

This module is also the program of that process (``python -m mooncake.console.what_if``): a question on
standard input becomes an answer on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, get_args

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta
from prometheus_client import Counter

from mooncake import clock, metrics
from mooncake.conductor.messages import AdmissionStatus, InstanceStatus
from mooncake.conductor.settings import Scheduling, SchedulingSettings
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.request_recorder import EndedRequest
from mooncake.http import large_json
from mooncake.http.api_requests import read_body
from mooncake.http.openai import ApiError, check_content_type
from mooncake.log import get_logger
from mooncake.recorded_requests import MAX_RECORDED_ID, RecordedRequest
from mooncake.sim.serving.what_if import Change, WhatIfQuestion, answer_what_if
from mooncake.types import InstanceId, WorkerRole

log = get_logger(__name__)

WHAT_IF = "/v1/what_if"
TIMEOUT_S = 180.0
MAX_ROWS = 4096
"""Most requests of a question: the latest ones."""
MAX_BODY_BYTES = 16 << 10
_NICE = 10

_questions = Counter(
    "mooncake_gateway_what_if",
    "Questions about the effect of a change, by outcome: answered, or the code of the refusal.",
    ["outcome"],
    registry=metrics.registry,
)


class WhatIfBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of the endpoint."""

    change: Change
    minutes: Annotated[float, Meta(gt=0, le=1440)] = 10.0
    "Requests that arrived within this time count; those before only fill the caches."
    slo_ttft_s: Annotated[float, Meta(ge=0)] | None = None
    "Objectives of the goodput; without them, those of the conductor."
    slo_tbt_s: Annotated[float, Meta(ge=0)] | None = None


_SCHEMA = {
    "type": "object",
    "required": ["change"],
    "properties": {
        "change": {
            "type": "object",
            "properties": {
                "memory": {"type": "number", "examples": [2.0]},
                "prefill": {"type": "integer"},
                "decode": {"type": "integer", "examples": [1]},
                "policy": {"type": "string", "examples": ["cache_aware"]},
                "load": {"type": "number"},
            },
        },
        "minutes": {"type": "number", "default": 10},
        "slo_ttft_s": {"type": "number"},
        "slo_tbt_s": {"type": "number"},
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong, or too few requests were served; `error.param` names the field"},
    401: {"description": "The key is missing or wrong"},
    415: {"description": "A browser's page sends the body as a form or as text; allowed: application/json"},
    403: {"description": "No admin key is set here"},
    429: {"description": "Another question is being answered; `Retry-After` is the time to retry"},
    503: {"description": "The conductor can't be reached, or the simulation failed"},
    504: {"description": "The simulation took too long: ask about fewer minutes"},
}


def add_what_if(
    app: FastAPI, gateway: Gateway, simulation: BesideSimulation, is_inside: bool = False
) -> None:
    """Add the endpoint. ``simulation`` is shared by all applications of the gateway. ``is_inside``: every
    client of this one is an operator."""

    @app.post(
        WHAT_IF,
        responses=_ERRORS,
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}
        },
    )
    async def what_if(http: Request) -> Response:
        """The effect of a change, computed from the latest requests; needs the admin key, changes nothing."""
        refusal = None if is_inside else gateway.admin_key.refusal(http.headers)
        if refusal is not None:
            raise ApiError(refusal.status, refusal.message, code=refusal.code)
        check_content_type(http.headers)
        body = _read(await read_body(http, MAX_BODY_BYTES))
        try:
            answer = await simulation.run(await _question(gateway, body))
        except ApiError as error:
            _questions.labels(error.detail.code or "failed").inc()
            raise
        _questions.labels("answered").inc()
        return Response(answer, media_type="application/json")


class BesideSimulation:
    """Runs one simulation at a time in a process of its own."""

    def __init__(self) -> None:
        self._is_busy = False

    async def run(self, question: WhatIfQuestion) -> bytes:
        """The answer as JSON. Raises ApiError."""
        if self._is_busy:
            message = "another question is being answered"
            raise ApiError(429, message, code="what_if_busy", retry_after_s=5.0)
        self._is_busy = True
        began = clock.monotonic()
        try:
            answer = await self._simulated(msgspec.msgpack.encode(question))
            seconds = round(clock.monotonic() - began, 3)
            log.info("what_if_answered", rows=len(question.rows), seconds=seconds)
            return answer
        finally:
            self._is_busy = False

    async def _simulated(self, question: bytes) -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "mooncake.console.what_if",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, errors = await process.communicate(question)
        except TimeoutError:
            message = f"the simulation took more than {TIMEOUT_S:g} s: ask about fewer minutes"
            raise ApiError(504, message, code="deadline_exceeded") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode == _REFUSED:
            field, _, message = output.decode().partition("\n")
            raise ApiError(400, message, param=field, code="invalid_value")
        if process.returncode:
            log.error("what_if_failed", status=process.returncode, reason=errors.decode()[-2000:])
            raise ApiError(
                503, "the simulation failed; the gateway's log has the reason", code="what_if_failed"
            )
        return output


def _read(content: bytes) -> WhatIfBody:
    """Raises ApiError, 400 naming the field."""
    try:
        return large_json.decode_as(content, WhatIfBody)
    except msgspec.ValidationError as error:
        field = str(error).partition("`$.")[2].rstrip("`") or None
        raise ApiError(400, str(error), param=field, code="invalid_value") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


async def _question(gateway: Gateway, body: WhatIfBody) -> WhatIfQuestion:
    """The latest requests and the cluster as it is. Raises ApiError."""
    settings, recorder = gateway.settings, gateway.recorder
    if not settings.recent_requests:
        raise ApiError(400, "recent_requests is 0: no request is remembered", code="nothing_recorded")
    try:
        status = await gateway.scheduling.status()
    except MooncakeError as error:
        raise ApiError(503, str(error), code=error.code, retry_after_s=1.0) from error
    now = clock.monotonic()
    recent = sorted(recorder.recent(0.0), key=lambda row: row.arrived_at)[-MAX_ROWS:]
    first = recent[0].arrived_at if recent else now
    scheduling, notes = _scheduling_of(await gateway.scheduling.admission(), settings)
    num_prefill, num_decode = _counts(status)
    return WhatIfQuestion(
        rows_of(recent),
        recorder.block_tokens,
        num_prefill,
        num_decode,
        scheduling,
        _checked(body.change),
        max(0.0, now - body.minutes * 60 - first) * 1e3,
        scheduling.slo_ttft_s if body.slo_ttft_s is None else body.slo_ttft_s,
        scheduling.slo_tbt_s if body.slo_tbt_s is None else body.slo_tbt_s,
        notes,
    )


def _scheduling_of(stated: AdmissionStatus, own: SchedulingSettings) -> tuple[SchedulingSettings, list[str]]:
    """The settings that the conductor states, and what is assumed where it states none."""
    names = ("scheduling", "slo_ttft_s", "slo_tbt_s", "audit_share", "turn_share")
    fields = {name: getattr(stated, name) for name in names}
    try:
        return msgspec.convert({**fields, "admission": stated.rule}, SchedulingSettings), []
    except msgspec.ValidationError:  # it is of another version, or was not reached yet
        note = (
            f"the conductor does not state its settings: the policy {own.scheduling!r}, and admission of all "
            "requests, are assumed"
        )
        assumed = SchedulingSettings(
            scheduling=own.scheduling, admission="none", slo_ttft_s=own.slo_ttft_s, slo_tbt_s=own.slo_tbt_s
        )
        return assumed, [note]


def _checked(change: Change) -> Change:
    """Raises ApiError, 400: there is no such policy."""
    known = get_args(Scheduling)
    if change.policy and change.policy not in known:
        message = f"policy is {change.policy!r}; allowed: {', '.join(known)}"
        raise ApiError(400, message, param="policy", code="invalid_value")
    return change


def _counts(status: Sequence[InstanceStatus]) -> tuple[int, int]:
    """Numbers of ready instances that compute prompts and that decode. Raises ApiError, 503 without any."""
    ready = [row.role for row in status if row.health == "ready"]
    num_prefill, num_decode = (ready.count(role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE))
    if not num_decode:
        raise ApiError(503, "no decode instance is ready", code="no_instance", retry_after_s=1.0)
    return num_prefill, num_decode


def rows_of(recent: Sequence[EndedRequest]) -> list[RecordedRequest]:
    """Rows for a simulation. Their ids are the conductor's keys, which this question does not leave."""
    numbers: dict[InstanceId, int] = {}
    first = recent[0].arrived_at if recent else 0.0

    def number(instance: InstanceId | None) -> int:
        return numbers.setdefault(instance, len(numbers)) if instance else -1

    return [
        msgspec.structs.replace(
            row.facts,
            timestamp=(row.arrived_at - first) * 1e3,
            hash_ids=[key & MAX_RECORDED_ID for key in row.keys[: row.num_prompt_keys]],
            prefill=number(row.prefill),
            decode=number(row.decode),
        )
        for row in recent
    ]


# --- the process of a simulation

_REFUSED = 3
"""Status with which the process ends when the question can't be answered."""


def main() -> None:
    """Answer the question on standard input."""
    os.nice(_NICE)
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WhatIfQuestion)
    try:
        answer = answer_what_if(question)
    except InvalidArgument as error:
        print(error.field, error, sep="\n")
        sys.exit(_REFUSED)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
