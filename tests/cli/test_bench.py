# SPDX-License-Identifier: Apache-2.0
"""The transfer bench: its report from given rows, and one small run with two real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from mooncake.cli import bench, main
from mooncake.cli.bench import device_ceilings, gloo
from mooncake.cli.bench.gloo import Gloo, GlooRow
from mooncake.cli.bench.measurements import KIB, MIB, SHAPES, CeilingRow, Row, Shape, measure_paths
from mooncake.cli.bench.paths import STREAMS, SUBJECTS, Paths, Subject, TargetProcess, candidate_engines
from mooncake.cli.bench.report import GOALS, BenchReport, check_goals, render
from mooncake.cli.bench.target import pattern
from mooncake.errors import ProtocolError, Unavailable
from tests.contract import cuda_double

PATHS = ("shm", "tcp", "file", "tcp+file")
ROW = Row("tcp", "write", "1 MiB", MIB, 1, 4.0, 250.0, 400.0, 0.3, "1 raw stream", 4.4, 0.2, 0.91)


def test_targets_are_judged_by_the_row_they_are_about() -> None:
    small = dataclasses.replace(ROW, shape="4 KiB", size_bytes=4 * KIB, p50_us=50.1, ratio=0.1)
    slow = dataclasses.replace(ROW, op="read", ratio=0.89)
    verdicts = {verdict.what: verdict for verdict in check_goals([ROW, small, slow])}
    assert len(verdicts) == len(GOALS)
    assert verdicts["tcp write 1 MiB"].is_met is True and verdicts["tcp write 1 MiB"].seen == "0.91 x"
    assert verdicts["tcp read 1 MiB"].is_met is False
    assert verdicts["tcp write 4 KiB"].is_met is False and verdicts["tcp write 4 KiB"].seen == "50.1 us"
    assert verdicts["tcp read 4 KiB"].is_met is None
    assert check_goals([dataclasses.replace(ROW, ratio=None, ceiling="")])[0].is_met is None


def test_the_report_names_machine_command_skips_and_verdicts() -> None:
    alone = [CeilingRow("one thread", "write", "1 MiB", 20.0, 0.05)]
    report = BenchReport("a machine", "mooncake bench transfer", 3, alone, 25.1, [ROW], {"rdma": "no device"})
    text = render(report)
    for part in ("machine: a machine", "command: mooncake bench transfer", "cannot show: a real network",
                 "round trip of 4 KiB over one raw socket: 25.1 us", "skipped: rdma: no device"):  # fmt: skip
        assert part in text
    assert next(line for line in text.splitlines() if line.startswith("  tcp write 1 MiB")).endswith("  met")
    assert json.loads(json.dumps(report.as_json()))["rows"][0]["ratio"] == 0.91


def test_shapes_are_named_as_people_write_them() -> None:
    assert [str(shape) for shape in SHAPES] == [
        "4 KiB", "64 KiB", "256 KiB", "1 MiB", "16 MiB", "128 MiB", "512 x 128 KiB"
    ]  # fmt: skip
    assert Shape(4 * KIB).num_calls == 1000 and Shape(128 * MIB).num_calls == 1


def test_patterns_differ_by_seed_and_do_not_repeat_at_slices() -> None:
    assert (pattern(1, 100_000) != pattern(2, 100_000)).any()
    assert (pattern(1, 32 * MIB)[: 16 * MIB] != pattern(1, 32 * MIB)[16 * MIB :]).any()


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tcp = Subject("tcp", "tcp", STREAMS)
    paths = Paths([tcp], 64 * KIB, candidate_engines(tmp_path), tmp_path)
    try:
        paths.verify(tcp, "write", 4 * KIB, 2, seed=3)
        paths.verify(tcp, "read", 4 * KIB, 2, seed=4)
        monkeypatch.setattr(paths, "move", lambda *_: None)
        for op in ("write", "read"):
            with pytest.raises(ProtocolError, match=f"tcp {op}: 2 x 4,096 bytes did not arrive"):
                paths.verify(tcp, op, 4 * KIB, 2, seed=5)
        monkeypatch.undo()
        paths.target.close()
        with pytest.raises(Unavailable, match="has ended"):
            paths.move(tcp, "write", 4 * KIB, 1, 1)
    finally:
        paths.close()


def test_an_interrupt_of_the_terminal_is_only_this_process_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other one would print a traceback."""
    engines = {"shm": candidate_engines(tmp_path)["shm"]}
    target = TargetProcess(64 * KIB, engines, None)
    try:
        assert os.getpgid(target.pid) == target.pid
    finally:
        target.close()
    pids = list[int]()

    def interrupted(self: TargetProcess, line: str) -> str:
        pids.append(self.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(TargetProcess, "_ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TargetProcess(64 * KIB, engines, None)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.processes
def test_device_memory_beside_the_driver_alone(tmp_path: Path) -> None:
    """Over the test double of the driver: what is measured, not how fast it is."""
    if not cuda_double.built():
        pytest.skip("no C++ compiler for the test double of the CUDA driver; install g++")
    fields = {"transports": ["cuda"], "cuda_library": str(cuda_double.LIBRARY)}
    engines = {**candidate_engines(tmp_path), "cuda": fields}
    subjects = [subject for subject in SUBJECTS if subject.engine == "cuda"]
    paths = Paths(subjects, 256 * KIB, engines, tmp_path)
    try:
        ceilings = device_ceilings(paths, 256 * KIB)
        rows = measure_paths(paths, subjects, ceilings, [Shape(4 * KIB, 3)], 1, lambda _: None)
    finally:
        paths.close()
    assert {(row.path, row.ceiling) for row in rows} == {
        ("cuda", "driver pageable"), ("cuda+pin", "driver pinned"), ("cuda+dev", "driver device")
    }  # fmt: skip
    assert len(rows) == 6 and all(row.ratio for row in rows)


@pytest.mark.processes
def test_a_small_run_measures_verifies_writes_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[plot]'")
    report, picture = tmp_path / "b.json", tmp_path / "b.png"
    words = ["bench", "transfer", "--quick", "--largest", "64KiB", "--folder", str(tmp_path)]
    words += [word for path in PATHS for word in ("--path", path)]
    with pytest.raises(SystemExit) as exit:
        main([*words, "--json", str(report), "--plot", str(picture)])
    assert exit.value.code == 0, capsys.readouterr().err
    rows = [Row(**row) for row in json.loads(report.read_text())["rows"]]
    assert {(row.path, row.op, row.shape) for row in rows} == {
        (path, op, shape) for path in PATHS for op in ("write", "read") for shape in ("4 KiB", "64 KiB")
    }
    assert all(row.gb_s > 0 and row.p50_us > 0 and row.cpu_s_per_gb > 0 for row in rows)
    assert all(row.p99_us is not None and row.p50_us <= row.p99_us for row in rows)
    against = {row.path: row.ceiling for row in rows if row.ratio}
    num_streams = max(1, min(4, (os.cpu_count() or 1) // 2))
    streams = f"{num_streams} raw stream{'s' * (num_streams > 1)}"
    assert against == {"shm": "one thread", "tcp": streams} | ({"file": "fio"} if shutil.which("fio") else {})
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "tcp write 4 KiB" in capsys.readouterr().out


def test_the_report_says_where_gloo_is_ahead() -> None:
    rows = [
        GlooRow("4 KiB", {"shm": 3.0, "tcp": 12.0, "gloo": 70.0}, 16, {"shm": 9.0, "tcp": 1.5, "gloo": 0.1}),
        GlooRow("64 MiB", {"shm": 3.0, "tcp": 12.0, "gloo": 9.0}, 2, {"shm": 9.0, "tcp": 4.0, "gloo": 4.1}),
    ]
    lines = render(BenchReport("a machine", "a command", 3, [], None, [ROW], {}, rows)).splitlines()
    small, large = (next(line for line in lines if line.strip().startswith(row.size)) for row in rows)
    assert small.split()[:4] == ["4", "KiB", "3.0", "12.0"] and small.endswith("  nothing")
    assert large.endswith("  time of tcp, GB/s of tcp")


def test_without_torch_gloo_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gloo, "find_spec", lambda _: None)
    words = ["bench", "transfer", "--quick", "--path", "gloo", "--largest", "4KiB", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert exit.value.code == 0
    assert "skipped: gloo: torch is not installed (pip install" in capsys.readouterr().out


@pytest.mark.processes
def test_both_are_measured_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    report = tmp_path / "b.json"
    words = ["bench", "transfer", "--quick", "--path", "gloo", "--largest", "64KiB"]
    with pytest.raises(SystemExit) as exit:
        main([*words, "--folder", str(tmp_path), "--json", str(report)])
    assert exit.value.code == 0
    found = json.loads(report.read_text())
    assert not found["rows"] and "gloo" not in found["skipped"]
    rows = [GlooRow(**row) for row in found["beside_gloo"]]
    assert [(row.size, row.num_in_flight) for row in rows] == [("4 KiB", 16), ("16 KiB", 4), ("64 KiB", 1)]
    for row in rows:
        assert row.p50_us.keys() == row.gb_s.keys() == {"shm", "tcp", "gloo"}
        assert all(value > 0 for value in [*row.p50_us.values(), *row.gb_s.values()])


@pytest.mark.processes
def test_a_lost_process_of_gloo_is_an_error_with_words(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    pair = Gloo(64 * KIB, tmp_path)
    try:
        assert pair.one_by_one(4 * KIB, 3).num_bytes == 3 * 4 * KIB
        assert len(pair.in_flight(4 * KIB, 4, 5).calls_s) == 5
        pair._other.kill()
        pair._other.wait()
        with pytest.raises(Unavailable, match="has ended"):
            pair.in_flight(4 * KIB, 4, 5)
    finally:
        pair.close()


def test_an_unknown_path_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", "transfer", "--path", "pigeon"])
    assert exit.value.code == 2
    assert "path is 'pigeon'; allowed: some of shm, shm+crc, tcp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ("--folder", "/nonexistent"),
            "--folder is '/nonexistent'; allowed: a folder that can be written to",
        ),
        (("--largest", "1KiB"), "--largest is '1KiB'; allowed: at least 4KiB"),
        (("--largest", "much"), "--largest is 'much'; allowed: a size"),
        (
            ("--plot", "/nonexistent/b.png"),
            "--plot is '/nonexistent/b.png'; allowed: a file that can be written",
        ),
        (("--plot", "b.word"), "--plot is 'b.word'; allowed: a name that ends in one of "),
        (("--plot", "b"), "--plot is 'b'; allowed: a name that ends in one of "),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    words: tuple[str, str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if words[0] == "--plot":
        pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[plot]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_measured", lambda *_: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as exit:
        main(["bench", "transfer", *words])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.startswith(f"error: {named}") and len(error.splitlines()) == 1, (
        error
    )
    assert not [*tmp_path.iterdir()]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            "#!/bin/sh\necho 'io_uring_queue_init: Operation not permitted' >&2\nexit 1\n",
            "Operation not permitted",
        ),
        ("#!/bin/sh\necho warning\n", "did not answer as JSON"),
        ("#!/nonexistent\n", "No such file or directory"),
    ],
    ids=["refused", "no JSON", "no program"],
)
def test_a_fio_that_cannot_run_is_skipped_with_the_reason(
    program: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fio = tmp_path / "fio"
    fio.write_text(program)
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = ["bench", "transfer", "--quick", "--path", "file", "--largest", "4KiB", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit) as exit:
        main(words)
    shown = capsys.readouterr()
    assert exit.value.code == 0, shown.err
    [line] = [line for line in shown.out.splitlines() if line.startswith("skipped: fio: ")]
    assert why in line
    assert any(line.startswith("file ") for line in shown.out.splitlines()), "the path itself is measured"
