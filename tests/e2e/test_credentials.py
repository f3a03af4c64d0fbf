"""A cluster in which everything asks for a credential answers as one without, and no stranger is answered."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from mooncake.cli.certs import CertsSettings, make, make_cluster_key
from mooncake.security import Identity, SecuritySettings
from tests.cluster import Cluster, OpenAiServer, running_cluster

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]

SMALL = ("--prefill", "1", "--decode", "1", "--pool-size", "256MiB", "--kv-cache-size", "128MiB")
QUESTION = {"role": "user", "content": "What is the capital of France?"}
PROMPT = [*range(2000, 2100)]
REQUEST = b"GET /ready HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n"
PATIENCE_S = 30.0


def identity_of(way: str, folder: Path) -> Identity:
    if way == "key":
        make_cluster_key(folder / "cluster.key")
        return Identity(SecuritySettings(cluster_key_file=str(folder / "cluster.key")))
    make(CertsSettings(folder=folder))
    return Identity(
        SecuritySettings(str(folder / "node.pem"), str(folder / "node.key"), str(folder / "ca.pem"))
    )


def answers(server: OpenAiServer) -> tuple[str, list[int]]:
    """Of a chat, and of tokens that are read twice: computed, and from the cache."""
    body = {"model": "smollm2", "messages": [QUESTION], "temperature": 0, "max_tokens": 12}
    chat = server.post("/v1/chat/completions", body)
    assert chat.status == 200, chat.body
    first, again = (server.complete(PROMPT, 8) for _ in range(2))
    assert first.status == again.status == 200, (first.body, again.body)
    tokens = first.body["choices"][0]["token_ids"]
    assert tokens == again.body["choices"][0]["token_ids"]
    return chat.body["choices"][0]["message"]["content"], tokens


def told_to_a_stranger(address: str, tls: ssl.SSLContext | None = None) -> bytes:
    """What the server at ``address`` says to who shows nothing, until it hangs up."""
    host, _, port = address.rpartition(":")
    said = b""
    with socket.create_connection((host, int(port)), PATIENCE_S) as plain:
        try:
            stream = plain if tls is None else tls.wrap_socket(plain)
            stream.sendall(REQUEST)
            while data := stream.recv(1 << 16):
                said += data
        except (ConnectionError, ssl.SSLError):
            pass
    return said


def told_by(cluster: Cluster, tls: ssl.SSLContext | None = None) -> dict[str, bytes]:
    roles = ("prefill-0", "decode-0", "metadata")
    return {role: told_to_a_stranger(cluster.address(role), tls) for role in roles}


@pytest.mark.parametrize("way", ["tls", "key"])
def test_it_answers_as_without_and_tells_a_stranger_nothing(
    way: str, cluster: Cluster, tmp_path: Path
) -> None:
    expected = answers(cluster)
    assert b" 200 " in told_by(cluster)["prefill-0"], "the stranger's request is a good one elsewhere"
    with running_cluster(*SMALL, identity=identity_of(way, tmp_path)) as closed:
        assert answers(closed) == expected
        assert closed.get("/ready", "prefill-0").status == 200, "a member is answered"
        told = told_by(closed)
        if way == "key":
            assert {role: said.split(b" ")[1] for role, said in told.items()} == {
                "prefill-0": b"401",
                "decode-0": b"401",
                "metadata": b"401",
            }
            return
        assert not any(b"HTTP" in said for said in told.values()), told
        without_certificate = ssl.create_default_context()
        without_certificate.check_hostname = False
        without_certificate.verify_mode = ssl.CERT_NONE
        assert set(told_by(closed, without_certificate).values()) == {b""}
        roles = [role for role in closed.status["roles"] if role not in ("master", "node", "conductor")]
        addresses = {role: closed.log(role) for role in roles}
        assert all("address=https://" in log for log in addresses.values()), addresses
