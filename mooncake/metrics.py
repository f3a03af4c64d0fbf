# SPDX-License-Identifier: Apache-2.0
"""The process's metrics registry and the text of its page.

A metric is declared beside the code that it measures, bound to ``registry``; this module only owns the
registry and its page. Names: ``mooncake_<package>_<what>_<unit>``, base units, ``_total`` for counters.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

disable_created_metrics()  # type: ignore[no-untyped-call]
registry = CollectorRegistry()

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Prometheus text format 0.0.4, which every scraper reads."""


def page() -> bytes:
    """The metrics of this process as Prometheus text."""
    return generate_latest(registry)


def page_for(headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """The metrics in the format that a scraper accepts, and the header that names it.

    OpenMetrics, where it is accepted, also has exemplars: the traces of measurements.
    """
    accepted = headers.get("accept", "")
    if "application/openmetrics-text" not in accepted:
        return page(), {"Content-Type": CONTENT_TYPE}
    # Other ways of escaping change the colon of engines' names (vllm:) in samples, though it is legal.
    # None of our names has a character that needs one.
    body = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return body, {"Content-Type": openmetrics.CONTENT_TYPE_LATEST}
