# SPDX-License-Identifier: Apache-2.0
"""The described messages are those that Envoy publishes, and mean what the protocol says."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from mooncake.gateway.ext_proc_messages import (
    FIELDS,
    ProcessingRequest,
    ProcessingResponse,
    event_of,
    make_pool,
    message_of,
)
from mooncake.gateway.ext_proc_stream import (
    BodyMode,
    Immediate,
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

_MODULES = {
    "envoy.config.core.v3": "envoy.config.core.v3.base_pb2",
    "envoy.type.v3": "envoy.type.v3.http_status_pb2",
    "envoy.service.ext_proc.v3": "envoy.service.ext_proc.v3.external_processor_pb2",
}
_ENUM, _INT32 = 14, 5


def test_numbers_and_types_are_the_published_ones() -> None:
    pytest.importorskip("envoy", reason="xds-protos is not installed (extra dev)")
    pool, num_compared = make_pool(), 0
    for package, module in _MODULES.items():
        published = importlib.import_module(module)
        for name in FIELDS[package]:
            ours = pool.FindMessageTypeByName(f"{package}.{name}")
            theirs = getattr(published, name).DESCRIPTOR
            assert ours.full_name == theirs.full_name
            for field in ours.fields:
                other = theirs.fields_by_number[field.number]
                assert (field.name, field.is_repeated) == (other.name, other.is_repeated)
                kind = _INT32 if other.type == _ENUM else other.type  # the same bytes
                assert field.type == kind, f"{name}.{field.name}"
                groups = [one.containing_oneof.name if one.containing_oneof else "" for one in (field, other)]
                assert groups[0] == groups[1], f"{name}.{field.name}"
                if field.message_type is not None:
                    assert field.message_type.full_name == other.message_type.full_name
                num_compared += 1
    assert num_compared > 40


def request(**fields: Any) -> Any:
    return ProcessingRequest(**fields)


HEADERS = {"headers": [{"key": ":Path", "raw_value": b"/v1"}, {"key": "X-B", "value": "c"}]}


def test_headers_are_read_from_either_field() -> None:
    found = event_of(request(request_headers={"headers": HEADERS, "end_of_stream": True}))
    assert found == RequestHeaders([(":path", "/v1"), ("x-b", "c")], True)
    found = event_of(request(response_headers={"headers": HEADERS}))
    assert found == ResponseHeaders([(":path", "/v1"), ("x-b", "c")])


@pytest.mark.parametrize("number", range(-1, 8))
def test_modes_have_their_names(number: int) -> None:
    message = request(
        request_headers={}, protocol_config={"request_body_mode": number, "response_body_mode": 2}
    )
    found = event_of(message)
    assert isinstance(found, RequestHeaders)
    assert found.request_mode is (BodyMode(number) if number < 6 else BodyMode.UNKNOWN)
    assert found.response_mode is BodyMode.BUFFERED


def test_other_messages() -> None:
    body = {"body": b"x", "end_of_stream": True}
    assert event_of(request(request_body=body)) == RequestBody(b"x", True)
    assert event_of(request(response_body={"body": b"x"})) == ResponseBody(b"x", False)
    ending = {"end_of_stream_without_message": True}
    assert event_of(request(response_body=ending)) == ResponseBody(b"", True)
    assert event_of(request(request_trailers={})) == RequestTrailers()
    assert event_of(request(response_trailers={})) == ResponseTrailers()
    assert event_of(request()) == Unknown()


def with_metadata(message: Any, namespace: str, name: str, value: Any) -> Any:
    field = message.metadata_context.filter_metadata[namespace].fields[name]
    if isinstance(value, str):
        field.string_value = value
    elif isinstance(value, list):
        field.list_value.SetInParent()
        for one in value:
            field.list_value.values.add(string_value=one)
    else:
        field.number_value = value
    return message


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["10.0.0.1:80", "10.0.0.2:80"], ["10.0.0.1:80", "10.0.0.2:80"]),
        ([], []),
        ("10.0.0.1:80, 10.0.0.2:80", ["10.0.0.1:80", "10.0.0.2:80"]),
        (7, []),
    ],
)
def test_a_subset_restricts_even_if_it_is_empty(value: Any, expected: list[str]) -> None:
    message = request(request_headers={})
    with_metadata(message, "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", value)
    found = event_of(message)
    assert isinstance(found, RequestHeaders)
    assert found.subset == expected


def test_no_subset_restricts_nothing() -> None:
    message = request(request_headers={})
    with_metadata(message, "envoy.lb.subset_hint", "another", "10.0.0.1:80")
    found = event_of(message)
    assert isinstance(found, RequestHeaders)
    assert found.subset is None


def test_the_endpoint_that_served() -> None:
    message = request(response_headers={})
    with_metadata(message, "envoy.lb", "x-gateway-destination-endpoint-served", "10.0.0.2:80")
    assert event_of(message) == ResponseHeaders([], False, "10.0.0.2:80")
    message.attributes["envoy.filters.http.ext_proc"]["upstream.address"] = "10.0.0.3:80"
    assert event_of(message) == ResponseHeaders([], False, "10.0.0.2:80")
    message.ClearField("metadata_context")
    assert event_of(message) == ResponseHeaders([], False, "10.0.0.3:80")


def test_a_destination_is_in_header_and_metadata() -> None:
    name, where = "x-gateway-destination-endpoint", "10.0.0.1:80,10.0.0.2:80"
    found = message_of(ProxyReply(ReplyTo.REQUEST_HEADERS, {name: where}, ["x-evil"], where))
    found = ProcessingResponse.FromString(found.SerializeToString())
    common = found.request_headers.response
    [option] = common.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == (name, where.encode())
    assert option.append_action == 2, "overwrite, or a client's own value would stay"
    assert [*common.header_mutation.remove_headers] == ["x-evil"]
    assert common.clear_route_cache
    assert found.dynamic_metadata["envoy.lb"][name] == where


def test_bodies_and_empty_replies() -> None:
    found = message_of(ProxyReply(ReplyTo.RESPONSE_BODY, body=b"x", is_streamed=True, is_last=True))
    streamed = found.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"x", True)
    found = message_of(ProxyReply(ReplyTo.REQUEST_BODY, body=b"whole"))
    assert found.request_body.response.body_mutation.body == b"whole"
    for to in ReplyTo:
        found = message_of(ProxyReply(to))
        assert found.WhichOneof("response") == to.value
        assert not found.HasField("dynamic_metadata")


def test_an_immediate_answer() -> None:
    found = message_of(Immediate(429, {"Retry-After": "3"}, b"{}", "overloaded")).immediate_response
    assert (found.status.code, found.body, found.details) == (429, b"{}", "overloaded")
    assert found.headers.set_headers[0].header.key == "retry-after"
