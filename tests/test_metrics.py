from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import Counter

from mooncake import metrics
from mooncake.errors import AddressInUse

probe = Counter("mooncake_test_probes", "Probes made by this test.", registry=metrics.registry)


def test_the_page_is_served_and_a_taken_port_is_named() -> None:
    probe.inc(3)
    server, port = metrics.serve_metrics("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert "mooncake_test_probes_total 3.0" in answer.read().decode()
        with pytest.raises(AddressInUse, match=str(port)):
            metrics.serve_metrics("127.0.0.1", port)
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_and_the_registry_agree() -> None:
    assert b"mooncake_test_probes_total" in metrics.page()
