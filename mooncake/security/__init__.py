# SPDX-License-Identifier: Apache-2.0
"""Authentication between the processes of a cluster: the table ``[security]`` of every role.

There are two ways, alone or together: TLS with certificates of the cluster's authority, or a cluster key that
is proven by challenge and response before anything else is read. Either of them determines a peer's ``Role``
and tenant. ``keys.py`` owns the secrets, ``greeting.py`` the challenge,
``request_signature.py`` the signature of an HTTP request, ``http_auth.py`` access to an HTTP server,
``principal.py`` roles and the name in a certificate, ``identity.py`` the settings.

A process has one identity, and everything that listens or connects in it uses that one unless it is passed
another: so a server that is added later requires authentication by default.
"""

from mooncake.security.http_auth import HttpAuth
from mooncake.security.identity import (
    Identity,
    SecuritySettings,
    check_address,
    install_identity,
    is_loopback,
    keep_upstream_defaults,
    process_identity,
    show_remaining,
    tool_identity,
    warn_if_open,
)
from mooncake.security.keys import Credential, KeyRing
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
    "show_remaining",
    "tool_identity",
    "warn_if_open",
]
