# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from mooncake.log import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


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
