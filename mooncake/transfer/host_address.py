# SPDX-License-Identifier: Apache-2.0
"""Host and addresses of this process, as its peers see them."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from mooncake.errors import InvalidArgument


def host_identity() -> str:
    """Identity of the running kernel and network namespace, the scope of abstract socket names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown/{secrets.token_hex(8)}"  # equal to no other host: no memory is shared


def reachable_host(listen_host: str) -> str:
    """The address to publish: the one listened on, or that of the default route for a wildcard."""
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


def host_towards(peer: str) -> str:
    """Address of this host on the route to ``peer``; the default route's if the name does not resolve."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel only picks a source address
            return str(probe.getsockname()[0])
    except OSError:
        return reachable_host("::" if ":" in peer else "0.0.0.0")


def numeric_host(host: str, field: str) -> str:
    """Resolve a host name once: resolving may block, and a name may have several addresses."""
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
