# SPDX-License-Identifier: Apache-2.0
"""The one exception tree, and the one shape of a refusal.

A miss is ``None``. A refusal (no space, key is leased, queue is full) is a ``Refusal`` value that the
caller can inspect. A failure outside the program raises from this tree::

    MooncakeError
    ├── InvalidArgument      invalid input by the caller; names the field, the value and what is allowed
    ├── AccessDenied         no key, a wrong key, or memory that was never registered
    ├── ProtocolError        a peer sent what it may not send, or speaks another version
    ├── OutOfMemory          the machine does not have the requested memory
    ├── OutOfSpace           a disk does not have the requested space
    ├── StorageError         a file or device failed to read or write
    ├── AddressInUse         a port is taken
    ├── ModelError           a model folder is missing, damaged or of an unknown family
    └── Unavailable          a peer or device does not answer; trying again later may help
        ├── PeerLost         the connection broke or was refused
        ├── NotLeader        this master is not the leader; ``leader`` is the address of the leader, if known
        └── DeadlineExceeded the peer did not answer in time

A bug fails an assert. Every message names the peer or the object, the operation, and what to do.
``code`` is the name on the wire and in HTTP error objects.
"""

from __future__ import annotations

import msgspec


class MooncakeError(Exception):
    """Base of all errors that this package raises for reasons outside the program."""

    code = "internal_error"


class InvalidArgument(MooncakeError):
    """Invalid input: ``field`` is ``value``, which is not ``allowed``."""

    code = "invalid_argument"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = f"{shown[:117]}..."
        super().__init__(f"{field} is {shown}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class AccessDenied(MooncakeError):
    code = "access_denied"


class ProtocolError(MooncakeError):
    code = "protocol_error"


class OutOfMemory(MooncakeError):
    code = "out_of_memory"


class OutOfSpace(MooncakeError):
    code = "out_of_space"


class StorageError(MooncakeError):
    code = "storage_error"


class AddressInUse(MooncakeError):
    code = "address_in_use"


class ModelError(MooncakeError):
    code = "model_error"


class Unavailable(MooncakeError):
    code = "unavailable"


class PeerLost(Unavailable):
    code = "peer_lost"


class NotLeader(Unavailable):
    code = "not_leader"
    leader = ""


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


def cause_of(error: Exception) -> str:
    """The operating system's words for a failure, without those that a library adds."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class Refusal(msgspec.Struct, frozen=True):
    """Reason why something was not done: ``code`` for programs, ``reason`` for people."""

    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"
