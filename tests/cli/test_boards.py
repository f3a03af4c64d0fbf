# SPDX-License-Identifier: Apache-2.0
"""Boards: every metric is on one, every query names declared series, and Grafana can lay them out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mooncake.cli import boards
from mooncake.cli.boards import BOARDS, NOT_ON_A_BOARD, Board, board_of, dashboard, other_panels
from mooncake.cli.metric_declarations import PACKAGE, DeclaredMetric, declared_metrics
from mooncake.cli.panels import series_in

DECLARED = {name: one for one in declared_metrics() for name in one.series}
TARGET_LABELS = {"instance", "job", "model_name"}
"""Labels that Prometheus adds to every series, and vLLM's to its own."""
UNITS = {"short", "none", "s", "bytes", "Bps", "ops", "reqps", "percentunit"}
OWN_MODULES = {"boards.py", "alerts.py"}
EVERY = pytest.mark.parametrize("board", BOARDS, ids=[board.name for board in BOARDS])


def diagrams(board: Board) -> list[dict[str, Any]]:
    """Every diagram of a board as Grafana reads it, those in closed rows included."""
    rows = dashboard(board)["panels"]
    return [one for row in rows for one in (row, *row.get("panels", ())) if one["type"] != "row"]


def test_every_declared_metric_is_on_a_board_or_listed_as_without() -> None:
    shown = {
        name for board in BOARDS for one in diagrams(board) for target in one["targets"]
        for name in series_in(target["expr"])
    }  # fmt: skip
    missing = [one.name for one in declared_metrics() if not shown & set(one.series)]
    assert sorted(missing) == sorted(NOT_ON_A_BOARD)
    assert all(len(reason) > 20 for reason in NOT_ON_A_BOARD.values())


@EVERY
def test_queries_name_declared_series_by_their_labels(board: Board) -> None:
    for panel in (*board.panels, *other_panels(board)):
        assert panel.unit in UNITS, panel.title
        for query, legend in panel.queries:
            names = series_in(query)
            assert names and names <= DECLARED.keys() | {"up"}, query
            labels = {label for name in names - {"up"} for label in DECLARED[name].labels} | TARGET_LABELS
            grouped = re.findall(r"by \(([^)]*)\)", query)
            used = {label.strip() for group in grouped for label in group.split(",")} - {"le"}
            used |= set(re.findall(r"{(\w+)=", query))
            assert used <= labels, query
            in_legend = set(re.findall(r"{{(\w+)}}", legend))
            assert in_legend <= (used if grouped else labels), f"{legend} of {query}"


@EVERY
def test_grafana_can_lay_a_board_out(board: Board) -> None:
    shown = dashboard(board)
    assert (shown["uid"], shown["title"]) == (f"mooncake-{board.name}", board.title)
    every = [one for row in shown["panels"] for one in (row, *row.get("panels", ()))]
    assert len({one["id"] for one in every}) == len(every)
    taken: dict[tuple[int, int], str] = {}
    for one in every:
        at = one["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), one["title"]) == one["title"], f"{one['title']} overlaps"
    titles = [one["title"] for one in diagrams(board)]
    assert len(set(titles)) == len(titles), "two diagrams of one board have the same title"
    for row in shown["panels"]:
        if row["type"] == "row":
            assert row["collapsed"] == bool(row["panels"])


@EVERY
def test_diagrams_have_units_legends_descriptions_and_the_boards_variables(board: Board) -> None:
    variables = {one["name"]: one for one in dashboard(board)["templating"]["list"]}
    assert variables["source"]["type"] == "datasource" and variables["instance"]["includeAll"]
    assert ("model" in variables) == board.has_models
    for one in diagrams(board):
        assert one["fieldConfig"]["defaults"]["unit"] in UNITS
        assert one["datasource"]["uid"] == "${source}"
        named = {name for target in one["targets"] for name in series_in(target["expr"])} - {"up"}
        for name in named:
            text = DECLARED[name].text.rstrip(".")
            assert text in one["description"], f"{one['title']} lacks the meaning of {name}"
        for target in one["targets"]:
            assert target["legendFormat"]
            for variable in re.findall(r"\$(\w+)", target["expr"]):
                assert variable in variables.keys() | {"__rate_interval"}
            for name in series_in(target["expr"]):
                assert re.search(rf'{re.escape(name)}{{[^}}]*instance=~"\$instance"', target["expr"])


@EVERY
def test_in_kubernetes_a_board_shows_one_namespace(board: Board) -> None:
    shown = dashboard(board, "serving")
    variables = {one["name"]: one for one in shown["templating"]["list"]}
    assert variables["namespace"]["current"]["value"] == "serving"
    for name in variables.keys() - {"source", "namespace"}:
        assert 'namespace="$namespace"' in variables[name]["definition"], name
    every = [one for row in shown["panels"] for one in (row, *row.get("panels", ()))]
    queries = [target["expr"] for one in every for target in one.get("targets", ())]
    assert len(queries) > 10
    for query in queries:
        assert query.count('namespace="$namespace"') == len(re.findall(r'instance=~"\$instance"', query)) > 0
    assert "namespace" not in str(dashboard(board)["templating"]), "elsewhere no series has this label"


def test_a_metric_of_a_new_part_is_on_the_board_of_the_cluster() -> None:
    new = DeclaredMetric("mooncake_novelty_things_total", "counter", (), "Things.", "novelty/things.py")
    assert board_of(new).name == "cluster"
    assert board_of(DECLARED["mooncake_store_objects"]).name == "store"


def test_queries_for_a_server_have_no_variables() -> None:
    found = boards.queries("1m")
    assert len(found) > 100 and not any("$" in query for query in found)


def test_label_values_in_queries_are_those_of_the_code() -> None:
    """A misspelt value selects nothing, and no error says so."""
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name not in OWN_MODULES)
    wanted = {value for query in boards.queries() for value in re.findall(r'\w="(\w+)"', query)}
    assert wanted >= {"yes", "lost"}
    for value in wanted:
        assert f'"{value}"' in sources, f"no code gives a label the value {value!r}"
