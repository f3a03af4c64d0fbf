# SPDX-License-Identifier: Apache-2.0
"""Results as JSON and as text, and that every bench can be run."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench import report
from bench.paper_table import Check, Table, exactly
from bench.report import LEAST_FOR_P99, Result, decoded, encoded, measured, p99, render
from tests.cluster import wait_for

ROOT = Path(__file__).parents[2]
LIBRARIES = {
    "clients_reference",
    "forked_clients",
    "drawn_workloads",
    "policy_workloads",
    "request_load",
    "__init__",
    "doctor_faults",
    "hit_rate",
    "paper_experiments",
    "paper_scheduling",
    "paper_table",
    "render",
    "report",
    "session_replay",
    "store_reference",
    "summary",
}
BENCHES = {path.stem for path in (ROOT / "bench").glob("*.py")} - LIBRARIES
ASKED = argparse.Namespace(save=False, json=False, quick=True)


def result() -> Result:
    made = Result(
        "x", "python -m bench.x", "0123456789abcdef", True, "2026-01-02T03:04:05+00:00", "a machine", [1.0]
    )
    table = made.table("what", ("GB/s", 2), "keys/s", title="A table", note="a note")
    table.add("put", 1.239, 123456.0, samples={"s": [0.1, 0.2]})
    table.add("get", None, 7)
    made.note("can't show: a network")
    return made


def test_a_text_names_the_circumstances_of_its_numbers() -> None:
    text = render(result())
    for part in ("command: python -m bench.x", "machine: a machine", "0123456789ab, changed since"):
        assert part in text
    for part in ("2026-01-02", "## A table", "a note", "can't show: a network"):
        assert part in text
    assert "| put  | 1.24 | 123,456 |" in text and "| get  |      |       7 |" in text


def test_json_keeps_everything_the_samples_too() -> None:
    assert decoded(encoded(result())) == result()
    assert json.loads(encoded(result()))["tables"][0]["samples"] == [{"s": [0.1, 0.2]}, {}]
    with pytest.raises(msgspec.ValidationError, match="commit"):
        decoded(b'{"bench": "x", "command": "y"}')


def test_a_run_is_kept_and_one_that_breaks_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "KEPT", tmp_path / "kept")
    with measured("x", ASKED) as made:
        made.table("what").add("put")
    kept = decoded((tmp_path / "kept" / "x.json").read_bytes())
    assert kept.commit == "unknown" or re.fullmatch("[0-9a-f]{40}", kept.commit)
    assert kept.machine and kept.date and len(kept.load_before) == len(kept.load_after) == 3
    assert (tmp_path / "kept" / "x.txt").read_text() == render(kept)
    with pytest.raises(ZeroDivisionError), measured("y", ASKED):
        raise ZeroDivisionError
    assert not (tmp_path / "kept" / "y.json").exists()


def test_a_percentile_needs_samples() -> None:
    assert p99([1.0] * (LEAST_FOR_P99 - 1)) is None
    assert p99([*map(float, range(200))]) == 198.0


def test_a_table_leaves_out_a_percentile_of_too_few_samples() -> None:
    table = result().table("what", ("p99 us", 1), ("p50 us", 1))
    enough = [1.0] * LEAST_FOR_P99
    table.add("few", 2.0, 1.0, samples={"s": enough[1:]})
    table.add("enough", 2.0, 1.0, samples={"s": enough, "other": [1.0]})
    table.add("counted", 2.0, 1.0, num_samples=LEAST_FOR_P99)
    table.add("counted, few", 2.0, 1.0, samples={"s": enough}, num_samples=5)
    table.add("none", None, 1.0)
    assert [row[1] for row in table.rows] == [None, 2.0, 2.0, None, None]
    assert all(row[2] == 1.0 for row in table.rows)
    with pytest.raises(AssertionError, match="a p99 without a number of samples"):
        table.add("unknown", 2.0, 1.0)


def test_results_that_are_kept_are_rendered_from_their_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.render", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    explained = (report.SAVED / "README.md").read_text()
    for text in report.SAVED.glob("*.txt"):
        is_rendered = text.with_suffix(".json").exists()
        assert is_rendered or text.stem in explained, (
            f"{text.name} has no JSON, and README.md does not explain why"
        )


def test_the_source_of_reference_values_is_named() -> None:
    made = result()
    Table("of a paper", [exactly("a", 1.0, 1.0, 2), Check(what="b", ours=2.0)]).show(made)
    Table("of ours", [exactly("a", 1.0, 1.2, 2)], reference="reference").show(made)
    of_paper, of_ours = made.tables[1:]
    assert [column.name for column in of_paper.columns][1] == "paper"
    assert [column.name for column in of_ours.columns][1] == "reference"
    assert [row[-1] for row in of_paper.rows] == ["PASS", "shown"] and of_ours.rows[0][-1] == "SHORT"


def test_what_is_short_and_explained_fails_no_run() -> None:
    known = Check(what="order", ours=0.5, low=1.0, is_explained=True)
    assert known.is_short and known.cells()[-1] == "short, explained"
    assert Table("", [known]).num_short == 0
    assert Table("", [Check(what="order", ours=0.5, low=1.0)]).num_short == 1


def listed() -> list[str]:
    done = subprocess.run([ROOT / "scripts" / "bench", "--list"], capture_output=True, text=True, check=True,
                          env={**os.environ, "VENV": sys.prefix})  # fmt: skip
    return done.stdout.split()


def test_every_bench_is_on_the_list_and_no_library_is() -> None:
    assert sorted(listed()) == sorted(BENCHES)


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "bench", *words],
        capture_output=True, text=True, timeout=120, env={**os.environ, "VENV": sys.prefix},
    )  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("name", ["simulate", "restart", "rdma"])
def test_the_short_ones_run(name: str) -> None:
    done = ran(name, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine:" in done.stdout or done.stdout.startswith("NOT RUN:")


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(BENCHES))
def test_every_bench_says_what_it_takes(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout and "--save" in done.stdout


def test_an_unknown_bench_is_named() -> None:
    done = ran("nonsense")
    assert done.returncode == 2 and "no bench nonsense; one of:" in done.stderr


@pytest.mark.processes
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="only root with tc makes network namespaces"
)
def test_the_bench_of_rails_leaves_no_namespace_when_it_is_ended() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.rails", "--quick"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    def namespaces() -> list[str]:
        shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return [line for line in shown.splitlines() if line.split()[0].endswith(f"-{process.pid}")]

    try:
        wait_for(lambda: len(namespaces()) == 2 or process.poll() is not None, "both namespaces", 60.0)
        if process.poll() is not None:
            pytest.skip("only root with tc makes network namespaces: this kernel refuses it")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert namespaces() == []
    finally:
        process.kill()
        process.communicate()
