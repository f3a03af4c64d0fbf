# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus with the generated configuration reads a live cluster and evaluates every query.

The configuration is the rendered one with other addresses, since the programs are no containers here. What a
query names must be a series of this cluster, or be declared by a program that is not part of it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.cli import boards
from mooncake.cli.alerts import ALERTS, rule_groups
from mooncake.cli.metric_declarations import declared_metrics
from mooncake.cli.panels import selected, series_in
from mooncake.cli.ports import free_ports
from tests.cluster import ADMIN_KEY, Cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]

PATIENCE_S = 90.0
SPAN = "30m"
"""Span of rates: longer than the test."""

ELSEWHERE = {
    "p2p/": "mooncake p2p serve",
    "gateway/endpoint_picker.py": "mooncake epp",
    "gateway/ext_proc_server.py": "mooncake epp",
    "connectors/encoder_transfer.py": "vLLM with our encoder connector",
    "connectors/pages.py": "vLLM or SGLang with our connector",
    "connectors/vllm/": "vLLM with our connectors",
    "inference/prefill_group.py": "a prefill group of several stages",
    "gateway/clients.py": "a gateway with a file of keys",
    "doctor/watch.py": "mooncake doctor --watch-s",
    "tracing/otlp.py": "a program whose spans go to a collector",
}
"""Modules whose metrics belong to programs that this cluster does not run, with these programs."""

WITH_RESULTS = {
    "cluster": (
        *("Programs whose metrics are not answered", "Instances that serve", "Requests by status"),
        *("Answers in progress", "Tokens per second", "Time to the first token", "Time between tokens"),
        *("Prompt tokens found cached", "Objectives met", "HTTP connections"),
    ),
    "store": (
        "Memory",
        "Objects",
        "Keys looked up",
        "Puts",
        "Nodes that are mounted",
    ),
    "conductor": ("Placements by outcome", "Instances", "Batches of KV events"),
    "engine": ("Requests waiting", "KV cache in use", "Time to the first token", "Bytes moved by path"),
}
"""Diagrams that show something after a few requests, by board."""


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **arguments: str) -> Any:
        """Data of an answer of its API."""
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success", found
        return found["data"]

    def values(self, query: str) -> list[float]:
        """Values that a query has now, without those that are not a number."""
        found = [float(one["value"][1]) for one in self.ask("query", query=query)["result"]]
        return [value for value in found if not math.isnan(value)]


def pages_of(cluster: Cluster) -> dict[str, str]:
    """Where each role has its page of metrics; its log says where that is no port of its own."""
    found = {}
    for name, role in cluster.status["roles"].items():
        # The last one: a role that was restarted has another port.
        named = re.findall(r" (?:metrics=|query_server_ready url=http://)(\d\S+)", cluster.log(name))
        if name != "metadata":
            found[name] = named[-1] if named else role["address"]
    return found


@pytest.fixture(scope="module")
def prometheus(
    shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Prometheus, dict[str, str]]]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed, so queries were NOT TESTED; run scripts/install-servers")
    folder: Path = tmp_path_factory.mktemp("prometheus")
    pages = pages_of(shared_cluster)
    content = boards.prometheus(dict.fromkeys(pages, ("http", 0)))
    content["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "admin.key").write_text(ADMIN_KEY)
    (folder / "rules.yaml").write_text(json.dumps({"groups": rule_groups()}))  # JSON is YAML
    for job in content["scrape_configs"]:
        job["authorization"] = {"credentials_file": str(folder / "admin.key")}  # on loopback, without TLS
        for group in job["static_configs"]:
            group["targets"] = [pages[target.removesuffix(":0")] for target in group["targets"]]
    (folder / "prometheus.yaml").write_text(json.dumps(content))
    (port,) = free_ports("127.0.0.1", 1, Random())
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(port)

        def is_up() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            return bool(server.ask("status/config"))

        wait_for(is_up, "Prometheus", PATIENCE_S)
        yield server, pages
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def served(prometheus: tuple[Prometheus, dict[str, str]], shared_cluster: Cluster) -> Prometheus:
    """Prometheus, after requests whose prompts another worker finds in the pool."""
    server, pages = prometheus
    unread = {f"http://{page}/metrics": "not asked yet" for page in pages.values()}

    def are_read() -> bool:
        # Each once, not all at one time: on a busy machine a page takes longer than its limit now and then.
        for one in server.ask("targets")["activeTargets"]:
            if one["health"] == "up":
                unread.pop(one["scrapeUrl"], None)
            elif one["scrapeUrl"] in unread:
                unread[one["scrapeUrl"]] = one["lastError"]
        return not unread

    try:
        wait_for(are_read, "Prometheus to read every page", PATIENCE_S)
    except TimeoutError as error:
        raise AssertionError(unread) from error
    shared_cluster.wait_until_routable()
    prompt = "The mooncake is a pastry that is eaten during the festival of autumn. " * 12
    # Round robin, so each worker computes, or loads, the prompt. A series that appears has no rate before it
    # changes once more, so there are requests before Prometheus reads the pages, and after.
    for _ in range(2):
        for _ in range(4):
            headers = {"x-slo-ttft-ms": "60000", "x-slo-tbt-ms": "60000"}
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            assert shared_cluster.request("POST", "/v1/completions", body, headers=headers).status == 200
        wait_for(lambda: server.values("mooncake_gateway_slo_total"), "a count of objectives", PATIENCE_S)
    return server


def test_every_query_is_valid_and_names_series_of_the_cluster(served: Prometheus) -> None:
    for query in boards.queries(SPAN):
        assert served.ask("query", query=query)["resultType"] == "vector", query

    def missing() -> set[str]:
        names = set(served.ask("label/__name__/values"))
        # A family with labels has no series before its first event; its type is on the page all the same.
        families = set(served.ask("metadata", limit="10000"))
        unknown = {name for query in boards.queries(SPAN) for name in series_in(query)} - names
        declared = {name: one for one in declared_metrics() for name in one.series}
        return {
            name
            for name in unknown
            if not {declared[name].name, declared[name].name.removesuffix("_total")} & families
            and not declared[name].module.startswith(tuple(ELSEWHERE))
        }

    wait_for(lambda: not missing(), f"the series {missing()}", PATIENCE_S)


@pytest.mark.parametrize("board", boards.BOARDS, ids=[board.name for board in boards.BOARDS])
def test_diagrams_show_what_happened(served: Prometheus, board: boards.Board) -> None:
    panels = {panel.title: panel for panel in board.panels}
    for title in WITH_RESULTS[board.name]:
        for query, _ in panels[title].queries:
            asked = selected(query, board.selectors).replace("$__rate_interval", SPAN)
            asked = asked.replace("$instance", ".*").replace("$model", ".*")
            wait_for(partial(served.values, asked), f"{title}: {asked}", PATIENCE_S)


def test_a_variable_selects_one_program(
    served: Prometheus, prometheus: tuple[Prometheus, dict[str, str]]
) -> None:
    page = prometheus[1]["prefill-0"]
    query = selected("vllm:num_requests_waiting", [f'instance=~"{page}"', 'model_name=~".*"'])
    assert len(served.values(query)) == 1
    assert len(served.values("vllm:num_requests_waiting")) > 1


def test_every_alert_is_evaluated_and_none_fires_for_a_healthy_cluster(served: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = served.ask("rules")["groups"]
        return list(group["rules"])

    wait_for(
        lambda: all(rule["health"] == "ok" for rule in rules()), "every alert to be evaluated", PATIENCE_S
    )
    assert {rule["name"] for rule in rules()} == {alert.name for alert in ALERTS}
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []
