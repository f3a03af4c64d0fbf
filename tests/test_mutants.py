# SPDX-License-Identifier: Apache-2.0
"""The list of mutants is complete, and the runner counts no mutant as killed that was never made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.mutants import ROOT, Mutant, Tree, made, mutants

FINE = Mutant(
    name="x", file="core.py", old="a and b", new="a", tests=("tests/test_core.py",), why="it would hurt"
)


def test_every_mutant_says_what_it_would_do_and_which_tests_must_fail() -> None:
    found = mutants()
    assert len({one.name for one in found}) == len(found), "two have one name"
    chosen = [one for one in found if one.sample == "chosen"]
    assert len(chosen) >= 43
    for one in found:
        assert one.why and one.tests and one.old != one.new, one.name
        assert one.sample in ("chosen", "unbiased"), one.name
        assert all(any(ROOT.glob(pattern)) for pattern in one.tests), f"{one.name}: no such tests"


def test_a_text_that_is_not_there_once_is_no_mutant(tmp_path: Path) -> None:
    core = tmp_path / "core.py"
    core.write_text("def f(a, b):\n    return a and b\n")
    assert made(FINE, tmp_path) == "def f(a, b):\n    return a\n"
    core.write_text("def f(a, b):\n    return a or b\n")
    with pytest.raises(ValueError, match="0 times"):
        made(FINE, tmp_path)
    core.write_text("x = a and b\ny = a and b\n")
    with pytest.raises(ValueError, match="2 times"):
        made(FINE, tmp_path)
    with pytest.raises(ValueError, match="0 times"):
        made(dataclasses.replace(FINE, file="elsewhere.py"), tmp_path)


def test_an_entry_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mutants.toml"
    file.write_text('[[mutant]]\nname = "a"\nfile = "b"\nold = "c"\nnew = "d"\ntests = []\nbecause = "e"\n')
    with pytest.raises(ValueError, match=r"mutants.toml: a: .*because"):
        mutants(file)


@pytest.mark.processes
def test_killed_survived_accepted_and_gone_are_distinguished(tmp_path: Path) -> None:
    """In a real copy of this tree, with one real core and one real test file."""
    tree = Tree(tmp_path)
    fine = Mutant(
        name="short key",
        file="mooncake/prefix.py",
        old="int.from_bytes(block_hash[:8], ",
        new="int.from_bytes(block_hash[:7], ",
        tests=("tests/test_prefix.py",),
        why="blocks are mistaken for each other",
    )
    framing = next(one for one in mutants() if one.name.startswith("prefix:"))
    before = (tmp_path / framing.file).read_text()
    assert tree.judge(framing) == ("killed", framing.why)
    assert (tmp_path / framing.file).read_text() == before, "the next one begins from the real code"
    harmless = dataclasses.replace(fine, old='_VERSION = b"', new='_VERSION = b"" b"')
    assert tree.judge(harmless) == ("SURVIVED", fine.why)
    assert tree.judge(dataclasses.replace(harmless, accepted="equivalent")) == ("accepted", "equivalent")
    assert tree.judge(dataclasses.replace(fine, old="not in it"))[0] == "GONE"
    assert tree.judge(dataclasses.replace(fine, tests=("tests/nothing.py",)))[0] == "GONE"
