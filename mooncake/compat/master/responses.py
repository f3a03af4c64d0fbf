# SPDX-License-Identifier: Apache-2.0
"""Responses of the existing package's HTTP side: its statuses, error numbers and names for our codes."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from mooncake.errors import Refusal
from mooncake.http import large_json, server
from mooncake.rpc.wire import Failure
from mooncake.security.http_auth import PRINCIPAL, AdminKey, challenge

MAX_BODY_BYTES = 1 << 20

_CODES = {
    "not_found": (404, -704, "OBJECT_NOT_FOUND"),
    "unknown_job": (404, -1402, "JOB_NOT_FOUND"),
    "unknown_segment": (404, -101, "SEGMENT_NOT_FOUND"),
    "unknown_tenant": (404, -1701, "TENANT_NOT_REGISTERED"),
    "tenant_in_use": (409, -1702, "TENANT_NOT_EMPTY"),
    "leased": (409, -706, "OBJECT_HAS_LEASE"),
    "busy": (409, -714, "OBJECT_REPLICA_BUSY"),
    "limit": (409, -1401, "TASK_PENDING_LIMIT_EXCEEDED"),
    "no_space": (409, -200, "NO_AVAILABLE_HANDLE"),
    "quota_exceeded": (409, -1700, "TENANT_QUOTA_EXCEEDED"),
    "invalid_argument": (400, -600, "INVALID_PARAMS"),
    "access_denied": (401, -601, "ILLEGAL_CLIENT"),
    "not_leader": (503, -1010, "UNAVAILABLE_IN_CURRENT_STATUS"),
    "unavailable": (503, -1010, "UNAVAILABLE_IN_CURRENT_STATUS"),
    "unsupported": (501, -1012, "NOT_SUPPORTED"),
}


class HttpRefusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, code: str, reason: str = "") -> None:
        self.status, self.number, self.name = _CODES.get(code, _unlisted(code))
        self.reason = reason
        super().__init__(f"{code}: {reason}")

    def response(self) -> Response:
        body = {"success": False, "error_code": self.number, "error_message": self.name}
        if self.reason:
            body["error"] = self.reason
        response = json(body, self.status)
        response.headers.update(challenge(self.status))
        return response


def _unlisted(code: str) -> tuple[int, int, str]:
    return (400, -600, "INVALID_PARAMS") if code.startswith("invalid_") else (500, -1, "INTERNAL_ERROR")


def json(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def unwrap_reply(reply: Any, not_found: str = "not_found") -> Any:
    """Return ``reply`` of the core, unless it is a refusal; its code "not_found" becomes ``not_found``.

    Raises:
        HttpRefusal: it is a refusal.
    """
    refusal = getattr(reply, "refusal", None)
    if isinstance(reply, Failure):
        raise HttpRefusal(reply.code, reply.message)
    if isinstance(refusal, Refusal):
        raise HttpRefusal(not_found if refusal.code == "not_found" else refusal.code, refusal.reason)
    return reply


def check_key(http: Request, key: AdminKey) -> None:
    """Raise HttpRefusal for a caller without the admin key: 401 for a wrong key, 403 where none is set."""
    refusal = key.refusal(http.headers, http.scope.get(PRINCIPAL))
    if refusal is not None:
        refused = HttpRefusal("access_denied", refusal.message)
        refused.status = refusal.status
        raise refused


async def read_body(http: Request, shape: Any) -> Any:
    """Decode the JSON body as ``shape``. Raises HttpRefusal, naming the field."""
    try:
        body = await server.read_body(http, MAX_BODY_BYTES)
    except server.BodyTooLarge as error:
        raise HttpRefusal("invalid_argument", str(error)) from error
    except server.BodyBudgetExceeded as error:
        raise HttpRefusal("unavailable", str(error)) from error
    try:
        return large_json.decode_as(body, shape)
    except msgspec.MsgspecError as error:
        raise HttpRefusal("invalid_argument", f"the body: {error}") from error
