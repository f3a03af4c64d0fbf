# SPDX-License-Identifier: Apache-2.0
"""``scripts/mutants``: clauses that have a reason, each taken away in a copy of the tree; a test must fail.

Owns the runner; the list is ``tests/mutants.toml``. A mutant has the file to change, the exact text that must
be in it once, the replacement, the tests to run, and the effect of the mutant on a user. Where a text is not
found, the list is out of date and the run reports it: a mutant that is not made proves nothing. Before a
mutant counts as killed its tests must have passed without it. Code that the tests start in processes of their
own is not mutated. A mutant that survives is an error unless the list says why that is accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_name("mutants.toml")
TIMEOUT_S = 600.0

# An editable installation maps names to the files of this checkout; the copy must be found instead.
RUN = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "ScikitBuild" not in type(one).__name__]
sys.path.insert(0, sys.argv[1])
import mooncake
assert mooncake.__file__.startswith(sys.argv[1]), mooncake.__file__
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One clause, with the harm that ``why`` describes when it is missing."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    "Files, as patterns; the nearest first."
    why: str
    accepted: str = ""
    "Why it may survive; empty: it may not."
    sample: str = "chosen"
    "``chosen`` for its harm, or found by an ``unbiased`` sample."
    select: str = ""
    "pytest's -k, where the files hold many unrelated tests."


def mutants(file: Path = LIST) -> list[Mutant]:
    """Load the list. Raises ValueError for a field that is missing or unknown."""
    found = []
    for fields in tomllib.loads(file.read_text())["mutant"]:
        try:
            found.append(Mutant(**{**fields, "tests": tuple(fields["tests"])}))
        except (TypeError, KeyError) as error:
            raise ValueError(f"{file.name}: {fields.get('name', fields)}: {error}") from error
    return found


def made(mutant: Mutant, root: Path) -> str:
    """The file's text with the mutant in it. Raises ValueError unless its text is there exactly once."""
    path = root / mutant.file
    text = path.read_text() if path.exists() else ""
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"the text is in {mutant.file} {count} times, not once: {mutant.old.strip()!r}")
    return text.replace(mutant.old, mutant.new)


class Tree:
    """A copy of the files of this checkout that git knows, and of the native module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._passed: dict[tuple[str, ...], bool] = {}
        words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        where = "import mooncake._native as n; print(n.__file__)"
        native = subprocess.run([sys.executable, "-c", where], capture_output=True, text=True, check=True)
        built = Path(native.stdout.strip())
        for path in (built, built.with_name("raw_stream")):
            if path.exists():
                shutil.copy2(path, folder / "mooncake" / path.name)

    def files(self, mutant: Mutant) -> list[str]:
        """The files of its tests. Raises ValueError for a pattern that matches no file."""
        found: dict[str, None] = {}
        for pattern in mutant.tests:
            matches = sorted(self.folder.glob(pattern))
            if not matches:
                raise ValueError(f"no file matches {pattern}")
            found.update(dict.fromkeys(str(path.relative_to(self.folder)) for path in matches))
        return list(found)

    def fails(self, files: Sequence[str], select: str) -> bool | None:
        """Whether a test fails; None when pytest could not run them."""
        command = [sys.executable, "-P", "-c", RUN, str(self.folder), "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "no:randomly", *(["-k", select] if select else []), *files]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("CI", None)
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return True  # it hangs, which the tests' own limits detect later
        self.output = done.stdout + done.stderr
        return {0: False, 1: True}.get(done.returncode)

    def passes(self, files: Sequence[str], select: str) -> bool:
        """Whether the tests pass without any mutant; run once."""
        key = (*files, select)
        if key not in self._passed:
            self._passed[key] = self.fails(files, select) is False
        return self._passed[key]

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """The state of a mutant, and a remark."""
        try:
            text = made(mutant, self.folder)
            files = self.files(mutant)
        except ValueError as error:
            return "GONE", str(error)
        path = self.folder / mutant.file
        before = path.read_text()
        path.write_text(text)
        try:
            fails = self.fails(files, mutant.select)
        finally:
            path.write_text(before)
        if fails is None:
            return "BROKEN", self.output[-400:].strip()
        if not fails:
            return ("accepted", mutant.accepted) if mutant.accepted else ("SURVIVED", mutant.why)
        if not self.passes(files, mutant.select):
            return "BROKEN", "its tests fail without it, too"
        return "killed", mutant.why


def run(chosen: Sequence[Mutant]) -> Iterator[tuple[Mutant, str, str, float]]:
    with tempfile.TemporaryDirectory(prefix="mooncake-mutants-") as folder:
        tree = Tree(Path(folder))
        for mutant in chosen:
            began = time.monotonic()
            state, remark = tree.judge(mutant)
            yield mutant, state, remark, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose name or file holds one of these")
    parser.add_argument("--list", action="store_true", help="show the list, and whether its texts are found")
    arguments = parser.parse_args()
    chosen = [
        one
        for one in mutants()
        if not arguments.words or any(word in one.name or word in one.file for word in arguments.words)
    ]
    if arguments.list:
        num_gone = 0
        for one in chosen:
            try:
                made(one, ROOT)
                state = "found"
            except ValueError:
                state, num_gone = "GONE", num_gone + 1
            print(f"{state:6} {one.name:44} {one.file}  {one.why}")
        return 1 if num_gone else 0
    counts: dict[str, dict[str, int]] = {}
    for mutant, state, remark, seconds in run(chosen):
        counts.setdefault(mutant.sample, {}).setdefault(state, 0)
        counts[mutant.sample][state] += 1
        print(f"{state:9} {seconds:6.1f} s  {mutant.name:44} {remark}", flush=True)
    for sample, states in counts.items():
        summary = ", ".join(f"{count} {state}" for state, count in states.items())
        print(f"{sample}: {summary}, of {sum(states.values())}")
    return 1 if {state for states in counts.values() for state in states} - {"killed", "accepted"} else 0


if __name__ == "__main__":
    sys.exit(main())
