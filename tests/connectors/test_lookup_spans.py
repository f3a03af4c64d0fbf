# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mooncake.connectors.block_transfer import PendingLookup
from mooncake.connectors.lookup_spans import SERVICE, start_tracing, trace_lookup
from mooncake.tracing import SpanContext, Tracing, install_tracing, process_tracing
from tests.otlp_collector import collector

PARENT = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
HEADERS = {"traceparent": PARENT.traceparent}


def lookup(**fields: Any) -> PendingLookup:
    """A lookup of 5 blocks that took half a second."""
    found = {"num_wanted": 5, "num_blocks": 3, "seconds": 0.5, "has_failed": False, **fields}
    return cast(PendingLookup, SimpleNamespace(**found))


@pytest.fixture(autouse=True)
def nothing_is_installed() -> Iterator[None]:
    yield
    process_tracing().close()
    install_tracing(None)


def test_a_lookup_is_below_the_call_to_its_engine() -> None:
    tracing = Tracing(4)
    install_tracing(tracing)
    trace_lookup(HEADERS, lookup())
    trace_lookup(HEADERS, lookup(has_failed=True))
    found, failed = tracing.ring.below(PARENT.span_id)
    assert (found.name, found.service, found.error) == ("store lookup", SERVICE, "")
    assert found.attributes == {"mooncake.blocks": 5, "mooncake.found_blocks": 3}
    assert found.end_s - found.start_s >= 0.5
    assert failed.error == "lookup_failed"


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}])
def test_a_request_without_a_trace_has_no_span(headers: dict[str, str] | None) -> None:
    tracing = Tracing(4)
    install_tracing(tracing)
    trace_lookup(headers, lookup())
    assert tracing.ring.latest(SERVICE) == []


def test_spans_are_sent_where_the_environment_names_a_collector() -> None:
    start_tracing({})
    assert not process_tracing().is_on
    with collector() as found:
        start_tracing({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{found.url}/v1/traces"})
        trace_lookup(HEADERS, lookup())
        process_tracing().close()
        assert [span.name for span in found.of(PARENT.trace_id)] == ["store lookup"]
    assert process_tracing().ring.num_requests == 0
