"""Serves an ASGI application on the loop that is already running.

Owns the socket and the two things uvicorn would do differently: a taken port raises ``AddressInUse``
before anything starts, and signals are left to whoever runs the role.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mooncake.errors import AddressInUse

KEEP_ALIVE_S = 75
"""How long an idle connection stays: longer than clients keep theirs, or now and then one writes its next
request just as the connection is closed."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; ``port`` 0 takes a free one.

    Raises:
        AddressInUse: the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen(2048)
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"port {port} on {host} is in use; stop its owner or choose another"
            ) from error
        raise
    opened.setblocking(False)
    return opened


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Certified(HttpToolsProtocol):
    """Puts the certificate of who asks into the scope of each request."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["mooncake.certificate"] = self.transport.get_extra_info("peercert")  # type: ignore[typeddict-unknown-key]


class WebServer:
    """``app`` behind ``listening``; ``close`` lets answers under way end for ``grace_s`` seconds."""

    def __init__(
        self, app: Any, listening: socket.socket, grace_s: float = 2.0, tls: ssl.SSLContext | None = None
    ) -> None:
        self._socket = listening
        self.port: int = listening.getsockname()[1]
        config = uvicorn.Config(
            app,
            timeout_keep_alive=KEEP_ALIVE_S,
            http="httptools",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        config.load()
        config.ssl = tls
        if tls is not None:
            config.http_protocol_class = _Certified
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once requests are taken.

        Raises:
            RuntimeError: the application's own start failed; the log has the traceback.
        """
        self._task = asyncio.get_running_loop().create_task(self._serve())
        while not self._server.started:
            if self._task.done():
                raise RuntimeError("the application did not start; the log says why")
            await asyncio.sleep(0.005)

    async def _serve(self) -> None:
        # uvicorn leaves the process when the application does not start; here that is not its decision.
        with contextlib.suppress(SystemExit):
            await self._server.serve(sockets=[self._socket])

    async def wait(self) -> None:
        """Return when the server has ended."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def close(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
