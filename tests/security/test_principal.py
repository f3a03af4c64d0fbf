# SPDX-License-Identifier: Apache-2.0
"""The principal that a certificate names, and the messages that each principal may send."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mooncake.errors import AccessDenied
from mooncake.security.principal import (
    ADMINS,
    EVERYBODY,
    NODES,
    OPEN,
    TRUSTED,
    Access,
    Principal,
    Role,
    certificate_name,
    principal_of,
)


def certificate(*names: str) -> dict[str, object]:
    return {"subjectAltName": (("DNS", "localhost"), *(("URI", name) for name in names))}


@pytest.mark.parametrize(
    ("role", "tenant"), [(Role.NODE, ""), (Role.ADMIN, ""), (Role.CLIENT, ""), (Role.CLIENT, "a/ü c")]
)
def test_a_name_says_role_and_tenant(role: Role, tenant: str) -> None:
    assert principal_of(certificate("spiffe://x/y", certificate_name(role, tenant))) == Principal(
        role, tenant
    )


def test_one_without_our_name_is_that_of_a_client() -> None:
    assert principal_of(certificate("spiffe://x/node")) == Principal(Role.CLIENT)
    assert principal_of({"subject": ()}) == Principal(Role.CLIENT)


@pytest.mark.parametrize(
    "names",
    [
        ["mooncake://root"],
        ["mooncake://"],
        ["mooncake://node/acme"],
        ["mooncake://admin", "mooncake://client"],
        ["mooncake://client/" + "x" * 300],
    ],
)
def test_a_name_that_makes_no_sense_proves_nothing(names: list[str]) -> None:
    with pytest.raises(AccessDenied):
        principal_of(certificate(*names))


def test_no_certificate_proves_nothing() -> None:
    with pytest.raises(AccessDenied, match="not authenticated"):
        principal_of(None)


@dataclass
class Read:
    tenant: str = ""


@dataclass
class Mount:
    pass


@dataclass
class Remove:
    force: bool
    tenant: str = ""


@dataclass
class Unlisted:
    pass


ACCESS = Access(
    {Read: EVERYBODY, Mount: NODES, Remove: EVERYBODY},
    {Remove: lambda one: ADMINS if one.force else EVERYBODY},
)
ADMIN, NODE, CLIENT = (Principal(role) for role in (Role.ADMIN, Role.NODE, Role.CLIENT))
ACME = Principal(Role.CLIENT, "acme")


def test_the_table_says_who_may() -> None:
    assert [not ACCESS.refusal(Read(), one) for one in (ADMIN, NODE, CLIENT)] == [True, True, True]
    assert [not ACCESS.refusal(Mount(), one) for one in (ADMIN, NODE, CLIENT, ACME)] == [
        False,
        True,
        False,
        False,
    ]
    assert [not ACCESS.refusal(Remove(True), one) for one in (ADMIN, NODE, CLIENT)] == [True, False, False]
    assert not ACCESS.refusal(Remove(False), CLIENT)


@pytest.mark.parametrize("principal", [ADMIN, NODE, CLIENT, ACME])
def test_what_is_not_in_the_table_is_refused(principal: Principal) -> None:
    assert "no role" in ACCESS.refusal(Unlisted(), principal)


def test_a_tenants_client_names_its_tenant_only() -> None:
    assert not ACCESS.refusal(Read("acme"), ACME)
    for tenant in ("", "default", "other"):
        assert "names tenant" in ACCESS.refusal(Read(tenant), ACME)
        assert not ACCESS.refusal(Read(tenant), CLIENT)
    default = Principal(Role.CLIENT, "default")
    assert not ACCESS.refusal(Read(""), default)


def test_where_there_is_no_credential_everything_is_allowed() -> None:
    for message in (Read("x"), Mount(), Remove(True), Unlisted()):
        assert not ACCESS.refusal(message, OPEN)


def test_everybody_is_trusted_and_tenants() -> None:
    assert TRUSTED < EVERYBODY
    assert ACME.level not in TRUSTED
