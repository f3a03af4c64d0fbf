# SPDX-License-Identifier: Apache-2.0
"""Live peers for tests: folders to load, peers that start together, one that alters what it sends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from mooncake.p2p import P2pSettings, P2PStore
from mooncake.p2p import upload as u
from mooncake.p2p.held_version import HeldVersion

ELEMENTS = 3_000_000
"""Elements of two bytes of the model: six chunks and the rest."""


def write_model(folder: Path, elements: np.ndarray[Any, Any] | None = None, *, extra: int = 0) -> Path:
    """Write a folder with a safetensors file, a small file, an empty one and a folder."""
    if elements is None:
        elements = np.random.default_rng(5).integers(0, 1 << 16, ELEMENTS, dtype=np.uint16)
    num_large = len(elements) - 1000
    header: dict[str, Any] = {
        "large": {"dtype": "BF16", "shape": [num_large], "data_offsets": [0, 2 * num_large]},
        "small": {"dtype": "BF16", "shape": [1000], "data_offsets": [2 * num_large, 2 * len(elements)]},
        "__metadata__": {"padding": "x" * extra},
    }
    encoded = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text('{"a": 1}')
    (folder / "empty").write_bytes(b"")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded + elements.astype("<u2").tobytes())
    return folder


def elements_of(folder: Path) -> np.ndarray[Any, Any]:
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return np.frombuffer(content[start:], dtype="<u2").copy()


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@contextlib.asynccontextmanager
async def running(num_peers: int, *first: str, **settings: Any) -> AsyncIterator[list[P2PStore]]:
    """Start peers that know the first of them, or the addresses ``first``."""
    stores: list[P2PStore] = []
    try:
        for _ in range(num_peers):
            peers = first or tuple(one.address for one in stores[:1])
            chosen = {"port": 0, "peers": peers, "stall_s": 20.0, **settings}
            store = P2PStore(P2pSettings(**chosen))
            await store.start()
            stores.append(store)
        yield stores
    finally:
        for store in stores:
            await store.close()


class LyingStore(P2PStore):
    """A peer that flips a bit of every chunk that it sends, from the moment on that ``is_lying`` is set."""

    is_lying = True

    def _put_into_slot(self, held: HeldVersion, send: u.SendChunk) -> bool:
        is_there = super()._put_into_slot(held, send)
        if self.is_lying:
            self._sending.view(send.slot)[0] ^= 1
        return is_there
