# SPDX-License-Identifier: Apache-2.0
"""Events and effects of a master: the types between the core and its shells."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import msgspec

from mooncake.store.master.log_records import Record


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """A message arrived. ``origin`` goes back in the Reply; ``connection`` is lost as a whole."""

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
    """Send it only when the records so far survive a loss of power."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorEvent:
    """Effect: log this event for operators."""

    event: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class AppendRecords:
    """Effect: write these records down before anything that follows is sent."""

    records: list[Record]


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryComplete:
    """Effect: all nodes have reported; what the records of an earlier master lacked is known."""


Event = Received | ConnectionLost
Effect = Reply | OperatorEvent | AppendRecords | RecoveryComplete
