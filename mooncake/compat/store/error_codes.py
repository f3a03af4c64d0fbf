# SPDX-License-Identifier: Apache-2.0
"""Error numbers of the existing package, and the number for each of our refusals and errors.

Programs compare these integers. vLLM goes further: a number outside a short list makes it keep its
buffers pinned until the process ends, because a transfer may still write to them. No call here leaves a
transfer behind, so ordinary failures stay within that list (``ORDINARY_FAILURES``).
"""

from __future__ import annotations

from enum import IntEnum

from mooncake.errors import InvalidArgument, MooncakeError, OutOfMemory, Refusal, StorageError, Unavailable


class StoreCode(IntEnum):
    """Numbers that this package returns; the existing one has more."""

    OK = 0
    INTERNAL_ERROR = -1
    NO_AVAILABLE_HANDLE = -200
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    OBJECT_REPLICA_BUSY = -714
    RPC_FAIL = -900
    FILE_NOT_FOUND = -1100
    TASK_NOT_FOUND = -1400
    TASK_PENDING_LIMIT_EXCEEDED = -1401
    TENANT_QUOTA_EXCEEDED = -1700
    TENANT_NOT_REGISTERED = -1701


ORDINARY_FAILURES = frozenset({-200, -703, -704, -705, -900, -901})
"""Numbers that vLLM treats as an ordinary failure of a read or a write; of a read also -600, -702 and -707,
of a write also -1700."""

CODES_OF_REFUSALS = {
    "no_space": StoreCode.NO_AVAILABLE_HANDLE,
    "too_large": StoreCode.NO_AVAILABLE_HANDLE,
    "no_ssd": StoreCode.NO_AVAILABLE_HANDLE,
    "invalid_key": StoreCode.INVALID_PARAMS,
    "invalid_size": StoreCode.INVALID_PARAMS,
    "invalid_policy": StoreCode.INVALID_PARAMS,
    "invalid_checksums": StoreCode.INVALID_PARAMS,
    "unknown_segment": StoreCode.INVALID_PARAMS,
    "invalid_argument": StoreCode.INVALID_PARAMS,
    "durable": StoreCode.INVALID_PARAMS,  # a move that would take a durable object off its only SSD
    "expired": StoreCode.REPLICA_IS_NOT_READY,
    "incomplete": StoreCode.REPLICA_IS_NOT_READY,
    "aborted": StoreCode.REPLICA_IS_NOT_READY,
    "being_written": StoreCode.REPLICA_IS_NOT_READY,
    "not_found": StoreCode.OBJECT_NOT_FOUND,
    "leased": StoreCode.OBJECT_HAS_LEASE,
    "busy": StoreCode.OBJECT_REPLICA_BUSY,
    "peer_lost": StoreCode.RPC_FAIL,
    "not_leader": StoreCode.RPC_FAIL,
    "storage_error": StoreCode.RPC_FAIL,  # the master can't write anything down now
    "limit": StoreCode.TASK_PENDING_LIMIT_EXCEEDED,
    "quota_exceeded": StoreCode.TENANT_QUOTA_EXCEEDED,
    "unknown_tenant": StoreCode.TENANT_NOT_REGISTERED,
}
"""Number for every code of a ``Refusal`` that a client may receive."""


def code_of_refusal(refusal: Refusal) -> int:
    return int(CODES_OF_REFUSALS.get(refusal.code, StoreCode.INTERNAL_ERROR))


def code_of_error(error: MooncakeError) -> int:
    match error:
        case InvalidArgument():
            return int(StoreCode.INVALID_PARAMS)
        case OutOfMemory():
            return int(StoreCode.NO_AVAILABLE_HANDLE)
        case Unavailable() | StorageError():
            return int(StoreCode.RPC_FAIL)
        case _:
            return int(StoreCode.INTERNAL_ERROR)


def code_of(outcome: Refusal | bool | None) -> int:
    """Number for the outcome of a put (None: stored) or a removal (True: removed, False: not found)."""
    if isinstance(outcome, Refusal):
        return code_of_refusal(outcome)
    return int(StoreCode.OBJECT_NOT_FOUND if outcome is False else StoreCode.OK)
