# SPDX-License-Identifier: Apache-2.0
"""The calls for tensors that several ranks write and read in parts.

The calls with ``tp`` take the whole tensor and store every part of it. With a parallelism each rank stores
its own part: with tensor parallelism alone it passes that part; with other axes besides, or as the writer of
a writer partition, it passes the whole tensor. The calls ``_from`` memory of the caller take the whole and
store every part. A tensor is divided into equal parts only. A reader gets the part that it names, if it was
stored so; any other part, and the whole, is assembled from the stored parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.compat.store.arguments import check_key, check_keys
from mooncake.compat.store.parallelism import ParallelAxis, ReadTarget, TensorParallelism, tp_key
from mooncake.compat.store.public_types import ReplicateConfig
from mooncake.compat.store.tensor_gather import TensorGatherCalls
from mooncake.compat.store.tensor_memory import Tensor
from mooncake.compat.store.tensor_split import TensorSplitCalls, tensors_at

__all__ = ["ParallelAxis", "ReadTarget", "TensorParallelCalls", "TensorParallelism"]


class TensorParallelCalls(TensorSplitCalls, TensorGatherCalls):
    """Tensors in parts. A missing one is None, or a code where numbers are returned."""

    # Tensor parallelism: key_tp_0, key_tp_1, ... --------------------------------------------------------

    def put_tensor_with_tp(
        self, key: str, tensor: Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Store every part of the whole ``tensor``; 0 or a code. ``tp_size`` 1 stores it whole."""
        return self._put_tp("put_tensor_with_tp", [key], [tensor], None, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        what = "batch_put_tensor_with_tp"
        return self._put_tp(what, base_keys, tensors_list, None, tp_size, split_dim)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Tensor,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """As ``put_tensor_with_tp``, with a configuration for the objects."""
        return self._put_tp("pub_tensor_with_tp", [key], [tensor], config, tp_size, split_dim)[0]

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        what = "batch_pub_tensor_with_tp"
        return self._put_tp(what, base_keys, tensors_list, config, tp_size, split_dim)

    def put_tensor_with_tp_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """As ``put_tensor_with_tp`` of the whole tensor whose object lies at ``buffer_ptr``."""
        return self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        what = "batch_put_tensor_with_tp_from"
        tensors = tensors_at(what, base_keys, buffer_ptrs, sizes)
        return self._put_tp(what, base_keys, tensors, None, tp_size, split_dim)

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """Part of ``tp_rank``, as it was stored."""
        return self.batch_get_tensor_with_tp([key], tp_rank, tp_size)[0]

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Tensor | None]:
        what = "batch_get_tensor_with_tp"
        return self._get_tensors(what, [tp_key(key, tp_rank, tp_size) for key in check_keys(what, base_keys)])

    def get_tensor_with_tp_into(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> Tensor | None:
        """As ``get_tensor_into`` of the part of ``tp_rank``."""
        key = check_key("get_tensor_with_tp_into", key)
        return self.get_tensor_into(tp_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Any]:
        return self.batch_get_tensor_into(
            [tp_key(key, tp_rank, tp_size) for key in base_keys], buffer_ptrs, sizes
        )

    # Any parallelism --------------------------------------------------------------------------------------

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Store this rank's part, or this writer's part of the whole ``tensor``; without either, the whole.

        With one axis of tensor parallelism ``tensor`` is the part itself, else the part is cut from it.
        Returns 0 or a code; -600 when both are given or one is invalid.
        """
        what = "put_tensor_with_parallelism"
        return self._put_parallel(what, [key], [tensor], [parallelism], config, [writer_partition])[0]

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """As the put call, replacing an existing object."""
        what = "upsert_tensor_with_parallelism"
        return self._put_parallel(what, [key], [tensor], [parallelism], config, [writer_partition], True)[0]

    def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[Any] | None = None,
    ) -> list[int]:
        what = "batch_put_tensor_with_parallelism"
        return self._put_parallel(what, keys, tensors_list, parallelisms, config, writer_partitions)

    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[Any] | None = None,
    ) -> list[int]:
        what = "batch_upsert_tensor_with_parallelism"
        return self._put_parallel(what, keys, tensors_list, parallelisms, config, writer_partitions, True)

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Store every part of the whole tensor whose object lies at ``buffer_ptr``, or this writer's part."""
        return self.batch_put_tensor_with_parallelism_from(
            [key], [buffer_ptr], [size], [parallelism], config, [writer_partition]
        )[0]

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """As the put call, replacing an existing object."""
        return self.batch_upsert_tensor_with_parallelism_from(
            [key], [buffer_ptr], [size], [parallelism], config, [writer_partition]
        )[0]

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[Any] | None = None,
    ) -> list[int]:
        what = "batch_put_tensor_with_parallelism_from"
        tensors = tensors_at(what, keys, buffer_ptrs, sizes)
        return self._put_parallel(what, keys, tensors, parallelisms, config, writer_partitions, False, True)

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[Any] | None = None,
    ) -> list[int]:
        what = "batch_upsert_tensor_with_parallelism_from"
        tensors = tensors_at(what, keys, buffer_ptrs, sizes)
        return self._put_parallel(what, keys, tensors, parallelisms, config, writer_partitions, True, True)

    def get_tensor_with_parallelism(self, key: str, target: ReadTarget | None = None) -> Tensor | None:
        """Part that ``target`` selects; without one, the whole tensor, in whatever parts it was stored."""
        return self.batch_get_tensor_with_parallelism([key], [target])[0]

    def batch_get_tensor_with_parallelism(
        self, keys: Sequence[str], targets: Sequence[ReadTarget | None] | None = None
    ) -> list[Tensor | None]:
        found = self._read_parallel("batch_get_tensor_with_parallelism", keys, targets)
        return [None if part is None else part.tensor for part in found]

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: ReadTarget | None = None
    ) -> Tensor | None:
        """As the call above, to an object at ``buffer_ptr``; the tensor there, None if it does not fit."""
        return self.batch_get_tensor_with_parallelism_into([key], [buffer_ptr], [size], [target])[0]

    def batch_get_tensor_with_parallelism_into(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        targets: Sequence[ReadTarget | None] | None = None,
    ) -> list[Any]:
        what = "batch_get_tensor_with_parallelism_into"
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [None] * len(keys)
        return self._read_parallel_into(what, keys, buffer_ptrs, sizes, targets)
