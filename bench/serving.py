"""Time to first token, cold and warm from another worker, and decode speed, of a whole cluster on this host.

Command: ``python -m bench.serving`` (``--json`` for programs). It starts ``mooncake up`` with round-robin
scheduling, so that the second time a prompt is sent its prefill lands on the other prefill worker, whose
memory has none of it: what is warm there came from the pool. The reference, in the same run, is the same
cluster computing the same number of tokens cold. What it can't show: a network (everything is on one
host, blocks move through shared memory) and a GPU (prefill on a CPU is slow, which flatters any cache).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from random import Random
from typing import Any

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3, help="prompts per length; medians are printed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    random = Random(7)
    rows: list[dict[str, Any]] = []
    with running_cluster("--scheduling", "round_robin") as cluster:
        measure(cluster, 64, random)
        measure(cluster, 64, random)
        for num_tokens in LENGTHS:
            rounds = [measure(cluster, num_tokens, random) for _ in range(arguments.rounds)]
            cold = statistics.median(entry["cold_s"] for entry in rounds)
            warm = statistics.median(entry["warm_s"] for entry in rounds)
            cached = rounds[0]["cached"]
            rows.append({"tokens": num_tokens, "cold_s": cold, "warm_s": warm, "cached_tokens": cached})
        speed = statistics.median(decode_speed(cluster, random) for _ in range(arguments.rounds))
    if arguments.json:
        print(json.dumps({"ttft": rows, "decode_tokens_per_s": speed}))
        return
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}")
    print(f"command: python -m bench.serving --rounds {arguments.rounds}   (SmolLM2-135M, CPU, one host)")
    print()
    print("prompt tokens   TTFT cold   TTFT warm, other worker   cold/warm   cached tokens")
    for row in rows:
        ratio = row["cold_s"] / row["warm_s"]
        cold_ms, warm_ms = row["cold_s"] * 1e3, row["warm_s"] * 1e3
        ttfts = f"{cold_ms:6.0f} ms   {warm_ms:20.0f} ms   {ratio:8.1f}x"
        print(f"{row['tokens']:13}   {ttfts}   {row['cached_tokens']:13}")
    print()
    print(f"decode, one request: {speed:.1f} tokens/s")
    print("can't show: a network between hosts, a GPU")


if __name__ == "__main__":
    main()
