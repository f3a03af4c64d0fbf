"""What goes into a master and what comes out: the words between the core and its shells."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import msgspec

from mooncake.store.master.log_records import Record


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """A message came in. ``origin`` goes back in the Reply; ``connection`` is lost as a whole."""

    origin: Any
    connection: Hashable
    message: msgspec.Struct


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLost:
    connection: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Effect: send ``message`` to ``origin``."""

    origin: Any
    message: msgspec.Struct
    must_last: bool = False
    """Not before what was kept so far survives a loss of power."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorEvent:
    """Effect: log this event; an operator wants to know."""

    event: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class AppendRecords:
    """Effect: write these records down before anything that follows is sent."""

    records: list[Record]


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryComplete:
    """Effect: the nodes have been heard; what the records of an earlier master lacked is known."""


Event = Received | ConnectionLost
Effect = Reply | OperatorEvent | AppendRecords | RecoveryComplete
