"""Memory that the store hands to a program: what ``get_buffer`` returns, and pools of registered buffers."""

from __future__ import annotations

import array


class BufferHandle(array.array):  # type: ignore[type-arg]
    """An object's bytes in memory of its own, for as long as somebody refers to them.

    ``memoryview(handle)`` is one-dimensional, of format ``b``, and may be written. An ``array`` because
    Python lets only types of C offer their memory.
    """

    def __new__(cls, size_bytes: int) -> BufferHandle:
        handle: BufferHandle = super().__new__(cls, "b", bytes(size_bytes))  # type: ignore[assignment]
        return handle

    def ptr(self) -> int:
        """The address of the first byte."""
        return self.buffer_info()[0]

    def size(self) -> int:
        return len(self)

    def __repr__(self) -> str:
        return f"<BufferHandle {len(self)} bytes>"
