"""Moves batches of byte ranges between registered memory of any two processes over the best path.

One side registers memory and describes itself; the other opens the description and reads or writes,
without the first one's doing::

    pool = engine.allocate(1 << 30)                    # here
    segment = other.open(engine.describe())            # there
    other.run(Op.WRITE, segment, [local], [pool.address], [4096])
"""

from __future__ import annotations

from mooncake.transfer import nvmeof
from mooncake.transfer.engine import TransferEngine
from mooncake.transfer.handshake import Notification
from mooncake.transfer.peer import Segment
from mooncake.transfer.queue import Queue
from mooncake.transfer.segment import RegionInfo, SegmentDescriptor
from mooncake.transfer.settings import TransferSettings
from mooncake.transfer.transports import (
    Completion,
    Op,
    Region,
    Status,
    crc32c,
    crc32c_columns,
    crc32c_combine,
)

__all__ = [
    "Completion",
    "Notification",
    "Op",
    "Queue",
    "Region",
    "RegionInfo",
    "Segment",
    "SegmentDescriptor",
    "Status",
    "TransferEngine",
    "TransferSettings",
    "crc32c",
    "crc32c_columns",
    "crc32c_combine",
    "nvmeof",
]
