# SPDX-License-Identifier: Apache-2.0
"""The choice of an endpoint for a request that a proxy forwards itself, and the account of that request.

A request is read, named and placed as the gateway does it (``any_engine.prepare``), so the conductor chooses
the same instance for both. What differs is what happens next: the proxy sends the request, to the endpoint or
to one of those behind it in the list, and reports which one served it. So each placement is a
``PickedRequest``, which passes on to the conductor what the proxy reports: the begin and the end of the
answer, the instances that failed, the one that served instead. A request that generates nothing is not
placed; its ``PickedCall`` holds the client's quotas only. A proxy addresses endpoints as ``ip:port``;
instances with another name are never picked.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from prometheus_client import Counter, Histogram

from mooncake import clock, metrics
from mooncake.conductor.messages import Decision, Failed, Finished, InstanceStatus, Prefilled, Refuse
from mooncake.gateway.any_engine import EMBEDDINGS, PreparedRequest, prepare, settle_model
from mooncake.gateway.clients import Client
from mooncake.gateway.engine_apis import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    EngineApi,
    read_object,
    read_request,
)
from mooncake.gateway.ext_proc_stream import Measured, Picked, Refused, RequestHeaders
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.handoff import supports, without_transfers
from mooncake.gateway.limiter import Permit
from mooncake.gateway.metrics import Slo, Timing, record_answer
from mooncake.gateway.request_parsing import (
    LAST_SESSION_HEADER,
    PRIORITY_HEADER,
    RANK_HEADER,
    SESSION_HEADERS,
    names_of,
    slo_of,
)
from mooncake.gateway.retries import PlacedRequest, Route, as_error
from mooncake.http import large_json
from mooncake.http.latency import ttft_seconds
from mooncake.http.openai import ApiError, PromptTokensDetails, Usage
from mooncake.log import get_logger
from mooncake.types import InstanceId

log = get_logger(__name__)

APIS = {api.path: api for api in (COMPLETIONS, CHAT, MESSAGES, RESPONSES)}

UNPLACED = {
    "GET": re.compile(r"/v1/models(/[\w.:-]*\w)*"),
    "POST": re.compile(rf"{EMBEDDINGS}|/(de)?tokenize|/v1/messages/count_tokens"),
}
"""By method: paths that generate nothing; any ready instance gets their requests. Others are refused."""

MAX_PLACEMENTS = 4
"""Placements of one request before it is refused, when the conductor chooses instances outside the subset."""

MAX_NAMED = 8
"""Instances that are named where none can be picked."""

LIST_AGAIN_S = 0.2
"""For how long the list of instances, which orders those behind the picked one, is used again."""

_FAULTS = (500, 502, 504)
"""Statuses by which an engine, or the proxy on its behalf, shows a fault of the engine."""

_picks = Counter(
    "mooncake_gateway_picks",
    "Requests of proxies for an endpoint, by outcome: picked, unplaced (any instance), or the code of "
    "the refusal.",
    ["outcome"],
    registry=metrics.registry,
)
_pick_seconds = Histogram(
    "mooncake_gateway_pick_seconds",
    "Time from a request's whole body to its endpoint.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
    registry=metrics.registry,
)
_served = Counter(
    "mooncake_gateway_served_endpoints",
    "Answers to requests of proxies, by the endpoint that served them: first, fallback (one behind it in the "
    "list), other, or unknown (the proxy reports none).",
    ["endpoint"],
    registry=metrics.registry,
)


@dataclass(frozen=True)
class PickRules:
    """How endpoints are named to a proxy."""

    max_endpoints: int = 3
    "Endpoints in one answer: the one that was picked, and those to try after it."
    prefill_header: str = ""
    "Header that names the instance which computes the prompt; empty for none."


def normalized(address: str) -> str | None:
    """``ip:port`` in one form for each endpoint, as Envoy writes it; None if it is not such an address."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        return None
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
    except ValueError:
        return None
    if is_bracketed is not (ip.version == 6):
        return None
    return f"[{ip}]:{int(port)}" if is_bracketed else f"{ip}:{int(port)}"


def why_none(rows: Sequence[InstanceStatus]) -> str:
    """Why none of these instances can be picked; empty if one can."""
    if any(row.health == "ready" and normalized(row.instance) is not None for row in rows):
        return ""
    if not rows:
        return "no instance is known: none was added, or the conductor has not answered"
    unready = [
        f"{row.instance} is {row.health}" + ", but its name is not ip:port" * (row.health == "ready")
        for row in rows[:MAX_NAMED]
    ]
    further = [f"{len(rows) - MAX_NAMED} more"] if len(rows) > MAX_NAMED else []
    return f"no endpoint can be picked: {'; '.join([*unready, *further])}"


class EndpointPicker:
    """Picks endpoints for proxies. ``gateway`` is started."""

    def __init__(self, gateway: Gateway, rules: PickRules) -> None:
        self._gateway, self._rules = gateway, rules
        self._rows: list[InstanceStatus] = []
        self._listed_at = float("-inf")
        self._unaddressable: dict[InstanceId, None] = {}
        self._why_not_ready = ""

    async def why_not_ready(self) -> str:
        """Why no endpoint can be picked; empty if one can. A change of the engines is logged."""
        if self._gateway.limiter.is_stopping:
            return "the endpoint picker is stopping"
        reason = why_none(await self._listed())
        if reason != self._why_not_ready:
            self._why_not_ready = reason
            if reason:
                log.warning("picker_not_ready", reason=reason)
            else:
                log.info("picker_ready")
        return reason

    async def pick(
        self, head: RequestHeaders, body: bytes
    ) -> tuple[Picked | Refused, PickedRequest | PickedCall | None]:
        """The endpoint of a request, or why there is none; and its account, if it has one.

        The caller ends the account with ``finish``.
        """
        began = clock.monotonic()
        http = _http_of(head)
        api = APIS.get(http.scope["path"])
        account: PickedRequest | PickedCall | None = None
        try:
            http.state.client = self._authenticated(http, api)
            if api is not None and http.method == "POST":
                answer, account = await self._place(http, api, head, body)
            else:
                answer, account = await self._any_instance(http, head, body)
        except ApiError as error:
            _picks.labels(error.detail.code or error.status).inc()
            form = None if api is None else api.error_body(error)
            return Refused.of(error, form, names_of(http)), None
        _picks.labels("picked" if isinstance(account, PickedRequest) else "unplaced").inc()
        _pick_seconds.observe(clock.monotonic() - began)
        return answer, account

    def _authenticated(self, http: Request, api: EngineApi | None) -> Client | None:
        clients = self._gateway.clients
        return None if clients is None else clients.of(http.headers, api is MESSAGES)

    async def _place(
        self, http: Request, api: EngineApi, head: RequestHeaders, body: bytes
    ) -> tuple[Picked, PickedRequest]:
        gateway = self._gateway
        given = await large_json.decoded(body, partial(read_request, api))
        client: Client | None = http.state.client
        request = dict(without_transfers(given, gateway.settings.trust_clients))
        if client is not None:
            request["cache_salt"] = client.entry.salt_at_engines
        permit = Permit(gateway.limiter, client, api.num_answers(request), clock.monotonic())
        account: PickedRequest | None = None
        try:
            adapter = await settle_model(gateway, request)
            prepared = await prepare(gateway, http, api, request, adapter)
            rows = await self._listed()
            allowed = _Allowed(head.subset, rows)
            is_stream = bool(request.get("stream"))
            account = PickedRequest(gateway, prepared, permit, slo_of(http), client, is_stream)
            decision = await account.place(allowed)
            endpoints = self._in_order(decision, allowed)
            account.expect(endpoints, rows)
        except BaseException:
            if account is not None:
                account.finish(False, Measured())
            permit.leave(clock.monotonic())
            raise
        prefill = decision.prefill if supports(gateway.protocol, api, request) else None
        set_headers, remove_headers = self._headers(http, prepared.headers, prefill)
        picked = Picked(
            ",".join(endpoints),
            {**set_headers, "x-gateway-destination-endpoint": ",".join(endpoints)},
            remove_headers,
            {**names_of(http), **account.route.headers()},
            # Encoded again even if nothing has changed: another parser might find other values in the text.
            msgspec.json.encode(request),
        )
        return picked, account

    async def _any_instance(
        self, http: Request, head: RequestHeaders, body: bytes
    ) -> tuple[Picked, PickedCall | None]:
        """Any ready instance that is allowed, in turn, for a request that generates nothing.

        Quotas, the salt and the names of models are those of ``any_engine.serve_call``.
        """
        path = str(http.scope["path"])
        if http.method not in UNPLACED or UNPLACED[http.method].fullmatch(path) is None:
            message = f"{http.method[:20]} {path[:200]} is not served here"
            raise ApiError(404, message, code="endpoint_not_served")
        if http.method != "POST":
            return await self._unplaced(http, head, None), None
        gateway = self._gateway
        given = await large_json.decoded(body, read_object)
        request = without_transfers(given, gateway.settings.trust_clients)
        client: Client | None = http.state.client
        account = PickedCall(path, Permit(gateway.limiter, client, 1, clock.monotonic()), client)
        try:
            if client is not None and path == EMBEDDINGS:
                request["cache_salt"] = client.entry.salt_at_engines
            await settle_model(gateway, request)
            return await self._unplaced(http, head, msgspec.json.encode(request)), account
        except BaseException:
            account.finish(False, Measured())
            raise

    async def _unplaced(self, http: Request, head: RequestHeaders, body: bytes | None) -> Picked:
        """The next instance that is allowed; ``body``: in the place of the proxy's."""
        backends, scheduling = self._gateway.backends, self._gateway.scheduling
        allowed = _Allowed(head.subset, await self._listed())
        instance = await backends.pick_instance(scheduling, allowed.excluded)
        endpoint = None if instance is None else allowed.endpoint_of(instance)
        if endpoint is None:
            raise ApiError(503, "no instance is ready", code="no_instance", retry_after_s=1.0)
        set_headers, remove_headers = self._headers(http, backends.headers, None)
        return Picked(
            endpoint,
            {**set_headers, "x-gateway-destination-endpoint": endpoint},
            remove_headers,
            names_of(http),
            body,
        )

    async def _listed(self) -> list[InstanceStatus]:
        """All instances; those that no proxy can address are logged."""
        now = clock.monotonic()
        if now > self._listed_at + LIST_AGAIN_S:
            self._listed_at = now
            self._rows = await self._gateway.scheduling.status()
            unknown = {row.instance: None for row in self._rows if normalized(row.instance) is None}
            for instance in unknown.keys() - self._unaddressable.keys():
                log.warning("endpoint_not_addressable", instance=instance, reason="its name is not ip:port")
            self._unaddressable = unknown
        return self._rows

    def _in_order(self, decision: Decision, allowed: _Allowed) -> list[str]:
        """The endpoint that was picked, and the least busy others that could do the same."""
        picked = decision.decode
        role = next((row.role for row in self._rows if row.instance == picked), None)
        others = [
            row
            for row in self._rows
            if row.health == "ready"
            and row.role is role
            and row.instance not in (picked, decision.prefill)
            and allowed.endpoint_of(row.instance) is not None
        ]
        others.sort(key=lambda row: (row.queued_tokens, row.num_requests, row.instance))
        instances = [picked, *(row.instance for row in others[: self._rules.max_endpoints - 1])]
        return [found for one in instances if (found := allowed.endpoint_of(one)) is not None]

    def _headers(
        self, http: Request, for_engines: Mapping[str, str], prefill: InstanceId | None
    ) -> tuple[dict[str, str], list[str]]:
        """Headers to set and to remove before an engine gets them."""
        wanted = {name.lower(): value for name, value in for_engines.items()}
        # A client's priority beside one in the body does not count, but engines would prefer it.
        remove = [PRIORITY_HEADER.lower()]
        if http.state.client is not None:
            # Neither a client's key for us, nor another tenant's session.
            own = ("authorization", "x-api-key", *SESSION_HEADERS, LAST_SESSION_HEADER)
            remove += [name.lower() for name in own]
        if self._rules.prefill_header:
            name = self._rules.prefill_header.lower()
            remove.append(name)  # a client's would make an engine call a host of its choice
            if prefill is not None and (endpoint := normalized(prefill)) is not None:
                wanted[name] = endpoint
                remove.append(RANK_HEADER.lower())
        changed = {name: value for name, value in wanted.items() if http.headers.get(name) != value}
        return changed, [name for name in remove if name not in wanted and name in http.headers]


class _Allowed:
    """The instances that may be picked: those with an address, of the proxy's subset if it names one."""

    def __init__(self, subset: Collection[str] | None, rows: Collection[InstanceStatus]) -> None:
        """Raises ApiError, 503 with a subset without any instance."""
        self._subset = None if subset is None else {normalized(one): None for one in subset}
        known = {row.instance: self.endpoint_of(row.instance) for row in rows}
        self.excluded = [instance for instance, endpoint in known.items() if endpoint is None]
        if subset is not None and len(self.excluded) == len(known):
            message = f"none of the {len(subset)} endpoints in the proxy's subset is an instance here"
            raise ApiError(503, message, code="no_endpoint_in_subset", retry_after_s=1.0)

    def endpoint_of(self, instance: InstanceId) -> str | None:
        """The address of an instance for the proxy; None if it may not be picked."""
        found = normalized(instance)
        is_allowed = found is not None and (self._subset is None or found in self._subset)
        return found if is_allowed else None


class PickedRequest(PlacedRequest):
    """The account of one request at the conductor, from its placement to ``finish``."""

    def __init__(
        self,
        gateway: Gateway,
        prepared: PreparedRequest,
        permit: Permit,
        slo: Slo,
        client: Client | None,
        is_stream: bool,
    ) -> None:
        super().__init__(gateway.scheduling, prepared.place)
        self._num_prompt_tokens = prepared.prompt.num_all_tokens
        self._permit, self._slo, self._client = permit, slo, client
        self._is_stream = is_stream
        self._endpoints: list[str] = []
        self._instances: dict[str, InstanceId] = {}
        self._is_computed = False
        self._has_ended = False

    def expect(self, endpoints: list[str], rows: Collection[InstanceStatus]) -> None:
        """Note what the proxy gets, in order, and the instances that it can address."""
        self._endpoints = endpoints
        found = {normalized(row.instance): row.instance for row in rows}
        self._instances = {endpoint: one for endpoint, one in found.items() if endpoint is not None}

    async def place(self, allowed: _Allowed) -> Decision:
        """Place the request on allowed instances. Raises ApiError, 429 or 503 with the time to retry."""
        exclude = [*allowed.excluded]
        for _ in range(MAX_PLACEMENTS):
            answer = await self._ask(exclude)
            if isinstance(answer, Refuse):
                raise as_error(answer)
            chosen = [one for one in (answer.decode, answer.prefill) if one is not None]
            # An instance that has joined since the list was made is not among the excluded ones.
            wrong = [one for one in chosen if allowed.endpoint_of(one) is None]
            if not wrong:
                self._goes_to(answer)
                return answer
            exclude += wrong
        message = "the conductor has chosen no endpoint that the proxy allows"
        raise ApiError(503, message, code="no_endpoint_in_subset", retry_after_s=1.0)

    async def _ask(self, exclude: Collection[InstanceId]) -> Decision | Refuse:
        self._no_longer_expect_first_token()
        self._placed_ids[self.place_id] = None
        return await self._scheduling.place(msgspec.structs.replace(self._place_event, exclude=[*exclude]))

    def _goes_to(self, decision: Decision) -> None:
        self.route = Route(decision.prefill, decision.decode, decision.degraded)
        if not self._is_stream:
            self._expect_first_token(decision)

    async def served(self, status: int, endpoint: str) -> None:
        """Note the answer's status, and the endpoint that the proxy reports; empty if it reports none."""
        by = normalized(endpoint) if endpoint else None
        first = self._endpoints[0]
        if by is None or by == first:
            _served.labels("unknown" if by is None else "first").inc()
        else:
            is_listed = by in self._endpoints
            _served.labels("fallback" if is_listed else "other").inc()
            for one in self._endpoints[: self._endpoints.index(by)] if is_listed else [first]:
                self._failed(one, f"the proxy went on to {by}")
            await self._move(by)
        if status in _FAULTS:
            self._failed(by or first, f"it answered {status}")

    def _failed(self, endpoint: str, reason: str) -> None:
        instance = self._instances.get(endpoint)
        if instance is not None:
            log.warning("endpoint_failed", instance=instance, reason=reason)
            self._scheduling.post(Failed(instance, reason, self.place_id))

    async def _move(self, endpoint: str) -> None:
        """Count the request at the instance that serves it."""
        instance = self._instances.get(endpoint)
        if instance is None:
            return
        stays = (instance, self.route.prefill)
        answer = await self._ask([one for one in self._instances.values() if one not in stays])
        if isinstance(answer, Decision):
            self._goes_to(answer)

    def first_piece(self) -> None:
        """The prompt is computed; of an answer that comes whole, long before."""
        if not self._is_computed:
            self._is_computed = True
            if self._is_stream:
                self._scheduling.post(Prefilled(self.place_id, has_begun=True))

    def finish(self, is_complete: bool, measured: Measured) -> None:
        """Report the end; repeated calls have no effect."""
        if self._has_ended:
            return
        self._has_ended = True
        self._permit.leave(clock.monotonic())
        place_id = self.place_id
        self.end(Finished(place_id, measured.output_tokens, measured.ttft_s, measured.tbt_s, is_complete))
        num_prompt = measured.prompt_tokens or self._num_prompt_tokens
        if not is_complete:
            if self._is_computed and self._client is not None:
                num_output = max(measured.output_tokens, measured.num_events)
                self._client.charge(num_prompt + num_output, clock.monotonic())
            return
        if measured.ttft_s:
            ttft_seconds.observe(measured.ttft_s)
        cached = PromptTokensDetails(measured.cached_tokens)
        usage = Usage(num_prompt, measured.output_tokens, num_prompt + measured.output_tokens, cached)
        timing = Timing(measured.ttft_s or None, measured.longest_gap_s, measured.e2e_s)
        record_answer(place_id, self.route, usage, timing, self._slo, self._client)


class PickedCall:
    """The account of one request that generates nothing, until ``finish``; the conductor does not know it."""

    def __init__(self, path: str, permit: Permit, client: Client | None) -> None:
        self._path, self._permit, self._client = path, permit, client
        self._has_ended = False

    async def served(self, status: int, endpoint: str) -> None:
        """Nothing, as the request was not placed."""

    def first_piece(self) -> None:
        """Nothing, as the request was not placed."""

    def finish(self, is_complete: bool, measured: Measured) -> None:
        """Charge what was embedded, and leave; repeated calls have no effect."""
        if self._has_ended:
            return
        self._has_ended = True
        now = clock.monotonic()
        self._permit.leave(now)
        # The answers of other paths have counts, too, but of tokens that were only counted.
        if self._client is not None and is_complete and self._path == EMBEDDINGS:
            self._client.used(measured.prompt_tokens, 0, now)


def _http_of(head: RequestHeaders) -> Request:
    """The request in the form in which the gateway reads headers."""
    fields = dict(head.headers)
    path, _, query = fields.get(":path", "/").partition("?")
    scope: dict[str, Any] = {
        "type": "http",
        "method": fields.get(":method", "POST"),
        "scheme": "http",
        "server": ("proxy", None),
        "path": path,
        "query_string": query.encode("latin-1", "replace"),
        "headers": [
            (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in head.headers
            if not name.startswith(":")
        ],
    }
    return Request(scope)
