# SPDX-License-Identifier: Apache-2.0
"""Keeps the language of the house: names stand once, modules are nouns, and prose is plain technical English.

Right after the modules were moved there were 454 of them, with 5 class names that stood twice, 206 docstrings
that opened with "Of" and 2,489 of the words that STYLE.md rules out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import house_counts
from tests.house_counts import Counts, Finding, circles, count

# Names on the wire and in recorded runs, which are not changed for their looks.
EXCEPTIONS = {
    ("docs/wire.md", "told"): "wire tag of StoryLines",
    ("mooncake/store/messages.py", "told"): "wire tag of StoryLines",
    ("mooncake/sim/faults/network.py", "ballot"): "a host of the simulator, which seeds draw by name",
}

MOST_MODULES = 507
"""Fewer is better; a new module should be an idea of its own."""
LARGEST = 1000
"""Lines of the largest module."""


@pytest.fixture(scope="module")
def counts() -> Counts:
    return count()


def test_no_word_that_style_rules_out(counts: Counts) -> None:
    found = [one for one in counts.words if (one.path, one.what) not in EXCEPTIONS]
    assert not found, "\n".join(map(str, found))


def test_exceptions_are_still_needed(counts: Counts) -> None:
    assert {(one.path, one.what) for one in counts.words} >= EXCEPTIONS.keys()


def test_no_docstring_opens_with_of(counts: Counts) -> None:
    assert not counts.of_docstrings, "\n".join(map(str, counts.of_docstrings))


def test_no_class_name_stands_twice(counts: Counts) -> None:
    assert not counts.twice


def test_no_module_is_named_by_a_gerund(counts: Counts) -> None:
    assert not counts.gerunds


def test_modules_import_without_circles(counts: Counts) -> None:
    assert not counts.circles


def test_modules_are_few_and_not_long(counts: Counts) -> None:
    assert counts.modules <= MOST_MODULES
    assert counts.largest[0] <= LARGEST, counts.largest


def test_words_are_found_in_identifiers_and_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house_counts, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text('"""Of nobody."""\nwas_told = HeardHere = 1\ntelling = stockpile = 2\n')
    found = {(one.line, one.what) for one in house_counts.words_in(path)}
    assert found == {(1, "nobody"), (2, "told"), (2, "heard")}
    assert [str(one) for one in house_counts.of_docstrings(path)] == [
        str(Finding("a.py", 1, "Of", "Of nobody."))
    ]


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"e"}}
    assert circles(graph) == [["a", "b", "c"]]
