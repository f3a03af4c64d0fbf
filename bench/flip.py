# SPDX-License-Identifier: Apache-2.0
"""Replacement of a running worker's weights: the change itself, the pause of clients, and its KV in a store.

Command: ``python -m bench.flip``. One ``mooncake worker`` with SmolLM2-135M in float32 and one thread, with a
store (a master and a node), all processes of their own. Four clients stream answers one after the other, with
a new prompt each. Meanwhile the weights are replaced by others of the same shape, and back again, in turns
with ``wait`` (begun answers end first, later ones wait), with ``abort`` (begun answers end with 409, and the
clients send them again at once), and not at all.

*Change*: the time that the worker reports for the change itself, in which nothing is computed. *Waited*: from
the request to the change, until the begun answers (``wait``) or the step under way (``abort``) had ended.
*Pause of the worker*: the longest time between two tokens of any clients, around the flip; afterwards four
prompts are computed at once. *Of a client*: between two of the same client's, which includes what it waited
for others' answers, or computed a second time. The row without a flip is the reference: what both are in as
many windows of half a second. The goal is a change of at most 100 ms.

The second table sends one prompt before and after a flip and a rollback. KV that was computed by other
weights must not be found in the worker or in the store, and that of the first must be found again in the
store; answers must be those of their weights. What it can't show: a GPU, a bigger model (the change exchanges
references, so its size does not matter, but the memory for a second version does), and several workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from safetensors.torch import load_file, save_file

from bench.report import Result, Table, measured, options
from bench.store import running_store
from mooncake import clock
from mooncake.cli.ports import free_ports
from mooncake.http.openai import WEIGHTS_REPLACED
from mooncake.inference.gguf import resolve_model
from tests.group_processes import HOST, WorkerProcess, stopped_at_end

CLIENTS = 4
PROMPT_TOKENS, ANSWER_TOKENS = 64, 48
LONG_TOKENS = 1024
ADMIN_KEY = "bench"
AFTER_S = 0.5
"""A window ends so long after the flip."""
GOAL_S = 0.1
NO_FLIP = "no flip"
MODES = (NO_FLIP, "wait", "abort")
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


class Worker:
    """The HTTP API of the worker under measurement."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def complete(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        async with self._http.post(f"{self._url}/v1/completions", json=body_of(prompt, num_tokens)) as answer:
            found: dict[str, Any] = await answer.json()
            assert answer.status == 200, found
            return found

    async def stream(self, prompt: list[int], num_tokens: int) -> AsyncIterator[float]:
        """Yield the instant of each event with tokens. Raises Replaced."""
        body = body_of(prompt, num_tokens) | {"stream": True}
        async with self._http.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise_error(await answer.json())
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise_error(event)
                if event["choices"]:
                    yield clock.monotonic()

    async def command(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"X-API-Key": ADMIN_KEY}
        async with self._http.post(f"{self._url}/weights/{what}", json=body, headers=headers) as answer:
            found: dict[str, Any] = await answer.json()
            assert answer.status == 200, found
            return found

    async def external_hits(self) -> int:
        """Prompt tokens that came from the store so far."""
        async with self._http.get(f"{self._url}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith(EXTERNAL_HITS):
                    return int(float(line.split()[-1]))
        raise AssertionError(f"the worker has no metric {EXTERNAL_HITS}")


class Replaced(Exception):
    """The worker ended an answer because its weights were replaced."""


def raise_error(body: dict[str, Any]) -> None:
    error = body["error"]
    assert error["code"] == WEIGHTS_REPLACED, error
    raise Replaced


def body_of(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def prompt_of(random: Random, num_tokens: int) -> list[int]:
    return [random.randrange(1000, 40_000) for _ in range(num_tokens)]


@dataclasses.dataclass
class Load:
    """Clients that send one request after the other, and the instants of their tokens."""

    worker: Worker
    instants: list[list[float]] = dataclasses.field(default_factory=lambda: [[] for _ in range(CLIENTS)])
    num_sent_again: int = 0

    async def client(self, number: int) -> None:
        random = Random(number)
        while True:
            prompt = prompt_of(random, PROMPT_TOKENS)
            while True:
                try:
                    async for instant in self.worker.stream(prompt, ANSWER_TOKENS):
                        self.instants[number].append(instant)
                    break
                except Replaced:
                    self.num_sent_again += 1

    def pauses(self, began: float, ended: float) -> tuple[float, float]:
        """The longest pause of the worker, and of a client, that overlaps this window, seconds."""
        of_all = sorted(instant for instants in self.instants for instant in instants)
        return longest(of_all, began, ended), max(longest(one, began, ended) for one in self.instants)


def longest(instants: Sequence[float], began: float, ended: float) -> float:
    pairs = itertools.pairwise(instants)
    return max(after - before for before, after in pairs if after > began and before < ended)


@contextlib.asynccontextmanager
async def loaded(worker: Worker) -> AsyncIterator[Load]:
    load = Load(worker)
    tasks = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
    try:
        await answered(load)
        yield load
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [error for error in ended if not isinstance(error, asyncio.CancelledError)]
        assert not errors, errors


async def answered(load: Load) -> None:
    """Return when each client has received two more tokens."""
    before = [len(instants) for instants in load.instants]
    for _ in range(6000):
        if all(len(one) >= two + 2 for one, two in zip(load.instants, before, strict=True)):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a client got no token within a minute")


async def pauses(table: Table, worker: Worker, num_turns: int) -> None:
    """Flips under load, one row per mode."""
    random = Random(7)
    found: dict[str, dict[str, list[float]]] = {
        mode: {"changed_s": [], "waited_s": [], "worker_pause_s": [], "client_pause_s": []} for mode in MODES
    }
    num_again = dict.fromkeys(MODES, 0)
    is_flipped = False
    async with loaded(worker) as load:
        for _ in range(num_turns):
            for mode in random.sample(MODES, len(MODES)):
                await asyncio.sleep(random.uniform(0.2, 0.6))  # not always at the same place of an answer
                samples, again = found[mode], load.num_sent_again
                began = clock.monotonic()
                if mode != NO_FLIP:
                    result = await worker.command("rollback" if is_flipped else "flip", {"mode": mode})
                    is_flipped = not is_flipped
                    samples["changed_s"].append(result["changed_s"])
                    samples["waited_s"].append(result["waited_s"])
                ended = clock.monotonic() + AFTER_S
                await asyncio.sleep(AFTER_S)
                await answered(load)  # the pauses that have begun have an end now
                of_worker, of_client = load.pauses(began, ended)
                samples["worker_pause_s"].append(of_worker)
                samples["client_pause_s"].append(of_client)
                num_again[mode] += load.num_sent_again - again
        if is_flipped:
            await worker.command("rollback", {"mode": "wait"})
    for mode, samples in found.items():
        cells: list[str | float | None] = [mode, num_turns]
        for name in ("changed_s", "waited_s", "worker_pause_s", "client_pause_s"):
            values = samples[name]
            cells += [statistics.median(values) * 1e3, max(values) * 1e3] if values else [None, None]
        table.add(*cells, num_again[mode], samples=samples)


async def reach(table: Table, worker: Worker) -> None:
    """Which KV of one prompt is found, and what is answered, before and after a flip and a rollback."""
    prompt = prompt_of(Random(42), LONG_TOKENS)
    answers: dict[str, list[int]] = {}

    async def ask(what: str, weights: str, least: int, most: int) -> None:
        hits = await worker.external_hits()
        began = clock.monotonic()
        answer = await worker.complete(prompt, 12)
        took_s = clock.monotonic() - began
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        from_store = await worker.external_hits() - hits
        tokens = answer["choices"][0]["token_ids"]
        assert answers.setdefault(weights, tokens) == tokens, "an answer of these weights has changed"
        assert least <= cached <= most, (what, cached)
        table.add(what, weights, LONG_TOKENS, cached, from_store, took_s * 1e3)

    await ask("first", "old", 0, 0)
    await ask("again", "old", LONG_TOKENS - 32, LONG_TOKENS)
    await worker.command("flip", {"mode": "abort"})
    await ask("after the flip", "new", 0, 0)
    await worker.command("rollback", {"mode": "abort"})
    await ask("after the rollback", "old", LONG_TOKENS - 32, LONG_TOKENS)
    await worker.command("flip", {"mode": "wait"})
    await ask("after a second flip", "new", LONG_TOKENS - 32, LONG_TOKENS)
    assert answers["old"] != answers["new"], "both weights answer alike, so that the bench shows nothing"


def other_weights(folder: Path, found: Path) -> Path:
    """A copy of the model in ``found`` whose answers differ."""
    copy = folder / "other"
    shutil.copytree(found, copy)
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            tensors[name] = tensor * 1.1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


async def measure(result: Result, url: str, other: Path, num_turns: int) -> None:
    pauses_table = result.table(
        "mode",
        "flips",
        ("change, ms, p50", 2),
        ("longest", 2),
        ("waited for answers, ms, p50", 0),
        ("longest", 0),
        ("pause of the worker, ms, p50", 0),
        ("longest", 0),
        ("pause of a client, ms, p50", 0),
        ("longest", 0),
        "sent again",
        title=f"SmolLM2-135M in float32, one thread, {CLIENTS} clients",
    )
    reach_table = result.table(
        "request",
        "weights",
        "prompt tokens",
        "cached tokens",
        "of these from the store",
        ("ms", 0),
        title="KV of one prompt in the worker and in the store",
    )
    timeout = aiohttp.ClientTimeout(total=600.0)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        worker = Worker(http, url)
        began = clock.monotonic()
        await worker.command("prepare", {"path": str(other)})
        result.note(f"prepared in {clock.monotonic() - began:.1f} s")
        await reach(reach_table, worker)
        await worker.command("rollback", {"mode": "wait"})
        await pauses(pauses_table, worker, num_turns)
        changes = [value for row in pauses_table.samples for value in row["changed_s"]]
        is_met = "met" if max(changes) <= GOAL_S else "missed"
        result.note(f"goal: a change of at most {GOAL_S * 1e3:.0f} ms: {is_met}, in {len(changes)} flips")


def main() -> None:
    parser = options(__doc__, "bench.flip")
    parser.add_argument("--turns", type=int, help="flips of each mode, 20 by default")
    arguments = parser.parse_args()
    num_turns = arguments.turns or (3 if arguments.quick else 20)
    with measured("flip", arguments) as result, tempfile.TemporaryDirectory() as folder:
        model = resolve_model("smollm2")
        other = other_weights(Path(folder), model)
        port = free_ports(HOST, 1, Random())[0]
        flags = ("--model", str(model), "--served-model-name", "smollm2", "--kv-cache-size", "256MiB")
        with running_store(1 << 30, lease_s=5.0) as master:
            store = ("--master", master, "--admin-api-key", ADMIN_KEY)
            worker = WorkerProcess("worker", Path(folder), port, *flags, *store)
            with stopped_at_end(worker):
                worker.wait_until_ready()
                asyncio.run(measure(result, f"http://{HOST}:{port}", other, num_turns))


if __name__ == "__main__":
    main()
