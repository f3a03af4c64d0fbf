# SPDX-License-Identifier: Apache-2.0
"""Runs the process of one role where a scheduler has placed it: the remote half of ``ray_roles.py``.

One object runs one process, once. It reports an address with free ports of its host, starts the role's
command as a child, reports when it serves, and returns its log. When the child has ended by itself, so does
this process, shortly after it has answered: whatever scheduled it starts it again, here or elsewhere.
Knows nothing of Ray, and nothing of other roles. Secrets are read from a file of this host, so that no
argument carries them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import IO

import mooncake
from mooncake.cli.ports import RolePlace, everywhere, free_ports
from mooncake.cli.processes import RolePlan, is_serving
from mooncake.errors import MooncakeError
from mooncake.security import Identity, SecuritySettings
from mooncake.security.http_auth import HttpClientAuth

PORTS_FREE_WITHIN_S = 10.0
"""How long the ports of the process before may still be in use."""
LEAVES_AFTER_S = 2.0
"""Time in which the caller learns the exit status and reads the end of the log."""
POLL_S = 0.1
LOG_WAIT_S = 10.0
LOG_BYTES = 256 << 10


@dataclass(frozen=True)
class Report:
    """What a host offers to a role."""

    place: RolePlace
    refusal: str = ""
    """Why no role can run there."""


class RoleHost:
    """The process of ``role`` on this host, at its address ``host``; its log is a file in ``log_folder``."""

    def __init__(
        self, role: str, host: str, log_folder: Path, leave: Callable[[], None] = lambda: os._exit(1)
    ) -> None:
        """``leave`` ends this process so that it is started again."""
        self.role = role
        self.host = host
        self.log_path = log_folder / f"mooncake-{role}-{os.getpid()}.log"
        self._leave = leave
        self._log: IO[bytes] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._plan: RolePlan | None = None
        self._caller: HttpClientAuth | None = None
        self._end: asyncio.Task[int] | None = None
        self._stays = False

    async def place(
        self,
        num_ports: int,
        former: RolePlace | None,
        besides: Collection[int],
        security: SecuritySettings,
        version: str,
    ) -> Report:
        """The address of this host with free ports, not those in ``besides``; the ``former`` if possible.

        The role that runs here, if any, is no longer wanted: it is killed, and this process ends.
        """
        if self._end is not None:
            await self.signal(signal.SIGKILL)
            self._leave()
            await asyncio.Event().wait()  # the caller asks the process that replaces this one
        if version != mooncake.__version__:
            refusal = f"{self.host} has mooncake {mooncake.__version__}, not {version}: install the same"
            return Report(RolePlace(self.host, ()), refusal)
        try:
            self._caller = HttpClientAuth(Identity(security))
            if former is not None and former.host == self.host and await _becomes_free(former):
                return Report(former)
            ports = free_ports(everywhere(self.host), num_ports, Random(), besides)
        except MooncakeError as error:
            return Report(RolePlace(self.host, ()), f"{self.host}: {error}")
        return Report(RolePlace(self.host, tuple(ports)))

    async def start(self, plan: RolePlan, secrets_file: str) -> int:
        """Start the role and return its process id. The file: JSON with more environment variables, or "".

        Raises:
            OSError: the program can't be started, or a file can't be used.
        """
        assert self._end is None, "one object runs one process"
        secrets = _read_secrets(secrets_file) if secrets_file else {}
        command = (sys.executable, "-m", "mooncake", *plan.command, "--parent", str(os.getpid()))
        child = self._spawn(command, {**plan.environment, **secrets})
        self._plan, self._child = plan, child
        self._end = asyncio.get_running_loop().create_task(self._live(child))
        return child.pid

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # Not with Ray's own variables: they may have its credential, which no role needs.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        # Other users may write to the folder: the file is a new one, and never opened by its name again.
        self.log_path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._log = os.fdopen(os.open(self.log_path, flags, 0o600), "rb")
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**ours, **environment},
            process_group=0,
        )

    async def _live(self, child: subprocess.Popen[bytes]) -> int:
        # Not asyncio's subprocesses: those depend on the kind of the loop, and on who handles SIGCHLD.
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(child.pid)
        try:
            loop.add_reader(descriptor, has_ended.set)
            await has_ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        status = child.wait()
        if not self._stays:
            loop.call_later(LEAVES_AFTER_S, self._leave)
        return status

    async def serves(self) -> bool:
        """Wait until the role serves; False when it has ended."""
        assert self._plan is not None and self._end is not None and self._caller is not None
        while not self._end.done():
            if await is_serving(self._plan.host, self._plan.port, self._plan.ready, self._caller):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def end(self) -> int:
        """Wait for the end of the role; its exit status, negative when a signal ended it."""
        assert self._end is not None, "start() first"
        return await asyncio.shield(self._end)

    async def log(self, offset: int) -> bytes | None:
        """A part of the role's log from byte ``offset`` on; None at the end of that of a role that has ended.

        Waits for one while the role runs, for a limited time: b"" is no end.
        """
        assert self._end is not None and self._log is not None, "start() first"
        until = asyncio.get_running_loop().time() + LOG_WAIT_S
        while True:
            is_over = self._end.done()
            part = os.pread(self._log.fileno(), LOG_BYTES, offset)
            if is_over and not part:
                return None
            if part or asyncio.get_running_loop().time() > until:
                return part
            await asyncio.sleep(POLL_S)

    async def signal(self, number: int) -> None:
        """Send a signal to the role, after which this process stays when the role has ended."""
        self._stays = True
        if self._child is None or self._child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._child.pid, number)
            else:
                self._child.send_signal(number)


def _read_secrets(path: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(Path(path).read_text())
    return found


async def _becomes_free(place: RolePlace) -> bool:
    """Whether its ports are free, or soon are: the process before may just be ending."""
    until = asyncio.get_running_loop().time() + PORTS_FREE_WITHIN_S
    while not place.is_free():
        if asyncio.get_running_loop().time() > until:
            return False
        await asyncio.sleep(POLL_S)
    return True
