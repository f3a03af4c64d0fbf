# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake.cli import main
from mooncake.cli.topology import dump_main
from tests.transfer.recorded_host import build


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(["topology", *words])
    assert exit.value.code == 0
    return capsys.readouterr().out


def dumped(capsys: pytest.CaptureFixture[str], *words: str) -> object:
    with pytest.raises(SystemExit) as exit:
        dump_main(words)
    assert exit.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = output_of(capsys, "--root", str(build("two_sockets", tmp_path)))
    rows = [line for line in text.splitlines() if "cuda:0" in line]
    assert "0000:18:00.0" in rows[0] and "mlx5_0" in rows[0]
    assert rows[1].split("│")[2:5] and "PIX" in rows[1] and "SYS" in rows[1]
    assert any("mlx5_1" in line and "down" in line and "100" in line for line in text.splitlines())


def test_a_host_without_rdma_says_what_is_used_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "over tcp" in output_of(capsys, "--root", str(tmp_path))
    assert json.loads(output_of(capsys, "--json", "--root", str(tmp_path))) == {"cpu:0": [[], []]}


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(build("two_sockets", tmp_path))
    matrix = json.loads(output_of(capsys, "--json", "--root", root))
    assert matrix["cuda:1"] == [["mlx5_2"], ["mlx5_0", "mlx5_1"]]
    assert dumped(capsys, "--root", root) == matrix
    for flag in ("--device-name", "--device_name", "-device_name"):
        only = dumped(capsys, flag, "mlx5_0,mlx5_2", "--root", root, "--backend=tent")
        assert only["cpu:0"] == [["mlx5_0"], ["mlx5_2"]]  # type: ignore[index]


def test_a_topology_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"cpu:0": [["a"], ["b"]]}')
    assert dumped(capsys, "--use-custom-topo", "--custom-topo-json", str(file)) == {"cpu:0": [["a"], ["b"]]}
    file.write_text("[]")
    for wrong in (str(file), str(tmp_path / "nothing")):
        with pytest.raises(SystemExit) as exit:
            dump_main(["--use_custom_topo=true", "--custom_topo_json", wrong])
        assert exit.value.code == 2
        assert "custom-topo-json" in capsys.readouterr().err


def test_a_device_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(build("two_sockets", tmp_path))
    with pytest.raises(SystemExit) as exit:
        main(["topology", "--device", "mlx9", "--root", root])
    assert exit.value.code == 2
    assert "mlx9" in (error := capsys.readouterr().err) and "mlx5_0, mlx5_1, mlx5_2" in error
