# SPDX-License-Identifier: Apache-2.0
"""Workers and prefill groups as processes without a cluster, for the bench and for the kill run.

Owns their start and end, and what the kernel knows of each: processor time and memory. Requests go straight
to a worker, over HTTP.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from mooncake.cli.ports import free_ports
from mooncake.cli.up import quiet_threads
from tests.cluster import wait_for

HOST = "127.0.0.1"
READY_WITHIN_S = 240.0


class WorkerProcess:
    """One ``mooncake worker``: a single one, or a stage of a group."""

    def __init__(self, name: str, folder: Path, port: int, *flags: str, core: int | None = None) -> None:
        """``core``: the only core that it may use."""
        self.name, self.port = name, port
        self._log = folder / f"{name}.log"
        command = [sys.executable, "-m", "mooncake", "worker", "--port", str(port), "--num-threads", "1"]
        command += [*flags, "--parent", str(os.getpid())]
        if core is not None:
            command = ["taskset", "-c", str(core), *command]
        environment = {**os.environ, **quiet_threads(1), "HF_HUB_OFFLINE": "1"}
        with self._log.open("a") as output:
            self._start = output.tell()
            self.child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.child.poll() is None, f"{self.name} has ended:\n{self.log()[-3000:]}"
            return " ready " in self.log()

        wait_for(is_ready, f"{self.name} to be ready", READY_WITHIN_S)

    def log(self) -> str:
        """What this process has logged."""
        return self._log.read_bytes()[self._start :].decode(errors="replace")

    def processor_s(self) -> float:
        """Processor time of all its threads."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Memory that only this process has: weights that are packed, KV blocks, the interpreter."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])

    def stop(self) -> None:
        self.child.kill()
        self.child.wait(30.0)

    def ask(
        self, prompt: list[int], num_tokens: int, salt: str = "", timeout_s: float = 300.0
    ) -> tuple[list[int], float]:
        """Greedy tokens and the seconds they took. Raises OSError or WorkerRefused when there is none."""
        body = {
            "model": "smollm2",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"cache_salt": salt} if salt else {}),
        }
        began = time.perf_counter()
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            content = json.loads(answer.read())
        if answer.status != 200:
            raise WorkerRefused(f"{answer.status}: {content['error']['message']}")
        found: list[int] = content["choices"][0]["token_ids"]
        return found, time.perf_counter() - began

    def __repr__(self) -> str:
        return f"WorkerProcess({self.name} port={self.port} status={self.child.poll()})"


class WorkerRefused(Exception):
    """A worker answered with an error."""


class GroupProcesses:
    """A prefill group: its first stage and the others, each a process."""

    def __init__(self, folder: Path, num_stages: int, *flags: str, cores: list[int] | None = None) -> None:
        """``cores``: one for each stage."""
        ports = free_ports(HOST, num_stages, Random())
        group = ("--pipeline-stages", str(num_stages))
        self._folder, self._flags = folder, flags
        self._plans = [("first", ports[0], tuple(f"--pipeline-peers={HOST}:{port}" for port in ports[1:]))]
        for number in range(1, num_stages):
            plan = (f"stage-{number}", ports[number], ("--pipeline-stage", str(number), *group))
            self._plans.append(plan)
        self._cores = cores
        self.stages = [self._start(number) for number in range(num_stages)]

    @property
    def first(self) -> WorkerProcess:
        return self.stages[0]

    def _start(self, number: int) -> WorkerProcess:
        name, port, flags = self._plans[number]
        core = None if self._cores is None else self._cores[number]
        return WorkerProcess(name, self._folder, port, *flags, *self._flags, core=core)

    def restart_ended(self) -> None:
        """Start the stages that have ended, and wait until the group is formed."""
        for number, stage in enumerate(self.stages):
            if stage.child.poll() is not None:
                self.stages[number] = self._start(number)
        self.first.wait_until_ready()

    def stop(self) -> None:
        for stage in self.stages:
            stage.stop()


@contextlib.contextmanager
def stopped_at_end(*processes: WorkerProcess | GroupProcesses) -> Iterator[None]:
    """Context manager: kill the processes at its end."""
    try:
        yield
    finally:
        for one in processes:
            one.stop()


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """A random prompt without special tokens."""
    random = Random(seed)
    return [random.randrange(5, 40_000) for _ in range(num_tokens)]
