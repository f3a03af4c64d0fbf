"""Reads a worker's measurements of its own steps from its answer to ``/ready``.

Owns the parsing only; the predictor learns from the samples. An answer in another form counts as no
measurements.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from mooncake.conductor.messages import ChunkMeasured, StepMeasured
from mooncake.types import InstanceId


class ReportedSteps(msgspec.Struct):
    """The latest rows; the counts include all earlier ones."""

    num_chunks: int = 0
    chunks: list[tuple[int, int, float]] = []
    "First token, number of tokens, seconds."
    num_steps: int = 0
    steps: list[tuple[int, int, float]] = []
    "Number of requests, tokens of their contexts, seconds."

    def since(
        self, before: ReportedSteps | None, instance: InstanceId
    ) -> Iterator[ChunkMeasured | StepMeasured]:
        """The rows that ``before`` did not have. A restarted worker counts from zero again."""
        if before is None or self.num_chunks < before.num_chunks or self.num_steps < before.num_steps:
            before = ReportedSteps()
        for first, num_tokens, seconds in _newest(self.chunks, self.num_chunks - before.num_chunks):
            yield ChunkMeasured(instance, first, num_tokens, seconds)
        for num_requests, num_tokens, seconds in _newest(self.steps, self.num_steps - before.num_steps):
            yield StepMeasured(instance, num_requests, num_tokens, seconds)


class _Ready(msgspec.Struct):
    measured: ReportedSteps | None = None


def read_reported_steps(body: bytes) -> ReportedSteps | None:
    """Parse the body of a worker's ``/ready``; None when it measures nothing."""
    try:
        return msgspec.json.decode(body, type=_Ready).measured
    except msgspec.MsgspecError:
        return None


def _newest(rows: list[tuple[int, int, float]], num: int) -> list[tuple[int, int, float]]:
    return rows[-num:] if num > 0 else []
