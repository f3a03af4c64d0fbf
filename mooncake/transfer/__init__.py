# SPDX-License-Identifier: Apache-2.0
"""Moves batches of byte ranges between registered memory of any two processes over the best path.

One side registers memory and describes itself; the other opens the description and reads or writes
without any action of the first::

    pool = engine.allocate(1 << 30)                    # here
    segment = other.open(engine.describe())            # there
    other.run(Op.WRITE, segment, [local], [pool.address], [4096])
"""

from __future__ import annotations

from mooncake.installation import why_no_native

try:
    import mooncake._native  # noqa: F401  every transport needs it; what is missing is said once, here
except ModuleNotFoundError as error:
    if error.name != "mooncake._native":
        raise
    raise ImportError(why_no_native(), name=error.name) from None

from mooncake.transfer import nvmeof
from mooncake.transfer.completion_queue import CompletionQueue
from mooncake.transfer.descriptor import RegionInfo, SegmentDescriptor
from mooncake.transfer.engine import TransferEngine
from mooncake.transfer.handshake import Notification
from mooncake.transfer.peers import RemoteSegment
from mooncake.transfer.settings import DEFAULT_TRANSFER, TransferSettings, transfer_from_environment
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
    "DEFAULT_TRANSFER",
    "Completion",
    "CompletionQueue",
    "Notification",
    "Op",
    "Region",
    "RegionInfo",
    "RemoteSegment",
    "SegmentDescriptor",
    "Status",
    "TransferEngine",
    "TransferSettings",
    "crc32c",
    "crc32c_columns",
    "crc32c_combine",
    "nvmeof",
    "transfer_from_environment",
]
