# SPDX-License-Identifier: Apache-2.0
"""The calls that move bytes: blocking, asynchronous, or in the order of a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mooncake.compat.transfer.async_batches import FAILED
from mooncake.compat.transfer.engine_lifecycle import EngineLifecycle
from mooncake.compat.transfer.host_probe import wait_for_stream
from mooncake.compat.transfer.public_types import TransferNotify, TransferOpcode
from mooncake.compat.transfer.temporary_registration import TemporaryRegistrations
from mooncake.errors import InvalidArgument
from mooncake.log import get_logger
from mooncake.transfer.batch import Addresses, TransferColumns, transfer_columns
from mooncake.transfer.completion_queue import CompletionQueue
from mooncake.transfer.submission import completion_error
from mooncake.transfer.transports import Op, Region, Status

log = get_logger("mooncake.engine")


class TransferCalls(EngineLifecycle):
    """Transfers between local addresses and a peer's."""

    # Blocking transfers -----------------------------------------------------------------------------

    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Return 0, or -1."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Write)

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Return 0, or -1."""
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
        """Return 0, or -1. ``notify`` reaches the peer after the bytes."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        transport_hint: str = "",
    ) -> int:
        """Return 0, or -1; 0 for nothing to move."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        transport_hint: str = "",
    ) -> int:
        """Return 0, or -1; 0 for nothing to move."""
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
        """Return 0, or -1; 0 for nothing to move. ``notify`` reaches the peer after the bytes, if any."""
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
        if notify is not None and not isinstance(notify, TransferNotify):
            raise TypeError(f"notify must be a TransferNotify, not {type(notify).__name__}")

        def move() -> None:
            engine, memory, op = self._ready(), self._memory, _op(opcode)
            columns = _columns(local, remote, lengths)
            timeout_s = self._engine_settings.transfer_s(int(columns.lengths.sum()))
            if not len(columns.lengths) and notify is None:
                return
            segment = self._open(target)
            rows = (columns.local, columns.remote, columns.lengths)
            use = memory.begin_use(np.stack([columns.local, columns.lengths], axis=1))
            try:
                temporary = self._register_temporarily(columns)
                try:
                    done = engine.run(op, segment, *rows, timeout_s=timeout_s)
                finally:
                    self._registrations.end(temporary)
            finally:
                memory.end_use(use)
            if done.status != Status.OK:
                raise completion_error(op, segment, done, timeout_s)
            if notify is not None:
                engine.notify(segment, notify.name, notify.msg, timeout_s)

        return -1 if self._number("transfer", move) else 0

    # Asynchronous transfers -------------------------------------------------------------------------

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        transport_hint: str = "",
    ) -> int:
        """Return a batch id, or 0."""
        return self._async(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Addresses,
        peer_buffer_addresses: Addresses,
        lengths: Addresses,
        transport_hint: str = "",
    ) -> int:
        """Return a batch id, or 0."""
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
        """Return a batch id, or 0."""
        return self._async(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Return a batch id, or 0."""
        return self._async(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Write)

    def transfer_check_status(self, batch_id: int, /) -> int:
        """Return 0 in flight, 1 done, -1 failed, -2 timed out. Reading the final status ends the id."""
        return FAILED if self._batches is None else self._batches.status(batch_id)

    def get_batch_transfer_status(self, batch_ids: Sequence[int], /) -> int:
        """Wait for all of them: 0 when all have succeeded, else -1."""
        return FAILED if self._batches is None else (0 if self._batches.wait(batch_ids) else FAILED)

    def _async(
        self, target: str, local: Addresses, remote: Addresses, lengths: Addresses, opcode: int
    ) -> int:
        numbers: list[int] = []

        def begin() -> None:
            engine, op = self._ready(), _op(opcode)
            columns = _columns(local, remote, lengths)
            rows = (columns.local, columns.remote, columns.lengths)
            timeout_s = self._engine_settings.transfer_s(int(columns.lengths.sum()))
            segment = self._open(target)
            deadline = time.monotonic() + timeout_s

            def submit(queue: CompletionQueue, number: int) -> None:
                self._register_temporarily(columns, number)
                try:
                    engine.submit(queue, number, op, segment, *rows, timeout_s=timeout_s)
                except BaseException:
                    self._registrations.end_of(number)
                    raise

            def resubmit(queue: CompletionQueue, number: int) -> bool:  # without self: `del engine` ends it
                if not engine.refresh(segment, max(0.0, deadline - time.monotonic())):
                    return False
                left_s = max(0.0, deadline - time.monotonic())
                engine.submit(queue, number, op, segment, *rows, timeout_s=left_s)
                return True

            assert self._batches is not None
            numbers.append(self._batches.begin(submit, resubmit))

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
        """Write after the stream's queued work. RuntimeError when it fails, or without a CUDA driver."""
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
        """Read before work that is queued in the stream later. RuntimeError as above."""
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
        """Write after the stream's queued work. RuntimeError as above."""
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
        """Read before work that is queued in the stream later. RuntimeError as above."""
        self._on_cuda(target_hostname, buffers, peer_buffer_addresses, lengths, Op.READ, stream_ptr)

    def _on_cuda(
        self, target: str, local: Addresses, remote: Addresses, lengths: Addresses, op: Op, stream: int
    ) -> None:
        """Move in the order of the stream: queued work ends first, and later work finds the bytes moved.

        The caller waits for the transfer. A callback in the stream would avoid that; the order is the same.
        """
        wait_for_stream(stream)
        opcode = TransferOpcode.Write if op == Op.WRITE else TransferOpcode.Read
        if self._sync(target, local, remote, lengths, opcode):
            raise RuntimeError(f"{op.name.lower()} with {target} failed; the log says why")

    def _register_temporarily(self, columns: TransferColumns, number: int = 0) -> list[Region]:
        """Register local memory of a batch that the program did not."""
        missing = self._memory.uncovered(columns.local, columns.lengths)
        if missing is None:
            return []
        return self._registrations.begin(columns.local[missing], columns.lengths[missing], number)

    @property
    def _registrations(self) -> TemporaryRegistrations:
        assert self._temporary_registrations is not None
        return self._temporary_registrations


def _columns(local: Addresses, remote: Addresses, lengths: Addresses) -> TransferColumns:
    """Columns of a batch; TypeError for floats, texts and the like, as in the existing package."""
    try:
        return transfer_columns(local, remote, lengths)
    except InvalidArgument as error:
        if isinstance(error.__cause__, TypeError):
            raise TypeError(str(error)) from error
        raise


def _op(opcode: int) -> Op:
    try:
        return Op.WRITE if TransferOpcode(opcode) == TransferOpcode.Write else Op.READ
    except ValueError:
        raise TypeError(f"opcode must be TransferOpcode.Read or Write, not {opcode!r}") from None
