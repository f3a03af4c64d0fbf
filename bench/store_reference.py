# SPDX-License-Identifier: Apache-2.0
"""The existing ``mooncake`` package and Redis, timed on request: the reference of ``bench/store.py``.

Runs under an interpreter of its own, because the package has our import name. ``store_reference.py MASTER``
contributes memory and waits; ``store_reference.py MASTER PORT`` is the client (PORT of a redis-server, or 0):
it answers ``ready`` and the parser of Redis' client, if that is used; then a line ``SYSTEM WHAT SIZE COUNT
TIMES`` on standard input gets the seconds that one of so many in a row took as a line on standard output. The
package's connection pool is on and its buffers are registered, which is its best over tcp; Redis gets one
pipeline per batch.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

WINDOW_BYTES = 256 << 20
POOL_BYTES = 1 << 30


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def expect(is_good: bool, what: object) -> None:
    """Not an assert: a reference that fails must not look fast under ``python -O`` either."""
    if not is_good:
        raise RuntimeError(f"the reference failed: {what}")


def new_store() -> Any:
    return importlib.import_module("mooncake.store").MooncakeDistributedStore()


class Package:
    """The existing package's client."""

    def __init__(self, master: str) -> None:
        self._store = new_store()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 128 << 20, "tcp", "", master)
        expect(code == 0, f"setup {code}")
        self._source = ctypes.create_string_buffer(os.urandom(1 << 20) * (WINDOW_BYTES >> 20), WINDOW_BYTES)
        self._target = ctypes.create_string_buffer(WINDOW_BYTES)
        for buffer in (self._source, self._target):
            expect(self._store.register_buffer(ctypes.addressof(buffer), WINDOW_BYTES) == 0, "register")
        self._num_keys = 0
        self._keys: list[str] = []
        self._unread: list[list[str]] = []
        "Puts that no get has followed yet."

    def time(self, what: str, size: int, count: int) -> float:
        source, target = ctypes.addressof(self._source), ctypes.addressof(self._target)
        sizes, store = [size] * count, self._store
        if what == "put":
            self._num_keys += count
            self._keys = [f"kv/0123456789abcdef/{self._num_keys - i:064x}" for i in range(count)]
            self._unread.append(self._keys)
        elif what == "get":
            self._keys = self._unread.pop(0)
        keys, results = self._keys, list[Any]()
        if what == "put" and count == 1:
            seconds = timed(lambda: results.append(store.put_from(keys[0], source, size)))
        elif what == "put":
            at = [source + i * size for i in range(count)]
            seconds = timed(lambda: results.extend(store.batch_put_from(keys, at, sizes)))
        elif what == "get" and count == 1:
            seconds = timed(lambda: results.append(store.get_into(keys[0], target, size)))
        elif what == "get":
            at = [target + i * size for i in range(count)]
            seconds = timed(lambda: results.extend(store.batch_get_into(keys, at, sizes)))
        else:
            queried = (keys * (count // len(keys) + 1))[:count]
            seconds = timed(lambda: results.extend(store.batch_is_exist(queried)))
        wanted = {"put": 0, "get": size, "exists": 1}[what]
        expect(all(result == wanted for result in results), (what, results[:4]))
        if what == "get":
            store.batch_remove(keys, True)
        return seconds


class Redis:
    """One redis-server, one connection."""

    def __init__(self, port: int) -> None:
        self._redis: Any = importlib.import_module("redis").Redis(port=port)
        self._value = os.urandom(1 << 20) * 16
        self.parser = importlib.import_module("redis.connection").DefaultParser.__name__.lstrip("_")

    def time(self, what: str, size: int, count: int) -> float:
        pipe = self._redis.pipeline(transaction=False)
        value = self._value[:size]
        for i in range(count):
            pipe.set(f"key{i}", value) if what == "put" else pipe.get(f"key{i}")
        results: list[Any] = []
        seconds = timed(lambda: results.extend(pipe.execute()))
        expect(all(r is True if what == "put" else len(r) == size for r in results), what)
        return seconds


def contribute(master: str) -> None:
    store = new_store()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", POOL_BYTES, 16 << 20, "tcp", "", master)
    expect(code == 0, f"setup {code}")
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    master = sys.argv[1]
    if len(sys.argv) == 2:
        contribute(master)
    systems: dict[str, Any] = {"package": Package(master)}
    parser = ""
    if int(sys.argv[2]):
        systems["redis"] = Redis(int(sys.argv[2]))
        parser = systems["redis"].parser
    print(f"ready {parser}".rstrip(), flush=True)
    for line in sys.stdin:
        system, what, size, count, times = line.split()
        each = [systems[system].time(what, int(size), int(count)) for _ in range(int(times))]
        print(sum(each) / len(each), flush=True)
    os._exit(0)  # its destructors are not part of the measurement


if __name__ == "__main__":
    main()
