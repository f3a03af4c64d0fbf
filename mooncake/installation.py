# SPDX-License-Identifier: Apache-2.0
"""Whether the folder of this package is as it was installed.

The existing package installs into a folder of the same name. pip overwrites without a question; an extension
module (``engine.so``) hides our module of that name, and our package (``store``) hides their module. What is
left fails much later, in words that name neither distribution. ``mooncake`` and ``mooncake.store`` check this
when they are imported, because ``mooncake/__init__.py`` may be the other's; a check lists the folder once.
The native extension is missing where a checkout that was not built lies before the installed package on the
path of modules, as with ``python -c`` or ``python -m`` in that folder; ``mooncake.transfer`` asks why.
"""

from __future__ import annotations

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
FOREIGN_MODULES = ("engine.", "store.")
"""The existing package's extension modules, where we have a module and a package."""
REINSTALL = (
    "Run `pip install --force-reinstall --no-deps mooncake-serving`, with the path of its wheel where no "
    "index has it (docs/install.md)."
)


def check_folder(folder: str = FOLDER) -> None:
    """Check that the files are ours, where they are files.

    Modules that lie in an archive (a zip file, a program made by PyInstaller), or in a folder that may not
    be listed, were not installed by pip into that folder: nothing is checked.

    Raises:
        ImportError: those of another distribution are among them, or took some of ours when they went.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    if not any(name.startswith("installation.") for name in names):
        return
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


def why_no_native(folder: str = FOLDER) -> str:
    """Say why ``mooncake._native`` is not found: where this package was imported from, and what to do."""
    others = _extensions(folder)
    if others:
        return (
            f"mooncake was imported from {folder}, whose native extension ({', '.join(others)}) is built for "
            f"another Python than this one ({sys.implementation.cache_tag}). {REINSTALL}"
        )
    parent = os.path.dirname(folder)
    if not os.path.exists(os.path.join(parent, "CMakeLists.txt")):
        return f"mooncake was imported from {folder}, which has no native extension. {REINSTALL}"
    entries = (os.path.join(os.path.abspath(entry), "mooncake") for entry in sys.path)
    elsewhere = next((other for other in entries if other != folder and _extensions(other)), None)
    advice = f"To use the checkout run `make serve` or scripts/install in it, then {parent}/.venv/bin/python."
    if elsewhere is not None:
        advice = (
            f"To use the package that is installed in {elsewhere}, start Python in another folder, or as "
            f"`python -P`. {advice}"
        )
    return (
        f"mooncake was imported from the checkout {parent}, in which its native extension is not built for "
        f"this Python. {advice}"
    )


def _extensions(folder: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(name for name in names if name.startswith("_native.") and name.endswith(".so"))
