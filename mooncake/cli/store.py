# SPDX-License-Identifier: Apache-2.0
"""``mooncake store``: the store on the command line and in scripts (``--json``).

The commands on objects (put, get, list, pin, remove), and those of operators: drain a node, verify what is
stored, repair its files, watch it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mooncake.cli.key_tree import drawn_tree, prefix_tree
from mooncake.cli.output import (
    fail,
    one_line,
    print_json,
    progress_bar,
    read_span,
    size_text,
    span_text,
    waiting,
    wide_console,
)
from mooncake.cli.store_board import board
from mooncake.errors import AccessDenied, InvalidArgument, Refusal
from mooncake.security import tool_identity
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.store import repair as repairing
from mooncake.store.master.prefix_counts import MAX_DEPTH
from mooncake.transfer import TransferEngine, transfer_from_environment
from mooncake.types import Tier

MASTER = typer.Option(
    "--master",
    metavar="HOST:PORT",
    envvar="MOONCAKE_MASTER",
    help="Address of the master; several separated by commas; etcd://, redis://, k8s:// for elected masters.",
)
Master = Annotated[str, MASTER]
Tenant = Annotated[
    str,
    typer.Option(
        "--tenant", help="Tenant, the namespace of the keys; without it that of a key bound to a tenant."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of objects.")]
Force = Annotated[bool, typer.Option("--force", help="Also objects that are leased at the moment.")]
HERE, DEFAULT = "127.0.0.1:50051", "default"
PIECE_BYTES = 16 << 20
"""Bytes of an input that are read at a time."""


@contextmanager
def opened(master: str, tenant: str = DEFAULT, timeout_s: float = 10.0) -> Iterator[Store]:
    identity = tool_identity()
    settings = StoreSettings(timeout_s, tenant=tenant)
    with (
        TransferEngine(transfer_from_environment().for_tool(), identity=identity) as engine,
        Store(master, engine, settings, identity) as store,
    ):
        store.connect()  # a user at a terminal must learn at once that no master listens there
        yield store


def make_application() -> typer.Typer:
    application = typer.Typer(no_args_is_help=True, help="Inspect and change the contents of the store.")
    for name, command, example in (
        ("put", put, "mooncake store put greeting hello.txt"),
        ("get", get, "mooncake store get greeting > hello.txt"),
        ("ls", ls, "mooncake store ls kv/ --tree --depth 2"),
        ("stat", stat, "mooncake store stat greeting"),
        ("rm", rm, "mooncake store rm --match '^kv/old-'"),
        ("pin", pin, "mooncake store pin greeting --for 30m"),
        ("unpin", unpin, "mooncake store unpin greeting"),
        ("drain", drain, "mooncake store drain node-1 --to node-2"),
        ("undrain", undrain, "mooncake store undrain 3"),
        ("verify", verify, "mooncake store verify --prefix kv/"),
        ("repair", repair, "mooncake store repair /var/lib/mooncake/master.oplog"),
        ("top", top, "mooncake store top"),
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
    ttl_s = read_span(pin_for, "--pin", "or hard") if pin_for and not is_hard else None
    policy = m.PutPolicy(replicas, soft_pin_ttl_s=ttl_s, is_hard_pinned=is_hard, is_durable=durable)
    name = "standard input" if str(file) == "-" else str(file)
    content = _content_of(file, lambda: _largest_object_bytes(master, tenant))
    if content is None:
        fail(
            f"{name} is larger than any object can be: than the largest segment of the store, or half of "
            "this machine's memory"
        )
    if not content:
        fail(f"{name} is empty; an object needs at least one byte")
    with opened(master, tenant, timeout_s=60.0) as store:
        before = None if replace else store.inspect([key])[0]
        with waiting(f"storing {size_text(len(content))}"):
            refusal = store.put(key, content, policy, replace=replace)
        if refusal is not None:
            fail(str(refusal))
        is_another = not replace and _is_another(store.inspect([key])[0], before, len(content))
    if is_another:
        shown = one_line(key, sys.stderr)
        print(f"{shown} exists and was left unchanged (--replace overwrites it)", file=sys.stderr)


def _is_another(found: m.ObjectStatus | None, before: m.ObjectStatus | None, size_bytes: int) -> bool:
    """Whether ``found`` after a put of ``size_bytes`` is not what was put: it was there ``before``, perhaps
    while it was being written, or another client stored it in between."""
    if found is None or found.is_writing:
        return False  # what was stored, by whomever, is gone
    return found.size_bytes != size_bytes or (before is not None and found.object_id == before.object_id)


def get(
    key: Annotated[str, typer.Argument(help="Key of the object.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; - is standard output.")
    ] = Path("-"),
    tenant: Tenant = DEFAULT,
    master: Master = HERE,
) -> None:
    """Fetch an object."""
    with opened(master, tenant, timeout_s=60.0) as store, waiting("fetching"):
        content = store.get(key)
    if content is None:
        fail(f"there is no {key!r}")
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
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of keys, or of prefixes.")] = 1000,
    is_long: Annotated[
        bool, typer.Option("--long", "-l", help="Also show sizes, replicas and uses.")
    ] = False,
    as_tree: Annotated[
        bool | None,
        typer.Option(
            "--tree/--flat",
            help="Show prefixes with their numbers of objects and bytes, or every key. By default prefixes "
            "in a terminal, and keys where the output is piped.",
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=0, max=MAX_DEPTH, help="Levels of prefixes to show.")] = 3,
    separator: Annotated[str, typer.Option(help="Text between two levels of a key.")] = "/",
    as_json: Json = False,
    tenant: Tenant = DEFAULT,
    master: Master = HERE,
) -> None:
    """List keys, or the prefixes of all keys as a tree."""
    if as_tree is None:
        as_tree = sys.stdout.isatty() and not is_long and not as_json
    if as_tree:
        with opened(master, tenant, timeout_s=60.0) as store:
            _show_prefixes(store, prefix, depth, limit, separator, as_json)
        return
    with opened(master, tenant) as store:
        keys = store.ask(m.ListKeys(prefix, limit + 1, store.settings.tenant)).keys
        has_more, keys = len(keys) > limit, keys[:limit]
        found = _inspect(store, keys) if is_long else {}
    if as_json:
        print_json(found if is_long else keys)
    elif is_long:
        Console(soft_wrap=True).print(_table(found))
    else:
        sys.stdout.write("".join(f"{one_line(key)}\n" for key in keys))
    if has_more:
        print(f"there are more than {limit}; --limit shows more", file=sys.stderr)


def _show_prefixes(store: Store, prefix: str, depth: int, limit: int, separator: str, as_json: bool) -> None:
    with waiting("counting keys"):
        found = store.ask(m.ListPrefixes(prefix, depth, limit, separator, store.settings.tenant))
        assert isinstance(found, m.Prefixes)
    root = prefix_tree(found.rows, prefix, separator)
    if as_json:
        print_json(root)
    else:
        Console(soft_wrap=True).print(drawn_tree(root))
    if found.num_folded:
        what = f"{found.num_folded} objects count at a prefix above their own"
        print(f"{what}, since there are more than {limit}; --limit shows more", file=sys.stderr)


def stat(keys: Keys, as_json: Json = False, tenant: Tenant = DEFAULT, master: Master = HERE) -> None:
    """Show all about objects: replicas, leases and pins, history."""
    with opened(master, tenant) as store:
        found = dict(zip(keys, store.inspect(keys), strict=True))
        stories = {key: store.ask(m.ObjectStory(key, store.settings.tenant)).lines for key in keys}
    if as_json:
        print_json(found)
    else:
        for key, one in found.items():
            lines = [key, *(f"  {line}" for line in _lines(one)), "  story:"]
            lines += [f"    {line}" for line in stories[key]] or ["    no history is kept"]
            print("\n".join(one_line(line) for line in lines))
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
            with waiting("removing"):
                removed: m.Removed = store.ask(m.RemoveMatching(match, force, store.settings.tenant))
            print(f"{removed.num_removed} removed")
            if removed.num_leased:
                fail(
                    f"leased objects stay: {removed.num_leased}" + ("" if force else "; --force removes them")
                )
            return
        outcomes = store.remove(keys, force)
    for key, outcome in zip(keys, outcomes, strict=True):
        if outcome is False:
            print(f"there is no {key!r}", file=sys.stderr)
        elif isinstance(outcome, Refusal):
            hint = "" if force else "; --force removes it"
            print(f"{one_line(key, sys.stderr)}: {outcome}{hint}", file=sys.stderr)
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
    ttl_s = read_span(span, "--for") if span else None
    with opened(master, tenant) as store:
        _say_missing(keys, store.pin(keys, ttl_s))


def unpin(keys: Keys, tenant: Tenant = DEFAULT, master: Master = HERE) -> None:
    """Allow eviction of objects again."""
    with opened(master, tenant) as store:
        _say_missing(keys, store.unpin(keys))


def _say_missing(keys: list[str], are_there: list[bool]) -> None:
    missing = [key for key, is_there in zip(keys, are_there, strict=True) if not is_there]
    if missing:
        fail(f"there is no {', '.join(map(repr, missing))}")


def _content_of(file: Path, largest_bytes: Callable[[], int]) -> bytes | None:
    """The content of a file or of standard input (``-``), which may have no end; None: it has more than
    ``largest_bytes()``, which is called when there is more than one piece.

    Raises:
        InvalidArgument: it can't be read.
    """
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as source:
            pieces = [source.read(PIECE_BYTES)]
            if len(pieces[0]) < PIECE_BYTES:
                return pieces[0]
            num_left = largest_bytes() - PIECE_BYTES
            if file.is_file() and str(file) != "-":  # without a second copy of its pieces
                return file.read_bytes() if file.stat().st_size <= num_left + PIECE_BYTES else None
            while num_left >= 0 and (piece := source.read(PIECE_BYTES)):
                pieces.append(piece)
                num_left -= len(piece)
    except OSError as error:
        raise InvalidArgument("FILE", str(file), f"a file that can be read ({error})") from error
    return b"".join(pieces) if num_left >= 0 else None


def _largest_object_bytes(master: str, tenant: str) -> int:
    """Size of the largest object that this store and this machine have room for."""
    own_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        with opened(master, tenant) as store:
            segments = [one.size_bytes for one in _status(store).segments if one.tier is Tier.MEMORY]
    except AccessDenied:  # a client may not query it
        segments = []
    return min([own_bytes, max(segments)]) if segments else own_bytes


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
        leased = span_text(one.leased_s) if one.leased_s else "-"
        cells: list[Any] = [size_text(one.size_bytes), str(one.num_uses), pin_text(one), leased]
        table.add_row(*cells, Text(one_line(places)), Text(one_line(key)))
    return table


def _lines(one: m.ObjectStatus | None) -> list[str]:
    if one is None:
        return ["not found"]
    lines = [
        f"size: {size_text(one.size_bytes)} ({one.size_bytes} bytes)",
        f"uses: {one.num_uses}; leased: {span_text(one.leased_s)}; pinned: {pin_text(one)}",
    ]
    lines += [f"group: {one.group}"] if one.group else []
    lines += [f"parent: {one.parent}"] if one.parent else []
    lines += ["being written"] if one.is_writing else []
    return lines + [f"replica: {replica_text(replica)}" for replica in one.replicas]


VERIFY_BATCH_KEYS = 64
LISTED_KEYS = 30_000
"""Number of keys to list at a time: half of what a message holds if all have the greatest length."""
POLL_EVERY_S = 0.2
TOP_EVERY_S = 1.0


def drain(
    segments: Annotated[
        list[str], typer.Argument(metavar="SEGMENT...", help="Segments to drain; `top` shows their names.")
    ],
    targets: Annotated[
        list[str] | None, typer.Option("--to", metavar="SEGMENT", help="Target segment; may be repeated.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=m.MAX_CONCURRENCY, help="Concurrent copies.")] = 4,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is done; Ctrl-C cancels it.")
    ] = True,
    as_json: Json = False,
    master: Master = HERE,
) -> None:
    """Move all objects of segments elsewhere, so that their node can be stopped."""
    with opened(master) as store:
        job = store.drain(segments, targets or [], concurrency)
        if isinstance(job, Refusal):
            fail(str(job))
        if wait:
            job = _wait(store, job)
        if as_json:
            print_json(job)
        elif not wait:
            print(f"job {job.job_id} is under way")
        elif job.state == "done":
            print(f"drained {job.about}: {job.num_done} moved, {size_text(job.moved_bytes)}")
        if wait and job.state != "done":
            what = f"job {job.job_id} {job.state}: {job.num_failed} failed, {job.num_left} left {job.reason}"
            if job.state == "failed" and store.cancel(job.job_id):
                what += f"; {job.about} takes objects again"
            fail(what)


def undrain(
    job: Annotated[int, typer.Argument(metavar="JOB", help="Number of the job, as `drain` prints it.")],
    master: Master = HERE,
) -> None:
    """Stop a drain, or undo one that has ended: its segments take objects again."""
    with opened(master) as store:
        found = store.job(job)
        if found is None or found.kind != "drain" or not store.cancel(job):
            fail(f"the master knows no drain with number {job}; one that has just begun to lead knows none")
        print(f"{found.about} takes objects again")


def _wait(store: Store, job: m.JobStatus) -> m.JobStatus:
    with progress_bar() as progress:
        task = progress.add_task(f"draining {job.about}", total=None)
        try:
            while job.state in ("waiting", "running"):
                progress.update(
                    task, completed=job.num_done, total=job.num_done + job.num_failed + job.num_left
                )
                time.sleep(POLL_EVERY_S)
                job = store.job(job.job_id) or fail(
                    f"the master no longer knows job {job.job_id}: it was restarted, or another one leads; "
                    f"{job.about} takes new objects again; start the drain again"
                )
            progress.update(task, completed=job.num_done, total=max(1, job.num_done + job.num_left))
        except KeyboardInterrupt:
            store.cancel(job.job_id)
            raise
    return job


def verify(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY...]", help="Keys of objects.")] = None,
    prefix: Annotated[str, typer.Option("--prefix", help="All keys with this prefix.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All objects of the tenant.")] = False,
    as_json: Json = False,
    tenant: Tenant = DEFAULT,
    master: Master = HERE,
) -> None:
    """Read every replica of objects and verify its bytes. Corrupt replicas are dropped."""
    if bool(keys) + bool(prefix) + everything != 1:
        raise InvalidArgument("verify", keys or prefix or "nothing", "keys, or --prefix, or --all")
    with opened(master, tenant, timeout_s=60.0) as store:
        verdicts: dict[str, bool | None] = {}
        num_keys = len(keys) if keys else _num_objects(store, prefix)
        waiting = iter(keys or _all_keys(store, prefix, num_keys))
        with progress_bar() as progress:
            task = progress.add_task("verifying", total=num_keys)
            while part := list(islice(waiting, VERIFY_BATCH_KEYS)):
                verdicts |= zip(part, store.verify(part), strict=True)
                progress.update(task, advance=len(part))
    wrong = [key for key, verdict in verdicts.items() if verdict is False]
    missing = [key for key, verdict in verdicts.items() if verdict is None]
    if as_json:
        print_json(verdicts)
    else:
        for key in wrong:
            print(f"wrong: {one_line(key)}")
        for key in missing if keys else ():
            print(f"not found: {one_line(key)}")
        gone = "" if keys else f", {len(missing)} removed meanwhile"
        print(f"{len(verdicts) - len(wrong) - len(missing)} good, {len(wrong)} wrong{gone}")
    if wrong or (keys and missing):
        raise SystemExit(1)


def _num_objects(store: Store, prefix: str) -> int:
    found: m.Prefixes = store.ask(m.ListPrefixes(prefix, 0, 1, tenant=store.settings.tenant))
    return sum(num_objects for _, num_objects, _ in found.rows)


def _all_keys(store: Store, prefix: str, num_keys: int) -> Iterator[str]:
    """All keys with a prefix, about ``num_keys``, in parts that fit into a message each."""
    num_parts = num_keys // LISTED_KEYS + 1
    for part in range(num_parts):
        listing = m.ListKeys(prefix, 1 << 31, store.settings.tenant, num_parts, part)
        yield from store.ask(listing).keys


def repair(
    path: Annotated[Path, typer.Argument(help="Oplog of a master, or directory of a node's SSD.")],
    does_it: Annotated[
        bool, typer.Option("--yes", help="Repair; without it, the repair is only shown.")
    ] = False,
) -> None:
    """Show what can be recovered of a damaged oplog or SSD index, and, with `--yes`, repair it.

    The original file is kept beside it. Stop the master, or the node, first.
    """
    with waiting(f"reading {path}"):
        what = repairing.plan(path)
    for line in what.lines():
        print(line)
    if not what.is_damaged:
        return
    if not does_it:
        print(f"nothing was changed; `mooncake store repair {path} --yes` does this")
        raise SystemExit(1)
    with waiting(f"repairing {path}"):
        repairing.repair(path)
    print("repaired")


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    as_json: Json = False,
    master: Master = HERE,
) -> None:
    """Show live status: nodes, tiers, and requests of clients. Ctrl-C exits."""
    console = wide_console()
    with opened(master) as store:
        before = _status(store)
        if as_json:
            print_json(msgspec.structs.asdict(before))
            return
        if once or not console.is_terminal:
            console.print(board(before, before, 0.0), soft_wrap=True)
            return
        taken_at = time.monotonic()
        with Live(board(before, before, 0.0), console=console, screen=True) as live:
            while True:
                time.sleep(TOP_EVERY_S)
                status, now = _status(store), time.monotonic()
                live.update(board(status, before, now - taken_at))
                before, taken_at = status, now


def _status(store: Store) -> m.MasterStatus:
    status = store.ask(m.GetMasterStatus())
    assert isinstance(status, m.MasterStatus)
    return status


def pin_text(found: m.ObjectStatus) -> str:
    if found.pinned_s is None:
        return "hard"
    return f"for {span_text(found.pinned_s)}" if found.pinned_s else "no"


def replica_text(one: m.ReplicaDetail) -> str:
    trouble = "" if one.is_complete else " (being written)"
    trouble += "" if one.is_alive else " (its node does not answer)"
    return f"{one.segment} [{one.tier}] at {one.address:#x}{trouble}"
