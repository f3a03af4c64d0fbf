# SPDX-License-Identifier: Apache-2.0
"""The settings ``[security]``, the identity that a process has from them, and where it may listen with it.

A command installs the identity that its flags, environment and file name. In a process of another
program (an engine with a connector, a program with the drop-in store) the first use reads
the environment and the file that ``MOONCAKE_CONFIG`` names. An ``Identity`` may be passed to each listener
or client in place of the process's own, as tests do, and programs that use two clusters.

A server without a credential listens on loopback only, unless overridden. Roles of ``mooncake`` refuse;
programs with the names of the existing package keep its defaults and warn.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import secrets
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from prometheus_client import Gauge

from mooncake import clock, config, metrics
from mooncake.errors import InvalidArgument
from mooncake.log import get_logger
from mooncake.security.greeting import NONCE_BYTES, ClientGreeting, ServerGreeting
from mooncake.security.keys import KeyRing, parse_key_file
from mooncake.security.principal import Principal, Role
from mooncake.security.request_signature import Signer, Verifier
from mooncake.security.tls_contexts import (
    certificate_digest,
    certificate_ends,
    client_context,
    server_context,
)

log = get_logger(__name__)

MAX_KEY_FILE_BYTES = 64 << 10
CREDENTIAL_OPTIONS = (
    "TLS (--tls-cert, --tls-key, --tls-ca), a cluster key (--cluster-key-file), or --insecure"
)

_certificate_remaining = Gauge(
    "mooncake_security_certificate_remaining_seconds",
    "Time until the end of a certificate that this process shows or verifies others with, by its file.",
    ["file"],
    registry=metrics.registry,
)

_has_warned = False
_keeps_defaults = ""
"""Name of the existing package's program that this process implements, if any."""


@dataclass(frozen=True)
class SecuritySettings:
    """Credentials of a process in its cluster, and those it requires of others (`docs/security.md`)."""

    tls_cert: str = ""
    "PEM file with this process's certificate and chain up to the authority; with it, TLS on everything."

    tls_key: str = ""
    "PEM file with the certificate's private key, without a password."

    tls_ca: str = ""
    "PEM file with the authority, which must have signed the certificates of peers and of this process."

    tls_check_host: bool = False
    "Require that a server's certificate also names the address it is reached at."

    cluster_key_file: str = ""
    "File with the cluster's key, or one derived from it; both sides of a connection must prove to have it."

    insecure: bool = False
    "Listen beyond loopback without TLS and without a cluster key, for networks in which all are trusted."

    def __post_init__(self) -> None:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        missing = [field for field, path in files.items() if not path]
        for field, path in files.items():
            if path and missing:
                raise InvalidArgument(field, path, f"set together with {' and '.join(missing)}")


class Identity:
    """Credentials of a process, and those it requires of others. Immutable; may be shared by threads.

    Args:
        settings: see ``SecuritySettings``.
        role: its role, where its key file holds the cluster's own key.
        tenant: its tenant, for the role of a client.

    Raises:
        InvalidArgument: a file is missing or wrong, or other users may read the key file.
    """

    def __init__(
        self, settings: SecuritySettings | None = None, role: Role = Role.NODE, tenant: str = ""
    ) -> None:
        self.settings = settings or SecuritySettings()
        self.keys = read_key_file(self.settings.cluster_key_file) if self.settings.cluster_key_file else None
        self.credential = self.keys.credential(role, tenant) if self.keys is not None else None
        self.has_tls = bool(self.settings.tls_cert)
        if self.has_tls:  # raises errors in the files now, not at the first connection
            _ = self.server_tls, self.client_tls, self.certificate_digest

    def __repr__(self) -> str:
        return f"<Identity {'tls ' * self.has_tls}{self.credential or ''}>"

    @property
    def is_open(self) -> bool:
        """True when it requires no authentication: every process that reaches its ports is served."""
        return self.keys is None and not self.has_tls

    @property
    def tenant(self) -> str:
        """Tenant that its key is bound to; "" when it is bound to none, or when a certificate names it."""
        return self.credential.tenant if self.credential is not None else ""

    @functools.cached_property
    def server_tls(self) -> ssl.SSLContext | None:
        return server_context(self.settings) if self.has_tls else None

    @functools.cached_property
    def client_tls(self) -> ssl.SSLContext | None:
        if not self.has_tls:
            return None
        return client_context(self.settings, check_host=self.settings.tls_check_host)

    def https_tls(self) -> ssl.SSLContext | None:
        """Make the context of HTTPS requests, whose servers show a certificate of the name in the URL."""
        return client_context(self.settings, check_host=True) if self.has_tls else None

    @functools.cached_property
    def certificate_digest(self) -> bytes:
        """SHA-256 of the certificate that this process shows; empty without TLS."""
        return certificate_digest(self.settings) if self.has_tls else b""

    def client_greeting(self) -> ClientGreeting:
        """Make the greeting of a connection that this process opens."""
        return ClientGreeting(self.credential, secrets.token_bytes(NONCE_BYTES))

    def server_greeting(self, certified: Principal | None = None, binding: bytes = b"") -> ServerGreeting:
        """Make the greeting of a connection that this process accepts."""
        return ServerGreeting(self.keys, secrets.token_bytes(NONCE_BYTES), certified, binding)

    def signer(self) -> Signer | None:
        """Make a signer of HTTP requests; None without a cluster key."""
        if self.credential is None:
            return None
        return Signer(self.credential, secrets.token_bytes, clock.wall)

    def verifier(self) -> Verifier | None:
        """Make a verifier of HTTP requests, one per server; None without a cluster key."""
        return Verifier(self.keys, clock.wall) if self.keys is not None else None

    def with_tls_files(self, cert: str, key: str, ca: str, check_host: bool) -> Identity:
        """Copy with the same keys, but TLS with these files."""
        other = Identity.__new__(Identity)
        other.settings = SecuritySettings(
            cert, key, ca, check_host, self.settings.cluster_key_file, self.settings.insecure
        )
        other.keys, other.credential, other.has_tls = self.keys, self.credential, bool(cert)
        if other.has_tls:
            _ = other.server_tls, other.client_tls, other.certificate_digest
        return other


def read_key_file(path: str) -> KeyRing:
    """Read the keys in the file at ``path``.

    Raises:
        InvalidArgument: it can't be read, is no key file, or may be read by its group or by others.
    """

    def wrong(reason: str) -> InvalidArgument:
        return InvalidArgument(
            "cluster_key_file", path, f"a key file that only its owner may read ({reason})"
        )

    try:
        with Path(path).expanduser().open("rb") as file:
            found = check_private(file, wrong)
            if found.st_size > MAX_KEY_FILE_BYTES:
                raise wrong("it is too large")
            content = file.read(MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise wrong(error.strerror or str(error)) from error
    try:
        return parse_key_file(content.decode("ascii"))
    except UnicodeDecodeError:
        raise wrong("it is no text") from None
    except ValueError as error:
        raise wrong(str(error)) from error


def check_private(file: IO[bytes], wrong: Callable[[str], InvalidArgument]) -> os.stat_result:
    """Check and return the status of an open file of secrets.

    Raises:
        InvalidArgument: ``wrong(reason)``: it is no regular file, or users other than its owner may use it.
    """
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise wrong("it is no regular file")
    if found.st_mode & 0o077:
        raise wrong(f"its mode is {stat.S_IMODE(found.st_mode):04o}; chmod 600 it")
    return found


_lock = threading.Lock()
_ours: Identity | None = None


def process_identity() -> Identity:
    """The identity of this process; read from the environment at the first use if none was installed.

    Raises:
        InvalidArgument: a value in the environment or the file is invalid.
    """
    global _ours
    with _lock:
        if _ours is None:
            _ours = from_environment()
            _show_remaining(_ours)
        return _ours


def from_environment(role: Role = Role.NODE) -> Identity:
    """Read the identity from ``MOONCAKE_SECURITY_*`` and the file named by ``MOONCAKE_CONFIG``."""
    settings, _ = config.load(SecuritySettings, {}, os.environ, config.named_file(os.environ))
    return Identity(settings, role)


def install_identity(identity: Identity | None) -> None:
    """Make ``identity`` that of this process; None to read it again at the next use."""
    global _ours
    with _lock:
        _ours = identity
        _show_remaining(identity)


def _show_remaining(identity: Identity | None) -> None:
    _certificate_remaining.clear()
    if identity is not None and identity.has_tls:
        # While authorities change there are two: the last to end is the one that goes on.
        _show_end(identity.settings.tls_ca, max(certificate_ends(identity.settings.tls_ca)))
        show_remaining(identity.settings.tls_cert)  # last, as both may be one file


def show_remaining(file: str) -> None:
    """Have the metrics page show when the first certificate in ``file`` ends, which this process shows.

    OpenSSL has loaded the file.
    """
    if ends := certificate_ends(file):  # none in the format of OpenSSL's own
        _show_end(file, ends[0])


def _show_end(file: str, ends: float) -> None:
    _certificate_remaining.labels(file).set_function(lambda: ends - clock.wall())


def tool_identity() -> Identity:
    """As ``process_identity``, for command-line tools: an administrator with the cluster's own key."""
    return Identity(process_identity().settings, Role.ADMIN)


def keep_upstream_defaults(program: str) -> None:
    """Mark this process as a program of the existing package, whose default addresses are kept."""
    global _keeps_defaults
    _keeps_defaults = program


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
    except (OSError, ValueError):  # ValueError: no host can have this name
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
