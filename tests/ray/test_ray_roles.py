# SPDX-License-Identifier: Apache-2.0
"""What follows when a role comes back at another address: ``RayRoles`` over role hosts inside this process.

``LocalActor`` stands for an actor: it replaces its ``RoleHost`` when that leaves, as Ray restarts an actor,
and fails the calls that were waiting. The roles are real processes. ``test_up_on_ray.py`` has real actors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mooncake.cli import role_host
from mooncake.cli.ports import RolePlace
from mooncake.cli.processes import HttpCheck, RolePlan
from mooncake.cli.role_host import RoleHost
from mooncake.cli.supervisor import RoleSpec, RoleState
from mooncake.errors import InvalidArgument, Unavailable
from mooncake.security import SecuritySettings

if TYPE_CHECKING:
    from mooncake.cli.ray_roles import RayRoles

pytestmark = pytest.mark.processes

HOST = "127.0.0.1"
ADMIN_KEY = "swordfish"


class LocalActor:
    def __init__(self, role: str, folder: Path) -> None:
        self._role, self._folder = role, folder
        self.num_lives = 0
        self._begin()

    def _begin(self) -> None:
        self.num_lives += 1
        self._has_left = asyncio.Event()
        life = self.num_lives
        self._host = RoleHost(
            *(self._role, HOST, self._folder), lambda: self.leave() if self.num_lives == life else None
        )

    def leave(self) -> None:
        """Ends as the process of an actor does, with its child, and begins anew."""
        self._has_left.set()
        child = self._host._child
        if child is not None and child.poll() is None:
            child.kill()
        self._begin()

    def __getattr__(self, method: str) -> Any:
        class Method:
            remote = staticmethod(partial(self._call, method))

        return Method

    def _call(self, method: str, *arguments: object) -> asyncio.Task[Any]:
        async def call() -> Any:
            from ray.exceptions import RayActorError

            left = asyncio.create_task(self._has_left.wait())
            asked = asyncio.create_task(getattr(self._host, method)(*arguments))
            try:
                await asyncio.wait([left, asked], return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    raise RayActorError
                return asked.result()
            finally:
                left.cancel()
                asked.cancel()

        return asyncio.create_task(call())


class World:
    """Roles ``a``, ``b`` with the address of ``a`` in its command, and ``c``, which follows ``a``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from mooncake.cli import ray_roles

        class LocalCluster(ray_roles.RayCluster):
            def __init__(self) -> None:
                self._security = SecuritySettings()
                self._resources, self._last_failure = {}, {}
                self._groups = []
                self.actors = {name: LocalActor(name, folder) for name in "abc"}
                self.num_ports = {"a": 1, "b": 1, "c": 2}
                self.places = {}

        monkeypatch.setattr("ray.kill", lambda actor, no_restart=True: actor.leave())
        self.cluster = LocalCluster()
        self.messages: list[str] = []
        self.has_changed = asyncio.Event()
        self._make: Callable[[], RayRoles] = lambda: ray_roles.RayRoles(
            *(self.cluster, self.plan, ADMIN_KEY, folder, self._say, self.has_changed.set, lambda: None)
        )
        self.roles: RayRoles

    async def begin(self) -> None:
        for name in self.cluster.actors:
            self.cluster.places[name] = (await self.cluster.place(name)).place
        self.roles = self._make()
        self._running = asyncio.create_task(self.roles.run())

    def plan(self, places: Mapping[str, RolePlace]) -> dict[str, RolePlan]:
        def one(name: str, role: str, *flags: str, ready: HttpCheck | None = None) -> RolePlan:
            port = places[name].ports[0]
            command = (role, "--host", HOST, "--port", str(port), *flags)
            return RolePlan(RoleSpec(name), command, HOST, port, ready)

        a = places["a"].address
        follower = one("c", "metadata", "--log-format", "json", ready=HttpCheck("/health"))
        follows = RolePlan(
            follower.spec, follower.command, HOST, follower.port, follower.ready, follows=("a",)
        )
        return {
            "a": one("a", "metadata", ready=HttpCheck("/health")),
            "b": one("b", "conductor", "--http-port", "0", "--pool-events", f"tcp://{a}"),
            "c": follows,
        }

    def _say(self, role: str, text: str, log_lines: Sequence[str]) -> None:
        self.messages += [f"{role}: {text}", *(f"{role} | {line}" for line in log_lines)]
        self.has_changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                self.has_changed.clear()
                await self.has_changed.wait()

    def are_ready(self) -> bool:
        return all(role.state is RoleState.READY for role in self.roles.supervisor.roles.values())

    async def end(self) -> int:
        if not self._running.done():
            self.roles.stop()
        async with asyncio.timeout(60):
            return await self._running


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(role_host, "PORTS_FREE_WITHIN_S", 0.5)
    monkeypatch.setattr(role_host, "LEAVES_AFTER_S", 0.5)
    found = World(tmp_path, monkeypatch)
    await found.begin()
    yield found
    await found.end()


async def test_a_role_that_dies_is_back_at_its_address(world: World) -> None:
    await world.until(world.are_ready)
    before = world.roles.plans["a"].address
    child = world.cluster.actors["a"]._host._child
    child.kill()
    await world.until(lambda: world.roles.supervisor.roles["a"].num_starts == 2 and world.are_ready())
    assert world.roles.plans["a"].address == before
    assert world.cluster.actors["a"].num_lives == 2, "the actor ended with its role"
    assert "a: died (killed by signal 9); restarting in 0.5 s" in world.messages
    assert any(line.startswith("a | ") for line in world.messages), "the end of its log"
    assert world.roles.supervisor.roles["b"].num_starts == 1
    assert b"ready" in world.roles.log_path("b").read_bytes()


async def test_a_role_that_moves(world: World) -> None:
    """Its port is taken meanwhile: who has the address is started again, who follows is informed."""
    await world.until(world.are_ready)
    calls: list[bytes] = []

    async def operators(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(await reader.readuntil(b"}"))
        # The first call fails, as that of a gateway that is just starting, and is repeated.
        writer.write(b"HTTP/1.0 503 no\r\n\r\n" if len(calls) == 1 else b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()

    operator_port = world.cluster.places["c"].ports[1]
    taken = world.cluster.places["a"].ports[0]
    before = world.roles.plans["a"].address
    async with await asyncio.start_server(operators, HOST, operator_port):
        child = world.cluster.actors["a"]._host._child
        child.kill()
        child.wait()
        async with await asyncio.start_server(lambda reader, writer: None, HOST, taken):
            await world.until(lambda: world.roles.plans["a"].address != before)
            await world.until(lambda: len(calls) == 3 and world.are_ready())
    after = world.roles.plans["a"].address
    assert "b: restarts, because a has another address" in world.messages
    assert world.roles.supervisor.roles["b"].num_starts == 2
    assert f"tcp://{after}" in world.roles.plans["b"].command
    assert world.roles.supervisor.roles["c"].num_starts == 1
    assert [call.split(b" ")[1] for call in calls] == [b"/instances/add"] * 2 + [b"/instances/remove"]
    assert after.encode() in calls[1] and before.encode() in calls[2]
    assert all(b"X-API-Key: swordfish" in call for call in calls)
    await world.until(lambda: f"c: knows a at {after}" in world.messages)


async def test_stopping_ends_every_process(world: World) -> None:
    await world.until(world.are_ready)
    children = [actor._host._child for actor in world.cluster.actors.values()]
    assert await world.end() == 0
    assert [child.poll() for child in children] == [0, 0, 0]
    assert {actor.num_lives for actor in world.cluster.actors.values()} == {1}


def test_an_address_without_a_ray_cluster_is_reported_at_once() -> None:
    from mooncake.cli.ray_roles import RayCluster

    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 .*ray start --head"):
        RayCluster("127.0.0.1:1", SecuritySettings(), {})
    with pytest.raises(InvalidArgument, match="host:port"):
        RayCluster("head", SecuritySettings(), {})


async def test_an_actor_that_does_not_start_is_no_endless_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RayActorError

    from mooncake.cli import ray_roles

    class NeverStarts:
        class place:
            @staticmethod
            async def remote(*arguments: object) -> None:
                raise RayActorError(error_msg="No module named 'mooncake'")

    world = World(tmp_path, monkeypatch)
    monkeypatch.setattr(ray_roles, "RESERVED_WITHIN_S", 2.0)
    monkeypatch.setattr(world.cluster, "_reserve", lambda *arguments: None)
    monkeypatch.setattr(world.cluster, "_create", lambda *arguments: NeverStarts)
    monkeypatch.setattr(world.cluster, "actors", {})
    with pytest.raises(Unavailable, match=r"actor of a .*No module named 'mooncake'"):
        await world.cluster.place_all([("a", "control", 1)])
