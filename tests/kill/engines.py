# SPDX-License-Identifier: Apache-2.0
"""``scripts/kill-vllm``: real vLLM servers behind our gateway, killed at random while they answer.

First a server without a connector answers every request; these are the undisturbed answers. Then clients
send the same requests to the gateway, and periodically a server that is ready gets a SIGKILL (all of its
processes; one time in three only the engine's, under the API server that stays) and is started again at its
address. Exits 1 if an answer is neither the undisturbed one nor a proper error, or if a server still has
requests when all clients have their answers.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from mooncake.cli.bench.report import describe_machine
from tests.cluster import wait_for
from tests.kill.mixed import Request, Seen, requests
from tests.kill.serving import Killer, Outcome, answers, show
from tests.vllm_server import (
    HOST,
    Gateway,
    VllmServer,
    direct_connector,
    free_port,
    running_gateway,
    running_store,
    store_connector,
)

RESTARTED_WITHIN_S = 900.0
AT_REST_WITHIN_S = 300.0
NUM_UNDISTURBED = 8
"""Requests at a time while nothing is killed; a batch is faster."""
HANDED = "vllm:external_prefix_cache_hits_total"


class Fleet:
    """Servers and the gateway before them."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        model: Path,
        protocol: str,
        counts: Sequence[int],
        is_one_at_a_time: bool,
    ) -> None:
        store = stack.enter_context(running_store(folder)) if protocol == "pool" else ""
        self.servers: dict[str, VllmServer] = {}
        self.restarts_s: list[float] = []
        self._is_one_at_a_time = is_one_at_a_time
        self._restarts: list[threading.Thread] = []
        self._random = Random(0)
        flags = ["--protocol", protocol]
        ports = [free_port() for _ in range(counts[0])]
        listeners = ",".join(f"{HOST}:{port}" for port in ports)
        for role, count in zip(("prefill", "decode"), counts, strict=True):
            flags += [f"--{role}"] if count else []
            for number in range(count):
                if store:
                    connector = store_connector(store)
                elif role == "prefill":
                    connector = direct_connector("kv_producer", listen_addr=f"{HOST}:{ports[number]}")
                else:
                    connector = direct_connector("kv_consumer", prefill_addr=listeners, listener_offset=0)
                core = len(self.servers) % (os.cpu_count() or 1)
                server = VllmServer(f"{role}-{number}", model, folder, connector, core, "float32")
                stack.callback(server.close)
                self.servers[f"{role}-{number}"] = server
                flags += [server.address]
                flags += [str(ports[number])] if role == "prefill" and not store else []
        self.gateway: Gateway = stack.enter_context(running_gateway(folder, model, *flags))
        for server in self.servers.values():
            server.wait_until_ready(RESTARTED_WITHIN_S)
        self.gateway.wait_until_routable()

    def kill(self, name: str) -> None:
        """Kill a server and start it again, in a thread.

        Raises:
            ProcessLookupError: it is not ready, or should be left until another is.
        """
        ready = self._ready()
        is_left = self._is_one_at_a_time and len(ready) < len(self.servers)
        if is_left or self.servers[name].address not in ready:
            raise ProcessLookupError(name)
        server = self.servers[name]
        if self._random.random() < 1 / 3:
            server.kill_engine()
        else:
            server.kill()
        self._restarts.append(threading.Thread(target=self._restart, args=(server,)))
        self._restarts[-1].start()

    def _restart(self, server: VllmServer) -> None:
        began = time.monotonic()
        server.wait_until_over()
        server.start()
        server.wait_until_ready(RESTARTED_WITHIN_S)
        self.restarts_s.append(time.monotonic() - began)

    def _ready(self) -> set[str]:
        rows = self.gateway.details("/status").body["instances"]
        return {row["instance"] for row in rows if row["health"] == "ready"}

    def pause(self, seen: Seen) -> None:
        """Wait until a server is ready, after a client got a 503."""
        if seen.status == 503:
            wait_for(self._ready, "a server that is ready", RESTARTED_WITHIN_S)

    def wait_until_back(self) -> None:
        for one in self._restarts:
            one.join()

    def wait_until_at_rest(self) -> None:
        """Wait until no server has a request: none hangs, none is computed without a client."""

        def is_at_rest() -> bool:
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            return not any(server.metric(name) for server in self.servers.values() for name in names)

        wait_for(is_at_rest, "every server to have no requests", AT_REST_WITHIN_S)

    def show(self) -> None:
        if self.restarts_s:
            median, worst = statistics.median(self.restarts_s), max(self.restarts_s)
            print(f"from a kill until it serves again: median {median:.0f} s, worst {worst:.0f} s")
        lines = self.gateway.details("/metrics").body.splitlines()
        retries = [line for line in lines if line.startswith("mooncake_gateway_retries_total")]
        print("\n".join(retries))
        missed = sum(server.log().count("transfer_missed") for server in self.servers.values())
        print(f"transfers that failed, so that decode computed the prompt: {missed}")
        tokens = sum(server.metric(HANDED) for server in self.servers.values())
        print(f"tokens handed over or loaded, by servers since their last start: {tokens:.0f}")


def undisturbed(model: Path, folder: Path, prompts: Sequence[Request]) -> list[Seen]:
    """Answers of an undisturbed server without a connector."""
    server = VllmServer("alone", model, folder, None, 0, "float32")
    try:
        server.wait_until_ready(RESTARTED_WITHIN_S)
        calm = answers(server.url, [(one, "") for one in prompts], NUM_UNDISTURBED)
    finally:
        server.close()
    for one, right in zip(prompts, calm, strict=True):
        assert right.status == 200 and not right.cut and not right.error, (one, right)
    return calm


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill-vllm", description=__doc__)
    parser.add_argument("--protocol", choices=("push", "pool"), default="push", help="of the gateway")
    parser.add_argument("--prefill", type=int, default=1, help="servers that compute prompts (default 1)")
    parser.add_argument("--decode", type=int, default=1, help="servers that answer (default 1)")
    parser.add_argument("--requests", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--period", type=float, default=30.0, help="seconds between two kills (default 30)")
    parser.add_argument("--clients", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument("--one-at-a-time", action="store_true", help="kill only while all are ready")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and kills (default 0)")
    parser.add_argument("--logs", type=Path, help="a folder for the logs; otherwise they go with the run")
    wanted = parser.parse_args()
    print(f"machine: {describe_machine()}; load average at the start {os.getloadavg()[0]:.1f}")
    print(f"command: {shlex.join(['scripts/kill-vllm', *sys.argv[1:]])}", flush=True)
    model = Path(os.environ["MOONCAKE_VLLM_ENV"]) / "model"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and no server is left behind
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-kill-"))
        folder = wanted.logs or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        prompts = requests(wanted.requests, wanted.seed, "smollm2")
        calm = undisturbed(model, folder, prompts)
        fleet = Fleet(
            stack, folder, model, wanted.protocol, (wanted.prefill, wanted.decode), wanted.one_at_a_time
        )
        outcome = Outcome()
        began = time.monotonic()
        with Killer(fleet.kill, [*fleet.servers], wanted.period, wanted.seed) as killer:
            seen = answers(fleet.gateway.url, [(one, "") for one in prompts], wanted.clients, fleet.pause)
        outcome.took_s, outcome.killed = time.monotonic() - began, killer.killed
        for one, disturbed, right in zip(prompts, seen, calm, strict=True):
            outcome.note(one, disturbed, right)
        fleet.wait_until_back()
        show(outcome)
        fleet.show()
        fleet.wait_until_at_rest()
        print("no server has a request left")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
