# SPDX-License-Identifier: Apache-2.0
"""The interpretation of options for requests and machines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mooncake.cli.simulation.options import cluster_of, offer_of, requests_of
from mooncake.errors import InvalidArgument
from mooncake.sim.traces.trace import TraceOptions
from tests.cli.conftest import Run
from tests.sim.silicon.row_table import random_rows

COSTS = "llama3-70b-8xA800"


def test_short_forms_of_clusters() -> None:
    apart = cluster_of("6p10D", COSTS, ["cache-tokens=1000000", "detail=step"], 64)
    assert (apart.num_prefill, apart.num_decode, apart.mode) == (6, 10, "disaggregated")
    assert (apart.node_costs.cache_tokens, apart.detail, apart.block_tokens) == (1_000_000, "step", 64)
    pool = cluster_of("16xchunked", COSTS, [], 512)
    assert (pool.num_prefill + pool.num_decode, pool.mode) == (16, "chunked")


def test_names_costs_and_fields_of_one_cluster() -> None:
    costs = "llama3-70b-fp8-1xH100:spot+llama3-70b-fp8-1xH200"
    one = offer_of(f"mixed=2P1D1S@{costs},store_tokens=700,restart_s=60", COSTS, ["restart_s=5"], 64)
    assert (one.name, one.hardware, one.decode_hardware) == ("mixed", *costs.replace(":spot", "").split("+"))
    spec = one.spec
    assert (spec.num_prefill, spec.num_decode, spec.num_store, spec.store_tokens) == (2, 1, 1, 700)
    assert spec.spot == "prefill" and spec.restart_s == 60
    assert spec.node_costs.device_tokens < spec.decode_node_costs.device_tokens
    plain = offer_of("1xchunked_prefix", COSTS, [], 64)
    assert (plain.name, plain.hardware, plain.decode_hardware) == ("1xchunked_prefix", COSTS, COSTS)
    assert plain.spec.decode_costs is None and plain.spec.mode == "chunked_prefix"


def test_costs_from_measured_rows(tmp_path: Path) -> None:
    rows = random_rows(tmp_path / "rows.csv", 60)
    card = next(row.named("system") for row in rows if not row.is_disaggregated)
    name = f"{tmp_path / 'rows.csv'}:maker/Llama-3.1-8B@{card}/engine/tp2"
    one = offer_of(f"2P1D@{name},restart_s=60", COSTS, [], 64)
    hardware = f"Llama-3.1-8B-2x{card.partition('_')[0].upper()}"
    assert (one.hardware, one.decode_hardware) == (hardware, hardware)
    costs = one.spec.node_costs
    assert costs.num_gpus == 2 and costs.has_errors and costs.decode.seconds(1, 1000) > 0
    assert cluster_of("1P1D", name, [], 64).node_costs == costs
    with pytest.raises(InvalidArgument, match="row 1, column mode"):
        (tmp_path / "bad.csv").write_text((tmp_path / "rows.csv").read_text().replace("agg", "half"))
        cluster_of("1P1D", name.replace("rows.csv", "bad.csv"), [], 64)


def test_more_load_is_more_agents() -> None:
    agents = requests_of("agentic:sessions=10,turns=5,requests=100", TraceOptions())
    more, faster = agents.at_load(1.5)
    assert faster == 1 and len(list(more)) == 150 and len({row.session for row in more}) >= 15
    some = requests_of("agentic:sessions=10,turns=5,requests=100", TraceOptions(num_rows=40))
    assert [len(list(some.at_load(load)[0])) for load in (0.5, 1.0, 2.0)] == [20, 40, 80]
    other = requests_of("poisson:requests=50", TraceOptions())
    assert other.at_load(1.5) == (other, 1.5)


def test_a_file_of_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('costs = "llama3-70b-8xH100"\nnum_prefill = 3\nnum_decode = 2\nssd_tokens = 700\n')
    found = cluster_of(str(file), COSTS, ["num_decode=4"], 512)
    assert (found.num_prefill, found.num_decode, found.ssd_tokens) == (3, 4, 700)
    assert "H100" in found.costs.title


@pytest.mark.parametrize(
    ("text", "changes", "named"),
    [
        ("8P", [], "--cluster is '8P'.*8P8D"),
        ("8P0D", [], "num_decode is 0"),
        ("0P8D", [], "num_prefill is 0; allowed: an integer above 0$"),
        ("4P4D", ["speed=1"], "--with is 'speed=1'.*cache_tokens"),
        ("4P4D", ["ssd_tokens"], "FIELD=VALUE"),
        ("4000P97D", [], "--cluster is '4000P97D'.*at most 4096 nodes"),
        ("4P4D", ["num_store=100000"], "at most 4096 nodes"),
        ("4P4D", ["cache_tokens=many"], "cache_tokens is 'many'; allowed: an integer, or none$"),
        ("4P4D", ["mode=magic"], "mode is 'magic'; allowed: disaggregated, vllm, prefix, chunked, chunked_p"),
        ("4P4D", ["spot=decode"], "spot is 'decode'; allowed: none, prefill$"),
        ("5P4D", ["pipeline_nodes=2"], "pipeline_nodes is 2.*divisor"),
        ("4P4D", ["sample_s=0"], "sample_s is 0.0.*above 0"),
        ("4P4D", ["sample_s=nan"], "sample_s is nan"),
        ("4P4D", ["measure_s=inf"], "measure_s is inf"),
        ("4P4D", ["nic_bytes_per_s=-1"], "nic_bytes_per_s is -1.0.*from 0 on"),
        ("4P4D", ["cache_tokens=100"], "cache_tokens is 100.*the 512 tokens of a block"),
        ("4P4D", ["cache_tokens=0"], "cache_tokens is 0.*left out"),
        ("4P4D", ["ssd_tokens=-1"], "ssd_tokens is -1"),
        ("4P4D", ["block_tokens=100"], "block_tokens is 100.*the 512 tokens that a key of the trace"),
    ],
)
def test_bad_clusters_are_named(text: str, changes: list[str], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        cluster_of(text, COSTS, changes, 512)


def test_bad_cluster_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    for content, named in (("num_prefill = ", "a TOML file"), ("nodes = 3", "'nodes'|nodes"), ("\xff", "is")):
        file.write_bytes(content.encode("latin-1"))
        with pytest.raises(InvalidArgument, match=named):
            cluster_of(str(file), COSTS, [], 512)


def test_generators_and_their_share() -> None:
    requests = requests_of("poisson:requests=50,rate=2", TraceOptions(num_rows=20))
    assert len(list(requests)) == 20 and len(list(requests)) == 20, "each run begins anew"
    assert requests.share(5) == 0.25
    assert requests.block_tokens == 512


def test_a_file_and_its_share(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [0, %d]}\n'
    file.write_text("".join(row % (number * 3000, number + 1) for number in range(10)))
    requests = requests_of(str(file), TraceOptions())
    assert [one.num_input for one in requests] == [600] * 10
    assert requests.share(0) == 1.0


def test_a_pipe_can_be_read_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    for is_standard_input in (False, True):
        source, sink = os.pipe()
        os.write(sink, row * 3)
        os.close(sink)
        with open(source) as pipe:
            monkeypatch.setattr("sys.stdin", pipe)
            requests = requests_of("-" if is_standard_input else f"/dev/fd/{source}", TraceOptions())
        assert [len(list(requests)) for _ in range(2)] == [3, 3]
    assert requests.name == "standard input" and requests.spooled is not None
    copy = Path(requests.spooled.name)
    assert copy.is_file()
    requests.spooled.close()
    assert not copy.exists()


def test_an_empty_pipe_is_named_and_not_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = os.pipe()
    os.close(sink)
    with open(source) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        with pytest.raises(InvalidArgument, match="TRACE is 'standard input'; allowed: a trace of at least"):
            requests_of("-", TraceOptions())


def test_how_a_file_is_read_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], "turn": 1}
    file.write_text(json.dumps(row))
    assert len(list(requests_of(str(file), TraceOptions()))) == 1
    assert capsys.readouterr().err == f"note: {file}: fields that are not read: turn\n"


def test_a_trace_is_read_as_options_say(mooncake: Run, tmp_path: Path) -> None:
    row = '{"timestamp": %s, "input_length": 600, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    trace, document = tmp_path / "trace.jsonl", tmp_path / "r.json"
    trace.write_text(row % 0 + row % 9000)
    words = ["simulate", str(trace), "--cluster", "1P1D", "--json", str(document)]
    for option, value, hint in (
        ("--block-tokens", "256", "3 ids"),
        ("--time-unit", "s", ""),
        ("--max-silence", "0", "9000 s after the row before"),
    ):
        done = mooncake(*words)
        assert not hint or (done.returncode == 2 and hint in done.stderr and option in done.stderr), option
        words += [option, value]
    done = mooncake(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(document.read_text())["runs"][0]["summary"]["num_requests"] == 2
    done = mooncake("plan", str(trace), *words[-6:-2], "--cluster", "1P1D")
    assert done.returncode == 2 and "--max-silence 0 allows any" in done.stderr


@pytest.mark.parametrize(
    ("spec", "options", "named"),
    [
        ("missing.jsonl", TraceOptions(), "TRACE is 'missing.jsonl'.*agentic"),
        ("agentic:speed=1", TraceOptions(), "'speed'.*sessions"),
        ("poisson:rate=x", TraceOptions(), "poisson:rate is 'x'"),
        ("poisson", TraceOptions(divide_lengths=4), "divide_lengths is 4.*generator"),
    ],
)
def test_bad_requests_are_named(spec: str, options: TraceOptions, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        requests_of(spec, options)


def test_a_text_that_is_too_long_for_a_path_is_no_file() -> None:
    changes = ",".join(f"cache_tokens={number}" for number in range(100_000, 100_030))
    assert cluster_of(f"8P8D,{changes}", COSTS, [], 64).node_costs.cache_tokens == 100_029
    long = "a" * 300
    with pytest.raises(InvalidArgument, match=r"TRACE is 'aaa.*a file that exists"):
        requests_of(long, TraceOptions())
    with pytest.raises(InvalidArgument, match="--cluster is 'aaa"):
        cluster_of(long, COSTS, [], 64)
    with pytest.raises(InvalidArgument, match="costs is 'aaa"):
        cluster_of("8P8D", long, [], 64)
