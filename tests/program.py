# SPDX-License-Identifier: Apache-2.0
"""Our processes, started as a user starts them, for tests that need a few and no whole cluster."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from mooncake.cli.ports import free_ports
from tests.cluster import OpenAiServer, wait_for

READY_WITHIN_S = 120.0


class Program(OpenAiServer):
    """``mooncake`` with these arguments, on a port of its own, until it is ended."""

    def __init__(self, folder: Path, *words: str, port: int = 0) -> None:
        """``port`` 0 takes a free one."""
        if not port:
            (port,) = free_ports("127.0.0.1", 1, Random())
        self.address = f"127.0.0.1:{port}"
        log = folder / f"{port}.log"
        command = [sys.executable, "-m", "mooncake", *words, "--port", str(port)]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())], stdout=output, stderr=output
            )
        # A daemon is ready as a master first.
        ready = " ready role=(?!master)"
        wait_for(lambda: re.search(ready, log.read_text()), " ".join(words), READY_WITHIN_S)

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@contextlib.contextmanager
def programs(folder: Path) -> Iterator[Callable[..., Program]]:
    """A fixture that starts programs by their arguments, and ends them all."""
    with contextlib.ExitStack() as stack:

        def start(*words: str, port: int = 0) -> Program:
            started = Program(folder, *words, port=port)
            stack.callback(started.process.wait, READY_WITHIN_S)
            stack.callback(started.process.kill)
            return started

        yield start
