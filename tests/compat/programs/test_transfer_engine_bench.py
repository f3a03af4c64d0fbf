# SPDX-License-Identifier: Apache-2.0
"""``transfer_engine_bench``, with the flags that scripts for the existing package pass."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import mooncake
from mooncake.compat.programs.transfer_engine_bench import main

PROGRAM = [sys.executable, "-c", "from mooncake.compat.programs.transfer_engine_bench import main; main()"]
SMALL = ["--block_size=65536", "-batch_size", "4", "--threads=2", "--buffer_size=1048576", "-v=1"]


@pytest.mark.processes
@pytest.mark.parametrize("protocol", ["tcp", "shm"])
def test_a_target_and_an_initiator(protocol: str) -> None:
    shared = [*PROGRAM, f"--protocol={protocol}", "--metadata-server=P2PHANDSHAKE"]
    common = [*shared, *SMALL]
    target = subprocess.Popen(  # without the initiator's flags: of its default blocks not one batch would fit
        [*shared, "--mode=target", "--local_server_name=127.0.0.1", "--buffer_size=1048576"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert target.stdout is not None
        name = re.search(r"--segment_id=(\S+)", target.stdout.readline())
        assert name
        line = target.stdout.readline()
        assert line == f"Transfer Engine RPC using P2P handshake, listening on {name[1]}\n", (
            "scripts search the existing program's output for this line, and take its last word"
        )
        for operation in ("read", "write"):
            done = subprocess.run(
                [
                    *common,
                    "-mode=initiator",
                    f"--segment_id={name[1]}",
                    f"-operation={operation}",
                    "--local-server-name=127.0.0.1",
                    "--duration=1",
                    "--report_unit=GiB",
                    "--noauto_discovery",
                ],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            found = re.search(r"duration [\d.]+, batch count (\d+), throughput [\d.]+ GiB/s", done.stdout)
            assert found and int(found[1]) > 0
        target.terminate()
        assert target.wait(60) == 0
    finally:
        target.kill()
        target.wait()


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["--mode=both"], 2, "initiator, target"),
        (["--report_unit=parsec"], 2, "GB"),
        (["--buffer_size=1000"], 2, "at least block_size x batch_size x threads"),
        ([], 2, "--segment_id"),
        (["--segment_id=127.0.0.1:1", "--protocol=nothing"], 2, "the log line above has the reason"),
        (
            ["--segment_id=127.0.0.1:1", "--protocol=tcp", "--local_server_name=127.0.0.1", *SMALL],
            1,
            "no memory",
        ),
    ],
)
def test_invalid_flags(
    arguments: list[str], status: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == status and why in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-version", "--version"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([flag])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"transfer_engine_bench {mooncake.__version__}\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "--batch_size=128" in capsys.readouterr().out
