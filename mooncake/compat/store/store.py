# SPDX-License-Identifier: Apache-2.0
"""``MooncakeDistributedStore``: the existing package's store, composed of its kinds of calls."""

from __future__ import annotations

import inspect
from typing import Any

from mooncake.compat import name_methods, public_in
from mooncake.compat.store import dummy_client
from mooncake.compat.store.arguments import check_key, number
from mooncake.compat.store.buffer_pool import LocalBuffer
from mooncake.compat.store.object_sessions import ObjectSessionCalls
from mooncake.compat.store.remove import RemoveCalls
from mooncake.compat.store.replicas import ReplicaCalls
from mooncake.compat.store.safetensors import SafetensorCalls
from mooncake.compat.store.segments import SegmentCalls
from mooncake.compat.store.setup_arguments import (
    DEFAULT_MASTER,
    DEFAULT_SIZE_BYTES,
    SetupArguments,
    setup_arguments,
)
from mooncake.compat.store.store_session import StoreSession
from mooncake.compat.store.tensor_parallel import TensorParallelCalls


class MooncakeDistributedStore(
    TensorParallelCalls, SafetensorCalls, ObjectSessionCalls, RemoveCalls, ReplicaCalls, SegmentCalls
):
    """A client of the store, with the calls and the numbers of the existing package.

    Call ``setup`` first; before it, and after ``close``, every call returns an error. New programs are better
    served by ``mooncake.store.Store``, which raises errors.
    """

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Connect to a master and, with a ``global_segment_size``, contribute memory of this process.

        setup(local_hostname: str, metadata_server: str, global_segment_size: int, local_buffer_size: int,
        protocol: str, rdma_devices: str, master_server_addr: str, engine: object = None,
        enable_ssd_offload: bool = False, ssd_offload_path: str = '', tenant_id: str = 'default',
        enable_client_http_server: bool = False, client_http_port: int = 9300) -> int

        setup(config: dict) -> int, with these names as keys; sizes may be written '16MB'.

        Returns 0; -600 for an invalid argument; -1 when the master does not answer. The log has the reason.
        """
        config = args[0] if args else kwargs.get("config")
        if len(args) + len(kwargs) == 1 and isinstance(config, dict):
            return self._begin(lambda: setup_arguments(config))
        arguments = SetupArguments(*args, **kwargs)
        return self._begin(lambda: arguments)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connect to the store of this host's ``mooncake_client`` at ``host:port``; 0, or -1.

        ``mem_pool_size``: size of the memory for ``alloc_from_mem_pool``.
        """
        what = "setup_dummy"
        pool_bytes = number(what, "mem_pool_size", mem_pool_size)
        buffer_bytes = number(what, "local_buffer_size", local_buffer_size)
        server_address = check_key(what, server_address)
        hostname = ""

        def find() -> SetupArguments:
            nonlocal hostname
            info = dummy_client.client_info(server_address)
            hostname = info.hostname
            return dummy_client.setup_arguments_from(info, server_address, buffer_bytes)

        def opened(session: StoreSession) -> None:
            session.hostname = hostname  # the segment on this host: programs prefer it by this name
            session.pool = LocalBuffer(session.engine, pool_bytes)

        return -1 if self._begin(find, opened) else 0

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int, /) -> int:
        """Call ``setup`` on one host with a master at its default port; for tests."""
        arguments = ("localhost", "P2PHANDSHAKE", mount_segment_size, DEFAULT_SIZE_BYTES)
        return self.setup(*arguments, protocol, device_name, DEFAULT_MASTER)

    def alloc_from_mem_pool(self, size: int, /) -> int:
        """Allocate registered memory of ``setup_dummy``'s pool; its address, 0 when the pool is exhausted."""
        size_bytes = number("alloc_from_mem_pool", "size", size)

        def allocate(session: StoreSession) -> int:
            memory = session.pool.take(size_bytes) if size_bytes > 0 else None
            return 0 if memory is None else int(memory.ctypes.data)

        return self._in_session("alloc_from_mem_pool", allocate, lambda _: 0)


public_in("mooncake.store", MooncakeDistributedStore)
name_methods(MooncakeDistributedStore)
SetupArguments.__init__.__qualname__ = MooncakeDistributedStore.setup.__qualname__  # for its TypeErrors
MooncakeDistributedStore.setup.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *inspect.signature(SetupArguments).parameters.values(),
    ],
    return_annotation=int,
)
