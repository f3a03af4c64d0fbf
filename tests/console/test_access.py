# SPDX-License-Identifier: Apache-2.0
"""Who is local, which session lives, and how often a wrong key may be tried."""

from __future__ import annotations

import itertools

import pytest

from mooncake.console.access import (
    FAILURES_WITHIN_S,
    IDLE_S,
    MAX_FAILURES,
    MAX_SESSIONS,
    SESSION_S,
    ConsoleSessions,
    LoginFailures,
    Visitor,
    is_equal,
    is_local,
    is_same_site,
    retry_after,
)

ADMIN = Visitor("admin", key="the-admin-key")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "localhost", "[::1]:8000", "127.9.0.1"])
@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_process_of_this_host_is_local(peer: str, host: str) -> None:
    assert is_local(peer, {"host": host})


@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        ("10.0.0.7", {"host": "localhost:8000"}),
        ("", {"host": "localhost:8000"}),
        ("127.0.0.1", {"host": "evil.example:8000"}),
        ("127.0.0.1", {"host": "127.0.0.1.evil.example"}),
        ("127.0.0.1", {"host": "localhost.evil.example"}),
        ("127.0.0.1", {}),
        ("127.0.0.1", {"host": "localhost", "x-forwarded-for": "127.0.0.1"}),
        ("127.0.0.1", {"host": "localhost", "forwarded": "for=127.0.0.1"}),
        ("127.0.0.1", {"host": "localhost", "via": "1.1 proxy"}),
    ],
)
def test_foreign_pages_and_proxies_are_not_local(peer: str, headers: dict[str, str]) -> None:
    assert not is_local(peer, headers)


def test_only_own_pages_are_of_the_same_site() -> None:
    assert is_same_site({"host": "a:8000"})  # a program
    assert is_same_site({"host": "a:8000", "origin": "http://a:8000", "sec-fetch-site": "same-origin"})
    assert not is_same_site({"host": "a:8000", "origin": "http://b"})
    assert not is_same_site({"host": "a:8000", "origin": "null"})
    assert not is_same_site({"host": "a:8000", "sec-fetch-site": "cross-site"})
    assert not is_same_site({"host": "a:8000", "sec-fetch-site": "same-site"})
    assert not is_same_site({"host": "a:8000", "origin": "http://b", "sec-fetch-site": "none"})


def test_browser_compares_the_origin_that_a_proxy_has_hidden() -> None:
    rewritten = {"host": "127.0.0.1:8000", "x-forwarded-host": "a", "origin": "https://a"}
    assert is_same_site({**rewritten, "sec-fetch-site": "same-origin"})
    assert not is_same_site(rewritten), "a browser over plain HTTP does not say whose page it was"
    assert not is_same_site({**rewritten, "sec-fetch-site": "cross-site"})


def sessions() -> ConsoleSessions:
    numbers = itertools.count()
    return ConsoleSessions(lambda: f"secret-{next(numbers)}")


def test_session_lives_until_it_is_idle_old_or_ended() -> None:
    found = sessions()
    token, session = found.begin(ADMIN, 0.0)
    assert token != session.csrf
    assert found.find(token, IDLE_S) is session
    assert found.find(token, 2 * IDLE_S + 1) is None
    token, _ = found.begin(ADMIN, 0.0)
    for now in range(0, int(SESSION_S) + 1, int(IDLE_S)):
        assert found.find(token, now) is not None
    assert found.find(token, SESSION_S + 1) is None
    token, _ = found.begin(ADMIN, 0.0)
    found.end(token)
    assert found.find(token, 0.0) is None
    assert found.find("secret-1", 0.0) is None, "the value for changes is no token"


def test_sessions_are_bounded() -> None:
    found = sessions()
    tokens = [found.begin(ADMIN, 0.0)[0] for _ in range(MAX_SESSIONS + 5)]
    found.check()
    assert len(found) == MAX_SESSIONS
    assert found.find(tokens[0], 0.0) is None and found.find(tokens[-1], 0.0) is not None


def test_wrong_keys_are_slowed_down_by_address() -> None:
    failures = LoginFailures()
    for number in range(MAX_FAILURES):
        assert failures.wait_s("10.0.0.1", number) == 0.0
        failures.failed("10.0.0.1", float(number))
    now = float(MAX_FAILURES)
    wait_s = failures.wait_s("10.0.0.1", now)
    assert 0 < wait_s <= FAILURES_WITHIN_S
    assert failures.wait_s("10.0.0.2", now) == 0.0
    assert failures.wait_s("10.0.0.1", now + wait_s) == 0.0
    failures.succeeded("10.0.0.1")
    assert failures.wait_s("10.0.0.1", now) == 0.0


def test_addresses_with_wrong_keys_are_bounded() -> None:
    failures = LoginFailures()
    for number in range(5000):
        failures.failed(str(number), 0.0)
    assert len(failures._by_address) <= 1024


def test_an_empty_secret_equals_nothing() -> None:
    assert is_equal("a", "a") and not is_equal("a", "b") and not is_equal("", "")


def test_secrets_that_are_not_valid_unicode_are_wrong_ones() -> None:
    assert not is_equal("\ud800", "a")
    assert sessions().find("\ud800", 0.0) is None


def test_a_visitor_shows_no_key() -> None:
    assert "the-admin-key" not in repr(ADMIN)
    assert ADMIN.sees_all and Visitor("reader").sees_all and not Visitor("client").sees_all


def test_retry_after_is_whole_seconds() -> None:
    assert [retry_after(one) for one in (0.1, 1.0, 1.2)] == ["1", "1", "2"]
