# SPDX-License-Identifier: Apache-2.0
"""The command ``master``: the store's master, with the existing package's HTTP interface."""

from __future__ import annotations

from mooncake.compat.master import load_http
from mooncake.store import server
from mooncake.store.settings import MasterSettings


async def serve(settings: MasterSettings) -> None:
    """Run a master until cancelled. Raises as ``store.server.serve``."""
    await server.serve(settings, load_http)
