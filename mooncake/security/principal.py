"""What a peer has proven to be, and what that allows: roles, tenants, and the shape of an access table.

A server has one table from the type of a message to who may send it. What is not in the table is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

DEFAULT_TENANT = "default"


class Role(enum.StrEnum):
    """In which role a process speaks to others."""

    NODE = "node"
    "Serves the cluster: masters, nodes, workers, conductors, gateways, engines that lend memory."
    CLIENT = "client"
    "Uses the store. With a tenant, that tenant's part of it."
    ADMIN = "admin"
    "Changes what concerns everybody: quotas, drains, removal by force."


Level: TypeAlias = str
"""A role's value, or ``TENANT``: what an access table is asked for."""

TENANT: Level = "tenant"
"""A client that is bound to a tenant."""

NODES = frozenset({Role.NODE.value})
ADMINS = frozenset({Role.ADMIN.value})
NODES_AND_ADMINS = NODES | ADMINS
TRUSTED = NODES_AND_ADMINS | {Role.CLIENT.value}
"""Everybody who is not bound to a tenant."""
EVERYBODY = TRUSTED | {TENANT}
"""Everybody who has proven something."""


@dataclass(frozen=True)
class Principal:
    """Who a peer has proven to be.

    ``tenant`` is "" when it is bound to none; ``is_open``: nothing was asked for, so all is allowed.
    """

    role: Role
    tenant: str = ""
    is_open: bool = False

    @property
    def level(self) -> Level:
        return TENANT if self.tenant else self.role.value

    def may_name(self, tenant: str) -> bool:
        """Whether a message of this peer may be about ``tenant``; "" and "default" are the same one."""
        return not self.tenant or (tenant or DEFAULT_TENANT) == self.tenant

    def __str__(self) -> str:
        if self.is_open:
            return "anybody"
        return f"{self.role} of tenant {self.tenant}" if self.tenant else str(self.role)


OPEN = Principal(Role.ADMIN, is_open=True)
"""Of everybody, where there is no credential."""


@dataclass(frozen=True)
class Access:
    """Which message may be sent by whom. ``special`` narrows what the content of a message decides."""

    table: Mapping[type, frozenset[Level]] = field(default_factory=dict)
    special: Mapping[type, Callable[[Any], frozenset[Level]]] = field(default_factory=dict)

    def free(self, principal: Principal) -> frozenset[type] | None:
        """Messages that ``standing`` may send whatever they say; None: all. ``refusal`` judges the others."""
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
        """Why ``standing`` may not send ``message``; "" when it may."""
        if principal.is_open:
            return ""
        kind = type(message)
        allowed = self.table.get(kind, frozenset())
        if kind in self.special:
            allowed = allowed & self.special[kind](message)
        if principal.level not in allowed:
            who = ", ".join(sorted(allowed)) or "nobody"
            return f"{kind.__name__} may be sent by {who}; the credential is that of {principal}"
        tenant = getattr(message, "tenant", None)
        if tenant is not None and not principal.may_name(tenant):
            named = tenant or DEFAULT_TENANT
            return f"{kind.__name__} names tenant {named!r}; the credential is that of {principal}"
        return ""
