"""What one ``setup`` brings about: an engine, a client of the master, perhaps segments of this process.

A session is entered and left by every call, so that closing it waits for the calls under way instead of
pulling the memory from under them. A forked child has none: its parent's sockets are not its own.
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
"""How long calls under way may take to end when a session is closed."""


class StoreSession:
    """Everything that ``close`` has to undo. Thread-safe."""

    def __init__(
        self,
        words: SetupArguments,
        settings: DropinSettings,
        engine: TransferEngine,
        hostname: str,
        owns_engine: bool,
    ) -> None:
        self.words = words
        self.settings = settings
        self.engine = engine
        self.hostname = hostname
        self.is_cut_off = False
        """The last call did not reach the master."""
        self._owns_engine = owns_engine
        self.store = self.client(settings.timeout_s)
        self._prober = self.client(settings.probe_timeout_s)
        self.registered = RegisteredMemory(engine)
        self.temporary_registrations = TemporaryRegistrations(engine.regions)
        self.local = LocalBuffer(engine, words.local_buffer_size)
        self.pool = LocalBuffer(engine, 0)
        """What a worker of a ``mooncake_client`` was promised besides."""
        self.client_metrics = ClientMetrics()
        self._nodes = threading.Lock()
        self._node: EmbeddedNode | None = None
        self._pid = os.getpid()
        self._calls = threading.Condition()
        self._num_calls = 0
        self._is_closed = False
        self.at_close: list[Callable[[], object]] = []
        """What else is to be undone, last first."""

    def client(self, timeout_s: float) -> Store:
        """A further client of the same master, with patience of its own."""
        settings = StoreSettings(timeout_s=timeout_s, tenant=self.words.tenant_id or DEFAULT_TENANT)
        return Store(self.words.master_server_addr, self.engine, settings)

    @property
    def is_usable(self) -> bool:
        return not self._is_closed and self._pid == os.getpid()

    def enter(self) -> bool:
        """A call begins, unless the session is closed or of another process."""
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
        """It answers, quickly."""
        try:
            self._prober.ask(m.Exists([]))
        except MooncakeError:
            self.is_cut_off = True
            return False
        self.is_cut_off = False
        return True

    def node(self, settings: NodeSettings | None = None) -> EmbeddedNode:
        """This process's node, which is made when it is first wanted.

        Raises:
            MooncakeError: as ``EmbeddedNode``.
        """
        with self._nodes:
            if self._node is None:
                nothing = NodeSettings(
                    master=self.words.master_server_addr, name=self.hostname, pool_size_bytes=0
                )
                self._node = EmbeddedNode(settings or nothing, self.engine, self.settings.setup_timeout_s)
            return self._node

    def is_on_node(self) -> bool:
        """The caller runs on the thread of this process's node."""
        return self._node is not None and self._node.is_on_own_thread()

    def unmount(self) -> None:
        """Tell the master that this process's memory goes away; all that matters when it is ending."""
        if self.is_usable and self._node is not None:
            self._node.close()

    def close(self) -> None:
        """Unmount, and let go of everything. Harmless when repeated, and in a forked child."""
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
