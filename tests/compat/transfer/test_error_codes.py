# SPDX-License-Identifier: Apache-2.0
"""The error number of each error."""

from __future__ import annotations

import pytest

from mooncake.compat.transfer.error_codes import EngineCode, EngineCodeError, code_of
from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    OutOfMemory,
    PeerLost,
    ProtocolError,
)


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (InvalidArgument("length", -1, "0 or more"), -1),
        (AccessDenied("not yours"), -1),
        (EngineCodeError(EngineCode.ADDRESS_NOT_REGISTERED, "nothing there"), -3),
        (EngineCodeError(EngineCode.DEVICE_NOT_FOUND, "no such card"), -6),
        (EngineCodeError(EngineCode.ADDRESS_OVERLAPPED, "taken"), -7),
        (InvalidArgument("host", "x", "a host name or address that resolves (unknown)"), -101),
        (PeerLost("gone"), -102),
        (DeadlineExceeded("silent"), -102),
        (EngineCodeError(EngineCode.MALFORMED_JSON, "garbage"), -103),
        (ProtocolError("another version"), -104),
        (EngineCodeError(EngineCode.METADATA, "unknown"), -200),
        (OutOfMemory("no more"), -302),
    ],
)
def test_numbers(error: MooncakeError, number: int) -> None:
    assert code_of(error) == number
