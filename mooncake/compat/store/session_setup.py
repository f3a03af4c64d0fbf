# SPDX-License-Identifier: Apache-2.0
"""Steps that open a session: engine, name, contact with the master, segments.

A step that fails leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mooncake.compat.store.exit_hooks import close_at_exit
from mooncake.compat.store.setup_arguments import (
    MIN_SEGMENT_BYTES,
    DropinSettings,
    SetupArguments,
    read_environment,
)
from mooncake.compat.store.store_session import StoreSession
from mooncake.compat.transfer import InnerTransferEngine
from mooncake.compat.transfer.environment import EngineSettings
from mooncake.compat.transfer.environment import read_environment as read_engine_environment
from mooncake.compat.transfer.error_codes import EngineCodeError
from mooncake.compat.transfer.host_probe import available_schemes, rdma_devices, resolves
from mooncake.compat.transfer.transport_choice import choose_transports, split_host
from mooncake.errors import AddressInUse, InvalidArgument
from mooncake.log import get_logger
from mooncake.store import messages as m
from mooncake.transfer import TransferEngine, TransferSettings, transfer_from_environment

log = get_logger("mooncake.store")

MAX_FOLDERS = 256
_SSD_SHARE = 0.9
"""Largest fraction of a file system that the SSD tier may take."""


def open_session(arguments: SetupArguments) -> StoreSession:
    """Open a session; its master answers and has accepted this process's segment, if there is one.

    Raises:
        MooncakeError: a step failed; the message has the reason.
    """
    settings = read_environment()
    session = _session_with_engine(arguments, settings)
    try:
        _wait_for_master(session)
        _mount(session)
        if arguments.enable_client_http_server:
            _serve_http(session)
    except BaseException:
        session.close()
        raise
    close_at_exit(session)
    return session


def _session_with_engine(arguments: SetupArguments, settings: DropinSettings) -> StoreSession:
    """Make a session with its engine, listening at the port of its name, or with the program's own engine.

    A port that is in use is replaced by a free one, which then is part of the name.
    """
    engine_settings = read_engine_environment()
    host, fixed = split_host(arguments.local_hostname)
    shown = f"[{host}]" if ":" in host else host
    every = range(settings.min_port, settings.max_port + 1)
    ports = random.SystemRandom().sample(every, min(settings.setup_retries, len(every)))
    if fixed:  # the others are for processes of one host that share a configuration
        ports.insert(0, fixed)
    if arguments.engine is not None:
        if not isinstance(arguments.engine, InnerTransferEngine):
            raise InvalidArgument(
                "engine", type(arguments.engine).__name__, "what TransferEngine.get_engine() returned"
            )
        engine, name = arguments.engine.engine, f"{shown}:{ports[0]}"
        return StoreSession(arguments, settings, engine_settings, engine, name, owns_engine=False)
    base = _transfer_settings(arguments, engine_settings)
    for port in ports:
        name = f"{shown}:{port}"
        with contextlib.suppress(AddressInUse):
            engine = TransferEngine(replace(base, name=name, tcp_port=port))
            if fixed and port != fixed:
                log.warning(
                    f"setup: port {fixed} of local_hostname {arguments.local_hostname!r} is in use; "
                    f"this process is {name}"
                )
            return StoreSession(arguments, settings, engine_settings, engine, name, owns_engine=True)
    where = f"{len(ports)} ports from {every[0]} to {every[-1]}, all"
    raise InvalidArgument("local_hostname", arguments.local_hostname, f"a free port; {where} in use")


def _serve_http(session: StoreSession) -> None:
    """Serve health and metrics, except where another process of this host has the port."""
    try:  # late: the dependencies of the store contain no web server
        from mooncake.compat.store.client_http import ClientHttpServer
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            "enable_client_http_server",
            True,
            f"False without {error.name}; pip install 'mooncake-serving[gateway]' to have it",
        ) from error

    try:
        endpoint = ClientHttpServer(
            session.arguments.client_http_port,
            lambda: 0 if session.has_master() else 2,
            session.client_metrics,
        )
    except AddressInUse as error:
        log.warning(f"setup: {error}; until then this process serves neither health nor metrics")
        return
    session.at_close.append(endpoint.close)


def _transfer_settings(arguments: SetupArguments, engine_settings: EngineSettings) -> TransferSettings:
    """Settings of an engine whose peers are found through the master."""
    try:
        choice = choose_transports(
            arguments.local_hostname,
            arguments.metadata_server,
            arguments.protocol,
            arguments.rdma_devices,
            engine_settings,
            available_schemes(),
            rdma_devices(),
            resolves,
        )
    except EngineCodeError as error:
        raise InvalidArgument("rdma_devices", arguments.rdma_devices, str(error)) from error
    if choice.warning:
        log.warning(f"setup: {choice.warning}")
    flags = {field: value for field, value in choice.flags.items() if not field.startswith("metadata")}
    host, _ = split_host(arguments.local_hostname)
    if flags["advertise_host"] and not resolves(host):
        flags["advertise_host"] = ""
        log.warning(
            f"setup: local_hostname {host!r} does not resolve: it names this process's segment, "
            "and peers reach it at this host's own address"
        )
    return replace(transfer_from_environment(flags), metadata="")


def _wait_for_master(session: StoreSession) -> None:
    """Wait for the master for ``setup_timeout_s``; check that the name is free."""
    client = session.client(session.settings.setup_timeout_s)
    try:
        if session.engine.identity.tenant:  # it may not query segments, and mounts none
            client.ask(m.Exists([], session.engine.identity.tenant))
            return
        status: m.MasterStatus = client.ask(m.GetMasterStatus())
    finally:
        client.close()
    name = session.hostname
    if any(segment.segment == name and segment.state == "alive" for segment in status.segments):
        raise InvalidArgument(
            "local_hostname",
            session.arguments.local_hostname,
            f"a free name; segment {name!r} is another process's",
        )


def _mount(session: StoreSession) -> None:
    arguments, settings = session.arguments, session.settings
    has_ssd = arguments.enable_ssd_offload or settings.ssd_offload
    if not arguments.global_segment_size and not has_ssd:
        return
    memory_only = session.node_settings(
        arguments.global_segment_size and max(arguments.global_segment_size, MIN_SEGMENT_BYTES)
    )
    if not has_ssd:
        session.node(memory_only)
        return
    root = Path(arguments.ssd_offload_path or settings.ssd_path)
    refusal: InvalidArgument | None = None
    for folder in _free_folders(root):
        size_bytes = min(settings.ssd_size_bytes, int(shutil.disk_usage(root).total * _SSD_SHARE))
        try:
            session.node(replace(memory_only, ssd_path=str(folder), ssd_size_bytes=size_bytes))
            return
        except InvalidArgument as error:
            refusal = error  # another process may just have locked it
    raise refusal or InvalidArgument("ssd_offload_path", str(root), f"fewer than {MAX_FOLDERS} processes")


def _free_folders(root: Path) -> Iterator[Path]:
    """Free folders of an SSD that several processes share, one for each; the same one after a restart."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            "ssd_offload_path", str(root), f"a directory that can be written ({error.strerror})"
        ) from error
    for number in range(MAX_FOLDERS):
        folder = root / f"client-{number}"
        if not _is_locked(folder / "mooncake.lock"):
            yield folder


def _is_locked(file: Path) -> bool:
    try:
        opened = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # it does not exist yet, or opening it later reports the error
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False
