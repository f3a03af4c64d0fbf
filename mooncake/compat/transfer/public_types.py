# SPDX-License-Identifier: Apache-2.0
"""Types of the existing engine that programs use directly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from mooncake.transfer.engine import TransferEngine as Engine


class TransferOpcode(IntEnum):
    """Direction of a transfer."""

    Read = 0
    Write = 1
    READ = 0
    WRITE = 1

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


@dataclass
class TransferNotify:
    """Notification that one program sends to another after its data."""

    name: str = ""
    msg: str = ""


class InnerTransferEngine:
    """Opaque result of ``get_engine``, to be passed to a store's ``setup``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        "The wrapped engine, for this package's own store."
