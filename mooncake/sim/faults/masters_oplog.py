# SPDX-License-Identifier: Apache-2.0
"""A master's log in a simulated directory: what ``oplog.py`` and ``oplog_writer.py`` do with real files.

Records are appended before any answer is sent, copied into a new file piece by piece when a leader is
followed or when the log has grown, and read again by the next incarnation of the process. An older version
writes records without the latest optional fields, and reads none of them.
"""

from __future__ import annotations

import msgspec

from mooncake.errors import Unavailable
from mooncake.sim.faults.pausable_process import PausableProcess
from mooncake.sim.faults.sim_files import SimDirectory, SimFile
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.log_records import LineBegan, Record, SpaceHeld, decode, encode
from mooncake.store.master.snapshot import Snapshot

NAME, NEXT = "oplog", "oplog.new"
HEADER_BYTES = 16
PIECE = 5
"""Objects copied at a time: few, so that much happens in between."""
PAUSE_S = 0.01
COMPACTION_BYTES = 8192
NEWEST: dict[type, dict[str, object]] = {
    LineBegan: {"lease_s": 0.0, "rest_s": 0.0},
    SpaceHeld: {"key": "", "object_id": 0},
}
"""The latest optional fields of each record, with the values that a reader without them assumes."""


def as_known_to_old(records: list[Record]) -> list[Record]:
    """Records as an older version writes them."""
    return [
        msgspec.structs.replace(record, **NEWEST[type(record)]) if type(record) in NEWEST else record
        for record in records
    ]


class SimOplog:
    """Implements ``role.Log`` for one incarnation of a process."""

    def __init__(self, process: PausableProcess, directory: SimDirectory, is_old: bool) -> None:
        self._process = process
        self._directory = directory
        self._is_old = is_old
        self._file = directory.open(NAME, is_locked=True)
        self._anew: SimFile | None = None
        self._copy: Snapshot | None = None
        """Snapshot of this master's own state, while its log is compacted."""
        self._compacted_bytes = 0
        self.num_compactions = 0
        self.possible: list[list[Record]] = []
        """What the next incarnation may read after records could not be written: some of them may have
        been."""
        self.id = ""

    def read(self) -> list[Record]:
        content = self._file.read()
        if len(content) < HEADER_BYTES:
            self._file.truncate(0)
            content = f"{self._directory.random.getrandbits(60):015x}\n".encode()
            self._file.append(content)
            self._file.sync()
        self.id = content[: HEADER_BYTES - 1].decode()
        records, size_bytes = decode(content[HEADER_BYTES:])
        self._file.truncate(HEADER_BYTES + size_bytes)
        self._compacted_bytes = self._file.size_bytes
        return self._known(records)

    def write_back(self) -> None:
        """Write back as the system does by itself after a while."""
        if not self._directory.sync_error:
            self._file.sync()
            self._directory.sync()
            self._directory.take_late_s()

    def keep(self, records: list[Record], catalog: Catalog) -> None:
        records = self._known(records)
        before = self._file.size_bytes
        try:
            self._file.append(encode(records))
        except OSError as error:
            written, _ = decode(self._file.read()[HEADER_BYTES:before])
            self.possible = [written + records[:count] for count in range(len(records) + 1)]
            raise Unavailable(f"the log can't be written: {error}") from error
        if self._anew is not None and self._copy is not None:
            self._append_anew(self._copy.between(records))
        elif self._anew is None and self._file.size_bytes > max(COMPACTION_BYTES, 2 * self._compacted_bytes):
            self._begin_anew()
            self._copy = Snapshot(catalog)
            self._compact(self._copy)
        self._suspend()

    def begin_copy(self) -> None:
        self._copy = None
        try:
            self._begin_anew()
        except OSError as error:
            raise Unavailable(f"the log can't be written: {error}") from error

    def copied(self, records: list[Record], is_complete: bool) -> None:
        if self._anew is None:
            return
        try:
            self._anew.append(encode(self._known(records)))
            if is_complete:
                self._take_place()
        except OSError as error:
            raise Unavailable(f"the log can't be written: {error}") from error
        self._suspend()

    def _compact(self, copy: Snapshot) -> None:
        if self._copy is not copy or self._anew is None:
            return
        if not self._append_anew(copy.piece(PIECE)):
            return
        if copy.is_over:
            try:
                self._take_place()
                self.num_compactions += 1
            except OSError:
                self._give_up()
            self._copy = None
        else:
            self._process.after(PAUSE_S, lambda: self._compact(copy))
        self._suspend()

    def stop_compacting(self) -> None:
        if self._copy is not None:
            self._give_up()

    def _append_anew(self, records: list[Record]) -> bool:
        """Returns False if the disk refuses it; the log then keeps growing."""
        assert self._anew is not None
        try:
            self._anew.append(encode(self._known(records)))
        except OSError:
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        self._anew = self._copy = None
        self._compacted_bytes = self._file.size_bytes

    def _begin_anew(self) -> None:
        if self._anew is not None:
            self._anew.close()
        self._anew = self._directory.open(NEXT)
        self._anew.truncate(0)
        self._anew.append(f"{self.id}\n".encode())

    def _take_place(self) -> None:
        assert self._anew is not None
        self._anew.sync()
        self._directory.rename(NEXT, NAME)
        self._directory.sync()
        self._file, self._anew = self._anew, None
        self._compacted_bytes = self._file.size_bytes

    def _known(self, records: list[Record]) -> list[Record]:
        return as_known_to_old(records) if self._is_old else records

    def _suspend(self) -> None:
        late_s = self._directory.take_late_s()
        if late_s:
            self._process.suspend(late_s)


class NoOplog:
    """The log of a master that keeps none."""

    id = ""
    possible: tuple[list[Record], ...] = ()

    def read(self) -> list[Record]:
        return []

    def write_back(self) -> None: ...

    def keep(self, records: list[Record], catalog: Catalog) -> None: ...

    def begin_copy(self) -> None: ...

    def copied(self, records: list[Record], is_complete: bool) -> None: ...

    def stop_compacting(self) -> None: ...
