# SPDX-License-Identifier: Apache-2.0
"""The greeting: a key admits its principal, every other client is refused as unauthenticated."""

from __future__ import annotations

import pytest

from mooncake.errors import AccessDenied, ProtocolError
from mooncake.security.greeting import (
    MAX_GREETING_BYTES,
    NONCE_BYTES,
    Challenge,
    ClientGreeting,
    Hello,
    Proof,
    ServerGreeting,
    binding_of,
)
from mooncake.security.keys import KeyRing, derive
from mooncake.security.principal import OPEN, Principal, Role

SECRET, OTHER = b"s" * 32, b"t" * 32
RING = KeyRing((SECRET,))


def nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES, "big")


def greeted(client_greeting: ClientGreeting, server_greeting: ServerGreeting) -> Principal:
    challenge = server_greeting.hello(client_greeting.hello())
    assert challenge is not None
    return server_greeting.prove(client_greeting.prove(challenge))


@pytest.mark.parametrize(
    ("role", "tenant"),
    [(Role.NODE, ""), (Role.ADMIN, ""), (Role.CLIENT, ""), (Role.CLIENT, "acme")],
)
def test_a_key_determines_role_and_tenant(role: Role, tenant: str) -> None:
    client_greeting = ClientGreeting(derive(SECRET, role, tenant), nonce(1))
    server_greeting = ServerGreeting(RING, nonce(2))
    assert greeted(client_greeting, server_greeting) == Principal(role, tenant)
    assert client_greeting.is_over


def test_a_cluster_with_two_secrets_takes_both() -> None:
    ring = KeyRing((SECRET, OTHER))
    for secret in (SECRET, OTHER):
        assert (
            greeted(ClientGreeting(derive(secret, Role.NODE), nonce(1)), ServerGreeting(ring, nonce(2))).role
            is Role.NODE
        )


def test_where_there_is_no_key_everybody_is_let_in() -> None:
    server_greeting = ServerGreeting(None, nonce(2))
    assert server_greeting.hello(ClientGreeting(None, nonce(1)).hello()) is None
    assert server_greeting.principal is OPEN


def test_a_client_with_a_key_does_not_trust_a_server_without() -> None:
    with pytest.raises(AccessDenied, match="no cluster key"):
        ServerGreeting(None, nonce(2)).hello(ClientGreeting(derive(SECRET, Role.NODE), nonce(1)).hello())


@pytest.mark.parametrize(
    "hello",
    [
        Hello(),
        Hello("node", "", derive(OTHER, Role.NODE).key_id, nonce(1)),
        Hello("admin", "", derive(SECRET, Role.NODE).key_id, nonce(1)),
        Hello("client", "b", derive(SECRET, Role.CLIENT, "a").key_id, nonce(1)),
    ],
)
def test_a_stranger_is_asked_who_he_is(hello: Hello) -> None:
    server_greeting = ServerGreeting(RING, nonce(2))
    with pytest.raises(AccessDenied, match="not authenticated"):
        server_greeting.hello(hello)
    assert server_greeting.principal is None


@pytest.mark.parametrize(
    "hello",
    [
        Hello("root", "", b"12345678", nonce(1)),
        Hello("node", "", b"12345678", b"short"),
        Hello("client", "x" * 256, b"12345678", nonce(1)),
    ],
)
def test_what_makes_no_sense_is_refused(hello: Hello) -> None:
    with pytest.raises(ProtocolError):
        ServerGreeting(RING, nonce(2)).hello(hello)


def test_a_recorded_greeting_cannot_be_replayed() -> None:
    credential = derive(SECRET, Role.NODE)
    client_greeting, first = ClientGreeting(credential, nonce(1)), ServerGreeting(RING, nonce(2))
    challenge = first.hello(client_greeting.hello())
    assert challenge is not None
    proof = client_greeting.prove(challenge)
    again = ServerGreeting(RING, nonce(3))
    again.hello(client_greeting.hello())
    with pytest.raises(AccessDenied, match="the proof is invalid"):
        again.prove(proof)


def test_a_proof_does_not_serve_in_the_other_direction() -> None:
    """A server without a key sends its victim's proof back, or obtains one from a real server."""
    credential = derive(SECRET, Role.NODE)
    real = ServerGreeting(RING, nonce(2))
    challenge = real.hello(Hello("node", "", credential.key_id, nonce(7)))
    assert challenge is not None
    with pytest.raises(AccessDenied, match="the proof is invalid"):
        real.prove(Proof(challenge.proof))
    victim = ClientGreeting(credential, nonce(1))
    victim.hello()
    with pytest.raises(AccessDenied, match="can't prove"):
        victim.prove(Challenge(challenge.nonce, challenge.proof))


def test_a_server_of_another_cluster_is_not_trusted() -> None:
    client_greeting = ClientGreeting(derive(SECRET, Role.NODE), nonce(1))
    one = derive(OTHER, Role.NODE)
    challenge = ServerGreeting(KeyRing((OTHER,)), nonce(2)).hello(Hello("node", "", one.key_id, nonce(1)))
    assert challenge is not None
    with pytest.raises(AccessDenied, match="can't prove"):
        client_greeting.prove(challenge)
    assert not client_greeting.is_over


def test_nothing_may_be_said_twice_or_out_of_turn() -> None:
    server_greeting = ServerGreeting(RING, nonce(2))
    with pytest.raises(ProtocolError):
        server_greeting.prove(Proof(b""))
    client_greeting = ClientGreeting(derive(SECRET, Role.NODE), nonce(1))
    challenge = server_greeting.hello(client_greeting.hello())
    assert challenge is not None
    with pytest.raises(ProtocolError):
        server_greeting.hello(client_greeting.hello())
    server_greeting.prove(client_greeting.prove(challenge))
    with pytest.raises(ProtocolError):
        server_greeting.prove(Proof(b""))
    with pytest.raises(ProtocolError):
        client_greeting.prove(challenge)


def test_with_tls_and_a_key_both_must_be_of_the_same() -> None:
    client_greeting = ClientGreeting(derive(SECRET, Role.CLIENT, "acme"), nonce(1))
    assert (
        greeted(client_greeting, ServerGreeting(RING, nonce(2), Principal(Role.CLIENT, "acme"))).tenant
        == "acme"
    )
    client_greeting = ClientGreeting(derive(SECRET, Role.NODE), nonce(1))
    assert greeted(client_greeting, ServerGreeting(RING, nonce(2), Principal(Role.CLIENT))).role is Role.NODE
    client_greeting = ClientGreeting(derive(SECRET, Role.ADMIN), nonce(1))
    with pytest.raises(AccessDenied, match="certificate is that of"):
        greeted(client_greeting, ServerGreeting(RING, nonce(2), Principal(Role.CLIENT, "acme")))


def test_a_greeting_is_small() -> None:
    import msgspec

    client_greeting = ClientGreeting(derive(SECRET, Role.CLIENT, "x" * 255), nonce(1))
    challenge = ServerGreeting(RING, nonce(2)).hello(client_greeting.hello())
    assert challenge is not None
    for message in (client_greeting.hello(), challenge, client_greeting.prove(challenge)):
        assert len(msgspec.msgpack.encode(message)) <= MAX_GREETING_BYTES


@pytest.mark.parametrize(
    ("meant", "reached"),
    [
        (binding_of(True, b""), binding_of(False, b"")),
        (binding_of(False, b""), binding_of(True, b"")),
        (binding_of(False, b"a" * 32), binding_of(False, b"b" * 32)),
        (binding_of(False, b"a" * 32), binding_of(False, b"")),
    ],
)
def test_a_greeting_to_one_server_cannot_be_relayed_to_another(meant: bytes, reached: bytes) -> None:
    """A node connects to another's engine, which relays every message to a master, and back."""
    client_greeting = ClientGreeting(derive(SECRET, Role.NODE), nonce(1), meant)
    master = ServerGreeting(RING, nonce(2), None, reached)
    challenge = master.hello(client_greeting.hello())
    assert challenge is not None
    with pytest.raises(AccessDenied, match="is it the right server"):
        client_greeting.prove(challenge)
    assert greeted(
        ClientGreeting(derive(SECRET, Role.NODE), nonce(1), meant),
        ServerGreeting(RING, nonce(2), None, meant),
    )
