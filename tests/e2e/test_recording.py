# SPDX-License-Identifier: Apache-2.0
"""A recording of live engines is replayed: the simulated hit rate is the one that was measured."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mooncake.conductor.prediction import PrefillModel
from mooncake.sim.serving import simulate
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.traces.reuse import reuse_of
from mooncake.sim.traces.trace import Trace, read_trace
from tests.agentic_load import Agents
from tests.cluster import wait_for
from tests.gateway.doubles import save_tokenizer
from tests.program import programs

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

BLOCK = 16
NUM_SESSIONS, NUM_TURNS = 60, 8
NUM_BLOCKS = 500
"""Blocks of the prefill engine: fewer than the sessions have, so that it evicts."""
TOLERANCE = 0.005


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trace, float]]:
    """A recording, and the hit rate that the clients saw."""
    folder: Path = tmp_path_factory.mktemp("recorded")
    save_tokenizer(folder)
    with programs(folder) as start:
        engine = ("dev", "fake-engine", "--num-blocks", str(NUM_BLOCKS + 1), "--block-tokens", str(BLOCK))
        prefill, decode = (start(*engine, "--role", role) for role in ("prefill", "decode"))
        gateway = start(
            *("gateway", "--model", str(folder), "--served-model-name", "fake", "--protocol", "workers"),
            *("--prefill", prefill.address, "--decode", decode.address, "--block-tokens", str(BLOCK)),
            *("--record-folder", str(folder / "traces")),
        )

        def is_ready() -> bool:
            with urllib.request.urlopen(f"{gateway.url}/ready") as answer:
                return bool(answer.status == 200)

        wait_for(is_ready, "the gateway's engines", 60)
        agents = Agents(gateway.url, NUM_SESSIONS, NUM_TURNS)
        asyncio.run(agents.run(16))
        gateway.process.terminate()
        gateway.process.wait(60)
    [path] = (folder / "traces").glob("*.jsonl")
    yield read_trace(str(path)), agents.hit_rate


def test_what_was_recorded_is_what_clients_saw(recorded: tuple[Trace, float]) -> None:
    trace, hit_rate = recorded
    rows = [row.recorded for row in trace]
    assert len(rows) == NUM_SESSIONS * NUM_TURNS
    assert all(row is not None and row.status == "done" for row in rows)
    found = sum(row.cached_tokens for row in rows if row) / sum(row.input_length for row in rows if row)
    assert found == pytest.approx(hit_rate, abs=1e-9)
    assert hit_rate > 0.2
    assert hit_rate < reuse_of(trace, BLOCK).best.hit_rate - 0.01, "the engine has evicted nothing"


def test_the_simulated_hit_rate_is_the_live_one(recorded: tuple[Trace, float]) -> None:
    trace, hit_rate = recorded
    rows = [row.recorded for row in trace if row.recorded is not None]
    token_s = sum(row.computed_ms for row in rows) / sum(row.computed_tokens for row in rows) / 1e3
    # Of an engine as fast as the recorded one: where a slower one has a queue, prompts are computed in
    # another order, and what they find depends on it.
    costs = msgspec.structs.replace(
        load_costs("llama3-70b-8xH100"),
        prefill=PrefillModel(0.0, token_s, 0.0),
        reuse_s=0.0,
        kv_bytes_per_token=1024,
    )
    spec = ClusterSpec(
        costs=costs,
        num_prefill=1,
        num_decode=1,
        block_tokens=trace.block_tokens,
        cache_tokens=NUM_BLOCKS * BLOCK,
    )
    assert simulate(trace, spec).summary().hit_rate == pytest.approx(hit_rate, abs=TOLERANCE)


def test_the_curve_has_the_live_hit_rate_at_the_engine_s_size(recorded: tuple[Trace, float]) -> None:
    trace, hit_rate = recorded
    found = reuse_of(trace, BLOCK)
    below, above = (
        found.at(NUM_BLOCKS * BLOCK),
        next(point for point in found.curve if point.size_tokens >= NUM_BLOCKS * BLOCK),
    )
    assert below.hit_rate - TOLERANCE <= hit_rate <= above.hit_rate + TOLERANCE


def test_a_turn_s_answer_is_the_beginning_of_the_next_prompt(recorded: tuple[Trace, float]) -> None:
    last: dict[str, tuple[int, ...]] = {}
    num_compared = 0
    for row in recorded[0]:
        assert row.recorded is not None
        assert row.session is not None
        if known := last.get(row.session):
            assert row.keys[: len(known)] == known
            num_compared += 1
        last[row.session] = (*row.keys, *row.recorded.output_hash_ids)
    assert num_compared == NUM_SESSIONS * (NUM_TURNS - 1)


def test_plan_reads_the_recording(recorded: tuple[Trace, float], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ["plan", recorded[0].path, "--costs", "llama3-70b-8xH100", "--json", str(out), "--intervals"]
    command = [sys.executable, "-m", "mooncake", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Hit rate by tier" in result.stdout
    assert "Time to live" in result.stdout
    found = json.loads(out.read_text())
    assert found["reuse"]["recorded"]["hit_rate"] == pytest.approx(recorded[1], abs=1e-6)
    [[low, high]] = found["bounds"].values()
    best = next(iter(found["plans"].values()))["best"]
    assert low["num_prefill"] <= best["num_prefill"] <= high["num_prefill"]
