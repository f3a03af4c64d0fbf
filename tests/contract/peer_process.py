"""A process that lends memory: prints its descriptor, then obeys one-letter lines until stdin ends.

``c`` closes the engine, ``u`` unregisters the region; each is answered with a line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mooncake.transfer import Region, TransferEngine, TransferSettings

DOUBLE = Path(__file__).parents[2] / "build" / "cuda-double" / "libcuda_double.so"


def engine_with(transport: str, num_streams: int = 0) -> TransferEngine:
    """An engine with one transport; ``cuda-double`` is cuda over the test double of its driver."""
    scheme, _, is_double = transport.partition("-")
    settings = TransferSettings(transports=(scheme,), num_streams=num_streams)
    if is_double:
        settings = TransferSettings(transports=(scheme,), num_streams=num_streams, cuda_library=str(DOUBLE))
    return TransferEngine(settings)


def lend(engine: TransferEngine, transport: str, size_bytes: int) -> Region:
    """Memory that peers reach over this transport."""
    return engine.allocate(size_bytes, device="cuda:0" if transport.startswith("cuda") else "cpu")


def main(transport: str, size_bytes: int) -> None:
    engine = engine_with(transport)
    region = lend(engine, transport, size_bytes)
    print(engine.describe().encode().decode(), flush=True)
    for line in sys.stdin:
        if line.strip() == "c":
            engine.close()
        elif line.strip() == "u":
            engine.unregister(region)
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
