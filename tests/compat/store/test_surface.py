# SPDX-License-Identifier: Apache-2.0
"""Every name and signature of the existing package's ``mooncake.store`` exists here, or is listed as missing.

``surface.txt`` is a recording of that package's own introspection; ``argN`` is a parameter that it does
not name.
"""

from __future__ import annotations

import copy
import enum
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mooncake.store
from mooncake.store import ReplicateConfig

HERE = Path(__file__).parent
LINES = (HERE / "surface.txt").read_text().splitlines()
DOCS = (HERE.parents[2] / "docs" / "store.md").read_text()

LISTED = set(re.findall(r"`([\w.]+)`", DOCS[DOCS.index("## Not there") :]))
"""Names that docs/store.md lists as missing, with the reason."""


def name_of(line: str) -> str:
    return re.split(r"[(:]", line)[0]


@pytest.mark.parametrize("line", LINES)
def test_the_name_exists(line: str) -> None:
    name = name_of(line)
    first, _, second = name.partition(".")
    if name in LISTED or first in LISTED:
        return
    owner = getattr(mooncake.store, first)
    thing = _member(owner, second) if second else owner
    if ": " in line:
        assert type(owner).__name__ == line.partition(": ")[2]
    elif second == "__init__" and issubclass(owner, enum.IntEnum):
        assert owner(0).value == 0
    elif "(" in line:
        _same_parameters(line[line.index("(") + 1 : -1], thing)


def test_a_star_import_has_every_public_name() -> None:
    found: dict[str, Any] = {}
    exec("from mooncake.store import *", found)
    theirs = {name_of(line).partition(".")[0] for line in LINES} - LISTED
    public = {name for name in theirs if not name.startswith("_")}
    assert public <= set(found) and len(public) > 30
    assert found["BufferPool"] is mooncake.store.BufferPool


def _member(owner: Any, name: str) -> Any:
    found = inspect.getattr_static(owner, name, None)
    if found is None:
        assert name in owner.__init__.__code__.co_varnames or name in dir(owner()), f"no {name}"
        return None
    return getattr(owner, name, found)


def _same_parameters(theirs: str, call: Any) -> None:
    ours = [p for p in inspect.signature(call).parameters.values() if p.name != "self"]
    wanted = re.findall(r"(\*?\w+)(?:=((?:'[^']*'|\w+\(\)|-?\w+)))?", theirs)
    assert len(ours) >= len(wanted), f"{theirs} but {ours}"
    for parameter in ours[len(wanted) :]:
        assert parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ), f"{parameter} is required"
    for parameter, (name, default) in zip(ours, wanted, strict=False):
        if name == "*args":
            assert parameter.kind is parameter.VAR_POSITIONAL
            continue
        if not re.fullmatch(r"arg\d", name):
            assert parameter.name == name and parameter.kind is not parameter.POSITIONAL_ONLY
        if default == "ReplicateConfig()":
            assert parameter.default is None or isinstance(parameter.default, ReplicateConfig)
        elif default:
            assert repr(parameter.default) == default


def test_names_listed_as_missing_are_missing() -> None:
    for name in LISTED & {name_of(line) for line in LINES}:
        first, _, second = name.partition(".")
        owner = getattr(mooncake.store, first, None)
        assert owner is None or (second and not hasattr(owner, second)), f"{name} exists"


def test_dir_of_the_module() -> None:
    names = {name_of(line).partition(".")[0] for line in LINES} - LISTED
    assert names <= set(dir(mooncake.store))


def test_names_of_the_package_itself() -> None:
    from mooncake import BufferPool, MooncakeDistributedStore, ReplicateConfig

    assert MooncakeDistributedStore is mooncake.store.MooncakeDistributedStore
    assert ReplicateConfig is mooncake.store.ReplicateConfig and BufferPool is mooncake.store.BufferPool
    with pytest.raises(AttributeError, match="NoSuchName"):
        mooncake.NoSuchName  # noqa: B018
    with pytest.raises(AttributeError, match="NoSuchName"):
        mooncake.store.NoSuchName  # noqa: B018


def test_names_of_types_are_those_that_programs_import() -> None:
    """In ``repr``, in error messages and in pickles, which another version of this package may read."""
    upstream = [getattr(mooncake.store, name) for name in mooncake.store._UPSTREAM]
    kinds = {kind for kind in upstream if isinstance(kind, type)}
    assert kinds and {kind.__module__ for kind in kinds} == {"mooncake.store"}
    assert pickle.loads(pickle.dumps(mooncake.store.TENSOR)) is mooncake.store.TENSOR
    with pytest.raises(TypeError, match=r"^MooncakeDistributedStore\.put\(\) missing"):
        mooncake.store.MooncakeDistributedStore().put()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^MooncakeDistributedStore\.setup\(\) missing"):
        mooncake.store.MooncakeDistributedStore().setup()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_store_cannot_be_copied(duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="cannot pickle 'MooncakeDistributedStore'"):
        duplicate(mooncake.store.MooncakeDistributedStore())
