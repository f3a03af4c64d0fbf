"""The calls about a program's memory: what it registers once moves without further ado."""

from __future__ import annotations

from mooncake.compat.store.arguments import number
from mooncake.compat.store.lifecycle import StoreLifecycle
from mooncake.compat.store.store_session import StoreSession
from mooncake.compat.transfer.error_codes import EngineCodeError
from mooncake.errors import InvalidArgument


class BufferRegistrationCalls(StoreLifecycle):
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """0; -600 when it overlaps what is registered, or is no memory."""
        what = "register_buffer"
        address, size_bytes = number(what, "buffer_ptr", buffer_ptr), number(what, "size", size)

        def register(session: StoreSession) -> int:
            try:
                session.registered.add([address], [size_bytes])
            except EngineCodeError as error:
                raise InvalidArgument("buffer", hex(address), str(error)) from error
            return 0

        return self._in_session(what, register, int)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """0; -600 when nothing registered begins there."""
        what = "unregister_buffer"
        address = number(what, "buffer_ptr", buffer_ptr)

        def unregister(session: StoreSession) -> int:
            try:
                session.registered.remove([address])
            except EngineCodeError as error:
                raise InvalidArgument("buffer", hex(address), str(error)) from error
            return 0

        return self._in_session(what, unregister, int)
