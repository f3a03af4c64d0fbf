# SPDX-License-Identifier: Apache-2.0
"""One-sided writes and reads between two engines, here in one process; between hosts it is the same.

.venv/bin/python examples/transfer.py
"""

from __future__ import annotations

import asyncio

import numpy as np

from mooncake.transfer import Op, TransferEngine, TransferSettings


def main() -> None:
    here, there = TransferEngine(), TransferEngine()
    target = there.allocate(1 << 20)  # shared memory: reachable by mapping on this host, by tcp from others
    source = np.arange(1 << 18, dtype=np.uint32)
    region = here.register(source)

    # A descriptor is what a peer must know; `encode()` gives bytes for any channel there is.
    segment = here.open(there.describe())
    print("paths:", segment.paths)

    # Columns: one row a slice. Four slices, written in reverse order.
    size = source.nbytes // 4
    local = [region.address + size * row for row in range(4)]
    remote = [target.address + size * (3 - row) for row in range(4)]
    done = here.run(Op.WRITE, segment, local, remote, [size] * 4, checksum=True)
    print("write:", done.status.name, done.num_bytes, "bytes; CRC32C of each slice:", done.checksums)

    arrived = np.frombuffer(target.view(), dtype=np.uint32)[: source.size]
    print("first of the last quarter:", arrived[-(size // 4)], "=", source[0])
    here.close()
    there.close()
    asyncio.run(by_name())


async def by_name() -> None:
    """Peers found by the address of their handshake, arrays instead of columns, a notification after the
    data."""
    settings = TransferSettings(metadata="P2PHANDSHAKE")
    with TransferEngine(settings) as here, TransferEngine(settings) as there:
        target = there.allocate(8 << 20)
        layers = [np.full(1 << 20, number, dtype=np.float32) for number in range(2)]
        here.register_all(layers)
        addresses = [target.address, target.address + (4 << 20)]
        # The greater priority goes first; progress says how far it is.
        await here.write(
            there.handshake, layers, addresses, priority=1, notify=("kv", "two layers are there")
        )
        [received] = there.notifications()
        print("received:", received.name, received.text)


if __name__ == "__main__":
    main()
