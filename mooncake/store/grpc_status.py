# SPDX-License-Identifier: Apache-2.0
"""Status of the store over gRPC: ``MooncakeStoreService.GetPoolStatus``, with server reflection.

The messages are described here and built at run time, so that there is no generated code to keep in sync.
grpcio answers on its own threads; for each answer the loop sends a ``GetMasterStatus`` to the master.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection

from mooncake.errors import AccessDenied, AddressInUse, MooncakeError
from mooncake.rpc.wire import Failure
from mooncake.security import HEADER, TRUSTED, Identity, Verifier, process_identity
from mooncake.security.principal import principal_of
from mooncake.store import messages as m
from mooncake.types import Tier

SERVICE = "MooncakeStoreService"
PACKAGES = ("mooncake", "")
"""Packages under which the service is registered; the second for clients that use its bare name."""
ANSWER_S = 10.0
MAX_CALLS = 64
"""Limit of calls waiting for a thread; further calls are refused."""

_STRING, _UINT64, _BOOL, _MESSAGE = 9, 4, 8, 11  # FieldDescriptorProto.Type
_FIELDS: dict[str, list[tuple[str, int | str]]] = {
    "GetPoolStatusRequest": [],
    "TierStatus": [
        ("tier", _STRING),
        ("capacity_bytes", _UINT64),
        ("used_bytes", _UINT64),
        ("free_bytes", _UINT64),
        ("num_segments", _UINT64),
        ("num_replicas", _UINT64),
    ],
    "SegmentStatus": [
        ("segment", _STRING),
        ("tier", _STRING),
        ("state", _STRING),
        ("capacity_bytes", _UINT64),
        ("used_bytes", _UINT64),
        ("num_replicas", _UINT64),
        ("is_draining", _BOOL),
    ],
    "NodeStatus": [("node", _STRING), ("host", _STRING), ("state", _STRING), ("segments", "SegmentStatus")],
    "PoolStatus": [
        ("num_objects", _UINT64),
        ("capacity_bytes", _UINT64),
        ("used_bytes", _UINT64),
        ("tiers", "TierStatus"),
        ("nodes", "NodeStatus"),
    ],
}


def _file(package: str) -> descriptor_pb2.FileDescriptorProto:
    """Descriptor of the .proto file that the service would have."""
    scope = f".{package}" if package else ""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package or 'bare'}/store_status.proto", package=package, syntax="proto3"
    )
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields, 1):
            if isinstance(kind, str):
                message.field.add(
                    name=field, number=number, label=3, type=_MESSAGE, type_name=f"{scope}.{kind}"
                )
            else:
                message.field.add(name=field, number=number, label=1, type=kind)
    service = file.service.add(name=SERVICE)
    service.method.add(
        name="GetPoolStatus",
        input_type=f"{scope}.GetPoolStatusRequest",
        output_type=f"{scope}.PoolStatus",
    )
    return file


def make_pool() -> descriptor_pool.DescriptorPool:
    """Descriptors of all messages and services."""
    pool = descriptor_pool.DescriptorPool()
    for package in PACKAGES:
        pool.Add(_file(package))
    return pool


def message_class(pool: descriptor_pool.DescriptorPool, package: str, name: str) -> Any:
    """Python class of a message."""
    full = f"{package}.{name}" if package else name
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(full))


def fill(answer: Any, status: m.MasterStatus) -> Any:
    """Fill a ``PoolStatus`` from the master's status."""
    alive = [one for one in status.segments if one.state == "alive"]
    answer.num_objects = status.num_objects
    answer.capacity_bytes = sum(one.size_bytes for one in alive)
    answer.used_bytes = sum(one.allocated_bytes for one in alive)
    for tier in Tier:
        of_tier = [one for one in alive if one.tier is tier]
        capacity_bytes = sum(one.size_bytes for one in of_tier)
        used_bytes = sum(one.allocated_bytes for one in of_tier)
        answer.tiers.add(
            tier=tier,
            capacity_bytes=capacity_bytes,
            used_bytes=used_bytes,
            free_bytes=capacity_bytes - used_bytes,
            num_segments=len(of_tier),
            num_replicas=sum(one.num_objects for one in of_tier),
        )
    by_node: dict[str, list[m.SegmentStatus]] = {}
    for one in status.segments:
        by_node.setdefault(one.node or one.segment, []).append(one)
    for name, segments in by_node.items():
        is_alive = any(one.state == "alive" for one in segments)
        node = answer.nodes.add(
            node=name, host=segments[0].host, state="alive" if is_alive else segments[0].state
        )
        for one in segments:
            node.segments.add(
                segment=one.segment,
                tier=one.tier,
                state=one.state,
                capacity_bytes=one.size_bytes,
                used_bytes=one.allocated_bytes,
                num_replicas=one.num_objects,
                is_draining=one.is_draining,
            )
    return answer


class _AccessInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Admits calls that are signed with the cluster's key (``mooncake.security.request_signature``).

    The signature is in the metadata, under the name of the HTTP header; method and path are ``POST`` and the
    call's, the body is empty.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._lock = threading.Lock()

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        given = next((value for name, value in details.invocation_metadata if name == HEADER.lower()), None)
        try:
            with self._lock:
                principal, _ = self._verifier.check(given, "POST", details.method)
            if principal.level not in TRUSTED:
                raise AccessDenied(f"this is for {', '.join(sorted(TRUSTED))}; you are {principal}")
        except AccessDenied as error:
            reason = str(error)

            def refuse(_: Any, context: grpc.ServicerContext) -> Any:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

            return grpc.unary_unary_rpc_method_handler(refuse)
        return continuation(details)


def _check_certificate(context: grpc.ServicerContext) -> None:
    """Check the client's certificate where this service terminates TLS itself."""
    names: Any = context.auth_context().get("x509_subject_alternative_name", ())
    found = {"subjectAltName": [("URI", one.decode(errors="replace")) for one in names]}
    try:
        principal = principal_of(found)
    except AccessDenied as error:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
    if principal.level not in TRUSTED:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, f"you are {principal}")


class StatusService:
    """Serves the status of the master that ``ask`` reaches. Construct it on the event loop of ``ask``."""

    def __init__(
        self, ask: Callable[[msgspec.Struct], Awaitable[Any]], identity: Identity | None = None
    ) -> None:
        self._ask = ask
        self._identity = identity or process_identity()
        self._speaks_tls = False
        self._loop = asyncio.get_running_loop()
        verifier = self._identity.verifier()
        self._server = grpc.server(
            ThreadPoolExecutor(4, "grpc"),
            interceptors=[_AccessInterceptor(verifier)] if verifier is not None else [],
            options=[("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        pool = make_pool()
        names = [reflection.SERVICE_NAME]
        for package in PACKAGES:
            name = f"{package}.{SERVICE}" if package else SERVICE
            names.append(name)
            self._server.add_generic_rpc_handlers((self._handler(pool, package, name),))
        reflection.enable_server_reflection(names, self._server, pool)

    def _handler(self, pool: Any, package: str, name: str) -> grpc.GenericRpcHandler[Any, Any]:
        request, answer = (
            message_class(pool, package, one) for one in ("GetPoolStatusRequest", "PoolStatus")
        )

        def get_pool_status(_: Any, context: grpc.ServicerContext) -> Any:
            if self._speaks_tls:
                _check_certificate(context)
            return fill(answer(), self._status(context))

        method = grpc.unary_unary_rpc_method_handler(
            get_pool_status, request.FromString, lambda message: message.SerializeToString()
        )
        handler: grpc.GenericRpcHandler[Any, Any] = grpc.method_handlers_generic_handler(
            name, {"GetPoolStatus": method}
        )
        return handler

    def _status(self, context: grpc.ServicerContext) -> m.MasterStatus:
        async def ask() -> Any:
            return await self._ask(m.GetMasterStatus())

        try:
            reply = asyncio.run_coroutine_threadsafe(ask(), self._loop).result(ANSWER_S)
        except (MooncakeError, TimeoutError) as error:
            reply = Failure("unavailable", str(error) or "the master did not answer in time")
        if isinstance(reply, Failure):
            context.abort(grpc.StatusCode.UNAVAILABLE, reply.message)
        assert isinstance(reply, m.MasterStatus)
        return reply

    def start(self, address: str) -> int:
        """Listen at ``host:port``, with TLS if this process uses it, or at ``unix:path``; returns the port.

        Raises:
            AddressInUse: the address is taken.
        """
        try:
            port: int
            if self._identity.has_tls and not address.startswith("unix:"):
                files = self._identity.settings
                pair = (Path(files.tls_key).read_bytes(), Path(files.tls_cert).read_bytes())
                credentials = grpc.ssl_server_credentials(
                    [pair], Path(files.tls_ca).read_bytes(), require_client_auth=True
                )
                port = self._server.add_secure_port(address, credentials)
                self._speaks_tls = True
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise AddressInUse(f"{address} can't be listened on; free it or choose another --port") from error
        self._server.start()
        return port

    async def close(self) -> None:
        await asyncio.to_thread(self._server.stop(0.5).wait)
