# SPDX-License-Identifier: Apache-2.0
"""The calls that vLLM up to 0.8.4 makes through ``mooncake_vllm_adaptor``, in their order."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import mooncake_vllm_adaptor as mva
from mooncake.store import MooncakeDistributedStore
from tests.contract.metadata_servers import MetadataServer, free_port


@pytest.mark.parametrize("shape", [(3, 5), (700, 1500)])
@pytest.mark.processes
def test_a_tensor_through_the_pipe(shape: tuple[int, int]) -> None:
    """Both ends are known by the addresses of their configuration; the receiver reads and acknowledges."""
    value = np.random.default_rng(1).random(shape)
    metadata = MetadataServer("http")
    try:
        sender, receiver = mva.mooncake_vllm_adaptor(), mva.mooncake_vllm_adaptor()
        prefill_url, decode_url = (f"127.0.0.1:{free_port()}" for _ in range(2))
        assert sender.initialize(prefill_url, metadata.url, "tcp", "") == 0
        assert receiver.initializeExt(decode_url, metadata.url, "tcp", "", "http") == 0
        data = pickle.dumps(value)
        source = sender.allocateManagedBuffer(len(data))
        assert source > 0 and sender.writeBytesToBuffer(source, data, len(data)) == 0
        target = receiver.allocateManagedBuffer(len(data))
        assert receiver.transferSync(prefill_url, target, source, len(data)) == 0
        arrived = pickle.loads(receiver.readBytesFromBuffer(target, len(data)))
        assert np.array_equal(arrived, value)
        assert receiver.freeManagedBuffer(target, len(data)) == 0
        assert sender.freeManagedBuffer(source, len(data)) == 0
        assert receiver.transferSync("127.0.0.1:1", target, source, 10) < 0, "the pipe raises then"
    finally:
        metadata.stop()


def test_transfers_with_an_opcode_and_memory_of_the_caller() -> None:
    engines = [mva.mooncake_vllm_adaptor() for _ in range(2)]
    memories = [np.full(1000, number, dtype=np.uint8) for number in range(2)]
    for engine, memory in zip(engines, memories, strict=True):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert engine.expRegisterMemory(memory.ctypes.data, memory.size) == 0
    peer = f"127.0.0.1:{engines[1].get_rpc_port()}"
    here, there = memories[0].ctypes.data, engines[0].getFirstBufferAddress(peer)
    assert there == memories[1].ctypes.data
    assert engines[0].transferSyncExt(peer, here, there, 400, mva.TransferOpcode.Write) == 0
    assert memories[1].sum() == 600
    assert engines[0].transferSyncExt(peer, here, there, 1000, mva.READ) == 0
    assert memories[0].sum() == 600
    assert engines[0].expUnregisterMemory(here) == 0


def test_the_store_of_that_module_is_the_drop_in_store() -> None:
    assert mva.MooncakeDistributedStore is MooncakeDistributedStore
