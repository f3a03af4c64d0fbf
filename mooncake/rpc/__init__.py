# SPDX-License-Identifier: Apache-2.0
"""Small typed messages between processes: one request, one reply, a deadline on every call.

Message structs belong to the packages that exchange them (the store's are in ``store/messages.py``);
this one only frames, sends and dispatches them. Bytes of objects never travel here: they go
through ``mooncake.transfer``.
"""

from mooncake.rpc.client import AsyncClient, BlockingClient
from mooncake.rpc.limits import Limits
from mooncake.rpc.server import Call, Connection, RpcServer
from mooncake.rpc.wire import Failure

__all__ = ["AsyncClient", "BlockingClient", "Call", "Connection", "Failure", "Limits", "RpcServer"]
