# SPDX-License-Identifier: Apache-2.0
"""``mooncake calibrate``: a costs file for the simulator, measured on a live cluster."""

from __future__ import annotations

import asyncio
import datetime
import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from mooncake.cli.replay.cost_measurement import CostMeasurement, Measurements
from mooncake.cli.replay.endpoint import Endpoint
from mooncake.cli.simulation.tables import write_whole
from mooncake.errors import InvalidArgument
from mooncake.sim.serving.node_costs import NodeCosts, fit_decode, fit_prefill

IN_TTFT_BYTES_PER_S = 1e12
"""Transfers between instances are inside the measured times; the simulator must not count them again."""
Url = Annotated[
    str, typer.Option("--url", help="Address of the server: a gateway or any other server of the OpenAI API.")
]
ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="OPENAI_API_KEY",
        show_envvar=False,
        help="Key of the server's API; by default OPENAI_API_KEY.",
    ),
]


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
        first_token_s=first_token_s,
    )
    write_whole(out, to_toml(costs))
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
