"""What a certificate says of its owner: role and tenant, as the name ``mooncake://<role>/<tenant>``.

It is one of the certificate's subject alternative names (a URI), which any authority can write. A
certificate without one counts as a client's: so certificates from elsewhere serve between transfer engines
and for reading and writing, and nobody becomes a node or an administrator by owning some certificate of the
authority.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from mooncake.errors import AccessDenied
from mooncake.security.keys import tenant_error
from mooncake.security.principal import Principal, Role

SCHEME = "mooncake://"


def name_of(role: Role, tenant: str = "") -> str:
    """The name to write into a certificate."""
    return f"{SCHEME}{role}/{quote(tenant, safe='')}" if tenant else f"{SCHEME}{role}"


def principal_of(certificate: Mapping[str, Any] | None) -> Principal:
    """What the certificate (as Python's ``ssl`` shows one that was verified) proves.

    Raises:
        AccessDenied: there is none, or its name can't be understood, or it has several.
    """
    if not certificate:
        raise AccessDenied("who are you? There is no certificate")
    names = [
        value
        for kind, value in certificate.get("subjectAltName", ())
        if kind == "URI" and value.startswith(SCHEME)
    ]
    if not names:
        return Principal(Role.CLIENT)
    if len(names) > 1:
        raise AccessDenied(f"the certificate has several names of ours: {', '.join(names)}")
    role, _, tenant = names[0].removeprefix(SCHEME).partition("/")
    tenant = unquote(tenant)
    if role not in [one.value for one in Role]:
        raise AccessDenied(f"the certificate names the role {role!r}, which there is not")
    trouble = tenant_error(Role(role), tenant)
    if trouble:
        raise AccessDenied(f"the certificate's name {names[0]!r}: {trouble}")
    return Principal(Role(role), tenant)
