# SPDX-License-Identifier: Apache-2.0
"""Time between tokens of a running answer while other requests load their KV from the store.

Command: ``python -m bench.tbt`` (``--json`` for programs). One engine with SmolLM2-135M in float32 decodes
one long answer. Meanwhile requests arrive whose 2,016 prompt tokens are all in the store (a master and a
node, processes of their own) and none in the engine's memory; each ends with its first token. Four kinds of
phases, of one request each, take turns in random order, so that other load on the machine disturbs all alike:

* *undisturbed*: nothing arrives;
* *from its own memory*: the request finds its KV in the engine's blocks, and costs what it computes;
* *loading*: it loads it. A request joins a step when its KV is there;
* *loading, joined early*: the rule before this one. A request joined with its first layer, and the step, with
  every request in it, waited for the other layers.

An interval of the long answer is counted as *while it loads* if a request was there that had no token yet,
and as *the step with it* if that request got its token in it: such a step computes two requests, with any
rule. *Stall* is the time that the engine's thread spent waiting for layers. The load comes through shared
memory; with ``--mbit`` (as root) over tcp, in a network namespace whose loopback ``tc`` limits to that speed.
What it can't show: a GPU, and several loads at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import itertools
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as workers set it; read when torch is loaded

import torch

from bench.report import Table, measured, not_run, options, p99
from bench.store import running_store
from mooncake import clock
from mooncake.connectors.kv_link import AnyLink, KvLoad
from mooncake.connectors.store_link import StoreLink
from mooncake.inference.blocks import BlockEvent
from mooncake.inference.engine import Engine, EngineThread, InferenceSettings, Output
from mooncake.inference.gguf import resolve_model
from mooncake.inference.host_memory import host_memory
from mooncake.inference.request import Request, SamplingParams
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.weights import load_model
from mooncake.kvlayout import KvIdentity
from mooncake.store import AsyncStore, StoreSettings
from mooncake.store.messages import GetMasterStatus
from mooncake.transfer import TransferEngine, TransferSettings
from tests.cluster import wait_for

PROMPT_TOKENS = 2016
RUNNING_TOKENS = 128
BLOCK_TOKENS = 32
NUM_PROMPTS = 8
"""Prompts that take turns: the engine's memory has room for half of them, so the next one is never in it."""
PAUSE_S = 0.2
"""Time from the end of a request to the end of its phase."""
PHASES = ("undisturbed", "own memory", "loading", "loading, joined early")
LONG_TOKENS = 1000
"""Length of a long answer; then the next one begins, so that contexts are alike in all phases."""


class EarlyLoad:
    """A load that seems complete when its first layer has arrived."""

    def __init__(self, real: KvLoad, num_layers: int) -> None:
        self.real = real
        self._num_layers = num_layers

    @property
    def num_layers_loaded(self) -> int:
        return self._num_layers if self.real.num_layers_loaded else 0

    @property
    def failed(self) -> bool:
        return self.real.failed

    @property
    def done(self) -> bool:
        return self.real.done or self.real.num_layers_loaded > 0


class TurnableLink:
    """The engine's link; with ``is_early`` its requests join steps as they did before."""

    def __init__(self, link: AnyLink, num_layers: int) -> None:
        self._link = link
        self._num_layers = num_layers
        self.is_early = False
        self.stall_s = 0.0
        """Time spent in ``wait_layer``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def start_load(self, lookup: Any, block_ids: Sequence[int]) -> Any:
        load = self._link.start_load(lookup, block_ids)
        return EarlyLoad(load, self._num_layers) if self.is_early else load

    def wait_layer(self, loads: Sequence[Any], layer: int) -> None:
        began = clock.monotonic()
        self._link.wait_layer([load.real if isinstance(load, EarlyLoad) else load for load in loads], layer)
        self.stall_s += clock.monotonic() - began


@dataclasses.dataclass
class Intervals:
    """Times between tokens of the long answer in one kind of phase, in seconds."""

    all: list[float] = dataclasses.field(default_factory=list)
    loading: list[float] = dataclasses.field(default_factory=list)
    joined: list[float] = dataclasses.field(default_factory=list)
    ttfts: list[float] = dataclasses.field(default_factory=list)
    """First tokens of the other requests."""
    stalls: list[float] = dataclasses.field(default_factory=list)


class LongAnswer:
    """Records the intervals of the long answer; its methods but ``begin`` run on the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = EngineThread(engine, self._stepped)
        self._last: float | None = None
        self._phase = ""
        self._arrived: float | None = None
        self._ended = threading.Event()
        self._num_requests = 0
        self._num_tokens_left = 0
        self._num_others = 0
        self.intervals = {phase: Intervals() for phase in ("", *PHASES)}
        """By phase; the empty one is not reported."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    def begin(self, phase: str) -> None:
        """Continue in another phase; the interval in which it begins is not counted."""
        self._last, self._phase = None, phase
        if self._num_tokens_left < 100:
            self._num_requests += 1
            self._num_tokens_left = LONG_TOKENS
            prompt = list(range(1000 + self._num_requests, 1000 + self._num_requests + RUNNING_TOKENS))
            self._add(f"long-{self._num_requests}", prompt, LONG_TOKENS)

    def request(self, prompt: list[int]) -> None:
        """Send a request and wait for its token."""
        self._ended.clear()
        self._arrived = began = clock.monotonic()
        self._num_others += 1
        self._add(f"other-{self._num_others}", prompt, 1)
        assert self._ended.wait(60.0), "no token came"
        self.intervals[self._phase].ttfts.append(clock.monotonic() - began)

    def _add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        refusal = self._engine.add(Request(request_id, prompt, sampling))
        assert refusal is None, refusal

    def _stepped(self, outputs: list[Output], events: list[BlockEvent]) -> None:
        now = clock.monotonic()
        tokens = {output.request_id: output for output in outputs if output.token_ids}
        joined = any(request_id.startswith("other") for request_id in tokens)
        if f"long-{self._num_requests}" in tokens:
            self._num_tokens_left -= 1
            if self._last is not None:
                found = self.intervals[self._phase]
                found.all.append(now - self._last)
                if joined:
                    found.joined.append(now - self._last)
                elif self._arrived is not None:
                    found.loading.append(now - self._last)
            self._last = now
        if joined:
            self._arrived = None
            self._ended.set()


def prompt_of(number: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return [int(token) for token in torch.randint(5, 40_000, (num_tokens,), generator=generator)]


@contextlib.asynccontextmanager
async def running_engine(
    master: str, transports: tuple[str, ...]
) -> AsyncIterator[tuple[LongAnswer, TurnableLink, StoreLink]]:
    """An engine whose link to the store uses ``transports``, and that link itself."""
    model = load_model(resolve_model("smollm2"), "float32")
    layout = model.config.kv_layout(model.dtype, BLOCK_TOKENS)
    num_blocks = 3 * PROMPT_TOKENS // BLOCK_TOKENS + 2 * (RUNNING_TOKENS + LONG_TOKENS) // BLOCK_TOKENS
    pool = new_pool(model, BLOCK_TOKENS, num_blocks * layout.pool_bytes(1)).normal_()
    async with contextlib.AsyncExitStack() as stack:
        transfer = TransferEngine(TransferSettings(transports=transports))
        stack.callback(transfer.close)
        store = AsyncStore(master, transfer, StoreSettings())
        stack.push_async_callback(store.close)
        identity, memory = KvIdentity("bench", "bench", layout), host_memory(layout, pool, 0)
        plain = StoreLink(store, transfer, identity, memory, asyncio.get_running_loop())
        stack.push_async_callback(plain.close)
        await fill(store, plain, layout.num_layers)
        link = TurnableLink(plain, layout.num_layers)
        answer = LongAnswer(Engine(InferenceSettings(), TorchRunner(model, pool, link), link))
        answer.start()
        stack.push_async_callback(asyncio.to_thread, answer.stop)
        yield answer, link, plain


async def fill(store: AsyncStore, link: StoreLink, num_layers: int) -> None:
    """Save the KV of every prompt: numbers of the pool as it was made, which are as good as computed ones."""
    for _ in range(600):
        if (await store.ask(GetMasterStatus())).segments:
            break
        await asyncio.sleep(0.1)
    for number in range(NUM_PROMPTS):
        hashes = Request("fill", prompt_of(number)).hash_blocks(BLOCK_TOKENS)
        blocks = [(block_hash, BLOCK_TOKENS, 1 + index) for index, block_hash in enumerate(hashes)]
        save = link.start_save(blocks)
        for layer in range(num_layers):
            link.save_layer(save, layer)
        link.finish_save(save)
        await asyncio.to_thread(wait_for, lambda save=save: save.done, "a save to be done", 30.0)
        assert save.num_stored_blocks == len(blocks), "the store did not take everything"


async def measure(table: Table, where: str, master: str, transports: tuple[str, ...], num_turns: int) -> None:
    random = Random(7)
    async with running_engine(master, transports) as (answer, link, _):
        prompts = itertools.cycle(range(1, NUM_PROMPTS))
        for number in range(-1, num_turns):
            for phase in random.sample(PHASES, len(PHASES)):
                if number < 0:  # the first turn touches all memory
                    phase = PHASES[2]
                link.is_early = phase == PHASES[3]
                if phase == PHASES[1]:  # and make sure that it is there
                    answer.begin("")
                    own = next(prompts)
                    await asyncio.to_thread(answer.request, prompt_of(own))
                    await asyncio.sleep(PAUSE_S)
                answer.begin(phase if number >= 0 else "")
                await asyncio.sleep(PAUSE_S)
                link.stall_s = 0.0
                if phase != PHASES[0]:
                    prompt = prompt_of(own if phase == PHASES[1] else next(prompts))
                    await asyncio.to_thread(answer.request, prompt)
                    answer.intervals[phase if number >= 0 else ""].stalls.append(link.stall_s)
                await asyncio.sleep(PAUSE_S)
    base = answer.intervals[PHASES[0]].all
    for phase in PHASES:
        found = answer.intervals[phase]
        cells: list[str | float | None] = [where, phase, len(found.all)]
        cells += [statistics.median(found.all) * 1e3, ms(p99(found.all)), max(found.all) * 1e3]
        cells += [len(found.loading) or None, ms(p99(found.loading)), ratio(p99(found.loading), p99(base))]
        cells += [
            ms(statistics.median(one)) if one else None for one in (found.joined, found.stalls, found.ttfts)
        ]
        table.add(*cells, samples=dataclasses.asdict(found))


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


CLONE_NEWNET = 0x40000000


def limit_loopback(mbit: int) -> None:
    """Move this process, and those it starts, to a network namespace whose loopback has that speed."""
    if os.geteuid() or shutil.which("tc") is None:
        not_run("--mbit needs root, ip and tc")
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        not_run(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    limit = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 1m latency 50ms"
    subprocess.run(limit.split(), check=True)


def main() -> None:
    parser = options(__doc__, "bench.tbt")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch computes with")
    parser.add_argument("--turns", type=int, help="turns of all phases, 40 by default")
    parser.add_argument(
        "--mbit", type=int, default=0, help="speed of the link to the store; 0: shared memory"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.mbit:
        limit_loopback(arguments.mbit)
    name = f"tbt-{arguments.mbit}mbit" if arguments.mbit else "tbt"
    words = shlex.join(word for word in sys.argv[1:] if word not in ("--save", "--json"))
    with measured(name, arguments, f"python -m bench.tbt {words}".strip()) as result:
        table = result.table(
            "link",
            "phase",
            "intervals",
            ("p50, ms", 1),
            ("p99", 1),
            ("longest", 1),
            "while it loads",
            ("p99, ms", 1),
            ("p99 / undisturbed", 2),
            ("step with it, p50", 1),
            ("stall, p50", 1),
            ("its TTFT, p50", 1),
            title=f"One answer of SmolLM2-135M in float32, others of {PROMPT_TOKENS} tokens",
        )
        turns = arguments.turns or (4 if arguments.quick else 40)
        where = f"tcp, {arguments.mbit} Mbit/s" if arguments.mbit else "shared memory"
        transports = ("tcp",) if arguments.mbit else ("shm", "tcp")
        with running_store(NUM_PROMPTS * 120 << 20, lease_s=5.0) as master:
            asyncio.run(measure(table, where, master, transports, turns))


if __name__ == "__main__":
    main()
