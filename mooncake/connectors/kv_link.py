"""The contract between the engine and a KV cache outside its process.

It owns names and promises only; ``blocks.py`` implements them over the store, tests over a
dictionary. Every call comes from the engine's thread. Only ``wait_layer`` may block, and every
wait has a deadline of the link's own: a cache that is slow or gone must end as a miss, a failed load
or a save that stored nothing. Whenever ``done``, ``num_layers_loaded`` or ``failed`` of something
changes, the link calls the ``wake`` it was attached with, from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from mooncake.prefix import BlockHash


class KvLookup(Protocol):
    """What the cache has of some leading blocks, held (by a lease) until loaded or released."""

    @property
    def done(self) -> bool: ...

    @property
    def num_blocks(self) -> int:
        """Leading blocks found; valid once done."""
        ...


class KvLoad(Protocol):
    """Blocks on their way into the pool, layer by layer."""

    @property
    def num_layers_loaded(self) -> int: ...

    @property
    def failed(self) -> bool:
        """Some layer won't come. Set only when nothing writes into the pool any more."""
        ...

    @property
    def done(self) -> bool:
        """Nothing writes into the pool any more: everything arrived, or it failed."""
        ...


class KvSave(Protocol):
    """Blocks on their way out of the pool."""

    @property
    def done(self) -> bool:
        """Nothing reads the pool any more."""
        ...

    @property
    def num_stored_blocks(self) -> int:
        """How many of its blocks, from the first, are in the cache; valid once done."""
        ...


LookupT = TypeVar("LookupT", bound=KvLookup)
LoadT = TypeVar("LoadT", bound=KvLoad)
SaveT = TypeVar("SaveT", bound=KvSave)


class KvLink(Protocol[LookupT, LoadT, SaveT]):
    """A KV cache outside this process; the three types are the link's own."""

    def attach(self, wake: Callable[[], None]) -> None:
        """Called once by the engine, before anything else."""
        ...

    def lookup(self, blocks: Sequence[tuple[BlockHash, int]]) -> LookupT:
        """Ask for (hash, tokens) blocks in order; the last may be a partial tail. Does not block."""
        ...

    def release(self, lookup: LookupT) -> None:
        """The lookup's result is not wanted."""
        ...

    def start_load(self, lookup: LookupT, block_ids: Sequence[int]) -> LoadT:
        """Load the blocks found into these blocks of the pool, first layer first."""
        ...

    def wait_layer(self, loads: Sequence[LoadT], layer: int) -> None:
        """Block until ``layer`` of every load has arrived or the load has failed."""
        ...

    def start_save(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> SaveT:
        """Announce (hash, tokens, block id) blocks whose layers are about to be computed."""
        ...

    def save_layer(self, save: SaveT, layer: int) -> None:
        """``layer`` of the blocks is in the pool now, and will not change before ``save.done``."""
        ...

    def finish_save(self, save: SaveT) -> None:
        """All layers were given: make the blocks visible once they have been moved."""
        ...

    def abort_save(self, save: SaveT) -> None:
        """What was given is not valid: nothing of it may ever become visible."""
        ...


AnyLink = KvLink[Any, Any, Any]
"""A link to an engine, which hands the link's objects back to it and only reads their state."""
