# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from prometheus_client import Counter

from mooncake import metrics

probe = Counter("mooncake_test_probes", "Probes made by this test.", registry=metrics.registry)


def test_the_page_and_the_registry_agree() -> None:
    probe.inc(3)
    assert b"mooncake_test_probes_total 3.0" in metrics.page()
