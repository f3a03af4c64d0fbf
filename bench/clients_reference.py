# SPDX-License-Identifier: Apache-2.0
"""Many clients of the existing ``mooncake`` package or of Redis: the reference of ``bench/clients.py``.

Runs under an interpreter of its own, because the package has our import name. ``clients_reference.py package
MASTER NUMBER`` or ``redis PORT NUMBER``: a line ``WHAT SECONDS`` on standard input is answered by a line of
JSON. Redis is called through redis-py with the parser of hiredis, if that is installed.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import sys
from typing import Any

SIZE_BYTES, BATCH, NUM_KEYS = 4096, 256, 4096


def expect(is_good: bool, what: object) -> None:
    if not is_good:
        raise RuntimeError(f"the reference failed: {what}")


def keys() -> list[str]:
    return [f"kv/0123456789abcdef/{number:064x}" for number in range(NUM_KEYS)]


def mine(index: int) -> list[str]:
    """The keys that client ``index`` queries."""
    first = index * BATCH % NUM_KEYS
    return keys()[first : first + BATCH]


class Package:
    def __init__(self, master: str, pool_bytes: int = 0) -> None:
        self.store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", pool_bytes, 16 << 20, "tcp", "", master)
        expect(code == 0, f"setup {code}")
        self.buffer = ctypes.create_string_buffer(os.urandom(SIZE_BYTES), SIZE_BYTES)
        expect(self.store.register_buffer(ctypes.addressof(self.buffer), SIZE_BYTES) == 0, "register")

    def put(self, key: str) -> None:
        expect(self.store.put_from(key, ctypes.addressof(self.buffer), SIZE_BYTES) == 0, key)

    def get(self, key: str) -> None:
        got = self.store.get_into(key, ctypes.addressof(self.buffer), SIZE_BYTES)
        expect(got == SIZE_BYTES, key)

    def exists(self, key: str) -> None:
        expect(self.store.is_exist(key) == 1, key)

    def exist(self, several: list[str]) -> None:
        expect(self.store.batch_is_exist(several) == [1] * len(several), "exists")


class Redis:
    def __init__(self, port: str) -> None:
        self.redis = importlib.import_module("redis").Redis(port=int(port))
        self.value = os.urandom(SIZE_BYTES)

    def put(self, key: str) -> None:
        expect(self.redis.set(key, self.value) is True, key)

    def get(self, key: str) -> None:
        expect(len(self.redis.get(key)) == SIZE_BYTES, key)

    def exists(self, key: str) -> None:
        expect(self.redis.exists(key) == 1, key)

    def exist(self, several: list[str]) -> None:
        expect(self.redis.exists(*several) == len(several), "exists")


def main() -> None:
    system, address, number = sys.argv[1:]
    importlib.import_module("mooncake.store" if system == "package" else "redis")
    forked_clients: Any = importlib.import_module("forked_clients")

    def connected() -> Any:
        return Package(address) if system == "package" else Redis(address)

    def connect(index: int) -> dict[str, Any]:
        client, own = connected(), mine(index)
        cycle, serial = itertools.cycle(own), itertools.count()
        return {
            "exists": lambda: client.exists(next(cycle)),
            "exists 256": lambda: client.exist(own),
            "get": lambda: client.get(next(cycle)),
            "put": lambda: client.put(f"put/{index:08x}/{next(serial):068x}"),
        }

    def contribute(_: int) -> dict[str, Any]:
        node = Package(address, 1 << 30)
        for key in keys():
            node.put(key)
        return {"stay": lambda: expect(node.store.health_check() >= 0, "its node")}  # else it were destroyed

    def fill(_: int) -> dict[str, Any]:
        client = connected()
        for key in keys():
            client.put(key)
        return {}

    # In a process of its own: a library that has threads can't be forked.
    node = forked_clients.ForkedClients(1, contribute if system == "package" else fill)
    clients = forked_clients.ForkedClients(int(number), connect)
    print("ready", *node.processes, *clients.processes, flush=True)
    for line in sys.stdin:
        what, seconds = line.rsplit(maxsplit=1)
        print(json.dumps(clients.measure(what, float(seconds))), flush=True)
    clients.close()
    node.close()


if __name__ == "__main__":
    main()
