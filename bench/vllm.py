# SPDX-License-Identifier: Apache-2.0
"""Time to first token of two real vLLM servers: B reuses what A computed, over each of our connectors.

Command: ``scripts/test-vllm --python -m bench.vllm``. Each row is a pair of vLLM servers, one core each, in
bfloat16: A computes a fresh prompt of 1,030 random tokens, then B gets the same prompt (8 blocks of 128
loaded from one store process, 6 tokens computed), then B computes another. With the direct connector there is
no store: A writes its blocks, including the partial one, into B's memory when B requests them, and B computes
one token. That case has two rows. "A has computed": B gets the prompt when A has answered. "A and B at once",
as a gateway sends it: the client's whole wait, including A's computing; the first tokens of both answers are
compared. "own cache": B gets the same prompt once more, directly afterwards; "added": the median of what the
first time took longer, from which the machine's momentary speed cancels out. References, in the same run, are
vLLM without a connector (its own prefix cache warm) and the existing package under vLLM's own connector. What
it can't show: a network (all is on one host), a GPU (prefill on a CPU is slow, which flatters any cache).
"""

from __future__ import annotations

import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench.report import Cell, measured, not_run, options
from tests.cluster import Streamed
from tests.vllm_server import (
    HOST,
    VllmServer,
    direct_connector,
    free_port,
    running_store,
    store_configuration,
    store_connector,
)

NUM_TOKENS = 1030
ANSWER_TOKENS = 4
EXISTING = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
STORED_WITHIN_S = 1.0
"""Time allowed for a prompt's blocks to reach the store; no package needs a tenth of it here."""
STARTED_WITHIN_S, ANSWERED_WITHIN_S = 240.0, 120.0
"""A slower answer counts as failed, and its rows with it; the others are measured."""
WANTED = 8
"""Target ratio of computing to loading."""


@dataclass(frozen=True)
class Setting:
    """The configuration of each server of a pair."""

    connectors: list[dict[str, Any] | None]
    environment: dict[str, str]
    cwd: Path | None = None


@dataclass
class Row:
    name: str
    computed_s: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    num_same: int = 0
    num_cached: int = 0

    def add(self, computed: Streamed, loaded: Streamed, again: Streamed) -> None:
        self.computed_s.append(computed.ttft_s)
        self.loaded_s.append(loaded.ttft_s)
        self.again_s.append(again.ttft_s)
        num_tokens = min(len(computed.token_ids), len(loaded.token_ids))
        self.num_same += computed.token_ids[:num_tokens] == loaded.token_ids[:num_tokens]
        self.num_cached = loaded.usage["prompt_tokens_details"]["cached_tokens"]

    def cells(self) -> list[Cell]:
        computed, loaded = statistics.median(self.computed_s), statistics.median(self.loaded_s)
        again = statistics.median(self.again_s)
        added = statistics.median(map(operator.sub, self.loaded_s, self.again_s))
        times = computed, loaded, min(self.loaded_s), max(self.loaded_s)
        same = f"{self.num_same}/{len(self.loaded_s)}"
        return [
            self.name,
            *(one * 1e3 for one in times),
            computed / loaded,
            again * 1e3,
            added * 1e3,
            self.num_cached,
            same,
        ]

    def samples(self) -> dict[str, list[float]]:
        return {"computed_s": self.computed_s, "loaded_s": self.loaded_s, "again_s": self.again_s}


COLUMNS: list[str | tuple[str, int]] = [
    "TTFT, medians",
    "computed ms",
    "loaded ms",
    "min",
    "max",
    ("ratio", 1),
    "own cache ms",
    "added ms",
    "cached",
    "same answer",
]


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
        yield Setting([store_connector(store)] * 2, {})


@contextmanager
def our_direct_connector(folder: Path) -> Iterator[Setting]:
    listener = f"{HOST}:{free_port()}"
    prefill = direct_connector("kv_producer", listen_addr=listener)
    yield Setting([prefill, direct_connector("kv_consumer", prefill_addr=listener, listener_offset=0)], {})


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
            time.sleep(2.0)  # it has no readiness check
        settings = store_configuration(folder, f"{HOST}:{rpc}")
        yield Setting(in_tree(("theirs-a", "theirs-b")), {**settings, "PYTHONPATH": str(site)}, folder)


Streams = list[tuple[Streamed, Streamed, Streamed]]
"""For each row of a pair of servers: the server that computed, the one that loaded, and the latter once more,
with the prompt in its own cache by then."""


def through_store(first: VllmServer, last: VllmServer, random: Random) -> Streams:
    prompt = a_prompt(random)
    computed = first.stream(prompt, ANSWER_TOKENS, ANSWERED_WITHIN_S, ignore_eos=True)
    time.sleep(STORED_WITHIN_S)
    loaded, again = (last.stream(prompt, ANSWER_TOKENS, ANSWERED_WITHIN_S, ignore_eos=True) for _ in range(2))
    return [(computed, loaded, again)]


def handed_over(first: VllmServer, last: VllmServer, random: Random) -> Streams:
    """B is sent the prompt when A has answered; and, with another prompt, both at once."""

    def ask(server: VllmServer, role: str, prompt: list[int], name: str, num_tokens: int) -> Streamed:
        params = {role: True, "transfer_id": name}
        return server.stream(
            prompt, num_tokens, ANSWERED_WITHIN_S, ignore_eos=True, kv_transfer_params=params
        )

    prompt, name = a_prompt(random), f"{random.getrandbits(64):x}"
    computed = ask(first, "do_remote_decode", prompt, name, ANSWER_TOKENS)
    after = ask(last, "do_remote_prefill", prompt, name, ANSWER_TOKENS)
    own = last.stream(prompt, ANSWER_TOKENS, ANSWERED_WITHIN_S, ignore_eos=True)
    prompt, name = a_prompt(random), f"{random.getrandbits(64):x}"
    with ThreadPoolExecutor() as pool:
        computing = pool.submit(ask, first, "do_remote_decode", prompt, name, 1)
        whole = ask(last, "do_remote_prefill", prompt, name, ANSWER_TOKENS)
        again = last.stream(prompt, ANSWER_TOKENS, ANSWERED_WITHIN_S, ignore_eos=True)
        return [(computed, after, own), (computing.result(), whole, again)]


@dataclass(frozen=True)
class Case:
    """A pair of servers and its rows."""

    names: tuple[str, ...]
    running: Callable[[Path], AbstractContextManager[Setting]]
    ask: Callable[[VllmServer, VllmServer, Random], Streams] = through_store


CASES = {
    "none": Case(("no connector, its own prefix cache warm",), no_connector),
    "ours": Case(("our MooncakeStoreConnector, mooncaked",), our_store_connector),
    "direct": Case(
        ("our MooncakeConnector, A has computed", "our MooncakeConnector, A and B at once"),
        our_direct_connector,
        handed_over,
    ),
    "in-tree": Case(("vLLM's own store connector, our package",), in_tree_on_ours),
    "existing": Case(("vLLM's own store connector, existing package",), in_tree_on_existing),
}


def measure(case: Case, setting: Setting, model: Path, folder: Path, rounds: int) -> list[Row]:
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
            server.wait_until_ready(STARTED_WITHIN_S)
        first, last = servers[0], servers[-1]
        random = Random(6)
        for _ in range(2):  # the first forward passes and the first load are slower
            case.ask(first, last, random)
        rows = [Row(name) for name in case.names]
        for _ in range(rounds):
            for row, streams in zip(rows, case.ask(first, last, random), strict=True):
                assert all(one.error is None for one in streams), [one.error for one in streams]
                row.add(*streams)
            if last is not first:  # B's time to compute is the reference: B is the server that saves the work
                took_s = last.stream(a_prompt(random), ANSWER_TOKENS).ttft_s
                for row in rows:
                    row.computed_s.append(took_s)
        return rows


def a_prompt(random: Random) -> list[int]:
    return [random.randrange(1000, 40_000) for _ in range(NUM_TOKENS)]


def main() -> None:
    parser = options(__doc__, "bench.vllm")
    parser.add_argument("--rounds", type=int, help="prompts per row, 5 by default; medians are printed")
    parser.add_argument("--row", action="append", choices=CASES, help="only this row; may be repeated")
    arguments = parser.parse_args()
    if "MOONCAKE_VLLM_ENV" not in os.environ:
        not_run("vLLM is not in this environment: scripts/test-vllm --python -m bench.vllm")
    model = Path(os.environ["MOONCAKE_VLLM_ENV"]) / "model"
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    chosen = arguments.row or (["none", "ours"] if arguments.quick else [*CASES])
    flags = "".join(f" --row {row}" for row in arguments.row or ()) + " --quick" * arguments.quick
    command = f"scripts/test-vllm --python -m bench.vllm --rounds {rounds}{flags}"
    num_failed = 0
    with measured("vllm", arguments, command) as result:
        title = (
            f"vLLM 0.32.0 on CPU, SmolLM2-135M, bfloat16, one core a server, prompts of {NUM_TOKENS} tokens"
        )
        table = result.table(*COLUMNS, title=title)
        for key in chosen:
            case = CASES[key]
            try:
                with tempfile.TemporaryDirectory(prefix="mooncake-vllm-") as name, ExitStack() as stack:
                    folder = Path(name)
                    setting = stack.enter_context(case.running(folder))
                    rows = measure(case, setting, model, folder, rounds)
                for row in rows:
                    table.add(*row.cells(), samples=row.samples())
            except Exception as error:  # the other rows are still measured
                num_failed += 1
                traceback.print_exc()
                for name in case.names:
                    result.note(f"{name}: FAILED: {error!r}"[:300])
        result.note(
            f"wanted: a ratio of {WANTED} or more, except at once, where the wait includes A's computing"
        )
        result.note("ours reads over shared memory, the existing package over tcp")
        result.note(
            "can't show: a network between hosts; a GPU (prefill on a CPU is slow: it flatters any cache)"
        )
    sys.exit(num_failed)


if __name__ == "__main__":
    main()
