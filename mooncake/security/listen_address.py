"""Where a server without a credential may listen: on loopback, unless somebody says that it is meant.

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
"""The existing package's program that this process is, if it is one."""


def keep_upstream_defaults(program: str) -> None:
    """This process is a program with a name of the existing package: what it listens at is its own affair."""
    global _keeps_defaults
    _keeps_defaults = program


CREDENTIAL_OPTIONS = (
    "TLS (--tls-cert, --tls-key, --tls-ca), a cluster key (--cluster-key-file), or --insecure"
)


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach what listens at ``host``."""
    name = host.strip().strip("[]")
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        pass
    if not name:
        return False  # asyncio and others listen everywhere then
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return True  # nothing can listen there; whoever tries says so
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def check_address(hosts: str | Iterable[str], identity: Identity | None = None) -> None:
    """For a role of ``mooncake`` that will listen at ``hosts`` (several: an iterable, or with commas).

    Raises:
        InvalidArgument: others can reach it there, and it has no way to know them.
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
    """For a program whose defaults are those of the existing package: one line, if anybody may come in."""
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
            advice="anybody who reaches it may read, write and remove; set "
            "MOONCAKE_SECURITY_CLUSTER_KEY_FILE, or _TLS_CERT, _TLS_KEY and _TLS_CA (docs/security.md)",
        )
