# SPDX-License-Identifier: Apache-2.0
"""Two programs for two processes: one written for the existing package, one for ``mooncake.transfer``.

Run as ``python programs.py existing|own``. They exchange addresses over standard input and output, one JSON
line at a time, as programs do over a channel of their own. The first must use only what the existing
package documents.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SIZE = 3 << 20


def send(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def receive() -> Any:
    line = sys.stdin.readline()
    assert line, "the other process has closed the pipe"
    return json.loads(line)


def existing() -> None:
    """Exchange data through ``mooncake.engine``; the memory is an array's."""
    import array
    import time

    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = array.array("B", bytes(SIZE))
    address, _ = memory.buffer_info()
    assert engine.register_memory(address, SIZE) == 0
    send(session=f"127.0.0.1:{engine.get_rpc_port()}", address=address, size=SIZE)
    peer = receive()
    half = SIZE // 2

    for at in range(half):
        memory[at] = at % 256
    assert engine.transfer_sync_write(peer["session"], address, peer["address"], half) == 0
    sources = [address + half + i * 1000 for i in range(50)]
    targets = [peer["address"] + (49 - i) * 1000 for i in range(50)]
    assert engine.batch_transfer_sync_read(peer["session"], sources, targets, [1000] * 50) == 0
    in_order = memory.tobytes()[: half + 50_000]
    thousands = [in_order[i * 1000 : (i + 1) * 1000] for i in range(50)]
    assert in_order[half:] == b"".join(reversed(thousands))

    batch = engine.batch_transfer_async_read(peer["session"], [address], [peer["address"] + half], [half])
    assert 0 < batch < 1 << 63
    deadline = time.monotonic() + 60
    while (status := engine.transfer_check_status(batch)) == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert status == 1
    send(read=memory[:16].tobytes().hex(), notified=[[one.name, one.msg] for one in engine.get_notifies()])
    receive()  # the peer has written to this memory meanwhile
    send(found=memory[:16].tobytes().hex(), notified=[[one.name, one.msg] for one in engine.get_notifies()])
    assert engine.unregister_memory(address) == 0


def own() -> None:
    """Exchange the same data through ``mooncake.transfer``."""
    import asyncio

    from mooncake.transfer import TransferEngine, TransferSettings

    with TransferEngine(TransferSettings(metadata="P2PHANDSHAKE")) as engine:
        pool = engine.allocate(SIZE)
        pool.view()[SIZE // 2 :] = b"own" * (SIZE // 6)
        send(session=engine.handshake, address=pool.address, size=SIZE)
        peer = receive()
        receive()  # the peer has written and read
        start = bytes(pool.view()[:16]).hex()

        async def answer() -> None:
            reply = engine.allocate(4096)
            reply.view()[:] = b"reply!" * 682 + b"...."
            await engine.write(peer["session"], reply, peer["address"], notify=("reply", "is there"))

        asyncio.run(answer())
        send(found=start)


if __name__ == "__main__":
    {"existing": existing, "own": own}[sys.argv[1]]()
