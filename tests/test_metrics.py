# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from prometheus_client import Counter, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from mooncake import metrics

probe = Counter("mooncake_test_probes", "Probes made by this test.", registry=metrics.registry)

probe_seconds = Histogram("mooncake_test_probe_seconds", "Their duration.", registry=metrics.registry)


def test_the_page_and_the_registry_agree() -> None:
    probe.inc(3)
    assert b"mooncake_test_probes_total 3.0" in metrics.page()


def test_a_scraper_that_accepts_openmetrics_gets_exemplars() -> None:
    probe_seconds.observe(0.3, {"trace_id": "0af7651916cd43dd8448eb211c80319c"})
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    page, headers = metrics.page_for({"accept": accept})
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(page.decode())}  # type: ignore[no-untyped-call]
    samples = families["mooncake_test_probe_seconds"].samples
    found = [sample.exemplar.labels for sample in samples if sample.exemplar is not None]
    assert found == [{"trace_id": "0af7651916cd43dd8448eb211c80319c"}]


def test_others_get_the_plain_format() -> None:
    page, headers = metrics.page_for({"accept": "*/*"})
    assert headers["Content-Type"] == metrics.CONTENT_TYPE
    assert b"trace_id" not in page
