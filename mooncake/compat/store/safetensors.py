# SPDX-License-Identifier: Apache-2.0
"""Tensors between the store and safetensors files. The calls import the safetensors library."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from mooncake.compat.store.arguments import check_key
from mooncake.compat.store.error_codes import StoreCode
from mooncake.compat.store.tensor_memory import Tensor
from mooncake.compat.store.tensors import TensorCalls
from mooncake.log import get_logger

log = get_logger("mooncake.store")


class SafetensorCalls(TensorCalls):
    """Files that hold a tensor under the name of its key."""

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Write the tensor ``key`` to a file, named as the key by default; 0, -1100 for a miss, or -600."""
        key = check_key("save_tensor_to_safetensor", key)
        tensor = self.get_tensor(key)
        if tensor is None:
            return int(StoreCode.FILE_NOT_FOUND)
        path = Path(key if file_name is None else file_name)
        try:
            _library().save_file({key: tensor}, path)
        except _errors() as error:
            log.error(f"save_tensor_to_safetensor of {key!r} to {path}: {error}")
            return int(StoreCode.INVALID_PARAMS)
        return int(StoreCode.OK)

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Tensor | None:
        """Put the tensor of a file into the store and return it; None when that fails.

        It is put under ``key``, or without one under its name in the file, which must then contain only one
        tensor; a file with several must have one named ``key``.
        """
        what = "load_tensor_from_safetensor"
        if key is not None:
            key = check_key(what, key)
        try:
            found: dict[str, Tensor] = _library().load_file(Path(file_name))
        except _errors() as error:
            log.error(f"{what}: {file_name!r}: {error}")
            return None
        name = key if key in found else next(iter(found)) if len(found) == 1 else None
        if name is None:
            log.error(f"{what}: {file_name!r} has {sorted(found)}, but not {key!r}")
            return None
        tensor = found[name]
        return tensor if self.put_tensor(name if key is None else key, tensor) == 0 else None


def _library() -> Any:
    return importlib.import_module("safetensors.torch")


def _errors() -> tuple[type[Exception], ...]:
    """Errors of files, and of a missing library."""
    try:
        return OSError, ImportError, importlib.import_module("safetensors").SafetensorError
    except ImportError:
        return OSError, ImportError
