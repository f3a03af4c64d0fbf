# SPDX-License-Identifier: Apache-2.0
"""Authentication of HTTP requests by signature, certificate or administrator's key, and the client's side.

The operators' key has one meaning everywhere, set or not.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from mooncake.security import HEADER, TRUSTED, HttpAuth, Identity, SecuritySettings
from mooncake.security.http_auth import CERTIFICATE, PRINCIPAL, AdminKey, HttpClientAuth
from mooncake.security.keys import derive, format_credential, format_secret
from mooncake.security.principal import OPEN, Principal, Role

SECRET = b"s" * 32

ADMIN_KEY = AdminKey("correct-horse")


def identity(folder: Path, text: str = format_secret(SECRET)) -> Identity:
    path = folder / "key"
    path.write_text(text)
    path.chmod(0o600)
    return Identity(SecuritySettings(cluster_key_file=str(path)))


class Server:
    """An application that records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, bytes]] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.asked.append((scope.get(PRINCIPAL), body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


async def ask(
    auth: HttpAuth, headers: dict[str, str], body: bytes = b"", path: str = "/a", certificate: Any = None
) -> int:
    """Status of the answer; 0 when there is none."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"x=1",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        CERTIFICATE: certificate,
    }
    pieces = [body[:1], body[1:]]
    answered: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answered.append(message["status"])

    await auth(scope, receive, send)
    return answered[0] if answered else 0


async def test_a_signed_request_is_let_in_with_the_body_that_was_signed(tmp_path: Path) -> None:
    server, ours = Server(), identity(tmp_path)
    auth, signer = HttpAuth(server, ours, open_paths=("/health",)), ours.signer()
    assert signer is not None
    assert await ask(auth, {}) == 401
    assert await ask(auth, {}, path="/health") == 200
    assert await ask(auth, signer.headers("POST", "/a?x=1", b"body"), b"body") == 200
    assert server.asked[-1][0].role is Role.NODE and server.asked[-1][1] == b"body"
    num_asked = len(server.asked)
    assert await ask(auth, signer.headers("POST", "/a?x=1", b"body"), b"other") == 0
    assert await ask(auth, signer.headers("POST", "/b?x=1", b"body"), b"body") == 401
    assert len(server.asked) == num_asked


async def test_who_may_ask_is_said_by_level(tmp_path: Path) -> None:
    server = Server()
    auth = HttpAuth(server, identity(tmp_path), TRUSTED, api_key="admin")
    text = format_credential(derive(SECRET, Role.CLIENT, "acme"))
    (tmp_path / "acme").mkdir()
    signer = identity(tmp_path / "acme", text).signer()
    assert signer is not None
    assert await ask(auth, signer.headers("POST", "/a?x=1")) == 403
    assert await ask(auth, {"X-API-Key": "admin"}) == 200
    assert server.asked[-1][0].role is Role.ADMIN
    for wrong in ("", "Admin", "admin "):
        assert await ask(auth, {"X-API-Key": wrong}) == 401
    assert await ask(HttpAuth(server, identity(tmp_path)), {"X-API-Key": ""}) == 401, (
        "no key is set, so none matches"
    )


async def test_with_tls_the_certificate_says_who_it_is(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="makes the certificates: pip install 'mooncake-serving[tls]'")
    from mooncake.cli.certs import CertsSettings, make

    make(CertsSettings(folder=tmp_path))
    ours = Identity(SecuritySettings(*(str(tmp_path / name) for name in ("node.pem", "node.key", "ca.pem"))))  # type: ignore[arg-type]
    server = Server()
    auth = HttpAuth(server, ours, TRUSTED)
    certificate = {"subjectAltName": (("URI", "mooncake://client/acme"),)}
    assert await ask(auth, {}, certificate=certificate) == 403
    assert await ask(auth, {}, certificate={"subjectAltName": (("URI", "mooncake://node"),)}) == 200
    assert await ask(auth, {}) == 401, "without TLS there is no certificate"


def test_without_a_credential_it_asks_plainly() -> None:
    client = HttpClientAuth(Identity())
    assert client.url("host:1", "/ready") == "http://host:1/ready"
    assert client.headers("GET", "/ready") == {} and client.tls is None


def test_with_a_key_it_signs_this_very_request(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "key"
    file.write_text(format_secret(b"k" * 32))
    file.chmod(0o600)
    identity = Identity(SecuritySettings(cluster_key_file=str(file)))
    client = HttpClientAuth(identity)
    header = client.headers("POST", "/v1/completions", b"{}")[HEADER]
    verifier = identity.verifier()
    assert verifier is not None
    assert str(verifier.check(header, "POST", "/v1/completions")[0]) == "node"


@pytest.mark.parametrize(
    "headers", [{"x-api-key": "correct-horse"}, {"authorization": "Bearer correct-horse"}]
)
def test_who_has_it_may(headers: dict[str, str]) -> None:
    assert ADMIN_KEY.refusal(headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"x-api-key": "correct-hors"},
        {"x-api-key": "höchst geheim"},
        {"x-api-key": "\udcff\udcfe"},  # bytes that are not UTF-8, as aiohttp reads them
        {"authorization": "Bearer \ud800"},
        {"authorization": "Basic correct-horse"},
        {"authorization": "correct-horse"},
        {"x-api-key": "wrong", "authorization": "Bearer correct-horse"},
    ],
)
def test_who_has_not_may_not(headers: dict[str, str]) -> None:
    refusal = ADMIN_KEY.refusal(headers)
    assert refusal is not None and (refusal.status, refusal.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("headers", [{}, {"x-api-key": ""}, {"x-api-key": "x"}, {"authorization": "Bearer "}])
def test_without_a_key_every_call_is_refused(headers: dict[str, str]) -> None:
    refusal = AdminKey("").refusal(headers)
    assert refusal is not None and (refusal.status, refusal.code) == (403, "admin_key_not_set")
    assert "ADMIN_API_KEY" in refusal.message


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_a_key_that_is_not_ascii_is_accepted_however_a_server_reads_headers(encoding: str) -> None:
    key = AdminKey("schl\u00fcssel \u2713")
    read = "schl\u00fcssel \u2713".encode().decode(encoding)
    assert key.matches({"x-api-key": read}) and key.matches({"authorization": f"Bearer {read}"})
    assert not key.matches({"x-api-key": "schl\u00fcssel ?"})


def test_a_node_or_administrator_of_the_cluster_needs_no_key() -> None:
    for role, may in ((Role.NODE, True), (Role.ADMIN, True), (Role.CLIENT, False)):
        assert (AdminKey("").refusal({}, Principal(role)) is None) is may
    assert AdminKey("").refusal({}, OPEN) is not None, "nothing was proven where nothing is asked"
    assert AdminKey("").refusal({}, Principal(Role.CLIENT, "tenant")) is not None
