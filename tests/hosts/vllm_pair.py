# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers on two hosts, a store on both, gateways on a third: ``scripts/test-hosts --vllm``.

Prefill and decode each have both of our connectors. By push, decode gets each prompt's KV from the other
host; by the pool, either server reads what the other one stored. Hosts share no memory, and all processes use
a cluster key. Answers are compared with those of one server alone, asked under a salt for which nothing is
cached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster import Answer, OpenAiServer, wait_for
from tests.hosts.network import ROOT, Host, Network, wait_for_line, why_impossible
from tests.vllm.engine import BLOCK_TOKENS, a_prompt
from tests.vllm_server import QUIET, direct_connector, store_connector

PATIENCE_S = 600.0
MASTER_PORT, ENGINE_PORT, PUSH_PORT, PUSHING_PORT, POOLING_PORT = 50051, 8100, 8998, 8000, 8001
NUM_TOKENS, NUM_PROMPTS = 8, 4
KV_BYTES = 30 * 2 * 3 * 64 * 4
"""KV of one token of SmolLM2-135M in float32: layers, key and value, heads, numbers of a head."""


class Server(OpenAiServer):
    """A server at an address of a host."""

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def wait(self, path: str = "/health") -> None:
        def answers() -> bool:
            return self.request("GET", path, None, timeout_s=5).status == 200

        wait_for(answers, f"{self.address} to answer {path}", PATIENCE_S)


class Pair:
    """The processes, and the requests to them."""

    def __init__(self, folder: Path, model: Path, network: Network) -> None:
        self._folder, self._model = folder, model
        self.hosts = network.hosts
        key = folder / "cluster.key"
        words = [sys.executable, "-m", "mooncake", "certs", "--cluster-key", str(key)]
        subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        config = folder / "mooncake.toml"
        config.write_text(f'[security]\ncluster_key_file = "{key}"\n')
        self._environment = {**os.environ, "MOONCAKE_CONFIG": str(config)}
        self._children: list[subprocess.Popen[bytes]] = []
        first, second, third = (host.address() for host in self.hosts)
        self.pushing, self.pooling = Server(f"{first}:{PUSHING_PORT}"), Server(f"{first}:{POOLING_PORT}")
        self.prefill, self.decode = Server(f"{second}:{ENGINE_PORT}"), Server(f"{third}:{ENGINE_PORT}")

    def _start(self, host: Host, name: str, words: list[str], **environment: str) -> Callable[[], None]:
        path = self._folder / f"{name}.log"
        with path.open("wb") as log:
            child = host.start(
                sys.executable, "-m", *words, log=log, stdout=log, env={**self._environment, **environment}
            )
        self._children.append(child)
        return lambda: wait_for_line(child, path, PATIENCE_S)

    def start(self) -> None:
        first, second, third = self.hosts
        master = f"{first.address()}:{MASTER_PORT}"
        words = ["mooncake", "master", "--host", first.address(), "--port", str(MASTER_PORT)]
        self._start(first, "master", words)()
        source = f"{second.address()}:{PUSH_PORT}"
        roles: list[tuple[str, Host, dict[str, Any]]] = [
            ("kv_producer", second, {"listen_addr": source}),
            ("kv_consumer", third, {"prefill_addr": source, "listener_offset": 0}),
        ]
        for core, (role, host, extra) in enumerate(roles):
            name = f"node{host.number}"
            words = ["mooncake", "node", "--master", master, "--host", host.address(), "--name", name]
            self._start(host, name, [*words, "--pool-size", "512MiB", "--no-huge-pages"])()
            connectors = [direct_connector(role, **extra), store_connector(master)]
            both = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": connectors},
            }
            words = ["vllm.entrypoints.openai.api_server", "--model", str(self._model), "--dtype", "float32"]
            words += ["--served-model-name", "smollm2", "--host", host.address(), "--port", str(ENGINE_PORT)]
            words += ["--max-model-len", "2048", "--enforce-eager", "--enable-prompt-tokens-details"]
            words += ["--kv-transfer-config", json.dumps(both)]
            own = {"VLLM_HOST_IP": host.address(), "VLLM_CPU_OMP_THREADS_BIND": str(core)}
            self._start(host, role, words, **{**QUIET, **own})
        ways = {
            "push": ["--prefill", self.prefill.address, str(PUSH_PORT), "--decode", self.decode.address],
            "pool": ["--scheduling", "round_robin", "--decode", self.prefill.address, self.decode.address],
        }
        for (way, flags), server in zip(ways.items(), (self.pushing, self.pooling), strict=True):
            words = ["mooncake", "gateway", "--model", str(self._model), "--served-model-name", "smollm2"]
            words += ["--host", first.address(), "--port", server.address.rpartition(":")[2], "--insecure"]
            self._start(first, f"gateway-{way}", [*words, "--protocol", way, *flags])
        for one in (self.prefill, self.decode):
            one.wait()
        for one in (self.pushing, self.pooling):
            one.wait("/ready")
        time.sleep(5.0)  # both engines are probed once more

    def close(self) -> None:
        """Wait for the processes, whose hosts are gone by now."""
        for child in self._children:
            child.kill()
            child.wait()


def tokens_of(answer: Answer) -> list[int]:
    assert answer.status == 200, answer
    found: list[int] = answer.body["choices"][0]["token_ids"]
    assert len(found) == NUM_TOKENS, answer
    return found


def ask(server: Server, prompts: list[str], **more: Any) -> list[Answer]:
    return [server.complete(one, NUM_TOKENS, **more) for one in prompts]


def play(folder: Path, model: Path) -> list[str]:
    """Run everything; returns lines of figures. Raises AssertionError: an answer or a figure is wrong."""
    lines = []
    with Network(3) as network:
        pair = Pair(folder, model, network)
        try:
            pair.start()
            third = pair.hosts[2]
            for way, server in (("push", pair.pushing), ("pool", pair.pooling)):
                prompts = [a_prompt(f"{way} {number}", 20) for number in range(NUM_PROMPTS)]
                alone = list(map(tokens_of, ask(pair.decode, prompts, cache_salt="alone")))
                if way == "pool":
                    assert list(map(tokens_of, ask(server, prompts))) == alone
                    time.sleep(
                        5.0
                    )  # until their blocks are stored; in this order each goes to the other server
                    prompts, alone = [*prompts[1:], prompts[0]], [*alone[1:], alone[0]]
                before = third.num_received(0)
                found = ask(server, prompts)
                carried = third.num_received(0) - before
                assert list(map(tokens_of, found)) == alone, way
                usage = [one.body["usage"] for one in found]
                num_tokens = sum(one["prompt_tokens"] for one in usage)
                num_cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
                if way == "pool":
                    assert num_cached >= NUM_PROMPTS * BLOCK_TOKENS, usage
                assert carried >= (num_tokens if way == "push" else num_cached / 2) * KV_BYTES, carried
                lines.append(
                    f"{way}: {NUM_PROMPTS} prompts of {num_tokens} tokens right, {num_cached} tokens cached, "
                    f"{carried} B to decode's host"
                )
            pair.hosts[1].kill()
            assert len(tokens_of(ask(pair.decode, [a_prompt("pool 0", 20)])[0])) == NUM_TOKENS
            [after] = ask(pair.pushing, [a_prompt("afterwards", 20)])
            assert after.status in (200, 503), after
            lines.append(
                f"prefill's host lost: decode's server answers, the gateway with status {after.status}"
            )
        finally:
            network.close()
            pair.close()
    return lines


def main() -> int:
    if reason := why_impossible():
        print(f"NOT RUN: no hosts can be made here: {reason}", file=sys.stderr)
        return 77
    with tempfile.TemporaryDirectory(prefix="mooncake-hosts-") as folder:
        keep = Path(os.environ.get("MOONCAKE_HOSTS_FOLDER", folder))
        print(*play(keep, Path(os.environ["MOONCAKE_VLLM_ENV"]) / "model"), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
