# SPDX-License-Identifier: Apache-2.0
"""One trace through the gateway and two real vLLM servers: their spans and our connector's join ours."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from tests.cluster import wait_for
from tests.otlp_collector import CollectedSpan, Collector, collector
from tests.vllm.engine import a_prompt
from tests.vllm_server import Gateway, VllmServer, running_gateway, running_store, store_connector

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

PROMPT = a_prompt("Zanzibar", 20)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@dataclass(frozen=True)
class TracedServers:
    collector: Collector
    gateway: Gateway


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedServers]:
    folder = tmp_path_factory.mktemp("traced")
    with ExitStack() as stack:
        found = stack.enter_context(collector())
        variables = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{found.url}/v1/traces",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        stack.enter_context(mock.patch.dict(os.environ, variables))
        store = stack.enter_context(running_store(folder))
        flags = ("--otlp-traces-endpoint", f"{found.url}/v1/traces")
        pair: list[VllmServer] = []
        for core, name in enumerate(("prefill", "decode")):
            environment = {**variables, "OTEL_SERVICE_NAME": f"vllm-{name}"}
            connector = store_connector(store)
            server = VllmServer(name, model, folder, connector, core, "float32", environment, flags)
            pair.append(server)
            stack.callback(server.close)
        roles = ["--prefill", pair[0].address, "--decode", pair[1].address]
        gateway = stack.enter_context(running_gateway(folder, model, "--protocol", "pool", *roles))
        for server in pair:
            server.wait_until_ready()
        gateway.wait_until_routable()
        yield TracedServers(found, gateway)


def test_the_engines_spans_join_the_trace(servers: TracedServers) -> None:
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    answer = servers.gateway.request("POST", "/v1/completions", body, headers=headers)
    assert answer.status == 200, answer.body

    def is_whole() -> bool:
        found = Counter(span.name for span in servers.collector.of(TRACE_ID))
        return found["llm_request"] == 2 and found["store lookup"] == 2 and found["text_completion"] == 1

    wait_for(is_whole, "the spans of the gateway, both engines and their connectors", 60.0)
    spans = servers.collector.of(TRACE_ID)
    by_id = {span.span_id: span for span in spans}
    assert [span.name for span in spans if span.parent_id not in by_id] == ["text_completion"]
    assert len(spans) >= 12, [span.name for span in spans]
    assert {"vllm-prefill", "vllm-decode"} <= {span.service for span in spans}
    for span in spans:
        if span.name in ("llm_request", "store lookup"):
            assert by_id[span.parent_id].name == "POST /v1/completions", span

    (root,) = (span for span in spans if span.name == "text_completion")
    phases: list[CollectedSpan] = [span for span in spans if span.parent_id == root.span_id]
    assert sum(span.seconds for span in phases) == pytest.approx(root.seconds, rel=0.02)
    engines = {span.service: span for span in spans if span.name == "llm_request"}
    assert engines["vllm-decode"].attributes["gen_ai.usage.completion_tokens"] == 16
