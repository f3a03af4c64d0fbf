"""The greeting of a connection: challenge and response in both directions, as a core without I/O.

The side that connects says which key it has and a fresh random number; the side that listens answers with
one of its own and proves that it has the key too; then the first side proves it. Every proof covers both
numbers, the direction, the role, the tenant, the version of the protocol and the *binding*: what kind of
server is asked, and with TLS which certificate it shows. So no proof serves twice, in the other direction,
for another role, or in the hands of somebody who passes it on to a server that was not meant. The key itself
never travels. A greeting is told apart from everything that comes after it by its place, and is small:
nothing else is read from a peer that has not ended it.
"""

from __future__ import annotations

import hmac

import msgspec

from mooncake.errors import AccessDenied, ProtocolError
from mooncake.security.keys import MAX_TENANT_BYTES, Credential, KeyRing
from mooncake.security.principal import OPEN, Principal, Role

MAX_GREETING_BYTES = 512
"""Of each frame before the greeting has ended."""
NONCE_BYTES = 32
VERSION = b"mooncake-rpc-3"

ADVICE = "give it the cluster's key (`--cluster-key-file`, MOONCAKE_SECURITY_CLUSTER_KEY_FILE)"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """What every client says first. All fields are empty where it has no key."""

    role: str = ""
    tenant: str = ""
    key_id: bytes = b""
    nonce: bytes = b""


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """The server's random number, and its proof."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    """The client's proof. Not answered: the next thing that is answered is a request."""

    proof: bytes


def binding_of(is_peer: bool, certificate: bytes) -> bytes:
    """What both sides know of the server without being told.

    Args:
        is_peer: it is one that any process may run (an engine); else one of those that serve the cluster.
        certificate: the SHA-256 of what it shows in TLS; empty without TLS.
    """
    return (b"peer" if is_peer else b"cluster") + certificate


def _mac(credential: Credential, side: bytes, asking: bytes, answering: bytes, binding: bytes) -> bytes:
    tenant = credential.tenant.encode()
    words = (VERSION, side, credential.role.value.encode(), len(tenant).to_bytes(2, "big") + tenant)
    # The numbers have one length, so what is bound can't be taken for a part of them.
    return hmac.digest(credential.key, b"\0".join(words) + asking + answering + binding, "sha256")


class ClientGreeting:
    """The side that connects. ``nonce``: fresh and random. ``binding`` is set before the challenge comes."""

    def __init__(self, credential: Credential | None, nonce: bytes, binding: bytes = b"") -> None:
        assert len(nonce) == NONCE_BYTES
        self.binding = binding
        self._credential = credential
        self._nonce = nonce
        self.is_over = credential is None
        """Requests may be sent."""

    def hello(self) -> Hello:
        if self._credential is None:
            return Hello()
        one = self._credential
        return Hello(one.role.value, one.tenant, one.key_id, self._nonce)

    def prove(self, challenge: Challenge) -> Proof:
        """Raises AccessDenied: the server has another key."""
        if self.is_over or self._credential is None:
            raise ProtocolError("it sent a challenge that nobody waits for")
        if len(challenge.nonce) != NONCE_BYTES:
            raise ProtocolError("its challenge has the wrong size")
        expected = _mac(self._credential, b"server", self._nonce, challenge.nonce, self.binding)
        if not hmac.compare_digest(expected, challenge.proof):
            raise AccessDenied("it can't prove that it has the cluster's key; it is another than was meant")
        self.is_over = True
        return Proof(_mac(self._credential, b"client", self._nonce, challenge.nonce, self.binding))


class ServerGreeting:
    """The side that listens.

    Args:
        keys: None where no key is asked for.
        nonce: fresh and random.
        certified: what the peer's certificate says, where there is TLS.
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
        self._asked: tuple[Credential, bytes] | None = None
        self.principal: Principal | None = None
        """None until the greeting is over."""

    def hello(self, hello: Hello) -> Challenge | None:
        """The challenge, or None where the greeting is over with this. Raises AccessDenied."""
        if self._asked is not None or self.principal is not None:
            raise ProtocolError("it greeted twice")
        if self._keys is None:
            if hello.key_id:
                raise AccessDenied(
                    "this server has no cluster key and can't prove that it is of your cluster; give it the "
                    "same key, or take yours away"
                )
            self.principal = self._certified or OPEN
            return None
        if not hello.key_id:
            raise AccessDenied(f"who are you? This server talks to members of its cluster only; {ADVICE}")
        is_sized = len(hello.nonce) == NONCE_BYTES and len(hello.tenant.encode()) <= MAX_TENANT_BYTES
        if not is_sized or hello.role not in [role.value for role in Role]:
            raise ProtocolError("its greeting can't be understood")
        found = self._keys.find(Role(hello.role), hello.tenant, hello.key_id)
        if found is None:
            raise AccessDenied("who are you? That key is not of this cluster (any more), or not of that role")
        self._asked = found, hello.nonce
        return Challenge(self._nonce, _mac(found, b"server", hello.nonce, self._nonce, self._binding))

    def prove(self, proof: Proof) -> Principal:
        """Raises AccessDenied: it has another key, or its certificate is of somebody else."""
        if self._asked is None or self.principal is not None:
            raise ProtocolError("it sent a proof that nobody asked for")
        credential, nonce = self._asked
        expected = _mac(credential, b"client", nonce, self._nonce, self._binding)
        if not hmac.compare_digest(expected, proof.proof):
            raise AccessDenied("who are you? That is no proof")
        principal = Principal(credential.role, credential.tenant)
        if self._certified is not None and not _agree(self._certified, principal):
            raise AccessDenied(f"its certificate is that of {self._certified}, its key that of {principal}")
        self.principal = principal
        return principal


def _agree(certified: Principal, proven: Principal) -> bool:
    """A certificate that names no role (it counts as a client's) leaves that to the key."""
    return certified == Principal(Role.CLIENT) or certified == proven
