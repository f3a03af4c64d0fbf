# SPDX-License-Identifier: Apache-2.0
"""The commands, with the module of each one's settings and entry point.

A package is imported only when its command runs: ``mooncake --help`` must not wait for torch.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import mooncake
from mooncake import config
from mooncake.cli.role_command import Invocation, ManyValues, add_command, config_file, run_until_stopped
from mooncake.config import LogSettings
from mooncake.security import SecuritySettings
from mooncake.tracing import TracingSettings


@dataclass(frozen=True)
class Command:
    """A subcommand: ``module`` has ``<Name>Settings`` and the function ``entry``.

    A coroutine function takes the settings and serves until cancelled; another one takes the invocation.
    """

    name: str
    module: str
    summary: str
    example: str
    entry: str = "serve"

    def settings_class(self) -> type:
        name = "".join(word.capitalize() for word in self.name.split("-"))
        found = getattr(importlib.import_module(self.module), f"{name}Settings")
        assert isinstance(found, type)
        return found

    def entry_point(self) -> Any:
        return getattr(importlib.import_module(self.module), self.entry)


COMMANDS = (
    Command(
        "up",
        "mooncake.cli.up",
        "Start a whole cluster on this host and keep it running.",
        "mooncake up --prefill 2 --decode 2 --port 8000",
        entry="up",
    ),
    Command(
        "chat",
        "mooncake.cli.chat",
        "Chat with a cluster in the terminal.",
        "mooncake chat --url http://127.0.0.1:8000",
        entry="chat",
    ),
    Command(
        "doctor",
        "mooncake.cli.doctor",
        "Find the broken link of a live KV cache deployment, ours or plain vLLM or SGLang servers.",
        "mooncake doctor --url http://127.0.0.1:8000 --master 127.0.0.1:50051",
        entry="doctor",
    ),
    Command(
        "gateway",
        "mooncake.cli.gateway_role",
        "Serve the OpenAI API and spread requests over workers.",
        "mooncake gateway --prefill 127.0.0.1:8101 127.0.0.1:8102 --decode 127.0.0.1:8201 --port 8000",
    ),
    Command(
        "epp",
        "mooncake.gateway.epp",
        "Pick the engine of each request for Envoy-based gateways (Gateway API Inference Extension).",
        "mooncake epp --endpoints 10.0.0.11:8000 10.0.0.12:8000 --model /models/qwen --port 9002",
    ),
    Command(
        "conductor",
        "mooncake.conductor.server",
        "Choose the workers of each request by their cached blocks and load.",
        "mooncake conductor --port 8400",
    ),
    Command(
        "worker",
        "mooncake.inference.worker",
        "Run the model for prefill or for decode.",
        "mooncake worker --role prefill --model smollm2 --port 8101",
    ),
    Command(
        "node",
        "mooncake.store.node.node",
        "Contribute this host's memory and SSD to the store.",
        "mooncake node --master 127.0.0.1:50051 --pool-size 64GiB",
    ),
    Command(
        "daemon",
        "mooncake.cli.store_roles",
        "Run a whole store in one process: master, memory, SSD (also called mooncaked).",
        "mooncake daemon --port 50051 --capacity-dram 256 --capacity-nvme 2000 --nvme-path /mnt/nvme",
        entry="serve_daemon",
    ),
    Command(
        "master",
        "mooncake.cli.store_roles",
        "Run the store's master, which keeps its metadata.",
        "mooncake master --port 50051",
        entry="serve_master",
    ),
    Command(
        "metadata",
        "mooncake.transfer.metadata_server",
        "Run the metadata service of transfer engines, which keeps their addresses.",
        "mooncake metadata --port 8080",
    ),
    Command(
        "certs",
        "mooncake.cli.certs",
        "Create a cluster's credentials: certificates, or a cluster key.",
        "mooncake certs --folder certs --name node-1 --host 10.0.0.1 node-1.example",
        entry="certs",
    ),
)

TRACE_COMMANDS = (
    (
        "simulate",
        "mooncake.cli.simulation.simulate",
        "Simulate a trace on virtual time; compare policies.",
        "mooncake simulate trace.jsonl --cluster 8P8D --policy overlap random --html report.html",
    ),
    (
        "plan",
        "mooncake.cli.simulation.plan",
        "Find the cheapest cluster for a trace and objectives.",
        "mooncake plan trace.jsonl --slo-ttft 30 --slo-tbt 0.1 --gpu-prices prices.toml",
    ),
    (
        "calibrate",
        "mooncake.cli.replay.calibrate",
        "Measure the costs of a live cluster, for the simulator.",
        "mooncake calibrate --url http://127.0.0.1:8000 --out costs.toml",
    ),
    (
        "replay",
        "mooncake.cli.replay.replay",
        "Replay a trace against a live cluster; compare with the prediction.",
        "mooncake replay trace.jsonl --url http://127.0.0.1:8000 --predict --costs costs.toml --cluster 2P2D",
    ),
    (
        "grade",
        "mooncake.cli.simulation.grade",
        "Grade predictions against measurements on GPUs.",
        "mooncake grade --fit-on measured.csv --test-on others.csv",
    ),
    (
        "what-if",
        "mooncake.cli.simulation.what_if",
        "Predict what a change to a running cluster would do.",
        "mooncake what-if --url http://127.0.0.1:8000 --decode 1",
    ),
)

FAKE_ENGINE = Command(
    "fake-engine",
    "mooncake.inference.fake_engine",
    "Run an engine without a model: real KV bytes, faults on request.",
    "mooncake dev fake-engine --master 127.0.0.1:50051 --port 8101 --fail-load-every 3",
)

P2P_SERVE = Command(
    "p2p",
    "mooncake.p2p.daemon",
    "Serve checkpoints and weights to peers, and load them from peers, without a master.",
    "mooncake p2p serve --root /models --host 10.0.0.2 --peers 10.0.0.1:7300 --limit-rate 500MB",
)

_NAMES = [command.name for command in COMMANDS]
KNOWN_ROLES = ["log", "security", "tracing", "transfer", *_NAMES, "fakeengine", "p2p", "deploy"]
"""Tables that a configuration file may have."""

DEPLOY_RENDER = Command(
    "deploy",
    "mooncake.cli.deploy",
    "Write the files that start a cluster in containers.",
    "mooncake deploy render --nodes 2 --model /models/smollm2 --out deploy",
    entry="render",
)

DOCS_OPENING = """\
# Configuration

Generated by `mooncake config --docs`; do not edit.

Flags beat the environment, which beats the file, which beats the default. The file is TOML (or JSON when its
name ends in `.json`), named by `--config` or `MOONCAKE_CONFIG`, with one table per role and the same names as
the flags, with underscores:

```toml
[node]
pool_size = "64GiB"
```

The flat `mooncake.json` of the existing package, with its own names instead of tables, is read, too:
`master_server_address` and `global_segment_size` become `master` and `pool_size`, and `root_fs_dir` and
`cluster_id` are those settings. Without the address, `master` comes from elsewhere, or is the default.

Sizes take suffixes: `64MiB` counts in powers of 1024, `256GB` in powers of 1000. Durations (`_s`) are
seconds. Port 0 takes a free port. Lists are repeated flags, or separated by commas in the environment.
`--print-config` shows every value and where it came from.

The tables `[log]`, `[security]` and `[tracing]` are those of every role. The flags of `[security]` are as
shown, those of `[log]` begin with `--log-`, those of `[tracing]` with `--tracing-`.

`[transfer]` is read by every role with a transfer engine (node, daemon, worker, p2p), by `mooncake store`, by
connectors inside other programs and by the classes with the existing package's names. Its flags begin with
`--transfer-`. What it sets precedes the own `host` and `advertise_host` of a role; a name or a port in it is
of one process. Parts of other programs take the environment, and the file that `MOONCAKE_CONFIG` names.
"""


def application_for(words: Sequence[str]) -> typer.Typer:
    """The command line, with the full flags of the one command that ``words`` select."""
    application = typer.Typer(
        epilog="Example: mooncake up --prefill 2 --decode 2 --port 8000",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    application.callback()(_start)
    selected = next((word for word in words if not word.startswith("-")), None)
    for command in COMMANDS:
        if command.name == selected:
            _add(application, command)
        else:
            application.command(command.name, help=command.summary)(_not_selected)
    application.command("config")(_config)
    application.command("topology")(_topology)
    _add_simulation(application, selected)
    application.command("explain", epilog="Example: mooncake explain cmpl-6f1c --url http://127.0.0.1:8000")(
        _explain
    )
    application.command("trace", epilog="Example: mooncake trace cmpl-6f1c --perfetto trace.json")(_trace)
    application.command("misses", epilog="Example: mooncake misses --url http://127.0.0.1:8000")(_misses)
    application.command("top", epilog="Example: mooncake top --url http://127.0.0.1:8000")(_top)
    benches = typer.Typer(no_args_is_help=True, help="Measure transfers against the limits of this machine.")
    benches.callback()(_start_bench)
    benches.command("transfer", epilog="Example: mooncake bench transfer --quick")(_bench_transfer)
    application.add_typer(benches, name="bench")
    _add_development(application, selected)
    if selected == "store":
        from mooncake.cli.store import make_application  # imported late, like every package

        application.add_typer(make_application(), name="store")
    else:
        application.command("store", help="Inspect and change the contents of the store.")(_not_selected)
    _add_p2p(application, selected)
    _add_deployment(application, selected)
    return application


def _add_development(application: typer.Typer, selected: str | None) -> None:
    """Add the tools for integrators: loaded only when selected."""
    tools = typer.Typer(no_args_is_help=True, help="Tools for connecting an engine.")
    tools.callback()(_start_development)
    if selected == "dev":
        _add(tools, FAKE_ENGINE)
    application.add_typer(tools, name="dev")


def _add_p2p(application: typer.Typer, selected: str | None) -> None:
    if selected == "p2p":
        tools = importlib.import_module("mooncake.cli.p2p").make_application()
        _add(tools, P2P_SERVE, "serve")
        application.add_typer(tools, name="p2p")
    else:
        summary = "Spread checkpoints and weights between hosts, without a master."
        application.command("p2p", help=summary)(_not_selected)


def _add_deployment(application: typer.Typer, selected: str | None) -> None:
    tools = typer.Typer(no_args_is_help=True, help="Start a cluster in containers.")
    tools.callback()(_start_deployment)
    if selected == "deploy":
        _add(tools, DEPLOY_RENDER, "render")
    application.add_typer(tools, name="deploy")


def _start_deployment() -> None:
    """Start a cluster in containers."""


def _start_development() -> None:
    """Tools for connecting an engine."""


def _add_simulation(application: typer.Typer, selected: str | None) -> None:
    """Add commands that take traces; numpy and the simulator are loaded only for the one that runs."""
    for name, module, summary, example in TRACE_COMMANDS:
        if selected == name:
            found = importlib.import_module(module)
            # Options that may be repeated also take several values at once.
            add = application.command(name, cls=ManyValues, epilog=f"Example: {example}")
            add(getattr(found, f"{name.replace('-', '_')}_command"))
        else:
            application.command(name, help=summary)(_not_selected)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(mooncake.__version__)
        raise typer.Exit


def _start(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """A KVCache-centric serving platform: prefill and decode disaggregated, one shared KV pool."""


def _start_bench() -> None:
    """Measure transfers against the limits of this machine."""


def _bench_transfer(
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the results as a JSON object to this file."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", help="Draw a plot into this file (needs the extra `plot`)."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three rounds instead of eleven.")] = False,
    paths: Annotated[
        list[str] | None, typer.Option("--path", help="Measure only this path; may be repeated.")
    ] = None,
    largest: Annotated[
        str, typer.Option("--largest", metavar="SIZE", help="Size of the largest transfer.")
    ] = "128MiB",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", help="Folder on the disk to be measured; by default that of temporary files."
        ),
    ] = None,
) -> None:
    """Measure every path between two processes beside the limits of this machine: bandwidth, times, processor
    time."""
    from mooncake.cli.bench import QUICK_ROUNDS, ROUNDS, bench_transfer

    bench_transfer(paths or [], QUICK_ROUNDS if quick else ROUNDS, largest, folder, json_file, plot_file)


def _topology(
    as_json: Annotated[
        bool, typer.Option("--json", help='Print {"cpu:0": [[preferred], [others]], ...} instead of tables.')
    ] = False,
    devices: Annotated[
        list[str] | None, typer.Option("--device", help="Use only this RDMA device; may be repeated.")
    ] = None,
    root: Annotated[str, typer.Option("--root", metavar="DIR", help="Mount point of sysfs.")] = "/sys",
) -> None:
    """Show which network cards are near which memory: NICs, NUMA nodes and GPUs of this host."""
    from mooncake.cli.topology import show_topology

    show_topology(root, as_json, devices or [])


def _explain(
    name: Annotated[
        str, typer.Argument(metavar="ID", help="The answer's id, or the request's X-Request-ID.")
    ],
    url: Annotated[str, typer.Option("--url", help="Address of the gateway.")] = "http://127.0.0.1:8000",
    admin_api_key: Annotated[
        str,
        typer.Option(
            "--admin-api-key", envvar="ADMIN_API_KEY", help="Needed for an id that the client chose."
        ),
    ] = "",
    api_key: Annotated[
        str, typer.Option("--api-key", help="The key of the request, where clients have keys.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the gateway's JSON answer unchanged.")
    ] = False,
) -> None:
    """Explain the routing of a request: what was weighed, predicted and measured, and why it missed."""
    from mooncake.cli.explain import explain

    explain(name, url, admin_api_key, as_json, api_key)


def _misses(
    url: Annotated[str, typer.Option("--url", help="Address of the gateway.")] = "http://127.0.0.1:8000",
    admin_api_key: Annotated[
        str, typer.Option("--admin-api-key", envvar="ADMIN_API_KEY", help="Shows all tenants.")
    ] = "",
    api_key: Annotated[str, typer.Option("--api-key", help="A client's key, which shows its tenant.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the gateway's JSON answer unchanged.")
    ] = False,
) -> None:
    """Show what became of prompts' tokens: hits, new ones, and avoidable misses by cause."""
    from mooncake.cli.explain import misses

    misses(url, admin_api_key, as_json, api_key)


def _trace(
    name: Annotated[
        str, typer.Argument(metavar="ID", help="The answer's id, or the request's X-Request-ID.")
    ],
    url: Annotated[str, typer.Option("--url", help="Address of the gateway.")] = "http://127.0.0.1:8000",
    admin_api_key: Annotated[
        str,
        typer.Option(
            "--admin-api-key", envvar="ADMIN_API_KEY", help="Needed for an id that the client chose."
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the gateway's JSON answer unchanged.")
    ] = False,
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", metavar="FILE", help="Write a file for ui.perfetto.dev instead."),
    ] = None,
) -> None:
    """Show what each process did for a request, and when: as a waterfall, or for Perfetto."""
    from mooncake.cli.trace import trace

    trace(name, url, admin_api_key, as_json, perfetto)


def _top(
    url: Annotated[str, typer.Option("--url", help="Address of the gateway.")] = "http://127.0.0.1:8000",
    master: Annotated[
        str,
        typer.Option(
            "--master",
            metavar="HOST:PORT",
            envvar="MOONCAKE_MASTER",
            help="Address of the store's master; each of several, separated by commas, is shown.",
        ),
    ] = "127.0.0.1:50051",
    admin_api_key: Annotated[
        str,
        typer.Option("--admin-api-key", envvar="ADMIN_API_KEY", help="Needed for instances and traffic."),
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    every_s: Annotated[
        float, typer.Option("--every-s", min=0.2, max=3600, help="Seconds between two looks.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON once, for programs.")] = False,
) -> None:
    """Show a whole cluster: instances, load, latencies, hits, and the store's nodes. Ctrl-C exits."""
    from mooncake.cli.top import top

    top(url, master, admin_api_key, once, as_json, every_s)


def _not_selected() -> None:
    raise AssertionError("only the selected command is built in full")


def _add(application: typer.Typer, command: Command, name: str = "") -> None:
    """Add a command, under another ``name`` if it belongs to a group."""

    def run(given: Invocation) -> None:
        entry = command.entry_point()
        if inspect.iscoroutinefunction(entry):
            run_until_stopped(entry, given.settings)
        else:
            entry(given)

    name = name or command.name
    add_command(application, name, command.settings_class(), run, command.example, KNOWN_ROLES, command.name)


def _config(
    file: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="Read this configuration file as the roles would."),
    ] = None,
    docs: Annotated[bool, typer.Option("--docs", help="Print docs/configuration.md instead.")] = False,
) -> None:
    """Show every setting of every role and the source of its value; invalid settings are named."""
    from mooncake.transfer import TransferSettings  # the native module: imported here, to keep --help fast

    classes = [
        LogSettings,
        SecuritySettings,
        TracingSettings,
        TransferSettings,
        *(command.settings_class() for command in (*COMMANDS, FAKE_ENGINE, P2P_SERVE, DEPLOY_RENDER)),
    ]
    if docs:
        print(config.render_docs(classes, DOCS_OPENING), end="")
        return
    path = config_file(file)
    tables: list[tuple[Any, dict[str, str]]] = [
        config.load(one, {}, os.environ, path, KNOWN_ROLES) for one in classes
    ]
    print("\n\n".join(config.describe(settings, origins) for settings, origins in tables))
