# SPDX-License-Identifier: Apache-2.0
"""Error numbers of the existing engine, and the number for each of this package's errors."""

from __future__ import annotations

from enum import IntEnum

from mooncake.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    OutOfMemory,
    ProtocolError,
    Unavailable,
)


class EngineCode(IntEnum):
    """Numbers that calls return where they do not return a bare -1."""

    OK = 0
    INVALID_ARGUMENT = -1
    ADDRESS_NOT_REGISTERED = -3
    DEVICE_NOT_FOUND = -6
    ADDRESS_OVERLAPPED = -7
    DNS = -101
    SOCKET = -102
    MALFORMED_JSON = -103
    HANDSHAKE_REJECTED = -104
    METADATA = -200
    MEMORY = -302


class EngineCodeError(MooncakeError):
    """Failure of a call that has an error number of its own."""

    def __init__(self, number: EngineCode, message: str) -> None:
        super().__init__(message)
        self.number = number


def code_of(error: MooncakeError) -> int:
    """Error number that describes ``error`` best."""
    match error:
        case EngineCodeError():
            return error.number
        case OutOfMemory():
            return EngineCode.MEMORY
        case ProtocolError():
            return EngineCode.HANDSHAKE_REJECTED
        case InvalidArgument() if "resolves" in error.allowed:
            return EngineCode.DNS
        case DeadlineExceeded() | Unavailable():
            return EngineCode.SOCKET
        case _:
            return EngineCode.INVALID_ARGUMENT
