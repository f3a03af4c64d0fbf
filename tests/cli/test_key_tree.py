# SPDX-License-Identifier: Apache-2.0
"""Prefixes as a tree: sums, order, and names that a terminal can't misread."""

from __future__ import annotations

from rich.console import Console

from mooncake.cli.key_tree import MAX_BELOW, drawn_tree, prefix_tree
from mooncake.cli.output import printable

ROWS = [("", 1, 10), ("kv/a/", 2, 2048), ("kv/", 1, 512), ("w/", 1, 4096)]


def test_sums_and_order() -> None:
    root = prefix_tree(ROWS, "", "/")
    assert (root.num_objects, root.size_bytes, root.num_own) == (5, 6666, 1)
    assert [(one.name, one.num_objects, one.size_bytes) for one in root.below] == [
        ("w/", 1, 4096),
        ("kv/", 3, 2560),
    ]
    (inner,) = root.below[1].below
    assert (inner.name, inner.num_objects, inner.below) == ("a/", 2, [])


def test_a_tree_below_a_prefix_and_with_another_separator() -> None:
    root = prefix_tree([("kv/a/", 0, 0), ("kv/a/b/", 3, 30)], "kv/a/", "/")
    assert (root.name, root.num_objects, [one.name for one in root.below]) == ("kv/a/", 3, ["b/"])
    (one,) = prefix_tree([("m::", 1, 8)], "", "::").below
    assert one.name == "m::"


def test_lines() -> None:
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(drawn_tree(prefix_tree(ROWS, "", "/")))
    assert captured.get().splitlines() == [
        "all keys  5 objects, 6.51 KiB, 1 of them here",
        "├── w/  1 object, 4 KiB",
        "└── kv/  3 objects, 2.5 KiB, 1 of them here",
        "    └── a/  2 objects, 2 KiB",
    ]


def test_names_can_not_command_a_terminal() -> None:
    assert printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\\x0a"
    assert printable("[bold]ü") == "[bold]ü"


def test_many_prefixes_are_summed_up_below_the_largest() -> None:
    rows = [(f"{number}/", 1, number) for number in range(1, MAX_BELOW + 31)]
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(drawn_tree(prefix_tree(rows, "", "/")))
    lines = captured.get().splitlines()
    assert len(lines) == MAX_BELOW + 2 and lines[1].startswith(f"├── {MAX_BELOW + 30}/")
    assert lines[-1] == f"└── … 30 more prefixes  30 objects, {sum(range(31))} B"
