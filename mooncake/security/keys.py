# SPDX-License-Identifier: Apache-2.0
"""The cluster key: secrets, the keys derived from them, and the file that holds them.

A holder of a secret of the cluster can derive the key of every role and tenant; a holder of only a
derived key can prove that role and tenant and nothing else. HKDF-SHA256 (RFC 5869), one block. A file may
hold several secrets: the first is used, all are accepted, which is how they are replaced one host at a time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from mooncake.security.principal import Role, tenant_error

SECRET_BYTES = 32
MAX_SECRETS = 8
KEY_ID_BYTES = 8
_MARK = "mooncake-key-1"
_CLUSTER = "cluster"
_SALT = b"mooncake cluster key 1"


@dataclass(frozen=True)
class Credential:
    """Key that proves one role and, for clients, possibly one tenant."""

    role: Role
    tenant: str
    key: bytes = field(repr=False)

    @property
    def key_id(self) -> bytes:
        """Public identifier of the key, which does not reveal it."""
        return hmac.digest(self.key, b"mooncake key id", "sha256")[:KEY_ID_BYTES]


@dataclass(frozen=True)
class KeyRing:
    """Content of a key file: secrets of the cluster, or derived keys."""

    secrets: tuple[bytes, ...] = field(default=(), repr=False)
    derived: tuple[Credential, ...] = ()

    def credential(self, role: Role, tenant: str = "") -> Credential:
        """The key to prove with: derived for ``role`` and ``tenant``, or the derived key in the file."""
        return derive(self.secrets[0], role, tenant) if self.secrets else self.derived[0]

    def find(self, role: Role, tenant: str, key_id: bytes) -> Credential | None:
        """Find the key that a peer names, if it can be derived here."""
        for secret in self.secrets:
            found = derive(secret, role, tenant)
            if hmac.compare_digest(found.key_id, key_id):
                return found
        for found in self.derived:
            if (found.role, found.tenant) == (role, tenant) and hmac.compare_digest(found.key_id, key_id):
                return found
        return None


def derive(secret: bytes, role: Role, tenant: str = "") -> Credential:
    """Derive the key of ``role`` (for ``tenant``) in the cluster that has ``secret``."""
    pseudorandom = hmac.digest(_SALT, secret, hashlib.sha256)
    info = b"\0".join((b"mooncake", role.value.encode(), tenant.encode()))
    return Credential(role, tenant, hmac.digest(pseudorandom, info + b"\x01", hashlib.sha256))


def format_secret(secret: bytes) -> str:
    """Format a secret of the cluster as a line of a key file."""
    return f"{_MARK} {_CLUSTER} - {base64.urlsafe_b64encode(secret).decode()}\n"


def format_credential(credential: Credential) -> str:
    """Format a derived key as a line of a key file."""
    tenant = quote(credential.tenant, safe="").replace("-", "%2D") or "-"
    return f"{_MARK} {credential.role} {tenant} {base64.urlsafe_b64encode(credential.key).decode()}\n"


def parse_key_file(text: str) -> KeyRing:
    """Parse the keys of a file's content.

    Raises:
        ValueError: names the wrong line, and never contains a secret.
    """
    secrets: list[bytes] = []
    derived: list[Credential] = []
    for number, line in enumerate(text.splitlines(), 1):
        columns = line.split()
        if not columns or columns[0].startswith("#"):
            continue
        if len(columns) != 4 or columns[0] != _MARK:
            raise ValueError(f"line {number} is no key; `mooncake certs --cluster-key` makes one")
        try:
            key = base64.b64decode(columns[3], altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"line {number} has a key that is not base64") from None
        if len(key) != SECRET_BYTES:
            raise ValueError(f"line {number} has a key of {len(key)} bytes instead of {SECRET_BYTES}")
        if columns[1] == _CLUSTER:
            secrets.append(key)
        elif columns[1] in [role.value for role in Role]:
            role, tenant = Role(columns[1]), "" if columns[2] == "-" else unquote(columns[2])
            trouble = tenant_error(role, tenant)
            if trouble:
                raise ValueError(f"line {number}: {trouble}")
            derived.append(Credential(role, tenant, key))
        else:
            raise ValueError(f"line {number} names the role {columns[1][:20]!r}")
    if not secrets and not derived:
        raise ValueError("it holds no key")
    if secrets and derived:
        raise ValueError("it holds secrets of the cluster and derived keys; keep them in files of their own")
    if len(secrets) + len(derived) > MAX_SECRETS:
        raise ValueError(f"it holds more than {MAX_SECRETS} keys")
    first: Sequence[Credential] = derived[:1]
    if any((one.role, one.tenant) != (first[0].role, first[0].tenant) for one in derived):
        raise ValueError("it holds keys of several roles or tenants; one file is for one of them")
    return KeyRing(tuple(secrets), tuple(derived))
