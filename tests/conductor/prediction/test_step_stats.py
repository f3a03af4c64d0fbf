# SPDX-License-Identifier: Apache-2.0
"""Each of the steps that workers report is read once."""

from __future__ import annotations

from mooncake.conductor.messages import ChunkMeasured, StepMeasured
from mooncake.conductor.prediction.step_stats import new_samples, read_step_stats
from mooncake.http.worker_stats import StepStats

BODY = b"""{"status": "ok", "measured": {
    "num_chunks": 3, "chunks": [[0, 512, 0.5], [512, 100, 0.2]], "num_steps": 1, "steps": [[4, 900, 0.03]]
}}"""


def test_rows_are_read_once() -> None:
    first = read_step_stats(BODY)
    assert first is not None
    assert list(new_samples(first, None, "p")) == [
        ChunkMeasured("p", 0, 512, 0.5),
        ChunkMeasured("p", 512, 100, 0.2),
        StepMeasured("p", 4, 900, 0.03),
    ]
    assert list(new_samples(first, first, "p")) == []
    later = StepStats(4, [*first.chunks, (0, 7, 0.1)], 1, first.steps)
    assert list(new_samples(later, first, "p")) == [ChunkMeasured("p", 0, 7, 0.1)]


def test_a_restarted_worker_counts_from_the_start() -> None:
    restarted = StepStats(1, [(0, 7, 0.1)], 0, [])
    assert list(new_samples(restarted, StepStats(50, [(0, 1, 0.1)], 9, []), "p")) == [
        ChunkMeasured("p", 0, 7, 0.1)
    ]


def test_other_servers_measure_nothing() -> None:
    for body in (b"", b"OK", b"[]", b"{}", b'{"measured": 3}', b'{"measured": {"chunks": [[1]]}}'):
        assert read_step_stats(body) is None
