# SPDX-License-Identifier: Apache-2.0
"""Addresses of a cluster's roles: whether a given port is free, and which others are."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from mooncake.errors import AddressInUse, InvalidArgument


@dataclass(frozen=True)
class RolePlace:
    """Where a role listens."""

    host: str
    ports: tuple[int, ...]
    """The port that others call, and the role's further ones."""

    @property
    def address(self) -> str:
        return host_and_port(self.host, self.ports[0])

    def is_free(self) -> bool:
        """Whether nothing listens there, on any address of this host."""
        try:
            for port in self.ports:
                _bind(everywhere(self.host), port).close()
        except OSError:
            return False
        return True


def host_and_port(host: str, port: int) -> str:
    """An address, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def everywhere(host: str) -> str:
    """The wildcard address of the family of ``host``."""
    return "::" if ":" in host else "0.0.0.0"


def check_free(host: str, port: int) -> None:
    """Check that the gateway's address can be listened on.

    Raises:
        AddressInUse: the port is taken.
        InvalidArgument: the host is not an address of this machine, or the port needs privileges.
    """
    try:
        _bind(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"port {port} on {host} is in use; free it or choose another with --port (0 takes a free one)"
            ) from error
        raise InvalidArgument(
            "host and port", f"{host}:{port}", f"an address of this machine ({error})"
        ) from error


def free_ports(host: str, count: int, random: Random, besides: Iterable[int] = ()) -> list[int]:
    """Find ``count`` ports without a listener that are not in ``besides``.

    They lie below the range from which the kernel takes ports for outgoing connections: a role that died
    must find its port free when it comes back.
    """
    taken = set(besides)
    first, last = 20_000, _first_outgoing_port() - 1
    found: list[int] = []
    for port in random.sample(range(first, last), k=last - first):
        if len(found) == count:
            break
        if port in taken:
            continue
        try:
            _bind(host, port).close()
        except OSError:
            continue
        found.append(port)
    if len(found) < count:
        raise AddressInUse(f"fewer than {count} free ports between {first} and {last} on {host}; free some")
    return found


def _first_outgoing_port() -> int:
    try:
        return max(21_000, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    except (OSError, ValueError):
        return 32_768


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except ValueError as error:
        raise socket.gaierror(socket.EAI_NONAME, "no host can have this name") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # with SO_REUSEADDR two sockets may bind, but only one may listen
    except OSError:
        listener.close()
        raise
    return listener
