# SPDX-License-Identifier: Apache-2.0
"""The command ``daemon``: a whole store in one process, with the existing package's HTTP interface."""

from __future__ import annotations

from mooncake.compat.master import load_http
from mooncake.store import daemon
from mooncake.store.daemon import DaemonSettings


async def serve(settings: DaemonSettings) -> None:
    """Run a daemon until cancelled. Raises as ``store.daemon.serve``."""
    await daemon.serve(settings, load_http)
