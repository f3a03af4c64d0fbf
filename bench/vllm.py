"""Time to first token of two real vLLM servers and one store process: computed by A, loaded by B.

Command: ``scripts/test-vllm --python -m bench.vllm``. Each row is a pair of vLLM servers, one core each, in
bfloat16: A computes a fresh prompt of 1,030 random tokens, then B is asked for the same one (8 blocks of 128
loaded, 6 tokens computed), then B computes another. The references, in the same run, are vLLM without a
connector (its own prefix cache warm) and the existing package under the same connector. What it can't show: a
network (everything is on one host), a GPU (prefill on a CPU is slow, which flatters any cache).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.cluster import Streamed
from bench.vllm_server import HOST, VllmServer, free_port, running_store, store_configuration

NUM_TOKENS = 1030
ANSWER_TOKENS = 4
EXISTING = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
STORED_WITHIN_S = 1.0
"""How long a prompt's blocks are given to reach the store; none of the packages needs a tenth of it here."""


@dataclass(frozen=True)
class Setting:
    """What each server of a pair is started with."""

    connectors: list[dict[str, Any] | None]
    environment: dict[str, str]
    cwd: Path | None = None


@dataclass
class Row:
    name: str
    computed_s: list[float]
    loaded_s: list[float]
    num_same: int = 0
    num_cached: int = 0

    def __str__(self) -> str:
        computed, loaded = statistics.median(self.computed_s), statistics.median(self.loaded_s)
        spread = f"{min(self.loaded_s) * 1e3:.0f}..{max(self.loaded_s) * 1e3:.0f}"
        return (
            f"{self.name:48} {computed * 1e3:8.0f} ms {loaded * 1e3:8.0f} ms {spread:>12}"
            f" {computed / loaded:6.1f}x   {self.num_cached:5}   {self.num_same}/{len(self.loaded_s)}"
        )


def in_tree(names: tuple[str, str]) -> list[dict[str, Any] | None]:
    return [
        {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"load_async": True, "lookup_rpc_port": name},
        }
        for name in names
    ]


@contextmanager
def no_connector(folder: Path) -> Iterator[Setting]:
    yield Setting([None], {})


@contextmanager
def in_tree_on_ours(folder: Path) -> Iterator[Setting]:
    with running_store(folder) as store:
        yield Setting(in_tree(("ours-a", "ours-b")), store_configuration(folder, store))


@contextmanager
def our_store_connector(folder: Path) -> Iterator[Setting]:
    with running_store(folder) as store:
        connector = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_connector_module_path": "mooncake.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"mooncake_store_addr": store},
        }
        yield Setting([connector, connector], {})


@contextmanager
def in_tree_on_existing(folder: Path) -> Iterator[Setting]:
    """The published wheel: its master, a client process that owns the memory, and the same configuration."""
    site = folder / "existing"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(site), EXISTING]
    subprocess.run(pip, check=True)
    rpc, metrics, client = free_port(), free_port(), free_port()
    master = [f"--rpc_port={rpc}", f"--rpc_address={HOST}", f"--metrics_port={metrics}"]
    owner = [f"--host={HOST}", f"--port={client}", f"--master_server_address={HOST}:{rpc}"]
    owner += ["--metadata_server=P2PHANDSHAKE", "--protocol=tcp", "--global_segment_size=1 GB"]
    owner += ["--start_offload_rpc_server=false"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(site / "mooncake")}
    with ExitStack() as stack:
        log = stack.enter_context((folder / "existing.log").open("a"))
        for program, flags in (("mooncake_master", master), ("mooncake_client", owner)):
            command = [str(site / "mooncake" / program), *flags]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            time.sleep(2.0)  # it has no way to say that it is ready
        settings = store_configuration(folder, f"{HOST}:{rpc}")
        yield Setting(in_tree(("theirs-a", "theirs-b")), {**settings, "PYTHONPATH": str(site)}, folder)


ROWS: dict[str, tuple[str, Callable[[Path], AbstractContextManager[Setting]]]] = {
    "none": ("no connector, its own prefix cache warm", no_connector),
    "ours": ("our MooncakeStoreConnector, mooncaked", our_store_connector),
    "in-tree": ("vLLM's own store connector, our package", in_tree_on_ours),
    "existing": ("vLLM's own store connector, existing package", in_tree_on_existing),
}


def measure(name: str, setting: Setting, model: Path, folder: Path, rounds: int) -> Row:
    with ExitStack() as stack:
        servers: list[VllmServer] = []
        for core, connector in enumerate(setting.connectors):
            server = VllmServer(
                f"server-{core}",
                model,
                folder,
                connector,
                core,
                "bfloat16",
                setting.environment,
                cwd=setting.cwd,
            )
            stack.callback(server.close)
            servers.append(server)
        for server in servers:
            server.wait_until_ready()
        first, last = servers[0], servers[-1]
        random = Random(6)
        for _ in range(2):  # the first forward passes and the first load are slower
            compare(first, last, random)
        row = Row(name, [], [])
        for _ in range(rounds):
            computed, loaded = compare(first, last, random)
            row.computed_s.append(computed.ttft_s)
            row.loaded_s.append(loaded.ttft_s)
            row.num_same += computed.token_ids == loaded.token_ids
            row.num_cached = loaded.usage["prompt_tokens_details"]["cached_tokens"]
            if last is not first:  # what B takes to compute counts as much: it is B that is saved the work
                row.computed_s.append(last.stream(a_prompt(random), ANSWER_TOKENS).ttft_s)
        return row


def compare(first: VllmServer, last: VllmServer, random: Random) -> tuple[Streamed, Streamed]:
    prompt = a_prompt(random)
    computed = first.stream(prompt, ANSWER_TOKENS, ignore_eos=True)
    time.sleep(STORED_WITHIN_S)
    loaded = last.stream(prompt, ANSWER_TOKENS, ignore_eos=True)
    assert computed.error is None and loaded.error is None, (computed.error, loaded.error)
    return computed, loaded


def a_prompt(random: Random) -> list[int]:
    return [random.randrange(1000, 40_000) for _ in range(NUM_TOKENS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="prompts per row; medians are printed")
    parser.add_argument("--row", action="append", choices=ROWS, help="only this row; can be repeated")
    arguments = parser.parse_args()
    if "MOONCAKE_VLLM_ENV" not in os.environ:  # `make bench` runs every bench, in an environment without vLLM
        print("NOT RUN here: scripts/test-vllm --python -m bench.vllm")
        return
    model = Path(os.environ["MOONCAKE_VLLM_ENV"]) / "model"
    flags = "".join(f" --row {row}" for row in arguments.row or ())
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}")
    print(f"command: scripts/test-vllm --python -m bench.vllm --rounds {arguments.rounds}{flags}")
    print(f"vLLM 0.32.0 on CPU, SmolLM2-135M, bfloat16, one core a server, prompts of {NUM_TOKENS} tokens\n")
    print(f"{'TTFT, medians':48}    computed      loaded     min..max   ratio   cached   same answer")
    for key in arguments.row or ROWS:
        name, running = ROWS[key]
        with tempfile.TemporaryDirectory(prefix="mooncake-vllm-") as folder, running(Path(folder)) as setting:
            print(measure(name, setting, model, Path(folder), arguments.rounds), flush=True)
    print("\ncan't show: a network between hosts; a GPU (prefill on a CPU is slow, which flatters any cache)")


if __name__ == "__main__":
    main()
