# SPDX-License-Identifier: Apache-2.0
"""KV pushed from prefill to decode, beside KV through the pool: the same prompts in turns, on two workers.

Command: ``python -m bench.push`` (``--tokens 1024``, ``--prompts 12``). A cluster of one prefill and one
decode worker is started; this process sends the requests that a gateway would: through the pool, prefill's
request and then decode's; with a push, both at once. Each prompt goes both ways, with a salt of its own each
time so that no worker has seen it, in alternating order; the tokens must be equal. Times are instants of one
monotonic clock in the workers' logs: *handover* is the time from the end of prefill's last step to decode's
first token. What it can't show: workers on several machines, whose KV crosses a network, and devices.
"""

from __future__ import annotations

import json
import statistics
import threading
import uuid
from random import Random
from typing import Any

from bench.report import Result, measured, options
from tests.cluster import Cluster, running_cluster

PROMPTS, TOKENS = 12, 1024
NUM_OUTPUT = 4
WAYS = ("pool", "push")


class Workers:
    """A prefill and a decode worker, called as a gateway calls them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        host = cluster.address("prefill-0").rpartition(":")[0]
        port = cluster.get("/ready", "prefill-0").body["push_port"]
        self._listener = f"{host}:{port}"

    def _ask(self, role: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        path = "/v1/completions"
        base = self._cluster.caller.url(self._cluster.address(role), "")
        headers = {"X-Request-ID": name}
        answer = self._cluster.request("POST", path, {"temperature": 0, **body}, base, headers, 600.0)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.body
        return found

    def serve(self, way: str, name: str, prompt: list[int], salt: str) -> list[int]:
        """Have a prompt computed by one worker and decoded by the other; decode's tokens."""
        shared: dict[str, Any] = {"prompt": prompt, "cache_salt": salt}
        first = {**shared, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        second = {**shared, "max_tokens": NUM_OUTPUT, "ignore_eos": True, "return_token_ids": True}
        if way == "pool":
            handed = self._ask("prefill-0", name, first)["kv_transfer_params"]
            answer = self._ask("decode-0", name, {**second, "kv_transfer_params": handed})
        else:
            transfer = {"transfer_id": uuid.uuid4().hex}
            first["kv_transfer_params"] |= transfer
            prefill = threading.Thread(target=self._ask, args=("prefill-0", name, first))
            prefill.start()
            params = {**transfer, "push_from": self._listener}
            answer = self._ask("decode-0", name, {**second, "kv_transfer_params": params})
            prefill.join()
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def events(self, role: str, event: str) -> list[dict[str, Any]]:
        """The events of that name in the log of a worker."""
        lines = (line for line in self._cluster.log(role).splitlines() if f'"{event}"' in line)
        return [found for found in map(json.loads, lines) if found.get("event") == event]

    def first_token_at(self, role: str, name: str) -> float:
        [found] = [one for one in self.events(role, "first_token") if one["request"].startswith(f"{name}-")]
        at: float = found["at"]
        return at

    def received_blocks(self) -> float:
        page = self._cluster.get("/metrics", "decode-0").body
        name = 'mooncake_inference_push_blocks_total{outcome="received"} '
        return next((float(line[len(name) :]) for line in page.splitlines() if line.startswith(name)), 0.0)


def timeline(result: Result, pushes: list[dict[str, Any]], decoded_at: float) -> None:
    """Add the layers of one prompt: when each was computed and written, in ms before prefill's last layer."""
    computed: dict[tuple[int, int], float] = {}
    written: dict[tuple[int, int], float] = {}
    for push in pushes:
        for (first, _, begin, end), ats in zip(push["parts"], push["computed_at"], strict=True):
            for layer, at in zip(range(begin, end), ats, strict=True):
                computed[first, layer], written[first, layer] = at, push["ended_at"]
    last = max(computed.values())
    steps = sorted({first for first, _ in computed})
    num_layers = 1 + max(layer for _, layer in computed)
    table = result.table(
        ("step", 0),
        ("layer", 0),
        ("computed ms", 1),
        ("written ms", 1),
        title="timeline of one pushed prompt",
        note="0 is the moment in which prefill's last layer is computed; a step is a chunk of the prompt",
    )
    for number, step in enumerate(steps, 1):
        for layer in range(num_layers):
            at, end = computed[step, layer], written[step, layer]
            table.add(number, layer, 1e3 * (at - last), 1e3 * (end - last))
    before = sum(push["ended_at"] <= last for push in pushes)
    num_bytes = sum(push["num_bytes"] for push in pushes)
    early = sum(push["num_bytes"] for push in pushes if push["ended_at"] <= last)
    moving_s = sum(push["ended_at"] - push["began_at"] for push in pushes)
    result.note(
        f"of that prompt {early / num_bytes:.1%} of {num_bytes / 1e6:.1f} MB, in {before} of {len(pushes)} "
        f"transfers, had been written when prefill's last layer was computed; all transfers took "
        f"{1e3 * moving_s:.1f} ms; its last layer was written {1e3 * (max(written.values()) - last):.1f} ms "
        f"and decode's first token made {1e3 * (decoded_at - last):.1f} ms after that layer"
    )


def main() -> None:
    parser = options(__doc__, "bench.push")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"length of a prompt (default {TOKENS})")
    parser.add_argument("--prompts", type=int, help=f"number of prompts (default {PROMPTS})")
    args = parser.parse_args()
    num_prompts = args.prompts or (3 if args.quick else PROMPTS)
    command = f"python -m bench.push --tokens {args.tokens} --prompts {num_prompts}"
    flags = ("--prefill", "1", "--decode", "1", "--pool-size", "512MiB", "--kv-cache-size", "128MiB")
    logs = ("--log-level", "debug", "--log-format", "json")
    with measured("push", args, command) as result, running_cluster(*flags, *logs) as cluster:
        workers = Workers(cluster)
        handover: dict[str, list[float]] = {way: [] for way in WAYS}
        random = Random(15)
        shown: tuple[list[dict[str, Any]], float] | None = None
        for number in range(num_prompts + 1):
            length = args.tokens if number else 64  # the first ones warm up
            prompt = [random.randrange(1000, 40_000) for _ in range(length)]
            answers = []
            for way in WAYS if number % 2 else WAYS[::-1]:
                name = f"{way}{number}"
                num_pushed, received = (
                    len(workers.events("prefill-0", "layers_pushed")),
                    workers.received_blocks(),
                )
                answers.append(workers.serve(way, name, prompt, name))
                was_pushed = workers.received_blocks() > received
                assert was_pushed == (way == "push"), "the KV has not gone that way"
                begun, ended = (workers.first_token_at(role, name) for role in ("prefill-0", "decode-0"))
                if number:
                    handover[way].append(ended - begun)
                if was_pushed:
                    shown = workers.events("prefill-0", "layers_pushed")[num_pushed:], ended
            assert answers[0] == answers[1], f"the tokens differ: {answers}"
        pool, push = (statistics.median(handover[way]) for way in WAYS)
        table = result.table(
            "way",
            ("median ms", 1),
            ("least ms", 1),
            ("most ms", 1),
            ("of the pool", 2),
            title=f"handover of {num_prompts} prompts of {args.tokens} tokens, SmolLM2-135M, float32",
        )
        for way, median in (("pool", pool), ("push", push)):
            found = handover[way]
            row = 1e3 * median, 1e3 * min(found), 1e3 * max(found), median / pool
            table.add(way, *row, samples={"seconds": found})
        pairs = [one / other for one, other in zip(handover["push"], handover["pool"], strict=True)]
        result.note(
            f"median of the ratio in a pair: {statistics.median(pairs):.2f}; tokens were equal in all"
        )
        assert shown is not None
        timeline(result, *shown)


if __name__ == "__main__":
    main()
