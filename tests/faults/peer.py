"""A process that lends memory and publishes itself behind a proxy: told how by its arguments (JSON).

Obeys lines on its standard input: ``[[offset, length], ...]`` is answered with the CRC-32 (of zlib, not
ours) of each range of its memory.
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

import msgspec
import numpy as np

from mooncake.transfer import SegmentDescriptor, TransferEngine, TransferSettings


class BehindProxy(TransferEngine):
    """Tells peers the proxy's address instead of its own."""

    proxy = ""

    def describe(self) -> SegmentDescriptor:
        described = super().describe()
        endpoints = {**described.endpoints, "tcp": self.proxy}
        return msgspec.structs.replace(described, endpoints=endpoints)


def initial(fill: int, size_bytes: int) -> bytes:
    """What a process has in its memory before anybody writes to it."""
    return np.random.default_rng(fill).bytes(size_bytes)


def main(told: dict[str, Any]) -> None:
    BehindProxy.proxy = told["proxy"]
    engine = BehindProxy(
        TransferSettings(
            name=told["name"],
            transports=tuple(told["transports"]),
            tcp_port=told["port"],
            handshake_port=told["handshake_port"],
            num_streams=told["num_streams"],
            metadata=told["metadata"],
            metadata_ttl_s=0.6,
            metadata_timeout_s=1.0,
        )
    )
    region = engine.allocate(told["size_bytes"])
    memory = region.view()
    memory[:] = initial(told["fill"], region.size_bytes)
    engine.publish(is_patient=True)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps([zlib.crc32(memory[at : at + n]) for at, n in json.loads(line)]), flush=True)
    engine.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
