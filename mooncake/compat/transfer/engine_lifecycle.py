# SPDX-License-Identifier: Apache-2.0
"""A drop-in engine from ``initialize`` on: its settings, its transfer engine, its peers."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from mooncake.compat.transfer.async_batches import AsyncBatches
from mooncake.compat.transfer.environment import EngineSettings, read_environment, set_log_level
from mooncake.compat.transfer.error_codes import EngineCode, EngineCodeError, code_of
from mooncake.compat.transfer.host_probe import (
    available_schemes,
    is_free,
    local_topology,
    rdma_devices,
    resolves,
)
from mooncake.compat.transfer.public_types import InnerTransferEngine, TransferNotify
from mooncake.compat.transfer.registered_memory import RegisteredMemory
from mooncake.compat.transfer.temporary_registration import TemporaryRegistrations
from mooncake.compat.transfer.transport_choice import P2P, TransportChoice, choose_transports, split_host
from mooncake.errors import AddressInUse, InvalidArgument, MooncakeError, PeerLost, ProtocolError, Unavailable
from mooncake.log import get_logger
from mooncake.transfer.engine import TransferEngine as Engine
from mooncake.transfer.host import numeric_host
from mooncake.transfer.peers import RemoteSegment
from mooncake.transfer.settings import TransferSettings, transfer_from_environment
from mooncake.transfer.transports import Completion, Status
from mooncake.transfer.transports.rdma import usable_devices

log = get_logger("mooncake.engine")


class EngineLifecycle:
    """One engine of this process and its messages to peers. Does nothing until ``initialize``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._engine_settings = EngineSettings()
        self._is_p2p = False
        self._registered: RegisteredMemory | None = None
        self._batches: AsyncBatches | None = None
        self._temporary_registrations: TemporaryRegistrations | None = None

    def __reduce__(self) -> NoReturn:
        """Refuse ``pickle`` and ``copy.copy``: memory is registered with one engine."""
        raise TypeError(f"cannot pickle {type(self).__qualname__!r} object: it belongs to one process")

    # Start ------------------------------------------------------------------------------------------

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None = "", /
    ) -> int:
        """Return 0, also when called again; -1 with a log line (-6: no such device, -101: no such host)."""
        return self._initialize(local_hostname, metadata_server, protocol, device_name, "")

    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
        metadata_type: str,
        /,
    ) -> int:
        """As ``initialize``; ``metadata_type`` (http, etcd, redis, p2p) for a server without a scheme."""
        return self._initialize(local_hostname, metadata_server, protocol, device_name, metadata_type)

    def _initialize(self, *words: str | bytes | None) -> int:
        host, metadata, protocol, device, kind = (
            word.decode("utf-8", "replace") if isinstance(word, bytes) else word or "" for word in words
        )
        with self._lock:
            if self._engine is not None:
                return 0
            try:
                self._start(host, metadata, protocol, device, kind)
            except MooncakeError as error:
                log.error(f"initialize: {error}")
                return int(code_of(error))
            except ValueError as error:  # no host can have this name
                log.error(f"initialize: {error}")
                return int(EngineCode.INVALID_ARGUMENT)
            return 0

    def _start(self, host: str, metadata: str, protocol: str, device: str, kind: str) -> None:
        engine_settings = self._engine_settings = read_environment()
        set_log_level(engine_settings.log_level)
        choice = choose_transports(
            host,
            metadata,
            protocol,
            device,
            engine_settings,
            available_schemes(),
            rdma_devices(),
            resolves,
            kind,
        )
        if choice.warning:
            log.warning(f"initialize: {choice.warning}")
        settings = transfer_from_environment(choice.flags)
        engine = self._bind_or_fall_back(choice, settings)
        try:
            engine.publish()
        except MooncakeError as error:
            engine.close()
            raise EngineCodeError(
                EngineCode.INVALID_ARGUMENT, f"metadata server {metadata!r}: {error}"
            ) from error
        self._is_p2p = settings.metadata == P2P
        self._registered = RegisteredMemory(engine, engine_settings.transfer_s)
        temporary = self._temporary_registrations = TemporaryRegistrations(engine.regions)

        def ended(
            number: int, completion: Completion
        ) -> None:  # not a method: a bound one would keep the engine alive after `del engine`
            temporary.end_of(number)
            if completion.status != Status.OK:
                log.error(f"batch {number} failed: {completion.status.name.lower()}")

        self._batches = AsyncBatches(engine.new_queue(), ended)
        self._engine = engine
        log.info(f"listening for handshakes at {engine.handshake}")

    def _bind_or_fall_back(self, choice: TransportChoice, settings: TransferSettings) -> Engine:
        """Leave out rdma when the only device is unusable, unless MC_FORCE_HCA is set or it is named."""
        try:
            return self._bind(choice, settings)
        except (InvalidArgument, Unavailable) as error:
            field = getattr(error, "field", "transports")
            if "rdma" not in settings.transports or field not in ("transports", "rdma_devices"):
                raise
            if self._engine_settings.force_hca or field == "rdma_devices" or settings.rdma_devices:
                raise EngineCodeError(EngineCode.DEVICE_NOT_FOUND, str(error)) from error
            rest = tuple(scheme for scheme in settings.transports if scheme != "rdma")
            log.warning(f"initialize: {error}; {' and '.join(rest)} will carry the bytes")
            return self._bind(choice, replace(settings, transports=rest, rdma_devices=()))

    def _bind(self, choice: TransportChoice, settings: TransferSettings) -> Engine:
        """Make an engine that answers handshakes at a port of the configured range."""
        if "rdma" in settings.transports:  # which the engine itself would replace by tcp
            usable_devices(settings.rdma_devices, settings.rdma_port)
        low, high = self._engine_settings.min_rpc_port, self._engine_settings.max_rpc_port
        if low > high:
            raise InvalidArgument("MC_MIN_RPC_PORT", low, f"at most MC_MAX_RPC_PORT, which is {high}")
        ports = [choice.port] if choice.port else random.sample(range(low, high + 1), high + 1 - low)
        for port in ports:
            if is_free(settings.listen_host, port):
                with contextlib.suppress(AddressInUse):
                    return Engine(replace(settings, handshake_port=port))
        where = f"port {choice.port}" if choice.port else f"any port from {low} to {high}"
        raise EngineCodeError(
            EngineCode.SOCKET,
            f"{where} at {settings.listen_host} is in use; see MC_MIN_RPC_PORT, MC_MAX_RPC_PORT",
        )

    def _ready(self) -> Engine:
        if self._engine is None:
            raise EngineCodeError(
                EngineCode.INVALID_ARGUMENT,
                "the engine is not initialized; call initialize() and see that it returns 0",
            )
        return self._engine

    @property
    def _memory(self) -> RegisteredMemory:
        self._ready()
        assert self._registered is not None
        return self._registered

    def get_rpc_port(self) -> int:
        """Port of this process's session ``host:port``; 0 before ``initialize``."""
        return 0 if self._engine is None else int(self._engine.handshake.rpartition(":")[2])

    def get_engine(self) -> InnerTransferEngine | None:
        """The engine to pass to a store's ``setup``; None before ``initialize``."""
        return None if self._engine is None else InnerTransferEngine(self._engine)

    def get_engine_ptr(self) -> int:
        """A number that is unique among the engines of one process; 0 before ``initialize``."""
        return 0 if self._engine is None else id(self._engine)

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON with each memory location's preferred network cards and the others."""
        return local_topology(device_name or "")

    # Peers --------------------------------------------------------------------------------------------

    def get_notifies(self) -> list[TransferNotify]:
        """Notifications that peers sent to this process since the last call."""
        if self._engine is None:
            return []
        return [TransferNotify(one.name, one.text) for one in self._engine.notifications()]

    def send_probe(self, peer_server_name: str) -> int:
        """Return 0 when the peer answers; -101 unknown host, -102 not reachable, -103 malformed metadata,
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
                raise EngineCodeError(EngineCode.MALFORMED_JSON, str(error)) from error
            except MooncakeError as error:
                raise EngineCodeError(EngineCode.METADATA, str(error)) from error
            if segment is None:
                raise EngineCodeError(EngineCode.METADATA, f"no segment has the name {peer_server_name!r}")
            engine.probe(segment.descriptor.handshake)

        return self._number("send_probe", probe)

    def warmup_efa_segment(self, segment_name: str, /) -> int:
        """Return 0: there is nothing to warm up, because there is no EFA transport."""
        return 0

    def _open(self, name: str) -> RemoteSegment:
        segment = self._ready().open_name(name)
        if segment is None:
            raise PeerLost(
                f"no segment has the name {name!r}; is its process running, with the same metadata server?"
            )
        return segment

    def _number(self, what: str, act: Callable[[], None]) -> int:
        """Return 0, or the error number of the failure of ``act``, whose reason is logged."""
        try:
            act()
        except MooncakeError as error:
            log.error(f"{what}: {error}")
            return int(code_of(error))
        except ValueError as error:  # no host can have this name; a UnicodeError, for instance, is one
            log.error(f"{what}: {error}")
            return int(EngineCode.INVALID_ARGUMENT)
        return 0
