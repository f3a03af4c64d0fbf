"""The calls that take and give tensors."""

from __future__ import annotations

from mooncake.store.compat.reading import ReadCalls
from mooncake.store.compat.writing import WriteCalls


class TensorCalls(ReadCalls, WriteCalls):
    """The calls that take and give tensors."""
