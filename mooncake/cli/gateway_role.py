# SPDX-License-Identifier: Apache-2.0
"""The command ``gateway``: the gateway's server with what the rooms above it add."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from mooncake.console.gateway_site import gateway_pages
from mooncake.console.what_if import BesideSimulation, add_what_if
from mooncake.gateway import app
from mooncake.gateway.gateway import Gateway, GatewaySettings
from mooncake.security import is_loopback


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until cancelled. Raises as ``gateway.app.serve``."""
    await app.serve(settings, _pages)


@contextlib.asynccontextmanager
async def _pages(gateway: Gateway, clients: FastAPI, operators: FastAPI) -> AsyncIterator[None]:
    simulation = BesideSimulation()
    add_what_if(clients, gateway, simulation)
    add_what_if(operators, gateway, simulation, is_loopback(gateway.settings.metrics_host))
    async with contextlib.AsyncExitStack() as pages:
        if gateway.settings.console:
            await pages.enter_async_context(gateway_pages(gateway, clients, operators))
        yield
