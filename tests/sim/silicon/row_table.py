# SPDX-License-Identifier: Apache-2.0
"""Rows of a world with simple laws, as files and as rows."""

from __future__ import annotations

import csv
from pathlib import Path
from random import Random

from mooncake.sim.silicon.measured_rows import MeasuredRow, read_rows


def fields_of(random: Random, number: int) -> dict[str, object]:
    """A row of a world with simple laws: bigger models and loads are slower, more cards faster."""
    model, slowness = random.choice([("maker/Llama-3.1-8B", 1.0), ("maker/Llama-3.1-70B", 6.0)])
    system, speed = random.choice([("h100_sxm", 1.0), ("b200_sxm", 2.0)])
    mode, gpus = random.choice(["agg", "disagg"]), random.choice([1, 2, 4, 8])
    concurrency, input_tokens = random.choice([1, 4, 16, 64]), random.choice([512, 2048, 8192])
    tpot_ms = 4 * slowness / speed * gpus**-0.7 * (1 + concurrency / 32) * (0.8 if mode == "disagg" else 1)
    ttft_ms = 0.02 * input_tokens * slowness / speed / gpus * (1 + concurrency / 8)
    sides = ("prefill_", "decode_") if mode == "disagg" else ("",)
    return {
        "id": str(number),
        "silicon_data_source": f"table; silicon_concurrency={concurrency}; image=x",
        "backend": "engine",
        "model_path": model,
        "system": system,
        "mode": mode,
        "isl": input_tokens,
        "osl": 1024,
        **{f"{side}tp_size": gpus for side in sides},
        **{f"{side}num_workers": 1 for side in sides if side},
        "silicon_ttft_ms": ttft_ms * random.lognormvariate(0, 0.02),
        "silicon_tpot_ms": tpot_ms * random.lognormvariate(0, 0.02),
    }


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def random_rows(path: Path, num_rows: int, seed: int = 5) -> list[MeasuredRow]:
    """Written to the path and read from it."""
    random = Random(seed)
    return read_rows(write_rows(path, [fields_of(random, number) for number in range(num_rows)]))
