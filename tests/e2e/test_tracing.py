# SPDX-License-Identifier: Apache-2.0
"""One trace through a whole cluster of processes: as a collector gets it, as the gateway returns it, and as
``mooncake trace`` writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.cluster import ADMIN_KEY, wait_for
from tests.gateway.doubles import save_tokenizer
from tests.otlp_collector import CollectedSpan, Collector, collector
from tests.program import Program, programs

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PHASES = ["receive", "tokenize", "hash blocks", "place", "prefill", "first token", "stream"]
LAST = {"choose instances", "worker prefill", "worker decode", "save"}
"""Spans that end last in their processes, each of which sends its spans by itself."""
ADMIN = {"X-API-Key": ADMIN_KEY}


@dataclass
class Traced:
    """A cluster whose processes send their spans to ``collector``."""

    collector: Collector
    gateway: Program
    conductor: Program
    prefill: Program
    decode: Program

    def complete(self, prompt: list[int], headers: dict[str, str]) -> str:
        """The id of an answer to a streamed completion of 24 tokens."""
        body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{self.gateway.url}/v1/completions", json.dumps(body).encode())
        for name, value in {"Content-Type": "application/json", **headers}.items():
            request.add_header(name, value)
        with urllib.request.urlopen(request, timeout=120.0) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
            return str(answer.headers["X-Mooncake-ID"])

    def spans(self, trace_id: str) -> list[CollectedSpan]:
        """The trace, once the collector has each process's last span and all parents but the client's."""

        def is_whole() -> bool:
            found = self.collector.of(trace_id)
            ids = {span.span_id for span in found}
            roots = [span.name for span in found if span.parent_id not in ids]
            return roots == ["text_completion"] and set(names(found)) >= LAST

        try:
            wait_for(is_whole, "the whole trace at the collector", 60.0)
        except TimeoutError as error:
            raise AssertionError(sorted(names(self.collector.of(trace_id)))) from error
        return self.collector.of(trace_id)


def names(spans: list[CollectedSpan]) -> list[str]:
    return [span.name for span in spans]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    save_tokenizer(folder)
    with collector() as found, programs(folder) as start, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        environment.setenv("ADMIN_API_KEY", ADMIN_KEY)
        store = start("daemon", "--capacity-dram", "1")
        common = ("--master", store.address, "--decode-token-s", "0.01", "--prefill-token-s", "0.0005")
        prefill, decode = (
            start("dev", "fake-engine", "--role", role, *common) for role in ("prefill", "decode")
        )
        conductor = start("conductor", "--block-tokens", "16", "--http-port", "0")
        sides = ("--prefill", prefill.address, "--decode", decode.address)
        gateway = start(
            *("gateway", "--model", str(folder), "--block-tokens", "16", "--conductor", conductor.address),
            *("--protocol", "workers", *sides),
        )

        def are_ready() -> bool:
            status = gateway.request("GET", "/status", None, headers=ADMIN).body
            rows = [row["health"] for row in status["instances"]]
            return rows == ["ready", "ready"] and status["conductor"].endswith("(connected)")

        wait_for(are_ready, "the engines", 60.0)
        yield Traced(found, gateway, conductor, prefill, decode)


def prompt_of(seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(100) for _ in range(200)]


def test_a_collector_gets_one_connected_tree(traced: Traced) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traced.complete(prompt_of(1), {"traceparent": f"00-{trace_id}-{parent_id}-01"})
    spans = traced.spans(trace_id)

    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = (span for span in spans if span.parent_id not in by_id)
    assert (root.name, root.parent_id, root.service) == ("text_completion", parent_id, "mooncake-gateway")
    assert len(set(names(spans))) >= 12, sorted(set(names(spans)))
    assert {"choose instances", "worker prefill", "worker decode", "store lookup", "load from pool"} <= set(
        names(spans)
    )
    assert {"queue", "compute prompt", "compute chunk", "save", "generate"} <= set(names(spans))
    services = {span.name: span.service for span in spans}
    assert services["choose instances"] == "mooncake-conductor"
    assert services["worker decode"] == "mooncake-worker"
    assert root.attributes["gen_ai.usage.input_tokens"] == 200
    assert root.attributes["gen_ai.usage.output_tokens"] == 24
    assert root.attributes["gen_ai.latency.time_to_first_token"] > 0.0
    loads = [span for span in spans if span.name == "load from pool"]
    assert loads and all(span.attributes["mooncake.bytes"] > 0 for span in loads)
    assert " by " in loads[0].attributes["mooncake.source"]


def test_the_phases_add_up_to_the_latency(traced: Traced) -> None:
    trace_id = "1bf7651916cd43dd8448eb211c80319c"
    traced.complete(prompt_of(2), {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    spans = traced.spans(trace_id)
    (root,) = (span for span in spans if span.name == "text_completion")
    phases = [span for span in spans if span.parent_id == root.span_id]
    assert names(sorted(phases, key=lambda span: span.start_ns)) == PHASES
    assert sum(span.seconds for span in phases) == pytest.approx(root.seconds, rel=0.02)
    # and within a worker: from the request's arrival to its last token or its save
    (decode,) = (span for span in spans if span.name == "worker decode")
    stages = [span for span in spans if span.parent_id == decode.span_id and span.name != "save"]
    assert names(sorted(stages, key=lambda span: (span.start_ns, span.end_ns))) == [
        *("receive", "queue", "fetch", "compute prompt", "generate")
    ]
    assert sum(span.seconds for span in stages) == pytest.approx(decode.seconds, rel=0.1)


def test_the_gateway_returns_the_same_spans(traced: Traced) -> None:
    trace_id = "2bf7651916cd43dd8448eb211c80319c"
    name = traced.complete(prompt_of(3), {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})

    def returned() -> dict[str, Any]:
        found: dict[str, Any] = traced.gateway.request("GET", f"/v1/requests/{name}/trace", None).body
        return found

    def collected() -> set[str]:
        return {span.span_id for span in traced.collector.of(trace_id)}

    expected = {span["span_id"] for span in returned()["spans"]}
    wait_for(lambda: collected() == expected, "all spans at the collector", 30.0)
    assert len(expected) >= 20
    assert returned()["trace_id"] == trace_id and returned()["missing"] == []
    starts = [span["start_s"] for span in returned()["spans"]]
    assert starts == sorted(starts)
    assert not any("mooncake.clock_shift_s" in span["attributes"] for span in returned()["spans"])


def test_a_request_that_a_client_does_not_sample_is_not_sent_but_kept(traced: Traced) -> None:
    trace_id = "3bf7651916cd43dd8448eb211c80319c"
    name = traced.complete(prompt_of(4), {"traceparent": f"00-{trace_id}-b7ad6b7169203331-00"})
    after = "4bf7651916cd43dd8448eb211c80319c"
    traced.complete(prompt_of(5), {"traceparent": f"00-{after}-b7ad6b7169203331-01"})
    traced.spans(after)
    assert traced.collector.of(trace_id) == []
    answer = traced.gateway.request("GET", f"/v1/requests/{name}/trace", None)
    assert {span["service"] for span in answer.body["spans"]} == {
        *("mooncake-gateway", "mooncake-conductor", "mooncake-worker")
    }


def test_the_list_has_the_latest_request_first(traced: Traced) -> None:
    first, second = (traced.complete(prompt_of(seed), {}) for seed in (6, 7))
    answer = traced.gateway.request("GET", "/v1/requests?limit=2", None, headers=ADMIN)
    assert [one["id"] for one in answer.body["requests"]] == [second, first]
    newest = answer.body["requests"][0]
    assert newest["latency_s"] > newest["ttft_s"] > 0.0
    assert (newest["status"], newest["prompt_tokens"], newest["output_tokens"]) == (200, 200, 24)
    assert newest["prefill"] == traced.prefill.address
    assert traced.gateway.request("GET", "/v1/requests", None).status == 401


def test_the_command_writes_a_file_for_perfetto(traced: Traced, tmp_path: Path) -> None:
    name = traced.complete(prompt_of(8), {})
    file = tmp_path / "trace.json"
    command = [sys.executable, "-m", "mooncake", "trace", name, "--url", traced.gateway.url]
    subprocess.run([*command, "--perfetto", str(file)], check=True, capture_output=True)
    events = json.loads(file.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {"text_completion", "worker prefill", "choose instances"} <= {event["name"] for event in slices}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert len(processes) == 4 and {event["pid"] for event in slices} == processes.keys()
    wide = {**os.environ, "COLUMNS": "180"}
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=wide).stdout
    assert "store lookup" in shown and "━" in shown


def test_a_lost_worker_is_named_as_missing(traced: Traced) -> None:
    name = traced.complete(prompt_of(9), {})
    traced.decode.process.kill()
    traced.decode.process.wait()
    answer = traced.gateway.request("GET", f"/v1/requests/{name}/trace", None)
    assert answer.body["missing"] == [traced.decode.address]
    assert "worker prefill" in [span["name"] for span in answer.body["spans"]]
