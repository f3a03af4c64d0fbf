# SPDX-License-Identifier: Apache-2.0
"""The page of all results: which rows are on it, with which numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.report import FASTER_THAN, LIMIT, OF_LIMIT, OVER, Result, encoded
from bench.summary import rendered, results, summary

ROOT = Path(__file__).parents[2]


def result(bench: str, commit: str = "0123456789abcdef") -> Result:
    return Result(
        bench, f"python -m bench.{bench}", commit, False, "2026-01-02T03:04:05+00:00", "a machine", [1.0]
    )


def store() -> Result:
    made = result("store")
    table = made.table(
        "path", "what", ("p50 us", 1), LIMIT, (OF_LIMIT, 2), "package, us", OVER, (f"{FASTER_THAN}package", 2)
    )
    table.add("shm", "put 4 KiB", 12.5, "memcpy, one thread", 0.251, 25.0, "tcp", 2.0)
    table.add("shm", "view 4 KiB", 3.0, "", None, None, "", None)
    table.add("ssd", "get", 9.0, "fio", 1, None, "", None)
    return made


def transfer() -> Result:
    made = result("transfer", "f" * 16)
    made.table("path", "op", "size", ("GB/s", 2), LIMIT, (OF_LIMIT, 2)).add(
        "tcp", "read", "1 MiB", 4, "x", 0.9
    )
    made.table("target", "wanted", "seen").add("tcp", "0.9", "0.9")
    return made


def test_every_row_that_is_compared_is_on_the_page() -> None:
    page = summary([store(), transfer()])
    assert [column.name for column in page.columns] == [
        "bench",
        "row",
        LIMIT,
        OF_LIMIT,
        f"{FASTER_THAN}package",
    ]
    assert page.rows == [
        ["store", "shm put 4 KiB", "memcpy, one thread", 0.251, 2.0],
        ["store", "ssd get", "fio", 1, None],
        ["transfer", "tcp read 1 MiB", "x", 0.9, None],
    ]


def test_the_page_names_commits_and_what_did_not_run() -> None:
    ours = store()
    ours.note("NOT RUN: Redis, for it is not there")
    text = rendered([ours, transfer(), result("alone")])
    assert "| store    | shm put 4 KiB  | memcpy, one thread |         0.25 |                2.00 |" in text
    assert "store: commit 0123456789ab; 2026" in text and "transfer: commit ffffffffffff" in text
    assert "store: NOT RUN: Redis" in text and "alone" not in text
    assert rendered([result("alone")]).startswith("no result has a row")


def test_a_new_result_counts_before_a_saved_one(tmp_path: Path) -> None:
    kept, saved = tmp_path / "kept", tmp_path / "saved"
    for folder in (kept, saved):
        folder.mkdir()
    (kept / "store.json").write_bytes(encoded(store()))
    (saved / "store.json").write_bytes(encoded(result("store", "old")))
    (saved / "transfer.json").write_bytes(encoded(transfer()))
    found = results([kept, saved, tmp_path / "absent"])
    assert [(one.bench, one.commit) for one in found] == [
        ("store", "0123456789abcdef"),
        ("transfer", "f" * 16),
    ]


def test_the_page_of_the_saved_results_can_be_printed() -> None:
    words = [sys.executable, "-m", "bench.summary", "--saved"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| bench") or done.stdout.startswith("no result")
