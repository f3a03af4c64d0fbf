# SPDX-License-Identifier: Apache-2.0
"""``mooncake_client``: one process per host that contributes memory and SSD, and gives workers an address.

The existing program's flags and defaults. That program also holds its workers' memory and moves their
bytes, which workers do themselves here; see ``compat/store/dummy_client.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import mooncake
from mooncake import clock
from mooncake.cli import print_and_exit, run_program
from mooncake.cli.role_command import run_until_stopped
from mooncake.compat.programs.gflags import NO_ARENA, parse_flags
from mooncake.compat.store.setup_arguments import SetupArguments, parse_size
from mooncake.errors import InvalidArgument, Unavailable
from mooncake.log import get_logger, setup_logging
from mooncake.security import check_address, keep_upstream_defaults

if TYPE_CHECKING:
    from mooncake.compat.store.store_session import StoreSession

log = get_logger(__name__)

MASTER_WAIT_S = 90.0
"""How long the program waits for its master, as the existing one does: launchers start both at once."""
BETWEEN_ATTEMPTS_S = 1.0

FLAGS: dict[str, Any] = {
    "host": "0.0.0.0",
    "port": 50052,
    "master_server_address": "127.0.0.1:50051",
    "metadata_server": "http://127.0.0.1:8080/metadata",
    "protocol": "tcp",
    "device_names": "",
    "global_segment_size": "4 GB",
    "local_buffer_size": "0",
    "threads": 1,
    "tenant_id": "default",
    "enable_offload": False,
    "offload_path": "",
    "start_offload_rpc_server": True,
    "enable_http_server": False,
    "http_port": 9300,
    "use_mmap_arena_allocator": False,
    "mmap_arena_pool_size": 8 << 30,
}
WITHOUT_EFFECT = {
    "threads": "bytes are moved by the threads of the transfer engine",
    "start_offload_rpc_server": "a client that reads from the SSD opens its file",
    "use_mmap_arena_allocator": NO_ARENA,
    "mmap_arena_pool_size": NO_ARENA,
}
HELP = """\
mooncake_client: contribute this host's memory and SSD to the store, for workers that call setup_dummy.

Example: mooncake_client --master_server_address=10.0.0.1:50051 --global_segment_size="64 GB" --port=50052

Flags take one dash or two, underscores or hyphens, and their value after = or a space:
"""


@dataclasses.dataclass(frozen=True)
class ClientOptions:
    """Arguments of ``setup`` and the port that result from the flags."""

    arguments: SetupArguments
    port: int
    """Port for requests of workers; a port in the host name is the transfer engine's."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the console script ``mooncake_client``."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "-help", "--help", "--helpfull", "--helpshort"} & set(given):
        print_and_exit("\n".join([HELP, *(f"  --{name}={default}" for name, default in FLAGS.items())]))
    if {"-version", "--version"} & set(given):
        print_and_exit(f"mooncake_client {mooncake.__version__}")
    run_program(lambda: _run(given))


def _run(given: Sequence[str]) -> None:
    setup_logging(role="client")
    keep_upstream_defaults("mooncake_client")
    run_until_stopped(_serve, read(given))


def read(given: Sequence[str]) -> ClientOptions:
    """Parse the command line.

    Raises:
        InvalidArgument: names the flag, the value and the allowed values.
    """
    values = parse_flags(given, FLAGS, os.environ)
    for name, reason in WITHOUT_EFFECT.items():
        if values[name] != FLAGS[name]:
            log.warning("flag_without_effect", flag=f"--{name}", reason=reason)
    sizes = {}
    for name in ("global_segment_size", "local_buffer_size"):
        try:
            sizes[name] = parse_size(values[name])
        except ValueError as error:
            raise InvalidArgument(f"--{name}", values[name], str(error)) from error
    if not 0 <= values["port"] < 65536:
        raise InvalidArgument("--port", values["port"], "0 to 65535")
    arguments = SetupArguments(
        values["host"],
        values["metadata_server"],
        sizes["global_segment_size"],
        sizes["local_buffer_size"],
        values["protocol"],
        values["device_names"],
        values["master_server_address"],
        enable_ssd_offload=values["enable_offload"],
        ssd_offload_path=values["offload_path"],
        tenant_id=values["tenant_id"],
        enable_client_http_server=values["enable_http_server"],
        client_http_port=values["http_port"],
    )
    return ClientOptions(arguments.checked(), values["port"])


async def _serve(options: ClientOptions) -> None:
    # Imported late: --help and flag errors should not wait for the native extension.
    from mooncake.compat.store.dummy_client import ACCESS, ClientInfo, ClientInfoRequest
    from mooncake.compat.transfer.transport_choice import split_host
    from mooncake.rpc import RpcServer
    from mooncake.transfer.host import reachable_host

    host, fixed = split_host(options.arguments.local_hostname)
    check_address(host)
    name = reachable_host(host) + (f":{fixed}" if fixed else "")
    arguments = dataclasses.replace(options.arguments, local_hostname=name)
    session = await _opened(arguments)
    client_info = ClientInfo(
        session.hostname,
        arguments.metadata_server,
        arguments.protocol,
        arguments.rdma_devices,
        arguments.master_server_addr,
        arguments.tenant_id,
    )
    server = RpcServer(
        {ClientInfoRequest: lambda _, __: client_info}, access=ACCESS, name="client", is_peer=True
    )
    try:
        port = await server.start(host, options.port)
        log.info("ready", role="client", address=f"{host}:{port}", segment=session.hostname)
        await asyncio.Event().wait()
    finally:
        await server.close()
        await asyncio.to_thread(session.close)


async def _opened(arguments: SetupArguments) -> StoreSession:
    """Open a session, and try again while the master can't be reached. Raises as ``open_session``."""
    from mooncake.compat.store.session_setup import open_session

    until = clock.monotonic() + MASTER_WAIT_S
    while True:
        try:
            return await asyncio.to_thread(open_session, arguments)
        except Unavailable as error:
            if clock.monotonic() + BETWEEN_ATTEMPTS_S >= until:
                raise
            log.warning("master_awaited", master=arguments.master_server_addr, reason=str(error))
        await asyncio.sleep(BETWEEN_ATTEMPTS_S)


if __name__ == "__main__":
    main()
