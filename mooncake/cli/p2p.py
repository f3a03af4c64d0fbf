# SPDX-License-Identifier: Apache-2.0
"""``mooncake p2p``: serve, load and list checkpoints and weights on the command line.

``serve`` is a peer that goes on; ``register``, ``drop`` and ``get --at`` command one. ``get --peer`` is a
peer of its own for as long as it runs, and needs no other process on its host.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from mooncake.cli.output import fail, print_json, read_size, size_text
from mooncake.cli.role_command import run_until_stopped
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.log import setup_logging
from mooncake.p2p import LoadProgress, P2pSettings, P2PStore, VersionInfo
from mooncake.p2p import messages as m
from mooncake.p2p.manifest import is_digest
from mooncake.p2p.swarm_peers import is_peer_address
from mooncake.rpc import BlockingClient
from mooncake.security import NODES, tool_identity

At = Annotated[
    str,
    typer.Option(
        "--at", metavar="HOST:PORT", envvar="MOONCAKE_P2P_AT", help="Address of the peer that is commanded."
    ),
]
HERE = "127.0.0.1:7300"
ASK_S = 10.0
REGISTER_S = 24 * 3600.0
POLL_S = 0.2
LIST_S = 2.0
"""Time for each of the other peers that `list` asks."""
MAX_ASKED = 256
"""Peers that `list` asks."""
NUM_ASKED_AT_ONCE = 32


def make_application() -> typer.Typer:
    application = typer.Typer(
        no_args_is_help=True, help="Spread checkpoints and weights between hosts, without a master."
    )
    for name, command, example in (
        ("register", register, "mooncake p2p register my-model checkpoints/step-100"),
        ("get", get, "mooncake p2p get my-model models/step-100 --peer 10.0.0.1:7300"),
        ("list", list_versions, "mooncake p2p list --at 10.0.0.1:7300"),
        ("drop", drop, "mooncake p2p drop my-model"),
    ):
        application.command(name, epilog=f"Example: {example}")(command)
    return application


def register(
    name: Annotated[str, typer.Argument(help="Name under which it is found.")],
    folder: Annotated[str, typer.Argument(help="Folder below the root of that peer.")],
    number: Annotated[int, typer.Option(min=0, help="Number of the version; 0 takes the next one.")] = 0,
    base: Annotated[
        str,
        typer.Option("--base", metavar="DIGEST", help="Version to make a delta from, if not the latest two."),
    ] = "",
    at: At = HERE,
) -> None:
    """Serve a folder of a peer's host as a new version of a name."""
    if base and not is_digest(base):
        raise InvalidArgument("--base", base, "a digest of 64 hexadecimal digits, as list shows it")
    reply = _ask(at, m.CommandRegister(name, folder, number, base), REGISTER_S)
    _print_version(reply.version)


def get(
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Name, and number or digest.")],
    folder: Annotated[str, typer.Argument(help="Folder to make; it must not exist.")],
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer", metavar="HOST:PORT", help="Load from this peer and those it knows; repeatable."
        ),
    ] = None,
    at: Annotated[
        str,
        typer.Option("--at", metavar="HOST:PORT", help="Command the peer there, instead of being one."),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on, for other peers.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    limit_rate: Annotated[
        str, typer.Option("--limit-rate", metavar="SIZE", help="Bytes per second to send; 0: no limit.")
    ] = "0",
    serves: Annotated[
        bool, typer.Option("--serve", help="Go on serving it to others when it is loaded, until Ctrl-C.")
    ] = False,
) -> None:
    """Load a version into a folder, from all peers that have parts of it; resume if it was interrupted."""
    name, digest, number = _version(name)
    if bool(at) == bool(peers):
        raise InvalidArgument("get", f"{len(peers or [])} peers", "--peer (one or more), or --at")
    if at:
        _get_there(at, name, folder, digest, number)
        return
    settings = P2pSettings(
        host=host,
        port=port,
        peers=tuple(peers or ()),
        limit_rate_bytes=read_size(limit_rate, "--limit-rate"),
    )

    target = Path(folder).absolute()
    found: list[VersionInfo | None] = []

    async def load(_: P2pSettings) -> None:
        async with P2PStore(settings) as store:
            with _progress() as (progress, task):
                info = await store.get(
                    name,
                    target,
                    digest=digest,
                    number=number,
                    progress=lambda one: _show(progress, task, one),
                )
            found.append(info)
            if info is not None:
                _print_version(info)
            if info is not None and serves:
                print(f"serving at {store.address} until Ctrl-C", file=sys.stderr)
                await asyncio.Event().wait()

    setup_logging("warning")
    run_until_stopped(load, settings)
    if not found:  # interrupted
        raise SystemExit(130)
    if found[0] is None:
        fail(f"no peer has such a version of {name}; `mooncake p2p list` shows what is there")


def list_versions(
    prefix: Annotated[str, typer.Argument(help="Only names with this prefix.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    at: At = HERE,
) -> None:
    """List the versions that a peer and the peers it knows have."""
    found: dict[str, dict[str, VersionInfo]] = {}
    question = m.AskVersions(prefix, False, "")
    replies = {at: _ask(at, question)}
    asked, silent = {at: None}, list[str]()
    with ThreadPoolExecutor(NUM_ASKED_AT_ONCE) as threads:
        while replies:
            for address, reply in replies.items():
                for info in m.valid_versions(reply.versions if isinstance(reply, m.Versions) else ()):
                    found.setdefault(info.digest, {})[address] = info
            named = [
                one for reply in replies.values() if isinstance(reply, m.Versions) for one in reply.peers
            ]
            fresh = [one for one in dict.fromkeys(named) if one not in asked and is_peer_address(one)]
            fresh = fresh[: MAX_ASKED - len(asked)]
            asked |= dict.fromkeys(fresh)
            answers = threads.map(lambda one: _asked_other(one, question), fresh)
            replies = {one: answer for one, answer in zip(fresh, answers, strict=True) if answer is not None}
            silent += [one for one in fresh if one not in replies]
    if silent:
        print(f"no answer from peers that others named: {', '.join(silent)}", file=sys.stderr)
    rows = [(next(iter(holders.values())), holders) for holders in found.values()]
    rows.sort(key=lambda row: (row[0].name, row[0].number))
    if as_json:
        print_json(
            [
                {
                    "name": info.name,
                    "number": info.number,
                    "digest": info.digest,
                    "size_bytes": info.size_bytes,
                    "peers": {
                        address: one.num_have / max(1, one.num_chunks) for address, one in holders.items()
                    },
                }
                for info, holders in rows
            ]
        )
        return
    for info, holders in rows:
        num_whole = sum(one.num_have == one.num_chunks for one in holders.values())
        parts = f", {len(holders) - num_whole} in part" if num_whole < len(holders) else ""
        _print_version(info, f", {num_whole} whole{parts}")


def drop(
    name: Annotated[str, typer.Argument(metavar="NAME[@DIGEST]", help="Name, and digest if not all.")],
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete its folder, too, if it was loaded.")
    ] = False,
    at: At = HERE,
) -> None:
    """Stop serving a version, or all versions of a name, at one peer."""
    name, digest, number = _version(name)
    if number:
        raise InvalidArgument("NAME", f"{name}@{number}", "a name, or a name and a digest")
    reply = _ask(at, m.CommandDrop(name, digest, delete), REGISTER_S)
    if not reply.digests:
        fail(f"{at} has no version of {name}")
    for one in reply.digests:
        print(f"dropped {name}@{one}")


def _get_there(at: str, name: str, folder: str, digest: str, number: int) -> None:
    info = _ask(at, m.CommandGet(name, folder, digest, number), REGISTER_S).version
    with _progress() as (progress, task):
        while True:
            state = _ask(at, m.AskProgress(folder))
            if state.error:
                fail(state.error)
            _show(progress, task, state)
            if state.is_complete:
                break
            time.sleep(POLL_S)
    _print_version(info)


def _version(text: str) -> tuple[str, str, int]:
    """Name, digest ("") and number (0) in ``NAME``, ``NAME@7`` or ``NAME@<digest>``."""
    name, at, version = text.partition("@")
    if not at:
        return name, "", 0
    if is_digest(version):
        return name, version, 0
    if version.isdecimal() and 0 < int(version) < 1 << 62:
        return name, "", int(version)
    raise InvalidArgument("NAME", text, "NAME, NAME@ and a number, or NAME@ and a digest of 64 digits")


def _ask(address: str, message: Any, timeout_s: float = ASK_S) -> Any:
    """Ask a peer; a refusal ends the program with its reason."""
    reply = _answer(address, message, timeout_s)
    if isinstance(reply, m.Declined):
        fail(reply.reason)
    return reply


def _answer(address: str, message: Any, timeout_s: float) -> Any:
    client = BlockingClient(
        address, m.REPLIES, "the peer", is_patient=False, identity=tool_identity(), servers=NODES
    )
    try:
        return client.call(message, timeout_s)
    finally:
        client.close()


def _asked_other(address: str, message: m.AskVersions) -> Any:
    """The answer of a peer that another one named; None without one: it may have ended since."""
    try:
        return _answer(address, message, LIST_S)
    except (MooncakeError, OSError, ValueError):
        return None


def _print_version(info: VersionInfo, more: str = "") -> None:
    print(f"{info.name}@{info.digest}  version {info.number}, {size_text(info.size_bytes)}{more}")
    for delta in info.deltas:
        print(f"  delta from {delta.base[:12]}: {size_text(delta.size_bytes)}")


@contextmanager
def _progress() -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on standard error, shown only in a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[peers]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        yield progress, progress.add_task("loading", total=None, peers="")


def _show(progress: Progress, task: TaskID, one: LoadProgress) -> None:
    peers = f"{one.num_peers} peers"
    progress.update(task, total=one.size_bytes or None, completed=one.have_bytes, peers=peers)
