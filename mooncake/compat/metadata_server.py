# SPDX-License-Identifier: Apache-2.0
"""The existing package's ``mooncake.http_metadata_server``: the HTTP metadata service in a thread.

``mooncake_http_metadata_server --port 8080 --host 0.0.0.0`` runs it as a program. Unlike the existing one it
lets a process publish its address again, as a restarted process must.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import errno
import signal
import sys
import threading
from collections.abc import Sequence

from mooncake.errors import AddressInUse, MooncakeError
from mooncake.http.server import HttpServer, listen
from mooncake.log import get_logger, setup_logging
from mooncake.security import process_identity, warn_if_open
from mooncake.transfer.metadata_server import make_app

log = get_logger(__name__)


class KVPoll(enum.IntEnum):
    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class KVBootstrapServer:
    """Metadata service that serves ``/metadata`` from ``run`` to ``close``."""

    def __init__(self, port: int, host: str = "0.0.0.0") -> None:
        self.port, self.host = port, host
        self._state = KVPoll.Failed
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_ready = threading.Event()

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that serves; None before ``run``."""
        return self._thread

    def run(self) -> threading.Thread:
        """Listen; returns the serving thread when requests are accepted. Idempotent.

        Raises:
            OSError: the port is in use.
        """
        if self._thread is not None:
            return self._thread
        try:
            listening = listen(self.host, self.port)
        except AddressInUse as error:
            raise OSError(errno.EADDRINUSE, str(error)) from error
        self.port = listening.getsockname()[1]
        web = HttpServer(make_app(), listening, tls=process_identity().server_tls)
        self._thread = thread = threading.Thread(target=lambda: asyncio.run(self._serve(web)), daemon=True)
        thread.start()
        self._is_ready.wait()
        return thread

    def poll(self) -> KVPoll:
        """``Success`` while it serves, ``Failed`` before ``run`` and when it has ended."""
        return self._state

    def close(self) -> None:
        """Stop. Idempotent, also before ``run``."""
        self._state = KVPoll.Failed
        if self._thread is None or self._loop is None or self._stopping is None:
            return
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _serve(self, web: HttpServer) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            await web.start()
            self._state = KVPoll.Success
            self._is_ready.set()
            await self._stopping.wait()
        finally:
            self._state = KVPoll.Failed
            self._is_ready.set()
            await web.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script ``mooncake_http_metadata_server``."""
    parser = argparse.ArgumentParser(
        prog="mooncake_http_metadata_server",
        description="Serve the addresses of transfer engines (metadata service).",
        epilog="Example: mooncake_http_metadata_server --port 8080 --host 0.0.0.0",
    )
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host", default="0.0.0.0")
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    parser.add_argument("--log-level", type=str.upper, choices=levels, default="INFO")
    parsed = parser.parse_args(arguments)
    if not 0 <= parsed.port < 65536:
        parser.error(f"--port {parsed.port}: 0 to 65535 is expected")
    setup_logging(parsed.log_level.lower(), role="metadata")
    warn_if_open("mooncake_http_metadata_server", parsed.host)
    server = KVBootstrapServer(parsed.port, parsed.host)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        server.run()
    except (MooncakeError, OSError) as error:
        print(f"error: {parsed.host}:{parsed.port}: {error}: --host, --port", file=sys.stderr, flush=True)
        sys.exit(2)
    log.info("ready", role="metadata", address=f"http://{server.host}:{server.port}")
    stop.wait()
    server.close()
