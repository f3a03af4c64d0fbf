# SPDX-License-Identifier: Apache-2.0
"""Role and tenant in a certificate, as the name ``mooncake://<role>/<tenant>``.

It is one of the certificate's subject alternative names (a URI), which any authority can write. A
certificate without one counts as a client's: so certificates made elsewhere work between transfer engines
and for reading and writing, and a certificate of the authority alone makes no process a node or an
administrator.
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
    """Format the name to write into a certificate."""
    return f"{SCHEME}{role}/{quote(tenant, safe='')}" if tenant else f"{SCHEME}{role}"


def principal_of(certificate: Mapping[str, Any] | None) -> Principal:
    """The principal of a verified certificate (in the form of Python's ``ssl``).

    Raises:
        AccessDenied: there is none, or its name is invalid, or it has several.
    """
    if not certificate:
        raise AccessDenied("not authenticated: there is no certificate")
    names = [
        value
        for kind, value in certificate.get("subjectAltName", ())
        if kind == "URI" and value.startswith(SCHEME)
    ]
    if not names:
        return Principal(Role.CLIENT)
    if len(names) > 1:
        raise AccessDenied(f"the certificate has several names of a role: {', '.join(names)}")
    role, _, tenant = names[0].removeprefix(SCHEME).partition("/")
    tenant = unquote(tenant)
    if role not in [one.value for one in Role]:
        raise AccessDenied(f"the certificate names the role {role!r}, which does not exist")
    trouble = tenant_error(Role(role), tenant)
    if trouble:
        raise AccessDenied(f"the certificate's name {names[0]!r}: {trouble}")
    return Principal(Role(role), tenant)
