# SPDX-License-Identifier: Apache-2.0
"""Time to first token, cold and warm from another worker, and decode speed, of a whole cluster on this host.

Command: ``python -m bench.serving`` (``--json`` for programs). It starts ``mooncake up`` with round-robin
scheduling, so that the second time a prompt is sent its prefill lands on the other prefill worker, whose
memory has none of it: cached blocks there came from the pool. The reference, in the same run, is the same
cluster computing the same number of tokens cold. What it can't show: a network (everything is on one host,
blocks move through shared memory) and a GPU (prefill on a CPU is slow, which flatters any cache).

``--flags "--model FOLDER --device cuda --kv-cache-size 4GiB"`` go to ``mooncake up``: another model, a GPU.

With ``--tls`` or ``--cluster-key`` it measures the cost of that instead, both if both are given: a cluster
with the credential and one without run side by side, with two prefill workers and one decode worker each, and
answer the same prompts in turns, so that other load on the machine affects both. "more" is the median, over
the prompts, of one time divided by the other; "middle half" is between which quartiles these quotients lie.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from bench.report import Result, measured, options
from mooncake.cli.certs import CertsSettings, make, make_cluster_key
from mooncake.security import Identity, SecuritySettings
from tests.cluster import Cluster, running_cluster

LENGTHS = (512, 1024, 2048, 4096)
DECODE_TOKENS = 64
SMALL = ("--prefill", "2", "--decode", "1", "--pool-size", "1GiB", "--kv-cache-size", "256MiB")
"""Flags of a cluster that runs beside another one."""
AT_ONCE = {f"MOONCAKE_{role}_SLOW_START_S": "0" for role in ("GATEWAY", "CONDUCTOR")}
"""Else a newcomer gets less than its turn, and a warm prompt lands where it was computed."""


def random_prompt(num_tokens: int, random: Random) -> list[int]:
    return [random.randrange(1000, 40_000) for _ in range(num_tokens)]


def measure(cluster: Cluster, prompt: list[int]) -> dict[str, float]:
    """Cold and warm TTFT of a fresh prompt, the warm one on the other prefill worker."""
    cold = cluster.stream(prompt, 2)
    warm = cluster.stream(prompt, 2)
    assert cold.error is None and warm.error is None, (cold.error, warm.error)
    assert cold.headers["x-mooncake-prefill"] != warm.headers["x-mooncake-prefill"], "not another worker"
    assert cold.token_ids == warm.token_ids, "a warm answer differs from the cold one"
    return {
        "cold_s": cold.ttft_s,
        "warm_s": warm.ttft_s,
        "cached": warm.usage["prompt_tokens_details"]["cached_tokens"],
    }


def decode_speed(cluster: Cluster, random: Random) -> float:
    """Tokens per second of one answer after its first token."""
    prompt = random_prompt(64, random)
    answer = cluster.stream(prompt, DECODE_TOKENS, ignore_eos=True)
    assert answer.error is None, answer.error
    return (len(answer.token_ids) - 1) / (answer.total_s - answer.ttft_s)


def identities(folder: Path, has_tls: bool, has_key: bool) -> dict[str, Identity]:
    """Create the requested credentials with ``mooncake certs``."""
    made = {}
    if has_key:
        make_cluster_key(folder / "cluster.key")
        made["cluster key"] = SecuritySettings(cluster_key_file=str(folder / "cluster.key"))
    if has_tls:
        make(CertsSettings(folder=folder))
        cert, key, ca = (str(folder / name) for name in ("node.pem", "node.key", "ca.pem"))
        made["TLS"] = SecuritySettings(cert, key, ca)
    return {name: Identity(settings) for name, settings in made.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def compare(result: Result, arguments: argparse.Namespace, rounds: int, lengths: Sequence[int]) -> None:
    """A table of the cost of each credential."""
    random = Random(7)
    kinds = ("cold", "warm")
    columns: list[str | tuple[str, int]] = ["credential", "prompt tokens", "prompts"]
    for kind in kinds:
        columns += [(f"TTFT {kind}, none, ms", 1), ("with it, ms", 1), ("more, %", 1), "middle half, %"]
    table = result.table(
        *columns, title="What a credential on everything costs: SmolLM2-135M on CPU, one host"
    )
    with tempfile.TemporaryDirectory() as folder:
        found = identities(Path(folder), arguments.tls, arguments.cluster_key)
        for name, identity in found.items():
            with contextlib.ExitStack() as stack:
                flags = ("--scheduling", "round_robin", *SMALL)
                plain = stack.enter_context(running_cluster(*flags, environment=AT_ONCE))
                closed = stack.enter_context(running_cluster(*flags, environment=AT_ONCE, identity=identity))
                for _ in range(2):
                    for cluster in (plain, closed):
                        measure(cluster, random_prompt(64, random))
                for num_tokens in lengths:
                    samples: dict[str, list[float]] = {
                        f"{kind}_{way}_s": [] for kind in kinds for way in ("none", "with")
                    }
                    for number in range(rounds):
                        prompt = random_prompt(num_tokens, random)
                        turns = [("none", plain), ("with", closed)]
                        for way, cluster in turns if number % 2 else reversed(turns):
                            measures = measure(cluster, prompt)
                            for kind in kinds:
                                samples[f"{kind}_{way}_s"].append(measures[f"{kind}_s"])
                    cells: list[str | float] = []
                    for kind in kinds:
                        none, other = samples[f"{kind}_none_s"], samples[f"{kind}_with_s"]
                        more = [100 * (b / a - 1) for a, b in zip(none, other, strict=True)]
                        low, middle, high = quartiles(more)
                        cells += [statistics.median(none) * 1e3, statistics.median(other) * 1e3]
                        cells += [middle, f"{low:+.1f} to {high:+.1f}"]
                    table.add(name, num_tokens, rounds, *cells, samples=samples)
    result.note("can't show: a network between hosts (blocks move through shared memory here), a GPU")


def main() -> None:
    parser = options(__doc__, "bench.serving")
    parser.add_argument("--rounds", type=int, help="prompts per length, 3 by default; medians are printed")
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt lengths in tokens")
    parser.add_argument(
        "--cluster-key", action="store_true", help="measure the cost of a cluster key on everything"
    )
    parser.add_argument("--tls", action="store_true", help="measure the cost of TLS on everything")
    parser.add_argument("--flags", default="", help="flags of mooncake up; not with a credential")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    lengths = arguments.lengths or (LENGTHS[:1] if arguments.quick else LENGTHS)
    with measured("serving", arguments) as result:
        if arguments.tls or arguments.cluster_key:
            compare(result, arguments, rounds, lengths)
        else:
            whole(result, rounds, lengths, shlex.split(arguments.flags))


def whole(result: Result, rounds: int, lengths: Sequence[int], flags: Sequence[str] = ()) -> None:
    """A table of times and one of speeds, of a cluster as ``mooncake up`` starts it with ``flags``."""
    random = Random(7)
    with running_cluster("--scheduling", "round_robin", *flags, environment=AT_ONCE) as cluster:
        table = result.table(
            "prompt tokens",
            ("TTFT cold, ms", 0),
            ("TTFT warm, other worker, ms", 0),
            ("cold/warm", 1),
            "cached tokens",
            title=f"{cluster.model} on one host, {' '.join(flags) or 'on CPU'}",
        )
        for _ in range(2):
            measure(cluster, random_prompt(64, random))
        for num_tokens in lengths:
            found = [measure(cluster, random_prompt(num_tokens, random)) for _ in range(rounds)]
            samples = {name: [entry[name] for entry in found] for name in ("cold_s", "warm_s")}
            cold, warm = (statistics.median(samples[name]) for name in ("cold_s", "warm_s"))
            table.add(num_tokens, cold * 1e3, warm * 1e3, cold / warm, found[0]["cached"], samples=samples)
        decode = result.table("decode", ("tokens/s", 1), title="Decode")
        speeds = [decode_speed(cluster, random) for _ in range(rounds)]
        decode.add("one request", statistics.median(speeds), samples={"tokens_per_s": speeds})
        result.note("can't show: a network between hosts" + ("" if flags else ", a GPU"))


if __name__ == "__main__":
    main()
