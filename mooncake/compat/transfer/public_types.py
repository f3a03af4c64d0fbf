# SPDX-License-Identifier: Apache-2.0
"""Types of the existing engine that programs use directly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from mooncake.compat import public_in
from mooncake.transfer.engine import TransferEngine as Engine


class BoundEnum(IntEnum):
    """Enumeration that prints as the existing package's do and is equal to its number.

    Every member is true, also that of number 0: programs write ``opcode or TransferOpcode.Write``.
    """

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __bool__(self) -> bool:
        return True


class TransferOpcode(BoundEnum):
    """Direction of a transfer."""

    Read = 0
    Write = 1
    READ = 0
    WRITE = 1


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


public_in("mooncake.engine", TransferOpcode, TransferNotify, InnerTransferEngine)
