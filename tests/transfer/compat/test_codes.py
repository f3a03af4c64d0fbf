"""Which number an error becomes."""

from __future__ import annotations

import pytest

from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    OutOfMemory,
    PeerLost,
    ProtocolError,
)
from mooncake.transfer.compat.codes import Code, Refused, code_of


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (InvalidArgument("length", -1, "0 or more"), -1),
        (AccessDenied("not yours"), -1),
        (Refused(Code.ADDRESS_NOT_REGISTERED, "nothing there"), -3),
        (Refused(Code.DEVICE_NOT_FOUND, "no such card"), -6),
        (Refused(Code.ADDRESS_OVERLAPPED, "taken"), -7),
        (InvalidArgument("host", "x", "a host name or address that resolves (unknown)"), -101),
        (PeerLost("gone"), -102),
        (DeadlineExceeded("silent"), -102),
        (Refused(Code.MALFORMED_JSON, "garbage"), -103),
        (ProtocolError("another version"), -104),
        (Refused(Code.METADATA, "unknown"), -200),
        (OutOfMemory("no more"), -302),
    ],
)
def test_numbers(error: MooncakeError, number: int) -> None:
    assert code_of(error) == number
