# SPDX-License-Identifier: Apache-2.0
"""The command ``gateway``: the gateway's server with what the rooms above it add."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from mooncake.console.gateway_site import gateway_pages
from mooncake.gateway import app
from mooncake.gateway.gateway import Gateway, GatewaySettings


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until cancelled. Raises as ``gateway.app.serve``."""
    await app.serve(settings, _pages)


@contextlib.asynccontextmanager
async def _pages(gateway: Gateway, clients: FastAPI, operators: FastAPI) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        if gateway.settings.console:
            await stack.enter_async_context(gateway_pages(gateway, clients, operators))
        yield
