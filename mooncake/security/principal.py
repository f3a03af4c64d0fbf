# SPDX-License-Identifier: Apache-2.0
"""Authenticated principals and their access: roles, tenants, and the access table of a server.

The table maps the type of a message to the levels that may send it. Types not in the table are refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

DEFAULT_TENANT = "default"


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
