# SPDX-License-Identifier: Apache-2.0
"""Runs the roles of a cluster as actors of Ray: ``mooncake up --on ray``.

Ray places the actors and restarts those that end, ``supervisor.py`` decides when a role is started, as it
does on one host, and each actor runs one role's process (``role_host.py``). Control roles are placed on
this host, where their files are; node daemons on Ray nodes of their own; workers where their resources are.
An actor that comes back on another host has another address: the plan is made anew, the gateway learns of
moved workers, and a role whose command names an address that is gone is started again.

What passes through Ray are commands, addresses and logs. Keys are read from files on each host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import mooncake
from mooncake.cli.ports import RolePlace
from mooncake.cli.processes import Processes, RolePlan
from mooncake.cli.role_host import Report, RoleHost
from mooncake.cli.supervisor import RoleExited, RoleReady, RoleState
from mooncake.errors import InvalidArgument, Unavailable
from mooncake.rpc.client import split_address
from mooncake.security import SecuritySettings, check_address

RESERVED_WITHIN_S = 60.0
"""How long Ray may take to reserve the resources of all roles, and then to start an actor."""
NODE_CPUS = 0.01
"""A node daemon does almost nothing; a bundle must have some resource."""
RETRY_S = 0.5
LAST_LOG_S = 1.0
"""How long the end of an ended role's log is waited for; its actor stays longer."""
PATIENCE_S = 5.0
"""An actor that has had no place for so long is announced."""
CALL_TIMEOUT_S = 10.0
LOST = -int(signal.SIGKILL)
"""The status of a role that is gone with its actor or its host."""

Kind = Literal["control", "node", "prefill", "decode"]


class RayRole(RoleHost):
    """``RoleHost`` as an actor: at the address of its Ray node, with its log beside Ray's own."""

    def __init__(self, role: str) -> None:
        context = ray.get_runtime_context()
        logs = Path(context.get_temp_dir()) / context.get_session_name() / "logs"
        super().__init__(role, ray.util.get_node_ip_address(), logs)


class RayCluster:
    """The connection to a Ray cluster, with what is reserved there. A context manager.

    Args:
        address: of its head, or ``auto``.
        security: credentials of all roles, with absolute paths.
        resources: of each prefill and decode worker.

    Raises:
        Unavailable: there is no such cluster, or its head does not answer.
        InvalidArgument: the address is neither ``auto`` nor ``host:port``.
    """

    def __init__(
        self, address: str, security: SecuritySettings, resources: Mapping[Kind, Mapping[str, float]]
    ) -> None:
        self._security = security
        self._resources = resources
        self._groups: list[Any] = []
        self._last_failure: dict[str, str] = {}
        self.actors: dict[str, Any] = {}
        self.num_ports: dict[str, int] = {}
        self.places: dict[str, RolePlace] = {}
        try:
            if address != "auto":  # Ray itself would try for minutes
                socket.create_connection(split_address(address), CALL_TIMEOUT_S).close()
            ray.init(
                address=address,
                namespace=f"mooncake-{secrets.token_hex(4)}",
                log_to_driver=False,
                logging_level="WARNING",
            )
        except (OSError, RayError, RuntimeError, ValueError) as error:
            raise Unavailable(
                f"no Ray cluster answers at {address} ({error}); start one with `ray start --head`, or name "
                "its head with --ray-address"
            ) from error

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self.actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()

    @property
    def num_nodes(self) -> int:
        """Number of Ray nodes that are alive."""
        return sum(bool(node["Alive"]) for node in ray.nodes())

    async def place_all(self, roles: Sequence[tuple[str, Kind, int]]) -> None:
        """Reserve resources, create an actor per role, and learn its place.

        ``roles``: of each its name, its kind, and the number of its ports.

        Raises:
            Unavailable: Ray has no room for them, or can't start their actors.
            InvalidArgument: a host can't run our roles; without a credential, other hosts could reach them.
        """
        nodes = [{"CPU": NODE_CPUS} for _, kind, _ in roles if kind == "node"]
        self._reserve("node daemons", nodes, "STRICT_SPREAD")
        workers = [dict(self._resources[kind]) for _, kind, _ in roles if kind in self._resources]
        self._reserve("workers", workers, "SPREAD")
        bundles = {"node": iter(range(len(nodes))), "worker": iter(range(len(workers)))}
        for name, kind, num_ports in roles:
            self.num_ports[name] = num_ports
            self.actors[name] = self._create(name, kind, bundles)
        for name in self.actors:
            try:
                async with asyncio.timeout(RESERVED_WITHIN_S):
                    report = await self.place(name)
            except TimeoutError as error:
                reason = self._last_failure.get(name, "Ray has not started it")
                raise Unavailable(
                    f"the actor of {name} does not run after {RESERVED_WITHIN_S:.0f} s ({reason}); every "
                    f"host of the Ray cluster needs mooncake {mooncake.__version__} with the extra `ray`"
                ) from error
            if report.refusal:
                raise InvalidArgument("--on", "ray", f"hosts that can run our roles ({report.refusal})")
            self.places[name] = report.place
        check_address(sorted({place.host for place in self.places.values()}))

    def _reserve(self, what: str, bundles: list[dict[str, float]], strategy: str) -> None:
        group = placement_group(bundles, strategy=strategy)
        self._groups.append(group)
        if not group.wait(RESERVED_WITHIN_S):
            free = {name: amount for name, amount in ray.available_resources().items() if ":" not in name}
            raise Unavailable(
                f"Ray has no room for {len(bundles)} {what} ({strategy}): wanted {bundles}, "
                f"free on {self.num_nodes} nodes: {free}"
            )

    def _create(self, name: str, kind: Kind, bundles: Mapping[str, Iterator[int]]) -> Any:
        amounts: Mapping[str, float] = self._resources.get(kind, {"CPU": NODE_CPUS if kind == "node" else 0})
        strategy: Any
        if kind == "control":
            here = ray.get_runtime_context().get_node_id()
            strategy = NodeAffinitySchedulingStrategy(here, soft=False)
        else:
            group = self._groups[0 if kind == "node" else 1]
            index = next(bundles["node" if kind == "node" else "worker"])
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        further = {one: amount for one, amount in amounts.items() if one not in ("CPU", "GPU", "memory")}
        options: dict[str, Any] = {
            "name": f"mooncake-{name}",
            "num_cpus": amounts.get("CPU", 0),
            "num_gpus": amounts.get("GPU", 0),
            "resources": further,
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": strategy,
        }
        if "memory" in amounts:
            options["memory"] = amounts["memory"]
        return ray.remote(RayRole).options(**options).remote(name)

    async def place(self, name: str) -> Report:
        """Where the role's actor is now, which may take until Ray has restarted it, with free ports there."""
        while True:
            taken = {port for other, one in self.places.items() if other != name for port in one.ports}
            try:
                report: Report = await self.actors[name].place.remote(
                    self.num_ports[name],
                    self.places.get(name),
                    taken,
                    self._security,
                    mooncake.__version__,
                )
            except RayActorError as error:
                self._last_failure[name] = str(error).strip().splitlines()[-1][:500]
                await asyncio.sleep(RETRY_S)
                continue
            now_taken = {port for other, one in self.places.items() if other != name for port in one.ports}
            if report.refusal or not now_taken & {*report.place.ports}:
                return report


class RayRoles(Processes):
    """The roles of a cluster as actors, kept running until they are to stop. A context manager.

    Args:
        cluster: with every role placed.
        plan: makes the plans from the roles' places, with commands that are arguments of ``mooncake``.
        admin_key: the gateway's.
        log_folder: for copies of all logs.

    The others: see ``Processes``.
    """

    def __init__(
        self,
        cluster: RayCluster,
        plan: Callable[[Mapping[str, RolePlace]], dict[str, RolePlan]],
        admin_key: str,
        log_folder: Path,
        say: Callable[[str, str, Sequence[str]], None],
        changed: Callable[[], None],
        all_ready: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._admin_key = admin_key
        plans = plan(cluster.places)
        super().__init__(list(plans.values()), log_folder, say, changed, all_ready)
        self._pids: dict[str, int] = {}
        self._started_as: dict[str, tuple[str, ...]] = {}  # commands of running roles, as ``_named`` has them
        self._known: dict[str, str] = {}  # addresses of instances as the running gateway knows them
        self._has_moved = asyncio.Event()
        self._secret_files: dict[str, Path] = {}

    def __enter__(self) -> RayRoles:
        for plan in self.plans.values():
            if plan.secrets:
                path = self._log_folder / f".{plan.name}.secrets"
                path.unlink(missing_ok=True)
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    json.dump(dict(plan.secrets), file)
                self._secret_files[plan.name] = path
        return self

    def __exit__(self, *error: object) -> None:
        for path in self._secret_files.values():
            path.unlink(missing_ok=True)

    async def run(self) -> int:
        informing = asyncio.get_running_loop().create_task(self._inform_gateway())
        try:
            return await super().run()
        finally:
            informing.cancel()

    def pid(self, name: str) -> int | None:
        """On the role's host."""
        return self._pids.get(name)

    # -- one life of a role --------------------------------------------------------------------------

    def _signal(self, name: str, number: signal.Signals) -> None:
        actor, is_stopping = self._cluster.actors[name], self.supervisor.is_stopping
        if name in self._pids and number != signal.SIGKILL:
            actor.signal.remote(int(number))
            return
        if is_stopping or name in self._started_as:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=is_stopping)
        self._lives[name].cancel()  # its host may be gone

    async def _live(self, plan: RolePlan) -> None:
        status, name = LOST, plan.name
        try:
            status = await self._start_and_wait(name)
        except asyncio.CancelledError:
            pass
        except InvalidArgument as error:
            self._say(name, f"cannot be started ({error})", ())
            status = 1
        except RayActorError:
            where = self._cluster.places[name].host
            self._say(name, f"its actor on {where} is gone; Ray places it again", ())
        except (RayError, OSError) as error:  # raised by the actor: the program can't be started
            self._say(name, f"cannot be started ({str(error).splitlines()[-1]})", ())
            status = 1
        self._pids.pop(name, None)
        self._started_as.pop(name, None)
        self._driver.post(RoleExited(name, status))

    async def _start_and_wait(self, name: str) -> int:
        self._log_starts[name] = self._log_size(name)
        await self._find_place(name)
        actor, plan = self._cluster.actors[name], self.plans[name]
        self._started_as[name] = self._named(plan)
        secrets_file = str(self._secret_files.get(name, ""))
        self._pids[name] = await actor.start.remote(replace(plan, secrets={}), secrets_file)
        if plan.follows:
            self._known = {other: self.plans[other].address for other in plan.follows}
            self._has_moved.set()
        self._changed()
        loop = asyncio.get_running_loop()
        probing = loop.create_task(self._probe(plan))
        copying = loop.create_task(self._copy_log(name))
        try:
            status: int = await actor.end.remote()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_LOG_S):
                    await asyncio.shield(copying)
            return status
        finally:
            probing.cancel()
            copying.cancel()

    def _log_size(self, name: str) -> int:
        path = self.log_path(name)
        return path.stat().st_size if path.exists() else 0

    async def _find_place(self, name: str) -> None:
        """Learn where the role's actor is now, and what follows from a new address.

        Raises:
            InvalidArgument: no role can run on that host.
        """
        asked = asyncio.get_running_loop().create_task(self._cluster.place(name))
        try:
            done, _ = await asyncio.wait([asked], timeout=PATIENCE_S)
            if not done:
                self._say(name, "waits until Ray has placed its actor", ())
            report = await asked
        finally:
            asked.cancel()
        if report.refusal:
            raise InvalidArgument("--on", "ray", f"hosts that can run our roles ({report.refusal})")
        if report.place == self._cluster.places[name]:
            return
        self._cluster.places[name] = report.place
        self.plans = self._plan(self._cluster.places)
        self._say(name, f"is at {self.plans[name].address} from now on", ())
        for other, command in [*self._started_as.items()]:
            if other != name and command != self._named(self.plans[other]):
                self._say(other, f"restarts, because {name} has another address", ())
                self._signal(other, signal.SIGKILL)

    def _named(self, plan: RolePlan) -> tuple[str, ...]:
        """Its command, with names in place of addresses that it can learn while it runs."""
        names = {self.plans[name].address: name for name in plan.follows}
        return tuple(names.get(word, word) for word in plan.command)

    async def _probe(self, plan: RolePlan) -> None:
        with contextlib.suppress(RayError):
            if await self._cluster.actors[plan.name].serves.remote():
                self._driver.post(RoleReady(plan.name))
                self._has_moved.set()

    async def _copy_log(self, name: str) -> None:
        """Append the role's log to the copy here until the role has ended."""
        offset, path = 0, self.log_path(name)
        with contextlib.suppress(RayError):
            while True:
                part: bytes | None = await self._cluster.actors[name].log.remote(offset)
                if part is None:
                    break
                with path.open("ab") as log:
                    log.write(part)
                offset += len(part)

    # -- the gateway ---------------------------------------------------------------------------------

    async def _inform_gateway(self) -> None:
        """Tell the gateway of instances that serve at another address than the one it knows."""
        while True:
            await self._has_moved.wait()
            self._has_moved.clear()
            for gateway in [plan for plan in self.plans.values() if plan.follows]:
                for name in gateway.follows:
                    before, present = self._known.get(name), self.plans[name].address
                    if before in (None, present) or self.supervisor.roles[name].state is not RoleState.READY:
                        continue
                    kind = "decode" if name.startswith("decode") else "prefill"
                    if await self._tell(gateway, "add", kind, present) and await self._tell(
                        gateway, "remove", kind, str(before)
                    ):
                        self._known[name] = present
                        self._say(gateway.name, f"knows {name} at {present}", ())
                    else:
                        asyncio.get_running_loop().call_later(1.0, self._has_moved.set)

    async def _tell(self, gateway: RolePlan, what: str, kind: str, instance: str) -> bool:
        """Whether the gateway did it. It is called at its operators' port on the loopback of this host."""
        port = self._cluster.places[gateway.name].ports[1]
        body = json.dumps({"type": kind, "instance": instance}).encode()
        head = f"POST /instances/{what} HTTP/1.0\r\nContent-Type: application/json\r\n"
        head += f"X-API-Key: {self._admin_key}\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(head.encode() + body)
                    status = (await reader.readline()).split(b" ")[1:2]
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        # A removal is done as well where the instance is unknown.
        return status == [b"200"] or (what == "remove" and status == [b"404"])
