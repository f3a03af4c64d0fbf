# SPDX-License-Identifier: Apache-2.0
"""``mooncake simulate`` and ``mooncake plan`` as users call them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mooncake.cli.simulation.plan import read_prices
from tests.cli.conftest import Run

LOAD = "poisson:rate=2,requests=120,input_tokens=4000,prefixes=40,prefix_tokens=2048"


def test_simulate_compares_and_reports(mooncake: Run, tmp_path: Path) -> None:
    page, document = tmp_path / "r.html", tmp_path / "r.json"
    words = ["--cluster", "2P2D", "4xchunked", "--policy", "cache_aware", "random"]
    done = mooncake("simulate", LOAD, *words, "--html", str(page), "--json", str(document), "--json-rows")
    assert done.returncode == 0, done.stderr
    names = ["2P2D cache_aware", "2P2D random", "4xchunked cache_aware", "4xchunked random"]
    assert all(name in done.stdout for name in names)
    runs = json.loads(document.read_text())["runs"]
    assert [run["name"] for run in runs] == names
    for run in runs:
        assert run["summary"]["num_requests"] == 120 == len(run["requests"]["ttft_s"])
    hits = {run["name"]: run["summary"]["hit_rate"] for run in runs}
    for name, hit_rate in hits.items():
        # Some 4 of 8 blocks are one of 40 beginnings; chunked keeps no prefixes.
        assert 0.1 < hit_rate < 0.4 if name.startswith("2P2D") else hit_rate == 0, name
    assert len({run["summary"]["ttft_s"]["mean"] for run in runs}) == 4, "four runs, not one four times"
    html = page.read_text()
    assert html.count("<svg") == 7 and html.count("</svg>") == 7
    assert all(name in html for name in names)
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import""", html), "it loads nothing"


def test_a_broken_row_leaves_nothing_behind(mooncake: Run, tmp_path: Path) -> None:
    row = '{"timestamp": %s, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    trace, document = tmp_path / "trace.jsonl", tmp_path / "r.json"
    trace.write_text(row % 0 + row % 3000 + row % -1)
    done = mooncake("simulate", str(trace), "--cluster", "1P1D", "--policy", "load", "--json", str(document))
    assert done.returncode == 2
    assert "row 3" in done.stderr and "timestamp" in done.stderr
    assert done.stdout == "" and not document.exists()


def test_plan_finds_a_cluster_and_what_it_costs(mooncake: Run, tmp_path: Path) -> None:
    prices, document = tmp_path / "prices.toml", tmp_path / "p.json"
    prices.write_text("[gpu]\nH100 = 2.54\n")
    words = ["--costs", "llama3-70b-8xH100", "--policy", "cache_aware", "--json", str(document)]
    done = mooncake("plan", LOAD, "--slo-ttft", "5", "--gpu-prices", str(prices), *words)
    assert done.returncode == 0, done.stderr
    [plan] = json.loads(document.read_text())["plans"].values()
    best = plan["best"]
    assert best["meets"] and best["attainment"] >= 0.9
    assert best["dollars_per_hour"] == pytest.approx((best["num_prefill"] + best["num_decode"]) * 8 * 2.54)
    less = {one["note"]: one for one in plan["sensitivity"]}
    assert all(not one["meets"] for note, one in less.items() if note.endswith("node less"))
    assert "Around the cheapest" in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["simulate", "none.jsonl"], "TRACE is 'none.jsonl'"),
        (["simulate", LOAD, "--policy", "magic"], "--policy is 'magic'"),
        (["simulate", LOAD, "--costs", "abacus"], "costs is 'abacus'"),
        (["simulate", LOAD, "--speedup", "0"], "--speedup is 0.0"),
        (["plan", LOAD, "--gpu-prices", "none.toml"], "--gpu-prices is 'none.toml'"),
        (["plan", LOAD, "--attainment", "2"], "attainment is 2.0"),
        (["plan", LOAD, "--speedup", "0"], "--speedup is 0.0"),
    ],
)
def test_bad_input_is_one_line(mooncake: Run, words: list[str], named: str) -> None:
    done = mooncake(*words)
    assert done.returncode == 2
    assert named in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_the_example_of_prices_is_the_default() -> None:
    example = Path(__file__).parents[3] / "examples" / "gpu-prices.toml"
    assert read_prices(example) == read_prices(None)
