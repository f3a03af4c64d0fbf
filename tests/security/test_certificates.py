# SPDX-License-Identifier: Apache-2.0
"""The principal that a certificate names."""

from __future__ import annotations

import pytest

from mooncake.errors import AccessDenied
from mooncake.security.certificates import name_of, principal_of
from mooncake.security.principal import Principal, Role


def certificate(*names: str) -> dict[str, object]:
    return {"subjectAltName": (("DNS", "localhost"), *(("URI", name) for name in names))}


@pytest.mark.parametrize(
    ("role", "tenant"), [(Role.NODE, ""), (Role.ADMIN, ""), (Role.CLIENT, ""), (Role.CLIENT, "a/ü c")]
)
def test_a_name_says_role_and_tenant(role: Role, tenant: str) -> None:
    assert principal_of(certificate("spiffe://x/y", name_of(role, tenant))) == Principal(role, tenant)


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
