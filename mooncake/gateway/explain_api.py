# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/requests/{id}/explain``: why a request was served as it was, for its client.

Owns the authorization. An explanation reveals what was cached and how busy workers were, so it is for the
client of that request and for operators. An id that this server generated (of the answer, or a request id
that the client omitted) can't be guessed: knowing it proves that one has the answer. A request id that a
client chose can be guessed, so it needs the admin key. Where clients have keys of their own, an explanation
is for the key of the request. Operators may query all: with the admin key, or at the operators' port.
"""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response

from mooncake.conductor.explanation import Explanation
from mooncake.errors import MooncakeError
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.request_ids import RequestIds
from mooncake.http.openai import ApiError


class ExplainAnswer(msgspec.Struct):
    """``prompts``: one explanation for each prompt of the request that is still remembered."""

    id: str
    request_id: str
    prompts: list[Explanation]


def add_routes(app: FastAPI, gateway: Gateway, is_inside: bool = False) -> None:
    """Add the endpoint. ``is_inside``: every client of this application is an operator."""

    @app.get("/v1/requests/{name:path}/explain", responses=_ERRORS)
    async def explain(http: Request, name: str) -> Response:
        """Candidates, choice, prediction and measurements of a request, and why its blocks missed."""
        names = gateway.request_ids.find(name)
        if is_inside or gateway.admin_key.refusal(http.headers) is None:
            names = names or RequestIds(name, "", True, [name])
        elif gateway.clients is not None:
            client = gateway.clients.of(http.headers)
            if names is None or names.client != client.name:
                raise _unknown(name)  # as if it did not exist: it may be another client's
        elif names is None:
            # The conductor may remember a request from before this gateway was started.
            names = RequestIds(name, "", True, [name])
        elif name != names.id and not names.is_secret:
            _check_key(gateway, http)
        try:
            found = [await gateway.scheduling.explain(place_id) for place_id in names.place_ids]
        except MooncakeError as error:
            raise ApiError(503, str(error), code=error.code, retry_after_s=1.0) from error
        known = [one for one in found if one is not None]
        if not known:
            raise _unknown(name)
        answer = ExplainAnswer(names.id, names.request_id, known)
        return Response(msgspec.json.encode(answer), media_type="application/json")


_ERRORS: dict[int | str, dict[str, str]] = {
    401: {"description": "A request id that its client chose needs the admin key"},
    404: {"description": "No such request is remembered"},
    503: {"description": "The conductor can't be reached"},
}


def _unknown(name: str) -> ApiError:
    message = f"no request {name[:128]!r} is remembered; only the latest ones are"
    return ApiError(404, message, param="id", code="request_not_found")


def _check_key(gateway: Gateway, http: Request) -> None:
    if gateway.admin_key.refusal(http.headers) is not None:
        message = (
            "this X-Request-ID was chosen by its client and could be guessed: ask by the answer's id "
            "(X-Mooncake-ID), or send X-API-Key"
        )
        raise ApiError(401, message, code="invalid_api_key")
