# SPDX-License-Identifier: Apache-2.0
"""The greeting of a connection: challenge and response in both directions, as a core without I/O.

The client sends the id of its key and a fresh random number; the server answers with
one of its own and proves that it has the key, too; then the client proves it. Every proof covers both
numbers, the direction, the role, the tenant, the version of the protocol and the *binding*: the kind of
server, and with TLS its certificate. So no proof is valid twice, in the other direction,
for another role, or when an attacker forwards it to a server that was not meant. The key itself
is never sent. A greeting is identified by its position, as the first frames, and is small:
nothing else is read from a peer that has not completed it.
"""

from __future__ import annotations

import hmac

import msgspec

from mooncake.errors import AccessDenied, ProtocolError
from mooncake.security.keys import Credential, KeyRing
from mooncake.security.principal import MAX_TENANT_BYTES, OPEN, Principal, Role

MAX_GREETING_BYTES = 512
"""Limit of each frame before the greeting has ended."""
NONCE_BYTES = 32
VERSION = b"mooncake-rpc-3"

ADVICE = "give it the cluster's key (MOONCAKE_SECURITY_CLUSTER_KEY_FILE, or `--cluster-key-file` of a role)"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of every client. All fields are empty when it has no key."""

    role: str = ""
    tenant: str = ""
    key_id: bytes = b""
    nonce: bytes = b""


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """The server's random number, and its proof."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    """The client's proof. It has no answer: the next message with an answer is a request."""

    proof: bytes


def binding_of(is_peer: bool, certificate: bytes) -> bytes:
    """Properties of the server that both sides know without exchanging them.

    Args:
        is_peer: a server that any process may run (an engine), as opposed to one that serves the cluster.
        certificate: the SHA-256 of its certificate in TLS; empty without TLS.
    """
    return (b"peer" if is_peer else b"cluster") + certificate


def _mac(
    credential: Credential, side: bytes, client_nonce: bytes, server_nonce: bytes, binding: bytes
) -> bytes:
    tenant = credential.tenant.encode()
    parts = (VERSION, side, credential.role.value.encode(), len(tenant).to_bytes(2, "big") + tenant)
    # The numbers have a fixed length, so the binding can't be mistaken for a part of them.
    return hmac.digest(credential.key, b"\0".join(parts) + client_nonce + server_nonce + binding, "sha256")


class ClientGreeting:
    """The client's side. ``nonce`` is fresh and random. ``binding`` is set before the challenge arrives."""

    def __init__(self, credential: Credential | None, nonce: bytes, binding: bytes = b"") -> None:
        assert len(nonce) == NONCE_BYTES
        self.binding = binding
        self._credential = credential
        self._nonce = nonce
        self.is_over = credential is None
        """True when requests may be sent."""

    def hello(self) -> Hello:
        if self._credential is None:
            return Hello()
        one = self._credential
        return Hello(one.role.value, one.tenant, one.key_id, self._nonce)

    def prove(self, challenge: Challenge) -> Proof:
        """Check the server's proof and make the client's; raises AccessDenied for another key."""
        if self.is_over or self._credential is None:
            raise ProtocolError("it sent an unexpected challenge")
        if len(challenge.nonce) != NONCE_BYTES:
            raise ProtocolError("its challenge has the wrong size")
        expected = _mac(self._credential, b"server", self._nonce, challenge.nonce, self.binding)
        if not hmac.compare_digest(expected, challenge.proof):
            raise AccessDenied("it can't prove that it has the cluster's key; is it the right server?")
        self.is_over = True
        return Proof(_mac(self._credential, b"client", self._nonce, challenge.nonce, self.binding))


class ServerGreeting:
    """The server's side.

    Args:
        keys: None where no key is required.
        nonce: fresh and random.
        certified: principal of the peer's certificate, with TLS.
        binding: ``binding_of`` this server.
    """

    def __init__(
        self, keys: KeyRing | None, nonce: bytes, certified: Principal | None = None, binding: bytes = b""
    ) -> None:
        assert len(nonce) == NONCE_BYTES
        self._binding = binding
        self._keys = keys
        self._nonce = nonce
        self._certified = certified
        self._challenged: tuple[Credential, bytes] | None = None
        self.principal: Principal | None = None
        """None until the greeting has ended."""

    def hello(self, hello: Hello) -> Challenge | None:
        """Return the challenge, or None when the greeting ends with this message. Raises AccessDenied."""
        if self._challenged is not None or self.principal is not None:
            raise ProtocolError("it greeted twice")
        if self._keys is None:
            if hello.key_id:
                raise AccessDenied(
                    "this server has no cluster key and can't prove that it is of your cluster; set the same "
                    "key on both sides, or none"
                )
            self.principal = self._certified or OPEN
            return None
        if not hello.key_id:
            raise AccessDenied(f"not authenticated: this server serves only members of its cluster; {ADVICE}")
        is_sized = len(hello.nonce) == NONCE_BYTES and len(hello.tenant.encode()) <= MAX_TENANT_BYTES
        if not is_sized or hello.role not in [role.value for role in Role]:
            raise ProtocolError("its greeting is invalid")
        found = self._keys.find(Role(hello.role), hello.tenant, hello.key_id)
        if found is None:
            raise AccessDenied(
                "not authenticated: the key is not (any longer) of this cluster, or not of that role"
            )
        self._challenged = found, hello.nonce
        return Challenge(self._nonce, _mac(found, b"server", hello.nonce, self._nonce, self._binding))

    def prove(self, proof: Proof) -> Principal:
        """Check the client's proof; raises AccessDenied for another key or principal's certificate."""
        if self._challenged is None or self.principal is not None:
            raise ProtocolError("it sent an unexpected proof")
        credential, nonce = self._challenged
        expected = _mac(credential, b"client", nonce, self._nonce, self._binding)
        if not hmac.compare_digest(expected, proof.proof):
            raise AccessDenied("not authenticated: the proof is invalid")
        principal = Principal(credential.role, credential.tenant)
        if self._certified is not None and not _agree(self._certified, principal):
            raise AccessDenied(f"its certificate is that of {self._certified}, its key that of {principal}")
        self.principal = principal
        return principal


def _agree(certified: Principal, proven: Principal) -> bool:
    """Whether certificate and key agree. With a certificate without a role (a client's), the key decides."""
    return certified == Principal(Role.CLIENT) or certified == proven
