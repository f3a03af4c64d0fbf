# SPDX-License-Identifier: Apache-2.0
"""A shell in an empty folder that runs command blocks as a reader of a document does.

Our console scripts are in its path, each calling the entry point that an installed wheel has.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 120.0


class Shell:
    """Runs blocks with ``bash``; ``close`` ends all processes that they started."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        commands = folder / "bin"
        commands.mkdir()
        with (ROOT / "pyproject.toml").open("rb") as file:
            scripts = tomllib.load(file)["project"]["scripts"]
        for name, target in scripts.items():
            module, _, function = target.partition(":")
            script = (
                f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
            )
            (commands / name).write_text(script)
            (commands / name).chmod(0o755)
        for name in ("python", "python3"):  # a link would leave the virtual environment
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            (commands / name).chmod(0o755)
        path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._started: list[subprocess.Popen[str]] = []

    def run(self, block: str, timeout_s: float = PATIENCE_S) -> str:
        """Run a block to its end; its output. Fails if the block does."""
        done = subprocess.run(
            ["bash", "-c", block],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{block}\n-> {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, block: str) -> subprocess.Popen[str]:
        """Run a block that starts a server, whether or not it ends with ``&``."""
        process = subprocess.Popen(
            ["bash", "-c", f"{block}\nwait"],
            cwd=self.folder,
            env=self._environment,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def text(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.exists() else ""

    def close(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + 20.0
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        shutil.rmtree(self.folder / "bin", ignore_errors=True)
