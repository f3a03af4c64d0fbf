# SPDX-License-Identifier: Apache-2.0
"""Signed HTTP requests: only those of the cluster, each once, and only for a while."""

from __future__ import annotations

import base64
import itertools
import json

import pytest

from mooncake.errors import AccessDenied
from mooncake.security import request_signature
from mooncake.security.keys import KeyRing, derive
from mooncake.security.principal import Principal, Role
from mooncake.security.request_signature import HEADER, WINDOW_S, Signer, Verifier, digest_of

SECRET = b"s" * 32
RING = KeyRing((SECRET,))


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, secret: bytes = SECRET, role: Role = Role.NODE, tenant: str = "") -> Signer:
    numbers = itertools.count()
    start = f"{role}{tenant}".encode()
    credential = derive(secret, role, tenant)
    return Signer(credential, lambda n: (start + next(numbers).to_bytes(8, "big"))[-n:].rjust(n), clock)


def test_a_signed_request_says_who_sent_it() -> None:
    clock = Clock()
    header = make(clock, role=Role.CLIENT, tenant="acme").headers("PUT", "/metadata?key=a", b"body")[HEADER]
    principal, digest = Verifier(RING, clock).check(header, "PUT", "/metadata?key=a")
    assert principal == Principal(Role.CLIENT, "acme")
    assert digest == digest_of(b"body")


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/a"), ("PUT", "/b"), ("PUT", "/a?x=1")])
def test_a_signature_is_good_for_its_own_request_only(method: str, path: str) -> None:
    clock = Clock()
    header = make(clock).headers("PUT", "/a")[HEADER]
    with pytest.raises(AccessDenied, match="not that of this request"):
        Verifier(RING, clock).check(header, method, path)


def test_a_request_is_taken_once() -> None:
    clock = Clock()
    verifier, header = Verifier(RING, clock), make(clock).headers("PUT", "/a")[HEADER]
    verifier.check(header, "PUT", "/a")
    with pytest.raises(AccessDenied, match="received before"):
        verifier.check(header, "PUT", "/a")
    clock.now += WINDOW_S + 1
    with pytest.raises(AccessDenied, match="clocks"):
        verifier.check(header, "PUT", "/a")


def test_one_from_the_future_cannot_be_kept_for_later() -> None:
    clock = Clock()
    clock.now += WINDOW_S - 1
    header = make(clock).headers("PUT", "/a")[HEADER]
    clock.now -= WINDOW_S - 1
    verifier = Verifier(RING, clock)
    verifier.check(header, "PUT", "/a")
    for _ in range(int(2 * WINDOW_S)):
        clock.now += 1
        with pytest.raises(AccessDenied):
            verifier.check(header, "PUT", "/a")


def test_what_is_remembered_is_bounded_and_nothing_forgotten_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_signature, "MAX_REMEMBERED", 8)
    clock = Clock()
    verifier, signer, headers = Verifier(RING, clock), make(clock), []
    for _ in range(50):
        clock.now += 0.01
        headers.append(signer.headers("GET", "/")[HEADER])
        verifier.check(headers[-1], "GET", "/")
        assert verifier.num_remembered <= 8
    for header in headers:
        with pytest.raises(AccessDenied):
            verifier.check(header, "GET", "/")


def changed(header: str, place: int, value: object) -> str:
    fields = json.loads(base64.b64decode(header, altchars=b"-_"))
    fields[place] = value
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, "admin"), (1, "acme"), (3, "1000001.000"), (4, "00" * 16), (5, "00" * 32), (6, "00" * 32)],
)
def test_nothing_of_a_signature_can_be_changed(place: int, value: str) -> None:
    clock = Clock()
    header = make(clock).headers("PUT", "/a")[HEADER]
    with pytest.raises(AccessDenied):
        Verifier(RING, clock).check(changed(header, place, value), "PUT", "/a")


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "x", "é", "[" * 900, "A" * 5000),
        base64.b64encode(b"[" * 700).decode(),
        base64.b64encode(b"{}").decode(),
        base64.b64encode(json.dumps(["a"] * 7).encode()).decode(),
        base64.b64encode(json.dumps(["node", "", "", "nan", "", "", ""]).encode()).decode(),
        base64.b64encode(json.dumps(["client", "\ud800", "", "1", "", "", ""]).encode()).decode(),
    ],
)
def test_what_is_no_signature_is_refused(header: str | None) -> None:
    with pytest.raises(AccessDenied):
        Verifier(RING, Clock()).check(header, "GET", "/")


def test_a_signature_that_names_no_number_as_its_time_is_refused() -> None:
    clock = Clock()
    signer = Signer(derive(SECRET, Role.NODE), lambda n: b"\0" * n, lambda: float("nan"))
    with pytest.raises(AccessDenied):
        Verifier(RING, clock).check(signer.headers("GET", "/")[HEADER], "GET", "/")


def test_another_cluster_is_refused() -> None:
    clock = Clock()
    header = make(clock, b"t" * 32).headers("GET", "/")[HEADER]
    with pytest.raises(AccessDenied, match=r"not \(any longer\) of this cluster"):
        Verifier(RING, clock).check(header, "GET", "/")


def test_a_tenant_that_floods_keeps_out_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_signature, "MAX_REMEMBERED", 8)
    clock, later = Clock(), Clock()
    later.now += WINDOW_S - 1
    verifier, flooding = Verifier(RING, clock), make(later, role=Role.CLIENT, tenant="acme")
    for _ in range(20):
        later.now += 0.01
        verifier.check(flooding.headers("GET", "/")[HEADER], "GET", "/")
    assert verifier.check(make(clock).headers("GET", "/")[HEADER], "GET", "/")[0] == Principal(Role.NODE)
    with pytest.raises(AccessDenied, match="older than those remembered"):
        one = make(clock, role=Role.CLIENT, tenant="acme").headers("GET", "/")[HEADER]
        verifier.check(one, "GET", "/")
