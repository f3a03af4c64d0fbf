# SPDX-License-Identifier: Apache-2.0
"""``mooncake calibrate``: a costs file for the simulator, measured on a live cluster through its public API.

Prefill is separated from the rest by sending a fresh prompt alone and then several of its length at once: the
extra time of the last of them is what the others occupied the instance for, whether they were computed one
after another or in one step; the rest of the time of one alone is the path from the last layer to the client.
Of several rounds the median counts. Decode is timed in steps of a whole batch. Instances are distinguished by
the response headers of our gateway; a server without them counts as one.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from mooncake.cli.output import check_writable, write_whole
from mooncake.cli.replay.endpoint import (
    HIGHEST_TOKEN,
    LOWEST_TOKEN,
    ApiKey,
    Endpoint,
    TimedAnswer,
    Url,
    gather_at_once,
)
from mooncake.errors import InvalidArgument, Unavailable
from mooncake.sim.serving.node_costs import NodeCosts, PrefillSample, StepSample, fit_decode, fit_prefill

AT_ONCE = 4
"""Prompts sent together, per prefill instance."""
MIN_PREFILL_S = MIN_STEP_S = 1e-4
"""Less than that is noise of other work on the machine."""
STEPS = 24
"""Tokens of each answer when decode is timed."""
PREFILL_HEADER, DECODE_HEADER = "x-mooncake-prefill", "x-mooncake-decode"


@dataclass
class Measurements:
    prefill: list[PrefillSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    "Time from a prompt's last layer to the client."
    has_decode_instances: bool = False
    "Whether answers name an instance that decodes, and another one that prefills."
    warm: list[tuple[int, int, float]] = field(default_factory=list)
    "(cached tokens, prompt tokens, TTFT) of prompts that were sent before."


class CostMeasurement:
    """``say(text)`` is called before each part. Raises Unavailable where requests fail, or answers are not
    streamed."""

    def __init__(self, endpoint: Endpoint, say: Callable[[str], None], seed: int) -> None:
        self._endpoint = endpoint
        self._say = say
        self._random = Random(seed)
        self.found = Measurements()

    async def run(self, lengths: Sequence[int], batches: Sequence[int], rounds: int) -> Measurements:
        self._say("warming up")
        num_instances = await self._warm_up(lengths[0])
        for length in lengths:
            occupied_s, alone_s = [], []
            for number in range(rounds):
                self._say(f"prefill of {length} tokens, round {number + 1} of {rounds}")
                alone_s.append(await self._alone(length))
                occupied_s.append(await self._together(length, AT_ONCE * num_instances, alone_s[-1]))
            seconds = max(MIN_PREFILL_S, statistics.median(occupied_s))
            self.found.prefill.append(PrefillSample(0, length, seconds))
            self.found.first_token_s.append(max(0.0, statistics.median(alone_s) - seconds))
        for batch in batches:
            for length in (lengths[0], lengths[len(lengths) // 2]):
                self._say(f"decode of {batch} at once, {length} tokens each")
                for _ in range(rounds):
                    await self._decode(length, batch)
        return self.found

    def _prompt(self, length: int) -> list[int]:
        """A prompt that was never sent before."""
        return self._random.choices(range(LOWEST_TOKEN, HIGHEST_TOKEN), k=length)

    async def _warm_up(self, length: int) -> int:
        """Warm up; return the number of prefill instances, as far as the headers show."""
        answers = await self._at_once([self._prompt(length) for _ in range(8)], 4)
        if all(answer.num_events < 2 for answer in answers):
            raise self._untimed()
        pairs = [(one.headers.get(PREFILL_HEADER, ""), one.headers.get(DECODE_HEADER, "")) for one in answers]
        self.found.has_decode_instances = all(
            prefill and decode and prefill != decode for prefill, decode in pairs
        )
        return len({answer.headers.get(PREFILL_HEADER, "") for answer in answers})

    async def _alone(self, length: int) -> float:
        """TTFT of a fresh prompt; it is sent again to measure a cached one."""
        prompt = self._prompt(length)
        [cold] = await self._at_once([prompt], 1)
        [warm] = await self._at_once([prompt], 1)
        if warm.num_cached:
            self.found.warm.append((warm.num_cached, length, warm.token_at_s[0]))
        return cold.token_at_s[0]

    async def _together(self, length: int, count: int, alone_s: float) -> float:
        """How long each of ``count`` prompts occupies its instance."""
        answers = await self._at_once([self._prompt(length) for _ in range(count)], 1)
        by_instance: dict[str, list[float]] = defaultdict(list)
        for answer in answers:
            by_instance[answer.headers.get(PREFILL_HEADER, "")].append(answer.token_at_s[0])
        return statistics.median(
            (max(ttfts) - alone_s) / max(1, len(ttfts) - 1) for ttfts in by_instance.values()
        )

    async def _decode(self, length: int, batch: int) -> None:
        answers = await self._at_once([self._prompt(length) for _ in range(batch)], STEPS)
        by_instance: dict[str, list[TimedAnswer]] = defaultdict(list)
        for answer in answers:
            by_instance[answer.headers.get(DECODE_HEADER, "")].append(answer)
        for together in by_instance.values():
            # While all of them decode: after the last one's first token, before the first one's end. Answers
            # that hardly overlap are timed each by itself: then that is what the batch was.
            begin = max(answer.token_at_s[0] for answer in together)
            end = min(answer.token_at_s[-1] for answer in together)
            steps = _steps(together, begin, end)
            size = len(together)
            if len(steps) < STEPS // 4:
                size, steps = 1, _steps(together, 0.0, math.inf)
            if not steps:
                raise self._untimed()
            seconds = max(MIN_STEP_S, statistics.median(steps))
            self.found.steps.append(StepSample(size, size * (length + STEPS // 2), seconds))

    async def _at_once(self, prompts: Sequence[list[int]], num_output: int) -> list[TimedAnswer]:
        answers = await gather_at_once(self._endpoint, prompts, num_output)
        for answer in answers:
            if not answer.is_complete:
                raise Unavailable(f"{self._endpoint.url} failed a request: {answer.status} {answer.error}")
        return answers

    def _untimed(self) -> Unavailable:
        return Unavailable(
            f"{self._endpoint.url} sends all tokens of an answer in one event, so steps of decode can't be "
            "timed; configure it, and proxies before it, to stream each token"
        )


def _steps(answers: Sequence[TimedAnswer], begin: float, end: float) -> list[float]:
    """The intervals between tokens that lie within that time."""
    return [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.token_at_s, answer.token_at_s[1:], strict=False)
        if earlier >= begin and later <= end
    ]


IN_TTFT_BYTES_PER_S = 1e12
"""Transfers between instances are inside the measured times; the simulator must not count them again."""


def calibrate_command(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.toml", help="Costs file to write.")
    ] = Path("costs.toml"),
    url: Url = "http://127.0.0.1:8000",
    model: Annotated[
        str, typer.Option("--model", help="Model to use; by default the first that the server lists.")
    ] = "",
    api_key: ApiKey = "",
    lengths: Annotated[
        list[int] | None, typer.Option("--length", min=8, help="Prompt lengths in tokens; at least three.")
    ] = None,
    batches: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Concurrent answers.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 3,
    kv_bytes_per_token: Annotated[int, typer.Option("--kv-bytes-per-token", min=1)] = 46_080,
    num_layers: Annotated[int, typer.Option("--num-layers", min=1)] = 30,
    cache_size: Annotated[
        int, typer.Option("--cache-tokens", min=0, help="Tokens of KV that a prefill instance caches.")
    ] = 11_000,
    device_tokens: Annotated[
        int, typer.Option("--device-tokens", min=1, help="Tokens of KV that a decode instance holds.")
    ] = 11_000,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the prompts; change it for prompts not sent before.")
    ] = 0,
) -> None:
    """Measure an otherwise idle cluster and write its costs, for simulate, plan and replay.

    What a client can't measure (sizes of KV and memory) is taken from the flags; their defaults are
    SmolLM2-135M's in float32 with 512 MiB a worker.
    """
    sizes = sorted(set(lengths or [64, 256, 512, 1024, 2048]))
    if len(sizes) < 3:
        raise InvalidArgument("--length", sizes, "at least three different lengths")
    check_writable(out, "--out")
    console = Console(stderr=True)

    async def measure() -> tuple[str, Measurements]:
        async with Endpoint(url, model, api_key) as endpoint:
            with console.status("calibrating") as status:
                measuring = CostMeasurement(endpoint, lambda text: status.update(text), seed)
                return endpoint.model, await measuring.run(sizes, batches or [1, 2, 4, 8], rounds)

    served, found = asyncio.run(measure())
    prefill, prefill_error = fit_prefill(found.prefill)
    decode, decode_error = fit_decode(found.steps)
    first_token_s = statistics.median(found.first_token_s)
    # Behind a gateway with separate decode workers, the first token is the last step of that time.
    decode_makes_first_token = found.has_decode_instances
    reuse_s = max(
        0.0,
        statistics.median(
            ttft_s - first_token_s - prefill.seconds(min(cached, length - 1), length)
            for cached, length, ttft_s in found.warm
        )
        if found.warm
        else 0.0,
    )
    today = datetime.date.today().isoformat()
    source = (
        f"Measured by `mooncake calibrate` on {today}: {len(found.prefill)} samples of prefill (mean error "
        f"of the fit {prefill_error:.1%}), {len(found.steps)} of decode ({decode_error:.1%}). Transfers "
        "between instances are inside these times."
    )
    costs = NodeCosts(
        title=served,
        source=source,
        kv_bytes_per_token=kv_bytes_per_token,
        num_layers=num_layers,
        prefill=prefill,
        decode=decode,
        device_tokens=device_tokens,
        cache_tokens=cache_size,
        nic_bytes_per_s=IN_TTFT_BYTES_PER_S,
        nic_latency_s=0.0,
        ssd_bytes_per_s=IN_TTFT_BYTES_PER_S,
        device_load_bytes_per_s=IN_TTFT_BYTES_PER_S,
        reuse_s=reuse_s,
        first_token_s=max(
            0.0, first_token_s - decode_makes_first_token * decode.seconds(1, sizes[len(sizes) // 2])
        ),
        decode_makes_first_token=decode_makes_first_token,
    )
    write_whole(out, to_toml(costs), "--out")
    print(source)
    prefill_ms, decode_ms = prefill.seconds(0, 512) * 1e3, decode.seconds(1, 512) * 1e3
    print(f"prefill: {prefill_ms:.1f} ms for 512 tokens, first token {first_token_s * 1e3:.1f} ms later")
    print(f"decode:  {decode_ms:.1f} ms a step alone, {decode.seconds(8, 4096) * 1e3:.1f} ms with 8")
    print(f"written: {out}")


def to_toml(costs: NodeCosts) -> str:
    """A file that ``load_costs`` reads; tables last, as TOML requires."""
    document: dict[str, Any] = msgspec.to_builtins(costs)
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in document.items() if name not in tables]
    for title, table in tables.items():
        lines += ["", f"[{title}]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"
