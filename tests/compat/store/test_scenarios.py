# SPDX-License-Identifier: Apache-2.0
"""Embeddings and hidden states as other programs keep them in the store, by the order of their calls.

SGLang's cache of encoder outputs, TorchSpec's hidden states of a layer range for training, and such hidden
states as tensors with their metadata.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from mooncake.compat.store.parallelism import ParallelAxis, ReadTarget, TensorParallelism
from mooncake.compat.store.public_types import ReplicateConfig
from mooncake.compat.store.store import MooncakeDistributedStore
from tests.compat.store.servers import LONG_LEASES, RunningMaster, a_store

MASTER = LONG_LEASES
TOKENS, HIDDEN = 96, 64


class EncoderNode:
    """An encoder of SGLang (0.5.23): embeddings in runs of pages of one registered host pool.

    Its embedding store has one object per item, ``emb_`` and the item's hash; a piece is a run of pages, so
    the number of pieces differs from node to node.
    """

    PAGE_TOKENS = 8

    def __init__(self, store: MooncakeDistributedStore, num_pages: int = 40) -> None:
        self._store = store
        self.pool = torch.zeros(num_pages * self.PAGE_TOKENS, HIDDEN, dtype=torch.bfloat16)
        assert store.register_buffer(self.pool.data_ptr(), self.pool.nbytes) == 0

    def close(self) -> None:
        assert self._store.unregister_buffer(self.pool.data_ptr()) == 0

    def rows(self, runs: Sequence[tuple[int, int]], num_tokens: int) -> list[slice]:
        """The pool's rows of (first page, pages) for ``num_tokens`` tokens."""
        found, left = list[slice](), num_tokens
        for first, pages in runs:
            tokens = min(pages * self.PAGE_TOKENS, left)
            found.append(slice(first * self.PAGE_TOKENS, first * self.PAGE_TOKENS + tokens))
            left -= tokens
        assert left == 0
        return found

    def _pieces(self, rows: Sequence[slice]) -> tuple[list[int], list[int]]:
        return [self.pool[one].data_ptr() for one in rows], [self.pool[one].nbytes for one in rows]

    def has(self, hashes: Sequence[str]) -> list[bool]:
        return [flag == 1 for flag in self._store.batch_is_exist([f"emb_{one}" for one in hashes])]

    def insert(self, items: Sequence[tuple[str, torch.Tensor, Sequence[tuple[int, int]]]]) -> list[bool]:
        """Copy embeddings into the pool and put those that the store does not have."""
        keys, pointers, sizes = list[str](), list[list[int]](), list[list[int]]()
        for name, tensor, runs in items:
            rows = self.rows(runs, len(tensor))
            at = 0
            for piece in rows:
                self.pool[piece] = tensor[at : at + piece.stop - piece.start]
                at += piece.stop - piece.start
            keys.append(f"emb_{name}")
            for column, values in zip((pointers, sizes), self._pieces(rows), strict=True):
                column.append(values)
        new = [at for at, flag in enumerate(self._store.batch_is_exist(keys)) if flag != 1]
        done = [True] * len(keys)
        results = self._store.batch_put_from_multi_buffers(
            [keys[at] for at in new], [pointers[at] for at in new], [sizes[at] for at in new]
        )
        for at, result in zip(new, results, strict=True):
            done[at] = result == 0
        return done

    def fetch(self, name: str, num_tokens: int, runs: Sequence[tuple[int, int]]) -> torch.Tensor | None:
        rows = self.rows(runs, num_tokens)
        pointers, sizes = self._pieces(rows)
        (result,) = self._store.batch_get_into_multi_buffers([f"emb_{name}"], [pointers], [sizes])
        return torch.cat([self.pool[one] for one in rows]) if result > 0 else None


@contextmanager
def encoder_nodes(*stores: MooncakeDistributedStore) -> Iterator[list[EncoderNode]]:
    nodes = [EncoderNode(store) for store in stores]
    yield nodes
    for node in nodes:
        node.close()


@pytest.fixture
def other(master: RunningMaster) -> Iterator[MooncakeDistributedStore]:
    with a_store(master, segment_bytes=0) as store:
        yield store


def test_what_one_encoder_of_sglang_has_computed_another_one_fetches(
    store: MooncakeDistributedStore, other: MooncakeDistributedStore
) -> None:
    images = {name: torch.randn(tokens, HIDDEN).to(torch.bfloat16) for name, tokens in (("a", 50), ("b", 8))}
    runs = {"a": [(0, 2), (5, 5)], "b": [(20, 1)]}
    with encoder_nodes(store, other) as (first, second):
        assert second.has(["a", "b"]) == [False, False]
        assert first.insert([(name, images[name], runs[name]) for name in images]) == [True, True]
        assert second.has(["a", "none", "b"]) == [True, False, True]
        found = second.fetch("a", 50, [(30, 3), (7, 3), (1, 1)])
        assert found is not None and torch.equal(found, images["a"])
        assert second.fetch("none", 8, [(39, 1)]) is None
        assert second.insert([("b", torch.zeros_like(images["b"]), [(12, 1)])]) == [True], "it is there"
        found = first.fetch("b", 8, [(25, 1)])
        assert found is not None and torch.equal(found, images["b"])


def test_tenants_separate_models_whose_embeddings_have_the_same_names(
    master: RunningMaster, store: MooncakeDistributedStore
) -> None:
    with (
        a_store(master, segment_bytes=0, tenant_id="model-2") as theirs,
        encoder_nodes(store, theirs) as (first, second),
    ):
        assert first.insert([("image", torch.ones(8, HIDDEN), [(0, 1)])]) == [True]
        assert first.has(["image"]) == [True] and second.has(["image"]) == [False]


class SampleStore:
    """TorchSpec's store of a sample's hidden states, on the side of inference and on that of training.

    A sample is some objects of bare elements (``_hs``: those of the captured layers side by side, ``_ids``,
    ``_lhs``); their shapes are sent by another way.
    """

    BUFFER_BYTES = 1 << 20

    def __init__(self, master: str) -> None:
        self.store = MooncakeDistributedStore()
        result = self.store.setup(
            local_hostname="127.0.0.1",
            metadata_server="P2PHANDSHAKE",
            global_segment_size=16 << 20,
            local_buffer_size=16 << 20,
            protocol="tcp",
            rdma_devices="",
            master_server_addr=master,
        )
        assert result in (None, 0)
        self._buffer = torch.zeros(self.BUFFER_BYTES, dtype=torch.uint8)
        assert self.store.register_buffer(self._buffer.data_ptr(), self._buffer.nbytes) == 0
        self._config = ReplicateConfig()
        self._config.with_hard_pin = True

    def put(self, key: str, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        keys, pointers, sizes, offset = [f"{key}{suffix}" for suffix in tensors], list[int](), list[int](), 0
        for tensor in tensors.values():
            self._buffer[offset : offset + tensor.nbytes] = tensor.contiguous().view(torch.uint8).view(-1)
            pointers.append(self._buffer.data_ptr() + offset)
            sizes.append(tensor.nbytes)
            offset += tensor.nbytes
        assert self.store.batch_put_from(keys, pointers, sizes, config=self._config) == [0] * len(keys)
        return {suffix: tuple(tensor.shape) for suffix, tensor in tensors.items()}

    def get_into(self, key: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Into registered memory, as with a GPU's."""
        sizes = [tensor.nbytes for tensor in like.values()]
        offsets = list(itertools.accumulate(sizes, initial=0))
        pointers = [self._buffer.data_ptr() + offset for offset in offsets[:-1]]
        results = self.store.batch_get_into([f"{key}{suffix}" for suffix in like], pointers, sizes)
        assert results == sizes
        parts = zip(like.items(), offsets, sizes, strict=False)
        return {
            suffix: self._buffer[at : at + size].clone().view(tensor.dtype).view(tensor.shape)
            for (suffix, tensor), at, size in parts
        }

    def get_buffers(self, key: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """By handles of the client's buffer, read where they lie."""
        handles = self.store.batch_get_buffer([f"{key}{suffix}" for suffix in like])
        found: dict[str, torch.Tensor] = {}
        for (suffix, tensor), handle in zip(like.items(), handles, strict=True):
            if handle is None:
                return None
            assert handle.size() == tensor.nbytes
            memory = (ctypes.c_byte * handle.size()).from_address(handle.ptr())
            found[suffix] = torch.frombuffer(memory, dtype=tensor.dtype).reshape(tensor.shape).clone()
        return found


def a_sample(num_layers: int = 3) -> dict[str, torch.Tensor]:
    return {
        "_hs": torch.randn(1, TOKENS, num_layers * HIDDEN).to(torch.bfloat16),
        "_ids": torch.randint(0, 1000, (1, TOKENS)),
        "_lhs": torch.randn(1, TOKENS, HIDDEN).to(torch.bfloat16),
    }


def test_hidden_states_that_inference_stores_training_reads_and_removes(master: RunningMaster) -> None:
    inference, training = SampleStore(master.address), SampleStore(master.address)
    try:
        sample = a_sample()
        assert training.get_buffers("sample", sample) is None
        assert inference.put("sample", sample) == {suffix: tuple(one.shape) for suffix, one in sample.items()}
        keys = [f"sample{suffix}" for suffix in sample]
        assert training.store.batch_is_exist(keys) == [1, 1, 1]
        for found in (training.get_into("sample", sample), training.get_buffers("sample", sample)):
            assert found is not None and all(torch.equal(found[one], sample[one]) for one in sample)
        assert training.store.remove(keys[0]) < 0, "it is leased"
        assert training.store.batch_remove(keys, force=True) == [0, 0, 0]
        assert training.store.batch_is_exist(keys) == [0, 0, 0]
    finally:
        inference.store.close()
        training.store.close()


def test_a_store_says_that_it_removes_by_force() -> None:
    """TorchSpec looks for the word where it does not find the version of the existing package."""
    assert "force" in (MooncakeDistributedStore.batch_remove.__doc__ or "")


def test_hidden_states_of_layer_ranges_are_tensors_that_describe_themselves(
    store: MooncakeDistributedStore, other: MooncakeDistributedStore
) -> None:
    """A pipeline's stages store their layers under one name; a reader needs no shapes from elsewhere."""
    stages = [torch.randn(layers, TOKENS, HIDDEN).to(torch.bfloat16) for layers in (3, 3, 2)]
    ranges = [TensorParallelism([ParallelAxis("pp", rank, 3, stage_id=rank)]) for rank in range(3)]
    for tensor, part in zip(stages, ranges, strict=True):
        assert store.put_tensor_with_parallelism("prompt/hidden", tensor, part) == 0
    targets = [ReadTarget("as_stored", part) for part in ranges]
    found = other.batch_get_tensor_with_parallelism(["prompt/hidden"] * 3, targets)
    for tensor, got in zip(stages, found, strict=True):
        assert got is not None and got.dtype == torch.bfloat16 and torch.equal(got, tensor)
    missing = ReadTarget("as_stored", TensorParallelism([ParallelAxis("pp", 3, 4, stage_id=3)]))
    assert other.get_tensor_with_parallelism("prompt/hidden", missing) is None


def test_hidden_states_in_the_memory_of_their_reader(
    store: MooncakeDistributedStore, other: MooncakeDistributedStore
) -> None:
    hidden = torch.randn(4, TOKENS, HIDDEN).to(torch.bfloat16)
    assert store.put_tensor("layers 8 to 11", hidden) == 0
    memory = torch.zeros(hidden.nbytes + 4096, dtype=torch.uint8)
    assert other.register_buffer(memory.data_ptr(), memory.nbytes) == 0
    found = other.get_tensor_into("layers 8 to 11", memory.data_ptr(), memory.nbytes)
    assert found is not None and torch.equal(found, hidden)
    assert memory.data_ptr() <= found.data_ptr() < memory.data_ptr() + memory.nbytes, "no copy"
    assert other.unregister_buffer(memory.data_ptr()) == 0
