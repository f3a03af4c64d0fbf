# SPDX-License-Identifier: Apache-2.0
"""Check of listen addresses: a server without a credential listens on loopback only, unless overridden.

Roles of ``mooncake`` refuse; programs with the names of the existing package keep its defaults and warn.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from mooncake.errors import InvalidArgument
from mooncake.log import get_logger
from mooncake.security.identity import Identity, process_identity

log = get_logger(__name__)

_has_warned = False
_keeps_defaults = ""
"""Name of the existing package's program that this process implements, if any."""


def keep_upstream_defaults(program: str) -> None:
    """Mark this process as a program of the existing package, whose default addresses are kept."""
    global _keeps_defaults
    _keeps_defaults = program


CREDENTIAL_OPTIONS = (
    "TLS (--tls-cert, --tls-key, --tls-ca), a cluster key (--cluster-key-file), or --insecure"
)


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach a listener at ``host``."""
    name = host.strip().strip("[]")
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        pass
    if not name:
        return False  # asyncio and others then listen on all addresses
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return True  # listening there fails with its own error
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def check_address(hosts: str | Iterable[str], identity: Identity | None = None) -> None:
    """Check ``hosts`` (several: an iterable, or with commas) of a role of ``mooncake``.

    Raises:
        InvalidArgument: other hosts can reach it there, and no authentication is configured.
    """
    identity = identity or process_identity()
    if not identity.is_open or identity.settings.insecure:
        return
    for host in hosts.split(",") if isinstance(hosts, str) else hosts:
        if not is_loopback(host):
            if _keeps_defaults:
                warn_if_open(_keeps_defaults, host, identity)
                return
            raise InvalidArgument(
                "--host",
                host,
                "a loopback address without a credential; "
                f"for others use {CREDENTIAL_OPTIONS}: docs/security.md",
            )


def warn_if_open(program: str, hosts: str | Iterable[str], identity: Identity | None = None) -> None:
    """Warn if a program with the existing package's defaults listens without authentication."""
    identity = identity or process_identity()
    listed = hosts.split(",") if isinstance(hosts, str) else list(hosts)
    global _has_warned
    if _has_warned:
        return
    if identity.is_open and not identity.settings.insecure and not all(is_loopback(host) for host in listed):
        _has_warned = True
        log.warning(
            "listening_without_credential",
            program=program,
            host=",".join(listed),
            advice="every process that reaches it may read, write and remove; set "
            "MOONCAKE_SECURITY_CLUSTER_KEY_FILE, or _TLS_CERT, _TLS_KEY and _TLS_CA (docs/security.md)",
        )
