# SPDX-License-Identifier: Apache-2.0
"""The other process of a bench: registers memory for every path, fills it, and verifies its content.

One line of JSON on its standard input defines what it offers (``{"window_bytes": ..., "engines": {name:
settings}, "file": path or ""}``). It answers with the descriptors of its engines and then obeys lines:
``fill <kind> <seed> <bytes>`` and ``holds <kind> <seed> <bytes>``, where the kind is that of a region. The
pattern of a seed is generated at both ends, so that neither has to trust the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.transfer import Region, TransferEngine, TransferSettings

Bytes = npt.NDArray[np.uint8]

DEVICE = "cuda"
"""The engine that has device memory, and the kind of that memory."""
FILE = "file"
"""The kind of a region that is a file; also the engine for local files."""

_PERIOD = 16_777_213  # a prime, so that no two slices begin at the same place of the pattern


@cache
def _base() -> Bytes:
    return np.random.default_rng(20240624).integers(0, 256, _PERIOD, dtype=np.uint8)


def pattern(seed: int, num_bytes: int) -> Bytes:
    """A pattern that differs from that of every other seed."""
    return np.resize(np.roll(_base(), -(seed * 7919 % _PERIOD)), num_bytes)


def engines_of(fields_of_engines: Mapping[str, Mapping[str, Any]]) -> dict[str, TransferEngine]:
    """One engine per name, created from the fields of its settings."""
    return {
        name: TransferEngine(msgspec.convert(dict(fields), TransferSettings))
        for name, fields in fields_of_engines.items()
    }


def register_window(engines: Mapping[str, TransferEngine], window_bytes: int) -> Region:
    """Register one window of memory with all engines. The first allocates it."""
    first, *others = engines.values()
    region = first.allocate(window_bytes)
    for engine in others:
        engine.register((region.address, region.size_bytes))
    return region


def fill(window: Region, seed: int, num_bytes: int) -> None:
    """Fill the beginning of a window, in memory of any kind, with the pattern of a seed."""
    window.write_from(pattern(seed, num_bytes).data)


def window_matches(window: Region, seed: int, num_bytes: int) -> bool:
    """Whether the window begins with the pattern of that seed."""
    found = np.empty(num_bytes, dtype=np.uint8)
    window.read_into(found.data)
    return np.array_equal(found, pattern(seed, num_bytes))


def main() -> None:
    order = json.loads(sys.stdin.readline())
    engines = engines_of(order["engines"])
    windows = {"memory": register_window(engines, order["window_bytes"])}
    if DEVICE in engines:
        windows[DEVICE] = engines[DEVICE].allocate(order["window_bytes"], device=f"{DEVICE}:0")
    if order["file"]:
        windows[FILE] = engines["tcp"].open_file(order["file"], order["window_bytes"])
    described = {name: engine.describe().encode().decode() for name, engine in engines.items()}
    print(json.dumps(described), flush=True)
    for line in sys.stdin:
        verb, kind, seed, num_bytes = line.split()
        if verb == "fill":
            fill(windows[kind], int(seed), int(num_bytes))
            print("done", flush=True)
        else:
            print("yes" if window_matches(windows[kind], int(seed), int(num_bytes)) else "no", flush=True)


if __name__ == "__main__":
    main()
