# SPDX-License-Identifier: Apache-2.0
"""``mooncake simulate`` and ``mooncake plan`` as users call them."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from mooncake.cli.simulation import grade
from mooncake.cli.simulation.plan import read_prices
from mooncake.errors import InvalidArgument
from mooncake.sim.serving.node_costs import load_costs
from tests.cli.conftest import Run
from tests.sim.silicon.row_table import random_rows, write_rows

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


def test_a_page_that_cannot_be_drawn_is_refused_before_the_run(
    mooncake: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in ("simulate", "replay"):
        done = mooncake(command, LOAD, "--html", str(tmp_path / "r.html"))
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr.startswith("error: matplotlib is not installed; `pip install "), done
    assert not [*tmp_path.iterdir()]


def test_a_plan_without_objectives_names_none(mooncake: Run) -> None:
    few = "poisson:rate=1,requests=3"
    words = ["--cluster", "1P1D", "--no-reuse", "--slo-ttft", "0"]
    done = mooncake("plan", few, *words)
    assert done.stdout.startswith(f"{few}: 90% of requests with TBT <= 100 ms\n"), done
    done = mooncake("plan", few, *words, "--slo-tbt", "0")
    assert done.stdout.startswith(f"{few}: 90% of requests completed\n"), done


def test_requests_that_fit_no_node_are_in_the_table(mooncake: Run) -> None:
    done = mooncake("simulate", "poisson:rate=2,requests=9,input_tokens=90000000", "--cluster", "2xchunked")
    assert done.returncode == 0, done.stderr
    assert re.search(r"2xchunked overlap +0 \+ \d failed +0 \(0.0%\)", done.stdout), done.stdout


def test_costs_of_measured_rows_have_errors(mooncake: Run, tmp_path: Path) -> None:
    document = tmp_path / "p.json"
    random_rows(tmp_path / "rows.csv", 200)
    costs = [f"{tmp_path / 'rows.csv'}:maker/Llama-3.1-8B@{one}/engine/tp2" for one in ("h100_sxm", "h200")]
    done = mooncake("simulate", LOAD, "--cluster", "2P2D", "--costs", costs[0], "--policy", "random")
    assert done.returncode == 0, done.stderr
    assert "llama-3.1-8b on 2 x h100 (measured rows)" in " ".join(done.stdout.split())
    words = ["--costs", costs[0], "--costs", costs[1], "--policy", "random", "--no-reuse"]
    few = LOAD.replace("requests=120", "requests=40")
    done = mooncake("plan", few, "--slo-ttft", "9", "--slo-tbt", "0.5", *words, "--json", str(document))
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "(physical estimate)" in shown and "PHYSICAL ESTIMATE" in shown
    found = json.loads(document.read_text())
    for name in costs:
        best, (low, high) = found["plans"][name]["best"], found["bounds"][name]
        nodes = [one["num_prefill"] + one["num_decode"] for one in (low, best, high) if one is not None]
        assert nodes == sorted(nodes) and len(nodes) >= 2


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
    shown = [line for line in done.stdout.splitlines() if line.strip().startswith(("1P", "2P", "3P", "4P"))]
    assert len(shown) == 1 and "llama3-70b-8xH100 " in shown[0], "a pipe has room for whole names"
    one_pool = next(line for line in done.stdout.splitlines() if " x chunked" in line)
    assert one_pool.split().count("-") == 2, (
        "colocated nodes without a pool use no network and no memory of it"
    )


AGENTS = (
    "agentic:sessions=20,turns=4,requests=100,common_tokens=4000,first_tokens=2000,turn_tokens=410,"
    "output_tokens=180,block_tokens=256"
)
POOL = "store_tokens=1500000,store_ssd_tokens=12000000"
TABLE = [
    *("--cluster", "2 x H100=1xchunked_prefix@llama3-70b-fp8-2xH100"),
    *("--cluster", f"H100 + H200=1P1D@llama3-70b-fp8-1xH100+llama3-70b-fp8-1xH200,{POOL}"),
    *("--cluster", f"spot H100 + H200=1P1D@llama3-70b-fp8-1xH100:spot+llama3-70b-fp8-1xH200,{POOL}"),
]


def test_plan_compares_the_cost_per_unit_of_throughput(mooncake: Run, tmp_path: Path) -> None:
    page, document = tmp_path / "p.html", tmp_path / "p.json"
    # Within three minutes of trace, interruptions must be frequent to strike at all; with strict objectives
    # few requests are enough to find the limits.
    spot = ["--with", "interruptions_per_hour=100", "--with", "restart_s=2"]
    strict = ["--slo-ttft", "1", "--slo-tbt", "0.027"]
    done = mooncake("plan", AGENTS, *TABLE, *spot, *strict, "--html", str(page), "--json", str(document))
    assert done.returncode == 0, done.stderr
    rows = json.loads(document.read_text())["clusters"]
    assert [row["name"] for row in rows] == ["2 x H100", "H100 + H200", "spot H100 + H200"]
    assert [round(row["dollars_per_hour"], 2) for row in rows] == [5.08, 6.24, 5.13]
    for row in rows:
        assert row["attainment"] >= 0.9 and row["load"] > 0
        assert row["relative_throughput"] == pytest.approx(row["good_per_s"] / rows[0]["good_per_s"])
        assert row["dollars_per_unit"] == pytest.approx(row["dollars_per_hour"] / row["relative_throughput"])
        assert f"{row['dollars_per_unit']:.2f}" in done.stdout
    assert rows[2]["num_interruptions"] > 0 == rows[1]["num_interruptions"]
    html = page.read_text()
    for heading in ("relative\nthroughput", "$/h per\nunit", "$ / 1,000\ngood", "good\nlost"):
        assert heading in html
    assert "sessions" in done.stdout


def test_tiers_are_those_of_the_first_cluster_with_its_own_memory(mooncake: Run) -> None:
    words = ["--cluster", "2P1D,cache_tokens=51200", "--slo-ttft", "9"]
    done = mooncake("plan", "poisson:rate=1,requests=20", *words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"memory of 2 nodes +102,400 ", done.stdout), done.stdout
    done = mooncake("plan", "poisson:rate=1,requests=20", "--cluster", "3xprefix", *words[2:])
    num_tokens = 3 * load_costs("llama3-70b-8xA800").device_tokens
    assert re.search(rf"memory of 3 nodes +{num_tokens:,} ", done.stdout), done.stdout


def test_plan_prints_the_end_of_its_search_as_a_bound(mooncake: Run) -> None:
    few = "poisson:rate=0.0001,requests=3"
    done = mooncake("plan", few, "--cluster", "one=1P1D", "--cluster", "more=2P2D", "--no-reuse")
    assert done.returncode == 0, done.stderr
    one, more = (line.split() for line in done.stdout.splitlines() if "1024.00x" in line)
    assert one[:4] == ["one", "27.04", "≥", "1024.00x"] and one[6:8] == ["1.00x", "27.04"]
    assert more[:4] == ["more", "54.08", "≥", "1024.00x"] and more[6:8] == ["-", "-"]
    assert "the search ends at 1,024 times the trace's load" in " ".join(done.stdout.split())


def test_plan_with_spot_leaves_out_hardware_without_a_spot_price(mooncake: Run) -> None:
    words = ["plan", LOAD, "--slo-ttft", "5", "--with", "spot=prefill", "--no-reuse", "--no-intervals"]
    done = mooncake(*words)
    assert done.returncode == 0, done.stderr
    assert "llama3-70b-8xH100:spot" in done.stdout and "A800" not in done.stdout
    assert done.stderr.startswith("note: llama3-70b-8xA800 is left out: it has no spot price")
    named = mooncake(*words, "--costs", "llama3-70b-8xA800")
    assert named.returncode == 2 and "allowed: a name with a spot price: A100, H100" in named.stderr


def test_plan_tries_each_pair_of_kinds(mooncake: Run, tmp_path: Path) -> None:
    page, document = tmp_path / "p.html", tmp_path / "p.json"
    kinds = ("llama3-70b-fp8-1xH100", "llama3-70b-fp8-1xH200")
    words = ["--costs", kinds[0], "--costs", kinds[1], "--baseline", kinds[1], "--json", str(document)]
    load = "poisson:rate=1,requests=40,input_tokens=2000,spread=0.3"
    done = mooncake("plan", load, *words, "--html", str(page))
    assert done.returncode == 0, done.stderr
    plans = json.loads(document.read_text())["plans"]
    first, second = kinds
    assert list(plans) == [first, second, f"{first}+{second}", f"{second}+{first}"]
    best = plans[f"{first}+{second}"]["best"]
    assert (best["hardware"], best["decode_hardware"]) == kinds
    assert best["dollars_per_hour"] == pytest.approx(best["num_prefill"] * 2.54 + best["num_decode"] * 3.70)
    assert plans[f"{first}+{second}"]["one_pool"] is None
    assert "$/h per\nunit" in page.read_text() and f"{first}+{second}" in page.read_text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cluster", "1P1D", "--baseline", "x"], "--baseline is 'x'"),
        (["--baseline", "x"], "--baseline is 'x'"),
        (["--cluster", "1P1D@abacus"], "costs is 'abacus'"),
        (["--cluster", "1P1D@llama3-70b-8xH100+llama3-70b-fp8-1xH200"], "kv_bytes_per_token of"),
        (["--cluster", "1P1D@llama3-70b-8xH100+llama3-70b-8xH200:spot"], "spot instances only for prefill"),
        (["--cluster", "1xvllm@llama3-70b-8xH100:spot"], "spot is 'prefill'"),
        (["--cluster", "1P1D,speed=1"], "--with is 'speed=1'"),
        (["--cluster", "1P1D", "--costs", "llama3-70b-8xA800:spot"], "--gpu-prices is 'llama3-70b-8xA800'"),
        (["--cluster", "1P1D", "--costs", "a", "--costs", "b"], "--costs is ['a', 'b']"),
        (["--cluster", "a=1P1D", "--cluster", "a=2P1D"], "--cluster is 'a'"),
    ],
)
def test_bad_comparisons_are_one_line(mooncake: Run, words: list[str], named: str) -> None:
    done = mooncake("plan", LOAD, *words)
    assert done.returncode == 2
    assert named in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["simulate", "none.jsonl"], "TRACE is 'none.jsonl'"),
        (["simulate", LOAD, "--policy", "magic"], "--policy is 'magic'"),
        (["simulate", LOAD, "--costs", "abacus"], "costs is 'abacus'"),
        (["simulate", LOAD, "--speedup", "0"], "--speedup is 0.0"),
        (["simulate", LOAD, "--speedup", "1e-300"], "--speedup is 1e-300; allowed: a number from 0.001"),
        (["simulate", LOAD, "--speedup", "inf"], "--speedup is inf; allowed: a number from 0.001"),
        (["simulate", LOAD, "--speedup", "nan"], "--speedup is nan"),
        (["simulate", LOAD, "--slo-ttft", "inf"], "--slo-ttft is inf; allowed: a finite number of seconds"),
        (["simulate", LOAD, "--slo-tbt", "inf"], "--slo-tbt is inf"),
        (["simulate", LOAD, "--json-rows"], "--json-rows is True; allowed: left out without --json"),
        (["grade", "--fit-on", "none.csv", "--fit-share", "0.9"], "--fit-share is 0.9"),
        (["plan", LOAD, "--gpu-prices", "none.toml"], "--gpu-prices is 'none.toml'"),
        (["plan", LOAD, "--attainment", "2"], "attainment is 2.0"),
        (["plan", LOAD, "--speedup", "0"], "--speedup is 0.0"),
        (["plan", LOAD, "--slo-tbt", "inf"], "--slo-tbt is inf"),
        (
            ["plan", LOAD, "--with", "mode=chunked"],
            "--with is 'mode=chunked'; allowed: another field, or given",
        ),
        (["plan", LOAD, "--with", "num-decode=3"], "--with is 'num-decode=3'"),
        (["plan", LOAD, "--with", "pipeline_nodes=2"], "--with is 'pipeline_nodes=2'"),
        (["plan", LOAD, "--with", "detail=step"], "--with is 'detail=step'"),
    ],
)
def test_bad_input_is_one_line(mooncake: Run, words: list[str], named: str) -> None:
    done = mooncake(*words)
    assert done.returncode == 2
    assert named in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_the_example_of_prices_is_the_default() -> None:
    example = Path(__file__).parents[3] / "examples" / "gpu-prices.toml"
    assert read_prices(example) == read_prices(None)


@pytest.mark.parametrize("content", ["", "gpu = 3", "dram_tb = -1\n[gpu]\nH100 = 1", "\xff"])
def test_prices_that_are_wrong_are_named_with_their_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidArgument, match=r"--gpu-prices is '.*prices\.toml'"):
        read_prices(file)


def test_grade_of_a_run_and_of_rows(mooncake: Run, tmp_path: Path) -> None:
    requests, free_at = [], 0.0
    for number in range(40):
        at, num_output = number * 0.5, 5 + number % 7
        free_at = max(free_at, at) + 0.1 * (num_output + 1)
        times = {
            "queued_ts": at,
            "first_token_ts": free_at - 0.1 * (num_output - 1),
            "last_token_ts": free_at,
        }
        lengths = {"input_toks": 10, "output_toks": num_output}
        requests.append(json.dumps({"request_id": f"r{number}", **lengths, **times}))
    (tmp_path / "requests.jsonl").write_text("\n".join(requests))
    (tmp_path / "meta.json").write_text('{"model": "one at a time", "engine_kwargs": {"max_num_seqs": 1}}')
    done = mooncake("grade", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["num_fitted"], found["num_graded"], len(found["requests"])) == (20, 20, 40)
    assert abs(found["errors"]["tpot"]["mean"]["error"]) < 0.03
    assert (found["default_limits"], found["span_s"] < 60) == (["max_num_batched_tokens"], True)
    shown = " ".join(mooncake("grade", str(tmp_path)).stdout.split())
    assert "TTFT mean" in shown and "days" not in shown
    assert "Limits: max_num_seqs 1, max_num_batched_tokens 8192 (default)." in shown
    in_ns = [
        {name: value * 10**9 if name.endswith("_ts") else value for name, value in json.loads(line).items()}
        for line in requests
    ]
    in_ns[7]["first_token_ts"] = in_ns[7]["last_token_ts"] = None
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, in_ns)))
    shown = " ".join(mooncake("grade", str(tmp_path)).stdout.split())
    assert "days: are its times in seconds?" in shown
    assert "Requests without times: 1; --json predicts them." in shown

    rows = tmp_path / "rows.csv"
    heading = "id,backend,model_path,system,mode,isl,osl,batch_size,tp_size,silicon_ttft_ms,silicon_tpot_ms\n"
    lines = [f"{n},e,m,s,agg,1024,64,{1 + n % 9},1,{100 + 10 * (n % 9)},{5 + n % 9}\n" for n in range(60)]
    rows.write_text(heading + "".join(lines))
    found = json.loads(mooncake("grade", "--fit-on", str(rows), "--test-on", str(rows), "--json").stdout)
    assert found["num_graded"] == 60 and found["errors"]["all"]["tpot"]["all"]["median"] < 0.05
    assert found["mode"]["cells"] == found["mode_with_cards"]["cells"] == 0, "there is nothing to compare"
    assert found["num_same_measurement"] == 60 and found["rows"][0]["standing"] == "same measurement"
    unseen = tmp_path / "unseen.csv"
    unseen.write_text(rows.read_text().replace(",m,s,", ",other,card,"))
    found = json.loads(mooncake("grade", "--fit-on", str(rows), "--test-on", str(unseen), "--json").stdout)
    one = found["rows"][0]
    assert "60 of 60 fitted rows have a card or a model of which no facts are known" in " ".join(
        found["notes"]
    )
    assert one["standing"] == "new model and card" and one["ttft_high_s"] > 10 * one["ttft_low_s"]
    rows.write_text(heading + lines[0] + "x,e,m,s,agg,1024,64,8,1,slow,5\n")
    refused = mooncake("grade", "--fit-on", str(rows))
    assert refused.returncode == 2 and "row 2, column silicon_ttft_ms" in refused.stderr
    assert "--fit-on is " in refused.stderr and "line 3" in refused.stderr
    rows.write_text(heading + "".join(lines))
    assert "60" in mooncake("grade", "--fit-on", str(rows), "--test-on", str(rows)).stdout
    refused = mooncake("grade", "--test-on", str(rows))
    assert refused.returncode == 2 and "not both" in refused.stderr
    assert "RUN_DIR is 'missing'" in mooncake("grade").stderr


def test_rows_without_a_concurrency_are_counted(mooncake: Run, tmp_path: Path) -> None:
    random_rows(tmp_path / "rows.csv", 40)
    text = (tmp_path / "rows.csv").read_text()
    (tmp_path / "bare.csv").write_text(re.sub("silicon_concurrency=[0-9]+", "", text, count=3))
    words = ("grade", "--fit-on", str(tmp_path / "rows.csv"), "--test-on")
    note = "3 of 40 predicted rows state no concurrency"
    assert note in " ".join(mooncake(*words, str(tmp_path / "bare.csv")).stdout.split())
    (found,) = json.loads(mooncake(*words, str(tmp_path / "bare.csv"), "--json").stdout)["notes"]
    assert note in found
    assert json.loads(mooncake(*words, str(tmp_path / "rows.csv"), "--json").stdout)["notes"] == []


def test_rows_without_times_are_predicted(mooncake: Run, tmp_path: Path) -> None:
    random_rows(tmp_path / "rows.csv", 40)
    with (tmp_path / "rows.csv").open(newline="") as file:
        lines: list[dict[str, object]] = [dict(one) for one in csv.DictReader(file)]
    no_ttft, no_times = {"silicon_ttft_ms": ""}, {"silicon_ttft_ms": "N/A", "silicon_tpot_ms": "nan"}
    words = ("grade", "--fit-on", str(tmp_path / "rows.csv"), "--test-on", str(tmp_path / "some.csv"))
    write_rows(tmp_path / "some.csv", [lines[0] | no_ttft, lines[1] | no_times, *lines[2:10]])
    found = json.loads(mooncake(*words, "--json").stdout)
    assert (found["num_predicted"], found["num_graded"], found["num_without_a_time"]) == (10, 9, 2)
    assert [found["errors"]["all"][name]["all"]["num_rows"] for name in ("ttft", "tpot")] == [8, 9]
    by_id = {row["id"]: row for row in found["rows"]}
    assert len(by_id) == 10 and all(row["ttft_s"] > 0 and row["tpot_s"] > 0 for row in by_id.values())
    assert by_id["0"]["measured_ttft_s"] is None and by_id["1"]["measured_tpot_s"] is None
    assert by_id["0"]["measured_tpot_s"] == float(str(lines[0]["silicon_tpot_ms"])) / 1000
    printed = " ".join(mooncake(*words).stdout.split())
    assert "2 of 10 predicted rows lack a measured time" in printed and "8/9" in printed

    # A file without any times can be predicted; of one to fit on, rows that lack a time are counted.
    write_rows(tmp_path / "some.csv", [one | no_times for one in lines[:5]])
    found = json.loads(mooncake(*words, "--json").stdout)
    assert found["num_graded"] == 0 and len(found["rows"]) == 5
    assert "5 of 5 predicted rows lack" in " ".join(mooncake(*words).stdout.split())
    write_rows(tmp_path / "rows.csv", [lines[0] | no_ttft, *lines[1:]])
    assert json.loads(mooncake(*words, "--json").stdout)["num_left_out"] == 1
    found = json.loads(mooncake(*words[:3], "--json").stdout)
    assert (found["num_fitted"], found["num_predicted"], found["num_left_out"]) == (19, 21, 0)


def test_of_too_many_rows_a_part_is_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_rows(tmp_path / "rows.csv", 40)
    monkeypatch.setattr(grade, "MOST_ROWS", 15)
    halves = grade._halves(tmp_path / "rows.csv", tmp_path / "rows.csv", 3)
    assert (len(halves.rows), len(halves.tested), halves.num_left_out) == (15, 40, 25)
    halves = grade._halves(tmp_path / "rows.csv", None, 3)
    assert (len(halves.rows), len(halves.tested), halves.num_left_out) == (15, 20, 5)
    assert len({row.id for row in (*halves.rows, *halves.tested)}) == 35
