# SPDX-License-Identifier: Apache-2.0
"""Whether the folder of this package is as it was installed.

The existing package installs into a folder of the same name. pip overwrites without a question; an extension
module (``engine.so``) hides our module of that name, and our package (``store``) hides their module. What is
left fails much later, in words that name neither distribution. ``mooncake`` and ``mooncake.store`` check this
when they are imported, because ``mooncake/__init__.py`` may be the other's; a check lists the folder once.
"""

from __future__ import annotations

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
FOREIGN_MODULES = ("engine.", "store.")
"""The existing package's extension modules, where we have a module and a package."""
REINSTALL = (
    "Run `pip install --force-reinstall --no-deps mooncake-serving`, with the path of its wheel where no "
    "index has it (docs/install.md)."
)


def check_folder(folder: str = FOLDER) -> None:
    """Check that the files are ours.

    Raises:
        ImportError: those of another distribution are among them, or took some of ours when they went.
    """
    names = os.listdir(folder)
    foreign = [name for name in names if name.startswith(FOREIGN_MODULES) and name.endswith(".so")]
    if foreign:
        raise ImportError(_mixed(folder, sorted(foreign)))
    if not any(name.startswith("__init__.") for name in names):
        raise ImportError(
            f"{folder} has no __init__.py: another distribution that had files of the same names was "
            f"uninstalled. {REINSTALL}"
        )


def _mixed(folder: str, foreign: list[str]) -> str:
    owners = _owners(folder, foreign)
    named = " and ".join(f"{name} {version}" for name, version in owners) or "another distribution"
    uninstalled = " ".join(name for name, _ in owners) or "mooncake-transfer-engine"
    return (
        f"{folder} has files of mooncake-serving and of {named} ({', '.join(foreign)}), which hide each "
        f"other. To keep mooncake-serving run `pip uninstall -y {uninstalled}` first. {REINSTALL} To keep "
        "the other one, uninstall both and install it again."
    )


def _owners(folder: str, files: list[str]) -> list[tuple[str, str]]:
    """Names and versions of the distributions that brought ``files``. An alias of ours brings none."""
    from importlib.metadata import distributions  # here: it is slow, and needed only before a failure

    parent, package = os.path.split(folder)
    paths = {f"{package}/{name}" for name in files}
    return sorted(
        (one.metadata["Name"], one.version)
        for one in distributions(path=[parent])
        if any(str(file) in paths for file in one.files or ())
    )
