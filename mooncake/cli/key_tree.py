# SPDX-License-Identifier: Apache-2.0
"""Prefixes of keys as a tree with sums, and the tree as lines: ``mooncake store ls`` in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.text import Text
from rich.tree import Tree

from mooncake.cli.output import printable, size_text

MAX_BELOW = 20
"""Maximum number of prefixes shown below one, the largest; JSON has all."""


class KeyPrefix(msgspec.Struct):
    """A prefix with the objects under it, those of the prefixes below it included."""

    name: str
    "Its part below the prefix above it; the whole prefix at the top."
    num_objects: int = 0
    size_bytes: int = 0
    num_own: int = 0
    "Objects that count at no prefix below it."
    below: list[KeyPrefix] = []


def prefix_tree(rows: Sequence[tuple[str, int, int]], prefix: str, separator: str) -> KeyPrefix:
    """The tree of ``rows`` (prefix, own objects, their bytes), all of which begin with ``prefix``."""
    root = KeyPrefix(prefix)
    found: dict[str, KeyPrefix] = {prefix: root}
    for name, number, size in rows:
        path = [root]
        end = len(prefix)
        while end < len(name):
            begin, end = end, name.index(separator, end) + len(separator)
            node = found.get(name[:end])
            if node is None:
                node = found[name[:end]] = KeyPrefix(name[begin:end])
                path[-1].below.append(node)
            path.append(node)
        path[-1].num_own += number
        for node in path:
            node.num_objects += number
            node.size_bytes += size
    for node in found.values():
        node.below.sort(key=lambda one: (-one.size_bytes, one.name))
    return root


def drawn_tree(root: KeyPrefix) -> Tree:
    """The tree for a terminal, the largest prefixes first."""
    tree = Tree(_line(root, root.name or "all keys"), guide_style="dim")
    _add(tree, root)
    return tree


def _add(tree: Tree, node: KeyPrefix) -> None:
    shown, others = node.below[:MAX_BELOW], node.below[MAX_BELOW:]
    for one in shown:
        _add(tree.add(_line(one, one.name)), one)
    if others:
        number, size = sum(one.num_objects for one in others), sum(one.size_bytes for one in others)
        tree.add(_line(KeyPrefix("", number, size), f"… {len(others):,} more prefixes"))


def _line(node: KeyPrefix, name: str) -> Text:
    own = f", {node.num_own:,} of them here" if node.below and node.num_own else ""
    objects = "object" if node.num_objects == 1 else "objects"
    return Text.assemble(
        printable(name), (f"  {node.num_objects:,} {objects}, {size_text(node.size_bytes)}{own}", "dim")
    )
