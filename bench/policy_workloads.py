# SPDX-License-Identifier: Apache-2.0
"""The workloads on which scheduling policies and admission rules are judged, for ``bench/policies.py``.

Some are marked as tuned: mechanisms were changed because of what they showed. The others are only judged:
they were added and first run when the mechanisms were complete. Both have published traces, generated
arrivals with several laws of lengths, shared and unshared prefixes, and several splits of the nodes. A
workload of a trace file needs the folder with the published traces; one that is generated needs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

from bench.paper_experiments import SyntheticWorkload
from mooncake.sim.traces.generators import Agentic, Bursts
from mooncake.sim.traces.trace import TraceOptions, TraceRow, read_trace

BLOCK_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """A law of lengths: a median and a shape."""

    median: float
    shape: float
    law: str = "lognormal"
    """``lognormal`` with sigma ``shape``; ``pareto`` with the exponent ``shape``; ``uniform`` from 0 to twice
    the median; ``two``: the median, or with probability ``shape`` sixteen times as much."""

    def draw(self, random: Random) -> int:
        if self.law == "lognormal":
            value = random.lognormvariate(math.log(self.median), self.shape)
        elif self.law == "pareto":
            value = self.median * random.paretovariate(self.shape) / 2 ** (1 / self.shape)
        elif self.law == "uniform":
            value = random.uniform(0, 2 * self.median)
        else:
            value = self.median * (16 if random.random() < self.shape else 1)
        return max(1, min(120_000, round(value)))


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """Requests with lengths by given laws, of which some begin with one of a number of common prefixes."""

    rate: float
    requests: int
    inputs: Lengths
    outputs: Lengths
    prefixes: int = 0
    prefix_tokens: int = 0
    tick_s: float = 0.0
    """Requests arrive at multiples of this, all of an interval at once; 0: at any time."""
    seed: int = 1

    def __iter__(self) -> Iterator[TraceRow]:
        random, now = Random(self.seed), 0.0
        for number in range(self.requests):
            now += random.expovariate(self.rate)
            own = (self.prefixes + number + 1) << 20
            num_input = self.inputs.draw(random)
            keys: tuple[int, ...] = ()
            if self.prefixes:
                family = random.randrange(self.prefixes)
                num_input += self.prefix_tokens
                keys = tuple(range(family << 20, (family << 20) + self.prefix_tokens // BLOCK_TOKENS))
            keys = (*keys, *range(own, own - len(keys) - (-num_input // BLOCK_TOKENS)))
            at = now // self.tick_s * self.tick_s if self.tick_s else now
            yield TraceRow(at, num_input, self.outputs.draw(random), keys)


@dataclasses.dataclass(frozen=True, slots=True)
class Ticked:
    """The rows of another generator, arriving at multiples of ``tick_s``, as published traces have them."""

    rows: Iterable[TraceRow]
    tick_s: float = 3.0

    def __iter__(self) -> Iterator[TraceRow]:
        for row in self.rows:
            yield row._replace(timestamp_s=row.timestamp_s // self.tick_s * self.tick_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, the machines that serve them, and the objectives."""

    name: str
    is_tuned: bool
    file: str = ""
    """Name of a trace file; empty: ``make`` makes the rows."""
    make: Callable[[int], Iterable[TraceRow]] | None = None
    """Rows by their number."""
    num_prefill: int = 8
    num_decode: int = 8
    speedup: float = 1.0
    slo_ttft_s: float = 30.0
    slo_tbt_s: float = 0.1
    rows: int = 2000
    first_row: int = 0
    is_spread: bool = False

    def read(self, folder: Path | None, divide: int) -> tuple[list[TraceRow], int] | None:
        """The rows and the size of their blocks; None without the file. ``divide``: as many times fewer."""
        num_rows = self.rows // divide
        if self.make is not None:
            return list(self.make(num_rows)), BLOCK_TOKENS
        if folder is None or not (folder / self.file).is_file():
            return None
        options = TraceOptions(num_rows=self.first_row + num_rows, is_spread=self.is_spread)
        trace = read_trace(str(folder / self.file), options)
        return list(trace)[self.first_row :], trace.block_tokens


CONVERSATION, SURROGATE = "conversation_trace.jsonl", "arxiv_surrogate.jsonl"
AGENTIC = "agentic_kvct_sample.jsonl.gz"
AZURE_CODE, AZURE_CHAT = "AzureLLMInferenceTrace2023_code.csv", "AzureLLMInferenceTrace2023_conv.csv"


def _documents(ticked: bool) -> Callable[[int], Iterable[TraceRow]]:
    def make(num_rows: int) -> Iterable[TraceRow]:
        rows = SyntheticWorkload(num_rows=num_rows, span_s=1022.0 * num_rows / 3993)
        return Ticked(rows) if ticked else rows

    return make


WORKLOADS = (
    # tuned on
    Workload(name="conversation", is_tuned=True, file=CONVERSATION),
    Workload(name="conversation x1.75", is_tuned=True, file=CONVERSATION, speedup=1.75),
    Workload(
        name="tools 6P10D x1.3", is_tuned=True, file=SURROGATE, speedup=1.3, num_prefill=6, num_decode=10
    ),
    Workload(
        name="azure code 3P2D",
        is_tuned=True,
        file=AZURE_CODE,
        speedup=1.0,
        num_prefill=3,
        num_decode=2,
        slo_ttft_s=5.0,
    ),
    Workload(name="documents", is_tuned=True, make=_documents(False)),
    Workload(name="documents ticked", is_tuned=True, make=_documents(True)),
    Workload(
        name="few prefixes",
        is_tuned=True,
        make=lambda n: Mixture(9.0, n, Lengths(1000, 0.8), Lengths(60, 0.8), 8, 16_384),
        slo_ttft_s=10.0,
    ),
    Workload(
        name="heavy decode 4P12D",
        is_tuned=True,
        make=lambda n: Mixture(8.0, n, Lengths(1500, 0.8), Lengths(700, 0.6)),
        num_prefill=4,
        num_decode=12,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="agents 80",
        is_tuned=True,
        make=lambda n: Agentic(sessions=80, turns=12, requests=n, jitter=0.3, ramp_s=100),
    ),
    Workload(
        name="heavy prefill 12P4D",
        is_tuned=True,
        make=lambda n: Mixture(3.0, n, Lengths(16_000, 0.9), Lengths(20, 0.8)),
        num_prefill=12,
        num_decode=4,
    ),
    Workload(
        name="bursts",
        is_tuned=True,
        make=lambda n: Bursts(
            rate=2.5,
            requests=n,
            input_tokens=4000,
            output_tokens=150,
            prefixes=20,
            prefix_tokens=2048,
            peak=6.0,
            period_s=120,
        ),
    ),
    Workload(
        name="conversation, later, 10P6D x2",
        is_tuned=True,
        file=CONVERSATION,
        first_row=6000,
        speedup=2.0,
        num_prefill=10,
        num_decode=6,
    ),
    Workload(name="tools, later, 8P8D x1.5", is_tuned=True, file=SURROGATE, first_row=12_000, speedup=1.5),
    Workload(
        name="tools, later, 5P4D x0.8",
        is_tuned=True,
        file=SURROGATE,
        first_row=5000,
        num_prefill=5,
        num_decode=4,
        speedup=0.8,
    ),
    Workload(
        name="azure chat 2P2D x2",
        is_tuned=True,
        file=AZURE_CHAT,
        speedup=2.0,
        num_prefill=2,
        num_decode=2,
        slo_ttft_s=5.0,
    ),
    Workload(name="real agents 8P12D", is_tuned=True, file=AGENTIC, num_prefill=8, num_decode=12, rows=1500),
    Workload(
        name="documents ticked 11P5D x1.6",
        is_tuned=True,
        make=_documents(True),
        speedup=1.6,
        num_prefill=11,
        num_decode=5,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="many prefixes, short answers",
        is_tuned=True,
        make=lambda n: Mixture(6.0, n, Lengths(800, 1.0), Lengths(12, 0.8), 60, 24_576, tick_s=3.0),
        slo_ttft_s=10.0,
    ),
    Workload(
        name="pareto",
        is_tuned=True,
        make=lambda n: Mixture(6.0, n, Lengths(3000, 1.3, "pareto"), Lengths(80, 1.5, "pareto"), 4, 2048),
    ),
    Workload(
        name="uniform 2P2D",
        is_tuned=True,
        make=lambda n: Mixture(1.6, n, Lengths(6000, 0, "uniform"), Lengths(300, 0, "uniform")),
        num_prefill=2,
        num_decode=2,
    ),
    Workload(
        name="two lengths",
        is_tuned=True,
        make=lambda n: Mixture(5.0, n, Lengths(3000, 0.1, "two"), Lengths(40, 0.1, "two"), 40, 8192),
        slo_ttft_s=20.0,
    ),
    Workload(
        name="heavy decode 2P6D",
        is_tuned=True,
        make=lambda n: Mixture(4.0, n, Lengths(2000, 1.0), Lengths(600, 1.0, "pareto"), 4, 1024),
        num_prefill=2,
        num_decode=6,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="bursts of long prompts",
        is_tuned=True,
        make=lambda n: Bursts(
            rate=1.0,
            requests=n,
            input_tokens=12_000,
            output_tokens=80,
            spread=1.0,
            peak=8.0,
            period_s=200,
            burst_s=20,
            seed=3,
        ),
    ),
    # judged: first run when the mechanisms were complete
    Workload(
        name="conversation, last, 6P4D x1.1",
        is_tuned=False,
        file=CONVERSATION,
        first_row=9500,
        speedup=1.1,
        num_prefill=6,
        num_decode=4,
    ),
    Workload(
        name="conversation, middle, 9P7D x1.9",
        is_tuned=False,
        file=CONVERSATION,
        first_row=3500,
        speedup=1.9,
        num_prefill=9,
        num_decode=7,
    ),
    Workload(
        name="tools, last, 10P6D x2",
        is_tuned=False,
        file=SURROGATE,
        first_row=20_000,
        speedup=2.0,
        num_prefill=10,
        num_decode=6,
    ),
    Workload(
        name="tools, middle, 7P3D x1.2",
        is_tuned=False,
        file=SURROGATE,
        first_row=9000,
        speedup=1.2,
        num_prefill=7,
        num_decode=3,
    ),
    Workload(
        name="azure code, later, 3P1D",
        is_tuned=False,
        file=AZURE_CODE,
        first_row=5000,
        num_prefill=3,
        num_decode=1,
        slo_ttft_s=8.0,
    ),
    Workload(
        name="azure chat, later, 3P3D x3",
        is_tuned=False,
        file=AZURE_CHAT,
        first_row=9000,
        speedup=3.0,
        num_prefill=3,
        num_decode=3,
        slo_ttft_s=3.0,
    ),
    Workload(
        name="real agents, later, 10P10D",
        is_tuned=False,
        file=AGENTIC,
        first_row=3000,
        num_prefill=10,
        num_decode=10,
        rows=1500,
    ),
    Workload(
        name="agents, common prompts, 6P6D",
        is_tuned=False,
        make=lambda n: Agentic(
            sessions=60,
            turns=20,
            requests=n,
            common_tokens=30_000,
            first_tokens=4000,
            groups=6,
            turn_tokens=1200,
            output_tokens=250,
            jitter=0.5,
            pause_s=3.0,
            answer_s=8.0,
            seed=9,
        ),
        num_prefill=6,
        num_decode=6,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="short answers on long prefixes, 6P4D",
        is_tuned=False,
        make=lambda n: Mixture(
            5.0, n, Lengths(500, 0.0, "uniform"), Lengths(8, 0.0, "uniform"), 30, 32_768, 3.0, 11
        ),
        num_prefill=6,
        num_decode=4,
        slo_ttft_s=5.0,
    ),
    Workload(
        name="many prefixes, two lengths, 12P4D",
        is_tuned=False,
        make=lambda n: Mixture(
            7.0, n, Lengths(1500, 0.08, "two"), Lengths(30, 0.2, "two"), 400, 12_288, 0.0, 12
        ),
        num_prefill=12,
        num_decode=4,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="pareto, slow decode, 3P9D",
        is_tuned=False,
        make=lambda n: Mixture(
            6.0, n, Lengths(2000, 1.5, "pareto"), Lengths(500, 2.0, "pareto"), 10, 1024, 0.0, 13
        ),
        num_prefill=3,
        num_decode=9,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="uniform, ticked, 5P3D",
        is_tuned=False,
        make=lambda n: Mixture(
            3.5, n, Lengths(7000, 0, "uniform"), Lengths(60, 0, "uniform"), 3, 4096, 3.0, 14
        ),
        num_prefill=5,
        num_decode=3,
        slo_ttft_s=20.0,
    ),
)

OVERLOADS = (
    Workload(
        name="conversation 4P4D x1.5",
        is_tuned=True,
        file=CONVERSATION,
        speedup=1.5,
        num_prefill=4,
        num_decode=4,
    ),
    Workload(name="tools 4P1D x2", is_tuned=True, file=SURROGATE, speedup=2.0, num_prefill=4, num_decode=1),
    Workload(
        name="short of decode 5P1D",
        is_tuned=True,
        make=lambda n: Mixture(5.5, n, Lengths(6000, 0.5), Lengths(500, 0.5)),
        num_prefill=5,
        num_decode=1,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="short of prefill 2P6D",
        is_tuned=True,
        make=lambda n: Mixture(6.0, n, Lengths(5000, 1.0), Lengths(100, 0.8)),
        num_prefill=2,
        num_decode=6,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="short of both 3P1D",
        is_tuned=True,
        make=lambda n: Mixture(4.5, n, Lengths(6000, 0.6), Lengths(450, 0.6), seed=4),
        num_prefill=3,
        num_decode=1,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="conversation, later, 8P1D x1.5",
        is_tuned=False,
        file=CONVERSATION,
        first_row=7000,
        speedup=1.5,
        num_prefill=8,
        num_decode=1,
    ),
    Workload(name="real agents 4P2D", is_tuned=False, file=AGENTIC, num_prefill=4, num_decode=2, rows=1000),
    Workload(
        name="azure code 1P1D", is_tuned=False, file=AZURE_CODE, num_prefill=1, num_decode=1, slo_ttft_s=5.0
    ),
    Workload(
        name="bursts 2P2D",
        is_tuned=False,
        make=lambda n: Bursts(
            rate=1.5, requests=n, input_tokens=4000, output_tokens=200, peak=8.0, period_s=120, seed=5
        ),
        num_prefill=2,
        num_decode=2,
        slo_ttft_s=10.0,
    ),
    Workload(
        name="pareto 3P1D",
        is_tuned=False,
        make=lambda n: Mixture(6.0, n, Lengths(4000, 1.8, "pareto"), Lengths(400, 1.8, "pareto"), seed=6),
        num_prefill=3,
        num_decode=1,
        slo_ttft_s=15.0,
    ),
)
"""Workloads that are more than the machines can serve, for admission."""
