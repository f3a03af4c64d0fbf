"""What one ``setup`` brings about: an engine, a client of the master, perhaps a segment of this process.

A session is entered and left by every call, so that closing it waits for the calls under way instead of
pulling the memory from under them. A forked child has none: its parent's sockets are not its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from dataclasses import replace

from mooncake.config import load
from mooncake.errors import AddressInUse, InvalidArgument, MooncakeError
from mooncake.log import get_logger
from mooncake.store import messages as m
from mooncake.store.client import Store, StoreSettings
from mooncake.store.compat.config import MIN_SEGMENT_BYTES, DropinSettings, Words, read_environment
from mooncake.store.compat.embedded import EmbeddedNode
from mooncake.store.compat.exits import close_at_exit
from mooncake.store.node import NodeSettings
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.transfer.compat import InnerTransferEngine
from mooncake.transfer.compat.borrowed import Borrowed
from mooncake.transfer.compat.choice import Choice, choose, split_host
from mooncake.transfer.compat.codes import Refused
from mooncake.transfer.compat.environment import read_environment as read_engine_environment
from mooncake.transfer.compat.machine import available_schemes, is_free, rdma_devices, resolves
from mooncake.transfer.compat.registered import Registered

log = get_logger("mooncake.store")

CLOSE_S = 5.0
"""How long calls under way may take to end when a session is closed."""


class Session:
    """Everything that ``close`` has to undo. Thread-safe."""

    def __init__(self, words: Words, settings: DropinSettings, engine: TransferEngine | None) -> None:
        self.words = words
        self.settings = settings
        self.hostname = ""
        self.is_cut_off = False
        """The last call did not reach the master."""
        self.nodes: dict[str, EmbeddedNode] = {}
        """By the segment's name, of this process."""
        self._owns_engine = engine is None
        self.engine = engine or _make_engine(words)
        master = words.master_server_addr
        self.store = Store(master, self.engine, StoreSettings(timeout_s=settings.timeout_s))
        self._prober = Store(master, self.engine, StoreSettings(timeout_s=settings.probe_timeout_s))
        self.registered = Registered(self.engine)
        self.borrowed = Borrowed(self.engine.regions)
        self._pid = os.getpid()
        self._calls = threading.Condition()
        self._num_calls = 0
        self._is_closed = False

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

    def close(self) -> None:
        """Unmount, and let go of everything. Harmless when repeated, and in a forked child."""
        if not self.is_usable:
            return
        with self._calls:
            if self._is_closed:
                return
            self._is_closed = True
            self._calls.wait_for(lambda: not self._num_calls, CLOSE_S)
        for node in self.nodes.values():
            node.close()
        with contextlib.suppress(MooncakeError):
            self.store.close()
            self._prober.close()
        if self._owns_engine:
            self.engine.close()


def open_session(words: Words) -> Session:
    """A session whose master answers and, if there is one, knows the segment.

    Raises:
        MooncakeError: it cannot be; the message says why.
    """
    settings = read_environment()
    engine = words.engine
    if engine is not None and not isinstance(engine, InnerTransferEngine):
        raise InvalidArgument("engine", type(engine).__name__, "what TransferEngine.get_engine() returned")
    session = Session(words, settings, None if engine is None else engine.engine)
    try:
        _greet(session)
        session.hostname = _mount(session)
    except BaseException:
        session.close()
        raise
    close_at_exit(session)
    return session


def _greet(session: Session) -> None:
    """Wait for the master, for a while."""
    first = Store(
        session.words.master_server_addr,
        session.engine,
        StoreSettings(timeout_s=session.settings.setup_timeout_s),
    )
    try:
        first.ask(m.Exists([]))
    finally:
        first.close()


def _mount(session: Session) -> str:
    """The name of this process's segment, which is mounted if it has a size."""
    host, fixed = split_host(session.words.local_hostname)
    shown = f"[{host}]" if ":" in host else host
    settings = session.settings
    ports = [fixed] if fixed else _some_ports(settings)
    problem: MooncakeError | None = None
    for port in ports:
        name = f"{shown}:{port}"
        try:
            if not session.words.global_segment_size:
                if fixed or is_free(_listen_host(session, host), port):
                    return name
                continue
            if _is_taken(session, name):
                raise AddressInUse(f"segment {name!r} is served by another process")
            session.nodes[name] = EmbeddedNode(
                node_settings(session, name, port, session.words.global_segment_size),
                settings.setup_timeout_s,
            )
            return name
        except AddressInUse as error:
            problem = error
    where = f"port {fixed}" if fixed else f"{len(ports)} ports tried from {settings.min_port}"
    raise InvalidArgument(
        "local_hostname", session.words.local_hostname, f"a name that is free ({where}: {problem})"
    )


def _some_ports(settings: DropinSettings) -> list[int]:
    every = range(settings.min_port, settings.max_port + 1)
    return random.SystemRandom().sample(every, min(settings.setup_retries, len(every)))


def _is_taken(session: Session, name: str) -> bool:
    status: m.MasterStatus = session.store.ask(m.Status())
    return any(segment.segment == name and segment.state == "alive" for segment in status.segments)


def node_settings(session: Session, name: str, port: int, size_bytes: int) -> NodeSettings:
    """Of a node that serves ``size_bytes`` of this process."""
    choice = _choice(session.words)
    return NodeSettings(
        master=session.words.master_server_addr,
        name=name,
        host=choice.flags["listen_host"],
        advertise_host=choice.flags["advertise_host"],
        port=port,
        pool_size_bytes=max(size_bytes, MIN_SEGMENT_BYTES),
        huge_pages=session.settings.huge_pages,
    )


def _listen_host(session: Session, host: str) -> str:
    return str(_choice(session.words).flags.get("listen_host", host))


def _choice(words: Words) -> Choice:
    knobs = read_engine_environment()
    try:
        return choose(
            *(words.local_hostname, words.metadata_server, words.protocol, words.rdma_devices, knobs),
            *(available_schemes(), rdma_devices(), resolves),
        )
    except Refused as error:
        raise InvalidArgument("rdma_devices", words.rdma_devices, str(error)) from error


def _make_engine(words: Words) -> TransferEngine:
    """The engine of a program that brings none. Its peers are found through the master."""
    choice = _choice(words)
    if choice.warning:
        log.warning(f"setup: {choice.warning}")
    flags = {field: value for field, value in choice.flags.items() if not field.startswith("metadata")}
    settings, _ = load(TransferSettings, flags, os.environ)
    return TransferEngine(replace(settings, name="", metadata=""))
