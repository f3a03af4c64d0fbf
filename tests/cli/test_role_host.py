# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import pytest

import mooncake
from mooncake.cli.ports import RolePlace
from mooncake.cli.processes import HttpCheck, RolePlan
from mooncake.cli.role_host import RoleHost
from mooncake.cli.supervisor import RoleSpec
from mooncake.security import SecuritySettings

pytestmark = pytest.mark.processes

T = TypeVar("T")
OPEN = SecuritySettings()
HOST = "127.0.0.1"


async def soon(result: Awaitable[T]) -> T:
    async with asyncio.timeout(60):
        return await result


def of_process(pid: int, what: str) -> bytes:
    return Path(f"/proc/{pid}/{what}").read_bytes()


class Subject(RoleHost):
    """A host of the smallest role that notes when it would end its process."""

    def __init__(self, folder: Path) -> None:
        self.has_left = asyncio.Event()
        super().__init__("metadata", HOST, folder, self.has_left.set)

    async def placed(self, former: RolePlace | None = None, security: SecuritySettings = OPEN) -> RolePlace:
        report = await self.place(2, former, [], security, mooncake.__version__)
        assert not report.refusal
        return report.place

    async def started(self, *flags: str, secrets_file: str = "") -> int:
        port = (await self.placed()).ports[0]
        command = ("metadata", "--host", HOST, "--port", str(port), *flags)
        plan = RolePlan(RoleSpec("metadata"), command, HOST, port, HttpCheck("/health"), {"SHOWN": "yes"})
        return await self.start(plan, secrets_file)

    async def logs(self, word: bytes) -> bool:
        """Wait until the role has logged this; False when it has ended without."""
        found = b""
        while word not in found and (part := await self.log(len(found))) is not None:
            found += part
        return word in found

    async def whole_log(self) -> bytes:
        """The log of a role that has ended."""
        found = b""
        while (part := await soon(self.log(len(found)))) is not None:
            found += part
        return found


@pytest.fixture
async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    found = Subject(tmp_path)
    yield found
    await found.signal(signal.SIGKILL)


async def test_a_place_has_free_ports_and_is_kept(subject: Subject) -> None:
    place = await subject.placed()
    assert place.host == HOST and len({*place.ports}) == 2
    assert await subject.placed(former=place) == place
    moved = await subject.placed(former=RolePlace("10.0.0.1", place.ports))
    assert moved.host == HOST
    report = await subject.place(1, None, [*range(20_000, 32_000)], OPEN, mooncake.__version__)
    assert report.refusal or not {*report.place.ports} & {*range(20_000, 32_000)}


async def test_a_host_that_cannot_run_the_role_is_refused_with_the_reason(
    subject: Subject, tmp_path: Path
) -> None:
    report = await subject.place(1, None, [], OPEN, "0.0.0")
    assert "install the same" in report.refusal and mooncake.__version__ in report.refusal
    key = tmp_path / "cluster.key"
    security = SecuritySettings(cluster_key_file=str(key))
    report = await subject.place(1, None, [], security, mooncake.__version__)
    assert str(key) in report.refusal and report.refusal.startswith(HOST)


async def test_a_role_serves_dies_and_is_to_be_placed_again(subject: Subject, tmp_path: Path) -> None:
    secrets_file = tmp_path / "secrets"
    secrets_file.write_text(json.dumps({"ADMIN_API_KEY": "swordfish"}))
    os.environ["RAY_CREDENTIAL_OF_A_TEST"] = "x"
    try:
        pid = await subject.started(secrets_file=str(secrets_file))
    finally:
        del os.environ["RAY_CREDENTIAL_OF_A_TEST"]
    assert await soon(subject.serves())
    environment = of_process(pid, "environ")
    assert b"ADMIN_API_KEY=swordfish" in environment and b"SHOWN=yes" in environment
    assert b"RAY_" not in environment
    assert b"swordfish" not in of_process(pid, "cmdline")
    assert os.getpgid(pid) == pid
    assert subject.log_path.stat().st_mode & 0o077 == 0

    assert await soon(subject.logs(b"ready"))  # written after the first answer
    os.kill(pid, signal.SIGKILL)
    assert await soon(subject.end()) == -signal.SIGKILL
    assert b"ready" in await subject.whole_log()
    assert not await subject.serves()
    await soon(subject.has_left.wait())


async def test_a_role_that_is_stopped_stays_stopped(subject: Subject) -> None:
    await subject.started()
    assert await soon(subject.serves())
    await subject.signal(signal.SIGTERM)
    assert await soon(subject.end()) == 0
    await subject.signal(signal.SIGTERM)
    assert not subject.has_left.is_set()


async def test_refused_settings_are_in_the_log(subject: Subject) -> None:
    await subject.started("--no-such-flag")
    assert await soon(subject.end()) == 2
    assert b"--no-such-flag" in await subject.whole_log()


async def test_who_asks_for_a_place_again_has_given_up_the_role(subject: Subject) -> None:
    pid = await subject.started()
    assert await soon(subject.serves())
    asking = asyncio.create_task(subject.placed())
    assert await soon(subject.end()) == -signal.SIGKILL
    await soon(subject.has_left.wait())
    assert not asking.done()
    asking.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
