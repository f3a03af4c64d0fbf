"""Who a process is to others of its cluster, and how it proves it: the table ``[security]`` of every role.

Two ways, alone or together: TLS with certificates of the cluster's authority, or a cluster key that is
proven by challenge and response before anything else is read. Either of them says in which ``Role`` a peer
speaks, and for which tenant. ``keys.py`` knows the secrets, ``greeting.py`` the challenge,
``request_signature.py`` the signature of an HTTP request, ``http_auth.py`` who may ask an HTTP server,
``certificates.py`` what a certificate says, ``identity.py`` the settings.

A process has one identity, and everything that listens or connects in it uses that one unless it is handed
another: so a server that somebody adds later is closed without anybody having to think of it.
"""

from mooncake.security.http_auth import HttpAuth
from mooncake.security.identity import (
    Identity,
    SecuritySettings,
    install_identity,
    process_identity,
    tool_identity,
)
from mooncake.security.keys import Credential, KeyRing
from mooncake.security.listen_address import check_address, is_loopback, keep_upstream_defaults, warn_if_open
from mooncake.security.principal import (
    ADMINS,
    EVERYBODY,
    NODES,
    NODES_AND_ADMINS,
    OPEN,
    TRUSTED,
    Access,
    Principal,
    Role,
)
from mooncake.security.request_signature import HEADER, Signer, Verifier

__all__ = [
    "ADMINS",
    "EVERYBODY",
    "HEADER",
    "NODES",
    "NODES_AND_ADMINS",
    "OPEN",
    "TRUSTED",
    "Access",
    "Credential",
    "HttpAuth",
    "Identity",
    "KeyRing",
    "Principal",
    "Role",
    "SecuritySettings",
    "Signer",
    "Verifier",
    "check_address",
    "install_identity",
    "is_loopback",
    "keep_upstream_defaults",
    "process_identity",
    "tool_identity",
    "warn_if_open",
]
