# SPDX-License-Identifier: Apache-2.0
"""The engine module of the existing package, by its name: ``from mooncake.engine import TransferEngine``.

Only the names are here; other modules of this package define the classes. New programs are better
served by ``mooncake.transfer``, which says what went wrong.
"""

from mooncake.compat.transfer import (
    InnerTransferEngine,
    ReceivedData,
    ReceivedTensor,
    RpcInterface,
    SharedSegment,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    create_rpc_client,
    create_rpc_server,
)
from mooncake.compat.transfer.host_probe import has_cuda

CoroRPCInterface = RpcInterface

Read = TransferOpcode.Read
Write = TransferOpcode.Write

SUPPORT_CUDA = has_cuda()
"""Whether this host has a CUDA device. The others concern hardware that this package has no transport for."""
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
]
