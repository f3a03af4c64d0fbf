# SPDX-License-Identifier: Apache-2.0
"""The contract between the engine and a KV cache outside its process.

It owns interfaces only; ``store_link.py`` implements them over the store, tests over a
dictionary. Every call comes from the engine's thread; ``start_load`` and ``release`` may also come from the
thread that called ``wake``, while the engine computes a step. Only ``wait_layer`` may block, and every
wait has a deadline of the link's own: with a cache that is slow or gone, an operation ends as a miss, a
failed load or a save that stored nothing. Whenever ``done``, ``num_layers_loaded`` or ``failed`` of an
operation changes, the link calls the ``wake`` it was attached with, from any thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from mooncake.prefix import BlockHash


class KvLookup(Protocol):
    """The blocks of a prefix that the cache has, held (by a lease) until loaded or released."""

    @property
    def done(self) -> bool: ...

    @property
    def num_blocks(self) -> int:
        """Number of leading blocks found; valid once done."""
        ...


class KvLoad(Protocol):
    """A transfer of blocks into the pool, layer by layer."""

    @property
    def num_layers_loaded(self) -> int: ...

    @property
    def failed(self) -> bool:
        """Whether some layer will not arrive. Set only once the load no longer writes into the pool."""
        ...

    @property
    def done(self) -> bool:
        """Whether the load no longer writes into the pool: everything arrived, or it failed."""
        ...

    @property
    def moved(self) -> tuple[int, float] | None:
        """Tokens whose KV came from the cache, and the seconds that this took; valid once done. None: it says
        nothing of how fast the cache is."""
        ...


class KvSave(Protocol):
    """A transfer of blocks out of the pool."""

    @property
    def done(self) -> bool:
        """Whether the save no longer reads the pool."""
        ...

    @property
    def num_stored_blocks(self) -> int:
        """Number of its leading blocks that are in the cache; valid once done."""
        ...


LookupT = TypeVar("LookupT", bound=KvLookup)
LoadT = TypeVar("LoadT", bound=KvLoad)
SaveT = TypeVar("SaveT", bound=KvSave)


class KvLink(Protocol[LookupT, LoadT, SaveT]):
    """A KV cache outside this process; the three types are the link's own."""

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the callback; the engine calls this once, before anything else."""
        ...

    def lookup(self, blocks: Sequence[tuple[BlockHash, int]]) -> LookupT:
        """Look up (hash, tokens) blocks in order; the last may be a partial tail. Does not block."""
        ...

    def release(self, lookup: LookupT) -> None:
        """Release the blocks of a lookup that is not going to be loaded."""
        ...

    def start_load(self, lookup: LookupT, block_ids: Sequence[int]) -> LoadT:
        """Load the blocks found into these blocks of the pool, first layer first."""
        ...

    def wait_layer(self, loads: Sequence[LoadT], layer: int) -> None:
        """Block until ``layer`` of every load has arrived or the load has failed."""
        ...

    def start_save(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> SaveT:
        """Begin to save (hash, tokens, block id) blocks whose layers are about to be computed."""
        ...

    def save_layer(self, save: SaveT, layer: int) -> None:
        """Save ``layer`` of the blocks, which is in the pool and does not change before ``save.done``."""
        ...

    def finish_save(self, save: SaveT) -> None:
        """Make the blocks visible once all layers, which were passed before, have been moved."""
        ...

    def abort_save(self, save: SaveT) -> None:
        """Discard the save: its layers are not valid and must never become visible."""
        ...


@dataclasses.dataclass(frozen=True)
class PushSource:
    """The engine that pushes the KV of a prompt to this one."""

    transfer_id: str
    address: str
    """``host:port`` of its listener."""


class PushingLink(KvLink[LookupT, LoadT, SaveT], Protocol[LookupT, LoadT, SaveT]):
    """A link that also moves blocks between engines, without the cache (``layer_push.py``).

    Its loads and saves are waited for and passed layers like those of the cache; a pushed save needs no
    ``finish_save``.
    """

    def start_receive(
        self, source: PushSource, prompt: bytes, first: int, block_ids: Sequence[int]
    ) -> KvLoad:
        """Have the blocks of a prompt from ``first`` to its end written into these blocks of the pool.

        ``prompt``: digest of its tokens. It fails when anything is wrong with the other engine.
        """
        ...

    def withdraw(self, load: KvLoad) -> None:
        """Let such a load end soon, as failed, if it has not ended."""
        ...

    def start_push(
        self,
        transfer_id: str,
        prompt: bytes,
        num_blocks: int,
        first: int,
        block_ids: Sequence[int],
        load: KvLoad | None,
    ) -> KvSave:
        """Push blocks from ``first`` on of a prompt of ``num_blocks``, whose layers are about to be computed.

        ``load``: the one that writes some of them during the same step.
        """
        ...

    def end_push(self, transfer_id: str, reason: str) -> None:
        """Discard the push of a prompt, of which not everything will be computed or is valid."""
        ...


AnyLink = KvLink[Any, Any, Any]
"""A link as an engine sees it: the engine passes the link's objects back to it and only reads their state."""

AnyPushingLink = PushingLink[Any, Any, Any]
