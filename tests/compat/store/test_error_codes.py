# SPDX-License-Identifier: Apache-2.0
"""The table of numbers is complete, and ordinary failures have numbers that vLLM tolerates."""

from __future__ import annotations

import re
from pathlib import Path

from mooncake.compat.store.error_codes import (
    CODES_OF_REFUSALS,
    ORDINARY_FAILURES,
    StoreCode,
    code_of,
    code_of_error,
)
from mooncake.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    OutOfMemory,
    PeerLost,
    Refusal,
    StorageError,
)
from mooncake.store.messages import PUT_AGAIN

STORE = Path(__file__).parents[3] / "mooncake" / "store"
SOURCES = [file for file in STORE.rglob("*.py") if file.name != "daemon.py"]
NODES_ONLY = {
    "name_taken",
    "invalid_name",
    "invalid_rest",
    "invalid_id",
    "corrupt",
    "cancelled",
    "draining",
    "timed_out",
    "unmounted",
}
"""Codes that only nodes receive."""


def test_every_refusal_has_a_number() -> None:
    texts = [file.read_text() for file in SOURCES]
    codes = {code for text in texts for code in re.findall(r'(?:Refusal|_refused)\(\s*"(\w+)"', text)}
    assert {"no_space", "leased", "expired", "durable", "storage_error"} <= codes, "the search finds them"
    missing = codes - CODES_OF_REFUSALS.keys() - NODES_ONLY - {*PUT_AGAIN}
    assert not missing


def test_ordinary_failures_are_safe() -> None:
    ordinary = ("no_space", "too_large", "no_ssd", "expired", "incomplete", "peer_lost", "not_found")
    for code in (*ordinary, "being_written", "storage_error"):
        assert CODES_OF_REFUSALS[code] in ORDINARY_FAILURES
    assert code_of_error(PeerLost("x")) == code_of_error(DeadlineExceeded("x")) == -900
    assert code_of_error(StorageError("x")) == -900
    assert code_of_error(OutOfMemory("x")) == -200


def test_outcomes() -> None:
    assert [code_of(outcome) for outcome in (None, True, False)] == [0, 0, -704]
    assert code_of(Refusal("leased", "x")) == -706
    assert code_of(Refusal("something new", "x")) == -1
    assert code_of_error(InvalidArgument("a", 1, "b")) == -600
    assert code_of_error(MooncakeError("x")) == -1
    assert {type(code_of(outcome)) for outcome in (None, False)} == {int}


def test_the_documents_name_every_number() -> None:
    docs = (STORE.parents[1] / "docs" / "store.md").read_text()
    for code in StoreCode:
        assert code.name in docs and str(int(code)) in docs, code
