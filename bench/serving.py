"""Time to first token, cold and warm from another worker, and decode speed, of a whole cluster on this host.

Command: ``python -m bench.serving`` (``--json`` for programs). It starts ``mooncake up`` with round-robin
scheduling, so that the second time a prompt is sent its prefill lands on the other prefill worker, whose
memory has none of it: what is warm there came from the pool. The reference, in the same run, is the same
cluster computing the same number of tokens cold. What it can't show: a network (everything is on one
host, blocks move through shared memory) and a GPU (prefill on a CPU is slow, which flatters any cache).
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from pathlib import Path
from random import Random

from bench.report import measured, options
from mooncake.cli.certs import make_cluster_key
from tests.cluster import Cluster, running_cluster

LENGTHS = (512, 1024, 2048, 4096)
DECODE_TOKENS = 64


def measure(cluster: Cluster, num_tokens: int, random: Random) -> dict[str, float]:
    """Cold and warm TTFT of one fresh random prompt, the warm one on the other prefill worker."""
    prompt = [random.randrange(1000, 40_000) for _ in range(num_tokens)]
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
    prompt = [random.randrange(1000, 40_000) for _ in range(64)]
    answer = cluster.stream(prompt, DECODE_TOKENS, ignore_eos=True)
    assert answer.error is None, answer.error
    return (len(answer.token_ids) - 1) / (answer.total_s - answer.ttft_s)


def main() -> None:
    parser = options(__doc__, "bench.serving")
    parser.add_argument("--rounds", type=int, help="prompts per length, 3 unless told; medians are printed")
    parser.add_argument("--cluster-key", action="store_true", help="with a cluster key for everything")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    random = Random(7)
    with contextlib.ExitStack() as stack:
        result = stack.enter_context(measured("serving", arguments))
        flags = ["--scheduling", "round_robin"]
        if arguments.cluster_key:
            key = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "cluster.key"
            make_cluster_key(key)
            flags += ["--cluster-key-file", str(key)]
        cluster = stack.enter_context(running_cluster(*flags))
        table = result.table(
            *("prompt tokens", ("TTFT cold, ms", 0), ("TTFT warm, other worker, ms", 0), ("cold/warm", 1)),
            "cached tokens",
            title="SmolLM2-135M on CPU, one host",
        )
        measure(cluster, 64, random)
        measure(cluster, 64, random)
        for num_tokens in LENGTHS[:1] if arguments.quick else LENGTHS:
            found = [measure(cluster, num_tokens, random) for _ in range(rounds)]
            samples = {name: [entry[name] for entry in found] for name in ("cold_s", "warm_s")}
            cold, warm = (statistics.median(samples[name]) for name in ("cold_s", "warm_s"))
            table.add(num_tokens, cold * 1e3, warm * 1e3, cold / warm, found[0]["cached"], samples=samples)
        decode = result.table("decode", ("tokens/s", 1), title="Decode")
        speeds = [decode_speed(cluster, random) for _ in range(rounds)]
        decode.add("one request", statistics.median(speeds), samples={"tokens_per_s": speeds})
        result.note("can't show: a network between hosts, a GPU")


if __name__ == "__main__":
    main()
