"""The error numbers of the existing engine, and which of our errors each of them is."""

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
    """What calls return when they return no bare -1."""

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
    """A call that ends with a number of its own."""

    def __init__(self, number: EngineCode, message: str) -> None:
        super().__init__(message)
        self.number = number


def code_of(error: MooncakeError) -> int:
    """The number that says best what ``error`` is."""
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
