# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker's process: Envoy-based gateways ask it which engine gets a request.

Owns the settings and the start. It is a gateway without the proxy: the same parts read, name and place a
request (``gateway.py``), but the request itself goes from Envoy to the engine. The protocol is that of the
Gateway API Inference Extension, version 1.0.0 (``docs/integrations/gateway-api.md``). gRPC is an extra, so
its modules are imported only when the process starts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import Annotated

from msgspec import Meta

from mooncake.conductor.settings import Seconds
from mooncake.config import Port, Secret, Size
from mooncake.errors import InvalidArgument
from mooncake.gateway.app import MAX_OPERATORS, create_operator_app, load_tokenizer, watch_client_keys
from mooncake.gateway.endpoint_picker import EndpointPicker, PickRules, normalized
from mooncake.gateway.gateway import AnswerSeconds, Gateway, GatewaySettings, ServingSettings
from mooncake.gateway.prompts import Tokenizing
from mooncake.http.server import HttpServer, listen_for_metrics
from mooncake.log import get_logger
from mooncake.rpc.client import split_address
from mooncake.security import Identity, is_loopback, process_identity, show_remaining

log = get_logger(__name__)


CUT_GRACE_S = 1.0
"""Time for the last messages of streams, after that for their answers."""


@dataclass(frozen=True)
class EppSettings(ServingSettings):
    """Pick the engine of each request for Envoy-based gateways (Gateway API Inference Extension)."""

    tokenizing: Tokenizing = "auto"
    "Source of prompts' tokens: the model's tokenizer or the engine; else text is hashed."

    host: str = "127.0.0.1"
    "Address to listen on for proxies."

    port: Port = 9002
    "Port of the gRPC server for proxies; 0 takes a free one."

    endpoints: tuple[str, ...] = ()
    "Engines that answer requests, `ip:port` as the proxy addresses them."

    prefill: tuple[str, ...] = ()
    "Engines that compute prompts for those, `ip:port`; the proxy sends them nothing."

    prefill_header: str = "x-prefiller-host-port"
    "Header that names the chosen one of `prefill` to the endpoint; a client's is removed. Empty: none."

    max_endpoints: Annotated[int, Meta(ge=1, le=16)] = 3
    "Endpoints in one answer: the one that was picked, and those that the proxy tries after it."

    server_cert: str = ""
    "PEM file with a certificate for TLS without client certificates; empty: the cluster's, with them."

    server_key: str = ""
    "PEM file with that certificate's private key, without a password."

    proxy_key: Annotated[str, Secret] = ""
    "Key that proxies send as metadata `authorization: Bearer KEY`; empty: none is needed."

    health_address: str = ""
    "`host:port` that answers gRPC health checks only, without TLS or key; empty: only the proxies' port."

    trust_clients: bool = False
    "Whether clients' `kv_transfer_params` reach engines; never fields that name a host or a transfer."

    body_timeout_s: Seconds = 30.0
    "How long the body of a request may take to arrive; after that it is refused with 408."

    request_timeout_s: AnswerSeconds = 600.0
    "How long one answer may take; after that its stream ends and the conductor no longer counts it."

    max_body_bytes: Annotated[int, Size, Meta(ge=1 << 10)] = 8 << 20
    "The largest body of a request; a larger one is refused with 413."

    max_connections: Annotated[int, Meta(ge=1)] = 256
    "Most connections of proxies, each of which carries many requests."

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("endpoints", "prefill"):
            for item in getattr(self, name):
                if normalized(item) is None:
                    raise InvalidArgument(name, item, "ip:port, or [ip]:port for IPv6")
        self.check_header("prefill_header")
        self.check_pair("server_cert", "server_key")
        if self.health_address:
            split_address(self.health_address)

    def as_gateway(self) -> GatewaySettings:
        """The settings of the parts that a gateway has, too."""
        shared = {one.name for one in fields(GatewaySettings)} & {one.name for one in fields(self)}
        given = {name: getattr(self, name) for name in shared - {"host", "port", "max_connections"}}
        return GatewaySettings(**given, decode=self.endpoints)


def check_exposure(settings: EppSettings, identity: Identity) -> None:
    """Check that proxies beyond loopback are authenticated, since any host on the network can be one.

    Raises:
        InvalidArgument: it would serve unauthenticated proxies.
    """
    if not is_loopback(settings.metrics_host) and not settings.admin_api_key:
        allowed = "a loopback address without ADMIN_API_KEY"
        raise InvalidArgument("--metrics-host", settings.metrics_host, allowed)
    if is_loopback(settings.host) or identity.settings.insecure:
        return
    has_certificates = identity.has_tls and not settings.server_cert
    if has_certificates or (settings.proxy_key and settings.server_cert):
        return
    allowed = (
        "a loopback address; for others the cluster's TLS, --server-cert with --proxy-key, or --insecure"
    )
    raise InvalidArgument("--host", settings.host, allowed)


async def serve(settings: EppSettings) -> None:
    """Run an endpoint picker until cancelled; then answers have ``drain_s``, unless it is cancelled again.

    Raises:
        InvalidArgument: it would serve unauthenticated proxies, or a file can't be used.
        ModelError: the model has no usable tokenizer.
        AddressInUse: a port is taken.
        ModuleNotFoundError: grpcio is not installed.
    """
    from mooncake.gateway.ext_proc_server import PickerServer, ServerTlsFiles  # late: an extra

    identity = process_identity()
    check_exposure(settings, identity)
    tls: ServerTlsFiles | None = None
    if settings.server_cert:
        tls = ServerTlsFiles(settings.server_cert, settings.server_key)
    elif identity.has_tls:
        files = identity.settings
        tls = ServerTlsFiles(files.tls_cert, files.tls_key, files.tls_ca)
    for_operators = listen_for_metrics(settings.metrics_host, settings.metrics_port)
    tokenizer = await asyncio.to_thread(load_tokenizer, settings.as_gateway())
    gateway = Gateway(settings.as_gateway(), tokenizer)
    picker = EndpointPicker(gateway, PickRules(settings.max_endpoints, settings.prefill_header))
    operator_app = create_operator_app(gateway, picker.why_not_ready)
    operator_server = HttpServer(operator_app, for_operators, max_connections=MAX_OPERATORS)
    server = PickerServer(
        picker,
        # More than answers: requests beyond their limit get a refusal with the time to retry.
        max_streams=2 * settings.max_in_flight,
        max_connections=settings.max_connections,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        request_timeout_s=settings.request_timeout_s,
        proxy_key=settings.proxy_key,
    )
    key_watch = asyncio.create_task(watch_client_keys(gateway))
    grace_s = CUT_GRACE_S
    try:
        await gateway.start()
        await operator_server.start()
        port = await server.start(f"{settings.host}:{settings.port}", tls)
        if settings.server_cert:
            show_remaining(settings.server_cert)
        if settings.health_address:
            await server.start_health(settings.health_address)
        log.info(
            "ready",
            role="epp",
            address=f"{settings.host}:{port}",
            tls=tls is not None,
            metrics=f"http://{settings.metrics_host}:{operator_server.port}",
            model=settings.as_gateway().model_name,
        )
        await operator_server.wait()
    except asyncio.CancelledError:
        try:
            await gateway.drain()
        except asyncio.CancelledError:
            grace_s = 0.0
        raise
    finally:
        key_watch.cancel()
        await server.close(grace_s)
        await operator_server.close()
        await gateway.close()
