"""The settings ``[security]``, what they make of a process, and the one identity that a process has.

A command installs the identity that its flags, environment and file name. In a process that belongs to
somebody else (an engine with one of our connectors, a program with the drop-in store) the first use reads
the environment and the file that ``MOONCAKE_CONFIG`` names. An ``Identity`` may be handed to whatever listens
or connects, in place of the process's own: tests do so, and programs that use two clusters.
"""

from __future__ import annotations

import functools
import os
import secrets
import ssl
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mooncake import clock, config
from mooncake.errors import InvalidArgument
from mooncake.security.greeting import NONCE_BYTES, ClientGreeting, ServerGreeting
from mooncake.security.keys import KeyRing, parse_key_file
from mooncake.security.principal import Principal, Role
from mooncake.security.request_signature import Signer, Verifier
from mooncake.security.tls_contexts import certificate_digest, client_context, server_context

MAX_KEY_FILE_BYTES = 64 << 10
CONFIG_VARIABLE = "MOONCAKE_CONFIG"


@dataclass(frozen=True)
class SecuritySettings:
    """Who a process is to others of its cluster, and whom it talks to (`docs/security.md`)."""

    tls_cert: str = ""
    "PEM file with this process's certificate and what leads to the authority; with it, TLS on everything."

    tls_key: str = ""
    "PEM file with the certificate's private key, without a password."

    tls_ca: str = ""
    "PEM file with the authority: peers must show a certificate of it, and so do we."

    tls_check_host: bool = False
    "A server's certificate must also name the address it is reached at, not only be of the authority."

    cluster_key_file: str = ""
    "File with the cluster's key, or one derived from it: peers must prove that they have it, and so do we."

    insecure: bool = False
    "Listen beyond loopback without TLS and without a cluster key: for networks in which all are trusted."

    def __post_init__(self) -> None:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        for field, path in files.items():
            if any(files.values()) and not path:
                raise InvalidArgument(field, path, "the path of a PEM file, or none of the three")


class Identity:
    """What a process proves with, and what it asks of others. Immutable; may be shared by threads.

    Args:
        settings: see ``SecuritySettings``.
        role: in which role it speaks, where its key file holds the cluster's own key.
        tenant: for a client's role.

    Raises:
        InvalidArgument: a file is missing or wrong, or others may read the key file.
    """

    def __init__(
        self, settings: SecuritySettings | None = None, role: Role = Role.NODE, tenant: str = ""
    ) -> None:
        self.settings = settings or SecuritySettings()
        self.keys = read_key_file(self.settings.cluster_key_file) if self.settings.cluster_key_file else None
        self.credential = self.keys.credential(role, tenant) if self.keys is not None else None
        self.has_tls = bool(self.settings.tls_cert)
        if self.has_tls:  # what is wrong with the files is said now, not at the first connection
            _ = self.server_tls, self.client_tls, self.certificate_digest

    def __repr__(self) -> str:
        return f"<Identity {'tls ' * self.has_tls}{self.credential or ''}>"

    @property
    def is_open(self) -> bool:
        """It asks for nothing: anybody who reaches its ports is answered."""
        return self.keys is None and not self.has_tls

    @property
    def tenant(self) -> str:
        """That its key is bound to; "" when it is bound to none, or when a certificate says it."""
        return self.credential.tenant if self.credential is not None else ""

    @functools.cached_property
    def server_tls(self) -> ssl.SSLContext | None:
        return server_context(self.settings) if self.has_tls else None

    @functools.cached_property
    def client_tls(self) -> ssl.SSLContext | None:
        if not self.has_tls:
            return None
        return client_context(self.settings, check_host=self.settings.tls_check_host)

    @functools.cached_property
    def certificate_digest(self) -> bytes:
        """SHA-256 of the certificate that this process shows; empty without TLS."""
        return certificate_digest(self.settings) if self.has_tls else b""

    def client_greeting(self) -> ClientGreeting:
        """The greeting of a connection that this process opens."""
        return ClientGreeting(self.credential, secrets.token_bytes(NONCE_BYTES))

    def server_greeting(self, certified: Principal | None = None, binding: bytes = b"") -> ServerGreeting:
        """The greeting of a connection that this process accepts."""
        return ServerGreeting(self.keys, secrets.token_bytes(NONCE_BYTES), certified, binding)

    def signer(self) -> Signer | None:
        """Signs HTTP requests; None without a cluster key."""
        if self.credential is None:
            return None
        return Signer(self.credential, secrets.token_bytes, clock.wall)

    def verifier(self) -> Verifier | None:
        """Checks HTTP requests; None without a cluster key. One for each server: it remembers what it saw."""
        return Verifier(self.keys, clock.wall) if self.keys is not None else None

    def with_tls_files(self, cert: str, key: str, ca: str, check_host: bool) -> Identity:
        """The same keys, but TLS with these files."""
        other = Identity.__new__(Identity)
        other.settings = SecuritySettings(
            cert, key, ca, check_host, self.settings.cluster_key_file, self.settings.insecure
        )
        other.keys, other.credential, other.has_tls = self.keys, self.credential, bool(cert)
        if other.has_tls:
            _ = other.server_tls, other.client_tls, other.certificate_digest
        return other


def read_key_file(path: str) -> KeyRing:
    """The keys in the file at ``path``.

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
    """The status of an open file of secrets.

    Raises:
        InvalidArgument: ``wrong`` of the reason: it is no plain file, or others than its owner may use it.
    """
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise wrong("it is no plain file")
    if found.st_mode & 0o077:
        raise wrong(f"its mode is {stat.S_IMODE(found.st_mode):04o}; chmod 600 it")
    return found


_lock = threading.Lock()
_ours: Identity | None = None


def process_identity() -> Identity:
    """The identity of this process; read from the environment at the first use if nobody installed one.

    Raises:
        InvalidArgument: what the environment or the file says can't be.
    """
    global _ours
    with _lock:
        if _ours is None:
            _ours = from_environment()
        return _ours


def from_environment(role: Role = Role.NODE) -> Identity:
    """What ``MOONCAKE_SECURITY_*`` and the file named by ``MOONCAKE_CONFIG`` say."""
    named = os.environ.get(CONFIG_VARIABLE)
    file = Path(named).expanduser() if named else None
    settings, _ = config.load(SecuritySettings, {}, os.environ, file)
    return Identity(settings, role)


def install_identity(identity: Identity | None) -> None:
    """Make ``identity`` that of this process; None: read it again at the next use."""
    global _ours
    with _lock:
        _ours = identity


def tool_identity() -> Identity:
    """As ``ours``, but for people's tools: what holds the cluster's own key speaks as an administrator."""
    return Identity(process_identity().settings, Role.ADMIN)
