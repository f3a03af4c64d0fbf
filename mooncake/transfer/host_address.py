"""Who this process is to others: the host it runs on, the address it is reached at, how many may come."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from mooncake.errors import InvalidArgument


def host_identity() -> str:
    """The running kernel and our network namespace, in which names of sockets mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown/{secrets.token_hex(8)}"  # shares memory with nobody


def reachable_host(listen_host: str) -> str:
    """The address to tell peers: the one listened on, or that of the default route for a wildcard."""
    if listen_host not in ("0.0.0.0", "::"):
        return listen_host
    family, target = (
        (socket.AF_INET, "192.0.2.1") if listen_host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: the kernel only picks a source address
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1" if family == socket.AF_INET else "::1"


def numeric_host(host: str, field: str) -> str:
    """The address of a host name, once and for all: resolving may block, and a name may have several."""
    if not host:
        raise InvalidArgument(field, host, "a host name or address")
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InvalidArgument(field, host, f"a host name or address that resolves ({error})") from error


def with_port(host: str, port: int) -> str:
    """``host:port``, or ``[host]:port`` when the host is an IPv6 address."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
