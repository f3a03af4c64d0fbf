# SPDX-License-Identifier: Apache-2.0
"""Every path of the transfer engine against the limits of this machine, kept like every result here.

``python -m bench.transfer`` runs ``mooncake bench transfer``, which measures, in a process of its own; flags
that are unknown here are passed on to it (``--path shm``). The comparison with gloo alone (``--path gloo``)
is a result of its own, transfer-gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.report import LEAST_FOR_P99, LIMIT, OF_LIMIT, Result, measured, options
from mooncake.cli.bench.report import GLOO_TIMES


def main() -> int:
    parser = options(__doc__, "bench.transfer")
    arguments, words = parser.parse_known_args()
    words += ["--quick"] if arguments.quick else []
    only_gloo = words[:2] == ["--path", "gloo"] and "--path" not in words[2:]
    name = "transfer-gloo" if only_gloo else "transfer"
    with measured(name, arguments, " ".join(["mooncake bench transfer", *words])) as result:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "transfer.json"
            command = [sys.executable, "-m", "mooncake", "bench", "transfer", *words, "--json", str(file)]
            subprocess.run(command, check=True, stdout=sys.stderr)
            found: dict[str, Any] = json.loads(file.read_text())
        if found["rows"]:
            _add_paths(result, found)
        if found["beside_gloo"]:
            _add_gloo(result, found["beside_gloo"])
        for path, why in found["skipped"].items():
            result.note(f"NOT RUN: {path}: {why}")
        if found["rows"]:
            result.note(found["references"])
        result.note(found["cannot_show"])
    return 0


def _add_paths(result: Result, found: dict[str, Any]) -> None:
    alone = result.table(
        "reference", "op", "size", ("GB/s", 2), ("CPU s/GB", 3), title="What this machine does alone"
    )
    for row in found["ceilings"]:
        alone.add(row["name"], row["op"], row["shape"], row["gb_s"], row["cpu_s_per_gb"])
    paths = result.table(
        "path",
        "op",
        "size",
        ("GB/s", 2),
        LIMIT,
        ("its GB/s", 2),
        (OF_LIMIT, 2),
        ("p50 us", 1),
        ("p99 us", 1),
        ("CPU s/GB", 3),
        ("its CPU s/GB", 3),
        title="Ours",
        note=f"median of {found['rounds']} rounds, ours and its reference in turns; every byte compared",
    )
    for row in found["rows"]:
        names = ("path", "op", "shape", "gb_s", "ceiling", "ceiling_gb_s", "ratio", "p50_us", "p99_us")
        paths.add(
            *(row[name] for name in names),
            row["cpu_s_per_gb"],
            row["ceiling_cpu_s_per_gb"],
            num_samples=LEAST_FOR_P99,  # the command has left out those of fewer
        )
    targets = result.table("target", "wanted", "seen", "is it met", title="Targets")
    verdicts = {True: "met", False: "NOT MET", None: "not measured"}
    for target in found["targets"]:
        targets.add(target["what"], target["wanted"], target["seen"], verdicts[target["is_met"]])


def _add_gloo(result: Result, rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["p50_us"])
    times: list[tuple[str, int]] = [(f"{name} us", 1) for name in names]
    speeds: list[tuple[str, int]] = [(f"{name} GB/s", 2) for name in names]
    title = "Writes of ours beside send and recv of torch.distributed's gloo, two processes on loopback"
    table = result.table("size", *times, "in flight", *speeds, title=title, note=GLOO_TIMES)
    for row in rows:
        table.add(row["size"], *row["p50_us"].values(), row["num_in_flight"], *row["gb_s"].values())


if __name__ == "__main__":
    sys.exit(main())
