# SPDX-License-Identifier: Apache-2.0
"""A Mooncake trace, replayed by ``aiperf`` through the gateway in front of 2 prefill and 2 decode workers.

Prints one table: each policy's failed requests, hit rates and times to the first token. Prompts are the
trace's with all lengths divided, block by block, so that shared prefixes stay shared; times are stretched by
the machine's slowness. The workers are used like third-party engines (``--protocol sequential``), each policy
on a cluster of its own. ``aiperf`` is a program of its own environment (``scripts/try-aiperf``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.paper_table import traces_folder
from bench.report import Cell, measured, not_run, options
from mooncake.inference.gguf import resolve_model
from tests.cluster import Cluster, running_cluster, wait_for

TRACE_BLOCK = 512
"""Tokens that one of the trace's hash ids stands for."""


def scaled_rows(trace: Path, num_rows: int, divisor: int, stretch: float, max_output: int) -> list[str]:
    """The first rows of a trace, scaled down."""
    rows: list[str] = []
    with trace.open() as lines:
        for _, line in zip(range(num_rows), lines, strict=False):
            row = json.loads(line)
            rows.append(
                json.dumps(
                    {
                        "timestamp": int(row["timestamp"] * stretch),
                        "input_length": max(1, row["input_length"] // divisor),
                        "output_length": min(max_output, max(1, row["output_length"] // divisor)),
                        "hash_ids": row["hash_ids"],
                    }
                )
            )
    return [_consistent(json.loads(row), TRACE_BLOCK // divisor) for row in rows]


def _consistent(row: dict[str, Any], block: int) -> str:
    """Division rounds: give a row as many ids as its length needs."""
    needed = -(-row["input_length"] // block)
    row["hash_ids"] = row["hash_ids"][:needed]
    row["input_length"] = min(row["input_length"], len(row["hash_ids"]) * block)
    return json.dumps(row)


@contextmanager
def fronting(cluster: Cluster, policy: str, log: Path) -> Iterator[str]:
    """Run a gateway in front of the cluster's workers; yield its address."""
    roles = cluster.status["roles"]
    command = [sys.executable, "-m", "mooncake", "gateway", "--port", "0", "--protocol", "sequential"]
    for side in ("prefill", "decode"):
        command += [f"--{side}", *(roles[name]["address"] for name in roles if name.startswith(side))]
    command += ["--scheduling", policy, "--log-format", "json"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_offline())
    try:

        def address() -> str | None:
            ready = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            return next((line["address"] for line in ready if line.get("event") == "ready"), None)

        url = wait_for(address, "the gateway", 120.0)
        assert url is not None
        time.sleep(2.0)  # all workers have been probed, and their events are followed
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _offline() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def as_downloaded(model: Path, cache: Path) -> str:
    """Lay a local model out as if it had been downloaded, as aiperf requires. Returns its name."""
    commit = "0" * 40
    repository = cache / "models--local--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file)
    return "local/model"


def replay(aiperf: str, url: str, rows: Path, block: int, folder: Path) -> dict[str, Any]:
    """Run one replay; return aiperf's exported results."""
    command = [aiperf, "profile", "--model", "smollm2", "--url", url, "--endpoint-type", "completions"]
    command += ["--streaming", "--custom-dataset-type", "mooncake_trace", "--input-file", str(rows)]
    command += ["--fixed-schedule", "--isl-block-size", str(block), "--ui", "none"]
    tokenizer = as_downloaded(resolve_model("smollm2"), folder / "hub")
    command += ["--tokenizer", tokenizer, "--artifact-dir", str(folder / "artifacts")]
    command += ["--no-server-metrics", "--no-gpu-telemetry", "--random-seed", "7"]
    command += ["--use-server-token-count", "--extra-inputs", "temperature:0"]
    environment = {**_offline(), "HF_HUB_CACHE": str(folder / "hub")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = sorted(folder.rglob("*aiperf.json"))
    if done.returncode or not found:
        raise SystemExit(
            f"aiperf ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    exported: dict[str, Any] = json.loads(found[0].read_text())
    return exported


def counted(cluster: Cluster, name: str) -> float:
    """Sum of a counter over all prefill workers."""
    total = 0.0
    for role in cluster.status["roles"]:
        if role.startswith("prefill"):
            for line in cluster.get("/metrics", role).body.splitlines():
                if line.startswith(f"{name}_total "):
                    total += float(line.split()[1])
    return total


def run(policy: str, arguments: argparse.Namespace, rows: Path, folder: Path) -> list[Cell]:
    """Return the row of one policy."""
    memory = ("--pool-size", "1GiB", "--kv-cache-size", arguments.kv_cache_size)
    with running_cluster("--prefill", "2", "--decode", "2", *memory) as cluster:
        with fronting(cluster, policy, folder / "gateway.log") as url:
            exported = replay(arguments.aiperf, url, rows, TRACE_BLOCK // arguments.divisor, folder)
        queries = counted(cluster, "vllm:prefix_cache_queries") or 1.0
        local = counted(cluster, "vllm:prefix_cache_hits")
        pool = counted(cluster, "vllm:external_prefix_cache_hits")
    (folder / "exported.json").write_text(json.dumps(exported, indent=1))
    ttft = exported["time_to_first_token"]
    failed = (exported.get("error_request_count") or {}).get("avg", 0)
    cached = next((value["avg"] for name, value in exported.items() if "cache" in name and value), None)
    shares = ((local + pool) / queries, local / queries, pool / queries)
    times = (ttft[name] for name in ("avg", "p50", "p90"))
    answered = exported["request_count"]["avg"]
    return [policy, answered, failed, cached, *(100 * share for share in shares), *times]


COLUMNS: list[str | tuple[str, int]] = [
    "policy",
    "answered",
    "failed",
    "cached/request",
    ("hit rate %", 1),
    ("own memory %", 1),
    ("from the pool %", 1),
    "TTFT mean ms",
    "p50",
    "p90",
]


def main() -> None:
    parser = options(__doc__, "bench.aiperf")
    parser.add_argument("trace", type=Path, nargs="?", help="data/traces/conversation_trace.jsonl, if found")
    parser.add_argument("--aiperf", default="", help="the program; by default that of scripts/try-aiperf")
    parser.add_argument("--rows", type=int, help="number of rows; 200 by default")
    parser.add_argument("--divisor", type=int, default=32, help="divisor of lengths")
    parser.add_argument("--stretch", type=float, default=3.0, help="factor of the time between requests")
    parser.add_argument("--max-output", type=int, default=8)
    parser.add_argument("--kv-cache-size", default="256MiB")
    parser.add_argument("--keep", type=Path, help="folder for aiperf's results and the logs")
    parser.add_argument("--policies", nargs="+")
    arguments = parser.parse_args()
    own = Path(os.environ.get("MOONCAKE_AIPERF_ENV") or Path.home() / ".cache/mooncake/aiperf") / "bin/aiperf"
    arguments.aiperf = arguments.aiperf or (str(own) if own.exists() else shutil.which("aiperf") or "")
    if not arguments.aiperf:
        not_run("aiperf is not installed: scripts/try-aiperf TRACE.jsonl makes an environment that has it")
    if arguments.trace is None:
        if (folder := traces_folder(None)) is None or not (folder / "conversation_trace.jsonl").exists():
            not_run("no trace beside or above this project: name one, scripts/try-aiperf TRACE.jsonl")
        arguments.trace = folder / "conversation_trace.jsonl"
    num_rows = arguments.rows or (20 if arguments.quick else 200)
    policies = arguments.policies or (["cache_aware"] if arguments.quick else ["round_robin", "cache_aware"])
    command = f"scripts/try-aiperf {arguments.trace.name} --rows {num_rows} --policies {' '.join(policies)}"
    with measured("aiperf", arguments, command) as result, tempfile.TemporaryDirectory() as temporary:
        table = result.table(*COLUMNS, note="one run a policy, one after the other: differences may be noise")
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = folder / "trace.jsonl"
        scaled = scaled_rows(
            arguments.trace, num_rows, arguments.divisor, arguments.stretch, arguments.max_output
        )
        rows.write_text("\n".join(scaled) + "\n")
        for policy in policies:
            (folder / policy).mkdir()
            table.add(*run(policy, arguments, rows, folder / policy))


if __name__ == "__main__":
    main()
