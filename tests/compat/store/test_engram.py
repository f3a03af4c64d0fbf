# SPDX-License-Identifier: Apache-2.0
"""Lookups return the stored rows, whichever process stored them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mooncake.compat.store.engram import EngramStore, EngramStoreConfig
from mooncake.compat.store.store import MooncakeDistributedStore
from tests.compat.store.servers import LONG_LEASES

MASTER = LONG_LEASES
_layers = itertools.count()
SIZES, DIM = [1000, 37], 24


def a_config() -> EngramStoreConfig:
    config = EngramStoreConfig()
    config.table_vocab_sizes = SIZES
    config.embedding_dim = DIM
    return config


def tables() -> list[Any]:
    noise = np.random.default_rng(1)
    return [noise.random((size, DIM), dtype=np.float32) for size in SIZES]


@pytest.mark.parametrize("is_local", [True, False])
def test_rows_of_every_head(store: MooncakeDistributedStore, is_local: bool) -> None:
    engram = EngramStore(next(_layers), a_config(), None if is_local else store)
    with pytest.raises(RuntimeError):
        engram.lookup(np.zeros((1, 2), dtype=np.int64))
    engram.populate(tables())
    ids = np.random.default_rng(2).integers(0, [1000, 37], (3, 5, 2))
    for _ in range(2):
        found = engram.lookup(ids)
        assert found.shape == (3, 5, 2, DIM) and found.dtype == np.float32
        for head, table in enumerate(tables()):
            assert np.array_equal(found[..., head, :], table[ids[..., head]])
    assert engram.lookup(np.empty((0, 2), dtype=np.int32)).shape == (0, 2, DIM)
    assert engram.remove_from_store(force=True) == len(SIZES)
    assert engram.remove_from_store(force=True) == 0
    with pytest.raises(RuntimeError):
        engram.lookup(ids)


def test_tables_that_exist_are_refused_and_stay(store: MooncakeDistributedStore) -> None:
    engram = EngramStore(next(_layers), a_config(), store)
    engram.populate(tables())
    assert store.remove(engram.get_store_keys()[0], True) == 0
    with pytest.raises(RuntimeError, match="remove_from_store"):
        engram.populate([table + 1 for table in tables()])
    assert [store.is_exist(key) for key in engram.get_store_keys()] == [0, 1]
    assert engram.remove_from_store(force=True) == 1
    engram.populate(tables())


def test_tables_of_which_one_could_not_be_stored_can_be_stored_again(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engram = EngramStore(next(_layers), a_config(), store)
    end = store.batch_put_session_end

    def end_first_only(keys: list[str]) -> list[int]:
        assert store.batch_put_session_revoke(keys[1:]) == [0]
        return [*end(keys[:1]), -1]

    with monkeypatch.context() as patch:
        patch.setattr(store, "batch_put_session_end", end_first_only)
        with pytest.raises(RuntimeError, match="not stored"):
            engram.populate(tables())
    assert [store.is_exist(key) for key in engram.get_store_keys()] == [0, 0]
    engram.populate(tables())
    assert engram.lookup([[1, 1]]).shape == (1, 2, DIM)


def test_tables_under_a_lease_are_not_removed(store: MooncakeDistributedStore) -> None:
    engram = EngramStore(next(_layers), a_config(), store)
    engram.populate(tables())
    engram.lookup([[0, 0]])
    with pytest.raises(RuntimeError, match="-706"):
        engram.remove_from_store()


def test_a_configuration_has_the_defaults_and_checks_of_the_existing_package() -> None:
    config = EngramStoreConfig()
    assert (config.table_vocab_sizes, config.embedding_dim) == ([1024], 64)
    for name, value in (("table_vocab_sizes", "12"), ("table_vocab_sizes", [1.5]), ("embedding_dim", "x")):
        with pytest.raises(TypeError):
            setattr(config, name, value)


def test_another_instance_finds_the_tables(store: MooncakeDistributedStore) -> None:
    layer = next(_layers)
    EngramStore(layer, a_config(), store).populate(tables())
    other = EngramStore(layer, a_config(), store)
    assert np.array_equal(other.lookup([[999, 36]])[0, 1], tables()[1][36])
    assert len(other.get_store_keys()) == other.get_num_heads() == 2
    assert (other.get_embedding_dim(), other.get_table_vocab_sizes()) == (DIM, SIZES)
    assert [store.is_exist(key) for key in other.get_store_keys()] == [1, 1]


def test_invalid_arguments(store: MooncakeDistributedStore) -> None:
    engram = EngramStore(next(_layers), a_config(), store)
    engram.populate(tables())
    for ids in ([[0, 37]], [[-1, 0]], [[0]], [[0.5, 0.5]], 3):
        with pytest.raises(RuntimeError):
            engram.lookup(ids)
    for bad in ([], tables()[:1], tables()[::-1], [table.astype(np.float64) for table in tables()]):
        with pytest.raises(RuntimeError):
            engram.populate(bad)
    empty = EngramStoreConfig()
    empty.table_vocab_sizes = []
    with pytest.raises(RuntimeError):
        EngramStore(0, empty)
    with pytest.raises(AttributeError):
        a_config().other = 1
    with pytest.raises(RuntimeError):
        EngramStore(0, a_config(), MooncakeDistributedStore()).populate(tables())
