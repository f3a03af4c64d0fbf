"""The cluster key: secrets, what is derived from them, and the file that holds them.

Whoever has a secret of the cluster can derive the key of every role and tenant; whoever has only such a
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

from mooncake.security.principal import Role

SECRET_BYTES = 32
MAX_SECRETS = 8
MAX_TENANT_BYTES = 255
KEY_ID_BYTES = 8
_MARK = "mooncake-key-1"
_CLUSTER = "cluster"
_SALT = b"mooncake cluster key 1"


@dataclass(frozen=True)
class Credential:
    """A key with which one role, for clients perhaps one tenant, is proven."""

    role: Role
    tenant: str
    key: bytes = field(repr=False)

    @property
    def key_id(self) -> bytes:
        """Names the key without telling it."""
        return hmac.digest(self.key, b"mooncake key id", "sha256")[:KEY_ID_BYTES]


@dataclass(frozen=True)
class KeyRing:
    """What a key file holds: secrets of the cluster, or derived keys."""

    secrets: tuple[bytes, ...] = field(default=(), repr=False)
    derived: tuple[Credential, ...] = ()

    def credential(self, role: Role, tenant: str = "") -> Credential:
        """What to prove with: derived for ``role`` and ``tenant``, or the derived key that the file holds."""
        return derive(self.secrets[0], role, tenant) if self.secrets else self.derived[0]

    def find(self, role: Role, tenant: str, key_id: bytes) -> Credential | None:
        """The key that a peer says it has, if it can be known here."""
        for secret in self.secrets:
            found = derive(secret, role, tenant)
            if hmac.compare_digest(found.key_id, key_id):
                return found
        for found in self.derived:
            if (found.role, found.tenant) == (role, tenant) and hmac.compare_digest(found.key_id, key_id):
                return found
        return None


def derive(secret: bytes, role: Role, tenant: str = "") -> Credential:
    """The key of ``role`` (for ``tenant``) in the cluster that has ``secret``."""
    pseudorandom = hmac.digest(_SALT, secret, hashlib.sha256)
    info = b"\0".join((b"mooncake", role.value.encode(), tenant.encode()))
    return Credential(role, tenant, hmac.digest(pseudorandom, info + b"\x01", hashlib.sha256))


def tenant_error(role: Role, tenant: str) -> str:
    """Why there can be no credential of ``role`` for ``tenant``; "" when there can."""
    if tenant and role is not Role.CLIENT:
        return "only clients are bound to a tenant"
    if len(tenant.encode()) > MAX_TENANT_BYTES or "\0" in tenant:
        return f"a tenant has at most {MAX_TENANT_BYTES} bytes, and no NUL"
    return ""


def format_secret(secret: bytes) -> str:
    """A secret of the cluster as a line of a key file."""
    return f"{_MARK} {_CLUSTER} - {base64.urlsafe_b64encode(secret).decode()}\n"


def format_credential(credential: Credential) -> str:
    """A derived key as a line of a key file."""
    tenant = quote(credential.tenant, safe="").replace("-", "%2D") or "-"
    return f"{_MARK} {credential.role} {tenant} {base64.urlsafe_b64encode(credential.key).decode()}\n"


def parse_key_file(text: str) -> KeyRing:
    """The keys of a file's content.

    Raises:
        ValueError: says which line is wrong, and never what a secret is.
    """
    secrets: list[bytes] = []
    derived: list[Credential] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 4 or words[0] != _MARK:
            raise ValueError(f"line {number} is no key; `mooncake certs --cluster-key` makes one")
        try:
            key = base64.b64decode(words[3], altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"line {number} has a key that is not base64") from None
        if len(key) != SECRET_BYTES:
            raise ValueError(f"line {number} has a key of {len(key)} bytes instead of {SECRET_BYTES}")
        if words[1] == _CLUSTER:
            secrets.append(key)
        elif words[1] in [role.value for role in Role]:
            role, tenant = Role(words[1]), "" if words[2] == "-" else unquote(words[2])
            trouble = tenant_error(role, tenant)
            if trouble:
                raise ValueError(f"line {number}: {trouble}")
            derived.append(Credential(role, tenant, key))
        else:
            raise ValueError(f"line {number} names the role {words[1][:20]!r}")
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
