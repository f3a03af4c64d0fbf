# SPDX-License-Identifier: Apache-2.0
"""Workloads drawn at random, by number, for ``bench/policies.py --drawn``.

What is tuned on given workloads is right for these. A drawn one has other nodes, objectives, lengths,
prefixes and arrivals each time, with a load of 0.6 to 1.15 times what its nodes can take: a mechanism that
fails on some of a hundred of them has a mistake that none of the given ones shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from random import Random

from bench.policy_workloads import BLOCK_TOKENS, Lengths, Mixture, Workload
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.traces.generators import Agentic, Bursts
from mooncake.sim.traces.trace import TraceRow

_SAMPLE = 400
_MEAN_BURST = 1.8
"""Requests of ``Bursts`` over its rate, about: it begins with a burst."""
_HIT_PART = {"agents": 0.8, "mixture": 0.9, "bursts": 0.0}
"""Part of what prompts have in common that is cached, about; of all of a prompt for agents."""

Make = Callable[[float, int], Iterable[TraceRow]]


def drawn(number: int, costs: NodeCosts) -> Workload:
    """The workload with this number, for nodes with these costs."""
    random = Random(number)
    num_prefill, num_decode = random.randint(1, 12), random.randint(1, 12)
    slo_ttft_s = random.choice([2.0, 3.0, 5.0, 10.0, 20.0, 30.0])
    slo_tbt_s = random.choice([0.05, 0.06, 0.1, 0.2])
    load = random.uniform(0.6, 1.15)
    kind = random.choice(["mixture", "mixture", "mixture", "bursts", "agents"])
    make, num_common = {"mixture": _mixture, "bursts": _bursts, "agents": _agents}[kind](random)
    rows = list(make(1.0, _SAMPLE))
    mean_tokens = sum(row.num_input for row in rows) / len(rows)
    hit_part = _HIT_PART[kind] * (1.0 if kind == "agents" else min(1.0, num_common / mean_tokens))
    rate = load * min(
        num_prefill / _prefill_s(rows, costs, hit_part), num_decode * _decode_rate(rows, costs, slo_tbt_s)
    )
    slos = f"TTFT {slo_ttft_s:.0f} s, TBT {slo_tbt_s * 1000:.0f} ms"
    prompts = f"{mean_tokens:.0f} tokens at {rate:.1f}/s"
    return Workload(
        name=f"{number}: {kind} {num_prefill}P{num_decode}D, {slos}, {prompts}",
        is_tuned=False,
        make=lambda num_rows: make(rate, num_rows),
        num_prefill=num_prefill,
        num_decode=num_decode,
        slo_ttft_s=slo_ttft_s,
        slo_tbt_s=slo_tbt_s,
    )


def _between(random: Random, least: float, most: float) -> float:
    """A number whose logarithm is drawn evenly."""
    return math.exp(random.uniform(math.log(least), math.log(most)))


def _lengths(random: Random, least: float, most: float) -> Lengths:
    law, shape = random.choice(
        [
            ("lognormal", random.uniform(0.3, 1.2)),
            ("pareto", random.uniform(1.2, 2.5)),
            ("uniform", 0.0),
            ("two", random.uniform(0.02, 0.2)),
        ]
    )
    return Lengths(_between(random, least, most), shape, law)


def _mixture(random: Random) -> tuple[Make, int]:
    inputs, outputs = _lengths(random, 300, 16_000), _lengths(random, 8, 600)
    prefixes = random.choice([0, 0, 3, 30, 300])
    prefix_tokens = random.choice([1024, 4096, 16_384, 32_768]) if prefixes else 0
    tick_s, seed = random.choice([0.0, 0.0, 3.0]), random.randrange(1000)
    return (
        lambda rate, num_rows: Mixture(
            rate, num_rows, inputs, outputs, prefixes, prefix_tokens, tick_s, seed
        ),
        prefix_tokens,
    )


def _bursts(random: Random) -> tuple[Make, int]:
    input_tokens, output_tokens = int(_between(random, 500, 12_000)), int(_between(random, 20, 500))
    prefixes = random.choice([0, 30, 300])
    prefix_tokens = random.choice([1024, 4096, 16_384]) if prefixes else 0
    peak, period_s, spread = random.uniform(3, 10), random.choice([60, 120, 300]), random.uniform(0.2, 1.2)
    seed = random.randrange(1000)
    return (
        lambda rate, num_rows: Bursts(
            rate=rate / _MEAN_BURST,
            requests=num_rows,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prefixes=prefixes,
            prefix_tokens=prefix_tokens,
            peak=peak,
            period_s=period_s,
            spread=spread,
            seed=seed,
        ),
        prefix_tokens,
    )


def _agents(random: Random) -> tuple[Make, int]:
    turns, common_tokens = random.randint(4, 30), random.choice([2000, 20_000, 40_000])
    first_tokens, groups = random.choice([1000, 10_000]), random.choice([1, 4, 20])
    turn_tokens, output_tokens = random.choice([300, 2000]), random.choice([50, 300, 900])
    jitter, pause_s = random.choice([0.0, 0.5]), random.choice([2.0, 5.0])
    answer_s, seed = random.choice([3.0, 15.0]), random.randrange(1000)

    def make(rate: float, num_rows: int) -> Iterable[TraceRow]:
        return Agentic(
            sessions=max(1, int(rate * (answer_s + 2 * pause_s))),
            turns=turns,
            requests=num_rows,
            common_tokens=common_tokens,
            first_tokens=first_tokens,
            turn_tokens=turn_tokens,
            output_tokens=output_tokens,
            groups=groups,
            jitter=jitter,
            pause_s=pause_s,
            answer_s=answer_s,
            ramp_s=60.0,
            seed=seed,
        )

    return make, common_tokens


def _prefill_s(rows: Sequence[TraceRow], costs: NodeCosts, hit_part: float) -> float:
    """Mean time to compute a prompt of which this part is cached."""
    cached = (int(row.num_input * min(hit_part, 0.97)) // BLOCK_TOKENS * BLOCK_TOKENS for row in rows)
    times = (costs.prefill_s(num_cached, row.num_input) for num_cached, row in zip(cached, rows, strict=True))
    return sum(times) / len(rows)


def _decode_rate(rows: Sequence[TraceRow], costs: NodeCosts, slo_tbt_s: float) -> float:
    """Requests per second that one decode instance takes with steps of four fifths of the SLO."""
    num_output = sum(row.num_output for row in rows)
    context = sum(row.num_input * row.num_output for row in rows) / num_output
    added_s = costs.decode.per_request_s + costs.decode.per_token_s * context
    batch = max(1.0, min((0.8 * slo_tbt_s - costs.decode.base_s) / added_s, costs.device_tokens / context))
    return batch / (num_output / len(rows) * costs.decode.seconds(batch, batch * context))
