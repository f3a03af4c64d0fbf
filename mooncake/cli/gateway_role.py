# SPDX-License-Identifier: Apache-2.0
"""The command ``gateway``: the gateway's server with the console's pages."""

from __future__ import annotations

from mooncake.console.gateway_site import gateway_pages
from mooncake.gateway import app
from mooncake.gateway.gateway import GatewaySettings


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until cancelled. Raises as ``gateway.app.serve``."""
    await app.serve(settings, gateway_pages if settings.console else None)
