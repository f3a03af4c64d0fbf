# SPDX-License-Identifier: Apache-2.0
"""A short slice of ``scripts/kill``, and tests that its book detects violations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kill.journal import Book, Journal, Line, content
from tests.kill.run import SCENARIOS, play


@pytest.mark.processes
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_acknowledged_is_lost(name: str) -> None:
    outcome = play(name, 2)
    assert not outcome.violations, f"scripts/kill --rounds 2 {name}: {outcome.violations}"
    assert outcome.num_acknowledged > 0 and outcome.num_checked > 0
    assert len(outcome.recovery_s) == 2


def noted(*lines: Line) -> Book:
    book = Book()
    for line in lines:
        book.note(line)
    return book


def test_an_acknowledged_put_is_promised_while_a_process_with_a_replica_lives() -> None:
    book = noted(Line("put", "k", 1), Line("put_done", "k", 1, places=["a", "b"]))
    assert book.keys["k"].is_promised and book.keys["k"].versions == [1]
    book.died("a")
    assert book.keys["k"].is_promised
    book.died("b")
    assert not book.keys["k"].is_promised


def test_an_object_on_ssd_survives_every_process() -> None:
    book = noted(Line("put", "k", 1, True), Line("put_done", "k", 1, True, ["a"]))
    book.died("a")
    assert book.keys["k"].is_promised


def test_without_a_reply_both_states_are_allowed() -> None:
    assert not noted(Line("put", "k", 1)).keys["k"].is_promised
    done = (Line("put", "k", 1), Line("put_done", "k", 1, places=["a"]))
    assert not noted(*done, Line("remove", "k")).keys["k"].is_promised
    assert noted(*done, Line("remove", "k"), Line("not_removed", "k")).keys["k"].is_promised
    replaced = noted(*done, Line("put", "k", 2)).keys["k"]
    assert replaced.versions == [1, 2] and not replaced.is_promised


def test_a_removed_key_may_not_be_found() -> None:
    done = (Line("put", "k", 1), Line("put_done", "k", 1, places=["a"]))
    assert noted(*done, Line("remove", "k"), Line("removed", "k")).keys["k"].versions == []


def test_a_journal_is_read_up_to_the_line_that_a_kill_truncated(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, book = Journal(path), Book()
    journal.write(Line("put", "k", 1), Line("put_done", "k", 1, places=["a"]))
    with path.open("ab") as file:
        file.write(b'["remove","k"')
    book.read(path)
    assert book.keys["k"].is_promised and book.num_acknowledged == 1
    with path.open("ab") as file:
        file.write(b"]\n")
    book.read(path)
    assert not book.keys["k"].is_promised


def test_no_two_versions_are_alike() -> None:
    assert content("k", 1) == content("k", 1)
    assert len({content(key, version) for key in ("k", "l") for version in (1, 2)}) == 4
