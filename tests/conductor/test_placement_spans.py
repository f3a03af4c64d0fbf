# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake.conductor.messages import Decision, Place, Prediction, Refuse
from mooncake.conductor.placement_spans import traced_placement
from mooncake.errors import Refusal
from mooncake.tracing import SpanContext, Tracing, install_tracing

PARENT = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
PLACE = Place("r", 60, [1, 2, 3], trace=PARENT.traceparent)


@pytest.fixture
def tracing() -> Iterator[Tracing]:
    found = Tracing(4)
    install_tracing(found)
    yield found
    install_tracing(None)


def test_a_placement_has_what_was_chosen(tracing: Tracing) -> None:
    decision = Decision("r", "p:1", "d:1", "soonest", 32, prediction=Prediction(ttft_s=0.5), policy="overlap")
    assert traced_placement(PLACE, lambda request: decision) is decision
    [span] = tracing.ring.below(PARENT.span_id)
    assert (span.name, span.service, span.trace_id) == (
        *("choose instances", "mooncake-conductor", PARENT.trace_id),
    )
    chosen = {name: span.attributes[f"mooncake.{name}"] for name in ("policy", "prefill", "decode", "blocks")}
    assert chosen == {"policy": "overlap", "prefill": "p:1", "decode": "d:1", "blocks": 3}
    assert span.attributes["mooncake.predicted_ttft_s"] == 0.5
    assert span.end_s >= span.start_s and span.error == ""


def test_a_refusal_has_its_code(tracing: Tracing) -> None:
    refusal = Refuse("r", Refusal("slo_ttft", "too late"), 1.0)
    assert traced_placement(PLACE, lambda request: refusal) is refusal
    assert [span.error for span in tracing.ring.below(PARENT.span_id)] == ["slo_ttft"]


def test_without_traces_it_is_only_placed() -> None:
    refusal = Refuse("r", Refusal("slo_ttft", "too late"), 1.0)
    assert traced_placement(PLACE, lambda request: refusal) is refusal


def test_a_header_that_is_not_valid_is_ignored(tracing: Tracing) -> None:
    refusal = Refuse("r", Refusal("slo_ttft", "too late"), 1.0)
    assert traced_placement(Place("r", 60, trace="nonsense"), lambda request: refusal) is refusal
    assert tracing.ring.latest("mooncake-conductor") == []
