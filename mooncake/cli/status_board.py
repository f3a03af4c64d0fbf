# SPDX-License-Identifier: Apache-2.0
"""The display of a running cluster: a live table in a terminal, plain lines anywhere else.

Reads the supervisor, decides nothing. ``write_status`` is the same for programs: a JSON file that is replaced
whole at every change.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mooncake import clock
from mooncake.cli.processes import Processes
from mooncake.cli.supervisor import RoleState, RoleStatus
from mooncake.security import SecuritySettings

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


def write_status(path: Path, processes: Processes, url: str, is_ready: bool) -> None:
    """Write the state of every role as JSON; readers never see half a file."""
    roles = {
        name: {
            "state": role.state,
            "pid": processes.pid(name),
            "address": processes.plans[name].address,
            "num_starts": role.num_starts,
            "log": str(processes.log_path(name)),
        }
        for name, role in processes.supervisor.roles.items()
    }
    status = {"url": url, "is_ready": is_ready, "pid": os.getpid(), "roles": roles}
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(status, indent=1))
    fresh.replace(path)


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


def welcome(
    url: str,
    model: str,
    master: str,
    admin_key: str,
    log_folder: Path,
    credentials: Credentials | None = None,
) -> str:
    """The usage hints that are printed once everything serves."""
    credentials = credentials or Credentials()
    variables = credentials.variables()
    from_python = f"is the pool, from Python{' with ' + variables if variables else ''}"
    message = {"role": "user", "content": "What is the capital of France?"}
    question = {"model": model, "temperature": 0, "messages": [message]}
    return f"""
Mooncake serves {model} at {url}

  curl -s{credentials.curl()} {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d {shlex.quote(json.dumps(question))}

  mooncake chat --url {url}{credentials.chat()}
      opens a chat; /status lists the workers, /metrics has the numbers
  X-API-Key: {admin_key}
      is the header that admin calls (/instances/add, ...) must send
  Store("{master}")
      {from_python}
  {log_folder}
      has the logs; Ctrl-C stops everything
"""
