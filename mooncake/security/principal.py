# SPDX-License-Identifier: Apache-2.0
"""Authenticated principals and their access: roles, tenants, and the access table of a server.

A certificate names role and tenant as ``mooncake://<role>/<tenant>``, one of its subject alternative names (a
URI), which any authority can write. A certificate without one counts as a client's: so certificates made
elsewhere work between transfer engines and for reading and writing, and a certificate of the authority alone
makes no process a node or an administrator.

The access table maps the type of a message to the levels that may send it; types not in it are refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from mooncake.errors import AccessDenied

DEFAULT_TENANT = "default"
MAX_TENANT_BYTES = 255

CERTIFICATE_SCHEME = "mooncake://"


class Role(enum.StrEnum):
    """Role of a process in its cluster."""

    NODE = "node"
    "Serves the cluster: masters, nodes, workers, conductors, gateways, engines that provide memory."
    CLIENT = "client"
    "Uses the store; with a tenant, that tenant's part of it."
    ADMIN = "admin"
    "Changes the whole cluster: quotas, drains, removal by force."


Level: TypeAlias = str
"""Key of an access table: a role's value, or ``TENANT``."""

TENANT: Level = "tenant"
"""Level of a client that is bound to a tenant."""

NODES = frozenset({Role.NODE.value})
ADMINS = frozenset({Role.ADMIN.value})
NODES_AND_ADMINS = NODES | ADMINS
TRUSTED = NODES_AND_ADMINS | {Role.CLIENT.value}
"""All levels that are not bound to a tenant."""
EVERYBODY = TRUSTED | {TENANT}
"""All authenticated levels."""


@dataclass(frozen=True)
class Principal:
    """Authenticated role and tenant of a peer.

    ``tenant`` is "" when it is bound to none; ``is_open`` means no authentication, so all is allowed.
    """

    role: Role
    tenant: str = ""
    is_open: bool = False

    @property
    def level(self) -> Level:
        return TENANT if self.tenant else self.role.value

    def may_name(self, tenant: str) -> bool:
        """Whether a message of this peer may name ``tenant``; "" and "default" are the same tenant."""
        return not self.tenant or (tenant or DEFAULT_TENANT) == self.tenant

    def __str__(self) -> str:
        if self.is_open:
            return "any client"
        return f"{self.role} of tenant {self.tenant}" if self.tenant else str(self.role)


OPEN = Principal(Role.ADMIN, is_open=True)
"""Principal of every peer of a server without a credential."""


def tenant_error(role: Role, tenant: str) -> str:
    """Reason why a credential of ``role`` for ``tenant`` is invalid; "" when it is valid."""
    if tenant and role is not Role.CLIENT:
        return "only clients are bound to a tenant"
    if len(tenant.encode()) > MAX_TENANT_BYTES or "\0" in tenant:
        return f"a tenant has at most {MAX_TENANT_BYTES} bytes, and no NUL"
    return ""


def certificate_name(role: Role, tenant: str = "") -> str:
    """Format the name to write into a certificate, as one of its subject alternative names (a URI)."""
    return f"{CERTIFICATE_SCHEME}{role}/{quote(tenant, safe='')}" if tenant else f"{CERTIFICATE_SCHEME}{role}"


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
        if kind == "URI" and value.startswith(CERTIFICATE_SCHEME)
    ]
    if not names:
        return Principal(Role.CLIENT)
    if len(names) > 1:
        raise AccessDenied(f"the certificate has several names of a role: {', '.join(names)}")
    role, _, tenant = names[0].removeprefix(CERTIFICATE_SCHEME).partition("/")
    tenant = unquote(tenant)
    if role not in [one.value for one in Role]:
        raise AccessDenied(f"the certificate names the role {role!r}, which does not exist")
    trouble = tenant_error(Role(role), tenant)
    if trouble:
        raise AccessDenied(f"the certificate's name {names[0]!r}: {trouble}")
    return Principal(Role(role), tenant)


@dataclass(frozen=True)
class Access:
    """Access table: levels per message type. ``special`` has the rules that depend on a message's content."""

    table: Mapping[type, frozenset[Level]] = field(default_factory=dict)
    special: Mapping[type, Callable[[Any], frozenset[Level]]] = field(default_factory=dict)

    def free(self, principal: Principal) -> frozenset[type] | None:
        """Messages that ``principal`` may send with any content; None means all, else ``refusal`` checks."""
        if principal.is_open:
            return None
        return frozenset(
            kind
            for kind, levels in self.table.items()
            if principal.level in levels
            and kind not in self.special
            and not (principal.tenant and "tenant" in getattr(kind, "__annotations__", ()))
        )

    def refusal(self, message: object, principal: Principal) -> str:
        """Reason why ``principal`` may not send ``message``; "" when it may."""
        if principal.is_open:
            return ""
        kind = type(message)
        allowed = self.table.get(kind, frozenset())
        if kind in self.special:
            allowed = allowed & self.special[kind](message)
        if principal.level not in allowed:
            roles = ", ".join(sorted(allowed)) or "no role"
            return f"{kind.__name__} may be sent by {roles}; the credential is that of {principal}"
        tenant = getattr(message, "tenant", None)
        if tenant is not None and not principal.may_name(tenant):
            named = tenant or DEFAULT_TENANT
            return f"{kind.__name__} names tenant {named!r}; the credential is that of {principal}"
        return ""
