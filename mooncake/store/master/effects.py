# SPDX-License-Identifier: Apache-2.0
"""Events and effects of a master: the types between the core and its shells.

Structs of msgspec rather than frozen dataclasses, which take several times as long to make: a request makes
two.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from mooncake.store.master.log_records import Record


class Received(msgspec.Struct, frozen=True):
    """A message arrived. ``origin`` goes back in the Reply; ``connection`` is lost as a whole."""

    origin: Any
    connection: Hashable
    message: msgspec.Struct


class ConnectionLost(msgspec.Struct, frozen=True):
    connection: Hashable


class Reply(msgspec.Struct, frozen=True):
    """Effect: send ``message`` to ``origin``."""

    origin: Any
    message: msgspec.Struct
    must_last: bool = False
    """Send it only when the records so far survive a loss of power."""


class OperatorEvent(msgspec.Struct, frozen=True):
    """Effect: log this event for operators."""

    event: str
    fields: dict[str, Any]
    is_warning: bool = False


class AppendRecords(msgspec.Struct, frozen=True):
    """Effect: write these records down before anything that follows is sent."""

    records: list[Record]


class RecoveryComplete(msgspec.Struct, frozen=True):
    """Effect: all nodes have reported; what the records of an earlier master lacked is known."""


Event = Received | ConnectionLost
Effect = Reply | OperatorEvent | AppendRecords | RecoveryComplete
