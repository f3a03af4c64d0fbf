# SPDX-License-Identifier: Apache-2.0
"""Prediction of one more decode instance, against adding it.

Command: ``python -m bench.what_if``. A gateway with one prefill and one decode instance is loaded with
prompts of their own that arrive at random instants (an open loop). Then its ``/v1/what_if`` predicts one
decode instance more, and the same load, the same prompts at the same instants, is sent to a gateway that has
two.

The engines are fake engines whose steps take a configured time, because two processor cores do not get faster
by a second process that computes on them: what is graded is the gateway's recording, the fit of the costs and
the simulation, not a model. A fake engine sleeps for each prompt's tokens and each step's, and computes its
KV besides, which takes processor time that varies with the other work of the machine.

*Error*: expected over measured after the change, minus 1. The goal is 20 % for the mean time of requests.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import measured, options
from tests.agentic_load import poisson
from tests.cluster import wait_for
from tests.gateway.doubles import save_tokenizer
from tests.program import Program, programs

ADMIN_KEY = "bench-admin-key"
GOAL = 0.2
RATE, SECONDS, QUICK_SECONDS = 2.5, 100.0, 30.0
PROMPT_TOKENS, ANSWER_TOKENS = (40, 400), (20, 60)
MAX_RUNNING = 4
"""Answers that an instance decodes at a time: with more, one instance would carry any load of fake steps."""
SPEEDS = ("--prefill-token-s", "0.0003", "--decode-token-s", "0.04", "--max-running", str(MAX_RUNNING))
FIGURES = ("ttft", "tbt", "e2e")


def gateway_of(start: Callable[..., Program], folder: Path, num_decode: int) -> Program:
    engine = ("dev", "fake-engine", *SPEEDS, "--num-blocks", "4096")
    prefill = start(*engine, "--role", "prefill")
    decode = [start(*engine, "--role", "decode") for _ in range(num_decode)]
    gateway = start(
        *("gateway", "--model", str(folder), "--served-model-name", "fake", "--protocol", "workers"),
        *("--prefill", prefill.address, "--decode", *(one.address for one in decode)),
        *("--block-tokens", "16", "--admin-api-key", ADMIN_KEY),
    )
    status = urllib.request.Request(f"{gateway.url}/status", headers={"X-API-Key": ADMIN_KEY})

    def is_ready() -> bool:
        with urllib.request.urlopen(status) as answer:
            rows = json.loads(answer.read())["instances"]
        return len(rows) == 1 + num_decode and all(row["health"] == "ready" for row in rows)

    wait_for(is_ready, "the engines", 60)
    return gateway


async def loaded(gateway: Program, seconds: float) -> list[dict[str, Any]]:
    answers = poisson(
        gateway.url, RATE, seconds, prompt_tokens=PROMPT_TOKENS, answer_tokens=ANSWER_TOKENS, seed=1
    )
    return [one async for one in answers]


def asked(gateway: Program, minutes: float) -> dict[str, Any]:
    body = json.dumps({"change": {"decode": 1}, "minutes": minutes}).encode()
    request = urllib.request.Request(f"{gateway.url}/v1/what_if", body, {"X-API-Key": ADMIN_KEY})
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def mean_ms(answers: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([one[f"{name}_s"] for one in answers])) * 1e3


def main() -> None:
    arguments = options(__doc__, "bench.what_if").parse_args()
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    with (
        measured("what_if", arguments) as result,
        tempfile.TemporaryDirectory() as temporary,
        programs(Path(temporary)) as start,
    ):
        folder = Path(temporary)
        save_tokenizer(folder)
        one = gateway_of(start, folder, 1)
        before = asyncio.run(loaded(one, seconds))
        found = asked(one, 60)
        two = gateway_of(start, folder, 2)
        after = asyncio.run(loaded(two, seconds))
        table = result.table(
            "mean",
            ("before ms", 1),
            ("simulated before ms", 1),
            ("expected ms", 1),
            ("low ms", 1),
            ("high ms", 1),
            ("after ms", 1),
            ("error %", 1),
            title=f"One decode instance more, {len(before)} requests at {RATE:g}/s",
        )
        worst = 0.0
        for name in FIGURES:
            was_ms, is_ms = mean_ms(before, name), mean_ms(after, name)
            key = f"{name}_mean_s"
            effect = found["effect"][key]
            measured_ms = found["measured"][f"{name}_s"]["mean"] * 1e3
            expected_ms = found["expected"][key] * 1e3
            error = expected_ms / is_ms - 1
            worst = max(worst, abs(error)) if name == "e2e" else worst
            table.add(
                name,
                was_ms,
                found["baseline"][f"{name}_s"]["mean"] * 1e3,
                expected_ms,
                measured_ms * (1 + effect["low"]),
                measured_ms * (1 + effect["high"]),
                is_ms,
                error * 100,
            )
        kept = "met" if worst <= GOAL else "missed"
        result.note(f"goal of {GOAL:.0%} for the mean time of requests: {kept} ({worst:.1%})")
        for note in found["notes"]:
            result.note(note)


if __name__ == "__main__":
    main()
