"""``TransferEngine`` as programs written for the existing package know it: addresses in, numbers out.

Nothing here raises for a broken world: the number says that it failed and the log says why. All methods
may be called from any thread; the interpreter lock is not held while bytes move.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from mooncake.config import load
from mooncake.errors import AddressInUse, InvalidArgument, MooncakeError, PeerLost, ProtocolError, Unavailable
from mooncake.log import get_logger
from mooncake.transfer.columns import Addresses, Columns, columns_of
from mooncake.transfer.compat.batches import FAILED, Batches
from mooncake.transfer.compat.borrowed import Borrowed
from mooncake.transfer.compat.choice import P2P, Choice, choose, split_host
from mooncake.transfer.compat.codes import Code, Refused, code_of
from mooncake.transfer.compat.environment import EngineSettings, read_environment, set_log_level
from mooncake.transfer.compat.machine import (
    available_schemes,
    is_free,
    is_mapped,
    local_topology,
    rdma_devices,
    resolves,
    wait_for_stream,
)
from mooncake.transfer.compat.registered import Registered, copy_in, copy_out
from mooncake.transfer.engine import TransferEngine as Engine
from mooncake.transfer.host import numeric_host
from mooncake.transfer.moves import failure
from mooncake.transfer.peer import Segment
from mooncake.transfer.queue import Queue
from mooncake.transfer.settings import TransferSettings
from mooncake.transfer.transports import Completion, Op, Status

log = get_logger("mooncake.engine")

SHORTEST_TIMEOUT_S = 5.0
_S_PER_BYTE = 1e-9


class TransferOpcode(IntEnum):
    """Which way the bytes go."""

    Read = 0
    Write = 1
    READ = 0
    WRITE = 1


@dataclass
class TransferNotify:
    """What one program tells another after its data."""

    name: str = ""
    msg: str = ""


class InnerTransferEngine:
    """What ``get_engine`` returns: opaque, to be handed to a store's ``setup``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        "The engine behind it, for this package's own store."


class TransferEngine:
    """One engine of this process. Does nothing until ``initialize``."""

    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._knobs = EngineSettings()
        self._is_p2p = False
        self._registered: Registered | None = None
        self._batches: Batches | None = None
        self._borrowed: Borrowed | None = None

    # Beginning --------------------------------------------------------------------------------------

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str = "", /
    ) -> int:
        """0, also when it was called before; -1 (-6: no such device, -101: no such host) with a log line."""
        return self._initialize(local_hostname, metadata_server, protocol, device_name, "")

    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str,
        metadata_type: str,
        /,
    ) -> int:
        """As ``initialize``; ``metadata_type`` (http, etcd, redis, p2p) for a server without a scheme."""
        return self._initialize(local_hostname, metadata_server, protocol, device_name, metadata_type)

    def _initialize(self, host: str, metadata: str, protocol: str, device: str, kind: str) -> int:
        with self._lock:
            if self._engine is not None:
                return 0
            try:
                self._start(host, metadata, protocol, device, kind)
            except MooncakeError as error:
                log.error(f"initialize: {error}")
                return int(code_of(error))
            return 0

    def _start(self, host: str, metadata: str, protocol: str, device: str, kind: str) -> None:
        knobs = self._knobs = read_environment()
        set_log_level(knobs.log_level)
        choice = choose(
            *(host, metadata, protocol, device, knobs),
            *(available_schemes(), rdma_devices(), resolves, kind),
        )
        if choice.warning:
            log.warning(f"initialize: {choice.warning}")
        settings, _ = load(TransferSettings, choice.flags, os.environ)
        try:
            engine = self._bind(choice, settings)
        except Unavailable as error:  # the kernel knows a device, but it is of no use
            if "rdma" not in settings.transports or knobs.force_hca:
                raise
            rest = tuple(scheme for scheme in settings.transports if scheme != "rdma")
            log.warning(f"initialize: {error}; {' and '.join(rest)} will carry the bytes")
            engine = self._bind(choice, replace(settings, transports=rest))
        try:
            engine.publish()
        except MooncakeError as error:
            engine.close()
            raise Refused(Code.INVALID_ARGUMENT, f"metadata server {metadata!r}: {error}") from error
        self._is_p2p = settings.metadata == P2P
        self._registered = Registered(engine)
        borrowed = self._borrowed = Borrowed(engine.regions)

        def ended(
            number: int, completion: Completion
        ) -> None:  # no method: `del engine` is how programs close
            borrowed.end_of(number)
            if completion.status != Status.OK:
                log.error(f"batch {number} failed: {completion.status.name.lower()}")

        self._batches = Batches(engine.new_queue(), ended)
        self._engine = engine
        log.info(f"listening for handshakes at {engine.handshake}")

    def _bind(self, choice: Choice, settings: TransferSettings) -> Engine:
        """An engine that answers handshakes at a port of the range."""
        low, high = self._knobs.min_rpc_port, self._knobs.max_rpc_port
        if low > high:
            raise InvalidArgument("MC_MIN_RPC_PORT", low, f"at most MC_MAX_RPC_PORT, which is {high}")
        ports = [choice.port] if choice.port else random.sample(range(low, high + 1), high + 1 - low)
        for port in ports:
            if is_free(settings.listen_host, port):
                with contextlib.suppress(AddressInUse):
                    return Engine(replace(settings, handshake_port=port))
        where = f"port {choice.port}" if choice.port else f"any port from {low} to {high}"
        raise Refused(
            Code.SOCKET, f"{where} at {settings.listen_host} is in use; see MC_MIN_RPC_PORT, MC_MAX_RPC_PORT"
        )

    def _ready(self) -> Engine:
        if self._engine is None:
            raise Refused(
                Code.INVALID_ARGUMENT,
                "the engine is not initialized; call initialize() and see that it returns 0",
            )
        return self._engine

    @property
    def _memory(self) -> Registered:
        self._ready()
        assert self._registered is not None
        return self._registered

    def get_rpc_port(self) -> int:
        """The port of this process's session ``host:port``; 0 before ``initialize``."""
        return 0 if self._engine is None else int(self._engine.handshake.rpartition(":")[2])

    def get_engine(self) -> InnerTransferEngine | None:
        """For a store's ``setup``; None before ``initialize``."""
        return None if self._engine is None else InnerTransferEngine(self._engine)

    def get_engine_ptr(self) -> int:
        """A number that tells engines of one process apart; 0 before ``initialize``."""
        return 0 if self._engine is None else id(self._engine)

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: each memory location's preferred network cards and the others."""
        return local_topology(device_name or "")

    # Memory -----------------------------------------------------------------------------------------

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """0; -7 when it overlaps what is registered; -1 when there is no such memory."""
        return self._number("register_memory", lambda: self._memory.add([buffer_addr], [capacity], location))

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """0; -3 when nothing registered begins there."""
        return self._number("unregister_memory", lambda: self._memory.remove([buffer_addr]))

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """0 when all are registered; else none of them, and a number as of ``register_memory``."""

        def register() -> None:
            with self._ready().together():
                self._memory.add(buffer_addresses, capacities, location)

        return self._number("batch_register_memory", register)

    def batch_unregister_memory(self, buffer_addresses: Sequence[int], /) -> int:
        """0; -3 when one of them was not registered (the others are not any more)."""

        def unregister() -> None:
            with self._ready().together():
                self._memory.remove(buffer_addresses)

        return self._number("batch_unregister_memory", unregister)

    def allocate_managed_buffer(self, length: int, /) -> int:
        """The address of ``length`` registered bytes, or 0."""
        addresses: list[int] = []
        self._number("allocate_managed_buffer", lambda: addresses.append(self._memory.allocate(length)))
        return addresses[0] if addresses else 0

    def free_managed_buffer(self, buffer_addr: int, length: int, /) -> int:
        """0; -3 when it is no managed buffer."""
        return self._number("free_managed_buffer", lambda: self._memory.free(buffer_addr))

    def write_bytes_to_buffer(self, dest_address: int, src: bytes | str, length: int, /) -> int:
        """Copy ``length`` bytes to an address of this process; 0, or -1 when there is no such memory."""

        def copy() -> None:
            data = src.encode() if isinstance(src, str) else bytes(src)
            if not 0 <= length <= len(data):
                raise InvalidArgument("length", length, f"0 to {len(data)}, the bytes given")
            self._vouch(dest_address, length)
            copy_in(dest_address, data[:length])

        return self._number("write_bytes_to_buffer", copy)

    def read_bytes_from_buffer(self, source_address: int, length: int, /) -> bytes:
        """``length`` bytes at an address of this process; empty when there is no such memory."""
        read: list[bytes] = []

        def copy() -> None:
            self._vouch(source_address, length)
            read.append(copy_out(source_address, length))

        self._number("read_bytes_from_buffer", copy)
        return read[0] if read else b""

    def _vouch(self, address: int, size: int) -> None:
        if size < 0 or (size and not is_mapped(address, size)):
            raise InvalidArgument("memory", f"[{address:#x}, +{size})", "memory of this process")

    def get_first_buffer_address(self, segment_name: str, /) -> int:
        """Where the first registered memory of a segment (of this process, too) begins; 0 without any."""
        found: list[int] = []

        def look() -> None:
            engine = self._ready()
            if segment_name == engine.name:
                found.append(self._memory.first())
            else:
                found.extend(region.address for region in self._open(segment_name).descriptor.regions[:1])

        self._number("get_first_buffer_address", look)
        return found[0] if found else 0

    # Transfers that are waited for ------------------------------------------------------------------

    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """0, or -1."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Write)

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """0, or -1."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Read)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: int,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """0, or -1. ``notify`` reaches the peer after the bytes."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        transport_hint: str = "",
    ) -> int:
        """0, or -1; 0 for nothing to move."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        transport_hint: str = "",
    ) -> int:
        """0, or -1; 0 for nothing to move."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        opcode: int,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """0, or -1; 0 for nothing to move. ``notify`` reaches the peer after the bytes."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)

    def _sync(
        self,
        target: str,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        opcode: int,
        notify: TransferNotify | None = None,
    ) -> int:
        def move() -> None:
            engine, op = self._ready(), _op(opcode)
            columns = columns_of(local, remote, lengths)
            timeout_s = self._timeout_s(int(columns.lengths.sum()))
            if not len(columns.lengths):
                return
            segment = self._open(target)
            rows = (columns.local, columns.remote, columns.lengths)
            is_borrowed = self._borrow(columns)
            try:
                done = engine.run(op, segment, *rows, timeout_s=timeout_s)
            finally:
                if is_borrowed:
                    self._lent.end()
            if done.status != Status.OK:
                raise failure(op, segment, done, timeout_s)
            if notify is not None:
                engine.notify(segment, notify.name, notify.msg, timeout_s)

        return min(0, -1 if self._number("transfer", move) else 0)

    # Transfers that are asked about -----------------------------------------------------------------

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        transport_hint: str = "",
    ) -> int:
        """A batch id, or 0."""
        return self._async(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        transport_hint: str = "",
    ) -> int:
        """A batch id, or 0."""
        return self._async(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        opcode: int,
        transport_hint: str = "",
    ) -> int:
        """A batch id, or 0."""
        return self._async(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """A batch id, or 0."""
        return self._async(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Write)

    def transfer_check_status(self, batch_id: int, /) -> int:
        """0 in flight; 1 done; -1 failed; -2 too late. The id is good until it has ended and been told so."""
        return FAILED if self._batches is None else self._batches.status(batch_id)

    def get_batch_transfer_status(self, batch_ids: Sequence[int], /) -> int:
        """Waits for all of them: 0 when all are well, else -1."""
        return FAILED if self._batches is None else (0 if self._batches.wait(batch_ids) else FAILED)

    def _async(
        self, target: str, local: Addresses, remote: Addresses, lengths: Addresses, opcode: int
    ) -> int:
        numbers: list[int] = []

        def begin() -> None:
            engine, op = self._ready(), _op(opcode)
            columns = columns_of(local, remote, lengths)
            rows = (columns.local, columns.remote, columns.lengths)
            timeout_s = self._timeout_s(int(columns.lengths.sum()))
            segment = self._open(target)

            def submit(queue: Queue, number: int) -> None:
                self._borrow(columns, number)
                try:
                    engine.submit(queue, number, op, segment, *rows, timeout_s=timeout_s)
                except BaseException:
                    self._lent.end_of(number)
                    raise

            assert self._batches is not None
            numbers.append(self._batches.begin(submit))

        self._number("transfer", begin)
        return numbers[0] if numbers else 0

    # On a CUDA stream ---------------------------------------------------------------------------------

    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Write what the stream has computed. RuntimeError when it fails, or without a CUDA driver."""
        self._on_cuda(target_hostname, [buffer], [peer_buffer_address], [length], Op.WRITE, stream_ptr)

    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Read before what is put into the stream from now on. RuntimeError as above."""
        self._on_cuda(target_hostname, [buffer], [peer_buffer_address], [length], Op.READ, stream_ptr)

    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Write what the stream has computed. RuntimeError as above."""
        self._on_cuda(target_hostname, buffers, peer_buffer_addresses, lengths, Op.WRITE, stream_ptr)

    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Read before what is put into the stream from now on. RuntimeError as above."""
        self._on_cuda(target_hostname, buffers, peer_buffer_addresses, lengths, Op.READ, stream_ptr)

    def _on_cuda(
        self, target: str, local: Addresses, remote: Addresses, lengths: Addresses, op: Op, stream: int
    ) -> None:
        """In the order of the stream: what it holds ends first, and what comes later finds the bytes moved.

        The caller waits for it, which a callback in the stream would spare; the order is the same.
        """
        wait_for_stream(stream)
        opcode = TransferOpcode.Write if op == Op.WRITE else TransferOpcode.Read
        if self._sync(target, local, remote, lengths, opcode):
            raise RuntimeError(f"{op.name.lower()} with {target} failed; the log says why")

    # Peers --------------------------------------------------------------------------------------------

    def get_notifies(self) -> list[TransferNotify]:
        """What peers told this process since the last call."""
        if self._engine is None:
            return []
        return [TransferNotify(told.name, told.text) for told in self._engine.notifications()]

    def send_probe(self, peer_server_name: str) -> int:
        """0 when the peer answers; -101 unknown host, -102 nobody there, -103 garbage in the metadata,
        -104 another version, -200 unknown to the metadata server."""

        def probe() -> None:
            engine = self._ready()
            if self._is_p2p:
                numeric_host(split_host(peer_server_name)[0], "peer_server_name")
                engine.probe(peer_server_name)
                return
            try:
                segment = engine.open_name(peer_server_name)
            except ProtocolError as error:
                raise Refused(Code.MALFORMED_JSON, str(error)) from error
            except MooncakeError as error:
                raise Refused(Code.METADATA, str(error)) from error
            if segment is None:
                raise Refused(Code.METADATA, f"no segment is called {peer_server_name!r}")
            engine.probe(segment.descriptor.handshake)

        return self._number("send_probe", probe)

    def warmup_efa_segment(self, segment_name: str, /) -> int:
        """0: there is nothing to warm up, because there is no EFA transport."""
        return 0

    def _open(self, name: str) -> Segment:
        segment = self._ready().open_name(name)
        if segment is None:
            raise PeerLost(
                f"no segment is called {name!r}; is its process running, with the same metadata server?"
            )
        return segment

    def _timeout_s(self, num_bytes: int) -> float:
        return max(SHORTEST_TIMEOUT_S, self._knobs.transfer_timeout_s) + num_bytes * _S_PER_BYTE

    def _borrow(self, columns: Columns, number: int = 0) -> bool:
        """Whether a batch begins that uses local memory which the program did not register."""
        missing = self._memory.uncovered(columns.local, columns.lengths)
        if missing is None:
            return False
        self._lent.begin(columns.local[missing], columns.lengths[missing], number)
        return True

    @property
    def _lent(self) -> Borrowed:
        assert self._borrowed is not None
        return self._borrowed

    def _number(self, what: str, act: Callable[[], None]) -> int:
        """0, or what the failure of ``act`` is as a number, with its reason in the log."""
        try:
            act()
        except MooncakeError as error:
            log.error(f"{what}: {error}")
            return int(code_of(error))
        return 0


def _op(opcode: int) -> Op:
    return Op.WRITE if TransferOpcode(opcode) == TransferOpcode.Write else Op.READ
