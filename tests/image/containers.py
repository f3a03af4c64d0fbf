# SPDX-License-Identifier: Apache-2.0
"""The services of a compose file as containers of podman, with an address each on a bridge of their own.

Owns what a field of a service is for the engine. A field without a meaning here fails the start, so that
nothing of the file is left out unseen; only restarts and published ports are, on purpose. Engines run health
checks by timers, podman by systemd's, so ``is_healthy`` runs the check's command in the container. All of it
is in one network namespace: a process of this host reaches the containers only from inside it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

NETWORK = "10.89.77"
FIRST_ADDRESS = 11
LIMITS = ("--ulimit", "nofile=8192:8192", "--ulimit", "nproc=4096:4096")
"""Below what an engine asks for: a container's root may not raise them everywhere."""
TMPFS = "rw,noexec,nosuid,nodev,mode=1777"
"""Docker's options of a tmpfs, which are stricter than podman's."""
NOT_TRIED = {"restart", "ports", "depends_on", "image", "command"}
"""Fields of a service that make no option: read elsewhere, or not tried."""


class Engine:
    """podman, by the program that ``scripts/test-image`` has made for its storage."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, *words: str, timeout_s: float = 120) -> str:
        """The output of a command.

        Raises:
            AssertionError: it failed; the message has its error output.
        """
        status, output, error = self.tried(*words, timeout_s=timeout_s)
        assert status == 0, f"{' '.join(words[:4])}: {error or output}"
        return output

    def tried(self, *words: str, timeout_s: float = 120) -> tuple[int, str, str]:
        """Exit status, output and error output of a command."""
        done = subprocess.run([self._program, *words], capture_output=True, text=True, timeout=timeout_s)
        return done.returncode, done.stdout, done.stderr


class Compose:
    """The services of ``file`` without those in ``left_out``, started one after the other as it says."""

    def __init__(
        self, engine: Engine, file: Path, variables: Mapping[str, str], left_out: Iterable[str] = ()
    ) -> None:
        self._engine, self._folder = engine, file.parent
        content = yaml.safe_load(self._filled(file.read_text(), variables))
        assert content.keys() <= {"name", "services", "volumes"}
        self.services: dict[str, Any] = {
            name: service for name, service in content["services"].items() if name not in set(left_out)
        }
        self.volumes = list(content["volumes"])
        self.addresses = {
            name: f"{NETWORK}.{number}" for number, name in enumerate(self.services, FIRST_ADDRESS)
        }

    @staticmethod
    def _filled(text: str, variables: Mapping[str, str]) -> str:
        """``text`` with ``${NAME:-default}`` replaced, as compose does."""
        return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1]) or found[2], text)

    def start(self, before: Callable[[str], None], patience_s: float) -> None:
        """Start every service when those that it needs are as it requires; ``before`` confines each one.

        Raises:
            AssertionError: a container ended, or is not healthy within ``patience_s``.
        """
        self._engine("network", "create", "--internal", "--subnet", f"{NETWORK}.0/24", "cluster")
        waiting = dict(self.services)
        ends_at = time.monotonic() + patience_s
        while waiting:
            ready = [name for name, service in waiting.items() if self._may_start(service)]
            for name in ready:
                self._run(name, waiting.pop(name))
                before(name)
            assert time.monotonic() < ends_at, f"{sorted(waiting)} wait: {self.said(waiting)}"
            if not ready:
                time.sleep(0.5)

    def _may_start(self, service: Mapping[str, Any]) -> bool:
        needs = service.get("depends_on", {})
        for name, how in needs.items():
            state = self.state(name)
            if state is None:
                return False
            condition = how["condition"]
            if condition == "service_completed_successfully":
                if state["Running"]:
                    return False
                assert state["ExitCode"] == 0, self.said([name])
            elif condition == "service_healthy":
                if not self.is_healthy(name):
                    return False
            else:
                assert condition == "service_started"
        return True

    def _run(self, name: str, service: Mapping[str, Any]) -> None:
        options = ["run", "--detach", "--name", name, "--restart", "no", *LIMITS]
        if service.get("network_mode") == "none":
            options += ["--network", "none"]
        else:
            options += ["--network", "cluster", "--ip", self.addresses[name]]
        for field, value in service.items():
            options += self._options(field, value)
        self._engine(*options, service["image"], *service.get("command", []))

    def _options(self, field: str, value: Any) -> list[str]:
        if field in ("hostname", "user"):
            return [f"--{field}", value]
        if field == "environment":
            return [word for name, text in value.items() for word in ("--env", f"{name}={text}")]
        if field == "env_file":
            return [word for path in value for word in ("--env-file", str(self._folder / path))]
        if field == "volumes":
            return [word for one in value for word in ("--volume", self._volume(one))]
        if field == "healthcheck":
            assert value["test"][0] == "CMD"
            return ["--no-healthcheck"]  # is_healthy runs it
        if field == "stop_grace_period":
            return ["--stop-timeout", value.removesuffix("s")]
        if field == "shm_size":
            return ["--shm-size", value]
        if field == "read_only":
            # podman would add writable folders to a read-only root, which other engines do not.
            return ["--read-only", "--read-only-tmpfs=false"] if value else []
        if field == "tmpfs":
            return [word for path in value for word in ("--tmpfs", f"{path}:{TMPFS}")]
        if field in ("cap_drop", "cap_add", "security_opt"):
            flag = "--" + field.replace("_", "-")
            return [word for one in value for word in (flag, one)]
        assert field in NOT_TRIED | {"network_mode"}, f"no meaning of {field} here"
        return []

    def _volume(self, one: Any) -> str:
        if isinstance(one, str):
            assert one.partition(":")[0] in self.volumes
            return one
        source = self._folder / one["source"]
        assert one["type"] == "bind" and one["bind"] == {"create_host_path": False} and source.exists()
        return f"{source.resolve()}:{one['target']}" + (":ro" if one.get("read_only") else "")

    def state(self, name: str) -> dict[str, Any] | None:
        """What the engine says of a container; None where there is none."""
        status, output, _ = self._engine.tried("inspect", "--type", "container", name)
        return json.loads(output)[0]["State"] if status == 0 else None

    def is_healthy(self, name: str) -> bool:
        """Whether the service's own check passes, run now.

        Raises:
            AssertionError: the container has ended.
        """
        state = self.state(name)
        assert state is not None and state["Running"], self.said([name])
        return self._engine.tried("exec", name, *self.services[name]["healthcheck"]["test"][1:])[0] == 0

    def said(self, names: Iterable[str]) -> str:
        """The last lines of each container's log."""
        return "\n".join(
            f"{name}: {' '.join(self._engine.tried('logs', '--tail', '12', name)[1:])}" for name in names
        )

    def stop(self) -> None:
        """Remove the containers with their volumes, and the network."""
        for name in reversed(self.services):
            self._engine.tried("rm", "--force", "--time", "0", "--volumes", name)
        self._engine.tried("network", "rm", "--force", "cluster")
        for name in self.volumes:
            self._engine.tried("volume", "rm", "--force", name)


class Firewall:
    """NetworkPolicies as a network of Kubernetes enforces them: rules inside each container's network.

    Args:
        pids: process of each container, by its name.
        addresses: of each container.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._pids: dict[str, int] = {}

    def close(self, name: str, pid: int, allowed: Iterable[tuple[str, int | None]]) -> None:
        """Let only ``allowed`` connect to a container: names, empty for all, with a port, None for all."""
        self._pids[name] = pid
        rules = ["-i lo -j ACCEPT", "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"]
        for source, port in allowed:
            origin = f"-s {self._addresses[source]}" if source else ""
            target = f"-p tcp --dport {port}" if port is not None else ""
            rules.append(f"{origin} {target} -j ACCEPT")
        for source, address in self._addresses.items():
            rules.append(f"-s {address} -p tcp --syn -j DROP -m comment --comment from-{source}")
        rules.append("-p tcp --syn -j DROP")
        for rule in rules:
            self._iptables(name, "-A", "INPUT", *rule.split())

    def dropped(self) -> set[tuple[str, str]]:
        """Source and target of connections that were refused so far."""
        found = set()
        for name in self._pids:
            for line in self._iptables(name, "-L", "INPUT", "-v", "-x", "-n").splitlines():
                rule = re.match(r"\s*(\d+)\s.*/\* from-(\S+) \*/", line)
                if rule and int(rule[1]):
                    found.add((rule[2], name))
        return found

    def _iptables(self, name: str, *words: str) -> str:
        command = ["nsenter", "--target", str(self._pids[name]), "--net", "iptables", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def engine_of_this_run() -> Engine:
    """The engine that ``scripts/test-image`` has made."""
    return Engine(os.environ["MOONCAKE_TEST_ENGINE"])
