# SPDX-License-Identifier: Apache-2.0
"""The commands ``master`` and ``daemon``: the store's servers with the existing package's HTTP interface."""

from __future__ import annotations

from mooncake.compat.master import load_http
from mooncake.store import daemon, server
from mooncake.store.daemon import DaemonSettings
from mooncake.store.settings import MasterSettings


async def serve_master(settings: MasterSettings) -> None:
    """Run a master until cancelled. Raises as ``store.server.serve``."""
    await server.serve(settings, load_http)


async def serve_daemon(settings: DaemonSettings) -> None:
    """Run a whole store in one process until cancelled. Raises as ``store.daemon.serve``."""
    await daemon.serve(settings, load_http)
