# SPDX-License-Identifier: Apache-2.0
"""Wheels without a module that carry the existing package's names and require this one.

Requirement lines of vLLM, SGLang and others name ``mooncake-transfer-engine``; pip compares names of
distributions, not what they contain. A wheel of metadata only answers such a line with ours, and
``scripts/wheel`` calls this beside building our own wheel. The standard library is enough: a build backend
would need three folders and an index.

    python aliases/wheels.py FOLDER [LEVEL]
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

NAMES = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13")
LEVEL = "0.3.13.post1"
"""Version of the existing package whose surface ours has."""
EPOCH = (1980, 1, 1, 0, 0, 0)


def our_version() -> str:
    source = Path(__file__).parent.parent / "mooncake" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"$', source.read_text(), re.M)
    assert found is not None, f"{source} has no __version__"
    return found[1]


def alias_version(level: str, ours: str) -> str:
    """Level of the existing package, with our version as local label: equal to the level for requirement
    lines without one, and recognizable, because a public index takes no local label."""
    return f"{level}+serving.{ours}"


def write_wheel(folder: Path, name: str, version: str, requires: list[str]) -> Path:
    """Write a wheel that contains nothing but metadata, the same bytes each time."""
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        "Summary: Alias of mooncake-serving, for requirement lines that name the existing package",
        "License: Apache-2.0",
        "Requires-Python: >=3.11",
        *(f"Requires-Dist: {line}" for line in requires),
    ]
    tags = ["Wheel-Version: 1.0", "Generator: mooncake-serving", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    files = {"METADATA": "\n".join(metadata) + "\n", "WHEEL": "\n".join(tags) + "\n"}
    records = [_record(f"{stem}.dist-info/{file}", text) for file, text in files.items()]
    files["RECORD"] = "\n".join([*records, f"{stem}.dist-info/RECORD,,"]) + "\n"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        for file, text in files.items():
            written.writestr(zipfile.ZipInfo(f"{stem}.dist-info/{file}", EPOCH), text)
    return wheel


def _record(path: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(text.encode())}"


def write_aliases(folder: Path, level: str = LEVEL) -> list[Path]:
    """One wheel for each name. Several may be installed together: they have no file in common."""
    ours = our_version()
    needed = [f"mooncake-serving[cli,gateway]=={ours}"]  # the extras are for the existing package's programs
    return [write_wheel(folder, name, alias_version(level, ours), needed) for name in NAMES]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python aliases/wheels.py FOLDER [LEVEL]")
    for made in write_aliases(Path(sys.argv[1]), *sys.argv[2:]):
        print(made)
