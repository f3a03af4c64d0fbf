# SPDX-License-Identifier: Apache-2.0
"""The engine by the names of the existing package's first module for vLLM, ``mooncake_vllm_adaptor``.

It was last in 0.3.3.post2, and vLLM up to 0.8.4 imports it: its pipe moves pickled tensors through managed
buffers, the receiver reads; its store is the drop-in store. Only the names differ from ``mooncake.engine``.
"""

from __future__ import annotations

from mooncake.compat.store.store import MooncakeDistributedStore
from mooncake.compat.transfer.engine import DropInEngine
from mooncake.compat.transfer.public_types import TransferOpcode


class VllmAdaptor(DropInEngine):
    """An engine whose plain transfer is a read."""

    initializeExt = DropInEngine.initialize_ext
    allocateManagedBuffer = DropInEngine.allocate_managed_buffer
    freeManagedBuffer = DropInEngine.free_managed_buffer
    transferSync = DropInEngine.transfer_sync_read
    transferSyncExt = DropInEngine.transfer_sync
    writeBytesToBuffer = DropInEngine.write_bytes_to_buffer
    readBytesFromBuffer = DropInEngine.read_bytes_from_buffer
    expRegisterMemory = DropInEngine.register_memory
    expUnregisterMemory = DropInEngine.unregister_memory
    getFirstBufferAddress = DropInEngine.get_first_buffer_address


mooncake_vllm_adaptor = VllmAdaptor
READ, WRITE = TransferOpcode.Read, TransferOpcode.Write

__all__ = ["READ", "WRITE", "MooncakeDistributedStore", "TransferOpcode", "mooncake_vllm_adaptor"]
