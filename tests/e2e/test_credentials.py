# SPDX-License-Identifier: Apache-2.0
"""A cluster with credentials everywhere answers as one without, and refuses unauthenticated clients."""

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
    """Answers to a chat, and to tokens that are sent twice: computed, and from the cache."""
    body = {"model": "smollm2", "messages": [QUESTION], "temperature": 0, "max_tokens": 12}
    chat = server.post("/v1/chat/completions", body)
    assert chat.status == 200, chat.body
    first, again = (server.complete(PROMPT, 8) for _ in range(2))
    assert first.status == again.status == 200, (first.body, again.body)
    tokens = first.body["choices"][0]["token_ids"]
    assert tokens == again.body["choices"][0]["token_ids"]
    return chat.body["choices"][0]["message"]["content"], tokens


def unauthenticated_answer(address: str, tls: ssl.SSLContext | None = None) -> bytes:
    """The server's answer to a client without credentials, until it closes the connection."""
    host, _, port = address.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), PATIENCE_S) as plain:
        try:
            stream = plain if tls is None else tls.wrap_socket(plain)
            stream.sendall(REQUEST)
            while data := stream.recv(1 << 16):
                answer += data
        except (ConnectionError, ssl.SSLError):
            pass
    return answer


def unauthenticated_answers(cluster: Cluster, tls: ssl.SSLContext | None = None) -> dict[str, bytes]:
    roles = ("prefill-0", "decode-0", "metadata")
    return {role: unauthenticated_answer(cluster.address(role), tls) for role in roles}


@pytest.mark.parametrize("way", ["tls", "key"])
def test_it_answers_as_without_and_refuses_unauthenticated_clients(
    way: str, cluster: Cluster, tmp_path: Path
) -> None:
    expected = answers(cluster)
    assert b" 200 " in unauthenticated_answers(cluster)["prefill-0"], "the request itself is valid"
    with running_cluster(*SMALL, identity=identity_of(way, tmp_path)) as closed:
        assert answers(closed) == expected
        assert closed.get("/ready", "prefill-0").status == 200, "a member is answered"
        found = unauthenticated_answers(closed)
        if way == "key":
            assert {role: answer.split(b" ")[1] for role, answer in found.items()} == {
                "prefill-0": b"401",
                "decode-0": b"401",
                "metadata": b"401",
            }
            return
        assert not any(b"HTTP" in answer for answer in found.values()), found
        without_certificate = ssl.create_default_context()
        without_certificate.check_hostname = False
        without_certificate.verify_mode = ssl.CERT_NONE
        assert set(unauthenticated_answers(closed, without_certificate).values()) == {b""}
        roles = [role for role in closed.status["roles"] if role not in ("master", "node", "conductor")]
        addresses = {role: closed.log(role) for role in roles}
        assert all("address=https://" in log for log in addresses.values()), addresses
