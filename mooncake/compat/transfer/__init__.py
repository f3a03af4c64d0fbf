# SPDX-License-Identifier: Apache-2.0
"""The surface of the existing package's ``mooncake.engine``, on this engine.

Programs written for that package keep their calls, their numbers and their sessions. Where it answers
with a bare number, the reason is logged here; where it silently did something else than the caller
requested, this one fails and says so. ``docs/engine.md`` lists what differs. Does not import torch; the CUDA
driver is loaded only by the calls that concern CUDA.
"""

from mooncake.compat.transfer.engine import TransferEngine
from mooncake.compat.transfer.public_types import InnerTransferEngine, TransferNotify, TransferOpcode
from mooncake.compat.transfer.rpc_interface import (
    ReceivedData,
    ReceivedTensor,
    RpcInterface,
    create_rpc_client,
    create_rpc_server,
)
from mooncake.compat.transfer.shared_segment import SharedSegment

__all__ = [
    "InnerTransferEngine",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "create_rpc_client",
    "create_rpc_server",
]
