# SPDX-License-Identifier: Apache-2.0
"""Command blocks that start vLLM, as the documents have them, by an installed package's entry point.

Replaced are the model, the addresses and ports, what a CPU does not have (fp8, parts of a GPU's memory) and,
for a laptop, the sizes; nothing is compiled. Each block runs in a shell; what one engine computed and another
loaded or received gives the same answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import OpenAiServer, wait_for
from tests.seeds.blocks import block, replaced
from tests.seeds.shell import Shell
from tests.vllm_server import HOST, QUIET, free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

READY_WITHIN_S = 600.0
PROMPT = "Summarize the state of KV cache disaggregation in 2026."
LONG = " ".join(f"Item {number} of the list is {number * 7 % 101}." for number in range(40))
METRICS = "--metrics_port 0"
EAGER = "--enforce-eager"
"""Compiling takes a laptop's core a minute for each server."""
LLAMA, QWEN = "meta-llama/Llama-3.1-70B-Instruct", "/home/vllm/Qwen2.5-7B-Instruct-GPTQ-Int4"


class Server(OpenAiServer):
    def __init__(self, port: int) -> None:
        self._port = port

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def is_healthy(self) -> bool:
        return self.request("GET", "/health", None, timeout_s=5).status == 200

    def metric(self, name: str) -> float:
        lines = self.request("GET", "/metrics", None).body.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0] == name)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    environment = {**QUIET, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    running = Shell(tmp_path, environment)
    try:
        yield running
    finally:
        running.close()


def started(shell: Shell, log: str, port: int, text: str) -> Server:
    shell.start(f"({text}) &> {log}")
    return Server(port)


def wait_until_healthy(shell: Shell, *servers: tuple[str, Server]) -> None:
    for log, server in servers:
        wait_for(server.is_healthy, f"vLLM to serve; {log}:\n{shell.text(log)[-2000:]}", READY_WITHIN_S)


def answered(shell: Shell, model: Path, port: int, prompt: str) -> str:
    """The guide's step 6, with a prompt of some blocks."""
    curl = replaced(
        block("000", "step 6"),
        ("<PREFILL_NODE_IP>:8200", f"{HOST}:{port}"),
        (LLAMA, str(model)),
        (PROMPT, prompt),
        ('"messages"', '"temperature": 0, "max_tokens": 12, "messages"'),
        ("curl ", "curl -sS "),
    )
    answer = json.loads(shell.run(curl))
    assert "choices" in answer, answer
    return str(answer["choices"][0]["message"]["content"])


def of_000(name: str, model: Path, port: int, *changes: tuple[str, str]) -> str:
    flags = (LLAMA, str(model)), ("--dtype fp8", "--dtype float32")
    text = replaced(block("000", name), *flags, *changes)
    old = "8200" if "--port 8200" in text else "8201"
    return replaced(text, (f"--port {old}", f"--port {port} {EAGER}"))


def test_vllm_is_there(shell: Shell) -> None:
    assert shell.run(block("000", "vllm version")).strip().startswith("0.")


def test_the_guide_s_store_in_six_steps(shell: Shell, model: Path) -> None:
    store, prefill, decode = free_port(), free_port(), free_port()
    daemon = replaced(
        block("000", "daemon"),
        ("--port 50051", f"--port {store}"),
        ("--capacity-dram 256", "--capacity-dram 0.5"),
        ("--capacity-nvme 2000", "--capacity-nvme 0.5"),
        ("/mnt/nvme/mooncake", str(shell.folder / "nvme")),
    )
    shell.start(daemon)
    wait_for(lambda: " ready role=daemon" in shell.text("mooncaked.log"), "mooncaked to be ready", 120.0)
    limits = ("  --gpu-memory-utilization 0.92 \\\n", ""), ("--max-model-len 32768", "--max-model-len 2048")
    here = ("<DECODE_NODE_IP>", HOST), ("50051", str(store))
    first = started(shell, "prefill.log", prefill, of_000("step 4", model, prefill, *limits, *here))
    second = started(shell, "decode.log", decode, of_000("step 5", model, decode, *limits, *here))
    wait_until_healthy(shell, ("prefill.log", first), ("decode.log", second))

    text = answered(shell, model, prefill, LONG)
    log = "mooncaked.log"
    wait_for(lambda: "block_write" in shell.text(log), "blocks to be written", 60.0)
    assert answered(shell, model, decode, LONG) == text
    assert second.metric("vllm:mooncake_connector_loaded_blocks_total") > 0
    lines = shell.run(replaced(block("000", "blocks"), ("tail -f", "cat"))).splitlines()
    written, read = (
        [line for line in lines if event in line and f"peer={HOST}:" in line]
        for event in ("block_write", "block_read")
    )
    assert written and read, lines
    # Both nodes are in the log: what one wrote, another read.
    peers = [{line.split("peer=")[1].split()[0] for line in some} for some in (written, read)]
    assert peers[0].isdisjoint(peers[1]), lines


def test_the_guide_s_store_without_a_variable(shell: Shell, model: Path) -> None:
    """Its first form of the same: the address in the configuration, and one rank named."""
    store, port = free_port(), free_port()
    shell.start(f"mooncaked --port {store} --capacity-dram 0.5 &> mooncaked.log")
    here = ("<STORE_NODE_IP>:50051", f"{HOST}:{store}")
    first = started(shell, "one.log", port, of_000("store prefill", model, port, here))
    wait_until_healthy(shell, ("one.log", first))
    text = answered(shell, model, port, LONG)
    wait_for(lambda: "block_write" in shell.text("mooncaked.log"), "blocks to be written", 60.0)
    other = free_port()
    second = started(shell, "two.log", other, of_000("store decode", model, other, here))
    wait_until_healthy(shell, ("two.log", second))
    assert answered(shell, model, other, LONG) == text
    assert second.metric("vllm:mooncake_connector_loaded_blocks_total") > 0


def test_the_guide_s_pair_without_a_store_behind_the_proxy(shell: Shell, model: Path) -> None:
    prefill, decode, proxy = free_port(), free_port(), free_port()
    to_decode = ("<DECODE_NODE_IP>:8201", f"{HOST}:{decode}")
    to_prefill = ("<PREFILL_NODE_IP>:8200", f"{HOST}:{prefill}")
    first = started(shell, "prefill.log", prefill, of_000("direct prefill", model, prefill, to_decode))
    second = started(shell, "decode.log", decode, of_000("direct decode", model, decode, to_prefill))
    wait_until_healthy(shell, ("prefill.log", first), ("decode.log", second))
    command = replaced(
        block("002", "proxy"),
        ("python3 ../proxy_demo.py", "mkdir -p logs; mooncake_proxy"),
        (QWEN, str(model)),
        ("localhost:8100", f"localhost:{prefill}"),
        ("localhost:8200", f"localhost:{decode}"),
        ("--port 8000", f"--port {proxy}"),
    )
    gateway = started(shell, "proxy.log", proxy, command)
    wait_for(gateway.is_healthy, "the proxy to serve", 120.0)
    wait_for(lambda: shell.text("proxy.log").count("after=ready") == 2, "it to know both servers", 60.0)
    text = answered(shell, model, proxy, LONG)
    assert text == answered(shell, model, prefill, LONG)
    assert second.metric("vllm:mooncake_direct_received_blocks_total") > 0, shell.text("decode.log")[-3000:]
    assert first.metric("vllm:mooncake_direct_pushed_blocks_total") > 0


def test_the_post_s_master_and_file(shell: Shell, model: Path) -> None:
    """The existing package's way: memory of the engines themselves, by mooncake.json."""
    shell.run("mkdir -p logs data")
    data = ("/mnt/mooncake_data", str(shell.folder / "data"))
    master = free_port()
    shell.start(replaced(block("002", "master"), ("--port 10001", METRICS + f" --port {master}"), data))
    file = replaced(block("002", "mooncake.json"), ("10.1.222.133", HOST), ("10001", str(master)), data)
    (shell.folder / "mooncake.json").write_text(replaced(file, ("274877906944", str(256 << 20))))
    less = ("--gpu-memory-utilization 0.4", "--dtype float32"), (QWEN, str(model))
    pair_by_file(
        shell, model, replaced(block("002", "prefill"), *less), replaced(block("002", "decode"), *less)
    )


def test_the_connector_guide_s_master_and_file(shell: Shell, model: Path) -> None:
    shell.run("mkdir -p logs")
    master = free_port()
    shell.start(f"({replaced(block('004', 'master'), ('50001', f'{master} {METRICS}'))}) &> master.log")
    file = replaced(block("004", "tcp"), ("192.168.0.137", HOST), ("50001", str(master)))
    (shell.folder / "mooncake.json").write_text(file)
    less = (
        ("--gpu-memory-utilization 0.8", "--dtype float32"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", str(model)),
    )
    prefill, decode = (replaced(block("004", name), *less) for name in ("prefill 8100", "decode 8200"))
    pair_by_file(shell, model, f"({prefill}) &> logs/prefill-0.txt", f"({decode}) &> logs/decode-0.txt")


def pair_by_file(shell: Shell, model: Path, first: str, second: str) -> None:
    """Start both commands one after the other, and have the second load what the first computed."""
    lengths = ("--max-model-len 10000", "--max-model-len 2048")
    answers = []
    for command, old, log in ((first, "8100", "prefill-0.txt"), (second, "8200", "decode-0.txt")):
        port = free_port()
        shell.start(replaced(command, lengths, (f"--port {old}", f"--port {port} {EAGER}")))
        server = Server(port)
        wait_until_healthy(shell, (f"logs/{log}", server))
        answers.append(answered(shell, model, port, LONG))
    assert answers[0] == answers[1]
    assert server.metric("vllm:mooncake_connector_loaded_blocks_total") > 0
