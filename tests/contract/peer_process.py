"""A process that lends memory: prints its descriptor, then obeys one-letter lines until stdin ends.

``c`` closes the engine, ``u`` unregisters the region; each is answered with a line.
"""

from __future__ import annotations

import sys

from mooncake.transfer import TransferEngine, TransferSettings


def main(transport: str, size_bytes: int) -> None:
    engine = TransferEngine(TransferSettings(transports=(transport,)))
    region = engine.allocate(size_bytes)
    print(engine.describe().encode().decode(), flush=True)
    for line in sys.stdin:
        if line.strip() == "c":
            engine.close()
        elif line.strip() == "u":
            engine.unregister(region)
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
