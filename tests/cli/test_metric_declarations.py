# SPDX-License-Identifier: Apache-2.0
"""Metrics that the source declares, by calls and by tables."""

from __future__ import annotations

import ast

import pytest

from mooncake.cli.metric_declarations import DeclaredMetric, declared_metrics, metrics_in


def test_a_call_and_the_tables_of_a_class_declare_metrics() -> None:
    source = """
things = Counter("mooncake_x_things", "Things.", ["kind"])

class Metrics:
    PREFIX = "vllm:x"
    COUNTERS: ClassVar = {"blocks": "Blocks."}
    TIMES: ClassVar = {"load_seconds": "Time of " "a load."}

class Base:
    PREFIX: ClassVar[str]
    COUNTERS: ClassVar[Mapping[str, str]]
"""
    assert list(metrics_in(ast.parse(source), "x.py")) == [
        DeclaredMetric("mooncake_x_things_total", "counter", ("kind",), "Things.", "x.py"),
        DeclaredMetric("vllm:x_blocks_total", "counter", (), "Blocks.", "x.py"),
        DeclaredMetric("vllm:x_load_seconds", "histogram", (), "Time of a load.", "x.py"),
    ]


@pytest.mark.parametrize(
    "source",
    [
        """
class Metrics:
    PREFIX = "vllm:x"
    COUNTERS = {"blocks": text_of("blocks")}
""",
        """
NAMES = {name_of("blocks"): "Blocks."}
for name, text in NAMES.items():
    Counter(f"mooncake_{name}", text)
""",
    ],
)
def test_a_table_without_literals_is_named_with_its_file(source: str) -> None:
    with pytest.raises(ValueError, match=r"^some/where\.py: .*line"):
        list(metrics_in(ast.parse(source), "some/where.py"))


def test_the_connectors_in_vllm_are_read() -> None:
    """Their names are made while vLLM runs, and alerts and boards name them."""
    found = {one.name: one for one in declared_metrics() if one.module == "connectors/vllm/stats.py"}
    assert found["vllm:mooncake_connector_failed_blocks_total"].kind == "counter"
    assert {name.split("_")[1] for name in found} == {"connector", "direct", "encoder"}
