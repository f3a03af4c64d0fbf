# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of Envoy's external processing, and their conversion to events and from effects.

Only the fields that an endpoint picker reads or writes are described here; they are built at run time in a
pool of their own, so that there is no generated code to keep in sync. protobuf skips fields that a
description lacks. ``tests/gateway/test_ext_proc_messages.py`` compares numbers and types with the published
descriptions. What the messages mean for a request is ``ext_proc_stream.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

from mooncake.gateway.ext_proc_stream import (
    BodyMode,
    Immediate,
    PeerEvent,
    ProxyReply,
    ReplyTo,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Unknown,
)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_ADDRESS = "upstream.address"

_EXT_PROC = "envoy.service.ext_proc.v3"
_CORE = "envoy.config.core.v3"
_STRUCT = "google.protobuf.Struct"
_STRING, _BYTES, _INT32, _BOOL, _MESSAGE = 9, 12, 5, 8, 11  # FieldDescriptorProto.Type; an enum is an int32
_OVERWRITE = 2  # HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD

Field = tuple[str, int, int | str]
"""Name, number, and type: a scalar, the name of a message, or ``*`` before it where it is repeated."""

FIELDS: dict[str, dict[str, list[Field]]] = {
    _CORE: {
        "HeaderValue": [("key", 1, _STRING), ("value", 2, _STRING), ("raw_value", 3, _BYTES)],
        "HeaderMap": [("headers", 1, f"*{_CORE}.HeaderValue")],
        "HeaderValueOption": [("header", 1, f"{_CORE}.HeaderValue"), ("append_action", 3, _INT32)],
        "Metadata": [("filter_metadata", 1, "map")],
    },
    "envoy.type.v3": {"HttpStatus": [("code", 1, _INT32)]},
    _EXT_PROC: {
        "ProtocolConfiguration": [("request_body_mode", 1, _INT32), ("response_body_mode", 2, _INT32)],
        "ProcessingRequest": [
            ("request_headers", 2, f"{_EXT_PROC}.HttpHeaders"),
            ("response_headers", 3, f"{_EXT_PROC}.HttpHeaders"),
            ("request_body", 4, f"{_EXT_PROC}.HttpBody"),
            ("response_body", 5, f"{_EXT_PROC}.HttpBody"),
            ("request_trailers", 6, f"{_EXT_PROC}.HttpTrailers"),
            ("response_trailers", 7, f"{_EXT_PROC}.HttpTrailers"),
            ("metadata_context", 8, f"{_CORE}.Metadata"),
            ("attributes", 9, "map"),
            ("observability_mode", 10, _BOOL),
            ("protocol_config", 11, f"{_EXT_PROC}.ProtocolConfiguration"),
        ],
        "HttpHeaders": [("headers", 1, f"{_CORE}.HeaderMap"), ("end_of_stream", 3, _BOOL)],
        "HttpBody": [
            ("body", 1, _BYTES),
            ("end_of_stream", 2, _BOOL),
            ("end_of_stream_without_message", 3, _BOOL),
        ],
        "HttpTrailers": [("trailers", 1, f"{_CORE}.HeaderMap")],
        "ProcessingResponse": [
            ("request_headers", 1, f"{_EXT_PROC}.HeadersResponse"),
            ("response_headers", 2, f"{_EXT_PROC}.HeadersResponse"),
            ("request_body", 3, f"{_EXT_PROC}.BodyResponse"),
            ("response_body", 4, f"{_EXT_PROC}.BodyResponse"),
            ("request_trailers", 5, f"{_EXT_PROC}.TrailersResponse"),
            ("response_trailers", 6, f"{_EXT_PROC}.TrailersResponse"),
            ("immediate_response", 7, f"{_EXT_PROC}.ImmediateResponse"),
            ("dynamic_metadata", 8, _STRUCT),
        ],
        "HeadersResponse": [("response", 1, f"{_EXT_PROC}.CommonResponse")],
        "BodyResponse": [("response", 1, f"{_EXT_PROC}.CommonResponse")],
        "TrailersResponse": [("header_mutation", 1, f"{_EXT_PROC}.HeaderMutation")],
        "CommonResponse": [
            ("header_mutation", 2, f"{_EXT_PROC}.HeaderMutation"),
            ("body_mutation", 3, f"{_EXT_PROC}.BodyMutation"),
            ("clear_route_cache", 5, _BOOL),
        ],
        "HeaderMutation": [
            ("set_headers", 1, f"*{_CORE}.HeaderValueOption"),
            ("remove_headers", 2, "*"),
        ],
        "BodyMutation": [("body", 1, _BYTES), ("streamed_response", 3, f"{_EXT_PROC}.StreamedBodyResponse")],
        "StreamedBodyResponse": [("body", 1, _BYTES), ("end_of_stream", 2, _BOOL)],
        "ImmediateResponse": [
            ("status", 1, "envoy.type.v3.HttpStatus"),
            ("headers", 2, f"{_EXT_PROC}.HeaderMutation"),
            ("body", 3, _BYTES),
            ("details", 5, _STRING),
        ],
    },
    "grpc.health.v1": {
        "HealthCheckRequest": [("service", 1, _STRING)],
        "HealthCheckResponse": [("status", 1, _INT32)],
    },
}

ONEOFS = {
    "ProcessingRequest": ("request", 6),
    "ProcessingResponse": ("response", 7),
    "BodyMutation": ("mutation", 2),
}
"""By message: its group of alternatives, and how many of its first fields belong to it."""


def _file(package: str, messages: Mapping[str, list[Field]]) -> descriptor_pb2.FileDescriptorProto:
    others = [f"{one}.proto" for one in (_CORE, "envoy.type.v3") if package == _EXT_PROC]
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto",
        package=package,
        syntax="proto3",
        dependency=["google/protobuf/struct.proto", *others],
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        group, num_members = ONEOFS.get(name, ("", 0))
        if group:
            message.oneof_decl.add(name=group)
        for position, (field, number, kind) in enumerate(fields):
            added = message.field.add(name=field, number=number, label=1)
            if kind == "map":
                _add_map(message, added, f".{package}.{name}")
            elif isinstance(kind, int):
                added.type = kind
            elif kind == "*":
                added.type, added.label = _STRING, 3
            else:
                added.type, added.type_name = _MESSAGE, f".{kind.removeprefix('*')}"
                added.label = 3 if kind.startswith("*") else 1
            if position < num_members:
                added.oneof_index = 0
    return file


def _add_map(message: Any, field: Any, scope: str) -> None:
    """Make ``field`` a map from text to a ``Struct``."""
    name = "".join(word.capitalize() for word in field.name.split("_")) + "Entry"
    field.label, field.type, field.type_name = 3, _MESSAGE, f"{scope}.{name}"
    entry = message.nested_type.add(name=name)
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=_STRING)
    entry.field.add(name="value", number=2, label=1, type=_MESSAGE, type_name=f".{_STRUCT}")


def make_pool() -> descriptor_pool.DescriptorPool:
    """Descriptors of all messages."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    for package, messages in FIELDS.items():
        pool.Add(_file(package, messages))
    return pool


_pool = make_pool()


def _class_of(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(name))


ProcessingRequest = _class_of(f"{_EXT_PROC}.ProcessingRequest")
ProcessingResponse = _class_of(f"{_EXT_PROC}.ProcessingResponse")
HealthCheckRequest = _class_of("grpc.health.v1.HealthCheckRequest")
HealthCheckResponse = _class_of("grpc.health.v1.HealthCheckResponse")


# --- what the proxy sends


def event_of(message: Any) -> PeerEvent:
    """The event of a ``ProcessingRequest``."""
    kind = message.WhichOneof("request")
    if kind == "request_headers":
        found = message.request_headers
        modes = message.protocol_config if message.HasField("protocol_config") else None
        return RequestHeaders(
            _headers_of(found.headers),
            found.end_of_stream,
            _subset_of(message.metadata_context),
            BodyMode.FULL_DUPLEX_STREAMED if modes is None else BodyMode.of(modes.request_body_mode),
            BodyMode.FULL_DUPLEX_STREAMED if modes is None else BodyMode.of(modes.response_body_mode),
            message.observability_mode,
        )
    if kind == "request_body":
        return RequestBody(message.request_body.body, _is_last(message.request_body))
    if kind == "request_trailers":
        return RequestTrailers()
    if kind == "response_headers":
        found = message.response_headers
        return ResponseHeaders(_headers_of(found.headers), found.end_of_stream, _served(message))
    if kind == "response_body":
        return ResponseBody(message.response_body.body, _is_last(message.response_body))
    if kind == "response_trailers":
        return ResponseTrailers()
    return Unknown()


def _is_last(body: Any) -> bool:
    return bool(body.end_of_stream or body.end_of_stream_without_message)


def _headers_of(given: Any) -> list[tuple[str, str]]:
    """Names in lower case, with the values; Envoy puts these into either of two fields."""
    return [
        (one.key.lower(), one.raw_value.decode("latin-1") if one.raw_value else one.value)
        for one in given.headers
    ]


def _subset_of(metadata: Any) -> list[str] | None:
    """The endpoints that may be picked; None where the proxy restricts nothing."""
    if SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        return [one.string_value for one in value.list_value.values]
    # A text is a list with commas, as the endpoints in an answer are; anything else allows none.
    return [one.strip() for one in value.string_value.split(",") if one.strip()]


def _served(message: Any) -> str:
    """The endpoint that served: the protocol's metadata, else Envoy's own attribute; empty without both."""
    by_namespace = message.metadata_context.filter_metadata
    if LB_NAMESPACE in by_namespace and SERVED in by_namespace[LB_NAMESPACE].fields:
        return str(by_namespace[LB_NAMESPACE].fields[SERVED].string_value)
    found = (
        one.fields[_ADDRESS].string_value for one in message.attributes.values() if _ADDRESS in one.fields
    )
    return next(found, "")


# --- what it receives


def message_of(effect: ProxyReply | Immediate) -> Any:
    """The ``ProcessingResponse`` of an effect."""
    answer = ProcessingResponse()
    if isinstance(effect, Immediate):
        found = answer.immediate_response
        found.status.code = effect.status
        found.body, found.details = effect.body, effect.details
        _fill(found.headers, effect.headers, ())
        return answer
    if effect.to in (ReplyTo.REQUEST_TRAILERS, ReplyTo.RESPONSE_TRAILERS):
        getattr(answer, effect.to.value).SetInParent()
        return answer
    common = getattr(answer, effect.to.value).response
    common.SetInParent()
    if effect.set_headers or effect.remove_headers:
        _fill(common.header_mutation, effect.set_headers, effect.remove_headers)
    if effect.endpoints:
        # A route may depend on a header that was set, so Envoy computes it again.
        common.clear_route_cache = True
        value = answer.dynamic_metadata.fields[LB_NAMESPACE].struct_value.fields[DESTINATION]
        value.string_value = effect.endpoints
    if effect.body is not None and effect.is_streamed:
        streamed = common.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = effect.body, effect.is_last
    elif effect.body is not None:
        common.body_mutation.body = effect.body
    return answer


def _fill(mutation: Any, set_headers: Mapping[str, str], remove_headers: Any) -> None:
    for name, value in set_headers.items():
        added = mutation.set_headers.add(append_action=_OVERWRITE)
        added.header.key, added.header.raw_value = name.lower(), value.encode("latin-1")
    mutation.remove_headers.extend(remove_headers)
