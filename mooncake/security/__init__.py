"""Who a process is to others of its cluster, and how it proves it: the table ``[security]`` of every role.

Two ways, alone or together: TLS with certificates of the cluster's authority, or a cluster key that is
proven by challenge and response before anything else is read. Either of them says in which ``Role`` a peer
speaks, and for which tenant. ``keys.py`` knows the secrets, ``greeting.py`` the challenge, ``signed.py`` the
signature of an HTTP request, ``door.py`` who may ask an HTTP server, ``certificates.py`` what a certificate
says, ``identity.py`` the settings.

A process has one identity, and everything that listens or connects in it uses that one unless it is handed
another: so a server that somebody adds later is closed without anybody having to think of it.
"""

from mooncake.security.door import HttpDoor
from mooncake.security.identity import Identity, SecuritySettings, install, of_tool, ours
from mooncake.security.keys import Credential, KeyRing
from mooncake.security.listening import check_address, is_loopback, keep_defaults_of, warn_if_open
from mooncake.security.signed import HEADER, Signer, Verifier
from mooncake.security.standing import (
    ADMINS,
    EVERYBODY,
    NODES,
    NODES_AND_ADMINS,
    OPEN,
    TRUSTED,
    Access,
    Role,
    Standing,
)

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
    "HttpDoor",
    "Identity",
    "KeyRing",
    "Role",
    "SecuritySettings",
    "Signer",
    "Standing",
    "Verifier",
    "check_address",
    "install",
    "is_loopback",
    "keep_defaults_of",
    "of_tool",
    "ours",
    "warn_if_open",
]
