# SPDX-License-Identifier: Apache-2.0
"""HTTP requests of an examination: bounded in time and size, with the reason when a server does not answer.

It owns the distinction between a server that is not there and one that speaks TLS where plain HTTP was
expected, or the other way round, which look alike to a client; and a server's clock, from the ``Date`` of its
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ssl
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

import mooncake
from mooncake import clock
from mooncake.doctor.facts import Reach, Trouble
from mooncake.errors import MooncakeError, ProtocolError, cause_of
from mooncake.rpc.client import split_address
from mooncake.security import Identity
from mooncake.security.http_auth import HttpClientAuth

MAX_ANSWER_BYTES = 8 << 20
TLS_PROBE_S = 3.0


class Unanswered(MooncakeError):
    """A server did not give the expected answer; ``reach`` has the reason."""

    code = "unanswered"

    def __init__(self, reach: Reach) -> None:
        super().__init__(reach.detail)
        self.reach = reach


@dataclass
class HttpReply:
    status: int
    body: bytes
    headers: Mapping[str, str]
    seconds: float
    skew_s: float | None = None
    "How far the server's clock is ahead, as far as its whole seconds show."

    def json(self) -> Any:
        """The decoded body, or None where it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None

    @property
    def message(self) -> str:
        """The error's message in any of the usual forms, shortened."""
        found = self.json()
        if isinstance(found, dict):
            error = found.get("error", found)
            if isinstance(error, dict):
                error = error.get("message") or error.get("detail") or error
            return str(error)[:300]
        return self.body[:300].decode(errors="replace").strip()


@dataclass(frozen=True)
class HttpServerAt:
    """Base address of a server, with the headers that it wants."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    is_signed: bool = True
    "Whether requests carry the cluster's signature, if there is a cluster key."

    @property
    def address(self) -> str:
        """``host:port``, the host as it is written in the URL: an address of IPv6 keeps its brackets."""
        parts = urllib.parse.urlsplit(self.url)
        return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"


class HttpProbe:
    """Sends the requests. Use it as an asynchronous context on one event loop."""

    def __init__(self, identity: Identity, timeout_s: float) -> None:
        self._caller = HttpClientAuth(identity)
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpProbe:
        # Without a certificate of ours, servers are verified by the system's authorities.
        # Each request has its own connection: a server that closes an idle one just when the next request
        # comes would look as if it had failed.
        connector = aiohttp.TCPConnector(limit=64, ssl=self._caller.tls or True, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, server: HttpServerAt, path: str) -> HttpReply:
        """Raises Unanswered."""
        return await self.request("GET", server, path)

    async def post(self, server: HttpServerAt, path: str, body: Any, timeout_s: float = 0.0) -> HttpReply:
        """Send JSON. Raises Unanswered."""
        return await self.request("POST", server, path, msgspec.json.encode(body), timeout_s)

    async def request(
        self, method: str, server: HttpServerAt, path: str, data: bytes = b"", timeout_s: float = 0.0
    ) -> HttpReply:
        """Send one request; errors of HTTP are replies. Raises Unanswered."""
        assert self._session is not None, "enter the context first"
        headers = {"User-Agent": f"mooncake-doctor/{mooncake.__version__}", **server.headers}
        if data:
            headers["Content-Type"] = "application/json"
        if server.is_signed:
            headers |= self._caller.headers(method, path, data)
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s, sock_connect=self._timeout_s)
        began = clock.monotonic()
        try:
            async with self._session.request(
                method, server.url.rstrip("/") + path, data=data or None, headers=headers, timeout=timeout
            ) as response:
                body = await response.content.read(MAX_ANSWER_BYTES)
                while len(body) < MAX_ANSWER_BYTES and (more := await response.content.read(1 << 20)):
                    body += more
                now = clock.wall()
                seconds = clock.monotonic() - began
                skew = skew_of(response.headers.get("Date", ""), now - seconds, now)
                return HttpReply(response.status, body, response.headers, seconds, skew)
        except aiohttp.ClientConnectorCertificateError as error:
            raise Unanswered(Reach(Trouble.CERTIFICATE, str(error))) from error
        except TimeoutError:
            reach = Reach(Trouble.SILENT, f"{method} {path} was not answered within {timeout.total:g} s")
            raise Unanswered(reach) from None
        # ValueError: no host can have this name
        except (aiohttp.ClientError, OSError, ValueError, ProtocolError) as error:
            raise Unanswered(await self._reason(server, error)) from error

    async def _reason(self, server: HttpServerAt, error: Exception) -> Reach:
        """Why a connection failed: nothing listens, the two sides disagree about TLS, or it is no server of
        HTTP."""
        is_tls = server.url.startswith("https:")
        host, port = split_address(server.address)
        speaks = await speaks_tls(host, port)
        detail = cause_of(error)
        if speaks is None:
            return Reach(Trouble.REFUSED, f"{server.url} can't be reached: {detail}")
        if speaks and not is_tls:
            return Reach(Trouble.TLS, f"{server.url}: this port speaks TLS, and http:// was used")
        if not speaks and is_tls:
            return Reach(Trouble.TLS, f"{server.url}: this port does not speak TLS, and https:// was used")
        if speaks:
            return Reach(Trouble.CERTIFICATE, f"{server.url}: {detail}")
        if isinstance(error, aiohttp.ServerDisconnectedError):
            what = "what listens there closed the connection without an answer in HTTP"
            return Reach(Trouble.NO_HTTP, f"{server.url}: {what}")
        if isinstance(error, aiohttp.ClientResponseError):  # its text has the bytes of the answer
            return Reach(Trouble.NO_HTTP, f"{server.url}: what answers there is no HTTP server")
        return Reach(Trouble.OTHER, f"{server.url}: {detail}")


def skew_of(date: str, sent_at: float, received_at: float) -> float | None:
    """How far a server's clock is ahead, from an answer's ``Date``: 0 within what its whole seconds allow."""
    try:
        shown = email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    # The header was written between both instants, and servers refresh it about once a second.
    if shown + 2.0 < sent_at:
        return shown + 1.0 - sent_at
    return max(0.0, shown - received_at)


async def speaks_tls(host: str, port: int) -> bool | None:
    """Whether a port answers a TLS handshake; None where nothing listens."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(TLS_PROBE_S):
            _, plain = await asyncio.open_connection(host, port)
            plain.close()
            with contextlib.suppress(OSError):
                await plain.wait_closed()
    except (OSError, ValueError, TimeoutError):  # ValueError: no host can have this name
        return None
    try:
        async with asyncio.timeout(TLS_PROBE_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.close()
            return True
    except ssl.SSLError as error:
        # A server that wants a certificate of its clients has answered, too.
        return any(word in str(error).upper() for word in ("CERTIFICATE", "ALERT", "HANDSHAKE_FAILURE"))
    except (OSError, TimeoutError):
        return False
