# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from mooncake import config
from mooncake.cli import main, run_program
from mooncake.cli.commands import COMMANDS, KNOWN_ROLES, Command

DOCS = Path(__file__).parent.parent.parent / "docs" / "configuration.md"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_settings_and_an_entry(command: Command) -> None:
    settings_class = command.settings_class()
    assert config.role_of(settings_class) == command.name
    assert config.options(settings_class)
    assert settings_class() == settings_class(), "the defaults must be valid together"
    assert len(inspect.signature(command.entry_point()).parameters) == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_ends_with_an_example_that_is_right(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit:
        main([command.name, "--help"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.strip().endswith(f"Example: {command.example}")
    with pytest.raises(SystemExit) as exit:
        main([*command.example.split()[1:], "--print-config"])
    assert exit.value.code == 0, capsys.readouterr().err


def test_the_docs_are_what_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "--docs"])
    assert DOCS.read_text() == capsys.readouterr().out, "run `mooncake config --docs > docs/configuration.md`"


def test_config_shows_all_roles_and_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.toml"
    file.write_text("[up]\nport = 1\n[chat]\nmax_tokens = 5\n")
    with pytest.raises(SystemExit) as exit:
        main(["config", "--config", str(file)])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert re.findall(r"^\[(\w+)\]$", text, re.M) == KNOWN_ROLES
    assert re.search(r"^max_tokens = 5 +# file", text, re.M)
    file.write_text("[chat]\nmax_token = 5\n")
    with pytest.raises(SystemExit) as exit:
        main(["config", "--config", str(file)])
    assert exit.value.code == 2
    assert "did you mean max_tokens?" in capsys.readouterr().err


def test_every_role_with_an_engine_reads_the_table_of_transfer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.toml"
    file.write_text('[transfer]\ntransports = ["shm", "rdma", "tcp"]\nlisten_host = "10.0.0.1,10.0.1.1"\n')
    monkeypatch.setenv("MOONCAKE_TRANSFER_RAIL_PATIENCE_S", "0.2")
    for words in (["node"], ["daemon"], ["worker"], ["dev", "fake-engine"], ["p2p", "serve"]):
        with pytest.raises(SystemExit) as exit:
            main([*words, "--config", str(file), "--transfer-num-streams", "3", "--print-config"])
        shown = capsys.readouterr().out
        assert exit.value.code == 0, words
        for pattern in (
            r"^\[transfer\]$",
            r'^transports = \["shm", "rdma", "tcp"\] +# file .*\[transfer\]$',
            r'^listen_host = "10.0.0.1,10.0.1.1" +# file ',
            r"^rail_patience_s = 0.2 +# environment MOONCAKE_TRANSFER_RAIL_PATIENCE_S$",
            r"^num_streams = 3 +# flag --transfer-num-streams$",
        ):
            assert re.search(pattern, shown, re.M), (words, pattern)


def test_an_interrupt_ends_a_program_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one while it is imported, before the command line is read."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit:
        run_program(interrupted)
    assert exit.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_a_home_folder_that_is_not_known_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["chat", "--config", "~an-unknown-user/mooncake.toml"])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.startswith("error: a path begins with ~") and error.count("\n") == 1
