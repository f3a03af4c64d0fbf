"""The calls that split tensors among ranks."""

from __future__ import annotations

from mooncake.store.compat.reading import ReadCalls
from mooncake.store.compat.writing import WriteCalls


class ParallelCalls(ReadCalls, WriteCalls):
    """The calls that split tensors among ranks."""
