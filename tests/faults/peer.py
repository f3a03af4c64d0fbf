# SPDX-License-Identifier: Apache-2.0
"""A process that serves memory and publishes itself behind a proxy, configured by its argument (JSON).

Answers lines on its standard input: ``[[offset, length], ...]`` with the CRC-32 (of zlib, not ours) of each
range of its memory.
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
    """Engine that publishes the proxy's address instead of its own."""

    proxy = ""

    def describe(self) -> SegmentDescriptor:
        described = super().describe()
        endpoints = {**described.endpoints, "tcp": self.proxy}
        return msgspec.structs.replace(described, endpoints=endpoints)


def initial(fill: int, size_bytes: int) -> bytes:
    """Content of a process's memory before the first write."""
    return np.random.default_rng(fill).bytes(size_bytes)


def main(config: dict[str, Any]) -> None:
    BehindProxy.proxy = config["proxy"]
    engine = BehindProxy(
        TransferSettings(
            name=config["name"],
            transports=tuple(config["transports"]),
            tcp_port=config["port"],
            handshake_port=config["handshake_port"],
            num_streams=config["num_streams"],
            metadata=config["metadata"],
            metadata_ttl_s=0.6,
            metadata_timeout_s=1.0,
        )
    )
    region = engine.allocate(config["size_bytes"])
    memory = region.view()
    memory[:] = initial(config["fill"], region.size_bytes)
    engine.publish(is_patient=True)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps([zlib.crc32(memory[at : at + n]) for at, n in json.loads(line)]), flush=True)
    engine.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
