"""``scripts/kill-vllm``: real vLLM servers behind our gateway, killed at random while they answer.

First a server without connector answers every request alone; that is what an undisturbed answer is. Then
clients ask the gateway for the same, and every so often a server that is ready gets a SIGKILL (all of its
processes; one time in three only the engine's, under the API server that stays), and is started again at its
address. Exits 1 if one answer is wrong (``mixed.verdict``), or if a server still has requests when all
clients have theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import re
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from bench.cluster import wait_for
from bench.vllm_server import HOST, Gateway, VllmServer, free_port, running_gateway, running_store
from tests.kill.mixed import Asked, Heard, ask, mixed, verdict

RESTARTED_WITHIN_S = 900.0
AT_REST_WITHIN_S = 300.0
"""Longer than a transfer is held for a decode that was killed (``timeout_s``, 120)."""
MODULE = {"kv_connector_module_path": "mooncake.connectors.vllm"}


def direct(role: str, **extra: Any) -> dict[str, Any]:
    """Our ``MooncakeConnector``."""
    return {
        "kv_connector": "MooncakeConnector",
        **MODULE,
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def pooled(role: str, store: str) -> dict[str, Any]:
    """Our ``MooncakeStoreConnector``."""
    extra = {"mooncake_store_addr": store}
    return {
        "kv_connector": "MooncakeStoreConnector",
        **MODULE,
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


class Fleet:
    """Servers and the gateway before them."""

    def __init__(
        self, stack: ExitStack, folder: Path, model: Path, protocol: str, counts: Sequence[int]
    ) -> None:
        store = stack.enter_context(running_store(folder)) if protocol == "pool" else ""
        self.servers: list[VllmServer] = []
        flags = ["--protocol", protocol]
        for role, count in zip(("prefill", "decode"), counts, strict=True):
            flags += [f"--{role}"] if count else []
            for number in range(count):
                port = free_port()
                if store:
                    connector = pooled("kv_both", store)
                elif role == "prefill":
                    connector = direct("kv_producer", listen_addr=f"{HOST}:{port}")
                else:
                    connector = direct("kv_consumer")
                core = len(self.servers) % (os.cpu_count() or 1)
                server = VllmServer(f"{role}-{number}", model, folder, connector, core, "float32")
                stack.callback(server.close)
                self.servers.append(server)
                flags += [server.address] + ([str(port)] if role == "prefill" and not store else [])
        self.gateway: Gateway = stack.enter_context(running_gateway(folder, model, *flags))
        for server in self.servers:
            server.wait_until_ready(RESTARTED_WITHIN_S)
        self.gateway.wait_until_routable()

    def ready(self) -> list[VllmServer]:
        rows = self.gateway.request("GET", "/status", None).body["instances"]
        ready = {row["instance"] for row in rows if row["health"] == "ready"}
        return [server for server in self.servers if server.address in ready]

    def wait_until_at_rest(self) -> None:
        """No request is left anywhere: none hangs, none is computed for nobody."""

        def is_at_rest() -> bool:
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            return not any(server.metric(name) for server in self.servers for name in names)

        wait_for(is_at_rest, "every server to have no requests", AT_REST_WITHIN_S)


class Killer(threading.Thread):
    """Kills one server after the other, with a pause, until it is stopped."""

    def __init__(self, fleet: Fleet, period_s: float, random: Random) -> None:
        super().__init__(daemon=True)
        self._fleet, self._period_s, self._random = fleet, period_s, random
        self._is_over = threading.Event()
        self._restarts: list[threading.Thread] = []
        self.kills: Counter[str] = Counter()
        self.restarts_s: list[float] = []

    def run(self) -> None:
        while not self._is_over.wait(self._period_s):
            ready = self._fleet.ready()
            if not ready:
                continue
            server = self._random.choice(ready)
            is_core_only = self._random.random() < 1 / 3
            if is_core_only:
                server.kill_engine()
            else:
                server.kill()
            self.kills[f"{server.log_path.stem}, {'its engine only' if is_core_only else 'whole'}"] += 1
            self._restarts.append(threading.Thread(target=self._restart, args=(server,)))
            self._restarts[-1].start()

    def _restart(self, server: VllmServer) -> None:
        began = time.monotonic()
        server.wait_until_over()
        server.start()
        server.wait_until_ready(RESTARTED_WITHIN_S)
        self.restarts_s.append(time.monotonic() - began)

    def stop(self) -> None:
        """Returns when everybody is back."""
        self._is_over.set()
        self.join()
        for one in self._restarts:
            one.join()


def everything(address: str, asked: Sequence[Asked], num_clients: int) -> list[Heard]:
    with ThreadPoolExecutor(num_clients) as pool:
        return list(pool.map(lambda one: ask(address, one), asked))


def undisturbed(model: Path, folder: Path, asked: Sequence[Asked]) -> list[Heard]:
    """What a server answers that has neither a connector nor other requests."""
    server = VllmServer("alone", model, folder, None, 0, "float32", flags=("--no-enable-prefix-caching",))
    try:
        server.wait_until_ready(RESTARTED_WITHIN_S)
        heard = everything(server.address, asked, 1)
    finally:
        server.close()
    for one in heard:
        assert one.is_done and one.status == 200 and one.finish_reason and not one.error, one
    return heard


def under_kills(fleet: Fleet, killer: Killer, asked: Sequence[Asked], num_clients: int) -> list[Heard]:
    """Who is refused waits a moment before its next request, as a client should; nothing is asked twice."""
    heard = [Heard() for _ in asked]
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(asked)):
        numbers.put(number)

    def client() -> None:
        while True:
            try:
                number = numbers.get_nowait()
            except queue.Empty:
                return
            heard[number] = one = ask(fleet.gateway.url.removeprefix("http://"), asked[number])
            if one.status == 503:
                wait_for(lambda: bool(fleet.ready()), "a server that is ready", RESTARTED_WITHIN_S)

    killer.start()
    clients = [threading.Thread(target=client) for _ in range(num_clients)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    killer.stop()
    return heard


def report(
    fleet: Fleet, killer: Killer, verdicts: Sequence[str], heard: Sequence[Heard], took_s: float
) -> None:
    counts = Counter(one.partition(":")[0] for one in verdicts)
    kills = ", ".join(f"{name} {count}" for name, count in sorted(killer.kills.items()))
    print(f"{len(verdicts)} requests in {took_s:.0f} s, {killer.kills.total()} kills ({kills})")
    if killer.restarts_s:
        median = statistics.median(killer.restarts_s)
        print(
            f"from a kill until it serves again: median {median:.0f} s, worst {max(killer.restarts_s):.0f} s"
        )
    print(
        f"equal {counts['equal']}, refused {counts['refused']}, broken off with an error event"
        f" {counts['broken off']}, WRONG {counts['wrong']}"
    )
    bad = [one for one, said in zip(heard, verdicts, strict=True) if said != "equal"]
    errors = Counter(re.sub(r"127[.0-9]*:\d+", "HOST:PORT", f"{one.status} {one.error}") for one in bad)
    for error, count in errors.most_common(8):
        print(f"  {count:4} {error[:150]}")
    retries = counted(fleet.gateway, "mooncake_gateway_retries_total")
    print(f"calls that the gateway tried again elsewhere: {json.dumps(retries)}")
    logs = [server.log() for server in fleet.servers]
    missed = sum(log.count("transfer_missed") for log in logs)
    print(f"transfers that failed, their prompts were computed: {missed}")
    print(f"tokens handed over or loaded, counted by servers since their last start: {handed(fleet)}")


def counted(server: Gateway, name: str) -> dict[str, int]:
    lines = server.request("GET", "/metrics", None).body.splitlines()
    found = {line.split('stage="')[1].split('"')[0]: line for line in lines if line.startswith(name + "{")}
    return {stage: int(float(line.rpartition(" ")[2])) for stage, line in found.items()}


def handed(fleet: Fleet) -> int:
    return int(sum(server.metric("vllm:external_prefix_cache_hits_total") for server in fleet.servers))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill-vllm", description=__doc__)
    parser.add_argument("--protocol", choices=("push", "pool"), default="push", help="of the gateway")
    parser.add_argument(
        "--prefill", type=int, default=1, help="servers that only compute prompts (default 1)"
    )
    parser.add_argument("--decode", type=int, default=1, help="servers that answer (default 1)")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument("--period", type=float, default=30.0, help="seconds between kills (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the logs; otherwise they go with the run")
    wanted = parser.parse_args()
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}")
    print(f"load average at the start {os.getloadavg()[0]:.1f}")
    print(f"command: {shlex.join(['scripts/kill-vllm', *sys.argv[1:]])}", flush=True)
    model = Path(os.environ["MOONCAKE_VLLM_ENV"]) / "model"
    with ExitStack() as stack:
        folder = wanted.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-kill-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        asked = mixed(Random(wanted.seed), wanted.requests)
        expected = undisturbed(model, folder, asked)
        print(f"undisturbed: {sum(len(one.token_ids) for one in expected)} tokens", flush=True)
        fleet = Fleet(stack, folder, model, wanted.protocol, (wanted.prefill, wanted.decode))
        killer = Killer(fleet, wanted.period, Random(wanted.seed))
        began = time.monotonic()
        heard = under_kills(fleet, killer, asked, wanted.clients)
        took_s = time.monotonic() - began
        verdicts = [verdict(one, right) for one, right in zip(heard, expected, strict=True)]
        report(fleet, killer, verdicts, heard, took_s)
        wrong = [(one, said) for one, said in zip(asked, verdicts, strict=True) if said.startswith("wrong")]
        for one, said in wrong:
            print(f"  {said}\n    of {one}")
        fleet.wait_until_at_rest()
        print("and no server has a request left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
