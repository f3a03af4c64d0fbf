# SPDX-License-Identifier: Apache-2.0
"""The operators' key has one meaning everywhere, set or not."""

from __future__ import annotations

import pytest

from mooncake.security.admin_key import AdminKey
from mooncake.security.principal import OPEN, Principal, Role

KEY = AdminKey("correct-horse")


@pytest.mark.parametrize(
    "headers", [{"x-api-key": "correct-horse"}, {"authorization": "Bearer correct-horse"}]
)
def test_who_has_it_may(headers: dict[str, str]) -> None:
    assert KEY.refusal(headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"x-api-key": "correct-hors"},
        {"x-api-key": "höchst geheim"},
        {"authorization": "Basic correct-horse"},
        {"authorization": "correct-horse"},
        {"x-api-key": "wrong", "authorization": "Bearer correct-horse"},
    ],
)
def test_who_has_not_may_not(headers: dict[str, str]) -> None:
    refusal = KEY.refusal(headers)
    assert refusal is not None and (refusal.status, refusal.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("headers", [{}, {"x-api-key": ""}, {"x-api-key": "x"}, {"authorization": "Bearer "}])
def test_without_a_key_every_call_is_refused(headers: dict[str, str]) -> None:
    refusal = AdminKey("").refusal(headers)
    assert refusal is not None and (refusal.status, refusal.code) == (403, "admin_key_not_set")
    assert "ADMIN_API_KEY" in refusal.message


def test_a_node_or_administrator_of_the_cluster_needs_no_key() -> None:
    for role, may in ((Role.NODE, True), (Role.ADMIN, True), (Role.CLIENT, False)):
        assert (AdminKey("").refusal({}, Principal(role)) is None) is may
    assert AdminKey("").refusal({}, OPEN) is not None, "nothing was proven where nothing is asked"
    assert AdminKey("").refusal({}, Principal(Role.CLIENT, "tenant")) is not None
