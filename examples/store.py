# SPDX-License-Identifier: Apache-2.0
"""Put, get and view objects in the pool. Start a cluster first (``make serve``), then:

.venv/bin/python examples/store.py 127.0.0.1:PORT     # the master's address, which `up` printed
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from mooncake.store import AsyncStore, Store


def main(master: str) -> None:
    block = np.arange(1 << 18, dtype=np.float32)
    with Store(master) as store:
        refusal = store.put("example/block", block)
        print("put:", "stored" if refusal is None else refusal)

        target = np.empty_like(block)
        print(
            "get_into:",
            store.get_into("example/block", target),
            "bytes, equal:",
            np.array_equal(block, target),
        )

        with store.view("example/block") as view:  # no copy when the node is on this host
            assert view is not None
            print("view:", np.frombuffer(view, dtype=np.float32)[:4])

        print("exists:", store.exists(["example/block", "example/none"]))
        print("a miss is None:", store.get("example/none"))
    asyncio.run(same_on_asyncio(master))


async def same_on_asyncio(master: str) -> None:
    async with AsyncStore(master) as store:
        results = await store.put_batch(["example/a", "example/b"], [b"first", b"second"])
        print("put_batch:", results)
        print("get_batch:", await store.get_batch(["example/a", "example/b", "example/none"]))
        print("remove:", await store.remove(["example/a", "example/b", "example/block"], force=True))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
