# SPDX-License-Identifier: Apache-2.0
"""Embedding tables in the store: one object per head, looked up by rows.

A lookup reads the rows that it needs, each once, under a session that stays open from the first lookup on:
the location of a table is requested from the master once, and again only after a failed read. Without a
store the tables stay in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake.compat import public_in
from mooncake.compat.store.arguments import number, numbers
from mooncake.compat.store.error_codes import StoreCode

if TYPE_CHECKING:
    from mooncake.compat.store.store import MooncakeDistributedStore

Rows: TypeAlias = npt.NDArray[np.float32]


class EngramStoreConfig:
    """Table shapes. ``table_vocab_sizes``: rows of each head's table; ``embedding_dim``: floats per row."""

    __slots__ = ("embedding_dim", "table_vocab_sizes")

    embedding_dim: int
    table_vocab_sizes: list[int]

    def __init__(self) -> None:
        self.table_vocab_sizes = [1024]
        self.embedding_dim = 64

    def __setattr__(self, name: str, value: Any) -> None:
        check = {"table_vocab_sizes": numbers, "embedding_dim": number}.get(name)
        if check is not None:
            value = check("EngramStoreConfig", name, value)
        object.__setattr__(self, name, value)


class EngramStore:
    """Embedding tables of one layer. Errors are ``RuntimeError``, as in the existing package.

    Raises:
        RuntimeError: there are no heads, or a size is not positive.
    """

    def __init__(
        self, layer_id: int, config: EngramStoreConfig, store: MooncakeDistributedStore | None = None
    ) -> None:
        self._sizes = [int(size) for size in config.table_vocab_sizes]
        self._dim = int(config.embedding_dim)
        if not self._sizes or min(self._sizes) < 1 or self._dim < 1:
            raise RuntimeError(
                f"tables of {self._sizes} rows of {self._dim}: at least one head, 1 row, 1 float"
            )
        self._store = store
        self._keys = [f"engram:l{int(layer_id)}:h{head}" for head in range(len(self._sizes))]
        self._local: list[Rows] = []
        self._is_open = False

    def get_embedding_dim(self) -> int:
        return self._dim

    def get_num_heads(self) -> int:
        return len(self._sizes)

    def get_store_keys(self) -> list[str]:
        return list(self._keys)

    def get_table_vocab_sizes(self) -> list[int]:
        return list(self._sizes)

    def populate(self, embedding_buffers: Sequence[Any]) -> None:
        """Store the tables, float32 [rows, embedding_dim] each.

        Raises:
            RuntimeError: not one per head, or of another shape or type; one of them exists already; or the
                store refuses them.
        """
        if len(embedding_buffers) != len(self._sizes):
            raise RuntimeError(f"{len(embedding_buffers)} tables for {len(self._sizes)} heads")
        tables = [
            self._table(buffer, size) for buffer, size in zip(embedding_buffers, self._sizes, strict=True)
        ]
        if self._store is None:
            self._local = [table.copy() for table in tables]
            return
        started = self._store.batch_put_session_start(self._keys, [table.nbytes for table in tables])
        if started != [0] * len(self._keys):
            begun = [key for key, code in zip(self._keys, started, strict=False) if code == 0]
            self._store.batch_put_session_revoke(begun)
            exists = int(StoreCode.OBJECT_ALREADY_EXISTS)
            hint = "; remove_from_store() first" if exists in started else ""
            raise RuntimeError(f"the store refuses the tables {self._keys}: {started}{hint}")
        pointers, sizes = [[table.ctypes.data] for table in tables], [[table.nbytes] for table in tables]
        self._store.batch_put_from_multi_buffer_ranges(self._keys, pointers, sizes, [[0]] * len(self._keys))
        ended = self._store.batch_put_session_end(self._keys)
        if any(ended):  # those that were stored would be refused when this is tried again
            stored = [key for key, code in zip(self._keys, ended, strict=True) if code == 0]
            self._store.batch_remove(stored, True)
            raise RuntimeError(f"the tables {self._keys} were not stored: {ended}")

    def lookup(self, row_ids: Any) -> Rows:
        """Look up rows: float32 [..., heads, embedding_dim] for integers [..., heads].

        Raises:
            RuntimeError: another last dimension, a row that the table does not have, or a missing table.
        """
        ids = np.asarray(row_ids)
        if ids.dtype.kind not in "iu" or not ids.ndim or ids.shape[-1] != len(self._sizes):
            raise RuntimeError(f"row_ids of {ids.dtype} {ids.shape}: integers [..., {len(self._sizes)}]")
        if ids.size and (
            ids.min() < 0 or (ids.reshape(-1, len(self._sizes)).max(axis=0) >= self._sizes).any()
        ):
            raise RuntimeError(f"row_ids from {ids.min()} to {ids.max()}: the tables have {self._sizes} rows")
        distinct = [np.unique(ids[..., head], return_inverse=True) for head in range(len(self._sizes))]
        rows = self._rows([numbers for numbers, _ in distinct])
        found = np.empty((*ids.shape, self._dim), dtype=np.float32)
        for head, (_, places) in enumerate(distinct):
            found[..., head, :] = rows[head][places.reshape(ids.shape[:-1])]
        return found

    def remove_from_store(self, force: bool = False) -> int:
        """Remove the tables: how many there were.

        Raises:
            RuntimeError: one of them remains, for instance because a reader has a lease on it.
        """
        if self._store is None:
            num_removed, self._local = len(self._local), []
            return num_removed
        self._store.batch_get_session_end(self._keys)
        self._is_open = False
        codes = self._store.batch_remove(self._keys, force)
        failed = [code for code in codes if code not in (0, int(StoreCode.OBJECT_NOT_FOUND))]
        if failed:
            raise RuntimeError(f"the tables {self._keys} were not removed: {codes}")
        return codes.count(0)

    def _rows(self, numbers: Sequence[npt.NDArray[Any]]) -> list[Rows]:
        """Read these rows of each head's table."""
        if self._store is None:
            if not self._local:
                raise RuntimeError("there are no tables yet; populate() first")
            return [table[of_head] for table, of_head in zip(self._local, numbers, strict=True)]
        rows = [np.empty((len(of_head), self._dim), dtype=np.float32) for of_head in numbers]
        row_bytes = 4 * self._dim
        pointers = [[part.ctypes.data + at * row_bytes for at in range(len(part))] for part in rows]
        offsets = [[int(number) * row_bytes for number in of_head] for of_head in numbers]
        sizes = [[row_bytes] * len(part) for part in rows]
        for _ in range(2):
            if self._is_open:
                read = self._store.batch_get_into_multi_buffer_ranges(self._keys, pointers, sizes, offsets)
                if read == [part.nbytes for part in rows]:
                    return rows
            # Not opened yet, or the opened objects are gone: tables may have been stored again.
            self._is_open = self._store.batch_get_session_start(self._keys) == [0] * len(self._keys)
        raise RuntimeError(f"some of the tables {self._keys} are not in the store")

    def _table(self, buffer: Any, num_rows: int) -> Rows:
        table = np.asarray(buffer)
        if table.dtype != np.float32 or table.shape != (num_rows, self._dim):
            raise RuntimeError(f"table of {table.dtype} {table.shape}: float32 [{num_rows}, {self._dim}]")
        return np.ascontiguousarray(table)


public_in("mooncake.store", EngramStoreConfig, EngramStore)
