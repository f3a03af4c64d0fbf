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
