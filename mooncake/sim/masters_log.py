"""A master's log in a simulated directory: what ``oplog.py`` and ``keeping.py`` do with real files.

Records are appended before anything is said, copied into a new file piece by piece when a leader is followed
or when the log grew, and read again by the next life of the process. An older version writes records without
the optional fields that came last, and reads none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mooncake.errors import Unavailable
from mooncake.sim.files import SimDirectory, SimFile
from mooncake.sim.pauses import PausingProcess
from mooncake.store.catalog import Catalog
from mooncake.store.copying import Copy
from mooncake.store.records import LineBegan, Record, decode, encode

NAME, NEXT = "oplog", "oplog.new"
PIECE = 5
"""Objects copied at a time: few, so that much happens in between."""
PAUSE_S = 0.01
COMPACTION_BYTES = 8192
NEWEST: dict[type, dict[str, object]] = {}
"""Of each record the optional fields that came last, as who does not know them takes them."""


def as_known_to_old(records: list[Record]) -> list[Record]:
    """What an older version makes of records."""
    return [
        msgspec.structs.replace(record, **NEWEST[type(record)]) if type(record) in NEWEST else record
        for record in records
    ]


class SimLog:
    """As ``role.Log``, for one life of a process."""
