# SPDX-License-Identifier: Apache-2.0
"""Unix socket of a server beside its loopback port, for clients on the same host.

A message over loopback TCP passes the whole network stack, twice for a call; over a Unix socket it is copied
and the peer woken. Clients find the socket by themselves: its abstract name follows from the loopback
address, and like that address it is visible within one network namespace only. Where there is none, or it is
not trusted, they use TCP.

Any local user may take an abstract name that is free, so the client compares the user that listens with its
own: only sockets of its own user or of root are used. What follows is the same as over TCP, greeting and
credentials included. With TLS there is no Unix socket, because certificates name hosts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid of ``SO_PEERCRED``."""
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The loopback address that a server on a wildcard address also has."""


def abstract_name(host: str, port: int) -> str:
    """Name of the socket beside a loopback address; "" for any other address."""
    loopback = _loopback(host)
    return f"\0mooncake-rpc/{loopback}:{port}" if loopback else ""


def loopback_of(listening: socket.socket) -> str:
    """The loopback address at which a socket listens; "" for none."""
    return _loopback(listening.getsockname()[0])


def _loopback(host: str) -> str:
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(_LOOPBACKS.get(host, host))
        if address.is_loopback:
            return str(address)
    return ""


def listen_beside(listening: socket.socket, backlog: int) -> socket.socket | None:
    """The Unix socket beside ``listening``; None if its address is no loopback address.

    Raises:
        OSError: another program has its name.
    """
    host, port = listening.getsockname()[:2]
    name = abstract_name(host, port)
    if not name:
        return None
    beside = socket.socket(socket.AF_UNIX)
    try:
        beside.bind(name)
        beside.listen(backlog)
        beside.setblocking(False)
    except OSError:
        beside.close()
        raise
    return beside


def connect_beside(host: str, port: int) -> socket.socket | None:
    """A connection, not blocking, to the Unix socket beside ``host:port``; None: use TCP."""
    if host == "localhost":
        with contextlib.suppress(OSError):
            host = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    name = abstract_name(host, port)
    if not name:
        return None
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        sock.connect(name)
        _, user, _ = peer_credentials(sock)
        if user in (os.geteuid(), 0):
            return sock
    except OSError:  # nothing listens, or it has no room
        pass
    sock.close()
    return None


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    pid, user, group = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, user, group
