# SPDX-License-Identifier: Apache-2.0
"""A process that serves memory: prints its descriptor, then obeys one-letter lines until stdin ends.

``c`` closes the engine, ``u`` unregisters the region, ``f`` forks a child that lives until stdin ends; each
is answered with a line.
"""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from pathlib import Path

from mooncake.transfer import Region, TransferEngine, TransferSettings

DOUBLE = Path(__file__).parents[2] / "build" / "cuda-double" / "libcuda_double.so"


def engine_with(transport: str, num_streams: int = 0) -> TransferEngine:
    """An engine with one transport; ``cuda-double`` is cuda over the test double of its driver."""
    scheme, _, variant = transport.partition("-")
    settings = TransferSettings(transports=(scheme,), num_streams=num_streams)
    if variant == "double":
        settings = TransferSettings(transports=(scheme,), num_streams=num_streams, cuda_library=str(DOUBLE))
    return TransferEngine(settings)


def lend(engine: TransferEngine, transport: str, size_bytes: int) -> Region:
    """Register memory that peers reach over this transport; a file for ``file`` and ``tcp-file``."""
    if transport.endswith("file"):
        descriptor, path = tempfile.mkstemp(prefix="mooncake-region-")
        os.close(descriptor)
        weakref.finalize(engine, Path(path).unlink, missing_ok=True)
        return engine.open_file(path, size_bytes)
    return engine.allocate(size_bytes, device="cuda:0" if transport.startswith("cuda") else "cpu")


def main(transport: str, size_bytes: int) -> None:
    engine = engine_with(transport)
    region = lend(engine, transport, size_bytes)
    if region.kind == "file":
        os.unlink(region.path)  # it stays ours, and we may be killed
    print(engine.describe().encode().decode(), flush=True)
    for line in sys.stdin:
        if line.strip() == "c":
            engine.close()
        elif line.strip() == "u":
            engine.unregister(region)
        elif line.strip() == "f" and os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
