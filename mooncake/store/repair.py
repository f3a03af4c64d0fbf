"""What a repair of a damaged oplog or SSD index would do, said before it is done; and doing it.

The start of a master with ``--oplog-repair``, or of a node with ``--ssd-repair``, does the same at once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

from mooncake.errors import InvalidArgument
from mooncake.files.frames import Scan
from mooncake.files.locked_directory import LockedDirectory
from mooncake.store.master.log_records import records_of
from mooncake.store.master.oplog import Oplog
from mooncake.store.node.ssd_index_log import NAME as INDEX
from mooncake.store.node.ssd_index_log import SsdIndexLog, parsed

SHOWN_BYTES = 16
"""Of each damage."""


@dataclasses.dataclass(frozen=True)
class RepairPlan:
    """What is wrong with a file."""

    file: Path
    is_index: bool
    size_bytes: int
    found: Scan
    kinds: dict[str, int]
    """How many whole records there are, by kind."""
    shown: list[str]
    """The beginning of each damage, in hexadecimal."""

    @property
    def is_damaged(self) -> bool:
        return bool(self.found.damages)

    def lines(self) -> list[str]:
        """For people."""
        found = self.found
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items())) or "none"
        lines = [f"{self.file}: {self.size_bytes} bytes; whole records: {kinds}"]
        for one, shown in zip(found.damages, self.shown, strict=True):
            lines.append(f"damaged: {one} ({shown})")
        if found.torn is not None:
            lines.append(f"cut off by a crash: {found.torn}; a start keeps these bytes beside it and goes on")
        if not self.is_damaged:
            return [*lines, "no damage: there is nothing to repair"]
        num_behind = len(found.bodies) - found.num_before
        lines.append(
            f"a repair keeps the {found.num_before} records before the damage and {num_behind} behind it"
        )
        lines.append(f"and leaves the file as it is beside it, as {self.file.name}.damaged")
        if self.is_index:
            lines.append(
                "what the lost records said of objects on this SSD is lost; the master drops what it misses"
            )
        else:
            lines.append("the next master asks every node what it holds, and takes in what its records lack;")
            lines.append("an object whose removal was among the lost records may come back")
        return lines


def plan(path: Path) -> RepairPlan:
    """Look at an oplog, or at the index in an SSD's directory; changes nothing.

    Raises:
        InvalidArgument: it is neither, or can't be read.
    """
    is_index = path.is_dir()
    file = path / INDEX if is_index else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidArgument("path", str(file), f"a file that can be read ({error})") from error
    if is_index:
        index, _ = parsed(LockedDirectory(path, "path"), content)
        found, kinds = index.found, {"index records": len(index.found.bodies)}
    else:
        found = Oplog(file).look(content)
        kinds = dict(Counter(type(record).__name__ for record in records_of(found.bodies)))
    shown = [
        content[one.offset : one.offset + min(one.num_bytes, SHOWN_BYTES)].hex(" ") for one in found.damages
    ]
    return RepairPlan(file, is_index, len(content), found, kinds, shown)


def repair(path: Path) -> None:
    """Do it, if nobody uses the file.

    Raises:
        InvalidArgument: it is neither, can't be written, or is in use.
        OutOfSpace, StorageError: the disk refuses.
    """
    if path.is_dir():
        folder = LockedDirectory(path, "path")
        try:
            folder.take()
            SsdIndexLog(folder, repairs=True).close()
        except OSError as error:
            raise folder.trouble(error) from error
        finally:
            folder.close()
    else:
        log = Oplog(path, repairs=True)
        log.read()
        log.close()
