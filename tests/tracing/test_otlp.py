# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from unittest.mock import Mock

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from mooncake import metrics
from mooncake.tracing import SpanContext, Tracing, TracingSettings, tracing_of
from mooncake.tracing.otlp import OtlpExporter
from tests.otlp_collector import Collector, collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(tracing: Tracing, parent: SpanContext | None = None) -> str:
    """The trace of a request with one phase."""
    scope = tracing.begin("chat", "mooncake-gateway", "host:1", parent, gen_ai__usage__input_tokens=7)
    scope.phase("place")
    scope.end()
    return scope.trace_id


def sent(found: Collector, *parents: SpanContext | None) -> list[str]:
    """The traces of requests below ``parents``, when all that is sent has arrived."""
    exporter = OtlpExporter(f"{found.url}/v1/traces")
    names = [traced(Tracing(4, exporter), parent) for parent in parents]
    exporter.flush()
    exporter.close()
    return names


def test_a_collector_gets_the_spans() -> None:
    with collector() as found:
        assert sent(found, SpanContext(TRACE, PARENT)) == [TRACE]
        root, phase = sorted(found.of(TRACE), key=lambda span: span.parent_id != PARENT)
    assert (root.name, root.parent_id, root.kind) == ("chat", PARENT, ProtoSpan.SPAN_KIND_SERVER)
    assert (phase.name, phase.parent_id, phase.kind) == (
        *("place", root.span_id),
        ProtoSpan.SPAN_KIND_INTERNAL,
    )
    assert root.attributes["gen_ai.usage.input_tokens"] == 7
    assert root.start_ns <= phase.start_ns <= phase.end_ns <= root.end_ns
    assert {"service.name": "mooncake-gateway", "service.instance.id": "host:1"}.items() <= (
        found.resources[0].items()
    )


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-production")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=blue")
    with collector() as found:
        sent(found, None)
    assert found.spans[0].service == "chat-production"
    assert found.resources[0]["deployment.environment.name"] == "blue"


def test_the_sampler_of_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with collector() as found:
        begun, continued = sent(found, None, SpanContext(TRACE, PARENT))
    assert found.of(begun) == [] and len(found.of(continued)) == 2


def test_what_its_client_does_not_sample_is_not_sent() -> None:
    with collector() as found:
        sent(found, SpanContext(TRACE, PARENT, False))
    assert found.spans == []


def test_a_collector_that_refuses_is_logged_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mooncake")
    with collector() as found:
        found.status = 400
        exporter = OtlpExporter(f"{found.url}/v1/traces")
        tracing = Tracing(4, exporter)
        for _ in range(3):
            traced(tracing)
            exporter.flush()
        assert [record.message for record in caplog.records] == ["spans_not_exported"]
        found.status = 200
        name = traced(tracing)
        exporter.flush()
        exporter.close()
    assert len(found.of(name)) == 2
    assert [record.message for record in caplog.records] == ["spans_not_exported", "spans_exported_again"]
    assert len(tracing.ring.latest("mooncake-gateway")) == 4


def test_spans_without_room_in_the_queue_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    before = {outcome: num_spans(outcome) for outcome in ("exported", "failed", "dropped")}
    with collector() as found:
        exporter = OtlpExporter(f"{found.url}/v1/traces")
        tracing = Tracing(4, exporter)
        found.is_answering.clear()
        for _ in range(10):
            traced(tracing)
        found.is_answering.set()
        exporter.flush()
        exporter.close()
    # At most 4 were on their way to the collector, and 4 in the queue.
    dropped = num_spans("dropped") - before["dropped"]
    assert dropped >= 12 and num_spans("failed") == before["failed"]
    assert num_spans("exported") - before["exported"] == len(found.spans) == 20 - dropped


def test_spans_that_threads_add_in_another_order_are_not_dropped() -> None:
    before = {outcome: num_spans(outcome) for outcome in ("exported", "dropped")}
    with collector() as found:
        exporter = OtlpExporter(f"{found.url}/v1/traces")
        processor, waiting = exporter._processor, Mock()
        exporter._processor = waiting
        for _ in range(3):
            traced(Tracing(4, exporter))
        for call in reversed(waiting.on_end.call_args_list):
            processor.on_end(*call.args)
        exporter._processor = processor
        exporter.flush()
        exporter.close()
    assert num_spans("exported") - before["exported"] == len(found.spans) == 6
    assert num_spans("dropped") == before["dropped"]


def num_spans(outcome: str) -> float:
    return metrics.registry.get_sample_value("mooncake_tracing_spans_total", {"outcome": outcome}) or 0.0


def test_settings_without_an_endpoint_send_nothing() -> None:
    assert tracing_of(TracingSettings()).exporter is None
    with collector() as found:
        tracing = tracing_of(TracingSettings(requests=0, endpoint=found.url))
        assert tracing.is_on
        name = traced(tracing)
        tracing.close()
        assert len(found.of(name)) == 2
    assert tracing.ring.latest("mooncake-gateway") == []
