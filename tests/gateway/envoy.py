# SPDX-License-Identifier: Apache-2.0
"""Envoy's part of external processing, played with the published messages (PyPI's ``xds-protos``).

``Exchange`` is one stream: a test sends and receives single messages. ``Proxy.forward`` plays a whole request
as Envoy does it in full duplex: headers and body to the picker, then the request with the picker's changes to
the first endpoint that answers, then the answer past the picker to the client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio
import msgspec
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

from mooncake.conductor.messages import InstanceStatus
from mooncake.conductor.server import ConductorService
from mooncake.gateway.endpoint_picker import EndpointPicker, PickRules
from mooncake.gateway.epp import EppSettings
from mooncake.gateway.ext_proc_messages import HealthCheckRequest, HealthCheckResponse
from mooncake.gateway.ext_proc_server import PickerServer, ServerTlsFiles
from mooncake.gateway.gateway import Gateway
from tests.gateway.engines import BLOCK, Engine, Wire
from tests.waiting import until

FULL_DUPLEX: int = ProcessingMode.BodySendMode.Value("FULL_DUPLEX_STREAMED")
DESTINATION = "x-gateway-destination-endpoint"
TIMEOUT_S = 20.0


def header_map(fields: Mapping[str, str]) -> dict[str, Any]:
    return {"headers": [{"key": name, "raw_value": value.encode()} for name, value in fields.items()]}


async def health_of(channel: Any, service: str) -> int:
    """A service's status by gRPC's health protocol: 1 serving, 2 not serving."""
    call = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=HealthCheckResponse.FromString,
    )
    return int((await call(HealthCheckRequest(service=service), timeout=10)).status)


class Exchange:
    """One stream of Envoy to a picker."""

    def __init__(self, channel: Any, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.call = ExternalProcessorStub(channel).Process(metadata=[*metadata])

    async def send(self, metadata: Mapping[str, Mapping[str, Any]] | None = None, **fields: Any) -> None:
        """Send one message; ``metadata``: by namespace."""
        message = messages.ProcessingRequest(**fields)
        for namespace, values in (metadata or {}).items():
            message.metadata_context.filter_metadata[namespace].update(values)
        await asyncio.wait_for(self.call.write(message), TIMEOUT_S)

    async def request_headers(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        path: str = "/v1/completions",
        method: str = "POST",
        subset: Sequence[str] | None = None,
        is_last: bool = False,
        modes: tuple[int, int] | None = (FULL_DUPLEX, FULL_DUPLEX),
    ) -> None:
        hint = {"x-gateway-destination-endpoint-subset": [*subset]} if subset is not None else None
        fields: dict[str, Any] = {}
        if modes is not None:
            fields["protocol_config"] = {"request_body_mode": modes[0], "response_body_mode": modes[1]}
        given = {":method": method, ":path": path, ":authority": "model.example", **(headers or {})}
        await self.send(
            None if hint is None else {"envoy.lb.subset_hint": hint},
            request_headers={"headers": header_map(given), "end_of_stream": is_last},
            **fields,
        )

    async def request_body(self, data: bytes, is_last: bool = True) -> None:
        await self.send(request_body={"body": data, "end_of_stream": is_last})

    async def response_headers(
        self, status: int = 200, served: str = "", is_last: bool = False, kind: str = "application/json"
    ) -> None:
        given = {":status": str(status), "content-type": kind}
        metadata = {"envoy.lb": {"x-gateway-destination-endpoint-served": served}} if served else None
        await self.send(metadata, response_headers={"headers": header_map(given), "end_of_stream": is_last})

    async def response_body(self, data: bytes, is_last: bool = True) -> None:
        await self.send(response_body={"body": data, "end_of_stream": is_last})

    async def receive(self) -> Any:
        """The next reply; grpc's EOF when the picker has ended the stream. Raises grpc.aio.AioRpcError."""
        return await asyncio.wait_for(self.call.read(), TIMEOUT_S)

    async def refusal(self) -> Refusal:
        """The next reply, which must be an answer of the picker itself."""
        found = await self.receive()
        assert found.WhichOneof("response") == "immediate_response", found
        answer = found.immediate_response
        headers = {one.header.key: one.header.raw_value.decode() for one in answer.headers.set_headers}
        return Refusal(answer.status.code, headers, msgspec.json.decode(answer.body), answer.details)

    async def picked(self) -> PickedRequest:
        """The replies to a request's headers and body."""
        found = PickedRequest()
        first = await self.receive()
        assert first.WhichOneof("response") == "request_headers", first
        common = first.request_headers.response
        for one in common.header_mutation.set_headers:
            assert one.append_action == one.OVERWRITE_IF_EXISTS_OR_ADD
            found.set_headers[one.header.key] = one.header.raw_value.decode()
        found.removed = [*common.header_mutation.remove_headers]
        in_metadata = first.dynamic_metadata["envoy.lb"][DESTINATION]
        assert found.set_headers[DESTINATION] == in_metadata, "both places have the same value"
        assert common.clear_route_cache
        found.endpoints = in_metadata.split(",")
        return found

    async def body(self) -> bytes:
        """The request's body as it comes back."""
        body = b""
        while True:
            reply = await self.receive()
            streamed = reply.request_body.response.body_mutation.streamed_response
            body += bytes(streamed.body)
            if streamed.end_of_stream:
                return body

    async def completed(self, data: Mapping[str, Any], **fields: Any) -> PickedRequest:
        """Send a whole completion; the picked endpoints and the body."""
        await self.request_headers(**fields)
        await self.request_body(msgspec.json.encode(data))
        found = await self.picked()
        found.content = await self.body()
        return found

    async def end(self) -> None:
        """Close the stream in order, and wait for the picker's end."""
        await self.call.done_writing()
        async with asyncio.timeout(TIMEOUT_S):
            while await self.call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass


@dataclass
class Refusal:
    status: int
    headers: dict[str, str]
    body: dict[str, Any]
    details: str


@dataclass
class PickedRequest:
    endpoints: list[str] = field(default_factory=list)
    set_headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    content: bytes = b""

    @property
    def request(self) -> dict[str, Any]:
        assert self.set_headers["content-length"] == str(len(self.content))
        found: dict[str, Any] = msgspec.json.decode(self.content)
        return found


@dataclass
class Forwarded:
    """What a client of the proxy gets, and who served it."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    served: str = ""
    endpoints: list[str] = field(default_factory=list)


@dataclass
class Proxy:
    """A picker with engines, and Envoy before it."""

    gateway: Gateway
    picker: EndpointPicker
    server: PickerServer
    address: str
    engines: list[Engine]
    session: aiohttp.ClientSession
    channel: Any

    def exchange(self, metadata: Sequence[tuple[str, str]] = ()) -> Exchange:
        return Exchange(self.channel, metadata)

    async def rows(self) -> dict[str, InstanceStatus]:
        return {row.instance: row for row in await self.gateway.scheduling.status()}

    async def num_placed(self) -> int:
        """Requests that the conductor counts at its instances."""
        return sum(row.num_requests for row in (await self.rows()).values())

    async def until_idle(self) -> None:
        async def is_idle() -> bool:
            return not await self.num_placed() and not self.gateway.limiter.num_in_flight

        await until(is_idle, "the end of all accounts")

    async def forward(
        self,
        data: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        path: str = "/v1/completions",
        chunk_bytes: int = 50,
    ) -> Forwarded:
        """A whole request, as Envoy handles it."""
        exchange, content = self.exchange(), msgspec.json.encode(data)
        given = {"content-type": "application/json", **(headers or {})}
        await exchange.request_headers(given, path=path)
        for start in range(0, len(content), chunk_bytes):
            await exchange.request_body(
                content[start : start + chunk_bytes], start + chunk_bytes >= len(content)
            )
        picked = await exchange.picked()
        body = await exchange.body()
        kept = {name: value for name, value in given.items() if name not in picked.removed}
        sent = kept | picked.set_headers
        for endpoint in picked.endpoints:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with self.session.post(f"http://{endpoint}{path}", data=body, headers=sent) as response:
                    kind = response.headers["content-type"]
                    await exchange.response_headers(response.status, endpoint, kind=kind)
                    found = await self._passed_by(exchange, response.content)
                    found.status, found.served, found.endpoints = response.status, endpoint, picked.endpoints
                    await exchange.end()
                    return found
        raise AssertionError(f"none of {picked.endpoints} answers")

    async def _passed_by(self, exchange: Exchange, content: aiohttp.StreamReader) -> Forwarded:
        reply = await exchange.receive()
        mutation = reply.response_headers.response.header_mutation
        found = Forwarded(0, b"")
        found.headers = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
        async for piece in content.iter_any():
            await exchange.response_body(piece, False)
            reply = await exchange.receive()
            found.body += reply.response_body.response.body_mutation.streamed_response.body
        await exchange.response_body(b"", True)
        reply = await exchange.receive()
        assert reply.response_body.response.body_mutation.streamed_response.end_of_stream
        return found


@contextlib.asynccontextmanager
async def proxied(
    num_engines: int = 2,
    num_prefill: int = 0,
    tokenizer: Any = None,
    engine: Any = None,
    tls: ServerTlsFiles | None = None,
    limits: Mapping[str, Any] | None = None,
    shared: Sequence[Engine] = (),
    **settings: Any,
) -> AsyncIterator[Proxy]:
    """A picker whose engines are all ready; checks that no account is left.

    Args:
        limits: of the server.
        shared: engines that run already, instead of others.
    """
    wire = Wire()
    engines = [*shared] or [Engine(wire, **(engine or {})) for _ in range(num_engines + num_prefill)]
    for one in engines if not shared else ():
        await one.start()
    num_engines = len(engines) - num_prefill
    addresses = [one.address for one in engines]
    fields: dict[str, Any] = {
        "model": "/somewhere/tiny",
        "endpoints": tuple(addresses[:num_engines]),
        "prefill": tuple(addresses[num_engines:]),
        "block_tokens": BLOCK,
        "probe_interval_s": 0.05,
        "suspect_probe_interval_s": 0.02,
        "max_probe_interval_s": 0.05,
        "slow_start_s": 0.0,
    }
    given = EppSettings(**{**fields, **settings})
    gateway = Gateway(given.as_gateway(), tokenizer)
    await gateway.start()
    picker = EndpointPicker(gateway, PickRules(given.max_endpoints, given.prefill_header))
    bounds: dict[str, Any] = {
        "max_streams": 64,
        "max_connections": 8,
        "max_body_bytes": given.max_body_bytes,
        "body_timeout_s": given.body_timeout_s,
        "request_timeout_s": given.request_timeout_s,
        "proxy_key": given.proxy_key,
    }
    server = PickerServer(picker, **{**bounds, **(limits or {})})
    port = await server.start("127.0.0.1:0", tls)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            proxy = Proxy(gateway, picker, server, f"127.0.0.1:{port}", engines, session, channel)

            async def are_ready() -> bool:
                rows = (await proxy.rows()).values()
                return len(rows) == len(engines) and all(row.health == "ready" for row in rows)

            await until(are_ready, "the readiness of all engines")
            yield proxy
            await proxy.until_idle()
            if isinstance(gateway.scheduling, ConductorService):
                gateway.scheduling.core.check()
    finally:
        await channel.close(None)
        await server.close(0.1)
        await gateway.close()
        for one in engines if not shared else ():
            await one.stop()
