# SPDX-License-Identifier: Apache-2.0
"""Journal of a client's actions and replies, written line by line before its next action; and its evaluation.

The journal is a file to which every line is one ``write``: data that the kernel has accepted survives the
client's SIGKILL. ``Book`` reads it and knows for every key which versions must or may exist, and which
processes' deaths the object must survive.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from pathlib import Path

import msgspec
import numpy as np

SIZES = (1, 100, 4096, 60_000, 300_000)


def content(key: str, version: int) -> bytes:
    """The value of version ``version`` of ``key``."""
    seed = zlib.crc32(f"{key} {version}".encode())
    size = SIZES[seed % len(SIZES)] + seed % 97
    return np.random.default_rng(seed).bytes(size)


class Line(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """``what``: put, put_done, put_refused, remove, removed, not_removed, wrong, or unknown (no answer)."""

    what: str
    key: str
    version: int = 0
    is_durable: bool = False
    places: list[str] = []
    """With put_done: the memory segments that have it."""
    more: str = ""


class Journal:
    """Writer of a journal, used by the client."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def write(self, *lines: Line) -> None:
        os.write(self._file, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


@dataclasses.dataclass(eq=False)
class Kept:
    """State of one key."""

    versions: list[int] = dataclasses.field(default_factory=list)
    """Versions that a reader may find; none: the key must be absent."""
    may_be_absent: bool = True
    is_durable: bool = False
    places: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_promised(self) -> bool:
        """Whether the key must be readable: acknowledged, and nothing has happened that may remove it."""
        return bool(self.versions) and not self.may_be_absent and (self.is_durable or bool(self.places))


class Book:
    """Reader of journals, used by the checker."""

    def __init__(self) -> None:
        self.keys: dict[str, Kept] = {}
        self.wrong: list[str] = []
        """Violations found by the clients themselves."""
        self.num_acknowledged = 0
        self._read: dict[Path, int] = {}

    def read(self, path: Path) -> None:
        """Read the part of a journal that was not read yet."""
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
        whole = data.rfind(b"\n") + 1  # a killed client's last line may be half
        self._read[path] = self._read.get(path, 0) + whole
        for line in data[:whole].splitlines():
            self.note(msgspec.json.decode(line, type=Line))

    def note(self, line: Line) -> None:
        kept = self.keys.setdefault(line.key, Kept())
        match line.what:
            case "put":  # begun: from now on it may be there, and what it replaces may be gone
                kept.versions.append(line.version)
                kept.is_durable, kept.places = kept.is_durable and line.is_durable, []
            case "put_done":
                kept.versions = [line.version]
                kept.may_be_absent, kept.is_durable, kept.places = False, line.is_durable, line.places
                self.num_acknowledged += 1
            case "put_refused":
                kept.versions = [version for version in kept.versions if version != line.version]
            case "remove":
                kept.may_be_absent = True
            case "removed":
                kept.versions, kept.may_be_absent = [], True
                self.num_acknowledged += 1
            case "not_removed":
                kept.may_be_absent = False
            case "wrong":
                self.wrong.append(f"{line.key} version {line.version}: {line.more}")

    def died(self, segment: str) -> None:
        """Note that the process with this memory segment ended, and its bytes are lost."""
        for kept in self.keys.values():
            if segment in kept.places:
                kept.places = [place for place in kept.places if place != segment]

    def forget(self, key: str) -> None:
        del self.keys[key]
