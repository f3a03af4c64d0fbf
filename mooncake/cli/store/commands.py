# SPDX-License-Identifier: Apache-2.0
"""The commands on objects, and the list of all of ``mooncake store``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mooncake.cli.store import display
from mooncake.errors import InvalidArgument, Refusal
from mooncake.security import tool_identity
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m

MASTER = typer.Option(
    "--master",
    metavar="HOST:PORT",
    envvar="MOONCAKE_MASTER",
    help="Address of the master; several separated by commas; etcd:// or redis:// for elected masters.",
)
Master = Annotated[str, MASTER]
Tenant = Annotated[str, typer.Option("--tenant", help="Tenant, the namespace of the keys.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of objects.")]
Force = Annotated[bool, typer.Option("--force", help="Also objects that are leased at the moment.")]
HERE, DEFAULT = "127.0.0.1:50051", "default"


@contextmanager
def opened(master: str, tenant: str = DEFAULT, timeout_s: float = 10.0) -> Iterator[Store]:
    with Store(master, settings=StoreSettings(timeout_s, tenant=tenant), identity=tool_identity()) as store:
        store.connect()  # a user at a terminal must learn at once that no master listens there
        yield store


def make_application() -> typer.Typer:
    from mooncake.cli.store import admin

    application = typer.Typer(no_args_is_help=True, help="Inspect and change the contents of the store.")
    for name, command, example in (
        ("put", put, "mooncake store put greeting hello.txt"),
        ("get", get, "mooncake store get greeting > hello.txt"),
        ("ls", ls, "mooncake store ls kv/ --long"),
        ("stat", stat, "mooncake store stat greeting"),
        ("rm", rm, "mooncake store rm --match '^kv/old-'"),
        ("pin", pin, "mooncake store pin greeting --for 30m"),
        ("unpin", unpin, "mooncake store unpin greeting"),
        ("drain", admin.drain, "mooncake store drain node-1 --to node-2"),
        ("verify", admin.verify, "mooncake store verify --prefix kv/"),
        ("repair", admin.repair, "mooncake store repair /var/lib/mooncake/master.oplog"),
        ("top", admin.top, "mooncake store top"),
    ):
        application.command(name, epilog=f"Example: {example}")(command)
    return application


def put(
    key: Annotated[str, typer.Argument(help="Key of the object.")],
    file: Annotated[Path, typer.Argument(help="File with its content; - reads standard input.")] = Path("-"),
    replicas: Annotated[
        int, typer.Option(min=1, max=64, help="Number of copies in memory, each on another node.")
    ] = 1,
    durable: Annotated[bool, typer.Option("--durable", help="Return when a copy is on SSD.")] = False,
    pin_for: Annotated[
        str, typer.Option("--pin", metavar="SPAN", help="Protect it from eviction: 30m, 2h, or `hard`.")
    ] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing object.")] = False,
    tenant: Tenant = DEFAULT,
    master: Master = HERE,
) -> None:
    """Store a file, or standard input, under a key."""
    is_hard = pin_for == "hard"
    ttl_s = display.read_span(pin_for, "--pin") if pin_for and not is_hard else None
    policy = m.PutPolicy(replicas, soft_pin_ttl_s=ttl_s, is_hard_pinned=is_hard, is_durable=durable)
    content = _content_of(file)
    if not content:
        display.fail(
            f"{'standard input' if str(file) == '-' else file} is empty; an object needs at least one byte"
        )
    with opened(master, tenant, timeout_s=60.0) as store:
        is_there = not replace and store.inspect([key])[0] is not None
        refusal = store.put(key, content, policy, replace=replace)
    if refusal is not None:
        display.fail(str(refusal))
    if is_there:
        print(f"{key} exists and was left unchanged (--replace overwrites it)", file=sys.stderr)


def get(
    key: Annotated[str, typer.Argument(help="Key of the object.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; - is standard output.")
    ] = Path("-"),
    tenant: Tenant = DEFAULT,
    master: Master = HERE,
) -> None:
    """Fetch an object."""
    with opened(master, tenant, timeout_s=60.0) as store:
        content = store.get(key)
    if content is None:
        display.fail(f"there is no {key!r}")
    if str(output) == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    try:
        output.write_bytes(content)
    except OSError as error:
        raise InvalidArgument("--output", str(output), f"a file that can be written ({error})") from error


def ls(
    prefix: Annotated[str, typer.Argument(help="Only keys with this prefix.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of keys.")] = 1000,
    is_long: Annotated[
        bool, typer.Option("--long", "-l", help="Also show sizes, replicas and uses.")
    ] = False,
    as_json: Json = False,
    tenant: Tenant = DEFAULT,
    master: Master = HERE,
) -> None:
    """List keys."""
    with opened(master, tenant) as store:
        keys = store.ask(m.ListKeys(prefix, limit + 1, tenant)).keys
        has_more, keys = len(keys) > limit, keys[:limit]
        found = _inspect(store, keys) if is_long else {}
    if as_json:
        display.print_json(found if is_long else keys)
    elif is_long:
        Console(soft_wrap=True).print(_table(found))
    else:
        sys.stdout.write("".join(f"{key}\n" for key in keys))
    if has_more:
        print(f"there are more than {limit}; --limit shows more", file=sys.stderr)


def stat(keys: Keys, as_json: Json = False, tenant: Tenant = DEFAULT, master: Master = HERE) -> None:
    """Show all about objects: replicas, leases and pins, history."""
    with opened(master, tenant) as store:
        found = dict(zip(keys, store.inspect(keys), strict=True))
        stories = {key: store.ask(m.ObjectStory(key, tenant)).lines for key in keys}
    if as_json:
        display.print_json(found)
    else:
        for key, one in found.items():
            print("\n".join([key, *(f"  {line}" for line in _lines(one)), "  story:"]))
            print("\n".join(f"    {line}" for line in stories[key]) or "    no history is kept")
    if None in found.values():
        raise SystemExit(1)


def rm(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY...]", help="Keys of objects.")] = None,
    match: Annotated[
        str, typer.Option("--match", metavar="REGEX", help="All keys that match this regular expression.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="All objects of the tenant.")] = False,
    force: Force = False,
    tenant: Tenant = DEFAULT,
    master: Master = HERE,
) -> None:
    """Remove objects."""
    if bool(keys) + bool(match) + everything != 1:
        raise InvalidArgument("rm", keys or match or "nothing", "keys, or --match, or --all")
    with opened(master, tenant) as store:
        if not keys:
            removed = store.remove_all(force) if everything else store.remove_matching(match, force)
            print(f"{removed} removed")
            return
        outcomes = store.remove(keys, force)
    for key, outcome in zip(keys, outcomes, strict=True):
        if outcome is False:
            print(f"there is no {key!r}", file=sys.stderr)
        elif isinstance(outcome, Refusal):
            print(f"{key}: {outcome}" + ("" if force else "; --force removes it"), file=sys.stderr)
    if any(outcome is not True for outcome in outcomes):
        raise SystemExit(1)


def pin(
    keys: Keys,
    span: Annotated[
        str,
        typer.Option(
            "--for", metavar="SPAN", help="Pin softly for this long: 30s, 10m, 2h; else until unpinned."
        ),
    ] = "",
    tenant: Tenant = DEFAULT,
    master: Master = HERE,
) -> None:
    """Protect objects from eviction."""
    ttl_s = display.read_span(span, "--for") if span else None
    with opened(master, tenant) as store:
        _say_missing(keys, store.pin(keys, ttl_s))


def unpin(keys: Keys, tenant: Tenant = DEFAULT, master: Master = HERE) -> None:
    """Allow eviction of objects again."""
    with opened(master, tenant) as store:
        _say_missing(keys, store.unpin(keys))


def _say_missing(keys: list[str], are_there: list[bool]) -> None:
    missing = [key for key, is_there in zip(keys, are_there, strict=True) if not is_there]
    if missing:
        display.fail(f"there is no {', '.join(map(repr, missing))}")


def _content_of(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise InvalidArgument("FILE", str(file), f"a file that can be read ({error})") from error


def _inspect(store: Store, keys: list[str]) -> dict[str, m.ObjectStatus]:
    found: dict[str, m.ObjectStatus] = {}
    for start in range(0, len(keys), m.MAX_KEYS):
        part = keys[start : start + m.MAX_KEYS]
        known = zip(part, store.inspect(part), strict=True)
        found |= {key: one for key, one in known if one is not None}
    return found


def _table(found: dict[str, m.ObjectStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("size", "uses", "pinned", "leased", "replicas", "key"):
        table.add_column(name, justify="right" if name in ("size", "uses") else "left", no_wrap=True)
    for key, one in found.items():
        places = ", ".join(f"{replica.segment} [{replica.tier}]" for replica in one.replicas)
        leased = display.span(one.leased_s) if one.leased_s else "-"
        cells: list[Any] = [display.size(one.size_bytes), str(one.num_uses), display.pinned(one), leased]
        table.add_row(*cells, Text(places), Text(key))
    return table


def _lines(one: m.ObjectStatus | None) -> list[str]:
    if one is None:
        return ["not found"]
    lines = [
        f"size: {display.size(one.size_bytes)} ({one.size_bytes} bytes)",
        f"uses: {one.num_uses}; leased: {display.span(one.leased_s)}; pinned: {display.pinned(one)}",
    ]
    lines += [f"group: {one.group}"] if one.group else []
    lines += [f"parent: {one.parent}"] if one.parent else []
    lines += ["being written"] if one.is_writing else []
    return lines + [f"replica: {display.replica(replica)}" for replica in one.replicas]
