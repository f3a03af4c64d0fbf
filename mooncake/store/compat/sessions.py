"""The calls that resolve keys once and then move byte ranges."""

from __future__ import annotations

from mooncake.store.compat.reading import ReadCalls
from mooncake.store.compat.writing import WriteCalls


class SessionCalls(ReadCalls, WriteCalls):
    """The calls that resolve keys once and then move byte ranges."""
