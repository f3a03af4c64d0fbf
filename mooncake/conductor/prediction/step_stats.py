# SPDX-License-Identifier: Apache-2.0
"""Reads a worker's measurements of its own steps from its answer to ``/ready``.

Owns the parsing only; the predictor learns from the samples. An answer in another form counts as no
measurements.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from mooncake.conductor.messages import ChunkMeasured, StepMeasured
from mooncake.http.worker_stats import StepStats
from mooncake.types import InstanceId


class _Ready(msgspec.Struct):
    measured: StepStats | None = None


def read_step_stats(body: bytes) -> StepStats | None:
    """Parse the body of a worker's ``/ready``; None when it measures nothing."""
    try:
        return msgspec.json.decode(body, type=_Ready).measured
    except msgspec.MsgspecError:
        return None


def new_samples(
    stats: StepStats, before: StepStats | None, instance: InstanceId
) -> Iterator[ChunkMeasured | StepMeasured]:
    """The rows that ``before`` did not have. A restarted worker counts from zero again."""
    if before is None or stats.num_chunks < before.num_chunks or stats.num_steps < before.num_steps:
        before = StepStats()
    for first, num_tokens, seconds in _newest(stats.chunks, stats.num_chunks - before.num_chunks):
        yield ChunkMeasured(instance, first, num_tokens, seconds)
    for num_requests, num_tokens, seconds in _newest(stats.steps, stats.num_steps - before.num_steps):
        yield StepMeasured(instance, num_requests, num_tokens, seconds)


def _newest(rows: list[tuple[int, int, float]], num: int) -> list[tuple[int, int, float]]:
    return rows[-num:] if num > 0 else []
