# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import builtins
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.rpc.wire import Failure
from mooncake.store.master.key_patterns import (
    MAX_PATTERN,
    MAX_PROGRAM,
    LiteralPattern,
    RegexPattern,
    compiled,
)

KEYS = ["kv/1", "kv/2", "KV/1", "a.b", "axb", "x", "", "^x$", "a\nb", "käse", "kv/11"]


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "^kv/[12]$",
        "v/",
        "^kv/",
        "1$",
        "^x$",
        r"a\.b",
        "a.b",
        r"\^x\$",
        "(?i)^kv",
        r"\d\d",
        "kä",
        "^$",
        "$",
    ],
)
def test_what_is_found_is_what_python_finds(pattern: str) -> None:
    found = compiled(pattern)
    assert not isinstance(found, Failure)
    assert [found.is_found_in(key) for key in KEYS] == [bool(re.search(pattern, key)) for key in KEYS]
    assert all(found.cost(key) >= 1 for key in KEYS)


@given(st.text(max_size=20).filter(lambda text: "\n" not in text), st.booleans(), st.booleans())
def test_text_needs_no_engine(text: str, is_from_start: bool, is_to_end: bool) -> None:
    pattern = "^" * is_from_start + re.escape(text) + "$" * is_to_end
    found = compiled(pattern)
    assert isinstance(found, LiteralPattern)
    for key in (text, "x" + text, text + "x", f"x{text}x", ""):
        assert found.is_found_in(key) is bool(re.search(pattern, key)), (pattern, key)


@pytest.mark.parametrize("pattern", [r"(?=x)", r"(?<!a)b", r"(a)\1", "(", "[", "*a", "x{1,", "a{0,2000}"])
def test_what_cannot_be_had_without_backtracking_is_refused_with_the_reason(pattern: str) -> None:
    found = compiled(pattern)
    if isinstance(found, Failure):
        assert found.code == "invalid_argument" and repr(pattern) in found.message
    else:
        assert pattern == "x{1,", "which is text"


def test_the_size_of_what_is_compiled_is_bounded() -> None:
    for pattern in ("(a?){600}a{600}b", "x" * MAX_PATTERN + "x"):
        found = compiled(pattern)
        assert isinstance(found, Failure) and found.code == "invalid_argument"
    found = compiled(".*(a?){300}b")
    assert isinstance(found, RegexPattern)
    assert 1 < found.cost("a" * 1024) <= 1 + 1024 * MAX_PROGRAM // 64


def test_an_expression_that_would_backtrack_endlessly_does_not() -> None:
    found = compiled("^(a+)+$")
    assert isinstance(found, RegexPattern)
    assert not found.is_found_in("a" * 1000 + "b") and found.is_found_in("a" * 1000)


def test_without_the_engine_text_works_and_the_rest_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "re2":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert isinstance(compiled("^kv/"), LiteralPattern)
    found = compiled("a+")
    assert isinstance(found, Failure) and "google-re2" in found.message
