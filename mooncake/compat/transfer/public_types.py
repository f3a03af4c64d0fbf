"""The nouns of the existing engine that programs hold in their hands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from mooncake.transfer.engine import TransferEngine as Engine


class TransferOpcode(IntEnum):
    """Which way the bytes go."""

    Read = 0
    Write = 1
    READ = 0
    WRITE = 1


@dataclass
class TransferNotify:
    """What one program tells another after its data."""

    name: str = ""
    msg: str = ""


class InnerTransferEngine:
    """What ``get_engine`` returns: opaque, to be handed to a store's ``setup``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        "The engine behind it, for this package's own store."
