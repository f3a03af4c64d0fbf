"""How a process finds the store through the ``mooncake_client`` of its host.

In the existing package that process owns everything and workers only talk to it. Here memory is shared
between processes anyway, so a worker needs nothing but the words: it asks once which master and tenant
there are, and is an ordinary client from then on, also while the other process restarts.
"""

from __future__ import annotations

import msgspec

from mooncake.compat.store.setup_arguments import SetupArguments
from mooncake.errors import InvalidArgument
from mooncake.rpc import BlockingClient
from mooncake.security import EVERYBODY, TRUSTED, Access

ANSWER_S = 5.0


class ClientInfoRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask_client"):
    """What should a worker of this host know?"""


ACCESS = Access({ClientInfoRequest: EVERYBODY})


class ClientInfo(msgspec.Struct, frozen=True, array_like=True, tag="client_is"):
    """The words of the process's own ``setup``; ``hostname`` is the segment it contributes."""

    hostname: str
    metadata_server: str
    protocol: str
    device_names: str
    master_server_address: str
    tenant_id: str


def client_info(server_address: str) -> ClientInfo:
    """What the process at ``host:port`` says.

    Raises:
        Unavailable: there is none.
        InvalidArgument: that is no address.
    """
    client = BlockingClient(
        server_address, [ClientInfo], "mooncake_client", is_patient=False, servers=TRUSTED
    )
    try:
        answer: ClientInfo = client.call(ClientInfoRequest(), ANSWER_S)
        return answer
    finally:
        client.close()


def setup_arguments_from(told: ClientInfo, server_address: str, local_buffer_size: int) -> SetupArguments:
    """Of a worker that contributes no memory."""
    host = server_address.rpartition(":")[0]
    if not host:
        raise InvalidArgument("server_address", server_address, "host:port of a mooncake_client")
    return SetupArguments(
        "127.0.0.1",
        told.metadata_server,
        0,
        local_buffer_size,
        told.protocol,
        told.device_names,
        told.master_server_address,
        tenant_id=told.tenant_id,
    )
