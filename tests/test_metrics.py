# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from mooncake import metrics

probe = Counter("mooncake_test_probes", "Probes made by this test.", registry=metrics.registry)

probe_seconds = Histogram("mooncake_test_probe_seconds", "Their duration.", registry=metrics.registry)

engine_probe = Gauge("vllm:test_probe", "A name of engines'.", ["model_name"], registry=metrics.registry)

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def test_the_page_and_the_registry_agree() -> None:
    probe.inc(3)
    assert b"mooncake_test_probes_total 3.0" in metrics.page()


def test_a_scraper_that_accepts_openmetrics_gets_exemplars() -> None:
    probe_seconds.observe(0.3, {"trace_id": "0af7651916cd43dd8448eb211c80319c"})
    page, headers = metrics.page_for({"accept": OPENMETRICS})
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(page.decode())}  # type: ignore[no-untyped-call]
    samples = families["mooncake_test_probe_seconds"].samples
    found = [sample.exemplar.labels for sample in samples if sample.exemplar is not None]
    assert found == [{"trace_id": "0af7651916cd43dd8448eb211c80319c"}]


@pytest.mark.parametrize(
    "accept", [OPENMETRICS, OPENMETRICS.replace("1.0.0", "1.0.0;escaping=allow-utf-8"), "*/*"]
)
def test_names_of_engines_keep_their_colon_in_every_format(accept: str) -> None:
    engine_probe.labels("a/b:c").set(2)
    page, _ = metrics.page_for({"accept": accept})
    assert b'vllm:test_probe{model_name="a/b:c"} 2.0' in page


def test_others_get_the_plain_format() -> None:
    page, headers = metrics.page_for({"accept": "*/*"})
    assert headers["Content-Type"] == metrics.CONTENT_TYPE
    assert b"trace_id" not in page
