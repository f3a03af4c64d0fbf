# SPDX-License-Identifier: Apache-2.0
"""The calls for memory: registration, managed buffers, reads and writes by address."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

from mooncake.compat.transfer.engine_lifecycle import EngineLifecycle
from mooncake.compat.transfer.registered_memory import copy_in, copy_out
from mooncake.errors import InvalidArgument
from mooncake.transfer.memory import is_readable, is_writable


class MemoryCalls(EngineLifecycle):
    """Registration of the memory that a program and its peers may move."""

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Return 0; -7 when it overlaps registered memory; -1 when it is not memory of this process."""
        addresses, sizes = _integers([buffer_addr]), _integers([capacity])
        _check_location("register_memory", location)
        return self._number("register_memory", lambda: self._memory.add(addresses, sizes, location))

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Return 0; -3 when nothing registered begins there."""
        addresses = _integers([buffer_addr])
        return self._number("unregister_memory", lambda: self._memory.remove(addresses))

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Return 0 when all are registered; else none is, and the number is that of ``register_memory``."""
        addresses, sizes = _integers(buffer_addresses), _integers(capacities)
        _check_location("batch_register_memory", location)

        def register() -> None:
            with self._ready().deferred_publication():
                self._memory.add(addresses, sizes, location)

        return self._number("batch_register_memory", register)

    def batch_unregister_memory(self, buffer_addresses: Sequence[int], /) -> int:
        """Return 0; -3 when one of them was not registered; the others are unregistered in either case."""
        starts = _integers(buffer_addresses)

        def unregister() -> None:
            with self._ready().deferred_publication():
                self._memory.remove(starts)

        return self._number("batch_unregister_memory", unregister)

    def allocate_managed_buffer(self, length: int, /) -> int:
        """The address of ``length`` registered bytes, or 0."""
        addresses: list[int] = []
        size = operator.index(length)
        self._number("allocate_managed_buffer", lambda: addresses.append(self._memory.allocate(size)))
        return addresses[0] if addresses else 0

    def free_managed_buffer(self, buffer_addr: int, length: int, /) -> int:
        """Return 0; -3 when it is not a managed buffer."""
        address = operator.index(buffer_addr)
        return self._number("free_managed_buffer", lambda: self._memory.free(address))

    def write_bytes_to_buffer(self, dest_address: int, src: bytes | str, length: int, /) -> int:
        """Copy ``length`` bytes to an address of this process; 0, or -1 when it cannot be written."""
        dest_address, length = _integers([dest_address, length])
        given = src if isinstance(src, str) else memoryview(src)

        def copy() -> None:
            data = given.encode() if isinstance(given, str) else bytes(given)
            if not 0 <= length <= len(data):
                raise InvalidArgument("length", length, f"0 to {len(data)}, the bytes given")
            _check_memory(dest_address, length, is_writable, "write")
            copy_in(dest_address, data[:length])

        return self._number("write_bytes_to_buffer", copy)

    def read_bytes_from_buffer(self, source_address: int, length: int, /) -> bytes:
        """``length`` bytes at an address of this process; empty when it cannot be read."""
        read: list[bytes] = []
        source_address, length = _integers([source_address, length])

        def copy() -> None:
            _check_memory(source_address, length, is_readable, "read")
            read.append(copy_out(source_address, length))

        self._number("read_bytes_from_buffer", copy)
        return read[0] if read else b""

    def get_first_buffer_address(self, segment_name: str, /) -> int:
        """Address of the first registered memory of a segment (also this process's own); 0 without any."""
        found: list[int] = []

        def look() -> None:
            engine = self._ready()
            if segment_name == engine.name:
                found.append(self._memory.first())
            else:
                found.extend(region.address for region in self._open(segment_name).descriptor.regions[:1])

        self._number("get_first_buffer_address", look)
        return found[0] if found else 0


def _integers(values: Iterable[int]) -> list[int]:
    """The numbers as ``int`` itself; numpy's wrap around. TypeError for one that is no integer."""
    return [int(operator.index(value)) for value in values]


def _check_memory(address: int, size: int, permits: Callable[[int, int], bool], access: str) -> None:
    if size < 0 or (size and not permits(address, size)):
        raise InvalidArgument("memory", f"[{address:#x}, +{size})", f"memory that this process may {access}")


def _check_location(what: str, location: object) -> None:
    if not isinstance(location, str):
        raise TypeError(f"{what}(): location must be a str, not {type(location).__name__}")
