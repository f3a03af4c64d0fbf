# SPDX-License-Identifier: Apache-2.0
"""Completion in a shell, also behind commands that are built only when they are selected."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mooncake.cli import main
from mooncake.cli.completion import MAX_LINE, completed_words


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, None),
        ({"COMP_WORDS": "mooncake up"}, None),
        ({"_MOONCAKE_COMPLETE": "complete_bash", "COMP_WORDS": "mooncake store l"}, ["store", "l"]),
        ({"_MOONCAKE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "mooncake  up --p"}, ["up", "--p"]),
        (
            {"_MOONCAKE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "mooncake store 'l"},
            ["store", "'l"],
        ),
        ({"_MOONCAKE_COMPLETE": "source_bash"}, []),
    ],
)
def test_words_of_the_line(environment: dict[str, str], words: list[str] | None) -> None:
    assert completed_words(environment) == words


def test_a_line_is_read_up_to_a_bound() -> None:
    line = "mooncake " + "x" * (2 * MAX_LINE)
    (word,) = completed_words({"_MOONCAKE_COMPLETE": "complete_bash", "COMP_WORDS": line}) or ()
    assert len(word) < MAX_LINE


def completions(
    line: str, shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setenv("_MOONCAKE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    with pytest.raises(SystemExit):
        main([])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("mooncake sto", {"store"}),
        ("mooncake store dra", {"drain"}),
        ("mooncake store ls --lo", {"--long"}),
        ("mooncake gateway --conduct", {"--conductor"}),
        ("mooncake deploy render --docs", {"--docs-url"}),
        ("mooncake plan --slo", {"--slo-ttft", "--slo-tbt"}),
        ("mooncake p2p ser", {"serve"}),
        ("mooncake nothing-of-the-kind --x", set()),
    ],
)
def test_bash(
    line: str, found: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(completions(line, "bash", monkeypatch, capsys).split()) == found


def test_zsh_shows_what_each_command_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = completions("mooncake store dr", "zsh", monkeypatch, capsys)
    assert found.startswith("_arguments") and '"drain":"Move all objects of segments' in found


def test_a_real_bash_completes_with_the_script_that_is_installed() -> None:
    show = {**os.environ, "_MOONCAKE_COMPLETE": "source_bash"}
    program = os.path.join(os.path.dirname(sys.executable), "mooncake")
    script = subprocess.run([program], env=show, capture_output=True, text=True, timeout=60).stdout
    assert "complete -o default -F _mooncake_completion mooncake" in script
    asked = 'COMP_WORDS=(mooncake store dra); COMP_CWORD=2; _mooncake_completion "$1"; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}", "bash", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("drain", 0), done.stderr
