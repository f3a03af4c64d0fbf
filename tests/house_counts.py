# SPDX-License-Identifier: Apache-2.0
"""Counts facts about the package: modules, lines, names, circles, and words that STYLE.md rules out.

``python -m tests.house_counts`` prints them with every finding; ``tests/test_language.py`` asserts them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent

WORDS = (
    *("nobody", "somebody", "anybody", "whoever", "told", "tells", "heard", "hears"),
    *("any more", "manieth", "for ever"),
    *(
        "lent",
        "porter",
        "porters",
        "errand",
        "errands",
        "stock",
        "ballot",
        "ballots",
        "desk",
        "tally",
        "judging",
    ),
    *("lender", "lenders", "mandate", "mandates"),
)
WORD = re.compile(rf"(?<![A-Za-z])({'|'.join(WORDS)})(?![A-Za-z])", re.IGNORECASE)
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

# Nouns that end like a gerund or a participle.
NOUNS = {
    "ceilings",
    "findings",
    "greeting",
    "preallocated",
    "request_parsing",
    "serving",
    "settings",
    "siblings",
    "tiering",
    "tracing",
}


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}: {self.text.strip()[:100]}"


@dataclass
class Counts:
    """What one tree shows."""

    modules: int = 0
    lines: int = 0
    largest: tuple[int, str] = (0, "")
    twice: dict[str, list[str]] = field(default_factory=dict)
    """Class names that stand in two or more modules of the package, with these modules."""
    gerunds: list[str] = field(default_factory=list)
    of_docstrings: list[Finding] = field(default_factory=list)
    words: list[Finding] = field(default_factory=list)
    circles: list[list[str]] = field(default_factory=list)


def words_in(path: Path) -> Iterator[Finding]:
    """Find words that STYLE.md rules out in identifiers, comments, strings and prose."""
    name = str(path.relative_to(ROOT))
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for found in WORD.finditer(HUMP.sub(" ", line).replace("_", " ")):
            yield Finding(name, number, found.group(1).lower(), line)


def of_docstrings(path: Path) -> Iterator[Finding]:
    """Find docstrings that open with an elliptic "Of"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and text.lstrip().startswith("Of "):
                yield Finding(str(path.relative_to(ROOT)), node.lineno, "Of", text)


def imports(path: Path, package: Path) -> set[str]:
    """List the modules of the package that a module imports when it is loaded (not within functions)."""
    found: set[str] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
                found.add(node.module)
            elif (isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)) or isinstance(
                node, ast.Try
            ):
                visit(node.body + node.orelse)
            elif isinstance(node, ast.ClassDef):
                visit(node.body)

    visit(ast.parse(path.read_text()).body)
    return found


def module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """List the strongly connected components with more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            place = stack.index(node)
            component = stack[place:]
            del stack[place:]
            if len(component) > 1:
                found.append(sorted(component))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10_000))
    try:
        for node in sorted(graph):
            if node not in index:
                visit(node)
    finally:
        sys.setrecursionlimit(limit)
    return found


def prose(root: Path) -> list[Path]:
    """List the files whose words count; decisions and results are records of their day."""
    files = [
        path
        for folder in ("mooncake", "tests", "bench", "examples")
        for path in (root / folder).rglob("*.py")
    ]
    files += [path for path in (root / "native").iterdir() if path.suffix in {".cpp", ".h"}]
    files += [path for path in (root / "scripts").iterdir() if path.is_file()]
    files += [path for path in (root / "docs").rglob("*.md") if "decisions" not in path.parts]
    files += list(root.glob("*.md"))
    own = {root / "tests" / "house_counts.py", root / "tests" / "test_language.py", root / "STYLE.md"}
    return sorted(set(files) - own)


def count(root: Path = ROOT) -> Counts:
    """Count one tree."""
    package = root / "mooncake"
    counts = Counts()
    classes: dict[str, list[str]] = {}
    modules = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        text = path.read_text()
        num_lines = text.count("\n")
        counts.modules += 1
        counts.lines += num_lines
        counts.largest = max(counts.largest, (num_lines, name))
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(name)
        stem = name.rpartition(".")[2]
        if re.search(r"(ing|ed)s?$", stem) and stem not in NOUNS:
            counts.gerunds.append(name)
        # A package's __init__ re-exports what lies in it; a module that imports from it imports no sibling.
        graph[name] = {target for target in imports(path, package) if target in modules} - {name}
    for name, targets in graph.items():
        graph[name] = {one for one in targets if not any(other.startswith(f"{one}.") for other in targets)}
    counts.twice = {
        name: where for name, where in classes.items() if len(where) > 1 and not name.startswith("_")
    }
    counts.circles = circles(graph)
    for path in prose(root):
        counts.words += words_in(path)
        if path.suffix == ".py":
            counts.of_docstrings += of_docstrings(path)
    return counts


def main() -> None:
    counts = count()
    for finding in [*counts.words, *counts.of_docstrings]:
        print(finding)
    for name, where in sorted(counts.twice.items()):
        print(f"{name}: {', '.join(where)}")
    for circle in counts.circles:
        print("circle:", " ".join(circle))
    num_lines, largest = counts.largest
    print(f"modules: {counts.modules}, lines: {counts.lines}, largest: {largest} ({num_lines} lines)")
    print(f"class names that stand twice: {len(counts.twice)}")
    print(f"modules named by a gerund or participle: {len(counts.gerunds)}")
    print(f"circles of modules: {len(counts.circles)}")
    print(f"docstrings that open with 'Of': {len(counts.of_docstrings)}")
    print(f"words that STYLE.md rules out: {len(counts.words)}")


if __name__ == "__main__":
    main()
