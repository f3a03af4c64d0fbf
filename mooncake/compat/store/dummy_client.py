# SPDX-License-Identifier: Apache-2.0
"""How a process finds the store through the ``mooncake_client`` of its host.

In the existing package that process owns all memory and workers are its clients. Here memory is shared
between processes anyway, so a worker only needs the arguments of ``setup``: it requests master and tenant
once, and is an ordinary client from then on, also while the other process restarts.
"""

from __future__ import annotations

import msgspec

from mooncake.compat.store.setup_arguments import SetupArguments
from mooncake.errors import InvalidArgument
from mooncake.rpc import BlockingClient
from mooncake.security import EVERYBODY, TRUSTED, Access

REPLY_TIMEOUT_S = 5.0


class ClientInfoRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask_client"):
    """Request for the arguments of ``setup`` on this host."""


ACCESS = Access({ClientInfoRequest: EVERYBODY})


class ClientInfo(msgspec.Struct, frozen=True, array_like=True, tag="client_is"):
    """Arguments of the process's own ``setup``; ``hostname`` is the name of its segment."""

    hostname: str
    metadata_server: str
    protocol: str
    device_names: str
    master_server_address: str
    tenant_id: str


def client_info(server_address: str) -> ClientInfo:
    """Request the information of the process at ``host:port``.

    Raises:
        Unavailable: no process answers.
        InvalidArgument: not an address.
    """
    client = BlockingClient(
        server_address, [ClientInfo], "mooncake_client", is_patient=False, servers=TRUSTED
    )
    try:
        answer: ClientInfo = client.call(ClientInfoRequest(), REPLY_TIMEOUT_S)
        return answer
    finally:
        client.close()


def setup_arguments_from(info: ClientInfo, server_address: str, local_buffer_size: int) -> SetupArguments:
    """Arguments of ``setup`` for a worker that contributes no memory."""
    host = server_address.rpartition(":")[0]
    if not host:
        raise InvalidArgument("server_address", server_address, "host:port of a mooncake_client")
    return SetupArguments(
        "127.0.0.1",
        info.metadata_server,
        0,
        local_buffer_size,
        info.protocol,
        info.device_names,
        info.master_server_address,
        tenant_id=info.tenant_id,
    )
