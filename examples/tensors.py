# SPDX-License-Identifier: Apache-2.0
"""Tensors in the pool: by their memory with our own API, by their keys with the existing package's calls.

.venv/bin/python examples/tensors.py 127.0.0.1:PORT     # the master's address, which `up` printed
"""

from __future__ import annotations

import sys

import torch

from mooncake.store import MooncakeDistributedStore, ParallelAxis, ReadTarget, Store, TensorParallelism


def main(master: str) -> None:
    with Store(master) as store:
        layer = torch.randn(256, 128, dtype=torch.float32)
        store.put("example/layer", layer)  # its elements, from where they are
        target = torch.empty_like(layer)
        store.get_into("example/layer", target)
        print("get_into:", torch.equal(layer, target))
        with store.view("example/layer") as view:  # no copy when the node is on this host
            assert view is not None
            there = torch.frombuffer(bytearray(view[:16]), dtype=torch.float32)
            print("view:", torch.equal(there, layer[0, :4]))
        store.remove(["example/layer"], force=True)
    with_types_and_shapes(master)


def with_types_and_shapes(master: str) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
    weight = torch.randn(6, 8, dtype=torch.bfloat16)
    print("put_tensor_with_tp:", store.put_tensor_with_tp("example/weight", weight, tp_size=2, split_dim=1))
    # Written by 2 ranks along the columns, read by the second of 3 along the rows.
    axis = ParallelAxis(kind="tp", rank=1, size=3, split_dim=0)
    part = store.get_tensor_with_parallelism("example/weight", ReadTarget("shard", TensorParallelism([axis])))
    assert part is not None
    print("a third of it:", torch.equal(part, weight[2:4]))
    store.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
