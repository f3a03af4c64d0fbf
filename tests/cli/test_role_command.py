# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from msgspec import Meta

from mooncake.cli import main
from mooncake.cli.role_command import (
    STOPPING_SIGNALS,
    Invocation,
    add_command,
    repeat_flags,
    run_until_stopped,
)
from mooncake.config import Port, Size
from mooncake.errors import InvalidArgument


@dataclass(frozen=True)
class ProbeSettings:
    """Do what a test needs.

    Long [story].
    """

    port: Port = 8000
    "Port to [listen] on."

    pool_size_bytes: Annotated[int, Size] = 2 << 30
    "Memory of the pool."

    is_loud: bool = False
    "Whether it shouts."

    peers: tuple[str, ...] = ()
    "Addresses of peers."

    color: Literal["red", "blue"] = "red"
    "Colour of the probe."

    ratio: Annotated[float, Meta(gt=0, lt=1)] | None = None
    "Share of the probe."


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("MOONCAKE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    handlers = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    root = logging.getLogger()
    outputs, level = list(root.handlers), root.level
    yield
    root.handlers[:] = outputs
    root.setLevel(level)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(*words: str) -> Invocation | None:
    """The settings that the command received; None when it was not run."""
    seen: list[Invocation] = []
    application = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    application.callback()(lambda: None)
    add_command(application, "probe", ProbeSettings, seen.append, "mooncake probe --port 1", ["probe", "log"])
    try:
        application(args=["probe", *words], prog_name="mooncake")
    except SystemExit as exit:
        if exit.code:
            raise
    return seen[0] if seen else None


def settings_of(*words: str) -> ProbeSettings:
    given = run(*words)
    assert given is not None
    assert isinstance(given.settings, ProbeSettings)
    return given.settings


def test_every_field_is_a_flag() -> None:
    words = "--port 7 --pool-size 64MiB --is-loud --peers a:1 b:2 --peers c:3 --color blue --ratio 0.5"
    assert settings_of(*words.split()) == ProbeSettings(
        port=7, pool_size_bytes=64 << 20, is_loud=True, peers=("a:1", "b:2", "c:3"), color="blue", ratio=0.5
    )
    assert settings_of() == ProbeSettings()
    assert settings_of("--port=9", "--no-is-loud").port == 9


def test_flags_beat_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.toml"
    file.write_text('[probe]\nport = 1\ncolor = "blue"\nis_loud = true\n[log]\nformat = "json"\n')
    monkeypatch.setenv("MOONCAKE_PROBE_PORT", "2")
    monkeypatch.setenv("MOONCAKE_LOG_LEVEL", "debug")
    given = run("--config", str(file), "--no-is-loud")
    assert given is not None
    assert given.settings == ProbeSettings(port=2, color="blue")
    assert (given.logs.level, given.logs.format, given.file) == ("debug", "json", file)
    monkeypatch.setenv("MOONCAKE_CONFIG", str(file))
    assert settings_of("--port", "3") == ProbeSettings(port=3, color="blue", is_loud=True)


def test_print_config_shows_origins_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--print-config", "--port", "5", "--log-level", "error") is None
    text = capsys.readouterr().out
    assert re.search(r"^port = 5 +# flag --port$", text, re.M)
    assert re.search(r'^level = "error" +# flag --log-level$', text, re.M)
    assert re.search(r'^pool_size = "2GiB" +# default$', text, re.M)


def test_a_misspelt_variable_is_reported_as_the_roles_logs_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOONCAKE_PROBE_POOLSIZE", "2GiB")
    assert run("--log-format", "json") is not None
    found = json.loads(capsys.readouterr().err)
    assert (found["event"], found["role"]) == ("unknown_environment_variable", "probe")
    assert (found["name"], found["did_you_mean"]) == ("MOONCAKE_PROBE_POOLSIZE", "MOONCAKE_PROBE_POOL_SIZE")


def test_a_command_without_logs_names_a_misspelt_variable_too() -> None:
    variables = {**os.environ, "MOONCAKE_CHAT_MAX_TOKEN": "5"}
    words = [sys.executable, "-m", "mooncake", "chat", "--print-config"]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert "name=MOONCAKE_CHAT_MAX_TOKEN did_you_mean=MOONCAKE_CHAT_MAX_TOKENS" in done.stderr


def test_help_comes_from_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "Port to [listen] on. (default: 8000)" in text
    assert "Memory of the pool. (default: 2GiB)" in text
    assert "[red|blue]" in text
    assert "--parent" not in text
    assert text.endswith("Example: mooncake probe --port 1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "x"], "port (flag --port) is 'x'; allowed: an integer from 0 to 65535"),
        (["--color", "green"], "color (flag --color) is 'green'; allowed: red, blue"),
        (["--pool-size", "big"], "pool_size (flag --pool-size) is 'big'; allowed: a size, such as"),
        (["--ratio", "1"], "ratio (flag --ratio) is '1'; allowed: a number above 0 below 1, or none"),
        (["--log-level", "loud"], "level (flag --log-level) is 'loud'; allowed: debug, info, warning, error"),
        (["--config", "/nowhere.toml"], "--config is '/nowhere.toml'; allowed: a readable"),
    ],
)
def test_bad_values_are_named(words: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize("words", [["--prot", "1"], ["stray"], ["--port"]])
def test_bad_flags_are_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run(*words)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert words[0] in error
    assert "Traceback" not in error


def test_several_values_after_one_flag() -> None:
    words = ["--prefill", "a", "b", "--port", "1", "x", "--prefill=c", "--decode", "d"]
    assert repeat_flags(words, {"--prefill", "--decode"}) == [
        *["--prefill", "a", "--prefill", "b", "--port", "1", "x", "--prefill=c", "--decode", "d"]
    ]


# -- running -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_signal_is_a_clean_stop_and_logged(
    number: signal.Signals, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[Any] = []

    async def serve(settings: int) -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            done.append(settings)

    def serve_plainly(settings: int) -> None:
        try:
            os.kill(os.getpid(), number)
            threading.Event().wait(60)
        finally:
            done.append(settings)

    caplog.set_level(logging.INFO)
    run_until_stopped(serve if kind == "async" else serve_plainly, 5)
    assert done == [5]
    logged = [one for one in caplog.records if one.name == "mooncake.cli.role_command"]
    assert [one.getMessage() for one in logged] == ["stopping", "stopped"]
    assert logged[0].fields == {"signal": number.name}  # type: ignore[attr-defined]


def test_a_role_that_ends_by_itself_was_not_stopped(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(settings: int) -> None:
        return

    caplog.set_level(logging.INFO)
    run_until_stopped(serve, 5)
    assert "stopp" not in caplog.text


def test_an_error_of_a_role_comes_through() -> None:
    async def serve(settings: int) -> None:
        raise ValueError("broken program")

    with pytest.raises(ValueError, match="broken program"):
        run_until_stopped(serve, 5)


# -- the command as users call it --------------------------------------------------------------------


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as exit:
        main(words)
    text = capsys.readouterr()
    return exit.value.code, text.out, text.err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = outcome(["--help"], capsys)
    assert status == 0
    for name in ("up", "chat", "gateway", "conductor", "worker", "node", "master", "metadata", "config"):
        assert f" {name} " in text


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(["--version"], capsys)[:2] == (0, "0.1.0\n")


def test_an_unknown_command_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = outcome(["mastre"], capsys)
    assert status == 2
    assert "Did you mean 'master'" in error


def test_an_error_is_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(["chat", "--temperature", "3"], capsys) == (
        2,
        "",
        "error: temperature (flag --temperature) is '3'; allowed: a number from 0 to 2\n",
    )


def test_help_of_a_command_ends_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("up", "chat"):
        _, text, _ = outcome([name, "--help"], capsys)
        assert text.split("Example: ")[1].startswith(f"mooncake {name}")


def test_up_with_a_taken_port_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        status, _, error = outcome(["up", "--port", str(port)], capsys)
    assert status == 2
    assert error.startswith(
        f"error: port {port} on 127.0.0.1 is in use; free it or choose another with --port"
    )


def test_starting_imports_nothing_heavy() -> None:
    program = "import sys, mooncake.cli.commands; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert not {"torch", "numpy", "aiohttp", "fastapi"} & set(done.stdout.split())


@pytest.mark.processes
def test_a_role_dies_with_its_supervisor() -> None:
    child = """
import os, time
from mooncake.cli.role_command import die_with
die_with(os.getppid())
print("up", flush=True)
time.sleep(600)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
        assert process.stdout.read() == "", "end of file: no process holds the pipe"
