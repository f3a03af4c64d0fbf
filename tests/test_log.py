# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mooncake.log import get_logger, setup_library_logging, setup_logging
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _restore_library_logger() -> Iterator[None]:
    ours = logging.getLogger("mooncake")
    handlers, level, propagates = list(ours.handlers), ours.level, ours.propagate
    # An earlier test of this process may have set it up, with the standard error of then.
    ours.handlers[:], ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    yield
    ours.handlers[:] = handlers
    ours.setLevel(level)
    ours.propagate = propagates


def test_text_is_event_then_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(role="master")
    get_logger("x").info("evicted", key="kv/1", size_bytes=12, reason="high watermark")
    line = capsys.readouterr().err
    assert line.endswith('info master evicted key=kv/1 size_bytes=12 reason="high watermark"\n')


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("a\x1b]0;title\x07", r'"a\u001b]0;title\u0007"'),
        ("x\rline", r'"x\rline"'),
        ("bank\0k", r'"bank\u0000k"'),
        ("del\x7f", r'"del\u007f"'),
        ("c1\x9b2J", r'"c1\u009b2J"'),
        ("right\u202eleft", r'"right\u202eleft"'),
        ("grün/日本", "grün/日本"),
    ],
)
def test_characters_that_would_change_a_terminal_are_escaped(
    capsys: pytest.CaptureFixture[str], key: str, shown: str
) -> None:
    setup_logging()
    get_logger("x").info("block_write", key=key)
    assert capsys.readouterr().err.endswith(f" block_write key={shown}\n")


def test_control_characters_of_other_programs_messages_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging()
    try:
        raise ValueError("no \x1b[2Jkey")
    except ValueError:
        logging.getLogger("other").exception("two\nlines\tof\x1b[31m it\x7f")
    text = capsys.readouterr().err
    assert r" error two" in text and "\nlines\tof\\u001b[31m it\\u007f\n" in text
    assert r"ValueError: no \u001b[2Jkey" in text and "\x1b" not in text


def test_json_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(log_format="json", role="node")
    get_logger("x").warning("mounted", segment="a b", size_bytes=3)
    entry = json.loads(capsys.readouterr().err)
    assert entry["event"] == "mounted"
    assert (entry["role"], entry["level"], entry["segment"], entry["size_bytes"]) == (
        "node",
        "warning",
        "a b",
        3,
    )


def test_levels_below_the_threshold_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(level="warning")
    get_logger("x").info("quiet")
    assert capsys.readouterr().err == ""


def test_an_exception_brings_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("x").exception("failed", step=1)
    text = capsys.readouterr().err
    assert "failed step=1" in text
    assert "ValueError: broken" in text


class StalledReader:
    """A pipe or socket as this process's standard error, read when the test says so."""

    def __init__(self, kind: str) -> None:
        if kind == "pipe":
            self._read_end, self.write_end = os.pipe()
        else:
            ours, theirs = socket.socketpair()
            self._read_end, self.write_end = ours.detach(), theirs.detach()
        self.stream = os.fdopen(self.write_end, "w")
        self.text = ""

    def read_until(self, part: str) -> list[str]:
        """All lines so far, once ``part`` is among them and the last one is whole."""
        while part not in self.text or not self.text.endswith("\n"):
            self.text += os.read(self._read_end, 1 << 16).decode()
        return self.text.splitlines()

    def close_reader(self) -> None:
        os.close(self._read_end)
        self._read_end = -1

    def close(self) -> None:
        self.stream.close()
        if self._read_end >= 0:
            self.close_reader()


@pytest.fixture
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StalledReader]:
    stalled = StalledReader(getattr(request, "param", "pipe"))
    # pytest replaces sys.stderr itself between a fixture and its test.
    monkeypatch.setattr("mooncake.log.sys", SimpleNamespace(stderr=stalled.stream))
    yield stalled
    # A writer with a backlog ends when its reader has ended, and the descriptor stays open until then.
    if stalled._read_end >= 0:
        stalled.close_reader()
    wait_until(lambda: all(one.name != "log" for one in threading.enumerate()), "the end of the writer")
    stalled.close()


@pytest.mark.parametrize("reader", ["pipe", "socket"], indirect=True)
def test_a_reader_that_stalls_holds_up_nothing_and_learns_what_it_missed(reader: StalledReader) -> None:
    setup_logging()
    for number in range(20_000):
        get_logger("x").info("counted", number=number, filler="x" * 80)
    assert os.get_blocking(reader.write_end), "other processes have this file description, too"
    lines = reader.read_until("log_lines_dropped")
    get_logger("x").info("afterwards")
    lines = reader.read_until("afterwards")
    counted = [line for line in lines if " counted " in line]
    assert all(line.endswith(f" number={number} filler={'x' * 80}") for number, line in enumerate(counted))
    (notice,) = [line for line in lines if "log_lines_dropped" in line]
    assert notice.endswith(f" error log_lines_dropped num_lines={20_000 - len(counted)}")
    assert lines.index(notice) == len(counted) and len(lines) == len(counted) + 2
    assert len(counted) < 20_000


def test_a_long_line_that_does_not_fit_is_not_torn(reader: StalledReader) -> None:
    setup_logging()
    for number in range(4):
        get_logger("x").info("counted", number=number, filler="y" * 50_000)
    lines = reader.read_until("number=3 filler=yy")
    assert [line.partition(" counted ")[2] for line in lines] == [
        f"number={number} filler={'y' * 50_000}" for number in range(4)
    ]


def test_a_slow_reader_misses_nothing(reader: StalledReader) -> None:
    setup_library_logging("engine")
    for number in range(2_000):
        get_logger("mooncake.x").info("counted", number=number, filler="x" * 80)
    lines = reader.read_until("number=1999 ")
    assert len(lines) == 2_000


def test_a_reader_that_has_ended_is_no_failure(
    reader: StalledReader, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging()
    reader.close_reader()
    for _ in range(20_000):
        get_logger("x").info("counted", filler="x" * 80)
    assert capsys.readouterr().err == "", "logging itself reports failures of handlers there"


def test_a_forked_child_does_not_repeat_its_parents_backlog(reader: StalledReader) -> None:
    setup_logging()
    for number in range(2_000):
        get_logger("x").info("counted", number=number, filler="x" * 80)
    child = os.fork()
    if child == 0:
        try:
            get_logger("x").info("of_the_child")
            logging.shutdown()
        finally:
            os._exit(0)
    lines = reader.read_until("number=1999 ")
    assert os.waitpid(child, 0) == (child, 0)
    assert sum(" counted " in line for line in lines) == 2_000


_ROLE = """
import asyncio
from mooncake.cli.role_command import run_until_stopped
from mooncake.log import get_logger, setup_logging

async def serve(settings):
    for _ in range(20_000):
        get_logger("x").info("counted", filler="x" * 80)
    print("serving", flush=True)
    await asyncio.Event().wait()

setup_logging()
run_until_stopped(serve, None)
print("ended", flush=True)
"""


def test_a_signal_ends_a_role_whose_log_is_not_read() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _ROLE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline() == "serving\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 0
        assert process.stdout.read() == "ended\n"
    finally:
        process.kill()
        process.communicate()
