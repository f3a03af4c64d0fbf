# SPDX-License-Identifier: Apache-2.0
"""What ``mooncake trace`` prints of an answer; the query itself is tested with a cluster."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from mooncake.cli import trace
from mooncake.cli.trace import FetchedTrace, show
from mooncake.tracing import Span
from tests.cli.conftest import Run

TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(name: str, parent: str, start_s: float, end_s: float, error: str = "") -> Span:
    found = Span(TRACE, name, parent, name, "mooncake-gateway", "host:1", start_s, end_s, error=error)
    found.attributes = {"mooncake.tokens": 7}
    return found


SPANS = [
    span("root", "", 100.0, 104.0),
    span("second", "root", 102.0, 104.0),
    span("first", "root", 100.0, 102.0),
    span("inner", "first", 101.0, 102.0, "worker_failed"),
]


def shown(width: int, missing: list[str] | None = None, spans: list[Span] = SPANS) -> list[str]:
    output = io.StringIO()
    found = FetchedTrace("cmpl-1", "r", TRACE, spans, missing or [])
    show(Console(file=output, width=width), found)
    return output.getvalue().splitlines()


def test_children_stand_below_their_parent_in_order() -> None:
    heading, _, *rows = shown(180)
    assert "cmpl-1" in heading and TRACE in heading and "4.000 s, 4 spans of 1 processes" in heading
    assert [row.split()[0] for row in rows] == ["root", "first", "inner", "second"]
    assert [len(row) - len(row.lstrip()) for row in rows] == [0, 2, 4, 2]


def test_a_client_may_name_a_span_of_the_tree_as_the_root_s_parent() -> None:
    *_, root, first, inner, second = shown(180, spans=[span("root", "inner", 100.0, 104.0), *SPANS[1:]])
    assert [row.split()[0] for row in (root, first, inner, second)] == ["root", "first", "inner", "second"]


def test_a_child_may_begin_before_the_root_by_a_slow_clock() -> None:
    *_, root, child = shown(180, spans=[SPANS[0], span("child", "root", 99.997, 103.9)])
    assert [row.split()[0] for row in (root, child)] == ["root", "child"] and "-3.00 ms" in child


def test_bars_are_on_one_axis() -> None:
    *_, root, first, inner, second = shown(180)
    assert [row.count("━") for row in (root, first, inner, second)] == [48, 24, 12, 24]
    assert root.index("━") == first.index("━")
    assert second.index("━") == inner.index("━") + 12 == first.index("━") + 24


def test_a_wide_terminal_has_attributes_and_a_narrow_one_the_bars() -> None:
    assert any("error worker_failed, tokens 7" in row for row in shown(180))
    narrow = shown(80)
    assert not any("tokens" in row for row in narrow)
    assert sum("━" in row for row in narrow) == 4 and max(map(len, narrow)) <= 80


def test_a_very_narrow_terminal_cuts_names_before_times() -> None:
    text = "\n".join(shown(30))
    assert text.count("1.000 s") == 2 and text.count("0.00 ms") == 2 and "seco…" in text


def test_a_process_that_did_not_answer_is_named() -> None:
    assert shown(180, ["host:2"])[-1] == "host:2 did not return its spans"


def test_a_file_that_would_not_be_written_is_refused_before_the_gateway_is_asked(
    mooncake: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(name: str, url: str, key: str) -> bytes:
        asked.append(name)
        return b"{}"

    monkeypatch.setattr(trace, "_fetch", fetch)
    done = mooncake("trace", "cmpl-1", "--json", "--perfetto", str(tmp_path / "trace.json"))
    assert done.returncode == 2 and "allowed: left out with --json" in done.stderr, done
    done = mooncake("trace", "cmpl-1", "--perfetto", str(tmp_path / "none" / "trace.json"))
    assert done.returncode == 2 and "error: --perfetto is " in done.stderr, done
    assert not asked and not [*tmp_path.iterdir()]
    assert mooncake("trace", "cmpl-1", "--json").stdout == "{}\n"
