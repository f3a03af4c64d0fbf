# SPDX-License-Identifier: Apache-2.0
"""Runs the roles of a one-host cluster as processes: the shell of ``supervisor.Supervisor``.

Every role is a child in a process group of its own, so that Ctrl-C in the terminal reaches the supervisor
alone, and is killed by the kernel when the supervisor dies, however that happens. A role's output goes
straight into its log file and not through us: a supervisor that is stopped or busy blocks no role. Readiness
is checked from outside, as a client would.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mooncake.cli.ports import host_and_port
from mooncake.cli.supervisor import (
    AllReady,
    AllStopped,
    Announce,
    Effect,
    KillRole,
    RoleExited,
    RoleReady,
    RoleSpec,
    StartAll,
    StartRole,
    StopAll,
    Supervisor,
    TerminateRole,
)
from mooncake.driver import Driver
from mooncake.security.http_auth import HttpClientAuth

PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 5.0
NUM_LAST_LINES = 12
LAST_BYTES = 16 << 10


@dataclass(frozen=True)
class HttpCheck:
    """Answers 200 on ``path``, with ``text`` in the body, once the role serves."""

    path: str
    text: str = ""
    port: int | None = None
    host: str | None = None
    """The address, when it is not the role's own."""
    over: Literal["member", "http", "https"] = "member"
    """How to connect: as a cluster member (TLS with our certificate where the cluster has it, signed where it
    has a key); without TLS; or over HTTPS without verifying the certificate."""


@dataclass(frozen=True)
class RolePlan:
    """How to run one role, and how to check whether it serves."""

    spec: RoleSpec
    command: tuple[str, ...]
    host: str
    port: int
    ready: HttpCheck | None = None
    """How to check that the role serves; None when an accepted connection is enough."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables set in addition to our own."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """More of them, whose values must appear in no argument, log or record."""
    follows: tuple[str, ...] = ()
    """Roles in its command; it can learn new addresses of these while it runs."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def address(self) -> str:
        return host_and_port(self.host, self.port)


class Processes:
    """The processes of a set of plans, kept running until they are to stop."""

    def __init__(
        self,
        plans: Sequence[RolePlan],
        log_folder: Path,
        say: Callable[[str, str, Sequence[str]], None],
        changed: Callable[[], None],
        all_ready: Callable[[], None],
        caller: HttpClientAuth | None = None,
    ) -> None:
        """``say(role, text, last_log_lines)`` informs the user, ``changed()`` is called after every change.

        ``caller``: how to connect for readiness checks; by default with this process's identity.
        """
        self.plans = {plan.name: plan for plan in plans}
        self.supervisor = Supervisor([plan.spec for plan in plans])
        self._log_folder = log_folder
        self._say = say
        self._changed = changed
        self._all_ready = all_ready
        self._caller = caller or HttpClientAuth()
        self._driver = Driver(self.supervisor, self._perform)
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._signals_to_send: dict[str, signal.Signals] = {}
        self._log_starts: dict[str, int] = {}  # offset in its log at which the role's present process begins
        self._finished: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Start everything and return the exit status once everything has stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        # `nohup` starts a program with this signal ignored, so that it outlives its terminal.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.stop)
        self._finished = loop.create_future()
        self._driver.post(StartAll())
        try:
            return await self._finished
        finally:
            self._driver.close()

    def stop(self) -> None:
        """Stop everything cleanly; when called again, kill it."""
        self._driver.post(StopAll())

    def pid(self, name: str) -> int | None:
        child = self._children.get(name)
        return child.pid if child is not None and child.returncode is None else None

    def log_path(self, name: str) -> Path:
        return self._log_folder / f"{name}.log"

    # -- effects -------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartRole(name):
                self._signals_to_send.pop(name, None)
                self._lives[name] = asyncio.get_running_loop().create_task(self._live(self.plans[name]))
            case TerminateRole(name):
                self._signal(name, signal.SIGTERM)
            case KillRole(name):
                self._signal(name, signal.SIGKILL)
            case Announce(name, text, show_log):
                lines = last_lines(self.log_path(name), self._log_starts.get(name, 0)) if show_log else []
                self._say(name, text, lines)
            case AllReady():
                self._all_ready()
            case AllStopped(status):
                assert self._finished is not None
                self._finished.set_result(status)
        self._changed()

    def _signal(self, name: str, number: signal.Signals) -> None:
        child = self._children.get(name)
        if child is None:
            self._signals_to_send[name] = number  # it is between fork and its first instruction
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(child.pid, number)
            else:
                child.send_signal(number)

    async def _live(self, plan: RolePlan) -> None:
        """One process of a role, from its start to its end."""
        try:
            status = await self._spawn_and_wait(plan)
        except OSError as error:
            self._say(plan.name, f"cannot be started ({error})", ())
            status = 1
        self._children.pop(plan.name, None)
        self._driver.post(RoleExited(plan.name, status))

    async def _spawn_and_wait(self, plan: RolePlan) -> int:
        with self.log_path(plan.name).open("ab") as log:
            self._log_starts[plan.name] = log.tell()
            child = await asyncio.create_subprocess_exec(
                *plan.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **plan.environment, **plan.secrets},
                process_group=0,
            )
        self._children[plan.name] = child
        if plan.name in self._signals_to_send:
            self._signal(plan.name, self._signals_to_send.pop(plan.name))
        self._changed()
        probing = asyncio.get_running_loop().create_task(self._probe(plan))
        try:
            return await child.wait()
        finally:
            probing.cancel()

    async def _probe(self, plan: RolePlan) -> None:
        while True:
            if await is_serving(plan.host, plan.port, plan.ready, self._caller):
                break
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._driver.post(RoleReady(plan.name))


async def is_serving(host: str, port: int, check: HttpCheck | None, caller: HttpClientAuth) -> bool:
    """Whether a role accepts connections and passes its check."""
    tls = None
    if check is not None:
        host, port = check.host or host, check.port or port
        tls = {"member": caller.tls, "http": None, "https": _ANYBODYS}[check.over]
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            try:
                return check is None or await _passes(check, reader, writer, caller)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


_ANYBODYS = _unverified()
"""For a child of ours with a certificate of any authority: it is sent no secret, and only its status is
read."""


async def _passes(
    check: HttpCheck, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: HttpClientAuth
) -> bool:
    headers = caller.headers("GET", check.path) if check.over == "member" else {}
    lines = [f"GET {check.path} HTTP/1.0", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("".join(f"{line}\r\n" for line in [*lines, ""]).encode())
    status_line = await reader.readline()
    if status_line.split(b" ")[1:2] != [b"200"]:
        return False
    return not check.text or check.text.encode() in await reader.read()  # read to its end


def last_lines(path: Path, start: int = 0) -> list[str]:
    """The last few lines of a log after byte ``start``, for a role that died."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(start, log.tell() - LAST_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return list(deque(text.splitlines(), maxlen=NUM_LAST_LINES))
