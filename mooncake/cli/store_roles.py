# SPDX-License-Identifier: Apache-2.0
"""The commands ``master`` and ``daemon``: the store's servers with the existing package's HTTP interface and
the console's pages about a store."""

from __future__ import annotations

from dataclasses import replace

from mooncake.compat.master import load_http
from mooncake.store import daemon, server
from mooncake.store.daemon import DaemonSettings
from mooncake.store.master.context import MasterHttp
from mooncake.store.settings import MasterSettings


async def serve_master(settings: MasterSettings) -> None:
    """Run a master until cancelled. Raises as ``store.server.serve``."""
    await server.serve(settings, load_pages)


async def serve_daemon(settings: DaemonSettings) -> None:
    """Run a whole store in one process until cancelled. Raises as ``store.daemon.serve``."""
    await daemon.serve(settings, load_pages)


def load_pages() -> MasterHttp:
    """Import the HTTP side of a master, with the console."""
    from mooncake.console import store_site  # late: a web framework takes half a second

    http = load_http()
    return replace(
        http,
        make_app=lambda context: store_site.add_store_pages(http.make_app(context), context),
        open_paths=(*http.open_paths, *store_site.open_paths()),
    )
