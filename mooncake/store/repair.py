# SPDX-License-Identifier: Apache-2.0
"""Repair of a damaged oplog or SSD directory: a plan that says what would be done, and the repair itself.

Starting a master with ``--oplog-repair``, or a node with ``--ssd-repair``, repairs without a plan.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

from mooncake.errors import InvalidArgument
from mooncake.files import LockedDirectory
from mooncake.files.frames import Scan
from mooncake.store.master.log_records import records_of
from mooncake.store.master.oplog import Oplog
from mooncake.store.node.ssd import OR_EMPTY, LostData, drop_lost, lost_data
from mooncake.store.node.ssd_index_log import NAME as INDEX
from mooncake.store.node.ssd_index_log import SsdIndexLog, parsed

SHOWN_BYTES = 16
"""Number of bytes shown of each damage."""


@dataclasses.dataclass(frozen=True)
class RepairPlan:
    """Damage of a file and what a repair would keep."""

    file: Path
    is_index: bool
    size_bytes: int
    found: Scan
    kinds: dict[str, int]
    """Kind -> number of whole records."""
    shown: list[str]
    """The beginning of each damage, in hexadecimal."""
    lost_data: LostData | None = None
    """What the data file beside an index lacks."""

    @property
    def is_damaged(self) -> bool:
        return bool(self.found.damages) or self.lost_data is not None

    def lines(self) -> list[str]:
        """The plan as text."""
        found = self.found
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items())) or "none"
        lines = [f"{self.file}: {self.size_bytes} bytes; whole records: {kinds}"]
        for one, shown in zip(found.damages, self.shown, strict=True):
            lines.append(f"damaged: {one} ({shown})")
        if found.torn is not None:
            lines.append(f"cut off by a crash: {found.torn}; a start saves these bytes beside it and goes on")
        if not self.is_damaged:
            return [*lines, "no damage: there is nothing to repair"]
        if found.damages:
            lines += self._lines_of_records()
        loss = self.lost_data
        if loss is not None:
            num_whole = loss.num_objects - len(loss.object_ids)
            lines.append(f"damaged: {loss}")
            lines.append(
                f"a repair keeps the {num_whole} objects whose bytes are there, and drops the others;"
            )
            lines.append(f"the index stays as it is beside it, as {self.file.name}.damaged;")
            lines.append(
                "if the file may be elsewhere, look for it first: what is dropped is lost unless other"
            )
            lines.append("nodes hold it;")
            lines.append(OR_EMPTY)
        return lines

    def _lines_of_records(self) -> list[str]:
        found = self.found
        num_behind = len(found.bodies) - found.num_before
        lines = [
            f"a repair keeps the {found.num_before} records before the damage and {num_behind} behind it",
            f"and leaves the file as it is beside it, as {self.file.name}.damaged",
        ]
        if self.is_index:
            lines.append("objects of this SSD that only lost records name are lost; the master drops them")
        else:
            lines.append("the next master has all nodes report their objects, and adds those it lacks;")
            lines.append("an object whose removal was among the lost records may come back")
        return lines


def plan(path: Path) -> RepairPlan:
    """Examine an oplog, or the index in an SSD's directory, without changing it.

    Raises:
        InvalidArgument: it is neither, or can't be read.
    """
    is_index = path.is_dir()
    file = path / INDEX if is_index else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidArgument("path", str(file), f"a file that can be read ({error})") from error
    loss = None
    if is_index:
        index, _ = parsed(LockedDirectory(path, "path"), content)
        loss = lost_data(index, path)
        found, kinds = index.found, {"index records": len(index.found.bodies)}
    else:
        found = Oplog(file).look(content)
        kinds = dict(Counter(type(record).__name__ for record in records_of(found.bodies)))
    shown = [
        content[one.offset : one.offset + min(one.num_bytes, SHOWN_BYTES)].hex(" ") for one in found.damages
    ]
    return RepairPlan(file, is_index, len(content), found, kinds, shown, loss)


def repair(path: Path) -> None:
    """Repair an oplog or an index that no process uses.

    Raises:
        InvalidArgument: it is neither, can't be written, or is in use.
        OutOfSpace, StorageError: the disk refuses.
    """
    if path.is_dir():
        folder = LockedDirectory(path, "path")
        try:
            folder.take()
            index = SsdIndexLog(folder, repairs=True)
            try:
                loss = lost_data(index.index, path)
                if loss is not None:
                    drop_lost(folder, index, loss)
            finally:
                index.close()
        except OSError as error:
            raise folder.trouble(error) from error
        finally:
            folder.close()
    else:
        log = Oplog(path, repairs=True)
        log.read()
        log.close()
