# SPDX-License-Identifier: Apache-2.0
"""``RpcInterface``: bytes and tensors from one program to a callback in another.

A convenience of the existing engine for data that is not worth registering memory for. Messages travel over
``mooncake.rpc``; larger ones are sent in parts and reassembled by the receiver. The callback runs in a
thread of the server, and the sender's call returns when the callback has returned.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from mooncake.compat import public_in
from mooncake.compat.transfer.registered_memory import copy_out
from mooncake.errors import InvalidArgument, MooncakeError, OutOfMemory
from mooncake.log import get_logger
from mooncake.rpc import BlockingClient, Call, Connection, RpcServer
from mooncake.rpc.client import split_address
from mooncake.security import TRUSTED, Access
from mooncake.transfer.handshake import replace_by_nothing
from mooncake.transfer.host import numeric_host
from mooncake.transfer.memory import span_of

log = get_logger("mooncake.engine")

PART_BYTES = 8 << 20
MAX_BYTES = 4 << 30
"""Most bytes of one message."""
MAX_GATHERED_BYTES = 4 << 30
"""Most bytes of unfinished messages, all connections together."""
MAX_PARTS = 256
"""Most unfinished messages of one connection."""

_STARTUP_TIMEOUT_S = 10.0


class MessagePart(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """Part of a message; the reply to the part that completes it is sent when the callback has returned."""

    number: int
    "Number of the message within its connection."
    size_bytes: int
    "Size of the whole message."
    payload: bytes
    dtype: str = ""
    "Element type of a tensor; empty for data."
    shape: tuple[int, ...] = ()


class PartReceived(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Acknowledgement of a part."""


ACCESS = Access({MessagePart: TRUSTED})


class ReceivedData(dict[str, Any]):
    """Bytes that ``send_data`` sent: a dict of ``source`` and ``data``, as the existing package passes it.

    The methods are those of the type that the existing package declares for it.
    """

    def __init__(self, source_address: str, payload: bytes) -> None:
        super().__init__(source=source_address, data=payload)

    @property
    def source_address(self) -> str:
        return str(self["source"])

    @property
    def data_size(self) -> int:
        return len(self.get_bytes())

    def get_bytes(self) -> bytes:
        data: bytes = self["data"]
        return data

    def get_memory_view(self) -> memoryview:
        return memoryview(self.get_bytes())


@dataclass(frozen=True)
class ReceivedTensor:
    """A tensor that ``send_tensor`` sent, as plain bytes, so that a receiver does not need torch."""

    source_address: str
    dtype: str
    "Element type as the sender's library writes it: ``torch.float32``, ``float32``."
    shape: tuple[int, ...]
    _payload: bytearray

    @property
    def total_bytes(self) -> int:
        return len(self._payload)

    def get_data_size(self) -> int:
        return len(self._payload)

    def get_data_as_bytes(self) -> bytes:
        return bytes(self._payload)

    def get_memory_view(self) -> memoryview:
        return memoryview(self._payload)


class RpcInterface:
    """Sender, receiver, or both. Thread-safe. A call that fails returns False or -1 and logs why."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[str, BlockingClient] = {}
        # The existing package has no call that ends a sender.
        weakref.finalize(self, _close_all, self._clients, os.getpid())
        _interfaces.add(self)
        self._numbers = itertools.count()
        self._timeout_s = 30.0
        self._listen_at: tuple[str, int] | None = None
        self._num_threads = 8
        self._server: _RpcServerThread | None = None
        self._on_data: Callable[[ReceivedData], object] | None = None
        self._on_tensor: Callable[[ReceivedTensor], object] | None = None

    def initialize(
        self,
        listen_address: str = "",
        thread_count: int = 0,
        timeout_seconds: int = 30,
        pool_size: int = 100,
    ) -> bool:
        """Prepare to send and, with a ``listen_address``, to receive once a server is started."""
        is_fine = self.initialize_client(pool_size, timeout_seconds)
        if is_fine and listen_address:
            is_fine = self.initialize_server(listen_address, thread_count or 8, timeout_seconds)
        return is_fine

    def initialize_client(self, pool_size: int = 100, timeout_seconds: int = 30) -> bool:
        """Prepare to send. ``pool_size`` is ignored: one connection per receiver carries all calls."""
        self._timeout_s = float(timeout_seconds)
        return True

    def initialize_server(
        self, listen_address: str, thread_count: int = 8, timeout_seconds: int = 30
    ) -> bool:
        """Set where to listen (``host:port``) and how many callbacks may run at once."""
        try:
            self._listen_at = split_address(listen_address)
        except MooncakeError as error:
            log.error(f"initialize_server: {error}")
            return False
        self._num_threads = max(1, thread_count)
        return True

    def start_server(self) -> bool:
        """Serve and block until ``stop_server``."""
        if not self.start_server_async():
            return False
        server = self._server
        if server is not None:
            server.wait()
        return True

    def start_server_async(self) -> bool:
        """Serve in the background; True once the server listens."""
        with self._lock:
            if self._server is not None:
                return True
            try:
                if self._listen_at is None:
                    raise InvalidArgument("listen_address", "", "an address, by initialize_server()")
                self._server = _RpcServerThread(*self._listen_at, self._num_threads, self._receive)
            except MooncakeError as error:
                log.error(f"start_server: {error}")
                return False
            return True

    def stop_server(self) -> None:
        """Stop serving and wait for callbacks that run; no further one starts. Idempotent.

        A callback that calls this is not waited for.
        """
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def set_data_receive_callback(self, callback: Callable[[ReceivedData], object]) -> None:
        self._on_data = callback

    def set_tensor_receive_callback(self, callback: Callable[[ReceivedTensor], object]) -> None:
        self._on_tensor = callback

    def send_data(self, target_address: str, data: Any) -> int:
        """Return 0 when the receiver's callback has returned, else -1."""
        return self._send(target_address, lambda: (memoryview(data).cast("B"), "", ()))

    def send_tensor(self, target_address: str, tensor: Any) -> int:
        """Return 0 when the receiver's callback has returned, else -1. Torch and numpy, from any device."""
        return self._send(target_address, lambda: _bytes_of(tensor))

    def send_data_async(self, target_address: str, data: Any, loop: asyncio.AbstractEventLoop) -> Any:
        """Awaitable of ``send_data``'s result, on ``loop``."""
        return loop.run_in_executor(None, self.send_data, target_address, data)

    def send_tensor_async(self, target_address: str, tensor: Any, loop: asyncio.AbstractEventLoop) -> Any:
        """Awaitable of ``send_tensor``'s result, on ``loop``."""
        return loop.run_in_executor(None, self.send_tensor, target_address, tensor)

    def _send(self, address: str, read: Callable[[], tuple[memoryview, str, tuple[int, ...]]]) -> int:
        try:
            payload, dtype, shape = read()
            if len(payload) > MAX_BYTES:
                raise InvalidArgument("data", f"{len(payload)} bytes", f"at most {MAX_BYTES}")
            client, number = self._client(address), next(self._numbers)
            for start in range(0, max(1, len(payload)), PART_BYTES):
                part = bytes(payload[start : start + PART_BYTES])
                client.call(MessagePart(number, len(payload), part, dtype, shape), self._timeout_s)
        except (MooncakeError, TypeError, ValueError) as error:  # ValueError: a view that was released
            log.error(f"send to {address!r}: {error}")
            return -1
        return 0

    def _client(self, address: str) -> BlockingClient:
        with self._lock:
            client = self._clients.get(address)
            if client is None:
                client = BlockingClient(
                    address, [PartReceived], name="the receiver", is_patient=False, servers=TRUSTED
                )
                self._clients[address] = client
            return client

    def _receive(self, source: str, part: MessagePart, payload: bytearray) -> None:
        if part.dtype and self._on_tensor is not None:
            self._on_tensor(ReceivedTensor(source, part.dtype, part.shape, payload))
        elif self._on_data is not None:  # also a tensor, which the existing package always passes as bytes
            self._on_data(ReceivedData(source, bytes(payload)))

    def leave_to_parent(self) -> None:
        """Begin anew in a forked child: connections, server and threads are its parent's."""
        self._lock = threading.Lock()
        self._clients.clear()
        server, self._server = self._server, None
        if server is not None:
            server.leave_to_parent()


class _RpcServerThread:
    """RPC server with a thread of its own; callbacks run in a thread pool."""

    def __init__(
        self, host: str, port: int, num_threads: int, receive: Callable[[str, MessagePart, bytearray], None]
    ) -> None:
        self._receive = receive
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="mooncake-rpc")
        self._parts: dict[tuple[Connection, int], bytearray] = {}
        self._gathered_bytes = 0
        self._in_callback: set[int] = set()
        """Identifiers of the threads that run a callback now."""
        self._rpc = RpcServer(
            {MessagePart: self._accept},
            on_lost=self._connection_lost,
            access=ACCESS,
            name="rpc_interface",
            is_peer=True,
        )
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        address = numeric_host(host, "listen_address")
        self._thread = threading.Thread(
            target=self._run, args=(address, port, started), name="mooncake-rpc", daemon=True
        )
        self._thread.start()
        started.result(_STARTUP_TIMEOUT_S)

    def wait(self) -> None:
        self._thread.join()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_STARTUP_TIMEOUT_S)
        self._pool.shutdown(wait=threading.get_ident() not in self._in_callback)

    def leave_to_parent(self) -> None:
        """Release the sockets in a forked child, so that they close when the parent's do."""
        replace_by_nothing(self._rpc.descriptors())

    def _call_back(self, source: str, part: MessagePart, payload: bytearray) -> None:
        self._in_callback.add(threading.get_ident())
        try:
            self._receive(source, part, payload)
        finally:
            self._in_callback.discard(threading.get_ident())

    def _run(self, host: str, port: int, started: concurrent.futures.Future[None]) -> None:
        # Its end cancels what still waits for a callback, such as for the one that stops this server.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(host, port, started))

    async def _serve(self, host: str, port: int, started: concurrent.futures.Future[None]) -> None:
        try:
            await self._rpc.start(host, port)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        await self._stop.wait()
        await self._rpc.close()

    async def _accept(self, part: MessagePart, call: Call) -> PartReceived:
        key = (call.connection, part.number)
        if not 0 <= part.size_bytes <= MAX_BYTES:
            raise InvalidArgument("size_bytes", part.size_bytes, f"at most {MAX_BYTES}")
        gathered = self._parts.get(key)
        if gathered is None:
            if sum(one is call.connection for one, _ in self._parts) >= MAX_PARTS:
                raise OutOfMemory(
                    f"{MAX_PARTS} messages of this connection are unfinished; finish them first"
                )
            gathered = self._parts[key] = bytearray()
        size_bytes = len(gathered) + len(part.payload)
        if size_bytes > part.size_bytes or self._gathered_bytes + len(part.payload) > MAX_GATHERED_BYTES:
            self._forget(key)
            if size_bytes > part.size_bytes:
                raise InvalidArgument("payload", size_bytes, f"the {part.size_bytes} bytes of the message")
            raise OutOfMemory("unfinished messages take too much memory in this process; send it again later")
        gathered += part.payload
        self._gathered_bytes += len(part.payload)
        if size_bytes == part.size_bytes:
            self._forget(key)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, self._call_back, call.connection.peer, part, gathered)
        return PartReceived()

    def _connection_lost(self, connection: Connection) -> None:
        for key in [key for key in self._parts if key[0] is connection]:
            self._forget(key)

    def _forget(self, key: tuple[Connection, int]) -> None:
        self._gathered_bytes -= len(self._parts.pop(key))


def _close_all(clients: dict[str, BlockingClient], pid: int) -> None:
    """Close the connections of process ``pid``; a forked child has none, and closing ends its parent's."""
    if os.getpid() == pid:
        for client in clients.values():
            client.close()


def _bytes_of(tensor: Any) -> tuple[memoryview, str, tuple[int, ...]]:
    if not hasattr(tensor, "dtype"):
        raise TypeError(f"a tensor or an array is needed, not {type(tensor).__name__}")
    if hasattr(tensor, "detach"):  # torch's: to main memory, in order
        try:
            tensor = tensor.detach().cpu().contiguous()
        except RuntimeError as error:  # it is sparse, or has no memory; NotImplementedError is one, too
            raise TypeError(f"a tensor whose elements are in memory is needed: {error}") from error
    shape, dtype = tuple(int(size) for size in tensor.shape), str(tensor.dtype)
    if hasattr(tensor, "data_ptr"):  # bfloat16 and the float8 types have no numpy form
        address, size, _ = span_of(tensor)
        return memoryview(copy_out(address, size)), dtype, shape
    return memoryview(tensor.tobytes()), dtype, shape


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Make an interface that sends."""
    interface = RpcInterface()
    interface.initialize_client()
    return interface


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Make an interface that receives once ``initialize_server`` has set its address."""
    return RpcInterface()


_interfaces: weakref.WeakSet[RpcInterface] = weakref.WeakSet()


def _after_fork() -> None:
    for interface in list(_interfaces):
        interface.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)

public_in("mooncake.engine", ReceivedData, ReceivedTensor, RpcInterface)
