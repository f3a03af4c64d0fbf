# SPDX-License-Identifier: Apache-2.0
"""The cluster key: the keys derived from it, and the contents of its file."""

from __future__ import annotations

import base64

import pytest

from mooncake.security.keys import KeyRing, derive, format_credential, format_secret, parse_key_file
from mooncake.security.principal import Role

SECRET, OTHER = b"s" * 32, b"t" * 32


def test_every_role_and_tenant_has_a_key_of_its_own() -> None:
    names = [(Role.NODE, ""), (Role.ADMIN, ""), (Role.CLIENT, ""), (Role.CLIENT, "a"), (Role.CLIENT, "b")]
    keys = {derive(secret, role, tenant).key for secret in (SECRET, OTHER) for role, tenant in names}
    assert len(keys) == 2 * len(names)
    assert SECRET not in keys


def test_a_key_is_the_one_that_rfc_5869_derives() -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    theirs = HKDF(hashes.SHA256(), 32, b"mooncake cluster key 1", b"mooncake\0client\0acme").derive(SECRET)
    assert derive(SECRET, Role.CLIENT, "acme").key == theirs


def test_the_secret_finds_every_key_of_its_cluster_and_of_no_other() -> None:
    ring = KeyRing((SECRET, OTHER))
    for secret in (SECRET, OTHER):
        one = derive(secret, Role.CLIENT, "acme")
        assert ring.find(Role.CLIENT, "acme", one.key_id) == one
        assert ring.find(Role.ADMIN, "", one.key_id) is None
        assert ring.find(Role.CLIENT, "other", one.key_id) is None
    assert ring.credential(Role.NODE) == derive(SECRET, Role.NODE)
    outsider = derive(b"x" * 32, Role.NODE)
    assert ring.find(Role.NODE, "", outsider.key_id) is None


def test_a_derived_key_finds_only_itself() -> None:
    acme = derive(SECRET, Role.CLIENT, "acme")
    ring = parse_key_file(format_credential(acme))
    assert ring.find(Role.CLIENT, "acme", acme.key_id) == acme
    node = derive(SECRET, Role.NODE)
    assert ring.find(Role.NODE, "", node.key_id) is None
    assert ring.credential(Role.ADMIN) == acme, "the role that is asked for changes nothing"


@pytest.mark.parametrize("tenant", ["", "acme", "a b/c:d%-", "ünï", "-"])
def test_what_is_written_is_read(tenant: str) -> None:
    one = derive(SECRET, Role.CLIENT, tenant)
    text = format_credential(one)
    assert parse_key_file("# a comment\n\n" + text).derived == (one,)
    assert parse_key_file(format_secret(SECRET) + format_secret(OTHER)).secrets == (SECRET, OTHER)


def encoded(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).decode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no key"),
        ("hello", "line 1 is no key"),
        ("mooncake-key-1 cluster - %%%%", "not base64"),
        (f"mooncake-key-1 cluster - {encoded(b'short')}", "5 bytes instead of 32"),
        (f"mooncake-key-1 root - {encoded(SECRET)}", "names the role 'root'"),
        (f"mooncake-key-1 admin acme {encoded(SECRET)}", "only clients are bound to a tenant"),
        (format_secret(SECRET) + format_credential(derive(SECRET, Role.NODE)), "files of their own"),
        (
            format_credential(derive(SECRET, Role.NODE)) + format_credential(derive(SECRET, Role.ADMIN)),
            "several roles",
        ),
        (format_secret(SECRET) * 9, "more than 8"),
    ],
)
def test_what_is_no_key_file_is_named(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_key_file(text)
    assert encoded(SECRET) not in str(caught.value)


def test_nothing_shows_a_key() -> None:
    one = derive(SECRET, Role.NODE)
    for shown in (repr(one), repr(KeyRing((SECRET,), (one,)))):
        assert repr(SECRET)[2:-1] not in shown
        assert repr(one.key) not in shown
