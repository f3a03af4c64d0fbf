# SPDX-License-Identifier: Apache-2.0
"""State that one ``setup`` creates: an engine, a client of the master, possibly segments of this process.

Every call enters and leaves the session, so that closing it waits for calls in progress instead of
releasing the memory they use. A forked child has no session: its parent's sockets are not its own.
``session_setup.py`` makes sessions.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from mooncake.compat.store.buffer_pool import LocalBuffer
from mooncake.compat.store.client_metrics import ClientMetrics
from mooncake.compat.store.embedded_node import EmbeddedNode
from mooncake.compat.store.setup_arguments import DEFAULT_TENANT, DropinSettings, SetupArguments
from mooncake.compat.transfer.environment import EngineSettings
from mooncake.compat.transfer.registered_memory import RegisteredMemory
from mooncake.compat.transfer.temporary_registration import TemporaryRegistrations
from mooncake.errors import MooncakeError
from mooncake.log import get_logger
from mooncake.store import messages as m
from mooncake.store.client.calls import StoreSettings
from mooncake.store.client.store import Store
from mooncake.store.node.node import NodeSettings
from mooncake.transfer import TransferEngine

log = get_logger("mooncake.store")

CLOSE_S = 5.0
"""Time for calls in progress to end when a session is closed."""


class StoreSession:
    """Resources of one ``setup``, until ``close``. Thread-safe."""

    def __init__(
        self,
        arguments: SetupArguments,
        settings: DropinSettings,
        engine_settings: EngineSettings,
        engine: TransferEngine,
        hostname: str,
        owns_engine: bool,
    ) -> None:
        self.arguments = arguments
        self.settings = settings
        self.engine = engine
        self.hostname = hostname
        self.is_cut_off = False
        """Whether the last call did not reach the master."""
        self._owns_engine = owns_engine
        self.transfer_s = engine_settings.transfer_s
        """Seconds that the transfer of so many bytes may take, other than requests to the master."""
        self.store = self.client(settings.timeout_s)
        self._prober = self.client(settings.probe_timeout_s)
        self.registered = RegisteredMemory(engine, self.transfer_s)
        self.temporary_registrations = TemporaryRegistrations(engine.regions)
        self.local = LocalBuffer(engine, arguments.local_buffer_size)
        self.pool = LocalBuffer(engine, 0)
        """Additional memory of a worker of a ``mooncake_client``."""
        self.client_metrics = ClientMetrics()
        self._node_lock = threading.Lock()
        self._node: EmbeddedNode | None = None
        self._pid = os.getpid()
        self._calls = threading.Condition()
        self._num_calls = 0
        self._is_closed = False
        self.at_close: list[Callable[[], object]] = []
        """Further actions for ``close``, run in reverse order."""

    def client(self, timeout_s: float) -> Store:
        """Make a further client of the same master, with a timeout of its own."""
        settings = StoreSettings(timeout_s=timeout_s, tenant=self.arguments.tenant_id or DEFAULT_TENANT)
        return Store(self.arguments.master_server_addr, self.engine, settings)

    @property
    def is_usable(self) -> bool:
        return not self._is_closed and self._pid == os.getpid()

    def enter(self) -> bool:
        """Begin a call; False when the session is closed or belongs to another process."""
        if not self.is_usable:
            return False
        with self._calls:
            if self._is_closed:
                return False
            self._num_calls += 1
            return True

    def leave(self) -> None:
        with self._calls:
            self._num_calls -= 1
            if self._is_closed and not self._num_calls:
                self._calls.notify_all()

    def has_master(self) -> bool:
        """Whether the master answers within the probe timeout."""
        try:
            self._prober.ask(m.Exists([]))
        except MooncakeError:
            self.is_cut_off = True
            return False
        self.is_cut_off = False
        return True

    def node(self, settings: NodeSettings | None = None) -> EmbeddedNode:
        """Node of this process, made on first use.

        Raises:
            MooncakeError: as ``EmbeddedNode``.
        """
        with self._node_lock:
            if self._node is None:
                settings = settings or self.node_settings(0)
                self._node = EmbeddedNode(settings, self.engine, self.settings.setup_timeout_s)
            return self._node

    def node_settings(self, pool_size_bytes: int) -> NodeSettings:
        """Settings of this process's node, without an SSD tier of its own."""
        arguments, settings = self.arguments, self.settings
        return NodeSettings(
            master=arguments.master_server_addr,
            name=self.hostname,
            huge_pages=settings.huge_pages,
            pool_size_bytes=pool_size_bytes,
            root_fs_dir=arguments.root_fs_dir or settings.root_fs_dir,
            cluster_id=arguments.cluster_id or settings.cluster_id,
            accept_root_fs_dir=settings.accept_root_fs_dir,
        )

    def is_on_node(self) -> bool:
        """Whether the caller runs on the thread of this process's node."""
        return self._node is not None and self._node.is_on_own_thread()

    def unmount(self) -> None:
        """Unmount this process's segments at the master, the only necessary step when the process ends."""
        if self.is_usable and self._node is not None:
            self._node.close()

    def close(self) -> None:
        """Unmount, and release all resources. Idempotent; does nothing in a forked child."""
        if not self.is_usable:
            return
        with self._calls:
            if self._is_closed:
                return
            self._is_closed = True
            self._calls.wait_for(lambda: not self._num_calls, CLOSE_S)
        for undo in reversed(self.at_close):
            undo()
        if self._node is not None:
            self._node.close()
        with contextlib.suppress(MooncakeError):
            self.store.close()
            self._prober.close()
        if self._owns_engine:
            self.engine.close()
